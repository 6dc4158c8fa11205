"""TensorBoard event files."""

from __future__ import annotations

import io
import math
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_training.experiment.files import Appender


class TensorBoardLogger:
    """Writes scalars. TensorBoard is imported here only, when used: the import is slow.

    TensorBoard's own writer uses a thread and ends a run when the disk is full; here events are written as in
    metrics.jsonl.

    `history` holds what was logged before, from metrics.jsonl: event files cannot be truncated, so they are rewritten
    from it after a resume, without missing or duplicate steps.
    """

    def __init__(self, directory: Path, history: Iterable[Mapping[str, Any]] = ()) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = Appender(directory / name)
        begin = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.write(begin + b"".join(_history(history)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._file.write(_scalars(step, metrics, time.time()))

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


def _history(entries: Iterable[Mapping[str, Any]]) -> Iterable[bytes]:
    for entry in entries:
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        yield _scalars(int(entry["global_step"]), numbers, entry.get("time/unix") or time.time())


def _scalars(step: int, metrics: Mapping[str, float], wall_time: float) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=name, simple_value=float(value))
        for name, value in metrics.items()
        if math.isfinite(value) and name not in ("global_step", "time/unix")
    ]
    return _record(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))


def _record(event: Any) -> bytes:
    """An event in the format of event files: with length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()
