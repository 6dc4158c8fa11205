"""Noisy layers: what the noise looks like, whose stream it comes from, and when it is there at all."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.policies.noisy import NoisyLinear, noisy_layers, remove_noise, reset_noise


def make_module(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(NoisyLinear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), NoisyLinear(4, 2)))


def x(rows=5):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(7))


def test_starts_as_the_paper_says():
    torch.manual_seed(0)
    layer = NoisyLinear(400, 50)
    for means in (layer.weight, layer.bias):
        assert means.abs().max() <= 1 / 20  # uniform in +-1 / sqrt(400)
    assert layer.weight.std().item() == pytest.approx(1 / 20 / np.sqrt(3), rel=0.02)
    for deviations in (layer.weight_sigma, layer.bias_sigma):
        assert torch.allclose(deviations, torch.tensor(0.5 / 20))


def test_means_start_as_those_of_a_linear_layer():
    torch.manual_seed(3)
    noisy = NoisyLinear(3, 4)
    torch.manual_seed(3)
    plain = nn.Linear(3, 4)
    assert torch.equal(noisy.weight, plain.weight)
    assert torch.equal(noisy(x()), plain(x()))  # no noise has been set


def test_forward_by_hand():
    layer = NoisyLinear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.bias.copy_(torch.tensor([3.0]))
        layer.weight_sigma.copy_(torch.tensor([[0.5, 0.25]]))
        layer.bias_sigma.copy_(torch.tensor([0.1]))
    layer.set_noise(torch.tensor([2.0, -1.0]), torch.tensor([4.0]))
    # weights 1 + 0.5 * 4 * 2 = 5 and 2 + 0.25 * 4 * -1 = 1, bias 3 + 0.1 * 4 = 3.4
    assert layer(torch.tensor([[1.0, 10.0]])).item() == pytest.approx(5 + 10 + 3.4)


def test_gradients_of_means_and_deviations():
    layer = NoisyLinear(2, 1)
    layer.set_noise(torch.tensor([2.0, -1.0]), torch.tensor([4.0]))
    layer(torch.tensor([[1.0, 10.0]])).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 10.0]]
    assert layer.bias.grad.tolist() == [1.0]
    assert layer.weight_sigma.grad.tolist() == [[8.0, -40.0]]  # times the noise
    assert layer.bias_sigma.grad.tolist() == [4.0]


def test_noise_is_factorised_and_scaled():
    # one stream, layer after layer: f(e) = sign(e) sqrt(|e|) of inputs, then of outputs
    module = make_module()
    reset_noise(module, np.random.default_rng(5))
    draws = np.random.default_rng(5).standard_normal(3 + 4 + 4 + 2, dtype=np.float32)
    scaled = np.sign(draws) * np.sqrt(np.abs(draws))
    first, second = noisy_layers(module)
    np.testing.assert_allclose(first.weight_noise, np.outer(scaled[3:7], scaled[:3]), rtol=1e-6)
    np.testing.assert_allclose(first.bias_noise, scaled[3:7], rtol=1e-6)
    np.testing.assert_allclose(second.weight_noise, np.outer(scaled[11:], scaled[7:11]), rtol=1e-6)
    np.testing.assert_allclose(second.bias_noise, scaled[11:], rtol=1e-6)


def test_the_mean_over_noise_is_the_output_of_the_means():
    torch.manual_seed(0)
    layer, rng = NoisyLinear(3, 4), np.random.default_rng(0)
    total = torch.zeros(5, 4)
    with torch.no_grad():
        for _ in range(4000):
            reset_noise(layer, rng)
            total += layer(x())
        remove_noise(layer)
        # deviations of about 0.5, so of 0.008 for the mean
        torch.testing.assert_close(total / 4000, layer(x()), rtol=0, atol=0.05)


def test_noise_comes_from_the_stream_alone():
    outputs = []
    for seed in (0, 0, 1):
        module = make_module()
        reset_noise(module, np.random.default_rng(seed))
        outputs.append(module(x()))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_it_is_fresh_each_time_and_stays_until_then():
    module, rng = make_module(), np.random.default_rng(0)
    reset_noise(module, rng)
    first = module(x())
    assert torch.equal(module(x()), first)
    reset_noise(module, rng)
    assert not torch.equal(module(x()), first)


@pytest.mark.parametrize("training", [False, True])
def test_noise_does_not_depend_on_the_mode(training):
    module = make_module().train(training)
    means = module(x())
    reset_noise(module, np.random.default_rng(0))
    noisy = module(x())
    assert not torch.equal(noisy, means)
    module.train(not training)
    assert torch.equal(module(x()), noisy)
    remove_noise(module)
    assert torch.equal(module(x()), means)


def test_noise_is_not_saved():
    module = make_module()
    names = set(module.state_dict())
    assert names == set(dict(module.named_parameters()))
    reset_noise(module, np.random.default_rng(0))
    assert set(module.state_dict()) == names


def test_a_copy_has_noise_of_its_own():
    module = make_module()
    other = copy.deepcopy(module)
    reset_noise(other, np.random.default_rng(0))
    assert not noisy_layers(module)[0].noise_on
    assert torch.equal(module(x()), make_module()(x()))
    assert not torch.equal(other(x()), module(x()))


def test_modules_without_noisy_layers_are_left_alone():
    module, rng = nn.Linear(3, 2), np.random.default_rng(0)
    before = module(x())
    reset_noise(module, rng)
    remove_noise(module)
    assert torch.equal(module(x()), before)
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state  # nothing was drawn
