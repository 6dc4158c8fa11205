"""The off-policy trainer: gradient steps that are due, its step budget, who acts, and how it goes on from a state."""

import os
from fractions import Fraction

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training import DQN, PPO, Callback
from rl_training.contracts.algorithm import ActOutput, Algorithm
from rl_training.contracts.batches import UpdateResult
from rl_training.contracts.errors import CheckpointError, ConfigError, NonFiniteError
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import EnvSpec
from rl_training.data.replay_buffer import OtherNumberOfEnvsError, ReplayBuffer
from rl_training.data.samplers import MixedSampler, PrioritizedIndexer, ReplaySampler, UniformIndexer
from rl_training.data.settings import OffPolicyConfig
from rl_training.envs.actions import ActionMap
from rl_training.envs.vector import AutoresetAdapter
from rl_training.runtime.collector import Collector
from rl_training.runtime.off_policy import OffPolicyTrainer, Workload

LEARNED, RANDOM = 1, 2
"""Actions by which it is told who acted."""


class Clock(gym.Env):
    """Observes the step of the episode; episodes have 7 steps."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(3)
    time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.full(1, self.time, np.float32), 1.0, False, self.time == 7, {}


class Always:
    """A policy with one action."""

    box_actions = "clip"

    def __init__(self, action):
        self.action = action

    def act(self, obs, **_):
        return ActOutput(torch.full((len(obs),), self.action), {})

    def value(self, obs):
        return torch.zeros(len(obs))


class Counting(Algorithm):
    """Learns nothing; remembers where the run stood, and what it was given."""

    def __init__(self, config, spec):
        super().__init__(config, spec, torch.device("cpu"), random_stream(0, "algorithm"))
        self.policy = Always(LEARNED)
        self.seen, self.explored, self.indices = [], [], []
        self.priorities, self.metrics = None, {}

    def explore(self, progress):
        self.explored.append(progress.env_steps)
        return self.policy

    def update(self, batch, progress):
        self.seen.append((progress.env_steps, progress.updates))
        self.indices.append(batch.indices.tolist())
        priorities = None if self.priorities is None else self.priorities(batch)
        return UpdateResult({"loss/critic": torch.tensor(0.5), **self.metrics}, priorities=priorities)


def make_trainer(num_envs=1, *, env=Clock, mode=AutoresetMode.SAME_STEP, prioritized=False, **settings):
    config = OffPolicyConfig(**{"buffer_size": 2_000, "batch_size": 2, "learning_starts": 20, **settings})
    vector = SyncVectorEnv([env] * num_envs, autoreset_mode=mode)
    spec = EnvSpec(vector.single_observation_space, vector.single_action_space)
    collector = Collector(
        AutoresetAdapter(vector),
        ActionMap(spec.action_space),
        policy_rng=random_stream(0, "policy"),
        env_rng=random_stream(0, "environment"),
    )
    buffer, rng = ReplayBuffer(spec, config.buffer_size, num_envs), random_stream(0, "sampler")
    indexer = PrioritizedIndexer(buffer, rng, alpha=1.0) if prioritized else UniformIndexer(rng)
    sampler = ReplaySampler(buffer, indexer, gamma=config.gamma, n_step=config.n_step)
    return OffPolicyTrainer(Counting(config, spec), collector, sampler, config, Always(RANDOM))


def actions(trainer):
    """Who acted in each row, oldest first, with all environments alike."""
    buffer = trainer.sampler.buffer
    rows = buffer.action[buffer.everything()].reshape(-1, buffer.num_envs)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


# Gradient steps per environment step


class Follow(Callback):
    """Environment steps and gradient steps after each iteration."""

    def __init__(self):
        self.made = []

    def on_iteration(self, run):
        self.made.append((run.env_steps, run.updates))


@pytest.mark.parametrize(
    ("rate", "num_envs", "env_steps", "updates"),
    [
        # 20 steps before learning starts, and then so many of the other 100 (with 16 environments: 108)
        (0.25, 1, 120, 25),
        (0.25, 3, 120, 25),
        (0.25, 16, 128, 27),
        (0.29, 1, 120, 29),  # 0.29 * 100 is less than 29 in floating point
        (0.29, 3, 120, 29),
        (0.29, 16, 128, 31),
        (1, 1, 120, 100),
        (1.0, 3, 120, 100),
        (1.0, 16, 128, 108),
        (20.0, 1, 120, 2000),
        (20.0, 3, 120, 2000),
        (20.0, 16, 128, 2160),
    ],
)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_gradient_steps_per_environment_step(rate, num_envs, env_steps, updates, num_steps):
    trainer = make_trainer(num_envs, updates_per_step=rate, num_steps=num_steps)
    follow = Follow()
    trainer.run(120, [follow])
    assert (trainer.env_steps, trainer.updates) == (env_steps, updates)
    assert len(trainer.algorithm.seen) == updates
    for steps, count in follow.made:  # at no time are there more than are due, or fewer
        assert count == int(Fraction(str(rate)) * max(0, steps - 20))
    assert [steps for steps, _ in follow.made[:-1]] == list(
        range(num_steps * num_envs, env_steps, num_steps * num_envs)
    )


def test_updates_are_numbered():
    trainer = make_trainer(updates_per_step=2.0, learning_starts=3)
    trainer.run(5)
    assert trainer.algorithm.seen == [(4, 0), (4, 1), (5, 2), (5, 3)], "delays and schedules count from these"


def test_no_gradient_steps_at_all():
    trainer = make_trainer(updates_per_step=0.0)
    assert trainer.run(100).metrics["train/updates"] == 0


def test_learning_from_the_first_step():
    trainer = make_trainer(learning_starts=0)
    trainer.run(3)
    assert trainer.algorithm.seen == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize(("num_envs", "first"), [(1, 21), (3, 21), (16, 32)])
def test_learning_starts(num_envs, first):
    trainer = make_trainer(num_envs, learning_starts=20)
    trainer.run(64)
    assert trainer.algorithm.seen[0] == (first, 0)


def test_an_algorithm_that_makes_several_gradient_steps_of_a_batch():
    trainer = make_trainer(learning_starts=0, num_steps=4)
    plain = trainer.algorithm.update
    trainer.algorithm.update = lambda batch, progress: UpdateResult(plain(batch, progress).metrics, num_updates=4)
    trainer.run(16)
    assert trainer.updates == 16
    assert [steps for steps, _ in trainer.algorithm.seen] == [4] * 4, "as many as were due until step 16"


class TestWorkload:
    def test_by_hand(self):
        work = Workload(Fraction("0.3"), start=10, updates_before=5)
        assert [work.due(steps, 5) for steps in (0, 10, 13, 14, 20)] == [0, 0, 0, 1, 3]
        assert work.due(20, 8) == 0
        assert work.due(24, 8) == 1

    def test_one_step_at_a_time_is_the_same_as_all_at_once(self):
        work, made = Workload(Fraction("0.37"), start=7), 0
        for steps in range(1_000):
            made += work.due(steps, made)
        assert made == int(0.37 * (999 - 7))

    def test_the_rate_is_a_setting_and_no_state(self):
        assert Workload(Fraction(1), 10, 20).state_dict() == {"start": 10, "updates_before": 20}


# The step budget


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize(("num_envs", "num_steps"), [(1, 1), (1, 4), (3, 1), (3, 4), (16, 4)])
@pytest.mark.parametrize("total", [1, 29, 48, 100])
def test_the_step_budget(mode, num_envs, num_steps, total):
    trainer = make_trainer(num_envs, mode=mode, num_steps=num_steps, updates_per_step=0.1)
    result = trainer.run(total)
    assert 0 <= result.env_steps - total < num_envs
    assert result.env_steps == trainer.sampler.buffer.num_transitions, "rows that only reset are no steps"


def test_a_second_run_goes_on():
    trainer = make_trainer(3, num_steps=4)
    trainer.run(30)
    trainer.run(30)
    assert trainer.env_steps == 30
    trainer.run(60)
    assert (trainer.env_steps, trainer.updates) == (60, 40)


# Who acts


@pytest.mark.parametrize(
    ("settings", "num_envs", "random_rows"),
    [
        ({"random_steps": None, "learning_starts": 20}, 1, 20),
        ({"random_steps": None, "learning_starts": 20}, 3, 7),
        ({"random_steps": 0}, 1, 0),
        ({"random_steps": 5}, 1, 5),
        ({"random_steps": 5}, 3, 2),
        ({"random_steps": 50}, 1, 50),
        ({"random_steps": 1}, 16, 1),
    ],
)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_random_actions_at_first(settings, num_envs, random_rows, num_steps):
    trainer = make_trainer(num_envs, **settings, num_steps=num_steps)
    trainer.run(60)
    rows = actions(trainer)
    assert rows[:random_rows] == [RANDOM] * random_rows
    assert rows[random_rows:] == [LEARNED] * (len(rows) - random_rows)
    learned_at = [row * num_envs for row in range(random_rows, len(rows))]
    assert trainer.algorithm.explored == learned_at, "exploration is asked for at every step, where the run stands"


# Replay and priorities


def test_priorities_reach_the_sampler():
    trainer = make_trainer(prioritized=True, learning_starts=4, batch_size=4)
    trainer.algorithm.priorities = lambda batch: batch.indices.float() + 10.0
    trainer.run(5)  # the first gradient step sees five transitions
    drawn = sorted(set(trainer.algorithm.indices[0]))
    leaves = trainer.sampler.indexer.tree.levels[0]
    assert leaves[:5].tolist() == pytest.approx([10.0 + i if i in drawn else 1.0 for i in range(5)])
    largest = 10.0 + drawn[-1]
    trainer.algorithm.priorities = None
    trainer.run(6)
    assert leaves[5] == pytest.approx(largest)


def test_each_update_has_the_priorities_of_the_one_before():
    trainer = make_trainer(prioritized=True, learning_starts=8, batch_size=64, updates_per_step=20.0)

    def only_the_first(batch):
        return torch.where(batch.indices == 0, 1e9, 0.0)

    trainer.algorithm.priorities = only_the_first
    trainer.run(9)
    assert len(set(trainer.algorithm.indices[0])) == 9
    assert set(trainer.algorithm.indices[-1]) == {0}


def test_batches():
    trainer = make_trainer(batch_size=5, learning_starts=2)
    trainer.run(10)
    assert [len(indices) for indices in trainer.algorithm.indices] == [5] * 8
    for time, indices in enumerate(trainer.algorithm.indices):
        assert max(indices) < 3 + time


def test_the_newest_transitions_stay():
    trainer = make_trainer(3, buffer_size=30)
    trainer.run(90)
    buffer = trainer.sampler.buffer
    assert (buffer.num_transitions, buffer.oldest, buffer.added) == (30, 20, 30)


def test_metrics():
    trainer = make_trainer(learning_starts=0)
    trainer.algorithm.metrics = {"loss/policy": torch.tensor(2.0)}
    trainer.run(1)
    trainer.algorithm.metrics = {"loss/temperature": 3.0}
    metrics = trainer.run(2).metrics
    assert {name: value for name, value in metrics.items() if name.startswith("loss/")} == {
        "loss/critic": 0.5, "loss/policy": 2.0, "loss/temperature": 3.0,
    }, "what learns with a delay is not in every result"  # fmt: skip
    assert metrics["train/updates"] == 2


def test_a_loss_that_is_not_finite():
    trainer = make_trainer(learning_starts=3)
    trainer.algorithm.metrics = {"loss/critic": torch.tensor(torch.nan)}
    with pytest.raises(NonFiniteError, match=r"the update after 4 environment steps gave .* loss/critic"):
        trainer.run(10)


# Going on from a state


def without_flight(state):
    """As where environments cannot be snapshotted, or others are given."""
    return {**state, "collector": {**state["collector"], "in_flight": None}}


def cartpole():
    return gym.make("CartPole-v1")


def test_an_exact_restore():
    settings = {"env": cartpole, "prioritized": True, "num_steps": 2, "updates_per_step": 0.29, "buffer_size": 90}
    whole, first, second = (make_trainer(3, **settings) for _ in range(3))
    for trainer in (whole, first, second):
        trainer.algorithm.priorities = lambda batch: batch.reward + batch.indices
        trainer.exploration.random_policy = Always(0)
    whole.run(200)
    first.run(100)
    second.load_state_dict(first.state_dict())
    second.run(200)
    assert first.algorithm.seen + second.algorithm.seen == whole.algorithm.seen
    assert first.algorithm.indices + second.algorithm.indices == whole.algorithm.indices
    for name in ("obs", "action", "reward", "truncated"):
        index = whole.sampler.buffer.everything()
        assert np.array_equal(getattr(whole.sampler.buffer, name)[index], getattr(second.sampler.buffer, name)[index])


def test_without_replay_learning_waits_and_makes_no_backlog():
    first, second = (make_trainer(checkpoint_replay=False, learning_starts=20) for _ in range(2))
    first.run(60)
    assert first.updates == 40
    state = first.state_dict()
    assert state["sampler"] is None
    second.load_state_dict(state)
    assert (second.env_steps, second.updates) == (60, 40)
    second.run(100)
    # steps 61 to 80 fill the replay, as the first 20 did; then one gradient step per step, 81 to 100
    assert second.updates == 60
    assert second.algorithm.seen[0] == (81, 40)
    assert [steps for steps, _ in second.algorithm.seen] == list(range(81, 101))
    assert actions(second) == [LEARNED] * 40, "the policy has learned: no more random actions"


def test_twice_without_replay():
    trainer = make_trainer(checkpoint_replay=False)
    trainer.run(60)
    for _ in range(2):
        state = trainer.state_dict()
        trainer = make_trainer(checkpoint_replay=False)
        trainer.load_state_dict(state)
        trainer.run(trainer.env_steps + 10)  # too few to learn from
    assert (trainer.env_steps, trainer.updates) == (80, 40)
    trainer.run(111)
    assert trainer.algorithm.seen[0] == (91, 40)
    assert trainer.updates == 40 + 21


def test_a_restore_before_learning_started():
    first, second = make_trainer(checkpoint_replay=False), make_trainer(checkpoint_replay=False)
    first.run(10)
    second.load_state_dict(first.state_dict())
    second.run(40)
    assert actions(second) == [RANDOM] * 10 + [LEARNED] * 20
    assert second.algorithm.seen[0] == (31, 0), "20 new steps after the 10 that are lost"


@pytest.mark.parametrize("num_envs", [1, 3])
def test_at_an_episode_boundary_open_episodes_end_as_truncated(num_envs):
    first, second = make_trainer(num_envs, n_step=3), make_trainer(num_envs, n_step=3)
    first.run(10 * num_envs)  # one episode of 7 steps, and 3 of the next
    second.load_state_dict(without_flight(first.state_dict()))
    buffer = second.sampler.buffer
    assert not first.sampler.buffer.truncated[9 * num_envs : 10 * num_envs].any()
    assert buffer.truncated[9 * num_envs : 10 * num_envs].all()
    assert not buffer.terminated.any()
    second.run(15 * num_envs)
    newest = buffer.at(np.full(num_envs, 9), np.arange(num_envs))
    assert buffer.next_observations(newest).reshape(-1).tolist() == [3.0] * num_envs, "what was seen last"
    assert buffer.obs[buffer.at(np.array([10]), np.array([0]))].item() == 0.0, "and then a new episode began"
    window = buffer.window(buffer.at(np.array([8]), np.array([0])), 3)
    assert window.used[0].tolist() == [True, True, False], "no return goes on into it"
    assert second.updates == int(15 * num_envs - 20) * (num_envs > 1)


def test_at_an_episode_boundary_nothing_is_lost():
    """Learning goes on at once: the replay is there."""
    first, second = make_trainer(), make_trainer()
    first.run(50)
    second.load_state_dict(without_flight(first.state_dict()))
    second.run(55)
    assert second.algorithm.seen == [(51, 30), (52, 31), (53, 32), (54, 33), (55, 34)]


def test_another_number_of_environments_starts_with_empty_replay():
    first, second = make_trainer(3), make_trainer(2)
    first.run(60)
    with pytest.warns(
        UserWarning, match="the replay buffer starts empty: it was saved with 3 environments, this run has 2"
    ):
        second.load_state_dict(without_flight(first.state_dict()))
    assert not second.sampler.ready
    second.run(100)
    assert second.algorithm.seen[0] == (82, 40), "as without replay"
    assert second.updates == 40 + 20


def test_with_episodes_in_flight_another_number_is_an_error():
    first, second = make_trainer(3), make_trainer(2)
    first.run(60)
    state = first.state_dict()
    second.collector.load_state_dict = lambda state: None
    second.collector.reset()
    with pytest.raises(OtherNumberOfEnvsError):
        second.load_state_dict(state)


@pytest.mark.parametrize("name", ["sampler", "workload"])
def test_an_incomplete_state_is_refused(name):
    state = make_trainer().state_dict()
    del state[name]
    with pytest.raises(CheckpointError, match=f"missing {name}"):
        make_trainer().load_state_dict(state)


# Agents


SMALL = {
    "buffer_size": 300, "batch_size": 8, "learning_starts": 20, "network": {"sizes": (8,)}, "eval_every": 0,
    "device": "cpu",
}  # fmt: skip


def vector_of(num_envs):
    return SyncVectorEnv([cartpole] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def test_an_agent_in_another_number_of_environments(tmp_path):
    agent = DQN(vector_of(3), **SMALL, epsilon=0.1, importance_exponent=1.0)
    agent.learn(60, progress=False)
    path = agent.save(tmp_path / "agent")
    same = DQN.load(path, env=vector_of(3))
    assert same._experiment.trainer.sampler.buffer.num_transitions == 60
    with pytest.warns(UserWarning, match="the replay buffer starts empty"):
        fewer = DQN.load(path, env=vector_of(2))
    fewer.learn(30, progress=False)
    assert fewer.num_timesteps == 90


def test_prior_replay(tmp_path):
    agent = DQN("CartPole-v1", num_envs=2, **SMALL)
    agent.learn(60, progress=False)
    path = agent.save_replay(tmp_path / "replay")
    other = DQN("CartPole-v1", num_envs=1, prior_replay=path, prior_ratio=0.25, **SMALL)
    sampler = other._experiment.trainer.sampler
    assert isinstance(sampler, MixedSampler)
    assert (sampler.prior.buffer.num_transitions, sampler.prior_ratio) == (60, 0.25)
    other.learn(40, progress=False)
    assert sampler.prior.buffer.num_transitions == 60
    assert sampler.online.buffer.num_transitions == 40


def test_a_replay_that_is_loaded(tmp_path):
    agent, other = (DQN("CartPole-v1", num_envs=2, **SMALL) for _ in range(2))
    agent.learn(60, progress=False)
    other.load_replay(agent.save_replay(tmp_path / "replay"))
    buffer = other._experiment.trainer.sampler.buffer
    assert buffer.num_transitions == 60
    assert buffer.num_rows * buffer.num_envs == 300, "its own size"
    other.learn(30, progress=False)
    assert buffer.num_transitions == 90


def test_on_policy_agents_have_no_replay(tmp_path):
    agent = PPO("CartPole-v1", eval_every=0)
    for use in (agent.save_replay, agent.load_replay):
        with pytest.raises(ConfigError, match="PPO is on-policy and has no replay buffer"):
            use(tmp_path / "replay")


def test_more_replay_than_memory_is_warned_of(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1_000)  # pages, and bytes of each: a megabyte
    with pytest.warns(
        UserWarning, match=r"a full replay buffer of 100000 transitions takes 0.0 GB.* smaller buffer_size"
    ):
        DQN("CartPole-v1", **{**SMALL, "buffer_size": 100_000})
    DQN("CartPole-v1", **{**SMALL, "buffer_size": 10_000})


def test_memory_that_is_not_known(monkeypatch):
    def unknown(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    DQN("CartPole-v1", **SMALL)


def test_replay_that_no_machine_has_memory_for():
    with pytest.raises(
        ConfigError, match=r"buffer_size: not enough memory for a replay buffer of 10000000000000 trans"
    ):
        DQN("CartPole-v1", **{**SMALL, "buffer_size": 10**13})
