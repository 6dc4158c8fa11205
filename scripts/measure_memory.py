"""Train on tasks that need a memory, with one and without: `python -m scripts.measure_memory --seeds 0 1 2`.

The tasks and their settings are in `tests/envs/memory_tasks.py`; PPO gets the same settings, less those of the memory.
Success is of 100 deterministic episodes of the final policy. The results are merged into the output file after every
run, so this may be interrupted and run in parts; what was measured with other settings is measured anew.

CartPole without velocities is a preset, and PPO on it a task, of the suite `classic`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rl_training.experiment.files import read_json, write_json
from rl_training.experiment.metadata import collect_metadata
from tests.envs.memory_tasks import TASKS, MemoryTask

OUTPUT = Path(__file__).parents[1] / "src/rl_training/zoo/results/memory.json"
EPISODES = 100
PROTOCOL = f"share of {EPISODES} episodes of the final policy that succeed, deterministic actions"
ALGORITHMS = ("recurrent_ppo", "ppo")


def measure(task: MemoryTask, algo: str, seed: int) -> dict[str, Any]:
    """Train one seed and evaluate it."""
    began, began_cpu = time.perf_counter(), time.process_time()
    result = task.train(algo, seed, EPISODES)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    about = collect_metadata()
    return {
        "success_rate": result.success_rate,
        "wall_seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "date": about["created"],
        "cpu": about["hardware"]["cpu"],
        "versions": about["versions"],
    }


def described(task: MemoryTask) -> dict[str, Any]:
    """What decides the numbers, besides the seed, as JSON gives it back."""
    about = {
        "env": task.env_class.__name__,
        "env_kwargs": dict(task.env_kwargs),
        "total_timesteps": task.total_timesteps,
        "settings": dict(task.settings),
        "recurrent": dict(task.recurrent),
    }
    plain: dict[str, Any] = json.loads(json.dumps(about))
    return plain


def load(path: Path, name: str) -> dict[str, Any]:
    """The entry of a task; empty if it was measured with other settings, or never."""
    entry: dict[str, Any] = read_json(path)["tasks"].get(name, {}) if path.is_file() else {}
    about = described(TASKS[name])
    return entry if {key: entry.get(key) for key in about} == about else {**about, **{algo: {} for algo in ALGORITHMS}}


def merge(path: Path, name: str, algo: str, seed: int, run: dict[str, Any]) -> dict[str, Any]:
    """Add one run to the file, and return the algorithm's part of the task."""
    entry = load(path, name)
    seeds = dict(sorted({**entry[algo].get("seeds", {}), str(seed): run}.items(), key=lambda item: int(item[0])))
    entry[algo] = {"median": statistics.median(run["success_rate"] for run in seeds.values()), "seeds": seeds}
    tasks = {**(read_json(path)["tasks"] if path.is_file() else {}), name: entry}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"protocol": PROTOCOL, "tasks": {known: tasks[known] for known in TASKS if known in tasks}})
    part: dict[str, Any] = entry[algo]
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all if none")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--again", action="store_true", help="measure seeds again that were measured before")
    args = parser.parse_args()
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"there is no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    for seed in args.seeds:
        for name in args.tasks or TASKS:
            for algo in ALGORITHMS:
                if str(seed) in load(args.output, name)[algo].get("seeds", {}) and not args.again:
                    print(f"{name} {algo} seed {seed}: measured before")
                    continue
                run = measure(TASKS[name], algo, seed)
                part = merge(args.output, name, algo, seed, run)
                print(
                    f"{name} {algo} seed {seed}: success {run['success_rate']:.2f}, {run['wall_seconds']:.0f} s "
                    f"(cpu {run['cpu_seconds']:.0f} s); median of {len(part['seeds'])}: {part['median']:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
