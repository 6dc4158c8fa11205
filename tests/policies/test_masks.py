"""Masked policies: the distribution is that of the valid actions alone, and nothing else is ever chosen."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as td

from rl_training.contracts.errors import SpaceError
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actor_critic import ActorCriticPolicy
from rl_training.policies.encoders import NatureCNN
from rl_training.policies.exploration import RandomPolicy, random_actions
from rl_training.policies.heads import ActionHead
from rl_training.policies.masks import MASKED, UnmaskedEncoder, apply_mask, make_policy_encoder, mask_of, put_mask
from rl_training.policies.networks import ActorCriticNetworkConfig
from rl_training.policies.q_networks import (
    CategoricalQNetwork,
    ImplicitQuantileQNetwork,
    QNetwork,
    QNetworkConfig,
    QPolicy,
    QuantileQNetwork,
)

A = 5
VECTOR = spaces.Box(-1.0, 1.0, (3,))
MASKS = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.int8)


def masked_space(size=A, vector=VECTOR):
    return spaces.Dict({"observation": vector, "action_mask": spaces.MultiBinary(size)})


SPEC = EnvSpec(masked_space(), spaces.Discrete(A), action_masks=True)


def observe(masks, rows=None, seed=0):
    rng = np.random.default_rng(seed)
    rows = len(masks) if rows is None else rows
    vectors = torch.from_numpy(rng.uniform(-1, 1, (rows, 3)).astype(np.float32))
    return {"observation": vectors, "action_mask": masks.expand(rows, -1)}


def random_masks(rows, size=A, seed=0):
    rng = np.random.default_rng(seed)
    masks = rng.random((rows, size)) < 0.4
    masks[np.arange(rows), rng.integers(size, size=rows)] = True
    return torch.from_numpy(masks)


class TestDistributions:
    def head(self, space):
        torch.manual_seed(0)
        return ActionHead(space, 4)

    def test_discrete_is_that_of_the_valid_actions(self):
        head, features = self.head(spaces.Discrete(A)), torch.randn(3, 4)
        found, logits = head(features, MASKS.bool()), head.linear(features)
        for row, mask in enumerate(MASKS.bool()):
            (valid,) = mask.nonzero(as_tuple=True)
            expected = td.Categorical(logits=logits[row, valid])
            torch.testing.assert_close(found.entropy()[row], expected.entropy())
            for place, action in enumerate(valid):
                actions = action.expand(3)
                torch.testing.assert_close(found.log_prob(actions)[row], expected.log_prob(torch.tensor(place)))
            assert found.log_probs.exp()[row][~mask].tolist() == [0.0] * int((~mask).sum()), "exactly zero"
            assert mask[found.mode()[row]]

    def test_multi_discrete_is_that_of_the_valid_actions_of_each_choice(self):
        head, features = self.head(spaces.MultiDiscrete([2, 3])), torch.randn(1, 4)
        mask = torch.tensor([[False, True, True, False, True]])
        found, logits = head(features, mask), head.linear(features)[0]
        first, second = td.Categorical(logits=logits[[1]]), td.Categorical(logits=logits[[2, 4]])
        torch.testing.assert_close(found.entropy()[0], first.entropy() + second.entropy())
        expected = first.log_prob(torch.tensor(0)) + second.log_prob(torch.tensor(1))
        torch.testing.assert_close(found.log_prob(torch.tensor([[1, 2]]))[0], expected)

    def test_a_whole_mask_changes_nothing(self):
        head, features = self.head(spaces.Discrete(A)), torch.randn(3, 4)
        mask = torch.ones(3, A, dtype=torch.bool)
        assert torch.equal(head(features, mask).log_probs, head(features).log_probs)

    @pytest.mark.parametrize("space", [spaces.Discrete(A), spaces.MultiDiscrete([2, 3])], ids=["discrete", "multi"])
    def test_samples_are_always_valid(self, space):
        head, rng, rows = self.head(space), np.random.default_rng(1), 20_000
        masks = random_masks(rows)
        if isinstance(space, spaces.MultiDiscrete):
            masks[:, 1] |= ~masks[:, :2].any(1)
            masks[:, 4] |= ~masks[:, 2:].any(1)
        with torch.no_grad():
            head.linear.weight *= 100.0  # sure of itself, of invalid actions as well
            found = head(torch.randn(rows, 4), masks)
            action = found.sample(head.draw_noise(rng, rows, torch.device("cpu")))
        choices = action.unsqueeze(1) if action.ndim == 1 else action + torch.tensor([0, 2])
        assert masks.gather(1, choices).all()

    def test_samples_are_as_likely_as_said(self):
        head, rng, rows = self.head(spaces.Discrete(A)), np.random.default_rng(1), 50_000
        with torch.no_grad():
            found = head(torch.randn(1, 4).expand(rows, 4), MASKS[:1].bool().expand(rows, A))
            action = found.sample(head.draw_noise(rng, rows, torch.device("cpu")))
        shares = torch.bincount(action, minlength=A) / rows
        torch.testing.assert_close(shares, found.log_probs[0].exp(), rtol=0, atol=0.01)

    def test_gradients_are_finite_and_none_for_invalid_actions(self):
        head, features = self.head(spaces.Discrete(A)), torch.randn(3, 4)
        found = head(features, MASKS.bool())
        (found.log_prob(torch.tensor([0, 2, 1])) + found.entropy()).sum().backward()
        assert torch.isfinite(head.linear.weight.grad).all()
        only = head(features[1:2], MASKS[1:2].bool())
        gradient = torch.autograd.grad(only.entropy().sum(), head.linear.weight)[0]
        assert torch.equal(gradient, torch.zeros_like(gradient)), "one valid action leaves nothing to learn"

    def test_without_a_valid_action_nothing_is_nan(self):
        found = self.head(spaces.Discrete(A))(torch.randn(2, 4), torch.zeros(2, A, dtype=torch.bool))
        assert torch.isfinite(found.entropy()).all()
        assert torch.isfinite(found.log_prob(torch.tensor([0, 1]))).all()


class TestMaskOfAnObservation:
    @pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float32, torch.int64])
    def test_of_any_type(self, dtype):
        assert torch.equal(mask_of({"action_mask": MASKS.to(dtype)}), MASKS.bool())

    def test_another_one_is_put_into_a_copy(self):
        obs = observe(MASKS)
        changed = put_mask(obs, 1 - MASKS, masked=True)
        assert torch.equal(changed["action_mask"], 1 - MASKS)
        assert torch.equal(obs["action_mask"], MASKS)

    def test_apply(self):
        found = apply_mask(torch.ones(3, A), MASKS.bool())
        assert torch.equal(found, torch.where(MASKS.bool(), 1.0, MASKED))


class TestEncoder:
    def test_the_mask_is_no_feature(self):
        encoder = make_policy_encoder("auto", SPEC)
        assert encoder.num_features == 3
        obs = observe(MASKS)
        assert torch.equal(encoder(obs), obs["observation"])

    def test_other_entries_are_joined(self):
        space = spaces.Dict({"b": spaces.Discrete(2), "a": VECTOR, "action_mask": spaces.MultiBinary(A)})
        encoder = make_policy_encoder("auto", EnvSpec(space, spaces.Discrete(A), action_masks=True))
        assert encoder.num_features == 5
        obs = {"a": torch.ones(2, 3), "b": torch.tensor([0, 1]), "action_mask": MASKS[:2]}
        assert encoder(obs).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]

    def test_pixels_and_a_mask(self):
        space = masked_space(vector=spaces.Box(0, 255, (40, 40, 1), np.uint8))
        encoder = make_policy_encoder("auto", EnvSpec(space, spaces.Discrete(A), action_masks=True))
        assert isinstance(encoder, UnmaskedEncoder)
        assert isinstance(encoder.encoder, NatureCNN)
        obs = {"observation": torch.zeros(2, 40, 40, 1, dtype=torch.uint8), "action_mask": MASKS[:2]}
        assert encoder(obs).shape == (2, 512)

    def test_without_masks_an_entry_of_that_name_is_a_feature(self):
        spec = EnvSpec(masked_space(), spaces.Discrete(A))
        assert make_policy_encoder("auto", spec).num_features == 3 + A

    def test_nothing_but_a_mask_is_refused(self):
        space = spaces.Dict({"action_mask": spaces.MultiBinary(A)})
        with pytest.raises(SpaceError, match="only an action mask"):
            make_policy_encoder("auto", EnvSpec(space, spaces.Discrete(A), action_masks=True))

    def test_dict_in_dict_is_refused(self):
        space = masked_space(vector=spaces.Dict({"a": VECTOR}))
        with pytest.raises(SpaceError, match="is a Dict inside a Dict"):
            make_policy_encoder("auto", EnvSpec(space, spaces.Discrete(A), action_masks=True))


def make_networks():
    config = QNetworkConfig((8,))
    return {
        "single": QNetwork(SPEC, config),
        "dueling": QNetwork(SPEC, config, dueling=True),
        "noisy": QNetwork(SPEC, config, noisy=True),
        "categorical": CategoricalQNetwork(SPEC, config, num_outputs=5, v_min=-1.0, v_max=1.0),
        "quantile": QuantileQNetwork(SPEC, config, num_outputs=4),
        "implicit": ImplicitQuantileQNetwork(SPEC, config, embedding_size=4, num_greedy_fractions=4),
    }


each_network = pytest.mark.parametrize("name", list(make_networks()))


class TestQPolicies:
    @each_network
    def test_values_of_invalid_actions_are_never_the_largest(self, name):
        network, obs = make_networks()[name], observe(MASKS)
        values, raw = network.q_values(obs), network.expected(network(obs))
        assert torch.equal(values[MASKS.bool()], raw[MASKS.bool()])
        assert (values[~MASKS.bool()] == MASKED).all()

    @each_network
    def test_where_nothing_is_valid_values_stay_as_they_are(self, name):
        network, obs = make_networks()[name], observe(torch.zeros(2, A))
        assert torch.equal(network.q_values(obs), network.expected(network(obs)))

    @each_network
    @pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
    def test_chosen_actions_are_valid(self, name, epsilon):
        policy, masks = QPolicy(make_networks()[name], epsilon), random_masks(5_000)
        obs = observe(masks)
        for deterministic in (True, False):
            action = policy.act(obs, deterministic=deterministic, rng=np.random.default_rng(0)).action
            assert masks.gather(1, action.unsqueeze(1)).all()

    def test_the_value_is_that_of_the_best_valid_action(self):
        network = make_networks()["single"]
        obs = observe(MASKS)
        raw = network.expected(network(obs)).detach()
        expected = [raw[row][mask].max() for row, mask in enumerate(MASKS.bool())]
        assert torch.equal(QPolicy(network).value(obs), torch.stack(expected))

    def test_another_mask_may_be_given(self):
        policy, obs = QPolicy(make_networks()["single"]), observe(MASKS)
        only = torch.zeros(3, A, dtype=torch.bool)
        only[:, 1] = True
        assert policy.act(obs, deterministic=True, action_mask=only).action.tolist() == [1, 1, 1]


class TestRandomActions:
    def test_uniform_over_the_valid_ones(self):
        mask = torch.tensor([[False, True, False, True, True]]).expand(30_000, A)
        shares = (
            torch.bincount(torch.from_numpy(random_actions(np.random.default_rng(0), 30_000, A, mask)), minlength=A)
            / 30_000
        )
        torch.testing.assert_close(shares, torch.tensor([0.0, 1 / 3, 0.0, 1 / 3, 1 / 3]), rtol=0, atol=0.015)
        assert shares[0] == shares[2] == 0.0

    def test_of_the_warm_up_policy(self):
        masks = random_masks(5_000)
        action = RandomPolicy(SPEC).act(observe(masks), rng=np.random.default_rng(0)).action
        assert masks.gather(1, action.unsqueeze(1)).all()

    def test_what_comes_next_in_the_stream_does_not_depend_on_the_masks(self):
        after = []
        for masks in (MASKS, 1 - MASKS + MASKS):
            rng = np.random.default_rng(0)
            random_actions(rng, 3, A, masks.bool())
            after.append(rng.random())
        assert after[0] == after[1]


class TestActorCritic:
    def make(self, spec=SPEC, **settings):
        torch.manual_seed(0)
        return ActorCriticPolicy(spec, ActorCriticNetworkConfig((8,), (8,), **settings))

    @pytest.mark.parametrize("shared", [False, True])
    def test_act_and_evaluate_agree(self, shared):
        policy, masks = self.make(shared=shared), random_masks(2_000)
        obs = observe(masks)
        out = policy.act(obs, rng=np.random.default_rng(0))
        assert masks.gather(1, out.action.unsqueeze(1)).all()
        log_prob, entropy, values = policy.evaluate_actions(obs, out.action)
        torch.testing.assert_close(log_prob, out.extras["logprobs"])
        assert torch.equal(entropy, policy.distribution(obs).entropy())
        torch.testing.assert_close(values, out.extras["values"])
        best = policy.act(obs, deterministic=True).action
        assert masks.gather(1, best.unsqueeze(1)).all()

    def test_values_do_not_see_the_mask(self):
        policy = self.make()
        assert torch.equal(policy.value(observe(MASKS)), policy.value(observe(1 - MASKS)))

    def test_another_mask_may_be_given(self):
        policy, obs = self.make(), observe(MASKS)
        only = torch.zeros(3, A, dtype=torch.bool)
        only[:, 1] = True
        assert policy.act(obs, action_mask=only, rng=np.random.default_rng(0)).action.tolist() == [1, 1, 1]


UNMASKED = EnvSpec(VECTOR, spaces.Discrete(A))


@pytest.mark.parametrize(
    "policy",
    [
        ActorCriticPolicy(UNMASKED, ActorCriticNetworkConfig((8,), (8,))),
        QPolicy(QNetwork(UNMASKED, QNetworkConfig((8,)))),
        RandomPolicy(UNMASKED),
    ],
    ids=["actor-critic", "q", "random"],
)
@pytest.mark.parametrize("obs", [torch.zeros(2, 3), {"observation": torch.zeros(2, 3)}], ids=["tensor", "dict"])
def test_a_mask_is_refused_rather_than_ignored(policy, obs):
    with pytest.raises(NotImplementedError, match="without action masks"):
        policy.act(obs, action_mask=torch.ones(2, A), rng=np.random.default_rng(0))
