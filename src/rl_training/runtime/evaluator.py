"""Evaluation: whole episodes in separate environments, with frozen statistics and separate seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_training.contracts.algorithm import Policy
from rl_training.contracts.arrays import ArrayObservation, BoolArray
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.environment import ActionMapping, Environments
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.data.normalize import ObservationNormalizer
from rl_training.runtime.collector import Episode, EpisodeStatistics, to_tensors
from rl_training.runtime.guards import check_step


class EvaluationStoppedError(Exception):
    """An evaluation that was stopped before its end. It has no result."""


class Evaluator:
    """Runs a policy for a number of episodes.

    Every environment plays a fixed share of the episodes, so that short episodes are not counted more often than long
    ones (https://github.com/DLR-RM/stable-baselines3/issues/402). Equal seeds give equal episodes.

    With probability `epsilon` the random policy chooses the action: otherwise a deterministic policy may loop forever
    in a deterministic game.

    A reset may leave state in an environment: statistics of observations, random streams of its own. So each evaluation
    restores the state `before_use` (see `Environments.take_snapshot`), or creates the environments again with `remake`.
    With neither, equal seeds give equal episodes only if a reset with a seed determines the environment.

    An episode is truncated after `max_steps` steps: in an environment without a time limit, a policy may never reach
    the end. Not every vector environment can reset a single one of its environments. So one whose episode was truncated
    waits until that episode ends anyway, or until all that have episodes left to play wait; then all are reset.
    """

    def __init__(
        self,
        env: Environments,
        actions: ActionMapping,
        *,
        device: torch.device | None = None,
        obs_normalizer: ObservationNormalizer | None = None,
        random_policy: Policy | None = None,
        epsilon: float = 0.0,
        before_use: Any = None,
        remake: Callable[[], Environments] | None = None,
        max_steps: int | None = None,
    ) -> None:
        self.env = env
        self.actions = actions
        self.device = device or torch.device("cpu")
        self.obs_normalizer = obs_normalizer
        self.random_policy, self.epsilon = random_policy, epsilon
        self.before_use, self.remake = before_use, remake
        self.max_steps = max_steps
        self._has_warned = False

    def evaluate(
        self,
        policy: Policy,
        num_episodes: int = 10,
        *,
        deterministic: bool = True,
        seed: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> EvaluationResult:
        """Returns and lengths of `num_episodes` episodes; `EvaluationStoppedError` as soon as `stop` is true."""
        self._prepare()
        rng = random_stream(seed, "evaluation")
        num_envs = self.env.num_envs
        quota = np.full(num_envs, num_episodes // num_envs) + (np.arange(num_envs) < num_episodes % num_envs)
        episodes: list[Episode] = []
        waiting, num_cut = np.zeros(num_envs, np.bool_), 0
        statistics = EpisodeStatistics.start(num_envs)
        obs = self.env.reset(seed=draw_seed(rng))
        state, episode_start = None, np.ones(num_envs, np.bool_)
        while quota.any():
            if stop is not None and stop():
                raise EvaluationStoppedError
            tensors = to_tensors(self._policy_obs(obs), self.device)
            out = policy.act(
                tensors,
                deterministic=deterministic,
                state=state,
                episode_start=torch.from_numpy(episode_start),
                rng=rng,
            )
            action = out.action.cpu().numpy()
            if self.random_policy is not None:
                chosen = rng.random(num_envs) < self.epsilon
                action[chosen] = self.random_policy.act(tensors, rng=rng).action.cpu().numpy()[chosen]
            step = self.env.step(self.actions.to_env(action))
            check_step(step, "in an evaluation")
            for env, episode in zip(step.finished, statistics.add(step), strict=True):
                if quota[env] > 0 and not waiting[env]:
                    quota[env] -= 1
                    episodes.append(episode)
                waiting[env] = False  # the end of an episode that was truncated before
            obs, state, episode_start = step.obs, out.state, step.terminated | step.truncated | ~step.valid
            for env in self._too_long(statistics, (quota > 0) & ~waiting):
                quota[env] -= 1
                waiting[env] = True
                num_cut += 1
                episodes.append(Episode(float(statistics.running_return[env]), self.max_steps or 0, None))
            if waiting.any() and quota.any() and waiting[quota > 0].all():
                obs = self.env.reset(seed=draw_seed(rng))
                statistics.restart()
                waiting[:] = False
                state, episode_start = None, np.ones(num_envs, np.bool_)
        self._report_cut(num_cut, num_episodes)
        return EvaluationResult(
            returns=[episode.total for episode in episodes],
            lengths=[episode.length for episode in episodes],
            successes=[episode.success for episode in episodes if episode.success is not None],
            num_cut=num_cut,
        )

    def _too_long(self, statistics: EpisodeStatistics, playing: BoolArray) -> npt.NDArray[np.intp]:
        """The environments whose episodes have reached the limit."""
        if self.max_steps is None:
            return np.zeros(0, np.intp)
        return np.flatnonzero(playing & (statistics.running_length >= self.max_steps))

    def _report_cut(self, num_cut: int, num_episodes: int) -> None:
        if num_cut and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{num_cut} of {num_episodes} evaluation episodes did not end and were truncated after "
                f"{self.max_steps:,} steps (eval_max_steps). If the environment has no time limit, give it one: "
                "gymnasium.wrappers.TimeLimit, or env_kwargs max_episode_steps=... for an id",
                stacklevel=3,
            )

    def _prepare(self) -> None:
        """Bring the environments into their state before the first evaluation."""
        if self.before_use is not None:
            self.env.restore_snapshot(self.before_use)
        elif self.remake is not None:
            self.env.close()
            self.env = self.remake()

    def _policy_obs(self, obs: ArrayObservation) -> ArrayObservation:
        return obs if self.obs_normalizer is None else self.obs_normalizer(obs)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()
