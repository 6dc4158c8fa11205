"""Aggregate results of a suite: normalised scores per algorithm, and probabilities of improvement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_training.algorithms.registry import registry
from rl_training.reports.curves import Curve, Panel
from rl_training.reports.records import EVALUATION
from rl_training.reports.statistics import Estimate, aggregate, probability_of_improvement, sample_efficiency
from rl_training.zoo.manifest import Manifest, RunResult, TaskResult
from rl_training.zoo.suites import flat_settings, plain_text

PLACE = {"env_id", "env_kwargs", "total_timesteps", "total_updates", "dataset"}
"""Settings that define the task and its length; a change in any other defines a different competitor."""
GRID = 21
"""Number of points at which curves are estimated."""
NORMALIZED = "normalised return, IQM"

Run = list[tuple[float, float]]
"""(step, return) of one run."""


@dataclass
class Competitor:
    """An algorithm, possibly with changed settings, and its task in each environment."""

    label: str
    algo: str
    is_plain: bool
    tasks: dict[str, TaskResult] = field(default_factory=dict)

    def scores(self, place: str) -> list[float]:
        """Normalised scores of its seeds in an environment."""
        task = self.tasks[place]
        return [task.normalization.score(score) for score in task.scores()]

    def overall(self) -> Estimate:
        """Interquartile mean of the normalised scores over all environments."""
        return aggregate([self.scores(place) for place in self.tasks])

    @property
    def num_runs(self) -> int:
        """The number of runs."""
        return sum(len(task.scores()) for task in self.tasks.values())

    def against(self, other: Competitor) -> Estimate | None:
        """The probability of improvement over another competitor, in the environments that both were trained in."""
        shared = [place for place in self.tasks if place in other.tasks]
        if not shared:
            return None
        return probability_of_improvement(
            [self.scores(place) for place in shared], [other.scores(place) for place in shared]
        )


def competitors(manifest: Manifest) -> list[Competitor]:
    """The competitors of a suite. Of several tasks in one environment, the first counts."""
    found: dict[str, Competitor] = {}
    for task in manifest.tasks:
        spec = registry().get(task.algo)
        own = [f"{key}={plain_text(value)}" for key, value in flat_settings(task.settings) if key not in PLACE]
        label = " ".join([spec.title if spec else task.algo, *own])
        competitor = found.setdefault(label, Competitor(label, task.algo, not own))
        if task.scores():
            competitor.tasks.setdefault(place_of(task), task)
    return [found[label] for label in sorted(found) if found[label].tasks]


def place_of(task: TaskResult) -> str:
    """The environment with its arguments and wrappers, and the recorded data."""
    kwargs = [f"{key}={plain_text(value)}" for key, value in task.env_kwargs.items() if key != "render_mode"]
    wrappers = [str(wrapper.get("name")) for wrapper in task.wrappers if isinstance(wrapper, Mapping)]
    data = [] if task.dataset is None else [task.dataset.partition(".")[0]]
    return " ".join([task.env_id, *kwargs, *wrappers, *data])


def has_curves(manifest: Manifest) -> bool:
    """Whether there are any curves to draw."""
    return any(curves_of(task)[0] for entry in competitors(manifest) if entry.is_plain for task in entry.tasks.values())


def learning_panels(manifest: Manifest) -> list[Panel]:
    """The sample-efficiency curves of a suite: one panel per environment, and one aggregated over all."""
    plain = [entry for entry in competitors(manifest) if entry.is_plain]
    panels = []
    for place in sorted({place for entry in plain for place in entry.tasks}):
        found = [(entry.label, *curves_of(entry.tasks[place])) for entry in plain if place in entry.tasks]
        curves = tuple(_curve(label, [runs], evaluated) for label, runs, evaluated in found if runs)
        panels.append(Panel(place, EVALUATION, curves))
    panels.append(overall_panel(plain))
    return [panel for panel in panels if panel.curves]


def overall_panel(found: Sequence[Competitor]) -> Panel:
    """The normalised scores of all runs in all environments, over the fraction of training."""
    curves = []
    for entry in found:
        tasks, all_evaluated = [], True
        for task in entry.tasks.values():
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


def _evaluations(run: RunResult) -> Run:
    start = [(0.0, run.untrained.mean)] if run.untrained is not None else []
    return [*start, *((float(step), mean) for step, mean, _ in run.evaluations or [])]


def _training_returns(run: RunResult) -> Run:
    return [(float(step), mean) for step, mean in run.training_returns or [] if mean is not None]
