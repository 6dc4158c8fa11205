"""One run of this package for a few seconds, given a config as JSON: its speed and fractions of time."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

WARM_UP = 5
"""Warm-up iterations after those without updates; not measured."""
WARM_SECONDS = 4.0
"""Warm-up seconds in which functions are compiled; not measured."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--spawned", type=float, default=None, help="not used here")
    args = parser.parse_args()

    import torch

    from rl_training.api.session import train
    from rl_training.experiment.config import Layer, resolve

    moments: list[dict[str, float]] = []
    warm = 0
    begun = float("inf")
    until = float("inf")
    threads = 0

    def watch(run: Any) -> None:
        nonlocal warm, begun, until, threads
        if run.updates:
            warm += 1
            begun = min(begun, time.perf_counter())
        if not moments and warm >= WARM_UP and time.perf_counter() > begun + WARM_SECONDS:
            threads = torch.get_num_threads()
            moments.append({"steps": run.env_steps, **run.metrics()})
            until = time.perf_counter() + args.seconds
        elif time.perf_counter() > until and len(moments) == 1:
            moments.append({"steps": run.env_steps, **run.metrics()})
            run.stop("measured")

    with tempfile.TemporaryDirectory() as directory:
        given = {**json.loads(args.config), "eval_every": 0, "total_timesteps": 10**9, "output_dir": directory}
        train(resolve([Layer(given, "benchmark")]), callback=watch, progress=False)
    wanted = ("steps", "time/")
    before, after = ({name: value for name, value in m.items() if name.startswith(wanted)} for m in moments)
    print(json.dumps({"before": before, "after": after, "threads": threads}))


if __name__ == "__main__":
    main()
