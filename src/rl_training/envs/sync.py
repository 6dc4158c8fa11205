"""Environments that are stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training.contracts.arrays import AnyArray


class Infos(Mapping[str, Any]):
    """Infos of single environments, merged into Gymnasium's vector format on first access.

    They are rarely read, and merging them would take half of the time of a MuJoCo step.
    """

    def __init__(self, add: Callable[..., dict[str, Any]], parts: list[tuple[int, dict[str, Any]]]) -> None:
        self._add = add
        self._parts = parts
        self._found: dict[str, Any] = {}

    def _all(self) -> dict[str, Any]:
        while self._parts:
            i, info = self._parts.pop(0)
            self._found = self._add(self._found, info, i)
        return self._found

    def __getitem__(self, key: str) -> Any:
        """An entry, as an array over all environments."""
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        """The names of all entries."""
        return iter(self._all())

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._all())


class SequentialVectorEnv(SyncVectorEnv):
    """Gymnasium's `SyncVectorEnv` with a faster `step`.

    Gymnasium's `step` costs as much as CartPole itself: it copies every array once more than needed, and recomputes
    constants for each environment. The fast path applies without autoreset, to observations and actions that are one
    array. In all other cases the fallback is Gymnasium's `step`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        containers = (spaces.Dict, spaces.Tuple, spaces.Graph, spaces.Sequence, spaces.OneOf, spaces.Text)
        is_plain = not isinstance(self.single_observation_space, containers)
        is_plain = is_plain and not isinstance(self.single_action_space, containers)
        self._is_quick = is_plain and self.autoreset_mode == AutoresetMode.DISABLED
        self._shape: Any = self.observation_space.shape
        self._dtype: Any = self.observation_space.dtype
        self._single_shape: Any = self.single_observation_space.shape

    def step(self, actions: Any) -> tuple[Any, AnyArray, AnyArray, AnyArray, Any]:
        """See `SyncVectorEnv.step`; the caller owns the returned arrays."""
        if not self._is_quick or len(actions) != self.num_envs or np.count_nonzero(self._autoreset_envs):
            return super().step(actions)
        seen: list[Any] = self._env_obs
        obs, rewards = np.empty(self._shape, self._dtype), np.empty(self.num_envs, np.float64)
        terminated, truncated = np.empty(self.num_envs, np.bool_), np.empty(self.num_envs, np.bool_)
        infos: list[tuple[int, dict[str, Any]]] = []
        is_array = True
        for i, env in enumerate(self.envs):
            seen[i], rewards[i], terminated[i], truncated[i], info = env.step(actions[i])
            is_array = is_array and getattr(seen[i], "shape", ()) == self._single_shape
            if is_array:
                obs[i] = seen[i]
            if info:
                infos.append((i, info))
        if not is_array:  # lists, or wrong shapes, which numpy refuses
            np.stack(seen, out=obs)
        self._rewards, self._terminations, self._truncations = rewards, terminated, truncated
        self._autoreset_envs = terminated | truncated
        return obs, rewards.copy(), terminated.copy(), truncated.copy(), Infos(self._add_info, infos)
