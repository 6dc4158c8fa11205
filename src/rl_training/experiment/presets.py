"""Presets: settings known to work, found by algorithm and environment or by name.

A preset may be for a family of environments: `ALE/*` is for every Atari game without its own preset.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.plugins import entry_points
from rl_training.envs.atari import is_atari
from rl_training.experiment.config import Layer, TrainConfig, resolve
from rl_training.experiment.schema import convert_fields
from rl_training.experiment.yaml_io import read_yaml


@dataclass(frozen=True)
class Preset:
    """One preset file."""

    name: str
    """The display name: `ppo/cartpole`."""
    data: Mapping[str, Any]
    path: Path

    @property
    def algo(self) -> str:
        """The algorithm of the preset."""
        return str(self.data["algo"])

    @property
    def env_id(self) -> str:
        """The environment of the preset; a family of environments if it contains a `*`."""
        return str(self.data["env_id"])

    @property
    def is_family(self) -> bool:
        """Whether it is for a family of environments, so that one of them has to be named."""
        return "*" in self.env_id

    @property
    def env_kwargs(self) -> dict[str, Any]:
        """The environment's keyword arguments, which belong to the task."""
        return dict(self.data.get("env_kwargs") or {})

    @property
    def subject(self) -> str:
        """The environment and its arguments, for display."""
        return f"{self.env_id} with env_kwargs={self.env_kwargs}" if self.env_kwargs else self.env_id

    def is_for(self, env_id: str) -> bool:
        """Whether it is for that environment or its family, regardless of keyword arguments."""
        return env_id == self.env_id or (self.is_family and fnmatch.fnmatchcase(env_id, self.env_id))

    @property
    def total_timesteps(self) -> int:
        """The number of training steps."""
        return int(self.data.get("total_timesteps", TrainConfig.total_timesteps))

    def layer(self) -> Layer:
        """The preset as a layer of a config; for a family, the environment id is left out."""
        data = {key: value for key, value in self.data.items() if key != "env_id" or not self.is_family}
        return Layer(data, f"preset {self.name}", trusted=False)


GROUP = "rl_training.presets"
"""Entry-point group of packages that provide presets in the same layout: `<algo>/<name>.yaml`."""


@functools.cache
def presets() -> dict[str, Preset]:
    """Every preset by name: those that ship with the package, and those of installed plug-ins."""
    found = _read_tree(Path(str(resources.files("rl_training"))) / "zoo" / "presets")
    for source, own, problem in plugin_presets():
        if problem is not None:
            warnings.warn(f"the presets of {source} are ignored: {problem}", stacklevel=2)
        found |= own
    return found


def plugin_presets() -> Iterator[tuple[str, dict[str, Preset], str | None]]:
    """For each package that provides presets: its name and version, its presets, and any error."""
    known = set(_read_tree(Path(str(resources.files("rl_training"))) / "zoo" / "presets"))
    for entries in entry_points(GROUP).values():
        for entry in entries:
            source = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
            try:
                own = _read_tree(Path(str(resources.files(entry.load()))))
            except Exception as error:  # errors in another package must not break this one
                yield source, {}, f"{type(error).__name__}: {error}"
                continue
            taken = sorted(known & own.keys())
            problem = f"these names are already in use: {', '.join(taken)}" if taken else None
            yield source, {} if taken else own, problem
            known |= own.keys()


def _read_tree(root: Path) -> dict[str, Preset]:
    found = {}
    for path in sorted(root.glob("*/*.yaml")):
        name = f"{path.parent.name}/{path.stem}"
        found[name] = Preset(name, read_yaml(path), path)
        _check(found[name])
    return found


def _check(preset: Preset) -> None:
    """Check that a preset names its algorithm and environment; the rest is checked when it is used."""
    problems = [f"{preset.path}: '{name}' is required" for name in ("algo", "env_id") if name not in preset.data]
    names = ("algo", "env_id", "env_kwargs", "total_timesteps")
    said = {name: preset.data[name] for name in names if name in preset.data}
    convert_fields(TrainConfig, said, str(preset.path), problems)
    if problems:
        raise ConfigError(problems)


def find_preset(algo: str, env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> Preset | None:
    """The preset for an algorithm and an environment with these arguments, or for its family; None if there is none.

    A preset also applies if further arguments are given (another `mode` of a game). It does not apply if an argument
    that selects a different task has another value. These are the arguments named in any preset of the id:
    `continuous` of LunarLander.

    Example:
        >>> find_preset("ppo", "LunarLander-v3", {"gravity": -5.0}).name
        'ppo/lunarlander'
        >>> find_preset("ppo", "LunarLander-v3", {"gravity": -5.0, "continuous": True}).name
        'ppo/lunarlander-continuous'
    """
    given = dict(env_kwargs or {})
    for_id = [preset for preset in presets().values() if preset.is_for(env_id)]
    # render_mode changes the task only for agents that learn from pixels, which is set explicitly
    telling = {key for preset in for_id for key in preset.env_kwargs} - {"render_mode"}

    def fits(preset: Preset) -> bool:
        own = preset.env_kwargs
        extends = all(key in given and given[key] == value for key, value in own.items())
        same_task = all((given.get(key) or None) == (own.get(key) or None) for key in telling)  # False equals not given
        return extends and same_task and is_atari(env_id, given) == is_atari(env_id, own)

    found = [preset for preset in for_id if preset.algo == algo and fits(preset)]
    return max(found, key=lambda preset: (not preset.is_family, len(preset.env_kwargs)), default=None)


def get_preset(name: str) -> Preset:
    """The preset with that name; the error suggests the closest name."""
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"there is no preset '{name}'.{hint} List all presets with `rl-training zoo list`")
    return known[name]


def resolve_with_preset(layers: Sequence[Layer], *, combinations: bool = True) -> tuple[TrainConfig, Preset | None]:
    """Merge defaults < preset < layers; the layers determine the preset. See `resolve`."""
    said: dict[str, Any] = {}
    for layer in layers:
        said.update({key: layer.data[key] for key in ("algo", "env_id", "env_kwargs") if key in layer.data})
    preset = None
    if isinstance(said.get("algo"), str) and isinstance(said.get("env_id"), str):
        kwargs = said.get("env_kwargs")
        preset = find_preset(said["algo"], said["env_id"], kwargs if isinstance(kwargs, Mapping) else None)
    below = [preset.layer()] if preset else []
    return resolve([*below, *layers], combinations=combinations), preset
