"""Search spaces: declared by the settings of an algorithm, or read from a file.

Settings are named like the keyword arguments of an agent, with dots for sections and schedules: `learning_rate`,
`network.actor_sizes`, `epsilon.until`, `num_envs`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.schedule import Piecewise, Schedule
from rl_training.contracts.settings import Choices, Range, SameAs, Search
from rl_training.experiment.config import Layer, TrainConfig, resolve
from rl_training.experiment.schema import convert_fields, plain, to_plain, unknown_key

Space = dict[str, Search]
"""The searched settings by name."""

OF_A_RUN = ("num_envs", "normalize_obs", "normalize_reward", "normalize_clip")
"""Run settings that may be searched besides the algorithm's: those that affect learning."""


def declared(config: type[Any], prefix: str = "") -> Space:
    """The search space declared by the settings of a dataclass, section by section.

    Example:
        >>> from rl_training.algorithms.ppo import PPOConfig
        >>> declared(PPOConfig)["learning_rate"]
        Range(low=1e-05, high=0.01, log=True)
    """
    found: dict[str, Search | None] = {}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found.update(declared(hint, f"{prefix}{field.name}."))
        found.update(_flat(field.metadata.get("search"), prefix + field.name))
    return {name: search for name, search in found.items() if search is not None}


def _flat(search: Search | Mapping[str, Any] | None, name: str) -> dict[str, Search | None]:
    """The entries that a field declares for itself and its parts; they replace earlier ones."""
    if not isinstance(search, Mapping):
        return {name: search}
    parts = [_flat(inner, f"{name}.{part}") for part, inner in search.items()]
    return {name: None, **{key: found for part in parts for key, found in part.items()}}


@dataclass(frozen=True)
class Place:
    """The location of a setting in a config."""

    path: tuple[str, ...]
    """Its path in the config as plain data."""
    owners: tuple[Any, ...]
    """The dataclasses along the path, from the config to the section or schedule that holds the field."""

    @property
    def value(self) -> Any:
        """The current value."""
        return getattr(self.owners[-1], self.path[-1])

    @property
    def is_whole(self) -> bool:
        """Whether it must be an integer."""
        hint = typing.get_type_hints(type(self.owners[-1]))[self.path[-1]]
        return int in (hint, *typing.get_args(hint)) and float not in typing.get_args(hint)

    @property
    def setting(self) -> tuple[str, ...]:
        """The path of the setting; for a part of a schedule, of the setting that holds the schedule."""
        return self.path[:-1] if isinstance(self.owners[-1], Schedule) else self.path


def find(config: TrainConfig, name: str) -> Place | None:
    """The location of a setting, or None if the config has none (a schedule may be a number instead)."""
    own = {field.name for field in dataclasses.fields(config.algorithm)}
    names = tuple(name.split("."))
    path = ("algorithm", *names) if names[0] in own else names
    owners: list[Any] = [config]
    for step in path[:-1]:
        owners.append(getattr(owners[-1], step, None))
        if not dataclasses.is_dataclass(owners[-1]):
            return None
    if path[-1] not in {field.name for field in dataclasses.fields(owners[-1])}:
        return None
    return Place(path, tuple(owners))


def space_for(config: TrainConfig, given: Mapping[str, Any] | None = None, fixed: Collection[str] = ()) -> Space:
    """The search space for a config: `given` (see `read_space`), or what the algorithm declares.

    From the declared space, settings are left out if they are `fixed`, have no effect or do not exist (the end of a
    schedule that is a number). Ranges and choices are widened to include the config's own values.
    """
    if given is not None:
        space = read_space(given, config)
    else:
        space = _applicable(declared(type(config.algorithm)), config, fixed)
    if not space:
        raise ConfigError("search: the search space is empty; fix fewer settings, or pass a search space with --search")
    problems: list[str] = []
    widened = {name: _including(search, name, config, problems) for name, search in space.items()}
    problems += space_problems(widened, config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return widened


def _applicable(space: Space, config: TrainConfig, fixed: Collection[str]) -> Space:
    without = {*fixed, *config.algorithm.unused()}

    def is_free(name: str) -> bool:
        return find(config, name) is not None and not any(
            name == other or name.startswith(f"{other}.") for other in without
        )

    free = {name: search for name, search in space.items() if is_free(name)}
    return {
        name: search
        for name, search in free.items()
        if not isinstance(search, SameAs) or _follows(name, search, free, config)
    }


def _follows(name: str, search: SameAs, space: Space, config: TrainConfig) -> bool:
    """Whether a setting can copy another: the other is searched, and both start from the same value."""
    return search.name in space and current(config, name) == current(config, search.name)


def current(config: TrainConfig, name: str) -> Any:
    """The value of a setting in a search: for a schedule, its maximum."""
    place = find(config, name)
    assert place is not None, name
    return peak(place.value) if isinstance(place.value, Schedule) else place.value


def peak(schedule: Schedule) -> float:
    """The maximum of a schedule."""
    fractions = [point for point, _ in schedule.points] if isinstance(schedule, Piecewise) else [0.0, 1.0]
    return max(map(schedule.value, fractions))


def _including(search: Search, name: str, config: TrainConfig, problems: list[str]) -> Search:
    """The range or choices widened to include the config's own value."""
    if isinstance(search, SameAs):
        return search
    value = current(config, name)
    if isinstance(search, Choices):
        return search if value in search.values else Choices((*search.values, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        problems.append(f"search > {name}: the initial value {to_plain(value)} is not a number; use a list of choices")
        return search
    if search.log and value <= 0:
        problems.append(
            f"search > {name}: the initial value {value} has no logarithm; remove 'log', or set the value above 0"
        )
        return search
    return Range(min(search.low, value), max(search.high, value), search.log)


def space_problems(space: Space, config: TrainConfig) -> list[str]:
    """Values in a space that their settings do not accept; each is checked separately."""
    problems: list[str] = []
    for name, search in space.items():
        if isinstance(search, SameAs):
            if not _follows(name, search, space, config):
                problems.append(
                    f"search > {name}: same_as '{search.name}' needs that setting to be searched and to have "
                    "the same initial value"
                )
            continue
        for value in (search.low, search.high) if isinstance(search, Range) else search.values:
            problems += _value_problems(name, value, config)
    return list(dict.fromkeys(problems))


def _value_problems(name: str, value: Any, config: TrainConfig) -> list[str]:
    place = find(config, name)
    assert place is not None, name
    data = config.to_dict()
    _put(data, place.path, to_plain(value))
    field = place.setting[-1]
    found: list[str] = []
    convert_fields(type(place.owners[len(place.setting) - 1]), {field: _get(data, place.setting)}, "search", found)
    return [problem.replace(f"search > {field}", f"search > {name}", 1) for problem in found]


def with_values(config: TrainConfig, space: Space, values: Mapping[str, Any]) -> TrainConfig:
    """The config with the given values for the settings of a space; all others stay unchanged.

    Raises:
        ConfigError: the values are not compatible with each other.
    """
    data = config.to_dict()
    for name, search in space.items():
        place = find(config, name)
        assert place is not None, name
        _put(data, place.path, to_plain(values[search.name if isinstance(search, SameAs) else name]))
    return resolve([Layer(data, "trial")])


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value in plain data; a number scales a schedule."""
    section = _get(data, path[:-1])
    old = section[path[-1]]
    if isinstance(old, dict) and "schedule" in old and isinstance(value, (int, float)):
        value = _scaled(old, value)
    section[path[-1]] = value


def _scaled(schedule: dict[str, Any], largest: float) -> Any:
    """A schedule of the same shape with another maximum; a number if it was zero throughout."""
    values = (
        [value for _, value in schedule["points"]]
        if "points" in schedule
        else [schedule["start"], schedule.get("end", 0.0)]
    )
    if max(values) <= 0:
        return largest
    if largest == max(values):  # bit-exact: the first trial of a study uses the given settings
        return schedule
    ratio = largest / max(values)
    if "points" in schedule:
        return {**schedule, "points": [[at, value * ratio] for at, value in schedule["points"]]}
    return {**schedule, **{key: schedule[key] * ratio for key in ("start", "end") if key in schedule}}


def _get(data: dict[str, Any], path: tuple[str, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


# Files


def read_space(data: Mapping[str, Any], config: TrainConfig) -> Space:
    """A space from plain data: `[a, b]` for choices, `{low: 1, high: 9, log: true}`, `{same_as: other.setting}`.

    Settings that are not named are not searched.
    """
    problems: list[str] = []
    space: Space = {}
    for key, entry in data.items():
        name = key.removeprefix("algorithm.")  # as in the options of `train`
        place = find(config, name)
        if place is None or (place.path[0] != "algorithm" and place.path[0] not in OF_A_RUN):
            problems.append(unknown_key("search", name, [*declared(type(config.algorithm)), *names_of(config)]))
            continue
        found = _read_entry(entry, f"search > {name}", place, problems)
        if found is not None:
            space[name] = found
    for name in space:
        inside = [other for other in space if other.startswith(f"{name}.")]
        problems += [f"search > {other}: is part of '{name}', which is also searched" for other in inside]
    if problems:
        raise ConfigError(problems)
    return space


def names_of(config: TrainConfig) -> Iterator[str]:
    """All settings that a search space for this config may name."""

    def below(section: Any, prefix: str) -> Iterator[str]:
        for field in dataclasses.fields(section):
            yield prefix + field.name
            if dataclasses.is_dataclass(getattr(section, field.name)):
                yield from below(getattr(section, field.name), f"{prefix}{field.name}.")

    yield from OF_A_RUN
    yield from below(config.algorithm, "")


ACCEPTED = "a list of choices, {low: ..., high: ..., log: true} or {same_as: <setting>}"


def _read_entry(entry: Any, where: str, place: Place, problems: list[str]) -> Search | None:
    count = len(problems)
    data = plain(entry, where, problems)
    if len(problems) > count:
        return None
    try:
        if isinstance(data, list):
            return Choices(tuple(_typed(item) for item in data))
        if isinstance(data, dict) and set(data) == {"same_as"} and isinstance(data["same_as"], str):
            return SameAs(data["same_as"])
        if isinstance(data, dict) and {"low", "high"} <= set(data) <= {"low", "high", "log"}:
            return _read_range(data, place)
    except ValueError as error:
        problems.append(f"{where}: {error}")
        return None
    problems.append(f"{where}: expected {ACCEPTED}, got {data!r:.80}")
    return None


def _read_range(data: dict[str, Any], place: Place) -> Range:
    numbers = [data["low"], data["high"]]
    if any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
        raise ValueError(f"low and high must be numbers, got {numbers[0]!r} and {numbers[1]!r}")
    if not isinstance(data.get("log", False), bool):
        raise ValueError(f"log must be true or false, got {data['log']!r}")
    if place.is_whole:
        if any(not float(number).is_integer() for number in numbers):
            raise ValueError(f"low and high must be whole numbers, got {numbers[0]} and {numbers[1]}")
        return Range(int(numbers[0]), int(numbers[1]), data.get("log", False))
    return Range(float(numbers[0]), float(numbers[1]), data.get("log", False))


def _typed(value: Any) -> Any:
    """Convert lists from files to tuples."""
    return tuple(map(_typed, value)) if isinstance(value, list) else value


def space_to_plain(space: Space) -> dict[str, Any]:
    """A space in the format of `read_space`."""

    def entry(search: Search) -> Any:
        if isinstance(search, SameAs):
            return {"same_as": search.name}
        if isinstance(search, Choices):
            return to_plain(search.values)
        return {"low": search.low, "high": search.high, **({"log": True} if search.log else {})}

    return {name: entry(search) for name, search in space.items()}
