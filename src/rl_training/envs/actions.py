"""Maps the policy's actions to the environment's; no other module does.

For Box spaces there are three explicit ways to stay within the bounds:

- `clip`: the policy's action is in the environment's units and is clipped to the bounds;
- `rescale`: the policy's action is clipped to [-1, 1] and mapped linearly to the bounds;
- `squash`: the policy's action is unbounded, tanh maps it to [-1, 1], and then it is mapped linearly. Buffers store
  the action before tanh: its density differs from that of the squashed action by a factor that does not depend on the
  parameters, so ratios and gradients of log-probabilities are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import SpaceError
from rl_training.contracts.spec import BoxActions

SQUASH_LIMIT = 1.0 - 1e-6
"""Recorded actions at the bounds have no finite inverse of tanh; this is the nearest one that is used."""
CLIP_WIDTH = 4.0
"""Half-width of bounds from which `clip_problem` calls them wide."""


class ActionMap:
    """Maps batches [N, ...] of policy actions to the dtype, offset and bounds of an action space.

    Example:
        >>> ActionMap(spaces.Box(-2.0, 2.0, (1,)), "rescale").to_env(np.array([[0.5]]))
        array([[1.]], dtype=float32)
    """

    def __init__(self, space: spaces.Space[Any], box_actions: BoxActions = "clip") -> None:
        self.space = space
        self.box_actions = box_actions
        self.offset: Any = 0
        self.low: Any = 0
        self.high: Any = 0
        self._half_width: Any = 0
        self._is_integer = False
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            self.offset = space.start
        elif isinstance(space, spaces.Box):
            if box_actions != "clip" and not space.is_bounded("both"):
                raise SpaceError(
                    f"box_actions '{box_actions}' needs finite bounds, got {space}. Give the environment finite ones: "
                    "gymnasium.wrappers.TransformAction(env, lambda action: action, Box(low, high, shape)). "
                    "PPO, A2C and TRPO also take infinite ones, with box_actions='clip'."
                )
            # the width of an integer space does not fit into its own dtype: 127 - -128 in int8
            self._is_integer = np.issubdtype(space.dtype, np.integer)
            self.low = space.low.astype(np.float64) if self._is_integer else space.low
            self.high = space.high.astype(np.float64) if self._is_integer else space.high
            if box_actions != "clip":
                self._half_width = 0.5 * (self.high - self.low)
        elif not isinstance(space, spaces.MultiBinary):
            raise SpaceError(f"actions of {type(space).__name__} are not supported: {space}")

    def problem(self) -> str | None:
        """See `clip_problem`; None for the other ways."""
        return clip_problem(self.space) if self.box_actions == "clip" else None

    def to_env(self, action: AnyArray) -> AnyArray:
        """Actions as the environment expects them."""
        space = self.space
        if not isinstance(space, spaces.Box):
            shifted: AnyArray = (action + self.offset).astype(space.dtype, copy=False)
            return shifted
        if self.box_actions != "clip":
            unit = np.tanh(action) if self.box_actions == "squash" else _clip(action, -1.0, 1.0)
            action = self.low + (unit + 1.0) * self._half_width
        # after mapping as well: float32 arithmetic may leave the bounds by one unit in the last place
        bounded = _clip(action, self.low, self.high)
        if self._is_integer:
            bounded = np.rint(bounded)
        return bounded.astype(space.dtype, copy=False)

    def to_policy(self, action: AnyArray) -> AnyArray:
        """The inverse of `to_env`, for recorded actions; those outside of the bounds are clipped.

        Example:
            >>> ActionMap(spaces.Box(-2.0, 2.0, (1,)), "rescale").to_policy(np.array([[1.0]])).tolist()
            [[0.5]]
        """
        if not isinstance(self.space, spaces.Box):
            shifted: AnyArray = np.asarray(action - self.offset).astype(np.int64)
            return shifted
        bounded = _clip(action, self.low, self.high)
        if self.box_actions == "clip":
            return bounded.astype(np.float32)
        unit = _clip((bounded - self.low) / self._half_width - 1.0, -1.0, 1.0)
        if self.box_actions == "squash":
            unit = np.arctanh(_clip(unit, -SQUASH_LIMIT, SQUASH_LIMIT))
        return unit.astype(np.float32)

    def log_slope(self, action: AnyArray) -> AnyArray:
        """Logarithm [N] of the volume of environment actions per volume of policy actions [N, ...].

        Subtract it from the log-density of policy actions to get that of the environment's.

        Example:
            >>> ActionMap(spaces.Box(-2.0, 2.0, (1,)), "rescale").log_slope(np.array([[0.5]])).round(4).tolist()
            [0.6931]
        """
        rows = len(action)
        if not isinstance(self.space, spaces.Box) or self.box_actions == "clip":
            return np.zeros(rows)
        slope = np.broadcast_to(np.log(self._half_width), action.shape).reshape(rows, -1).sum(1)
        if self.box_actions == "squash":
            slope = slope + np.log1p(-np.square(np.tanh(action))).reshape(rows, -1).sum(1)
        return np.asarray(slope)


def clip_problem(space: spaces.Space[Any]) -> str | None:
    """Why `clip` suits the bounds badly, or None: the first actions of a Gaussian policy are about 0, give or take 1.

    Example:
        >>> clip_problem(spaces.Box(-1.0, 1.0, (2,))), clip_problem(spaces.Box(0.0, 10.0, (1,)))[:40]
        (None, "box_actions: is 'clip', but the bounds B")
    """
    if not isinstance(space, spaces.Box) or not space.is_bounded("both"):
        return None
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    middle, half = (low + high) / 2, (high - low) / 2
    if not np.any((half > CLIP_WIDTH) | (np.abs(middle) > half / 2)):
        return None
    return (
        f"box_actions: is 'clip', but the bounds {space} are wide or not symmetric. The first actions are about 0, "
        "give or take 1, and reach only a part of them: consider box_actions='rescale'"
    )


def _clip(x: AnyArray, low: Any, high: Any) -> AnyArray:
    """Like `np.clip`, but faster on small arrays."""
    bounded: AnyArray = np.minimum(np.maximum(x, low), high)
    return bounded
