"""Replay of Atari games: the memory of 100 000 transitions, and the time to sample a batch.

    python benchmarks/frame_replay.py [--transitions 100000]

Pong is played with random actions in ale-py's native vector environment, through the same adapter and buffer as in
training: four grey frames of 84 x 84 pixels per observation. `whole stacks` is the same buffer without shared frames;
only its size is computed, it is not filled.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import RESULTS, about

from rl_training.contracts.batches import Progress, Step
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import EnvSpec, FrameStack
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.samplers import ReplaySampler, UniformIndexer
from rl_training.envs.atari import AtariAdapter, AtariConfig, make_native_games
from rl_training.experiment.files import write_json

OUTPUT = RESULTS / "frame_replay.json"
NUM_ENVS = 8
BATCH = 32
NUM_BATCHES = 200


def resident() -> int:
    """Resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def play(sampler: ReplaySampler, num_transitions: int) -> None:
    """Fill the buffer with random play."""
    import ale_py

    gym.register_envs(ale_py)
    config = AtariConfig()
    env = AtariAdapter(make_native_games("ALE/Pong-v5", config, NUM_ENVS), config)
    rng = np.random.default_rng(0)
    obs = env.reset(seed=0)
    for _ in range(num_transitions // NUM_ENVS):
        action = rng.integers(0, 6, NUM_ENVS)
        step = env.step(action)
        sampler.add(
            Step(
                obs=obs,
                policy_obs=obs,
                action=action,
                extras={},
                reward=step.reward,
                policy_reward=step.reward,
                terminated=step.terminated,
                truncated=step.truncated,
                valid=step.valid,
                ended=step.ended,
                final_obs=step.final_obs,
                final_policy_obs=step.final_obs,
                next_obs=step.obs,
            )
        )
        obs = step.obs
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    actions = gym.spaces.Discrete(6)
    whole = ReplayBuffer(EnvSpec(space, actions), args.transitions, NUM_ENVS).num_bytes

    warm = ReplayBuffer(EnvSpec(space, actions, frame_stack=FrameStack(4)), 1_000, NUM_ENVS)
    play(ReplaySampler(warm, UniformIndexer(random_stream(0, "warm-up")), gamma=0.99), 1_000)
    before = resident()
    buffer = ReplayBuffer(EnvSpec(space, actions, frame_stack=FrameStack(4)), args.transitions, NUM_ENVS)
    sampler = ReplaySampler(buffer, UniformIndexer(random_stream(0, "sampler")), gamma=0.99)
    play(sampler, args.transitions)
    grown = resident() - before

    seconds = []
    for _ in range(NUM_BATCHES):
        began = time.perf_counter()
        sampler.sample(BATCH, Progress())
        seconds.append(time.perf_counter() - began)
    results: dict[str, Any] = {
        "transitions": buffer.num_transitions,
        "memory_gigabytes": round(grown / 1e9, 3),
        "columns_gigabytes": round(buffer.num_bytes / 1e9, 3),
        "whole_stacks_gigabytes": round(whole / 1e9, 3),
        "batch": BATCH,
        "batch_milliseconds": round(1e3 * statistics.median(seconds), 3),
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    write_json(args.output, {"results": results, "about": about()})


if __name__ == "__main__":
    main()
