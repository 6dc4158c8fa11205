"""A memory must solve what cannot be solved without one; plain PPO gets the same environment and as many steps.

Three seeds, deterministic episodes of the final policy, the median seed counts. Our own results are in
`rl_training/zoo/results/foundation.json` and `memory.json`.
"""

from __future__ import annotations

from statistics import median

import pytest
from scripts.measure_presets import configure, measure

from tests.envs.memory_tasks import SHORT, TASKS, MemoryTask

SEEDS = (0, 1, 2)
HIDDEN = {"wrappers": [{"name": "HideVelocity"}], "total_timesteps": 200_000}


@pytest.mark.learning
def test_cartpole_without_velocities() -> None:
    with_memory = configure("recurrent_ppo/cartpole-novelocity", {"total_timesteps": 200_000})
    without = configure("ppo/cartpole", HIDDEN)
    reached, not_reached = ([measure(config, seed)["mean"] for seed in SEEDS] for config in (with_memory, without))
    assert median(reached) >= 400.0, f"with a memory {reached}"
    assert median(not_reached) < 200.0, f"without {not_reached}"


def success(task: MemoryTask, algo: str, seed: int) -> float:
    rate = task.train(algo, seed).success_rate
    assert rate is not None
    return rate


@pytest.mark.learning
@pytest.mark.parametrize("name", TASKS)
def test_solved_with_a_memory_and_not_without(name: str) -> None:
    reached, not_reached = ([success(TASKS[name], algo, seed) for seed in SEEDS] for algo in ("recurrent_ppo", "ppo"))
    assert median(reached) >= 0.95, f"with a memory {reached}"
    assert median(not_reached) <= 0.45, f"without {not_reached}"


def test_a_short_delay() -> None:
    """Seconds of training, so that the ordinary tests notice when the memory is broken."""
    assert success(SHORT, "recurrent_ppo", seed=0) >= 0.95
    assert success(SHORT, "ppo", seed=0) <= 0.7
