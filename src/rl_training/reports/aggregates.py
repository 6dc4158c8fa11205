"""A suite's results as a whole: normalised scores of each algorithm, and which is likely to do better than which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_training.algorithms.registry import registry
from rl_training.reports.figures import LearningCurves, Line, Panel, Run, shares
from rl_training.reports.statistics import Estimate, aggregate, probability_of_improvement
from rl_training.zoo.manifest import Manifest, RunResult, TaskResult
from rl_training.zoo.suites import flat_settings, plain_text

PLACE = {"env_id", "env_kwargs", "total_timesteps"}
"""Settings that say where and how long an algorithm is trained; others make another algorithm of it."""


@dataclass
class Competitor:
    """An algorithm, perhaps with settings that make another of it, and its task on each environment."""

    label: str
    algo: str
    is_plain: bool
    tasks: dict[str, TaskResult] = field(default_factory=dict)

    def scores(self, place: str) -> list[float]:
        """Normalised scores of its seeds on an environment."""
        task = self.tasks[place]
        return [task.normalization.score(score) for score in task.scores()]

    def overall(self) -> Estimate:
        """Interquartile mean of the normalised scores over all environments."""
        return aggregate([self.scores(place) for place in self.tasks])

    @property
    def num_runs(self) -> int:
        """Runs behind it."""
        return sum(len(task.scores()) for task in self.tasks.values())

    def against(self, other: Competitor) -> Estimate | None:
        """The probability that it does better than another one, on the environments that both were trained on."""
        shared = [place for place in self.tasks if place in other.tasks]
        if not shared:
            return None
        return probability_of_improvement(
            [self.scores(place) for place in shared], [other.scores(place) for place in shared]
        )


def competitors(manifest: Manifest) -> list[Competitor]:
    """The algorithms of a suite. Of several tasks on one environment the first counts."""
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
    """The environment with its arguments and wrappers."""
    kwargs = [f"{key}={plain_text(value)}" for key, value in task.env_kwargs.items() if key != "render_mode"]
    wrappers = [str(wrapper.get("name")) for wrapper in task.wrappers if isinstance(wrapper, Mapping)]
    return " ".join([task.env_id, *kwargs, *wrappers])


def learning_curves(manifest: Manifest) -> LearningCurves:
    """The sample-efficiency curves of a suite: one diagram for each environment, and one over all of them."""
    plain = [competitor for competitor in competitors(manifest) if competitor.is_plain]
    colors = {name: index for index, name in enumerate(sorted(competitor.algo for competitor in plain))}
    places = sorted({place for competitor in plain for place in competitor.tasks})
    panels = [Panel(place, _lines(plain, place, colors)) for place in places]
    overall = [overall_line(competitor, colors[competitor.algo]) for competitor in plain]
    panels.append(Panel("all of them, normalised", [line for line in overall if line.tasks], in_steps=False))
    return LearningCurves([panel for panel in panels if panel.lines])


def _lines(plain: list[Competitor], place: str, colors: Mapping[str, int]) -> list[Line]:
    lines = []
    for competitor in plain:
        if place in competitor.tasks:
            runs, evaluated = curves_of(competitor.tasks[place])
            if runs:
                lines.append(Line(competitor.label, colors[competitor.algo], [runs], dashed=not evaluated))
    return lines


def overall_line(competitor: Competitor, color: int) -> Line:
    """The normalised scores of all runs on all environments, over the share of the training."""
    tasks, all_evaluated = [], True
    for task in competitor.tasks.values():
        runs, evaluated = curves_of(task)
        score = task.normalization.score
        if runs:
            tasks.append([shares([(x, score(y)) for x, y in run], task.total_timesteps) for run in runs])
            all_evaluated &= evaluated
    return Line(competitor.label, color, tasks, dashed=not all_evaluated)


def curves_of(task: TaskResult) -> tuple[list[Run], bool]:
    """The curves of a task's runs, from evaluations where all have them, else from training episodes."""
    evaluated = all(run.evaluations for run in task.runs)
    runs = [_evaluations(run) if evaluated else _training_returns(run) for run in task.runs]
    return [run for run in runs if len(run) > 1], evaluated


def _evaluations(run: RunResult) -> Run:
    start = [(0.0, run.untrained.mean)] if run.untrained is not None else []
    return [*start, *((float(step), mean) for step, mean, _ in run.evaluations or [])]


def _training_returns(run: RunResult) -> Run:
    return [(float(step), mean) for step, mean in run.training_returns or [] if mean is not None]
