"""Environments whose every episode is written down, so that each transition can be recognised wherever it turns up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import ArrayObservation

NUM_ACTIONS = 3


class ScriptedEpisode(NamedTuple):
    """Rewards of its steps, how it ends, and whether its end is a success."""

    rewards: tuple[float, ...]
    end: Literal["terminated", "truncated", "both"]
    success: bool = False


SCRIPTS: tuple[tuple[ScriptedEpisode, ...], ...] = (
    (
        ScriptedEpisode((1.0, 2.0, 3.0), "terminated", success=True),
        ScriptedEpisode((4.0,), "truncated"),
        ScriptedEpisode((0.0, 5.0), "both", success=True),
    ),
    (
        ScriptedEpisode((-1.0, 0.5), "truncated", success=True),
        ScriptedEpisode((0.0, 0.0, 0.0, 7.0), "terminated"),
    ),
    (ScriptedEpisode((0.25, 0.25, 0.25, 0.25, 8.0), "truncated"),),
)
"""One script per environment; one-step episodes, and several that end in the same step, are among them."""


class Place(NamedTuple):
    """What an observation says: which environment, which of its episodes, and how many steps into it."""

    env: int
    episode: int
    step: int


class Transition(NamedTuple):
    """A transition in plain numbers. `following` is the true next observation, also where an episode ended."""

    place: Place
    action: int
    reward: float
    terminated: bool
    truncated: bool
    following: Place


class ScriptedEnv(gym.Env[Any, Any]):
    """Plays its script over and over. The reward is the scripted one plus ten times the action."""

    def __init__(self, index: int, script: Sequence[ScriptedEpisode], dict_obs: bool = False) -> None:
        self.index, self.script, self.dict_obs = index, script, dict_obs
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self.observation_space = box_space() if not dict_obs else dict_space()
        self.episode, self.length = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        # a seed begins the script anew
        self.episode = 0 if seed is not None else self.episode + 1
        self.length = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        episode = self.script[self.episode % len(self.script)]
        reward = episode.rewards[self.length] + 10.0 * int(action)
        self.length += 1
        if self.length < len(episode.rewards):
            return self._observe(), reward, False, False, {}
        terminated, truncated = episode.end != "truncated", episode.end != "terminated"
        return self._observe(), reward, terminated, truncated, {"is_success": episode.success}

    def _observe(self) -> Any:
        place = np.array([self.index, self.episode, self.length], np.float32)
        return {"_place": place, "step": self.length} if self.dict_obs else place


def box_space() -> spaces.Space[Any]:
    return spaces.Box(-1000.0, 1000.0, (3,), np.float32)


def dict_space() -> spaces.Space[Any]:
    """The leading underscore is on purpose: Gymnasium's infos use it for masks, observations may not lose it."""
    return spaces.Dict({"_place": box_space(), "step": spaces.Discrete(100)})


def make_scripted(dict_obs: bool) -> list[Any]:
    """Functions that make the scripted environments, for vector environments."""
    return [lambda i=i, s=s: ScriptedEnv(i, s, dict_obs) for i, s in enumerate(SCRIPTS)]


def places(obs: ArrayObservation) -> list[Place]:
    """What a batch of observations says."""
    array = obs["_place"] if isinstance(obs, dict) else obs
    if isinstance(obs, dict):
        assert list(obs["step"]) == list(array[:, 2]), "the parts of a dict observation belong to different steps"
    return [Place(*(int(number) for number in row)) for row in array]


def scripted_action(place: Place) -> int:
    """A policy: the action depends on everything that the observation says."""
    return (place.env + 2 * place.episode + place.step) % NUM_ACTIONS


def expected_transitions(index: int, count: int) -> list[Transition]:
    """The first transitions of one environment, straight from its script."""
    found: list[Transition] = []
    episode = 0
    while len(found) < count:
        rewards, end, _ = SCRIPTS[index][episode % len(SCRIPTS[index])]
        for step, reward in enumerate(rewards):
            place = Place(index, episode, step)
            action = scripted_action(place)
            last = step == len(rewards) - 1
            flags = (last and end != "truncated", last and end != "terminated")
            found.append(
                Transition(place, action, reward + 10.0 * action, *flags, following=Place(index, episode, step + 1))
            )
        episode += 1
    return found[:count]
