"""What learns by weighting recorded actions is better than imitation, on data of a good and a random policy."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_training import AWAC, AWR, BC, CRR, IQL, MARWIL, XQL
from rl_training.data.dataset import Dataset

pytestmark = pytest.mark.learning
STEPS, SHARE_GOOD = 20, 0.3
SETTINGS: dict[str, Any] = {"eval_every": 0, "num_threads": 1, "gamma": 0.9, "batch_size": 128, "learning_rate": 1e-3}
SETTINGS |= {"network": {"actor_sizes": (32, 32), "critic_sizes": (32, 32)}}


class Point(gym.Env[Any, Any]):
    """A point on a line has to go to 0 and stay there; the reward is minus its distance."""

    observation_space = spaces.Box(-20, 20, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-3, 3, 1), 0
        return self.place.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.place, self.steps = self.place + 0.5 * np.clip(action, -1, 1), self.steps + 1
        return self.place.astype(np.float32), -float(abs(self.place[0])), False, self.steps == STEPS, {}


def good(obs: Any) -> Any:
    return np.clip(-2.0 * obs, -1, 1).astype(np.float32)


@pytest.fixture(scope="module")
def mixed() -> Dataset:
    """Episodes of a good policy and, more often, of random actions."""
    rng, env = np.random.default_rng(0), Point()
    rows: list[Any] = []
    finals = []
    for episode in range(300):
        obs, _ = env.reset(seed=episode)
        is_good = rng.random() < SHARE_GOOD
        for step in range(STEPS):
            action = good(obs) if is_good else rng.uniform(-1, 1, 1).astype(np.float32)
            following, reward, _, _, _ = env.step(action)
            rows.append((obs, action, reward, step == STEPS - 1))
            obs = following
        finals.append(obs)
    obs, action, reward, ended = (np.array(column) for column in zip(*rows, strict=True))
    return Dataset(
        observations=obs, actions=action, rewards=reward.astype(np.float32), terminated=np.zeros_like(ended),
        truncated=ended, final_observations=np.array(finals),
        observation_space=Point.observation_space, action_space=Point.action_space,
    )  # fmt: skip


def median_return(cls: Any, data: Dataset, updates: int, **settings: Any) -> float:
    found = []
    for seed in range(3):
        agent = cls(Point, seed=seed, **{**SETTINGS, **settings})
        if updates:
            agent.learn_offline(data, updates, progress=False)
        found.append(agent.evaluate(20, seed=1).mean)
    return float(np.median(found))


@pytest.fixture(scope="module")
def imitation(mixed: Dataset) -> float:
    return median_return(BC, mixed, 1500)


@pytest.mark.parametrize("cls", [MARWIL, AWR, AWAC, CRR, IQL, XQL], ids=lambda cls: cls.__name__)
def test_it_is_better_than_imitation(cls: Any, mixed: Dataset, imitation: float) -> None:
    untrained = median_return(cls, mixed, 0)
    trained = median_return(cls, mixed, 1500)
    behaviour = float(mixed.episode_returns.mean())
    assert trained > imitation + 2.0
    assert trained > behaviour > untrained
