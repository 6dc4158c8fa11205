"""Action masks of environments, in `obs["action_mask"]` or `info["action_mask"]`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from rl_training.contracts.arrays import AnyArray, BoolArray
from rl_training.contracts.errors import EnvError, SpaceError
from rl_training.contracts.spec import ACTION_MASK

SingleEnv = gym.Env[Any, Any]
NO_CHOICE = "the action mask leaves no valid action"


def mask_size(action_space: spaces.Space[Any]) -> int:
    """Length of a mask: the number of actions; for MultiDiscrete, the sum over its dimensions."""
    if isinstance(action_space, spaces.Discrete):
        return int(action_space.n)
    if isinstance(action_space, spaces.MultiDiscrete):
        return int(action_space.nvec.sum())
    raise SpaceError(f"action_masks: needs Discrete or MultiDiscrete actions, got {action_space}")


def has_choice(mask: AnyArray, action_space: spaces.Space[Any]) -> BoolArray:
    """Which masks [..., A] leave a valid action; for MultiDiscrete, one in every dimension.

    Example:
        >>> has_choice(np.array([[1, 0, 0, 1], [1, 1, 0, 0]]), spaces.MultiDiscrete([2, 2])).tolist()
        [True, False]
    """
    sizes = action_space.nvec.reshape(-1) if isinstance(action_space, spaces.MultiDiscrete) else [mask.shape[-1]]
    choices = np.split(mask.astype(np.bool_), np.cumsum(sizes)[:-1], axis=-1)
    return np.asarray(np.all([choice.any(axis=-1) for choice in choices], axis=0), np.bool_)


def check_mask_space(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
    """Refuse observations whose mask is missing or has another size than the actions."""
    size = mask_size(action_space)
    part = observation_space.spaces.get(ACTION_MASK) if isinstance(observation_space, spaces.Dict) else None
    if part is None or part.shape != (size,):
        raise SpaceError(
            f"action_masks: needs observations with an entry '{ACTION_MASK}' of shape ({size},), "
            f"got {observation_space}"
        )


class ActionMask(gym.Wrapper[Any, Any, Any, Any]):
    """Puts the mask into the observation, from `info` if the observation has none, and checks it.

    An observation that is not a Dict becomes one, with the entries `observation` and `action_mask`.
    """

    def __init__(self, env: SingleEnv) -> None:
        super().__init__(env)
        self.size = mask_size(env.action_space)
        space = env.observation_space
        self.is_dict = isinstance(space, spaces.Dict)
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
        self.from_info = ACTION_MASK not in parts
        if self.from_info:
            self.observation_space = spaces.Dict({**parts, ACTION_MASK: spaces.MultiBinary(self.size)})
        check_mask_space(self.observation_space, env.action_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(obs, info, needed=True), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(obs, info, needed=not terminated), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: dict[str, Any], needed: bool) -> Any:
        """The observation with its mask; after termination no action follows, so the mask may be missing."""
        given = info.get(ACTION_MASK) if self.from_info else obs[ACTION_MASK]
        if given is None and needed:
            raise EnvError(f"action_masks is true, but the environment's info has no '{ACTION_MASK}'")
        mask = np.ones(self.size, np.bool_) if given is None else np.asarray(given).astype(np.bool_)
        if mask.shape != (self.size,):
            raise EnvError(f"the action mask has shape {mask.shape}, expected ({self.size},)")
        if needed and not has_choice(mask, self.env.action_space):
            raise EnvError(NO_CHOICE)
        if not self.from_info:
            return obs
        return {**(obs if self.is_dict else {"observation": obs}), ACTION_MASK: mask.astype(np.int8)}


class CheckedMasks(VectorWrapper):
    """Refuses masks without a valid action in the observations of an existing vector environment."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        check_mask_space(env.single_observation_space, env.single_action_space)
        super().__init__(env)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.vector.VectorEnv.reset`."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._check(obs[ACTION_MASK])
        return obs, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """See `gymnasium.vector.VectorEnv.step`."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        masks = obs[ACTION_MASK]
        reset_already = self.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
        self._check(masks if reset_already else masks[~np.asarray(terminated, np.bool_)])
        return obs, reward, terminated, truncated, info

    def _check(self, masks: AnyArray) -> None:
        if not has_choice(masks, self.single_action_space).all():
            raise EnvError(NO_CHOICE)
