"""metrics.jsonl: one JSON object per line."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_training.contracts.state import MAX_NUMBER
from rl_training.experiment.files import Appender, open_file, require_file, write_text

TAIL_BYTES = 16_384
"""Longer than any line."""


class JsonlLogger:
    """Appends lines to a file. NaN and infinity, which JSON does not have, become null."""

    def __init__(self, path: Path) -> None:
        _drop_cut_line(path)
        self._file = Appender(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {**numbers, "global_step": step, "time/unix": round(time.time(), 3)}
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


def _drop_cut_line(path: Path) -> None:
    """Remove an incomplete last line left by a crash, so that the next line is not appended to it."""
    if not os.path.lexists(path):
        return
    require_file(path)
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(begin + tail.rfind(b"\n") + 1)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; incomplete or damaged lines are skipped."""
    return (entry for entry in _lines(path) if entry is not None)


def last_metrics(path: Path) -> dict[str, Any]:
    """The last complete line of a metrics file that may be growing; empty if there is none. Reads only its end."""
    if not os.path.lexists(path):
        return {}
    require_file(path)
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and _is_metrics(entry):
                return entry
    return {}


def rewind_metrics(path: Path, env_steps: int) -> None:
    """Drop the lines after a step: a run resumed from there writes them again."""
    lines = list(_lines(path))
    damaged = lines[:-1].count(None)  # the last one may be incomplete after a crash
    if damaged:
        warnings.warn(f"{path}: {damaged} damaged lines were removed", stacklevel=2)
    kept = [entry for entry in lines if entry is not None and entry["global_step"] <= env_steps]
    if lines:
        write_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """One entry per line, None if the line is not valid."""
    if not os.path.lexists(path):
        return
    require_file(path)
    with io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            yield entry if isinstance(entry, dict) and _is_metrics(entry) else None


def _is_metrics(entry: dict[str, Any]) -> bool:
    def is_number(value: Any) -> bool:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= MAX_NUMBER)

    return isinstance(entry.get("global_step"), int) and all(v is None or is_number(v) for v in entry.values())
