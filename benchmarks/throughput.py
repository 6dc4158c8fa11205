"""Speed of this package and its peers on the same machine, in turns: environment steps per second, all included.

    python benchmarks/throughput.py                                     # every task, every peer: 45 to 55 minutes
    python benchmarks/throughput.py --task ppo_cartpole --peers sb3,sbx --repeats 5

Each peer gets its own virtual environment, created when first needed (`--environments` says where; the default is
`.peers` in the root of the repository). The sides take turns, with one process per run. Peers are first tried with one
thread and with one per core, in shorter runs that take turns, and the faster setting is kept; this package chooses for
itself.

The comparison is between what users get by default. Here that is a run directory with metrics, TensorBoard files,
checkpoints and checks of every number, but no evaluations, because the peers do not evaluate by default. Settings are
the same on all sides (`sides/tasks.py`). Timing starts at a step by which everything has been compiled and every kind
of update has been made. The time of a long run from the start of its process is extrapolated from that; `--full`
measures it instead, with one run per side, which takes another half an hour.

Results are merged into the output file task by task. If a side fails, the file says so, and the others continue.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import (
    ENVIRONMENTS,
    PEERS,
    RESULTS,
    SideError,
    about,
    merge_results,
    run_side,
    script,
)
from benchmarks.sides.tasks import TASKS, Task
from benchmarks.summaries import fastest, ratios

OUTPUT = RESULTS / "throughput.json"
TRIAL = 0.3
"""Fraction of a task's measured steps in trial runs that choose the number of threads."""
NUM_TRIALS = 3
"""Trial runs per number of threads; the median speed counts, because a single run may be disturbed."""

Runner = Callable[[str, int, int], dict[str, Any]]
"""Runs one side with a number of threads (0: its own choice) up to a step, and returns the measurements."""


def runner(task: str, environments: Path) -> Runner:
    """A runner that starts a process for each run."""

    def run(side: str, threads: int, steps: int) -> dict[str, Any]:
        command = script(f"run_{side}.py", task, "--threads", str(threads), "--steps", str(steps))
        found = run_side(side, command, environments, threads=threads)
        used = found["threads"] or "own"
        print(f"  {side:<5}{used:>4} threads  {found['steps_per_second']:>10,.1f} steps/s", flush=True)
        return found

    return run


@dataclasses.dataclass
class Side:
    """One side of a comparison, as stored in the results."""

    threads: int = 0
    """0: chosen by the side."""
    trials: dict[str, float] = dataclasses.field(default_factory=dict)
    """Median speed in the trials with each number of threads."""
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    full: dict[str, Any] | None = None
    """A measured run of `Task.total` steps."""
    error: str | None = None
    """Why runs are missing."""


def compare(task: Task, peers: list[str], repeats: int, run: Runner, *, full: bool = False) -> dict[str, Side]:
    """Measure all sides of one task, in turns. A side that failed is not tried again."""
    sides = {name: Side() for name in ["ours", *(peer for peer in peers if peer in task.peers)]}

    def choose_threads(name: str, side: Side) -> None:
        if name != "ours":
            speeds: dict[int, list[float]] = {threads: [] for threads in sorted({1, os.cpu_count() or 1})}
            for _ in range(NUM_TRIALS):
                for threads, found in speeds.items():
                    found.append(run(name, threads, task.measuring(TRIAL).steps)["steps_per_second"])
            side.trials = {str(threads): statistics.median(found) for threads, found in speeds.items()}
            side.threads = fastest(side.trials)

    def measure(name: str, side: Side) -> None:
        side.runs.append(run(name, side.threads, task.steps))

    def measure_full(name: str, side: Side) -> None:
        side.full = run(name, side.threads, task.total)

    for turn in [choose_threads, *[measure] * repeats, *[measure_full] * bool(full and task.total)]:
        for name, side in sides.items():
            if side.error is None:
                try:
                    turn(name, side)
                except SideError as error:
                    side.error = str(error)
                    print(f"  {name} failed: {error}", flush=True)
    return sides


def record(task: Task, sides: dict[str, Side], repeats: int) -> dict[str, Any]:
    """A task's entry in the output file."""
    return {
        "task": dataclasses.asdict(task),
        "repeats": repeats,
        "sides": {name: dataclasses.asdict(side) for name, side in sides.items()},
        "about": about(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--peers", default=",".join(PEERS), help="peers, with commas between them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of each task's measured steps; less is quicker")
    parser.add_argument("--full", action="store_true", help="also runs of 20 000 steps, where these are of interest")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    peers = [peer for peer in args.peers.split(",") if peer]
    if unknown := [peer for peer in peers if peer not in PEERS]:
        parser.error(f"unknown peers: {', '.join(unknown)}; known are {', '.join(PEERS)}")
    failed = []
    for name in args.task:
        print(name, flush=True)
        task = TASKS[name].measuring(args.share)
        sides = compare(task, peers, args.repeats, runner(name, args.environments), full=args.full)
        merge_results(args.output, "tasks", {name: record(task, sides, args.repeats)})
        failed += [f"{name}, {side}: {found.error}" for side, found in sides.items() if found.error]
        for side, found in sides.items():
            if side != "ours" and (times := ratios(sides["ours"].runs, found.runs)):
                print(f"  {statistics.median(times):.2f} times as fast as {side}", flush=True)
    for text in failed:
        print(f"failed: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
