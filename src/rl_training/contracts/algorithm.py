"""Interfaces: policies act, algorithms learn, and neither knows about environments, files or logs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Metrics, Observation, Progress, UpdateResult
from rl_training.contracts.spec import AlgorithmConfig, BoxActions, EnvSpec
from rl_training.contracts.state import Stateful


class ActOutput(NamedTuple):
    """Actions [N, ...], extras for the algorithm (such as log-probabilities), and the policy's next state."""

    action: Tensor
    extras: Mapping[str, Tensor]
    state: Any = None


class Policy(Protocol):
    """Chooses actions; the only interface that collectors, evaluators and remote workers use.

    `state` is opaque to callers: feed-forward policies ignore it and return None.

    For export, a policy also computes the deterministic action in plain torch: `mode(obs)` returns flat actions
    [B, ...]. A recurrent policy has `state_size`, and its `mode(obs, state, episode_start)` returns the actions and the
    next state.
    """

    box_actions: BoxActions

    def act(
        self,
        obs: Observation,
        *,
        deterministic: bool = False,
        action_mask: Tensor | None = None,
        state: Any = None,
        episode_start: Tensor | None = None,
        rng: np.random.Generator | None = None,
    ) -> ActOutput:
        """Choose actions for a batch of observations; without gradients. `rng` is needed unless deterministic."""
        ...

    def value(self, obs: Observation) -> Tensor:
        """The estimated value [N] of a batch of observations; without gradients."""
        ...


class ArrayPolicy(Policy, Protocol):
    """A policy that can also act without torch, whose call overhead exceeds the cost of a small network."""

    def act_on_arrays(self, obs: ArrayObservation, rng: np.random.Generator) -> AnyArray | None:
        """Like `act` with exploration, without extras or state; returns None if `act` must be called instead."""
        ...


class ScoringPolicy(Policy, Protocol):
    """A policy that can compute log-probabilities and values of many actions at once, faster than step by step."""

    def score(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values [B] of actions [B, ...]; without gradients."""
        ...


@runtime_checkable
class StochasticPolicy(Policy, Protocol):
    """A policy whose action probabilities are known: what importance sampling needs."""

    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """Log-probability or log-density [B] of actions [B, ...], as `act` samples them; without gradients."""
        ...


ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)


class Algorithm(Stateful, ABC, Generic[ConfigT]):
    """Learns: owns networks, optimizers and one named random stream, and implements the paper's maths in `update`."""

    policy: Policy
    columns: ClassVar[tuple[str, ...]] = ()
    """Further columns of transitions that updates read from `batch.extras`: `return_to_go`, `next_action`, or a column
    of the dataset."""

    def __init__(self, config: ConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        self.config = config
        self.spec = spec
        self.device = device
        self.rng = rng

    @abstractmethod
    def update(self, batch: Any, progress: Progress) -> UpdateResult:
        """Learn from one batch (a rollout or transitions) and report metrics as detached tensors."""

    def validate(self, batch: Any) -> Metrics:
        """Losses and statistics on transitions that were not learned from; nothing by default."""
        return {}

    def explore(self, progress: Progress) -> Policy:
        """The policy for data collection at this point of a run; exploration that changes over time is set here."""
        return self.policy

    def place(self, first: int, count: int, total: int) -> None:
        """Told once in which of a run's environments this copy acts: `count` of `total`, from number `first` on."""

    def start_from(self, weights: dict[str, Any]) -> None:
        """Load the saved weights of a trained policy; everything else stays as in a new run."""
        self.load_state_dict({**self.state_dict(), "policy": weights})
