"""The sum tree: against running sums, at its edges, and in proportion."""

import numpy as np
import pytest

from rl_training.contracts.errors import CheckpointError
from rl_training.data.sum_tree import FAN_OUT, SumTree

SIZES = [1, 2, 31, 32, 33, 1023, 1024, 1025, 40_000]


def tree_of(values):
    tree = SumTree(len(values))
    tree.set(np.arange(len(values)), np.asarray(values, np.float64))
    return tree


def test_by_hand():
    # stretches of the cumulated values: [0, 1) is item 0, [1, 1) nothing, [1, 4) item 2, [4, 4.5) item 3
    tree = tree_of([1.0, 0.0, 3.0, 0.5])
    assert tree.total == 4.5
    assert tree.find(np.array([0.0, 0.99, 1.0, 2.0, 3.99, 4.0, 4.49])).tolist() == [0, 0, 2, 2, 2, 3, 3]
    tree.set(np.array([0, 2]), np.array([0.0, 1.0]))
    assert tree.total == 1.5
    assert tree.find(np.array([0.0, 0.99, 1.0])).tolist() == [2, 2, 3]
    assert tree.values(np.array([3, 0, 2])).tolist() == [0.5, 0.0, 1.0]


def test_of_equal_items_the_last_counts():
    tree = tree_of([1.0, 1.0])
    tree.set(np.array([0, 0, 0]), np.array([7.0, 8.0, 9.0]))
    assert tree.values(np.array([0])).tolist() == [9.0]
    assert tree.total == 10.0


@pytest.mark.parametrize("size", SIZES)
def test_against_running_sums(size):
    rng = np.random.default_rng(size)
    # whole numbers: sums are exact in any order, so the answers must be equal, not close
    values = rng.integers(0, 10, size).astype(np.float64) * (rng.random(size) < 0.7)
    values[rng.integers(size)] = 5.0
    tree = SumTree(size)
    for part in np.array_split(rng.permutation(size), 7):
        tree.set(part, values[part])
    assert tree.total == values.sum()
    masses = np.concatenate([rng.random(500) * values.sum(), np.unique(values.cumsum())[:-1], [0.0]])
    expected = np.searchsorted(values.cumsum(), masses, side="right")
    assert np.array_equal(tree.find(masses), expected)
    assert (tree.values(tree.find(masses)) > 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_every_item_is_found(size):
    tree = tree_of(np.ones(size))
    assert np.array_equal(tree.find(np.arange(size) + 0.5), np.arange(size))


def test_sums_do_not_drift():
    """After many changes every sum is what a new tree of the same values has, bit by bit."""
    rng = np.random.default_rng(0)
    tree = SumTree(2_000)
    for _ in range(2_000):
        items = rng.integers(2_000, size=32)
        tree.set(items, rng.random(32) ** 8 * 10.0 ** rng.integers(-6, 6, 32))
    fresh = tree_of(tree.values(np.arange(2_000)))
    assert all(np.array_equal(a, b) for a, b in zip(tree.levels, fresh.levels, strict=True))


def test_masses_at_the_very_end_are_never_an_item_without_value():
    """Rounding may bring a mass to the total, or beyond the sum of the last children."""
    rng = np.random.default_rng(1)
    for size in (5, 33, 5_000):
        values = rng.random(size) * (rng.random(size) < 0.1)
        values[0], values[-3:] = 1.0, 0.0
        tree = tree_of(values)
        last = int(np.flatnonzero(values)[-1])
        masses = np.array([np.nextafter(tree.total, 0.0), tree.total, tree.total * (1 + 1e-12)])
        assert tree.find(masses)[1:].tolist() == [last, last]
        assert (tree.values(tree.find(masses)) > 0).all()


def test_very_unequal_values():
    values = np.array([1e-300, 1e12, 1e-300, 1.0, 0.0])
    found = tree_of(values).find(np.linspace(0, 1e12, 1_001)[:-1])
    assert set(found.tolist()) == {0, 1}  # the first mass is 0, which belongs to the first item that has any value


@pytest.mark.parametrize("size", [10, 2_000])
def test_items_are_found_in_proportion_to_their_values(size):
    """Pearson's statistic of 200 000 draws lies where it does for draws of the right probabilities."""
    rng = np.random.default_rng(3)
    values = rng.random(size) + 0.1
    values[1::5] = 0.0
    tree = tree_of(values)
    num_draws = 200_000
    counts = np.bincount(tree.find(rng.random(num_draws) * tree.total), minlength=size)
    assert (counts[values == 0] == 0).all()
    expected = num_draws * values[values > 0] / values.sum()
    freedom = expected.size - 1
    statistic = np.sum((counts[values > 0] - expected) ** 2 / expected)
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_shape():
    """A million leaves are four levels and the root, and no level is much larger than it must be."""
    tree = SumTree(1_000_000)
    assert [level.size for level in tree.levels] == [1_000_000, 31_264, 992, 32, 1]
    assert all(level.size % FAN_OUT == 0 for level in tree.levels[:-1])


def test_state_round_trip():
    tree = tree_of(np.random.default_rng(0).random(1_500))
    copy = SumTree(1_500)
    copy.set(np.arange(1_500), np.full(1_500, 3.0))
    copy.load_state_dict({"values": tree.state_dict()["values"].copy()})
    assert all(np.array_equal(a, b) for a, b in zip(tree.levels, copy.levels, strict=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones(4), "expected 3 priorities, got float64 of shape"),
        (np.ones(3, np.float32), "expected 3 priorities, got float32"),
        (np.array([1.0, -1.0, 1.0]), "finite and not negative"),
        (np.array([1.0, np.nan, 1.0]), "finite and not negative"),
        (np.array([1.0, np.inf, 1.0]), "finite and not negative"),
    ],
)
def test_damaged_state_is_refused(values, message):
    with pytest.raises(CheckpointError, match=message):
        SumTree(3).load_state_dict({"values": values})


def test_a_state_without_values_is_refused():
    with pytest.raises(CheckpointError, match="missing values"):
        SumTree(3).load_state_dict({})
