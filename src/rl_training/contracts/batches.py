"""Data passed between the layers: observations, steps, batches, progress and metrics.

Dimensions: T time, N environments, B batch, K episodes that end in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray, map_observation
from rl_training.contracts.state import Stateful

Observation = Tensor | dict[str, Tensor]
"""A batch of observations as tensors; a dict for Dict spaces."""


def num_rows(obs: Observation) -> int:
    """How many observations are in a batch."""
    return len(next(iter(obs.values())) if isinstance(obs, dict) else obs)


def device_of(obs: Observation) -> torch.device:
    """The device of a batch of observations."""
    return (next(iter(obs.values())) if isinstance(obs, dict) else obs).device


def as_arrays(obs: Observation) -> Any:
    """CPU observations as numpy arrays that share their memory; tensors on other devices stay tensors."""
    return map_observation(lambda x: x.numpy() if x.device.type == "cpu" else x, obs)


Metrics = dict[str, Tensor | float]
"""Detached scalars; read (and synchronised with the device) only by the logger."""


class Step(NamedTuple):
    """One step of all N environments, as the collector passes it to a sink (a buffer).

    `obs` is the environment's observation; `policy_obs` is the policy's input (the same unless observations are
    normalised). Likewise `reward` and `policy_reward`. Rows where `valid` is false are not transitions: with next-step
    autoreset, the environment only reset itself there.
    """

    obs: ArrayObservation
    policy_obs: ArrayObservation
    action: AnyArray
    extras: Mapping[str, AnyArray]
    reward: AnyArray
    policy_reward: AnyArray
    terminated: BoolArray
    truncated: BoolArray
    valid: BoolArray
    ended: npt.NDArray[np.intp]
    """Indices [K] of the environments whose episode ended in this step."""
    final_obs: ArrayObservation | None
    """True last observations [K, ...] of those episodes; None when K is 0."""
    final_policy_obs: ArrayObservation | None
    next_obs: ArrayObservation
    """Observations to act on next; after the end of an episode, the first observation of the next one."""


class TransitionBatch(NamedTuple):
    """Transitions [B] from replay, as off-policy algorithms learn from them.

    A batch carries `discount` (0 where the episode terminated, gamma**k after k steps otherwise), never `done`, so
    every target is `reward + discount * next_value` and truncation needs no special case. With n-step returns,
    `reward` is the discounted sum of up to n rewards and `next_obs` the observation after the last of them.
    """

    obs: Observation
    action: Tensor
    """The policy's own actions: integers from 0 [B], or reals in [-1, 1] of the space's shape [B, ...]."""
    reward: Tensor
    discount: Tensor
    next_obs: Observation
    weight: Tensor
    """Importance weights; ones unless sampling is prioritised."""
    indices: Tensor
    """Index of each row in the replay buffer, for updating priorities."""
    extras: Mapping[str, Tensor] = {}
    """Further columns [B, ...] by name: `log_prob` of the behaviour policy, `return_to_go`, `next_action`, ..."""


class RolloutBatch(NamedTuple):
    """Valid rows [B] of a rollout, flattened over time and environments, ready for minibatches."""

    obs: Observation
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def rows(self, index: Tensor | slice) -> RolloutBatch:
        """The rows that an index tensor or a slice chooses."""
        return RolloutBatch(
            obs=map_observation(lambda x: x[index], self.obs),
            actions=self.actions[index],
            logprobs=self.logprobs[index],
            values=self.values[index],
            advantages=self.advantages[index],
            returns=self.returns[index],
        )

    @property
    def num_rows(self) -> int:
        """Number of transitions."""
        return self.advantages.shape[0]


@dataclass
class Progress(Stateful):
    """Progress of a run; schedules and the gradient steps due depend on it, and checkpoints save it."""

    env_steps: int = 0
    """Transitions seen so far, over all environments."""
    horizon: int = 0
    """Steps over which schedules run; fixed when the phase is first started."""
    iterations: int = 0
    updates: int = 0
    """Gradient steps so far."""
    offline_updates: int = 0
    """Gradient steps of the offline phase, which has no environment steps."""
    phase_start: int = 0
    """Position at which the current phase (offline or online) began."""

    @property
    def position(self) -> int:
        """How far the run is: environment steps, plus the gradient steps of its offline phase."""
        return self.env_steps + self.offline_updates

    @property
    def fraction(self) -> float:
        """Share of the phase's horizon that has passed, in [0, 1]."""
        return min(1.0, (self.position - self.phase_start) / self.horizon) if self.horizon > 0 else 0.0

    def begin_phase(self) -> None:
        """Begin another phase here; schedules start again."""
        self.phase_start, self.horizon = self.position, 0

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful.state_dict`; runs without an offline phase are saved as they always were."""
        state = super().state_dict()
        if not (self.offline_updates or self.phase_start):
            del state["offline_updates"], state["phase_start"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stateful.load_state_dict`."""
        super().load_state_dict({"offline_updates": 0, "phase_start": 0, **state})


@dataclass(frozen=True)
class UpdateResult:
    """Result of an update: metrics as detached tensors, number of gradient steps, new priorities or None."""

    metrics: Metrics
    num_updates: int = 1
    priorities: Tensor | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """Returns and lengths of evaluation episodes."""

    returns: list[float]
    lengths: list[int]
    successes: list[bool] = field(default_factory=list)
    num_cut: int = 0
    """Episodes that were truncated after `eval_max_steps` steps: their returns are those up to there."""

    @property
    def mean(self) -> float:
        """Mean undiscounted return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the return over episodes."""
        return float(np.std(self.returns))

    @property
    def success_rate(self) -> float | None:
        """Share of episodes with `info["is_success"]`, where the environment reports it."""
        return float(np.mean(self.successes)) if self.successes else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON files."""
        data: dict[str, Any] = {
            "mean": self.mean, "std": self.std, "returns": self.returns, "lengths": self.lengths,
        }  # fmt: skip
        if self.successes:
            data["success_rate"] = self.success_rate
        if self.num_cut:
            data["num_cut"] = self.num_cut
        return data
