"""Wrappers that a config may name. Only registered names are accepted, so a config file cannot import code."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.spec import FrameStack

WrapperFactory = Callable[..., "gym.Env[Any, Any]"]

_GYMNASIUM = (
    "AddRenderObservation",
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


def stack_of(wrapper: WrapperConfig) -> FrameStack | None:
    """What a wrapper makes of observations, if it stacks them in a way that replay can undo."""
    padding = wrapper.kwargs.get("padding_type", "reset")
    if wrapper.name != "FrameStackObservation" or padding not in ("reset", "zero"):
        return None
    return FrameStack(int(wrapper.kwargs["stack_size"]), "first" if padding == "reset" else "zero")


def _as_tuples(kwargs: dict[str, Any]) -> dict[str, Any]:
    """YAML has no tuples, and wrappers want them for shapes."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}


@register_wrapper("ActionRepeat")
class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Takes each action several times, or until the episode ends, and gives the sum of the rewards.

    Example:
        >>> env = ActionRepeat(gym.make("Pendulum-v1"), num_repeats=2)  # episodes of 100 steps instead of 200
    """

    def __init__(self, env: gym.Env[Any, Any], num_repeats: int) -> None:
        super().__init__(env)
        if num_repeats < 1:
            raise ValueError(f"num_repeats must be at least 1, got {num_repeats}")
        self.num_repeats = num_repeats

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`; observation and info are the last ones."""
        obs, total, terminated, truncated, info = self.env.step(action)
        for _ in range(self.num_repeats - 1):
            if terminated or truncated:
                break
            obs, reward, terminated, truncated, info = self.env.step(action)
            total = float(total) + float(reward)
        return obs, float(total), terminated, truncated, info


_VELOCITIES = {
    "CartPole-v1": (1, 3),
    "LunarLander-v3": (2, 3, 5),
    "MountainCar-v0": (1,),
    "MountainCarContinuous-v0": (1,),
    "Pendulum-v1": (2,),
}
"""Entries of the observation that are velocities."""


@register_wrapper("HideVelocity")
class HideVelocity(gym.ObservationWrapper[Any, Any, Any]):
    """Observations without their velocities, so that one of them does not tell how things go on: a task for memory.

    Example:
        >>> HideVelocity(gym.make("CartPole-v1")).observation_space.shape
        (2,)
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        env_id = env.spec.id if env.spec is not None else str(env)
        if env_id not in _VELOCITIES:
            raise ValueError(f"the velocities of '{env_id}' are not known; known are those of {', '.join(_VELOCITIES)}")
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        self.kept = [entry for entry in range(space.shape[0]) if entry not in _VELOCITIES[env_id]]
        self.observation_space = spaces.Box(space.low[self.kept], space.high[self.kept], dtype=space.dtype.type)

    def observation(self, observation: Any) -> Any:
        """See `gymnasium.ObservationWrapper.observation`."""
        return observation[self.kept]
