"""The clock that all sides share: when a run reached a step, when it was over, and how much memory it took."""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from importlib.metadata import version

from tasks import TASKS, Task


class Clock:
    """Seconds since this object was made, which is before anything heavy is imported."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.marks: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        """Seconds of processor time, over all threads."""

    def mark(self, name: str) -> None:
        """Remember now, unless it was marked before."""
        if name not in self.marks:
            self.marks[name], self.cpu[name] = time.perf_counter() - self.began, time.process_time()


def run(side: Callable[[Task, int, Clock], None], packages: tuple[str, ...]) -> None:
    """Measure one run, and print what was found as one line of JSON."""
    clock = Clock()
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    task = TASKS[args.task]
    side(task, args.threads, clock)
    clock.mark("end")
    seconds = clock.marks["end"] - clock.marks["start"]
    found = {
        "steps_per_second": (task.steps - task.start) / seconds,
        "steps_per_cpu_second": (task.steps - task.start) / (clock.cpu["end"] - clock.cpu["start"]),
        "seconds_to_import": clock.marks["imported"],
        "seconds_to_start": clock.marks["start"],
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {name: version(name) for name in packages},
    }
    print(json.dumps(found))
