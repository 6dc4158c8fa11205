"""Environments that are stepped one after the other in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training.contracts.arrays import AnyArray


class SequentialVectorEnv(SyncVectorEnv):
    """Gymnasium's `SyncVectorEnv` with a shorter way from an environment's step to the arrays that are returned.

    Environments are cheap, and Gymnasium's way costs as much as CartPole itself: it copies every array once more than
    we need, and finds out anew for each environment what does not change. It is taken here only where it differs:
    without autoreset, for observations and actions that are one array. All else is Gymnasium's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        containers = (spaces.Dict, spaces.Tuple, spaces.Graph, spaces.Sequence, spaces.OneOf, spaces.Text)
        is_plain = not isinstance(self.single_observation_space, containers)
        is_plain = is_plain and not isinstance(self.single_action_space, containers)
        self._is_quick = is_plain and self.autoreset_mode == AutoresetMode.DISABLED
        self._shape: Any = self.observation_space.shape
        self._dtype: Any = self.observation_space.dtype

    def step(self, actions: Any) -> tuple[Any, AnyArray, AnyArray, AnyArray, dict[str, Any]]:
        """See `SyncVectorEnv.step`; the arrays returned are nobody else's."""
        if not self._is_quick or len(actions) != self.num_envs or self._autoreset_envs.any():
            return super().step(actions)
        seen: list[Any] = self._env_obs
        rewards = np.empty(self.num_envs, np.float64)
        terminated, truncated = np.empty(self.num_envs, np.bool_), np.empty(self.num_envs, np.bool_)
        infos: dict[str, Any] = {}
        for i, env in enumerate(self.envs):
            seen[i], rewards[i], terminated[i], truncated[i], info = env.step(actions[i])
            if info:
                infos = self._add_info(infos, info, i)
        self._rewards, self._terminations, self._truncations = rewards, terminated, truncated
        self._autoreset_envs = terminated | truncated
        obs = np.stack(seen, out=np.empty(self._shape, self._dtype))
        return obs, rewards.copy(), terminated.copy(), truncated.copy(), infos
