"""Statistics against numbers computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rl_training.reports.statistics import (
    aggregate,
    interquartile_mean,
    interval,
    probability_of_improvement,
    sample_efficiency,
)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.0, 10.0, 20.0, 1000.0], 15.0),  # the middle two of four
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 4.5),  # the middle four of eight
        ([1.0, 2.0, 9.0], 4.0),  # a quarter of three is less than one: the mean
        ([7.0], 7.0),
        ([-100.0, 0.0, 1.0, 2.0, 3.0, 1000.0], 1.5),  # one of six on each side
    ],
)
def test_interquartile_mean(scores, expected):
    assert interquartile_mean(scores) == pytest.approx(expected)
    assert aggregate([scores]).value == pytest.approx(expected)


def test_tasks_are_pooled():
    # 0 0 1 1 1 2 2 9, without the lowest and highest two: 1 1 1 2
    assert aggregate([[0.0, 1.0, 2.0, 9.0], [0.0, 1.0, 1.0, 2.0]]).value == pytest.approx(1.25)


def test_the_interval_of_two_runs_is_known():
    """Of runs 0 and 1 a draw of two has mean 0, 1/2, 1/2 or 1: the outer ones each in a quarter of the draws."""
    found = aggregate([[0.0, 1.0]])
    assert (found.low, found.value, found.high) == (0.0, 0.5, 1.0)


def test_runs_are_drawn_within_their_task():
    """Each task's runs are equal, so however they are drawn, the pool is the same; across tasks it would not be."""
    found = aggregate([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.5)


def test_the_interval_is_that_of_the_normal_distribution_for_many_runs():
    scores = [float(i % 100) for i in range(400)]  # the mean of the middle half has a known spread
    found = aggregate([scores])
    assert found.value == pytest.approx(49.5)
    assert found.low is not None
    assert found.high is not None
    # trimmed mean: standard error = winsorised deviation / (0.5 sqrt n); winsorised at 25 and 74 it is 20.6
    half = 1.96 * 20.6 / (0.5 * 400**0.5)
    assert found.high - found.value == pytest.approx(half, rel=0.15)
    assert found.value - found.low == pytest.approx(half, rel=0.15)


def test_one_run_has_no_interval():
    found = aggregate([[3.0], [1.0, 2.0]])
    assert (found.value, found.low, found.high) == (2.0, None, None)


def test_equal_samples_give_equal_intervals():
    assert aggregate([[1.0, 5.0, 2.0, 8.0]]) == aggregate([[1.0, 5.0, 2.0, 8.0]])


def test_probability_of_improvement():
    # 3 x 2 pairs: 1>0, 2>0, 3>0, 3>2 better, 2=2 half, 1<2: 4.5 of 6
    assert probability_of_improvement([[1.0, 2.0, 3.0]], [[0.0, 2.0]]).value == pytest.approx(0.75)
    # averaged over tasks, not over pairs
    two = probability_of_improvement([[1.0, 2.0, 3.0], [0.0, 0.0]], [[0.0, 2.0], [1.0, 1.0]])
    assert two.value == pytest.approx(0.375)
    back = probability_of_improvement([[0.0, 2.0], [1.0, 1.0]], [[1.0, 2.0, 3.0], [0.0, 0.0]])
    assert back.value == pytest.approx(1 - 0.375)


def test_probability_of_improvement_of_equals_and_opposites():
    same = probability_of_improvement([[5.0, 5.0]], [[5.0, 5.0, 5.0]])
    assert (same.low, same.value, same.high) == (0.5, 0.5, 0.5)
    better = probability_of_improvement([[5.0, 6.0]], [[1.0, 2.0]])
    assert (better.low, better.value, better.high) == (1.0, 1.0, 1.0)
    assert probability_of_improvement([[5.0]], [[1.0]]).low is None


def test_probability_of_improvement_needs_the_same_tasks():
    with pytest.raises(ValueError, match="the same number of tasks"):
        probability_of_improvement([[1.0]], [[1.0], [2.0]])


def test_sample_efficiency_is_an_estimate_at_each_point():
    runs = [[(0.0, 0.0), (10.0, 10.0)], [(0.0, 2.0), (10.0, 2.0)]]
    values, low, high = sample_efficiency([runs], [0.0, 5.0, 10.0])
    assert values.tolist() == pytest.approx([1.0, 3.5, 6.0])
    assert (low[2], high[2]) == (2.0, 10.0)


def test_the_interval_is_that_of_all_draws_there_are():
    """Of four runs there are 4**4 equally likely draws, which can be listed."""
    runs = [0.0, 3.0, 4.0, 20.0]
    draws = sorted(sum(sorted(draw)[1:3]) / 2 for draw in itertools.product(runs, repeat=4))
    found = aggregate([runs])
    assert (found.low, found.value, found.high) == (draws[int(0.025 * 256)], 3.5, draws[int(0.975 * 256)])


def test_an_interval_of_many_points_is_that_of_each():
    values = np.array([[1.0, 5.0], [2.0, 5.0], [6.0, 8.0]])
    center, low, high = interval([values])
    assert center.tolist() == pytest.approx([3.0, 6.0])
    assert low.tolist() == [1.0, 5.0], "of three runs the range from the worst to the best"
    assert high.tolist() == [6.0, 8.0]
    center, low, high = interval([values[:1]])
    assert center.tolist() == [1.0, 5.0]
    assert np.isnan([low, high]).all(), "a single run has no interval"


def test_the_interval_of_a_mean_of_many_runs_is_the_textbooks():
    values = np.random.default_rng(1).normal(size=40)
    center, low, high = interval([values])
    half = 1.96 * values.std() / math.sqrt(40)
    assert [low, high] == pytest.approx([center - half, center + half], abs=0.05)
    assert interval([values]) == (center, low, high), "the same each time"


# The numbers that rliable 1.2.0 gives for the same scores, a column for each task (`get_interval_estimates` of
# `metrics.aggregate_iqm` with 50,000 resamples, and of `metrics.probability_of_improvement` with 1,500).
OURS = [[0.1, 0.4, 0.5, 0.9, 0.7], [1.0, 0.9, 1.3, 0.2, 1.1]]
THEIRS = [[0.3, 0.35, 0.5, 0.2, 0.6], [0.8, 0.9, 1.0, 0.1, 1.25]]


@pytest.mark.parametrize(
    ("tasks", "value", "low", "high"),
    [
        (OURS, 0.73333333, 0.43333333, 0.93333333),
        (THEIRS, 0.575, 0.325, 0.75),
        (OURS[:1], 0.53333333, 0.2, 0.83333333),
    ],
)
def test_the_interquartile_mean_and_its_interval_are_those_of_rliable(tasks, value, low, high):
    found = aggregate(tasks)
    assert found.value == pytest.approx(value)
    # few runs give few different means: the ends agree but for the neighbouring one
    assert found.low == pytest.approx(low, abs=0.035)
    assert found.high == pytest.approx(high, abs=0.035)


def test_the_probability_of_improvement_and_its_interval_are_those_of_rliable():
    found = probability_of_improvement(OURS, THEIRS)
    assert found.value == pytest.approx(0.65)
    assert found.low == pytest.approx(0.38475, abs=0.03)
    assert found.high == pytest.approx(0.89, abs=0.03)
