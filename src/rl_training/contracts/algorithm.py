"""Policies act, algorithms learn. Neither knows of environments, files or logs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Observation, Progress, UpdateResult
from rl_training.contracts.spec import AlgorithmConfig, BoxActions, EnvSpec
from rl_training.contracts.state import Stateful


class ActOutput(NamedTuple):
    """Actions [N, ...], what the algorithm will want to know about them, and the policy's next state."""

    action: Tensor
    extras: Mapping[str, Tensor]
    state: Any = None


class Policy(Protocol):
    """Acts. This is all that collectors, evaluators and remote workers hold.

    `state` is opaque to everybody else: feed-forward policies ignore it and return None.

    To be exported, a policy also says in plain torch code what it does without randomness: `mode(obs)` gives flat
    actions [B, ...]; one that remembers has `state_size` and `mode(obs, state, episode_start)`, which gives the actions
    and the next state.
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
    """A policy that may also act without torch, whose calls cost more than a small network between steps."""

    def act_on_arrays(self, obs: ArrayObservation, rng: np.random.Generator) -> AnyArray | None:
        """As `act`, exploring and without extras or state; None where `act` has to be called."""
        ...


class ScoringPolicy(Policy, Protocol):
    """A policy that can compute log-probabilities and values of many actions at once, faster than while acting."""

    def score(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values [B] of actions [B, ...]; without gradients."""
        ...


ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)


class Algorithm(Stateful, ABC, Generic[ConfigT]):
    """Learns. Owns its networks, optimizers and one named random stream; its `update` is the paper's maths."""

    policy: Policy

    def __init__(self, config: ConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        self.config = config
        self.spec = spec
        self.device = device
        self.rng = rng

    @abstractmethod
    def update(self, batch: Any, progress: Progress) -> UpdateResult:
        """Learn from one batch (a rollout or transitions) and report metrics as detached tensors."""

    def explore(self, progress: Progress) -> Policy:
        """The policy to collect with at this point of a run; exploration that changes over time is set here."""
        return self.policy

    def start_from(self, weights: dict[str, Any]) -> None:
        """Take over the saved weights of a trained policy; everything else stays as in a new run."""
        self.load_state_dict({**self.state_dict(), "policy": weights})
