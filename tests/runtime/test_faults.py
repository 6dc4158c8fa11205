"""Whatever goes wrong in a run is said with its place, ends the run cleanly, and leaves the last good checkpoint."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training import PPO, TrainConfig, load, resume, train
from rl_training.cli import main
from rl_training.contracts.errors import EnvError, NonFiniteError, RLTrainingError
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.contracts.state import Segment
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.experiment.checkpointing import checkpoints_of, find_checkpoint
from rl_training.experiment.logging import last_metrics
from rl_training.experiment.runs import RunDirectory
from tests.resume_harness import ENVIRONMENT

OWN = {"num_steps": 16, "num_epochs": 1, "minibatch_size": 32, "network": {"actor_sizes": [4], "critic_sizes": [4]}}
SETTINGS: dict[str, Any] = {"num_envs": 2, "eval_every": 0, "checkpoint_every": 32, "tensorboard": False}


class Faulty(gym.Env[Any, int]):
    """Episodes of 8 steps; from step 20 of its life on, the copy with an odd seed does what it was told."""

    broken = True
    """Whether the fault is there at all: switched off, the environment has been repaired."""

    def __init__(self, fault: str = "", pids: str = "", mapping: bool = False, dtype: str = "float32") -> None:
        self.fault, self.mapping, self.dtype = fault, mapping, dtype
        self.action_space = spaces.Discrete(2)
        box = spaces.Box(-10.0, 10.0, (3,), np.dtype(dtype).type)
        self.observation_space = spaces.Dict({"good": box, "bad": box}) if mapping else box
        self.steps = self.seed = 0
        if pids:
            Path(pids, str(os.getpid())).touch()

    def get_state(self) -> dict[str, int]:
        return {"steps": self.steps, "seed": self.seed, "length": self.length}

    def set_state(self, state: dict[str, int]) -> None:
        self.steps, self.seed, self.length = state["steps"], state["seed"], state["length"]

    @property
    def due(self) -> bool:
        return self.broken and self.steps >= 20 and self.seed % 2 == 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.length = 0
        if self.due and self.fault == "raise in reset":
            self.explode()
        return self.observation(math.nan if self.broken and self.fault == "nan at start" else 1.0), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.length += 1
        ended = self.length == 8
        value, reward = 1.0, 1.0
        if self.due and not (self.fault.endswith("in final observation") and not ended):
            if self.fault == "raise in step":
                self.explode()
            elif self.fault == "exit":
                sys.exit(3)
            elif self.fault == "hang":
                time.sleep(600)
            elif self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            word, _, where = self.fault.partition(" ")
            number = {"nan": math.nan, "inf": math.inf, "huge": 3e38, "overflow": -1e39}.get(word, 1.0)
            value, reward = (1.0, -number if word == "inf" else number) if where == "reward" else (number, 1.0)
        return self.observation(value), reward, False, ended, {}

    def observation(self, value: float) -> Any:
        array = np.array([0.5, value, 0.5], np.float64 if self.dtype == "float16" else self.dtype)
        return {"good": np.ones(3, np.float32), "bad": array} if self.mapping else array

    def explode(self) -> None:
        raise ZeroDivisionError("the simulator exploded")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Faulty, "broken", True)
    gym.register("Faulty-v0", entry_point=Faulty, disable_env_checker=True)
    yield
    del gym.registry["Faulty-v0"]


def repair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "broken", False)


def odd_one() -> str:
    """The number of the environment that gets an odd seed, in a run with seed 0."""
    return str(1 - draw_seed(random_stream(0, "environment")) % 2)


def config_file(directory: Path, fault: str, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        **SETTINGS,
        "algo": "ppo",
        "env_id": "Faulty-v0",
        "env_kwargs": {"fault": fault},
        "total_timesteps": 128,
        "output_dir": directory / "runs",
        "algorithm": OWN,
        **changes,
    }
    path = directory / "config.yaml"
    path.write_text(TrainConfig(**settings).to_yaml())
    return path


def run_of(directory: Path) -> Path:
    (run,) = (directory / "runs").iterdir()
    return run


def assert_ended_cleanly(run: Path, newest: int) -> None:
    """Recorded as failed, with the last good checkpoint as the newest, and nothing half-written."""
    assert RunDirectory(run).status() == "failed"
    assert sorted(os.listdir(run / "checkpoints")) == [path.name for path in sorted(checkpoints_of(run))]
    checkpoint = find_checkpoint(run)
    assert checkpoint.path.name == f"step_{newest}"
    assert all(bool(torch.isfinite(weight).all()) for weight in checkpoint.state["algorithm"]["policy"].values())


def segments() -> set[str]:
    """Shared memory that this process made."""
    return {name for name in os.listdir("/dev/shm") if str(os.getpid()) in name} if os.path.isdir("/dev/shm") else set()


# NaN and infinity

QUANTITIES = {
    "nan": "observation",
    "inf": "observation",
    "nan reward": "reward",
    "inf reward": "reward",
    "nan in final observation": "observation",
}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("fault", QUANTITIES)
def test_values_that_are_not_finite_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, vectorization: str
) -> None:
    path = config_file(tmp_path, fault, vectorization=vectorization)
    assert main(["train", "--config", str(path), "--quiet"]) == 1
    error = capsys.readouterr().err
    steps = 2 * (23 if fault == "nan in final observation" else 19)
    assert f"environment {odd_one()}: the {QUANTITIES[fault]} is not finite, after {steps} environment steps" in error
    assert "Traceback" not in error
    assert str(run_of(tmp_path)) in error
    assert_ended_cleanly(run_of(tmp_path), newest=32)


@pytest.mark.parametrize("fault", ["nan", "nan in final observation"])
def test_the_entry_of_a_dict_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    path = config_file(tmp_path, fault, env_kwargs={"fault": fault, "mapping": True})
    assert main(["train", "--config", str(path), "--quiet"]) == 1
    assert f"environment {odd_one()}: the observation 'bad' is not finite" in capsys.readouterr().err
    assert_ended_cleanly(run_of(tmp_path), newest=32)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("fault", QUANTITIES)
def test_with_every_autoreset_mode(mode: AutoresetMode, fault: str) -> None:
    env = SyncVectorEnv([Faulty, lambda: Faulty(fault), Faulty], autoreset_mode=mode)
    env.envs[1].seed = 1
    agent = PPO(env, eval_every=0, **OWN)
    agent._experiment.trainer.collector.env.reset(seed=None)
    agent._experiment.trainer.collector.env_rng = OddSeeds()  # type: ignore[assignment]
    with pytest.raises(NonFiniteError, match=rf"environment 1: the {QUANTITIES[fault]} is not finite"):
        agent.learn(1000, progress=False)
    agent.close()


class OddSeeds:
    """Gives a seed with which the second of three environments gets an odd one."""

    def integers(self, high: int) -> int:
        return 4


OVERFLOWS = {
    "overflow reward": ("float32", "the reward is outside of the range of float32 (3.403e+38)"),
    "overflow": ("float64", "the observation is outside of the range of float32 (3.403e+38)"),
    "overflow in final observation": ("float64", "the observation is outside of the range of float32 (3.403e+38)"),
    "huge": ("float16", "the observation is not finite"),
}
DQN = {"learning_starts": 8, "batch_size": 4, "buffer_size": 1000, "network": {"sizes": [4]}}


def numbers_in(state: Any) -> Iterator[Any]:
    """All arrays of a checkpoint, those of the replay too."""
    if isinstance(state, Segment):
        state = state.tensors()
    if isinstance(state, (dict, list)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from numbers_in(part)
    elif isinstance(state, (np.ndarray, torch.Tensor)):
        yield np.asarray(state)


@pytest.mark.parametrize("fault", OVERFLOWS)
@pytest.mark.parametrize("settings", [{}, {"normalize_obs": True, "normalize_reward": True}], ids=["raw", "normalized"])
@pytest.mark.parametrize(("algo", "own"), [("ppo", OWN), ("dqn", DQN)])
def test_numbers_that_float32_cannot_hold_reach_no_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    settings: dict[str, Any],
    algo: str,
    own: dict[str, Any],
) -> None:
    dtype, said = OVERFLOWS[fault]
    kwargs = {"fault": fault, "dtype": dtype}
    path = config_file(tmp_path, fault, algo=algo, algorithm=own, env_kwargs=kwargs, checkpoint_every=2, **settings)
    with np.errstate(over="ignore"):
        assert main(["train", "--config", str(path), "--quiet"]) == 1
    assert f"environment {odd_one()}: {said}" in capsys.readouterr().err
    run = run_of(tmp_path)
    assert RunDirectory(run).status() == "failed"
    assert all(np.isfinite(array).all() for array in numbers_in(find_checkpoint(run).state))
    repair(monkeypatch)
    assert main(["resume", str(run), "--quiet"]) == 0
    assert find_checkpoint(run).path.name == "step_128"


def test_the_first_observation_is_looked_at_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "nan at start")
    assert main(["train", "--config", str(path), "--quiet"]) != 0
    assert "environment 0, 1: the observation is not finite, at a reset" in capsys.readouterr().err
    agent = PPO(lambda: Faulty("nan at start"), **SETTINGS, **OWN)
    with pytest.raises(NonFiniteError):
        agent.learn(32, progress=False)
    agent.close()


def test_evaluations_are_looked_at_too() -> None:
    agent = PPO(Faulty, eval_env=lambda: Faulty("nan reward"), **SETTINGS, **OWN)
    with pytest.raises(NonFiniteError, match=r"environment \d: the reward is not finite, in an evaluation"):
        agent.evaluate(8)  # two environments, one of them with an odd seed
    agent.close()


def test_a_loss_that_is_not_finite_ends_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "huge reward")
    assert main(["train", "--config", str(path), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert "the update after 64 environment steps" in error
    assert "loss/total" in error
    assert "the last checkpoint was saved before this update" in error
    assert_ended_cleanly(run_of(tmp_path), newest=32)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_ends_a_run(tmp_path: Path, value: float) -> None:
    agent = PPO(Faulty, **SETTINGS, **OWN)

    def break_gradients(run: Any) -> None:
        if run.env_steps == 64:
            weight = agent.policy.value_head.weight  # type: ignore[attr-defined]
            weight.register_hook(lambda gradient: gradient * value)

    with pytest.raises(NonFiniteError, match=r"the update after 96 environment steps .* train/gradient_norm\."):
        agent.learn(256, progress=False, run_dir=tmp_path / "runs" / "run", callback=break_gradients)
    agent.close()
    assert_ended_cleanly(run_of(tmp_path), newest=64)


def test_a_run_that_met_a_nan_can_be_resumed_once_the_cause_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", str(config_file(tmp_path, "nan")), "--quiet"]) == 1
    run = run_of(tmp_path)
    assert main(["resume", str(run), "--quiet"]) == 1, "the cause is still there"
    assert f"environment {odd_one()}: the observation is not finite, after 38" in capsys.readouterr().err
    repair(monkeypatch)
    assert main(["resume", str(run), "--quiet"]) == 0
    assert find_checkpoint(run).path.name == "step_128"
    assert RunDirectory(run).status() == "finished"


# Environments that raise


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("fault", ["raise in step", "raise in reset"])
def test_an_environment_that_raises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    vectorization: str,
) -> None:
    before = segments()
    path = config_file(tmp_path, fault, vectorization=vectorization)
    assert main(["train", "--config", str(path), "--quiet"]) == 1
    error = capsys.readouterr().err
    said = "environment worker" if vectorization == "async" else "environment"
    assert f"{said} {odd_one()} raised ZeroDivisionError" in error
    assert "Traceback (most recent call last)" in error
    assert "in explode" in error, "its own traceback"
    assert error.count("Traceback (most recent call last)") == 1
    assert str(run_of(tmp_path)) in error
    assert_ended_cleanly(run_of(tmp_path), newest=32)
    assert multiprocessing.active_children() == []
    assert segments() == before
    repair(monkeypatch)
    assert main(["resume", str(run_of(tmp_path)), "--quiet"]) == 0
    assert find_checkpoint(run_of(tmp_path)).path.name == "step_128"


@pytest.mark.parametrize(
    ("vectorization", "said"),
    [("sync", "environment {} raised SystemExit in step: 3"), ("async", "worker {} died during step (exit code 3)")],
)
def test_an_environment_that_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vectorization: str, said: str
) -> None:
    assert main(["train", "--config", str(config_file(tmp_path, "exit", vectorization=vectorization)), "--quiet"]) == 1
    assert said.format(odd_one()) in capsys.readouterr().err
    assert_ended_cleanly(run_of(tmp_path), newest=32)


def test_an_environment_that_exits_where_it_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gym.register("Exiting-v0", entry_point=lambda: sys.exit("no licence"), disable_env_checker=True)
    try:
        assert main(["train", "ppo", "Exiting-v0", "--output-dir", str(tmp_path)]) == 2
    finally:
        del gym.registry["Exiting-v0"]
    assert "'Exiting-v0' could not be made: SystemExit: no licence" in capsys.readouterr().err


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_made_in_python_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vectorization: str
) -> None:
    settings = {**SETTINGS, "output_dir": tmp_path / "runs", "total_timesteps": 128, "vectorization": vectorization}
    config = TrainConfig(algo="ppo", env_id="mine", algorithm=OWN, **settings)
    with pytest.raises(EnvError, match=r"raised ZeroDivisionError(.|\n)*in explode"):
        train(config, env=lambda: Faulty("raise in step"), progress=False)
    run = run_of(tmp_path)
    assert_ended_cleanly(run, newest=32)
    with pytest.raises(RLTrainingError, match="trained on an environment object"):
        resume(run, progress=False)
    result = resume(run, env=lambda: Faulty(), progress=False)
    assert result.env_steps == 128
    assert RunDirectory(run).status() == "finished"


def test_an_evaluation_environment_that_raises(tmp_path: Path) -> None:
    agent = PPO(Faulty, eval_env=lambda: Faulty("raise in step"), **{**SETTINGS, "eval_every": 64}, **OWN)
    with pytest.raises(EnvError, match="raised ZeroDivisionError in step"):
        agent.learn(2000, progress=False, run_dir=tmp_path / "runs" / "run")
    agent.close()
    assert RunDirectory(run_of(tmp_path)).status() == "failed"
    load(run_of(tmp_path), env=Faulty).close()


# Workers


@pytest.mark.parametrize(
    ("fault", "said"),
    [("hang", "did not answer step within 1 s (env_timeout)"), ("die", "died during step (exit code -9)")],
)
def test_workers_that_hang_or_die_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, said: str
) -> None:
    monkeypatch.setattr("rl_training.envs.workers.CLOSE_SECONDS", 0.3)
    (tmp_path / "pids").mkdir()
    before = segments()
    kwargs = {"fault": fault, "pids": str(tmp_path / "pids")}
    path = config_file(tmp_path, fault, vectorization="async", env_timeout=1.0, env_kwargs=kwargs)
    began = time.monotonic()
    assert main(["train", "--config", str(path), "--quiet", "--trust"]) == 1
    assert time.monotonic() - began < 60
    assert f"environment worker {odd_one()} {said}" in capsys.readouterr().err
    assert_ended_cleanly(run_of(tmp_path), newest=32)
    workers = [int(name) for name in os.listdir(tmp_path / "pids") if int(name) != os.getpid()]
    assert len(workers) == 2
    assert [pid for pid in workers if os.path.exists(f"/proc/{pid}")] == []
    assert multiprocessing.active_children() == []
    assert segments() == before
    repair(monkeypatch)
    assert main(["resume", str(run_of(tmp_path)), "--quiet", "--trust"]) == 0


def test_a_worker_that_hangs_while_it_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_training.envs.workers.CLOSE_SECONDS", 0.3)
    env = WorkerVectorEnv([Faulty, Faulty], timeout=1.0)
    env.reset(seed=0)
    snapshots = env.take_snapshots()
    os.kill(env.processes[1].pid, signal.SIGSTOP)
    with pytest.raises(EnvError, match="worker 1 did not answer restore within 1 s"):
        env.restore_snapshots(snapshots)
    env.close()
    assert multiprocessing.active_children() == []


# Signals

SLOW = """
import multiprocessing, sys, time
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    told = False

    def step(self, action):
        if multiprocessing.parent_process() is None and not Slow.told:
            Slow.told = True
            print("an evaluation has begun", file=sys.stderr, flush=True)
        time.sleep(0.02)
        return super().step(action)

gym.register("Slow-v0", entry_point=Slow)
from rl_training.cli import main
sys.exit(main(sys.argv[1:]))
"""


def processes_of(session: int) -> list[int]:
    """All processes that belong to a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, _, owner = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(owner) == session and state != "Z":
            found.append(int(name))
    return found


@pytest.mark.parametrize("moment", ["training", "evaluation"])
def test_sigterm_to_the_process_group_saves(tmp_path: Path, moment: str) -> None:
    """As systemd and Slurm send it: to the run and to its workers. The evaluation would take minutes."""
    arguments = ["train", "ppo", "Slow-v0", "--num-envs", 2, "--vectorization", "async", "--algorithm.num-steps", 8]
    arguments += ["--algorithm.minibatch-size", 16, "--total-timesteps", 10**6, "--output-dir", tmp_path / "runs"]
    arguments += ["--eval-every", 64 if moment == "evaluation" else 10**6, "--eval-episodes", 1000, "--log-every", 16]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        assert any("resume grade" in line for line in process.stderr), "it has begun"
        deadline = time.monotonic() + 60
        while last_metrics(run_of(tmp_path) / "metrics.jsonl").get("global_step", 0) < 48:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if moment == "evaluation":
            assert any("an evaluation has begun" in line for line in process.stderr)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        out, error = process.communicate(timeout=60)
        assert time.monotonic() - began < 15
        assert process.returncode == 128 + signal.SIGTERM, error
        assert "to continue:" in out
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
    run = RunDirectory(run_of(tmp_path))
    assert run.status() == "stopped"
    assert run.evaluations() == []
    checkpoint = find_checkpoint(run.path)
    assert checkpoint.metadata["env_steps"] == run.env_steps() >= 48
    undone = checkpoint.state.get("undone", [])
    assert ("EvaluationCallback" in undone) == (moment == "evaluation")


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal; the iteration here would take minutes."""
    arguments = ["train", "ppo", "Slow-v0", "--num-envs", 2, "--vectorization", "async", "--algorithm.num-steps", 9999]
    arguments += ["--total-timesteps", 10**6, "--eval-every", 0, "--output-dir", tmp_path / "runs"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        assert any("resume grade" in line for line in process.stderr), "it has begun"
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGINT)
        assert any("finishing this iteration" in line for line in process.stderr)
        time.sleep(0.5)
        assert process.poll() is None, "the first one waits for the iteration"
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=30)
        assert time.monotonic() - began < 20
        assert process.returncode == 130
        assert "interrupted" in error
        assert "Traceback" not in error
        deadline = time.monotonic() + 5
        while processes_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_of(process.pid) == []
        assert not [name for name in os.listdir("/dev/shm") if str(process.pid) in name]
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
    assert RunDirectory(run_of(tmp_path)).status() == "failed"
    assert not (run_of(tmp_path) / "checkpoints").exists()


# Found before any training

TRAIN = ["train", "ppo", "CartPole-v1"]
WRONG = {
    "unknown option": [*TRAIN, "--nonsense", "3"],
    "unknown algorithm": ["train", "pppo", "CartPole-v1"],
    "unknown environment": ["train", "ppo", "CartPoel-v1"],
    "unknown version": ["train", "ppo", "CartPole-v99"],
    "malformed environment": ["train", "ppo", "no such thing"],
    "nothing": ["train"],
    "no number": [*TRAIN, "--total-timesteps", "many"],
    "out of range": [*TRAIN, "--num-envs", "0"],
    "not whole": [*TRAIN, "--seed", "1.5"],
    "out of the algorithm's range": [*TRAIN, "--algorithm.gamma", "1.5"],
    "unknown choice": [*TRAIN, "--vectorization", "magic"],
    "wrong combination": [*TRAIN, "--stop-reward", "5", "--eval-every", "0"],
    "unknown wrapper": [*TRAIN, "--wrappers", "{name: Nonsense}"],
    "wrapper's arguments": [*TRAIN, "--wrappers", "{name: TimeLimit, kwargs: {nonsense: 1}}"],
    "environment's arguments": [*TRAIN, "--env-kwargs", "nonsense=1"],
    "no native environment": ["train", "ppo", "Pendulum-v1", "--vectorization", "native"],
    "unknown device": [*TRAIN, "--device", "abacus"],
    "no such weights": [*TRAIN, "--init-from", "nowhere"],
    "no such config": ["train", "--config", "nowhere.yaml"],
    "output below a file": [*TRAIN, "--output-dir", "file/runs"],
    "output is a file": [*TRAIN, "--output-dir", "file"],
    "no such run": ["resume", "nowhere"],
    "not a run": ["resume", "."],
    "no run": ["resume"],
    "no such checkpoint": ["eval", "nowhere"],
    "no episodes": ["eval", "nowhere", "--num-episodes", "0"],
    "no such directory": ["runs", "nowhere"],
    "unknown command": ["trian"],
    "unknown preset": ["zoo", "show", "ppo/nonsense"],
}


@pytest.mark.parametrize("kind", WRONG)
def test_mistakes_are_found_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("rl_training.runtime.trainer.Trainer.run", lambda *args, **kwargs: pytest.fail("it trains"))
    assert main([*WRONG[kind], "--quiet"] if WRONG[kind][0] in ("train", "resume") else WRONG[kind]) == 2
    out, error = capsys.readouterr()
    assert "Traceback" not in out + error
    assert error.strip()
    assert "\n\n" not in error.strip(), "one paragraph"
    assert os.listdir(tmp_path) == ["file"], "nothing is left behind"


@pytest.mark.parametrize("number", ["EROFS", "EACCES", "ENOSPC"])
def test_a_directory_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    import errno

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr("rl_training.experiment.runs.Path.mkdir", refuse)
    assert main([*TRAIN, "--output-dir", str(tmp_path / "runs"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert f"output_dir: '{tmp_path / 'runs'}' is not writable" in error
    assert os.strerror(getattr(errno, number)) in error


MISSING = """
import contextlib, io, json, sys
for name in ("mujoco", "Box2D", "pygame", "ale_py", "moviepy", "wandb", "mlflow"):
    sys.modules[name] = None
from rl_training.cli import main
found = {}
for extra, arguments in json.loads(sys.argv[1]).items():
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        code = main(["train", "ppo", *arguments, "--total-timesteps", "64", "--quiet", "--output-dir", "runs"])
    found[extra] = [code, error.getvalue()]
print(json.dumps(found))
"""


def test_missing_extras(tmp_path: Path) -> None:
    needs = {
        "mujoco": ["Ant-v5"],
        "box2d": ["LunarLander-v3"],
        "atari": ["ALE/Pong-v5"],
        "wandb": ["CartPole-v1", "--wandb"],
        "mlflow": ["CartPole-v1", "--mlflow"],
        "video": ["CartPole-v1", "--video-every", "10"],
    }
    done = subprocess.run(
        [sys.executable, "-c", MISSING, json.dumps(needs)],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for extra, (code, error) in json.loads(done.stdout.splitlines()[-1]).items():
        assert code == 2, (extra, error)
        assert f"pip install '.[{extra}]'" in error
        assert "Traceback" not in error
    assert not (tmp_path / "runs").exists(), "nothing is left behind"
