"""Every algorithm with networks and replay so small that whole runs fit into an ordinary test."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from rl_training.algorithms.registry import registry
from rl_training.contracts.spec import AlgorithmSpec, OffPolicyConfig
from tests.envs.pixel_tasks import DOT

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


def small_env(spec: AlgorithmSpec) -> str:
    """The id of an environment that the algorithm takes."""
    if spec.needs_images:
        return DOT
    return "CartPole-v1" if spaces.Discrete in spec.action_spaces else "Pendulum-v1"


def small_settings(spec: AlgorithmSpec | str, **changes: Any) -> dict[str, Any]:
    """Settings of the algorithm: on-policy ones learn from 16 steps, the others from a replay of 200 transitions."""
    spec = registry()[spec] if isinstance(spec, str) else spec
    names = spec.config.__dataclass_fields__
    if not issubclass(spec.config, OffPolicyConfig):
        return {**({"num_steps": 16} if "num_steps" in names else {}), **changes}
    sizes = {"sizes": (8,)} if spaces.Discrete in spec.action_spaces else {"actor_sizes": (8,), "critic_sizes": (8,)}
    own = {name: value for name, value in SIZES.items() if name in names}
    replay = {"buffer_size": 200, "batch_size": 8, "learning_starts": 10, "num_steps": 2, "updates_per_step": 0.5}
    return {**replay, **own, "network": sizes, **changes}
