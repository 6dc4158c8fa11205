"""The registry of algorithms: every module of `algorithms` and `contrib` that defines a `SPEC`.

Nothing is listed by hand, so adding an algorithm is adding a module.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from typing import Any

from gymnasium import spaces

from rl_training.contracts.errors import ConfigError, SpaceError
from rl_training.contracts.images import has_images
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec

_PACKAGES = ("rl_training.algorithms", "rl_training.contrib")


@functools.cache
def registry() -> dict[str, AlgorithmSpec]:
    """All algorithms by name."""
    found: dict[str, AlgorithmSpec] = {}
    for package_name in _PACKAGES:
        package = importlib.import_module(package_name)
        for module_info in pkgutil.iter_modules(package.__path__):
            spec = getattr(importlib.import_module(f"{package_name}.{module_info.name}"), "SPEC", None)
            if isinstance(spec, AlgorithmSpec):
                found[spec.name] = spec
    return dict(sorted(found.items()))


def get_spec(name: str) -> AlgorithmSpec:
    """The algorithm with that name; the error names the nearest one."""
    specs = registry()
    if name not in specs:
        near = difflib.get_close_matches(name.lower(), specs, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"algo: unknown algorithm '{name}'.{hint} Known: {', '.join(specs)}")
    return specs[name]


def check_action_space(algorithm: AlgorithmSpec, spec: EnvSpec) -> None:
    """Refuse an action space that the algorithm cannot handle, and name algorithms that can."""
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
