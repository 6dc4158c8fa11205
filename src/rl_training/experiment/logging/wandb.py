"""Weights & Biases, behind the `wandb` setting and extra."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import MissingExtraError


def require_wandb() -> None:
    """Raise an error before training if Weights & Biases is not installed."""
    if find_spec("wandb") is None:
        raise MissingExtraError("the wandb setting", "wandb")


class WandbLogger:
    """Sends scalars to one W&B run, named like the run directory; a resumed run continues the same W&B run."""

    def __init__(self, directory: Path, config: dict[str, Any], run_id: str) -> None:
        require_wandb()
        import wandb

        name = directory.resolve().name
        self._run = wandb.init(
            project="rl-training", id=run_id, name=name, resume="allow", dir=str(directory), config=config
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See `Logger.close`."""
        self._run.finish()
