"""Profile of a run: spans around its parts, as a table and as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_training.deploy.video import VideoCallback
from rl_training.experiment.build import Experiment
from rl_training.experiment.checkpointing import CheckpointCallback
from rl_training.experiment.files import write_json, write_text
from rl_training.experiment.logging import LoggingCallback, ProgressCallback
from rl_training.experiment.runs import EvaluationLog
from rl_training.runtime.callbacks import Callback, EvaluationCallback
from rl_training.runtime.collector import Collector

PROFILE, TRACE = "profile.json", "trace.json"
MAX_EVENTS = 200_000
"""Maximum number of spans in a trace that browsers can display; the table counts later spans too."""
CALLBACKS: dict[type[Callback], str] = {
    EvaluationCallback: "evaluate",
    LoggingCallback: "log",
    EvaluationLog: "log",
    CheckpointCallback: "checkpoint",
    ProgressCallback: "progress",
    VideoCallback: "video",
}
"""Part names of callbacks; all others are `callbacks`."""


@dataclass
class Part:
    """Total time of all spans with one name."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0
    """Time excluding nested parts."""


class Profiler:
    """Measures method calls, including nested ones.

    While a method is watched, its object has a wrapper of the same name that times the call. Without profiling there is
    no wrapper and no overhead.

    Example:
        >>> profiler = Profiler()
        >>> numbers = type("Numbers", (), {"total": lambda self: sum(range(1000))})()
        >>> with profiler.watching([(numbers, "total", "add")]):
        ...     _ = [numbers.total() for _ in range(3)]
        >>> [(part.name, part.calls) for part in profiler.parts()]
        [('add', 3)]
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, float, float]] = []
        """Name, start and duration in seconds of the first spans."""
        self.wall_seconds = 0.0
        self._parts: dict[str, Part] = {}
        self._inside: list[float] = [0.0]

    def parts(self) -> list[Part]:
        """All parts, longest own time first."""
        return sorted(self._parts.values(), key=lambda part: -part.own_seconds)

    @contextmanager
    def watching(self, methods: list[tuple[Any, str, str]]) -> Iterator[None]:
        """Time methods inside the context; each is given as object, method name and part name."""
        began = time.perf_counter()
        for owner, method, name in methods:
            setattr(owner, method, self._timed(getattr(owner, method), name))
        try:
            yield
        finally:
            self.wall_seconds += time.perf_counter() - began
            for owner, method, _ in methods:
                delattr(owner, method)

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        part = self._parts.setdefault(name, Part(name))

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._inside.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - began
                part.calls += 1
                part.seconds += seconds
                part.own_seconds += seconds - self._inside.pop()
                self._inside[-1] += seconds
                if len(self.events) < MAX_EVENTS:
                    self.events.append((name, began, seconds))

        return timed

    def table(self) -> str:
        """The parts as a text table."""
        wall = max(self.wall_seconds, 1e-9)
        lines = [f"{'part':<12}{'seconds':>10}{'share':>8}{'calls':>12}{'per call':>14}"]
        rest = Part("other", own_seconds=self.wall_seconds - sum(part.own_seconds for part in self._parts.values()))
        for part in [*self.parts(), rest]:
            each = f"{1e6 * part.seconds / part.calls:,.1f} us" if part.calls else ""
            own = part.own_seconds
            lines.append(f"{part.name:<12}{own:>10.2f}{own / wall:>8.1%}{part.calls or '':>12}{each:>14}")
        return "\n".join(lines)

    def write(self, directory: Path) -> None:
        """Write table and trace into a run directory."""
        parts = [asdict(part) for part in self.parts()]
        write_json(directory / PROFILE, {"wall_seconds": self.wall_seconds, "parts": parts})
        began = min((event[1] for event in self.events), default=0.0)
        events = [
            {"name": name, "ph": "X", "pid": 0, "tid": 0, "ts": 1e6 * (start - began), "dur": 1e6 * seconds}
            for name, start, seconds in self.events
        ]
        write_text(directory / TRACE, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def watched_methods(experiment: Experiment, callbacks: list[Callback]) -> list[tuple[Any, str, str]]:
    """The methods of a run that a profile distinguishes."""
    trainer = experiment.trainer
    collector, algorithm = trainer.collector, trainer.algorithm
    methods: list[tuple[Any, str, str]] = [(algorithm.policy, "act", "act"), (algorithm, "update", "update")]
    if isinstance(collector, Collector):
        methods += [(collector, "collect", "collect"), (collector.env, "step", "env")]
    if hasattr(algorithm.policy, "act_on_arrays"):
        methods.append((algorithm.policy, "act_on_arrays", "act"))
    for name in ("buffer", "sampler"):  # where steps are stored, depending on the regime
        if hasattr(vars(trainer).get(name), "add"):
            methods.append((vars(trainer)[name], "add", "store"))
    if "sampler" in vars(trainer):
        methods.append((vars(trainer)["sampler"], "sample", "sample"))
        methods.append((vars(trainer)["sampler"], "update_priorities", "sample"))
    if "exploration" in vars(trainer):
        methods.append((vars(trainer)["exploration"].random_policy, "act", "act"))
    for callback in callbacks:
        name = next((label for cls, label in CALLBACKS.items() if isinstance(callback, cls)), "callbacks")
        methods += [(callback, hook, name) for hook in ("on_start", "on_iteration", "on_evaluation", "on_stop")]
    return methods
