"""Actor-critics for discrete actions, and Gaussian actors for recorded ones, against torch's own distributions."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical, Normal, TanhTransform, TransformedDistribution

from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import GaussianPolicy, OffPolicyNetworkConfig, SquashedGaussianPolicy
from rl_training.policies.discrete import DiscreteActorCriticPolicy
from rl_training.policies.exploration import NoiseConfig

NETWORK = OffPolicyNetworkConfig(actor_sizes=(8,), critic_sizes=(8,))
DISCRETE = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(4))
MASKED = EnvSpec(
    spaces.Dict({"observation": spaces.Box(-1, 1, (3,)), "action_mask": spaces.Box(0, 1, (4,), np.int8)}),
    spaces.Discrete(4),
    action_masks=True,
)
BOX = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2, 1)))
OBS = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def discrete(spec=DISCRETE, num_critics=3):
    torch.manual_seed(0)
    return DiscreteActorCriticPolicy(spec, NETWORK, num_critics)


def test_log_probabilities_are_those_of_torchs_categorical():
    actor, action = discrete().actor, torch.arange(64) % 4
    expected = Categorical(logits=actor(OBS)).log_prob(action)
    torch.testing.assert_close(actor.log_prob(OBS, action), expected)


def test_sampled_actions_have_the_probabilities_of_the_actor():
    policy, rng = discrete(), np.random.default_rng(0)
    obs = OBS[:1].expand(20_000, 3)
    action, log_prob = policy.actor.sample(obs, policy.draw_noise(rng, 20_000))
    shares = torch.bincount(action, minlength=4) / 20_000
    torch.testing.assert_close(shares, policy.actor.distribution(OBS[:1]).log_probs[0].exp(), atol=0.015, rtol=0)
    torch.testing.assert_close(log_prob, policy.actor.log_prob(obs, action))


def test_critics_of_an_action_are_its_entries():
    critic, action = discrete().critic, torch.arange(64) % 4
    values = critic.q_values(OBS)
    assert values.shape == (3, 64, 4)
    expected = torch.stack([values[:, row, column] for row, column in enumerate(action.tolist())], dim=1)
    assert torch.equal(critic(OBS, action), expected)
    assert torch.equal(critic(OBS, action, torch.tensor([2, 0])), expected[[2, 0]])


def test_several_actions_for_each_observation():
    critic, actions = discrete().critic, torch.arange(128).view(2, 64) % 3
    expected = torch.stack([critic(OBS, action) for action in actions], dim=1)
    assert torch.equal(critic.of_several(OBS, actions), expected)
    torch.manual_seed(0)
    gaussian = GaussianPolicy(BOX, NETWORK, 3, NoiseConfig(kind="none")).critic
    actions = torch.rand(5, 64, 2, 1)
    expected = torch.stack([gaussian(OBS, action) for action in actions], dim=1)
    torch.testing.assert_close(gaussian.of_several(OBS, actions), expected)


def test_numpy_and_torch_choose_the_same_actions():
    policy = discrete()
    quick = policy.act_on_arrays(OBS.numpy(), np.random.default_rng(3))
    noise = policy.draw_noise(np.random.default_rng(3), 64)
    assert quick.tolist() == policy.actor.sample(OBS, noise)[0].tolist()
    assert policy.act(OBS, deterministic=True).action.tolist() == policy.mode(OBS).tolist()


@pytest.mark.parametrize("deterministic", [True, False])
def test_invalid_actions_are_never_taken(deterministic):
    policy = discrete(MASKED)
    mask = torch.zeros(64, 4, dtype=torch.int8)
    mask[torch.arange(64), torch.arange(64) % 4] = 1
    obs = {"observation": OBS, "action_mask": mask}
    for _ in range(5):
        out = policy.act(obs, deterministic=deterministic, rng=np.random.default_rng(0))
        assert out.action.tolist() == (torch.arange(64) % 4).tolist()


def test_log_probabilities_of_recorded_actions_are_those_of_torchs_gaussians():
    torch.manual_seed(0)
    action = torch.rand(64, 2, 1) * 1.98 - 0.99
    flat = action.flatten(1)
    gaussian = GaussianPolicy(BOX, NETWORK, 1, NoiseConfig(kind="none"))
    mean, log_std = gaussian.actor(OBS)
    expected = Normal(mean, log_std.exp()).log_prob(flat).sum(1)
    torch.testing.assert_close(gaussian.actor.log_prob(OBS, action), expected)
    squashed = SquashedGaussianPolicy(BOX, NETWORK, 1, NoiseConfig(kind="none"))
    mean, log_std = squashed.actor(OBS)
    expected = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform()).log_prob(flat).sum(1)
    torch.testing.assert_close(squashed.actor.log_prob(OBS, action), expected, rtol=1e-3, atol=1e-4)
    assert squashed.actor.log_prob(OBS, torch.ones(64, 2, 1)).isfinite().all()


def test_a_gaussian_policy_samples_around_its_mean_within_the_bounds():
    torch.manual_seed(0)
    policy = GaussianPolicy(BOX, NETWORK, 1, NoiseConfig(kind="none"))
    rng = np.random.default_rng(1)
    quick = policy.act_on_arrays(OBS.numpy(), np.random.default_rng(5))
    slow = policy.sample(OBS, policy.draw_noise(np.random.default_rng(5), 64)).detach()
    np.testing.assert_allclose(quick.reshape(64, 2), slow.numpy(), atol=1e-6)
    assert policy.act(OBS, rng=rng).action.shape == (64, 2, 1)
    assert np.abs(quick).max() <= 1.0
    torch.testing.assert_close(policy.act(OBS, deterministic=True).action.flatten(1), policy.mode(OBS).detach())
