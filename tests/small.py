"""Every algorithm with networks and replay so small that whole runs fit into an ordinary test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from rl_training.algorithms.registry import registry
from rl_training.contracts.spec import AlgorithmSpec
from rl_training.testing import small
from tests.envs.pixel_tasks import DOT


def small_env(spec: AlgorithmSpec) -> str:
    """The id of an environment that the algorithm takes."""
    if spec.needs_images:
        return DOT
    return "CartPole-v1" if spaces.Discrete in spec.action_spaces else "Pendulum-v1"


def small_settings(spec: AlgorithmSpec | str, **changes: Any) -> dict[str, Any]:
    """See `rl_training.testing.small.small_settings`; of an algorithm by its name as well."""
    return small.small_settings(registry()[spec] if isinstance(spec, str) else spec, **changes)


def small_budget(spec: AlgorithmSpec, steps: int, directory: Path) -> dict[str, Any]:
    """See `rl_training.testing.small.budget`; in the environment that `small_env` names."""
    return small.budget(spec, steps, gym.make(small_env(spec)), directory)


def learn(agent: Any, steps: int) -> Any:
    """Train an agent for that many steps: of the environment, or gradient steps on recorded data."""
    spec = registry()[agent.algo]
    if not small.only_offline(spec):
        return agent.learn(steps, progress=False)
    return agent.learn_offline(small.recorded_data(gym.make(small_env(spec))), steps, progress=False)
