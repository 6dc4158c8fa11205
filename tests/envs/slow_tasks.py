"""An environment that takes its time, so that tests can interrupt what trains on it, and that breaks when told to.

Registered when this module is imported: `tests.envs.slow_tasks:SlowWalk-v0`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SLOW = "tests.envs.slow_tasks:SlowWalk-v0"
BREAK = "BREAK_SLOW_WALK"
"""The environment variable that makes a step raise, after as many steps as it says."""


class SlowWalk(gym.Env[Any, Any]):
    """Ten steps of a random walk that actions push; each takes a millisecond, and the reward is where it is."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-100.0, 100.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.place, self.time, self.steps = 0.0, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time = 0.0, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.001)
        self.steps += 1
        if self.steps > int(os.environ.get(BREAK, self.steps)):
            raise RuntimeError("the walk is closed")
        self.time += 1
        self.place += float(action) - 0.5 + float(self.np_random.normal())
        return self._observe(), self.place, self.time >= 10, False, {}

    def get_state(self) -> dict[str, Any]:
        return {"place": self.place, "time": self.time, "steps": self.steps, "rng": self.np_random}

    def set_state(self, state: dict[str, Any]) -> None:
        self.place, self.time, self.steps = state["place"], state["time"], state["steps"]
        self.np_random = state["rng"]

    def _observe(self) -> Any:
        return np.array([self.place], np.float32)


gym.register("SlowWalk-v0", entry_point=SlowWalk)
