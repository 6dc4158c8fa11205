"""Ape-X: the ladder of exploration rates, and who stands on which rung."""

import numpy as np
import pytest

from rl_training import ApeX
from rl_training.algorithms.apex import epsilon_ladder
from rl_training.api.agent import make_agent
from rl_training.contracts.errors import ConfigError
from rl_training.testing.probes import PROBE


def test_ladder():
    # the paper's: 0.4 ** (1 + 7 i / 7) for 8 actors, so each rate is 0.4 times the one before
    assert epsilon_ladder(0.4, 7.0, 8) == pytest.approx([0.4**i for i in range(1, 9)])
    assert epsilon_ladder(0.4, 7.0, 1).tolist() == [0.4]


def test_workers_share_the_ladder_out():
    settings = {"num_envs": 4, "eval_every": 0, "epsilon_power": 3.0, "epsilon": 0.5, "device": "cpu"}
    settings |= {"buffer_size": 200, "batch_size": 8, "learning_starts": 10, "network": {"sizes": [8]}}
    alone = make_agent("apex", PROBE, **settings)
    assert alone._experiment.trainer.policy.rates.tolist() == [0.5, 0.25, 0.125, 0.0625]
    agent = make_agent("apex", PROBE, workers={"count": 2, "backend": "inline"}, **settings)
    agent.learn(64, progress=False)
    workers = agent._experiment.trainer.collector.backend.workers
    rates = np.concatenate([workers[index].algorithm.policy.rates for index in range(2)])
    assert rates.tolist() == [0.5, 0.25, 0.125, 0.0625]
    for each in (alone, agent):
        each.close()


def test_epsilon_must_be_a_number():
    with pytest.raises(ConfigError, match="epsilon: must be a number"):
        make_agent("apex", PROBE, epsilon={"schedule": "linear", "start": 1.0, "end": 0.1})


@pytest.mark.learning
def test_it_learns_acrobot_with_workers():
    workers = {"count": 2, "backend": "inline"}
    agent = ApeX.from_preset("Acrobot-v1", seed=0, eval_every=0, workers=workers)
    untrained = agent.evaluate(num_episodes=5).mean
    agent.learn(progress=False)
    assert agent.evaluate(num_episodes=20).mean > -110 > untrained
    agent.close()
