"""Shared code for measurements with two sides: with and without a feature.

The success rate is over 100 deterministic episodes of the final policy. Results are merged into the output file after
every run, so a measurement may be interrupted and run in parts; results with other settings are measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.experiment.files import read_json, write_json
from rl_training.experiment.metadata import collect_metadata

RESULTS = Path(__file__).parents[1] / "src/rl_training/zoo/results"
EPISODES = 100
PROTOCOL = f"share of {EPISODES} episodes of the final policy that succeed, deterministic actions"


@dataclass(frozen=True)
class Measurement:
    """Tasks, each trained on every side."""

    tasks: Mapping[str, Any]
    sides: Mapping[str, Any]
    """The names of the sides, and the argument of `task.train` for each."""
    describe: Callable[[Any], dict[str, Any]]
    """Everything that affects the results of a task, besides the seed."""
    output: str

    def load(self, path: Path, name: str) -> dict[str, Any]:
        """The entry of a task; empty if it was never measured, or with other settings."""
        entry: dict[str, Any] = read_json(path)["tasks"].get(name, {}) if path.is_file() else {}
        about = json.loads(json.dumps(self.describe(self.tasks[name])))
        is_same = {key: entry.get(key) for key in about} == about
        return entry if is_same else {**about, **{side: {} for side in self.sides}}

    def merge(self, path: Path, name: str, side: str, seed: int, run: dict[str, Any]) -> dict[str, Any]:
        """Add one run to the file; returns the task's entry for that side."""
        entry = self.load(path, name)
        seeds = dict(sorted({**entry[side].get("seeds", {}), str(seed): run}.items(), key=lambda item: int(item[0])))
        entry[side] = {"median": statistics.median(run["success_rate"] for run in seeds.values()), "seeds": seeds}
        tasks = {**(read_json(path)["tasks"] if path.is_file() else {}), name: entry}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            path, {"protocol": PROTOCOL, "tasks": {known: tasks[known] for known in self.tasks if known in tasks}}
        )
        part: dict[str, Any] = entry[side]
        return part

    def main(self, description: str | None) -> None:
        """Run the measurements that the command line selects."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(self.tasks)}; all if none")
        parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
        parser.add_argument("--output", type=Path, default=RESULTS / self.output)
        parser.add_argument("--again", action="store_true", help="measure seeds again that were measured before")
        args = parser.parse_args()
        if unknown := set(args.tasks) - set(self.tasks):
            parser.error(f"there is no task {', '.join(sorted(unknown))}; there are {', '.join(self.tasks)}")
        for seed in args.seeds:
            for name in args.tasks or self.tasks:
                for side, given in self.sides.items():
                    if str(seed) in self.load(args.output, name)[side].get("seeds", {}) and not args.again:
                        print(f"{name} {side} seed {seed}: measured before")
                        continue
                    run = measure(self.tasks[name], given, seed)
                    part = self.merge(args.output, name, side, seed, run)
                    print(
                        f"{name} {side} seed {seed}: success {run['success_rate']:.2f}, {run['wall_seconds']:.0f} s "
                        f"(cpu {run['cpu_seconds']:.0f} s); median of {len(part['seeds'])}: {part['median']:.2f}",
                        flush=True,
                    )


def measure(task: Any, given: Any, seed: int) -> dict[str, Any]:
    """Train one seed and evaluate it."""
    began, began_cpu = time.perf_counter(), time.process_time()
    result = task.train(given, seed, EPISODES)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    about = collect_metadata()
    return {
        "success_rate": result.success_rate,
        "mean": round(result.mean, 3),
        "wall_seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "date": about["created"],
        "cpu": about["hardware"]["cpu"],
        "versions": about["versions"],
    }
