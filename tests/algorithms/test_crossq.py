"""CrossQ: joint statistics against a direct computation, which network is in which mode, and state that is saved."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from rl_training import CrossQ, load
from rl_training.accelerate.recording import SEEN_BEFORE
from rl_training.algorithms.crossq import CrossQAlgorithm, CrossQConfig, CrossQNetworkConfig, joined
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.plugins import NETWORKS
from rl_training.contracts.spec import EnvSpec

B, OBS, A = 6, 3, 2
SPEC = EnvSpec(spaces.Box(-1, 1, (OBS,)), spaces.Box(-1, 1, (A,)))
SIZES = {"actor_sizes": (16, 8), "critic_sizes": (16, 8)}


def make(seed=0, spec=SPEC, **settings):
    config = CrossQConfig(**{"network": CrossQNetworkConfig(**SIZES), **settings})
    return CrossQAlgorithm(config, spec, torch.device("cpu"), np.random.default_rng(seed))


def make_batch(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return TransitionBatch(
        obs=torch.randn(B, OBS, generator=rng),
        action=torch.rand(B, A, generator=rng) * 2 - 1,
        reward=torch.randn(B, generator=rng),
        discount=torch.where(torch.arange(B) % 4 == 0, 0.0, 0.9),
        next_obs=3.0 + torch.randn(B, OBS, generator=rng),  # other statistics than obs
        weight=torch.rand(B, generator=rng) + 0.5,
        indices=torch.arange(B),
    )


def at(updates):
    return Progress(env_steps=0, horizon=1000, updates=updates)


def normalized(x, statistics=None, scale=1.0, shift=0.0):
    """Before the warm-up of batch renorm: by the statistics of the batch, or by given ones."""
    mean, variance = (x.mean(0), x.var(0, unbiased=False)) if statistics is None else statistics
    return scale * (x - mean) / (variance + 1e-3).sqrt() + shift


def values_of(critic, member, x, statistics=None):
    """Q-values of one critic: batch norm of the inputs, then linear, ReLU, batch norm per hidden layer, then linear."""
    for index, (norm, layer) in enumerate(zip(critic.members.norms, critic.members.layers, strict=True)):
        x = F.relu(x) if index else x
        x = normalized(x, statistics and statistics[index], norm.weight[member, 0], norm.bias[member, 0])
        x = F.linear(x, layer.weight[member].T, layer.bias[member, 0])
    return x[:, 0]


def running(critic, member):
    return [(norm.mean[member, 0], norm.variance[member, 0]) for norm in critic.members.norms]


def buffers(module):
    return {name: value.clone() for name, value in module.named_buffers()}


def changed(before, module):
    return {name for name, value in module.named_buffers() if not torch.equal(before[name], value)}


def test_an_update_against_plain_torch():
    algorithm, batch = make(policy_delay=1), make_batch()
    rng = copy.deepcopy(algorithm.rng)
    next_noise, noise = (torch.from_numpy(rng.standard_normal((B, A), dtype=np.float32)) for _ in range(2))
    actor, critic = copy.deepcopy(algorithm.policy.actor), copy.deepcopy(algorithm.policy.critic)
    with torch.no_grad():
        action, log_prob = actor.eval().sample(batch.next_obs, next_noise)
    x = torch.cat([torch.cat([batch.obs, batch.action], 1), torch.cat([batch.next_obs, action], 1)])
    outputs = torch.stack([values_of(critic, member, x) for member in range(2)])  # statistics of all 12 rows
    target = batch.reward + batch.discount * (outputs[:, B:].amin(0) - log_prob)  # alpha is 1
    errors = outputs[:, :B] - target.detach()
    loss = 0.5 * (batch.weight * errors.square()).mean(1).sum()
    gradient = torch.autograd.grad(loss, critic.members.layers[0].weight)[0]

    result = algorithm.update(batch, at(0))
    torch.testing.assert_close(result.priorities, errors.detach().abs().mean(0))
    assert float(result.metrics["loss/critic"]) == pytest.approx(loss.item(), rel=1e-5)
    span, shape = algorithm.critic_store.slices["members.layers.0.weight"]
    found = algorithm.critic_store.grad[span].view(shape)  # through the statistics as well, also those of the next rows
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)

    # the running statistics of the inputs follow those of the joint batch by a hundredth
    norm = algorithm.policy.critic.members.norms[0]
    torch.testing.assert_close(norm.mean[0, 0], 0.01 * x.mean(0))
    torch.testing.assert_close(norm.variance[1, 0], 0.99 + 0.01 * x.var(0, unbiased=False))

    # the actor: its own statistics of this batch, the critics' running ones
    hidden, h = actor.trunk.hidden, normalized(batch.obs)
    h = normalized(F.relu(hidden[1](h)))
    h = normalized(F.relu(hidden[4](h)))
    mean, log_std = actor.trunk.head(h).chunk(2, dim=1)
    u = mean + log_std.exp() * noise
    log_slope = torch.log(1 - u.double().tanh() ** 2)
    log_prob = (torch.distributions.Normal(mean, log_std.exp()).log_prob(u) - log_slope).sum(1)
    after = algorithm.policy.critic
    inputs = torch.cat([batch.obs, u.tanh()], 1)
    smallest = torch.minimum(*(values_of(after, m, inputs, running(after, m)) for m in range(2)))
    expected = (log_prob - smallest).mean().item()
    assert float(result.metrics["loss/policy"]) == pytest.approx(expected, rel=1e-4)


def test_each_step_changes_the_statistics_of_its_own_network_only():
    algorithm = make()
    for updates in range(6):
        before = {part: buffers(getattr(algorithm.policy, part)) for part in ("actor", "critic")}
        algorithm.update(make_batch(updates), at(updates))
        assert len(changed(before["critic"], algorithm.policy.critic)) == 9  # mean, variance and count of three layers
        assert len(changed(before["actor"], algorithm.policy.actor)) == (9 if updates in (2, 5) else 0)


def test_acting_and_values_change_nothing_and_do_not_depend_on_the_other_rows():
    algorithm, obs = make(), make_batch().obs
    algorithm.update(make_batch(), at(2))
    before = buffers(algorithm.policy)
    actions, values = algorithm.policy.act(obs, deterministic=True).action, algorithm.policy.value(obs)
    algorithm.policy.act(obs, rng=np.random.default_rng(0))
    assert changed(before, algorithm.policy) == set()
    torch.testing.assert_close(algorithm.policy.act(obs[:1], deterministic=True).action, actions[:1])
    torch.testing.assert_close(algorithm.policy.value(obs[3:4]), values[3:4])


def test_there_are_no_target_networks():
    algorithm = make()
    assert algorithm.targets() == []
    assert not [name for name in algorithm.state_dict() if "target" in name and name != "target_entropy"]
    with pytest.raises(ConfigError, match=r"tau: CrossQ has no target networks; leave it at 0.005, got 0.1"):
        CrossQ("Pendulum-v1", tau=0.1)


def test_statistics_are_saved(tmp_path):
    agent = CrossQ("Pendulum-v1", seed=0, network=SIZES, learning_starts=20, batch_size=16, eval_every=0)
    agent.learn(60, progress=False)
    again = load(agent.save(tmp_path / "agent"))
    own, other = buffers(agent.policy), buffers(again.policy)
    assert own["critic.members.norms.0.num_batches"] == 40
    assert own["actor.trunk.hidden.0.num_batches"] == 13
    assert all(torch.equal(value, other[name]) for name, value in own.items())
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_array_equal(again.predict(obs)[0], agent.predict(obs)[0])
    np.testing.assert_array_equal(again.value(obs), agent.value(obs))


def test_exported_actions_use_the_running_statistics(tmp_path):
    agent = CrossQ("Pendulum-v1", seed=0, network=SIZES, learning_starts=20, batch_size=16, eval_every=0)
    agent.learn(60, progress=False)
    agent.export(tmp_path / "actor.pt2", format="torch-export")
    program = torch.export.load(tmp_path / "actor.pt2").module()
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    actions = np.asarray(program(torch.from_numpy(obs)))
    np.testing.assert_allclose(actions, agent.predict(obs)[0], rtol=1e-5, atol=1e-6)


def test_dicts_are_joined_by_entry():
    one, two = ({"a": torch.full((2, 3), float(i)), "b": torch.full((2,), i)} for i in range(2))
    found = joined(one, two)
    assert found["a"][:, 0].tolist() == [0, 0, 1, 1]
    assert found["b"].tolist() == [0, 0, 1, 1]


def test_a_network_of_ones_own_replaces_the_normalised_one(monkeypatch):
    class Own(torch.nn.Sequential):
        def __init__(self, num_inputs, num_outputs):
            super().__init__(torch.nn.BatchNorm1d(num_inputs), torch.nn.Linear(num_inputs, num_outputs))

    monkeypatch.setitem(NETWORKS._added, "own", Own)
    network = {"actor_sizes": (8,), "critic": "own"}
    agent = CrossQ("Pendulum-v1", seed=0, network=network, learning_starts=20, batch_size=16, eval_every=0)
    agent.learn(40, progress=False)
    norm = agent.policy.critic.members.networks[0].module[0]
    assert int(norm.num_batches_tracked) == 20
    with pytest.raises(ConfigError, match="critic_norm: is for 'mlp'"):
        CrossQ("Pendulum-v1", network={**network, "critic_norm": "layer"})


def test_replays_have_the_bits_of_what_is_written():
    quick, plain = make(), make()
    for updates in range(3 * (SEEN_BEFORE + 3)):
        plain.gradient_steps._seen.clear()  # each call is its first, so it is never recorded
        found, expected = (algorithm.update(make_batch(updates), at(updates)) for algorithm in (quick, plain))
        assert torch.equal(found.priorities, expected.priorities)
    assert (quick.gradient_steps.num_recordings, plain.gradient_steps.num_recordings) == (2, 0)
    for name, value in quick.policy.state_dict().items():
        assert torch.equal(value, plain.policy.state_dict()[name]), name
