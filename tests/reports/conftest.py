"""Real runs, made once: small ones of two algorithms, with seeds, settings that differ, a resume and a video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_training import A2C, PPO

TINY: dict[str, Any] = {
    "num_envs": 2, "num_steps": 16, "eval_every": 64, "eval_episodes": 2, "log_every": 32, "checkpoint_every": 64,
    "tensorboard": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of runs that tests read, and copy before they change anything."""
    root = tmp_path_factory.mktemp("suite")
    for seed in (0, 1, 2):
        PPO("CartPole-v1", seed=seed, **TINY).learn(256, run_dir=root / f"ppo-{seed}", progress=False)
    wider = PPO("CartPole-v1", seed=0, gae_lambda=0.5, **TINY)
    wider.learn(256, run_dir=root / "ppo-lambda", progress=False)
    training_only = A2C("Pendulum-v1", seed=0, **{**TINY, "eval_every": 0})
    training_only.learn(512, run_dir=root / "a2c-0", progress=False)  # an episode has 200 steps
    agent = PPO.load(root / "ppo-0" / "checkpoints" / "best")
    agent.record_video(root / "ppo-0" / "videos", 1, seed=1)
    return root
