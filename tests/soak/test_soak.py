"""Long checks of what a run promises: killed at fifty random moments, and half an hour without growth.

`make test-soak` runs them. SOAK_KILLS and SOAK_MINUTES make them shorter or longer; SOAK_SEED chooses other moments.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from rl_training.testing.resume import differences
from tests.resume_harness import ENVIRONMENT, command, kill_and_resume, random_delays, run_through

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("SOAK_KILLS", "50"))
MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED", "0"))

COMMON = ["--seed", 11, "--num-envs", 4, "--eval-episodes", 2, "--log-every", 200, "--checkpoint-every", 400]
PPO = ["--algorithm.num-steps", 32, "--algorithm.num-epochs", 4, "--algorithm.minibatch-size", 32]
NORMALIZED = ["--normalize-obs", "--normalize-reward"]
NATIVE, ASYNC = ["--vectorization", "native"], ["--vectorization", "async"]
REPLAY = ["--algorithm.buffer-size", 3000, "--algorithm.learning-starts", 200, "--algorithm.batch-size", 32]
Q_LEARNING = [*REPLAY, "--algorithm.network.sizes", 32, "--algorithm.prioritized", "--algorithm.n-step", 3]
ACTOR_CRITIC = [*REPLAY, "--algorithm.network.actor-sizes", 32, "--algorithm.network.critic-sizes", 32]
ACTOR_CRITIC += ["--algorithm.updates-per-step", 0.25]
RUNS = {
    "ppo-cartpole-sync": ["ppo", "CartPole-v1", "--total-timesteps", 12_000, "--eval-every", 1500, *PPO],
    "ppo-cartpole-native": ["ppo", "CartPole-v1", "--total-timesteps", 12_000, "--eval-every", 1500, *PPO, *NATIVE],
    "ppo-acrobot-async": ["ppo", "Acrobot-v1", "--total-timesteps", 8_000, "--eval-every", 3000, *PPO, *ASYNC],
    "a2c-pendulum-normalised": ["a2c", "Pendulum-v1", "--total-timesteps", 12_000, "--eval-every", 2000, *NORMALIZED],
    "dqn-cartpole-prioritized": ["dqn", "CartPole-v1", "--total-timesteps", 8_000, "--eval-every", 1500, *Q_LEARNING],
    "sac-pendulum-normalised": [
        *("sac", "Pendulum-v1", "--total-timesteps", 6_000, "--eval-every", 2000, *ACTOR_CRITIC, *NORMALIZED),
    ],
    "ppo-ant-normalised": ["ppo", "Ant-v5", "--total-timesteps", 4_000, "--eval-every", 1500, *PPO, *NORMALIZED],
}


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments(name: str, tmp_path: Path) -> None:
    """Every kill is a SIGKILL to the process; the resumed run must not differ in one bit from the whole one."""
    args = ["train", *RUNS[name], *COMMON]
    began = time.monotonic()
    whole = run_through(*args, "--output-dir", tmp_path / "whole")
    longest = max(0.5, (time.monotonic() - began - 3.0) / 3)  # start-up takes about three seconds
    hits, rounds, found = 0, 0, []
    while hits < KILLS / len(RUNS):
        rounds += 1
        delays = random_delays(SEED * 1000 + rounds, 4, longest)
        killed, hit = kill_and_resume(args, tmp_path / f"killed-{rounds}", delays)
        hits += hit
        found += differences(whole, killed)
        assert rounds < 50, "kills do not hit"
    print(f"\nsoak {name}: {hits} kills in {rounds} runs, {len(found)} differences")
    assert found == []


def _sample(pid: int) -> tuple[float, int, int]:
    """Resident megabytes, open files and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    numbers = {line.split(":")[0]: line.split()[1] for line in status if line.startswith(("VmRSS", "Threads"))}
    return int(numbers["VmRSS"]) / 1000, len(os.listdir(f"/proc/{pid}/fd")), int(numbers["Threads"])


def test_no_growth_of_memory_files_or_threads(tmp_path: Path) -> None:
    """PPO on CartPole with all the defaults of a run; the first sixth of the time is warm-up."""
    args = command(
        "train", "ppo", "CartPole-v1", "--total-timesteps", 10**9, "--max-seconds", MINUTES * 60,
        "--output-dir", tmp_path, "--eval-every", 20_000, "--checkpoint-every", 20_000, "--quiet",
    )  # fmt: skip
    process = subprocess.Popen(args, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    samples = []
    end = time.monotonic() + MINUTES * 60
    while time.monotonic() < end and process.poll() is None:
        time.sleep(min(10.0, MINUTES * 2))
        if process.poll() is None:
            samples.append(_sample(process.pid))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    warm = samples[max(2, len(samples) // 6) :]
    memory, files, threads = zip(*warm, strict=True)
    checkpoints = len(list(tmp_path.glob("*/checkpoints/step_*")))
    print(
        f"\nsoak growth over {MINUTES:g} minutes: memory {memory[0]:.1f} -> {memory[-1]:.1f} MB (largest "
        f"{max(memory):.1f}), files {files[0]} -> {files[-1]}, threads {threads[0]} -> {threads[-1]}, "
        f"{checkpoints} checkpoints kept"
    )
    half = len(memory) // 2
    assert max(memory[half:]) <= max(memory[:half]) * 1.02 + 2.0
    assert max(files) <= files[0] + 1
    assert max(threads) <= threads[0]
    assert checkpoints <= 4
