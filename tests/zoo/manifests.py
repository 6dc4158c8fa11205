"""Results made up for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from rl_training.experiment.presets import get_preset
from rl_training.zoo.manifest import Evaluated, RunResult, TaskResult, config_hash
from rl_training.zoo.suites import Normalization, task_config


def run_result(seed: int, mean: float, **changes: Any) -> RunResult:
    final = Evaluated(mean=mean, std=1.0, episodes=20, step=1000, returns=[mean] * 20)
    values: dict[str, Any] = {
        "seed": seed, "env_steps": 1000, "wall_seconds": 2.0, "env_steps_per_second": 500.0,
        "date": "2026-01-31T00:00:00+00:00", "versions": {"torch": "2.13.0"}, "hardware": {"cpu": "abacus"},
        "git_commit": "0123456789abcdef", "untrained": dataclasses.replace(final, mean=10.0, step=0), "final": final,
        "evaluations": [(500, mean / 2, 0.5), (1000, mean, 0.25)], "training_returns": [(500, None), (1000, mean)],
    }  # fmt: skip
    return RunResult(**{**values, **changes})


def task_result(preset: str = "ppo/cartpole", *runs: RunResult, **changes: Any) -> TaskResult:
    settings = changes.get("settings", {})
    config = task_config(get_preset(preset), settings, "test")
    values: dict[str, Any] = {
        "preset": preset, "settings": settings, "algo": config.algo, "env_id": config.env_id,
        "env_kwargs": config.env_kwargs, "wrappers": config.to_dict()["wrappers"],
        "total_timesteps": config.total_timesteps, "config_hash": config_hash(config), "judge": "final",
        "deterministic": True, "epsilon": 0.0, "final_episodes": 20, "points": 2, "episodes": 10,
        "normalization": Normalization(config.env_id, 0.0, 100.0, "by hand"), "runs": list(runs),
    }  # fmt: skip
    return TaskResult(**{**values, **changes})
