"""Snapshots of environments: plain data from which an environment continues exactly where it was.

Supported, level by level from the outermost wrapper to the environment itself:

- anything that implements the protocol: `get_state()` without arguments returns plain data (numbers, strings, arrays,
  lists, tuples, dicts, random generators), and `set_state(state)` restores it;
- Gymnasium's classic control, toy text and MuJoCo environments, and its native vector CartPole;
- Gymnasium's own wrappers, and wrappers without state of their own.

Everything else (Box2D, ale-py's vector environment, unknown environments and wrappers) is refused with a
`SnapshotError` that says why; such runs resume at an episode boundary.

The state includes the closure variables of functions (`TransformReward(env, function)`), and the random generators of
spaces if there is code that is not Gymnasium's. Global variables of modules and attributes of classes are not saved,
but a wrapper that draws from a random generator there is refused.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import SyncVectorEnv, VectorEnv

from rl_training.contracts.errors import CheckpointError
from rl_training.envs.encoding import RANDOM, Decoder, Encoder, SnapshotError

WALKED = (
    "gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "gymnasium.envs.mujoco", "gymnasium.wrappers",
    "rl_training.envs.masks", "rl_training.envs.wrappers",
)  # fmt: skip
"""Modules whose objects keep their whole state in plain attributes (each of them is tested)."""

TRUSTED = ("gymnasium.", "rl_training.", "typing.", "abc.", "builtins.", "numpy.")
"""Modules whose classes and functions are known to keep no state outside of instances."""

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
"""Attributes that never change after construction, or are handled separately."""
FORMERLY = frozenset({"_metadata"})
"""Constants that older checkpoints hold as state."""


@runtime_checkable
class RemoteEnvs(Protocol):
    """A vector environment whose environments run in other processes and take their own snapshots."""

    def take_snapshots(self) -> list[Any]:
        """One snapshot per environment."""
        ...

    def restore_snapshots(self, snapshots: list[Any]) -> None:
        """Restore every environment."""
        ...


def take_snapshot(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> list[dict[str, Any]]:
    """The state of an environment and all of its wrappers, outermost first, as plain data."""
    encoder = Encoder()
    snapshot: list[dict[str, Any]] = encoder.finish(_get_levels(_levels(env), encoder))
    return snapshot


def restore_snapshot(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any], snapshot: list[dict[str, Any]]) -> None:
    """Restore a state of `take_snapshot` in an environment with the same wrappers."""
    _set_levels(env, snapshot, Decoder())


def take_vector_snapshot(env: VectorEnv[Any, Any, Any]) -> list[dict[str, Any]]:
    """The state of a vector environment: its vector wrappers, then each environment or the native vector as a whole."""
    *wrappers, base = _levels(env)
    encoder = Encoder()
    state = _get_levels(wrappers, encoder)
    if isinstance(base, SyncVectorEnv):
        parts: list[Any] = [_get_levels(_levels(part), encoder) for part in base.envs]
        state.append({"class": _class_name(base), "state": {"envs": parts}})
    elif isinstance(base, RemoteEnvs):
        state.append({"class": _class_name(base), "state": {"envs": []}})
    else:
        state += _get_levels([base], encoder)
    snapshot: list[dict[str, Any]] = encoder.finish(state)
    if isinstance(base, RemoteEnvs):  # already finished by the workers, each with its own numbering
        snapshot[-1]["state"]["envs"] = base.take_snapshots()
    return snapshot


def restore_vector_snapshot(env: VectorEnv[Any, Any, Any], snapshot: list[dict[str, Any]], resetting: Any) -> None:
    """Restore a vector environment with the same wrappers; `resetting` marks pending next-step resets."""
    levels, decoder = _levels(env), Decoder()
    _check_classes(levels, snapshot)
    for level, entry in zip(levels, snapshot, strict=True):
        state = entry["state"]
        if isinstance(level, SyncVectorEnv):
            level._autoreset_envs = np.array(resetting)
            for part, saved in zip(level.envs, state["envs"], strict=True):
                _set_levels(part, saved, decoder)
        elif isinstance(level, RemoteEnvs):
            level.restore_snapshots(state["envs"])
        else:
            _set_level(level, state, decoder)


def _get_levels(levels: list[Any], encoder: Encoder) -> list[dict[str, Any]]:
    return [{"class": _class_name(level), "state": _get_level(level, levels, encoder)} for level in levels]


def _set_levels(env: Any, snapshot: list[dict[str, Any]], decoder: Decoder) -> None:
    levels = _levels(env)
    _check_classes(levels, snapshot)
    for level, entry in zip(levels, snapshot, strict=True):
        _set_level(level, entry["state"], decoder)


def _check_classes(levels: list[Any], snapshot: list[dict[str, Any]]) -> None:
    names = [_class_name(level) for level in levels]
    saved = [str(entry["class"]) for entry in snapshot]
    if names != saved:
        raise CheckpointError(
            f"the environment consists of {' > '.join(names)}, the checkpoint's of {' > '.join(saved)}"
        )


def _levels(env: Any) -> list[Any]:
    levels = [env]
    while isinstance(levels[-1], (gym.Wrapper, gym.vector.VectorWrapper)):
        levels.append(levels[-1].env)
    return levels


def _class_name(level: Any) -> str:
    cls = SyncVectorEnv if isinstance(level, SyncVectorEnv) else type(level)  # our faster subclass has the same state
    return f"{cls.__module__}.{cls.__qualname__}"


def _implements_protocol(level: Any) -> bool:
    """Whether it has our `get_state` and `set_state`; MuJoCo's own `set_state(qpos, qvel)` does not count."""
    getter, setter = getattr(level, "get_state", None), getattr(level, "set_state", None)
    return callable(getter) and callable(setter) and _required(getter) == 0 and _required(setter) == 1


def _required(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind in kinds for p in parameters)


def _get_level(level: Any, levels: list[Any], encoder: Encoder) -> dict[str, Any]:
    name = _class_name(level)
    if _implements_protocol(level):
        return {"own": encoder.encode(level.get_state(), f"{name}.get_state()")}
    if not _is_walked(level):
        raise SnapshotError(f"{name} has no get_state and set_state to save and restore its state")
    _check_class(type(level))
    parts = {key: _get_part(value, f"{name}.{key}", levels, encoder) for key, value in _attributes(level).items()}
    state: dict[str, Any] = {key: part for key, part in parts.items() if part is not _NOTHING}
    if "gymnasium.envs.mujoco" in _modules(level):
        state["$mujoco"] = _get_mujoco(level)
    return state


def _set_level(level: Any, state: dict[str, Any], decoder: Decoder) -> None:
    if "own" in state and _implements_protocol(level):
        level.set_state(decoder.decode(state["own"]))
        return
    for key, value in state.items():
        if key == "$mujoco":
            _set_mujoco(level, value)
        elif key in FORMERLY and hasattr(level, key):
            continue
        elif not _is_settable(level, key):
            raise CheckpointError(f"{_class_name(level)} has no state named '{key:.60}'")
        else:
            setattr(level, key, _set_part(value, getattr(level, key, None), decoder))


_NOTHING = object()
"""Marks a part without state."""


def _get_part(value: Any, where: str, levels: list[Any], encoder: Encoder) -> Any:
    """The state of an attribute, or of a closure variable of a function."""
    if any(value is level for level in levels) or _is_constant(value):
        return _NOTHING
    if isinstance(value, spaces.Space):
        if not _has_own_code(levels):
            return _NOTHING
        streams = [space._np_random for space in _spaces(value)]
        found = [encoder.encode(stream, f"the random generator of {where}") for stream in streams]
        return {"$space": found} if any(stream is not None for stream in streams) else _NOTHING
    if callable(value):
        return _get_function(value, where, levels, encoder)
    return encoder.encode(value, where)


def _set_part(value: Any, current: Any, decoder: Decoder) -> Any:
    """The inverse of `_get_part`; spaces and functions are restored in place."""
    if isinstance(value, dict) and "$space" in value:
        parts = list(_spaces(current)) if isinstance(current, spaces.Space) else []
        for space, stream in zip(parts, value["$space"], strict=True):
            space._np_random = decoder.decode(stream, space._np_random)
        return current
    if isinstance(value, dict) and "$function" in value:
        cells = _cells(current) if isinstance(current, types.FunctionType) else {}
        for name, item in value["$function"].items():
            if name not in cells or _is_constant(cells[name].cell_contents):
                raise CheckpointError(f"the function {current!r:.60} has no variable '{name:.60}'")
            cells[name].cell_contents = _set_part(item, cells[name].cell_contents, decoder)
        return current
    if callable(current) or isinstance(current, spaces.Space):
        raise CheckpointError(f"{current!r:.60} cannot be restored from data")
    return decoder.decode(value, current)


def _has_own_code(levels: list[Any]) -> bool:
    """Whether untrusted code may sample from the spaces; Gymnasium's environments and wrappers do not."""
    used = [*map(type, levels), *(value for level in levels for value in vars(level).values())]
    return any(isinstance(x, (type, types.FunctionType)) and not f"{x.__module__}.".startswith(TRUSTED) for x in used)


def _spaces(space: spaces.Space[Any]) -> Iterator[spaces.Space[Any]]:
    """A space and all its subspaces."""
    yield space
    for value in vars(space).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for part in parts:
            if isinstance(part, spaces.Space):
                yield from _spaces(part)


def _get_function(function: Any, where: str, levels: list[Any], encoder: Encoder) -> Any:
    """The closure variables of a function; functions that keep state elsewhere are refused."""
    if isinstance(function, types.FunctionType):
        if f"{function.__module__}.".startswith(TRUSTED):
            return _NOTHING
        if name := _global_stream(function):
            raise SnapshotError(f"{where} uses the global random generator '{name}'")
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if vars(function).keys() - {"__wrapped__"} or not all(_is_fixed(value) for value in defaults):
            raise SnapshotError(f"{where} is a function with data of its own (attributes or default values)")
        found = {
            name: _get_part(cell.cell_contents, f"{where} (variable '{name}')", levels, encoder)
            for name, cell in _cells(function).items()
        }
        found = {name: part for name, part in found.items() if part is not _NOTHING}
        return {"$function": found} if found else _NOTHING
    if not _is_fixed(function) and not any(getattr(function, "__self__", None) is level for level in levels):
        raise SnapshotError(f"{where} is a {type(function).__name__}, which may keep state of its own")
    return _NOTHING


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    """The closure variables of a function that have a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if name != "__class__" and cell != types.CellType()}


def _global_stream(function: types.FunctionType) -> str | None:
    names = function.__code__.co_names
    return next((name for name in names if isinstance(function.__globals__.get(name), RANDOM)), None)


def _is_fixed(value: Any) -> bool:
    """Whether a value, also a callable, is immutable."""
    if isinstance(value, functools.partial):
        return all(_is_fixed(part) for part in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, types.FunctionType):
        return not _cells(value) and not _global_stream(value)
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    if type(value) in (tuple, frozenset):
        return all(_is_fixed(item) for item in value)
    kinds = (bool, int, float, complex, str, bytes, type(None), np.ufunc, type(np.clip))
    return type(value) in kinds or isinstance(value, np.generic) or _is_constant(value)


def _check_class(cls: type[Any]) -> None:
    """Refuse a class whose methods use random generators or mutable data outside of the instance."""
    for base in cls.__mro__:
        if f"{base.__module__}.".startswith(TRUSTED):
            continue
        for name, value in vars(base).items():
            if isinstance(value, RANDOM):
                raise SnapshotError(f"{base.__qualname__}.{name} is a random generator shared by the class")
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                for variable, cell in _cells(function).items():
                    if not _is_fixed(cell.cell_contents):
                        raise SnapshotError(f"{base.__qualname__}.{name} uses '{variable}' of the code around it")
                if variable := _global_stream(function) or "":
                    raise SnapshotError(f"{base.__qualname__}.{name} uses the global random generator '{variable}'")


def _is_settable(level: Any, key: str) -> bool:
    """Whether a file may set an attribute: no methods, properties or constants."""
    own = key.isidentifier() and not key.startswith("__") and key not in CONSTANT and key not in RENDERING
    return own and not (callable(found := getattr(type(level), key, None)) or isinstance(found, property))


def _is_walked(level: Any) -> bool:
    module = type(level).__module__
    if isinstance(level, gym.Wrapper) and not set(_attributes(level)) - set(_attributes(gym.Wrapper(level.env))):
        return True  # no state of its own
    if isinstance(level, VectorEnv) and not isinstance(level, gym.vector.VectorWrapper):
        return module.startswith("gymnasium.envs.classic_control")
    return module.startswith(WALKED) and not module.startswith(UNWALKABLE)


def _modules(level: Any) -> str:
    return " ".join(cls.__module__ for cls in type(level).__mro__)


def _attributes(level: Any) -> dict[str, Any]:
    found = {**vars(level), **_slots(level)}
    return {key: value for key, value in found.items() if key not in CONSTANT and key not in RENDERING}


def _slots(level: Any) -> dict[str, Any]:
    """Values of the `__slots__` of an object's classes."""
    found = {}
    for cls in type(level).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[name] = member.__get__(level)
                except AttributeError:  # not set yet
                    found[name] = None
    return found


def _is_constant(value: Any) -> bool:
    return isinstance(value, (GymnasiumSpec, Enum, type, types.ModuleType))


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
