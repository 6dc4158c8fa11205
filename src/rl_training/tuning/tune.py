"""Hyper-parameter search: many short training runs with different settings, and the best settings found.

Trials train an ordinary `Agent`. Optuna (extra `tune`) samples settings and prunes trials; all code that uses it is in
`tuning.study`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_training.algorithms.registry import get_spec
from rl_training.contracts.errors import CheckpointError, ConfigError, MissingExtraError, RLTrainingError
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.build import build_experiment
from rl_training.experiment.config import Layer, TrainConfig
from rl_training.experiment.files import safe_name
from rl_training.experiment.lock import run_lock
from rl_training.experiment.presets import resolve_with_preset
from rl_training.experiment.schema import convert_fields, unknown_key
from rl_training.experiment.yaml_io import read_yaml
from rl_training.tuning.search_space import Space, space_for, space_to_plain

if TYPE_CHECKING:
    from rl_training.tuning.study import Study

DATABASE, WORKERS_LOG = "study.db", "workers.log"
POLL_SECONDS = 0.5
MAX_FALSE_STARTS = 3
"""Maximum number of processes in a row that end before starting a trial; then the study fails."""

FLAGS = {
    "algo": "the first argument",
    "env_id": "the second argument",
    "total_timesteps": "--timesteps",
    "seed": "--seed",
    "output_dir": "--output-dir",
    "eval_every": "--evaluations",
}
"""Run settings for which a study has its own options."""


@documented
@dataclass
class TuneConfig:
    """All settings of a study.

    Example:
        >>> TuneConfig(algo="ppo", env_id="CartPole-v1", trials=20, timesteps=10_000).jobs
        1
    """

    algo: str = setting(help="Algorithm, in lower case: ppo, sac, dqn, ...")
    env_id: str = setting(help="Gymnasium environment id.")
    trials: int = setting(50, "Total number of trials; calling again continues up to this number.", ge=1)
    jobs: int = setting(1, "Number of parallel trials, each in its own process with one thread.", ge=1)
    timesteps: int | None = setting(
        None, "Environment steps per trial; by default those of the preset or config file, or 100_000.", ge=1
    )
    seeds: int = setting(1, "Training runs per trial, with different seeds; the score is their mean.", ge=1)
    evaluations: int = setting(
        4, "Evaluations during a trial's first training run, after which it may be pruned.", ge=0
    )
    episodes: int = setting(30, "Episodes of the final evaluation of a trial; their mean return is its score.", ge=1)
    seed: int | None = setting(
        None, "Seed of the search and of training; by default that of the config file, or 0.", ge=0
    )
    timeout: float | None = setting(None, "Seconds after which no more trials are started.", gt=0)
    sampler: Literal["tpe", "random"] = setting(
        "tpe", "Optuna sampler: tpe (tree-structured Parzen estimator) or random."
    )
    pruner: Literal["median", "halving", "none"] = setting(
        "median", "Optuna pruner: median (stops trials below the median), halving (successive halving) or none."
    )
    search: Path | None = setting(
        None, "YAML file with the search space; by default the one that the algorithm declares."
    )
    config: Path | None = setting(None, "Config file with fixed settings of all trials.")
    set: dict[str, Any] = setting(factory=dict, help="Fixed settings of all trials; they override the config file.")
    storage: str | None = setting(
        None,
        "URL of the study's database: sqlite:///, postgresql://, mysql:// or journal:///; by default in its directory.",
    )
    study_name: str | None = setting(None, "Name of the study; by default algorithm, environment and seed.")
    output_dir: Path | None = setting(
        None, "Directory in which tune/STUDY is created; by default the output_dir setting (runs)."
    )
    trust: bool = setting(False, "Allow the config file to name a module to import (package:Env-v0).")

    def __post_init__(self) -> None:
        """Check and convert every field."""
        problems: list[str] = []
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name, value in convert_fields(TuneConfig, data, "tune", problems).items():
            setattr(self, name, value)
        problems += [
            f"tune > set: '{name}' has its own option, use {FLAGS[name]}" for name in FLAGS if name in self.set
        ]
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Plan:
    """A resolved study: everything its worker processes need to know."""

    tune: TuneConfig
    base: TrainConfig
    """Settings of the first trial; the others differ in the searched settings."""
    space: Space
    preset: str | None
    """Name of the underlying preset, if any."""
    study_name: str
    directory: Path
    url: str

    @property
    def eval_every(self) -> int:
        """Steps between evaluations, without one at the very end, where the score is measured anyway."""
        return self.base.total_timesteps // (self.tune.evaluations + 1) + 1

    def record(self) -> dict[str, Any]:
        """What all trials of a study share; stored with it, so that no incomparable trials are added."""
        of_a_machine = ("output_dir", "device", "num_threads")
        base = {name: value for name, value in self.base.to_dict().items() if name not in of_a_machine}
        options = {name: getattr(self.tune, name) for name in ("seeds", "evaluations", "episodes", "sampler", "pruner")}
        return {"base": base, "search": space_to_plain(self.space), **options}


@dataclass
class TuneResult:
    """The results of a study so far."""

    study_name: str
    directory: Path
    best: TrainConfig
    best_trial: int
    best_score: float
    first_score: float | None
    """The score of the base settings; None if that trial failed."""
    counts: dict[str, int]
    """The number of trials per outcome: complete, pruned, failed."""
    interrupted: bool = False
    """Whether a signal stopped it early; another call continues it."""
    signal: int = 0
    """The signal that stopped it, or 0."""
    files: dict[str, Path] = field(default_factory=dict)
    """Written files: preset, report, trials, search."""


def require_tune() -> None:
    """Raise an error before any work if the extra is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("optuna", "plotly")):
        raise MissingExtraError("the search for hyper-parameters", "tune")


def make_plan(tune: TuneConfig, search: Mapping[str, Any] | None = None) -> Plan:
    """Resolve settings, search space and paths of a study; all problems are raised here."""
    layers = []
    if tune.config is not None:
        layers.append(Layer(read_yaml(tune.config), str(tune.config), tune.trust))
    layers.append(Layer(_nested(tune.set, tune.algo), "--set"))
    fixed = {name for layer in layers for name in _leaves(layer.data)}
    own = {"seed": tune.seed, "total_timesteps": tune.timesteps, "output_dir": tune.output_dir}
    said = {name: value for name, value in own.items() if value is not None}
    layers.append(Layer({"algo": tune.algo, "env_id": tune.env_id, **said}, "tune"))
    base, preset = resolve_with_preset(layers)
    if search is None and tune.search is not None:
        search = read_yaml(tune.search)
    space = space_for(base, search, fixed)
    names = [safe_name(base.algo), safe_name(base.env_id), f"seed{base.seed}"]
    study_name = tune.study_name or "__".join(names)
    named = study_name if tune.study_name is None else "__".join([*names[:2], safe_name(tune.study_name)])
    directory = base.output_dir / "tune" / named
    url = tune.storage or f"sqlite:///{(directory / DATABASE).absolute()}"
    return Plan(tune, base, space, preset.name if preset else None, study_name, directory, url)


def _nested(settings: Mapping[str, Any], algo: str) -> dict[str, Any]:
    """Settings by dotted name as a config layer."""
    own = {item.name for item in dataclasses.fields(get_spec(algo).config)}
    known = own | {item.name for item in dataclasses.fields(TrainConfig)}
    problems = [unknown_key("--set", name, known) for name in settings if name.split(".")[0] not in known]
    if problems:
        raise ConfigError(problems)
    layer: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = (["algorithm"] if name.split(".")[0] in own else []) + name.split(".")
        section = layer
        for step in sections:
            section = section.setdefault(step, {})
            if not isinstance(section, dict):
                raise ConfigError(f"--set: '{name}' is part of another setting that is also given")
        section[last] = value
    return layer


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings in a layer, by dotted name."""
    for key, value in data.items():
        if key == "algorithm" and not prefix and isinstance(value, Mapping):
            yield from _leaves(value)
        elif isinstance(value, Mapping) and "schedule" not in value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def tune(config: TuneConfig, *, search: Mapping[str, Any] | None = None, progress: bool = True) -> TuneResult:
    """Run or continue a study, and write its results: a preset, a report and a table of all trials.

    `search` is the search space, as in a file: `{"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}`.

    Example:
        >>> result = tune(TuneConfig("ppo", "CartPole-v1", trials=20, timesteps=10_000))  # doctest: +SKIP
        >>> result.best_score, result.files["preset"]  # doctest: +SKIP
    """
    require_tune()
    plan = make_plan(config, search)
    build_experiment(plan.base.replace(num_threads=1)).close()  # fail now if no trial could run
    from rl_training.tuning import study as studies

    try:
        plan.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir: '{plan.directory}' is not writable: {error.strerror}") from error
    with studies.quietly(), _alone(plan):
        study = studies.open_study(plan)
        studies.repeat_lost(study, plan)
        say = Progress(plan, study, show=progress)
        stop = Stop()
        with stop.on_signals():
            if config.jobs == 1:
                studies.work(plan, study, stop, say.deadline, after_trial=say.update)
            else:
                _supervise(plan, study, stop, say)
        say.update()
        if stop.requested and studies.best_trial(study) is None:
            raise (
                KeyboardInterrupt if stop.number == signal.SIGINT else SystemExit(128 + stop.number)
            )  # nothing to write
        from rl_training.tuning.report import write_results

        result = write_results(plan, study)
    result.interrupted = stop.requested and studies.remaining(study, config.trials) > 0
    result.signal = stop.number if stop.requested else 0
    return result


@contextlib.contextmanager
def _alone(plan: Plan) -> Iterator[None]:
    """Lock the study's directory: unfinished trials that were started there cannot be running any more."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(run_lock(plan.directory))
        except CheckpointError as error:
            raise ConfigError(
                f"another process runs this study in {plan.directory}. For parallel trials use --jobs; on "
                "another machine, use --storage with a shared database and another --output-dir"
            ) from error
        yield


class Stop:
    """Whether a signal has requested a stop. The first signal stops gracefully."""

    def __init__(self) -> None:
        self.requested = False
        self.number = signal.SIGINT

    def request(self, number: int, frame: types.FrameType | None) -> None:
        """Handle a signal; a second one stops at once."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested, self.number = True, signal.Signals(number)
        print(
            "\nstopping: unfinished trials are repeated by the next call; press again to stop immediately",
            file=sys.stderr,
        )

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM, if in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Progress:
    """Prints a line for each trial that ends, in any process: its score, the best so far, and the time left."""

    def __init__(self, plan: Plan, study: Study, *, show: bool) -> None:
        from rl_training.tuning import study as studies

        self._studies, self._study, self._show, self._total = studies, study, show, plan.tune.trials
        self.began = time.monotonic()
        self.deadline = None if plan.tune.timeout is None else self.began + plan.tune.timeout
        self._seen = {trial.number for trial in studies.ended(study)}
        self._before = self._total - studies.remaining(study, self._total)
        self._say(self._introduction(plan))

    def _introduction(self, plan: Plan) -> str:
        base = f"preset {plan.preset}" if plan.preset else "the defaults"
        lines = [
            f"study {plan.study_name}: {self._before} of {self._total} trials done",
            f"first trial: {base}; {plan.base.total_timesteps:,} steps each, {len(plan.space)} settings searched",
        ]
        return "\n".join(lines)

    def update(self) -> None:
        """Print lines for newly ended trials."""
        for trial in self._studies.ended(self._study):
            if trial.number not in self._seen:
                self._seen.add(trial.number)
                self._say(self._line(trial))

    def _line(self, trial: Any) -> str:
        best = self._studies.best_trial(self._study)
        known = "" if best is None else f"best {best.value:.2f} (trial {best.number})"
        left = self._studies.remaining(self._study, self._total)
        done = self._total - left
        pace = (time.monotonic() - self.began) / max(1, done - self._before)
        time_left = f", {_duration(pace * left)} left" if left else ""
        said = self._studies.summary(trial)
        return f"trial {trial.number:>3}  {said:<32}  {known:<26}  {done}/{self._total}{time_left}"

    def _say(self, text: str) -> None:
        if self._show:
            print(text, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# Parallel processes


def _supervise(plan: Plan, study: Study, stop: Stop, say: Progress) -> None:
    """Keep worker processes running until the study is done. If one dies, another repeats its trial."""
    from rl_training.tuning import study as studies

    context = multiprocessing.get_context("spawn")  # forking a process that uses torch's threads may hang

    def start() -> SpawnProcess:
        worker = context.Process(target=_worker, args=(plan, say.deadline), name="tune")
        with _safe_path():
            worker.start()
        return worker

    workers = [start() for _ in range(min(plan.tune.jobs, studies.remaining(study, plan.tune.trials)))]
    false_starts, told = 0, False
    try:
        while workers:
            connection.wait([worker.sentinel for worker in workers], timeout=POLL_SECONDS)
            if stop.requested and not told:
                told = True
                for worker in workers:
                    worker.terminate()
            say.update()
            for worker in [worker for worker in workers if not worker.is_alive()]:
                workers.remove(worker)
                if worker.exitcode == 0 or stop.requested:
                    continue
                had_begun = studies.repeat_lost(study, plan, pid=worker.pid)
                false_starts = 0 if had_begun else false_starts + 1
                if false_starts == MAX_FALSE_STARTS:
                    raise _cannot_start(plan)
                workers.append(start())
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    studies.repeat_lost(study, plan)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Child processes do not import modules from the working directory, as with `-P`."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _cannot_start(plan: Plan) -> RLTrainingError:
    path = plan.directory / WORKERS_LOG
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    last = lines[-1] if lines else "they printed nothing"
    return RLTrainingError(f"the worker processes end before they start a trial: {last}. See the log {path}")


def _worker(plan: Plan, deadline: float | None) -> None:
    """Main function of a worker process: run trials until there are enough."""
    import torch

    from rl_training.tuning import study as studies

    os.setpgid(0, 0)  # Ctrl-C goes to the parent, which stops the workers
    _write_to(plan.directory / WORKERS_LOG)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    stop = Stop()
    with studies.quietly(), stop.on_signals():
        studies.work(plan, studies.open_study(plan), stop, deadline)


def _write_to(path: Path) -> None:
    """Redirect this process's output to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _die_with_parent() -> None:
    """Exit when the parent is killed: the trial is repeated when the study continues."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
