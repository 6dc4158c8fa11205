"""Step an environment from stored states, and compare what it does with what a dataset says.

The state comes from the columns `qpos` and `qvel` (MuJoCo), or from the observation where it determines the state:
classic control, and MuJoCo environments whose observation is positions and velocities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray, BoolArray
from rl_training.data.dataset import Dataset, Finding, Indices

MAX_STEPS = 100_000
"""Rows that are stepped again at most."""
TRIAL_STEPS = 200
"""Rows with which other explanations of a disagreement are tried."""
CLASSIC_TOLERANCE, MUJOCO_TOLERANCE = 1e-3, 5e-3
"""Relative difference up to which numbers agree; positions and velocities are not the whole state of MuJoCo."""

Float64 = npt.NDArray[np.float64]
SetState = Callable[[Any, Float64], None]
"""Puts an environment into the state of an observation."""


def _set_array(env: Any, obs: Float64) -> None:
    env.state = np.array(obs)


def _set_cartpole(env: Any, obs: Float64) -> None:
    env.state, env.steps_beyond_terminated = tuple(obs), None


def _set_pendulum(env: Any, obs: Float64) -> None:
    env.state, env.last_u = np.array([np.arctan2(obs[1], obs[0]), obs[2]]), None


def _set_acrobot(env: Any, obs: Float64) -> None:
    env.state = np.array([np.arctan2(obs[1], obs[0]), np.arctan2(obs[3], obs[2]), obs[4], obs[5]])


CLASSIC: dict[str, SetState] = {
    "CartPoleEnv": _set_cartpole,
    "PendulumEnv": _set_pendulum,
    "AcrobotEnv": _set_acrobot,
    "MountainCarEnv": _set_array,
    "Continuous_MountainCarEnv": _set_array,
}
HIDDEN_POSITIONS = {
    "HalfCheetahEnv": 1, "HopperEnv": 1, "Walker2dEnv": 1, "SwimmerEnv": 2, "AntEnv": 2, "InvertedPendulumEnv": 0,
}  # fmt: skip
"""MuJoCo environments whose observations begin with positions and velocities; how many positions are left out."""
CLIPPED_VELOCITY = {"HopperEnv": 10.0, "Walker2dEnv": 10.0}
"""Observations clip velocities here, so that larger ones are not known."""


@dataclass
class _Stepper:
    """Sets stored states in an environment; `usable` says which rows determine the state."""

    env: Any
    source: str
    tolerance: float
    set_row: Callable[[int], None]
    usable: Callable[[Indices], BoolArray] = field(default=lambda rows: np.ones(len(rows), np.bool_))


@dataclass
class _Outcome:
    """What the environment did from the stored states of these rows."""

    rows: Indices
    rewards: Float64
    terminated: BoolArray
    obs_differ: BoolArray
    rewards_differ: BoolArray


def step_from_stored_states(
    dataset: Dataset, env: gymnasium.Env[Any, Any], limit: int | None = None, max_steps: int = MAX_STEPS
) -> Iterator[Finding]:
    """Findings about the rows in which the environment does something else than the dataset says."""
    stepper = _find_stepper(dataset, env)
    if isinstance(stepper, str):
        yield Finding("note", "stepping", f"the environment was not stepped: {stepper}")
        return
    env.reset(seed=0)
    rows = np.unique(np.linspace(0, len(dataset) - 1, min(max_steps, len(dataset))).astype(np.int64))
    rows = rows[stepper.usable(rows)]
    if not len(rows):
        yield Finding("note", "stepping", "the environment was not stepped: no row determines its state")
        return
    outcome = _step(dataset, stepper, rows)
    share = f"of {len(rows)} rows that were stepped again from {stepper.source}"
    yield from _compare_observations(dataset, stepper, outcome, share)
    yield from _compare_rewards(dataset, outcome, share)
    yield from _compare_ends(dataset, outcome, limit, share)


# States


def _find_stepper(dataset: Dataset, env: gymnasium.Env[Any, Any]) -> _Stepper | str:
    """How to set stored states in this environment, or why that is impossible."""
    inner: Any = env.unwrapped
    name = type(inner).__name__
    is_ours = type(inner).__module__.startswith("gymnasium.envs.")
    if isinstance(dataset.observations, dict) or inner.observation_space.shape != dataset.observation_space.shape:
        return "its own observations have another shape than the stored ones"
    observations = dataset.observations
    if is_ours and name in CLASSIC:
        set_state = CLASSIC[name]
        return _Stepper(
            inner,
            "their observations",
            CLASSIC_TOLERANCE,
            lambda row: set_state(inner, np.asarray(observations[row], np.float64)),
        )
    if not (hasattr(inner, "set_state") and hasattr(inner, "model") and hasattr(inner, "data")):
        return f"{name} is neither of classic control nor of MuJoCo, so that its state cannot be set"
    num_pos, num_vel = int(inner.model.nq), int(inner.model.nv)
    qpos, qvel = dataset.extras.get("qpos"), dataset.extras.get("qvel")
    if qpos is not None and qvel is not None and qpos.shape[1:] == (num_pos,) and qvel.shape[1:] == (num_vel,):
        return _Stepper(
            inner,
            "qpos and qvel",
            MUJOCO_TOLERANCE,
            lambda row: inner.set_state(np.asarray(qpos[row], np.float64), np.asarray(qvel[row], np.float64)),
        )
    if not is_ours or name not in HIDDEN_POSITIONS:
        return f"the observations of {name} do not determine its state, and qpos and qvel are not stored"
    return _from_positions(inner, name, observations)


def _from_positions(inner: Any, name: str, observations: AnyArray) -> _Stepper | str:
    num_pos, num_vel = int(inner.model.nq), int(inner.model.nv)
    hidden = HIDDEN_POSITIONS[name]
    if not getattr(inner, "_exclude_current_positions_from_observation", hidden > 0):
        hidden = 0
    known = num_pos - hidden
    if observations.ndim != 2 or observations.shape[1] < known + num_vel:
        return f"the observations of {name} are shorter than its state"
    bound = CLIPPED_VELOCITY.get(name, np.inf)

    def set_row(row: int) -> None:
        obs = np.asarray(observations[row], np.float64)
        qpos = np.concatenate([np.zeros(hidden), obs[:known]])  # no force depends on where it is
        inner.set_state(qpos, obs[known : known + num_vel])

    def usable(rows: Indices) -> BoolArray:
        velocities = np.abs(np.asarray(observations[rows], np.float64)[:, known : known + num_vel])
        return np.asarray((velocities < bound).all(axis=1))

    return _Stepper(inner, "their observations", MUJOCO_TOLERANCE, set_row, usable)


# Steps


def _step(
    dataset: Dataset, stepper: _Stepper, rows: Indices, change: Callable[[AnyArray], AnyArray] | None = None
) -> _Outcome:
    outcome = _Outcome(
        rows,
        np.full(len(rows), np.nan),
        np.zeros(len(rows), np.bool_),
        np.ones(len(rows), np.bool_),
        np.ones(len(rows), np.bool_),
    )
    for start in range(0, len(rows), 4096):
        part = rows[start : start + 4096]
        actions, rewards = np.asarray(dataset.actions[part]), np.asarray(dataset.rewards[part], np.float64)
        following = np.asarray(dataset.next_observations[part], np.float64)
        unknown = _unknown_next(dataset, part, following)
        for number, row in enumerate(part):
            action = actions[number] if change is None else change(actions[number])
            done = _one_step(stepper, int(row), action)
            if done is None:
                continue
            obs, reward, ended = done
            place = start + number
            outcome.rewards[place], outcome.terminated[place] = reward, ended
            agrees = unknown[number] or _agrees(obs, following[number], stepper.tolerance).all()
            outcome.obs_differ[place] = not agrees
            outcome.rewards_differ[place] = not _agrees(reward, rewards[number], stepper.tolerance)
    return outcome


def _unknown_next(dataset: Dataset, rows: Indices, following: Float64) -> BoolArray:
    """Rows whose true next observation is not stored: a termination that repeats the observation before it."""
    observations = dataset.observations
    assert not isinstance(observations, dict)  # such environments have no stepper
    before = np.asarray(observations[rows], np.float64)
    same = (before == following).reshape(len(rows), -1).all(axis=1)
    return np.asarray(same & np.asarray(dataset.terminated)[rows])


def _one_step(stepper: _Stepper, row: int, action: Any) -> tuple[Float64, float, bool] | None:
    """One step from a stored state; None if the environment refuses it, as with an action that it does not have."""
    try:
        stepper.set_row(row)
        obs, reward, terminated, _, _ = stepper.env.step(action)
        return np.asarray(obs, np.float64), float(reward), bool(terminated)
    except Exception:
        return None  # counts as a disagreement


def _agrees(ours: Any, theirs: Any, tolerance: float) -> Any:
    with np.errstate(invalid="ignore"):
        return np.abs(ours - theirs) <= tolerance * np.maximum(1.0, np.abs(theirs))


# Findings


def _compare_observations(dataset: Dataset, stepper: _Stepper, outcome: _Outcome, share: str) -> Iterator[Finding]:
    differ = int(outcome.obs_differ.sum())
    if not differ:
        text = f"the next observations agree with the environment in all {share.removeprefix('of ')}"
        yield Finding("note", "stepping", text)
        return
    first = int(outcome.rows[outcome.obs_differ][0])
    text = f"{differ} {share} have another next observation than the environment (the first is row {first})"
    is_scaled = differ > 0.5 * len(outcome.rows) and _agrees_if_scaled(dataset, stepper, outcome)
    if is_scaled:
        text += ". With actions scaled from [-1, 1] to the bounds they agree: the stored actions are scaled"
    elif differ > 0.5 * len(outcome.rows):
        text += ". It is another environment or version, or observations or actions were changed (filtered, scaled)"
    yield Finding("error" if differ > 0.01 * len(outcome.rows) else "warning", "stepping", text, differ)


def _agrees_if_scaled(dataset: Dataset, stepper: _Stepper, outcome: _Outcome) -> bool:
    space = stepper.env.action_space
    if not isinstance(space, spaces.Box) or not space.is_bounded("both"):
        return False
    rows = outcome.rows[:: max(1, len(outcome.rows) // TRIAL_STEPS)]

    def to_bounds(action: AnyArray) -> AnyArray:
        return cast(
            AnyArray, (space.low + (np.clip(action, -1, 1) + 1) * 0.5 * (space.high - space.low)).astype(space.dtype)
        )

    return bool(_step(dataset, stepper, rows, to_bounds).obs_differ.mean() < 0.1)


def _compare_rewards(dataset: Dataset, outcome: _Outcome, share: str) -> Iterator[Finding]:
    differ = int(outcome.rewards_differ.sum())
    if not differ:
        return
    text = f"{differ} {share} have another reward than the environment"
    stored = np.asarray(dataset.rewards[outcome.rows], np.float64)
    known = np.isfinite(outcome.rewards) & np.isfinite(stored)
    if differ > 0.5 * len(outcome.rows) and known.sum() > 2 and np.ptp(outcome.rewards[known]) > 1e-6:
        factor, offset = np.polyfit(outcome.rewards[known], stored[known], 1)
        fitted = factor * outcome.rewards[known] + offset
        if _agrees(fitted, stored[known], 1e-3).mean() > 0.95:
            text += f": they are {factor:.4g} times the environment's, plus {offset:.4g}"
    yield Finding("error" if differ > 0.01 * len(outcome.rows) else "warning", "stepping", text, differ)


def _compare_ends(dataset: Dataset, outcome: _Outcome, limit: int | None, share: str) -> Iterator[Finding]:
    stored = np.asarray(dataset.terminated)[outcome.rows]
    too_many, too_few = stored & ~outcome.terminated, ~stored & outcome.terminated
    if count := int(too_many.sum()):
        lengths = dataset.episode_lengths[dataset.episode_of(outcome.rows[too_many])]
        usual = int(np.bincount(lengths).argmax())
        at_limit = int((lengths == (limit or usual)).sum())
        text = f"{count} {share} are marked as terminated, and the environment goes on"
        if at_limit > 0.5 * count and at_limit > 1:
            text += f"; {at_limit} of them after {limit or usual} steps: time limits marked as terminal"
        yield Finding("error", "stepping", text, count)
    if count := int(too_few.sum()):
        cut = np.asarray(dataset.truncated)[outcome.rows[too_few]]
        text = f"{count} {share} are not marked as terminated, and the environment terminates there"
        if cut.any():
            text += f"; {int(cut.sum())} of them are marked as truncated"
        yield Finding("error" if count > 0.001 * len(stored) else "warning", "stepping", text, count)
