"""REDQ and DroQ: random subsets, means of the ensemble, and dropout in targets, against plain computations."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from rl_training import REDQ, DroQ
from rl_training.accelerate.recording import SEEN_BEFORE
from rl_training.algorithms.droq import DroQAlgorithm, DroQConfig, DroQNetworkConfig
from rl_training.algorithms.redq import REDQAlgorithm, REDQConfig
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.plugins import NETWORKS
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import StochasticNetworkConfig
from rl_training.policies.ensemble import OwnEnsemble

B, OBS, A, E = 6, 3, 2, 5
SPEC = EnvSpec(spaces.Box(-1, 1, (OBS,)), spaces.Box(-1, 1, (A,)))
CPU = torch.device("cpu")
SIZES = {"actor_sizes": (16, 8), "critic_sizes": (16, 8)}


def redq(seed=0, **settings):
    config = REDQConfig(**{"network": StochasticNetworkConfig(**SIZES), "num_critics": E, **settings})
    return REDQAlgorithm(config, SPEC, CPU, np.random.default_rng(seed))


def droq(seed=0, **settings):
    network = DroQNetworkConfig(**{**SIZES, "critic_dropout": 0.25})
    return DroQAlgorithm(DroQConfig(**{"network": network, **settings}), SPEC, CPU, np.random.default_rng(seed))


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


def values_of(critic, member, obs, action, masks=None):
    """Q-values [B] of one critic; with masks, of DroQ's: linear, dropout, layer norm, ReLU."""
    x = torch.cat([obs, action], dim=1)
    for index, layer in enumerate(critic.members.layers):
        x = F.linear(x, layer.weight[member].T, layer.bias[member, 0])
        if index == 2:
            return x[:, 0]
        if masks is not None:
            norm = critic.members.norms[index]
            x = x * masks[index][member]
            x = F.layer_norm(x, x.shape[1:], norm.weight[member, 0], norm.bias[member, 0])
        x = F.relu(x)
    raise AssertionError


class TestREDQ:
    def test_an_update_against_plain_torch(self):
        algorithm, batch = redq(policy_delay=1), make_batch()
        rng = copy.deepcopy(algorithm.rng)
        members = rng.choice(E, 2, replace=False)
        next_noise, noise = (torch.from_numpy(rng.standard_normal((B, A), dtype=np.float32)) for _ in range(2))
        actor, critic = copy.deepcopy(algorithm.policy.actor), copy.deepcopy(algorithm.policy.critic)
        with torch.no_grad():
            action, log_prob = actor.sample(batch.next_obs, next_noise)
            first, second = (values_of(critic, member, batch.next_obs, action) for member in members)
            target = batch.reward + batch.discount * (torch.minimum(first, second) - log_prob)  # alpha is 1
            errors = torch.stack([values_of(critic, m, batch.obs, batch.action) - target for m in range(E)])
        result = algorithm.update(batch, at(0))
        torch.testing.assert_close(result.priorities, errors.abs().mean(0))
        loss = 0.5 * (batch.weight * errors.square()).mean(1).sum().item()
        assert float(result.metrics["loss/critic"]) == pytest.approx(loss, rel=1e-5)

        action, log_prob = actor.sample(batch.obs, noise)
        mean = sum(values_of(algorithm.policy.critic, m, batch.obs, action) for m in range(E)) / E
        assert float(result.metrics["loss/policy"]) == pytest.approx((log_prob - mean).mean().item(), rel=1e-4)
        assert algorithm.rng.bit_generator.state == rng.bit_generator.state

    def test_the_minimum_is_that_of_the_subset(self):
        # critics are constants 0 to 4, so the target of the subset {3, 1} is 0.9 * (1 - 0), of {4, 2} 0.9 * (2 - 0)
        algorithm = redq()
        last = algorithm.critic_target.module.members.layers[-1]
        last.weight.zero_()
        last.bias.copy_(torch.arange(E).reshape(E, 1, 1))
        batch = make_batch()._replace(reward=torch.zeros(B), discount=torch.full((B,), 0.9))
        inputs = {"noise": torch.zeros(B, A), "alpha": torch.zeros(())}
        for members, expected in (([3, 1], 0.9), ([4, 2], 1.8), ([0, 4], 0.0)):
            target = algorithm.q_target(batch, members=torch.tensor(members), **inputs)
            torch.testing.assert_close(target, torch.full((B,), expected))

    def test_subsets_are_drawn_without_replacement_from_all(self):
        algorithm = redq(num_target_critics=3)
        drawn = [algorithm.target_draws(make_batch())["members"] for _ in range(200)]
        assert all(len(set(members.tolist())) == 3 for members in drawn)
        counts = torch.cat(drawn).bincount(minlength=E)
        assert (counts > 90).all(), "each is drawn in about 120 of 200 updates"

    def test_all_critics_in_the_target_and_a_minimum_in_it_are_as_in_sac(self):
        algorithm, batch = redq(num_critics=2), make_batch()
        inputs = {"noise": torch.zeros(B, A), "alpha": torch.ones(())}
        both = algorithm.q_target(batch, members=torch.tensor([1, 0]), **inputs)
        torch.testing.assert_close(both, super(REDQAlgorithm, algorithm).q_target(batch, **inputs))

    def test_the_actor_is_updated_once_per_twenty_updates(self):
        algorithm = redq()
        changed = []
        for updates in range(40):
            before = algorithm.actor_store.flat.detach().clone()
            algorithm.update(make_batch(updates), at(updates))
            changed.append(not torch.equal(before, algorithm.actor_store.flat))
        assert [index for index, value in enumerate(changed) if value] == [19, 39]

    def test_value_is_the_mean(self):
        policy, obs = redq().policy, make_batch().obs
        expected = sum(values_of(policy.critic, m, obs, policy.mode(obs)) for m in range(E)) / E
        torch.testing.assert_close(policy.value(obs), expected.detach())

    def test_more_target_critics_than_critics_are_refused(self):
        with pytest.raises(ConfigError, match=r"num_target_critics: must be at most num_critics \(2\), got 3"):
            REDQ("Pendulum-v1", num_critics=2, num_target_critics=3)


class TestDroQ:
    def test_dropout_is_active_in_the_target_with_masks_of_its_own(self):
        algorithm, batch = droq(policy_delay=1), make_batch()
        actor, critic = copy.deepcopy(algorithm.policy.actor), copy.deepcopy(algorithm.policy.critic)
        rng, target = algorithm.rng, algorithm.critic_target.module
        algorithm.rng = copy.deepcopy(rng)
        result = algorithm.update(batch, at(0))  # leaves its masks in the layers
        layers = [net.members.dropouts for net in (algorithm.policy.critic, target)]
        masks = [[layer.get_buffer(f"mask_{B}") for layer in part] for part in layers]
        assert masks[1][0].unique().tolist() == pytest.approx([0.0, 4 / 3])
        assert not torch.equal(masks[0][0], masks[1][0])
        for layer in (*layers[0], *layers[1]):
            layer.draw(B, rng, CPU)
        members = rng.choice(2, 2, replace=False)
        noise = torch.from_numpy(rng.standard_normal((B, A), dtype=np.float32))
        with torch.no_grad():
            action, log_prob = actor.sample(batch.next_obs, noise)
            next_q = torch.stack([values_of(critic, m, batch.next_obs, action, masks[1]) for m in members])
            q_target = batch.reward + batch.discount * (next_q.amin(0) - log_prob)
            errors = torch.stack([values_of(critic, m, batch.obs, batch.action, masks[0]) - q_target for m in range(2)])
        torch.testing.assert_close(result.priorities, errors.abs().mean(0))

    def test_evaluation_drops_nothing(self):
        policy, obs = droq().policy, make_batch().obs
        torch.testing.assert_close(policy.value(obs), policy.value(obs))
        assert not policy.training

    def test_it_is_redq_with_network_settings(self):
        network = StochasticNetworkConfig(**SIZES, critic_norm="layer", critic_dropout=0.25)
        one, two = droq(), redq(num_critics=2, network=network)
        for updates in range(3):
            found = [algorithm.update(make_batch(updates), at(updates)).priorities for algorithm in (one, two)]
            assert torch.equal(*found)
        assert torch.equal(one.critic_store.flat, two.critic_store.flat)

    def test_a_partly_given_network_keeps_dropout_and_norm(self):
        network = DroQ("Pendulum-v1", network={"critic_sizes": (8,)}).config.algorithm.network
        assert (network.critic_norm, network.critic_dropout, network.critic_sizes) == ("layer", 0.01, (8,))


@pytest.mark.parametrize("make", [redq, droq])
def test_replays_have_the_bits_of_what_is_written(make):
    quick, plain = make(policy_delay=2), make(policy_delay=2)
    for updates in range(2 * (SEEN_BEFORE + 3)):
        plain.gradient_steps._seen.clear()  # each call is its first, so it is never recorded
        found, expected = (algorithm.update(make_batch(updates), at(updates)) for algorithm in (quick, plain))
        assert torch.equal(found.priorities, expected.priorities)
    assert (quick.gradient_steps.num_recordings, plain.gradient_steps.num_recordings) == (2, 0)
    assert torch.equal(quick.critic_store.flat, plain.critic_store.flat)
    assert torch.equal(quick.actor_store.flat, plain.actor_store.flat)


def test_networks_of_others_are_selected_by_indices(monkeypatch):
    monkeypatch.setitem(NETWORKS._added, "line", torch.nn.Linear)
    ensemble, x = OwnEnsemble(4, 3, 2, "line", {}), torch.randn(5, 3)
    assert torch.equal(ensemble(x, torch.tensor([2, 0])), ensemble(x)[[2, 0]])
