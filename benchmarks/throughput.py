"""Speed of this package and of its peers on the same machine, in turns: environment steps per second, all included.

    python benchmarks/throughput.py                                     # every task, every peer, 5 repeats: an hour
    python benchmarks/throughput.py --task ppo_cartpole --peers sb3,sbx --repeats 5

Each peer gets a virtual environment of its own, made when it is first needed (`--environments` says where; the default
is `.peers` in the root of the repository). The sides take turns, one process for each run. Peers are first tried with
one thread and with as many as there are cores, and the faster setting is kept; this package chooses for itself.

What is compared is what a user gets by default. Here that is a run directory with metrics, TensorBoard files,
checkpoints and checks of every number, but no evaluations, because the peers do not evaluate unless they are told to.
Times begin at a step by which everything has been compiled and every kind of update been made (`sides/tasks.py`);
`seconds_to_start` is the time from the start of the process to that step. Results are merged into the output file task
by task.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from rl_training.experiment.files import read_json, write_json
from rl_training.experiment.metadata import collect_metadata

HERE = Path(__file__).parent
sys.path.append(str(HERE / "sides"))
from tasks import TASKS  # noqa: E402 - read by every side, in environments without this package

OUTPUT = HERE / "results" / "throughput.json"
SHARED = ["gymnasium==1.4.0", "numpy==2.4.6", "mujoco==4.0.0", "imageio==2.38.1", "packaging==26.3"]
PEERS = {
    "sb3": ["torch==2.13.0", "stable-baselines3", "sb3-contrib", "ale-py==0.12.1", "opencv-python==5.0.0.93", *SHARED],
    "sbx": ["torch==2.13.0", "sbx-rl", *SHARED],
}
"""What is installed for each peer, beside what it asks for itself."""


def python_of(side: str, environments: Path) -> Path:
    """The interpreter of a side; for a peer, its environment is made first if there is none."""
    if side == "ours":
        return Path(sys.executable)
    directory = environments / side
    python = directory / "bin" / "python"
    made = directory / ".made"
    if not made.exists():
        print(f"making an environment for {side} in {directory} ...", flush=True)
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEERS[side]], check=True)
        made.touch()
    return python


def run_once(side: str, task: str, threads: int, environments: Path) -> dict[str, Any]:
    """One process, from start to end; what it measured."""
    command = [
        str(python_of(side, environments)),
        str(HERE / "sides" / f"run_{side}.py"),
        task,
        "--threads",
        str(threads),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)} if threads else dict(os.environ)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} {task} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  {side:<5} {threads or 'own':>3} threads  {found['steps_per_second']:>10,.0f} steps/s", flush=True)
    return found


def best_threads(side: str, task: str, environments: Path) -> int:
    """The number of threads with which a peer is fastest; 0 leaves the choice to this package."""
    if side == "ours":
        return 0
    tried = {n: run_once(side, task, n, environments)["steps_per_second"] for n in sorted({1, os.cpu_count() or 1})}
    return max(tried, key=lambda n: tried[n])


def summary(runs: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """The median of every number, and how far the speeds lie apart."""
    speeds = [run["steps_per_second"] for run in runs]
    numbers = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {
        **{name: round(statistics.median(run[name] for run in runs), 2) for name in numbers},
        "slowest": round(min(speeds), 2),
        "fastest": round(max(speeds), 2),
        "repeats": len(runs),
        "threads": threads or "chosen by the package",
        "versions": runs[0]["versions"],
    }


def compare(task: str, peers: list[str], repeats: int, environments: Path) -> dict[str, Any]:
    """All sides of one task, in turns."""
    print(task, flush=True)
    sides = ["ours", *[peer for peer in peers if peer in TASKS[task].peers]]
    threads = {side: best_threads(side, task, environments) for side in sides}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side in sides:
            runs[side].append(run_once(side, task, threads[side], environments))
    found = {side: summary(runs[side], threads[side]) for side in sides}
    pairs = {side: zip(runs["ours"], runs[side], strict=True) for side in sides[1:]}
    ratios = {
        side: [round(ours["steps_per_second"] / its["steps_per_second"], 3) for ours, its in both]
        for side, both in pairs.items()
    }
    for side, values in ratios.items():
        print(f"  {statistics.median(values):.2f} times as fast as {side}", flush=True)
    return {"sides": found, "times_faster_than": ratios, "about": collect_metadata(), "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--peers", default=",".join(PEERS), help="peers, with commas between them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--environments", type=Path, default=HERE.parent / ".peers")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    peers = [peer for peer in args.peers.split(",") if peer]
    if unknown := [peer for peer in peers if peer not in PEERS]:
        parser.error(f"unknown peers: {', '.join(unknown)}; known are {', '.join(PEERS)}")
    for task in args.task:
        results = read_json(args.output) if args.output.is_file() else {}
        results[task] = compare(task, peers, args.repeats, args.environments)
        write_json(args.output, results)


if __name__ == "__main__":
    main()
