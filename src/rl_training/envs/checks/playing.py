"""Playing any kind of environment: calls with checked results, and trajectories to compare."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rl_training.envs.advice import OLD_STEP
from rl_training.envs.checks.findings import Report, error_text
from rl_training.envs.checks.observations import check_observation
from rl_training.envs.factory import SingleEnv
from rl_training.envs.vector import AnyVectorEnv

COMPARED_STEPS = 200
"""Steps of two equally seeded trajectories that are compared."""

SEEDING = "Draw all random numbers from self.np_random, which super().reset(seed=seed) seeds"

StepParts = tuple[Any, Any, Any, Any, dict[str, Any]]


class Player:
    """Resets and steps an environment, and reports malformed results."""

    def __init__(self, env: SingleEnv | AnyVectorEnv, observation_space: spaces.Space[Any], report: Report) -> None:
        self.env, self.observation_space, self.report = env, observation_space, report

    def reset(self, **kwargs: Any) -> Any:
        """The observation of a reset."""
        try:
            result: Any = self.env.reset(**kwargs)
        except (Exception, SystemExit) as error:
            arguments = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
            message = f"reset({arguments}) raised {error_text(error)}"
            if isinstance(error, TypeError) and "argument" in str(error) and any(key in str(error) for key in kwargs):
                message += ". Its signature must be reset(self, *, seed=None, options=None)"
            raise self.report.fatal("reset", message) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            kinds = [type(part).__name__ for part in result] if isinstance(result, tuple) else []
            found = f"({', '.join(kinds)})" if kinds else type(result).__name__
            raise self.report.fatal("reset", f"reset() must return (obs, info) with a dict info, got {found}")
        self.check_observation(result[0], "reset()")
        return result[0]

    def step(self, action: Any) -> StepParts:
        """The five parts of a step."""
        try:
            result: Any = self.env.step(action)
        except (Exception, SystemExit) as error:
            # wrappers unpack five values before we can count them
            old = isinstance(error, ValueError) and "unpack" in str(error) and "got 4" in str(error)
            message = OLD_STEP if old else f"step({action!r}) raised {error_text(error)}"
            raise self.report.fatal("step", message) from error
        if not isinstance(result, tuple) or len(result) != 5:
            found = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            message = f"step() must return (obs, reward, terminated, truncated, info), got {found}"
            raise self.report.fatal("step", OLD_STEP if found == "4 values" else message)
        obs, reward, terminated, truncated, info = result
        if not isinstance(info, dict):
            message = f"the info that step() returns must be a dict, got {type(info).__name__}"
            raise self.report.fatal("step", message)
        self.check_observation(obs, "step()")
        self.check_outcome(reward, terminated, truncated)
        return obs, reward, terminated, truncated, info

    def check_observation(self, obs: Any, call: str) -> None:
        """Check an observation that a call returned."""
        check_observation(self.observation_space, obs, self.report, call)

    def check_outcome(self, reward: Any, terminated: Any, truncated: Any) -> None:
        """Check the reward and the flags that a step returned."""
        raise NotImplementedError


class Moment(NamedTuple):
    """Record of one step, or of a reset (`length` 0)."""

    digest: bytes
    episode: int = 0
    """Episodes that ended before."""
    length: int = 0
    """Steps of the episode so far; for a vector environment, of the trajectory."""
    terminated: bool = False
    truncated: bool = False

    @property
    def ended(self) -> bool:
        """Whether the episode ended here."""
        return self.terminated or self.truncated


def check_repeatable(one: Sequence[Moment], two: Sequence[Moment], report: Report, where: str) -> None:
    """Equal seeds and equal actions must give equal trajectories; `where` is the format string that names a moment."""
    moment = next((a for a, b in zip(one, two, strict=False) if a != b), None)
    if moment is None:
        return
    place = where.format(step=moment.length, episode=moment.episode + 1)
    differ = f"the same seed and actions give different trajectories, from {place} on"
    if moment.episode == 0 and moment.length == 0:
        report.add("error", "seeding", f"two resets with the same seed give different observations. {SEEDING}")
    elif moment.episode == 0:
        report.add("error", "seeding", f"{differ}. {SEEDING}")
    elif moment.length == 0:
        message = "a reset() without a seed must continue with self.np_random, but it draws a new seed"
        report.add("error", "seeding", message)
    else:
        # Gymnasium's BipedalWalker is one of these
        report.add(
            "warning",
            "seeding",
            f"{differ}, after episodes have ended: a reset without a seed draws a new one, or keeps state of earlier "
            "episodes. Runs are reproducible only with newly made environments",
        )


def random_actions(space: spaces.Space[Any], num_steps: int, seed: int) -> list[Any]:
    """Random actions, without touching the generator of the environment's own space."""
    own = copy.deepcopy(space)
    own.seed(seed)
    return [own.sample() for _ in range(num_steps)]


def digest(value: Any) -> bytes:
    """Hash of an observation: equal observations have equal digests, without being kept in memory."""
    if isinstance(value, Mapping):
        parts = [repr(key).encode() + digest(value[key]) for key in sorted(value, key=repr)]
    elif isinstance(value, (tuple, list)):
        parts = [digest(part) for part in value]
    else:
        array = np.asarray(value)
        parts = [repr(value).encode()] if array.dtype.hasobject else [str(array.shape).encode(), array.tobytes()]
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()
