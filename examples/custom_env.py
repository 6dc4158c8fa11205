"""Train on a custom environment: pass the agent a function that creates one. Runs in a few seconds.

    python examples/custom_env.py

It is a function and not an environment, because training steps several copies in parallel, and evaluation uses separate
copies. Everything else works as with a registered id.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training import PPO


class Corridor(gym.Env[np.ndarray, int]):
    """Walk to a door on a line. The position and the door are random; the actions are a step left and a step right."""

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.position = self.door = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # seeds self.np_random: draw all random numbers from it for reproducible runs
        self.position, self.door = self.np_random.choice(self.length, size=2, replace=False)
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position = int(np.clip(self.position + (1 if action == 1 else -1), 0, self.length - 1))
        arrived = bool(self.position == self.door)
        # `terminated` is for ends that belong to the task. A time limit does not: the TimeLimit wrapper sets
        # `truncated`, and the agent then bootstraps. With `is_success`, results include success rates.
        return self._observe(), 1.0 if arrived else -0.05, arrived, False, {"is_success": arrived}

    def _observe(self) -> np.ndarray:
        return np.array([self.position, self.door], np.float32) / self.length


def make_corridor() -> gym.Env:
    return gym.wrappers.TimeLimit(Corridor(), max_episode_steps=30)


def main() -> None:
    agent = PPO(
        make_corridor, num_envs=8, num_steps=64, num_epochs=5, learning_rate=3e-3, gamma=0.95, eval_every=0, seed=1
    )
    before = agent.evaluate(num_episodes=50)
    agent.learn(10_000)
    after = agent.evaluate(num_episodes=50)
    print(f"untrained: return {before.mean:.2f}, arrives in {before.success_rate:.0%} of the episodes")
    print(f"trained:   return {after.mean:.2f}, arrives in {after.success_rate:.0%} of the episodes")
    action, _ = agent.predict(np.array([0.2, 0.8], np.float32))
    print(f"far to the left of the door it goes {'right' if action == 1 else 'left'}")
    agent.close()


if __name__ == "__main__":
    main()
