"""Snapshots of environments: plain data from which an environment goes on exactly where it was.

What can be snapshotted, level by level from the outermost wrapper to the environment itself:

- anything that implements the protocol: `get_state()` without arguments returns plain data (numbers, strings, arrays,
  lists, tuples, dicts, random generators), and `set_state(state)` takes it back;
- Gymnasium's classic control, toy text and MuJoCo environments, and its native vector CartPole;
- Gymnasium's own wrappers, and wrappers that keep nothing of their own.

Everything else (Box2D, ale-py's vector environment, unknown environments and wrappers) is refused with a
`SnapshotError` that says why; such runs resume at an episode boundary.
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers.utils import RunningMeanStd

from rl_training.contracts.errors import CheckpointError, RLTrainingError

WALKED = (
    "gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "gymnasium.envs.mujoco", "gymnasium.wrappers",
    "rl_training.envs.masks", "rl_training.envs.wrappers",
)  # fmt: skip
"""Modules whose objects keep their whole state in plain attributes (held by tests on every one of them)."""

UNWALKABLE = ("gymnasium.wrappers.rendering",)
"""Wrappers that hold files or windows."""

RENDERING = frozenset(
    {"screen", "surf", "clock", "isopen", "screens", "mujoco_renderer", "window_surface", "cell_size"}
)
RENDERING |= {
    "fire_img",
    "hole_img",
    "ice_img",
    "goal_img",
    "elf_images",
    "start_img",
    "cracked_hole_img",
    "tile_images",
}
CONSTANT = frozenset(
    {"env", "metadata", "_metadata", "spec", "_cached_spec", "_saved_kwargs", "P", "desc", "model", "data"}
)
"""Attributes that never change after construction, or are handled by themselves."""
FORMERLY = frozenset({"_metadata"})
"""Constants that older checkpoints hold as state."""


@runtime_checkable
class RemoteEnvs(Protocol):
    """A vector environment whose environments live in other processes and answer for themselves."""

    def take_snapshots(self) -> list[Any]:
        """One snapshot per environment."""
        ...

    def restore_snapshots(self, snapshots: list[Any]) -> None:
        """Restore every environment."""
        ...


class SnapshotError(RLTrainingError):
    """An environment whose state cannot be taken; the message says which part is in the way."""


def take_snapshot(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> list[dict[str, Any]]:
    """The state of an environment and all of its wrappers, outermost first, as plain data."""
    return [{"class": _class_name(level), "state": _get_level(level)} for level in _levels(env)]


def restore_snapshot(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any], snapshot: list[dict[str, Any]]) -> None:
    """Put an environment of the same make-up into the state that `take_snapshot` took."""
    levels = _levels(env)
    _check_classes(levels, snapshot)
    for level, entry in zip(levels, snapshot, strict=True):
        _set_level(level, entry["state"])


def take_vector_snapshot(env: VectorEnv[Any, Any, Any]) -> list[dict[str, Any]]:
    """The state of a vector environment: its vector wrappers, then each environment or the native whole."""
    *wrappers, base = _levels(env)
    state = [{"class": _class_name(level), "state": _get_level(level)} for level in wrappers]
    if isinstance(base, SyncVectorEnv):
        parts: list[Any] = [take_snapshot(part) for part in base.envs]
    elif isinstance(base, RemoteEnvs):
        parts = base.take_snapshots()
    else:
        return [*state, *take_snapshot(base)]
    return [*state, {"class": _class_name(base), "state": {"envs": parts}}]


def restore_vector_snapshot(env: VectorEnv[Any, Any, Any], snapshot: list[dict[str, Any]], resetting: Any) -> None:
    """Put a vector environment of the same make-up into a state. `resetting` marks next-step resets to come."""
    levels = _levels(env)
    _check_classes(levels, snapshot)
    for level, entry in zip(levels, snapshot, strict=True):
        state = entry["state"]
        if isinstance(level, SyncVectorEnv):
            level._autoreset_envs = np.array(resetting)
            for part, saved in zip(level.envs, state["envs"], strict=True):
                restore_snapshot(part, saved)
        elif isinstance(level, RemoteEnvs):
            level.restore_snapshots(state["envs"])
        else:
            _set_level(level, state)


def _check_classes(levels: list[Any], snapshot: list[dict[str, Any]]) -> None:
    names = [_class_name(level) for level in levels]
    saved = [str(entry["class"]) for entry in snapshot]
    if names != saved:
        raise CheckpointError(
            f"the environment is made of {' > '.join(names)}, the checkpoint's of {' > '.join(saved)}"
        )


def _levels(env: Any) -> list[Any]:
    levels = [env]
    while isinstance(levels[-1], (gym.Wrapper, gym.vector.VectorWrapper)):
        levels.append(levels[-1].env)
    return levels


def _class_name(level: Any) -> str:
    cls = SyncVectorEnv if isinstance(level, SyncVectorEnv) else type(level)  # our quicker one has the same state
    return f"{cls.__module__}.{cls.__qualname__}"


def _implements_protocol(level: Any) -> bool:
    """MuJoCo environments have a `set_state(qpos, qvel)` of their own, which is not ours."""
    getter, setter = getattr(level, "get_state", None), getattr(level, "set_state", None)
    return callable(getter) and callable(setter) and _required(getter) == 0 and _required(setter) == 1


def _required(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind in kinds for p in parameters)


def _get_level(level: Any) -> dict[str, Any]:
    name = _class_name(level)
    if _implements_protocol(level):
        return {"own": encode(level.get_state(), f"{name}.get_state()")}
    if not _is_walked(level):
        raise SnapshotError(f"{name} does not say how to take its state (get_state and set_state)")
    state: dict[str, Any] = {
        key: encode(value, f"{name}.{key}") for key, value in _attributes(level).items() if not _is_constant(value)
    }
    if "gymnasium.envs.mujoco" in _modules(level):
        state["$mujoco"] = _get_mujoco(level)
    return state


def _set_level(level: Any, state: dict[str, Any]) -> None:
    if "own" in state and _implements_protocol(level):
        level.set_state(decode(state["own"], None))
        return
    for key, value in state.items():
        if key == "$mujoco":
            _set_mujoco(level, value)
        elif key in FORMERLY and hasattr(level, key):
            continue
        elif not _is_settable(level, key):
            raise CheckpointError(f"{_class_name(level)} has no state named '{key:.60}'")
        else:
            setattr(level, key, decode(value, getattr(level, key, None)))


def _is_settable(level: Any, key: str) -> bool:
    """Whether an attribute may hold state: no methods, properties or fixed parts, whatever a file says."""
    own = key.isidentifier() and not key.startswith("__") and key not in CONSTANT and key not in RENDERING
    return own and not (callable(found := getattr(type(level), key, None)) or isinstance(found, property))


def _is_walked(level: Any) -> bool:
    module = type(level).__module__
    if isinstance(level, gym.Wrapper) and not set(_attributes(level)) - set(_attributes(gym.Wrapper(level.env))):
        return True  # keeps nothing of its own
    if isinstance(level, VectorEnv) and not isinstance(level, gym.vector.VectorWrapper):
        return module.startswith("gymnasium.envs.classic_control")
    return module.startswith(WALKED) and not module.startswith(UNWALKABLE)


def _modules(level: Any) -> str:
    return " ".join(cls.__module__ for cls in type(level).__mro__)


def _attributes(level: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(level).items() if key not in CONSTANT and key not in RENDERING}


def _is_constant(value: Any) -> bool:
    kinds = (spaces.Space, GymnasiumSpec, Enum, type, types.ModuleType)
    return isinstance(value, kinds) or (callable(value) and not isinstance(value, np.ndarray))


def encode(value: Any, where: str) -> Any:
    """Plain data in a form that JSON and safetensors can hold without losing types."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return value.copy()
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":  # before float: np.float64 is one
        return {"$scalar": np.array(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, np.random.Generator):
        return {"$generator": value.bit_generator.state}
    if isinstance(value, RunningMeanStd):
        return {"$moments": {key: encode(item, f"{where}.{key}") for key, item in vars(value).items()}}
    for kind, tag in ((list, "$list"), (tuple, "$tuple"), (deque, "$deque")):
        if isinstance(value, kind):
            return {tag: [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"$pairs": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    raise SnapshotError(f"{where} is a {type(value).__name__}, which is not plain data")


def decode(value: Any, current: Any) -> Any:
    """The inverse of `encode`; random generators, deques and moments are restored in place where there is one."""
    if not isinstance(value, dict):
        return value.copy() if isinstance(value, np.ndarray) else value
    (tag, content), *_ = value.items()
    if tag == "$scalar":
        return np.asarray(content)[()]
    if tag == "$generator":
        generator = current if isinstance(current, np.random.Generator) else _generator(content)
        generator.bit_generator.state = content
        return generator
    if tag == "$moments":
        for key, item in content.items():
            setattr(current, key, decode(item, getattr(current, key, None)))
        return current
    if tag == "$pairs":
        return {decode(key, None): decode(item, None) for key, item in content}
    items = [decode(item, None) for item in content]
    if tag == "$deque" and isinstance(current, deque):
        current.clear()
        current.extend(items)
        return current
    return {"$list": list, "$tuple": tuple, "$deque": deque}[tag](items)


def _generator(state: dict[str, Any]) -> np.random.Generator:
    kinds = {cls.__name__: cls for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)}
    name = state.get("bit_generator")
    if name not in kinds:
        raise CheckpointError(f"unknown random generator '{name}' in an environment's state")
    return np.random.Generator(kinds[name]())


def _get_mujoco(level: Any) -> dict[str, Any]:
    """The integration state, and all derived arrays: some rewards are differences of positions from before the step."""
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.empty(mujoco.mj_stateSize(level.model, kind))
    mujoco.mj_getState(level.model, level.data, integration, kind)
    return {"integration": integration, **{name: array.copy() for name, array in _mujoco_arrays(level.data).items()}}


def _set_mujoco(level: Any, saved: dict[str, Any]) -> None:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(level.model, level.data, np.asarray(saved["integration"], np.float64), kind)
    for name, array in _mujoco_arrays(level.data).items():
        array[...] = np.asarray(saved[name])


def _mujoco_arrays(data: Any) -> dict[str, Any]:
    """The fixed-size arrays of MjData that hold poses, velocities, forces and sensor readings."""
    wanted = ("x", "c", "q", "geom_x", "site_x", "subtree", "actuator_", "sensordata", "ten_", "mocap_")
    found = {}
    for name in dir(data):
        if name.startswith(wanted) and not name.startswith(("contact", "crb")):
            array = getattr(data, name)
            if isinstance(array, np.ndarray) and array.dtype == np.float64 and array.flags.writeable:
                found[name] = array
    return found
