"""Probes: environments so small that the right values and actions are known, for every action space.

Each isolates one thing that can break: the value, the observation, the action, the discount. Observations are one
number, or an image of that brightness. Their whole state can be saved, so that runs on them resume exactly.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray

Kind = Literal["constant", "observation", "action", "match", "delayed", "walk"]

PROBE = "rl_training/Probe-v0"
ACTIONS: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(2),
    "MultiDiscrete": spaces.MultiDiscrete([2, 2]),
    "MultiBinary": spaces.MultiBinary(2),
    "Box": spaces.Box(-1.0, 1.0, (1,), np.float32),
}
"""The action space of a probe, by the name of its class."""
IMAGE = (16, 16, 3)


class Probe(gym.Env[Any, Any]):
    """A probe of one kind.

    - `constant`: one step, reward 1. The value has to become 1.
    - `observation`: one step; the observation is 1 or -1, and so is the reward. The value has to become the same.
    - `action`: one step; the reward says how good the action is.
    - `match`: one step; which action is good depends on the observation.
    - `delayed`: two steps; the first action is rewarded at the end of the second, and the observation tells how much.
    - `walk`: episodes of up to seven steps that terminate at random or are truncated, for testing resumed runs.

    A good action is 1 in every component for an observation that is not negative, and 0 for one that is; real-valued
    actions aim at 0.5 and -0.5. The best reward is 1.
    """

    limit: ClassVar[int] = 7

    def __init__(self, kind: Kind = "walk", actions: str = "Discrete", images: bool = False) -> None:
        self.kind, self.images = kind, images
        self.action_space = ACTIONS[actions]
        self.observation_space = (
            spaces.Box(0, 255, IMAGE, np.uint8) if images else spaces.Box(-1.0, 1.0, (1,), np.float32)
        )
        self.shown, self.ticks = 0.0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AnyArray, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self.ticks = 0
        random = self.kind in ("observation", "match", "walk")
        self.shown = float(self.np_random.choice([-1.0, 1.0])) if random else 0.0
        return self.show(self.shown), {}

    def step(self, action: Any) -> tuple[AnyArray, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        self.ticks += 1
        quality = self.quality(action)
        if self.kind == "delayed" and self.ticks == 1:
            self.shown = float(np.clip(quality, -1.0, 1.0))
            return self.show(self.shown), 0.0, False, False, {}
        rewards = {"constant": 1.0, "observation": self.shown, "delayed": self.shown}
        reward, terminated, truncated = rewards.get(self.kind, quality), True, False
        if self.kind == "walk":
            terminated, truncated = bool(self.np_random.random() < 0.1), self.ticks == self.limit
            self.shown = float(self.np_random.uniform(-1.0, 1.0))
        return self.show(self.shown), reward, terminated, truncated, {}

    def quality(self, action: Any) -> float:
        """How good an action is for the current observation: 1 at best, and -1 for an all-wrong discrete action."""
        up = self.shown >= 0
        if isinstance(self.action_space, spaces.Box):
            return 1.0 - 2.0 * float((np.asarray(action)[0] - (0.5 if up else -0.5)) ** 2)
        return 2.0 * float(np.mean(np.asarray(action) == int(up))) - 1.0

    def good_action(self) -> Any:
        """A good action for the current observation."""
        up = self.shown >= 0
        if isinstance(self.action_space, spaces.Box):
            return np.array([0.5 if up else -0.5], np.float32)
        return np.int64(up) if isinstance(self.action_space, spaces.Discrete) else np.full(2, int(up))

    def show(self, number: float) -> AnyArray:
        """The observation of a number from -1 to 1."""
        if self.images:
            return np.full(IMAGE, round(127.5 + 127.5 * number), np.uint8)
        return np.array([number], np.float32)

    def get_state(self) -> dict[str, Any]:
        """See `rl_training.envs.snapshot`."""
        return {"shown": self.shown, "ticks": self.ticks, "rng": self.np_random}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `rl_training.envs.snapshot`."""
        self.shown, self.ticks, self.np_random = state["shown"], state["ticks"], state["rng"]


gym.register(PROBE, entry_point=f"{__name__}:Probe")
