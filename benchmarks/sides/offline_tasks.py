"""What all sides of the offline benchmark share: data, settings, evaluation. Needs numpy and gymnasium only."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

SIZES = (256, 256)
BATCH_SIZE = 256
GAMMA = 0.99
FIRST_SEED = 10_000
"""Seed of the first evaluation episode; all sides and seeds are evaluated in the same episodes."""


@dataclasses.dataclass(frozen=True)
class Data:
    """A dataset, and the environment that policies are evaluated in."""

    file: str
    env_id: str
    episodes: int
    max_episode_steps: int | None = None
    """The time limit with which the data was recorded, if it is not the environment's."""


DATASETS = {
    "cartpole-replay": Data("d3rlpy-cartpole-replay.npz", "CartPole-v1", 20, 200),
    "pendulum-replay": Data("d3rlpy-pendulum-replay.npz", "Pendulum-v1", 20),
    "pendulum-medium": Data("rllib-pendulum-medium-sac.npz", "Pendulum-v1", 20),
    "halfcheetah-medium": Data("halfcheetah-v5-medium-cs285.npz", "HalfCheetah-v5", 10),
}
LEARNING_RATES = {
    "bc": (1e-3, 1e-3),
    "awac": (3e-4, 3e-4),
    "iql": (3e-4, 3e-4),
    "cql": (1e-4, 3e-4),
    "cal_ql": (1e-4, 3e-4),
    "td3_bc": (3e-4, 3e-4),
    "rebrac": (1e-3, 1e-3),
    "bcq": (1e-3, 1e-3),
    "bear": (1e-4, 3e-4),
    "crr": (3e-4, 3e-4),
}
"""Learning rates of actor and critics, by algorithm: the same on all sides. Discrete actions: the second, for all."""
SPEED_ALGOS = ("iql", "td3_bc", "cql")
SPEED_SHAPE = (17, 6)
"""Observation and action components of the data that speed is measured on."""


def discrete(actions: np.ndarray[Any, Any]) -> bool:
    """Whether recorded actions are integers."""
    return actions.dtype.kind in "iu"


def read_columns(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """The columns of an npz file of plain arrays."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def write_speed_data(path: Path, rows: int = 20_000) -> Path:
    """Random transitions in the shape of Walker2d; only their shape matters for the speed."""
    rng = np.random.default_rng(0)
    num_obs, num_actions = SPEED_SHAPE
    ends = np.arange(rows) % 200 == 199
    np.savez(
        path,
        observations=rng.normal(size=(rows, num_obs)).astype(np.float32),
        actions=rng.uniform(-1, 1, size=(rows, num_actions)).astype(np.float32),
        rewards=rng.normal(size=rows).astype(np.float32),
        next_observations=rng.normal(size=(rows, num_obs)).astype(np.float32),
        terminations=np.zeros(rows, bool),
        truncations=ends,
        episode_id=np.arange(rows) // 200,
    )
    return path


def evaluate(data: Data, act: Callable[[np.ndarray[Any, Any]], Any]) -> list[float]:
    """Returns of whole episodes, one after another, with the same seeds on all sides."""
    env = gym.make(data.env_id, max_episode_steps=data.max_episode_steps)
    returns = []
    for episode in range(data.episodes):
        obs, _ = env.reset(seed=FIRST_SEED + episode)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(act(np.asarray(obs, np.float32)))
            total += float(reward)
            ended = terminated or truncated
        returns.append(total)
    env.close()
    return returns


def timed(update: Callable[[int], Any], warmup: int, updates: int) -> float:
    """Updates per second after a warm-up."""
    update(warmup)
    began = time.perf_counter()
    update(updates)
    return updates / (time.perf_counter() - began)


def arguments() -> argparse.Namespace:
    """The command line of a side: `ALGO DATASET FILE` and options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("algo")
    parser.add_argument("dataset", help="a name in DATASETS, or 'speed'")
    parser.add_argument("file", type=Path)
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spawned", type=float, default=None)
    return parser.parse_args()


def report(**found: Any) -> None:
    """Print the result, as the last line."""
    print(json.dumps(found), flush=True)
