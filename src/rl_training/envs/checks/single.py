"""The check of a single environment."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.envs.atari import is_atari
from rl_training.envs.checks.findings import CannotGoOn, Report, error_text
from rl_training.envs.checks.observations import check_spaces, get_space
from rl_training.envs.checks.playing import (
    COMPARED_STEPS,
    Moment,
    Player,
    check_repeatable,
    digest,
    random_actions,
)
from rl_training.envs.encoding import SnapshotError
from rl_training.envs.factory import SingleEnv
from rl_training.envs.snapshot import restore_snapshot, take_snapshot

LONG_EPISODE = 200
"""An id without time limit whose random episodes are all shorter gets no warning: Blackjack."""


def check_single(env: SingleEnv, report: Report, num_steps: int, seed: int) -> None:
    """All checks; the most basic come first."""
    observation_space = get_space(env, "observation_space", report)
    action_space = get_space(env, "action_space", report)
    check_spaces(observation_space, action_space, report)
    player = SinglePlayer(env, observation_space, report)
    actions = random_actions(action_space, num_steps, seed)
    compared = actions[:COMPARED_STEPS]
    trajectory, again = player.play(seed, actions), player.play(seed, compared)
    check_repeatable(trajectory, again, report, "step {step} of episode {episode}")
    _check_seeds(player, again, compared, seed)
    _check_ends(trajectory, env, report)
    in_private = SinglePlayer(env, observation_space, Report())  # problems after a bad restore are not findings
    report.add("info", "snapshot", _try_snapshot(in_private, actions[:20], seed))


class SinglePlayer(Player):
    """Plays episodes with one environment."""

    env: SingleEnv
    _last: tuple[Any, bytes] | None = None

    def play(self, seed: int, actions: Sequence[Any]) -> list[Moment]:
        """Play from a seeded reset, through as many episodes as it takes."""
        return [Moment(digest(self.reset(seed=seed, options={}))), *self.follow(actions)]

    def follow(self, actions: Sequence[Any]) -> list[Moment]:
        """Play from the current state."""
        moments: list[Moment] = []
        episode, length = 0, 0
        for action in actions:
            obs, reward, terminated, truncated, info = self.step(action)
            length += 1
            moments.append(Moment(digest((obs, reward)), episode, length, bool(terminated), bool(truncated)))
            if "is_success" in info:
                message = "info['is_success'] is reported: its value at the end of an episode gives the success rate"
                self.report.add("info", "success", message)
            if moments[-1].ended:
                episode, length = episode + 1, 0
                moments.append(Moment(digest(self.reset()), episode))
        return moments

    def check_observation(self, obs: Any, call: str) -> None:
        """Also check whether the call overwrote the observation that the previous call returned."""
        if self._last is not None and digest(self._last[0]) != self._last[1]:
            self.report.add(
                "warning",
                "final observation",
                f"{call} writes into the array that the call before it returned. Code that keeps observations, such "
                "as a vector environment with same-step autoreset, then has wrong final observations: return a copy",
                "overwritten",
            )
        self._last = (obs, digest(obs))
        super().check_observation(obs, call)

    def check_outcome(self, reward: Any, terminated: Any, truncated: Any) -> None:
        """A number and two booleans."""
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, (bool, np.bool_)):
                message = f"{name} must be True or False, got {flag!r} of type {type(flag).__name__}"
                raise self.report.fatal("step", message)
        if not isinstance(reward, (numbers.Real, np.integer, np.floating)):
            shape = f" of shape {reward.shape}" if isinstance(reward, np.ndarray) else ""
            message = f"the reward must be a number, got a {type(reward).__name__}{shape}: return float(reward)"
            self.report.add("error", "reward", message)
        elif not np.isfinite(float(reward)):
            message = f"the reward is {reward}: a single such value makes all weights NaN"
            self.report.add("error", "reward", message, "finite")


def _check_seeds(player: SinglePlayer, first: Sequence[Moment], actions: Sequence[Any], seed: int) -> None:
    """Whether different seeds give different episodes."""
    if {digest(player.reset(seed=seed + other)) for other in range(1, 5)} != {first[0].digest}:
        return
    if len({digest(player.reset()) for _ in range(5)}) > 1:
        player.report.add(
            "warning",
            "seeding",
            "every seed gives the same first observation, though it varies between resets without a seed. "
            "Call super().reset(seed=seed) in reset() and draw from self.np_random",
        )
    elif player.play(seed + 1, actions) == first:
        player.report.add("info", "seeding", "the environment looks deterministic: seeds change nothing")
    else:
        player.report.add("info", "seeding", "all episodes start in the same state; randomness comes later")


def _check_ends(trajectory: Sequence[Moment], env: SingleEnv, report: Report) -> None:
    """Whether episodes end, and whether time limits are truncations."""
    limit = _time_limit(env)
    ends = [moment for moment in trajectory if moment.ended]
    if not ends:
        report.add("info", "episodes", f"no episode ended within {len(trajectory) - 1} random steps")
    if limit is None and not any(end.truncated for end in ends):
        _check_no_limit(ends, env, report)
    if limit is not None:
        _check_time_limit([moment for moment in trajectory if moment.length >= limit], limit, report)
    elif len(ends) > 1 and len({end.length for end in ends}) == 1 and not any(end.truncated for end in ends):
        report.add(
            "info",
            "truncation",
            f"every episode was terminated after exactly {ends[0].length} steps. If that is a time limit, it should be "
            "truncated=True instead: values are then bootstrapped",
        )


def _check_no_limit(ends: Sequence[Moment], env: SingleEnv, report: Report) -> None:
    """No time limit, and no truncation in random episodes; short episodes may always end by themselves."""
    if env.spec is not None and is_atari(env.spec.id, {}):  # the emulator ends games after 108,000 frames
        return
    longest = max((end.length for end in ends), default=None)
    if longest is not None and (longest <= LONG_EPISODE or env.spec is None):
        return
    report.add(
        "warning",
        "time limit",
        "the environment has no time limit: a policy that never reaches an end makes one endless episode, and "
        "evaluations truncate it after eval_max_steps. Add gymnasium.wrappers.TimeLimit, or max_episode_steps when it "
        "is registered or made (env_kwargs)",
    )


def _check_time_limit(late: Sequence[Moment], limit: int, report: Report) -> None:
    """`late` are the steps at the limit, and those beyond it that should not exist."""
    if not late:
        message = f"no episode reached its limit of {limit} steps, so truncation could not be checked"
        report.add("info", "truncation", message)
    elif any(moment.length > limit for moment in late):
        message = f"an episode went on after {limit} steps, which is its limit, without truncated=True"
        report.add("error", "truncation", message)
    elif not any(moment.truncated for moment in late):
        report.add(
            "error",
            "truncation",
            f"episodes that reach the limit of {limit} steps report terminated=True. A time limit is truncated=True: "
            "as a termination it teaches the agent that the last state has value 0",
        )
    elif all(moment.terminated for moment in late) and len(late) > 1:
        report.add(
            "warning",
            "truncation",
            f"every episode that reaches the limit of {limit} steps is truncated and terminated. "
            "If the environment counts the same limit itself, it should not report terminated=True",
        )


def _time_limit(env: SingleEnv) -> int | None:
    """The limit of a TimeLimit wrapper or of the registration."""
    layer: Any = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, gym.wrappers.TimeLimit):
            return layer._max_episode_steps
        layer = layer.env
    return env.spec.max_episode_steps if env.spec is not None else None


def _try_snapshot(player: SinglePlayer, actions: Sequence[Any], seed: int) -> str:
    """Whether the same actions have the same effect after a state in the middle of an episode is restored."""
    try:
        player.play(seed, actions[:1])
        state = take_snapshot(player.env)
        never_stopped = player.follow(actions)
        restore_snapshot(player.env, state)
        exact = player.follow(actions) == never_stopped
    except SnapshotError as error:
        return f"{error}: a resumed run begins new episodes"
    except CannotGoOn as error:
        return f"the state can be saved, but after a restore {error}"
    except (Exception, SystemExit) as error:
        return f"saving or restoring the state raised {error_text(error)}"
    verdict = "can be restored exactly" if exact else "can be saved, but the steps after a restore differ"
    return f"the state in the middle of an episode {verdict}"
