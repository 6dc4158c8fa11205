"""Replay in shards: chances, importance weights and priorities by hand, and episodes that were cut."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.contracts.batches import Progress, Step
from rl_training.contracts.spec import EnvSpec
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.samplers import PrioritizedIndexer, ReplaySampler, UniformIndexer
from rl_training.data.shards import ShardedSampler

SPEC = EnvSpec(spaces.Box(-100, 100, (1,)), spaces.Discrete(2))


def steps(first, count):
    """Steps of one environment that counts."""
    return [
        Step(
            obs=np.full((1, 1), t, np.float32),
            policy_obs=np.full((1, 1), t, np.float32),
            action=np.zeros(1, np.int64),
            extras={},
            reward=np.full(1, float(t)),
            policy_reward=np.full(1, float(t)),
            terminated=np.zeros(1, np.bool_),
            truncated=np.zeros(1, np.bool_),
            valid=np.ones(1, np.bool_),
            ended=np.zeros(0, np.intp),
            final_obs=None,
            final_policy_obs=None,
            next_obs=np.full((1, 1), t + 1, np.float32),
        )
        for t in range(first, first + count)
    ]


def sharded(prioritized=False):
    shards = []
    for index in range(2):
        buffer, rng = ReplayBuffer(SPEC, 10), np.random.default_rng(index)
        indexer = PrioritizedIndexer(buffer, rng, alpha=1.0, beta=1.0) if prioritized else UniformIndexer(rng)
        shards.append(ReplaySampler(buffer, indexer, gamma=0.9))
    sampler = ShardedSampler(shards, np.random.default_rng(7))
    sampler.extend(0, steps(0, 2))
    sampler.extend(1, steps(50, 6))
    return sampler


def test_every_transition_has_the_same_chance():
    batch = sharded().sample(8_000, Progress())
    values, counts = np.unique(batch.reward.numpy(), return_counts=True)
    assert values.tolist() == [0, 1, 50, 51, 52, 53, 54, 55]
    assert counts == pytest.approx(np.full(8, 1_000), rel=0.15)
    assert batch.weight.unique().tolist() == [1.0]


def test_priorities_and_importance_weights_count_over_all_shards():
    sampler = sharded(prioritized=True)
    batch = sampler.sample(4_000, Progress())
    # rewards 1 and 50 get priority 3, the others 1: (2 * 3 + 6 * 1) = 12 in total, so P = 1/4 and 1/12
    sampler.update_priorities(batch.indices, torch.where((batch.reward == 1) | (batch.reward == 50), 3.0, 1.0))
    batch = sampler.sample(8_000, Progress())
    share = {value: float((batch.reward == value).float().mean()) for value in (0.0, 1.0, 50.0, 51.0)}
    assert share == pytest.approx({0.0: 1 / 12, 1.0: 1 / 4, 50.0: 1 / 4, 51.0: 1 / 12}, rel=0.1)
    # weights are 1 / (8 P), and then divided by the largest: 1/3 and 1
    large = batch.weight[(batch.reward == 1) | (batch.reward == 50)]
    assert large.unique().tolist() == pytest.approx([1 / 3], rel=1e-5)
    assert batch.weight[batch.reward == 51].unique().tolist() == pytest.approx([1.0], rel=1e-5)


def test_a_worker_that_begins_elsewhere_has_cut_its_episodes():
    sampler = sharded()
    sampler.extend(0, steps(2, 1))
    assert not sampler.shards[0].buffer.truncated.any()
    sampler.extend(0, steps(70, 1))
    batch = sampler.sample(200, Progress())
    cut = batch.reward == 2
    assert batch.next_obs[cut].unique().tolist() == [3.0]
    assert batch.discount.unique().tolist() == pytest.approx([0.9])
    assert sampler.shards[0].buffer.truncated.sum() == 1
