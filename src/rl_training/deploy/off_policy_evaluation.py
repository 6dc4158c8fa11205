"""Off-policy evaluation: the value of a trained policy, estimated from recorded data, without an environment."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.accelerate import using
from rl_training.contracts.algorithm import Policy, StochasticPolicy
from rl_training.contracts.arrays import AnyArray, ArrayObservation, map_observation
from rl_training.contracts.batches import Observation
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.random import random_stream
from rl_training.data.dataset import Dataset, DatasetError, Indices
from rl_training.data.processing import returns_to_go
from rl_training.data.recorded import RecordedTransitions
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.samplers import ReplaySampler, UniformIndexer
from rl_training.deploy.fitted_q import FittedQ, FQEConfig
from rl_training.envs.actions import ActionMap
from rl_training.experiment.build import Experiment
from rl_training.experiment.recorded_data import RecordedData
from rl_training.functional import off_policy_evaluation as estimators
from rl_training.runtime.collector import to_tensors
from rl_training.runtime.threads import using_threads

Method = Literal["fqe", "is", "wis", "pdis", "dr"]
METHODS: dict[Method, str] = {
    "fqe": "fitted Q evaluation",
    "is": "importance sampling",
    "wis": "weighted importance sampling",
    "pdis": "per-decision importance sampling",
    "dr": "doubly robust",
}
RATIO_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, float], estimators.Estimate]] = {
    "is": estimators.importance_sampling,
    "wis": estimators.weighted_importance_sampling,
    "pdis": estimators.per_decision_importance_sampling,
}
LOG_PROB = "log_prob"
"""The column of a dataset with the behaviour policy's log-probability (or log-density) of each recorded action."""
ROWS_AT_ONCE = 4096
NUM_ACTION_SAMPLES = 16
"""Actions per state in the mean of Q-values of a stochastic policy; Discrete actions are summed exactly."""

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PolicyValue:
    """The estimated value of a policy: its mean discounted return from the first states of the recorded episodes."""

    method: Method
    value: float
    standard_error: float
    """Over episodes; it says nothing about the bias of the method."""
    gamma: float
    deterministic: bool
    num_episodes: int
    behaviour_value: float
    """Mean discounted return of the recorded episodes."""
    critics_std: float | None = None
    """With fqe and dr: standard deviation of the value over the independently learned Q-functions."""
    effective_episodes: float | None = None
    """With ratios: how many equally weighted episodes the estimate rests on."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON files; NaN and infinity become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(self).items()
        }


def estimate_value(
    experiment: Experiment,
    dataset: Dataset,
    method: Method = "fqe",
    *,
    deterministic: bool = True,
    gamma: float | None = None,
    seed: int = 0,
    settings: FQEConfig | None = None,
) -> PolicyValue:
    """Estimate the value of an experiment's policy from recorded episodes; see `Agent.estimate_value`."""
    evaluation = _Evaluation(experiment, dataset, deterministic, experiment.config.algorithm.gamma, seed)
    if gamma is not None:
        evaluation.gamma = gamma
    evaluation.check(method)
    with using_threads(experiment.config.num_threads), using(experiment.config.accelerate):
        return evaluation.run(method, settings or FQEConfig())


class _Rows(NamedTuple):
    """Some rows of the data, as the policy and the Q-functions see them."""

    index: Indices  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    obs: Observation
    next_obs: Observation


class _Evaluation:
    """A policy and a dataset, in common units."""

    def __init__(self, experiment: Experiment, dataset: Dataset, deterministic: bool, gamma: float, seed: int) -> None:
        data = RecordedData(experiment.config, dataset)
        data.require_fit(experiment.spec)
        self.dataset, self.spec, self.device = dataset, experiment.spec, experiment.device
        self.policy: Policy = experiment.trainer.algorithm.policy
        self.actions = experiment.actions
        self.normalizer = experiment.trainer.collector.obs_normalizer
        self.deterministic, self.gamma, self.seed = deterministic, gamma, seed
        space = self.spec.action_space
        bounded = isinstance(space, spaces.Box) and space.is_bounded("both")
        self.units = ActionMap(space, "rescale" if bounded else "clip")  # the same for all agents that are compared
        self.rng = random_stream(seed, "off-policy actions")

    def check(self, method: str) -> None:
        """Refuse what cannot be estimated, with all reasons."""
        problems = []
        if method not in METHODS:
            problems.append(f"method: expected one of {', '.join(METHODS)}, got '{method}'")
        if not 0.0 <= self.gamma <= 1.0:
            problems.append(f"gamma: must be between 0 and 1, got {self.gamma}")
        if hasattr(self.policy, "state_size"):
            problems.append("the policy is recurrent; off-policy evaluation is for policies without memory")
        if method in ("is", "wis", "pdis", "dr"):
            problems += self._ratio_problems(method)
        if method in ("fqe", "dr") and not isinstance(self.spec.action_space, (spaces.Box, spaces.Discrete)):
            problems.append(f"method: {method} takes Box and Discrete actions, got {self.spec.action_space}; use wis")
        if problems:
            raise ConfigError(problems)

    def _ratio_problems(self, method: str) -> list[str]:
        found = []
        if LOG_PROB not in self.dataset.extras:
            known = ", ".join(self.dataset.extras) or "no extra columns"
            found.append(
                f"method: {method} needs the column '{LOG_PROB}' of the dataset (log-probabilities of actions under "
                f"the behaviour policy), and there is {known}; use fqe, which does not need it"
            )
        if self.deterministic and isinstance(self.spec.action_space, spaces.Box):
            found.append(
                f"method: {method} divides by probabilities, and deterministic real-valued actions have no density; "
                "evaluate sampled actions (deterministic=False, --stochastic), or use fqe"
            )
        elif not self.deterministic and not isinstance(self.policy, StochasticPolicy):
            found.append(f"method: {method} needs a policy with known action probabilities (`log_prob`); use fqe")
        return found

    def run(self, method: Method, settings: FQEConfig) -> PolicyValue:
        """The estimate by one method."""
        ratio = None if method == "fqe" else self._padded(self._log_ratio())
        effective = None if ratio is None else float(estimators.effective_episodes(ratio))
        if effective == 0.0:
            warnings.warn(
                "each recorded episode has an action that the policy never takes: the ratios say nothing of its value",
                stacklevel=5,
            )
        spread = None
        if method in ("fqe", "dr"):
            found, spread = self._by_fitted_q(self._fit(settings), ratio)
        else:
            assert ratio is not None
            found = RATIO_ESTIMATORS[method](ratio, self._padded(np.asarray(self.dataset.rewards)), self.gamma)
        returns = returns_to_go(self.dataset, self.gamma)[self.dataset.episode_starts]
        return PolicyValue(
            method=method,
            value=float(found.value),
            standard_error=float(found.standard_error),
            gamma=self.gamma,
            deterministic=self.deterministic,
            num_episodes=self.dataset.num_episodes,
            behaviour_value=float(returns.mean()),
            critics_std=spread,
            effective_episodes=effective,
        )

    def _by_fitted_q(self, fitted: FittedQ, ratio: Tensor | None) -> tuple[estimators.Estimate, float]:
        """The estimate of fitted Q evaluation, or the doubly robust one; and its deviation over the critics."""
        first = self._first_values(fitted)
        spread = float(first.mean(1).std(correction=0))
        if ratio is not None:
            errors = self._padded(self._td_errors(fitted))
            return estimators.doubly_robust(ratio, errors, first.mean(0), self.gamma), spread
        error = first.mean(0).std(correction=0) / self.dataset.num_episodes**0.5
        return estimators.Estimate(first.mean(), error), spread

    # Q-functions

    def _fit(self, settings: FQEConfig) -> FittedQ:
        rng = random_stream(self.seed, "fitted Q evaluation")
        fitted = FittedQ(settings, self.spec, self.device, rng, self._next_actions)
        buffer = cast(ReplayBuffer, RecordedTransitions(self.dataset, self.units.to_policy))
        indexer = UniformIndexer(random_stream(self.seed, "off-policy rows"))
        sampler = ReplaySampler(buffer, indexer, gamma=self.gamma, device=self.device, obs_normalizer=self.normalizer)
        fitted.fit(sampler, settings.num_updates)
        return fitted

    def _next_actions(self, obs: Observation) -> Tensor:
        """The evaluated policy's actions, in the units of the Q-functions."""
        out = self.policy.act(obs, deterministic=self.deterministic, rng=self.rng)
        action = self.actions.to_env(out.action.cpu().numpy())
        return torch.from_numpy(self.units.to_policy(action)).to(self.device)

    def _state_values(self, fitted: FittedQ, obs: Observation) -> Tensor:
        """Mean Q-values [E, B] under the policy."""
        space = self.spec.action_space
        if self.deterministic:
            return fitted.values(obs, self._next_actions(obs))
        if isinstance(space, spaces.Discrete) and isinstance(self.policy, StochasticPolicy):
            rows = next(iter(obs.values())) if isinstance(obs, dict) else obs
            values = torch.zeros((), device=self.device)
            for choice in range(int(space.n)):
                action = torch.full((len(rows),), choice, device=self.device)
                values = values + self.policy.log_prob(obs, action).exp() * fitted.values(obs, action)
            return values
        samples = [fitted.values(obs, self._next_actions(obs)) for _ in range(NUM_ACTION_SAMPLES)]
        return torch.stack(samples).mean(0)

    def _first_values(self, fitted: FittedQ) -> Tensor:
        """Values [E, N] of the first states of all episodes."""
        starts = self.dataset.episode_starts
        found = [self._state_values(fitted, rows.obs) for rows in self._chunks(starts)]
        return torch.cat(found, dim=1).double().cpu()

    def _td_errors(self, fitted: FittedQ) -> Float64:
        """Mean over the critics of r + discount v(s') - q(s, a), of all rows."""
        found = []
        rewards, terminated = np.asarray(self.dataset.rewards), np.asarray(self.dataset.terminated)
        for rows in self._chunks(np.arange(len(self.dataset))):
            action = torch.from_numpy(self.units.to_policy(np.asarray(self.dataset.actions[rows.index])))
            q = fitted.values(rows.obs, action.to(self.device)).mean(0).double().cpu().numpy()
            next_value = self._state_values(fitted, rows.next_obs).mean(0).double().cpu().numpy()
            discount = self.gamma * ~terminated[rows.index]
            found.append(rewards[rows.index] + discount * next_value - q)
        return np.concatenate(found)

    # Ratios

    def _log_ratio(self) -> Float64:
        """Log pi(a|s) - log mu(a|s) of all rows."""
        found = []
        behaviour = self.dataset.extras[LOG_PROB]
        for rows in self._chunks(np.arange(len(self.dataset))):
            action = self.actions.to_policy(np.asarray(self.dataset.actions[rows.index]))
            found.append(self._log_prob(rows.obs, action) - np.asarray(behaviour[rows.index], np.float64).reshape(-1))
        ratio = np.concatenate(found)
        if np.isnan(ratio).any() or np.isposinf(ratio).any():
            wrong = int((np.isnan(ratio) | np.isposinf(ratio)).sum())
            raise DatasetError(
                f"column '{LOG_PROB}': {wrong} of {len(ratio)} ratios are not finite; the behaviour policy must have a "
                "positive probability of each recorded action"
            )
        return ratio

    def _log_prob(self, obs: Observation, action: AnyArray) -> Float64:
        """Log-probabilities of policy actions; densities are those of the environment's actions, as recorded."""
        tensor = torch.from_numpy(action).to(self.device)
        if self.deterministic:
            chosen = self.policy.act(obs, deterministic=True, rng=self.rng).action
            same = (chosen == tensor).reshape(len(action), -1).all(1)
            return np.where(same.cpu().numpy(), 0.0, -np.inf)
        assert isinstance(self.policy, StochasticPolicy)
        log_prob = self.policy.log_prob(obs, tensor).double().cpu().numpy()
        return cast(Float64, log_prob - self.actions.log_slope(action))

    # Rows

    def _chunks(self, rows: Indices) -> Iterator[_Rows]:
        buffer = RecordedTransitions(self.dataset, self.units.to_policy)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            index = rows[start : start + ROWS_AT_ONCE]
            yield _Rows(
                index, self._tensors(buffer.observations(index)), self._tensors(buffer.next_observations(index))
            )

    def _tensors(self, obs: ArrayObservation) -> Observation:
        seen = obs if self.normalizer is None else self.normalizer(obs)
        return to_tensors(map_observation(np.ascontiguousarray, seen), self.device)

    def _padded(self, values: Float64) -> Tensor:
        """Values of all rows by episode [N, T], padded with 0 at the end."""
        lengths = self.dataset.episode_lengths
        padded = np.zeros((len(lengths), int(lengths.max())))
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = values
        return torch.from_numpy(padded)
