"""Wrappers that a config may name. Only registered names are accepted, so a config file cannot import code."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import ConfigError, MissingExtraError
from rl_training.contracts.images import ImageLayout, image_layout, is_image
from rl_training.contracts.spec import FrameStack
from rl_training.envs.rendering import rendering_hint

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
    "MaxAndSkipObservation",
    "RescaleAction",
    "RescaleObservation",
    "ReshapeObservation",
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
        except MissingExtraError:
            raise
        except Exception as error:
            raise ConfigError(f"wrappers: {wrapper.name}: {error}{rendering_hint(error)}") from error
    return env


_SAME_OBSERVATIONS = ("ClipAction", "ClipReward", "RescaleAction", "StickyAction", "TimeLimit")
"""Wrappers that pass on every observation unchanged."""


def stack_of(wrappers: list[WrapperConfig], inside: FrameStack | None = None) -> FrameStack | None:
    """The frame stack of the outermost observations; None if there is none that the replay buffer can undo.

    `inside` is the frame stack without any wrapper.
    """
    for wrapper in reversed(wrappers):
        if wrapper.name in _SAME_OBSERVATIONS:
            continue
        padding = wrapper.kwargs.get("padding_type", "reset")
        if wrapper.name != "FrameStackObservation" or padding not in ("reset", "zero"):
            return None
        return FrameStack(int(wrapper.kwargs["stack_size"]), "first" if padding == "reset" else "zero")
    return inside


def _as_tuples(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples: YAML has no tuples, and wrappers need them for shapes."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}


@register_wrapper("ActionRepeat")
class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats each action several times, or until the episode ends, and returns the sum of the rewards.

    Example:
        >>> env = ActionRepeat(gym.make("Pendulum-v1"), num_repeats=2)  # episodes of 100 steps instead of 200
    """

    def __init__(self, env: gym.Env[Any, Any], num_repeats: int) -> None:
        super().__init__(env)
        if num_repeats < 1:
            raise ValueError(f"num_repeats must be at least 1, got {num_repeats}")
        self.num_repeats = num_repeats
        if "render_fps" in env.metadata:  # a video has one frame per step
            self.metadata = {**env.metadata, "render_fps": env.metadata["render_fps"] / num_repeats}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`; observation and info are the last ones."""
        obs, total, terminated, truncated, info = self.env.step(action)
        for _ in range(self.num_repeats - 1):
            if terminated or truncated:
                break
            obs, reward, terminated, truncated, info = self.env.step(action)
            total = float(total) + float(reward)
        return obs, float(total), terminated, truncated, info


class ImageWrapper(gym.ObservationWrapper[Any, Any, Any]):
    """Base of wrappers that transform images: all images of a Dict, or the entries in `keys`.

    Gymnasium's wrappers take one image with channels last; with channels first, its `ResizeObservation` would resize
    channels and height. These wrappers support and keep all layouts that encoders support, and give the same pixels.
    """

    def __init__(self, env: gym.Env[Any, Any], keys: str | Sequence[str] | None) -> None:
        super().__init__(env)
        self.keys: tuple[str, ...] | None = None
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            if keys is not None:
                raise ValueError(f"keys: need a Dict observation space, got {space}")
            self.observation_space = self.changed_space(_image_space(space, "the observation"))
            return
        if keys is None:
            keys = [key for key, part in space.spaces.items() if is_image(part)]
        self.keys = (keys,) if isinstance(keys, str) else tuple(keys)
        if not self.keys or not set(self.keys) <= set(space.spaces):
            raise ValueError(f"keys: expected images among {list(space.spaces)}, got {list(self.keys)} of {space}")
        images = {key: self.changed_space(_image_space(space[key], f"'{key}'")) for key in self.keys}
        self.observation_space = spaces.Dict([(key, images.get(key, part)) for key, part in space.spaces.items()])

    def observation(self, observation: Any) -> Any:
        """See `gymnasium.ObservationWrapper.observation`."""
        space = self.env.observation_space
        if self.keys is None:
            return self.changed(observation, image_layout(space))
        assert isinstance(space, spaces.Dict)
        images = {key: self.changed(observation[key], image_layout(space[key])) for key in self.keys}
        return {**observation, **images}

    def changed_space(self, space: spaces.Box) -> spaces.Box:
        """The space of a transformed image."""
        raise NotImplementedError

    def changed(self, image: AnyArray, layout: ImageLayout) -> AnyArray:
        """The transformed image."""
        raise NotImplementedError


def _image_space(space: spaces.Space[Any], name: str) -> spaces.Box:
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3, 4):
        return space
    raise ValueError(f"{name} is not an image (a Box of uint8 with 2, 3 or 4 dimensions); got {space}")


@register_wrapper("ResizeObservation")
class ResizeObservation(ImageWrapper):
    """Resizes the height and width of images; the dimensions of channels and stacked frames stay in place.

    Example:
        >>> env = ResizeObservation(gym.make("CarRacing-v3"), shape=(84, 84))  # doctest: +SKIP
    """

    def __init__(self, env: gym.Env[Any, Any], shape: tuple[int, int], keys: str | Sequence[str] | None = None) -> None:
        try:
            import cv2  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("ResizeObservation", "atari") from error
        if not isinstance(shape, tuple) or len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
            raise ValueError(f"shape: expected height and width, such as [84, 84], got {shape!r}")
        self.shape = shape
        super().__init__(env, keys)

    def changed_space(self, space: spaces.Box) -> spaces.Box:
        """See `ImageWrapper.changed_space`."""
        shape = list(space.shape)
        *_, height, width = image_layout(space).order
        shape[height - 1], shape[width - 1] = self.shape
        return spaces.Box(space.low.min(), space.high.max(), tuple(shape), np.uint8)

    def changed(self, image: AnyArray, layout: ImageLayout) -> AnyArray:
        """See `ImageWrapper.changed`: area interpolation."""
        import cv2

        order = [dim - 1 for dim in layout.order[1:]]
        in_front = image.transpose(order)
        height, width = self.shape
        # plane by plane, because OpenCV takes no more than four channels
        planes = [cv2.resize(p, (width, height), interpolation=cv2.INTER_AREA) for p in _planes(in_front)]
        resized: AnyArray = np.stack(planes).reshape(*in_front.shape[:-2], height, width)
        return np.ascontiguousarray(resized.transpose(np.argsort(order)))


def _planes(images: AnyArray) -> AnyArray:
    return images.reshape(-1, *images.shape[-2:])


_LUMINANCE = np.array([0.2125, 0.7154, 0.0721])
"""Weights of red, green and blue, as in Gymnasium's wrapper."""


@register_wrapper("GrayscaleObservation")
class GrayscaleObservation(ImageWrapper):
    """Converts colour images to greyscale; removes the channel dimension, or keeps it with size 1.

    Example:
        >>> env = GrayscaleObservation(gym.make("CarRacing-v3"), keep_dim=True)  # doctest: +SKIP
    """

    def __init__(self, env: gym.Env[Any, Any], keep_dim: bool = False, keys: str | Sequence[str] | None = None) -> None:
        self.keep_dim = keep_dim
        super().__init__(env, keys)

    def changed_space(self, space: spaces.Box) -> spaces.Box:
        """See `ImageWrapper.changed_space`."""
        colours, shape = image_layout(space).channel_dim, list(space.shape)
        if colours is None or shape[colours] != 3:
            raise ValueError(f"expected images with 3 channels (red, green, blue), got {space}; `keys` chooses images")
        shape[colours : colours + 1] = [1] * self.keep_dim
        return spaces.Box(0, space.high.max(), tuple(shape), np.uint8)

    def changed(self, image: AnyArray, layout: ImageLayout) -> AnyArray:
        """See `ImageWrapper.changed`."""
        assert layout.channel_dim is not None
        colours = np.moveaxis(image, layout.channel_dim, -1)
        grey: AnyArray = np.multiply(colours, _LUMINANCE).sum(axis=-1).astype(np.uint8)
        return np.expand_dims(grey, layout.channel_dim) if self.keep_dim else grey


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
    """Removes velocities from observations: partial observability, a task for recurrent policies.

    Example:
        >>> HideVelocity(gym.make("CartPole-v1")).observation_space.shape
        (2,)
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        env_id = env.spec.id if env.spec is not None else str(env)
        if env_id not in _VELOCITIES:
            raise ValueError(
                f"the velocities of '{env_id}' are not known; supported environments: {', '.join(_VELOCITIES)}"
            )
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        self.kept = [entry for entry in range(space.shape[0]) if entry not in _VELOCITIES[env_id]]
        self.observation_space = spaces.Box(space.low[self.kept], space.high[self.kept], dtype=space.dtype.type)

    def observation(self, observation: Any) -> Any:
        """See `gymnasium.ObservationWrapper.observation`."""
        return observation[self.kept]
