"""The registry of algorithms: every module of `algorithms` and `contrib` that defines a `SPEC`, and plug-ins.

There is no list to edit: a new algorithm is a new module. Other packages declare an entry point in the group
`rl_training.algorithms`; scripts call `register_algorithm`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
import types
import warnings
from typing import Any

from gymnasium import spaces

from rl_training.contracts.errors import ConfigError, SpaceError
from rl_training.contracts.images import has_images
from rl_training.contracts.plugins import REGISTRIES, Registry
from rl_training.contracts.spec import AlgorithmConfig, AlgorithmSpec, EnvSpec

_PACKAGES = ("rl_training.algorithms", "rl_training.contrib")


def _accept(name: str, value: Any) -> AlgorithmSpec:
    """Check a registered spec, or the `SPEC` of a registered module, and return it."""
    spec = getattr(value, "SPEC", None) if isinstance(value, types.ModuleType) else value
    if not isinstance(spec, AlgorithmSpec):
        raise ConfigError(f"expected an AlgorithmSpec, or a module that has one named SPEC, got {value!r:.80}")
    problems = []
    if spec.name != name:
        problems.append(
            f"its entry point is named '{name}', but its SPEC is named '{spec.name}'; both must be the same"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", spec.name):
        problems.append(f"name: expected lower-case letters, digits and underscores, got '{spec.name}'")
    if not spec.title.isidentifier():
        problems.append(f"title: must be a valid class name, got '{spec.title}'")
    if not (isinstance(spec.config, type) and issubclass(spec.config, AlgorithmConfig)):
        problems.append(f"config: expected a dataclass derived from AlgorithmConfig, got {spec.config!r:.80}")
    if taken := [other.name for other in ALGORITHMS.own().values() if other.title == spec.title]:
        problems.append(f"title: '{spec.title}' is the title of rl_training's own {taken[0]}; choose another")
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(spec, layer="plugin")


ALGORITHMS: Registry[AlgorithmSpec] = Registry("algorithm", "rl_training.algorithms", accept=_accept)
REGISTRIES[ALGORITHMS.kind] = ALGORITHMS


@functools.cache
def _discover() -> None:
    """Register the package's own algorithms."""
    for package_name in _PACKAGES:
        package = importlib.import_module(package_name)
        for module_info in pkgutil.iter_modules(package.__path__):
            spec = getattr(importlib.import_module(f"{package_name}.{module_info.name}"), "SPEC", None)
            if isinstance(spec, AlgorithmSpec):
                ALGORITHMS.builtin(spec.name)(spec)


def register_algorithm(spec: AlgorithmSpec) -> AlgorithmSpec:
    """Register an algorithm under its name, for Python, configs and checkpoints of this process.

    The command line and other processes find only algorithms of installed packages, by entry points in the group
    `rl_training.algorithms`. Names and titles of the package's own algorithms are refused. Returns the registered spec,
    whose layer is `plugin`.

    Example:
        >>> from my_package import SPEC  # doctest: +SKIP
        >>> register_algorithm(SPEC)  # doctest: +SKIP
        >>> agent = rl_training.make_agent("my_algorithm", "CartPole-v1")  # doctest: +SKIP
    """
    _discover()
    ALGORITHMS.register(spec.name)(spec)
    return ALGORITHMS.get(spec.name)


def own_algorithms() -> dict[str, AlgorithmSpec]:
    """The algorithms of this package, by name, without plug-ins."""
    _discover()
    return dict(sorted(ALGORITHMS.own().items()))


def registry() -> dict[str, AlgorithmSpec]:
    """All algorithms by name. Plug-ins that cannot be imported are left out with a warning."""
    found = own_algorithms()
    for name in ALGORITHMS.added():
        try:
            found[name] = get_spec(name)
        except ConfigError as error:
            _warn(str(error))
    return dict(sorted(found.items()))


@functools.cache  # warn once
def _warn(problem: str) -> None:
    warnings.warn(f"{problem}. `rl-training doctor` shows all plug-ins", stacklevel=3)


def get_spec(name: str) -> AlgorithmSpec:
    """The algorithm with that name; the error for an unknown name suggests the nearest one."""
    _discover()
    try:
        return ALGORITHMS.get(name)
    except ConfigError as error:
        raise ConfigError([f"algo: {problem}" for problem in error.problems]) from error


def check_action_space(algorithm: AlgorithmSpec, spec: EnvSpec) -> None:
    """Raise a `SpaceError` for an unsupported action space; it names algorithms that support the space."""
    if isinstance(spec.action_space, algorithm.action_spaces):
        return
    accepted = ", ".join(space.__name__ for space in algorithm.action_spaces)
    images = has_images(spec.observation_space)
    able = [other for other in registry().values() if isinstance(spec.action_space, other.action_spaces)]
    others = [other.title for other in able if images or not other.needs_images]
    kind = type(spec.action_space).__name__
    advice = f"For {kind} actions use {' or '.join(others)}." if others else _advice(spec.action_space)
    raise SpaceError(
        f"{algorithm.title} needs an action space of type {accepted}, "
        f"got {spec.action_space} from '{spec.env_id}'. {advice}"
    )


def _advice(space: spaces.Space[Any]) -> str:
    return (
        f"No algorithm takes {type(space).__name__} actions; wrap the environment so that it offers one of "
        "Discrete, MultiDiscrete, MultiBinary or Box."
    )
