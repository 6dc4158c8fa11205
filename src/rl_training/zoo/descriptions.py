"""Markdown tables of an algorithm's settings and presets, for the docs of this package and of plug-ins."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from rl_training.contracts.schedule import Schedule
from rl_training.contracts.spec import AlgorithmConfig, AlgorithmSpec
from rl_training.envs.wrappers import WrapperConfig
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import LoggerConfig
from rl_training.experiment.presets import Preset, presets
from rl_training.experiment.schema import to_plain
from rl_training.zoo.suites import plain_text


def describe(spec: AlgorithmSpec) -> str:
    """A page about an algorithm: summary, settings, presets."""
    own = [preset for preset in presets().values() if preset.algo == spec.name]
    facts = [
        ["`algo`", f"`{spec.name}`"],
        ["Layer", spec.layer],
        ["Data", ", ".join(regime.value for regime in spec.regimes)],
        ["Actions", ", ".join(space.__name__ for space in spec.action_spaces)],
        ["Paper", spec.paper],
    ]
    return "\n\n".join(
        [
            f"# {spec.title}",
            table(["", ""], facts),
            "## Settings",
            settings_text(spec.config),
            "## Presets",
            presets_table(own),
        ]
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def environment_text(preset: Preset, env_id: str = "") -> str:
    """The environment of a preset, or `env_id`, with its arguments."""
    kwargs = " ".join(f"`{key}={plain_text(value)}`" for key, value in preset.env_kwargs.items())
    return f"{env_id or preset.env_id} {kwargs}".strip()


def presets_table(chosen: Iterable[Preset]) -> str:
    """A table of presets."""
    rows = []
    for preset in chosen:
        config = TrainConfig.from_dict(preset.data)
        rows.append([f"`{preset.name}`", environment_text(preset), f"{config.total_timesteps:,}", f"{config.num_envs}"])
    return table(["Preset", "Environment", "Steps", "Parallel environments"], rows) if rows else "None yet."


def settings_text(cls: type[Any], base: type[Any] | None = None) -> str:
    """Tables of a config's settings, one per section: all, or only those that differ from the config `base`."""
    tables = settings_tables(cls)
    if base is not None:
        known = settings_tables(base)
        tables = {key: [row for row in rows if row not in known.get(key, [])] for key, rows in tables.items()}
    head = ["Setting", "Type", "Default", "Range", "What it does"]
    return "\n\n".join(
        (f"In the section `{section}`:\n\n" if section else "") + table(head, rows)
        for section, rows in tables.items()
        if rows
    )


def settings_tables(cls: type[Any]) -> dict[str, list[list[str]]]:
    """Rows of a config's own settings (under an empty name) and of each of its sections."""
    sections = {
        field.name: field.default_factory
        for field in dataclasses.fields(cls)
        if isinstance(hint := typing.get_type_hints(cls)[field.name], type)
        and dataclasses.is_dataclass(hint)
        and field.default_factory is not dataclasses.MISSING
    }
    tables = {"": settings_rows(cls, skip=sections)}
    for section, factory in sections.items():
        default = factory()
        tables[section] = settings_rows(type(default), default, prefix=f"{section}.")
    return tables


def settings_rows(cls: type[Any], defaults: Any = None, prefix: str = "", skip: Iterable[str] = ()) -> list[list[str]]:
    """One row per field: name, type, default, range, help."""
    hints = typing.get_type_hints(cls)
    return [
        [
            f"`{prefix}{field.name}`",
            type_text(hints[field.name]),
            default_text(field, hints[field.name], defaults),
            range_text(field),
            field.metadata["help"],
        ]
        for field in dataclasses.fields(cls)
        if field.name not in skip
    ]


def type_text(hint: Any) -> str:
    """A type as text for readers."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin in (tuple, list):
        items = [arg for arg in args if arg is not Ellipsis]
        count = f"{len(items)} " if origin is tuple and Ellipsis not in args else ""
        return f"list of {count}{type_text(items[0])}s"
    if origin is dict:
        return "mapping"
    names = {int: "int", float: "float", bool: "bool", str: "text", Path: "path", type(None): "none"}
    if hint in names:
        return names[hint]
    words = {Schedule: "schedule", AlgorithmConfig: "mapping", WrapperConfig: "wrapper", LoggerConfig: "logger"}
    return words.get(hint, f"`{hint.__name__}`")


def default_text(field: dataclasses.Field[Any], hint: Any, defaults: Any) -> str:
    """The default as written in a config file."""
    if defaults is not None:
        value = getattr(defaults, field.name)
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "`none`" if type(None) in typing.get_args(hint) else "depends"
    return f"`{plain_text(to_plain(value))}`"


def range_text(field: dataclasses.Field[Any]) -> str:
    """The declared range of a number."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[key]} {field.metadata[key]:g}" for key in signs if field.metadata.get(key) is not None]
    return ", ".join(bounds)
