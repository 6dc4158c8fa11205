"""Checks for NaN and infinity where they first appear; errors name the step, the environment and the quantity.

Networks and buffers compute in float32. A float64 number that exceeds the range of float32 would become infinity there,
and counts as infinite.
"""

from __future__ import annotations

import math

import numpy as np

from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Metrics
from rl_training.contracts.environment import VectorStep
from rl_training.contracts.errors import NonFiniteError

LARGEST = float(np.finfo(np.float32).max)
When = int | str
"""For error messages: the number of environment steps so far, or a text."""


def check_step(step: VectorStep, when: When) -> None:
    """Refuse rewards and observations (including final ones) that are not finite in float32."""
    _check("reward", step.reward, None, when)
    check_observation(step.obs, None, when)
    if step.final_obs is not None:
        check_observation(step.final_obs, step.ended, when)


def check_observation(obs: ArrayObservation, envs: AnyArray | None, when: When) -> None:
    """Refuse observations that are not finite in float32, of the environments with these numbers (None: of all)."""
    if isinstance(obs, dict):
        for key, part in obs.items():
            _check(f"observation '{key}'", part, envs, when)
    else:
        _check("observation", obs, envs, when)


def _check(quantity: str, values: AnyArray, envs: AnyArray | None, when: When) -> None:
    if values.dtype.kind != "f":
        return
    fits = np.isfinite(values) if values.dtype.itemsize <= 4 else np.abs(values) <= LARGEST
    if np.count_nonzero(fits) == values.size:  # faster than `.all()` on small arrays
        return
    when = when if isinstance(when, str) else f"after {when} environment steps"
    envs = np.arange(len(values)) if envs is None else envs
    rows = ~fits.reshape(len(values), -1).all(axis=1)
    numbers = ", ".join(str(number) for number in envs[rows])
    problem = "not finite" if not np.isfinite(values).all() else f"outside of the range of float32 ({LARGEST:.4g})"
    none = " (a reward of None is read as NaN)" if quantity == "reward" and np.isnan(values[rows][0]).any() else ""
    raise NonFiniteError(f"environment {numbers}: the {quantity} is {problem}, {when}: {values[rows][0]}{none}")


def check_update(metrics: Metrics, when: str) -> None:
    """Refuse losses and gradient norms that are not finite."""
    bad = [
        name
        for name, value in metrics.items()
        if name.startswith("loss/") or name == "train/gradient_norm"
        if not math.isfinite(float(value))
    ]
    if bad:
        raise NonFiniteError(
            f"the update after {when} gave NaN or infinity in {', '.join(bad)}. "
            "Try a smaller learning rate, gradient clipping, or normalize_obs and normalize_reward; "
            "the last checkpoint was saved before this update"
        )
