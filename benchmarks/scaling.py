"""Throughput of this package against the number of environments, network width and batch size.

    python benchmarks/scaling.py          # about twelve minutes
    python benchmarks/scaling.py --sweep num_envs --seconds 10 --repeats 3

Every point is a separate process that trains for some seconds after a warm-up, with defaults except for what the sweep
sets. Its speed is recorded together with the run's time fractions: `time/env_fraction`, `time/policy_fraction` and
`time/update_fraction`. The sweep is repeated `--repeats` times from first to last point, so that a disturbance does
not affect all runs of one point.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import ENVIRONMENTS, RESULTS, SideError, about, merge_results, run_side, script
from benchmarks.summaries import shares_between

OUTPUT = RESULTS / "scaling.json"


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in one number."""

    title: str
    axis: str
    values: tuple[int, ...]
    config: Callable[[int], dict[str, Any]]


def ppo(num_envs: int = 8, width: int = 64) -> dict[str, Any]:
    """PPO on CartPole: 128 steps, 4 epochs of 4 minibatches."""
    algorithm = {
        "num_steps": 128,
        "num_epochs": 4,
        "minibatch_size": num_envs * 128 // 4,
        "network": {"actor_sizes": [width, width], "critic_sizes": [width, width]},
    }
    return {"algo": "ppo", "env_id": "CartPole-v1", "num_envs": num_envs, "algorithm": algorithm}


def sac(width: int = 256, batch: int = 256) -> dict[str, Any]:
    """SAC on HalfCheetah, one update per step."""
    algorithm = {
        "batch_size": batch,
        "buffer_size": 100_000,
        "network": {"actor_sizes": [width, width], "critic_sizes": [width, width]},
    }
    return {"algo": "sac", "env_id": "HalfCheetah-v5", "num_envs": 1, "algorithm": algorithm}


WIDTHS = tuple(2**n for n in range(5, 11))
SWEEPS = {
    "num_envs": Sweep(
        "PPO on CartPole-v1, 128 steps of each environment, 4 epochs of 4 minibatches, 64x64",
        "environments",
        tuple(2**n for n in range(9)),
        lambda value: ppo(num_envs=value),
    ),
    "ppo_width": Sweep(
        "PPO on CartPole-v1, 8 environments, 4 epochs of 4 minibatches of 256, two hidden layers",
        "width of the hidden layers",
        WIDTHS,
        lambda value: ppo(width=value),
    ),
    "sac_width": Sweep(
        "SAC on HalfCheetah-v5, batches of 256, one update per step, two hidden layers",
        "width of the hidden layers",
        WIDTHS,
        lambda value: sac(width=value),
    ),
    "sac_batch": Sweep(
        "SAC on HalfCheetah-v5, [256, 256], one update per step",
        "transitions in a batch",
        tuple(2**n for n in range(5, 12)),
        lambda value: sac(batch=value),
    ),
}


def run_sweep(sweep: Sweep, seconds: float, repeats: int) -> dict[str, Any]:
    """Run all points of a sweep, several times."""
    points: dict[str, dict[str, Any]] = {str(value): {"runs": [], "error": None} for value in sweep.values}
    for _ in range(repeats):
        for value in sweep.values:
            point = points[str(value)]
            if point["error"] is None:
                command = script("scaling_point.py", json.dumps(sweep.config(value)), "--seconds", str(seconds))
                try:
                    point["runs"].append(measured(run_side("ours", command, ENVIRONMENTS)))
                    print(f"  {value:>5}: {point['runs'][-1]}", flush=True)
                except SideError as error:
                    point["error"] = str(error)
                    print(f"  {value:>5} failed: {error}", flush=True)
    return {"title": sweep.title, "axis": sweep.axis, "points": points, "seconds": seconds, "about": about()}


def measured(found: dict[str, Any]) -> dict[str, Any]:
    """One run in the format of the results file."""
    speed, shares = shares_between(found["before"], found["after"])
    return {"steps_per_second": round(speed, 1), **shares._asdict(), "threads": found["threads"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--seconds", type=float, default=4.0, help="for which a run is measured")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    failed = []
    for name in args.sweep:
        print(name, flush=True)
        found = run_sweep(SWEEPS[name], args.seconds, args.repeats)
        merge_results(args.output, "sweeps", {name: found})
        failed += [point["error"] for point in found["points"].values() if point["error"]]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
