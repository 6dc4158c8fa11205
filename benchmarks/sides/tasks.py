"""What is compared: the same work for every side, in this package's words. Plain Python, read in every environment.

Settings that a task does not name are the defaults that all sides share. `start` is the step from which speed is
measured: by then networks are compiled, replay has something in it, and every kind of update has been made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One comparison."""

    algo: str
    env_id: str
    steps: int
    start: int
    settings: dict[str, Any] = field(default_factory=dict)
    num_envs: int = 1
    peers: tuple[str, ...] = ("sb3", "sbx")
    sizes: tuple[int, ...] = (64, 64)
    atari: bool = False


ACTOR_CRITIC = {"learning_rate": 3e-4, "batch_size": 256, "buffer_size": 100_000, "learning_starts": 100, "tau": 0.005}

TASKS: dict[str, Task] = {
    "ppo_cartpole": Task(
        "ppo",
        "CartPole-v1",
        steps=65_536,
        start=8_192,
        num_envs=8,
        settings={"num_steps": 128, "num_epochs": 4, "minibatch_size": 256, "learning_rate": 2.5e-4, "ent_coef": 0.01},
    ),
    "ppo_halfcheetah": Task(
        "ppo",
        "HalfCheetah-v5",
        steps=12_288,
        start=2_048,
        settings={"num_steps": 2048, "num_epochs": 10, "minibatch_size": 64, "learning_rate": 3e-4, "ent_coef": 0.0},
    ),
    "dqn_cartpole": Task(
        "dqn",
        "CartPole-v1",
        steps=8_000,
        start=1_500,
        settings={
            "learning_rate": 1e-3,
            "batch_size": 64,
            "buffer_size": 50_000,
            "learning_starts": 1_000,
            "num_steps": 1,
            "updates_per_step": 1.0,
            "target_update_every": 500,
        },
    ),
    "sac_halfcheetah": Task("sac", "HalfCheetah-v5", steps=1_500, start=400, settings=ACTOR_CRITIC, sizes=(256, 256)),
    "td3_halfcheetah": Task("td3", "HalfCheetah-v5", steps=2_400, start=400, settings=ACTOR_CRITIC, sizes=(256, 256)),
    "ppo_pong": Task(
        "ppo",
        "ALE/Pong-v5",
        steps=6_144,
        start=1_024,
        num_envs=8,
        settings={"num_steps": 128, "num_epochs": 4, "minibatch_size": 256, "learning_rate": 2.5e-4, "ent_coef": 0.01},
        peers=("sb3",),
        atari=True,
    ),
    "dqn_pong": Task(
        "dqn",
        "ALE/Pong-v5",
        steps=3_600,
        start=1_600,
        settings={
            "learning_rate": 1e-4,
            "batch_size": 32,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "num_steps": 4,
            "updates_per_step": 0.25,
            "target_update_every": 250,
        },
        peers=("sb3",),
        atari=True,
    ),
    "recurrent_ppo_cartpole": Task(
        "recurrent_ppo",
        "CartPole-v1",
        steps=8_192,
        start=2_048,
        num_envs=8,
        settings={"num_steps": 128, "num_epochs": 4, "minibatch_size": 256, "learning_rate": 2.5e-4, "ent_coef": 0.01},
        peers=("sb3",),
    ),
}
