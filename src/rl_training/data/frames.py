"""Frame stacks: helpers with which the replay buffer stores each frame once."""

from __future__ import annotations

import numpy as np

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray, map_observation
from rl_training.contracts.errors import DataError
from rl_training.contracts.spec import FrameStack


def newest(stacks: ArrayObservation) -> ArrayObservation:
    """The newest frames [N, ...] of stacks [N, K, ...]."""
    return map_observation(lambda x: x[:, -1], stacks)


def follow(stacks: ArrayObservation, later: ArrayObservation) -> BoolArray:
    """Which of `later` [N] continue `stacks` by one frame."""
    return equal(map_observation(lambda x: x[:, 1:], stacks), map_observation(lambda x: x[:, :-1], later))


def begin(stacks: ArrayObservation, stack: FrameStack) -> BoolArray:
    """Which stacks [N] hold a single frame and padding: the first frame of an episode."""
    older = map_observation(lambda x: x[:, :-1], stacks)
    if stack.padding == "zero":
        return equal(older, map_observation(np.zeros_like, older))
    return equal(older, map_observation(lambda x: np.broadcast_to(x[:, -1:], x[:, :-1].shape), stacks))


def check(found: BoolArray, stack: FrameStack) -> None:
    """Refuse observations that are not frame stacks as declared."""
    if not found.all():
        raise DataError(
            f"observations should be stacks of the last {stack.size} frames, but environment "
            f"{int(np.flatnonzero(~found)[0])} returned one that neither continues the one before it nor begins an "
            "episode"
        )


def equal(a: ArrayObservation, b: ArrayObservation) -> BoolArray:
    """Which rows [N] are equal in all parts, in the dtypes of `a`: the replay buffer stores float64 as float32."""
    if isinstance(a, dict):
        assert isinstance(b, dict)
        found: BoolArray = np.logical_and.reduce([_rows_equal(a[key], b[key]) for key in a])
        return found
    assert not isinstance(b, dict)
    return _rows_equal(a, b)


def _rows_equal(a: AnyArray, b: AnyArray) -> BoolArray:
    same = b.astype(a.dtype, copy=False)
    return np.array([np.array_equal(x, y) for x, y in zip(a, same, strict=True)], np.bool_)
