"""A memory must solve what cannot be solved without one; plain PPO gets the same environment and as many steps.

Three seeds, deterministic episodes of the final policy, the median seed counts. Our own results are in
`rl_training/zoo/results/classic.json` and `memory.json`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rl_training.experiment.presets import get_preset
from rl_training.zoo.suites import Protocol, task_config
from rl_training.zoo.worker import measure, run_config
from tests.envs.memory_tasks import SHORT, TASKS, MemoryTask

SEEDS = (0, 1, 2)
HIDDEN = {"wrappers": [{"name": "HideVelocity"}], "total_timesteps": 200_000}


def trained(preset: str, settings: dict[str, Any], seed: int, directory: Path) -> float:
    """What the final policy of a preset with other settings reaches."""
    config = task_config(get_preset(preset), settings, "test")
    run = measure(run_config(config, Protocol(points=1), seed, directory), 20)
    assert run is not None
    assert run.final is not None
    return run.final.mean


@pytest.mark.learning
def test_cartpole_without_velocities(tmp_path: Path) -> None:
    memory = {"total_timesteps": 200_000}
    reached = [trained("recurrent_ppo/cartpole-novelocity", memory, seed, tmp_path) for seed in SEEDS]
    not_reached = [trained("ppo/cartpole", HIDDEN, seed, tmp_path) for seed in SEEDS]
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
