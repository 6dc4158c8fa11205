"""Progress display of a benchmark: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from rl_training.contracts.text import printable
from rl_training.zoo.benchmark import Job, Outcome, View

LINE_SECONDS = 30.0
"""Seconds between plain lines about an active run."""
ORDER = ("training", "evaluating", "failed", "done", "waiting")
COLORS = {"training": "cyan", "evaluating": "cyan", "done": "green", "failed": "red", "waiting": "dim"}


@contextmanager
def showing(title: str, *, quiet: bool = False, console: Console | None = None) -> Iterator[View]:
    """A view that writes to standard error."""
    console = console or Console(file=sys.stderr)
    if quiet:
        yield Silence()
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            yield LiveTable(title, live, console)
    else:
        yield PlainLines(console)


class Silence:
    """Shows nothing."""

    def update(self, jobs: Sequence[Job]) -> None:
        """See `View.update`."""


class LiveTable:
    """A table redrawn in place: active runs first, then as many others as fit on the screen."""

    def __init__(self, title: str, live: Live, console: Console) -> None:
        self.title, self.live, self.console = title, live, console
        self.began = time.monotonic()

    def update(self, jobs: Sequence[Job]) -> None:
        """See `View.update`."""
        self.live.update(self.table(jobs), refresh=True)

    def table(self, jobs: Sequence[Job]) -> Table:
        """The current table."""
        done = sum(job.state == "done" for job in jobs)
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        title = f"{self.title}: {done} of {len(jobs)} runs done, {minutes}:{seconds:02} min"
        table = Table(
            "task", "seed", "state", "steps", "steps/s", "return", title=title, title_justify="left", box=None
        )
        room = max(5, self.console.height - 4)
        shown = sorted(jobs, key=lambda job: ORDER.index(job.state))
        for job in shown[:room]:
            table.add_row(*_row(job))
        if len(shown) > room:
            table.caption = f"and {len(shown) - room} more"
        return table


def _row(job: Job) -> list[str]:
    share = f"{100 * job.steps // job.config.budget} %" if job.steps else ""
    speed, latest = "", job.latest
    if job.result is not None:
        share, speed = "", f"{job.result.env_steps_per_second:,.0f}"
        judged = job.result.judged(job.task.judge)
        latest = judged.mean if judged is not None else None
    elif job.process is not None and job.rate:
        speed = f"{job.rate:,.0f}"
    state = f"[{COLORS[job.state]}]{job.state}[/]" + (f" {share}" if job.state == "training" else "")
    steps = (
        f"{job.steps:,}/{job.config.budget:,}"
        if job.result is None
        else f"{job.result.env_steps or job.result.updates:,}"
    )
    if job.note:
        state += f" ({escape(printable(job.note[:60]))})"
    return [
        escape(printable(job.task.name)),
        str(job.seed),
        state,
        steps,
        speed,
        "" if latest is None else f"{latest:.1f}",
    ]


class PlainLines:
    """Prints a line when a run changes state, and from time to time while it is active."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._states: dict[str, str] = {}
        self._shown: dict[str, float] = {}

    def update(self, jobs: Sequence[Job]) -> None:
        """See `View.update`."""
        now = time.monotonic()
        for job in jobs:
            changed = self._states.get(job.name, "waiting") != job.state
            stale = job.process is not None and now - self._shown.get(job.name, now) >= LINE_SECONDS
            if changed or stale:
                self._states[job.name], self._shown[job.name] = job.state, now
                done = sum(other.state == "done" for other in jobs)
                line = printable(f"[{done}/{len(jobs)}] {_line(job)}")
                self.console.print(line, soft_wrap=True, highlight=False, markup=False)


def _line(job: Job) -> str:
    if job.result is not None:
        judged = job.result.judged(job.task.judge)
        reached = "" if judged is None else f", return {judged.mean:.1f} +/- {judged.std:.1f}"
        speed = f"{job.result.env_steps_per_second:,.0f} steps/s"
        return f"{job.name}: done{reached}, {job.result.wall_seconds:.0f} s, {speed}"
    if job.state == "training" and job.steps:
        latest = "" if job.latest is None else f", return {job.latest:.1f}"
        return f"{job.name}: {job.steps:,}/{job.config.budget:,} steps, {job.rate:,.0f} steps/s{latest}"
    return f"{job.name}: {job.state}" + (f": {job.note}" if job.note else "")


def summary(outcome: Outcome) -> Table:
    """The results so far: per task, the median over seeds and each seed."""
    table = Table("task", "seeds", "judged", "median", "each seed", box=None)
    wanted = {job.task.name for job in outcome.jobs}
    for task in outcome.manifest.tasks:
        scores = task.scores()
        if task.name in wanted and scores:
            each = "  ".join(f"{score:.1f}" for score in scores)
            name, median = escape(printable(task.name)), f"{statistics.median(scores):.1f}"
            table.add_row(name, str(len(scores)), task.judge, median, each)
    return table
