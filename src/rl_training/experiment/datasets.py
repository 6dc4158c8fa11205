"""Datasets from files, and from what runs leave behind: a saved replay, or the replay of a run's newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from rl_training.contracts.arrays import AnyArray, ArrayObservation, map_observation
from rl_training.contracts.environment import ActionMapping
from rl_training.contracts.spec import EnvSpec
from rl_training.data.dataset import (
    SMALL_BYTES,
    Dataset,
    DatasetError,
    DatasetMetadata,
    Finding,
    HasSpaces,
    Indices,
    LazyColumn,
    read_dataset,
)
from rl_training.data.formats.space_json import flatten_dict
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.experiment.build import Experiment, build_experiment
from rl_training.experiment.checkpointing import MANIFEST, load_checkpoint
from rl_training.experiment.metadata import package_versions
from rl_training.experiment.replay import read_replay
from rl_training.experiment.restoring import config_of, load_experiment
from rl_training.experiment.runs import CONFIG
from rl_training.runtime.off_policy import OffPolicyTrainer


def open_dataset(
    source: str | Path, *, env: HasSpaces | None = None, download: bool = False, trust: bool = False
) -> Dataset:
    """A dataset from a file, a Minari dataset, a saved replay, or a run (the replay of its newest checkpoint).

    See `read_dataset`. `trust` allows the files of a run to name a module to import (`package:Env-v0`).

    Example:
        open_dataset("runs/sac__Pendulum-v1__seed0__20250101-120000")
    """
    path = Path(source).expanduser()
    if path.is_dir() and any((path / name).exists() for name in (MANIFEST, CONFIG)):
        return replay_dataset(path, trust=trust)
    return read_dataset(source, env=env, download=download)


def replay_dataset(path: Path, *, trust: bool = False) -> Dataset:
    """The transitions of a saved replay, of a checkpoint, or of a run's newest checkpoint."""
    saved = load_checkpoint(path) if (path / MANIFEST).exists() else None
    if saved is not None and "replay" in saved.state:
        experiment = build_experiment(config_of(saved, trust=trust))
        try:
            return _dataset_of(read_replay(path, experiment.spec), experiment, str(path))
        finally:
            experiment.close()
    experiment, _ = load_experiment(path, trust=trust)
    try:
        if experiment.damage is not None:
            raise DatasetError(experiment.damage)
        trainer = experiment.trainer
        if not isinstance(trainer, OffPolicyTrainer):
            raise DatasetError(
                f"{path}: {experiment.config.algo} has no replay here: it learned from {_learned(trainer)}"
            )
        if trainer.sampler.buffer.num_transitions == 0:
            raise DatasetError(f"{path}: its replay buffer is empty, or was not saved (checkpoint_replay)")
        return _dataset_of(trainer.sampler.buffer, experiment, str(path))
    finally:
        experiment.close()


def _learned(trainer: object) -> str:
    return "rollouts, which are not kept" if hasattr(trainer, "buffer") else "recorded data; use that file"


def _dataset_of(buffer: ReplayBuffer, experiment: Experiment, name: str) -> Dataset:
    config = experiment.config
    metadata = DatasetMetadata(
        env_id=config.env_id,
        env_kwargs=config.env_kwargs,
        behaviour_policy=f"replay of {config.algo}, {name}",
        seeds=[config.seed],
        versions=package_versions(),
        spaces_known=True,
    )
    return dataset_of(buffer, experiment.spec, experiment.actions, metadata)


def dataset_of(buffer: ReplayBuffer, spec: EnvSpec, actions: ActionMapping, metadata: DatasetMetadata) -> Dataset:
    """The transitions of a replay buffer, environment after environment. Large observations are not copied.

    Episodes that are unfinished count as truncated at their newest step. The oldest episode of each environment may
    lack its first steps.
    """
    buffer.close_episodes()
    index = _in_order(buffer)
    terminated = buffer.terminated[index]
    truncated = (buffer.truncated[index] | (buffer.final_row[index] >= 0)) & ~terminated
    text = f"the oldest {buffer.oldest * buffer.num_envs:,} steps have left the replay: episodes may lack their start"
    return Dataset(
        observations=_observations(buffer, index),
        actions=actions.to_env(buffer.action[index]),
        rewards=buffer.reward[index],
        terminated=terminated,
        truncated=truncated,
        final_observations=buffer.next_observations(index[terminated | truncated]),
        observation_space=flatten_dict(spec.observation_space),
        action_space=spec.action_space,
        metadata=metadata,
        findings=[Finding("note", "episodes", text)] if buffer.oldest else [],
    )


def _in_order(buffer: ReplayBuffer) -> Indices:
    """Indices of all transitions, in time order within each environment."""
    times = np.arange(buffer.oldest, buffer.added)
    index = np.concatenate([buffer.at(times, np.full(len(times), env)) for env in range(buffer.num_envs)])
    valid: Indices = index[buffer.valid[index]]
    return valid


class _ReplayColumn(LazyColumn):
    """Observations of a replay buffer, or one key of them; stacked frames are put together when they are read."""

    def __init__(self, buffer: ReplayBuffer, index: Indices, key: str, like: AnyArray) -> None:
        super().__init__((len(index), *like.shape[1:]), like.dtype)
        self._buffer, self._index, self._key = buffer, index, key

    def _rows(self, rows: Indices) -> AnyArray:
        found = self._buffer.observations(self._index[rows])
        return found[self._key] if isinstance(found, dict) else found


def _observations(buffer: ReplayBuffer, index: Indices) -> ArrayObservation:
    first = buffer.observations(index[:1])
    columns: Any
    if isinstance(first, dict):
        columns = {key: _ReplayColumn(buffer, index, key, like) for key, like in first.items()}
    else:
        columns = _ReplayColumn(buffer, index, "", first)
    small = buffer.num_bytes <= SMALL_BYTES and not buffer.is_stacked
    return cast(ArrayObservation, map_observation(lambda column: column[:], columns) if small else columns)
