"""The collector steps environments with a policy and passes every step to a sink."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rl_training.contracts.algorithm import ActOutput, Algorithm, Policy
from rl_training.contracts.arrays import ArrayObservation, map_observation
from rl_training.contracts.batches import Observation, Progress, Step
from rl_training.contracts.environment import ActionMapping, Environments, VectorStep
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.random import draw_seed
from rl_training.contracts.state import Stateful
from rl_training.data.normalize import ObservationNormalizer, RewardNormalizer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.runtime.guards import check_observation, check_step

WINDOW = 100
"""Episodes over which returns, lengths and successes are averaged."""


NO_EXTRAS = ActOutput(torch.empty(0), {})
"""Empty extras and state, for actions that were chosen without torch."""


class Sink(Protocol):
    """Where steps go: a rollout buffer, a replay buffer."""

    def add(self, step: Step) -> None:
        """Add one step of all environments."""
        ...


class CollectStats(NamedTuple):
    """What one call of `collect` did."""

    num_transitions: int
    policy_seconds: float
    env_seconds: float


@dataclass
class Exploration:
    """How an off-policy run acts: at random for the first steps, then as the algorithm explores."""

    algorithm: Algorithm[Any]
    random_policy: Policy
    random_steps: int

    def policy(self, progress: Progress) -> Policy:
        """The policy for the next step."""
        is_random = progress.env_steps < self.random_steps and not progress.offline_updates
        return self.random_policy if is_random else self.algorithm.explore(progress)


class Episode(NamedTuple):
    """A finished episode: undiscounted return, length, and `info["is_success"]` where the environment reports it."""

    total: float
    length: int
    success: bool | None


@dataclass
class EpisodeStatistics(Stateful):
    """Raw (never normalised) returns and lengths: of unfinished episodes, and of the last finished ones."""

    per_env: ClassVar[tuple[str, ...]] = ("running_return", "running_length")
    running_return: npt.NDArray[np.float64]
    running_length: npt.NDArray[np.int64]
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    successes: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    num_episodes: int = 0

    @classmethod
    def start(cls, num_envs: int) -> EpisodeStatistics:
        """Empty statistics for N environments."""
        return cls(np.zeros(num_envs, np.float64), np.zeros(num_envs, np.int64))

    def take_finished(self) -> dict[str, Any]:
        """The episodes that ended since the last call, for the statistics of a whole fleet."""
        found = {name: list(getattr(self, name)) for name in ("returns", "lengths", "successes")}
        for name in found:
            getattr(self, name).clear()
        count, self.num_episodes = self.num_episodes, 0
        return {**found, "num_episodes": count}

    def add_finished(self, episodes: Mapping[str, Any]) -> None:
        """Add what `take_finished` of a worker's statistics returned."""
        for name in ("returns", "lengths", "successes"):
            getattr(self, name).extend(episodes[name])
        self.num_episodes += episodes["num_episodes"]

    def restart(self) -> None:
        """Discard unfinished episodes (all environments were reset)."""
        self.running_return[:] = 0
        self.running_length[:] = 0

    def add(self, step: VectorStep) -> list[Episode]:
        """Add one step; returns the episodes that ended in it, in the order of `step.finished`."""
        if step.num_valid == len(step.valid):
            self.running_return += step.score
            self.running_length += 1
        else:
            self.running_return += np.where(step.valid, step.score, 0.0)
            self.running_length += step.valid
        if not len(step.finished):
            return []
        episodes = [
            Episode(float(self.running_return[env]), int(self.running_length[env]), _success(step.end_info, env))
            for env in step.finished
        ]
        for episode in episodes:
            self.returns.append(episode.total)
            self.lengths.append(episode.length)
            if episode.success is not None:
                self.successes.append(episode.success)
        self.num_episodes += len(episodes)
        self.running_return[step.finished] = 0
        self.running_length[step.finished] = 0
        return episodes

    def metrics(self) -> dict[str, float]:
        """Means over the window; only the number of episodes before the first one ends."""
        if not self.returns:
            return {"rollout/episodes": 0.0}
        found = {
            "rollout/return_mean": float(np.mean(self.returns)),
            "rollout/length_mean": float(np.mean(self.lengths)),
            "rollout/episodes": float(self.num_episodes),
        }
        if self.successes:
            found["rollout/success_rate"] = float(np.mean(self.successes))
        return found


def _success(end_info: Mapping[str, Any], env: int) -> bool | None:
    """`info["is_success"]` of one environment, if that one reported it."""
    if "is_success" not in end_info:
        return None
    reported = end_info.get("_is_success")
    return bool(end_info["is_success"][env]) if reported is None or reported[env] else None


def to_tensors(obs: ArrayObservation, device: torch.device) -> Observation:
    """Observations as tensors on the policy's device.

    Copied also on a CPU: numpy aligns its memory less strictly than torch, and kernels may then round differently.
    """
    return map_observation(lambda x: torch.from_numpy(x).to(device, copy=True), obs)


class Collector(Stateful):
    """Owns the environments, the last observation, the policy's state and the episode statistics.

    Example:
        >>> stats = collector.collect(policy, num_steps=128, sink=buffer)  # doctest: +SKIP
    """

    transient: ClassVar[tuple[str, ...]] = ("env", "obs", "policy_state", "episode_start")

    def __init__(
        self,
        env: Environments,
        actions: ActionMapping,
        *,
        policy_rng: np.random.Generator,
        env_rng: np.random.Generator,
        device: torch.device | None = None,
        obs_normalizer: ObservationNormalizer | None = None,
        reward_normalizer: RewardNormalizer | None = None,
    ) -> None:
        self.env = env
        self.actions = actions
        self.policy_rng = policy_rng
        self.env_rng = env_rng
        self.device = device or torch.device("cpu")
        self.obs_normalizer = obs_normalizer
        self.reward_normalizer = reward_normalizer
        self.statistics = EpisodeStatistics.start(env.num_envs)
        self.obs: ArrayObservation | None = None
        self.policy_state: Any = None
        self.episode_start = np.ones(env.num_envs, np.bool_)
        self.saves_episodes = True
        """Whether unfinished episodes are part of the state; False if it is known that they cannot be restored."""

    def reset(self) -> None:
        """Begin new episodes everywhere, from the next seed of the environment stream."""
        self.obs = self.env.reset(seed=draw_seed(self.env_rng))
        check_observation(self.obs, None, "at a reset")
        self.policy_state = None
        self.episode_start = np.ones(self.env.num_envs, np.bool_)
        self.statistics.restart()
        if self.reward_normalizer is not None:
            self.reward_normalizer.restart()
        if self.obs_normalizer is not None:
            self.obs_normalizer.update(self.obs)

    @property
    def policy_obs(self) -> ArrayObservation:
        """The last observation as the policy sees it."""
        assert self.obs is not None, "reset first"
        return self.obs if self.obs_normalizer is None else self.obs_normalizer(self.obs)

    def collect(
        self, policy: Policy, num_steps: int, sink: Sink, max_transitions: int | None = None, env_steps: int = 0
    ) -> CollectStats:
        """Step all environments `num_steps` times, or until `max_transitions` is reached.

        `env_steps` is the number of environment steps so far, for error messages.
        """
        if self.obs is None:
            self.reset()
        transitions, policy_seconds, env_seconds = 0, 0.0, 0.0
        policy_obs = self.policy_obs
        quick = getattr(policy, "act_on_arrays", None)  # of an `ArrayPolicy`; isinstance is slow with protocols
        out = NO_EXTRAS
        for _ in range(num_steps):
            began = time.perf_counter()
            action = None if quick is None else quick(policy_obs, self.policy_rng)
            if action is None:
                out = policy.act(
                    to_tensors(policy_obs, self.device),
                    state=self.policy_state,
                    episode_start=torch.from_numpy(self.episode_start),
                    rng=self.policy_rng,
                )
                action = out.action.cpu().numpy()
            acted = time.perf_counter()
            step = self.env.step(self.actions.to_env(action))
            env_seconds += time.perf_counter() - acted
            policy_seconds += acted - began
            check_step(step, env_steps + transitions)
            policy_obs = self._record(sink, policy_obs, action, out, step)
            transitions += step.num_valid
            if max_transitions is not None and transitions >= max_transitions:
                break
        return CollectStats(transitions, policy_seconds, env_seconds)

    def fill(
        self,
        buffer: RolloutBuffer,
        algorithm: Algorithm[Any],
        progress: Progress,
        limit: int | None = None,
        num_steps: int | None = None,
    ) -> CollectStats:
        """Fill a rollout buffer, up to `limit` transitions, with the log-probabilities and values of the policy."""
        buffer.reset()
        buffer.first_state, buffer.first_starts = self.policy_state, self.episode_start.copy()
        stats = self.collect(
            algorithm.policy,
            buffer.num_steps if num_steps is None else num_steps,
            buffer,
            max_transitions=limit,
            env_steps=progress.env_steps,
        )
        buffer.last_obs = self.policy_obs
        buffer.score(algorithm.policy, self.device)
        return stats

    def gather(
        self, sink: Sink, exploration: Exploration, progress: Progress, num_steps: int, limit: int, share: int = 1
    ) -> CollectStats:
        """Pass `num_steps` steps to a sink, up to `limit` transitions, and count them in `progress`.

        Each transition counts as `share`: one of several workers advances the run by the steps of all of them.
        """
        total = CollectStats(0, 0.0, 0.0)
        for _ in range(num_steps):
            stats = self.collect(exploration.policy(progress), 1, sink, env_steps=progress.env_steps)
            progress.env_steps += share * stats.num_transitions
            total = CollectStats(
                total.num_transitions + stats.num_transitions,
                total.policy_seconds + stats.policy_seconds,
                total.env_seconds + stats.env_seconds,
            )
            if total.num_transitions >= limit:
                break
        return total

    @property
    def has_episodes(self) -> bool:
        """Whether the next step continues episodes; otherwise it begins new ones."""
        return self.obs is not None

    def leave_episodes(self) -> None:
        """Begin new episodes with the next step."""
        self.obs = None

    def _record(
        self, sink: Sink, policy_obs: ArrayObservation, action: npt.NDArray[Any], out: ActOutput, step: VectorStep
    ) -> ArrayObservation:
        """Pass one step to the sink, update the collector's state, and return the next observation for the policy."""
        assert self.obs is not None
        obs, reward, final_obs, normalize = self.obs, step.reward, step.final_obs, self.obs_normalizer
        done = step.terminated | step.truncated
        self.obs = step.obs
        if normalize is not None:
            normalize.update(map_observation(lambda x: x[step.acting], step.obs))
        final_policy_obs = final_obs if normalize is None or final_obs is None else normalize(final_obs)
        policy_reward = reward if self.reward_normalizer is None else self.reward_normalizer(reward, done, step.valid)
        sink.add(
            Step(
                obs=obs,
                policy_obs=policy_obs,
                action=action,
                extras={name: value.cpu().numpy() for name, value in out.extras.items()},
                reward=reward,
                policy_reward=policy_reward,
                terminated=step.terminated,
                truncated=step.truncated,
                valid=step.valid,
                ended=step.ended,
                final_obs=final_obs,
                final_policy_obs=final_policy_obs,
                next_obs=step.obs,
            )
        )
        self.statistics.add(step)
        self.policy_state = out.state
        self.episode_start = done if step.num_valid == len(done) else done | ~step.valid
        return self.policy_obs

    def state_dict(self) -> dict[str, Any]:
        """Random streams, normalisers and statistics; unfinished episodes if the environments support snapshots."""
        state = super().state_dict()
        snapshot = self.env.take_snapshot() if self.obs is not None and self.saves_episodes else ""
        state["in_flight"] = None
        if not isinstance(snapshot, str):
            state["in_flight"] = {
                "obs": self.obs, "episode_start": self.episode_start, "env": snapshot, "policy": self.policy_state,
            }  # fmt: skip
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; without unfinished episodes, the next `collect` begins new ones from the next environment seed."""
        state = dict(state)
        flight = state.pop("in_flight")
        if flight is None:  # no state per environment is restored, so their number may differ
            for name, part in (("statistics", self.statistics), ("reward_normalizer", self.reward_normalizer)):
                if part is not None:
                    part.restart()
                    own = part.state_dict()
                    state[name] = {**state[name], **{key: own[key] for key in part.per_env}}
        super().load_state_dict(state)
        self.obs = self.policy_state = None
        if flight is not None:
            self.policy_state = flight.get("policy")  # format 1 had none
            self.env.restore_snapshot(flight["env"])
            self.obs = map_observation(lambda x: np.array(x), flight["obs"])
            self.episode_start = np.array(flight["episode_start"])
            if self.episode_start.dtype != np.bool_ or self.episode_start.shape != (self.env.num_envs,):
                raise CheckpointError("the saved episode starts are not one boolean per environment")

    def metrics(self) -> dict[str, float]:
        """Statistics of the latest episodes."""
        return self.statistics.metrics()

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


class NoCollector(Stateful):
    """In place of a collector when a run has no training environments: it keeps the observation statistics."""

    reward_normalizer: ClassVar[None] = None
    obs: ClassVar[None] = None

    def __init__(self, obs_normalizer: ObservationNormalizer | None = None) -> None:
        self.obs_normalizer = obs_normalizer

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful.state_dict`; there are no episodes that could be unfinished."""
        return {**super().state_dict(), "in_flight": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stateful.load_state_dict`."""
        names = ("obs_normalizer",)
        super().load_state_dict({name: state[name] for name in names if name in state})

    def metrics(self) -> dict[str, float]:
        """No episodes, no statistics."""
        return {}

    def close(self) -> None:
        """There is nothing to close."""
