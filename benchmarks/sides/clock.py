"""The clock that all sides share: when a run reached a step, when it ended, and how much memory it used."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from tasks import TASKS, Task

FIRST_STEPS = {
    "CartPole-v1": (("gymnasium.envs.classic_control.cartpole", "CartPoleEnv", "CartPoleVectorEnv"),),
    "HalfCheetah-v5": (("gymnasium.envs.mujoco.half_cheetah_v5", "HalfCheetahEnv"),),
    "ALE/Pong-v5": (("ale_py.env", "AtariEnv"), ("ale_py.vector_env", "AtariVectorEnv")),
}
"""Modules and classes whose first `step` call is the first step of a run."""


class Clock:
    """Seconds since the process was started, or if unknown, since this object was created."""

    def __init__(self, spawned: float | None = None) -> None:
        already = 0.0 if spawned is None else max(0.0, time.time() - spawned)
        self.began = time.perf_counter() - already
        self.marks: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        """CPU seconds over all threads."""
        self.threads: int | None = None
        """Torch's number of threads, if the side reports it."""

    def mark(self, name: str) -> None:
        """Record the current time, unless the name was marked before."""
        if name not in self.marks:
            self.marks[name], self.cpu[name] = time.perf_counter() - self.began, time.process_time()

    def await_first_step(self, env_id: str) -> None:
        """Mark the first step of an environment of this kind, whoever calls it; later calls are not wrapped."""
        for module, *names in FIRST_STEPS[env_id]:
            for name in names:
                cls = getattr(importlib.import_module(module), name, None)
                if cls is not None:
                    self._watch(cls)

    def _watch(self, cls: Any) -> None:
        step = cls.step

        def first(env: Any, *args: Any, **kwargs: Any) -> Any:
            self.mark("first_step")
            cls.step = step
            return step(env, *args, **kwargs)

        cls.step = first


def run(side: Callable[[Task, int, Clock], None], packages: tuple[str, ...]) -> None:
    """Measure one run, and print the results as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="end there instead of where the task ends")
    parser.add_argument("--spawned", type=float, default=None, help="when the process was started (time.time())")
    args = parser.parse_args()
    clock = Clock(args.spawned)
    task = TASKS[args.task]
    if args.steps:
        task = dataclasses.replace(task, steps=args.steps, start=min(task.start, args.steps // 2))
    side(task, args.threads, clock)
    clock.mark("end")
    steps = task.steps - task.start
    found = {
        "steps_per_second": steps / (clock.marks["end"] - clock.marks["start"]),
        "steps_per_cpu_second": steps / (clock.cpu["end"] - clock.cpu["start"]),
        "seconds_to_import": clock.marks["imported"],
        "seconds_to_first_step": clock.marks.get("first_step"),
        "seconds_to_start": clock.marks["start"],
        "seconds": clock.marks["end"],
        "steps": task.steps,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "threads": clock.threads or args.threads,
        "versions": {name: version(name) for name in packages},
    }
    print(json.dumps(found))
