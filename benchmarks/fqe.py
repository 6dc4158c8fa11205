"""Fitted Q evaluation against d3rlpy's: the same policy, data, networks, batches and number of updates.

    python benchmarks/fqe.py --file d3rlpy-pendulum-replay.npz     # six runs of a few minutes each

The policy is the TD3 agent for Pendulum that ships with this package; its weights are copied into d3rlpy's network,
which must then give the same actions. The result has each side's estimate for each seed, and the mean discounted return
of 100 episodes in the environment as the truth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import ENVIRONMENTS, RESULTS, about, merge_results, run_side, script


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True, help="npz file with transitions of Pendulum-v1")
    parser.add_argument("--updates", type=int, default=5_000)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--output", type=Path, default=RESULTS / "fqe.json")
    args = parser.parse_args()
    shared = [str(args.file), "--updates", str(args.updates), "--gamma", str(args.gamma)]
    with tempfile.TemporaryDirectory() as scratch:
        policy = str(Path(scratch) / "policy.npz")
        truth = run_side("ours", script("fqe_ours.py", *shared, "--export", policy), args.environments, threads=1)
        print(f"in the environment: {truth['value']:.2f} +/- {truth['standard_error']:.2f}", flush=True)
        values: dict[str, list[float]] = {"ours": [], "d3rlpy": []}
        for seed in args.seeds:
            for side, found in values.items():
                more = ["--policy", policy] if side == "d3rlpy" else []
                command = script(f"fqe_{side}.py", *shared, "--seed", str(seed), *more)
                found.append(run_side(side, command, args.environments, threads=1)["value"])
                print(f"{side}, seed {seed}: {found[-1]:.2f}", flush=True)
    means = {side: float(np.mean(found)) for side, found in values.items()}
    spread = max(float(np.ptp(found)) for found in values.values())
    entry = {
        "gamma": args.gamma,
        "updates": args.updates,
        "seeds": args.seeds,
        "environment": truth,
        "values": values,
        "difference": means["ours"] - means["d3rlpy"],
        "spread_over_seeds": spread,
        "about": about(),
    }
    merge_results(args.output, "files", {args.file.name: entry})
    print(f"difference of the means {entry['difference']:.2f}, largest spread over seeds {spread:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
