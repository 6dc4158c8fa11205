"""Train on tasks that need memory, with and without it: `python -m scripts.measure_memory --seeds 0 1 2`.

The tasks and their settings are in `tests/envs/memory_tasks.py`; PPO gets the same settings, without the memory's.
CartPole without velocities is a preset, and PPO on it is a task of the suite `classic`.
See `scripts/measure_sides.py` for the protocol.
"""

from __future__ import annotations

from typing import Any

from scripts.measure_sides import Measurement

from tests.envs.memory_tasks import TASKS, MemoryTask


def described(task: MemoryTask) -> dict[str, Any]:
    return {
        "env": task.env_class.__name__,
        "env_kwargs": dict(task.env_kwargs),
        "total_timesteps": task.total_timesteps,
        "settings": dict(task.settings),
        "recurrent": dict(task.recurrent),
    }


if __name__ == "__main__":
    Measurement(TASKS, {"recurrent_ppo": "recurrent_ppo", "ppo": "ppo"}, described, "memory.json").main(__doc__)
