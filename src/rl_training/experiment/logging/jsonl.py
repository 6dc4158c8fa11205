"""metrics.jsonl: one JSON object per line, readable by anything."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_training.experiment.files import write_text


class JsonlLogger:
    """Appends lines to a file. NaN and infinity, which JSON does not have, become null."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {**numbers, "global_step": step, "time/unix": round(time.time(), 3)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a metrics file; a line that was cut off by a crash is passed over."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("global_step"), int):
                yield entry


def rewind_metrics(path: Path, env_steps: int) -> None:
    """Drop the lines from beyond a step: the run goes on from there and will write them again."""
    if path.exists():
        kept = [entry for entry in read_metrics(path) if entry["global_step"] <= env_steps]
        write_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))
