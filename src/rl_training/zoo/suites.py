"""Benchmark suites: YAML files that name presets, seeds, steps, the evaluation protocol and score normalisation.

A file is checked completely, including its presets and settings, before training starts.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.config import Layer, TrainConfig, resolve
from rl_training.experiment.files import safe_name
from rl_training.experiment.presets import Preset, get_preset, presets
from rl_training.experiment.schema import INVALID, build
from rl_training.experiment.yaml_io import read_yaml

Judged = Literal["final", "best"]

SUITES_OWN = frozenset(
    {"algo", "seed", "output_dir", "num_threads", "init_from", "eval_every", "eval_episodes", "checkpoint_every"}
    | {"checkpoint_keep", "checkpoint_best", "stop_reward", "stop_patience", "max_seconds", "video_every", "wandb"}
    | {"mlflow"}
)
"""Settings that the suite determines for all runs; a task may change any other."""


@documented
@dataclass(frozen=True)
class Protocol:
    """How the runs of a suite are evaluated."""

    points: int = setting(20, "Evaluations during training, evenly spread.", ge=1)
    episodes: int = setting(10, "Episodes of each evaluation during training.", ge=1)
    final_episodes: int = setting(20, "Episodes of the evaluations after training.", ge=1)


@documented
@dataclass(frozen=True)
class Normalization:
    """The score scale of an environment: 0 is a random policy, 1 a named reference."""

    env_id: str = setting(help="Environment.")
    low: float = setting(help="Mean return of uniformly random actions.")
    high: float = setting(help="Return of the reference.")
    reference: str = setting(help="Source of `high`.")
    env_kwargs: dict[str, Any] = setting(
        factory=dict, help="Keyword arguments of the environment; the scale is only for tasks with these."
    )

    def problems(self) -> list[str]:
        """Why the scale is invalid; empty if valid."""
        if self.high > self.low:
            return []
        return [f"high: must be above low, got {self.high:g} and {self.low:g} for {self.env_id}"]

    def fits(self, env_id: str, env_kwargs: Mapping[str, Any]) -> bool:
        """Whether the scale is for an environment with these arguments."""
        return self.env_id == env_id and self.env_kwargs.items() <= dict(env_kwargs).items()

    def score(self, value: float) -> float:
        """The normalised score of a return."""
        return (value - self.low) / (self.high - self.low)


@documented
@dataclass(frozen=True)
class TaskFile:
    """One task as written in a suite file."""

    preset: str = setting(
        help="Name of a preset, or a pattern such as `*/cartpole` for all that match: with the setting dataset, those "
        "that learn from recorded data, otherwise the others."
    )
    settings: dict[str, Any] = setting(factory=dict, help="Settings that override the preset, as in a config file.")
    judge: Judged | None = setting(
        None, "Which policy is scored in this task: final or best; by default that of the suite."
    )


@documented
@dataclass(frozen=True)
class SuiteFile:
    """A benchmark suite as written in its file."""

    description: str = setting(help="Purpose of the suite, in one line.")
    tasks: list[TaskFile] = setting(help="Presets to train.")
    normalization: list[Normalization] = setting(help="Score scale of each environment.")
    seeds: int = setting(3, "Number of seeds per task: 0, 1, ...", ge=1)
    evaluation: Protocol = setting(factory=Protocol, help="How runs are evaluated.")
    judge: Judged = setting("final", "Which policy is scored: the final one or the best checkpoint.")


@dataclass(frozen=True)
class Task:
    """A preset, optionally with changed settings, and how it is evaluated."""

    preset: str
    config: TrainConfig
    normalization: Normalization
    settings: Mapping[str, Any] = field(default_factory=dict)
    judge: Judged = "final"

    @property
    def name(self) -> str:
        """The display name: `dqn/cartpole double=true`."""
        return task_name(self.preset, self.settings)


@dataclass(frozen=True)
class Suite:
    """A validated suite."""

    name: str
    description: str
    seeds: int
    evaluation: Protocol
    tasks: tuple[Task, ...]
    trusted: bool = True
    """Whether it may name a module to import, a path, or a logger that uses the network."""

    def select(self, patterns: Sequence[str]) -> tuple[Task, ...]:
        """The tasks selected by preset name, task name or pattern; all if `patterns` is empty."""
        chosen = {pattern: [task for task in self.tasks if _is_called(task, pattern)] for pattern in patterns}
        missing = [pattern for pattern, found in chosen.items() if not found]
        if missing:
            names = sorted({task.preset for task in self.tasks})
            near = [difflib.get_close_matches(pattern, names, n=1) for pattern in missing]
            hints = [f" Did you mean '{found[0]}'?" if found else f" Accepted: {', '.join(names)}." for found in near]
            raise ConfigError(
                [f"suite {self.name} has no task '{p}'.{hint}" for p, hint in zip(missing, hints, strict=True)]
            )
        wanted = {task.name for found in chosen.values() for task in found}
        return tuple(task for task in self.tasks if not patterns or task.name in wanted)


def task_name(preset: str, settings: Mapping[str, Any]) -> str:
    """A preset name with its changed settings: `dqn/cartpole double=true`."""
    return " ".join([preset, *(f"{key}={plain_text(value)}" for key, value in flat_settings(settings))])


def flat_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Changed settings in one flat sequence, of the run and of the algorithm."""
    for key, value in settings.items():
        if key == "algorithm" and isinstance(value, Mapping):
            yield from value.items()
        else:
            yield key, value


def plain_text(value: Any) -> str:
    """Plain data on one line, with short number formats."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return f"{value:g}" if value == 0 or abs(value) >= 1e-2 else _scientific(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(plain_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def task_config(preset: Preset, settings: Mapping[str, Any], source: str, *, trust: bool = True) -> TrainConfig:
    """The config of a preset with changed settings."""
    place = {"env_id": preset.env_id} if preset.is_family and "env_id" not in settings else {}
    return resolve([preset.layer(), Layer({**place, **settings}, source, trusted=trust)])


@functools.cache
def suites() -> dict[str, Path]:
    """The suite files that ship with the package, by name."""
    root = Path(str(resources.files("rl_training"))) / "zoo" / "suites"
    return {path.stem: path for path in sorted(root.glob("*.yaml"))}


def get_suite(name: str, *, trust: bool = False) -> Suite:
    """A suite by name or from a file; `trust` allows a file to name a module to import (package:Env-v0)."""
    if name in suites():
        return read_suite(suites()[name])
    if name.endswith((".yaml", ".yml")):
        return read_suite(Path(name), trust=trust)
    near = difflib.get_close_matches(name, suites(), n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"Accepted: {', '.join(suites())}."
    raise ConfigError(f"there is no suite '{name}'. {hint} A custom suite is a file that ends in .yaml")


def read_suite(path: Path, *, trust: bool = False) -> Suite:
    """Read a suite; all problems are reported together."""
    problems: list[str] = []
    data = build(SuiteFile, read_yaml(path), str(path), problems)
    if data is INVALID:
        raise ConfigError(problems)
    assert isinstance(data, SuiteFile)
    tasks = list(_tasks(data, str(path), problems, trust=trust))
    for index, task in enumerate(tasks):
        same = [other.name for other in tasks[:index] if other.config == task.config]
        problems += [f"{path} > tasks: '{name}' and '{task.name}' have the same settings" for name in same]
    if not data.tasks:
        problems.append(f"{path} > tasks: must not be empty")
    if problems:
        raise ConfigError(problems)
    return Suite(safe_name(path.stem), data.description, data.seeds, data.evaluation, tuple(tasks), trust)


def _tasks(data: SuiteFile, where: str, problems: list[str], *, trust: bool) -> Iterator[Task]:
    """The tasks of a file. A pattern matches presets that the file does not name explicitly."""
    named = {task_name(task.preset, task.settings) for task in data.tasks}
    for index, task in enumerate(data.tasks):
        place = f"{where} > tasks[{index}]"
        found = _matching(task, named, place, problems)
        own = sorted(SUITES_OWN & task.settings.keys())
        problems += [f"{place} > settings: '{key}' cannot differ between tasks; the suite sets it" for key in own]
        for preset in found if not own else []:
            if preset.is_family and "env_id" not in task.settings:
                problems.append(
                    f"{place} > settings: 'env_id' is required: {preset.name} is a preset for {preset.env_id}"
                )
                continue
            try:
                config = task_config(preset, task.settings, f"{place} > settings", trust=trust)
            except ConfigError as error:
                problems += error.problems
                continue
            scale = _scale(data.normalization, config)
            if scale is None:
                problems.append(f"{place}: no entry of 'normalization' is for {config.env_id} ({preset.name})")
            else:
                yield Task(preset.name, config, scale, task.settings, task.judge or data.judge)


def _matching(task: TaskFile, named: set[str], place: str, problems: list[str]) -> list[Preset]:
    try:
        if "*" not in task.preset:
            return [get_preset(task.preset)]
    except ConfigError as error:
        problems += [f"{place} > preset: {text}" for text in error.problems]
        return []
    recorded = "dataset" in task.settings
    matching = [preset for name, preset in presets().items() if fnmatch.fnmatchcase(name, task.preset)]
    found = [preset for preset in matching if learns_from_data(preset) == recorded]
    if not found:
        problems.append(f"{place} > preset: no preset matches '{task.preset}'. See `rl-training zoo list`")
    return [preset for preset in found if task_name(preset.name, task.settings) not in named]


def learns_from_data(preset: Preset) -> bool:
    """Whether a preset needs recorded data, in an offline phase or mixed into batches."""
    return bool(preset.data.get("total_updates") or preset.data.get("online"))


def _scale(scales: Sequence[Normalization], config: TrainConfig) -> Normalization | None:
    """The scale for a config's environment; one with matching arguments has priority over one without."""
    fitting = [scale for scale in scales if scale.fits(config.env_id, config.env_kwargs)]
    return max(fitting, key=lambda scale: len(scale.env_kwargs), default=None)


def _is_called(task: Task, pattern: str) -> bool:
    return pattern in (task.preset, task.name) or fnmatch.fnmatchcase(task.preset, pattern)
