"""Search spaces: what a study may try, gathered from the settings of an algorithm or read from a file.

A setting is named as it is among the keywords of an agent, with dots into sections and schedules: `learning_rate`,
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
"""What is searched, by the names of settings."""

OF_A_RUN = ("num_envs", "normalize_obs", "normalize_reward", "normalize_clip")
"""Settings of a run that may be searched beside the algorithm's own: those that decide what is learned."""


def declared(config: type[Any], prefix: str = "") -> Space:
    """What the settings of a dataclass declare, section by section.

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
    """What a field says about itself and its parts, over what was said of them before."""
    if not isinstance(search, Mapping):
        return {name: search}
    parts = [_flat(inner, f"{name}.{part}") for part, inner in search.items()]
    return {name: None, **{key: found for part in parts for key, found in part.items()}}


@dataclass(frozen=True)
class Place:
    """Where a setting is in a config."""

    path: tuple[str, ...]
    """Its place in the config as plain data."""
    owners: tuple[Any, ...]
    """The dataclasses on the way there, from the config to the section or schedule that has it as a field."""

    @property
    def value(self) -> Any:
        """What it is."""
        return getattr(self.owners[-1], self.path[-1])

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers will do."""
        hint = typing.get_type_hints(type(self.owners[-1]))[self.path[-1]]
        return int in (hint, *typing.get_args(hint)) and float not in typing.get_args(hint)

    @property
    def setting(self) -> tuple[str, ...]:
        """The path of the setting that it is or, as a part of a schedule, that it belongs to."""
        return self.path[:-1] if isinstance(self.owners[-1], Schedule) else self.path


def find(config: TrainConfig, name: str) -> Place | None:
    """The place of a setting, or None if this config has no such one (a schedule may be a number instead)."""
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
    """What a study on top of a config searches: what is `given` (see `read_space`), or what the algorithm declares.

    Of the latter, settings that are `fixed`, have no effect or are not there (the end of a schedule that is a number)
    are left out. A space always includes the config itself, so ranges and choices are widened to include its values.
    """
    if given is not None:
        space = read_space(given, config)
    else:
        space = _applicable(declared(type(config.algorithm)), config, fixed)
    if not space:
        raise ConfigError("search: nothing is left to search; free a setting, or name some with --search")
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
    """Whether a setting can follow another: that one is searched, and both begin with the same value."""
    return search.name in space and current(config, name) == current(config, search.name)


def current(config: TrainConfig, name: str) -> Any:
    """The value of a setting as a search sees it: of a schedule, its largest value."""
    place = find(config, name)
    assert place is not None, name
    return peak(place.value) if isinstance(place.value, Schedule) else place.value


def peak(schedule: Schedule) -> float:
    """The largest value of a schedule."""
    fractions = [point for point, _ in schedule.points] if isinstance(schedule, Piecewise) else [0.0, 1.0]
    return max(map(schedule.value, fractions))


def _including(search: Search, name: str, config: TrainConfig, problems: list[str]) -> Search:
    """The search widened to include the config's own value."""
    if isinstance(search, SameAs):
        return search
    value = current(config, name)
    if isinstance(search, Choices):
        return search if value in search.values else Choices((*search.values, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        problems.append(
            f"search > {name}: begins with {to_plain(value)}, which no range includes; give a list of choices"
        )
        return search
    if search.log and value <= 0:
        problems.append(
            f"search > {name}: begins with {value}, which has no logarithm; leave 'log' out, or set it above 0"
        )
        return search
    return Range(min(search.low, value), max(search.high, value), search.log)


def space_problems(space: Space, config: TrainConfig) -> list[str]:
    """Values in a space that their settings do not accept, each by itself."""
    problems: list[str] = []
    for name, search in space.items():
        if isinstance(search, SameAs):
            if not _follows(name, search, space, config):
                problems.append(
                    f"search > {name}: can be the same as '{search.name}' only if that is searched and both begin alike"
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
    """The config with what was found for the settings of a space; the rest of it stays as it is.

    Raises:
        ConfigError: the values do not go together.
    """
    data = config.to_dict()
    for name, search in space.items():
        place = find(config, name)
        assert place is not None, name
        _put(data, place.path, to_plain(values[search.name if isinstance(search, SameAs) else name]))
    return resolve([Layer(data, "trial")])


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value in plain data; a number for a schedule scales it."""
    section = _get(data, path[:-1])
    old = section[path[-1]]
    if isinstance(old, dict) and "schedule" in old and isinstance(value, (int, float)):
        value = _scaled(old, value)
    section[path[-1]] = value


def _scaled(schedule: dict[str, Any], largest: float) -> Any:
    """A schedule of the same shape with another largest value; a number if it was zero throughout."""
    values = (
        [value for _, value in schedule["points"]]
        if "points" in schedule
        else [schedule["start"], schedule.get("end", 0.0)]
    )
    if max(values) <= 0:
        return largest
    if largest == max(values):  # to the bit: a study's first trial has the settings that it was given
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

    It is the whole space: what is not named is not searched.
    """
    problems: list[str] = []
    space: Space = {}
    for key, entry in data.items():
        name = key.removeprefix("algorithm.")  # as it is in flags of `train`
        place = find(config, name)
        if place is None or (place.path[0] != "algorithm" and place.path[0] not in OF_A_RUN):
            problems.append(unknown_key("search", name, [*declared(type(config.algorithm)), *names_of(config)]))
            continue
        found = _read_entry(entry, f"search > {name}", place, problems)
        if found is not None:
            space[name] = found
    for name in space:
        inside = [other for other in space if other.startswith(f"{name}.")]
        problems += [f"search > {other}: is a part of '{name}', which is searched as well" for other in inside]
    if problems:
        raise ConfigError(problems)
    return space


def names_of(config: TrainConfig) -> Iterator[str]:
    """All settings that a space for this config may name."""

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
        raise ValueError(f"low and high are numbers, got {numbers[0]!r} and {numbers[1]!r}")
    if not isinstance(data.get("log", False), bool):
        raise ValueError(f"log is true or false, got {data['log']!r}")
    if place.is_whole:
        if any(not float(number).is_integer() for number in numbers):
            raise ValueError(f"low and high are whole numbers here, got {numbers[0]} and {numbers[1]}")
        return Range(int(numbers[0]), int(numbers[1]), data.get("log", False))
    return Range(float(numbers[0]), float(numbers[1]), data.get("log", False))


def _typed(value: Any) -> Any:
    """Lists in files are tuples in settings."""
    return tuple(map(_typed, value)) if isinstance(value, list) else value


def space_to_plain(space: Space) -> dict[str, Any]:
    """A space as `read_space` reads it."""

    def entry(search: Search) -> Any:
        if isinstance(search, SameAs):
            return {"same_as": search.name}
        if isinstance(search, Choices):
            return to_plain(search.values)
        return {"low": search.low, "high": search.high, **({"log": True} if search.log else {})}

    return {name: entry(search) for name, search in space.items()}
