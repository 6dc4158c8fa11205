"""Environments that fail, for trials of a study."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

MORTAL, FAULTY = "tests/Mortal-v0", "tests/Faulty-v0"
MORTAL_BY_MODULE = f"tests.tuning.tasks:{MORTAL}"
"""Importable in another process."""


class Mortal(CartPoleEnv):
    """Kills its process at the 20th step, once: a file says that it has happened."""

    def __init__(self, flag: str, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.flag, self.num_steps = Path(flag), 0

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        if self.num_steps == 20 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Faulty(CartPoleEnv):
    """Raises in its 40th step in all, of the attempts whose numbers (counted in a file) are given."""

    def __init__(self, counter: str, fails: str, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        path = Path(counter)
        attempt = len(path.read_text()) if path.exists() else 0
        path.write_text("x" * (attempt + 1))
        self.fails, self.num_steps = fails == "always" or str(attempt) in fails.split(), 0

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        if self.fails and self.num_steps == 40:
            raise RuntimeError("the motor is broken")
        return super().step(action)


for name, task in ((MORTAL, Mortal), (FAULTY, Faulty)):
    if name not in gym.registry:
        gym.register(name, entry_point=task, max_episode_steps=50)
