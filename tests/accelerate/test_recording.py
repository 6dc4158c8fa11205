"""Accelerated functions give the bits of the plain ones, and what cannot be recorded runs as written."""

import copy
import pickle
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_training.accelerate import recording
from rl_training.accelerate.kernels import lay_out
from rl_training.accelerate.numpy_kernels import SmallArithmetic
from rl_training.accelerate.recording import MAX_RECORDINGS, SEEN_BEFORE, Accelerated
from rl_training.policies.activations import ACTIVATIONS
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore

ROWS = 7


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def network(activation="tanh", width=16):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(3, width), ACTIVATIONS[activation](), nn.Linear(width, width), nn.LayerNorm(width)]
        return nn.Sequential(*layers, ACTIVATIONS[activation](), nn.Linear(width, 4))


def warm(function, *inputs):
    """Call until there is a recording, or there never will be."""
    for _ in range(SEEN_BEFORE + 1):
        function(*inputs)


def losses_of(net):
    """A loss with most of what ours are made of: gather, softmax, clamp, where, minimum, in-place operators, sums."""

    def losses(x, index, coef):
        logits = net(x)
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(1, index.unsqueeze(1)).squeeze(1)
        ratio = (chosen - chosen.detach().mean()).exp()
        bounded = torch.minimum(ratio * x[:, 0], ratio.clamp(1.0 - coef, 1.0 + coef) * x[:, 0])
        total = torch.zeros_like(bounded)
        total += torch.where(bounded > 0, bounded, 0.5 * bounded)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        smooth = nn.functional.huber_loss(logits.amax(1), x[:, 1]) + nn.functional.softplus(logits).mean()
        loss = total.mean() - 0.1 * entropy.mean() + smooth + logits.square().amin(0).sum()
        with torch.no_grad():
            share = (ratio > 1.0 + coef).float().mean()
        return {"loss": loss, "share": share, "rows": bounded}

    return losses


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_gradient_steps_are_those_of_autograd_to_the_bit(activation, max_grad_norm):
    plain, quick = network(activation), network(activation)
    plain_store, quick_store = (ParameterStore(net, OptimizerConfig()) for net in (plain, quick))
    step = GradientStep(quick_store, losses_of(quick), module=quick, max_grad_norm=max_grad_norm)
    plain_losses = losses_of(plain)
    for turn in range(12):
        x, index = draw(ROWS, 3, seed=turn), torch.arange(ROWS) % 4
        coef, rate = 0.1 + 0.01 * turn, 0.01 / (turn + 1)  # numbers that change are not part of a recording
        found = step(rate, x, index, coef)
        with SmallArithmetic():
            expected = plain_losses(x, index, coef)
            norm = plain_store.step(expected["loss"], learning_rate=rate, max_grad_norm=max_grad_norm)
        for name, value in {**expected, "gradient_norm": norm}.items():
            assert torch.equal(found[name], value.detach()), (turn, name)
        assert torch.equal(quick_store.flat, plain_store.flat), turn
    assert step._step.num_recordings == 1


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gradients_are_those_of_torch_but_for_rounding(activation):
    plain, quick = network(activation), network(activation)
    plain_store, quick_store = (ParameterStore(net, OptimizerConfig()) for net in (plain, quick))
    step = GradientStep(quick_store, losses_of(quick), module=quick, max_grad_norm=None)
    for turn in range(SEEN_BEFORE + 3):
        x, index = draw(ROWS, 3, seed=turn), torch.arange(ROWS) % 4
        found = step(0.0, x, index, 0.1)
        expected = losses_of(plain)(x, index, 0.1)
        norm = plain_store.differentiate(expected["loss"], None)
        for name, value in {**expected, "gradient_norm": norm}.items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(quick_store.grad, plain_store.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_every_optimizer_steps_as_torch_does(name):
    net, reference = network(), network()
    settings = OptimizerConfig(name=name, momentum=0.5 if name in ("rmsprop", "sgd") else 0.0, weight_decay=0.01)
    store = ParameterStore(net, settings)
    step = GradientStep(store, losses_of(net), module=net, max_grad_norm=None)
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in reference.parameters()]))
    optimizer = settings.make([flat])
    for turn in range(8):
        inputs = (draw(ROWS, 3, seed=turn), torch.arange(ROWS) % 4, 0.2)
        nn.utils.vector_to_parameters(flat.detach(), reference.parameters())
        with SmallArithmetic():  # RMSprop's first step divides a gradient by itself, and so enlarges how it was rounded
            found = torch.autograd.grad(losses_of(reference)(*inputs)["loss"], list(reference.parameters()))
        flat.grad = torch.cat([gradient.reshape(-1) for gradient in found])
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()
        step(0.01, *inputs)
        own = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        assert torch.allclose(own, flat, rtol=1e-5, atol=1e-6), turn


def test_a_restored_optimizer_goes_on_with_its_own_slots():
    """Slots are replaced when a state is loaded: what was recorded before must not write into the old ones."""
    nets = network(), network()
    stores = [ParameterStore(net, OptimizerConfig()) for net in nets]
    steps = [GradientStep(s, losses_of(n), module=n, max_grad_norm=None) for s, n in zip(stores, nets, strict=True)]
    inputs = (draw(ROWS, 3), torch.arange(ROWS) % 4, 0.2)
    for _ in range(5):
        steps[0](0.01, *inputs)
        steps[1](0.02, *inputs)
    state = {
        k: {n: t.clone() for n, t in v.items()} if isinstance(v, dict) else v for k, v in stores[0].state_dict().items()
    }
    nets[1].load_state_dict(nets[0].state_dict())
    stores[1].load_state_dict(state)
    for _ in range(5):
        for step in steps:
            step(0.01, *inputs)
        assert torch.equal(stores[0].flat, stores[1].flat)


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict[str, torch.Tensor]


def test_inputs_and_outputs_may_be_nested_and_outputs_are_not_overwritten():
    function = Accelerated(lambda pair, flag: Pair(pair.left + 1 if flag else pair.left, {"b": 2 * pair.right["a"]}))
    kept = [function(Pair(torch.full((2,), float(i)), {"a": torch.full((1,), float(i))}), True) for i in range(6)]
    assert [pair.left[0].item() for pair in kept] == [1, 2, 3, 4, 5, 6]
    assert [pair.right["b"].item() for pair in kept] == [0, 2, 4, 6, 8, 10]
    assert isinstance(kept[-1], Pair)
    other = function(Pair(torch.zeros(2), {"a": torch.zeros(1)}), False)  # a plain value is part of the kind
    assert other.left[0].item() == 0
    assert function.num_recordings == 1


def test_kinds_of_inputs_have_recordings_of_their_own_and_few_are_kept():
    function = Accelerated(lambda x: x.cumsum(0) + len(x))
    for size in range(1, MAX_RECORDINGS + 6):
        for _ in range(SEEN_BEFORE + 2):
            x = draw(size, seed=size)
            assert torch.equal(function(x), x.cumsum(0) + size)
    assert function.num_recordings == MAX_RECORDINGS
    x = draw(1)
    assert torch.equal(function(x), x.cumsum(0) + 1)  # forgotten, and made again


def test_recordings_of_a_function_take_turns_in_the_same_memory():
    def function(x):
        return {"result": torch.tanh(x * 3).exp() + torch.sigmoid(x - 1) * x.sum()}

    recorded = Accelerated(function)
    sizes = [5000, 9000, 6000]  # the second needs a larger block, which the third then shares
    inputs = [draw(size, seed=seed) for seed, size in enumerate(sizes)]
    with SmallArithmetic():
        expected = [function(x)["result"] for x in inputs]
    for x in inputs:
        warm(recorded, x)
    assert recorded.num_recordings == 3
    for _ in range(3):
        for x, y in zip(inputs, expected, strict=True):
            assert torch.equal(recorded(x)["result"], y)
    places = [r.outputs["result"].untyped_storage().data_ptr() for r in recorded._recordings.values()]
    assert places[0] != places[1] == places[2]


def test_weights_are_read_where_they_lie():
    net = network()
    function = Accelerated(net, net)
    x = draw(ROWS, 3)
    with torch.no_grad(), SmallArithmetic():
        warm(function, x)
        net[0].weight.mul_(2.0)  # in place: the recording sees it
        assert torch.equal(function(x), net(x))
        net[0].weight.data = net[0].weight.data.clone().mul_(3.0)  # elsewhere: a new recording is made
        assert torch.equal(function(x), net(x))
        assert torch.equal(function(x), net(x))


REFUSED = {
    "value": (lambda x: x * 2 if x.sum() > 0 else x, "reads a tensor's value"),
    "item": (lambda x: x * x.max().item(), "reads a tensor's value"),
    "random": (lambda x: x + torch.rand_like(x), "draws random numbers"),
    "dropout": (lambda x: nn.functional.dropout(x, 0.5), "draws random numbers"),
    "mask": (lambda x: x[x > 0], "depends on values"),
    "nonzero": (lambda x: x.nonzero(), "depends on values"),
    "convolution": (lambda x: nn.functional.conv1d(x.unsqueeze(0), x[None, None, 0, :2]), "allocates its own memory"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_recorded_runs_as_written(name):
    function, reason = REFUSED[name]
    recorded = Accelerated(lambda x: function(x.expand(1, -1) if name == "convolution" else x))
    for seed in range(6):
        x = draw(ROWS, seed=seed)
        found = recorded(x)
        if "random" not in reason:
            assert torch.equal(found, recorded.function(x))
    assert reason in recorded.why_plain
    assert recorded.num_recordings == 0


def test_indexing_by_integers_is_recorded():
    function = Accelerated(lambda x, index: x[index])
    for seed in range(5):
        x, index = draw(ROWS, 2, seed=seed), torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(function(x, index), x[index])
    assert function.num_recordings == 1


def test_networks_with_strange_parts_are_not_recorded():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    part = Counting()
    function = Accelerated(part, nn.Sequential(nn.Linear(1, 1), part))
    assert [function(torch.ones(1)).item() for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert "Counting" in function.why_plain


def test_constants_that_are_written_into_are_made_anew():
    def count(x):
        total = torch.zeros(3)
        total += x
        return total

    function = Accelerated(count)
    assert [function(torch.full((3,), float(i)))[0].item() for i in range(6)] == [0, 1, 2, 3, 4, 5]


def test_two_threads_do_not_share_memory():
    net = network()
    function = Accelerated(net, net)
    inputs = [draw(64, 3, seed=seed) for seed in range(8)]
    with torch.no_grad(), SmallArithmetic():
        expected = [net(x) for x in inputs]
        warm(function, inputs[0])
    wrong = []

    def work(number):
        with torch.no_grad():
            for _ in range(300):
                if not torch.equal(function(inputs[number]), expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copies_begin_without_recordings():
    net = network()
    function = Accelerated(net.forward, net)
    x = draw(ROWS, 3)
    warm(function, x)
    for other in (copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
        assert other.num_recordings == 0
        warm(other, x)
        with torch.no_grad():
            net[0].weight.mul_(1.5)
        assert not torch.equal(other(x), function(x))  # it has weights of its own


def test_memory_is_used_again_but_never_by_two_at_once():
    rng = np.random.default_rng(0)
    count = 60
    first = {piece: piece for piece in range(count)}
    last = {piece: piece + int(rng.integers(1, 12)) for piece in range(count)}
    sizes = {piece: 64 * int(rng.integers(1, 9)) for piece in range(count)}
    offsets = lay_out(first, last, sizes)
    for a in range(count):
        for b in range(a):
            apart = offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
            assert apart or last[b] < first[a]
    assert max(offsets[p] + sizes[p] for p in offsets) < 0.4 * sum(sizes.values())


def test_inputs_keep_their_memory_order_while_they_are_recorded():
    seen = []

    def function(x):
        seen.append(x.stride())
        return x.flatten(1).sum(1)

    double = Accelerated(function)
    images = draw(2, 5, 6, 3).permute(0, 3, 1, 2)  # channels first, channels last in memory
    for x in (images, images.contiguous()):
        for turn in range(SEEN_BEFORE + 2):
            x = x.clone() + turn
            torch.testing.assert_close(double(x), x.flatten(1).sum(1))
    assert seen == [images.stride()] * (SEEN_BEFORE + 1) + [images.contiguous().stride()] * (SEEN_BEFORE + 1)
    gaps = draw(2, 3, 5, 12)[..., ::2]
    torch.testing.assert_close(double(gaps), double.function(gaps.contiguous()))
    assert double.num_recordings == 2


class Names(TorchDispatchMode):
    """Notes the names of all operators that torch runs."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_large_relu_writes_straight_to_its_place():
    """Torch's own relu with a place to write to makes new memory first, and copies."""
    rectify = Accelerated(torch.relu)
    x = torch.linspace(-1, 1, 20_000)
    for _ in range(3):
        rectify(x)
    with Names() as names:
        found = rectify(x)
    assert names.found == ["clamp_min", "clone"]
    assert torch.equal(found, torch.relu(x))


@pytest.mark.parametrize("case", ["only kept", "used later", "read before", "returned", "not aligned", "a part of it"])
def test_results_are_written_to_where_they_are_kept(case):
    """The copy is spared where nobody can tell, and made where somebody could."""
    memory = torch.zeros(3 * 10_000 + 64)
    start = 16 if case != "not aligned" else 17
    place = memory[start:][:10_000]

    def function(x):
        made = torch.tanh(x) if case != "a part of it" else torch.tanh(torch.cat((x, x)))[:10_000]
        before = place.sum() if case == "read before" else x.sum()
        place.copy_(made)
        result = place.square().sum() + before
        return result + made.sum() if case == "used later" else result, made if case == "returned" else result

    recorded = Accelerated(function)
    for turn in range(SEEN_BEFORE + 3):
        x = draw(10_000, seed=turn)
        place.fill_(turn)
        found = [t.clone() for t in recorded(x)]
        kept = place.clone()
        place.fill_(turn)
        with SmallArithmetic():
            expected = function(x)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), turn
        assert torch.equal(kept, place)
    assert memory[:start].eq(0).all()
    assert memory[start + 10_000 :].eq(0).all()
    with Names() as names:
        recorded(draw(10_000))
    outputs = 2
    assert names.found.count("copy_") + names.found.count("clone") == outputs + (case != "only kept")


def test_recorded_functions_within_one_are_parts_of_it():
    """The inner ones are not recorded by themselves, and the whole has the bits of what is written."""
    net = network()
    store = ParameterStore(net, OptimizerConfig())
    step = GradientStep(store, losses_of(net), module=net, max_grad_norm=None)
    double = Accelerated(lambda x: 2 * x)

    def both(rate, x, index):
        return {**step(rate, double(x), index, 0.1), "sum": double(x).sum()}

    whole, plain_net = Accelerated(both, net), network()
    plain = GradientStep(
        ParameterStore(plain_net, OptimizerConfig()), losses_of(plain_net), module=plain_net, max_grad_norm=None
    )
    for turn in range(SEEN_BEFORE + 3):
        x, index = draw(ROWS, 3, seed=turn), torch.arange(ROWS) % 4
        found, expected = whole(0.01, x, index), plain(0.01, 2 * x, index, 0.1)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), turn
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain_net.parameters(), strict=True)), turn
    assert whole.num_recordings == 1
    assert (double.num_recordings, step._step.num_recordings) == (0, 0)


def test_a_failure_within_a_recorded_function_leaves_others_recording():
    def fail(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Accelerated(fail)(draw(3))
    double = Accelerated(lambda x: 2 * x)
    for _ in range(SEEN_BEFORE + 1):
        double(draw(3))
    assert double.num_recordings == 1


def rounded(x, place):
    place.copy_((x.exp().view(torch.int32) & -16).view(torch.float32))
    return place.sum()


def complex_parts(x, place):
    place.copy_(torch.view_as_real(torch.complex(x[::2].exp(), x[1::2].exp())).reshape(-1))
    return place.sum()


def read_as_bytes(x, place):
    made = x.exp()
    first = made.view(torch.uint8)[:4].sum()
    place.copy_(made)
    return place.sum() + first


@pytest.mark.parametrize("function", [rounded, complex_parts, read_as_bytes])
def test_results_that_are_kept_may_be_seen_as_other_types_before(function):
    place = torch.zeros(10_000)
    recorded = Accelerated(lambda x: function(x, place))
    for turn in range(SEEN_BEFORE + 3):
        x = draw(10_000, seed=turn)
        found, kept = recorded(x), place.clone()
        with SmallArithmetic():
            assert torch.equal(found, function(x, place)), turn
        assert torch.equal(kept, place), turn


def test_an_operator_may_give_different_numbers_of_results():
    """The first layer's inputs need no gradient, so its backward gives a tensor less than the second's."""
    net = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    step = GradientStep(ParameterStore(net, OptimizerConfig()), losses_of(net), module=net, max_grad_norm=None)
    for turn in range(SEEN_BEFORE + 2):
        step(0.01, draw(ROWS, 3, seed=turn), torch.arange(ROWS) % 4, 0.1)
    assert step._step.num_recordings == 1


def test_what_cannot_be_run_again_is_refused_with_its_results(monkeypatch):
    def fail(*_):
        raise ValueError("no such overload")

    monkeypatch.setattr(recording, "Recording", fail)
    double = Accelerated(lambda x: 2 * x)
    for turn in range(SEEN_BEFORE + 3):
        assert double(torch.tensor([float(turn)])).item() == 2 * turn
    assert double.num_recordings == 0
    assert "no such overload" in double.why_plain


@pytest.mark.parametrize("function", [torch.tanh, torch.exp])
def test_operators_that_are_told_where_to_write_have_the_same_bits(function):
    place = torch.zeros(100)

    def tell(x):
        function(x, out=place)
        return 2 * place

    recorded = Accelerated(tell)
    for turn in range(SEEN_BEFORE + 3):
        x = draw(100, seed=turn)
        assert torch.equal(recorded(x), 2 * function(x)), turn


def test_copies_that_need_not_wait():
    place = torch.zeros(5)

    def keep(x):
        place.copy_(x, non_blocking=True)
        return 2 * place

    recorded = Accelerated(keep)
    for turn in range(SEEN_BEFORE + 3):
        assert recorded(torch.full((5,), float(turn))).tolist() == [2.0 * turn] * 5


@pytest.mark.parametrize("other", [torch.empty(2, device="meta"), torch.ones(2, dtype=torch.complex64)])
def test_inputs_of_another_kind_are_not_recorded(other):
    """Also if nothing is computed from them."""
    function = Accelerated(lambda x, y: x + y.shape[0])
    for _ in range(SEEN_BEFORE + 3):
        assert torch.equal(function(torch.ones(3), other), torch.full((3,), 3.0))
    assert function.num_recordings == 0
    assert "inputs" in function.why_plain
