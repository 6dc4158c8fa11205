"""Small tasks with goals: cheap to play, and hopeless to learn from their sparse rewards alone.

Bit flipping is from Andrychowicz et al. 2017 (arXiv:1707.01495), section 3.1. Point reaching stands for the robot arms
of the same paper, without their physics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import rl_training
from rl_training.algorithms.registry import get_spec
from rl_training.contracts.batches import EvaluationResult

AnyArray = np.ndarray[Any, np.dtype[Any]]
Observed = dict[str, AnyArray]


def goal_space(part: spaces.Box) -> spaces.Dict:
    return spaces.Dict({"observation": part, "achieved_goal": part, "desired_goal": part})


class BitFlipping(gym.Env[Any, Any]):
    """Flip one of n bits per step, until they are as desired; n steps, which suffice.

    A step costs 1 unless the bits are as desired after it. Every step flips a bit, so the goal cannot be held: an
    episode is a success if its goal was reached at any time.
    """

    def __init__(self, num_bits: int) -> None:
        self.num_bits = num_bits
        self.action_space = spaces.Discrete(num_bits)
        self.observation_space = goal_space(spaces.Box(0, 1, (num_bits,), np.int8))
        self.bits = self.goal = np.zeros(num_bits, np.int8)
        self.num_steps, self.reached = 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(0, 2, (2, self.num_bits), np.int8)
        self.num_steps, self.reached = 0, False
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.bits = self.bits.copy()
        self.bits[action] ^= 1
        self.num_steps += 1
        reward = float(self.compute_reward(self.bits, self.goal, {}))
        self.reached |= reward == 0.0
        return self._observe(), reward, False, self.num_steps == self.num_bits, {"is_success": self.reached}

    def compute_reward(self, achieved: AnyArray, desired: AnyArray, info: Any) -> AnyArray:
        """One goal [n] or many [M, n]."""
        return np.where((achieved == desired).all(axis=-1), 0.0, -1.0)

    def _observe(self) -> Observed:
        return {"observation": self.bits, "achieved_goal": self.bits, "desired_goal": self.goal}


class PointReaching(gym.Env[Any, Any]):
    """Move a point in a box to a goal, and keep it there.

    An action is a step of at most `step_size` in each dimension. Each step costs 1 unless the point is within `radius`
    of the goal after it. An episode is a success if it is there after its last step.
    """

    def __init__(self, num_dims: int, num_steps: int, step_size: float, radius: float) -> None:
        self.num_steps, self.step_size, self.radius = num_steps, step_size, radius
        self.action_space = spaces.Box(-1.0, 1.0, (num_dims,), np.float32)
        self.observation_space = goal_space(spaces.Box(-1.0, 1.0, (num_dims,), np.float32))
        self.point = self.goal = np.zeros(num_dims, np.float32)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.point, self.goal = self.np_random.uniform(-1.0, 1.0, (2, *self.point.shape)).astype(np.float32)
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        move = self.step_size * np.clip(action, -1.0, 1.0)
        self.point = np.clip(self.point + move, -1.0, 1.0).astype(np.float32)
        self.time += 1
        reward = float(self.compute_reward(self.point, self.goal, {}))
        return self._observe(), reward, self._over(), self.time == self.num_steps, {"is_success": reward == 0.0}

    def compute_reward(self, achieved: AnyArray, desired: AnyArray, info: Any) -> AnyArray:
        """One goal [n] or many [M, n]."""
        return np.where(np.linalg.norm(achieved - desired, axis=-1) <= self.radius, 0.0, -1.0)

    def _over(self) -> bool:
        return False

    def _observe(self) -> Observed:
        return {"observation": self.point, "achieved_goal": self.point, "desired_goal": self.goal}


class PointTouching(PointReaching):
    """As `PointReaching`, but an episode terminates when the goal is reached."""

    def compute_terminated(self, achieved: AnyArray, desired: AnyArray, info: Any) -> AnyArray:
        """One goal [n] or many [M, n]."""
        return np.equal(self.compute_reward(achieved, desired, info), 0.0)

    def _over(self) -> bool:
        return bool(self.compute_terminated(self.point, self.goal, {}))


class PointReachingOneByOne(PointReaching):
    """As `PointReaching`, but rewards are computed for one goal only, and as a plain number."""

    def compute_reward(self, achieved: AnyArray, desired: AnyArray, info: Any) -> Any:
        assert achieved.ndim == 1, "one goal at a time"
        return 0.0 if sum((achieved - desired) ** 2) <= self.radius**2 else -1.0


@dataclass(frozen=True)
class GoalTask:
    """An algorithm, an environment, and settings with which it is solved with hindsight."""

    algo: str
    env_class: type[gym.Env[Any, Any]]
    env_kwargs: Mapping[str, Any]
    total_timesteps: int
    settings: Mapping[str, Any]

    def make_env(self) -> gym.Env[Any, Any]:
        return self.env_class(**self.env_kwargs)

    def train(self, her: bool, seed: int, num_episodes: int = 100) -> EvaluationResult:
        """Episodes of the final policy, with deterministic actions."""
        agent_class = getattr(rl_training, get_spec(self.algo).title)
        agent = agent_class(self.make_env, her=her, seed=seed, eval_every=0, **self.settings)
        try:
            agent.learn(self.total_timesteps, progress=False)
            result: EvaluationResult = agent.evaluate(num_episodes)
        finally:
            agent.close()
        return result


BITS = {
    "num_envs": 8, "num_steps": 1, "updates_per_step": 0.25, "learning_starts": 500, "buffer_size": 100_000,
    "batch_size": 128, "gamma": 0.98, "learning_rate": 1e-3, "target_update_every": 200, "epsilon": 0.2,
    "network": {"sizes": (256,)},
}  # fmt: skip
POINT = {
    "num_envs": 8, "updates_per_step": 0.25, "learning_starts": 1000, "buffer_size": 100_000, "batch_size": 128,
    "gamma": 0.95, "learning_rate": 1e-3, "tau": 0.02, "network": {"actor_sizes": (64, 64), "critic_sizes": (64, 64)},
}  # fmt: skip
NOISY_POINT = {**POINT, "noise": {"std": 0.2}}
SPACE = {"num_dims": 3, "num_steps": 50, "step_size": 0.1, "radius": 0.1}

TASKS = {
    "dqn/bit-flipping": GoalTask("dqn", BitFlipping, {"num_bits": 15}, 12_000, BITS),
    "sac/point-reaching": GoalTask("sac", PointReaching, SPACE, 12_000, {**POINT, "initial_temperature": 0.1}),
    "td3/point-reaching": GoalTask("td3", PointReaching, SPACE, 12_000, NOISY_POINT),
    "ddpg/point-reaching": GoalTask("ddpg", PointReaching, SPACE, 12_000, NOISY_POINT),
    "td3/point-touching": GoalTask("td3", PointTouching, SPACE, 12_000, NOISY_POINT),
    "td3/point-reaching-one-by-one": GoalTask("td3", PointReachingOneByOne, SPACE, 12_000, NOISY_POINT),
}
FEW_BITS = GoalTask("dqn", BitFlipping, {"num_bits": 8}, 3_000, BITS)
"""Takes seconds."""
