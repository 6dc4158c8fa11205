"""The results of a study: the best settings as a preset, a table of all trials, and a page of plots."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from rl_training.contracts.errors import ConfigError, RLTrainingError
from rl_training.experiment.config import Layer, TrainConfig, merge, resolve
from rl_training.experiment.files import write_text
from rl_training.experiment.metadata import utc_now
from rl_training.experiment.presets import find_preset
from rl_training.experiment.schema import is_section, to_plain
from rl_training.experiment.yaml_io import dump_yaml
from rl_training.reports.page import Html, Page, element, facts, section, table
from rl_training.reports.tables import csv_text
from rl_training.tuning.search_space import space_to_plain
from rl_training.tuning.study import Study, best_trial, config_of, ended, reason, shown
from rl_training.tuning.tune import Plan, TuneResult

NOT_IN_A_PRESET = ("seed", "output_dir")
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
COLUMNS = ["trial", "state", "score", "seconds", "seeds", "reason"]
HEIGHT = 480
"""Default height of a plot in pixels."""


def write_results(plan: Plan, study: Study) -> TuneResult:
    """Write all result files of a study; an error with the reasons if no trial is complete."""
    trials = ended(study)
    files = {
        "preset": plan.directory / "best.yaml",
        "report": plan.directory / "report.html",
        "trials": plan.directory / "trials.csv",
        "search": plan.directory / "search.yaml",
    }
    write_text(files["search"], dump_yaml(space_to_plain(plan.space)))
    write_text(files["trials"], trials_table(plan, trials))
    best = best_trial(study)
    if best is None:
        raise _no_score(plan, trials)
    assert best.value is not None
    first = next((trial for trial in trials if trial.user_attrs.get("base") and trial.value is not None), None)
    result = TuneResult(
        plan.study_name,
        plan.directory,
        config_of(plan, best),
        best.number,
        best.value,
        first.value if first is not None and first.state == TrialState.COMPLETE else None,
        counts(trials),
        files=files,
    )
    write_text(files["preset"], preset_text(plan, result, best))
    write_text(files["report"], report_page(plan, study, result))
    return result


def counts(trials: list[FrozenTrial]) -> dict[str, int]:
    """The number of trials per outcome."""
    found = Counter(STATES[trial.state] for trial in trials)
    return {name: found[name] for name in STATES.values()}


def counted(numbers: Mapping[str, int]) -> str:
    """Counts as text."""
    parts = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
    total = sum(numbers.values())
    return f"{total} {'trial' if total == 1 else 'trials'} ({parts})"


def _no_score(plan: Plan, trials: list[FrozenTrial]) -> RLTrainingError:
    error = RLTrainingError(f"no trial of the study '{plan.study_name}' has a score: {counted(counts(trials))}")
    if not trials:
        error = RLTrainingError(f"no trial of the study '{plan.study_name}' has ended yet")
    for text, number in Counter(map(reason, trials)).most_common(3):
        error.add_note(f"{number} x {text}")
    error.add_note(f"All trials are in {plan.directory / 'trials.csv'}")
    return error


# The preset


def preset_text(plan: Plan, result: TuneResult, best: FrozenTrial) -> str:
    """The best settings as a preset file: the differences from the defaults, and their origin."""
    first = "" if result.first_score is None else f"; the initial settings: {result.first_score:.2f}"
    base = f"preset {plan.preset}" if plan.preset else "the defaults"
    seeds = best.user_attrs["seeds"]
    header = [
        f"Found by `rl-training tune`, study {result.study_name}, starting from {base}:",
        f"the best of {counted(result.counts)}, written on {utc_now():%Y-%m-%d}.",
        f"Trial {best.number}: mean return {result.best_score:.2f} over {plan.tune.episodes} episodes after "
        f"{result.best.total_timesteps:,} steps with {_seeds(seeds)}{first}.",
        "The best of many trials is partly luck: train with other seeds to verify it.",
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in header) + dump_yaml(preset_data(result.best))


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def preset_data(config: TrainConfig) -> dict[str, Any]:
    """A config as a minimal preset: the differences from the defaults and from the preset that it is merged with.

    `--config FILE` merges a file over the preset of its algorithm and environment, so settings that only that preset
    changes have to be reset explicitly.
    """
    place = {"algo": config.algo, "env_id": config.env_id}
    below = [resolve([Layer(place, "defaults")])]
    preset = find_preset(config.algo, config.env_id, config.env_kwargs)
    if preset is not None:
        below.append(resolve([preset.layer(), Layer(place, "preset")]))
    data: dict[str, Any] = dict(place)
    for base in below:
        data = merge(data, _difference(config, base))
    return _in_order({name: value for name, value in data.items() if name not in NOT_IN_A_PRESET}, config.to_dict())


def _in_order(data: Mapping[str, Any], order: Mapping[str, Any]) -> dict[str, Any]:
    """The same data in the order of the settings."""
    return {
        name: _in_order(data[name], value)
        if isinstance(data[name], Mapping) and isinstance(value, Mapping)
        else data[name]
        for name, value in order.items()
        if name in data
    }


def _difference(wanted: Any, base: Any) -> dict[str, Any]:
    """The settings that differ between two dataclasses, section by section, as plain data."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(wanted):
        value, other = getattr(wanted, field.name), getattr(base, field.name)
        if value != other:
            found[field.name] = _difference(value, other) if is_section(value) else to_plain(value)
    return found


def needs_trust(config: TrainConfig) -> bool:
    """Whether the preset of a config names something that files are not trusted to name."""
    try:
        resolve([Layer(preset_data(config), "preset", trusted=False)])
    except ConfigError:
        return True
    return False


# The table


def trials_table(plan: Plan, trials: list[FrozenTrial]) -> str:
    """All trials as CSV."""
    names = [name for name in plan.space if any(name in trial.params for trial in trials)]
    rows = [[*trial_row(trial), *(trial.params.get(name, "") for name in names)] for trial in trials]
    return csv_text([*COLUMNS, *names], rows)


def trial_row(trial: FrozenTrial) -> list[Any]:
    """The columns of a trial before its settings."""
    score = trial.value if trial.state == TrialState.COMPLETE else ""
    seconds = f"{trial.duration.total_seconds():.1f}" if trial.duration is not None else ""
    seeds = " ".join(map(str, trial.user_attrs.get("seeds", [])))
    return [trial.number, STATES[trial.state], score, seconds, seeds, reason(trial)]


# The page


def _importances(study: Study) -> Any:
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()  # needs no additional package
    return optuna.visualization.plot_param_importances(study, evaluator=evaluator)


PLOTS: dict[str, Callable[[Study], Any]] = {
    "Optimization history": optuna.visualization.plot_optimization_history,
    "Importance of the settings": _importances,
    "Parallel coordinates": optuna.visualization.plot_parallel_coordinate,
    "Slices": optuna.visualization.plot_slice,
    "Evaluations during the trials": optuna.visualization.plot_intermediate_values,
    "Timeline": optuna.visualization.plot_timeline,
}
"""Optuna's plots by heading."""


def report_page(plan: Plan, study: Study, result: TuneResult) -> str:
    """The complete page as one file that needs no network."""
    page = Page(f"{result.study_name}: {result.best_score:.2f}")
    page.add(element("h1", result.study_name), _facts(plan, result))
    page.add(section("The best settings", element("pre", dump_yaml(preset_data(result.best)))))
    for heading, draw in PLOTS.items():
        page.add(section(heading, *_plot(page, heading, draw, study)))
    rows = [[_cell(value) for value in trial_row(trial)] for trial in ended(study)]
    page.add(section("Trials", table(COLUMNS, rows, numeric=(0, 2, 3))))
    return page.render()


def _facts(plan: Plan, result: TuneResult) -> Html:
    first = "it failed" if result.first_score is None else f"{result.first_score:.2f}"
    score = f"mean return of {plan.tune.episodes} episodes after the last step, of {plan.tune.seeds} training run(s)"
    return facts(
        {
            "algorithm, environment": f"{result.best.algo}, {result.best.env_id}",
            "trials": counted(result.counts),
            "best": f"{result.best_score:.2f} (trial {result.best_trial})",
            "first, with " + (f"preset {plan.preset}" if plan.preset else "the defaults"): first,
            "steps of a trial": f"{result.best.total_timesteps:,}",
            "score": score,
            "storage": shown(plan.url),
            "written": f"{utc_now():%Y-%m-%d %H:%M} UTC",
        }
    )


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _plot(page: Page, heading: str, draw: Callable[[Study], Any], study: Study) -> list[Html]:
    """One of Optuna's plots, or why it is missing: some need several complete trials."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            figure = draw(study)
        except (ValueError, RuntimeError, ZeroDivisionError) as error:
            return [_note(f"Not yet: {error}")]
    notes = [_note(str(warning.message)) for warning in caught if issubclass(warning.category, UserWarning)]
    drawn = json.loads(figure.to_json())
    layout = {key: value for key, value in drawn["layout"].items() if key not in ("template", "title", "height")}
    height = drawn["layout"].get("height") or HEIGHT
    return [*notes, page.chart(heading, drawn["data"], height=height, **{"hovermode": "closest", **layout})]


def _note(text: str) -> Html:
    return element("p", text, class_="soft")
