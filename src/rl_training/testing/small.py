"""Settings that make an algorithm small and fast enough for whole runs in a unit test."""

from __future__ import annotations

from typing import Any

from rl_training.contracts.spec import AlgorithmSpec
from rl_training.data.settings import OffPolicyConfig

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
    """Settings of the algorithm: on-policy ones learn from 16 steps, the others from a replay of 200 transitions."""
    names = spec.config.__dataclass_fields__
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
    sizes = {name: (width,) for name in ("sizes", "actor_sizes", "critic_sizes") if hasattr(network, name)}
    return {"network": sizes} if sizes else {}
