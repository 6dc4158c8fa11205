"""Runs an experiment: with or without a run directory, from the start or from a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from rl_training.contracts.errors import CheckpointError, ConfigError
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.contracts.schedule import Schedule
from rl_training.data.formats.space_json import space_to_json
from rl_training.data.settings import OffPolicyConfig
from rl_training.deploy.profiling import Profiler, watched_methods
from rl_training.deploy.video import VideoCallback, recorder, require_video
from rl_training.envs.factory import EnvLike, describe_env
from rl_training.experiment.build import (
    EPISODE_BOUNDARY,
    EXACT,
    LEARNER_ONLY,
    NOTHING_LOST,
    WEIGHTS_ONLY,
    Experiment,
    build_experiment,
)
from rl_training.experiment.checkpointing import (
    CheckpointCallback,
    checkpoints_of,
    find_checkpoint,
    save_checkpoint,
)
from rl_training.experiment.config import Layer, TrainConfig, resolve
from rl_training.experiment.files import UnwritableError
from rl_training.experiment.lock import run_lock
from rl_training.experiment.logging import (
    JsonlLogger,
    LoggedRun,
    Logger,
    LoggingCallback,
    MlflowLogger,
    ProgressCallback,
    TensorBoardLogger,
    WandbLogger,
    make_logger,
    read_metrics,
    require_mlflow,
    require_wandb,
)
from rl_training.experiment.metadata import collect_metadata
from rl_training.experiment.plugins import plugins_of
from rl_training.experiment.restoring import (
    changeable,
    differing_machine,
    initialize,
    refuse_changes,
    refuse_edits,
    require_environment,
    restore,
    spec_of,
)
from rl_training.experiment.runs import CONFIG, METRICS, EvaluationLog, RunDirectory, make_run_dir
from rl_training.experiment.yaml_io import read_yaml
from rl_training.runtime.callbacks import (
    Callback,
    CallbackLike,
    EvaluateFn,
    EvaluationCallback,
    Every,
    StopAfterSeconds,
    StopOnNoImprovement,
    StopOnReward,
    as_callbacks,
)
from rl_training.runtime.distributed.fleet import Fleet
from rl_training.runtime.evaluator import EvaluationStoppedError
from rl_training.runtime.offline import OfflineTrainer, ValidationCallback
from rl_training.runtime.threads import using_threads
from rl_training.runtime.trainer import Trainer, TrainResult

Callbacks = CallbackLike | Sequence[CallbackLike] | None
OnSignal = Literal["raise", "return"]
"""What happens after a signal (SIGINT, SIGTERM) has ended a run and everything is saved.

`raise`: the program gets the signal, as without training: its own handler is called; without one, SIGINT raises
`KeyboardInterrupt` and SIGTERM ends the process (`SystemExit`, exit code 143). `return`: the call returns normally, and
`TrainResult.interrupted` says that the run is not complete.
"""


def train(
    config: TrainConfig,
    *,
    env: EnvLike | None = None,
    eval_env: EnvLike | None = None,
    callback: Callbacks = None,
    progress: bool = True,
    profile: bool = False,
    on_signal: OnSignal = "raise",
) -> TrainResult:
    """Train from a config, in a new run directory below `config.output_dir`.

    SIGINT (Ctrl-C) and SIGTERM end the run after the current iteration, with a checkpoint. `KeyboardInterrupt` is then
    raised, or the process ends; with `on_signal="return"`, the result is returned instead (see `OnSignal`).

    With `profile`, the run directory gets a table of the time per part (`profile.json`), and a trace of the first
    spans for chrome://tracing and Perfetto (`trace.json`).

    Example:
        >>> result = train(TrainConfig(algo="ppo", env_id="CartPole-v1"))  # doctest: +SKIP
        >>> result.checkpoint_path, result.metrics["global_step"]  # doctest: +SKIP
    """
    check_on_signal(on_signal)
    experiment = build_experiment(config, env, eval_env)
    config = experiment.config
    try:
        require_extras(config)
        require_data(experiment)
        if config.init_from is not None:
            initialize(experiment, config.init_from)
        run_dir = RunDirectory(make_run_dir(config))
        with run_lock(run_dir.path):
            return run_experiment(
                experiment,
                experiment.end,
                run_dir=run_dir,
                callback=callback,
                progress=progress,
                profiler=Profiler() if profile else None,
                on_signal=on_signal,
            )
    finally:
        experiment.close()


def resume(
    path: str | Path,
    *,
    total_timesteps: int | None = None,
    online: bool = False,
    env: EnvLike | None = None,
    eval_env: EnvLike | None = None,
    callback: Callbacks = None,
    progress: bool = True,
    trust: bool = False,
    learner_only: bool = False,
    on_signal: OnSignal = "raise",
    **changes: Any,
) -> TrainResult:
    """Continue a run from its newest valid checkpoint, in the same run directory.

    `env` is needed for runs whose environment was an object. `trust` allows the run's config to name a module to
    import (`package:Env-v0`) and to log to W&B or MLflow. With `learner_only`, the replay and unfinished episodes
    are not read: the run continues from the weights and optimizer of its newest checkpoint even if these are damaged.
    `online` ends the offline phase of a run: it goes on in its environment for `total_timesteps` steps.
    `on_signal` is as for `train`. Other settings that may change (`eval_every`, `device`, ...) are keyword arguments.
    """
    check_on_signal(on_signal)
    run_dir = RunDirectory(Path(path))
    run_dir.require()
    if total_timesteps is not None:
        changes["total_timesteps"] = total_timesteps
    if online:
        changes["online"] = True
    source, rest = str(run_dir.path / CONFIG), read_yaml(run_dir.path / CONFIG)
    rest = dict(rest)
    place = {str(name): rest.pop(name) for name in ("env_id", "env_kwargs") if name in rest}  # `env` replaces it
    layers = [Layer(rest, source, trust), Layer(place, source, trust or env is not None), Layer(changes, "resume")]
    config = resolve(layers)
    with run_lock(run_dir.path):
        run_dir.recover()
        with _offering_learner_only(run_dir, learner_only):
            checkpoint = find_checkpoint(run_dir.path, learner_only=learner_only)
        require_environment(checkpoint, env)
        refuse_changes(checkpoint, config)
        refuse_edits(config, run_dir.path / CONFIG, run_dir.metadata().get("history"), changes)
        experiment = build_experiment(config, env, eval_env, spec=spec_of(checkpoint))
        try:
            require_data(experiment)
            with _offering_learner_only(run_dir, learner_only):
                restore(experiment, checkpoint, learner_only=learner_only)
            _refuse_finished(run_dir, experiment)
            _say_if_bits_may_differ(run_dir, experiment)
            trainer = experiment.trainer
            run_dir.rewind(trainer.position, again=EvaluationLog.__name__ in trainer.undone)
            return run_experiment(
                experiment,
                experiment.end,
                run_dir=run_dir,
                callback=callback,
                progress=progress,
                learner_only=learner_only,
                on_signal=on_signal,
            )
        finally:
            experiment.close()


@contextmanager
def _offering_learner_only(run_dir: RunDirectory, learner_only: bool) -> Iterator[None]:
    """If a run cannot be resumed but its weights are intact, add to the error how to continue from them."""
    try:
        yield
    except CheckpointError as error:
        if learner_only:
            raise
        try:
            newest = find_checkpoint(run_dir.path, learner_only=True)
        except CheckpointError:
            raise error from None
        raise CheckpointError(
            f"{error}. The weights and the optimizer in {newest.path.name} are intact. To continue from them with an "
            f"empty replay buffer and new episodes: rl-training resume {run_dir.path} --learner-only "
            "(in Python, learner_only=True)"
        ) from error


def _refuse_finished(run_dir: RunDirectory, experiment: Experiment) -> None:
    """Refuse to resume a finished run; one that was killed before its final evaluation may still complete it."""
    trainer, end = experiment.trainer, experiment.end
    if trainer.position >= end and run_dir.status() == "finished":
        longer = "total_timesteps" if trainer.unit == "steps" else "total_updates, or online,"
        raise ConfigError(
            f"{run_dir.path} has already been trained for {trainer.position} of {end} {trainer.unit}. "
            f"Pass a larger {longer} to continue."
        )


def _say_if_bits_may_differ(run_dir: RunDirectory, experiment: Experiment) -> None:
    changes = differing_machine(run_dir.metadata(), str(experiment.device))
    if changes:
        warnings.warn(
            f"the machine or package versions changed since the run started ({changes}): results may differ slightly",
            stacklevel=3,
        )


def require_extras(config: TrainConfig) -> None:
    """Raise an error before training if a setting needs a package that is not installed."""
    if config.wandb:
        require_wandb()
    if config.mlflow:
        require_mlflow()
    if config.video_every:
        require_video()


def require_data(experiment: Experiment) -> None:
    """Raise an error before training if something that it needs is missing, or if recorded data cannot be read."""
    problems = experiment.config.training_problems()
    if experiment.env is not None:
        problems = [text for text in problems if not text.startswith("env_id")]
    if experiment.data is not None and experiment.data.given is not None:
        problems = [text for text in problems if not text.startswith("dataset")]
    if problems:
        raise ConfigError(problems)
    experiment.trainer.prepare()


def describe_environment(experiment: Experiment) -> dict[str, Any]:
    """The origin of the environment, for the metadata."""
    if experiment.env is None and not experiment.config.env_id:
        return {"source": "none", "description": "recorded data only"}
    if experiment.env is None:
        return {"source": "id", "description": experiment.config.env_id}
    return {"source": "object", "description": describe_env(experiment.env)}


def save_experiment(experiment: Experiment, path: Path) -> Path:
    """Write the complete state of an experiment as a checkpoint."""
    state = experiment.trainer.state_dict()
    if experiment.eval_state is not None:
        state["evaluation"] = experiment.eval_state
    about = {
        **collect_metadata(str(experiment.device)),
        "seed": experiment.config.seed,
        "environment": describe_environment(experiment),
        "env_steps": experiment.trainer.env_steps,
        "plugins": plugins_of(experiment.config),
        "resume_grade": _grade(experiment, state),
        **_about_data(experiment),
    }
    return save_checkpoint(path, state, experiment.config.to_dict(), about)


def _about_data(experiment: Experiment) -> dict[str, Any]:
    """What the metadata says about recorded data: its hash, and the spaces if there is no environment to ask."""
    about: dict[str, Any] = {}
    if experiment.data is not None and experiment.data.is_open:
        about["dataset"] = experiment.data.describe()
    if not experiment.config.env_id and experiment.env is None:
        spec = experiment.spec
        about["spaces"] = {
            "observation": space_to_json(spec.observation_space),
            "action": space_to_json(spec.action_space),
        }
    return about


def save_weights(experiment: Experiment, path: Path) -> Path:
    """Write a weights-only checkpoint to share: what acting needs, and nothing specific to this machine.

    It holds the policy's weights, the normalisation statistics and the number of training steps. Paths, device and
    hardware are left out.
    """
    config, collector = experiment.config, experiment.trainer.collector
    elsewhere: dict[str, Any] = {
        "output_dir": TrainConfig.output_dir,
        "init_from": None,
        "dataset": None,
        "device": "auto",
        "num_threads": None,
    }
    settings = config.algorithm
    if isinstance(settings, OffPolicyConfig):
        elsewhere["algorithm"] = dataclasses.replace(settings, prior_replay=None)
    normalizers = {"obs_normalizer": collector.obs_normalizer, "reward_normalizer": collector.reward_normalizer}
    state = {
        "algorithm": {"policy": experiment.trainer.algorithm.state_dict()["policy"]},
        "collector": {name: part.state_dict() for name, part in normalizers.items() if part is not None},
        "progress": experiment.trainer.progress.state_dict(),
    }
    machine = collect_metadata(str(experiment.device))
    about = {
        **{name: machine[name] for name in ("created", "versions")},
        "seed": config.seed,
        "environment": describe_environment(experiment),
        "env_steps": experiment.trainer.env_steps,
        "plugins": plugins_of(config),
        "resume_grade": WEIGHTS_ONLY,
        **_about_data(experiment),
    }
    return save_checkpoint(path, state, config.replace(**elsewhere).to_dict(), about)


def _grade(experiment: Experiment, state: dict[str, Any]) -> str:
    """How exactly a run can be resumed from this state."""
    if state.get("sampler", ...) is None:
        return LEARNER_ONLY
    evaluations_differ = experiment.config.eval_every and experiment.eval_obstacle is not None
    episodes_lost = state["collector"]["in_flight"] is None and not isinstance(experiment.trainer, OfflineTrainer)
    if episodes_lost or evaluations_differ:
        return EPISODE_BOUNDARY
    collector = experiment.trainer.collector
    is_async = isinstance(collector, Fleet) and collector.settings.mode == "async"
    return NOTHING_LOST if is_async else EXACT


def run_experiment(
    experiment: Experiment,
    end: int,
    *,
    run_dir: RunDirectory | None = None,
    callback: Callbacks = None,
    progress: bool = True,
    profiler: Profiler | None = None,
    learner_only: bool = False,
    on_signal: OnSignal = "raise",
) -> TrainResult:
    """Train until the position `end`. All files go to the run directory; without one, nothing is written."""
    config, trainer = experiment.config, experiment.trainer
    said = ""
    if config.eval_every and experiment.has_env:
        _ = experiment.evaluator  # fail now if the evaluation environment cannot be created
    if run_dir is not None:
        require_extras(config)
        this = _with_end(experiment, end)
        grade, obstacle = experiment.resume_grade()
        if progress:
            said = f"resume grade: {grade}" + (f" ({obstacle})" if obstacle else "")
        facts = {
            "environment": describe_environment(experiment),
            "resume_grade": grade,
            "plugins": plugins_of(config),
            **_about_data(experiment),
        }
        run_dir.begin(
            this,
            str(experiment.device),
            experiment.trainer.position,
            settings=changeable(this),
            learner_only=learner_only,
            accelerate=experiment.acceleration(),
            **facts,
        )
    _warn_if_schedules_are_over(experiment)
    try:
        user = as_callbacks(callback)
        callbacks = _callbacks(experiment, run_dir, user, progress)
        with (
            using_threads(config.num_threads),
            _stop_on_signals(trainer, None if run_dir is None else run_dir.path),
            _profiled(experiment, callbacks, profiler, run_dir),
        ):
            if said:  # from here on, the run saves on a signal
                _say(said)
            result = trainer.run(end, callbacks, new=user)
            if config.eval_every and experiment.has_env and not result.interrupted:
                _evaluate_at_the_end(experiment, result)
    except BaseException as error:
        if run_dir is not None:
            _record_failure(run_dir, experiment, error)
        raise
    if run_dir is not None:
        result.run_dir = run_dir.path
        result.checkpoint_path = max(checkpoints_of(run_dir.path), key=lambda path: int(path.name[5:]), default=None)
        try:
            _record_end(run_dir, experiment, result)
        except UnwritableError as error:
            warnings.warn(f"the run has ended and is saved, but its status could not be written: {error}", stacklevel=2)
    if trainer.signal is not None and on_signal == "raise":
        _pass_on(trainer.signal, result)
    return result


def check_on_signal(value: Any) -> None:
    """Refuse a value that is not one of `OnSignal`."""
    if value not in get_args(OnSignal):
        raise ConfigError(f"on_signal: got {value!r}, accepted: {', '.join(get_args(OnSignal))}")


def _pass_on(name: str, result: TrainResult) -> None:
    """Give a signal to the program: to its own handler, otherwise as KeyboardInterrupt or the end of the process."""
    number = signal.Signals[name]
    handler = signal.getsignal(number)
    try:
        if not callable(handler):
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        handler(number, None)
    except (KeyboardInterrupt, SystemExit) as error:
        saved = f"saved: {result.checkpoint_path}" if result.run_dir is not None else NOT_SAVED
        error.add_note(f"{name} ended the training after {result.env_steps:,} steps; {saved}")
        raise


def _with_end(experiment: Experiment, end: int) -> TrainConfig:
    """The config with the budget of the current phase."""
    progress = experiment.trainer.progress
    if isinstance(experiment.trainer, OfflineTrainer):
        return experiment.config.derived(total_updates=end - progress.env_steps)
    return experiment.config.derived(total_timesteps=end - progress.offline_updates)


def _record_end(run_dir: RunDirectory, experiment: Experiment, result: TrainResult) -> None:
    if result.final_evaluation is not None:
        run_dir.add_evaluation(experiment.trainer.position, result.final_evaluation, final=True)
    run_dir.update(
        status="stopped" if result.interrupted else "finished",
        env_steps=result.env_steps,
        best_return=result.best_return,
        stop_reason=result.stop_reason,
        accelerate=experiment.acceleration(),
    )


@contextmanager
def _profiled(
    experiment: Experiment, callbacks: list[Callback], profiler: Profiler | None, run_dir: RunDirectory | None
) -> Iterator[None]:
    """Measure the time per part, and write the profile however the run ends."""
    if profiler is None or run_dir is None:
        yield
        return
    try:
        with profiler.watching(watched_methods(experiment, callbacks)):
            yield
    finally:
        try:
            profiler.write(run_dir.path)
        except UnwritableError as error:
            warnings.warn(str(error), stacklevel=2)
        _say(profiler.table())


def _evaluate_at_the_end(experiment: Experiment, result: TrainResult) -> None:
    """Run the final evaluation. If a signal stops it, a resume repeats it, unless the run had ended early."""
    config, trainer = experiment.config, experiment.trainer
    seed = draw_seed(random_stream(config.seed, "final evaluation"))
    try:
        result.final_evaluation = _stoppable(experiment)(
            trainer.policy, config.eval_episodes, deterministic=config.eval_deterministic, seed=seed
        )
    except EvaluationStoppedError:
        if trainer.position < trainer.end:
            warnings.warn(f"no final evaluation: {trainer.signal} interrupted it", stacklevel=2)
        else:
            assert trainer.signal is not None
            result.interrupted, result.stop_reason = True, trainer.signal


def _stoppable(experiment: Experiment) -> EvaluateFn:
    """The evaluation function, which stops on a signal."""
    return functools.partial(experiment.evaluator.evaluate, stop=lambda: experiment.trainer.signal is not None)


def _record_failure(run_dir: RunDirectory, experiment: Experiment, error: BaseException) -> None:
    """Record the error in the metadata; if that fails too (full disk), the first error is kept."""
    try:
        run_dir.update(
            status="failed",
            env_steps=experiment.trainer.env_steps,
            error=f"{type(error).__name__}: {error}",
            accelerate=experiment.acceleration(),
        )
    except CheckpointError as second:
        error.add_note(f"The status 'failed' could not be written: {second}")
    else:
        error.add_note(f"The run is recorded as failed in {run_dir.path}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _warn_if_schedules_are_over(experiment: Experiment) -> None:
    """Warn if the schedules have reached their horizon: further training keeps their last values."""
    progress, settings = experiment.trainer.progress, experiment.config.algorithm
    names = [name for name in _schedules(settings) if name not in settings.unused()]
    if names and 0 < progress.horizon <= progress.position - progress.phase_start:
        warnings.warn(
            f"the schedules of {', '.join(names)} ended at step {progress.horizon} and stay at their last values; "
            "for new schedules, start a new run with init_from",
            stacklevel=3,
        )


def _schedules(settings: Any, prefix: str = "") -> Iterator[str]:
    """Names of the settings that are schedules, including those in sections."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Schedule):
            yield prefix + field.name
        elif dataclasses.is_dataclass(value):
            yield from _schedules(value, f"{prefix}{field.name}.")


def _callbacks(
    experiment: Experiment, run_dir: RunDirectory | None, user: list[Callback], progress: bool
) -> list[Callback]:
    """The run's callbacks in order: evaluation, stop conditions, user callbacks, logging, and last the checkpoint."""
    config = experiment.config
    callbacks: list[Callback] = []
    if isinstance(experiment.trainer, OfflineTrainer) and config.eval_every:
        callbacks.append(ValidationCallback(experiment.validation_batches, Every(config.eval_every)))
    if config.eval_every and experiment.has_env:
        callbacks.append(
            EvaluationCallback(
                _stoppable(experiment),
                Every(config.eval_every),
                config.eval_episodes,
                config.eval_deterministic,
                config.seed,
            )
        )
    if config.stop_reward is not None:
        callbacks.append(StopOnReward(config.stop_reward))
    if config.stop_patience is not None:
        callbacks.append(StopOnNoImprovement(config.stop_patience))
    if config.max_seconds is not None:
        callbacks.append(StopAfterSeconds(config.max_seconds))
    callbacks += user
    if run_dir is not None:
        callbacks += _file_callbacks(experiment, run_dir)
    if progress:
        callbacks.append(ProgressCallback(f"{config.algo} {config.env_id}".strip()))
    if run_dir is not None:
        callbacks.append(
            CheckpointCallback(
                lambda path: save_experiment(experiment, path),
                run_dir.path / "checkpoints",
                Every(config.checkpoint_every),
                config.checkpoint_keep,
                config.checkpoint_best,
            )
        )
    return callbacks


def _file_callbacks(experiment: Experiment, run_dir: RunDirectory) -> list[Callback]:
    config, path = experiment.config, run_dir.path
    history = list(read_metrics(path / METRICS))
    logged_at = max((entry["global_step"] for entry in history if "train/updates" in entry), default=-1)
    loggers: list[Logger] = [JsonlLogger(path / METRICS)]
    if config.tensorboard:
        loggers.append(TensorBoardLogger(path / "tensorboard", history))
    if config.wandb:
        loggers.append(WandbLogger(path, config.to_dict(), run_dir.run_id()))
    if config.mlflow:
        loggers.append(MlflowLogger(path, config.to_dict(), run_dir.run_id(), run_dir.metadata()))
    about = LoggedRun(path, config.to_dict(), run_dir.run_id(), history)
    loggers += [make_logger(logger, about) for logger in config.loggers]
    reference = None if experiment.data is None else experiment.data.reference()
    logging = LoggingCallback(loggers, Every(config.log_every), logged_at, reference)
    callbacks: list[Callback] = [EvaluationLog(run_dir), logging]
    if config.video_every:
        videos = path / "videos"
        callbacks.append(
            VideoCallback(
                lambda prefix: recorder(experiment, videos, prefix),
                Every(config.video_every),
                config.seed,
                config.eval_deterministic,
                stop=lambda: experiment.trainer.signal is not None,
            )
        )
    return callbacks


NOT_SAVED = "nothing is written without run_dir; the agent in memory has learned up to here"


@contextmanager
def _stop_on_signals(trainer: Trainer, run_dir: Path | None) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run after this iteration or evaluation; a second SIGINT ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: types.FrameType | None) -> None:
        name = signal.Signals(number).name
        trainer.interrupt(name)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        saving = NOT_SAVED if run_dir is None else f"then saving to {run_dir}"
        _say(f"\n{name}: finishing this iteration, {saving}; Ctrl-C stops immediately")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
