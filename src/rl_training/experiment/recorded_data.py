"""The recorded data of a run: read, checked against the environment and processed when training needs it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import EnvSpec
from rl_training.data.dataset import Dataset, DatasetError
from rl_training.data.normalize import ObservationNormalizer
from rl_training.data.processing import Processed, fit_normalizer, process
from rl_training.data.recorded import RecordedTransitions
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.samplers import ReplaySampler, UniformIndexer
from rl_training.envs.actions import ActionMap
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.normalized_scores import Reference, reference_of


class RecordedData:
    """Reads the dataset that a config names, once, when it is first needed.

    It is also the reward change that online steps get, so that both halves of a mixed batch have the same rewards.
    """

    def __init__(self, config: TrainConfig, dataset: Dataset | None = None) -> None:
        self.config = config
        self.given = dataset
        self.env_spec: EnvSpec | None = None
        """The environment's spaces, if there is one; files that do not store their spaces need it."""

    @property
    def is_given(self) -> bool:
        """Whether the run has recorded data."""
        return self.given is not None or self.config.dataset is not None

    @property
    def is_open(self) -> bool:
        """Whether the data has been read."""
        return "raw" in self.__dict__

    def describe(self) -> dict[str, Any]:
        """What a run's metadata says about its data."""
        data = self.raw
        source = self.config.dataset or "an object in memory"
        scale = {name: getattr(data.metadata, name) for name in ("min_score", "max_score")}
        return {
            "source": source, "hash": data.hash, "transitions": data.num_transitions, "episodes": data.num_episodes,
            **{name: value for name, value in scale.items() if value is not None},
        }  # fmt: skip

    def reference(self) -> Reference | None:
        """The returns that count as 0 and 100 in normalised scores, if they are known."""
        return reference_of(self.config.env_id, self.raw.metadata if self.is_open else None)

    @functools.cached_property
    def raw(self) -> Dataset:
        """The dataset as recorded."""
        if self.given is not None:
            return self.given
        if self.config.dataset is None:
            raise ConfigError(
                f"dataset: {self.config.algo} needs an environment or recorded data to know the spaces; give one"
            )
        from rl_training.experiment.datasets import open_dataset  # which builds experiments, and so imports this module

        return open_dataset(self.config.dataset, env=self.env_spec)

    @functools.cached_property
    def processed(self) -> Processed:
        """The training and validation parts."""
        return process(self.raw, self.config.data)

    def scale(self, reward: AnyArray) -> AnyArray:
        """Rewards of online steps, changed like the recorded ones (see `RewardScale`)."""
        return self.processed.change(reward)

    def spec(self) -> EnvSpec:
        """The spaces of the data, for runs without an environment."""
        return EnvSpec(self.raw.observation_space, self.raw.action_space, self.raw.metadata.env_id or "dataset")

    def sampler(
        self,
        spec: EnvSpec,
        algorithm: Algorithm[Any],
        actions: ActionMap,
        normalizer: ObservationNormalizer | None,
        *,
        validation: bool = False,
    ) -> ReplaySampler:
        """A sampler over the training part, or the validation part if there is one; fits a new normaliser."""
        self.require_fit(spec)
        settings = self.config.algorithm
        if normalizer is not None and normalizer.is_new:
            normalizer.moments = fit_normalizer(self.processed.train).moments
        train, held_out = self.processed.train, self.processed.validation
        dataset = held_out if validation and held_out is not None else train
        transitions = RecordedTransitions(dataset, actions.to_policy)
        buffer = cast(ReplayBuffer, transitions)  # it has the reading side, which is all that is used
        return ReplaySampler(
            buffer,
            UniformIndexer(random_stream(self.config.seed, "validation" if validation else "dataset")),
            gamma=settings.gamma,
            n_step=getattr(settings, "n_step", 1),
            device=algorithm.device,
            obs_normalizer=normalizer,
            columns=algorithm.columns,
        )

    def require_fit(self, spec: EnvSpec) -> None:
        """Refuse data whose spaces are not those of the environment."""
        problems = []
        for kind, mine, theirs in (
            ("observations", spec.observation_space, self.raw.observation_space),
            ("actions", spec.action_space, self.raw.action_space),
        ):
            if not same_kind(mine, theirs):
                problems.append(f"{kind} are {theirs}, and the environment has {mine}")
        if problems:
            source = self.config.dataset or "the dataset"
            raise DatasetError(f"{Path(source).name}: does not fit {spec.env_id}: {'; '.join(problems)}")


def same_kind(mine: Any, theirs: Any) -> bool:
    """Whether two spaces have the same shape and values of the same kind; bounds may differ."""
    if type(mine) is not type(theirs):
        return False
    if hasattr(mine, "spaces"):
        return set(mine.spaces) == set(theirs.spaces) and all(
            same_kind(mine.spaces[key], theirs.spaces[key]) for key in mine.spaces
        )
    if hasattr(mine, "n"):
        return bool(mine.n == theirs.n)
    if hasattr(mine, "nvec"):
        return bool(mine.nvec.tolist() == theirs.nvec.tolist())
    return bool(mine.shape == theirs.shape)
