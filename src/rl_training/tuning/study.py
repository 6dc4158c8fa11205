"""The Optuna part of a search: storage, sampling and pruning.

A study is determined by its seed: each trial derives its seeds, for sampling and for training, from its position in the
study. So a study with one process gives the same trials again, even if it was killed and resumed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import optuna
from optuna.trial import FrozenTrial, TrialState

from rl_training.algorithms.registry import get_spec
from rl_training.api import facades
from rl_training.api.agent import Agent
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import ConfigError, NonFiniteError
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.contracts.settings import Choices, Range, Search
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.schema import to_plain
from rl_training.experiment.yaml_io import dump_yaml
from rl_training.runtime.callbacks import Callback, EvaluationCallback, Every, RunView
from rl_training.tuning.search_space import Space, current, with_values

if TYPE_CHECKING:
    from rl_training.tuning.tune import Plan, Stop

Study: TypeAlias = optuna.Study

STARTUP_TRIALS = 5
"""Number of random trials without pruning at the start of a study."""
HEARTBEAT, GRACE = 30, 120
"""Seconds between heartbeats of a trial, and until other machines consider it lost."""
MAX_LOSSES = 2
"""How often a trial whose process died is repeated: its settings may be the cause."""
SQLITE_TIMEOUT = 60
INTERRUPTED = "interrupted"
RECORD = "rl_training"
TURN = ".turn"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress Optuna's log and its warnings about experimental features (heartbeats)."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


# Storage


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """Open the storage at a URL; errors do not show its password."""
    kind, _, rest = url.partition("://")
    if url in ("sqlite://", "sqlite:///:memory:") or not rest:
        raise ConfigError(
            f"storage: '{shown(url)}' is in memory, which other processes cannot read. Use sqlite:///FILE, "
            "postgresql://..., mysql://... or journal:///FILE"
        )
    try:
        if kind == "journal":
            backend = optuna.storages.journal.JournalFileBackend(rest)
            return optuna.storages.JournalStorage(backend)
        return optuna.storages.RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": SQLITE_TIMEOUT}} if kind.startswith("sqlite") else None,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=repeat,
        )
    except Exception as error:  # drivers and dialects may raise anything
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigError(f"storage: '{shown(url)}' cannot be opened: {type(error).__name__}: {reason}") from error


def shown(url: str) -> str:
    """A storage's URL without its password."""
    address, at, rest = url.rpartition("@")
    scheme, separator, user = address.partition("://")
    return f"{scheme}{separator}{user.partition(':')[0]}:***@{rest}" if at and ":" in user else url


def open_study(plan: Plan) -> Study:
    """The study of a plan: a new one whose first trial has the base settings, or the existing one."""
    storage = open_storage(plan.url)
    seed = plan.base.seed
    study = optuna.create_study(
        storage=storage,
        sampler=SeededSampler(plan.tune.sampler, seed),
        pruner=_pruner(plan),
        study_name=plan.study_name,
        direction="maximize",
        load_if_exists=True,
    )
    if study.directions != [optuna.study.StudyDirection.MAXIMIZE]:
        raise ConfigError(f"study_name: '{plan.study_name}' does not maximize one value; choose another --study-name")
    if RECORD not in study.user_attrs:
        if study.get_trials(deepcopy=False):
            raise ConfigError(
                f"study_name: '{plan.study_name}' has trials of another program; choose another --study-name"
            )
        study.set_user_attr(RECORD, plan.record())
        study.enqueue_trial(base_params(plan), user_attrs={"base": True}, skip_if_exists=True)
    _refuse_another(study.user_attrs[RECORD], plan)
    return study


def _refuse_another(before: dict[str, Any], plan: Plan) -> None:
    """Refuse to add to a study whose trials were trained or scored differently: they are not comparable."""
    now = plan.record()
    changes = list(_differences(before, now))
    if changes:
        raise ConfigError(
            f"the study '{plan.study_name}' was started with other settings ({'; '.join(changes[:5])}). Use the "
            "same settings "
            "to continue it, or another --study-name for a new study"
        )


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        label = name.removeprefix("base.").removeprefix("algorithm.")
        yield f"{label}: {before} then, {now} now"


# Sampling


class SeededSampler(optuna.samplers.BaseSampler):  # type: ignore[misc] # Any where Optuna is not installed
    """One of Optuna's samplers, reseeded for every trial from the trial's position in the study."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._seed = kind, seed
        self._sampler = self._make(0)

    def _make(self, place: int) -> optuna.samplers.BaseSampler:
        seed = draw_seed(random_stream(self._seed, "search", place))
        if self._kind == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """See Optuna's `BaseSampler`."""
        self._sampler = self._make(place_of(study, trial.number))
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        """See Optuna's `BaseSampler`."""
        space: dict[str, Any] = self._sampler.infer_relative_search_space(study, trial)
        return space

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        """See Optuna's `BaseSampler`."""
        params: dict[str, Any] = self._sampler.sample_relative(study, trial, search_space)
        return params

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        """See Optuna's `BaseSampler`."""
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """See Optuna's `BaseSampler`."""
        self._sampler.after_trial(study, trial, state, values)


def _pruner(plan: Plan) -> optuna.pruners.BasePruner:
    if plan.tune.pruner == "median":
        warm_up = plan.base.total_timesteps // 3  # some settings learn slowly at first
        return optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=warm_up)
    if plan.tune.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=plan.eval_every, reduction_factor=2)
    return optuna.pruners.NopPruner()


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Any]:
    """Values for all settings that are searched directly."""
    values: dict[str, Any] = {}
    for name, search in space.items():
        if isinstance(search, Choices):
            named = labels(search)
            values[name] = named[trial.suggest_categorical(name, list(named))]
        elif isinstance(search, Range):
            whole = isinstance(search.low, int) and isinstance(search.high, int)
            ask = trial.suggest_int if whole else trial.suggest_float
            values[name] = ask(name, search.low, search.high, log=search.log)
    return values


def labels(search: Choices) -> dict[Any, Any]:
    """Choices by label: storages and plots do not support lists."""
    if all(value is None or isinstance(value, (bool, int, float, str)) for value in search.values):
        return {value: value for value in search.values}
    return {_label(value): value for value in search.values}


def _label(value: Any) -> str:
    return dump_yaml({"x": to_plain(value)}).removeprefix("x:").strip()


def params_of(config: TrainConfig, space: Space) -> dict[str, Any]:
    """A config as Optuna parameters."""

    def param(name: str, search: Search) -> Any:
        value = current(config, name)
        if not isinstance(search, Choices):
            return value
        return next(label for label, choice in labels(search).items() if choice == value)

    return {name: param(name, search) for name, search in space.items() if isinstance(search, (Choices, Range))}


def base_params(plan: Plan) -> dict[str, Any]:
    """The base settings of a study as Optuna parameters."""
    return params_of(plan.base, plan.space)


def config_of(plan: Plan, trial: FrozenTrial) -> TrainConfig:
    """The config of a trial, without its seed."""
    values = {
        name: labels(search)[trial.params[name]] if isinstance(search, Choices) else trial.params[name]
        for name, search in plan.space.items()
        if isinstance(search, (Choices, Range))
    }
    return with_values(plan.base, plan.space, values)


# Progress of a study


def _repeated(trials: list[FrozenTrial]) -> dict[int, int]:
    """Lost trials mapped to the trials that repeat them."""
    return {trial.user_attrs["again"]: trial.number for trial in trials if "again" in trial.user_attrs}


def ended(study: Study) -> list[FrozenTrial]:
    """The trials that have ended, except those that are repeated."""
    trials = study.get_trials(deepcopy=False)
    repeated = _repeated(trials)
    return [trial for trial in trials if trial.state.is_finished() and trial.number not in repeated]


def remaining(study: Study, total: int) -> int:
    """The number of trials that have not ended yet."""
    return max(0, total - len(ended(study)))


def place_of(study: Study, number: int) -> int:
    """The position of a trial in the study: a repeated trial has the position of its first attempt."""
    return number - sum(lost < number for lost in _repeated(study.get_trials(deepcopy=False)))


def best_trial(study: Study) -> FrozenTrial | None:
    """The complete trial with the highest score; the earliest of several."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return max(complete, key=lambda trial: (trial.value, -trial.number), default=None)


def reason(trial: FrozenTrial) -> str:
    """Why a trial has no score."""
    if trial.state == TrialState.COMPLETE:
        return ""
    if trial.state == TrialState.PRUNED and "reason" not in trial.user_attrs:
        return f"pruned after {trial.last_step:,} steps, with return {trial.value:.2f}"
    return str(trial.user_attrs.get("reason", "its process ended"))


def summary(trial: FrozenTrial) -> str:
    """How a trial ended, as short text."""
    if trial.state == TrialState.COMPLETE:
        return f"score {trial.value:.2f}"
    if trial.state == TrialState.PRUNED and "reason" not in trial.user_attrs:
        return f"pruned at {trial.last_step:,} steps ({trial.value:.2f})"
    return f"{'pruned' if trial.state == TrialState.PRUNED else 'failed'}: {reason(trial):.100}"


def repeat(study: Study, trial: FrozenTrial) -> None:
    """Queue a lost trial again with the same settings, unless its process died too often."""
    losses = trial.user_attrs.get("losses", 0) + (trial.user_attrs.get("reason") != INTERRUPTED)
    if losses > MAX_LOSSES:
        return
    kept = {name: trial.user_attrs[name] for name in ("base", "seeds") if name in trial.user_attrs}
    # if not all settings were sampled yet, sample them again from the same seed
    drawn = trial.params if set(trial.params) == _names(study) else {}
    params = trial.system_attrs.get("fixed_params") or drawn
    study.enqueue_trial(params, user_attrs={**kept, "again": trial.number, "losses": losses})


def _names(study: Study) -> set[str]:
    """The parameters of a study."""
    search = study.user_attrs[RECORD]["search"]
    return {name for name, entry in search.items() if not (isinstance(entry, dict) and "same_as" in entry)}


def repeat_lost(study: Study, plan: Plan, pid: int | None = None) -> bool:
    """Queue unfinished trials of this directory (or of process `pid`) again. Returns whether there were any.

    The caller holds the lock of the directory, and none of its processes (or not that one) is running.
    """
    trials = study.get_trials(deepcopy=False)
    repeated, found = _repeated(trials), False
    nowhere = (
        _here(plan) if plan.tune.storage is None else None
    )  # killed before it recorded where it runs; a local storage file has only local trials
    for trial in trials:
        about = trial.user_attrs
        is_ours = about.get("where", nowhere) == _here(plan) and pid in (None, about.get("pid"))
        if not is_ours or trial.number in repeated:
            continue
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
        elif trial.state != TrialState.FAIL or about.get("reason") != INTERRUPTED:
            continue
        repeat(study, trial)
        found = True
    return found


def _here(plan: Plan) -> str:
    return f"{socket.gethostname()}:{plan.directory.absolute()}"


# Trials


class InterruptedTrialError(Exception):
    """A trial that a signal interrupted."""


class UnfitError(Exception):
    """Settings that are not compatible with each other."""


class Pruning(Callback):
    """Reports evaluations to the study, and ends a trial when the pruner says so."""

    def __init__(self, trial: optuna.Trial, eval_every: int) -> None:
        self.trial, self.eval_every = trial, eval_every
        self.pruned = False

    def on_evaluation(self, run: RunView, result: EvaluationResult) -> None:
        """See `Callback.on_evaluation`."""
        # rounded: pruners compare equal steps, but rollouts of different lengths end at different steps
        self.trial.report(result.mean, run.position // self.eval_every * self.eval_every)
        if self.trial.should_prune():
            self.pruned = True
            run.stop("pruned")


class TrialRunner:
    """Trains and scores an agent with the settings of a trial. `begun` is called when the trial is in the storage."""

    def __init__(self, plan: Plan, study: Study, stop: Stop, begun: Callable[[], None]) -> None:
        self.plan, self.study, self.stop, self.begun = plan, study, stop, begun

    def __call__(self, trial: optuna.Trial) -> float:
        """The score of a trial."""
        trial.set_user_attr("where", _here(self.plan))
        trial.set_user_attr("pid", os.getpid())
        self.begun()
        try:
            return self._score(trial)
        except optuna.TrialPruned:
            raise
        except (InterruptedTrialError, KeyboardInterrupt):
            trial.set_user_attr("reason", INTERRUPTED)
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            trial.set_user_attr("reason", text.strip().splitlines()[0])
            if isinstance(error, (NonFiniteError, UnfitError)):  # caused by the settings: the search learns from it
                raise optuna.TrialPruned from error
            raise

    def _score(self, trial: optuna.Trial) -> float:
        plan = self.plan
        values = suggest(trial, plan.space)
        try:
            config = with_values(plan.base, plan.space, values)
        except ConfigError as error:
            raise UnfitError(str(error)) from error
        scores = []
        for number, seed in enumerate(self._seeds(trial)):
            agent = self._agent(config, seed)
            try:
                self._train(agent, Pruning(trial, plan.eval_every) if number == 0 else None)
                # the same episodes for all trials, if the environment's seed determines them
                episodes = draw_seed(random_stream(plan.base.seed, "score", number))
                scores.append(agent.evaluate(plan.tune.episodes, seed=episodes).mean)
            finally:
                agent.close()
        return sum(scores) / len(scores)

    def _seeds(self, trial: optuna.Trial) -> list[int]:
        """Training seeds from the trial's position in the study; a repeated trial keeps its seeds."""
        if "seeds" not in trial.user_attrs:
            rng = random_stream(self.plan.base.seed, "trial", place_of(self.study, trial.number))
            trial.set_user_attr("seeds", [draw_seed(rng) for _ in range(self.plan.tune.seeds)])
        return list(trial.user_attrs["seeds"])

    def _train(self, agent: Agent, pruning: Pruning | None) -> None:
        callbacks = [] if pruning is None else [*self._evaluations(agent), pruning]
        result = agent.learn(callback=callbacks, progress=False, on_signal="return")
        if result.stop_reason in ("SIGINT", "SIGTERM"):
            self.stop.requested, self.stop.number = True, signal.Signals[result.stop_reason]
        if result.interrupted:
            raise InterruptedTrialError
        if pruning is not None and pruning.pruned:
            raise optuna.TrialPruned

    def _agent(self, config: TrainConfig, seed: int) -> Agent:
        threads = 1 if self.plan.tune.jobs > 1 and config.num_threads is None else config.num_threads
        # evaluation is done here; a trial ends at its last step or when pruned
        config = config.replace(
            seed=seed, num_threads=threads, eval_every=0, stop_reward=None, stop_patience=None, video_every=0,
            wandb=False, mlflow=False, loggers=[],
        )  # fmt: skip
        facade: type[Agent] = getattr(facades, get_spec(config.algo).title)
        return facade(config)

    def _evaluations(self, agent: Agent) -> list[Callback]:
        if not self.plan.tune.evaluations:
            return []

        def evaluate(policy: Any, num_episodes: int, *, deterministic: bool, seed: int) -> EvaluationResult:
            return agent.evaluate(num_episodes, deterministic=deterministic, seed=seed)

        config = agent.config
        every = Every(self.plan.eval_every)
        return [EvaluationCallback(evaluate, every, config.eval_episodes, config.eval_deterministic, config.seed)]


class Turn:
    """A file lock: one process at a time checks whether a trial is left and starts it.

    The operating system releases it if the process dies.
    """

    def __init__(self, plan: Plan) -> None:
        self._file = open(plan.directory / TURN, "a")  # noqa: SIM115 - open as long as the process runs

    def take(self) -> None:
        """Wait for the lock."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def give(self) -> None:
        """Release the lock."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, which releases the lock too."""
        self._file.close()


def work(
    plan: Plan, study: Study, stop: Stop, deadline: float | None, after_trial: Callable[[], None] = lambda: None
) -> None:
    """Run trials one after another until the study has enough, the time is over, or a signal arrives."""
    turn = Turn(plan)
    runner = TrialRunner(plan, study, stop, turn.give)
    try:
        while not stop.requested and (deadline is None or time.monotonic() < deadline):
            turn.take()
            if _is_full(study, plan.tune.trials):
                break
            try:
                study.optimize(runner, n_trials=1, catch=(Exception,))
            finally:
                turn.give()
                repeat_lost(study, plan, pid=os.getpid())  # the trial that the signal just interrupted
            after_trial()
    finally:
        turn.close()


def _is_full(study: Study, total: int) -> bool:
    """Whether all trials have ended or are running, here or elsewhere."""
    return remaining(study, total) <= len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
