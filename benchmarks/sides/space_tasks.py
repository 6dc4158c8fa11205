"""One cheap environment with any observation space, for all sides; needs only gymnasium and numpy."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "Box": spaces.Box(-1.0, 1.0, (8,), np.float32),
    "Discrete": spaces.Discrete(16),
    "MultiDiscrete": spaces.MultiDiscrete([4, 4, 4]),
    "MultiBinary": spaces.MultiBinary(8),
    "Dict": spaces.Dict({"a": spaces.Box(-1.0, 1.0, (4,), np.float32), "b": spaces.Discrete(8)}),
    "image 32": spaces.Box(0, 255, (32, 32, 3), np.uint8),
    "image 64": spaces.Box(0, 255, (64, 64, 3), np.uint8),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(4),
    "MultiDiscrete": spaces.MultiDiscrete([3, 3]),
    "MultiBinary": spaces.MultiBinary(4),
    "Box": spaces.Box(-1.0, 1.0, (2,), np.float32),
}
CELLS = {
    **{f"ppo {name}": ("ppo", name, "Discrete") for name in OBSERVATIONS},
    **{f"ppo Box, {name} actions": ("ppo", "Box", name) for name in ACTIONS if name != "Discrete"},
    "ppo masks": ("ppo", "Box", "masked"),
    **{f"dqn {name}": ("dqn", name, "Discrete") for name in OBSERVATIONS},
    **{f"sac {name}": ("sac", name, "Box") for name in OBSERVATIONS},
}
"""Algorithm, observation space and action space of each cell of the table."""
STEPS = {"ppo": 16_384, "dqn": 4_000, "sac": 800}
START = {"ppo": 8_192, "dqn": 2_000, "sac": 400}
"""The step from which speed is measured."""
IMAGE_SHARE = 8
"""Cells with images have so many times fewer steps."""


class SpaceEnv(gym.Env[Any, Any]):
    """Episodes of 50 steps with precomputed observations; the reward is that of the first action."""

    def __init__(self, observation: str, action: str) -> None:
        self.observation_space = OBSERVATIONS[observation]
        self.masked = action == "masked"
        self.action_space = ACTIONS["Discrete" if self.masked else action]
        self.observation_space.seed(0)
        self._samples = [self.observation_space.sample() for _ in range(64)]
        self._time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        return self._samples[0], self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._time += 1
        reward = float(np.asarray(action).flat[0] == 0)
        return self._samples[self._time % 64], reward, False, self._time >= 50, self._info()

    def action_masks(self) -> Any:
        """Which actions are valid, as sb3-contrib asks for it."""
        mask = np.ones(4, np.bool_)
        mask[self._time % 4] = False
        return mask

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.action_masks().astype(np.int8)} if self.masked else {}


def length(cell: str, share: int = 1) -> tuple[int, int]:
    """The last step of a run, and the step from which it is measured; with `share` times fewer steps."""
    share *= IMAGE_SHARE if "image" in cell else 1
    algo = CELLS[cell][0]
    return STEPS[algo] // share, START[algo] // share
