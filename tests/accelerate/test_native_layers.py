"""Layers of image networks that are computed here: torch's bits, or torch itself."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from rl_training.accelerate.native import compiler, convolutions, layers
from rl_training.accelerate.recording import SEEN_BEFORE
from rl_training.policies.encoders import NatureCNN
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore
from tests.accelerate.native_harness import HAS_COMPILER
from tests.accelerate.test_recording import draw

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")

INPUTS, OUTPUTS = 3136, 512


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def ready():
    """Wait until the kernels are compiled."""
    for library in (layers.is_ready, convolutions.is_ready):
        bool(library)
        library._thread.join()
        assert library


@pytest.fixture
def layer():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return layers.WideLinear(INPUTS, OUTPUTS)


def derivatives(y, x, layer, **options):
    return torch.autograd.grad(y, [x, layer.weight, layer.bias], draw(*y.shape, seed=5), **options)


@pytest.mark.parametrize("rows", [1, 8, 32, 50, 256, 300])
def test_it_is_a_linear_layer_to_the_bit(rows, layer, ready, threads):
    x = draw(rows, INPUTS, seed=1).relu().requires_grad_()
    mine, its = layer(x), F.linear(x, layer.weight, layer.bias)
    assert torch.equal(mine, its)
    assert all(map(torch.equal, derivatives(mine, x, layer), derivatives(its, x, layer)))
    is_known = all(layers.chunks(rows, INPUTS, OUTPUTS)) and layers.MIN_ROWS <= rows <= layers.MAX_ROWS
    assert ("_Linear" in mine.grad_fn.name()) == is_known


def test_only_what_is_wanted_is_computed(layer, ready):
    x = draw(32, INPUTS)  # needs no gradient, as where convolutions are frozen
    found = torch.autograd.grad(layer(x).sum(), [layer.bias])
    assert torch.equal(found[0], torch.full((OUTPUTS,), 32.0))
    with torch.no_grad():
        assert layer(x).grad_fn is None


def test_it_can_be_differentiated_twice(layer, ready):
    """As the trust region does."""
    x = draw(32, INPUTS)

    def curvature(forward):
        (first,) = torch.autograd.grad(forward(x).square().mean(), [layer.weight], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [layer.weight])[0]

    assert torch.allclose(curvature(layer), curvature(lambda x: F.linear(x, layer.weight, layer.bias)), atol=1e-6)


def test_gradients_of_two_calls_add_up(layer, ready):
    x, y = draw(32, INPUTS), draw(32, INPUTS, seed=1)
    (together,) = torch.autograd.grad(layer(x).sum() + layer(y).sum(), [layer.weight])
    (one,), (other,) = (torch.autograd.grad(layer(z).sum(), [layer.weight]) for z in (x, y))
    assert torch.allclose(together, one + other)


@pytest.mark.parametrize("kind", ["double", "three dimensions", "strided", "small"])
def test_the_rest_is_left_to_torch(kind, layer, ready):
    x = draw(32, INPUTS)
    if kind == "double":
        layer, x = layer.double(), x.double()
    elif kind == "three dimensions":
        x = x.view(4, 8, INPUTS)
    elif kind == "strided":
        x = draw(INPUTS, 32).t()
    else:
        layer, x = layers.WideLinear(64, 64), draw(32, 64)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert "_Linear" not in layer(x).grad_fn.name()


def test_without_a_compiler_it_is_left_to_torch(layer, monkeypatch):
    monkeypatch.setattr(layers, "find_compiler", lambda: None)
    monkeypatch.setattr(layers, "is_ready", layers.Ready(layers.library))
    x = draw(32, INPUTS)
    for _ in range(2):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        layers.is_ready._thread.join()
    assert not layers.is_ready


def test_a_compiler_that_fails_is_no_compiler(monkeypatch):
    def library():
        raise compiler.NotCompiledError("out of paper")

    monkeypatch.setattr(layers, "library", library)
    monkeypatch.setattr(layers, "is_ready", layers.Ready(layers.library))
    assert not layers.is_ready
    layers.is_ready._thread.join()
    assert not layers.is_ready


@pytest.mark.parametrize("shape", [(1, 4, 84, 84), (32, 4, 84, 84), (3, 4, 40, 37), (2, 3, 36, 36), (2, 1, 36, 36)])
@pytest.mark.parametrize("kind", ["bytes", "turned", "floats"])
def test_pixels_are_the_same_to_the_bit(shape, kind, ready, threads):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    images = {"bytes": images, "turned": images.permute(0, 1, 3, 2), "floats": images.float()}[kind]
    assert layers.in_planes(images) == (kind == "bytes" and shape[1] == layers.PLANES)
    expected = images.contiguous(memory_format=torch.channels_last).to(torch.float32).mul(1 / 255)
    found = layers.scale_images(images, 1 / 255)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert found.data_ptr() != images.data_ptr()


def test_one_vector(layer, ready, threads):
    """As when one environment is acted in."""
    x = draw(1, INPUTS, seed=1)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        known = layers._is_vector_known(INPUTS, OUTPUTS)
        found = layers._multiply_vector(layer.weight, x, layer.bias)
        assert torch.equal(found, layer(x)) or not known
        expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert torch.allclose(found.double(), expected, atol=1e-5)
        moved = draw(1, INPUTS + 1, seed=1)[:, 1:]  # begins elsewhere, and is added up in another order
        assert torch.equal(layer(moved), F.linear(moved, layer.weight, layer.bias))
    assert layer(x).grad_fn is not None


def test_gradients_are_written_to_their_places(layer, ready):
    x = draw(32, INPUTS)
    places = [torch.full_like(p, 7.0) for p in (layer.weight, layer.bias)]

    def found(y):
        with layers.places_for_gradients(zip((layer.weight, layer.bias), places, strict=True)):
            return torch.autograd.grad(y, [layer.weight, layer.bias], draw(32, OUTPUTS, seed=5))

    weight, bias = found(layer(x))
    is_known = all(layers.chunks(32, INPUTS, OUTPUTS))
    assert (weight.data_ptr() == places[0].data_ptr()) == is_known
    assert bias.data_ptr() != places[1].data_ptr()
    (expected,) = torch.autograd.grad(layer(x), [layer.weight], draw(32, OUTPUTS, seed=5))
    assert expected.data_ptr() != places[0].data_ptr()
    assert torch.equal(weight, expected)
    twice, _ = found(layer(x) + layer(2 * x))  # the second must not be written over the first
    assert torch.allclose(twice, 3 * expected, atol=1e-3)


def test_a_network_of_images_learns_the_same(ready, monkeypatch):
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (32, 4, 84, 84), dtype=np.uint8))

    def learn():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = NatureCNN(space)
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            net(images).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(net.parameters())

    mine = learn()
    monkeypatch.setattr(layers, "is_ready", False)
    monkeypatch.setattr(convolutions, "is_ready", False)
    assert torch.equal(mine, learn())


def test_its_optimizer_is_recorded_by_itself(ready):
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84), dtype=np.uint8))

    def learn(is_recorded):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = NatureCNN(space)
        store = ParameterStore(net, OptimizerConfig())
        if not is_recorded:
            store._apply = store.optimizer_step
        step = GradientStep(store, lambda x: {"loss": net(x).square().mean()}, module=net, max_grad_norm=0.01)
        for turn in range(SEEN_BEFORE + 3):
            step(torch.tensor(1e-3 / (1 + turn)), images)
        assert step._step.num_recordings == 0
        return store

    mine, its = learn(True), learn(False)
    assert mine._apply.num_recordings == 1
    assert torch.equal(mine.flat, its.flat)
