"""TQC: its update against plain torch, one critic and one quantile at a time; its targets, values and settings."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from rl_training import TQC
from rl_training.accelerate.recording import SEEN_BEFORE
from rl_training.algorithms.tqc import TQCAlgorithm, TQCConfig
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import StochasticNetworkConfig

B, OBS, A, E, K = 6, 3, 2, 3, 5
SPEC = EnvSpec(spaces.Box(-1, 1, (OBS,)), spaces.Box(-1, 1, (A,)))


def make(seed=0, **settings):
    network = StochasticNetworkConfig(actor_sizes=(16, 8), critic_sizes=(16, 8), **settings.pop("network", {}))
    config = TQCConfig(network=network, **{"num_critics": E, "num_quantiles": K, "num_dropped": 1, **settings})
    return TQCAlgorithm(config, SPEC, torch.device("cpu"), np.random.default_rng(seed))


def make_batch(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return TransitionBatch(
        obs=torch.randn(B, OBS, generator=rng),
        action=torch.rand(B, A, generator=rng) * 2 - 1,
        reward=torch.randn(B, generator=rng),
        discount=torch.where(torch.arange(B) % 4 == 0, 0.0, 0.9),
        next_obs=torch.randn(B, OBS, generator=rng),
        weight=torch.rand(B, generator=rng) + 0.5,
        indices=torch.arange(B),
    )


def at(updates):
    return Progress(env_steps=0, horizon=1000, updates=updates)


def quantiles_of(critic, obs, action):
    """[E][B, K], one critic at a time."""
    found = []
    for member in range(E):
        x = torch.cat([obs, action], dim=1)
        for index, layer in enumerate(critic.members.layers):
            x = F.linear(x, layer.weight[member].T, layer.bias[member, 0])
            x = F.relu(x) if index < 2 else x
        found.append(x)
    return found


def test_an_update_against_plain_torch():
    algorithm, batch = make(), make_batch()
    rng = copy.deepcopy(algorithm.rng)
    next_noise, noise = (torch.from_numpy(rng.standard_normal((B, A), dtype=np.float32)) for _ in range(2))
    actor, critic = copy.deepcopy(algorithm.policy.actor), copy.deepcopy(algorithm.policy.critic)
    with torch.no_grad():
        next_action, next_log_prob = actor.sample(batch.next_obs, next_noise)
        pooled = torch.cat(quantiles_of(critic, batch.next_obs, next_action), dim=1)
    costs = torch.zeros(B)
    for row in range(B):
        kept = sorted(pooled[row].tolist())[: E * K - E]
        for quantiles in quantiles_of(critic, batch.obs, batch.action):
            for index, predicted in enumerate(quantiles[row].tolist()):
                for number in kept:
                    target = batch.reward[row] + batch.discount[row] * (number - next_log_prob[row])  # alpha is 1
                    u, fraction = float(target) - predicted, (2 * index + 1) / (2 * K)
                    huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                    costs[row] += abs(fraction - (u < 0)) * huber / (K * len(kept))
    result = algorithm.update(batch, at(0))
    torch.testing.assert_close(result.priorities, costs / E)
    assert float(result.metrics["loss/critic"]) == pytest.approx(float((batch.weight * costs).mean()), rel=1e-5)

    action, log_prob = actor.sample(batch.obs, noise)
    values = torch.stack(quantiles_of(algorithm.policy.critic, batch.obs, action)).mean((0, 2))
    expected = (log_prob - values).mean().item()
    assert float(result.metrics["loss/policy"]) == pytest.approx(expected, rel=1e-4)


def test_terminated_rows_have_their_reward_as_target():
    algorithm = make(num_critics=1, num_quantiles=2)
    batch = make_batch()._replace(discount=torch.zeros(B))
    predicted = algorithm.policy.critic(batch.obs, batch.action).detach()[0]
    priorities = algorithm.update(batch, at(0)).priorities
    u = batch.reward.unsqueeze(1) - predicted
    costs = (torch.tensor([0.25, 0.75]) - (u < 0).float()).abs() * F.huber_loss(u, 0 * u, reduction="none")
    torch.testing.assert_close(priorities, costs.mean(1))


def test_more_dropped_quantiles_give_lower_targets():
    targets = []
    for num_dropped in (0, 1, 4):
        algorithm = make(num_dropped=num_dropped)
        draws = {"noise": torch.zeros(B, A), "alpha": torch.ones(())}
        targets.append(algorithm.q_target(make_batch(), **draws))
        assert targets[-1].shape == (B, E * (K - num_dropped))
    means = torch.stack([target.mean(1) for target in targets])[:, make_batch().discount > 0]
    assert (means[0] > means[1]).all()
    assert (means[1] > means[2]).all()


def test_values_are_means_over_critics_and_quantiles():
    policy, obs = make().policy, make_batch().obs
    expected = torch.stack(quantiles_of(policy.critic, obs, policy.mode(obs))).mean((0, 2))
    torch.testing.assert_close(policy.value(obs), expected.detach())


@pytest.mark.parametrize("settings", [{}, {"network": {"exploration": "gsde"}}, {"policy_delay": 2, "kappa": 0.5}])
def test_replays_have_the_bits_of_what_is_written(settings):
    quick, plain = make(**copy.deepcopy(settings)), make(**copy.deepcopy(settings))
    for updates in range(2 * (SEEN_BEFORE + 3)):
        plain.gradient_steps._seen.clear()  # each call is its first, so it is never recorded
        found, expected = (algorithm.update(make_batch(updates), at(updates)) for algorithm in (quick, plain))
        assert torch.equal(found.priorities, expected.priorities)
    assert quick.gradient_steps.num_recordings == settings.get("policy_delay", 1)
    assert plain.gradient_steps.num_recordings == 0
    assert torch.equal(quick.critic_store.flat, plain.critic_store.flat)
    assert torch.equal(quick.actor_store.flat, plain.actor_store.flat)


def test_all_quantiles_cannot_be_dropped():
    with pytest.raises(ConfigError, match=r"num_dropped: must be less than num_quantiles \(4\), got 4"):
        TQC("Pendulum-v1", num_quantiles=4, num_dropped=4)
