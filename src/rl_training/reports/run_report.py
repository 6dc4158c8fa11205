"""The report page of one run, for `rl-training report`."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.contracts.errors import CheckpointError, RLTrainingError
from rl_training.deploy.profiling import PROFILE
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.files import read_mapping, read_text, refuse_links
from rl_training.experiment.runs import COMMAND
from rl_training.experiment.yaml_io import dump_yaml
from rl_training.reports.page import (
    COLORS,
    Content,
    Html,
    Page,
    element,
    facts,
    fold,
    join,
    section,
    table,
    video_element,
)
from rl_training.reports.plotting import STEPS, plain_numbers, series_trace
from rl_training.reports.records import EVALUATION, ROLLOUT, RunRecord, Series, leaves, numbers, read_run, shown
from rl_training.reports.videos import Video, video_of_run

MACHINE = ("git_commit", "hardware", "versions")
"""Metadata entries about the machine and versions."""
FIRST_EVALUATIONS = 12
"""Number of evaluations shown before the rest is collapsed."""

GROUPS = {
    "loss": "Losses",
    "policy": "Policy",
    "value": "Values",
    "train": "Training",
    "rollout": "Training episodes",
    "eval": "Evaluations",
    "time": "Time",
}
"""Metric groups in display order; others follow."""


def run_report(path: Path, *, video: bool, trust: bool) -> tuple[Page, list[str]]:
    """The report page of a run, and messages about what could not be read or recorded.

    With `video`, an episode is recorded if the run has no video yet; `trust` allows its config to import a module.
    """
    run = read_run(path)
    found, said = video_of_run(run, record=video, trust=trust)
    return run_page(run, found, said), [*run.problems, *said]


def run_page(run: RunRecord, shot: Video | None, said: Sequence[str] = ()) -> Page:
    """The report page of one run."""
    title = f"{run.title} on {run.environment}"
    page = Page(f"{title}, seed {run.seed}")
    grade = run.metadata.get("resume_grade")
    chips = [f"seed {run.seed}", run.status, f"resume grade: {shown(grade)}" if grade is not None else None, run.name]
    page.add(element("header", element("h1", title), chip_list(chips), _notes(run, said), _tiles(run)))
    page.add(section("Videos", video_row([shot] if shot else [], said)))
    page.add(section("Learning curves", _return_chart(page, run), *_metric_groups(page, run)))
    page.add(section("Evaluations", _evaluations(run)))
    page.add(section("Time per part", _time_split(run), _profile(run)))
    page.add(section("Settings", *_settings(run)))
    page.add(section("Starts and resumes", *_history(run)))
    page.add(section("Machine and versions", machine_facts(run)))
    return page


def chip_list(texts: Sequence[str | None]) -> Html:
    """Short texts in a row."""
    return element("ul", *(element("li", text) for text in texts if text), class_="chips")


def _notes(run: RunRecord, said: Sequence[str]) -> Html | None:
    texts = [f"This run {run.note}." if run.note else None, *run.problems, *said]
    error = run.metadata.get("error")
    return warning_box([*texts, f"It ended with: {shown(error)}" if error and run.status == "failed" else None])


def warning_box(texts: Sequence[str | None]) -> Html | None:
    """A box with warnings; None if there are none."""
    lines = [element("p", text) for text in texts if text]
    return element("div", *lines, class_="warn", role="note") if lines else None


def _tiles(run: RunRecord) -> Html:
    last, seconds, speed = run.last_evaluation, training_seconds(run), last_value(run, "time/env_steps_per_second")
    total = f" of {run.total_timesteps:,}" if run.total_timesteps else ""
    when = "final evaluation" if last and last.get("final") else "newest evaluation"
    episodes = len(numbers(last.get("returns"))) if last else 0
    entries = {
        f"{when}, {episodes} episodes": f"{last['mean']:,.1f} ± {_number(last.get('std'), '.1f')}" if last else None,
        "best evaluation": None if run.best_return is None else f"{run.best_return:,.1f}",
        **_normalized(run, when),
        f"steps{total}": f"{run.env_steps:,}",
        "of training": None if seconds is None else duration(seconds),
        "steps per second": None if speed is None else f"{speed:,.0f}",
    }
    tiles = [
        element("div", element("b", text), element("span", name), class_="tile")
        for name, text in entries.items()
        if text is not None
    ]
    return element("div", *tiles, class_="tiles")


def _normalized(run: RunRecord, when: str) -> dict[str, str]:
    """Normalised scores of the last and of the best evaluation, if the environment has a scale."""
    if run.reference is None or run.last_evaluation is None or run.best_return is None:
        return {}
    last, best = run.reference.score(run.last_evaluation["mean"]), run.reference.score(run.best_return)
    return {f"normalised score, {when}": f"{last:,.1f}", "normalised score, best evaluation": f"{best:,.1f}"}


def video_row(videos: Sequence[Video], said: Sequence[str] = ()) -> Html:
    """The videos side by side, or how to record one."""
    if not videos:
        how = "record one with `rl-training report PATH --video` (extra: pip install '.[video]')"
        return element("p", f"There is no video; {how}." if not said else "There is no video.", class_="soft")
    kind = "videos single" if len(videos) == 1 else "videos"
    return element("div", *(video_element(shot.data, shot.caption) for shot in videos), class_=kind)


def _return_chart(page: Page, run: RunRecord) -> Html:
    """Chart of training and evaluation returns, with each evaluation episode as a dot."""
    traces: list[dict[str, Any]] = []
    if ROLLOUT in run.series:
        traces.append(series_trace(run.series[ROLLOUT], "training episodes (mean of the last 100)", COLORS[0]))
    episodes = [(entry["step"], value) for entry in run.evaluations for value in numbers(entry.get("returns"))]
    if episodes:
        dots = {"type": "scatter", "mode": "markers", "name": "evaluation episodes", "hoverinfo": "skip"}
        marker = {"color": COLORS[1], "size": 5, "opacity": 0.35}
        where = np.array(episodes, float)
        traces.append({**dots, "marker": marker, "x": plain_numbers(where[:, 0]), "y": plain_numbers(where[:, 1])})
    if EVALUATION in run.series:
        line = {"mode": "lines+markers", "line": {"color": COLORS[1], "width": 2.2}}
        traces.append(series_trace(run.series[EVALUATION], "evaluations (mean)", COLORS[1], **line))
    if not traces:
        return element("p", "Nothing has been logged yet.", class_="soft")
    return page.chart("Return", traces, height=400, showlegend=True, xaxis=STEPS)


def _metric_groups(page: Page, run: RunRecord) -> list[Html]:
    """Small charts of all other metrics, by group."""
    names = sorted(set(run.series) - {ROLLOUT, EVALUATION, "time/unix"})
    found = {name.partition("/")[0] for name in names}
    parts = []
    for group in [*(key for key in GROUPS if key in found), *sorted(found - set(GROUPS))]:
        own = [name for name in names if name.partition("/")[0] == group]
        charts = [
            page.chart(
                name,
                [series_trace(run.series[name], name, COLORS[2])],
                height=190,
                small=True,
                yaxis=_room(run.series[name]),
            )
            for name in own
        ]
        parts.append(
            fold(
                f"{GROUPS.get(group, group)} ({len(own)})",
                element("div", *charts, class_="grid"),
                open_=group in ("loss", "policy"),
            )
        )
    return parts


def _room(series: Series) -> dict[str, Any]:
    """An axis range for a constant value: by default, plotly shows a constant learning rate between -1 and 1."""
    value = float(series.values[0])
    if value == 0 or np.ptp(series.values) > 0:
        return {}
    return {"range": [value - abs(value) / 2, value + abs(value) / 2]}


def _evaluations(run: RunRecord) -> Html:
    if not run.evaluations:
        return element("p", "No evaluations yet.", class_="soft")
    head = ["step", "", "episodes", "mean", "deviation", "worst", "best", "mean length", "success rate"]
    rows = [
        _evaluation_row(entry) for entry in sorted(run.evaluations, key=lambda e: (e["step"], bool(e.get("final"))))
    ]
    shown_rows, columns = rows[-FIRST_EVALUATIONS:], range(2, len(head))
    first = table(["step", *head[1:]], shown_rows, numeric=(0, *columns))
    if len(rows) == len(shown_rows):
        return first
    note = element("p", f"The last {len(shown_rows)} of {len(rows)}.", class_="soft")
    return join([note, first, fold(f"All {len(rows)} evaluations", table(head, rows, numeric=(0, *columns)))])


def _evaluation_row(entry: Mapping[str, Any]) -> list[Content]:
    returns, lengths = numbers(entry.get("returns")), numbers(entry.get("lengths"))
    return [
        f"{entry['step']:,}",
        "final" if entry.get("final") else "",
        len(returns) or "-",
        f"{entry['mean']:,.2f}",
        _number(entry.get("std"), ",.2f"),
        f"{min(returns):,.2f}" if returns else "-",
        f"{max(returns):,.2f}" if returns else "-",
        f"{np.mean(lengths):,.1f}" if lengths else "-",
        _number(entry.get("success_rate"), ".2f"),
    ]


def _time_split(run: RunRecord) -> Html:
    """The fractions of wall time as a bar."""
    names = {"environments": "env", "acting": "policy", "learning": "update"}
    shares = {name: last_value(run, f"time/{key}_fraction") for name, key in names.items()}
    known = {name: min(max(value, 0.0), 1.0) for name, value in shares.items() if value is not None}
    if not known:
        return element("p", "No times have been logged yet.", class_="soft")
    known["the rest: evaluations, checkpoints, logs"] = max(0.0, 1.0 - sum(known.values()))
    colors = dict(zip(known, (COLORS[0], COLORS[1], COLORS[2], COLORS[8]), strict=False))
    bar = [element("i", "", style=f"width:{share:.1%};background:{colors[name]}") for name, share in known.items()]
    rows = [
        [join([element("span", "", class_="key", style=f"background:{colors[name]}"), name]), f"{share:.1%}"]
        for name, share in known.items()
    ]
    note = element("p", "Fractions of wall time since the last start of the run.", class_="soft")
    return join([note, element("div", *bar, class_="split"), table([], rows, numeric=(1,))])


def _profile(run: RunRecord) -> Html | None:
    if not os.path.lexists(run.path / PROFILE):
        return None
    try:
        data = read_mapping(run.path / PROFILE)
    except CheckpointError as error:
        return element("p", f"The profile cannot be shown: {error}", class_="soft")
    wall = numbers([data.get("wall_seconds")])
    rows: list[list[Content]] = []
    for part in _list(data.get("parts")):
        own = numbers([part.get("own_seconds")]) if isinstance(part, dict) else []
        if own:
            share = f"{own[0] / wall[0]:.1%}" if wall and wall[0] > 0 else "-"
            rows.append([shown(part.get("name")), f"{own[0]:,.2f}", share, _number(part.get("calls"), ",.0f")])
    return fold("Profile", table(["part", "seconds", "share", "calls"], rows, numeric=(1, 2, 3)))


def _settings(run: RunRecord) -> list[Html]:
    try:
        text = dump_yaml(run.config)
    except Exception:  # PyYAML may raise anything for values of a config that this version does not know
        text = shown(run.config)
    whole = fold("Complete config", element("pre", text))
    found = differences(run.config)
    if found is None:
        return [element("p", "This version does not know the algorithm's defaults.", class_="soft"), whole]
    if not found:
        return [element("p", "All settings have their defaults.", class_="soft"), whole]
    rows = [[element("code", name), shown(value), shown(default)] for name, (value, default) in found.items()]
    return [
        element("p", "Differences from the defaults:", class_="soft"),
        table(["setting", "value", "default"], rows),
        whole,
    ]


def differences(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Settings that differ from the algorithm's defaults, with the default; None if the algorithm is unknown."""
    try:
        whole = TrainConfig(algo=config["algo"], env_id=config["env_id"]).to_dict()
    except (KeyError, RLTrainingError):
        return None
    defaults, own = leaves(whole), leaves(config)
    kept = [name for name in own if name not in ("algo", "env_id") and own[name] != defaults.get(name)]
    return {name: (own[name], defaults.get(name)) for name in kept}


def _history(run: RunRecord) -> list[Html]:
    history = run.metadata.get("history")
    starts = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    rows: list[list[Content]] = []
    for number, entry in enumerate(starts):
        more = ", ".join(f"{key}: {shown(value)}" for key, value in entry.items() if key not in _HISTORY_SHOWN)
        steps = [_number(entry.get(key), ",.0f") for key in ("from_step", "total_timesteps")]
        rows.append(["started" if number == 0 else f"resumed ({number})", shown(entry.get("started")), *steps, more])
    parts = [table(["", "when (UTC)", "from step", "to step", ""], rows, numeric=(2, 3))] if rows else []
    if not rows:
        parts.append(element("p", "The metadata has no history.", class_="soft"))
    reason = run.metadata.get("stop_reason")
    why = f" ({shown(reason)})" if reason and reason != run.status else ""
    parts.append(element("p", f"Status: {run.status}{why}.", class_="soft"))
    commands = _commands(run)
    return [*parts, fold("Commands", element("pre", commands))] if commands else parts


_HISTORY_SHOWN = ("started", "from_step", "total_timesteps")


def _commands(run: RunRecord) -> str:
    path = run.path / COMMAND
    try:
        refuse_links([path], within=run.path)
        return read_text(path, errors="replace")[:20_000]
    except (OSError, CheckpointError):
        return ""


def machine_facts(run: RunRecord, keys: Sequence[str] = ("created", "environment", *MACHINE)) -> Html:
    """Machine, versions and origin of a run."""
    entries: dict[str, Content] = {}
    for key in keys:
        value = run.metadata.get(key)
        if isinstance(value, dict):
            entries.update({str(name): shown(item) for name, item in value.items() if item is not None})
        elif value is not None:
            entries[key.replace("_", " ")] = shown(value)
    return facts(entries) if entries else element("p", "The metadata has no entry.", class_="soft")


def training_seconds(run: RunRecord) -> float | None:
    """Wall time from each start to the last line it logged; excludes steps lost when the run was killed."""
    if "time/unix" not in run.series:
        return None
    logged = np.sort(run.series["time/unix"].values)
    starts = np.array(sorted(filter(None, map(_unix, _list(run.metadata.get("history"))))) or [logged[0]])
    owner = np.searchsorted(starts, logged + 1.0, side="right")  # start times have a resolution of one second
    ends = {int(start): time for start, time in zip(owner, logged, strict=True) if start > 0}
    return float(sum(max(0.0, end - starts[start - 1]) for start, end in ends.items()))


def _unix(entry: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(entry["started"]).timestamp()
    except (TypeError, KeyError, ValueError, OverflowError, OSError):
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def duration(seconds: float) -> str:
    """A duration as readable text."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:,.1f} h"


def last_value(run: RunRecord, metric: str) -> float | None:
    """The newest value of a metric."""
    return float(run.series[metric].values[-1]) if metric in run.series else None


def _number(value: Any, spec: str) -> str:
    found = numbers([value])
    return format(found[0], spec) if found else "-"
