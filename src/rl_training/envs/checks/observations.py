"""Checks of spaces, and of observations against their space."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_training.envs.checks.findings import Level, Report

SUPPORTED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
SUPPORTED_NAMES = "Box, Discrete, MultiDiscrete and MultiBinary"


def get_space(env: Any, name: str, report: Report) -> spaces.Space[Any]:
    """A space of an environment; fatal if it has none."""
    space = getattr(env, name, None)
    if not isinstance(space, spaces.Space):
        raise report.fatal("spaces", f"{name} must be a gymnasium.spaces.Space, got {space!r}")
    return space


def check_spaces(observation_space: spaces.Space[Any], action_space: spaces.Space[Any], report: Report) -> None:
    """Whether the package supports the spaces (of a single environment)."""
    nested = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {None: observation_space}
    for key, part in nested.items():
        name = "the observation space" if key is None else f"observation '{key}'"
        if isinstance(part, spaces.Dict):
            report.add("error", "spaces", f"{name} is a Dict inside a Dict; only one level is supported: flatten it")
        elif not isinstance(part, SUPPORTED):
            report.add(
                "error",
                "spaces",
                f"{name} is a {type(part).__name__}, which is not supported. Supported are {SUPPORTED_NAMES}, and a "
                "Dict of these; gymnasium.wrappers.FlattenObservation turns many other spaces into a Box",
            )
    if not isinstance(action_space, SUPPORTED):
        kind = type(action_space).__name__
        message = f"the action space is a {kind}, which is not supported. Supported are {SUPPORTED_NAMES}"
        report.add("error", "spaces", message)
    elif isinstance(action_space, spaces.Box) and not action_space.is_bounded("both"):
        report.add(
            "warning",
            "spaces",
            f"the action space {action_space} has infinite bounds: algorithms that rescale or squash actions cannot "
            "use it. Give it finite bounds",
        )


def check_observation(space: spaces.Space[Any], obs: Any, report: Report, source: str, name: str = "") -> None:
    """Report the first thing that is wrong with an observation, or with each entry of a dict observation."""
    if isinstance(space, spaces.Dict) and isinstance(obs, Mapping) and set(obs) == set(space.spaces):
        for key, part in space.spaces.items():
            check_observation(part, obs[key], report, source, f"{name} '{key}'")
        return
    problem = _dict_problem(space, obs) if isinstance(space, spaces.Dict) else _problem(space, obs)
    if problem is not None:
        level, kind, text = problem
        report.add(level, "observation", f"the observation{name} returned by {source} {text}", f"{kind}{name}")


Problem = tuple[Level, str, str]
"""Level, kind (each is reported once) and the end of a sentence that begins with 'the observation'."""


def _dict_problem(space: spaces.Dict, obs: Any) -> Problem:
    found = f"the keys {sorted(map(str, obs))}" if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
    return "error", "keys", f"must be a dict with the keys {sorted(space.spaces)}, got {found}"


def _problem(space: spaces.Space[Any], obs: Any) -> Problem | None:
    """The first of: type, shape, kind of dtype, finiteness, range, exact dtype."""
    if not isinstance(space, SUPPORTED):
        return None if space.contains(obs) else ("error", "range", f"is not in its space {space}")
    scalar = space.shape == ()
    if not isinstance(obs, np.ndarray) and not (scalar and isinstance(obs, (numbers.Real, np.generic))):
        expected = "a number" if scalar else f"a numpy array of dtype {space.dtype}"
        return "error", "type", f"must be {expected}, got a {type(obs).__name__}"
    value, dtype = np.asarray(obs), np.dtype(space.dtype)
    if value.shape != space.shape:
        return "error", "shape", f"has shape {value.shape}, its space says {space.shape}"
    dtypes = f"has dtype {value.dtype}, its space says {dtype}"
    advice = f"Return obs.astype(np.{dtype}), or change the space"
    if not np.can_cast(value.dtype, dtype, "same_kind"):
        return "error", "dtype", f"{dtypes}: the cast would lose values. {advice}"
    if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
        found = "NaN" if np.isnan(value).any() else "infinite values"
        return "error", "finite", f"has {found}, which networks cannot learn from"
    out_of_range = _range_problem(space, value.astype(dtype))
    if out_of_range is None and isinstance(obs, np.ndarray) and value.dtype != dtype:
        return "warning", "dtype", f"{dtypes}: it is cast silently. {advice}"
    return out_of_range


def _range_problem(space: spaces.Space[Any], value: np.ndarray[Any, Any]) -> Problem | None:
    if not isinstance(space, spaces.Box):
        inside = space.contains(value if value.ndim else value.item())
        return None if inside else ("error", "range", f"is {value}, which is not in its space {space}")
    outside = (value < space.low) | (value > space.high)
    if not outside.any():
        return None
    index = tuple(int(i) for i in np.argwhere(outside)[0])
    bounds = f"[{space.low[index]}, {space.high[index]}]"
    return "warning", "range", f"is outside its space: entry {index} is {value[index]}, the bounds are {bounds}"
