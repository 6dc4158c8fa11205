"""The collector by itself: every transition, in every way to reset, with its statistics and its normalisers."""

from collections import deque

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import EnvSpec
from rl_training.data.normalize import ObservationNormalizer, RewardNormalizer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.envs.actions import ActionMap
from rl_training.envs.vector import AutoresetAdapter
from rl_training.runtime.collector import WINDOW, Collector, EpisodeStatistics

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())


class Counting(gym.Env):
    """Episodes of a fixed length. Shows (number, step of the episode, episode), pays what it is told, tells successes.

    Every second episode terminates and is a success, the others are truncated.
    """

    def __init__(self, number, length, reward=1.0, tells_success=True):
        self.observation_space = spaces.Box(-100.0, 100.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.number, self.length, self.reward, self.tells_success = number, length, reward, tells_success
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode = 0 if seed is not None else self.episode + 1
        self.step_number = 0
        return self._observe(), {}

    def step(self, action):
        self.step_number += 1
        ended, even = self.step_number == self.length, self.episode % 2 == 0
        info = {"is_success": even} if ended and self.tells_success else {}
        return self._observe(), self.reward, ended and even, ended and not even, info

    def _observe(self):
        return np.array([self.number, self.step_number, self.episode], np.float32)


LENGTHS = (1, 2, 3)


def counting(mode, **kwargs):
    makers = [lambda i=i, n=n: Counting(i, n, reward=i + 1.0, **kwargs) for i, n in enumerate(LENGTHS)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


class FixedPolicy:
    """Alternates with the step of the episode; remembers what it was shown. Its value is that step."""

    box_actions = "clip"

    def __init__(self):
        self.seen, self.starts, self.states = [], [], []

    def act(self, obs, *, deterministic=False, action_mask=None, state=None, episode_start=None, rng=None):
        self.seen.append(obs.clone())
        self.starts.append(episode_start.clone())
        self.states.append(state)
        values = obs[:, 1].float()
        return ActOutput(values.long() % 2, {"logprobs": -values, "values": values}, len(self.seen))


class ListSink:
    """A sink is anything with `add`."""

    def __init__(self):
        self.steps = []

    def add(self, step):
        self.steps.append(step)


def make_collector(vector, seed=0, **kwargs):
    return Collector(
        AutoresetAdapter(vector),
        ActionMap(vector.single_action_space),
        policy_rng=random_stream(seed, "policy"),
        env_rng=random_stream(seed, "environment"),
        **kwargs,
    )


def transitions_of(steps, env):
    """The transitions of one environment as plain tuples; rows that only reset are left out."""
    found = []
    for step in steps:
        if not step.valid[env]:
            continue
        final = None
        if env in step.ended:
            final = tuple(step.final_obs[list(step.ended).index(env)].tolist())
        flags = bool(step.terminated[env]), bool(step.truncated[env])
        found.append((tuple(step.obs[env].tolist()), int(step.action[env]), float(step.reward[env]), *flags, final))
    return found


def expected_transitions(env, count):
    found, episode = [], 0
    while len(found) < count:
        for step in range(LENGTHS[env]):
            last, even = step == LENGTHS[env] - 1, episode % 2 == 0
            final = (env, step + 1.0, episode) if last else None
            found.append(((env, step, episode), step % 2, env + 1.0, last and even, last and not even, final))
        episode += 1
    return found[:count]


@modes
def test_every_transition_reaches_the_sink(mode):
    sink, policy = ListSink(), FixedPolicy()
    stats = make_collector(counting(mode)).collect(policy, 12, sink)
    assert len(sink.steps) == len(policy.seen) == 12
    total = 0
    for env, length in enumerate(LENGTHS):
        found = transitions_of(sink.steps, env)
        if mode is AutoresetMode.NEXT_STEP:  # one row in each length + 1 only resets
            assert len(found) == 12 - 12 // (length + 1)
        else:
            assert len(found) == 12
        assert found == expected_transitions(env, len(found))
        total += len(found)
    assert stats.num_transitions == total
    assert stats.env_seconds > 0
    assert stats.policy_seconds > 0


@modes
def test_the_rollout_buffer_is_such_a_sink(mode):
    vector = counting(mode)
    spec = EnvSpec(vector.single_observation_space, vector.single_action_space)
    buffer = RolloutBuffer.for_spec(spec, num_steps=8, num_envs=3)
    stats = make_collector(vector).collect(FixedPolicy(), 8, buffer)
    valid = buffer.valid
    assert int(valid.sum()) == stats.num_transitions
    for env in range(3):
        expected = expected_transitions(env, int(valid[:, env].sum()))
        rows = valid[:, env]
        assert buffer.obs[rows, env].tolist() == [list(row[0]) for row in expected]
        assert buffer.actions[rows, env].tolist() == [row[1] for row in expected]
        assert buffer.rewards[rows, env].tolist() == [row[2] for row in expected]
        assert buffer.dones[rows, env].tolist() == [row[3] or row[4] for row in expected]
        assert buffer.truncated[rows, env].tolist() == [row[4] for row in expected]
        assert buffer.values[rows, env].tolist() == [row[0][1] for row in expected]
        final = [obs.tolist() for (_, e), obs in zip(buffer.final_rows, buffer.final_obs, strict=True) if e == env]
        assert final == [list(row[5]) for row in expected if row[4]]
    assert not buffer.dones[~valid].any()


@modes
def test_collecting_goes_on_where_it_stopped(mode):
    once, twice = ListSink(), ListSink()
    make_collector(counting(mode)).collect(FixedPolicy(), 11, once)
    collector = make_collector(counting(mode))
    for num_steps in (1, 4, 6):
        collector.collect(FixedPolicy(), num_steps, twice)
    for env in range(3):
        assert transitions_of(twice.steps, env) == transitions_of(once.steps, env)
    assert collector.policy_obs is collector.obs


@modes
@pytest.mark.parametrize("budget", [1, 3, 4, 9, 10])
def test_a_budget_of_transitions_is_kept(mode, budget):
    sink = ListSink()
    stats = make_collector(counting(mode)).collect(FixedPolicy(), 100, sink, max_transitions=budget)
    assert budget <= stats.num_transitions < budget + 3
    assert stats.num_transitions == sum(int(step.valid.sum()) for step in sink.steps)


@modes
def test_the_policy_is_told_of_starts_and_gets_its_state_back(mode):
    policy = FixedPolicy()
    make_collector(counting(mode)).collect(policy, 10, ListSink())
    assert policy.states == [None, *range(1, 10)]
    for seen, starts in zip(policy.seen, policy.starts, strict=True):
        first = seen[:, 1] == 0
        assert bool(starts[first].all()), "every first observation of an episode is announced"
        if mode is not AutoresetMode.NEXT_STEP:  # there, the last observation is shown as well, and is nobody's start
            assert torch.equal(starts, first)


@modes
def test_a_reset_begins_anew(mode):
    collector, sink = make_collector(counting(mode)), ListSink()
    collector.collect(FixedPolicy(), 2, ListSink())
    assert collector.statistics.running_length.tolist() != [0, 0, 0]
    collector.reset()
    assert collector.statistics.running_length.tolist() == [0, 0, 0]
    assert collector.statistics.running_return.tolist() == [0, 0, 0]
    policy = FixedPolicy()
    collector.collect(policy, 4, sink)
    assert policy.states[0] is None
    assert bool(policy.starts[0].all())
    assert transitions_of(sink.steps, 2)[0] == expected_transitions(2, 1)[0]


# Statistics of episodes


@modes
def test_returns_lengths_and_successes(mode):
    collector = make_collector(counting(mode))
    for _ in range(4):  # episodes go on over calls
        collector.collect(FixedPolicy(), 3, ListSink())
    statistics = collector.statistics
    # in 12 steps: 12, 6 and 4 episodes; where one row in each length + 1 resets, 6, 4 and 3
    counts = (6, 4, 3) if mode is AutoresetMode.NEXT_STEP else (12, 6, 4)
    assert statistics.num_episodes == sum(counts)
    assert sorted(statistics.lengths) == sorted(
        n for n, count in zip(LENGTHS, counts, strict=True) for _ in range(count)
    )
    # each environment pays its number plus one at each of its steps: returns 1, 4 and 9
    assert sorted(statistics.returns) == sorted([1.0] * counts[0] + [4.0] * counts[1] + [9.0] * counts[2])
    successes = sum(-(-count // 2) for count in counts)  # the first, third, ... of each
    assert sum(statistics.successes) == successes
    assert statistics.metrics() == {
        "rollout/return_mean": pytest.approx((counts[0] + 4 * counts[1] + 9 * counts[2]) / sum(counts)),
        "rollout/length_mean": pytest.approx((counts[0] + 2 * counts[1] + 3 * counts[2]) / sum(counts)),
        "rollout/success_rate": pytest.approx(successes / sum(counts)),
        "rollout/episodes": sum(counts),
    }


@modes
def test_no_success_rate_where_nobody_tells(mode):
    collector = make_collector(counting(mode, tells_success=False))
    collector.collect(FixedPolicy(), 12, ListSink())
    assert collector.statistics.num_episodes > 0
    assert not collector.statistics.successes
    assert "rollout/success_rate" not in collector.statistics.metrics()


@modes
def test_who_does_not_tell_has_not_failed(mode):
    """Two environments end in the same step, and only the first of them knows about success."""
    makers = [lambda: Counting(0, 2, tells_success=True), lambda: Counting(1, 2, tells_success=False)]
    collector = make_collector(SyncVectorEnv(makers, autoreset_mode=mode))
    collector.collect(FixedPolicy(), 2, ListSink())
    assert collector.statistics.num_episodes == 2
    assert list(collector.statistics.successes) == [True]


def test_metrics_before_the_first_end():
    collector = make_collector(SyncVectorEnv([lambda: Counting(0, 50)], autoreset_mode=AutoresetMode.DISABLED))
    collector.collect(FixedPolicy(), 5, ListSink())
    assert collector.statistics.metrics() == {"rollout/episodes": 0.0}


def test_means_are_over_a_window():
    collector = make_collector(SyncVectorEnv([lambda: Counting(0, 1)], autoreset_mode=AutoresetMode.DISABLED))
    collector.collect(FixedPolicy(), WINDOW + 20, ListSink())
    assert collector.statistics.num_episodes == WINDOW + 20
    assert isinstance(collector.statistics.returns, deque)
    assert len(collector.statistics.returns) == len(collector.statistics.lengths) == WINDOW


def test_statistics_survive_a_checkpoint():
    collector = make_collector(counting(AutoresetMode.SAME_STEP))
    collector.collect(FixedPolicy(), 5, ListSink())
    copy = EpisodeStatistics.start(3)
    copy.load_state_dict(collector.statistics.state_dict())
    assert copy.metrics() == collector.statistics.metrics()
    assert copy.running_length.tolist() == collector.statistics.running_length.tolist() != [0, 0, 0]


# Normalisation


@modes
def test_observations_are_normalised_for_the_policy_only(mode):
    vector = counting(mode)
    normalizer = ObservationNormalizer(vector.single_observation_space)
    sink, policy = ListSink(), FixedPolicy()
    collector = make_collector(vector, obs_normalizer=normalizer)
    collector.collect(policy, 30, sink)
    for step, seen in zip(sink.steps, policy.seen, strict=True):
        assert np.array_equal(step.policy_obs, seen.numpy())
        assert step.policy_obs.dtype == np.float32
    raw = np.concatenate([step.obs for step in sink.steps])
    assert set(raw[:, 0]) == {0.0, 1.0, 2.0}, "the environments' own numbers"
    shown = np.concatenate([step.policy_obs[step.valid] for step in sink.steps[10:]])
    assert np.abs(shown.mean(axis=0)[:2]).max() < 0.5
    assert 0.5 < shown.std(axis=0)[0] < 1.5
    # last observations are seen through the same statistics as the observation that follows
    last = next(step for step in reversed(sink.steps) if step.final_obs is not None)
    assert last.final_policy_obs.shape == last.final_obs.shape
    assert not np.allclose(last.final_policy_obs, last.final_obs)


@modes
def test_observation_statistics_take_in_what_is_acted_on(mode):
    vector = counting(mode)
    normalizer = ObservationNormalizer(vector.single_observation_space)
    sink = ListSink()
    collector = make_collector(vector, obs_normalizer=normalizer)
    stats = collector.collect(FixedPolicy(), 24, sink)
    acted_on = [step.obs[step.valid] for step in sink.steps]
    if mode is AutoresetMode.NEXT_STEP:  # some of the next ones are last ones
        waiting = collector.obs[[env for env in range(3) if env not in sink.steps[-1].ended]]
    else:
        waiting = collector.obs
    everything = np.concatenate([*acted_on, waiting]).astype(np.float64)
    assert len(everything) == stats.num_transitions + len(waiting)
    moments = normalizer.moments[""]
    assert float(moments.count) == len(everything)
    np.testing.assert_allclose(moments.mean, everything.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(moments.var, everything.var(axis=0), rtol=1e-9)


@modes
def test_rewards_are_normalised_for_the_learner_only(mode):
    sink = ListSink()
    collector = make_collector(counting(mode), reward_normalizer=RewardNormalizer(3, gamma=0.9))
    collector.collect(FixedPolicy(), 30, sink)
    for env in range(3):
        assert {row[2] for row in transitions_of(sink.steps, env)} == {env + 1.0}
    assert set(collector.statistics.returns) == {1.0, 4.0, 9.0}
    late = sink.steps[-1]
    scale = np.sqrt(collector.reward_normalizer.moments.var + 1e-8)
    np.testing.assert_allclose(late.policy_reward, late.reward / scale, rtol=1e-6)
    assert not np.allclose(late.policy_reward, late.reward)


# Random streams


def cartpole_actions(seed, num_envs=3, steps=40):
    class Coin:
        box_actions = "clip"

        def act(self, obs, *, rng=None, **_):
            action = torch.from_numpy(rng.integers(2, size=len(obs)))
            return ActOutput(action, {"logprobs": torch.zeros(len(obs)), "values": torch.zeros(len(obs))})

    vector = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    sink = ListSink()
    make_collector(vector, seed=seed).collect(Coin(), steps, sink)
    return np.stack([step.action for step in sink.steps]), np.stack([step.obs for step in sink.steps])


def test_equal_streams_equal_rows():
    (actions, obs), (same_actions, same_obs) = cartpole_actions(1), cartpole_actions(1)
    assert np.array_equal(actions, same_actions)
    assert np.array_equal(obs, same_obs)
    other_actions, other_obs = cartpole_actions(2)
    assert not np.array_equal(actions, other_actions)
    assert not np.array_equal(obs[0], other_obs[0])


def test_environments_of_one_vector_have_different_seeds():
    _, obs = cartpole_actions(1)
    assert len({tuple(row) for row in obs[0]}) == 3
