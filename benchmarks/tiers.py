"""What each tier of acceleration gives: plain torch, torch.compile, recordings, C, own convolutions.

    python benchmarks/tiers.py                          # every task and tier, 3 turns: hours on two cores
    python benchmarks/tiers.py --task sac_halfcheetah --tier recorded compiled --repeats 5
    python benchmarks/tiers.py --neighbours 0 1 2 4 --tier convolutions --peers sb3   # beside busy processes
    python benchmarks/tiers.py --total 20000 --task sac_halfcheetah                  # from a cold start

Tiers take turns, one process for each run; the median of the turns counts. With `--neighbours N`, N busy processes run
meanwhile. With `--total N`, runs end at step N and the time from the start of the process is what matters; the cache
of compiled libraries is then empty at the start of each run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "sides"))
from benchmarks.harness import ENVIRONMENTS, PEERS, RESULTS, SIDES, SideError, about, merge_results, run_side, script
from benchmarks.sides.run_tier import TIERS
from benchmarks.sides.tasks import TASKS

OUTPUT = RESULTS / "tiers.json"


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many busy processes."""
    command = [sys.executable, str(SIDES / "neighbour.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, env=env) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(name: str, task: str, threads: int, total: int, environments: Path) -> dict[str, Any]:
    """One run of a tier or of a peer."""
    steps = total or TASKS[task].steps
    if name in PEERS:
        command, side = script(f"run_{name}.py", task, "--threads", str(threads), "--steps", str(steps)), name
    else:
        command, side = script("run_tier.py", name, task, "--threads", "0", "--steps", str(steps)), "ours"
    with tempfile.TemporaryDirectory() as cache:
        if total:
            os.environ["XDG_CACHE_HOME"] = cache
        found = run_side(side, command, environments, threads=threads if name in PEERS else 0)
        os.environ.pop("XDG_CACHE_HOME", None)
    return found


def measure(task: str, names: list[str], beside: int, options: argparse.Namespace) -> dict[str, Any]:
    """All tiers and peers of one task in turns."""
    speeds: dict[str, list[float]] = {name: [] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    with neighbours(beside):
        for _ in range(options.repeats):
            for name in names:
                if name in errors:
                    continue
                try:
                    found = run(name, task, options.threads, options.total, options.environments)
                except SideError as error:
                    errors[name] = str(error)
                    print(f"  {name} failed: {error}", flush=True)
                    continue
                speeds[name].append(found["steps_per_second"])
                seconds[name].append(found["seconds"])
                print(f"  {name:<15}{speeds[name][-1]:>10,.1f} steps/s {seconds[name][-1]:>8.1f} s", flush=True)
    return {
        "steps_per_second": speeds,
        "median": {name: statistics.median(values) for name, values in speeds.items() if values},
        "seconds": seconds,
        "errors": errors,
        "neighbours": beside,
        "total": options.total,
        "about": about(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--tier", nargs="*", choices=TIERS, default=list(TIERS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--threads", type=int, default=0, help="of peers; 0 for their own choice")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--neighbours", nargs="+", type=int, default=[0])
    parser.add_argument("--total", type=int, default=0, help="end there instead of where the task ends")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    for task in options.task:
        for beside in options.neighbours:
            print(f"{task}, {beside} neighbours", flush=True)
            found = measure(task, [*options.tier, *options.peers], beside, options)
            key = task + (f" beside {beside}" if beside else "") + (f" to {options.total}" if options.total else "")
            merge_results(options.output, "tasks", {key: found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
