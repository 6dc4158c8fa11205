"""Speed over observation and action spaces, against Stable-Baselines3: PPO, DQN and SAC, one thread on both sides.

    python benchmarks/spaces.py                    # every cell, 3 turns: about half an hour
    python benchmarks/spaces.py --cell "ppo Discrete" "dqn Discrete"

The environment is the same cheap one for all (`sides/space_tasks.py`), so the packages are what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "sides"))
from benchmarks.harness import ENVIRONMENTS, RESULTS, SIDES, SideError, about, merge_results, run_side
from benchmarks.sides.space_tasks import CELLS

OUTPUT = RESULTS / "spaces.json"


def measure(cell: str, repeats: int, share: int, environments: Path) -> dict[str, Any]:
    """Both sides of a cell, in turns."""
    speeds: dict[str, list[float]] = {"ours": [], "sb3": []}
    errors: dict[str, str] = {}
    for _ in range(repeats):
        for side, found in speeds.items():
            if side not in errors:
                try:
                    result = run_side(
                        side, [str(SIDES / f"spaces_{side}.py"), cell, str(share)], environments, threads=1
                    )
                except SideError as error:
                    errors[side] = str(error)
                    continue
                found.append(result["steps_per_second"])
    medians = {side: statistics.median(values) for side, values in speeds.items() if values}
    ratios = [ours / theirs for ours, theirs in zip(speeds["ours"], speeds["sb3"], strict=False)]
    ratio = statistics.median(ratios) if ratios else None
    found = {"steps_per_second": speeds, "median": medians, "ratio": ratio, "errors": errors}
    return {**found, "share": share, "about": about()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=int, default=1, help="so many times fewer steps, to try it out")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    for cell in options.cell:
        found = measure(cell, options.repeats, options.share, options.environments)
        merge_results(options.output, "cells", {cell: found})
        medians = ", ".join(f"{side} {value:,.0f}" for side, value in found["median"].items())
        print(f"{cell:<28}{found['ratio'] or float('nan'):>6.2f} x  ({medians}) {found['errors'] or ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
