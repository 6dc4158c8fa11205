"""Comparison of results with published ones: which figure belongs to which result, and whether it was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.presets import Preset
from rl_training.experiment.schema import INVALID, build
from rl_training.experiment.yaml_io import read_yaml
from rl_training.reports.statistics import Estimate, aggregate
from rl_training.zoo.manifest import Manifest, TaskResult, config_hash, pick
from rl_training.zoo.suites import Judged, flat_settings, plain_text, task_config

Verdict = Literal["reached", "within its spread", "below"]
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
    std: float = setting(help="Its spread, over what the source's protocol says.", ge=0)
    seeds: int = setting(help="Runs behind it.", ge=1)
    steps: int = setting(help="Environment steps of training.", ge=1)

    def verdict(self, score: float) -> Verdict:
        """How a score compares with the figure."""
        if score >= self.mean:
            return "reached"
        return "within its spread" if score >= self.mean - self.std else "below"


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
    """One row of the results: a preset, possibly with changed settings, and the scores of one of its policies."""

    preset: Preset
    config: TrainConfig
    settings: Mapping[str, Any]
    judge: Judged = "final"
    task: TaskResult | None = None
    figures: list[Figure] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        """The mean return of each seed."""
        return [] if self.task is None else self.task.scores(self.judge)

    @property
    def estimate(self) -> Estimate:
        """Interquartile mean over seeds, with its interval."""
        return aggregate([self.scores])

    @property
    def is_current(self) -> bool:
        """Whether it was measured with the preset's current settings."""
        return self.task is None or self.task.config_hash == config_hash(self.config)

    @property
    def name(self) -> str:
        """The display name; environment and steps are in separate columns."""
        shown = [f"`{key}={plain_text(value)}`" for key, value in flat_settings(self.settings) if key not in SAME_TASK]
        return " ".join([f"`{self.preset.name}`", *shown, *self.marks])

    @property
    def marks(self) -> list[str]:
        """Notes on an evaluation that differs from the usual one."""
        marks = ["*best*"] if self.judge == "best" else []
        if self.task is not None and not self.task.deterministic:
            marks.append("*sampled actions*")
        if self.task is not None and self.task.epsilon:
            marks.append(f"*ε = {self.task.epsilon:g}*")
        return marks

    def below(self) -> list[Figure]:
        """The figures that the result does not reach."""
        return [figure for figure in self.figures if self.scores and self.verdict(figure) == "below"]

    def verdict(self, figure: Figure) -> Verdict:
        """How this result compares with a figure."""
        return figure.verdict(self.estimate.value)


def rows_of(preset: Preset, manifests: Sequence[Manifest], published: Published) -> list[Row]:
    """The rows of a preset, unchanged and with changed settings, each with the figures it is compared with."""
    own = [task for manifest in manifests for task in manifest.tasks if task.preset == preset.name]
    names = sorted({task.name for task in own} - {preset.name})
    rows = _rows(preset, [task for task in own if task.name == preset.name])
    for name in names:
        rows += _rows(preset, [task for task in own if task.name == name])
    if not any(row.settings == {} and row.judge == "final" for row in rows):
        rows.insert(0, Row(preset, task_config(preset, {}, preset.name), {}))
    _place(published.figures, preset, rows)
    return rows


def _rows(preset: Preset, candidates: Sequence[TaskResult]) -> list[Row]:
    """The rows of one task: its final policy, and its best checkpoint if the task counts that one."""
    if not candidates:
        return []
    settings = candidates[0].settings
    config = task_config(preset, settings, candidates[0].name)
    task = pick(candidates, config_hash(config))
    assert task is not None
    judges: list[Judged] = ["final"] if task.judge == "final" else ["final", "best"]
    return [Row(preset, config, settings, judge, task) for judge in judges if task.scores(judge)]


def _place(figures: Sequence[Figure], preset: Preset, rows: Sequence[Row]) -> None:
    """Assign each figure to the row with its environment and steps; else with its steps; else to the first row."""
    comparable = [row for row in rows if {key for key, _ in flat_settings(row.settings)} <= SAME_TASK]
    comparable.sort(key=lambda row: not row.scores)  # rows with results first, otherwise in the same order
    for figure in figures:
        if figure.preset == preset.name:
            near = [row for row in comparable if row.config.total_timesteps == figure.steps]
            same = [row for row in near if row.config.env_id == figure.env_id]
            next(iter([*same, *near, rows[0]])).figures.append(figure)
