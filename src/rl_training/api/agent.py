"""The agent: `learn`, `predict`, `evaluate`, `save`, `load` in one object."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from rl_training.algorithms.registry import get_spec
from rl_training.api.session import (
    Callbacks,
    OnSignal,
    check_on_signal,
    describe_environment,
    require_data,
    run_experiment,
    save_experiment,
    save_weights,
)
from rl_training.contracts.algorithm import Algorithm, Policy
from rl_training.contracts.arrays import ArrayObservation
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import CheckpointError, ConfigError, DataError
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.contracts.spec import ACTION_MASK, EnvSpec
from rl_training.data.dataset import Dataset, read_dataset
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.settings import OffPolicyConfig
from rl_training.deploy.export import ExportFormat, export_policy
from rl_training.deploy.fitted_q import FQEConfig
from rl_training.deploy.hub import CARD, VIDEO, download, model_card, require_hub, upload
from rl_training.deploy.off_policy_evaluation import Method, PolicyValue, estimate_value
from rl_training.deploy.video import recorder, require_video
from rl_training.envs.advice import require_env_like
from rl_training.envs.factory import EnvLike, describe_env
from rl_training.envs.masks import has_choice, mask_size
from rl_training.experiment.build import Experiment, build_experiment
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.config import Layer, TrainConfig, merge, resolve
from rl_training.experiment.lock import run_lock
from rl_training.experiment.metadata import collect_metadata
from rl_training.experiment.plugins import plugins_of
from rl_training.experiment.presets import find_preset, presets
from rl_training.experiment.replay import read_replay, save_replay
from rl_training.experiment.restoring import initialize, load_experiment
from rl_training.experiment.runs import RunDirectory
from rl_training.experiment.schema import build, to_plain, unknown_key
from rl_training.runtime.collector import to_tensors
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.offline import OfflineTrainer
from rl_training.runtime.threads import using_threads
from rl_training.runtime.trainer import TrainResult

AgentT = TypeVar("AgentT", bound="Agent")


class Agent:
    """Base of `PPO`, `A2C` and all other ready-to-use classes.

    Args:
        env: an environment id, a callable that creates an environment, an environment, a vector environment, or a
            complete `TrainConfig`. Without one, `dataset` gives the spaces, and the agent learns from it alone.
        eval_env: an environment for evaluation; by default one like `env`.
        **settings: any field of `TrainConfig` or of the algorithm's config.

    Example:
        >>> agent = PPO("CartPole-v1", num_envs=8, seed=1, clip_coef=0.1)  # doctest: +SKIP
        >>> agent.learn(100_000)  # doctest: +SKIP
        >>> action, state = agent.predict(obs, deterministic=True)  # doctest: +SKIP
    """

    algo: ClassVar[str] = ""
    _given: frozenset[str] = frozenset()
    """Settings that were given as keywords."""

    def __init__(
        self, env: EnvLike | TrainConfig | None = None, *more: Any, eval_env: EnvLike | None = None, **settings: Any
    ) -> None:
        if more:
            name = type(self).__name__
            raise ConfigError(
                f"{name} takes one positional argument, the environment, got {1 + len(more)}: {name}(env, seed=1). "
                "There is no policy name such as 'MlpPolicy': networks follow from the observation space"
            )
        if not isinstance(env, TrainConfig):
            require_env_like(env)
        if isinstance(env, TrainConfig):
            config, given = _override(env, settings, self.algo), None
            if config.algo != self.algo:
                raise ConfigError(f"algo: the config is for '{config.algo}', but this class is {type(self).__name__}")
        else:
            given = None if isinstance(env, str) else env
            config = resolve([Layer(_layer(self.algo, env, settings), type(self).__name__)])
        self._given = frozenset(settings)
        self._experiment = build_experiment(config, given, eval_env)
        if config.init_from is not None:
            initialize(self._experiment, config.init_from)
        self._rng = random_stream(config.seed, "predict")

    @classmethod
    def _from_experiment(cls: type[AgentT], experiment: Experiment) -> AgentT:
        agent = cls.__new__(cls)
        agent._experiment = experiment
        agent._rng = random_stream(experiment.config.seed, "predict")
        return agent

    @classmethod
    def from_preset(
        cls: type[AgentT], env: str, *, env_id: str | None = None, eval_env: EnvLike | None = None, **settings: Any
    ) -> AgentT:
        """An agent with the settings of a preset, found by environment id or by the preset's name.

        `env_id` applies them to another environment; a preset for a family, such as `ppo/atari`, needs it.

        Example:
            >>> PPO.from_preset("CartPole-v1", seed=1)  # doctest: +SKIP
            >>> PPO.from_preset("ppo/atari", env_id="ALE/Seaquest-v5")  # doctest: +SKIP
        """
        named = presets().get(env) or presets().get(f"{cls.algo}/{env}")
        preset = named or find_preset(cls.algo, env, settings.get("env_kwargs"))
        if preset is None or preset.algo != cls.algo:
            known = ", ".join(sorted(p.subject for p in presets().values() if p.algo == cls.algo))
            raise ConfigError(f"there is no {cls.algo} preset for '{env}'. There are presets for: {known}")
        if env_id is None and (named is None or preset.is_family):
            env_id = preset.env_id if named is not None else env  # a family is refused: name one environment
        place = {} if env_id is None else {"env_id": env_id}
        own = split_settings(cls.algo, settings, env_id or preset.env_id)
        return cls(resolve([preset.layer(), Layer({**place, **own}, cls.__name__)]), eval_env=eval_env)

    @classmethod
    def load(
        cls: type[AgentT],
        path: str | Path,
        env: EnvLike | None = None,
        *,
        eval_env: EnvLike | None = None,
        trust: bool = False,
        learner_only: bool = False,
    ) -> AgentT:
        """Load an agent from a path (a checkpoint, or a run directory: its newest one). `learn` continues training.

        Agents that were trained on an environment object need `env`. `trust` allows the file to name a module to
        import (`package:Env-v0`), and `learn` to log to W&B or MLflow if the file says so; without it they are off.
        With `learner_only`, the replay and unfinished episodes are not read: enough for acting; `learn` then starts
        with an empty replay and new episodes.
        """
        experiment, checkpoint = load_experiment(
            path, env=env, eval_env=eval_env, trust=trust, learner_only=learner_only
        )
        if cls.algo and experiment.config.algo != cls.algo:
            experiment.close()
            raise CheckpointError(
                f"{checkpoint.path} holds a '{experiment.config.algo}' agent, not '{cls.algo}'. rl_training.load(path) "
                "takes any"
            )
        return cls._from_experiment(experiment)

    def learn(
        self,
        total_timesteps: int | None = None,
        *,
        callback: Callbacks = None,
        progress: bool = True,
        run_dir: str | Path | None = None,
        on_signal: OnSignal = "raise",
    ) -> TrainResult:
        """Train for this many more steps (default: the config's). Writes nothing unless `run_dir` is given.

        The first call sets the horizon of schedules. SIGINT (Ctrl-C) and SIGTERM end the training after the current
        iteration, with a checkpoint if there is a `run_dir`; then `KeyboardInterrupt` is raised, or the process ends.
        With `on_signal="return"`, the result is returned instead.
        """
        check_on_signal(on_signal)
        more = _whole("total_timesteps", self.config.total_timesteps if total_timesteps is None else total_timesteps)
        self._require_whole()
        if isinstance(self._experiment.trainer, OfflineTrainer):
            self._begin_phase(self.config.replace(online=True), self._given_data())
        return self._run(more, callback, progress, run_dir, on_signal)

    def learn_offline(
        self,
        dataset: str | Path | Dataset | None = None,
        total_updates: int | None = None,
        *,
        callback: Callbacks = None,
        progress: bool = True,
        run_dir: str | Path | None = None,
        on_signal: OnSignal = "raise",
    ) -> TrainResult:
        """Make this many more gradient steps on recorded data, without the environment.

        `dataset` is a file, `minari:<id>` or a `Dataset` (default: the config's). `learn` then goes on online: part of
        each batch still comes from the data (setting `prior_ratio`).

        Example:
            >>> agent = IQL("Pendulum-v1")  # doctest: +SKIP
            >>> agent.learn_offline("pendulum.npz", 50_000)  # doctest: +SKIP
            >>> agent.learn(10_000)  # doctest: +SKIP
        """
        check_on_signal(on_signal)
        more = _whole("total_updates", (self.config.total_updates or None) if total_updates is None else total_updates)
        self._require_whole()
        given = dataset if isinstance(dataset, Dataset) else None
        offline = isinstance(self._experiment.trainer, OfflineTrainer)
        if offline and dataset is None:
            self._experiment.config = self.config.derived(total_updates=more)
        else:
            named = {} if dataset is None or given is not None else {"dataset": str(dataset)}
            config = self.config.replace(online=False, total_updates=more, **named)
            self._begin_phase(config, given or (self._given_data() if dataset is None else None))
        return self._run(more, callback, progress, run_dir, on_signal)

    def _given_data(self) -> Dataset | None:
        data = self._experiment.data
        return None if data is None else data.given

    def _begin_phase(self, config: TrainConfig, dataset: Dataset | None) -> None:
        """Go on with another trainer: same algorithm state, counts and statistics, data from another source."""
        old = self._experiment
        new = build_experiment(config, old.env, old.eval_env, dataset=dataset)
        try:
            require_data(new)
            state = old.trainer.state_dict()
            if isinstance(old.trainer, OfflineTrainer) and isinstance(new.trainer, OfflineTrainer):
                state["sampler"] = None  # other data
            new.trainer.load_state_dict(state)
        except BaseException:
            new.close()
            raise
        old.close()
        self._experiment = new

    def _run(
        self, more: int, callback: Callbacks, progress: bool, run_dir: str | Path | None, on_signal: OnSignal
    ) -> TrainResult:
        require_data(self._experiment)
        self._warn_of_settings_without_effect(more, run_dir)
        position = self._experiment.trainer.position
        directory = None
        if run_dir is not None:
            directory = RunDirectory(Path(run_dir))
            directory.join(position)
        total = position + more
        with nullcontext() if directory is None else run_lock(directory.path):
            if directory is not None:
                directory.recover()
            return run_experiment(
                self._experiment,
                total,
                run_dir=directory,
                callback=callback,
                progress=progress,
                on_signal=on_signal,
            )

    def _warn_of_settings_without_effect(self, more: int, run_dir: str | Path | None) -> None:
        """Warn of chosen settings that have no effect in this `learn`; the warning shows the caller's line."""
        config, settings = self.config, self.config.algorithm
        if run_dir is None:
            chosen = [name for name in ("wandb", "mlflow", "loggers", "video_every") if getattr(config, name)]
            chosen += ["checkpoint_every"] * ("checkpoint_every" in self._given)
            if chosen:
                warnings.warn(
                    f"{', '.join(chosen)}: no effect without a run directory; pass learn(run_dir=...)", stacklevel=4
                )
        trainer = self._experiment.trainer
        if "box_actions" not in self._given and (problem := self._experiment.actions.problem()):
            warnings.warn(problem, stacklevel=4)
        if isinstance(trainer, OffPolicyTrainer) and isinstance(settings, OffPolicyConfig):
            end = trainer.env_steps + more
            if end <= settings.learning_starts:
                warnings.warn(
                    f"nothing is learned: the training ends at step {end:,}, and learning_starts is "
                    f"{settings.learning_starts:,}",
                    stacklevel=4,
                )

    def predict(
        self,
        obs: Any,
        state: Any = None,
        *,
        deterministic: bool = True,
        episode_start: Any = None,
        action_mask: Any = None,
    ) -> tuple[Any, Any]:
        """Actions for one observation or a batch, in the environment's format, and the policy's next state.

        With the setting `action_masks`, the mask is an entry of the observation or given as `action_mask`.
        """
        batch, single = self._batch(self._with_mask(obs, action_mask))
        out = self.policy.act(
            to_tensors(batch, self._experiment.device),
            deterministic=deterministic,
            state=state,
            episode_start=None if episode_start is None else torch.as_tensor(episode_start),
            rng=self._rng,
        )
        action = self._experiment.actions.to_env(out.action.cpu().numpy())
        return (action[0] if single else action), out.state

    def value(self, obs: Any, *, action_mask: Any = None) -> Any:
        """The critic's value estimate: a float for one observation, an array [B] for a batch."""
        batch, single = self._batch(self._with_mask(obs, action_mask))
        values = self.policy.value(to_tensors(batch, self._experiment.device)).cpu().numpy()
        return float(values[0]) if single else values

    def evaluate(
        self, num_episodes: int = 10, *, deterministic: bool | None = None, seed: int | None = None
    ) -> EvaluationResult:
        """Run full episodes in the agent's evaluation environments. Equal seeds give equal episodes.

        By default, the settings `eval_deterministic` and `eval_epsilon` determine how actions are chosen.
        """
        return self._evaluate(self._experiment.evaluator, num_episodes, deterministic, seed)

    def estimate_value(
        self,
        dataset: str | Path | Dataset,
        method: Method = "fqe",
        *,
        deterministic: bool | None = None,
        gamma: float | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> PolicyValue:
        """The policy's mean discounted return, estimated from recorded episodes (off-policy evaluation).

        Methods: `fqe` (fitted Q evaluation; `settings` are fields of `FQEConfig`), `is`, `wis` and `pdis` (ordinary,
        weighted and per-decision importance sampling), and `dr` (doubly robust: both). All but `fqe` need the column
        `log_prob` in the dataset. By default, `eval_deterministic` and the algorithm's `gamma` apply.

        Example:
            >>> agent.estimate_value("pendulum.npz", num_updates=20_000).value  # doctest: +SKIP
        """
        problems: list[str] = []
        checked = build(FQEConfig, settings, "estimate_value", problems)
        if problems:
            raise ConfigError(problems)
        data = dataset if isinstance(dataset, Dataset) else read_dataset(dataset, env=self._experiment.spec)
        if deterministic is None:
            deterministic = self.config.eval_deterministic
        return estimate_value(
            self._experiment, data, method, deterministic=deterministic, gamma=gamma, seed=seed, settings=checked
        )

    def record_video(
        self,
        directory: str | Path,
        num_episodes: int = 1,
        *,
        deterministic: bool | None = None,
        seed: int | None = None,
    ) -> EvaluationResult:
        """Record episodes as mp4 files (extra `video`)."""
        prefix = f"{self.config.algo}-step-{self.num_timesteps}"
        evaluator = recorder(self._experiment, Path(directory), prefix, num_episodes)
        return self._play(evaluator, num_episodes, deterministic, seed)

    def render(
        self, num_episodes: int = 1, *, deterministic: bool | None = None, seed: int | None = None
    ) -> EvaluationResult:
        """Render episodes on the screen."""
        return self._play(self._experiment.viewer(), num_episodes, deterministic, seed)

    def _play(
        self, evaluator: Evaluator, num_episodes: int, deterministic: bool | None, seed: int | None
    ) -> EvaluationResult:
        try:
            return self._evaluate(evaluator, num_episodes, deterministic, seed)
        finally:
            evaluator.close()

    def _evaluate(
        self, evaluator: Evaluator, num_episodes: int, deterministic: bool | None, seed: int | None
    ) -> EvaluationResult:
        if num_episodes < 1:
            raise ConfigError(f"num_episodes: must be at least 1, got {num_episodes}")
        if seed is None:
            seed = draw_seed(random_stream(self.config.seed, "evaluate"))
        if deterministic is None:
            deterministic = self.config.eval_deterministic
        with using_threads(self.config.num_threads):
            return evaluator.evaluate(self.policy, num_episodes, deterministic=deterministic, seed=seed)

    def save(self, path: str | Path, *, weights_only: bool = False) -> Path:
        """Write the agent (its complete state and metadata) as a checkpoint directory.

        With `weights_only`, write only what acting needs: `learn` then starts from the weights like a new run.
        """
        if weights_only:
            return save_weights(self._experiment, Path(path))
        self._require_whole()
        return save_experiment(self._experiment, Path(path))

    def _require_whole(self) -> None:
        if self._experiment.damage is not None:
            raise CheckpointError(
                f"{self._experiment.damage}. The weights are intact. To continue training from them with an empty "
                "replay buffer, load the agent with learner_only=True; to save them, use save(weights_only=True)"
            )

    def export(self, path: str | Path, format: ExportFormat = "onnx") -> dict[str, Any]:  # noqa: A002 - what it is
        """Write the deterministic policy as one file that runs without this package: ONNX, or a torch.export archive.

        It takes raw observations of the environment and returns the actions of `predict`. Both are compared on random
        observations before the file is written. Returns the file's metadata.

        Example:
            >>> agent.export("policy.onnx")  # doctest: +SKIP
            >>> agent.export("policy.pt2", format="torch-export")  # doctest: +SKIP
        """

        def predict(obs: Any, state: Any, episode_start: Any) -> tuple[Any, Any]:
            return self.predict(obs, state, deterministic=True, episode_start=episode_start)

        return export_policy(self._experiment, Path(path), format, predict)

    def push_to_hub(self, repo_id: str, *, num_episodes: int = 20, video: bool = False, private: bool = False) -> str:
        """Upload the agent (as `save(weights_only=True)`) and a model card with an evaluation (extra `hub`).

        `video` adds a recorded episode (extra `video`). Returns the URL of the repository.
        """
        require_hub()
        if video:
            require_video()
        with tempfile.TemporaryDirectory() as scratch:
            folder = save_weights(self._experiment, Path(scratch) / "agent")
            result = self.evaluate(num_episodes)
            if video:
                self.record_video(Path(scratch) / "videos")
                (video_file,) = (Path(scratch) / "videos").glob("*.mp4")
                video_file.rename(folder / VIDEO)
            title, config = get_spec(self.config.algo).title, load_checkpoint(folder).config
            card = model_card(repo_id, title, TrainConfig.from_dict(config), self.num_timesteps, result, video=video)
            (folder / CARD).write_text(card, encoding="utf-8")
            return upload(folder, repo_id, private=private)

    def save_replay(self, path: str | Path) -> Path:
        """Write only the replay buffer, for another agent or as prior data (setting `prior_replay`)."""
        self._require_whole()
        return save_replay(Path(path), self._off_policy().sampler.buffer, self.config.to_dict())

    def load_replay(self, path: str | Path) -> None:
        """Replace the replay buffer by a saved one; priorities are reset."""
        trainer = self._off_policy()
        buffer = trainer.sampler.buffer
        size = buffer.num_rows * buffer.num_envs
        trainer.replace_replay(read_replay(Path(path), self._experiment.spec, size, buffer.num_envs))

    def _off_policy(self) -> OffPolicyTrainer:
        trainer = self._experiment.trainer
        if not isinstance(trainer, OffPolicyTrainer):
            raise ConfigError(f"{type(self).__name__} is on-policy and has no replay buffer")
        return trainer

    @property
    def config(self) -> TrainConfig:
        """The resolved config."""
        return self._experiment.config

    @property
    def policy(self) -> Policy:
        """The policy, which chooses actions."""
        return self.algorithm.policy

    @property
    def algorithm(self) -> Algorithm[Any]:
        """The learning algorithm."""
        return self._experiment.trainer.algorithm

    @property
    def spec(self) -> EnvSpec:
        """The spaces that the agent was made for."""
        return self._experiment.spec

    @property
    def device(self) -> torch.device:
        """The device of the networks."""
        return self._experiment.device

    @property
    def env(self) -> VectorEnv[Any, Any, Any] | None:
        """The vector environment that the agent trains in; None while it learns from recorded data alone."""
        adapter = getattr(self._experiment.trainer.collector, "env", None)
        return getattr(adapter, "env", None)

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """The replay buffer of an off-policy agent."""
        return self._off_policy().sampler.buffer

    def get_parameters(self) -> dict[str, Any]:
        """Copies of the policy's weights by name: plain data and arrays."""
        saved: dict[str, Any] = copy.deepcopy(self.algorithm.state_dict()["policy"])
        return saved

    def set_parameters(self, parameters: dict[str, Any]) -> None:
        """Set the weights that `get_parameters` of an agent with the same networks returned; optimizers start anew."""
        self.algorithm.start_from(copy.deepcopy(parameters))

    @property
    def num_timesteps(self) -> int:
        """Environment steps so far."""
        return self._experiment.trainer.env_steps

    @property
    def position(self) -> int:
        """Environment steps plus gradient steps on recorded data; what logs and checkpoints count."""
        return self._experiment.trainer.position

    @property
    def metadata(self) -> dict[str, Any]:
        """Config, seed, versions, hardware and environment, as `save` writes them."""
        return {
            **collect_metadata(str(self._experiment.device)),
            "seed": self.config.seed,
            "environment": describe_environment(self._experiment),
            "plugins": plugins_of(self.config),
            "config": self.config.to_dict(),
            "env_steps": self.num_timesteps,
        }

    def close(self) -> None:
        """Close the environments."""
        self._experiment.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config.env_id!r}, seed={self.config.seed}, steps={self.num_timesteps})"

    def _with_mask(self, obs: Any, action_mask: Any) -> Any:
        """The observation in the format of the agent's environment, including its mask."""
        spec = self._experiment.spec
        if not spec.action_masks:
            if action_mask is not None:
                raise ConfigError("action_mask: this agent was created without action_masks=True, so it takes no mask")
            return obs
        assert isinstance(spec.observation_space, spaces.Dict)
        wrapped = isinstance(obs, Mapping) and (set(obs) | {ACTION_MASK}) == set(spec.observation_space.spaces)
        entries = dict(obs) if wrapped else {"observation": obs}
        if action_mask is not None:
            entries[ACTION_MASK] = action_mask
        if ACTION_MASK not in entries:
            raise DataError("this agent uses action masks: pass action_mask=...")
        mask, size = np.asarray(entries[ACTION_MASK]), mask_size(spec.action_space)
        if mask.ndim not in (1, 2) or mask.shape[-1] != size:
            raise DataError(f"action_mask: expected shape ({size},) or a batch of that, got {mask.shape}")
        if not has_choice(mask, spec.action_space).all():
            raise DataError("action_mask: marks no action as valid")
        return entries

    def _batch(self, obs: Any) -> tuple[ArrayObservation, bool]:
        """A normalised batch for the policy, and whether a single observation was given."""
        space = self._experiment.spec.observation_space
        arrays, single = _as_batch(obs, space)
        normalizer = self._experiment.trainer.collector.obs_normalizer
        return (arrays if normalizer is None else normalizer(arrays)), single


def _as_batch(obs: Any, space: spaces.Space[Any]) -> tuple[ArrayObservation, bool]:
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping) or set(obs) != set(space.spaces):
            given = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise DataError(f"expected an observation with the keys {sorted(space.spaces)}, got {given}")
        parts = {key: _as_batch(obs[key], part) for key, part in space.spaces.items()}
        singles = {single for _, single in parts.values()}
        if len(singles) != 1:
            raise DataError("some entries of the observation have a batch dimension and some do not")
        return {key: array for key, (array, _) in parts.items()}, singles.pop()  # type: ignore[misc]
    raw = np.asarray(obs)
    array = np.array(raw, dtype=space.dtype, order="C")
    if array.dtype.kind in "iub" and not np.array_equal(array, raw):
        raise DataError(f"the observation does not fit {space}: it has values outside of the range of {array.dtype}")
    shape = tuple(space.shape or ())
    if array.shape == shape:
        return array[None], True
    if array.shape[1:] == shape and array.ndim == len(shape) + 1:
        return array, False
    raise DataError(f"expected an observation of shape {shape} or a batch of them, got shape {array.shape}")


def _layer(algo: str, env: EnvLike | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as a config layer, including the number of environments of an environment object."""
    given = {"algo": algo, "env_id": "" if env is None else describe_env(env)}
    data = split_settings(algo, settings, given["env_id"])
    if "atari" in data and not isinstance(env, str):
        raise ConfigError(
            "atari: applies only to environments created by id; wrap your environment object before you pass it"
        )
    if isinstance(env, VectorEnv):
        if data.get("num_envs", env.num_envs) != env.num_envs:
            raise ConfigError(
                f"num_envs: got {data['num_envs']}, but the vector environment has {env.num_envs}; leave num_envs out"
            )
        data["num_envs"] = env.num_envs
    elif isinstance(env, gym.Env):
        data.setdefault("num_envs", 1)
        if data["num_envs"] != 1:
            raise ConfigError(
                f"num_envs: got one environment object and num_envs {data['num_envs']}; pass a callable that "
                "creates environments"
            )
    return {**data, **given}


def split_settings(algo: str, settings: Mapping[str, Any], env_id: str = "any") -> dict[str, Any]:
    """Sort keyword arguments into fields of `TrainConfig` and of the algorithm's config; unknown ones are errors.

    If there are unknown ones, problems of the other settings with `env_id` are reported as well.
    """
    run_fields = {field.name for field in dataclasses.fields(TrainConfig)} - {"algo", "env_id"}
    own_fields = {field.name for field in dataclasses.fields(get_spec(algo).config)}
    known, title = run_fields | own_fields, get_spec(algo).title
    data = {key: value for key, value in settings.items() if key in run_fields}
    own = {key: value for key, value in settings.items() if key in own_fields}
    if own:
        base = to_plain(data.get("algorithm") or {})
        data["algorithm"] = merge(base, own) if isinstance(base, Mapping) else base
    problems = [unknown_key(title, key, known) for key in settings if key not in known]
    if problems:
        try:
            resolve([Layer({"algo": algo, "env_id": env_id, **data}, title)])
        except ConfigError as error:
            problems += error.problems
        raise ConfigError(problems)
    return data


def _override(config: TrainConfig, settings: Mapping[str, Any], algo: str) -> TrainConfig:
    if not settings:
        return config
    changes = split_settings(algo, settings, config.env_id)
    return config.updated(changes, "keywords")


def make_agent(
    algo: str, env: EnvLike | TrainConfig | None = None, *, eval_env: EnvLike | None = None, **settings: Any
) -> Agent:
    """Create an agent by the lower-case name of its algorithm; arguments as for its class.

    Example:
        >>> make_agent("ppo", "CartPole-v1", seed=1)  # doctest: +SKIP
    """
    from rl_training.api import facades

    cls: type[Agent] = getattr(facades, get_spec(algo).title)
    return cls(env, eval_env=eval_env, **settings)


def load(
    path: str | Path,
    env: EnvLike | None = None,
    *,
    eval_env: EnvLike | None = None,
    trust: bool = False,
    learner_only: bool = False,
) -> Agent:
    """Load an agent of any algorithm from a path; see `Agent.load`."""
    experiment, _ = load_experiment(path, env=env, eval_env=eval_env, trust=trust, learner_only=learner_only)
    return agent_of(experiment)


def agent_of(experiment: Experiment) -> Agent:
    """The agent of an experiment, as an instance of its algorithm's class."""
    from rl_training.api import facades

    cls: type[Agent] = getattr(facades, get_spec(experiment.config.algo).title)
    return cls._from_experiment(experiment)


def load_from_hub(
    repo_id: str,
    env: EnvLike | None = None,
    *,
    revision: str | None = None,
    eval_env: EnvLike | None = None,
    trust: bool = False,
) -> Agent:
    """Load an agent from a repository on the Hugging Face Hub (extra `hub`), like any checkpoint: it runs no code."""
    with tempfile.TemporaryDirectory() as scratch:
        path = download(repo_id, Path(scratch) / "agent", revision)
        return load(path, env, eval_env=eval_env, trust=trust)


def evaluate(
    path: str | Path,
    num_episodes: int = 10,
    *,
    env: EnvLike | None = None,
    deterministic: bool | None = None,
    seed: int | None = None,
    trust: bool = False,
) -> EvaluationResult:
    """Evaluate an agent loaded from a path (a checkpoint or a run directory)."""
    agent = load(path, env, trust=trust, learner_only=True)
    try:
        return agent.evaluate(num_episodes, deterministic=deterministic, seed=seed)
    finally:
        agent.close()


def _whole(name: str, value: Any) -> int:
    """A number of steps; anything else is refused."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return int(value)
