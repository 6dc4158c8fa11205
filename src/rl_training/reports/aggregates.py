"""Aggregate results of a suite: normalised scores per algorithm, and probabilities of improvement."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rl_training.algorithms.registry import registry
from rl_training.reports.curves import Curve, Panel
from rl_training.reports.records import EVALUATION
from rl_training.reports.statistics import Estimate, aggregate, probability_of_improvement, sample_efficiency
from rl_training.zoo.manifest import RunResult, TaskResult
from rl_training.zoo.suites import Judged, flat_settings, plain_text

PLACE = {"env_id", "env_kwargs", "total_timesteps", "total_updates", "dataset"}
"""Settings that define the task and its length; a change in any other defines a different competitor."""
GRID = 21
"""Number of points at which curves are estimated."""
NORMALIZED = "normalised return, IQM"

Run = list[tuple[float, float]]
"""(step, return) of one run."""


class Kind(NamedTuple):
    """What has to agree before two results may be ranked: the environment, the budget and the protocol."""

    place: str
    """The environment, its version, arguments and wrappers."""
    steps: int
    judge: Judged
    episodes: int
    deterministic: bool
    epsilon: float
    candidates: int | None
    """Of the best policy: among how many it was chosen."""


@dataclass
class Competitor:
    """An algorithm, possibly with changed settings, and its results of each kind."""

    label: str
    algo: str
    is_plain: bool
    tasks: dict[Kind, TaskResult] = field(default_factory=dict)

    def scores(self, kind: Kind) -> list[float]:
        """Normalised scores of its seeds."""
        task = self.tasks[kind]
        return [task.normalization.score(score) for score in task.scores(kind.judge)]

    def overall(self, kinds: Sequence[Kind]) -> Estimate:
        """Interquartile mean of the normalised scores of some kinds."""
        return aggregate([self.scores(kind) for kind in kinds])

    def num_runs(self, kinds: Sequence[Kind]) -> int:
        """The number of runs of some kinds."""
        return sum(len(self.scores(kind)) for kind in kinds)

    def against(self, other: Competitor) -> Estimate | None:
        """The probability of improvement over another competitor, of the kinds that both were measured in."""
        shared = shared_kinds([self, other])
        if not shared:
            return None
        return probability_of_improvement(
            [self.scores(kind) for kind in shared], [other.scores(kind) for kind in shared]
        )


def competitors(tasks: Iterable[TaskResult], judge: Judged | None = None) -> list[Competitor]:
    """Tasks by algorithm, each kind for itself. `judge` scores one policy of all; by default each task's own."""
    found: dict[str, Competitor] = {}
    for task in tasks:
        spec = registry().get(task.algo)
        own = [f"{key}={plain_text(value)}" for key, value in flat_settings(task.settings) if key not in PLACE]
        label = " ".join([spec.title if spec else task.algo, *own])
        competitor = found.setdefault(label, Competitor(label, task.algo, not own))
        if task.scores(judge):
            competitor.tasks.setdefault(kind_of(task, judge), task)
    return [found[label] for label in sorted(found) if found[label].tasks]


def kind_of(task: TaskResult, judge: Judged | None = None) -> Kind:
    """What a result is comparable with."""
    judged = judge or task.judge
    candidates = task.points if judged == "best" else None
    protocol = (task.final_episodes, task.deterministic, task.epsilon, candidates)
    return Kind(place_of(task), task.total_timesteps, judged, *protocol)


def shared_kinds(found: Sequence[Competitor]) -> list[Kind]:
    """The kinds that all competitors were measured in; of several versions of an environment only the newest."""
    shared = [kind for kind in found[0].tasks if all(kind in other.tasks for other in found)] if found else []
    newest: dict[tuple[str, ...], Kind] = {}
    for kind in sorted(shared, key=lambda kind: _version(kind.place)):
        newest[(_VERSION.sub("", kind.place), *map(str, kind[1:]))] = kind
    return list(newest.values())


_VERSION = re.compile(r"-v(\d+)")


def _version(place: str) -> int:
    found = _VERSION.search(place)
    return int(found[1]) if found else 0


def place_of(task: TaskResult) -> str:
    """The environment of a task with its arguments and wrappers, and the recorded data."""
    data = "" if task.dataset is None else f" {task.dataset.partition('.')[0]}"
    return place_name(task.env_id, task.env_kwargs, task.wrappers) + data


def place_name(env_id: str, env_kwargs: Mapping[str, Any], wrappers: Sequence[Any]) -> str:
    """An environment with its arguments and wrappers."""
    kwargs = [f"{key}={plain_text(value)}" for key, value in env_kwargs.items() if key != "render_mode"]
    names = [str(wrapper.get("name")) for wrapper in wrappers if isinstance(wrapper, Mapping)]
    return " ".join([env_id, *kwargs, *names])


def has_curves(tasks: Sequence[TaskResult]) -> bool:
    """Whether there are any curves to draw."""
    return any(curves_of(task)[0] for task in tasks)


def learning_panels(tasks: Sequence[TaskResult]) -> list[Panel]:
    """One panel per environment, with a curve for each algorithm, changed settings and number of steps."""
    panels = []
    for place in sorted({place_of(task) for task in tasks}):
        here = [(label, *curves_of(task)) for label, task in _labelled(tasks, place)]
        curves = tuple(_curve(label, [runs], evaluated) for label, runs, evaluated in here if runs)
        panels.append(Panel(place, EVALUATION, curves))
    return [panel for panel in panels if panel.curves]


def _labelled(tasks: Sequence[TaskResult], place: str) -> list[tuple[str, TaskResult]]:
    """The tasks of an environment; the number of steps is part of the label if an algorithm has several."""
    here = [(entry.label, task) for entry in competitors(tasks) for task in entry.tasks.values()]
    here = [(label, task) for label, task in here if place_of(task) == place]
    labels = [label for label, _ in here]
    return [
        (f"{label}, {task.total_timesteps:,} steps" if labels.count(label) > 1 else label, task) for label, task in here
    ]


def overall_panel(found: Sequence[Competitor]) -> Panel:
    """The normalised scores over the fraction of training, of the kinds that all competitors were measured in."""
    curves = []
    kinds = shared_kinds(found)
    for entry in found:
        tasks, all_evaluated = [], True
        for task in (entry.tasks[kind] for kind in kinds):
            runs, evaluated = curves_of(task)
            score, total = task.normalization.score, task.budget
            if runs:
                tasks.append([[(step / total, score(value)) for step, value in run] for run in runs])
                all_evaluated &= evaluated
        if tasks:
            curves.append(_curve(entry.label, tasks, all_evaluated))
    return Panel("All environments", NORMALIZED, tuple(curves), in_steps=False)


def _curve(label: str, tasks: Sequence[Sequence[Run]], evaluated: bool) -> Curve:
    """The interquartile mean over runs, on the interval that all of them cover."""
    runs = [run for runs in tasks for run in runs]
    points = np.linspace(max(run[0][0] for run in runs), min(run[-1][0] for run in runs), GRID)
    counts = np.full(GRID, len(runs))
    return Curve(label, points, *sample_efficiency(tasks, points), counts, len(runs), evaluated=evaluated)


def curves_of(task: TaskResult) -> tuple[list[Run], bool]:
    """The curves of a task's runs: from evaluations if all runs have them, otherwise from training episodes."""
    evaluated = all(run.evaluations for run in task.runs)
    runs = [_evaluations(run) if evaluated else _training_returns(run) for run in task.runs]
    return [run for run in runs if len(run) > 1], evaluated


def steps_to(task: TaskResult, score: float) -> list[float | None]:
    """For each run, the steps after which its curve first has a normalised score; None if it never has."""
    target = task.normalization.low + score * (task.normalization.high - task.normalization.low)
    runs, _ = curves_of(task)
    return [next((step for step, value in run if value >= target), None) for run in runs]


def _evaluations(run: RunResult) -> Run:
    start = [(0.0, run.untrained.mean)] if run.untrained is not None else []
    return [*start, *((float(step), mean) for step, mean, _ in run.evaluations or [])]


def _training_returns(run: RunResult) -> Run:
    return [(float(step), mean) for step, mean in run.training_returns or [] if mean is not None]
