"""Nothing that training changes is left out of a checkpoint.

Every object that a trainer holds is looked at before training, after it, and in a second trainer that was restored from
the first one's checkpoint. Whatever changed in training must be the same again after the restore, unless its class
names it in `transient`, or it is one of the few exemptions below, each with its reason.
"""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from rl_training.accelerate.acting import ArrayNetwork
from rl_training.accelerate.recording import Recorded
from rl_training.algorithms.ppo import PPOAlgorithm
from rl_training.algorithms.registry import registry
from rl_training.api import session
from rl_training.api.session import save_experiment
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import AlgorithmSpec
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.experiment import build
from rl_training.experiment.build import Experiment, build_experiment
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import ProgressCallback
from rl_training.experiment.restoring import load_experiment
from rl_training.experiment.runs import RunDirectory
from rl_training.policies.noisy import NoisyLinear
from rl_training.policies.parameters import ParameterStore
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.trainer import Timers, Trainer
from tests.resume_harness import _flat
from tests.small import small_env, small_settings

EVERYTHING = "*"
EXEMPT: dict[type[Any], dict[str, str]] = {
    RolloutBuffer: {EVERYTHING: "filled and used up within one iteration"},
    Timers: {EVERYTHING: "seconds of this process"},
    ProgressCallback: {EVERYTHING: "what this process shows on the screen"},
    Trainer: {
        "_recorded": "metrics that callbacks added in this process (timings, checkpoint size)",
        "_timers": "seconds of this process",
        "_latest": "metrics, which are tensors before a restore and numbers after it",
        "_just_restored": "whether callbacks still wait for their state",
        "restored_from": "where the state was read from, for messages",
    },
    ParameterStore: {"grad": "written anew before every use"},
    NoisyLinear: {"_buffers": "noise, which is drawn anew before every use and off otherwise"},
}
"""What is not state although it changes, by class, with the reason."""

Snapshot = dict[str, dict[str, Any]]
"""For each object by its path: the fingerprints of its attributes."""


def is_ours(value: Any) -> bool:
    """Objects whose attributes are looked at: the package's own, its networks, and those of this module."""
    root = type(value).__module__.split(".")[0]
    return isinstance(value, nn.Module) or (
        (root == "rl_training" or type(value).__module__ == __name__)
        and not isinstance(
            value, (type, tuple, types.FunctionType, Recorded, ArrayNetwork)
        )  # made anew by every process
        and not isinstance(value, VectorEnv)  # Gymnasium's state, whose snapshots have tests of their own
        and hasattr(value, "__dict__")
    )


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """What an attribute leads to: itself, the items of a container, the owner of a method."""
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key}]", item
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    else:
        yield "", value


def objects_of(root: Any, name: str = "trainer") -> dict[str, Any]:
    """Every object of ours that can be reached through attributes, by its path."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [(name, root)]
    while waiting:
        path, owner = waiting.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        found[path] = owner
        for attribute, value in vars(owner).items():
            for suffix, item in children(value):
                for deeper, part in children(item):
                    if is_ours(part):
                        waiting.append((f"{path}.{attribute}{suffix}{deeper}", part))
    return found


def fingerprint(value: Any) -> Any:
    """Something comparable that differs whenever plain data, a tensor or a random stream does."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.detach().cpu().numpy().tobytes())
    if isinstance(value, (np.ndarray, np.generic)):
        return ("array", str(value.dtype), value.shape, np.asarray(value).tobytes())
    if isinstance(value, np.random.Generator):
        return ("generator", str(value.bit_generator.state))
    if isinstance(value, torch.Generator):
        return ("generator", value.get_state().numpy().tobytes())
    if isinstance(value, torch.optim.Optimizer):  # the learning rate is set before each step
        slots = [fingerprint(dict(slots)) for slots in value.state.values()]
        return ("optimizer", [slot for slot in slots if slot != ("mapping", {})])
    if isinstance(value, Mapping):
        return ("mapping", {key: fingerprint(item) for key, item in value.items()})
    if isinstance(value, (list, tuple, deque)):
        return ("sequence", [fingerprint(item) for item in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return ("object", type(value).__qualname__)  # walked by itself, or not ours


def attributes_of(owner: Any) -> dict[str, Any]:
    """Of the object itself, and defaults that a dataclass leaves with the class until they are first set.

    Replay counts by its rows: what lies in places of its ring that hold none does not matter.
    """
    if isinstance(owner, ReplayBuffer):
        return _flat(owner.state_dict())
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    return {**{field.name: getattr(owner, field.name) for field in fields if hasattr(owner, field.name)}, **vars(owner)}


def look_at(root: Any) -> Snapshot:
    return {
        path: {name: fingerprint(value) for name, value in attributes_of(owner).items()}
        for path, owner in objects_of(root).items()
    }


def exemption(owner: Any, attribute: str) -> str | None:
    """Why an attribute need not be restored, or None."""
    if attribute in getattr(owner, "transient", ()):
        return "transient"
    for cls, reasons in EXEMPT.items():
        if isinstance(owner, cls):
            return reasons.get(attribute) or reasons.get(EVERYTHING)
    return None


def find_loose(before: Snapshot, trainer: Any, restored: Any) -> list[str]:
    """Attributes that training changed and a restore does not bring back."""
    after, again, owners = look_at(trainer), look_at(restored), objects_of(trainer)
    missing = object()
    return [
        f"{path}.{attribute} of {type(owners[path]).__name__}"
        for path, attributes in after.items()
        for attribute, value in attributes.items()
        if value != before.get(path, {}).get(attribute, missing)
        and value != again.get(path, {}).get(attribute, missing)
        and exemption(owners[path], attribute) is None
    ]


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
        num_envs=2,
        total_timesteps=320,
        normalize_obs=True,
        normalize_reward=True,
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
    )


def run_it(experiment: Experiment, directory: Path, callbacks: Callable[[], list[Callback]]) -> Trainer:
    """As `run_experiment` does; an experiment that has its steps behind it only gets its callbacks back."""
    directory.mkdir(exist_ok=True)
    (directory / "metadata.json").write_text('{"run_id": "x"}')
    user = callbacks()
    wired = session._callbacks(experiment, RunDirectory(directory), user, progress=True)
    experiment.trainer.run(experiment.config.total_timesteps, wired, new=user)
    return experiment.trainer


def loose_state(
    config: TrainConfig, directory: Path, callbacks: Callable[[], list[Callback]] = lambda: [Counting()]
) -> list[str]:
    """What a checkpoint of this run would lack."""
    trained = build_experiment(config)
    fresh = look_at(trained.trainer)
    run_it(trained, directory / "trained", callbacks)
    save_experiment(trained, directory / "checkpoint")
    restored, _ = load_experiment(directory / "checkpoint")
    run_it(restored, directory / "restored", callbacks)
    found = find_loose(fresh, trained.trainer, restored.trainer)
    trained.close()
    restored.close()
    return found


@pytest.mark.parametrize("spec", registry().values(), ids=lambda spec: spec.name)
def test_no_algorithm_has_loose_state(spec: AlgorithmSpec, tmp_path: Path) -> None:
    assert loose_state(make_config(spec, tmp_path), tmp_path) == []


def test_what_is_looked_at(tmp_path: Path) -> None:
    """The walk reaches every part that holds state, and sees what training changes."""
    experiment = build_experiment(make_config(registry()["ppo"], tmp_path))
    before = look_at(experiment.trainer)
    trainer = run_it(experiment, tmp_path / "run", lambda: [Counting()])
    names = {type(owner).__name__ for owner in objects_of(trainer).values()}
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
