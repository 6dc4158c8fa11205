"""Normalisation, dropout and spectral norm: against direct computations, in every network and mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_training import DQN, PPO, SAC, TD3
from rl_training.contracts.errors import ConfigError
from rl_training.policies.ensemble import EnsembleMLP
from rl_training.policies.layers import (
    BatchNorm,
    Dropout,
    EnsembleLinear,
    LayerNorm,
    LayerOptions,
    SpectralLinear,
    draw_dropout,
)
from rl_training.policies.networks import make_mlp

CPU = torch.device("cpu")


def test_a_hidden_layer_has_its_parts_in_this_order() -> None:
    options = LayerOptions(norm="layer", dropout=0.1, spectral_norm=True)
    kinds = [type(part) for part in make_mlp(3, (4,), "relu", options)[0]]
    assert kinds == [SpectralLinear, Dropout, nn.LayerNorm, nn.ReLU]
    kinds = [type(part) for part in make_mlp(3, (4,), "relu", LayerOptions(norm="batch"))[0]]
    assert kinds == [BatchNorm, nn.Linear, nn.ReLU, BatchNorm]


def test_without_options_there_are_linear_layers_and_activations_only() -> None:
    network = EnsembleMLP(2, 3, (4, 5), 1, "relu")
    assert set(network.state_dict()) == {f"layers.{i}.{name}" for i in range(3) for name in ("weight", "bias")}


def test_layer_norm_of_an_ensemble_is_that_of_each_member() -> None:
    torch.manual_seed(0)
    layer, x = LayerNorm(5, num_members=3), torch.randn(3, 7, 5)
    layer.weight.data.normal_()
    layer.bias.data.normal_()
    for member in range(3):
        single = nn.LayerNorm(5)
        single.weight.data, single.bias.data = layer.weight[member, 0].detach(), layer.bias[member, 0].detach()
        torch.testing.assert_close(layer(x)[member], single(x[member]))
    torch.testing.assert_close(layer(x[[2, 0]], torch.tensor([2, 0])), layer(x)[[2, 0]])


class TestBatchNorm:
    def test_in_training_the_batch_statistics_count(self) -> None:
        layer, x = BatchNorm(2), torch.tensor([[1.0, 0.0], [3.0, 4.0]])
        # means 2 and 2, variances 1 and 4
        expected = torch.tensor([[-1.0 / 1.001**0.5, -2.0 / 4.001**0.5], [1.0 / 1.001**0.5, 2.0 / 4.001**0.5]])
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer.mean, torch.tensor([0.02, 0.02]))
        torch.testing.assert_close(layer.variance, torch.tensor([1.0, 0.99 + 0.04]))
        assert layer.num_batches == 1

    def test_in_evaluation_the_running_statistics_count_and_stay(self) -> None:
        layer = BatchNorm(1).eval()
        layer.mean.fill_(1.0)
        layer.variance.fill_(4.0 - 1e-3)
        torch.testing.assert_close(layer(torch.tensor([[5.0], [1.0]])), torch.tensor([[2.0], [0.0]]))
        assert layer.mean == 1.0
        assert layer.num_batches == 0

    def test_members_have_their_own_statistics(self) -> None:
        torch.manual_seed(0)
        layer, x = BatchNorm(4, num_members=2), torch.randn(2, 8, 4) * 3 + 1
        single = [BatchNorm(4) for _ in range(2)]
        found = layer(x)
        for member in range(2):
            torch.testing.assert_close(found[member], single[member](x[member]))
            torch.testing.assert_close(layer.mean[member, 0], single[member].mean)
            torch.testing.assert_close(layer.variance[member, 0], single[member].variance)

    def test_renormalisation_begins_after_the_warm_up_and_is_bounded(self) -> None:
        layer, x = BatchNorm(1, renorm=True), torch.tensor([[9.0], [11.0]])  # mean 10, variance 1
        plain = torch.tensor([[-1.0], [1.0]]) / 1.001**0.5
        torch.testing.assert_close(layer(x), plain)
        layer.num_batches.fill_(BatchNorm.WARMUP)
        layer.mean.fill_(9.0)
        layer.variance.fill_(4.0 - 1e-3)  # running standard deviation 2
        scale, shift = 1.001**0.5 / 2.0, (10.0 - 9.0) / 2.0
        torch.testing.assert_close(layer(x), plain * scale + shift)
        layer.mean.fill_(-1000.0)
        layer.variance.fill_(1e-6)
        torch.testing.assert_close(layer(x), plain * 3.0 + 5.0)

    def test_the_correction_has_no_gradient(self) -> None:
        layer = BatchNorm(1, renorm=True)
        layer.num_batches.fill_(BatchNorm.WARMUP)
        layer.mean.fill_(0.4)
        x = torch.tensor([[0.0], [1.0], [0.5]], requires_grad=True)
        (gradient,) = torch.autograd.grad((layer(x) * torch.tensor([[1.0], [2.0], [-1.0]])).sum(), x)
        plain, y = BatchNorm(1), x.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad((plain(y) * torch.tensor([[1.0], [2.0], [-1.0]])).sum(), y)
        scale = ((x.var(unbiased=False) + 1e-3).sqrt() / 1.001**0.5).detach()
        torch.testing.assert_close(gradient, expected * scale)


class TestDropout:
    def test_masks_come_from_the_given_generator(self) -> None:
        layer, x = Dropout(0.25, 64), torch.ones(32, 64)
        draw_dropout([layer], 32, np.random.default_rng(3), CPU)
        first = layer(x)
        draw_dropout([layer], 32, np.random.default_rng(3), CPU)
        assert torch.equal(layer(x), first)
        assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
        assert abs((first == 0).float().mean().item() - 0.25) < 0.03
        draw_dropout([layer], 32, np.random.default_rng(4), CPU)
        assert not torch.equal(layer(x), first)

    def test_evaluation_drops_nothing(self) -> None:
        layer = Dropout(0.5, 4).eval()
        assert torch.equal(layer(torch.ones(2, 4)), torch.ones(2, 4))

    def test_repeated_rows_repeat_their_mask(self) -> None:
        layer = Dropout(0.5, 8, num_members=2)
        draw_dropout([layer], 3, np.random.default_rng(0), CPU)
        once, thrice = layer(torch.ones(2, 3, 8)), layer(torch.ones(2, 9, 8))
        assert torch.equal(thrice, once.repeat_interleave(3, dim=1))


class TestSpectralNorm:
    def test_the_largest_singular_value_becomes_one(self) -> None:
        torch.manual_seed(1)
        layer = EnsembleLinear(3, 6, 4, spectral_norm=True)
        layer.weight.data *= 7.0
        assert layer.scale is not None
        for _ in range(200):
            scaled = layer.scale(layer.weight)
        values = torch.linalg.svdvals(scaled.detach())[:, 0]
        torch.testing.assert_close(values, torch.ones(3), rtol=1e-3, atol=1e-3)

    def test_a_single_layer_agrees_with_torch(self) -> None:
        torch.manual_seed(1)
        ours = SpectralLinear(6, 4)
        theirs = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4), n_power_iterations=1)
        theirs.parametrizations.weight.original.data.copy_(ours.weight.data)
        theirs.bias.data.copy_(ours.bias.data)
        x = torch.randn(5, 6)
        for _ in range(300):
            ours(x)
            theirs(x)
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)

    def test_evaluation_changes_nothing(self) -> None:
        layer = SpectralLinear(3, 2).eval()
        before = layer.scale.u.clone()
        layer(torch.ones(1, 3))
        assert torch.equal(layer.scale.u, before)


SETTINGS: dict[str, dict[str, Any]] = {
    "layer": {"critic_norm": "layer", "actor_norm": "layer"},
    "batch": {"critic_norm": "batch_renorm", "actor_norm": "batch"},
    "dropout": {"critic_dropout": 0.1, "actor_dropout": 0.05, "critic_norm": "layer"},
    "spectral": {"critic_spectral_norm": True, "actor_spectral_norm": True},
}


@pytest.mark.parametrize("mode", ["off", "recorded"])
@pytest.mark.parametrize("options", SETTINGS)
def test_networks_of_off_policy_actor_critics_learn_with_them(options: str, mode: str) -> None:
    network = {"actor_sizes": (16,), "critic_sizes": (16,), **SETTINGS[options]}
    make = TD3 if options == "spectral" else SAC
    agent = make("Pendulum-v1", seed=0, network=network, accelerate=mode, learning_starts=20, batch_size=16)
    before = agent.predict(np.zeros((1, 3), np.float32), deterministic=True)[0].copy()
    agent.learn(60, progress=False)
    after = agent.predict(np.zeros((1, 3), np.float32), deterministic=True)[0]
    assert np.isfinite(after).all()
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("options", [{"norm": "layer"}, {"norm": "batch"}, {"dropout": 0.2}, {"spectral_norm": True}])
def test_q_networks_learn_with_them(options: dict[str, Any]) -> None:
    agent = DQN("CartPole-v1", seed=0, network={"sizes": (16,), **options}, learning_starts=20)
    first = _weights(agent.policy)
    agent.learn(60, progress=False)
    assert not torch.equal(first, _weights(agent.policy))
    assert torch.isfinite(_weights(agent.policy)).all()


def test_on_policy_networks_take_layer_norm_and_refuse_what_depends_on_the_minibatch() -> None:
    agent = PPO("CartPole-v1", network={"actor_norm": "layer", "critic_norm": "layer"}, num_steps=16, num_envs=2)
    agent.learn(64, progress=False)
    with pytest.raises(ConfigError, match=r"(?s)actor_norm.*critic_dropout"):
        PPO("CartPole-v1", network={"actor_norm": "batch", "critic_dropout": 0.1})


def _weights(policy: Any) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in policy.parameters()])
