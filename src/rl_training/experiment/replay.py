"""Save and load a replay buffer separately from the agent that collected it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.spec import EnvSpec
from rl_training.contracts.state import check_keys
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.experiment.checkpointing import load_checkpoint, save_checkpoint
from rl_training.experiment.metadata import collect_metadata


def save_replay(path: Path, buffer: ReplayBuffer, config: dict[str, Any]) -> Path:
    """Write a buffer in the checkpoint format; `config` records how it was collected."""
    return save_checkpoint(path, {"replay": buffer.state_dict()}, config, collect_metadata())


def read_replay(path: Path, spec: EnvSpec, capacity: int | None = None, num_envs: int | None = None) -> ReplayBuffer:
    """A buffer with the saved transitions, by default just large enough for them.

    Episodes that were unfinished when it was saved count as truncated.
    """
    checkpoint = load_checkpoint(path)
    try:
        check_keys("a replay", ("replay",), checkpoint.state)
        state = checkpoint.state["replay"]
        if num_envs is None:
            num_envs = int(state["num_envs"])
        if capacity is None:
            capacity = num_envs * max(1, int(state["added"]) - int(state["oldest"]))
        buffer = ReplayBuffer(spec, capacity, num_envs)
        buffer.load_state_dict(state)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{path}: this replay buffer does not fit the environment: {error}") from error
    buffer.close_episodes()
    return buffer
