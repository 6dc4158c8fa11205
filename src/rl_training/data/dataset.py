"""Recorded datasets: episodes with true ends, in columns that may be larger than memory.

A dataset stores each observation once. The next observation of a row is the following row's observation; at the end of
an episode it is the stored last one. Columns are numpy arrays, or memory-mapped files if they are large.

`read_dataset` reads npz, HDF5 and Parquet files and Minari datasets; `write_dataset` writes npz, Parquet and Minari.
Reading runs no code from a file: no pickle, no environment that a file names.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray, map_observation
from rl_training.contracts.errors import DataError
from rl_training.contracts.text import printable

Indices = npt.NDArray[np.int64]
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

CHUNK_BYTES = 16 * 2**20
"""How much of a column is in memory at once while it is hashed, checked or copied."""
SMALL_BYTES = 256 * 2**20
"""Data up to this size is loaded into memory; larger data is memory-mapped."""


class DatasetError(DataError):
    """A recorded dataset that cannot be read, written or used; the message names the file."""


class HasSpaces(Protocol):
    """Anything that has the two spaces: an environment, or an `EnvSpec`."""

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """Space of single observations."""

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Space of single actions."""


@dataclass(frozen=True)
class Finding:
    """One finding about a dataset: what was met while reading or checking it, and what was done about it."""

    severity: Severity
    topic: str
    message: str
    count: int = 0
    """How many rows or episodes it is about; 0 if it is about the whole dataset."""

    def __str__(self) -> str:
        return f"{self.severity:<7}  {self.topic}: {printable(self.message)}"


def format_findings(findings: Sequence[Finding]) -> str:
    """Findings as text to print: a summary line, then one line each, errors first.

    Example:
        >>> print(format_findings([Finding("warning", "actions", "3 of 10 are outside of the bounds")]))
        1 warning.
        warning  actions: 3 of 10 are outside of the bounds
    """
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES[:2]}
    parts = [f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts.items() if count]
    in_order = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
    return "\n".join([f"{', '.join(parts) or 'No problems found'}.", *map(str, in_order)])


@dataclass(frozen=True)
class DatasetMetadata:
    """Where a dataset comes from. Everything may be unknown."""

    env_id: str = ""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    behaviour_policy: str = ""
    seeds: list[int] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    licence: str = ""
    author: str = ""
    description: str = ""
    min_score: float | None = None
    """Return that counts as 0 in normalised scores (a random policy's)."""
    max_score: float | None = None
    """Return that counts as 1 in normalised scores (an expert's)."""
    spaces_known: bool = False
    """Whether the spaces are those of the environment; otherwise they were inferred from the data."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without what is unknown."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in ("", None, [], {})}

    @classmethod
    def from_dict(cls, data: Any) -> DatasetMetadata:
        """The inverse of `to_dict`; entries of a wrong type and unknown ones are ignored."""
        accepted: dict[str, Any] = {}
        for part in dataclasses.fields(cls) if isinstance(data, dict) else ():
            value = data.get(part.name)
            if value is not None and _has_type(part.name, value):
                accepted[part.name] = value
        return cls(**accepted)


def _has_type(name: str, value: Any) -> bool:
    if name in ("min_score", "max_score"):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "max_episode_steps":
        return type(value) is int and value > 0
    if name == "seeds":
        return isinstance(value, list) and all(type(seed) is int for seed in value)
    if name == "versions":
        return isinstance(value, dict) and all(isinstance(x, str) for pair in value.items() for x in pair)
    if name == "env_kwargs":
        return isinstance(value, dict)
    return type(value) is bool if name == "spaces_known" else isinstance(value, str)


# Columns


class LazyColumn:
    """A column that is computed when it is indexed. Indexing with integers, slices, masks and arrays gives arrays."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole column, if it were an array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (int, np.integer)):
            row = int(index) + (len(self) if index < 0 else 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            return self._rows(np.array([row]))[0]
        if isinstance(index, slice):
            return self._rows(np.arange(*index.indices(len(self))))
        rows = np.asarray(index)
        if rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)
        rows = rows.astype(np.int64, copy=False)
        return self._rows(np.where(rows < 0, rows + len(self), rows))

    def take(self, indices: Any, axis: int = 0) -> AnyArray:
        """Rows, as `numpy.ndarray.take` with axis 0."""
        assert axis == 0, "only rows can be taken"
        return cast(AnyArray, self[np.asarray(indices)])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        return np.asarray(self[:], dtype=dtype)

    def _rows(self, rows: Indices) -> AnyArray:
        raise NotImplementedError


class NextObservations(LazyColumn):
    """Next observations without storage of their own: the following row, or the last observation of an episode."""

    def __init__(self, observations: AnyArray, ends: Indices, finals: AnyArray) -> None:
        super().__init__(observations.shape, observations.dtype)
        self._observations, self._ends, self._finals = observations, ends, finals

    def _rows(self, rows: Indices) -> AnyArray:
        found = np.array(self._observations[np.minimum(rows + 1, len(self) - 1)])
        episode = np.searchsorted(self._ends, rows)
        at_end = self._ends[episode] == rows
        if at_end.any():
            found[at_end] = self._finals[episode[at_end]]
        return found


class EpisodeRows:
    """The rows of chosen episodes, one after the other: computed on demand, since all of them may be many."""

    def __init__(self, starts: Indices, lengths: Indices) -> None:
        self._offsets = np.cumsum(lengths)
        self._shifts = starts - self._offsets + lengths

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, positions: Indices) -> Indices:
        return positions + self._shifts[np.searchsorted(self._offsets, positions, side="right")]


class SelectedRows(LazyColumn):
    """Some rows of another column, in a given order."""

    def __init__(self, column: Any, selected: EpisodeRows) -> None:
        super().__init__((len(selected), *column.shape[1:]), column.dtype)
        self._column, self._selected = column, selected

    def _rows(self, rows: Indices) -> AnyArray:
        return np.asarray(self._column[self._selected[rows]])


def parts_of(observations: Any, name: str = "observations") -> dict[str, Any]:
    """The columns of observations by name: `observations`, or `observations.key` for each key of a dict."""
    if isinstance(observations, dict):
        return {f"{name}.{key}": column for key, column in observations.items()}
    return {name: observations}


def chunks(column: Any, num_bytes: int | None = None) -> Iterator[tuple[slice, AnyArray]]:
    """A column in pieces of at most about `CHUNK_BYTES`, each with its place."""
    row_bytes = max(1, column.nbytes // max(1, len(column)))
    size = max(1, (num_bytes or CHUNK_BYTES) // row_bytes)
    for start in range(0, len(column), size):
        place = slice(start, min(start + size, len(column)))
        yield place, np.asarray(column[place])


# Datasets


class Episode(NamedTuple):
    """One episode of T steps. `observations` has T + 1 rows: the last one is the true last observation."""

    observations: ArrayObservation
    actions: AnyArray
    rewards: AnyArray
    terminated: bool
    truncated: bool
    extras: dict[str, AnyArray]

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(eq=False)
class Dataset:
    """Recorded episodes, one row per step, in time order.

    Actions are the environment's own, not the policy's. `terminated` and `truncated` are apart, and one of them is set
    in the last row of each episode and nowhere else. `extras` are further columns, such as the behaviour policy's
    `log_prob`; their row t belongs to step t.

    Example:
        >>> dataset = Dataset(
        ...     observations=np.zeros((3, 2), np.float32), actions=np.array([0, 1, 1]), rewards=np.ones(3),
        ...     terminated=np.array([False, True, False]), truncated=np.array([False, False, True]),
        ...     final_observations=np.ones((2, 2), np.float32), observation_space=spaces.Box(-1, 1, (2,)),
        ...     action_space=spaces.Discrete(2),
        ... )
        >>> dataset.num_episodes, dataset.episode_starts.tolist(), dataset.episode_returns.tolist()
        (2, [0, 2], [2.0, 1.0])
        >>> dataset.next_observations[1].tolist()
        [1.0, 1.0]
    """

    observations: ArrayObservation
    actions: AnyArray
    rewards: AnyArray
    terminated: BoolArray
    truncated: BoolArray
    final_observations: ArrayObservation
    """The true last observation of each episode."""
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    extras: dict[str, AnyArray] = field(default_factory=dict)
    metadata: DatasetMetadata = field(default_factory=DatasetMetadata)
    findings: list[Finding] = field(default_factory=list)
    """What was met while reading; `check_dataset` repeats them."""
    stored_next: ArrayObservation | None = None
    """Next observations as a column, for data in which they are not the following row's observation."""

    def __post_init__(self) -> None:
        """Refuse columns that do not belong together."""
        columns = {**self._columns(), **parts_of(self.observations)}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1 or self.num_transitions == 0:
            raise DatasetError(f"columns need equally many rows, at least one; got {lengths}")
        if not (self.terminated[-1] or self.truncated[-1]):
            raise DatasetError("the last row must end an episode: set terminated or truncated there")
        for name, column in parts_of(self.final_observations, "final_observations").items():
            if len(column) != self.num_episodes:
                raise DatasetError(f"{name} has {len(column)} rows, of {self.num_episodes} episodes")

    def _columns(self) -> dict[str, Any]:
        names = ("actions", "rewards", "terminated", "truncated")
        extras = {f"extras.{name}": column for name, column in self.extras.items()}
        return {**{name: getattr(self, name) for name in names}, **extras}

    def __len__(self) -> int:
        return self.num_transitions

    @property
    def num_transitions(self) -> int:
        """Number of rows."""
        return len(self.rewards)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.episode_ends)

    @functools.cached_property
    def episode_ends(self) -> Indices:
        """The last row of each episode (included)."""
        return np.flatnonzero(np.asarray(self.terminated) | np.asarray(self.truncated)).astype(np.int64, copy=False)

    @functools.cached_property
    def episode_starts(self) -> Indices:
        """The first row of each episode."""
        return np.concatenate([np.zeros(1, np.int64), self.episode_ends[:-1] + 1])

    @property
    def episode_lengths(self) -> Indices:
        """Steps of each episode."""
        return self.episode_ends - self.episode_starts + 1

    @functools.cached_property
    def episode_returns(self) -> npt.NDArray[np.float64]:
        """Undiscounted return of each episode."""
        returns = np.zeros(self.num_episodes)
        for place, rewards in chunks(self.rewards):
            episode = self.episode_of(np.arange(place.start, place.stop))
            first = int(episode[0])
            sums = np.bincount(episode - first, weights=rewards.astype(np.float64))
            returns[first : first + len(sums)] += sums
        return returns

    def episode_of(self, rows: Indices) -> Indices:
        """The number of the episode that each row belongs to."""
        return np.searchsorted(self.episode_ends, rows)

    @functools.cached_property
    def next_observations(self) -> Any:
        """True next observation of each row; computed when indexed, so that it takes no memory."""
        if self.stored_next is not None:
            return self.stored_next
        if isinstance(self.observations, dict):
            finals = cast(dict[str, AnyArray], self.final_observations)
            return {
                key: NextObservations(column, self.episode_ends, finals[key])
                for key, column in self.observations.items()
            }
        return NextObservations(self.observations, self.episode_ends, cast(AnyArray, self.final_observations))

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the content: columns and ends, whatever the file format; not of spaces and metadata."""
        digest = hashlib.sha256()
        columns = {**self._columns(), **parts_of(self.observations)}
        columns |= parts_of(self.final_observations, "final_observations")
        if self.stored_next is not None:
            columns |= parts_of(self.stored_next, "next_observations")
        for name, column in sorted(columns.items()):
            digest.update(f"{name} {column.dtype.str} {list(column.shape)}\n".encode())
            for _, chunk in chunks(column):
                digest.update(np.ascontiguousarray(chunk).data)
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns, in memory or in files."""
        columns = [*self._columns().values(), *parts_of(self.observations).values()]
        return sum(int(column.nbytes) for column in columns)

    def episode(self, number: int) -> Episode:
        """One episode, with its last observation appended to its observations."""
        start, end = int(self.episode_starts[number]), int(self.episode_ends[number])
        rows, last = slice(start, end + 1), slice(number, number + 1)

        def with_last(column: Any, finals: Any) -> AnyArray:
            return np.concatenate([np.asarray(column[rows]), np.asarray(finals[last])])

        observations: ArrayObservation
        if isinstance(self.observations, dict):
            finals = cast(dict[str, AnyArray], self.final_observations)
            observations = {key: with_last(column, finals[key]) for key, column in self.observations.items()}
        else:
            observations = with_last(self.observations, self.final_observations)
        return Episode(
            observations,
            np.asarray(self.actions[rows]),
            np.asarray(self.rewards[rows]),
            bool(self.terminated[end]),
            bool(self.truncated[end]),
            {name: np.asarray(column[rows]) for name, column in self.extras.items()},
        )

    def episodes(self) -> Iterator[Episode]:
        """All episodes, in order."""
        return map(self.episode, range(self.num_episodes))

    def select(self, episode_indices: Sequence[int] | Indices) -> Dataset:
        """A dataset of these episodes, in this order. Large columns are not copied."""
        chosen = np.asarray(episode_indices, np.int64).reshape(-1)
        if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= self.num_episodes:
            raise DatasetError(
                f"episodes from 0 to {self.num_episodes - 1} can be selected, got {chosen.tolist()!r:.80}"
            )
        selected = EpisodeRows(self.episode_starts[chosen], self.episode_lengths[chosen])
        rows = selected[np.arange(len(selected))]

        def pick(column: Any) -> Any:
            if isinstance(column, LazyColumn) or column.nbytes > SMALL_BYTES:
                return SelectedRows(column, selected)
            return np.asarray(column)[rows]

        return dataclasses.replace(
            self,
            observations=map_observation(pick, self.observations),
            actions=pick(self.actions),
            rewards=pick(self.rewards),
            terminated=np.asarray(self.terminated)[rows],
            truncated=np.asarray(self.truncated)[rows],
            final_observations=map_observation(lambda x: np.asarray(x[chosen]), self.final_observations),
            extras={name: pick(column) for name, column in self.extras.items()},
            findings=list(self.findings),
            stored_next=None if self.stored_next is None else map_observation(pick, self.stored_next),
        )

    def split(self, fraction: float, rng: np.random.Generator) -> tuple[Dataset, Dataset]:
        """Two datasets of whole episodes, chosen at random; the second has this share of them, at least one."""
        if not 0 < fraction < 1 or self.num_episodes < 2:
            raise DatasetError(
                f"a split needs a fraction between 0 and 1 and two episodes, got {fraction} and {self.num_episodes}"
            )
        held_out = min(max(1, round(fraction * self.num_episodes)), self.num_episodes - 1)
        order = rng.permutation(self.num_episodes)
        return self.select(np.sort(order[held_out:])), self.select(np.sort(order[:held_out]))

    def statistics(self) -> DatasetStatistics:
        """Numbers about the whole dataset; reads every row once."""
        from rl_training.data.statistics import measure

        return measure(self)


@dataclass(frozen=True)
class ColumnStatistics:
    """Range, mean and standard deviation of a column, by component."""

    low: AnyArray
    high: AnyArray
    mean: AnyArray
    std: AnyArray


@dataclass(frozen=True)
class DatasetStatistics:
    """Numbers about a dataset."""

    num_episodes: int
    num_transitions: int
    num_terminated: int
    num_truncated: int
    return_mean: float
    return_std: float
    return_min: float
    return_median: float
    return_max: float
    length_mean: float
    length_min: int
    length_max: int
    reward_min: float
    reward_max: float
    actions: ColumnStatistics
    observations: dict[str, ColumnStatistics]
    """By column: `observations`, or `observations.key` for Dict spaces."""
    action_coverage: float
    """Share of discrete actions that occur; for Box spaces, of 10 equal bins between the bounds, over dimensions."""
    state_coverage: float
    """Share of observations that fall into different cells, with 8 bins per dimension between lowest and highest; of a
    sample of at most 50,000 rows and of the first 16 dimensions. 1 if no two observations are alike."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return cast(dict[str, Any], _plain(dataclasses.asdict(self)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


# Files


def read_dataset(source: str | Path, *, env: HasSpaces | None = None, download: bool = False) -> Dataset:
    """A dataset from an npz, HDF5 or Parquet file, a Minari directory, or `minari:<id>`.

    `env` is an environment or an `EnvSpec` whose spaces the data has; files that do not store their spaces need it,
    otherwise spaces are inferred from the data. With `download`, a Minari dataset that is not on this machine is
    fetched; nothing else is ever downloaded. Saved replays and runs are opened by
    `rl_training.experiment.datasets.open_dataset`, which reads everything that this function does as well.
    """
    from rl_training.data import formats

    return formats.read(source, env, download)


def write_dataset(dataset: Dataset, path: str | Path) -> Path:
    """Write a dataset as npz or Parquet, by suffix, or to `minari:<id>`. An existing file is replaced when complete."""
    from rl_training.data import formats

    return formats.write(dataset, path)
