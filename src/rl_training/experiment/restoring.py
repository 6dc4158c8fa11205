"""Restore an experiment from files: loading, settings that may change on a resume, starting from trained weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gymnasium import spaces

from rl_training.contracts.arrays import ArrayObservation
from rl_training.contracts.errors import CheckpointError, ConfigError, RLTrainingError
from rl_training.contracts.spec import EnvSpec
from rl_training.contracts.state import Stateful, check_keys
from rl_training.data.formats.space_json import space_from_json
from rl_training.envs.factory import EnvLike
from rl_training.experiment.build import WEIGHTS_ONLY, Experiment, build_experiment
from rl_training.experiment.checkpointing import CONFIG, Checkpoint, find_checkpoint
from rl_training.experiment.config import NETWORK_LOGGERS, Layer, TrainConfig, resolve
from rl_training.experiment.metadata import collect_metadata
from rl_training.experiment.plugins import changed_plugins, require_plugins
from rl_training.runtime.collector import NoCollector
from rl_training.runtime.distributed.fleet import Fleet

MAY_CHANGE = frozenset(
    {"total_timesteps", "output_dir", "device", "num_threads", "env_timeout", "max_seconds", "stop_reward"}
    | {"stop_patience", "eval_every", "eval_episodes", "eval_deterministic", "eval_epsilon", "checkpoint_every"}
    | {"eval_max_steps"}
    | {"checkpoint_keep", "checkpoint_best", "video_every", "log_every", "tensorboard", "wandb", "mlflow", "loggers"}
    | {"init_from", "total_updates", "online"}
)
MAY_CHANGE_INSIDE = frozenset({"workers > backend", "workers > address"})
"""Settings that may change when a run is resumed; results do not depend on where workers run."""

SAME_BITS = frozenset({"system", "c_compiler"})
"""Machine properties that do not affect results: compiled functions give the same bits as torch."""


def load_experiment(
    path: str | Path,
    *,
    env: EnvLike | None = None,
    eval_env: EnvLike | None = None,
    trust: bool = False,
    config: TrainConfig | None = None,
    learner_only: bool = False,
) -> tuple[Experiment, Checkpoint]:
    """Restore the experiment from a checkpoint, or from a run's newest one.

    If an environment is given, new episodes begin in it; it may differ from the original one, also in number. A given
    `config` replaces the checkpoint's and may differ only in what a resume may change. With `learner_only`, the replay
    and unfinished episodes are not restored. If only these are damaged, the experiment is restored without them and
    `damage` says so.
    """
    try:
        return _load_experiment(path, env, eval_env, trust, config, learner_only)
    except CheckpointError as error:
        if learner_only:
            raise
        try:
            experiment, checkpoint = _load_experiment(path, env, eval_env, trust, config, True)
        except RLTrainingError:
            raise error from None
        experiment.damage = str(error)
        warnings.warn(f"{error}. The weights are intact: the agent can act, but cannot continue training", stacklevel=3)
        return experiment, checkpoint


def _load_experiment(
    path: str | Path,
    env: EnvLike | None,
    eval_env: EnvLike | None,
    trust: bool,
    config: TrainConfig | None,
    learner_only: bool,
) -> tuple[Experiment, Checkpoint]:
    checkpoint = find_checkpoint(path, learner_only=learner_only)
    require_environment(checkpoint, env)
    if config is None:
        off = {} if trust else dict.fromkeys(NETWORK_LOGGERS, False)  # not needed for acting
        config = config_of(checkpoint, trust=trust or env is not None, **off)
    else:
        refuse_changes(checkpoint, config)
    experiment = build_experiment(config, env, eval_env, spec=spec_of(checkpoint))
    try:
        restore(experiment, checkpoint, in_flight=env is None, learner_only=learner_only)
    except BaseException:
        experiment.close()
        raise
    return experiment, checkpoint


def spec_of(checkpoint: Checkpoint) -> EnvSpec | None:
    """The spaces that a run without an environment saved; None for the others."""
    saved = checkpoint.metadata.get("spaces")
    if not isinstance(saved, Mapping):
        return None
    with _naming(checkpoint, "the saved spaces are damaged"):
        return EnvSpec(space_from_json(saved["observation"]), space_from_json(saved["action"]), "dataset")


def config_of(checkpoint: Checkpoint, *, trust: bool, **changes: Any) -> TrainConfig:
    """The config stored in a checkpoint, with changes applied."""
    require_plugins(checkpoint.metadata, str(checkpoint.path))
    saved = Layer(checkpoint.config, str(checkpoint.path / CONFIG), trusted=trust)
    try:
        return resolve([saved, Layer(changes, "changes")])
    except ConfigError as error:
        if not any("Known: " in problem for problem in error.problems):
            raise
        raise ConfigError(
            [
                *error.problems,
                "A part of your own (encoder, network, logger, wrapper, ...) has to be registered before loading: "
                "import the module that registers it",
            ]
        ) from error


def restore(
    experiment: Experiment, checkpoint: Checkpoint, *, in_flight: bool = True, learner_only: bool = False
) -> None:
    """Load a checkpoint's state into an experiment; if it does not fit, the error names the checkpoint."""
    config = experiment.config
    with _naming(checkpoint, f"does not fit {config.algo} on {config.env_id}"):
        state = dict(checkpoint.state)
        eval_state = state.pop("evaluation", None)
        if checkpoint.metadata.get("resume_grade") == WEIGHTS_ONLY:
            state = _completed(experiment, state)
        elif learner_only or not in_flight:
            replay = {"sampler": None} if learner_only and "sampler" in state else {}
            state = {**state, **replay, "collector": {**state["collector"], "in_flight": None}}
        experiment.trainer.load_state_dict(state)
        _check_observation(experiment.trainer.collector.obs, experiment)
    experiment.eval_state = eval_state if in_flight and not learner_only else None
    experiment.trainer.restored_from = str(checkpoint.path)


def _completed(experiment: Experiment, state: dict[str, Any]) -> dict[str, Any]:
    """Complete a weights-only checkpoint as for a new run: new optimizer and random generators, no replay."""
    check_keys("a weights-only checkpoint", ("algorithm", "collector", "progress"), state)
    _start_from(experiment, state)
    new = experiment.trainer.state_dict()
    replay = {"sampler": None} if "sampler" in new else {}
    return {**new, **replay, "collector": {**new["collector"], "in_flight": None}, "progress": state["progress"]}


def _check_observation(obs: ArrayObservation | None, experiment: Experiment) -> None:
    """Check that the last observation is in the environment's observation space, or is None."""
    collector = experiment.trainer.collector
    if obs is None or isinstance(collector, (NoCollector, Fleet)):
        return
    space, num_envs = experiment.spec.observation_space, collector.env.num_envs
    if isinstance(space, spaces.Dict) or isinstance(obs, dict):
        parts = space.spaces if isinstance(space, spaces.Dict) else {}
        check_keys("the last observation", parts.keys(), obs)
        pairs = [(part, obs[key]) for key, part in parts.items()]
    else:
        pairs = [(space, obs)]
    for part, array in pairs:
        if array.dtype.kind not in "biuf" or array.shape != (num_envs, *(part.shape or ())):
            raise CheckpointError(f"the last observation is not a batch of {num_envs} observations of {part}")


def initialize(experiment: Experiment, path: Path) -> None:
    """Start from the weights and normalisation statistics of a trained agent; everything else is as in a new run."""
    checkpoint = find_checkpoint(path, learner_only=True)
    with _naming(checkpoint, f"cannot be started from{_other(checkpoint, experiment.config)}"):
        _start_from(experiment, checkpoint.state)


def _other(checkpoint: Checkpoint, config: TrainConfig) -> str:
    """For messages: that a checkpoint is of another algorithm or environment, if it is."""
    saved = [str(checkpoint.config.get(name)) for name in ("algo", "env_id")]
    own = [config.algo, config.env_id]
    if saved == own:
        return ""
    return (
        f": it holds {saved[0]} on {saved[1]}, and this run is {own[0]} on {own[1]}; networks must have the same shapes"
    )


def _start_from(experiment: Experiment, state: dict[str, Any]) -> None:
    collector = experiment.trainer.collector
    trained = state["collector"].get("obs_normalizer")
    if (trained is None) != (collector.obs_normalizer is None):
        raise ConfigError("normalize_obs must be the same as in this checkpoint")
    experiment.trainer.algorithm.start_from(state["algorithm"]["policy"])
    for name in ("obs_normalizer", "reward_normalizer"):
        part, saved = getattr(collector, name), state["collector"].get(name)
        if isinstance(part, Stateful) and saved is not None:
            part.load_state_dict({**part.state_dict(), "moments": saved["moments"]})


class _naming:  # noqa: N801 - used like a function
    """Converts any exception from a state that does not fit into a `CheckpointError` that names the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, problem: str) -> None:
        self.text = f"{checkpoint.path}: {problem}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            reason = str(error) if isinstance(error, RLTrainingError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.text}: {reason}") from error


def require_environment(checkpoint: Checkpoint, env: EnvLike | None) -> None:
    """Raise an error if the environment was a Python object, which cannot be recreated from files."""
    about = checkpoint.metadata.get("environment")
    if env is None and isinstance(about, Mapping) and about.get("source") == "object":
        raise ConfigError(
            f"{checkpoint.path}: this agent was trained on an environment object ({about.get('description')}), "
            "not on a registered id, so the environment cannot be recreated from files. In Python, pass the "
            "environment: load(path, env=...) or resume(path, env=...)."
        )


def refuse_changes(checkpoint: Checkpoint, config: TrainConfig) -> None:
    """Refuse to resume with changed settings other than those in `MAY_CHANGE`; all are reported together.

    A run that learned from recorded data without an environment may get one.
    """
    # parsed by this version: settings newer than the checkpoint have their defaults
    before = dict(_leaves(config_of(checkpoint, trust=True).to_dict()))
    after = dict(_leaves(config.to_dict()))
    allowed_too = {"env_id", "env_kwargs"} if before.get("env_id") == "" else set()  # data only, until now
    problems = [
        f"{name}: was {before.get(name)!r} and cannot become {after.get(name)!r} in a resumed run"
        for name in sorted(before.keys() | after.keys())
        if name.split(" > ")[0] not in MAY_CHANGE | allowed_too
        and name not in MAY_CHANGE_INSIDE
        and before.get(name) != after.get(name)
    ]
    if problems:
        allowed = ", ".join(sorted(MAY_CHANGE - {"init_from", "output_dir"}))
        raise ConfigError(
            [
                *problems,
                f"A resumed run may change: {allowed}. To change other settings, start a new run with init_from.",
            ]
        )


def refuse_edits(config: TrainConfig, where: Path, history: Any, given: Collection[str] = ()) -> None:
    """Refuse an edited config.yaml: it records the last start; settings are changed by passing them to `resume`.

    `history` is from the run's metadata; `given` are the settings that this resume changes.
    """
    starts = [entry for entry in history if isinstance(entry, Mapping)] if isinstance(history, list) else []
    values = changeable(config)
    problems = []
    for name in sorted(values.keys() - set(given)):
        # the last two: a process may be killed between writing its history entry and its config.yaml
        began = [start[name] for start in map(_settings_of, starts[-2:]) if name in start]
        if began and values[name] not in began:
            problems.append(
                f"{where} > {name}: is {values[name]!r}, but the run was started with {began[-1]!r}. Restore the old "
                f"value, and pass the new one to resume: --{name.replace('_', '-')} (in Python, {name}=...)"
            )
    if problems:
        raise ConfigError(problems)


def changeable(config: TrainConfig) -> dict[str, Any]:
    """The settings that may change on a resume, except paths."""
    return {name: value for name, value in config.to_dict().items() if name in MAY_CHANGE - {"output_dir", "init_from"}}


def _settings_of(start: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings recorded for one start of a run; older versions recorded only the number of steps."""
    settings = start.get("settings")
    return settings if isinstance(settings, Mapping) else {k: v for k, v in start.items() if k == "total_timesteps"}


def _leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, f"{name} > {key}" if name else str(key))
    else:
        yield name, data


def differing_machine(before: Mapping[str, Any], device: str) -> str | None:
    """The differences between the run's previous machine and this one that affect results; None if there are none."""
    now = collect_metadata(device)
    changes = changed_plugins(before)
    for group in ("versions", "hardware"):
        old = before.get(group) if isinstance(before.get(group), Mapping) else {}
        assert isinstance(old, Mapping)
        names = [name for name in now[group] if name in old and old[name] != now[group][name]]
        names = [name for name in names if name not in SAME_BITS]
        changes += [f"{name} {old[name]} -> {now[group][name]}" for name in names]
    return ", ".join(changes) or None
