"""Nothing that training changes is left out of a checkpoint: see `rl_training.testing.loose_state`."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rl_training.algorithms.ppo import PPOAlgorithm
from rl_training.algorithms.registry import registry
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import AlgorithmSpec
from rl_training.experiment import build
from rl_training.experiment.build import build_experiment
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.callbacks import Callback
from rl_training.testing import loose_state as walk
from rl_training.testing.loose_state import look_at, objects_of, run_it
from rl_training.testing.small import only_offline
from tests.small import small_budget, small_env, small_settings

ROOTS = ("rl_training", __name__.partition(".")[0])


# A run with everything on


@dataclass
class Counting(Callback):
    """A callback as users write them."""

    iterations: int = field(default=0, init=False)
    seen: list[int] = field(default_factory=list, init=False)

    def on_iteration(self, run: Any) -> None:
        self.iterations += 1
        self.seen.append(run.env_steps)


def make_config(spec: AlgorithmSpec, output: Path) -> TrainConfig:
    own = small_settings(spec)
    if "learning_rate" in spec.config.__dataclass_fields__:
        own["learning_rate"] = Linear(1e-3, 0.0)
    return TrainConfig(
        algo=spec.name,
        env_id=small_env(spec),
        env_kwargs={"max_episode_steps": 40},
        num_envs=2,
        normalize_obs=True,
        normalize_reward=not only_offline(spec),
        eval_every=64,
        eval_episodes=1,
        stop_reward=1e9,
        stop_patience=1000,
        max_seconds=1e6,
        checkpoint_every=96,
        log_every=32,
        tensorboard=False,
        output_dir=output,
        algorithm=own,
        **small_budget(spec, 320, output),
    )


def loose_state(
    config: TrainConfig, directory: Path, callbacks: Callable[[], list[Callback]] = lambda: [Counting()]
) -> list[str]:
    return walk.loose_state(config, directory, callbacks, ROOTS, progress=True)


@pytest.mark.parametrize("spec", registry().values(), ids=lambda spec: spec.name)
def test_no_algorithm_has_loose_state(spec: AlgorithmSpec, tmp_path: Path) -> None:
    assert loose_state(make_config(spec, tmp_path), tmp_path) == []


def test_what_is_looked_at(tmp_path: Path) -> None:
    """The walk reaches every part that holds state, and sees what training changes."""
    experiment = build_experiment(make_config(registry()["ppo"], tmp_path))
    before = look_at(experiment.trainer)
    trainer = run_it(experiment, tmp_path / "run", lambda: [Counting()])
    names = {type(owner).__name__ for owner in objects_of(trainer, ROOTS).values()}
    expected = {"PPOAlgorithm", "ParameterStore", "Collector", "EpisodeStatistics", "ObservationNormalizer", "Progress"}
    expected |= {"RewardNormalizer", "RunningMoments", "AutoresetAdapter", "EvaluationCallback", "Every", "Counting"}
    expected |= {
        "StopOnNoImprovement",
        "StopAfterSeconds",
        "LoggingCallback",
        "CheckpointCallback",
        "Evaluator",
        "Linear",
    }
    assert expected <= names
    after = look_at(trainer)
    changed = {
        f"{path}.{attribute}".removeprefix("trainer.")
        for path, attributes in after.items()
        for attribute, value in attributes.items()
        if value != before.get(path, {}).get(attribute)
    }
    for name in (
        *("algorithm.rng", "algorithm.store.optimizer", "collector.policy_rng", "collector.env_rng", "collector.obs"),
        *("collector.statistics.returns", "collector.reward_normalizer.returns", "progress.env_steps"),
        *("progress.horizon", "_best_return", "callbacks[0].num_evaluations"),
    ):
        assert name in changed, name
    assert any(name.startswith("algorithm.policy") and "_parameters" in name for name in changed)
    experiment.close()


# The test can fail


class Helper:
    """Something that an algorithm might keep, with a counter of its own."""

    def __init__(self) -> None:
        self.calls = 0


class LooseAlgorithm(PPOAlgorithm):
    """Keeps a counter where no checkpoint finds it."""

    kind: ClassVar[str] = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counter = 0
        self.window: deque[int] = deque(maxlen=5)
        self.table = {"updates": 0}
        self.numbers = [0]
        self.helper = Helper()
        self.late: Any = None
        self.caught = torch.zeros(1)

    def update(self, *args: Any) -> Any:
        self.caught += 1  # a tensor is found by its type
        if self.kind == "counter":
            self.counter += 1
        elif self.kind == "window":
            self.window.append(1)
        elif self.kind == "table":
            self.table["updates"] += 1
        elif self.kind == "numbers":
            self.numbers.append(1)
        elif self.kind == "helper.calls":
            self.helper.calls += 1
        elif self.kind == "late":
            self.late = np.random.default_rng(len(self.window))
            self.late.random()
        elif self.kind == "policy.temperature":
            self.policy.temperature = getattr(self.policy, "temperature", 0.0) + 0.5
        return super().update(*args)


def loose_spec(monkeypatch: pytest.MonkeyPatch, **members: Any) -> AlgorithmSpec:
    """PPO with such an algorithm instead of its own."""
    algorithm = type("Loose", (LooseAlgorithm,), {**members, "__module__": __name__})
    spec = dataclasses.replace(registry()["ppo"], algorithm=algorithm)
    monkeypatch.setattr(build, "get_spec", lambda name: spec)
    return spec


@pytest.mark.parametrize("kind", ["counter", "window", "table", "numbers", "helper.calls", "policy.temperature"])
def test_loose_state_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = loose_spec(monkeypatch, kind=kind)
    found = loose_state(make_config(spec, tmp_path), tmp_path)
    assert [name.split(" of ")[0] for name in found] == [f"trainer.algorithm.{kind}"]


def test_a_random_stream_that_is_made_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = loose_spec(monkeypatch, kind="late")
    with pytest.raises(CheckpointError, match="unknown late"):
        loose_state(make_config(spec, tmp_path), tmp_path)


def test_a_declared_attribute_is_not_loose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = loose_spec(monkeypatch, kind="counter", transient=("counter",))
    assert loose_state(make_config(spec, tmp_path), tmp_path) == []


class LooseCallback(Callback):
    """Not a dataclass, so its counter is a setting to the checkpoint."""

    def __init__(self) -> None:
        self.iterations = 0

    def on_iteration(self, run: Any) -> None:
        self.iterations += 1


def test_a_loose_callback_is_found(tmp_path: Path) -> None:
    config = make_config(registry()["ppo"], tmp_path)
    found = loose_state(config, tmp_path, lambda: [LooseCallback()])
    assert [name.rpartition(".")[2] for name in found] == ["iterations of LooseCallback"]
