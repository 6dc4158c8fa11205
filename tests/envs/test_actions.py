"""From the policy's action to the environment's."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from gymnasium import spaces

from rl_training.contracts.errors import SpaceError
from rl_training.contracts.spec import BoxActions
from rl_training.envs.actions import ActionMap, clip_problem

UNEVEN = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))


def test_clip_keeps_units_and_bounds() -> None:
    actions = ActionMap(UNEVEN, "clip").to_env(np.array([[-3.0, 4.0], [1.5, 11.0]], np.float32))
    assert actions.tolist() == [[-2.0, 4.0], [1.5, 10.0]]


def test_clip_respects_a_bound_on_one_side() -> None:
    space = spaces.Box(np.array([0.0], np.float32), np.array([np.inf], np.float32))
    assert ActionMap(space, "clip").to_env(np.array([[-1.0], [1e9]], np.float32)).tolist() == [[0.0], [1e9]]


def test_rescale_maps_the_unit_interval_to_the_bounds() -> None:
    actions = np.array([[-1.0, -1.0], [0.0, 0.0], [0.5, -0.5], [1.0, 7.0]], np.float32)
    expected = [[-2.0, 0.0], [0.0, 5.0], [1.0, 2.5], [2.0, 10.0]]
    assert ActionMap(UNEVEN, "rescale").to_env(actions).tolist() == expected


def test_squash_is_rescale_of_tanh() -> None:
    actions = np.array([[0.0, 0.0], [0.3, -1.2], [-50.0, 50.0]], np.float32)
    found = ActionMap(UNEVEN, "squash").to_env(actions)
    np.testing.assert_allclose(found[:2], [[0.0, 5.0], [2 * np.tanh(0.3), 5 + 5 * np.tanh(-1.2)]], rtol=1e-6)
    assert found[2].tolist() == [-2.0, 10.0]


@pytest.mark.parametrize("box_actions", ["rescale", "squash"])
def test_mapped_actions_never_leave_the_space(box_actions: BoxActions) -> None:
    """float32 arithmetic leaves some of these bounds before the last clip."""
    rng = np.random.default_rng(0)
    low, high = -rng.random(200).astype(np.float32), 10 * rng.random(200).astype(np.float32)
    assert (low + (high - low) > high).any()
    space = spaces.Box(low, high)
    extremes = np.stack([np.full(200, value, np.float32) for value in (-20.0, -1.0, 1.0, 20.0)])
    for action in ActionMap(space, box_actions).to_env(extremes):
        assert space.contains(action)


@pytest.mark.parametrize("box_actions", ["rescale", "squash"])
@pytest.mark.parametrize("bound", [np.inf, -np.inf])
def test_infinite_bounds_are_refused(box_actions: BoxActions, bound: float) -> None:
    low, high = sorted((0.0, bound))
    space = spaces.Box(np.array([-1.0, low], np.float32), np.array([1.0, high], np.float32))
    with pytest.raises(SpaceError, match="finite bounds"):
        ActionMap(space, box_actions)


def test_discrete_actions_begin_at_the_start_of_the_space() -> None:
    space = spaces.Discrete(3, start=-1)
    actions = ActionMap(space).to_env(np.array([0, 1, 2]))
    assert actions.tolist() == [-1, 0, 1]
    assert all(space.contains(action) for action in actions)


def test_multi_discrete_actions_begin_at_the_starts() -> None:
    space = spaces.MultiDiscrete([2, 3], start=[5, -2])
    actions = ActionMap(space).to_env(np.array([[0, 0], [1, 2]]))
    assert actions.tolist() == [[5, -2], [6, 0]]
    assert all(space.contains(action) for action in actions)


def test_multi_discrete_of_two_axes() -> None:
    space = spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [2, 3]]))
    assert ActionMap(space).to_env(np.zeros((1, 2, 2), np.int64)).tolist() == [[[0, 1], [2, 3]]]


def test_multi_binary_actions_pass() -> None:
    space = spaces.MultiBinary(3)
    actions = ActionMap(space).to_env(np.array([[0, 1, 1]], np.int64))
    assert actions.tolist() == [[0, 1, 1]]
    assert space.contains(actions[0])


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Box(-1.0, 1.0, (2,), np.float64), np.zeros((1, 2), np.float32)),
        (spaces.Box(-1.0, 1.0, (2,), np.float32), np.zeros((1, 2), np.float64)),
        (spaces.Box(-5, 5, (2,), np.int8), np.zeros((1, 2), np.float32)),
        (spaces.Box(0, 255, (2,), np.uint8), np.zeros((1, 2), np.float32)),
        (spaces.Discrete(3, dtype=np.int8), np.zeros(1, np.int64)),
        (spaces.MultiDiscrete([2, 2], dtype=np.int32), np.zeros((1, 2), np.int64)),
        (spaces.MultiBinary(2), np.zeros((1, 2), np.float32)),
    ],
    ids=repr,
)
def test_actions_have_the_dtype_of_the_space(space: spaces.Space[Any], action: Any) -> None:
    mapped = ActionMap(space).to_env(action)
    assert mapped.dtype == space.dtype
    assert space.contains(mapped[0])


@pytest.mark.parametrize("box_actions", ["rescale", "squash"])
@pytest.mark.parametrize(("dtype", "low", "high"), [(np.int8, -128, 127), (np.uint8, 0, 255)])
def test_integer_boxes_as_wide_as_their_dtype(box_actions: BoxActions, dtype: Any, low: int, high: int) -> None:
    """The width 127 - -128 does not fit into int8."""
    mapping = ActionMap(spaces.Box(low, high, (1,), dtype), box_actions)
    actions = mapping.to_env(np.array([[-20.0], [-0.0], [20.0]], np.float32))
    assert actions[[0, 2], 0].tolist() == [low, high]
    assert abs(int(actions[1, 0]) - (low + high) / 2) <= 0.5


def test_integer_boxes_round_to_the_nearest() -> None:
    """A cast alone rounds towards zero, which would give zero twice the share of its neighbours."""
    mapping = ActionMap(spaces.Box(-3, 3, (1,), np.int8), "clip")
    found = mapping.to_env(np.array([[-0.6], [0.4], [0.6], [2.9]], np.float32))
    assert found.ravel().tolist() == [-1, 0, 1, 3]


def test_other_spaces_are_refused() -> None:
    with pytest.raises(SpaceError, match="Tuple"):
        ActionMap(spaces.Tuple([spaces.Discrete(2)]))


def test_given_actions_are_not_changed() -> None:
    """Buffers keep the policy's own actions."""
    given = np.array([[5.0, 50.0]], np.float32)
    for box_actions in get_args(BoxActions):
        ActionMap(UNEVEN, box_actions).to_env(given)
        assert given.tolist() == [[5.0, 50.0]]


@pytest.mark.parametrize(
    ("low", "high", "warned"),
    [([-1], [1], False), ([-2], [2], False), ([-1, 0], [2, 10], True), ([-20], [20], True), ([-np.inf], [1], False)],
)
def test_bounds_that_clip_suits_badly(low, high, warned):
    space = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    assert (clip_problem(space) is not None) == warned
    assert (ActionMap(space).problem() is not None) == warned
    if np.isfinite(low).all():
        assert ActionMap(space, "rescale").problem() is None
