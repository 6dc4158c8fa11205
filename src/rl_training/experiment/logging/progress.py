"""The progress bar: steps, percent, speed, return, best return, time left. Plain lines without a terminal."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rl_training.runtime.callbacks import Callback, RunView

LINE_SECONDS = 5.0
"""Seconds between plain lines."""


class ProgressCallback(Callback):
    """Shows training progress on standard error, so that standard output stays clean."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title = title
        self.console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._began = 0.0
        self._first = 0
        self._shown = 0.0

    def on_start(self, run: RunView) -> None:
        """See `Callback.on_start`."""
        self._began = self._shown = time.monotonic()
        self._first = run.position
        if not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + run.unit),
            TextColumn("[cyan]{task.fields[speed]}"),
            TextColumn("[green]{task.fields[returns]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self._task = self._bar.add_task(self.title, total=run.end, completed=run.position, speed="", returns="")
        self._bar.start()

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        now = time.monotonic()
        wait = 0.1 if self._bar is not None else LINE_SECONDS
        if now - self._shown >= wait:
            self._shown = now
            self._show(run)

    def on_stop(self, run: RunView) -> None:
        """See `Callback.on_stop`."""
        self._show(run)

    def close(self) -> None:
        """See `Callback.close`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, run: RunView) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = (run.position - self._first) / seconds
        speed, returns = f"{rate:,.0f} {run.unit}/s", self._returns(run)
        if self._bar is not None:
            done = min(run.position, run.end)
            self._bar.update(self._task, completed=done, speed=speed, returns=returns)
            return
        left = (run.end - run.position) / rate if rate > 0 else 0.0
        percent = 100 * run.position / max(run.end, 1)
        self.console.print(
            f"{self.title}: {run.position:,}/{run.end:,} {run.unit} ({percent:.0f} %), {speed}, "
            f"{returns or 'no episode yet'}, {max(left, 0):.0f} s left",
            soft_wrap=True,
            highlight=False,
        )

    def _returns(self, run: RunView) -> str:
        mean = run.metrics().get("rollout/return_mean")
        parts = [] if mean is None else [f"return {mean:.1f}"]
        if run.best_return is not None:
            parts.append(f"best {run.best_return:.1f}")
        return ", ".join(parts)
