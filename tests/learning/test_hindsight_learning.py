"""Hindsight replay must solve what cannot be solved without it; nothing but the setting `her` differs.

Three seeds, 100 deterministic episodes of the final policy, the median seed counts. Our own results are in
`rl_training/zoo/results/hindsight.json`.
"""

from __future__ import annotations

from statistics import median

import pytest

from tests.envs.goal_tasks import FEW_BITS, TASKS, GoalTask

SEEDS = (0, 1, 2)


def success(task: GoalTask, her: bool, seed: int) -> float:
    rate = task.train(her, seed).success_rate
    assert rate is not None
    return rate


@pytest.mark.learning
@pytest.mark.parametrize("name", TASKS)
def test_solved_with_hindsight_and_not_without(name: str) -> None:
    with_her, without = ([success(TASKS[name], her, seed) for seed in SEEDS] for her in (True, False))
    assert median(with_her) >= 0.9, f"with {with_her}"
    assert median(without) < 0.2, f"without {without}"


def test_few_bits() -> None:
    """Seconds of training, so that the ordinary tests notice when hindsight is broken."""
    assert success(FEW_BITS, her=True, seed=0) >= 0.8
    assert success(FEW_BITS, her=False, seed=0) <= 0.4
