"""Run directories with chosen numbers in them, written without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_training import TrainConfig

Points = Sequence[tuple[int, float | None]]


def write_run(
    path: Path,
    metrics: Mapping[str, Points] | None = None,
    evaluations: Points = (),
    *,
    status: str = "finished",
    algo: str = "ppo",
    env_id: str = "CartPole-v1",
    **settings: Any,
) -> Path:
    """A run with these metrics, and with evaluations of two episodes each, one below and one above the mean."""
    config = TrainConfig(algo=algo, env_id=env_id, **settings)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config.to_yaml())
    lines: dict[int, dict[str, Any]] = {}
    for name, points in (metrics or {}).items():
        for step, value in points:
            lines.setdefault(step, {"global_step": step})[name] = value
    (path / "metrics.jsonl").write_text("".join(json.dumps(lines[step]) + "\n" for step in sorted(lines)))
    entries = [
        {"step": step, "mean": mean, "std": 1.0, "returns": [mean - 1.0, mean + 1.0], "lengths": [3, 5]}
        for step, mean in evaluations
        if mean is not None
    ]
    (path / "evaluations.json").write_text(json.dumps(entries))
    metadata = {"status": status, "env_steps": 0, "seed": config.seed, "resume_grade": "exact"}
    (path / "metadata.json").write_text(json.dumps(metadata))
    return path
