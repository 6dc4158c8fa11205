"""Train on goal-conditioned tasks with and without HER: `python -m scripts.measure_hindsight --seeds 0 1 2`.

The tasks and their settings are in `tests/envs/goal_tasks.py`. Only the setting `her` differs between the two sides.
See `scripts/measure_sides.py` for the protocol.
"""

from __future__ import annotations

from typing import Any

from scripts.measure_sides import Measurement

from tests.envs.goal_tasks import TASKS, GoalTask


def described(task: GoalTask) -> dict[str, Any]:
    return {
        "algo": task.algo,
        "env": task.env_class.__name__,
        "env_kwargs": dict(task.env_kwargs),
        "total_timesteps": task.total_timesteps,
        "settings": dict(task.settings),
    }


if __name__ == "__main__":
    Measurement(TASKS, {"with_her": True, "without_her": False}, described, "hindsight.json").main(__doc__)
