"""Converts plain data to typed settings and back. All problems are collected and reported together."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from rl_training.contracts.schedule import SCHEDULES, Piecewise, Schedule
from rl_training.contracts.settings import range_problem
from rl_training.contracts.state import MAX_NUMBER

INVALID = object()
"""Returned for a value that could not be converted; the problem has been noted."""

MAX_LENGTH = 100
"""Maximum number of entries of a setting with several values, such as the sizes of layers."""
_HINTS: dict[type[Any], dict[str, Any]] = {}
"""Cache of evaluated annotations: evaluating them is slow, and every field needs them."""


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def unknown_key(where: str, key: str, accepted: Iterable[str]) -> str:
    """The error message for an unknown key."""
    names = sorted(accepted)
    near = difflib.get_close_matches(str(key), names, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"Accepted: {', '.join(names)}."
    return f"{where}: unknown key '{key}'. {hint}"


def convert_fields(cls: type[Any], data: Mapping[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """The known, well-typed entries of `data` for a dataclass; everything else is noted as a problem."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = _hints(cls)
    converted: dict[str, Any] = {}
    for key, value in data.items():
        if key not in fields:
            problems.append(unknown_key(where, key, fields))
            continue
        result = convert(hints[key], _completed(value, default_of(fields[key])), f"{where} > {key}", problems)
        if result is INVALID or not _check_range(fields[key], result, f"{where} > {key}", problems):
            continue
        if problem := _name_problem(fields[key], result):
            problems.append(f"{where} > {key}: {problem}")
            continue
        converted[key] = result
    return converted


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a setting, or MISSING."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def is_section(value: Any) -> bool:
    """Whether a value is a dataclass of settings. A schedule counts as one value, although it has fields."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Schedule))


def _completed(value: Any, default: Any) -> Any:
    """Complete a partially given section from the setting's default.

    That default may differ from the section class's: A2C's optimizer stays RMSprop if only its `eps` is given.
    """
    if not isinstance(value, Mapping) or not is_section(default):
        return value
    own = {field.name: getattr(default, field.name) for field in dataclasses.fields(default) if field.init}
    return {**own, **{key: _completed(item, own.get(key)) for key, item in value.items()}}


def valid_part(cls: type[Any], data: Mapping[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """The known, well-typed entries of `data` as plain data, section by section; everything else is noted as a problem.

    Sections may be incomplete, so combinations of settings are not checked.
    """
    hints = _hints(cls)
    valid: dict[str, Any] = {}
    for key, value in data.items():
        hint = hints.get(key)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            valid[key] = valid_part(hint, value, f"{where} > {key}", problems)
        elif key in convert_fields(cls, {key: value}, where, problems):
            valid[key] = to_plain(value)
    return valid


def build(cls: type[Any], data: Any, where: str, problems: list[str]) -> Any:
    """Build a dataclass from a mapping (or from an instance, whose fields are checked again)."""
    if isinstance(data, cls):
        data = {field.name: getattr(data, field.name) for field in dataclasses.fields(data) if field.init}
    if not isinstance(data, Mapping):
        problems.append(f"{where}: expected a mapping of {cls.__name__}, got {_shown(data)}")
        return INVALID
    count = len(problems)
    values = convert_fields(cls, data, where, problems)
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in data
    ]
    problems += [f"{where}: '{name}' is required" for name in missing]
    if len(problems) > count:
        return INVALID
    try:
        instance = cls(**values)
    except ValueError as error:
        problems.append(f"{where}: {error}")
        return INVALID
    if hasattr(instance, "problems"):
        problems += [f"{where} > {text}" for text in instance.problems()]
    return instance


def convert(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Convert `value` to the type `hint`; INVALID if that fails, with the problem noted."""
    if isinstance(value, np.generic):
        value = value.item()
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return plain(value, where, problems)
    if origin is Literal:
        if value in args:
            return value
        near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
        extra = f" Did you mean '{near[0]}'?" if near else ""
        problems.append(f"{where}: got {_shown(value)}, accepted: {', '.join(map(str, args))}.{extra}")
        return INVALID
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, where, problems)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, where, problems)
    if origin in (tuple, list):
        return _convert_sequence(origin, args, value, where, problems)
    if origin is dict:
        count = len(problems)
        data = (
            plain(value, where, problems) if isinstance(value, Mapping) else _wrong(where, "a mapping", value, problems)
        )
        return data if len(problems) == count else INVALID
    if hint in (str, Path) and isinstance(value, (str, Path)) and any(map(_is_control, str(value))):
        return _wrong(where, "text without control characters", value, problems)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if hint is bool:
        return value if isinstance(value, bool) else _wrong(where, "true or false", value, problems)
    if hint is int:
        whole = _is_number(value) and abs(value) < MAX_NUMBER and float(value).is_integer()
        return int(value) if whole else _wrong(where, "a whole number", value, problems)
    if hint is float:
        number = _is_number(value) and (isinstance(value, float) or abs(value) < MAX_NUMBER)
        return float(value) if number else _wrong(where, "a number", value, problems)
    if hint is str and isinstance(value, str):
        return value
    return _wrong(where, getattr(hint, "__name__", str(hint)), value, problems)


def _convert_union(args: tuple[Any, ...], value: Any, where: str, problems: list[str]) -> Any:
    if value is None and type(None) in args:
        return None
    if isinstance(value, Schedule) and Schedule in args:
        return value
    if isinstance(value, Mapping) and Schedule in args:
        return _build_schedule(value, where, problems)
    others = [arg for arg in args if arg not in (type(None), Schedule)]
    if Schedule in args and (isinstance(value, bool) or not isinstance(value, (int, float))):
        return _wrong(where, "a number or a schedule ({schedule: linear, start: ...})", value, problems)
    if len(others) == 1:
        return convert(others[0], value, where, problems)
    for arg in others:
        trial: list[str] = []
        result = convert(arg, value, where, trial)
        if not trial:
            return result
    return _wrong(where, " or ".join(getattr(a, "__name__", str(a)) for a in others), value, problems)


def _build_schedule(value: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    data = dict(value)
    name = data.pop("schedule", None)
    if not isinstance(name, str) or name not in SCHEDULES:
        problems.append(
            f"{where}: a schedule needs 'schedule: <name>' with one of {', '.join(SCHEDULES)}; got {_shown(name)}"
        )
        return INVALID
    return build(SCHEDULES[name], data, where, problems)


def _convert_sequence(origin: Any, args: tuple[Any, ...], value: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(value, (list, tuple)):
        return _wrong(where, "a list", value, problems)
    open_ended = origin is list or (len(args) == 2 and args[1] is Ellipsis)
    hints = [args[0]] * len(value) if open_ended else list(args)
    if len(hints) != len(value):
        return _wrong(where, f"a list of {len(hints)} values", value, problems)
    items = [
        convert(hint, item, f"{where}[{i}]", problems) for i, (hint, item) in enumerate(zip(hints, value, strict=True))
    ]
    return INVALID if any(item is INVALID for item in items) else origin(items)


def plain(value: Any, where: str, problems: list[str]) -> Any:
    """Convert to data that YAML can hold: numbers, strings, booleans, none, lists and mappings. Tuples become lists."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", problems) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                problems.append(f"{where}: keys must be strings, got {_shown(key)}")
        return {str(key): plain(item, f"{where} > {key}", problems) for key, item in value.items()}
    problems.append(f"{where}: must be plain data (numbers, strings, lists, mappings), got {_shown(value)}")
    return INVALID


def to_plain(value: Any) -> Any:
    """The inverse of `convert`: settings as data that YAML and JSON can hold."""
    if isinstance(value, Schedule):
        return {"schedule": value.name, **{f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _check_range(field: dataclasses.Field[Any], value: Any, where: str, problems: list[str]) -> bool:
    found: list[str] = []
    if isinstance(value, Schedule):
        corners = [0.0, 1.0] if not isinstance(value, Piecewise) else [fraction for fraction, _ in value.points]
        # a schedule may reach the open bound (a learning rate may decay to zero)
        wrong = [v for v in map(value.value, corners) if range_problem(field, v) and v != field.metadata.get("gt")]
        found += [f"{where}: {range_problem(field, number)}, got {number} from {value}" for number in wrong[:1]]
    else:
        if isinstance(value, tuple) and len(value) > MAX_LENGTH:
            found.append(f"{where}: must have at most {MAX_LENGTH} entries, got {len(value)}")
        for item in value[:MAX_LENGTH] if isinstance(value, tuple) else [value]:
            if isinstance(item, (int, float)) and not isinstance(item, bool) and (text := range_problem(field, item)):
                found.append(f"{where}: {text}, got {item}")
    problems += found
    return not found


def _is_control(character: str) -> bool:
    """Whether a terminal would interpret a character; setting values are shown in help and tables."""
    return unicodedata.category(character) == "Cc" and character not in "\n\t"


def _name_problem(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Why a registered name is not accepted, or None."""
    registry = field.metadata.get("registry")
    return registry.problem(value) if registry is not None and isinstance(value, str) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(where: str, expected: str, value: Any, problems: list[str]) -> Any:
    problems.append(f"{where}: expected {expected}, got {_shown(value)}")
    return INVALID


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
