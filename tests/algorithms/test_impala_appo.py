"""IMPALA and APPO: their numbers by hand, and that old rollouts are corrected for."""

import math

import numpy as np
import pytest
import torch

from rl_training import APPO, IMPALA
from rl_training.contracts.batches import Progress
from rl_training.contracts.state import same_state
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.functional.policies import target_ratio
from rl_training.testing.probes import PROBE


def agent_of(cls, **settings):
    return cls(PROBE, num_envs=2, seed=1, eval_every=0, device="cpu", accelerate="off", num_steps=4, **settings)


def filled(policy, shift=0.0):
    """Two environments, four steps, one truncated at step 1; `shift` is added to the acting log-probabilities."""
    buffer = RolloutBuffer(4, 2, (1,), (), action_dtype=np.int64)
    buffer.size = 4
    buffer.obs[:] = torch.linspace(-1, 1, 8).reshape(4, 2, 1)
    buffer.actions[:] = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])
    buffer.rewards[:] = torch.arange(8.0).reshape(4, 2)
    logprobs, _ = policy.score(buffer.obs.flatten(0, 1), buffer.actions.flatten())
    buffer.logprobs[:] = logprobs.reshape(4, 2) + shift
    buffer.dones[1, 0] = buffer.truncated[1, 0] = True
    buffer.final_rows, buffer.final_obs = [(1, 0)], [np.array([0.5], np.float32)]
    buffer.last_obs = np.zeros((2, 1), np.float32)
    return buffer


@pytest.mark.parametrize("shift", [0.0, math.log(2.0), -math.log(2.0)])
def test_impala_learns_from_vtrace_with_its_own_values(shift):
    agent = agent_of(IMPALA, gamma=0.5)
    algorithm = agent._experiment.trainer.algorithm
    policy = algorithm.policy
    buffer = filled(policy, shift)
    algorithm.estimate_vtrace(buffer, policy)
    rho = min(1.0, math.exp(-shift))  # twice as likely when acting: half the weight; half as likely: clipped to 1
    value = policy.value(buffer.obs.flatten(0, 1)).reshape(4, 2)
    final, last = policy.value(torch.tensor([[0.5], [0.0]])).tolist()
    # environment 0 is cut after step 1: nothing of steps 2 and 3 reaches it
    delta1 = rho * (2.0 + 0.5 * final - value[1, 0])
    assert buffer.returns[1, 0].item() == pytest.approx((value[1, 0] + delta1).item(), rel=1e-5)
    delta0 = rho * (0.0 + 0.5 * value[1, 0] - value[0, 0])
    assert buffer.returns[0, 0].item() == pytest.approx((value[0, 0] + delta0 + 0.5 * rho * delta1).item(), rel=1e-4)
    assert buffer.advantages[1, 0].item() == pytest.approx(delta1.item(), rel=1e-5)
    delta3 = rho * (7.0 + 0.5 * last - value[3, 1])
    assert buffer.returns[3, 1].item() == pytest.approx((value[3, 1] + delta3).item(), rel=1e-5)
    agent.close()


def test_target_ratio():
    now, target, acting = torch.tensor([0.3, 0.2, 0.25]).log()
    assert target_ratio(now, target, acting, 2.0).item() == pytest.approx(1.5)  # not clipped: 0.3 / 0.2
    acting = torch.tensor(0.8).log()
    assert target_ratio(now, target, acting, 2.0).item() == pytest.approx(0.3 / 0.8 * 2)


def test_appo_judges_with_its_target_and_uses_each_rollout_again():
    agent = agent_of(APPO, num_rollouts=2, minibatch_size=8, target_update_every=3, learning_rate=0.05)
    algorithm = agent._experiment.trainer.algorithm
    target = {name: x.clone() for name, x in algorithm.target.module.state_dict().items()}
    for iteration, (steps, is_same) in enumerate(((1, True), (2, True), (2, False))):
        progress = Progress(iterations=iteration)
        assert algorithm.update(filled(algorithm.policy), progress).num_updates == steps
        assert same_state(dict(algorithm.target.module.state_dict()), target) == is_same
    online = dict(algorithm.policy.state_dict())
    assert same_state(dict(algorithm.target.module.state_dict()), online)
    # the target's scores are computed with its own weights, not with those it was copied from
    obs, actions = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    before = algorithm.target.module.score(obs, actions)[0]
    with torch.no_grad():
        algorithm.policy.head.linear.bias.add_(torch.tensor([1.0, -1.0]))
    assert algorithm.target.module.score(obs, actions)[0] == before
    assert algorithm.policy.score(obs, actions)[0] != before
    agent.close()


@pytest.mark.learning
@pytest.mark.parametrize("cls", [IMPALA, APPO])
@pytest.mark.parametrize("workers", [{}, {"count": 4, "backend": "inline", "mode": "pipelined"}])
def test_they_learn_cartpole(cls, workers):
    agent = cls.from_preset("CartPole-v1", seed=0, eval_every=0, workers=workers)
    untrained = agent.evaluate(num_episodes=10).mean
    agent.learn(progress=False)
    assert agent.evaluate(num_episodes=20).mean > 400 > untrained
    agent.close()
