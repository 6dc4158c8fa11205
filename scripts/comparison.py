"""Comparison of results with published ones: which figure belongs to which result, and whether it was reached."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.presets import Preset
from rl_training.experiment.schema import INVALID, build
from rl_training.experiment.yaml_io import read_yaml
from rl_training.reports.statistics import interquartile_mean
from rl_training.zoo.manifest import Manifest, TaskResult, config_hash, pick
from rl_training.zoo.measured import State, measured, state_of
from rl_training.zoo.suites import Judged, flat_settings, plain_text, task_config

OLD_CONTACTS = re.compile(r"(Hopper|Ant)-v\d+")
"""Environments whose contacts mujoco 3.5 changed: figures from before are of another task."""
NEW_CONTACTS = (3, 5)
SAME_TASK = {"env_id", "total_timesteps"}
"""Settings that may differ in a comparison: both are shown beside the figure."""


@documented
@dataclass(frozen=True)
class Source:
    """The publication that figures come from."""

    short: str = setting(help="Name in tables.")
    name: str = setting(help="Whose figures they are.")
    where: str = setting(help="Repository, file and commit, or paper.")
    protocol: str = setting(help="How they were measured.")
    differs: str = setting(help="In what that differs from ours, in a few words.")


@documented
@dataclass(frozen=True)
class Figure:
    """One published figure."""

    preset: str = setting(help="The preset of ours that it is for.")
    source: str = setting(help="Key of its source.")
    env_id: str = setting(help="The environment that it was measured on.")
    mean: float = setting(help="Return.")
    std: float = setting(help="Its spread: over seeds, or over the episodes of a single run.", ge=0)
    seeds: int = setting(help="Runs behind it.", ge=1)
    steps: int = setting(help="Environment steps of training.", ge=1)

    def verdict(self, scores: Sequence[float]) -> str:
        """How the scores of our seeds compare with the figure.

        A single run has no spread over seeds, so it is compared as one run: with each of ours.
        """
        average = float(interquartile_mean(scores))
        if self.seeds == 1:
            reached = sum(score >= self.mean for score in scores)
            if average >= self.mean:
                return "reached"
            return f"one run, reached by {reached} of our {len(scores)}" if reached else "below"
        if average >= self.mean:
            return "reached"
        return "within its spread over seeds" if average >= self.mean - self.std else "below"


@documented
@dataclass(frozen=True)
class FollowUp:
    """What is known about a result that is below a published figure."""

    preset: str = setting(help="The preset.")
    note: str = setting(help="What was found, or what is to be tried.")


@documented
@dataclass(frozen=True)
class PublishedFile:
    """Results reported by other projects."""

    figures: list[Figure] = setting(help="The figures.")
    follow_up: list[FollowUp] = setting(help="About results that are below them.")


@dataclass(frozen=True)
class Published:
    """Published figures and their sources."""

    sources: dict[str, Source]
    figures: list[Figure]
    follow_up: dict[str, str]


def read_published(path: Path) -> Published:
    """The published figures from their file; all problems are reported together."""
    problems: list[str] = []
    data = read_yaml(path)
    given = data.pop("sources", {})
    where = f"{path} > sources"
    sources = {key: build(Source, value, f"{where} > {key}", problems) for key, value in given.items()}
    found = build(PublishedFile, data, str(path), problems)
    if found is not INVALID:
        unknown = sorted({figure.source for figure in found.figures} - sources.keys())
        problems += [f"{path} > figures: there is no source '{key}'" for key in unknown]
    if problems:
        raise ConfigError(problems)
    return Published(sources, found.figures, {entry.preset: entry.note for entry in found.follow_up})


@dataclass
class Row:
    """One row of the results: a preset as it ships, or with changed settings."""

    preset: Preset
    config: TrainConfig
    settings: Mapping[str, Any]
    state: State
    task: TaskResult | None = None
    figures: list[Figure] = field(default_factory=list)

    def scores(self, judge: Judged = "final") -> list[float]:
        """The mean return of each seed, of the final policy or of the best checkpoint."""
        return [] if self.task is None else self.task.scores(judge)

    @property
    def steps(self) -> int:
        """The steps of the result, which may be from before the preset was changed; else those of the preset."""
        return self.config.total_timesteps if self.task is None else self.task.total_timesteps

    @property
    def judge(self) -> Judged:
        """Which policy is compared: the final one; the best only where the final one was not measured."""
        return "final" if self.scores("final") else "best"

    @property
    def is_shipped(self) -> bool:
        """Whether it is the preset as it ships."""
        return not self.settings

    @property
    def name(self) -> str:
        """The display name; environment and steps are in separate columns."""
        shown = [f"`{key}={plain_text(value)}`" for key, value in flat_settings(self.settings) if key not in SAME_TASK]
        return " ".join([f"`{self.preset.name}`", *shown, *self.marks])

    @property
    def marks(self) -> list[str]:
        """Notes on a result that cannot be relied on, or on an evaluation that differs from the usual one."""
        marks = {"stale": ["**stale**"], "no commit": ["**no commit**"]}.get(self.state, [])
        if self.task is not None and self.state == "stale" and not all(run.git_commit for run in self.task.runs):
            marks.append("**no commit**")
        if self.task is not None and not self.task.deterministic:
            marks.append("*sampled actions*")
        if self.task is not None and self.task.epsilon:
            marks.append(f"*ε = {self.task.epsilon:g}*")
        return marks

    def below(self) -> list[Figure]:
        """The figures that the result does not reach."""
        return [figure for figure in self.figures if (self.verdict(figure) or "").startswith("below")]

    def verdict(self, figure: Figure) -> str | None:
        """How this result compares with a figure; None if the two were not measured alike."""
        scores = self.scores(self.judge)
        if not scores or self.other_task(figure) is not None:
            return None
        found = figure.verdict(scores)
        if figure.steps < self.steps:
            return None
        if figure.steps > self.steps:
            return "reached in fewer steps" if found == "reached" else None
        return f"{found}, best of {self.task.points}" if self.judge == "best" and self.task is not None else found

    def other_task(self, figure: Figure) -> str | None:
        """Why a figure is of another task than this result; None if it is of the same, perhaps in another version."""
        if _base(self.config.env_id) != _base(figure.env_id):
            return f"on {figure.env_id}"
        if OLD_CONTACTS.fullmatch(figure.env_id) and self._has_new_contacts():
            return "before mujoco 3.5, which changed the contacts of this task"
        if "Walker2d-v5" in (self.config.env_id, figure.env_id) and self.config.env_id != figure.env_id:
            return "v5 is another task"
        return None

    def _has_new_contacts(self) -> bool:
        """Whether any run used, or would use today, a mujoco with the changed contacts."""
        found = [] if self.task is None else [str(run.versions.get("mujoco", "")) for run in self.task.runs]
        versions = [tuple(map(int, version.split(".")[:2])) for version in found if version]
        return not versions or max(versions) >= NEW_CONTACTS


def _base(env_id: str) -> str:
    """The name of an environment in all of its versions; others name it after its wrapper."""
    return re.sub(r"(NoFrameskip|NoVel)?-v\d+$", "", env_id).removeprefix("ALE/")


def rows_of(preset: Preset, manifests: Sequence[Manifest], published: Published) -> list[Row]:
    """The rows of a preset, first as it ships, then with changed settings, each with its published figures."""
    about = measured(preset, manifests)
    rows = [Row(preset, task_config(preset, {}, preset.name), {}, about.state, about.task)]
    own = [task for manifest in manifests for task in manifest.tasks if task.preset == preset.name and task.runs]
    for name in sorted({task.name for task in own if task.settings}):
        rows.append(_variant(preset, [task for task in own if task.name == name]))
    _place(published.figures, preset, rows)
    return rows


def _variant(preset: Preset, candidates: Sequence[TaskResult]) -> Row:
    """The row of a preset with changed settings."""
    settings = candidates[0].settings
    config = task_config(preset, settings, candidates[0].name)
    current = config_hash(config)
    task = pick(candidates, current)
    assert task is not None
    return Row(preset, config, settings, state_of(task, current), task)


def _place(figures: Sequence[Figure], preset: Preset, rows: Sequence[Row]) -> None:
    """Assign each figure to the row with its environment and steps; else with its steps; else to the first row."""
    comparable = [row for row in rows if {key for key, _ in flat_settings(row.settings)} <= SAME_TASK]
    for figure in figures:
        if figure.preset == preset.name:
            near = [row for row in comparable if row.config.total_timesteps == figure.steps]
            same = [row for row in near if row.config.env_id == figure.env_id]
            next(iter([*same, *near, rows[0]])).figures.append(figure)
