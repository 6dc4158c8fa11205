"""Where metrics go: files, TensorBoard, Weights & Biases, the terminal."""

from rl_training.experiment.logging.base import Logger, LoggingCallback
from rl_training.experiment.logging.jsonl import JsonlLogger, read_metrics, rewind_metrics
from rl_training.experiment.logging.progress import ProgressCallback
from rl_training.experiment.logging.tensorboard import TensorBoardLogger
from rl_training.experiment.logging.wandb import WandbLogger, require_wandb

__all__ = [
    "JsonlLogger",
    "Logger",
    "LoggingCallback",
    "ProgressCallback",
    "TensorBoardLogger",
    "WandbLogger",
    "read_metrics",
    "require_wandb",
    "rewind_metrics",
]
