"""Evaluations do not depend on those before them, so a resumed run has those of a run that was never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_training import PPO, TrainConfig, load
from rl_training.api.session import resume, train
from rl_training.experiment.checkpointing import checkpoints_of, load_checkpoint
from rl_training.testing.resume import differences, flat, same


def a_config(tmp_path: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {"algo": "ppo", "env_id": "CartPole-v1", "num_envs": 2, "seed": 3, "device": "cpu"}
    settings |= {"total_timesteps": 320, "eval_every": 64, "eval_episodes": 3, "checkpoint_every": 64}
    settings |= {"algorithm": {"num_steps": 16, "num_epochs": 1}, "tensorboard": False, "output_dir": tmp_path}
    return TrainConfig(**{**settings, **changes})


class OwnStream(gym.Env[Any, Any]):
    """Rewards come from a stream that a reset with a seed does not begin anew."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.stream = np.random.Generator(np.random.MT19937(5))
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.np_random.random(2, np.float32), float(self.stream.random()), self.steps == 7, False, {}

    def get_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "stream": self.stream, "random": self.np_random}

    def set_state(self, state: dict[str, Any]) -> None:
        self.steps, self.stream, self.np_random = state["steps"], state["stream"], state["random"]


class NoneBeforeReset(OwnStream):
    """Has no state to take before its first reset."""

    def __init__(self) -> None:
        super().__init__()
        del self.steps


class Unknown(OwnStream):
    """Does not say how to take its state."""

    get_state = None  # type: ignore[assignment]


class BrokenRestore(OwnStream):
    """Cannot take back the state that it gives."""

    def set_state(self, state: dict[str, Any]) -> None:
        raise KeyError("missing")


class LossyRestore(OwnStream):
    """Forgets a part of the state that it gives."""

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state({**state, "stream": np.random.default_rng(0)})


def normalized() -> gym.Env[Any, Any]:
    return gym.wrappers.NormalizeObservation(gym.make("CartPole-v1"))


def crash(run: Any) -> None:
    if run.env_steps >= 192:
        raise RuntimeError("crash")


def end_of(run: Path) -> dict[str, Any]:
    """What evaluations leave in a run directory."""
    best = run / "checkpoints" / "best"
    metadata = json.loads((run / "metadata.json").read_text())
    return {
        "evaluations": json.loads((run / "evaluations.json").read_text()),
        "best_return": metadata["best_return"],
        "steps of the best": load_checkpoint(best).metadata["env_steps"],
        "grade": metadata["resume_grade"],
    }


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "async": (lambda: normalized, lambda: None, {"vectorization": "async"}),
    "a callable": (lambda: normalized, lambda: None, {}),
    "an object": (normalized, lambda: None, {"num_envs": 1}),
    "a callable to evaluate in": (lambda: None, lambda: normalized, {}),
    "an object to evaluate in": (lambda: None, normalized, {}),
    "a stream of its own": (lambda: OwnStream, lambda: None, {}),
    "an object with a stream": (OwnStream, lambda: None, {"num_envs": 1}),
    "no state before a reset": (lambda: NoneBeforeReset, lambda: None, {}),
}


@pytest.mark.parametrize(("env", "eval_env", "settings"), CASES.values(), ids=CASES.keys())
def test_a_resumed_run_has_the_same_evaluations(env: Any, eval_env: Any, settings: Any, tmp_path: Path) -> None:
    given = {"env": env(), "eval_env": eval_env()}
    whole = train(a_config(tmp_path / "whole", **settings), progress=False, **given)
    given = {"env": env(), "eval_env": eval_env()}
    with pytest.raises(RuntimeError, match="crash"):
        train(a_config(tmp_path / "stopped", **settings), progress=False, callback=crash, **given)
    (stopped,) = (tmp_path / "stopped").iterdir()
    assert whole.run_dir is not None
    assert len(json.loads((stopped / "evaluations.json").read_text())) == 3
    if isinstance(given["eval_env"], gym.Env):
        given["eval_env"] = eval_env()
    resume(stopped, progress=False, **given)  # with the object that was trained on, as it is
    expected, found = end_of(whole.run_dir), end_of(stopped)
    assert expected["grade"] == "exact"
    assert len(expected["evaluations"]) == 6
    assert found == expected
    assert differences(whole.run_dir, stopped) == []
    best, other = (flat(load_checkpoint(run / "checkpoints" / "best").state) for run in (whole.run_dir, stopped))
    assert [name for name in best.keys() | other.keys() if not same(best, other, name)] == []


@pytest.mark.parametrize("env", [normalized, OwnStream])
def test_equal_seeds_give_equal_evaluations(env: Any, tmp_path: Path) -> None:
    agent = PPO(env, num_envs=2, num_steps=16, eval_every=0, device="cpu", seed=1)
    first = agent.evaluate(3, deterministic=False, seed=5)
    agent.evaluate(3, deterministic=False, seed=6)
    assert agent.evaluate(3, deterministic=False, seed=5) == first
    agent.save(tmp_path / "agent")
    assert load(tmp_path / "agent", env=env).evaluate(3, deterministic=False, seed=5) == first
    agent.close()


def test_box2d_leaves_no_traces_of_earlier_evaluations() -> None:
    limit = [{"name": "TimeLimit", "kwargs": {"max_episode_steps": 90}}]
    agent = PPO("BipedalWalker-v3", num_envs=1, wrappers=limit, num_steps=16, eval_every=0, device="cpu", seed=1)
    first = agent.evaluate(2, seed=5)
    assert agent.evaluate(2, seed=5) == first
    agent.close()


def test_an_evaluation_environment_of_other_settings_is_used_as_it_is(tmp_path: Path) -> None:
    config = a_config(tmp_path, total_timesteps=64)
    first = train(config, progress=False, eval_env=lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1"), 5))
    assert first.run_dir is not None
    shorter = lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1"), 3)  # noqa: E731
    again = resume(first.run_dir, total_timesteps=128, progress=False, eval_env=shorter)
    assert first.final_evaluation is not None
    assert again.final_evaluation is not None
    assert (first.final_evaluation.lengths, again.final_evaluation.lengths) == ([5, 5, 5], [3, 3, 3])


def test_another_number_of_evaluation_environments(tmp_path: Path) -> None:
    first = train(a_config(tmp_path, total_timesteps=64), progress=False)
    assert first.run_dir is not None
    again = resume(first.run_dir, total_timesteps=128, progress=False, eval_episodes=1)
    assert again.final_evaluation is not None
    assert len(again.final_evaluation.returns) == 1


REASONS = {
    "unknown": (Unknown, "Unknown has no get_state and set_state"),
    "broken": (BrokenRestore, "evaluation environment: restoring a snapshot raised KeyError"),
    "lossy": (LossyRestore, "evaluation environment: the state differs after a snapshot was restored"),
}


@pytest.mark.parametrize(("env", "reason"), REASONS.values(), ids=REASONS.keys())
def test_an_evaluation_environment_that_cannot_be_restored_lowers_the_grade(
    env: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(a_config(tmp_path, total_timesteps=64), env=OwnStream, eval_env=env)
    assert result.run_dir is not None
    said = capsys.readouterr().err
    assert "resume grade: episode-boundary" in said
    assert "(evaluation environment: " in said
    assert reason in said
    assert end_of(result.run_dir)["grade"] == "episode-boundary"
    for path in checkpoints_of(result.run_dir):
        assert load_checkpoint(path).metadata["resume_grade"] == "episode-boundary"
    without = a_config(tmp_path, total_timesteps=64, eval_every=0)
    result = train(without, env=OwnStream, eval_env=env)
    assert result.run_dir is not None
    assert json.loads((result.run_dir / "metadata.json").read_text())["resume_grade"] == "exact"


@pytest.mark.parametrize("env", [BrokenRestore, LossyRestore])
def test_an_environment_that_does_not_take_back_its_state(
    env: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop: Any = lambda run: run.env_steps < 64  # noqa: E731
    stopped = train(a_config(tmp_path), env=env, callback=stop)
    assert stopped.run_dir is not None
    assert "resume grade: episode-boundary (" in capsys.readouterr().err
    assert load_checkpoint(checkpoints_of(stopped.run_dir)[-1]).metadata["resume_grade"] == "episode-boundary"
    assert resume(stopped.run_dir, env=env, progress=False).final_evaluation is not None
