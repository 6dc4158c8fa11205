"""Public module for training from a config."""

from __future__ import annotations

from typing import Any

from rl_training.api.agent import split_settings
from rl_training.api.session import train
from rl_training.contracts.errors import ConfigError
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.trainer import TrainResult

__all__ = ["train", "train_ppo"]


def train_ppo(cfg: TrainConfig, **settings: Any) -> TrainResult:
    """`train` for PPO, with fields of the config by keyword: `train_ppo(cfg, total_timesteps=1024, num_steps=64)`."""
    if cfg.algo != "ppo":
        raise ConfigError(f"algo: train_ppo needs a config for 'ppo', got '{cfg.algo}'")
    return train(cfg.updated(split_settings("ppo", settings, cfg.env_id), "train_ppo"))
