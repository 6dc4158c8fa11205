"""Which presets are measured as they ship, and how far a result can be relied on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_training.contracts.errors import ConfigError
from rl_training.experiment.presets import Preset, presets
from rl_training.zoo.manifest import Manifest, TaskResult, config_hash, pick
from rl_training.zoo.suites import task_config

State = Literal["measured", "stale", "no commit", "not measured", "published settings"]

AFFORDABLE = 5_000_000
"""Presets with more steps are published settings that nobody has measured here."""
HEADER = "# Measured: "
"""The start of the line in each preset's file that says so; `scripts/generate_docs.py` writes it."""


@dataclass(frozen=True)
class Measured:
    """A preset and its result with the settings that ship, or with earlier ones."""

    preset: Preset
    state: State
    task: TaskResult | None = None

    @property
    def text(self) -> str:
        """The state in a few words, with the number of seeds."""
        seeds = 0 if self.task is None else len(self.task.runs)
        count = f"{seeds} seed{'s' if seeds != 1 else ''}"
        return {
            "measured": f"yes, {count}",
            "stale": f"with earlier settings, {count}",
            "no commit": f"without a recorded commit, {count}",
            "not measured": "not yet",
            "published settings": "no, published settings",
        }[self.state]

    def with_header(self, text: str) -> str:
        """The text of the preset's file with its current header line, before its first setting."""
        lines = [line for line in text.splitlines() if not line.startswith(HEADER)]
        first = next(index for index, line in enumerate(lines) if re.match(r"\w", line))
        return "\n".join([*lines[:first], f"{HEADER}{self.text}.", *lines[first:]]) + "\n"


def shipped_hash(preset: Preset) -> str:
    """The config hash of a preset as it ships; empty for families, which have no environment, and invalid presets."""
    try:
        return "" if preset.is_family else config_hash(task_config(preset, {}, preset.name))
    except ConfigError:  # of another package; training with it says what is wrong
        return ""


def state_of(task: TaskResult, current_hash: str) -> State:
    """How far a result can be relied on."""
    if task.config_hash != current_hash:
        return "stale"
    return "measured" if all(run.git_commit for run in task.runs) else "no commit"


def measured(preset: Preset, manifests: Iterable[Manifest]) -> Measured:
    """The best result of a preset as it ships."""
    every = (task for manifest in manifests for task in manifest.tasks)
    candidates = [task for task in every if task.preset == preset.name and not task.settings and task.runs]
    current = shipped_hash(preset)
    task = pick(candidates, current)
    if task is None:
        return Measured(preset, "not measured" if preset.total_timesteps <= AFFORDABLE else "published settings")
    return Measured(preset, state_of(task, current), task)


def measured_presets(manifests: Sequence[Manifest]) -> dict[str, Measured]:
    """Every preset by name, with its result."""
    return {name: measured(preset, manifests) for name, preset in presets().items()}
