"""Loggers: files, TensorBoard, Weights & Biases, MLflow, the terminal."""

from rl_training.experiment.logging.base import (
    LoggedRun,
    Logger,
    LoggerConfig,
    LoggingCallback,
    make_logger,
    register_logger,
)
from rl_training.experiment.logging.jsonl import JsonlLogger, last_metrics, read_metrics, rewind_metrics
from rl_training.experiment.logging.mlflow import MlflowLogger, require_mlflow
from rl_training.experiment.logging.progress import ProgressCallback
from rl_training.experiment.logging.tensorboard import TensorBoardLogger
from rl_training.experiment.logging.wandb import WandbLogger, require_wandb

__all__ = [
    "JsonlLogger",
    "LoggedRun",
    "Logger",
    "LoggerConfig",
    "LoggingCallback",
    "MlflowLogger",
    "ProgressCallback",
    "TensorBoardLogger",
    "WandbLogger",
    "last_metrics",
    "make_logger",
    "read_metrics",
    "register_logger",
    "require_mlflow",
    "require_wandb",
    "rewind_metrics",
]
