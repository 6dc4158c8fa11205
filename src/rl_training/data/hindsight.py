"""Hindsight experience replay (Andrychowicz et al. 2017): relabels transitions with goals that were achieved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray
from rl_training.contracts.state import Stateful
from rl_training.data.replay_buffer import Indices, ReplayBuffer, Window

Strategy = Literal["future", "final", "episode"]
GoalFn = Callable[[AnyArray, AnyArray], AnyArray]
"""Maps achieved and desired goals [M, ...] to rewards [M], or to whether the episode is over [M]."""


@dataclass(frozen=True)
class Goals:
    """New goals for some rows of a batch: which rows, and the goals [M, ...] for them."""

    rows: Indices
    values: AnyArray

    def put(self, obs: ArrayObservation) -> None:
        """Write the goals into a batch of observations."""
        assert isinstance(obs, dict)
        obs["desired_goal"][self.rows] = self.values


class Hindsight(Stateful):
    """Replaces the desired goal of a share of the transitions with one that was achieved in the same episode.

    Strategies: `future` takes the goal achieved at a random step from this one on, `final` at the episode's last step,
    `episode` at any of its steps. An unfinished episode counts up to its newest step. Rewards are recomputed. If the
    environment has `compute_terminated`, so is termination, and an episode that ended only because it reached its own
    goal counts as truncated under the new one. Otherwise termination is unchanged.
    """

    def __init__(
        self,
        compute_reward: GoalFn,
        rng: np.random.Generator,
        *,
        strategy: Strategy = "future",
        ratio: float = 0.8,
        compute_terminated: GoalFn | None = None,
    ) -> None:
        self.compute_reward, self.compute_terminated = compute_reward, compute_terminated
        self.rng = rng
        self.strategy, self.ratio = strategy, ratio

    def goals(self, buffer: ReplayBuffer, index: Indices) -> Goals:
        """New goals for a share of the transitions."""
        rows = np.flatnonzero(self.rng.random(index.size) < self.ratio)
        chosen = index[rows]
        first, last = buffer.episodes(chosen)
        if self.strategy == "future":
            first = buffer.times(chosen)
        elif self.strategy == "final":
            first = last
        times = first + (self.rng.random(rows.size) * (last - first + 1)).astype(np.int64)
        return Goals(rows, self._achieved(buffer, buffer.at(times, chosen % buffer.num_envs)))

    def relabel(
        self, buffer: ReplayBuffer, window: Window, goals: Goals, reward: AnyArray, terminated: BoolArray
    ) -> tuple[AnyArray, BoolArray, BoolArray]:
        """Rewards, termination and the `used` mask [B, n] of the steps of a window under the new goals."""
        if not goals.rows.size:
            return reward, terminated, window.used
        index, used = window.steps[goals.rows], window.used.copy()
        num_steps = index.shape[1]
        achieved = self._achieved(buffer, index.reshape(-1))
        desired = np.repeat(goals.values, num_steps, axis=0)
        reward, terminated = reward.copy(), terminated.copy()
        reward[goals.rows] = self.compute_reward(achieved, desired).reshape(-1, num_steps)
        if self.compute_terminated is not None:
            over = self.compute_terminated(achieved, desired).reshape(-1, num_steps).astype(np.bool_)
            terminated[goals.rows] = over
            before = np.logical_or.accumulate(over, axis=1)[:, :-1]
            used[goals.rows[:, None], np.arange(1, num_steps)] &= ~before
        return reward, terminated, used

    @staticmethod
    def _achieved(buffer: ReplayBuffer, index: Indices) -> AnyArray:
        obs = buffer.next_observations(index)
        assert isinstance(obs, dict)
        return obs["achieved_goal"]
