"""Finds state that training changes and a checkpoint lacks.

Every object reachable from a trainer is inspected before training, after it, and in a second trainer that was restored
from the first one's checkpoint. Whatever changed in training must be the same after the restore, unless its class lists
it in `transient`, or it is one of the few exemptions below, each with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from rl_training.accelerate import Accelerated, ArrayNetwork
from rl_training.api import session
from rl_training.api.session import save_experiment
from rl_training.data.dataset import Dataset, LazyColumn
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.experiment.build import Experiment, build_experiment
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.files import Appender, Outage
from rl_training.experiment.logging import ProgressCallback
from rl_training.experiment.restoring import load_experiment
from rl_training.experiment.runs import RunDirectory
from rl_training.policies.layers import Dropout
from rl_training.policies.noisy import NoisyLinear
from rl_training.policies.parameters import ParameterStore
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.trainer import Timers, Trainer
from rl_training.testing.resume import flat

EVERYTHING = "*"
EXEMPT: dict[type[Any], dict[str, str]] = {
    RolloutBuffer: {EVERYTHING: "filled and used up within one iteration"},
    Dataset: {EVERYTHING: "never changes, except for what was computed from it; checkpoints have its hash"},
    LazyColumn: {EVERYTHING: "is computed from a dataset"},
    Timers: {EVERYTHING: "seconds of this process"},
    ProgressCallback: {EVERYTHING: "what this process shows on the screen"},
    Trainer: {
        "_recorded": "metrics that callbacks added in this process (timings, checkpoint size)",
        "_timers": "seconds of this process",
        "_latest": "metrics, which are tensors before a restore and numbers after it",
        "_changes": "what the networks looked like in this process",
        "_just_restored": "whether callbacks still wait for their state",
        "restored_from": "where the state was read from, for messages",
    },
    Outage: {EVERYTHING: "whether this process could write"},
    Appender: {EVERYTHING: "what is written to a file, which has its own length"},
    ParameterStore: {"grad": "written anew before every use"},
    Dropout: {EVERYTHING: "masks, which are drawn anew before every update and off otherwise"},
    NoisyLinear: {"_buffers": "noise, which is drawn anew before every use and off otherwise"},
}
"""Attributes that change but are not state, by class, with the reason."""

PACKAGE = frozenset({"rl_training"})
"""Default root packages whose objects are inspected."""

Snapshot = dict[str, dict[str, Any]]
"""For each object by its path: the fingerprints of its attributes."""


def is_ours(value: Any, roots: Collection[str]) -> bool:
    """Whether an object's attributes are inspected: networks, and objects of the packages in `roots`."""
    return isinstance(value, nn.Module) or (
        type(value).__module__.partition(".")[0] in roots
        and not isinstance(
            value, (type, tuple, types.FunctionType, Accelerated, ArrayNetwork)
        )  # created again by every process
        and not isinstance(value, VectorEnv)  # Gymnasium's state, whose snapshots have tests of their own
        and hasattr(value, "__dict__")
    )


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an attribute refers to: itself, the items of a container, the owner of a method."""
    if isinstance(value, functools.partial):
        yield from children(value.func)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key}]", item
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    else:
        yield "", value


def objects_of(root: Any, roots: Collection[str] = PACKAGE) -> dict[str, Any]:
    """Every object of these packages that can be reached from a trainer through attributes, by its path."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [("trainer", root)]
    while waiting:
        path, owner = waiting.pop(0)
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        found[path] = owner
        for attribute, value in vars(owner).items():
            for suffix, item in children(value):
                for deeper, part in children(item):
                    if is_ours(part, roots):
                        waiting.append((f"{path}.{attribute}{suffix}{deeper}", part))
    return found


def fingerprint(value: Any) -> Any:
    """A comparable value that differs whenever plain data, a tensor or a random stream does."""
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
    return ("object", type(value).__qualname__)  # inspected separately, or not ours


def attributes_of(owner: Any) -> dict[str, Any]:
    """Attributes of the object, including dataclass defaults that are still stored on the class.

    A replay buffer is compared by its rows: unused places of its ring do not matter.
    """
    if isinstance(owner, ReplayBuffer):
        return flat(owner.state_dict())
    fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
    return {**{field.name: getattr(owner, field.name) for field in fields if hasattr(owner, field.name)}, **vars(owner)}


def look_at(root: Any, roots: Collection[str] = PACKAGE) -> Snapshot:
    """Fingerprints of all objects reachable from a trainer."""
    return {
        path: {name: fingerprint(value) for name, value in attributes_of(owner).items()}
        for path, owner in objects_of(root, roots).items()
    }


def exemption(owner: Any, attribute: str) -> str | None:
    """Why an attribute need not be restored, or None."""
    if attribute in getattr(owner, "transient", ()):
        return "transient"
    for cls, reasons in EXEMPT.items():
        if isinstance(owner, cls):
            return reasons.get(attribute) or reasons.get(EVERYTHING)
    return None


def find_loose(before: Snapshot, trainer: Any, restored: Any, roots: Collection[str] = PACKAGE) -> list[str]:
    """Attributes that training changed and loading a checkpoint does not restore."""
    after, again, owners = look_at(trainer, roots), look_at(restored, roots), objects_of(trainer, roots)
    missing = object()
    return [
        f"{path}.{attribute} of {type(owners[path]).__name__}"
        for path, attributes in after.items()
        for attribute, value in attributes.items()
        if value != before.get(path, {}).get(attribute, missing)
        and value != again.get(path, {}).get(attribute, missing)
        and exemption(owners[path], attribute) is None
    ]


def run_it(
    experiment: Experiment, directory: Path, callbacks: Callable[[], list[Callback]], *, progress: bool = False
) -> Trainer:
    """Run as `run_experiment` does; for a finished experiment, only the callbacks are restored."""
    directory.mkdir(exist_ok=True)
    (directory / "metadata.json").write_text('{"run_id": "x"}')
    user = callbacks()
    experiment.trainer.prepare()
    wired = session._callbacks(experiment, RunDirectory(directory), user, progress)
    experiment.trainer.run(experiment.end, wired, new=user)
    return experiment.trainer


def loose_state(
    config: TrainConfig,
    directory: Path,
    callbacks: Callable[[], list[Callback]] = list,
    roots: Collection[str] = PACKAGE,
    *,
    progress: bool = False,
) -> list[str]:
    """Attributes that a checkpoint of this run would lack."""
    trained = build_experiment(config)
    fresh = look_at(trained.trainer, roots)
    run_it(trained, directory / "trained", callbacks, progress=progress)
    save_experiment(trained, directory / "checkpoint")
    restored, _ = load_experiment(directory / "checkpoint")
    run_it(restored, directory / "restored", callbacks, progress=progress)
    found = find_loose(fresh, trained.trainer, restored.trainer, roots)
    trained.close()
    restored.close()
    return found
