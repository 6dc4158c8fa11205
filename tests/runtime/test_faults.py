"""Every fault is named, loses nothing, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_training import PPO, resume, train
from rl_training.cli import main
from rl_training.config import TrainConfig
from rl_training.contracts.errors import EnvError, NonFiniteError
from rl_training.experiment.checkpointing import checkpoints_of
from tests.resume_harness import ENVIRONMENT, command

SMALL = {"num_steps": 8, "num_epochs": 1, "minibatch_size": 16, "network": {"actor_sizes": [8], "critic_sizes": [8]}}


class Faulty(gym.Env):
    """Harmless for `after` steps, then does what it was told. Dict observations, short episodes."""

    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-9.0, 9.0, (2,)), "b": gym.spaces.Discrete(3)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault: str = "", after: int = 40) -> None:
        self.fault, self.after, self.steps, self.resets = fault, after, 0, 0

    def _obs(self, value: float = 0.5) -> dict[str, Any]:
        return {"a": np.array([0.1, value], np.float32), "b": self.steps % 3}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.resets += 1
        if self.fault == "raise in reset" and self.steps > self.after:
            raise RuntimeError("the robot does not stand up")
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        bad, last = self.steps > self.after, self.steps % 10 == 0
        if bad and self.fault == "raise":
            raise RuntimeError("the robot fell off the table")
        if bad and self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if bad and self.fault == "hang":
            time.sleep(600)
        reward = np.inf if bad and self.fault == "reward" else 1.0
        wrong = bad and (self.fault == "observation" or (self.fault == "final observation" and last))
        return self._obs(np.nan if wrong else 0.5), reward, last, False, {}


def config(tmp_path: Path, **settings: Any) -> TrainConfig:
    """A small run that saves often."""
    often = {"eval_every": 0, "checkpoint_every": 16, "checkpoint_keep": 9, "tensorboard": False}
    return TrainConfig(
        algo="ppo", env_id="Faulty", num_envs=2, total_timesteps=400, output_dir=tmp_path, algorithm=SMALL,
        **{**often, **settings},
    )  # fmt: skip


def envs(fault: str) -> Any:
    """A callable whose second environment has the fault."""
    made: list[int] = []

    def make() -> gym.Env[Any, Any]:
        made.append(1)
        return Faulty(fault if len(made) % 2 == 0 else "")

    return make


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("reward", "environment 1: the reward is not finite, after 80 environment steps"),
        ("observation", "environment 1: the observation 'a' is not finite, after 80 environment steps"),
        ("final observation", "environment 1: the observation 'a' is not finite, after 98 environment steps"),
    ],
)
def test_values_that_are_not_finite(fault: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError) as error:
        train(config(tmp_path), env=envs(fault), progress=False)
    assert said in str(error.value)
    (run,) = tmp_path.iterdir()
    newest = checkpoints_of(run)[-1]
    assert newest.name == ("step_96" if fault == "final observation" else "step_80"), "from before the fault"
    assert resume(run, env=lambda: Faulty(), progress=False).env_steps == 400


@pytest.mark.parametrize("quantity", ["loss", "gradient"])
def test_losses_and_gradients_that_are_not_finite(quantity: str, tmp_path: Path, monkeypatch: Any) -> None:
    from rl_training.algorithms import ppo
    from rl_training.policies.parameters import ParameterStore

    original, calls = ParameterStore.step, []

    def poisoned(self: Any, loss: Any, **settings: Any) -> Any:
        calls.append(1)
        norm = original(self, loss, **settings)
        return norm * np.nan if len(calls) > 5 else norm

    def poisoned_loss(*args: Any, **settings: Any) -> Any:
        losses = ppo_loss(*args, **settings)
        calls.append(1)
        return {**losses, "loss": losses["loss"] * np.nan} if len(calls) > 5 else losses

    ppo_loss = ppo.ppo_loss
    if quantity == "gradient":
        monkeypatch.setattr(ParameterStore, "step", poisoned)
    else:
        monkeypatch.setattr(ppo, "ppo_loss", poisoned_loss)
    with pytest.raises(NonFiniteError, match=r"after 96 environment steps .* train/gradient_norm") as error:
        train(config(tmp_path), env=Faulty, progress=False)
    assert ("loss/total" in str(error.value)) == (quantity == "loss")
    (run,) = tmp_path.iterdir()
    assert checkpoints_of(run)[-1].name == "step_80"


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("fault", "doing"), [("raise", "step"), ("raise in reset", "reset")])
def test_an_environment_that_raises(vectorization: str, fault: str, doing: str, tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with pytest.raises(EnvError) as error:
        train(config(tmp_path, vectorization=vectorization), env=lambda: Faulty(fault), progress=False)
    message = str(error.value)
    assert "the robot" in message
    assert "Traceback" in message, "its own"
    assert "test_faults.py" in message
    assert (
        "environment worker" if vectorization == "async" else f"environment 0 raised RuntimeError in {doing}"
    ) in message
    (run,) = tmp_path.iterdir()
    assert resume(run, env=lambda: Faulty(), progress=False).env_steps == 400
    assert set(os.listdir("/dev/shm")) <= shm


@pytest.mark.parametrize(("fault", "said"), [("die", "died during step"), ("hang", "did not answer step within")])
def test_a_worker_that_dies_or_hangs_during_training(fault: str, said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rl_training.envs.workers.CLOSE_SECONDS", 0.5)
    agent = PPO(lambda: Faulty(fault), vectorization="async", num_envs=2, env_timeout=1.0, eval_every=0, **SMALL)
    pids = [process.pid for process in agent._experiment.trainer.collector.env.env.processes]  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match=f"worker 0.*{said}"):
        agent.learn(400, progress=False)
    agent.close()
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    # an iteration of a million steps: the first signal alone would have to wait for its end
    args = command("train", "ppo", "CartPole-v1", "--algorithm.num-steps", 10**6, "--num-envs", 1, "--eval-every", 0)
    args += ["--total-timesteps", str(10**7), "--output-dir", str(tmp_path)]
    process = subprocess.Popen(args, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "once more to stop at once" in errors


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train", "ppo", "CartPole-v9"], "CartPole"),
        (["train", "ppo", "CartPole-v1", "--seed", "-3"], "seed: must be >= 0"),
        (["train", "ppo", "CartPole-v1", "--device", "warp"], "device: 'warp' is not available"),
        (["train", "pppo", "CartPole-v1"], "Did you mean 'ppo'?"),
        (["train", "ppo", "CartPole-v1", "--output-dir", "/proc/nowhere"], "output_dir"),
        (["resume", "nowhere"], "nowhere"),
        (["eval", "nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_said_before_any_training(
    args: list[str], said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*args]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message
    assert "\n\n" not in message.strip()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["train", "ppo", "Ant-v5"]) == 2
    assert "pip install 'rl-training[mujoco]'" in capsys.readouterr().err
