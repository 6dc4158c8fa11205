"""TensorBoard event files."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class TensorBoardLogger:
    """Writes scalars. TensorBoard is imported only here, when it is used: it is heavy.

    `history` is what was logged before, from metrics.jsonl: event files cannot be shortened, so after a resume they are
    written anew from it, without steps that are missing or there twice.
    """

    def __init__(self, directory: Path, history: Iterable[Mapping[str, Any]] = ()) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        shutil.rmtree(directory, ignore_errors=True)
        self._writer = SummaryWriter(str(directory))
        for entry in history:
            numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
            self._write(int(entry["global_step"]), numbers, entry.get("time/unix"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._write(step, metrics, None)

    def _write(self, step: int, metrics: Mapping[str, float], wall_time: float | None) -> None:
        for name, value in metrics.items():
            if math.isfinite(value) and name not in ("global_step", "time/unix"):
                self._writer.add_scalar(name, value, step, walltime=wall_time)

    def close(self) -> None:
        """See `Logger.close`."""
        self._writer.close()
