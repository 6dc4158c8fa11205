"""This package: saving and loading agents, and the memory of the replay buffer."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from costs import REPEATS, TRANSITIONS, measure_checkpoints, report

PACKAGES = ("rl-training", "torch", "gymnasium", "numpy")


def ppo() -> dict[str, Any]:
    """An agent trained on one rollout."""
    from rl_training import PPO

    agent = PPO("CartPole-v1", num_envs=8, num_steps=128, eval_every=0, seed=0)
    agent.learn(1_024, progress=False)
    return checkpoints(agent)


def sac() -> dict[str, Any]:
    """An agent with 100 000 random transitions."""
    from rl_training import SAC

    settings = {"buffer_size": TRANSITIONS, "learning_starts": TRANSITIONS, "eval_every": 0, "seed": 0}
    agent = SAC("HalfCheetah-v5", num_envs=10, **settings)
    agent.learn(TRANSITIONS, progress=False)
    return checkpoints(agent)


def checkpoints(agent: Any) -> dict[str, Any]:
    """Save the complete state to a new directory each time, and load it."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / str(number) for number in range(REPEATS)]
        saves = [partial(agent.save, path) for path in paths]
        return measure_checkpoints(saves, lambda: type(agent).load(paths[-1]), paths[-1])


def halfcheetah() -> dict[str, Any]:
    """A replay buffer of a million transitions with HalfCheetah's sizes, filled with random numbers."""
    import numpy as np

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.replay_checkpoint import NUM_ENVS, SPEC, memory, play

    from rl_training.data.replay_buffer import ReplayBuffer

    rng, count = np.random.default_rng(0), 1_000_000
    play(ReplayBuffer(SPEC, 10_000, NUM_ENVS), 10_000, rng)  # so that late imports are not counted
    before = memory("VmRSS")
    buffer = ReplayBuffer(SPEC, count, NUM_ENVS)
    play(buffer, count, rng)
    assert buffer.num_transitions == count
    # observation, action and reward in single precision, and two bytes for how the step ended
    raw = count * (17 * 4 + 6 * 4 + 4 + 1 + 1)
    return {"transitions": count, "bytes": memory("VmRSS") - before, "raw_bytes": raw}


if __name__ == "__main__":
    report({"ppo": ppo, "sac": sac, "halfcheetah": halfcheetah}, PACKAGES)
