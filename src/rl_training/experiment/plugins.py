"""Plug-ins of a run: parts from other packages. They are recorded in the run's files and required when loading them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from rl_training.algorithms.registry import ALGORITHMS, get_spec
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.plugins import REGISTRIES, Origin, Registry
from rl_training.experiment.config import TrainConfig


def plugins_of(config: TrainConfig) -> list[dict[str, Any]]:
    """The parts of a config that come from other packages, as plain data: kind, name, package, version, module."""
    get_spec(config.algo)
    names = [(ALGORITHMS, config.algo), *_named(config)]
    origins = {origin: None for registry, name in names if (origin := registry.origin(name)) is not None}
    return [dataclasses.asdict(origin) for origin in origins]


def _named(settings: Any) -> Iterator[tuple[Registry[Any], str]]:
    """Every registered name in some settings."""
    for field in dataclasses.fields(settings):
        value, registry = getattr(settings, field.name), field.metadata.get("registry")
        if registry is not None and isinstance(value, str):
            yield registry, value
        for item in value if isinstance(value, list) else [value]:
            if dataclasses.is_dataclass(item):
                yield from _named(item)


def require_plugins(about: Mapping[str, Any], where: str) -> None:
    """Raise an error that says what to install if plug-ins are missing; imports nothing that the files name."""
    problems = [
        f"{where}: needs {origin}, which is not registered. {_remedy(origin)}"
        for origin in _origins(about)
        if origin.kind in REGISTRIES and origin.name not in REGISTRIES[origin.kind].names()
    ]
    if problems:
        raise CheckpointError("\n".join(problems))


def _remedy(origin: Origin) -> str:
    if origin.package is not None:
        return f"Install it with: pip install '{origin.package}=={origin.version}'"
    return "It was registered in Python: import the module that registers it first"


def changed_plugins(before: Mapping[str, Any]) -> list[str]:
    """Plug-in packages whose version changed since the run began."""
    changes = []
    for origin in _origins(before):
        try:
            now = metadata.version(origin.package) if origin.package else None
        except metadata.PackageNotFoundError:
            now = None
        if origin.package and now != origin.version:
            changes.append(f"{origin.package} {origin.version} -> {now}")
    return sorted(set(changes))


def _origins(about: Mapping[str, Any]) -> Iterator[Origin]:
    """The plug-ins named in the metadata; malformed entries are skipped."""
    names = [field.name for field in dataclasses.fields(Origin)]
    entries = about.get("plugins")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and all(isinstance(entry.get(name), (str, type(None))) for name in names):
            yield Origin(**{name: entry.get(name) for name in names})  # type: ignore[arg-type]
