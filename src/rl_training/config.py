"""Public module for the configuration."""

from rl_training.experiment.config import TrainConfig

__all__ = ["TrainConfig"]
