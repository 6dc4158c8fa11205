"""The report page of a directory of runs, for `rl-training report`: a benchmark or any other runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_training.contracts.errors import ConfigError
from rl_training.reports.benchmark_parts import benchmark_parts
from rl_training.reports.curves import Curve, Panel, label_runs, make_panels
from rl_training.reports.page import Content, Html, Page, element, fold, section, table
from rl_training.reports.plotting import caption, panel_charts
from rl_training.reports.records import RunRecord, find_run_dirs, name_of, read_runs, shown
from rl_training.reports.run_report import (
    MACHINE,
    chip_list,
    differences,
    duration,
    last_value,
    machine_facts,
    training_seconds,
    video_row,
    warning_box,
)
from rl_training.reports.statistics import CONFIDENCE, interval
from rl_training.reports.videos import Video, videos_of_suite
from rl_training.zoo.manifest import Manifest, manifest_of


def suite_report(path: Path, *, video: bool, trust: bool) -> tuple[Page, list[str]]:
    """The report page of a directory of runs, and messages about what could not be read or recorded."""
    paths, _ = find_run_dirs([path])
    runs, problems = read_runs(paths)
    if not runs:
        raise ConfigError(["no run could be read", *problems])
    try:
        panels, left_out = make_panels(runs)
    except ConfigError as error:
        panels, left_out = [], error.problems[:1]
    labels = label_runs(runs)
    videos, said = videos_of_suite(runs, labels, record=video, trust=trust)
    manifest, unread = manifest_of(path)
    problems = [*problems, *left_out, *said, *unread]
    name = name_of(path) if manifest is None else manifest.suite
    return suite_page(name, runs, labels, panels, videos, manifest, problems), problems


def suite_page(
    name: str,
    runs: Sequence[RunRecord],
    labels: Sequence[str],
    panels: Sequence[Panel],
    videos: Sequence[Video],
    manifest: Manifest | None,
    problems: Sequence[str],
) -> Page:
    """The report page of many runs."""
    page = Page(name)
    counts = {
        "runs": len(runs),
        "finished": sum(run.status == "finished" for run in runs),
        "environments": len({run.environment for run in runs}),
        "algorithms": len({run.algo for run in runs}),
    }
    chips = [f"{number} {text if number != 1 else text.removesuffix('s')}" for text, number in counts.items()]
    page.add(element("header", element("h1", name), chip_list(chips), warning_box(problems)))
    if manifest is not None:
        page.add(section("Results", *benchmark_parts(page, manifest)))
    elif panels:
        page.add(section("Results", element("p", _RESULTS_NOTE, class_="soft"), _results(panels)))
    if panels:
        page.add(section("Learning curves", element("p", caption(), class_="soft"), panel_charts(page, panels)))
    page.add(section("Videos", video_row(videos)))
    page.add(section("Runs", _overview(runs, labels)))
    page.add(section("Settings", *_group_settings(runs, labels)))
    page.add(section("Machines and versions", *_machines(runs)))
    return page


_RESULTS_NOTE = (
    "Evaluations at the end of training (the newest ones if no seed has finished): mean over seeds, its "
    f"{CONFIDENCE:.0%} bootstrap interval, and the worst and the best seed. A single seed has no interval. "
    "The last column is the mean over seeds of the best evaluation during training: the largest of several, so it "
    "is too optimistic."
)


def _results(panels: Sequence[Panel]) -> Html:
    head = ["environment", "algorithm", "seeds", "mean return", "interval", "worst seed", "best seed"]
    head.append("best evaluation")
    rows = [_result_row(panel.title, curve) for panel in panels for curve in panel.curves]
    return table(head, rows, numeric=range(2, len(head)))


def _result_row(environment: str, curve: Curve) -> list[Content]:
    newest = [last for run in curve.runs if (last := run.last_evaluation)]
    if not newest:
        return [environment, curve.label, len(curve.runs), "not evaluated", "-", "-", "-", "-"]
    # do not mix runs stopped half way with final results
    finals = [entry["mean"] for entry in [entry for entry in newest if entry.get("final")] or newest]
    mean, low, high = map(float, interval([np.array(finals, float)]))
    band = "-" if len(finals) < 2 else f"{low:,.1f} to {high:,.1f}"
    extremes = [f"{min(finals):,.1f}", f"{max(finals):,.1f}"]
    seeds = str(len(finals)) + (f" of {len(curve.runs)}" if len(finals) < len(curve.runs) else "")
    best = [run.best_return for run in curve.runs if run.best_return is not None]
    return [environment, curve.label, seeds, f"{mean:,.1f}", band, *extremes, f"{np.mean(best):,.1f}"]


def _overview(runs: Sequence[RunRecord], labels: Sequence[str]) -> Html:
    head = [
        "run",
        "environment",
        "algorithm",
        "seed",
        "status",
        "resume grade",
        "steps",
        "return",
        "best",
        "time",
        "steps/s",
    ]
    rows: list[list[Content]] = []
    for run, label in zip(runs, labels, strict=True):
        last, seconds, speed = run.last_evaluation, training_seconds(run), last_value(run, "time/env_steps_per_second")
        facts_of_run = [run.name, run.environment, label, shown(run.seed), run.status]
        numbers_of_run = [
            f"{run.env_steps:,}",
            f"{last['mean']:,.1f}" if last else "-",
            f"{run.best_return:,.1f}" if run.best_return is not None else "-",
            duration(seconds) if seconds is not None else "-",
            f"{speed:,.0f}" if speed is not None else "-",
        ]
        rows.append([*facts_of_run, shown(run.metadata.get("resume_grade")), *numbers_of_run])
    return table(head, rows, numeric=(3, *range(6, len(head))))


def _group_settings(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Html]:
    """Per algorithm and environment, the settings that differ from the defaults (of the first run)."""
    first: dict[tuple[str, str], RunRecord] = {}
    for run, label in zip(runs, labels, strict=True):
        first.setdefault((run.environment, label), run)
    parts = []
    for (environment, label), run in first.items():
        found = differences(run.config) or {}
        rows = [
            [element("code", name), shown(value), shown(default)]
            for name, (value, default) in found.items()
            if name not in ("seed", "output_dir")
        ]
        parts.append(fold(f"{label} on {environment}", table(["setting", "value", "default"], rows)))
    return parts


def _machines(runs: Sequence[RunRecord]) -> list[Html]:
    """Each machine with its versions, without duplicates."""
    found: dict[str, RunRecord] = {}
    for run in runs:
        found.setdefault(shown({key: run.metadata.get(key) for key in MACHINE}), run)
    if len(found) == 1:
        return [machine_facts(runs[0], MACHINE)]
    return [fold(f"{run.name} and similar runs", machine_facts(run, MACHINE)) for run in found.values()]
