"""Networks are ordinary modules: parameters may be frozen and layers replaced, in every mode."""

import numpy as np
import pytest
import torch
from torch import nn

import rl_training
from rl_training import load

MODES = ["off", "auto"]
PPO = {"num_steps": 16, "num_epochs": 2, "minibatch_size": 16, "num_envs": 2}
REPLAY = {"learning_starts": 8, "batch_size": 8}
TWO_LAYERS = {"network": {"actor_sizes": (16, 16), "critic_sizes": (16, 16)}}
AGENTS = {
    "PPO": ("CartPole-v1", PPO, 64, "actor", "head.linear"),
    "A2C": ("CartPole-v1", {"num_envs": 2}, 60, "actor", "head.linear"),
    "DQN": (
        "CartPole-v1",
        {**REPLAY, "num_steps": 1, "updates_per_step": 1.0, "epsilon": 0.1},
        40,
        "network.hidden.1",
        "network.head",
    ),
    "SAC": ("Pendulum-v1", {**REPLAY, **TWO_LAYERS}, 40, "actor.trunk.hidden.0", "actor.trunk.head"),
    "TD3": ("Pendulum-v1", {**REPLAY, **TWO_LAYERS, "policy_delay": 1}, 40, "actor.trunk.hidden.0", "actor.trunk.head"),
}
each_agent = pytest.mark.parametrize("name", AGENTS)
each_mode = pytest.mark.parametrize("mode", MODES)


def make(name, mode, **settings):
    env_id, own, steps, frozen, replaced = AGENTS[name]
    agent = getattr(rl_training, name)(env_id, seed=1, accelerate=mode, **own, **settings)
    return agent, steps, frozen, replaced


def weights(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def changed(before, module):
    return {name for name, parameter in module.named_parameters() if not torch.equal(before[name], parameter)}


@each_agent
@each_mode
def test_frozen_parameters_stay_as_they_are(name, mode):
    agent, steps, frozen, _ = make(name, mode)
    agent.learn(steps, progress=False)
    agent.policy.get_submodule(frozen).requires_grad_(False)
    before = weights(agent.policy)
    agent.learn(2 * steps, progress=False)
    names = changed(before, agent.policy)
    assert names, "the others learn"
    assert not [other for other in names if other.startswith(frozen)]
    agent.policy.requires_grad_(True)
    agent.learn(3 * steps, progress=False)
    assert [other for other in changed(before, agent.policy) if other.startswith(frozen)], "it learns again"


@each_agent
@each_mode
def test_a_replaced_layer_is_used_and_trained(name, mode):
    agent, steps, _, replaced = make(name, mode)
    agent.learn(steps, progress=False)
    owner, _, attribute = replaced.rpartition(".")
    old = agent.policy.get_submodule(replaced)
    new = nn.Linear(old.in_features, old.out_features)
    nn.init.zeros_(new.weight)
    with torch.no_grad():
        new.bias.copy_(torch.linspace(-3.0, 3.0, old.out_features))
    setattr(agent.policy.get_submodule(owner), attribute, new)
    obs = (
        np.stack([agent.env_spec.observation_space.sample() for _ in range(3)]) if hasattr(agent, "env_spec") else None
    )
    if obs is not None:
        actions, _ = agent.predict(obs, deterministic=True)
        assert len(np.unique(np.asarray(actions), axis=0)) == 1, (
            "it acts with the new layer, which ignores observations"
        )
    before = weights(new)
    agent.learn(2 * steps, progress=False)
    assert agent.policy.get_submodule(replaced) is new
    assert changed(before, new)


def test_a_replaced_part_is_trained_with_its_own_optimizer():
    agent, steps, _, _ = make("SAC", "auto")
    agent.learn(steps, progress=False)
    policy = agent.policy
    policy.actor = type(policy.actor)(agent._experiment.spec, agent._experiment.config.algorithm.network)
    before = weights(policy.actor)
    agent.learn(2 * steps, progress=False)
    assert changed(before, policy.actor)


@each_agent
def test_what_is_frozen_stays_frozen_in_a_saved_agent(name, tmp_path):
    agent, steps, frozen, _ = make(name, "auto")
    agent.policy.get_submodule(frozen).requires_grad_(False)
    before = weights(agent.policy.get_submodule(frozen))
    agent.learn(steps, progress=False)
    agent.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    again.learn(2 * steps, progress=False)
    agent.learn(2 * steps, progress=False)
    assert not changed(before, again.policy.get_submodule(frozen))
    for name_, parameter in agent.policy.named_parameters():
        assert torch.equal(parameter, dict(again.policy.named_parameters())[name_]), name_


def test_everything_may_be_frozen():
    agent, steps, _, _ = make("PPO", "auto")
    agent.policy.requires_grad_(False)
    before = weights(agent.policy)
    agent.learn(steps, progress=False)
    assert not changed(before, agent.policy)
