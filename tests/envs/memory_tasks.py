"""Small tasks that need a memory: what is asked at the end of an episode was shown only at its beginning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import rl_training
from rl_training.algorithms.registry import get_spec
from rl_training.contracts.batches import EvaluationResult


class Recall(gym.Env[Any, Any]):
    """A cue is shown in the first step; after a delay in which nothing is shown, it is asked for.

    The observation is the cue as a one-hot vector, and a 1 behind it when it is asked. Only the answer is rewarded, and
    it ends the episode. Without a memory the best is to guess.
    """

    def __init__(self, num_cues: int = 4, delay: int = 6) -> None:
        self.num_cues, self.delay = num_cues, delay
        self.observation_space = spaces.Box(0.0, 1.0, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues)
        self.cue = self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(self.num_cues)), 0
        return self._observe(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        asked = self.time > self.delay
        right = asked and int(action) == self.cue
        self.time += 1
        return self._observe(), float(right), asked, False, {**self._info(), **({"is_success": right} if asked else {})}

    def _observe(self) -> Any:
        shown = np.zeros(self.num_cues + 1, np.float32)
        if self.time == 0:
            shown[self.cue] = 1.0
        if self.time > self.delay:
            shown[-1] = 1.0
        return shown

    def _info(self) -> dict[str, Any]:
        return {}

    def get_state(self) -> dict[str, Any]:
        """See `rl_training.envs.snapshot`."""
        return {"cue": self.cue, "time": self.time, "random": self.np_random}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse of `get_state`."""
        self.cue, self.time, self.np_random = state["cue"], state["time"], state["random"]


class MaskedRecall(Recall):
    """As `Recall`, with a mask: until it is asked, only the action 0 is valid."""

    def _info(self) -> dict[str, Any]:
        mask = np.ones(self.num_cues, np.int8)
        if self.time <= self.delay:
            mask[1:] = 0
        return {"action_mask": mask}


@dataclass(frozen=True)
class MemoryTask:
    """An environment, and settings of PPO and of the memory with which it is solved; PPO gets all but the memory."""

    env_class: type[gym.Env[Any, Any]]
    env_kwargs: Mapping[str, Any]
    total_timesteps: int
    settings: Mapping[str, Any]
    recurrent: Mapping[str, Any]

    def make_env(self) -> gym.Env[Any, Any]:
        return self.env_class(**self.env_kwargs)

    def train(self, algo: str, seed: int, num_episodes: int = 100) -> EvaluationResult:
        """Episodes of the final policy, with deterministic actions."""
        agent_class = getattr(rl_training, get_spec(algo).title)
        own = self.recurrent if algo == "recurrent_ppo" else {}
        agent = agent_class(self.make_env, seed=seed, eval_every=0, **self.settings, **own)
        try:
            agent.learn(self.total_timesteps, progress=False)
            result: EvaluationResult = agent.evaluate(num_episodes)
        finally:
            agent.close()
        return result


SETTINGS = {
    "num_envs": 8, "num_steps": 64, "minibatch_size": 256, "num_epochs": 10, "gamma": 0.95, "ent_coef": 0.01,
    "learning_rate": {"schedule": "linear", "start": 2e-3},
}  # fmt: skip

TASKS = {
    "recall": MemoryTask(Recall, {"num_cues": 4, "delay": 6}, 100_000, SETTINGS, {"sequence_length": 16}),
    "recall-gru": MemoryTask(
        Recall, {"num_cues": 4, "delay": 6}, 100_000, SETTINGS, {"sequence_length": 16, "memory": {"kind": "gru"}}
    ),
}
SHORT = MemoryTask(
    Recall, {"num_cues": 2, "delay": 1}, 6_144, {**SETTINGS, "learning_rate": 2e-3}, {"sequence_length": 16}
)
"""Takes seconds."""
