"""The compared tasks: the same work for every side, in this package's terms. Plain Python, read in every environment.

A task sets every setting whose default could differ between the sides, even where defaults agree. `start` is the step
from which speed is measured: by then networks are compiled, the replay buffer has data, and every kind of update has
been made.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """One comparison."""

    title: str
    algo: str
    env_id: str
    steps: int
    start: int
    settings: dict[str, Any]
    num_envs: int = 1
    peers: tuple[str, ...] = ("sb3", "sbx")
    sizes: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    atari: bool = False
    total: int = 0
    """Steps for which the time from the start of the process is also reported; 0 for none."""

    @property
    def iteration(self) -> int:
        """Steps between updates: a run can only end at a multiple of it."""
        return int(self.settings["num_steps"]) * self.num_envs

    def measuring(self, share: float) -> Task:
        """The same task with a fraction of its measured steps, in whole iterations and at least one."""
        wanted = (self.steps - self.start) * share / self.iteration
        return dataclasses.replace(self, steps=self.start + max(1, round(wanted)) * self.iteration)


PPO = {
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_coef": 0.2,
    "clip_value_coef": None,
    "vf_coef": 1.0,  # the loss is half the squared error
    "max_grad_norm": 0.5,
    "normalize_advantage": True,
    "target_kl": None,
    "optimizer": {"name": "adam", "eps": 1e-5},
}
PPO_8_ENVS = {
    **PPO,
    "num_steps": 128,
    "num_epochs": 4,
    "minibatch_size": 256,
    "learning_rate": 2.5e-4,
    "ent_coef": 0.01,
}
DQN = {
    "gamma": 0.99,
    "tau": 1.0,
    "double": False,
    "loss": "huber",
    "max_grad_norm": 10.0,
    "epsilon": {"schedule": "linear", "start": 1.0, "end": 0.05, "until": 0.1},
    "optimizer": {"name": "adam", "eps": 1e-8},
}
ACTOR_CRITIC = {
    "gamma": 0.99,
    "learning_rate": 3e-4,
    "batch_size": 256,
    "buffer_size": 100_000,
    "learning_starts": 100,
    "num_steps": 1,
    "updates_per_step": 1.0,
    "tau": 0.005,
    "num_critics": 2,
    "max_grad_norm": None,
    "optimizer": {"name": "adam", "eps": 1e-8},
}
SOFT = {
    **ACTOR_CRITIC,
    "temperature": None,
    "initial_temperature": 1.0,
    "target_entropy": None,
    "policy_delay": 1,
    "noise": {"kind": "none"},
}

TASKS: dict[str, Task] = {
    "ppo_cartpole": Task(
        "PPO, CartPole-v1",
        "ppo",
        "CartPole-v1",
        steps=196_608,
        start=147_456,
        num_envs=8,
        settings=PPO_8_ENVS,
        activation="tanh",
    ),
    "ppo_halfcheetah": Task(
        "PPO, HalfCheetah-v5",
        "ppo",
        "HalfCheetah-v5",
        steps=26_624,
        start=16_384,
        settings={
            **PPO,
            "num_steps": 2048,
            "num_epochs": 10,
            "minibatch_size": 64,
            "learning_rate": 3e-4,
            "ent_coef": 0.0,
        },
        activation="tanh",
    ),
    "dqn_cartpole": Task(
        "DQN, CartPole-v1",
        "dqn",
        "CartPole-v1",
        steps=14_000,
        start=8_000,
        settings={
            **DQN,
            "learning_rate": 1e-3,
            "batch_size": 64,
            "buffer_size": 50_000,
            "learning_starts": 500,
            "num_steps": 1,
            "updates_per_step": 1.0,
            "target_update_every": 250,
        },
    ),
    "sac_halfcheetah": Task(
        "SAC, HalfCheetah-v5",
        "sac",
        "HalfCheetah-v5",
        steps=2_800,
        start=1_600,
        settings=SOFT,
        sizes=(256, 256),
        total=20_000,
    ),
    "tqc_halfcheetah": Task(
        "TQC, HalfCheetah-v5",
        "tqc",
        "HalfCheetah-v5",
        steps=2_400,
        start=1_600,
        settings={**SOFT, "num_quantiles": 25, "num_dropped": 2},
        sizes=(256, 256),
    ),
    "crossq_halfcheetah": Task(
        "CrossQ, HalfCheetah-v5",
        "crossq",
        "HalfCheetah-v5",
        steps=2_400,
        start=1_600,
        settings={**{name: value for name, value in SOFT.items() if name != "tau"}, "policy_delay": 3},
        sizes=(256, 256),
    ),
    "redq_halfcheetah": Task(
        "REDQ with one update per step, HalfCheetah-v5",
        "redq",
        "HalfCheetah-v5",
        steps=2_400,
        start=1_600,
        settings={**SOFT, "num_critics": 10, "num_target_critics": 2},
        peers=(),
        sizes=(256, 256),
    ),
    "droq_halfcheetah": Task(
        "DroQ with 20 updates per step, HalfCheetah-v5",
        "droq",
        "HalfCheetah-v5",
        steps=400,
        start=240,
        settings={**SOFT, "num_target_critics": 2, "policy_delay": 20, "updates_per_step": 20.0},
        peers=(),
        sizes=(256, 256),
    ),
    "td3_halfcheetah": Task(
        "TD3, HalfCheetah-v5",
        "td3",
        "HalfCheetah-v5",
        steps=3_200,
        start=1_600,
        settings={
            **ACTOR_CRITIC,
            "policy_delay": 2,
            "target_noise": 0.2,
            "target_noise_clip": 0.5,
            "noise": {"kind": "gaussian", "std": 0.1},
        },
        sizes=(256, 256),
        total=20_000,
    ),
    "ppo_pong": Task(
        "PPO, Pong",
        "ppo",
        "ALE/Pong-v5",
        steps=7_168,
        start=3_072,
        num_envs=8,
        settings=PPO_8_ENVS,
        peers=("sb3",),
        sizes=(),
        atari=True,
    ),
    "dqn_pong": Task(
        "DQN, Pong",
        "dqn",
        "ALE/Pong-v5",
        steps=3_600,
        start=2_000,
        settings={
            **DQN,
            "learning_rate": 1e-4,
            "batch_size": 32,
            "buffer_size": 100_000,
            "learning_starts": 500,
            "num_steps": 4,
            "updates_per_step": 0.25,
            "target_update_every": 250,
        },
        peers=("sb3",),
        sizes=(),
        atari=True,
    ),
    "recurrent_ppo_cartpole": Task(
        "RecurrentPPO, CartPole-v1",
        "recurrent_ppo",
        "CartPole-v1",
        steps=8_192,
        start=2_048,
        num_envs=8,
        settings={
            **PPO_8_ENVS,
            "sequence_length": None,  # backpropagation through whole rollouts, as in sb3-contrib
            "memory": {"kind": "lstm", "size": 64, "critic": "separate"},
        },
        peers=("sb3",),
        activation="tanh",
    ),
}
