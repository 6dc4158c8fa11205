"""Train on tasks with goals, with hindsight replay and without: `python -m scripts.measure_hindsight --seeds 0 1 2`.

The tasks and their settings are in `tests/envs/goal_tasks.py`. Nothing but the setting `her` differs between the two.
Success is of 100 deterministic episodes of the final policy. The results are merged into the output file after every
run, so this may be interrupted and run in parts; what was measured with other settings is measured anew.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from rl_training.experiment.files import read_json, write_json
from rl_training.experiment.metadata import collect_metadata
from tests.envs.goal_tasks import TASKS, GoalTask

OUTPUT = Path(__file__).parents[1] / "src/rl_training/zoo/results/hindsight.json"
EPISODES = 100
PROTOCOL = f"share of {EPISODES} episodes of the final policy that succeed, deterministic actions"
SIDES = {"with_her": True, "without_her": False}


def measure(task: GoalTask, her: bool, seed: int) -> dict[str, Any]:
    """Train one seed and evaluate it."""
    began, began_cpu = time.perf_counter(), time.process_time()
    result = task.train(her, seed, EPISODES)
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


def described(task: GoalTask) -> dict[str, Any]:
    """What decides the numbers, besides the seed, as it is written to the file."""
    return {
        "algo": task.algo,
        "env": task.env_class.__name__,
        "env_kwargs": dict(task.env_kwargs),
        "total_timesteps": task.total_timesteps,
        "settings": _lists(task.settings),
    }


def _lists(value: Any) -> Any:
    """Settings as JSON gives them back."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def load(path: Path, name: str) -> dict[str, Any]:
    """The entry of a task; empty if it was measured with other settings, or never."""
    entry: dict[str, Any] = read_json(path)["tasks"].get(name, {}) if path.is_file() else {}
    about = described(TASKS[name])
    return entry if {key: entry.get(key) for key in about} == about else {**about, **{side: {} for side in SIDES}}


def merge(path: Path, name: str, side: str, seed: int, run: dict[str, Any]) -> dict[str, Any]:
    """Add one run to the file, and return the task's side."""
    entry = load(path, name)
    seeds = dict(sorted({**entry[side].get("seeds", {}), str(seed): run}.items(), key=lambda item: int(item[0])))
    entry[side] = {"median": statistics.median(run["success_rate"] for run in seeds.values()), "seeds": seeds}
    tasks = {**(read_json(path)["tasks"] if path.is_file() else {}), name: entry}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"protocol": PROTOCOL, "tasks": {known: tasks[known] for known in TASKS if known in tasks}})
    part: dict[str, Any] = entry[side]
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"all if none is named: {', '.join(TASKS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--again", action="store_true", help="measure seeds again that were measured before")
    args = parser.parse_args()
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"unknown tasks: {', '.join(sorted(unknown))}")
    for seed in args.seeds:
        for name in args.tasks or TASKS:
            for side, her in SIDES.items():
                if str(seed) in load(args.output, name)[side].get("seeds", {}) and not args.again:
                    print(f"{name} {side} seed {seed}: measured before")
                    continue
                run = measure(TASKS[name], her, seed)
                entry = merge(args.output, name, side, seed, run)
                print(
                    f"{name} {side} seed {seed}: success {run['success_rate']:.2f}, {run['wall_seconds']:.0f} s "
                    f"(cpu {run['cpu_seconds']:.0f} s); median of {len(entry['seeds'])}: {entry['median']:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
