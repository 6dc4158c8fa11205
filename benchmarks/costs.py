"""Further costs in time and memory: imports, saving and loading, and replay; compared with peers where possible.

    python benchmarks/costs.py            # about three minutes

- Imports: seconds inside a new process, in turns, after one uncounted turn (it fills the disk cache).
- Checkpoints: a PPO agent on CartPole, and a SAC agent on HalfCheetah saved with 100 000 transitions in its replay
  buffer. Five saves to new directories and five loads.
- Replay: the memory of a million HalfCheetah transitions, compared with the bytes of the data itself, each observation
  once in single precision. `benchmarks/frame_replay.py` measures Atari.

Results are merged into the output file part by part. If a side fails, the file says so, and the others continue.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import ENVIRONMENTS, PEERS, RESULTS, SideError, about, merge_results, run_side, script

OUTPUT = RESULTS / "costs.json"
IMPORTS = (
    ("ours", "import rl_training"),
    ("ours", "from rl_training import PPO"),
    ("sb3", "from stable_baselines3 import PPO"),
    ("sbx", "from sbx import PPO"),
)
TIMED = "import json, time; began = time.perf_counter(); {}; print(json.dumps({{'s': time.perf_counter() - began}}))"
CHECKPOINTS, REPLAY = ("ppo", "sac"), ("halfcheetah", "atari")
SIDES = {"ppo": ("ours", "sb3"), "sac": ("ours", "sb3"), "halfcheetah": ("ours", "sb3"), "atari": ("sb3",)}


def time_imports(peers: list[str], repeats: int, environments: Path) -> dict[str, Any]:
    """Seconds of each import statement."""
    found: dict[str, dict[str, Any]] = {
        text: {"side": side, "seconds": [], "error": None} for side, text in IMPORTS if side in ("ours", *peers)
    }
    for turn in range(repeats + 1):
        for text, entry in found.items():
            if entry["error"] is None:
                try:
                    seconds = run_side(entry["side"], ["-c", TIMED.format(text)], environments)["s"]
                except SideError as error:
                    entry["error"] = str(error)
                    continue
                if turn > 0:
                    entry["seconds"].append(seconds)
    for text, entry in found.items():
        print(f"  {text}: {entry['error'] or [round(seconds, 2) for seconds in entry['seconds']]}", flush=True)
    return found


def measure(what: str, peers: list[str], environments: Path) -> dict[str, Any]:
    """The measurements of each side's script."""
    found: dict[str, Any] = {}
    for side in SIDES[what]:
        if side in ("ours", *peers):
            try:
                found[side] = run_side(side, script(f"costs_{side}.py", what), environments)
            except SideError as error:
                found[side] = {"error": str(error)}
            print(f"  {side}: {found[side]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help="peers, with commas between them")
    parser.add_argument("--repeats", type=int, default=5, help="of imports")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    peers = [peer for peer in args.peers.split(",") if peer]
    print("imports", flush=True)
    imports = time_imports(peers, args.repeats, args.environments)
    merge_results(args.output, "imports", imports)
    failed = [entry["error"] for entry in imports.values() if entry["error"]]
    for section, names in (("checkpoints", CHECKPOINTS), ("replay", REPLAY)):
        for what in names:
            print(what, flush=True)
            found = measure(what, peers, args.environments)
            merge_results(args.output, section, {what: found})
            failed += [entry["error"] for entry in found.values() if "error" in entry]
    merge_results(args.output, "about", about())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
