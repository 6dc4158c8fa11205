"""Record the progress of runs, finished or not: `python scripts/collect_curves.py runs/*Pong* --output FILE`.

For each run: the hash of its settings, versions and hardware, its evaluations, and the return of its latest training
episodes with the time at regular steps. `scripts/generate_docs.py` puts the file into the docs (`generated:curves`).
Seconds are wall time since the start of the run, including evaluations, pauses and other load on the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl_training.experiment.config import read_config
from rl_training.experiment.files import write_json
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.runs import CONFIG, METRICS, RunDirectory
from rl_training.zoo.manifest import config_hash

POINTS = 20


def curve(path: Path) -> dict[str, Any]:
    """The record of one run, from its files."""
    run, config = RunDirectory(path), read_config(path / CONFIG)
    about = run.metadata()
    entries = [entry for entry in read_metrics(path / METRICS) if "rollout/return_mean" in entry]
    first = next(read_metrics(path / METRICS))
    chosen = entries[:: max(1, len(entries) // POINTS)]
    if chosen[-1] is not entries[-1]:
        chosen.append(entries[-1])
    return {
        "algo": config.algo,
        "env_id": config.env_id,
        "seed": config.seed,
        "total_timesteps": config.total_timesteps,
        "env_steps": entries[-1]["global_step"],
        "config_hash": config_hash(config),
        "date": about["history"][0]["started"],
        "versions": about["versions"],
        "hardware": {key: value for key, value in about["hardware"].items() if key != "system"},
        "evaluations": [
            {
                "step": entry["step"],
                "mean": round(entry["mean"], 2),
                "std": round(entry["std"], 2),
                "episodes": len(entry["returns"]),
            }
            for entry in run.evaluations()
        ],
        "training": [
            {
                "step": entry["global_step"],
                "return": round(entry["rollout/return_mean"], 2),
                "seconds": round(entry["time/unix"] - first["time/unix"]),
                "env_fraction": round(entry["time/env_fraction"], 3),
            }
            for entry in chosen
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    write_json(args.output, {"runs": [curve(path) for path in args.runs]})


if __name__ == "__main__":
    main()
