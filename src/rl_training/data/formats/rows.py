"""From rows in time order, as most files have them, to episodes with true ends.

Published files differ in how they mark ends. What is repaired here is said in a finding:

- `terminals` set on the last two rows of an episode (only the last one counts);
- no next observation at the end: the last row of a truncated episode is left out, since nobody knows what followed it;
- episodes that stop without a mark, or in the middle: they count as truncated there;
- one column `dones` for both kinds of ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray, BoolArray
from rl_training.data.dataset import (
    Dataset,
    DatasetError,
    DatasetMetadata,
    Finding,
    HasSpaces,
    Indices,
    Severity,
    chunks,
)
from rl_training.data.formats.space_json import flatten_dict
from rl_training.data.formats.storage import check_dtype, settle

ALIASES: dict[str, tuple[str, ...]] = {
    "observations": ("observations", "observation", "obs", "states"),
    "next_observations": ("next_observations", "next_observation", "next_obs", "next_states"),
    "actions": ("actions", "action"),
    "rewards": ("rewards", "reward"),
    "terminations": ("terminations", "termination", "terminated", "terminals", "terminal"),
    "truncations": ("truncations", "truncation", "truncated", "timeouts", "timeout"),
    "dones": ("dones", "done"),
    "episode_ends": ("episode_terminals",),
    "episode_id": ("episode_id", "episode_ids", "episode"),
}
"""Names that a column may have in files; the first that is found is used."""
REQUIRED = ("observations", "actions", "rewards")
CLOSE = 1e-4
"""Relative difference up to which a next observation counts as the following observation, rounded differently."""
MAX_CUT_SHARE = 0.1
"""With more breaks than this, next observations are kept as stored: episodes were not merely cut."""


@dataclass
class Rows:
    """The columns of a file by their usual names, and what the file says about itself.

    Columns may be arrays, memory maps or open HDF5 datasets: anything that can be sliced.
    """

    observations: dict[str, Any]
    """By key; the key of observations that are no dict is ''."""
    next_observations: dict[str, Any]
    columns: dict[str, Any]
    extras: dict[str, Any]
    source: Path
    key: str
    """Name of the cache entry for columns that have to be converted."""
    metadata: DatasetMetadata = field(default_factory=DatasetMetadata)
    observation_space: spaces.Space[Any] | None = None
    action_space: spaces.Space[Any] | None = None


def sort_columns(columns: Mapping[str, Any], source: Path, key: str) -> Rows:
    """Tell the columns of a file apart by their names. Parts of dicts are `observations/key` or `observations.key`."""
    known: dict[str, Any] = {}
    grouped: dict[str, dict[str, Any]] = {"observations": {}, "next_observations": {}}
    extras: dict[str, Any] = {}
    lookup = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
    for given, column in columns.items():
        head, part = _split_name(given)
        name = lookup.get(head if part else given, "")
        if part and name in grouped:
            grouped[name][part] = column
        elif not part and name in grouped:
            grouped[name][""] = column
        elif not part and name:
            if name in known:
                raise DatasetError(f"{source}: has several columns for {name}: keep one of {ALIASES[name]}")
            known[name] = column
        else:
            extras[_extra_name(given)] = column
    for name, parts in grouped.items():
        if "" in parts and len(parts) > 1:
            raise DatasetError(f"{source}: {name} is both a column and a group of columns")
    missing = [name for name in REQUIRED if name not in known and not grouped.get(name)]
    if missing:
        raise DatasetError(
            f"{source}: has no column {', '.join(missing)}; it has {', '.join(sorted(columns)) or 'none'!s:.300}. A dataset "
            "needs observations, actions and rewards; next_observations, terminations, truncations and episode_id say "
            "where episodes end"
        )
    return Rows(grouped["observations"], grouped["next_observations"], known, extras, source, key)


def _split_name(given: str) -> tuple[str, str]:
    """`observations/key` and `observations.key` as two parts; nested keys are joined by dots."""
    for sign in ("/", "."):
        head, found, part = given.partition(sign)
        if found:
            return head, part.replace("/", ".")
    return given, ""


def _extra_name(given: str) -> str:
    name = given.removeprefix("extras.").removeprefix("infos/").replace("/", ".")
    return "log_prob" if name in ("action_log_probs", "action_log_prob", "log_probs") else name


def build(rows: Rows, env: HasSpaces | None) -> Dataset:
    """A dataset from rows in time order."""
    return _Builder(rows, env).build()


class _Builder:
    def __init__(self, rows: Rows, env: HasSpaces | None) -> None:
        self.rows, self.env, self.source = rows, env, rows.source
        self.findings: list[Finding] = []
        self.num_rows = self._count_rows()
        known = rows.columns
        self.has_next = bool(rows.next_observations)
        self.terminated = self._flags("terminations")
        self.truncated = self._flags("truncations")
        if "terminations" not in known and "dones" in known:
            self.terminated = self._flags("dones") & ~self.truncated
            if "truncations" not in known:
                self.found("warning", "ends", "only `dones` is stored, which does not tell time limits from terminal "
                           "states; all count as terminated", int(self.terminated.sum()))  # fmt: skip
        if "episode_ends" in known:
            self.truncated |= self._flags("episode_ends") & ~self.terminated

    def found(self, severity: Severity, topic: str, message: str, count: int = 0) -> None:
        self.findings.append(Finding(severity, topic, message, count))

    def _all_columns(self) -> dict[str, Any]:
        rows = self.rows
        return {
            **{f"observations.{key}": column for key, column in rows.observations.items()},
            **{f"next_observations.{key}": column for key, column in rows.next_observations.items()},
            **rows.columns,
        }

    def _count_rows(self) -> int:
        lengths = {}
        for name, column in self._all_columns().items():
            check_dtype(f"{self.source}: {name.rstrip('.')}", column.dtype)
            lengths[name.rstrip(".")] = int(column.shape[0]) if column.shape else -1
        if len(set(lengths.values())) != 1 or min(lengths.values()) <= 0:
            raise DatasetError(f"{self.source}: columns need equally many rows, at least one; got {lengths!s:.300}")
        num_rows = min(lengths.values())
        for name, column in list(self.rows.extras.items()):
            usable = column.shape[:1] == (num_rows,) and column.dtype.kind in "biuf" and column.dtype.itemsize <= 8
            if not usable:
                del self.rows.extras[name]
        if self.rows.next_observations.keys() not in (set(), self.rows.observations.keys()):
            raise DatasetError(
                f"{self.source}: observations have the parts {sorted(self.rows.observations)}, next_observations "
                f"{sorted(self.rows.next_observations)}"
            )
        return num_rows

    def _flags(self, name: str) -> BoolArray:
        column = self.rows.columns.get(name)
        if column is None:
            return np.zeros(self.num_rows, np.bool_)
        values = np.asarray(column[...]).reshape(self.num_rows, -1)
        if values.shape[1] != 1:
            raise DatasetError(f"{self.source}: {name} has the shape {column.shape}; it needs one value per row")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise DatasetError(f"{self.source}: {name} contains NaN or infinity")
        return np.asarray(values[:, 0] != 0)

    def build(self) -> Dataset:
        ends = self._episode_ends()
        keep_next = False
        if self.has_next:
            ends, keep_next = self._compare_next(ends)
        self._mark_ends(ends)
        finals, keep = self._finals(ends)
        names = {f"observations.{key}": column for key, column in self.rows.observations.items()}
        names |= {name: self.rows.columns[name] for name in ("actions", "rewards")}
        names |= {f"extras.{name}": column for name, column in self.rows.extras.items()}
        if keep_next:
            names |= {f"next_observations.{key}": column for key, column in self.rows.next_observations.items()}
        settled = settle(names, keep, self.rows.key)
        terminated, truncated = self.terminated, self.truncated
        if keep is not None:
            terminated, truncated = terminated[keep], truncated[keep]
        observations, final_observations, observation_space = self._observations(settled, finals)
        actions, action_space = self._actions(settled["actions"])
        stored_next = None
        if keep_next:
            stored_next = {key: settled[f"next_observations.{key}"] for key in self.rows.next_observations}
        is_dict = isinstance(observations, dict)
        known = self.env is not None or (self.rows.observation_space is not None and self.rows.metadata.spaces_known)
        return Dataset(
            observations=observations,
            actions=actions,
            rewards=self._rewards(settled["rewards"]),
            terminated=terminated,
            truncated=truncated,
            final_observations=final_observations,
            observation_space=observation_space,
            action_space=action_space,
            extras={name: settled[f"extras.{name}"] for name in self.rows.extras},
            metadata=replace(self.rows.metadata, spaces_known=known),
            findings=self.findings,
            stored_next=stored_next if is_dict or stored_next is None else stored_next[""],
        )

    # Ends

    def _episode_ends(self) -> BoolArray:
        """Which rows end an episode, by flags and by the number of the episode."""
        flagged = self.terminated | self.truncated
        column = self.rows.columns.get("episode_id")
        if column is None:
            self._repair_double_flags(flagged)
            ends = self.terminated | self.truncated
            if not ends.any() and not self.has_next:
                self.found("error", "ends", "no row ends an episode: the data has neither terminations, truncations nor "
                           "episode_id. All of it counts as one truncated episode")  # fmt: skip
        else:
            number = np.asarray(column[...]).reshape(self.num_rows)
            ends = np.append(number[1:] != number[:-1], True)
            inside = flagged & ~ends
            doubled = inside & np.append(flagged[1:] & ends[1:], False)
            self._clear_doubled(doubled)
            again = int((inside & ~doubled).sum())
            if again:
                self.found("warning", "ends", f"{again} rows in the middle of an episode_id are marked as ends; episodes "
                           "are split there", again)  # fmt: skip
            ends |= self.terminated | self.truncated
            if len(np.unique(number)) != 1 + int((number[1:] != number[:-1]).sum()):
                self.found("warning", "episodes", "an episode_id occurs in several places: rows are not in time order, or "
                           "numbers are used again. Each place counts as an episode")  # fmt: skip
        ends[-1] = True
        return ends

    def _repair_double_flags(self, flagged: BoolArray) -> None:
        """Without numbers of episodes: terminals on two successive rows are doubled, unless episodes are that short."""
        pair = np.append(self.terminated[:-1] & self.terminated[1:] & ~self.truncated[:-1], False)
        if not pair.any():
            return
        rows = np.flatnonzero(pair)
        if self.has_next:
            continues = self._equal(rows)
            doubled = np.zeros_like(pair)
            doubled[rows[continues]] = True
        else:
            others = int(self.terminated.sum()) - 2 * len(rows)
            doubled = pair if len(rows) > others else np.zeros_like(pair)
            if not doubled.any():
                self.found("warning", "ends", f"{len(rows)} terminated rows follow another one directly; they count as "
                           "episodes of one step", len(rows))  # fmt: skip
        self._clear_doubled(doubled)

    def _clear_doubled(self, doubled: BoolArray) -> None:
        if count := int(doubled.sum()):
            self.terminated[doubled] = False
            self.truncated[doubled] = False
            self.found("warning", "ends", f"{count} episodes are marked as ended on their last two rows; only the last "
                       "mark is kept", count)  # fmt: skip

    def _equal(self, rows: Indices) -> BoolArray:
        """Whether the next observations of these rows are the observations of the following ones."""
        same = np.ones(len(rows), np.bool_)
        for key, column in self.rows.observations.items():
            after = self.rows.next_observations[key]
            for index, row in enumerate(rows):
                same[index] &= _close(np.asarray(after[row]), np.asarray(column[row + 1]))
        return same

    def _compare_next(self, ends: BoolArray) -> tuple[BoolArray, bool]:
        """Compare next observations with the following rows; returns the ends, and whether to keep the column.

        Equal ones need no column. A few breaks are places where an episode was cut. Many mean that the rows are no
        trajectories, or that observations were changed after the fact.
        """
        exact, close = np.ones(self.num_rows, np.bool_), np.ones(self.num_rows, np.bool_)
        for key, column in self.rows.observations.items():
            after = self.rows.next_observations[key]
            if after.shape != column.shape:
                raise DatasetError(
                    f"{self.source}: observations have the shape {column.shape}, next_observations {after.shape}"
                )
            for place, chunk in chunks(column):
                if place.start == 0 and place.stop == self.num_rows == 1:
                    continue
                before = slice(max(place.start - 1, 0), place.stop - 1)
                following = chunk if place.start > 0 else chunk[1:]
                same, near = _row_matches(np.asarray(after[before]), following)
                exact[before] &= same
                close[before] &= near
        inside = ~ends
        breaks, rounded = inside & ~close, inside & close & ~exact
        num_inside, num_breaks, num_rounded = (int(x.sum()) for x in (inside, breaks, rounded))
        if num_rounded:
            self.found("note", "next_observations", f"{num_rounded} differ a little from the following observation "
                       "(rounding); both are kept", num_rounded)  # fmt: skip
        if num_breaks and num_breaks <= MAX_CUT_SHARE * num_inside:
            self.found("warning", "episodes", f"{num_breaks} episodes are cut in the middle: the next observation is not "
                       "the following row's. They count as truncated there", num_breaks)  # fmt: skip
            return ends | breaks, num_rounded > 0
        if num_breaks and num_breaks == num_inside and not self._has_ends():
            self.found("warning", "episodes", "rows are single transitions, not in time order; each counts as an episode "
                       "of one step, so there are no returns of episodes", num_breaks)  # fmt: skip
            return ends | breaks, False
        if num_breaks:
            self.found("warning", "next_observations", f"{num_breaks} of {num_inside} are not the following row's "
                       "observation: rows are not in time order, or observations were filtered (normalised) while they "
                       "were recorded. Both are kept; n-step returns and sequences are not to be trusted",
                       num_breaks)  # fmt: skip
        return ends, num_breaks + num_rounded > 0

    def _has_ends(self) -> bool:
        return bool((self.terminated | self.truncated).any()) or "episode_id" in self.rows.columns

    def _mark_ends(self, ends: BoolArray) -> None:
        """Mark episodes that stop without a flag as truncated."""
        unmarked = ends & ~(self.terminated | self.truncated)
        count = int(unmarked.sum())
        if count:
            self.truncated |= unmarked
            self.found("note" if count == 1 else "warning", "ends", f"{count} episodes stop without a mark; they count as "
                       "truncated", count)  # fmt: skip

    def _finals(self, ends: BoolArray) -> tuple[dict[str, AnyArray], BoolArray | None]:
        """Last observations of all episodes, and which rows to keep (None for all)."""
        rows = np.flatnonzero(ends)
        if self.has_next:
            return {key: _take(column, rows) for key, column in self.rows.next_observations.items()}, None
        terminated = self.terminated[rows]
        if terminated.any():
            self.found("note", "next_observations", f"not stored: the last observation of {int(terminated.sum())} "
                       "terminated episodes is unknown; their last known one stands in for it. No target uses it",
                       int(terminated.sum()))  # fmt: skip
        cut = rows[~terminated]
        if not len(cut):
            return {key: _take(column, rows) for key, column in self.rows.observations.items()}, None
        starts = np.append(0, rows[:-1] + 1)
        alone = rows[~terminated & (starts == rows)]  # a truncated episode of one row has no transition at all
        keep = np.ones(self.num_rows, np.bool_)
        keep[cut] = False
        if not keep.any():
            raise DatasetError(f"{self.source}: no row has a next observation")
        before = np.setdiff1d(cut, alone) - 1
        self.truncated[before] = True
        self.found("note", "next_observations", f"not stored: the last step of {len(cut)} truncated episodes is left out, "
                   "since its next observation is unknown", len(cut))  # fmt: skip
        remaining = np.setdiff1d(rows, alone)
        return {key: _take(column, remaining) for key, column in self.rows.observations.items()}, keep

    # Spaces

    def _observations(
        self, settled: dict[str, AnyArray], finals: dict[str, AnyArray]
    ) -> tuple[Any, Any, spaces.Space[Any]]:
        columns = {key: settled[f"observations.{key}"] for key in self.rows.observations}
        space = self.env.observation_space if self.env is not None else self.rows.observation_space
        space = None if space is None else flatten_dict(space)
        is_dict = "" not in columns
        if space is not None and isinstance(space, spaces.Dict) != is_dict:
            raise DatasetError(f"{self.source}: observations do not have the space {space}")
        if not is_dict:
            part = space or infer_observation_space(columns[""])
            shaped = [fit(x, part, f"{self.source}: observations") for x in (columns[""], finals[""])]
            return shaped[0], shaped[1], part
        parts = space.spaces if isinstance(space, spaces.Dict) else None
        if parts is not None and parts.keys() != columns.keys():
            raise DatasetError(f"{self.source}: observations have the parts {sorted(columns)}, not those of {space}")
        chosen = {key: parts[key] if parts else infer_observation_space(column) for key, column in columns.items()}
        where = f"{self.source}: observations"
        shaped_columns = {key: fit(column, chosen[key], f"{where}.{key}") for key, column in columns.items()}
        shaped_finals = {key: fit(column, chosen[key], f"{where}.{key}") for key, column in finals.items()}
        return shaped_columns, shaped_finals, spaces.Dict(chosen)

    def _actions(self, actions: AnyArray) -> tuple[AnyArray, spaces.Space[Any]]:
        space = self.env.action_space if self.env is not None else self.rows.action_space
        if space is None:
            space = infer_action_space(actions)
            self.found("note", "spaces", f"the file does not say which spaces it has; actions have {space} by their values."
                       " Name the environment for the true ones")  # fmt: skip
        return fit(actions, space, f"{self.source}: actions"), space

    def _rewards(self, rewards: AnyArray) -> AnyArray:
        flat = rewards.reshape(len(rewards), -1)
        if flat.shape[1] != 1:
            raise DatasetError(f"{self.source}: rewards have the shape {rewards.shape}; one number per row is needed")
        flat = flat[:, 0]
        return flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float64)


def _take(column: Any, rows: Indices) -> AnyArray:
    """Rows of a column that may be an HDF5 dataset, which is read in pieces."""
    if isinstance(column, np.ndarray):
        return np.array(column[rows], dtype=column.dtype.newbyteorder("="), subok=False)
    found = np.empty((len(rows), *column.shape[1:]), column.dtype.newbyteorder("="))
    for place, chunk in chunks(column):
        first, last = np.searchsorted(rows, [place.start, place.stop])
        found[first:last] = chunk[rows[first:last] - place.start]
    return found


def _close(one: AnyArray, other: AnyArray) -> bool:
    return bool(_row_matches(one[None], other[None])[1][0])


def _row_matches(ours: AnyArray, theirs: AnyArray) -> tuple[BoolArray, BoolArray]:
    """Which rows are equal (NaN is equal to NaN), and which nearly so."""
    ours, theirs = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    equal = ours == theirs
    if ours.dtype.kind == "f":
        equal |= np.isnan(ours) & np.isnan(theirs)
    same = equal.all(axis=1)
    if same.all() or ours.dtype.kind != "f":
        return same, same.copy()
    with np.errstate(all="ignore"):
        near = np.abs(ours - theirs) <= CLOSE * np.maximum(1.0, np.maximum(np.abs(ours), np.abs(theirs)))
    return same, np.asarray((near | equal).all(axis=1))


def infer_observation_space(column: AnyArray) -> spaces.Space[Any]:
    """The widest space that such observations have."""
    shape, kind = column.shape[1:], column.dtype.kind
    if column.dtype == np.uint8 and len(shape) >= 2:
        return spaces.Box(0, 255, shape, np.uint8)
    if kind == "b":
        return spaces.MultiBinary(shape or 1)
    if kind == "f":
        return spaces.Box(-np.inf, np.inf, shape or (1,), column.dtype.type)
    return _integers(column)


def infer_action_space(actions: AnyArray) -> spaces.Space[Any]:
    """The narrowest space that holds these actions: bounds are their range."""
    if actions.dtype.kind == "f":
        shape = actions.shape[1:] or (1,)
        low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
        for _, chunk in chunks(actions):
            finite = np.isfinite(chunk)
            low = np.minimum(low, np.where(finite, chunk, np.inf).min(axis=0))
            high = np.maximum(high, np.where(finite, chunk, -np.inf).max(axis=0))
        return spaces.Box(low.astype(actions.dtype), high.astype(actions.dtype), shape, actions.dtype.type)
    if actions.dtype.kind == "b":
        return spaces.MultiBinary(actions.shape[1:] or 1)
    return _integers(actions)


def _integers(column: AnyArray) -> spaces.Space[Any]:
    flat = column.reshape(len(column), -1)
    low, high = flat.min(axis=0).astype(np.int64), flat.max(axis=0).astype(np.int64)
    start = np.minimum(low, 0)
    if flat.shape[1] == 1:
        return spaces.Discrete(int(high[0] - start[0]) + 1, start=int(start[0]))
    shape = column.shape[1:]
    return spaces.MultiDiscrete((high - start + 1).reshape(shape), start=start.reshape(shape))


def fit(column: AnyArray, space: spaces.Space[Any], where: str) -> AnyArray:
    """A column in the shape of its space. Whole numbers that were stored as reals become integers again."""
    shape = tuple(space.shape or ())
    if column.shape[1:] != shape:
        if int(np.prod(shape)) != int(np.prod(column.shape[1:])) or max(len(shape), column.ndim - 1) > 1:
            raise DatasetError(f"{where}: rows have the shape {column.shape[1:]}, the space {space!s:.120} has {shape}")
        column = column.reshape(len(column), *shape)
    if isinstance(space, spaces.Box):
        if column.dtype.kind == "b" or (column.dtype.kind == "f" and np.issubdtype(space.dtype, np.integer)):
            return _whole(column, np.dtype(space.dtype), where)
        return column
    if column.dtype.kind == "f":
        return _whole(column, np.dtype(np.int64), where)
    return column


def _whole(column: AnyArray, dtype: np.dtype[Any], where: str) -> AnyArray:
    for _, chunk in chunks(column):
        if column.dtype.kind == "f" and not (np.isfinite(chunk).all() and (chunk == np.rint(chunk)).all()):
            raise DatasetError(f"{where}: has numbers that are not whole; the space needs whole ones")
    return column.astype(dtype)
