"""Wrappers that a config may name. Only registered names are accepted, so a config file cannot import code."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from rl_training.contracts.errors import ConfigError

WrapperFactory = Callable[..., "gym.Env[Any, Any]"]

_GYMNASIUM = (
    "ClipAction",
    "ClipReward",
    "DelayObservation",
    "DtypeObservation",
    "FilterObservation",
    "FlattenObservation",
    "FrameStackObservation",
    "GrayscaleObservation",
    "MaxAndSkipObservation",
    "RescaleAction",
    "RescaleObservation",
    "ReshapeObservation",
    "ResizeObservation",
    "StickyAction",
    "TimeAwareObservation",
    "TimeLimit",
)

_WRAPPERS: dict[str, WrapperFactory] = {name: getattr(gym.wrappers, name) for name in _GYMNASIUM}


@dataclass
class WrapperConfig:
    """One wrapper: its registered name and its keyword arguments."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


def register_wrapper(name: str) -> Callable[[WrapperFactory], WrapperFactory]:
    """Make a wrapper available to configs under a name.

    Example:
        >>> @register_wrapper("HalveReward")
        ... class HalveReward(gym.RewardWrapper):
        ...     def reward(self, reward):
        ...         return reward / 2
    """

    def register(factory: WrapperFactory) -> WrapperFactory:
        _WRAPPERS[name] = factory
        return factory

    return register


def wrapper_names() -> list[str]:
    """Names that configs may use."""
    return sorted(_WRAPPERS)


def wrapper_problem(name: str) -> str | None:
    """Why a wrapper's name is not accepted, or None."""
    if name in _WRAPPERS:
        return None
    near = difflib.get_close_matches(name, _WRAPPERS, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"unknown wrapper '{name}'.{hint} Known: {', '.join(wrapper_names())}"


def apply_wrappers(env: gym.Env[Any, Any], wrappers: list[WrapperConfig]) -> gym.Env[Any, Any]:
    """Wrap from the first (innermost) to the last (outermost)."""
    for wrapper in wrappers:
        problem = wrapper_problem(wrapper.name)
        if problem:
            raise ConfigError(f"wrappers: {problem}")
        try:
            kwargs = _as_tuples(wrapper.kwargs)
            env = _WRAPPERS[wrapper.name](env, **kwargs)
        except Exception as error:
            raise ConfigError(f"wrappers: {wrapper.name}: {error}") from error
    return env


def _as_tuples(kwargs: dict[str, Any]) -> dict[str, Any]:
    """YAML has no tuples, and wrappers want them for shapes."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}
