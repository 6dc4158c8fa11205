"""Environments in processes: what dies, hangs or raises is reported by number, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest

from rl_training.contracts.errors import EnvError
from rl_training.envs.snapshot import SnapshotError
from rl_training.envs.workers import WorkerVectorEnv


class Faulty(gym.Env):
    """Works for three steps, then does what it was told."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault=""):
        self.fault, self.steps = fault, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fault == "raise in reset":
            raise RuntimeError("no start")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps > 3:
            if self.fault == "raise":
                raise RuntimeError("it broke")
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(2, np.float32), 1.0, False, False, {}


def alive(pids):
    """Which of the processes still exist."""
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def run(fault, timeout=60.0):
    """Two environments, the second with a fault; the error, and the processes that were used."""
    env = WorkerVectorEnv([Faulty, lambda: Faulty(fault)], timeout=timeout)
    pids = [process.pid for process in env.processes]
    try:
        with pytest.raises(EnvError) as error:
            play(env)
    finally:
        env.close()
    return str(error.value), pids


def play(env):
    """Ten steps, if it comes to that."""
    env.reset(seed=0)
    for _ in range(10):
        env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "worker 1 raised RuntimeError: it broke"),
        ("raise in reset", "worker 1 raised RuntimeError: no start"),
        ("die", "worker 1 died during step (exit code -9)"),
    ],
)
def test_faults_name_the_worker_and_leave_no_process(fault, said):
    message, pids = run(fault)
    assert said in message
    assert ("Traceback" in message) == fault.startswith("raise")
    assert alive(pids) == []


def test_a_worker_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("rl_training.envs.workers.CLOSE_SECONDS", 0.5)
    began = time.monotonic()
    message, pids = run("hang", timeout=0.5)
    assert "worker 1 did not answer step within 0.5 s" in message
    assert time.monotonic() - began < 60
    assert alive(pids) == []


class Stillborn(Faulty):
    """Dies where it is made in a worker, as often as the file says."""

    def __init__(self, lives):
        super().__init__()
        if multiprocessing.parent_process() is not None and (left := int(lives.read_text())):
            lives.write_text(str(left - 1))
            os._exit(7)


def test_a_worker_that_died_at_its_start_is_started_once_more(tmp_path):
    lives = tmp_path / "lives"
    lives.write_text("1")
    env = WorkerVectorEnv([lambda: Stillborn(lives)], timeout=60)
    env.reset(seed=0)
    assert env.step(np.zeros(1, np.int64))[1].tolist() == [1.0]
    env.close()

    lives.write_text("1000")
    with pytest.raises(EnvError, match=r"died while starting \(exit codes \[7\]\)"):
        WorkerVectorEnv([lambda: Stillborn(lives)], timeout=60)


def test_snapshots_through_workers():
    original, restored = (WorkerVectorEnv([lambda: gym.make("Pendulum-v1")] * 2, timeout=60) for _ in range(2))
    original.reset(seed=0)
    restored.reset(seed=1)
    restored.restore_snapshots(original.take_snapshots())
    actions = [np.full((2, 1), value, np.float32) for value in np.linspace(-2, 2, 30)]
    seen = [[env.step(action)[0].tolist() for action in actions] for env in (original, restored)]
    original.close()
    restored.close()
    assert seen[0] == seen[1]


def test_a_refused_snapshot_does_not_end_the_workers():
    env = WorkerVectorEnv([Faulty, Faulty], timeout=60)
    env.reset(seed=0)
    with pytest.raises(SnapshotError, match="Faulty"):
        env.take_snapshots()
    assert env.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
    env.close()


def test_workers_leave_sigterm_to_the_main_process():
    env = WorkerVectorEnv([Faulty, Faulty], timeout=60)
    env.reset(seed=0)
    for process in env.processes:
        os.kill(process.pid, signal.SIGTERM)
    for _ in range(3):
        assert env.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
    env.close()


class Starting(Faulty):
    """Starts a program, as simulators do, and ends it politely."""

    def step(self, action):
        program = subprocess.Popen(["sleep", "600"])
        program.terminate()
        return np.zeros(2, np.float32), float(program.wait(timeout=30)), False, False, {}


def test_programs_that_an_environment_starts_hear_sigterm():
    env = WorkerVectorEnv([Starting], timeout=60)
    env.reset(seed=0)
    assert env.step(np.zeros(1, np.int64))[1].tolist() == [-signal.SIGTERM]
    env.close()


NOT_CLOSED = """
import gymnasium as gym
from rl_training.envs.workers import WorkerVectorEnv
env = WorkerVectorEnv([lambda: gym.make("CartPole-v1")] * 2, timeout=60)
env.reset(seed=0)
"""


def test_a_program_may_end_without_closing_its_workers():
    done = subprocess.run([sys.executable, "-c", NOT_CLOSED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def make_workers():
    """In a process that has a parent itself."""
    env = WorkerVectorEnv([Faulty, Faulty], timeout=60)
    play(env)
    env.close()


def test_workers_of_a_process_that_is_a_worker_itself():
    """As with `rl-training tune --jobs 2` and async environments."""
    process = multiprocessing.get_context("spawn").Process(target=make_workers)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0


ORPHAN_SCRIPT = """
import os, signal, gymnasium as gym
from rl_training.envs.workers import WorkerVectorEnv
env = WorkerVectorEnv([lambda: gym.make("CartPole-v1")] * 2, timeout=60)
print(*[process.pid for process in env.processes], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_when_the_main_process_is_killed():
    done = subprocess.run([sys.executable, "-c", ORPHAN_SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(pids) == []
