"""Benchmark sections of a report: scores per task, aggregate normalised scores, probabilities of improvement."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rl_training.reports.aggregates import Competitor, Kind, competitors, overall_panel, place_of, shared_kinds
from rl_training.reports.page import Content, Html, Page, element, table
from rl_training.reports.plotting import panel_charts
from rl_training.reports.statistics import CONFIDENCE, Estimate, aggregate
from rl_training.zoo.manifest import Manifest, TaskResult

TASKS_NOTE = (
    "From the manifest: evaluation episodes after training, of the policy that the suite scores (the final or the best "
    f"one). IQM is the interquartile mean over seeds with its {CONFIDENCE:.0%} bootstrap interval; for up to "
    "three seeds it is the mean. Last and best: medians of the final policy and of the best checkpoint, in new "
    "episodes. Normalised scores: 0 is a random policy, 1 the suite's reference for the environment."
)
OVERALL_NOTE = (
    "Normalised scores over the environments in which all algorithms were measured alike: the same version, number of "
    "steps and protocol. The interval is a stratified bootstrap over the runs of each environment."
)
BETTER_NOTE = (
    "Probability that a run of the algorithm in the row is better than one of the algorithm in the column, on the "
    f"environments in which both were measured alike; in bold where the {CONFIDENCE:.0%} interval excludes one half."
)


def benchmark_parts(page: Page, manifest: Manifest) -> list[Html]:
    """Result tables and normalised sample-efficiency curves."""
    found = competitors(manifest.tasks)
    parts = [_soft(TASKS_NOTE), _tasks(manifest)]
    kinds = shared_kinds(found)
    if kinds:
        parts += [element("h3", "Measured alike, together"), _soft(OVERALL_NOTE), _overall(found, kinds)]
    overall = overall_panel(found)
    if overall.curves:
        parts.append(panel_charts(page, [overall]))
    if any(one.against(other) for one in found for other in found if one is not other):
        parts += [element("h3", "Probability of improvement"), _soft(BETTER_NOTE), _better(found)]
    return parts


def _soft(text: str) -> Html:
    return element("p", text, class_="soft")


def _tasks(manifest: Manifest) -> Html:
    head = ["task", "environment", "seeds", "judged", "IQM", "interval", "each seed", "last", "best", "untrained"]
    head.append("normalised")
    rows = [_task_row(task) for task in manifest.tasks if task.scores()]
    return table([*head, "steps/s"], rows, numeric=(2, *range(4, len(head) + 1)))


def _task_row(task: TaskResult) -> list[Content]:
    scores = task.scores()
    found, normalised = aggregate([scores]), aggregate([[task.normalization.score(score) for score in scores]])
    untrained = [run.untrained.mean for run in task.runs if run.untrained is not None]
    return [
        task.name,
        place_of(task),
        len(scores),
        task.judge,
        f"{found.value:,.1f}",
        _interval(found, ",.1f"),
        ", ".join(f"{score:,.1f}" for score in scores),
        *(f"{median(own):,.1f}" if (own := task.scores(judge)) else "-" for judge in ("final", "best")),
        f"{median(untrained):,.1f}" if untrained else "-",
        f"{normalised.value:.2f}",
        f"{median(run.env_steps_per_second for run in task.runs):,.0f}",
    ]


def _overall(found: list[Competitor], kinds: Sequence[Kind]) -> Html:
    scores = sorted(((entry, entry.overall(kinds)) for entry in found), key=lambda pair: -pair[1].value)
    rows: list[list[Content]] = [
        [entry.label, len(kinds), entry.num_runs(kinds), f"{score.value:.2f}", _interval(score, ".2f")]
        for entry, score in scores
    ]
    return table(["algorithm", "environments", "runs", "IQM", "interval"], rows, numeric=range(1, 5))


def _interval(found: Estimate, form: str) -> str:
    if found.low is None or found.high is None:
        return "-"
    return f"{found.low:{form}} to {found.high:{form}}"


def _better(found: list[Competitor]) -> Html:
    rows = [[one.label, *(_probability(one, other) for other in found)] for one in found]
    return table(["better than ...", *(entry.label for entry in found)], rows, numeric=range(1, len(found) + 1))


def _probability(one: Competitor, other: Competitor) -> Content:
    found = None if one is other else one.against(other)
    if found is None:
        return ""
    return element("b", f"{found.value:.2f}") if found.leaves_out(0.5) else f"{found.value:.2f}"
