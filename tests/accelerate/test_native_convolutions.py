"""ConvolutionStack that are computed here: torch's bits, or torch itself."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_training.accelerate.native import compiler, convolutions, layers
from rl_training.accelerate.native.convolutions import ConvolutionStack, Order, Shape
from rl_training.policies.encoders import DrQCNN, NatureCNN
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import ParameterStore
from tests.accelerate.native_harness import HAS_COMPILER
from tests.accelerate.test_native_layers import ready, threads  # noqa: F401 - fixtures
from tests.accelerate.test_recording import draw

pytestmark = [
    pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine"),
    pytest.mark.usefixtures("ready"),
]

NATURE = [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
SIZES = [(outputs, channels, size, stride) for channels, outputs, size, stride in NATURE]
ORDERS = [
    Order(chunk=chunk, parts=parts, by_rows=by_rows, last_row_first=a, last_column_first=b)
    for (chunk, parts, by_rows), a, b in itertools.product(
        [(1000, 1, False), (100, 2, True), (37, 3, False), (64, 1, True)], (False, True), (False, True)
    )
]
SHAPES = [  # images, height, width, channels, outputs, size, stride
    Shape(3, 20, 20, 32, 64, 4, 2),
    Shape(2, 9, 9, 64, 64, 3, 1),
    Shape(1, 23, 31, 32, 32, 5, 3),  # some pixels are never looked at
    Shape(4, 13, 8, 32, 96, 2, 1),
    Shape(2, 16, 16, 96, 32, 1, 1),
    Shape(5, 36, 36, 4, 32, 8, 4),
]


def channels_last(*shape, seed):
    return draw(*shape, seed=seed).contiguous(memory_format=torch.channels_last)


def stack(sizes=NATURE, *more, seed=0):
    modules = [
        module
        for inputs, outputs, size, stride in sizes
        for module in (nn.Conv2d(inputs, outputs, size, stride=stride), nn.ReLU(inplace=True))
    ]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ConvolutionStack(*copy.deepcopy(modules), *more)


def bytes_of(*shape):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def by_torch(net, images, scale=None):
    return nn.Sequential.forward(net, images if scale is None else layers.scale_images(images, scale))


def gradients(y, net):
    return torch.autograd.grad(y, list(net.parameters()), draw(*y.shape, seed=5))


class TestOneLayer:
    """Whatever the order of sums is, they are those of the right products."""

    @pytest.mark.parametrize("order", ORDERS[::4])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_results(self, shape, order, threads):  # noqa: F811
        x, weight, bias = self.inputs(shape)
        found = convolutions.convolve(shape, order, x, weight, bias, relu=False)
        expected = F.conv2d(x.double(), weight.double(), bias.double(), shape.stride)
        assert torch.allclose(found.double(), expected, atol=1e-4)
        assert torch.equal(convolutions.convolve(shape, order, x, weight, bias), found.relu())

    @pytest.mark.parametrize("order", ORDERS[::4])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_weights_gradient(self, shape, order, threads):  # noqa: F811
        x, *_ = self.inputs(shape)
        gradient = channels_last(*shape.result, seed=3)
        order = order._replace(parts=min(order.parts, shape.images))
        found = convolutions.weight_gradient(shape, order, x, gradient)
        expected = self.backward(shape, gradient, x)[1:]
        assert all(torch.allclose(a.double(), b, atol=1e-3) for a, b in zip(found, expected, strict=True))

    @pytest.mark.parametrize("order", ORDERS[:4])
    @pytest.mark.parametrize("shape", SHAPES[:-1])
    def test_the_images_gradient(self, shape, order, threads):  # noqa: F811
        x, *_ = self.inputs(shape)
        gradient = channels_last(*shape.result, seed=3)
        weight = self.inputs(shape)[1]
        found = convolutions.x_gradient(shape, order, weight, gradient)
        assert torch.allclose(found.double(), self.backward(shape, gradient, x)[0], atol=1e-4)
        masked = convolutions.x_gradient(shape, order, weight, gradient, mask=x)
        assert torch.equal(masked, found * (x > 0))

    def inputs(self, shape):
        s = shape
        x = channels_last(s.images, s.channels, s.height, s.width, seed=0)
        return x, draw(s.outputs, s.channels, s.size, s.size, seed=1), draw(s.outputs, seed=2)

    def backward(self, shape, gradient, x):
        weight = self.inputs(shape)[1]
        case = convolutions._Case(x.double(), weight.double(), draw(shape.outputs).double(), gradient.double())
        return convolutions._gradients(shape, case, [True, True, True])


@pytest.mark.parametrize(
    ("images", "kind"),
    [
        *((images, "bytes in planes") for images in (1, 2, 32, 64)),
        *((5, kind) for kind in ("bytes in planes", "bytes", "three colours", "floats")),
        (32, "floats"),
    ],
)
def test_a_stack_has_torchs_bits(images, kind, threads):  # noqa: F811
    planes = 3 if kind == "three colours" else 4
    net = stack([(planes, *NATURE[0][1:]), *NATURE[1:]], nn.Flatten())
    x, scale = bytes_of(images, planes, 84, 84), 1 / 255
    if kind == "floats":
        x, scale = channels_last(images, 4, 84, 84, seed=1), None
    elif kind != "bytes in planes":
        x = x.contiguous(memory_format=torch.channels_last)
    mine, its = net(x, scale), by_torch(net, x, scale)
    assert torch.equal(mine, its)
    assert all(map(torch.equal, gradients(mine, net), gradients(its, net)))
    with torch.no_grad():
        assert torch.equal(net(x, scale), its)
        assert net(x, scale).grad_fn is None


def test_bytes_are_read_as_they_are(monkeypatch):
    monkeypatch.setattr(layers, "scale_images", None)
    net = stack()
    for x in (bytes_of(2, 4, 84, 84), bytes_of(2, 4, 84, 84).contiguous(memory_format=torch.channels_last)):
        with torch.no_grad():
            if not convolutions.is_known(convolutions._shapes(x.shape, tuple(SIZES)), False, torch.get_num_threads()):
                pytest.skip("on this machine torch has another order")
            assert net(x, 1 / 255).shape == (2, 64, 7, 7)


def test_bytes_without_a_scale_are_an_error():
    with pytest.raises(RuntimeError, match="type"):
        stack()(bytes_of(2, 4, 84, 84))


def test_weights_of_another_type_are_torchs():
    with pytest.raises(RuntimeError, match="type"):
        stack().double()(bytes_of(2, 4, 84, 84), 1 / 255)


def test_the_number_of_threads_may_change_before_the_pass_back():
    net, x = stack(), channels_last(64, 4, 84, 84, seed=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        y = net(x)
        expected = gradients(by_torch(net, x), net)
        torch.set_num_threads(3)
        assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(gradients(y, net), expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_the_usual_networks_are_not_left_to_torch(threads):  # noqa: F811
    """Where torch is known to add in these orders: what it uses on x86 with wide vectors."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("on this machine torch may have other orders")
    for images in (32, 256):
        y = stack()(channels_last(images, 4, 84, 84, seed=1))
        assert "_Stack" in y.grad_fn.name()


@pytest.mark.parametrize("encoder", [NatureCNN, DrQCNN])
@pytest.mark.parametrize("planes", [4, 3])
def test_encoders_learn_the_same(encoder, planes, monkeypatch):
    space = spaces.Box(0, 255, (planes, 84, 84), np.uint8)
    images = bytes_of(8, planes, 84, 84)

    def learn():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = encoder(space)
        store = ParameterStore(net, OptimizerConfig())
        for _ in range(3):
            store.step(net(images).square().mean(), learning_rate=1e-3, max_grad_norm=0.5)
        return store.flat.detach().clone()

    mine = learn()
    monkeypatch.setattr(layers, "is_ready", False)
    monkeypatch.setattr(convolutions, "is_ready", False)
    assert torch.equal(mine, learn())


def test_gradients_that_are_not_wanted_are_not_given():
    net = stack()
    x = channels_last(8, 4, 84, 84, seed=1)
    net[2].weight.requires_grad_(False)
    found = torch.autograd.grad(net(x).sum(), [net[0].weight, net[4].bias])
    its = torch.autograd.grad(by_torch(net, x).sum(), [net[0].weight, net[4].bias])
    assert all(map(torch.equal, found, its))


def test_it_can_be_differentiated_twice():
    """As the trust region does."""
    net = stack([(4, 32, 4, 2), (32, 32, 3, 1)])
    x = bytes_of(2, 4, 20, 20)

    def curvature(y):
        (first,) = torch.autograd.grad(y.square().mean(), [net[0].weight], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [net[2].weight])[0]

    mine = curvature(net(x, 1 / 255))
    assert mine.abs().max() > 0
    assert torch.allclose(mine, curvature(by_torch(net, x, 1 / 255)), atol=1e-9)


def test_gradients_of_two_calls_add_up():
    net = stack()
    x, y = (channels_last(8, 4, 84, 84, seed=seed) for seed in (1, 2))
    together = torch.autograd.grad(net(x).sum() + net(y).sum(), list(net.parameters()))
    apart = (torch.autograd.grad(net(z).sum(), list(net.parameters())) for z in (x, y))
    assert all(torch.allclose(a, b + c, atol=1e-3) for a, b, c in zip(together, *apart, strict=True))


def test_who_watches_sees_torch():
    net = stack()
    x = channels_last(8, 4, 84, 84, seed=1)
    names = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    y = net(x)
    with Watch():
        torch.autograd.grad(y.sum(), list(net.parameters()))
        net(x)
    assert names.count("convolution") == 6  # once more for the gradients of what was computed before
    assert names.count("convolution_backward") == 3


@pytest.mark.parametrize(
    "kind", ["padding", "double", "channels first", "an image", "no images", "wanted gradient", "odd width", "tanh"]
)
def test_the_rest_is_left_to_torch(kind):
    net, x = stack(), channels_last(8, 4, 84, 84, seed=1)
    if kind == "padding":
        net = ConvolutionStack(nn.Conv2d(4, 32, 3, padding=1), nn.ReLU())
    elif kind == "double":
        net, x = net.double(), x.double()
    elif kind == "channels first":
        x = draw(8, 4, 84, 84, seed=1)
    elif kind == "an image":
        x = x[0]
    elif kind == "no images":
        x = x[:0]
    elif kind == "wanted gradient":
        x.requires_grad_()
    elif kind == "odd width":
        net = stack([(4, 30, 8, 4)])
    else:
        net = ConvolutionStack(nn.Conv2d(4, 32, 3), nn.Tanh())
    y = net(x)
    assert torch.equal(y, by_torch(net, x))
    assert "_Stack" not in y.grad_fn.name()


def test_torch_says_what_is_wrong():
    with pytest.raises(RuntimeError, match="to have 4 channels, but got 3"):
        stack()(channels_last(2, 3, 84, 84, seed=0))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        stack()(channels_last(2, 4, 20, 20, seed=0))


def test_an_order_that_is_not_found_is_not_used(monkeypatch):
    monkeypatch.setattr(convolutions, "is_known", convolutions.is_known.__wrapped__)
    monkeypatch.setattr(convolutions, "to_weight", lambda *_: convolutions.UNKNOWN)
    net, x = stack(), channels_last(8, 4, 84, 84, seed=1)
    assert "_Stack" not in net(x).grad_fn.name()


def test_other_numbers_are_no_order(monkeypatch):
    """An order is one only if all bits are torch's."""
    real = convolutions.convolve

    def nearly(*args, **kwargs):
        return real(*args, **kwargs).mul_(1 + 1e-7)

    monkeypatch.setattr(convolutions, "convolve", nearly)
    assert convolutions.to_result.__wrapped__(SHAPES[0], 1) == convolutions.UNKNOWN


def test_copies_compute_by_themselves():
    net = stack()
    other = copy.deepcopy(net)
    x = channels_last(8, 4, 84, 84, seed=1)
    with torch.no_grad():
        before = net(x)
        other[0].weight.zero_()
        assert torch.equal(net(x), before)
        assert not torch.equal(other(x), before)


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ()])
def test_kernels_for_other_machines(flags, monkeypatch):
    """Narrower vectors: sums are added in the same order."""
    other = compiler.build("convolutions.c", '#include "convolutions.c"', flags)
    shape, order = SHAPES[0], Order(chunk=100, parts=2, by_rows=True)
    s = shape
    x = channels_last(s.images, s.channels, s.height, s.width, seed=0)
    weight, bias = draw(s.outputs, s.channels, s.size, s.size, seed=1), draw(s.outputs, seed=2)
    gradient = channels_last(*s.result, seed=3)

    def results():
        return (
            convolutions.convolve(shape, order, x, weight, bias),
            *convolutions.weight_gradient(shape, order, x, gradient),
            convolutions.x_gradient(shape, order, weight, gradient, mask=x),
        )

    expected = results()
    monkeypatch.setattr(convolutions, "convolutions_library", lambda: other)
    assert all(map(torch.equal, results(), expected))
