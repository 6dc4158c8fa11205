"""Builds a run from its config: environments, algorithm, collector, buffer, trainer and evaluator."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import nn

from rl_training.accelerate import report, using
from rl_training.algorithms.registry import check_action_space, get_spec
from rl_training.contracts.algorithm import Algorithm, Policy
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.environment import Environments
from rl_training.contracts.errors import CheckpointError, ConfigError, EnvError
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.contracts.spec import ACTION_MASK, EnvSpec, FrameStack, OnPolicyConfig, Regime
from rl_training.contracts.state import same_state
from rl_training.data.dataset import Dataset
from rl_training.data.hindsight import Hindsight
from rl_training.data.normalize import ObservationNormalizer, RewardNormalizer
from rl_training.data.recorded import DatasetSampler
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.data.samplers import (
    Indexer,
    MixedSampler,
    PrioritizedIndexer,
    ReplaySampler,
    Sampler,
    UniformIndexer,
    make_indexer,
)
from rl_training.data.settings import OffPolicyConfig
from rl_training.data.shards import ShardedSampler
from rl_training.envs.actions import ActionMap
from rl_training.envs.atari import AtariAdapter, is_atari
from rl_training.envs.factory import EnvLike, copy_env, make_env, make_vector_env, wrap_env
from rl_training.envs.goals import check_goal_space, goal_functions
from rl_training.envs.masks import check_mask_space
from rl_training.envs.vector import AnyVectorEnv, AutoresetAdapter
from rl_training.envs.wrappers import stack_of
from rl_training.experiment.checkpointing import round_trip
from rl_training.experiment.config import Layer, TrainConfig, resolve
from rl_training.experiment.recorded_data import RecordedData
from rl_training.experiment.replay import read_replay
from rl_training.policies.exploration import RandomPolicy
from rl_training.runtime.collector import Collector, Exploration, NoCollector
from rl_training.runtime.distributed.backends import make_backend
from rl_training.runtime.distributed.fleet import Fleet
from rl_training.runtime.distributed.worker import RolloutTask, RolloutWorker, StepsTask, Task
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.off_policy import OffPolicyTrainer
from rl_training.runtime.offline import OfflineTrainer
from rl_training.runtime.on_policy import OnPolicyTrainer
from rl_training.runtime.threads import using_threads
from rl_training.runtime.trainer import Trainer

MAX_EVAL_ENVS = 8
MAX_THREADS = 8
NUM_VALIDATION_BATCHES = 10
THREADS_FROM = 2**23
"""Minimum multiplications per matrix product for multiple threads; 256 rows times a 256 x 256 layer are twice that."""
EXACT, EPISODE_BOUNDARY, LEARNER_ONLY = "exact", "episode-boundary", "learner-only"
NOTHING_LOST = "nothing-lost"
"""Everything is restored, but the run is not repeatable."""
WEIGHTS_ONLY = "weights-only"


@dataclass
class Experiment:
    """All parts of one run, built and connected."""

    config: TrainConfig
    spec: EnvSpec
    trainer: Trainer
    actions: ActionMap
    device: torch.device
    env: EnvLike | None = None
    """The environment object, if one was given instead of an id."""
    eval_env: EnvLike | None = None
    data: RecordedData | None = None
    """The recorded data of the run, opened when training needs it."""
    damage: str | None = None
    """What is damaged in the restored replay or episodes; if set, the experiment can act but not continue training."""
    eval_state: Any = field(default=None, repr=False)
    """State restored into the evaluation environments before each evaluation, if it can be saved."""
    eval_obstacle: str | None = field(default=None, repr=False)
    """Why an evaluation may depend on earlier ones; None if it does not."""
    _evaluator: Evaluator | None = field(default=None, repr=False)

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator, with its own environments; created on first use."""
        if not self.has_env:
            raise ConfigError(
                "env_id: is empty; an evaluation needs an environment: give --env-id (in Python, eval_env)"
            )
        if self._evaluator is None:
            env = AutoresetAdapter(self._make_eval_env())
            saved, self.eval_state = self.eval_state, None
            if saved is not None and self.eval_env is None and self._fits_eval_env(saved, env):
                self.eval_state = saved  # a resumed run keeps the state of its first start
            else:
                self._take_eval_state(env)
            self._evaluator = self._make_evaluator(env)
            self._evaluator.before_use = self.eval_state
            if self.eval_obstacle is not None and self._is_remade(env.env):
                self._evaluator.remake = lambda: AutoresetAdapter(self._make_eval_env())
                self.eval_obstacle = None
        return self._evaluator

    @property
    def has_env(self) -> bool:
        """Whether there is an environment to evaluate in."""
        return bool(self.config.env_id) or self.env is not None or self.eval_env is not None

    @property
    def end(self) -> int:
        """The position at which the current phase of the run ends, by its config."""
        progress = self.trainer.progress
        if isinstance(self.trainer, OfflineTrainer):
            return progress.env_steps + self.config.total_updates
        return progress.offline_updates + self.config.total_timesteps

    def validation_batches(self) -> list[TransitionBatch]:
        """The same transitions in each call: of the validation part, or of the training part if there is none."""
        assert self.data is not None
        sampler = self.data.sampler(
            self.spec,
            self.trainer.algorithm,
            self.actions,
            self.trainer.collector.obs_normalizer,
            validation=True,
        )
        size = self.config.algorithm.rows_per_update(1)
        return [sampler.sample(size, self.trainer.progress) for _ in range(NUM_VALIDATION_BATCHES)]

    def _fits_eval_env(self, saved: Any, env: AutoresetAdapter) -> bool:
        """Whether a saved state is of as many environments; one that they cannot restore is an error."""
        try:
            if len(saved["resetting"]) != env.num_envs:
                return False
            env.restore_snapshot(saved)
        except Exception as error:
            env.close()
            raise CheckpointError(
                f"{self.trainer.restored_from}: the saved state of the evaluation environments does not fit: "
                f"{type(error).__name__}: {error}"
            ) from error
        return True

    def _take_eval_state(self, env: AutoresetAdapter) -> None:
        env.reset(seed=0)  # before the first reset, some have no state or a random one
        snapshot = env.take_snapshot()
        problem = snapshot if isinstance(snapshot, str) else _restoring_problem(env, snapshot)
        if problem is None:
            self.eval_state = snapshot
        else:
            self.eval_obstacle = f"evaluation environment: {problem}"

    def _is_remade(self, env: AnyVectorEnv) -> bool:
        """Whether evaluations recreate the environments: Box2D keeps state between episodes, but is cheap to make."""
        if self.env is not None or self.eval_env is not None or not isinstance(env, SyncVectorEnv):
            return False
        return type(env.envs[0].unwrapped).__module__.startswith("gymnasium.envs.box2d")

    def resume_grade(self) -> tuple[str, str | None]:
        """How exactly this run can be resumed, and what prevents `exact`, if anything."""
        collector = self.trainer.collector
        if isinstance(collector, NoCollector):
            if self.has_env and self.config.eval_every and self.evaluator and self.eval_obstacle is not None:
                return EPISODE_BOUNDARY, self.eval_obstacle
            return EXACT, None
        problem = collector.obstacle() if isinstance(collector, Fleet) else episodes_problem(collector)
        settings = self.config.algorithm
        if isinstance(settings, OffPolicyConfig) and not settings.checkpoint_replay:
            return LEARNER_ONLY, "checkpoint_replay is off: a resumed run starts with an empty replay buffer"
        if problem is not None:
            return EPISODE_BOUNDARY, problem
        if isinstance(collector, Fleet) and collector.settings.mode == "async":
            return NOTHING_LOST, "workers.mode is async: results depend on how fast each worker is"
        if self.config.eval_every and self.evaluator and self.eval_obstacle is not None:
            return EPISODE_BOUNDARY, self.eval_obstacle
        return EXACT, None

    def acceleration(self) -> dict[str, Any]:
        """The acceleration mode, and per function: `recorded`, `compiled`, or plain torch with the reason."""
        return {"mode": self.config.accelerate, "functions": report(self.trainer.algorithm)}

    def viewer(self) -> Evaluator:
        """An evaluator with one environment that renders to the screen."""
        return self.evaluator_of(self.make_single_env("human"))

    def evaluator_of(self, env: gym.Env[Any, Any]) -> Evaluator:
        """An evaluator that uses the given environment."""
        return self._make_evaluator(
            AutoresetAdapter(SyncVectorEnv([lambda: env], autoreset_mode=AutoresetMode.DISABLED))
        )

    def close(self) -> None:
        """Close all environments created here; environments passed in by the caller stay open."""
        if not isinstance(self.env, (gym.Env, VectorEnv)):
            self.trainer.close()
        if self._evaluator is not None and not isinstance(self.eval_env, (gym.Env, VectorEnv)):
            self._evaluator.close()

    def _make_evaluator(self, env: AutoresetAdapter) -> Evaluator:
        epsilon = self.config.eval_epsilon
        return Evaluator(
            env,
            self.actions,
            device=self.device,
            obs_normalizer=self.trainer.collector.obs_normalizer,
            random_policy=RandomPolicy(self.spec) if epsilon > 0 else None,
            epsilon=epsilon,
            max_steps=self.config.eval_max_steps,
        )

    def _make_eval_env(self) -> AnyVectorEnv:
        given = self.eval_env if self.eval_env is not None else self.env
        config = self.config
        if config.vectorization == "async":  # not worth starting workers for a few episodes
            config = config.derived(vectorization="sync")
        if given is None or not isinstance(given, (gym.Env, VectorEnv)):
            count = min(config.num_envs, config.eval_episodes, MAX_EVAL_ENVS)
            return make_vector_env(config, count, env=given, autoreset_mode=AutoresetMode.DISABLED)
        own = given if self.eval_env is not None else copy_env(given)
        return make_vector_env(config, 1, env=own, autoreset_mode=AutoresetMode.DISABLED)

    def make_single_env(self, render_mode: str) -> gym.Env[Any, Any]:
        """One environment that renders; environment objects must have been created with that render mode."""
        chosen = self.eval_env if self.eval_env is not None else self.env
        if chosen is None:
            config = self.config
            kwargs, wrappers, masks = config.env_kwargs, config.wrappers, config.action_masks
            return make_env(config.env_id, kwargs, wrappers, render_mode, masks, config.atari)
        given = copy_env(chosen)
        if isinstance(given, VectorEnv):
            raise EnvError("a vector environment cannot be rendered; pass a single environment as eval_env=...")
        env = given() if callable(given) else given
        if isinstance(env, str) or env.render_mode != render_mode:
            raise EnvError(f"to render it, create the environment with render_mode='{render_mode}'")
        return wrap_env(env, self.config.wrappers, self.config.action_masks)


def build_experiment(
    config: TrainConfig,
    env: EnvLike | None = None,
    eval_env: EnvLike | None = None,
    *,
    dataset: Dataset | None = None,
    spec: EnvSpec | None = None,
) -> Experiment:
    """Build a run. Problems with spaces, extras and devices are raised here, before training starts.

    `dataset` is recorded data in memory, in place of the file that the config names. `spec` is for runs without an
    environment: what a checkpoint says about the data, so that acting does not need it.
    """
    if isinstance(env, str):
        config, env = config.replace(env_id=env), None
    config = _fit(config, env)
    data = RecordedData(config, dataset)
    if config.regime is Regime.OFFLINE or (config.env_id == "" and env is None):
        return _build_offline(config, env, eval_env, data, spec)
    if config.workers.count:
        return _build_with_workers(config, env, eval_env, data)
    device = resolve_device(config.device)
    vector = make_vector_env(config, env=env, autoreset_mode=AutoresetMode.DISABLED)
    try:
        spec = data.env_spec = _spec_of(config, vector, env)
        algorithm = _make_algorithm(config, spec, device)
        algorithm.place(0, vector.num_envs, vector.num_envs)
        config = _with_threads(config, algorithm, vector.num_envs)
        collector = _make_collector(config, vector, env, spec, algorithm)
        trainer = TRAINERS[config.regime](config, spec, algorithm, collector, data)
    except BaseException:
        if not isinstance(env, (gym.Env, VectorEnv)):
            vector.close()
        raise
    actions = ActionMap(spec.action_space, algorithm.policy.box_actions)
    return Experiment(config, spec, trainer, actions, device, env, eval_env, data)


def _spec_of(config: TrainConfig, vector: AnyVectorEnv, env: EnvLike | None) -> EnvSpec:
    return EnvSpec(
        vector.single_observation_space,
        vector.single_action_space,
        config.env_id,
        config.action_masks,
        _frame_stack(config, env),
    )


def _with_threads(config: TrainConfig, algorithm: Algorithm[Any], num_envs: int) -> TrainConfig:
    """The config with the number of threads for updates, if it was not given."""
    if config.num_threads is not None:
        return config
    rows = config.algorithm.rows_per_update(num_envs)
    return config.derived(num_threads=choose_threads(algorithm.policy, rows))


def _make_collector(
    config: TrainConfig,
    vector: AnyVectorEnv,
    env: EnvLike | None,
    spec: EnvSpec,
    algorithm: Algorithm[Any],
    index: int = 0,
) -> Collector:
    """The collector of a run, or of the worker with this number."""
    return Collector(
        _learning_adapter(config, vector, env),
        ActionMap(spec.action_space, algorithm.policy.box_actions),
        policy_rng=random_stream(config.seed, "policy", index),
        env_rng=random_stream(config.seed, "environment", index),
        device=algorithm.device,
        obs_normalizer=_obs_normalizer(config, spec),
        reward_normalizer=_reward_normalizer(config, vector.num_envs),
    )


def _build_with_workers(
    config: TrainConfig, env: EnvLike | None, eval_env: EnvLike | None, data: RecordedData
) -> Experiment:
    """Build a run whose experience comes from workers; they start when training does."""
    device = resolve_device(config.device)
    vector = make_vector_env(config, 1, env=env, autoreset_mode=AutoresetMode.DISABLED)
    try:
        spec = data.env_spec = _spec_of(config, vector, env)
    finally:
        if not isinstance(env, (gym.Env, VectorEnv)):
            vector.close()
    algorithm = _make_algorithm(config, spec, device)
    config = _with_threads(config, algorithm, config.num_envs)
    workers = config.workers
    objects = "workers: need an environment id, because every worker makes its own; set workers.count to 0"
    fleet = Fleet(
        functools.partial(make_backend, workers, BUILD_WORKER, _worker_setup(config)),
        workers,
        config.num_envs // workers.count,
        timeout=config.env_timeout,
        refusal=None if env is None else objects,
        obs_normalizer=_obs_normalizer(config, spec),
        reward_normalizer=_reward_normalizer(config, 0),
    )
    trainer = TRAINERS[config.regime](config, spec, algorithm, fleet, data)
    actions = ActionMap(spec.action_space, algorithm.policy.box_actions)
    return Experiment(config, spec, trainer, actions, device, env, eval_env, data)


BUILD_WORKER = f"{__name__}:build_worker"


def _worker_setup(config: TrainConfig) -> dict[str, Any]:
    """What a worker is built from: the config, and how the environment is registered, as JSON."""
    registered = gym.registry.get(config.env_id)
    known = registered is not None and isinstance(registered.entry_point, str) and not registered.additional_wrappers
    return {
        "config": config.derived(device="cpu").to_dict(),
        "env": registered.to_json() if known and registered is not None else None,
    }


def build_worker(setup: Mapping[str, Any], index: int) -> RolloutWorker:
    """Build a worker of a run, in whatever process it is to work."""
    config = resolve([Layer(setup["config"], "the training process")])
    if setup["env"] is not None and config.env_id not in gym.registry:
        about = gym.envs.registration.EnvSpec.from_json(setup["env"])
        gym.registry[about.id] = about
    each = config.num_envs // config.workers.count
    vector = make_vector_env(config, each, autoreset_mode=AutoresetMode.DISABLED)
    try:
        spec = _spec_of(config, vector, None)
        algorithm = _make_algorithm(config, spec, torch.device("cpu"))
        algorithm.place(index * each, each, config.num_envs)
        collector = _make_collector(config, vector, None, spec, algorithm, index)
        settings = config.algorithm
        task: Task
        if isinstance(settings, OnPolicyConfig):
            task = RolloutTask(_rollout_buffer(settings, spec, collector.obs_normalizer, each), algorithm)
        else:
            assert isinstance(settings, OffPolicyConfig)
            exploration = Exploration(algorithm, RandomPolicy(spec), settings.first_random_steps)
            task = StepsTask(exploration, config.workers.count)
        fresh = copy.deepcopy(collector.state_dict())
        problem = episodes_problem(collector)
        collector.load_state_dict(fresh)  # episodes begin with the first order, which brings the normalisers' moments
        return RolloutWorker(collector, algorithm, task, problem)
    except BaseException:
        vector.close()
        raise


def _build_offline(
    config: TrainConfig, env: EnvLike | None, eval_env: EnvLike | None, data: RecordedData, spec: EnvSpec | None
) -> Experiment:
    """Build a run that learns from recorded data; the environment, if there is one, gives the spaces."""
    device = resolve_device(config.device)
    if config.env_id or env is not None:
        spec = data.env_spec = _spec_of_env(config, env)
    elif spec is None:
        spec = data.spec()
    algorithm = _make_algorithm(config, spec, device)
    if config.num_threads is None:
        rows = config.algorithm.rows_per_update(1)
        config = config.derived(num_threads=choose_threads(algorithm.policy, rows))
        data.config = config
    actions = ActionMap(spec.action_space, algorithm.policy.box_actions)
    normalizer = _obs_normalizer(config, spec)
    collector = NoCollector(normalizer)

    def open_data() -> ReplaySampler:
        return data.sampler(spec, algorithm, actions, normalizer)

    trainer = OfflineTrainer(algorithm, collector, DatasetSampler(open_data), config.algorithm.rows_per_update(1))
    return Experiment(config, spec, trainer, actions, device, env, eval_env, data)


def _spec_of_env(config: TrainConfig, env: EnvLike | None) -> EnvSpec:
    vector = make_vector_env(config, 1, env=env, autoreset_mode=AutoresetMode.DISABLED)
    try:
        return EnvSpec(vector.single_observation_space, vector.single_action_space, config.env_id, config.action_masks)
    finally:
        if not isinstance(env, (gym.Env, VectorEnv)):
            vector.close()


def _make_algorithm(config: TrainConfig, spec: EnvSpec, device: torch.device) -> Algorithm[Any]:
    algorithm_spec = get_spec(config.algo)
    check_action_space(algorithm_spec, spec)
    if config.action_masks:
        check_mask_space(spec.observation_space, spec.action_space)
    # one thread, so that initial weights do not depend on the number of threads
    with using_threads(1), using(config.accelerate):
        rng = random_stream(config.seed, "algorithm")
        try:
            return algorithm_spec.algorithm_for(spec.action_space)(config.algorithm, spec, device, rng)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise ConfigError(f"algorithm > network: not enough memory for networks of these sizes: {error}") from error


def _learning_adapter(config: TrainConfig, vector: AnyVectorEnv, given: EnvLike | None) -> AutoresetAdapter:
    """Adapter for training environments. Evaluation and videos use plain ones: full episodes, unmodified rewards."""
    if given is None and is_atari(config.env_id, config.env_kwargs):
        return AtariAdapter(vector, config.atari)
    return AutoresetAdapter(vector)


def _frame_stack(config: TrainConfig, given: EnvLike | None) -> FrameStack | None:
    """How stacked observations share frames, if the settings say so; None if every observation is stored on its own."""
    hindsight = isinstance(config.algorithm, OffPolicyConfig) and config.algorithm.her
    if config.action_masks or hindsight:  # masks and goals are stored per row
        return None
    game = given is None and is_atari(config.env_id, config.env_kwargs)
    return stack_of(config.wrappers, FrameStack(config.atari.frame_stack) if game else None)


def episodes_problem(collector: Collector) -> str | None:
    """Why unfinished episodes cannot be restored exactly; None if they can. Begins episodes if there are none."""
    seed = None if collector.obs is not None else draw_seed(copy.deepcopy(collector.env_rng))
    if collector.obs is None:
        collector.reset()
    snapshot = collector.env.take_snapshot()
    if isinstance(snapshot, str):
        return snapshot
    problem = _restoring_problem(collector.env, snapshot)
    if problem is not None:
        collector.saves_episodes = False
        if seed is not None:  # do not train on the state a failed restore left behind
            collector.obs = collector.env.reset(seed=seed)
    return problem


def _restoring_problem(env: Environments, snapshot: Any) -> str | None:
    """Why an environment cannot be restored exactly from a snapshot saved in a checkpoint; None if it can."""
    try:
        back = round_trip({"env": snapshot})["env"]
        env.restore_snapshot(back)
        again = env.take_snapshot()
    except Exception as error:  # raised by the environment's own set_state: must not end the run
        return f"restoring a snapshot raised {type(error).__name__}: {error}"
    if not same_state(snapshot, back):
        return "the state changes when it is saved to a checkpoint and loaded"
    if not same_state(snapshot, again):
        return again if isinstance(again, str) else "the state differs after a snapshot was restored"
    return None


def choose_threads(policy: Policy, rows: int) -> int:
    """Number of threads for gradient steps on `rows` rows: one if the products are small, otherwise torch's, capped.

    Convolutions and large matrix products gain from threads; for small ones, starting and joining threads costs more
    than the work. Torch's default respects OMP_NUM_THREADS.
    """
    assert isinstance(policy, nn.Module)
    weights = list(policy.parameters())
    is_large = max(weight.numel() for weight in weights) * rows >= THREADS_FROM
    has_convolutions = any(isinstance(part, nn.modules.conv._ConvNd) for part in policy.modules())
    return min(torch.get_num_threads(), MAX_THREADS) if is_large or has_convolutions else 1


def _fit(config: TrainConfig, env: EnvLike | None) -> TrainConfig:
    """Adapt the config to the given environment object; settings that cannot apply to it are refused."""
    if env is None and "*" in config.env_id:  # a preset for a family of environments
        one = "a game with --env-id ALE/Pong-v5" if config.env_id.startswith("ALE/") else "one with --env-id"
        raise ConfigError(
            f"env_id: '{config.env_id}' is a pattern for many environments; choose {one} (in Python: env_id=...)"
        )
    if isinstance(env, VectorEnv) and config.wrappers:
        raise ConfigError("wrappers: cannot be applied to a vector environment; wrap it before you pass it")
    if env is not None and is_atari(config.env_id, config.env_kwargs):  # ready-made: apply no Atari defaults
        config = config.derived(vectorization="sync")
    if env is not None and not isinstance(env, VectorEnv) and config.vectorization == "native":
        raise ConfigError("vectorization: native needs an environment id or a vector environment object")
    if isinstance(env, (gym.Env, VectorEnv)):
        return config.derived(num_envs=env.num_envs if isinstance(env, VectorEnv) else 1)
    return config


def _on_policy(
    config: TrainConfig, spec: EnvSpec, algorithm: Algorithm[Any], collector: Collector | Fleet, data: RecordedData
) -> Trainer:
    settings = config.algorithm
    assert isinstance(settings, OnPolicyConfig)
    try:
        buffer = _rollout_buffer(settings, spec, collector.obs_normalizer, config.num_envs)
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"num_steps: not enough memory for rollouts of {settings.num_steps:,} steps of {config.num_envs:,} "
            f"environments: {error}"
        ) from error
    return OnPolicyTrainer(algorithm, collector, buffer)


def _rollout_buffer(
    settings: OnPolicyConfig, spec: EnvSpec, normalizer: ObservationNormalizer | None, num_envs: int
) -> RolloutBuffer:
    keys = normalizer.moments if normalizer is not None else ()
    return RolloutBuffer.for_spec(spec, settings.num_steps, num_envs, normalized_keys=keys)


def _off_policy(
    config: TrainConfig, spec: EnvSpec, algorithm: Algorithm[Any], collector: Collector | Fleet, data: RecordedData
) -> Trainer:
    settings = config.algorithm
    assert isinstance(settings, OffPolicyConfig)
    hindsight = None
    if settings.her:
        assert isinstance(collector, Collector)
        assert isinstance(collector.env, AutoresetAdapter)
        check_goal_space(spec.observation_space, spec.env_id)
        reward, terminated = goal_functions(collector.env.env, spec.env_id)
        rng = random_stream(config.seed, "hindsight")
        hindsight = Hindsight(
            reward, rng, strategy=settings.her_strategy, ratio=settings.her_ratio, compute_terminated=terminated
        )

    def sampler_over(buffer: ReplayBuffer, name: str, index: int = 0) -> ReplaySampler:
        rng = random_stream(config.seed, name, index)
        indexer: Indexer = UniformIndexer(rng)
        if settings.prioritized:
            alpha, beta = settings.priority_exponent, settings.importance_exponent
            indexer = PrioritizedIndexer(buffer, rng, alpha=alpha, beta=beta)
            indexer.loaded(buffer)
        elif settings.sampler is not None:
            indexer = make_indexer(settings.sampler, buffer, rng, settings.sampler_kwargs)
        return ReplaySampler(
            buffer,
            indexer,
            gamma=settings.gamma,
            n_step=settings.n_step,
            hindsight=hindsight,
            device=algorithm.device,
            obs_normalizer=collector.obs_normalizer,
            reward_normalizer=data if data.is_given else collector.reward_normalizer,
            columns=algorithm.columns,
        )

    count = config.workers.count or 1
    try:
        buffers = [
            ReplayBuffer(spec, -(-settings.buffer_size // count), config.num_envs // count) for _ in range(count)
        ]
    except MemoryError as error:
        size = settings.buffer_size
        raise ConfigError(
            f"buffer_size: not enough memory for a replay buffer of {size} transitions: {error}"
        ) from error
    _warn_if_large(buffers)
    if isinstance(collector, Fleet):
        shards = [sampler_over(buffer, "sampler", index) for index, buffer in enumerate(buffers)]
        sharded = ShardedSampler(shards, random_stream(config.seed, "shards"))
        return OffPolicyTrainer(algorithm, collector, sharded, settings, RandomPolicy(spec))
    online = sampler_over(buffers[0], "sampler")
    sampler: Sampler = online
    if settings.prior_replay is not None:
        prior = sampler_over(read_replay(settings.prior_replay, spec), "prior")
        sampler = MixedSampler(online, prior, settings.prior_ratio)
    elif data.is_given:

        def open_data() -> ReplaySampler:
            actions = ActionMap(spec.action_space, algorithm.policy.box_actions)
            return data.sampler(spec, algorithm, actions, collector.obs_normalizer)

        sampler = MixedSampler(online, DatasetSampler(open_data), settings.prior_ratio)
    return OffPolicyTrainer(algorithm, collector, sampler, settings, RandomPolicy(spec))


def _warn_if_large(buffers: list[ReplayBuffer]) -> None:
    """Warn before training if full replay buffers do not fit into memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # unknown on this system
        return
    size, num_bytes = sum(b.num_rows * b.num_envs for b in buffers), sum(b.num_bytes for b in buffers)
    if num_bytes > memory:
        warnings.warn(
            f"a full replay buffer of {size} transitions takes "
            f"{num_bytes / 1e9:.1f} GB, and this machine has {memory / 1e9:.1f} GB; use a smaller buffer_size",
            stacklevel=2,
        )


TRAINERS: dict[Regime, Callable[[TrainConfig, EnvSpec, Algorithm[Any], Collector | Fleet, RecordedData], Trainer]] = {
    Regime.ON_POLICY: _on_policy,
    Regime.OFF_POLICY: _off_policy,
}
"""The trainer for each regime with an environment; see `TrainConfig.regime` for the choice."""


def _obs_normalizer(config: TrainConfig, spec: EnvSpec) -> ObservationNormalizer | None:
    if not config.normalize_obs:
        return None
    normalizer = ObservationNormalizer(spec.observation_space, config.normalize_clip)
    if spec.action_masks:  # masks may be float arrays
        normalizer.moments.pop(ACTION_MASK, None)
    return normalizer


def _reward_normalizer(config: TrainConfig, num_envs: int) -> RewardNormalizer | None:
    if not config.normalize_reward:
        return None
    return RewardNormalizer(num_envs, config.algorithm.gamma, config.normalize_clip)


def resolve_device(name: str) -> torch.device:
    """The torch device of that name; an error if this machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # torch has devices that compute nothing, such as meta
    except Exception as error:  # for devices that it was built without, torch raises many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"device: '{name}' is not available here: {reason}") from error
    return device
