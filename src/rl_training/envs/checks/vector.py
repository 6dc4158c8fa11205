"""The check of a vector environment, in particular its autoreset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rl_training.envs.checks.findings import Report
from rl_training.envs.checks.observations import check_observation, check_spaces, get_space
from rl_training.envs.checks.playing import (
    COMPARED_STEPS,
    Moment,
    Player,
    check_repeatable,
    digest,
    random_actions,
)
from rl_training.envs.vector import AnyVectorEnv


def check_vector(env: AnyVectorEnv, report: Report, num_steps: int, seed: int) -> None:
    """All checks; `num_steps` are spread over the environments."""
    player = VectorPlayer(env, get_space(env, "observation_space", report), report)
    check_spaces(player.single_space, get_space(env, "single_action_space", report), report)
    action_space = get_space(env, "action_space", report)
    actions = random_actions(action_space, max(2, num_steps // env.num_envs), seed)
    trajectory = player.play(seed, actions)
    check_repeatable(trajectory, player.play(seed, actions[:COMPARED_STEPS]), report, "step {step}")
    _check_seeds(player, trajectory[0], seed)
    if player.num_ended == 0:
        report.add(
            "info", "episodes", f"no episode ended within {len(actions)} steps, so autoreset could not be checked"
        )
    elif player.num_overwritten == player.num_ended:
        report.add(
            "warning",
            "final observation",
            "info['final_obs'] always equals the first observation of the next episode: the environment probably "
            "writes into the array that it returned before. Return a copy",
        )


class VectorPlayer(Player):
    """Plays all environments at once, and checks the autoreset at the ends of episodes."""

    env: AnyVectorEnv

    def __init__(self, env: AnyVectorEnv, *args: Any) -> None:
        super().__init__(env, *args)
        self.single_space = get_space(env, "single_observation_space", self.report)
        self.mode = _autoreset_mode(env, self.report)
        self.num_ended, self.num_overwritten = 0, 0

    def play(self, seed: int, actions: Sequence[Any]) -> list[Moment]:
        """Play from a seeded reset."""
        moments = [Moment(digest(self.reset(seed=seed)))]
        num_ended, ended = 0, np.zeros(self.env.num_envs, np.bool_)
        for length, action in enumerate(actions, start=1):
            before = ended
            obs, reward, terminated, truncated, info = self.step(action)
            ended = terminated | truncated
            self.check_autoreset(obs, reward, ended, before, info)
            if self.mode is AutoresetMode.DISABLED and ended.any():
                obs = self.masked_reset(obs, ended)
            num_ended += int(ended.sum())
            moments.append(Moment(digest((obs, reward, terminated, truncated)), num_ended, length))
        self.num_ended += num_ended
        return moments

    def check_outcome(self, reward: Any, terminated: Any, truncated: Any) -> None:
        """Arrays [N] of numbers and of booleans."""
        shape = (self.env.num_envs,)
        parts = (("reward", reward, "fiu"), ("terminated", terminated, "b"), ("truncated", truncated, "b"))
        for name, value, kinds in parts:
            if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind not in kinds:
                found = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
                expected = f"an array of {'booleans' if kinds == 'b' else 'numbers'} of shape {shape}"
                raise self.report.fatal("step", f"{name} must be {expected}, got {found}")
        if not np.isfinite(reward).all():
            self.report.add("error", "reward", f"a reward is not finite: {reward}", "finite")

    def check_autoreset(self, obs: Any, reward: Any, ended: Any, before: Any, info: Mapping[str, Any]) -> None:
        """Whether autoreset behaves as the mode says; `before` marks environments that ended one step ago."""
        if self.mode is AutoresetMode.SAME_STEP:
            self.check_final_obs(obs, ended, info)
        elif ended.any() and "final_obs" in info:
            message = f"it declares {self.mode.value}, but its info has 'final_obs', as in SameStep mode"
            self.report.add("error", "autoreset", message)
        if self.mode is AutoresetMode.NEXT_STEP and (ended[before].any() or np.any(reward[before] != 0)):
            self.report.add(
                "error",
                "autoreset",
                "it declares NextStep, but the step after the end of an episode has a reward or an end flag: it is a "
                "transition, not a reset, and would be discarded",
            )

    def check_final_obs(self, obs: Any, ended: Any, info: Mapping[str, Any]) -> None:
        """Same-step mode: the last observations of the episodes that ended must be in the info."""
        if ended.any() and "final_obs" not in info:
            message = "it declares SameStep, but info has no 'final_obs' when an episode ends"
            raise self.report.fatal("autoreset", message)
        for index in np.flatnonzero(ended):
            final = _row(info["final_obs"], index)
            if final is None:
                message = "info['final_obs'] has no entry for an environment whose episode ended"
                self.report.add("error", "final observation", message)
                continue
            check_observation(self.single_space, final, self.report, "info['final_obs']", " (last of its episode)")
            self.num_overwritten += digest(final) == digest(_row(obs, index))

    def masked_reset(self, obs: Any, ended: Any) -> Any:
        """Disabled mode: reset the environments that ended, and check that no other was reset."""
        fresh = self.reset(options={"reset_mask": ended})
        if any(digest(_row(obs, index)) != digest(_row(fresh, index)) for index in np.flatnonzero(~ended)):
            message = "it declares Disabled, but reset(options={'reset_mask': mask}) resets more than the mask"
            self.report.add("error", "autoreset", message)
        return fresh


def _autoreset_mode(env: AnyVectorEnv, report: Report) -> AutoresetMode:
    """The declared mode; next-step, the package's default, if there is none."""
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        message = (
            "metadata['autoreset_mode'] is not set: next-step is assumed. Set it to a gymnasium.vector.AutoresetMode"
        )
        report.add("warning", "autoreset", message)
        return AutoresetMode.NEXT_STEP
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
        raise report.fatal("autoreset", f"metadata['autoreset_mode'] is {mode!r}; accepted: {known}") from None


def _check_seeds(player: VectorPlayer, start: Moment, seed: int) -> None:
    """Whether different seeds give different starts, and every environment its own."""
    num_envs = player.env.num_envs
    starts = [player.reset(seed=seed + 1000 * other) for other in range(1, 4)]
    if {digest(obs) for obs in starts} == {start.digest}:
        player.report.add("info", "seeding", "all seeds give the same first observations")
    elif num_envs > 1 and all(len({digest(_row(obs, i)) for i in range(num_envs)}) == 1 for obs in starts):
        message = "all environments start in the same state: each needs a seed of its own"
        player.report.add("warning", "seeding", message)


def _row(obs: Any, index: int | np.intp) -> Any:
    """One environment's observation out of a batch."""
    return {key: _row(value, index) for key, value in obs.items()} if isinstance(obs, Mapping) else obs[index]
