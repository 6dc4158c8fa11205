"""Settings that make an algorithm small and fast enough for whole runs in a unit test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.data.dataset import Dataset, write_dataset
from rl_training.data.settings import BatchConfig, OffPolicyConfig

SIZES: dict[str, Any] = {
    "num_atoms": 11,
    "v_min": -20.0,
    "v_max": 20.0,
    "num_quantiles": 8,
    "num_fractions": 4,
    "num_target_fractions": 4,
    "num_greedy_fractions": 4,
    "embedding_size": 8,
    "target_update_every": 7,
}
LIMITS = {"policy_delay": 2}
"""Largest values of settings that would keep a short run from making every kind of update."""
REPLAY = {"buffer_size": 200, "batch_size": 8, "learning_starts": 10, "num_steps": 2, "updates_per_step": 0.5}


def small_settings(spec: AlgorithmSpec, **changes: Any) -> dict[str, Any]:
    """Settings of the algorithm: on-policy ones learn from 16 steps, the others from a replay of 200 transitions.

    Those that learn from recorded data only have just the batch size.
    """
    names = spec.config.__dataclass_fields__
    if not issubclass(spec.config, OffPolicyConfig) and issubclass(spec.config, BatchConfig):
        return {"batch_size": REPLAY["batch_size"], **small_sizes(spec), **small_networks(spec, 8), **changes}
    if not issubclass(spec.config, OffPolicyConfig):
        return {**({"num_steps": 16} if "num_steps" in names else {}), **changes}
    return {**REPLAY, **small_sizes(spec), **small_networks(spec, 8), **changes}


def small_sizes(spec: AlgorithmSpec) -> dict[str, Any]:
    """Sizes and periods of the algorithm."""
    config = spec.config()
    own = {name: value for name, value in SIZES.items() if hasattr(config, name)}
    return own | {name: limit for name, limit in LIMITS.items() if getattr(config, name, limit) > limit}


def small_networks(spec: AlgorithmSpec, width: int) -> dict[str, Any]:
    """The setting `network` with one hidden layer of that width, if the algorithm has the package's networks."""
    network = getattr(spec.config(), "network", None)
    sizes = {
        name: (width,) for name in ("sizes", "actor_sizes", "critic_sizes", "behaviour_sizes") if hasattr(network, name)
    }
    return {"network": sizes} if sizes else {}


def only_offline(spec: AlgorithmSpec) -> bool:
    """Whether the algorithm learns from recorded data only."""
    return spec.regimes == (Regime.OFFLINE,)


def recorded_data(env: gym.Env[Any, Any], num_steps: int = 60, share_good: float = 0.0) -> Dataset:
    """Whole episodes of random actions, at least that many steps; equal environments give equal data.

    A probe can say which action is good: `share_good` of the steps take that one.
    """
    rng = np.random.default_rng(0)
    env.action_space.seed(0)
    columns: dict[str, list[Any]] = {name: [] for name in ("obs", "action", "reward", "terminated", "truncated")}
    final: list[Any] = []
    while len(columns["obs"]) < num_steps:
        obs, _ = env.reset(seed=len(final))
        ended = False
        while not ended:
            action = env.unwrapped.good_action() if rng.random() < share_good else env.action_space.sample()  # type: ignore[attr-defined]
            following, reward, terminated, truncated, _ = env.step(action)
            for name, value in zip(columns, (obs, action, reward, terminated, truncated), strict=True):
                columns[name].append(value)
            obs, ended = following, terminated or truncated
        final.append(obs)
    arrays: dict[str, AnyArray] = {name: np.array(values) for name, values in columns.items()}
    return Dataset(
        observations=arrays["obs"],
        actions=arrays["action"],
        rewards=arrays["reward"].astype(np.float32),
        terminated=arrays["terminated"],
        truncated=arrays["truncated"],
        final_observations=np.array(final),
        observation_space=env.observation_space,
        action_space=env.action_space,
    )


def budget(spec: AlgorithmSpec, steps: int, env: gym.Env[Any, Any], directory: Path) -> dict[str, Any]:
    """Settings of a run of that many steps; for offline algorithms gradient steps, on data that is written there."""
    if not only_offline(spec):
        return {"total_timesteps": steps}
    directory.mkdir(parents=True, exist_ok=True)
    return {"dataset": str(write_dataset(recorded_data(env), directory / "recorded.npz")), "total_updates": steps}
