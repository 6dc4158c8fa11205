"""Registries of plug-ins by name: algorithms, encoders, networks, optimizers, samplers, loggers.

A name is registered in Python (`register_encoder("mine")`), or declared by an installed package as an entry point of
its group (`rl_training.encoders`). Settings and files hold names only. A lookup searches the registered names and the
entry points of installed packages, and imports only the entry point with that name. A module that a file names is never
imported.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, TypeVar

from rl_training.contracts.errors import ConfigError, RLTrainingError

T = TypeVar("T")
FactoryT = TypeVar("FactoryT")


@functools.cache
def entry_points(group: str) -> dict[str, list[metadata.EntryPoint]]:
    """The entry points of a group by name; several under one name are a name clash between packages."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Origin:
    """Where a plug-in comes from."""

    kind: str
    name: str
    package: str | None
    """The installed distribution; None if a script or a loose module registered it."""
    version: str | None
    module: str

    def __str__(self) -> str:
        source = f"the package {self.package} {self.version}" if self.package else f"the module {self.module}"
        return f"the {self.kind} '{self.name}' of {source}"


class Registry(Generic[T]):
    """Objects of one kind by name: built-in, registered in Python, or declared by installed packages.

    `accept` converts a registered value to the one that is used, or refuses it with a `ConfigError`. `also` are names
    that the caller handles itself, without an entry in the registry.

    Example:
        >>> colours = Registry("colour", "my_package.colours")
        >>> colours.register("red")("#ff0000")
        '#ff0000'
        >>> colours.get("red"), colours.problem("rad")
        ('#ff0000', "unknown colour 'rad'. Did you mean 'red'? Known: red")
    """

    def __init__(
        self,
        kind: str,
        group: str,
        *,
        accept: Callable[[str, Any], T] = lambda name, value: value,
        also: tuple[str, ...] = (),
    ) -> None:
        self.kind, self.group, self.also = kind, group, also
        self._accept = accept
        self._builtin: dict[str, T] = {}
        self._added: dict[str, T] = {}
        self._loaded: dict[str, T] = {}

    def builtin(self, name: str) -> Callable[[FactoryT], FactoryT]:
        """Register a built-in under a name."""

        def register(value: FactoryT) -> FactoryT:
            self._builtin[name] = value  # type: ignore[assignment]
            return value

        return register

    def register(self, name: str) -> Callable[[FactoryT], FactoryT]:
        """Register an object under a name; built-in names are refused."""

        def register(value: FactoryT) -> FactoryT:
            if problem := self._clash(name):
                raise ConfigError(problem)
            self._added[name] = self._accept(name, value)
            return value

        return register

    def unregister(self, name: str) -> None:
        """Remove a name that was registered in Python."""
        self._added.pop(name, None)

    def names(self) -> list[str]:
        """All known names; imports nothing."""
        return sorted({*self.also, *self._builtin, *self.added()})

    def added(self) -> list[str]:
        """Known names that are not built-in."""
        announced = {name for name in entry_points(self.group) if not self._clash(name)}
        return sorted(self._added.keys() | announced)

    def own(self) -> dict[str, T]:
        """The built-in objects by name."""
        return dict(self._builtin)

    def problem(self, name: str) -> str | None:
        """Why a name is not accepted, or None; imports the named object."""
        if name in self.also:
            return None
        try:
            self.get(name)
        except ConfigError as error:
            return str(error)
        return None

    def get(self, name: str) -> T:
        """The object with that name; a `ConfigError` if it is unknown or cannot be imported."""
        for known in (self._builtin, self._added, self._loaded):
            if name in known:
                return known[name]
        entries = entry_points(self.group).get(name, [])
        if not entries:
            near = difflib.get_close_matches(name.lower(), self.names(), n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"unknown {self.kind} '{name}'.{hint} Known: {', '.join(self.names())}")
        if len(entries) > 1:
            packages = ", ".join(map(_package, entries))
            raise ConfigError(
                f"{self.kind} '{name}': provided by several installed packages: {packages}. Uninstall all but one"
            )
        self._loaded[name] = self._load(entries[0])
        return self._loaded[name]

    def make(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> Any:
        """Call the factory with that name; if it refuses the arguments, a `ConfigError` names the setting `where`."""
        factory: Any = self.get(name)
        try:
            inspect.signature(factory).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{where}: the {self.kind} '{name}' cannot be called with {dict(kwargs)}: {error}"
            ) from error
        except ValueError:  # a factory without a signature
            pass
        try:
            return factory(*args, **kwargs)
        except RLTrainingError:
            raise
        except Exception as error:  # plug-in code may raise anything
            raise ConfigError(
                f"{where}: the {self.kind} '{name}' cannot be made with {dict(kwargs)}: {type(error).__name__}: {error}"
            ) from error

    def origin(self, name: str) -> Origin | None:
        """Where a known name comes from; None if it is built-in."""
        if name in self._builtin or name in self.also:
            return None
        entries = entry_points(self.group).get(name, [])
        if entries and (dist := entries[0].dist) is not None:
            return Origin(self.kind, name, dist.name, dist.version, entries[0].module)
        value = self.get(name)
        module = str(getattr(getattr(value, "algorithm", value), "__module__", "__main__"))
        package = _distribution_of(module)
        return Origin(self.kind, name, package, metadata.version(package) if package else None, module)

    def check_entry_points(self) -> Iterator[tuple[str, str, str | None]]:
        """Name, package and problem (or None) of every entry point of the group; imports them all."""
        for name, entries in entry_points(self.group).items():
            problem = self._clash(name) or self.problem(name)
            for entry in entries:
                yield name, _package(entry), problem

    def _clash(self, name: str) -> str | None:
        if name in self._builtin or name in self.also:
            return f"{self.kind} '{name}': the name is taken by rl_training itself; choose another"
        return None

    def _load(self, entry: metadata.EntryPoint) -> T:
        who = f"the {self.kind} '{entry.name}' of the package {_package(entry)}"
        try:
            value = entry.load()
        except Exception as error:  # another package's code: whatever it raises must not break this one
            raise ConfigError(f"{who} cannot be imported: {type(error).__name__}: {error}") from error
        try:
            return self._accept(entry.name, value)
        except ConfigError as error:
            raise ConfigError(f"{who} is refused: {error}") from error


def _package(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _distribution_of(module: str) -> str | None:
    """The installed distribution that a module belongs to, if it belongs to one."""
    root = module.partition(".")[0]
    if root == "__main__" or root in sys.stdlib_module_names:
        return None
    found = _distributions().get(root, [])
    return found[0] if found else None


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {name: list(packages) for name, packages in metadata.packages_distributions().items()}


ENCODERS: Registry[Callable[..., Any]] = Registry("encoder", "rl_training.encoders", also=("auto",))
NETWORKS: Registry[Callable[..., Any]] = Registry("network", "rl_training.networks", also=("mlp",))
OPTIMIZERS: Registry[Callable[..., Any]] = Registry(
    "optimizer", "rl_training.optimizers", also=("adam", "adamw", "rmsprop", "sgd")
)
SAMPLERS: Registry[Callable[..., Any]] = Registry("sampler", "rl_training.samplers")
LOGGERS: Registry[Callable[..., Any]] = Registry("logger", "rl_training.loggers")
REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry for registry in (ENCODERS, NETWORKS, OPTIMIZERS, SAMPLERS, LOGGERS)
}
"""All registries by kind; the one for algorithms is added when it is imported."""
