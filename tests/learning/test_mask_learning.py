"""A mask must help: where most actions are invalid, the same agent learns faster with the mask than without it."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

import rl_training
from tests.envs.masked_tasks import Corridor

SEEDS = (0, 1, 2)
BEST = float(Corridor.num_steps)
SETTINGS: dict[str, dict[str, Any]] = {
    "PPO": {"num_envs": 8, "num_steps": 48, "learning_rate": 3e-3, "minibatch_size": 128, "num_epochs": 6},
    "A2C": {"num_envs": 8, "num_steps": 12, "learning_rate": 5e-3},
    "TRPO": {"num_envs": 8, "num_steps": 48, "target_kl": 0.05, "learning_rate": 3e-3, "cg_damping": 0.01},
    "DQN": {
        "num_envs": 8, "num_steps": 1, "updates_per_step": 0.25, "learning_rate": 1e-3, "learning_starts": 200,
        "target_update_every": 100, "epsilon": 0.1, "buffer_size": 20_000, "gamma": 0.9,
    },
}  # fmt: skip


def score(title: str, masks: bool, seed: int, num_steps: int) -> float:
    """Mean return of the final policy, deterministic, on a scale from 0 to 12."""
    agent = getattr(rl_training, title)(Corridor, action_masks=masks, seed=seed, eval_every=0, **SETTINGS[title])
    try:
        agent.learn(num_steps, progress=False)
        return float(agent.evaluate(5).mean)
    finally:
        agent.close()


def test_ppo_learns_faster_with_the_mask() -> None:
    """Seconds of training, so that the ordinary tests notice when masks no longer help."""
    with_mask, without = (score("PPO", masks, seed=0, num_steps=3_000) for masks in (True, False))
    assert with_mask >= 0.75 * BEST
    assert without <= 0.5 * BEST


@pytest.mark.learning
@pytest.mark.parametrize("title", SETTINGS)
def test_learned_faster_with_the_mask(title: str) -> None:
    with_mask, without = ([score(title, masks, seed, 6_000) for seed in SEEDS] for masks in (True, False))
    assert median(with_mask) >= 0.75 * BEST, f"with {with_mask}"
    assert median(without) <= median(with_mask) - 3.0, f"with {with_mask}, without {without}"
