"""Goal environments as in Gymnasium-Robotics: observations with goals, and rewards as a function of goals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import EnvError, NonFiniteError, SpaceError
from rl_training.envs.vector import AnyVectorEnv

GOAL_KEYS = ("achieved_goal", "desired_goal", "observation")
PROBE_ROWS = 16


class GoalFunction:
    """`compute_reward(achieved, desired, info)` or `compute_terminated`, for a batch of goals.

    Some environments accept only one goal per call. The first call tests this: if a batch gives one number per row,
    equal to the results row by row, later calls pass whole batches. `info` is empty, since the replay buffer does not
    store it.
    """

    def __init__(self, function: Callable[[Any, Any, Any], Any], name: str) -> None:
        self.function, self.name = function, name
        self.vectorized: bool | None = None

    def __call__(self, achieved: AnyArray, desired: AnyArray) -> AnyArray:
        """One number per row, from goals [M, ...]."""
        if self.vectorized is None and len(achieved) > 1:
            self.vectorized = self._takes_batches(achieved[:PROBE_ROWS], desired[:PROBE_ROWS])
        values = self._batch(achieved, desired) if self.vectorized else self._rows(achieved, desired)
        finite = np.isfinite(values)
        if np.count_nonzero(finite) < values.size:
            row = int(np.argmin(finite))
            raise NonFiniteError(
                f"the environment's {self.name} returned a number that is not finite in float32, for the goals "
                f"{achieved[row]} (achieved) and {desired[row]} (desired)"
            )
        return values

    def _takes_batches(self, achieved: AnyArray, desired: AnyArray) -> bool:
        rows = self._rows(achieved, desired)
        try:
            batch = self._batch(achieved, desired)
        except Exception:  # any exception means that it does not accept batches
            return False
        return batch.shape == rows.shape and np.array_equal(batch, rows)

    def _batch(self, achieved: AnyArray, desired: AnyArray) -> AnyArray:
        return _as_float32(self.function(achieved, desired, [{} for _ in achieved]))

    def _rows(self, achieved: AnyArray, desired: AnyArray) -> AnyArray:
        try:
            values = [float(self.function(a, d, {})) for a, d in zip(achieved, desired, strict=True)]
        except Exception as error:
            raise EnvError(
                f"the environment's {self.name} raised {type(error).__name__}: {error}. It is called with two goals "
                "and an empty info, because the replay buffer does not store infos"
            ) from error
        return _as_float32(values)


def _as_float32(values: Any) -> AnyArray:
    with np.errstate(over="ignore"):  # the caller refuses infinity
        return np.asarray(values, np.float32)


def check_goal_space(space: spaces.Space[Any], env_id: str) -> None:
    """Refuse observations without goals."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {}
    if set(GOAL_KEYS) - parts.keys() or parts["achieved_goal"].shape != parts["desired_goal"].shape:
        raise SpaceError(
            f"her needs a Dict observation space with {', '.join(GOAL_KEYS)}, where both goals have the same shape; "
            f"got {space} from '{env_id}'"
        )


def goal_functions(env: AnyVectorEnv, env_id: str) -> tuple[GoalFunction, GoalFunction | None]:
    """The environment's `compute_reward`, and its `compute_terminated` if it has one."""
    if isinstance(env.unwrapped, SyncVectorEnv):
        single: Any = env.unwrapped.envs[0]
    elif isinstance(env.unwrapped, AsyncVectorEnv):
        single = env.unwrapped.env_fns[0]()  # one more, here: a call to a worker for every batch would be slow
    else:
        single = env
    reward, terminated = (_find(single, name) for name in ("compute_reward", "compute_terminated"))
    if reward is None:
        raise EnvError(
            f"her needs an environment with a method compute_reward(achieved_goal, desired_goal, info); "
            f"'{env_id}' has none"
        )
    ends = None if terminated is None else GoalFunction(terminated, "compute_terminated")
    return GoalFunction(reward, "compute_reward"), ends


def _find(env: Any, name: str) -> Any:
    try:
        return env.get_wrapper_attr(name)
    except AttributeError:
        return getattr(env, name, None)
