"""`rl-training report`: one HTML page about a run or a directory of runs, which opens from disk, without a network."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.contracts.errors import CheckpointError, ConfigError, RLTrainingError
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.files import read_mapping, refuse_links, write_text
from rl_training.experiment.runs import COMMAND
from rl_training.experiment.yaml_io import dump_yaml
from rl_training.zoo.curves import (
    EVALUATION,
    ROLLOUT,
    Curve,
    Panel,
    RunRecord,
    Series,
    find_run_dirs,
    is_run_dir,
    label_runs,
    leaves,
    make_panels,
    name_of,
    numbers,
    read_run,
    read_runs,
    require_plot,
    shown,
)
from rl_training.zoo.films import Film, film_of_run, films_of_suite
from rl_training.zoo.page import COLORS, Content, Html, Page, element, facts, film, fold, join, section, table
from rl_training.zoo.plotting import STEPS, caption, panel_charts, plain_numbers, series_trace
from rl_training.zoo.statistics import CONFIDENCE, interval

REPORT, MANIFEST, PROFILE = "report.html", "manifest.json", "profile.json"
FIRST_EVALUATIONS = 12
"""How many evaluations are shown before the rest is folded."""

GROUPS = {
    "loss": "Losses",
    "policy": "Policy",
    "value": "Values",
    "train": "Training",
    "rollout": "Training episodes",
    "eval": "Evaluations",
    "time": "Time",
}
"""Groups of metrics in the order in which they are shown; others follow."""


def write_report(
    path: Path, output: Path | None = None, *, video: bool = False, trust: bool = False
) -> tuple[Path, list[str]]:
    """Write the page of a run or of a directory of runs; return where it is, and what could not be read or filmed.

    With `video`, an episode is filmed for a run (or, in a directory of runs, for an algorithm on an environment) that
    has no film yet. `trust` lets a run's config name a module to import for that.
    """
    require_plot()
    if not os.path.isdir(path):
        problem = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise ConfigError(f"'{path}' {problem}: name a run directory, or a directory of runs")
    place = _place(path, output)
    if is_run_dir(path):
        run = read_run(path)
        found, said = film_of_run(run, record=video, trust=trust)
        page, problems = run_page(run, found, said), [*run.problems, *said]
    else:
        page, problems = _suite(path, video=video, trust=trust)
    write_text(place, page.render())
    return place, problems


def _place(path: Path, output: Path | None) -> Path:
    """Where the page goes; refused before any work is done if it cannot."""
    place = path / REPORT if output is None else output / REPORT if output.is_dir() else output
    if output is None:
        refuse_links([place], within=path)
    if place.suffix != ".html":
        raise ConfigError(f"output: '{place}' should end in .html")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output: '{place}' cannot be written: {error.strerror}") from error
    return place


# ---------------------------------------------------------------------------------------------------------------------
# A run
# ---------------------------------------------------------------------------------------------------------------------


def run_page(run: RunRecord, shot: Film | None, said: Sequence[str] = ()) -> Page:
    """The page about one run."""
    title = f"{run.title} on {run.environment}"
    page = Page(f"{title}, seed {run.seed}")
    grade = run.metadata.get("resume_grade")
    chips = [f"seed {run.seed}", run.status, f"resume grade: {shown(grade)}" if grade is not None else None, run.name]
    page.add(element("header", element("h1", title), _chips(chips), _notes(run, said), _tiles(run)))
    page.add(section("The agent at work", _films([shot] if shot else [], said)))
    page.add(section("Learning curves", _return_chart(page, run), *_metric_groups(page, run)))
    page.add(section("Evaluations", _evaluations(run)))
    page.add(section("Where the time went", _time_split(run), _profile(run)))
    page.add(section("Settings", *_settings(run)))
    page.add(section("Starts and resumes", *_history(run)))
    page.add(section("Machine and versions", _machine(run)))
    return page


def _chips(texts: Sequence[str | None]) -> Html:
    return element("ul", *(element("li", text) for text in texts if text), class_="chips")


def _notes(run: RunRecord, said: Sequence[str]) -> Html | None:
    texts = [f"This run {run.note}." if run.note else None, *run.problems, *said]
    error = run.metadata.get("error")
    return _warning([*texts, f"It ended with: {shown(error)}" if error and run.status == "failed" else None])


def _warning(texts: Sequence[str | None]) -> Html | None:
    lines = [element("p", text) for text in texts if text]
    return element("div", *lines, class_="warn", role="note") if lines else None


def _tiles(run: RunRecord) -> Html:
    last, seconds, speed = run.last_evaluation, training_seconds(run), _last(run, "time/env_steps_per_second")
    total = f" of {run.total_timesteps:,}" if run.total_timesteps else ""
    when = "final evaluation" if last and last.get("final") else "newest evaluation"
    episodes = len(numbers(last.get("returns"))) if last else 0
    entries = {
        f"{when}, {episodes} episodes": f"{last['mean']:,.1f} ± {_number(last.get('std'), '.1f')}" if last else None,
        "best evaluation": None if run.best_return is None else f"{run.best_return:,.1f}",
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


def _films(films: Sequence[Film], said: Sequence[str] = ()) -> Html:
    if not films:
        how = "`rl-training report PATH --video` films an episode (with the extra: pip install 'rl-training[video]')"
        return element(
            "p", f"There is no film of this. {how}." if not said else "There is no film of this.", class_="soft"
        )
    kind = "films single" if len(films) == 1 else "films"
    return element("div", *(film(shot.data, shot.caption) for shot in films), class_=kind)


def _return_chart(page: Page, run: RunRecord) -> Html:
    """Returns of training episodes and of evaluations, each evaluation episode as a dot."""
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
    """Small charts of all other metrics, group by group."""
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
    """A range around a value that never changes: by itself, plotly shows a learning rate between -1 and 1."""
    value = float(series.values[0])
    if value == 0 or np.ptp(series.values) > 0:
        return {}
    return {"range": [value - abs(value) / 2, value + abs(value) / 2]}


def _evaluations(run: RunRecord) -> Html:
    if not run.evaluations:
        return element("p", "There are no evaluations (yet).", class_="soft")
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
    """The shares of wall time as a bar."""
    names = {"environments": "env", "acting": "policy", "learning": "update"}
    shares = {name: _last(run, f"time/{key}_fraction") for name, key in names.items()}
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
    note = element("p", "Shares of the wall time since the newest start of the run.", class_="soft")
    return join([note, element("div", *bar, class_="split"), table([], rows, numeric=(1,))])


def _profile(run: RunRecord) -> Html | None:
    if not os.path.lexists(run.path / PROFILE):
        return None
    try:
        return fold("Profile", data_view(read_mapping(run.path / PROFILE)))
    except CheckpointError as error:
        return element("p", f"The profile cannot be shown: {error}", class_="soft")


def _settings(run: RunRecord) -> list[Html]:
    try:
        text = dump_yaml(run.config)
    except Exception:  # whatever PyYAML raises at an odd value of a config that this version does not understand
        text = shown(run.config)
    whole = fold("The whole config", element("pre", text))
    found = differences(run.config)
    if found is None:
        return [element("p", "This version does not know the algorithm's defaults.", class_="soft"), whole]
    if not found:
        return [element("p", "All settings have their defaults.", class_="soft"), whole]
    rows = [[element("code", name), shown(value), shown(default)] for name, (value, default) in found.items()]
    return [
        element("p", "What differs from the defaults:", class_="soft"),
        table(["setting", "value", "default"], rows),
        whole,
    ]


def differences(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    """Settings that are not the defaults of their algorithm, with the default; None if that is not known here."""
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
        total = entry.get("total_timesteps")
        goal = f"{total:,}" if type(total) is int else shown(total)
        rows.append(["started" if number == 0 else f"resumed ({number})", shown(entry.get("started")), goal, more])
    parts = [table(["", "when (UTC)", "to step", ""], rows, numeric=(2,))] if rows else []
    if not rows:
        parts.append(element("p", "Its metadata has no history.", class_="soft"))
    reason = run.metadata.get("stop_reason")
    why = f" ({shown(reason)})" if reason and reason != run.status else ""
    parts.append(element("p", f"Status: {run.status}{why}.", class_="soft"))
    commands = _commands(run)
    return [*parts, fold("Commands", element("pre", commands))] if commands else parts


_HISTORY_SHOWN = ("started", "total_timesteps")


def _commands(run: RunRecord) -> str:
    path = run.path / COMMAND
    try:
        refuse_links([path], within=run.path)
        return path.read_text(encoding="utf-8", errors="replace")[:20_000] if path.is_file() else ""
    except (OSError, CheckpointError):
        return ""


_MACHINE = ("git_commit", "hardware", "versions")


def _machine(run: RunRecord, keys: Sequence[str] = ("created", "environment", *_MACHINE)) -> Html:
    entries: dict[str, Content] = {}
    for key in keys:
        value = run.metadata.get(key)
        if isinstance(value, dict):
            entries.update({str(name): shown(item) for name, item in value.items() if item is not None})
        elif value is not None:
            entries[key.replace("_", " ")] = shown(value)
    return facts(entries) if entries else element("p", "Its metadata does not say.", class_="soft")


def training_seconds(run: RunRecord) -> float | None:
    """Wall time from each start to the last line that it logged; what a kill undid is not in it."""
    if "time/unix" not in run.series:
        return None
    logged = np.sort(run.series["time/unix"].values)
    starts = np.array(sorted(filter(None, map(_unix, _list(run.metadata.get("history"))))) or [logged[0]])
    owner = np.searchsorted(starts, logged + 1.0, side="right")  # starts are written in whole seconds
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
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:,.1f} h"


def _last(run: RunRecord, metric: str) -> float | None:
    return float(run.series[metric].values[-1]) if metric in run.series else None


def _number(value: Any, spec: str) -> str:
    found = numbers([value])
    return format(found[0], spec) if found else "-"


# ---------------------------------------------------------------------------------------------------------------------
# A suite
# ---------------------------------------------------------------------------------------------------------------------


def _suite(path: Path, *, video: bool, trust: bool) -> tuple[Page, list[str]]:
    paths, _ = find_run_dirs([path])
    runs, problems = read_runs(paths)
    if not runs:
        raise ConfigError(["no run can be read", *problems])
    try:
        panels, left_out = make_panels(runs)
    except ConfigError as error:
        panels, left_out = [], error.problems[:1]
    labels = label_runs(runs)
    films, said = films_of_suite(runs, labels, record=video, trust=trust)
    manifest, unread = _manifest(path)
    problems = [*problems, *left_out, *said, *unread]
    name = next((found for key in ("suite", "name") if isinstance(found := manifest.get(key), str)), name_of(path))
    return suite_page(name, runs, labels, panels, films, manifest, problems), problems


def _manifest(path: Path) -> tuple[dict[str, Any], list[str]]:
    if not os.path.lexists(path / MANIFEST):
        return {}, []
    try:
        return read_mapping(path / MANIFEST), []
    except CheckpointError as error:
        return {}, [str(error)]


def suite_page(
    name: str,
    runs: Sequence[RunRecord],
    labels: Sequence[str],
    panels: Sequence[Panel],
    films: Sequence[Film],
    manifest: Mapping[str, Any],
    problems: Sequence[str],
) -> Page:
    """The page about many runs."""
    page = Page(name)
    counts = {
        "runs": len(runs),
        "finished": sum(run.status == "finished" for run in runs),
        "environments": len({run.environment for run in runs}),
        "algorithms": len({run.algo for run in runs}),
    }
    chips = [f"{number} {text if number != 1 else text.removesuffix('s')}" for text, number in counts.items()]
    page.add(element("header", element("h1", name), _chips(chips), _warning(problems)))
    if panels:
        page.add(section("Results", element("p", _RESULTS_NOTE, class_="soft"), _results(panels)))
        page.add(section("Learning curves", element("p", caption(), class_="soft"), panel_charts(page, panels)))
    page.add(section("The agents at work", _films(films)))
    page.add(section("Runs", _overview(runs, labels)))
    page.add(section("Settings", *_group_settings(runs, labels)))
    if manifest:
        page.add(section("Manifest", data_view(manifest)))
    page.add(section("Machines and versions", *_machines(runs)))
    return page


_RESULTS_NOTE = (
    "Evaluations at the end of training (or, where no seed has ended, the newest): mean over seeds, its "
    f"{CONFIDENCE:.0%} bootstrap interval, and the worst and the best seed. A single seed has no interval."
)


def _results(panels: Sequence[Panel]) -> Html:
    head = ["environment", "algorithm", "seeds", "mean return", "interval", "worst", "best"]
    rows = [_result_row(panel.environment, curve) for panel in panels for curve in panel.curves]
    return table(head, rows, numeric=range(2, len(head)))


def _result_row(environment: str, curve: Curve) -> list[Content]:
    newest = [last for run in curve.runs if (last := run.last_evaluation)]
    if not newest:
        return [environment, curve.label, len(curve.runs), "not evaluated", "-", "-", "-"]
    # a run that was stopped half way is no sample of what the others reached at their end
    finals = [entry["mean"] for entry in [entry for entry in newest if entry.get("final")] or newest]
    mean, low, high = map(float, interval([np.array(finals, float)]))
    band = "-" if len(finals) < 2 else f"{low:,.1f} to {high:,.1f}"
    extremes = [f"{min(finals):,.1f}", f"{max(finals):,.1f}"]
    seeds = str(len(finals)) + (f" of {len(curve.runs)}" if len(finals) < len(curve.runs) else "")
    return [environment, curve.label, seeds, f"{mean:,.1f}", band, *extremes]


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
        last, seconds, speed = run.last_evaluation, training_seconds(run), _last(run, "time/env_steps_per_second")
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
    """For each algorithm on each environment, what differs from the defaults (of its first run)."""
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
    """Each machine with its versions, once."""
    found: dict[str, RunRecord] = {}
    for run in runs:
        found.setdefault(shown({key: run.metadata.get(key) for key in _MACHINE}), run)
    if len(found) == 1:
        return [_machine(runs[0], _MACHINE)]
    return [fold(f"Of {run.name} and others like it", _machine(run, _MACHINE)) for run in found.values()]


# ---------------------------------------------------------------------------------------------------------------------
# Files whose form is not known here
# ---------------------------------------------------------------------------------------------------------------------


def data_view(data: Any, depth: int = 0) -> Html:
    """Plain data as tables: mappings and lists of mappings become rows, what is nested deeper is folded."""
    rows = _records(data)
    if rows is not None:
        return _record_table(rows[:MAX_ROWS], depth)
    if not isinstance(data, dict):
        return element("p", _cell(data))
    plain = {str(key): _cell(value) for key, value in data.items() if not _is_nested(value)}
    nested = {str(key): value for key, value in data.items() if _is_nested(value)}
    parts: list[Html] = [facts(plain)] if plain else []
    for key, value in nested.items():
        deeper = _deeper(value, depth)
        parts.append(join([element("h3", key), deeper]) if depth == 0 else fold(key, deeper))
    return join(parts)


def _record_table(rows: Sequence[dict[str, Any]], depth: int) -> Html:
    """A table of what fits into cells, and for each row what does not, folded."""
    flat = [_with_numbers(row) for row in rows]
    columns = [
        key
        for key in dict.fromkeys(key for row in flat for key in row)
        if not any(_is_nested(row.get(key)) for row in flat)
    ]
    parts = [table(columns, [[_cell(row.get(key)) for key in columns] for row in flat])] if columns else []
    for number, (row, short) in enumerate(zip(rows, flat, strict=True), 1):
        rest = {key: value for key, value in row.items() if key not in columns and _is_nested(value)}
        if rest:
            name = " ".join(_cell(short[key]) for key in columns[:1] if key in short)
            inside = [join([element("h3", key), _deeper(value, depth)]) for key, value in rest.items()]
            parts.append(fold(f"More of {name or number}", *inside))
    return join(parts)


def _with_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row in which a mapping of numbers (an evaluation: mean, deviation, ...) became columns of their own."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict) and value and all(_is_numeric(item) for item in value.values()):
            found.update({f"{key}.{name}": item for name, item in value.items() if not isinstance(item, list)})
        else:
            found[str(key)] = value
    return found


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numeric(item) and not isinstance(item, list) for item in value)
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _deeper(value: Any, depth: int) -> Html:
    if depth < MAX_NESTING:
        return data_view(value, depth + 1)
    return element("pre", shown(value)[:MAX_TEXT])


MAX_ROWS, MAX_NESTING, MAX_TEXT, MAX_LIST = 1_000, 6, 5_000, 12


def _records(data: Any) -> list[dict[str, Any]] | None:
    """A list of mappings as it is; a mapping of several mappings with its keys as the first column; else None."""
    if isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
        return data
    if isinstance(data, dict) and len(data) > 1 and all(isinstance(item, dict) for item in data.values()):
        return [{"": key, **item} for key, item in data.items()]
    return None


def _is_nested(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, list) and (len(value) > MAX_LIST or any(isinstance(item, (dict, list)) for item in value))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if type(value) is int:
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    text = shown(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."
