"""Learning from recorded data against d3rlpy: scores, and updates per second.

    python benchmarks/offline.py --data DIRECTORY                         # everything: days on two cores
    python benchmarks/offline.py --data DIRECTORY --algos iql --datasets pendulum-replay --seeds 0
    python benchmarks/offline.py --data DIRECTORY --max-runs 1            # the next run only, for a queue
    python benchmarks/offline.py --speed                                  # updates per second; needs no data

Both sides get the same files, networks ([256, 256]), batch size, learning rates and number of updates, and are
evaluated in the same episodes (`sides/offline_tasks.py`); other settings are the defaults of each side. d3rlpy has its
own virtual environment, created when first needed. One run of one side is one process with one thread.

Each result is written as soon as it is there. A further call skips what was measured with the same number of updates,
so an interrupted benchmark goes on. A side that lacks an algorithm, or a discrete form of it, is named and left out.

Known differences: d3rlpy leaves out the last transition of an episode that was cut by a time limit, because it has no
next observation for it. Its BEAR has a warm-up of 40 000 updates, here at most a fifth of all.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import ENVIRONMENTS, RESULTS, SideError, about, merge_results, read_results, run_side, script

sys.path.append(str(Path(__file__).parent / "sides"))
import offline_tasks as tasks

from rl_training.algorithms.registry import registry

OUTPUT = RESULTS / "offline.json"
SIDES = ("ours", "d3rlpy")
TIMEOUT = 24 * 3600.0
BOX_ONLY = {"d3rlpy": {"awac", "iql", "cal_ql", "td3_bc", "rebrac", "bear", "crr"}}
"""Algorithms without a discrete form, by side; this package's registry knows its own."""


def why_not(side: str, algo: str, dataset: str) -> str | None:
    """Why a side cannot do a task; None if it can."""
    is_discrete = dataset == "cartpole-replay"
    if side == "ours":
        spec = registry().get(algo)
        if spec is None:
            return "this version has no algorithm of that name yet"
        names = {space.__name__ for space in spec.action_spaces}
        return None if ("Discrete" if is_discrete else "Box") in names else f"is for {', '.join(sorted(names))} actions"
    return "has no discrete form there" if is_discrete and algo in BOX_ONLY.get(side, ()) else None


def chosen(args: argparse.Namespace, datasets: list[str]) -> list[tuple[str, str, str]]:
    """The tasks (side, algorithm, dataset) that can be done; the others are named once."""
    found, refused = [], []
    for dataset, algo, side in itertools.product(datasets, args.algos, args.sides):
        reason = why_not(side, algo, dataset)
        if reason is None:
            found.append((side, algo, dataset))
        else:
            refused.append(f"left out: {side}, {algo} on {dataset}: {reason}")
    print(*refused, sep="\n", flush=True)
    return found


def command(side: str, algo: str, dataset: str, file: Path, args: argparse.Namespace, seed: int) -> list[str]:
    """The command of one run."""
    options = ["--updates", str(args.updates), "--seed", str(seed)]
    return script(f"offline_{side}.py", algo, dataset, str(file), *options)


def measure_scores(args: argparse.Namespace) -> int:
    """Make the runs that are missing, all tasks with one seed before the next seed. Returns the number of failures."""
    done = read_results(args.output).get("runs", {})
    failed = made = 0
    for seed, (side, algo, dataset) in itertools.product(args.seeds, chosen(args, args.datasets)):
        key = f"{side}/{algo}/{dataset}/seed{seed}/{args.updates}"
        if key in done:
            continue
        if args.max_runs is not None and made >= args.max_runs:
            break
        made += 1
        file = args.data / tasks.DATASETS[dataset].file
        try:
            found = run_side(
                side, command(side, algo, dataset, file, args, seed), args.environments, threads=1, timeout=TIMEOUT
            )
        except SideError as error:
            failed += 1
            print(f"failed: {key}: {error}", flush=True)
            continue
        merge_results(args.output, "runs", {key: {**found, "about": about()}})
        print(f"{key}: {found['mean']:.1f} in {found['seconds']:,.0f} s", flush=True)
    return failed


def measure_speed(args: argparse.Namespace) -> int:
    """Measure updates per second, the sides in turns. Returns the number of failures."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        file = tasks.write_speed_data(Path(scratch) / "speed.npz")
        speeds: dict[tuple[str, str], list[float]] = {}
        for _, (side, algo, _) in itertools.product(range(args.repeats), chosen(args, ["speed"])):
            try:
                found = run_side(side, command(side, algo, "speed", file, args, 0), args.environments, threads=1)
            except SideError as error:
                failed += 1
                print(f"failed: {side}, {algo}: {error}", flush=True)
                continue
            speeds.setdefault((side, algo), []).append(found["updates_per_second"])
            print(f"{side}, {algo}: {found['updates_per_second']:.1f} updates/s", flush=True)
    for algo in args.algos:
        entry: dict[str, Any] = {side: speeds[side, algo] for side in args.sides if (side, algo) in speeds}
        if len(entry) == len(SIDES):
            ratios = [ours / theirs for ours, theirs in zip(entry["ours"], entry["d3rlpy"], strict=False)]
            entry["ratio"] = statistics.median(ratios)
            print(f"{algo}: {entry['ratio']:.2f} times as fast as d3rlpy", flush=True)
        if entry:
            merge_results(args.output, "speed", {algo: {**entry, "updates": args.updates, "about": about()}})
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help=f"directory with {', '.join(d.file for d in tasks.DATASETS.values())}"
    )
    parser.add_argument("--algos", nargs="+", choices=tasks.LEARNING_RATES, default=None)
    parser.add_argument("--datasets", nargs="+", choices=tasks.DATASETS, default=list(tasks.DATASETS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=None, help="gradient steps: 100 000, or 1 000 timed for --speed")
    parser.add_argument("--max-runs", type=int, default=None, help="stop after so many runs")
    parser.add_argument("--speed", action="store_true", help="measure updates per second")
    parser.add_argument("--repeats", type=int, default=5, help="turns of --speed")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if args.updates is None:
        args.updates = 1_000 if args.speed else 100_000
    if args.algos is None:
        args.algos = list(tasks.SPEED_ALGOS if args.speed else tasks.LEARNING_RATES)
    if args.speed:
        return 1 if measure_speed(args) else 0
    if args.data is None:
        parser.error("--data: give the directory with the datasets")
    if missing := [name for name in args.datasets if not (args.data / tasks.DATASETS[name].file).is_file()]:
        parser.error(f"--data: {args.data} lacks {', '.join(tasks.DATASETS[name].file for name in missing)}")
    return 1 if measure_scores(args) else 0


if __name__ == "__main__":
    sys.exit(main())
