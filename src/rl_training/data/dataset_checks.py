"""Checks of a recorded dataset: what is wrong with it, or looks as if it were.

`check_dataset` repeats what was found while reading, and adds what the columns show: NaN, actions outside of the
bounds or scaled, time limits marked as terminal, cut episodes, filtered observations. With an environment, its spaces
and its time limit are compared, and it is stepped from stored states (see `dataset_stepping`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray
from rl_training.data.dataset import Dataset, Finding, Severity, chunks, parts_of
from rl_training.data.dataset_stepping import MAX_STEPS, step_from_stored_states
from rl_training.data.statistics import column_statistics

TOLERANCE = 1e-4
"""Relative distance from a bound that counts as rounding."""
MIN_EPISODES = 5
"""Fewer episodes say nothing about how ends are marked."""


def check_dataset(
    dataset: Dataset, env: gymnasium.Env[Any, Any] | None = None, max_steps: int = MAX_STEPS
) -> list[Finding]:
    """Findings about a dataset, those made while reading included.

    `env` is the environment that the data claims to come from; up to `max_steps` rows are stepped again in it.

    Example:
        findings = check_dataset(read_dataset("data.npz"), gymnasium.make("Pendulum-v1"))
    """
    found = list(dataset.findings)
    found += _non_finite(dataset)
    found += _spaces(dataset, env)
    space = dataset.action_space if env is None else env.action_space
    known = env is not None or dataset.metadata.spaces_known
    found += _actions(dataset, space, known)
    found += _observations(dataset, env)
    limit = _time_limit(dataset, env)
    found += _ends(dataset, limit)
    found += _rewards(dataset)
    if env is not None and not any(finding.severity == "error" and finding.topic == "spaces" for finding in found):
        found += step_from_stored_states(dataset, env, limit, max_steps)
    return found


# Values


def _non_finite(dataset: Dataset) -> Iterator[Finding]:
    columns = {
        **parts_of(dataset.observations),
        **parts_of(dataset.final_observations, "last observations"),
        "actions": dataset.actions,
        "rewards": dataset.rewards,
        **{f"extras.{name}": column for name, column in dataset.extras.items()},
    }
    if dataset.stored_next is not None:
        columns |= parts_of(dataset.stored_next, "next_observations")
    for name, column in columns.items():
        if column.dtype.kind != "f":
            continue
        count, first = 0, -1
        for place, chunk in chunks(column):
            bad = ~np.isfinite(chunk.reshape(len(chunk), -1)).all(axis=1)
            if bad.any():
                first = place.start + int(bad.argmax()) if first < 0 else first
                count += int(bad.sum())
        if count:
            severity: Severity = "warning" if name.startswith("extras.") else "error"
            text = f"NaN or infinity in {count} of {len(column)} rows, the first is row {first}"
            yield Finding(severity, name, text, count)


def _spaces(dataset: Dataset, env: gymnasium.Env[Any, Any] | None) -> Iterator[Finding]:
    if env is None:
        return
    for name in ("observation_space", "action_space"):
        ours, theirs = getattr(dataset, name), getattr(env, name)
        if type(ours) is not type(theirs) or ours.shape != theirs.shape:
            yield Finding("error", "spaces", f"the data's {name} is {ours!s:.120}, the environment's {theirs!s:.120}")


def _outside(column: Any, space: spaces.Space[Any]) -> tuple[int, float]:
    """Rows outside of a space, and by how much at most."""
    low: Any
    high: Any
    if isinstance(space, spaces.Box):
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    elif isinstance(space, spaces.Discrete):
        low, high = np.float64(space.start), np.float64(space.start + space.n - 1)
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start.astype(np.float64), (space.start + space.nvec - 1).astype(np.float64)
    else:
        low, high = np.float64(0), np.float64(1)
    slack = TOLERANCE * np.maximum(1.0, np.where(np.isfinite(high), np.abs(high), 0.0))
    count, worst = 0, 0.0
    for _, chunk in chunks(column):
        values = chunk.astype(np.float64)
        beyond = np.nan_to_num(np.maximum(low - values, values - high), nan=0.0, neginf=0.0)
        outside = (beyond > slack).reshape(len(chunk), -1).any(axis=1)
        count += int(outside.sum())
        worst = max(worst, float(beyond.max()))
    return count, worst


def _actions(dataset: Dataset, space: spaces.Space[Any], known: bool) -> Iterator[Finding]:
    if not known or space.shape != dataset.action_space.shape:
        return
    count, worst = _outside(dataset.actions, space)
    total = len(dataset)
    if count and not isinstance(space, spaces.Box):
        yield Finding("error", "actions", f"{count} of {total} are not in {space}", count)
    elif count:
        text = (
            f"{count} of {total} are outside of the bounds of {space!s:.120}, by up to {worst:.3g}: they were stored "
        )
        yield Finding("warning", "actions", text + "before they were clipped or squashed, or in another scale", count)
    elif isinstance(space, spaces.Box) and space.is_bounded("both"):
        yield from _scaled_actions(dataset, space)


def _scaled_actions(dataset: Dataset, space: spaces.Box) -> Iterator[Finding]:
    """Actions in [-1, 1] though the bounds are wider: most likely a policy's, before they were scaled."""
    wide = (space.high > 1.5) & (space.low < -1.5)
    if not wide.any():
        return
    ranges = column_statistics(dataset.actions)
    low, high = ranges.low[wide], ranges.high[wide]
    if (low >= -1 - TOLERANCE).all() and (high <= 1 + TOLERANCE).all() and (np.maximum(-low, high) > 0.9).all():
        yield Finding(
            "warning",
            "actions",
            f"all are within [-1, 1], and the bounds are {space!s:.120}: they look scaled "
            "to [-1, 1]. The environment needs them in its own bounds",
            len(dataset),
        )


def _observations(dataset: Dataset, env: gymnasium.Env[Any, Any] | None) -> Iterator[Finding]:
    given: Any = dataset.observation_space if env is None else env.observation_space
    for name, column in parts_of(dataset.observations).items():
        key = name.partition(".")[2]
        space: Any = given.spaces.get(key) if key and isinstance(given, spaces.Dict) else given
        if (env is not None or dataset.metadata.spaces_known) and getattr(space, "shape", None) == column.shape[1:]:
            count, worst = _outside(column, space)
            if count:
                text = f"{count} of {len(column)} are outside of {space!s:.160}, by up to {worst:.3g}"
                yield Finding("warning", name, text, count)
        if column.dtype.kind == "f":
            yield from _filtered(column, name)


def _filtered(column: Any, name: str) -> Iterator[Finding]:
    """Observations that look normalised: every component has mean 0 and deviation 1."""
    numbers = column_statistics(column)
    mean, std = numbers.mean.reshape(-1), numbers.std.reshape(-1)
    varies = std > 1e-6
    if not varies.all() and len(varies) > 1:
        count = int((~varies).sum())
        yield Finding("note", name, f"{count} of {len(varies)} components never change", count)
    if varies.sum() < 2:
        return
    is_standard = (np.abs(mean[varies]) < 0.2) & (np.abs(std[varies] - 1) < 0.2)
    if is_standard.all():
        yield Finding(
            "warning",
            name,
            "every component has about mean 0 and deviation 1: they look filtered (normalised); "
            "a policy that is trained on them needs the same filter when it acts",
        )


def _rewards(dataset: Dataset) -> Iterator[Finding]:
    numbers = column_statistics(dataset.rewards)
    if numbers.low == numbers.high and len(set(dataset.episode_lengths.tolist())) == 1:
        yield Finding(
            "note",
            "rewards",
            f"all are {float(numbers.low):.6g}, and all episodes are equally long: there is nothing to learn from them",
        )


# Ends


def _time_limit(dataset: Dataset, env: gymnasium.Env[Any, Any] | None) -> int | None:
    if env is not None and env.spec is not None and env.spec.max_episode_steps:
        return int(env.spec.max_episode_steps)
    return dataset.metadata.max_episode_steps


def _ends(dataset: Dataset, limit: int | None) -> Iterator[Finding]:
    lengths = dataset.episode_lengths
    terminated = np.asarray(dataset.terminated)[dataset.episode_ends]
    longest = int(lengths.max())
    at_longest = lengths == longest
    suspicious = int((terminated & at_longest).sum())
    if limit is not None:
        at_limit = int((terminated & (lengths == limit)).sum())
        if at_limit:
            severity: Severity = "error" if at_limit > 0.5 * len(lengths) else "warning"
            yield Finding(
                severity,
                "time limits",
                f"{at_limit} of {len(lengths)} episodes are marked as terminated at the "
                f"time limit of {limit} steps: time limits marked as terminal. Targets would be wrong "
                "there; mark them as truncated",
                at_limit,
            )
        yield from _against_limit(lengths, terminated, limit)
    if (limit is None or longest != limit) and suspicious >= MIN_EPISODES and longest > 1:
        share = suspicious / len(lengths)
        if share > 0.9:
            yield Finding(
                "error",
                "time limits",
                f"{suspicious} of {len(lengths)} episodes are terminated after exactly "
                f"{longest} steps, the longest of all: time limits marked as terminal",
                suspicious,
            )
        elif suspicious > 3 * max(1.0, _typical_count(lengths, longest)):
            yield Finding(
                "warning",
                "time limits",
                f"{suspicious} of {len(lengths)} episodes are terminated after exactly "
                f"{longest} steps, the longest of all: they look like time limits marked as terminal",
                suspicious,
            )
    if limit is None:
        yield from _cut_lengths(lengths, terminated)
    single = int((lengths == 1).sum())
    if single > 0.5 * len(lengths) and len(lengths) > MIN_EPISODES:
        yield Finding("warning", "episodes", f"{single} of {len(lengths)} have one step only", single)


def _typical_count(lengths: AnyArray, longest: int) -> float:
    """How many episodes share a length, in the mean over those that occur, the longest left out."""
    _, counts = np.unique(lengths[lengths < longest], return_counts=True)
    return float(counts.mean()) if len(counts) else 0.0


def _against_limit(lengths: AnyArray, terminated: AnyArray, limit: int) -> Iterator[Finding]:
    longer = int((lengths > limit).sum())
    if longer:
        yield Finding(
            "warning",
            "episodes",
            f"{longer} of {len(lengths)} are longer than the environment's time limit of "
            f"{limit} steps (up to {lengths.max()}): the data was recorded with another limit",
            longer,
        )
    cut = ~terminated & (lengths < limit)
    count = int(cut.sum())
    if count == 1 and cut[-1]:
        text = (
            f"the last one is cut after {lengths[-1]} steps, before the time limit of {limit}: recording stopped there"
        )
        yield Finding("note", "episodes", text, 1)
        return
    usual = int(np.bincount(lengths[cut]).argmax()) if count else limit
    if count > 1 and (lengths[cut] == usual).mean() > 0.5:
        yield Finding(
            "note",
            "episodes",
            f"{count} of {len(lengths)} are truncated before the environment's time limit of "
            f"{limit} steps, most of them at {usual}: the data was recorded with another limit",
            count,
        )
    elif count:
        yield Finding(
            "warning",
            "episodes",
            f"{count} of {len(lengths)} are truncated before the time limit of {limit} "
            "steps: they were cut in the middle",
            count,
        )


def _cut_lengths(lengths: AnyArray, terminated: AnyArray) -> Iterator[Finding]:
    """Without a known limit: truncated episodes of different lengths were cut somewhere."""
    cut = lengths[~terminated]
    if len(cut) < 2:
        return
    shorter = int((cut < cut.max()).sum())
    if shorter and not (shorter == 1 and lengths[-1] < cut.max()):  # recording stopped there
        yield Finding(
            "note",
            "episodes",
            f"{shorter} of {len(cut)} truncated episodes are shorter than the longest one "
            f"({cut.max()} steps): they may have been cut in the middle",
            shorter,
        )
