"""Checkpoints of a full replay buffer: time, bytes actually written, and memory.

    python benchmarks/replay_checkpoint.py [--transitions 1000000] [--directory /a/disk/to/write/to]

The buffer has HalfCheetah's sizes: observations of 17 floats, actions of 6 floats, episodes of 1000 steps. It is filled
and saved, then saved again after every 25 000 further transitions, and the last checkpoint is loaded. Files shared
with the previous checkpoint are not counted as written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_training.contracts.batches import Step
from rl_training.contracts.spec import EnvSpec
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.files import write_json
from rl_training.experiment.metadata import collect_metadata
from rl_training.experiment.replay import save_replay

OUTPUT = Path(__file__).parent / "results" / "replay_checkpoint.json"
SPEC = EnvSpec(spaces.Box(-np.inf, np.inf, (17,), np.float64), spaces.Box(-1, 1, (6,)), "HalfCheetah")
NUM_ENVS = 10
EPISODE = 1_000
BETWEEN = 25_000
"""Transitions between checkpoints."""
NUM_CHECKPOINTS = 15
"""After the first: about enough to fill a segment, so that every fill level of the newest one occurs."""
KEPT = 3
MEGA = 1e6


def play(buffer: ReplayBuffer, num_transitions: int, rng: np.random.Generator) -> None:
    """Add random steps."""
    no, yes, everybody = np.zeros(NUM_ENVS, np.bool_), np.ones(NUM_ENVS, np.bool_), np.arange(NUM_ENVS)
    for _ in range(num_transitions // NUM_ENVS):
        obs, following = rng.standard_normal((2, NUM_ENVS, 17))
        action, reward = rng.random((NUM_ENVS, 6), np.float32) * 2 - 1, rng.standard_normal(NUM_ENVS)
        ends = buffer.added % EPISODE == EPISODE - 1
        buffer.add(
            Step(
                obs=obs,
                policy_obs=obs,
                action=action,
                extras={},
                reward=reward,
                policy_reward=reward,
                terminated=no,
                truncated=yes if ends else no,
                valid=yes,
                ended=everybody if ends else everybody[:0],
                final_obs=following if ends else None,
                final_policy_obs=None,
                next_obs=following,
            )
        )


def memory(field: str) -> int:
    """Memory of this process in bytes: `VmRSS` now, or `VmHWM` as the peak since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def watched(action: Callable[[], Any]) -> tuple[Any, float, int]:
    """An action's result, its seconds, and the peak increase of memory."""
    forget_peak()
    before, began = memory("VmRSS"), time.perf_counter()
    result = action()
    return result, time.perf_counter() - began, max(0, memory("VmHWM") - before)


def files_of(path: Path) -> dict[int, int]:
    """Sizes by inode."""
    return {file.stat().st_ino: file.stat().st_size for file in path.iterdir()}


def save(buffer: ReplayBuffer, path: Path, before: dict[int, int]) -> dict[str, float]:
    """Write one checkpoint; `before` are the files of the previous one."""
    _, seconds, growth = watched(lambda: save_replay(path, buffer, {}))
    files = files_of(path)
    written = sum(size for inode, size in files.items() if inode not in before)
    return {
        "seconds": round(seconds, 3),
        "megabytes": round(sum(files.values()) / MEGA, 2),
        "megabytes_written": round(written / MEGA, 2),
        "peak_memory_growth_megabytes": round(growth / MEGA, 1),
    }


def measure(transitions: int, directory: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(SPEC, transitions, NUM_ENVS)
    began = time.perf_counter()
    play(buffer, transitions, rng)
    fill_seconds = time.perf_counter() - began
    first = save(buffer, directory / "0", {})
    print("first:", first, flush=True)
    later = []
    for number in range(1, NUM_CHECKPOINTS + 1):
        before = files_of(directory / str(number - 1))
        play(buffer, BETWEEN, rng)
        later.append(save(buffer, directory / str(number), before))
        print(f"after {number * BETWEEN} more:", later[-1], flush=True)
        if number >= KEPT:
            shutil.rmtree(directory / str(number - KEPT))
    copy = ReplayBuffer(SPEC, transitions, NUM_ENVS)
    last = directory / str(NUM_CHECKPOINTS)
    _, load_seconds, load_growth = watched(lambda: copy.load_state_dict(load_checkpoint(last).state["replay"]))
    index = buffer.everything()
    assert np.array_equal(copy.everything(), index)
    for read in (ReplayBuffer.observations, ReplayBuffer.next_observations):
        np.testing.assert_array_equal(read(copy, index), read(buffer, index))
    return {
        "transitions": transitions,
        "buffer_megabytes": round(buffer.num_bytes / MEGA, 1),
        "fill_seconds": round(fill_seconds, 1),
        "first_checkpoint": first,
        f"checkpoints_every_{BETWEEN}": {
            name: {
                "median": round(statistics.median(one[name] for one in later), 3),
                "min": min(one[name] for one in later),
                "max": max(one[name] for one in later),
            }
            for name in first
        },
        "load": {
            "seconds": round(load_seconds, 3),
            "peak_memory_growth_megabytes": round(load_growth / MEGA, 1),
            "of_which_the_loaded_buffer": round(copy.num_bytes / MEGA, 1),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; by default the temporary one")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        result = measure(options.transitions, Path(directory))
    print("load:", result["load"], flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    write_json(options.output, {**collect_metadata(), "load_average": round(load, 1), **result})


if __name__ == "__main__":
    main()
