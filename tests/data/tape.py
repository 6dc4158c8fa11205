"""Episodes written down as letters, played into a buffer or a sampler, and remembered in plain Python.

A step is a letter: `.` goes on, `T` terminates, `C` is cut off (truncated), `B` is both at once, and `r` is a row in
which a next-step environment only resets itself. An observation is a number that says where it was made: 1000 times the
environment, plus 10 times the episode, plus the step. The one that ends the first episode after 3 steps is 3, and the
next one begins with 10.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces

from rl_training.contracts.batches import Step
from rl_training.contracts.spec import EnvSpec
from rl_training.data.replay_buffer import ReplayBuffer

NUMBERS = spaces.Box(-np.inf, np.inf, (1,), np.float32)
SPEC = EnvSpec(NUMBERS, spaces.Discrete(1000))
"""Observations as above."""


class Row(NamedTuple):
    """What one environment did in one step; `following` is what was really seen after it."""

    obs: float
    action: int
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    following: float

    @property
    def ends(self) -> bool:
        return self.terminated or self.truncated


class Tape:
    """Plays letters into a sink, and keeps the whole history, row by row and environment by environment.

    With `next_step`, the row after the end of an episode is `r`, and must be written. `observe` turns the numbers [N]
    into observations. Actions count the steps.
    """

    per_env: ClassVar[int] = 1000
    per_episode: ClassVar[int] = 10

    def __init__(self, sink: Any, num_envs: int = 1, *, next_step: bool = False, observe: Any = None) -> None:
        self.sink, self.next_step = sink, next_step
        self.observe = observe or (lambda numbers: np.array(numbers, np.float32)[:, None])
        self.episode = [0] * num_envs
        self.length = [0] * num_envs
        self.history: list[list[Row]] = []

    def play(self, *letters: str, rewards: Any = None) -> Tape:
        """One string per environment, all of one length. `rewards` likewise, by default 1, 2, 3, ... over time."""
        num_steps = len(letters[0])
        if rewards is None:
            began = len(self.history) + 1
            rewards = [list(range(began, began + num_steps))] * len(letters)
        elif len(letters) == 1:
            rewards = [rewards]
        for time in range(num_steps):
            self.step([line[time] for line in letters], [line[time] for line in rewards])
        return self

    def step(self, letters: list[str], rewards: list[float]) -> None:
        before = self._numbers()
        rows, final = [], []
        for env, (letter, reward) in enumerate(zip(letters, rewards, strict=True)):
            terminated, truncated, valid = letter in "TB", letter in "CB", letter != "r"
            if valid:
                self.length[env] += 1
            following = self._number(env)
            if terminated or truncated:
                final.append(following)
            if not valid or (not self.next_step and (terminated or truncated)):
                self.episode[env] += 1
                self.length[env] = 0
            action = len(self.history)
            rows.append(Row(before[env], action, reward, terminated, truncated, valid, following))
        self.history.append(rows)
        obs = self.observe(before)
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        self.sink.add(
            Step(
                obs=obs,
                policy_obs=obs,
                action=columns[1],
                extras={},
                reward=columns[2],
                policy_reward=columns[2],
                terminated=columns[3],
                truncated=columns[4],
                valid=columns[5],
                ended=np.flatnonzero(columns[3] | columns[4]),
                final_obs=self.observe(final) if final else None,
                final_policy_obs=None,
                next_obs=self.observe(self._numbers()),
            )
        )

    def restart(self) -> None:
        """Begin new episodes everywhere, as environments that are made anew do."""
        self.episode = [episode + 1 for episode in self.episode]
        self.length = [0] * len(self.length)

    def _numbers(self) -> list[int]:
        return [self._number(env) for env in range(len(self.episode))]

    def _number(self, env: int) -> int:
        return self.per_env * env + self.per_episode * self.episode[env] + self.length[env]


def recorded(*letters: str, capacity: int = 100, next_step: bool = False, rewards: Any = None) -> ReplayBuffer:
    """A buffer with what the letters say."""
    buffer = ReplayBuffer(SPEC, capacity, len(letters))
    Tape(buffer, len(letters), next_step=next_step).play(*letters, rewards=rewards)
    return buffer


def numbers(array: Any) -> list[float]:
    """Observations as the numbers that they are."""
    return [float(number) for number in np.asarray(array).reshape(-1)]
