"""Record datasets: step an environment with a trained policy, a mixture of policies, or random actions.

The behaviour policy chooses one of its policies at the start of each episode, by their shares. Its actions may be
perturbed by noise (real-valued actions) and replaced by random ones. Steps are collected as in training: episodes end
as the environment ends them, with their true last observations. Rewards are the environment's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rl_training.contracts.algorithm import ActOutput, Policy, StochasticPolicy
from rl_training.contracts.arrays import AnyArray, map_observation
from rl_training.contracts.batches import Observation, Step
from rl_training.contracts.errors import ConfigError, SpaceError
from rl_training.contracts.random import random_stream
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import BoxActions, EnvSpec
from rl_training.data.dataset import Dataset, DatasetMetadata
from rl_training.data.formats.space_json import flatten_dict
from rl_training.data.normalize import ObservationNormalizer
from rl_training.envs.actions import ActionMap
from rl_training.envs.atari import AtariConfig
from rl_training.envs.factory import Vectorization, make_vector_env
from rl_training.envs.vector import AnyVectorEnv, AutoresetAdapter
from rl_training.envs.wrappers import WrapperConfig
from rl_training.experiment.build import Experiment
from rl_training.experiment.metadata import package_versions
from rl_training.experiment.recorded_data import same_kind
from rl_training.experiment.restoring import load_experiment
from rl_training.policies.exploration import RandomPolicy
from rl_training.policies.masks import mask_of
from rl_training.runtime.collector import Collector, to_tensors
from rl_training.runtime.threads import using_threads

RANDOM = "random"
LOG_PROB, POLICY = "log_prob", "policy"
"""Extra columns: log-probability of the action, and number of the policy that acted in the episode."""

Float64 = npt.NDArray[np.float64]


@documented
@dataclass(kw_only=True)
class RecordConfig:
    """How a dataset is recorded."""

    env_id: str = setting("", "Environment; by default the agent's own.")
    env_kwargs: dict[str, Any] = setting(
        factory=dict, help="Keyword arguments of the environment; by default the agent's own."
    )
    steps: int = setting(10_000, "Steps to record. The last episode is cut there and counts as truncated.", ge=1)
    mix: tuple[str, ...] = setting(
        (), "Further policies and their shares of the episodes: PATH:0.3 random:0.2. The first policy has the rest."
    )
    epsilon: float = setting(0.0, "Share of random actions, in every step of every policy.", ge=0, le=1)
    noise_std: float = setting(
        0.0,
        "Standard deviation of Gaussian noise that is added to real-valued actions, in units of half the width of "
        "their bounds.",
        ge=0,
    )
    deterministic: bool = setting(
        False,
        "Use deterministic actions. By default, policies that have a distribution (PPO, SAC, ...) sample from it.",
    )
    seed: int = setting(0, "Seed of environment and policies.", ge=0)
    licence: str = setting("", "Licence of the data, for the metadata.")
    author: str = setting("", "Author of the data, for the metadata.")
    description: str = setting("", "Description of the data, for the metadata.")


def record(policy: str, config: RecordConfig, *, trust: bool = False) -> Dataset:
    """Record a dataset with an agent (a run, a checkpoint or `zoo:...`) or with `random` actions.

    `trust` allows the agent's files to name a module to import (`package:Env-v0`).

    Example:
        >>> data = record("random", RecordConfig(env_id="CartPole-v1", steps=100))
        >>> len(data), sorted(data.extras), data.metadata.behaviour_policy
        (100, ['log_prob'], 'random')
    """
    names, shares = _shares(policy, config.mix)
    with ExitStack() as stack:
        agents = [None if name == RANDOM else stack.enter_context(_loaded(name, trust)) for name in names]
        place = _place(agents, config)
        env = make_vector_env(place, 1, autoreset_mode=AutoresetMode.DISABLED)
        stack.callback(env.close)
        spec = EnvSpec(env.single_observation_space, env.single_action_space, place.env_id, place.action_masks)
        _require_fit(names, agents, spec)
        behaviour = BehaviourPolicy(list(_members(names, shares, agents, spec, config)), spec, config)
        sink = _Columns(config.steps, spec)
        collector = Collector(
            AutoresetAdapter(env),
            _AsTheyAre(),
            policy_rng=random_stream(config.seed, "policy"),
            env_rng=random_stream(config.seed, "environment"),
        )
        threads = max((agent.config.num_threads or 1 for agent in agents if agent is not None), default=1)
        with using_threads(threads):
            collector.collect(behaviour, config.steps, sink)
        metadata = DatasetMetadata(
            env_id=place.env_id,
            env_kwargs=place.env_kwargs,
            max_episode_steps=_time_limit(env),
            behaviour_policy=behaviour.name,
            seeds=[config.seed],
            versions=package_versions(),
            licence=config.licence,
            author=config.author,
            description=config.description,
            spaces_known=True,
        )
    return sink.dataset(spec, metadata)


def _shares(policy: str, mix: Sequence[str]) -> tuple[list[str], list[float]]:
    """The policies and their shares of the episodes; those of `mix` are `NAME:share`."""
    names, shares, problems = [policy], [0.0], []
    for text in mix:
        name, _, share = text.rpartition(":")
        try:
            names.append(name)
            shares.append(float(share))
        except ValueError:
            shares.append(math.nan)
        if not name or not 0 < shares[-1] < 1:
            problems.append(f"mix: expected PATH:share with a share between 0 and 1, as in random:0.2, got '{text}'")
    shares[0] = 1.0 - sum(shares[1:])
    if not problems and shares[0] <= 1e-9:
        problems.append(f"mix: the shares are {sum(shares[1:]):g} together, which leaves nothing for '{policy}'")
    if problems:
        raise ConfigError(problems)
    return names, shares


@contextmanager
def _loaded(name: str, trust: bool) -> Iterator[Experiment]:
    experiment, _ = load_experiment(name, trust=trust, learner_only=True)
    try:
        yield experiment
    finally:
        experiment.close()


# The environment


@dataclass
class _Place:
    """The environment, as `EnvSettings`."""

    env_id: str
    env_kwargs: dict[str, Any]
    wrappers: list[WrapperConfig] = field(default_factory=list)
    atari: AtariConfig = field(default_factory=AtariConfig)
    vectorization: Vectorization = "sync"
    num_envs: int = 1
    env_timeout: float = 60.0
    action_masks: bool = False


def _place(agents: Sequence[Experiment | None], config: RecordConfig) -> _Place:
    """The environment of the first agent, wrappers included, unless the settings name another one."""
    first = next((agent.config for agent in agents if agent is not None), None)
    if first is None or not (first.env_id or config.env_id):
        if not config.env_id:
            raise ConfigError("env_id: is missing; say where to record, as in --env-id Pendulum-v1")
        return _Place(config.env_id, config.env_kwargs)
    is_other = config.env_id not in ("", first.env_id)
    kwargs = config.env_kwargs if is_other or config.env_kwargs else first.env_kwargs
    return _Place(config.env_id or first.env_id, kwargs, first.wrappers, first.atari, action_masks=first.action_masks)


def _require_fit(names: Sequence[str], agents: Sequence[Experiment | None], spec: EnvSpec) -> None:
    problems = []
    for name, agent in zip(names, agents, strict=True):
        for kind in ("observation_space", "action_space"):
            if agent is not None and not same_kind(getattr(agent.spec, kind), theirs := getattr(spec, kind)):
                problems.append(f"{name} has the {kind} {getattr(agent.spec, kind)}, and {spec.env_id} has {theirs}")
    if problems:
        raise SpaceError("; ".join(problems))


def _time_limit(env: AnyVectorEnv) -> int | None:
    spec = env.envs[0].spec if hasattr(env, "envs") else env.spec
    return None if spec is None else spec.max_episode_steps


class _AsTheyAre:
    """Actions that are the environment's already (an `ActionMapping`)."""

    def to_env(self, action: AnyArray) -> AnyArray:
        return action


# The behaviour policy


class _Choice(NamedTuple):
    action: AnyArray
    """The environment's action [1, ...]."""
    state: Any
    seen: Observation
    """What the policy saw: normalised if it needs that."""


@dataclass
class _Member:
    """One of the policies, with all that turns observations and actions into its own."""

    name: str
    share: float
    policy: Policy
    actions: ActionMap
    normalizer: ObservationNormalizer | None
    device: torch.device
    samples: bool
    """Whether actions are drawn from the policy's own distribution."""

    @property
    def is_random(self) -> bool:
        """Whether it ignores observations."""
        return isinstance(self.policy, RandomPolicy)

    def choose(self, obs: Observation, state: Any, start: Tensor | None, rng: np.random.Generator) -> _Choice:
        """An action before noise and random actions of the behaviour."""
        raw = map_observation(lambda x: x.numpy(), obs)
        seen = to_tensors(raw if self.normalizer is None else self.normalizer(raw), self.device)
        out = self.policy.act(seen, deterministic=not self.samples, state=state, episode_start=start, rng=rng)
        return _Choice(self.actions.to_env(out.action.cpu().numpy()), out.state, seen)

    def own_log_prob(self, seen: Observation, action: AnyArray) -> Float64:
        """Log-probability [1] of the environment's action in the policy's distribution, in the environment's units."""
        assert isinstance(self.policy, StochasticPolicy)
        own = self.actions.to_policy(action)
        found = self.policy.log_prob(seen, torch.from_numpy(own).to(self.device)).double().cpu().numpy()
        return np.asarray(found - self.actions.log_slope(own))


class BehaviourPolicy:
    """Several policies, one per episode, with noise and random actions. Its actions are the environment's.

    Its state is the number of the policy that acts in this episode, and that policy's own state.
    """

    box_actions: BoxActions = "clip"

    def __init__(self, members: Sequence[_Member], spec: EnvSpec, config: RecordConfig) -> None:
        self.members, self.config, self.space = members, config, spec.action_space
        self.shares = np.array([member.share for member in members])
        self.masked = spec.action_masks
        box = self.space if isinstance(self.space, spaces.Box) else None
        if config.noise_std > 0 and (box is None or np.issubdtype(box.dtype, np.integer)):
            raise ConfigError(f"noise_std: is for real-valued actions; {spec.env_id} has {self.space}. Use epsilon")
        self.random: _Member | None = None
        if config.epsilon > 0:
            self.random = _random_member(spec, 1.0)
        self.std: Float64 = np.zeros(0)
        if box is not None and config.noise_std > 0:
            width = box.high.astype(np.float64) - box.low
            self.std = config.noise_std * np.where(np.isfinite(width), 0.5 * width, 1.0)
        self.scores = all(self._can_score(member) for member in members)

    @property
    def name(self) -> str:
        """A description for the metadata."""
        several = len(self.members) > 1
        parts = [f"{member.share:.6g} {member.name}" if several else member.name for member in self.members]
        config = self.config
        parts += [f"epsilon {config.epsilon:g}"] * (config.epsilon > 0) + [f"noise {config.noise_std:g}"] * (
            config.noise_std > 0
        )
        return ", ".join([*parts, *["deterministic"] * (config.deterministic and self.members[0].name != RANDOM)])

    def act(
        self,
        obs: Observation,
        *,
        deterministic: bool = False,
        action_mask: Tensor | None = None,
        state: Any = None,
        episode_start: Tensor | None = None,
        rng: np.random.Generator | None = None,
    ) -> ActOutput:
        """See `Policy.act`, for one environment. Extras: `log_prob` if all policies have it, `policy` if several."""
        assert rng is not None
        assert episode_start is not None
        number, inner = state if state is not None else (0, None)
        if bool(episode_start.any()):
            number, inner = int(rng.choice(len(self.members), p=self.shares)), None
        member = self.members[number]
        chosen = member.choose(obs, inner, episode_start, rng)
        action = self._explore(member, chosen.action, obs, rng)
        extras = {POLICY: torch.tensor([number], dtype=torch.int16)} if len(self.members) > 1 else {}
        if self.scores:
            extras[LOG_PROB] = torch.from_numpy(self._log_prob(member, chosen, action, obs).astype(np.float32))
        return ActOutput(torch.from_numpy(action), extras, (number, chosen.state))

    def value(self, obs: Observation) -> Tensor:
        """See `Policy.value`: not available."""
        raise NotImplementedError("a behaviour policy has no values")

    def _explore(self, member: _Member, action: AnyArray, obs: Observation, rng: np.random.Generator) -> AnyArray:
        if self.std.size and not member.is_random:
            assert isinstance(self.space, spaces.Box)
            noisy = action + self.std * rng.standard_normal(action.shape)
            action = np.clip(noisy, self.space.low, self.space.high).astype(self.space.dtype)
        if self.random is not None and rng.random() < self.config.epsilon:
            action = self.random.choose(obs, None, None, rng).action
        return action

    # Log-probabilities

    def _can_score(self, member: _Member) -> bool:
        if self.random is not None and _unbounded(self.space):
            return False
        if member.is_random:
            return not _unbounded(self.space)
        if member.samples:
            return isinstance(member.policy, StochasticPolicy) and not self.std.size
        return not isinstance(self.space, spaces.Box) or bool(self.std.size)

    def _log_prob(self, member: _Member, chosen: _Choice, action: AnyArray, obs: Observation) -> Float64:
        """Log-probability [1] of an action; of real-valued ones, the density before they were clipped."""
        if member.is_random:
            return self._uniform(obs)
        if member.samples:
            found = member.own_log_prob(chosen.seen, action)
        elif self.std.size:
            around = (action.astype(np.float64) - chosen.action) / self.std
            each = -0.5 * around**2 - np.log(self.std) - 0.5 * math.log(2 * math.pi)
            found = each.reshape(len(action), -1).sum(axis=1)
        else:
            same = (action == chosen.action).reshape(len(action), -1).all(axis=1)
            found = np.where(same, 0.0, -np.inf)
        if self.random is None:
            return found
        epsilon = self.config.epsilon
        kept = math.log1p(-epsilon) if epsilon < 1 else -math.inf
        mixed: Float64 = np.logaddexp(kept + found, math.log(epsilon) + self._uniform(obs))
        return mixed

    def _uniform(self, obs: Observation) -> Float64:
        """Log-probability [1] of every action of a random policy."""
        space = self.space
        if isinstance(space, spaces.Discrete):
            return np.array([-math.log(float(mask_of(obs).sum()) if self.masked else float(space.n))])
        if isinstance(space, spaces.Box):
            return np.array([-np.log(space.high.astype(np.float64) - space.low).sum()])
        sizes = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape or (1,), 2)
        return np.array([-np.log(sizes.astype(np.float64)).sum()])


def _unbounded(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and (
        not space.is_bounded("both") or bool(np.issubdtype(space.dtype, np.integer))
    )


def _members(
    names: Sequence[str],
    shares: Sequence[float],
    agents: Sequence[Experiment | None],
    spec: EnvSpec,
    config: RecordConfig,
) -> Iterator[_Member]:
    for name, share, agent in zip(names, shares, agents, strict=True):
        if agent is None:
            yield _random_member(spec, share)
            continue
        policy = agent.trainer.algorithm.policy
        is_noisy = getattr(getattr(policy, "network", None), "noisy", False)  # noise in the weights has no density
        has_distribution = isinstance(policy, StochasticPolicy) or hasattr(policy, "state_size")
        yield _Member(
            f"{agent.config.algo} {name} at step {agent.trainer.position}",
            share,
            policy,
            agent.actions,
            agent.trainer.collector.obs_normalizer,
            agent.device,
            has_distribution and not is_noisy and not config.deterministic,
        )


def _random_member(spec: EnvSpec, share: float) -> _Member:
    policy = RandomPolicy(spec)
    actions = ActionMap(spec.action_space, policy.box_actions)
    return _Member(RANDOM, share, policy, actions, None, torch.device("cpu"), True)


# Columns


class _Columns:
    """A sink that keeps the steps of one environment as the columns of a dataset."""

    def __init__(self, num_rows: int, spec: EnvSpec) -> None:
        self.num_rows, self.count = num_rows, 0
        self.columns: dict[str, Any] = {}
        self.finals: list[Any] = []
        self.last: Any = None

    def add(self, step: Step) -> None:
        """See `Sink.add`."""
        given = {
            "observations": step.obs,
            "actions": step.action,
            "rewards": step.reward,
            "terminated": step.terminated,
            "truncated": step.truncated & ~step.terminated,
            **{f"extras.{name}": column for name, column in step.extras.items()},
        }
        if not self.columns:  # the system gives memory when rows are written
            empty = (self.num_rows,)
            self.columns = {
                name: map_observation(lambda x: np.zeros(empty + x.shape[1:], x.dtype), rows)
                for name, rows in given.items()
            }
        for name, rows in given.items():
            _put(self.columns[name], self.count, rows)
        if step.final_obs is not None:
            self.finals.append(map_observation(lambda x: x[:1].copy(), step.final_obs))
        self.last = step.next_obs
        self.count += 1

    def dataset(self, spec: EnvSpec, metadata: DatasetMetadata) -> Dataset:
        """The dataset; an episode that has not ended counts as truncated."""
        columns = self.columns
        if not (columns["terminated"][-1] or columns["truncated"][-1]):
            columns["truncated"][-1] = True
            self.finals.append(map_observation(lambda x: x[:1].copy(), self.last))
        finals: Any = (
            {key: np.concatenate([final[key] for final in self.finals]) for key in columns["observations"]}
            if isinstance(columns["observations"], dict)
            else np.concatenate(self.finals)
        )
        return Dataset(
            **{name: column for name, column in columns.items() if not name.startswith("extras.")},
            final_observations=finals,
            observation_space=flatten_dict(spec.observation_space),
            action_space=spec.action_space,
            extras={n.removeprefix("extras."): x for n, x in columns.items() if n.startswith("extras.")},
            metadata=metadata,
        )


def _put(column: Any, row: int, rows: Any) -> None:
    if isinstance(column, dict):
        for key, part in column.items():
            part[row] = rows[key][0]
    else:
        column[row] = rows[0]
