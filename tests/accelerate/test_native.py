"""Compiled recordings give the bits of the recorded kernels, and what cannot be compiled runs as before."""

import ctypes
import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.accelerate.kernels import Recording
from rl_training.accelerate.native import compiler, few, products, takeover
from rl_training.accelerate.native.memory import Access, by_all, by_first, by_share
from rl_training.accelerate.native.program import Program
from rl_training.accelerate.numpy_kernels import SmallArithmetic
from rl_training.accelerate.recording import Accelerated
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore
from tests.accelerate.native_harness import HAS_COMPILER, compile_now, settle
from tests.accelerate.test_recording import draw, losses_of, network, warm

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def compare(function, *inputs, seeds=3):
    """Compile a function of tensors, and compare it with itself as written."""
    recorded = Accelerated(function)
    recording = settle(recorded, *inputs)
    assert recording.library is not None, "refused"
    assert recording.kernels is recording.library.kernels
    program = recording.library._program
    for seed in range(seeds):
        fresh = [
            draw(*x.shape, seed=seed + 10 * i) if x.dtype == torch.float32 and seed else x for i, x in enumerate(inputs)
        ]
        found = recorded(*fresh)
        with SmallArithmetic(), torch.no_grad():
            expected = function(*fresh)
        for name, its in expected.items():
            assert found[name].dtype == its.dtype, name
            assert torch.equal(torch.nan_to_num(found[name], 77.0), torch.nan_to_num(its, 77.0)), name
    return program


# ---------------------------------------------------------------------------------------------------------------------
# Operators
# ---------------------------------------------------------------------------------------------------------------------

ELEMENTS = {
    "abs": lambda x, y: x.abs(),
    "add": lambda x, y: x + y,
    "add a number": lambda x, y: x + 0.1,
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "broadcast": lambda x, y: x * y[:, :1] + y[:1],
    "cat": lambda x, y: torch.cat([x, y[:, :3]], 1),
    "clamp": lambda x, y: x.clamp(-0.5, 0.7),
    "clamp from above": lambda x, y: x.clamp(max=0.1),
    "clamp from below": lambda x, y: x.clamp(min=0.1),
    "compare": lambda x, y: ((x > y) & (x <= 1.0)).float() * (x == x).float() + (x != y).float() + (x < 0.1).float(),
    "div": lambda x, y: x / y,
    "divide a number": lambda x, y: 1.0 / x,
    "in place": lambda x, y: x.clone().add_(y).mul_(0.3).sub_(y).div_(y),
    "masked": lambda x, y: x * (y > 0),
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "neg": lambda x, y: -x,
    "powers": lambda x, y: x**2 + y**1,
    "relu": lambda x, y: x.relu(),
    "rsub": lambda x, y: 1 - x,
    "sqrt": lambda x, y: (x * x).sqrt(),
    "sub": lambda x, y: x - y,
    "transposed": lambda x, y: (x.t() + 1).t() * y,
    "where": lambda x, y: torch.where(x > y, x, y),
    "where a number": lambda x, y: torch.where(x > 0, x, 0.0),
    "zeros": lambda x, y: torch.zeros_like(x).add_(y),
}


def elements(x, y):
    return {name: function(x, y) for name, function in ELEMENTS.items()}


@pytest.mark.parametrize("shape", [(6, 5), (130, 97)])
def test_operations_on_elements_have_the_same_bits(shape, threads):
    program = compare(elements, draw(*shape), draw(*shape, seed=1))
    assert program.foreign == []


def test_what_is_not_a_number_stays_so():
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-45])
    x, y = (values.contiguous() for values in torch.meshgrid(special, special, indexing="ij"))
    compare(elements, x, y, seeds=1)


REDUCTIONS = {
    "all": lambda x: x.sum(),
    "all of a mean": lambda x: x.mean(),
    "columns": lambda x: x.sum(0),
    "columns of a mean": lambda x: x.mean(0),
    "largest": lambda x: x[:4].amax(0),
    "smallest": lambda x: x[:3].amin(0),
    "few": lambda x: x[:, :5].sum(-1),
    "few of a mean": lambda x: x[:, :6].mean(-1),
    "few rows": lambda x: x[:6].sum(0),
    "very few": lambda x: x[:, :4].sum(-1),
    "rows": lambda x: x.sum(-1, keepdim=True),
    "rows of a mean": lambda x: x.mean(-1),
    "truth": lambda x: (x[:2] > 0).sum(0) / 2.0,
    "blocks": lambda x: x.view(2, len(x) // 2, -1).sum(1, keepdim=True),
    "the same number": lambda x: x.sum(0).expand(3, -1).sum(0),
}


@pytest.mark.parametrize(
    "shape", [(8, 6), (12, 33), (16, 256), (64, 64), (256, 256), (300, 128), (1024, 64), (514, 40)]
)
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_sums_have_the_same_bits(shape, threads):
    compare(lambda x: {name: function(x) for name, function in REDUCTIONS.items()}, draw(*shape))


@pytest.mark.parametrize("shape", [(12, 33), (300, 128), (514, 40)])
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_sums_by_one_thread_and_by_three(shape, threads):
    compare(lambda x: {name: function(x) for name, function in REDUCTIONS.items()}, draw(*shape))


@pytest.mark.parametrize(("rows", "columns"), [(4, 2), (64, 6)])
def test_single_elements_of_rows(rows, columns):
    index = torch.arange(rows)[:, None] % columns

    def function(x, added):
        return {"chosen": x.gather(1, index), "added": x.scatter_add(1, index, added)}

    assert compare(function, draw(rows, columns), draw(rows, 1, seed=1)).foreign == []


# ---------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------


def matrix(rows, columns, is_turned, seed):
    return draw(columns, rows, seed=seed).t() if is_turned else draw(rows, columns, seed=seed)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(256, 256, 256), (128, 64, 17), (256, 23, 256), (23, 256, 256), (8, 64, 64), (100, 130, 300), (3, 70, 20)],
)
def test_products_have_the_same_bits(m, n, k, threads):
    """Of matrices as they are, and of either one transposed."""
    for turned in [(False, False), (False, True), (True, False)]:
        a, b, bias = matrix(m, k, turned[0], 1), matrix(k, n, turned[1], 2), draw(n, seed=3)
        compare(lambda a, b, bias: {"mm": a @ b, "addmm": torch.addmm(bias, a, b).relu()}, a, b, bias)


@pytest.mark.parametrize(
    ("n", "k"), [(2, 256), (3, 256), (4, 256), (5, 256), (6, 256), (7, 256), (3, 64), (6, 300), (2, 401)]
)
def test_a_last_layer_with_few_outputs_has_the_same_bits(n, k, threads):
    """Forward and back, as for actions of few dimensions."""

    def function(x, weight, bias, gradient):
        return {
            "forward": torch.addmm(bias, x, weight.t()),
            "without a bias": x @ weight.t(),
            "to the inputs": gradient @ weight,
            "to the weights": gradient.t() @ x,
        }

    program = compare(function, draw(256, k), draw(n, k, seed=1), draw(n, seed=2), draw(256, n, seed=3))
    of_gradient = (1, 6, 256), (1536, 1, 6), (1, 256, 256), (65536, 256, 1)
    is_known = few._is_known(256, 6, 256, True, threads) and products.chunks_of_rows(of_gradient, False, False, threads)
    if is_known and k != 401:  # else it is not known on this machine, or for an odd length
        assert program.foreign == []


@pytest.mark.parametrize("shape", [(6,), (1,), (256, 6), (256, 1)])
def test_what_is_added_to_few_columns_may_have_any_shape(shape, threads):
    """It is not always one number for each column."""

    def function(added, x, weight):
        return {"sum": torch.addmm(added, x, weight.t())}

    compare(function, draw(*shape), draw(256, 256, seed=1), draw(6, 256, seed=2))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 256])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_products_with_few_columns(m, n):
    a, weight, bias = draw(m, 43), draw(n, 43, seed=1), draw(n, seed=2)
    assert torch.allclose(few._multiply(a, weight, bias), torch.addmm(bias, a, weight.t()), atol=1e-5)
    assert torch.allclose(few._multiply(a, weight, None), a @ weight.t(), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 40])
@pytest.mark.parametrize("n", [64, 128, 100])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_products_with_few_rows(m, n, chunk):
    a, b = draw(1, m, 40), draw(1, 40, n, seed=1)
    found = products._multiply(a, b, None, chunk)
    assert torch.allclose(found, a @ b, atol=1e-5)
    if chunk == 1:  # rounded, and then added up
        one_by_one = torch.zeros(1, m, n)
        for i in range(40):
            one_by_one += a[:, :, i : i + 1] * b[:, i : i + 1]
        assert torch.equal(found, one_by_one)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_many_products_at_once(count, threads):
    a, b, bias = draw(count, 128, 96), draw(count, 96, 64, seed=1), draw(count, 1, 64, seed=2)
    compare(lambda a, b, bias: {"baddbmm": torch.baddbmm(bias, a, b).relu(), "bmm": torch.bmm(a, b)}, a, b, bias)
    compare(lambda x, b: {"one": torch.bmm(x.expand(count, -1, -1), b).sum(1)}, a[0], b)


@pytest.mark.parametrize(("m", "k", "n"), [(256, 256, 17), (128, 64, 32), (64, 96, 6), (256, 64, 40), (100, 64, 17)])
def test_few_columns_are_computed_as_rows(m, k, n, threads):
    """As gradients of the weights of a first layer are asked for."""
    program = compare(lambda gradient, x: {"y": gradient.t() @ x}, draw(k, m), draw(k, n, seed=1))
    rows = [product.c.shape[1] for product in program._products]
    assert rows in ([], [n if 6 <= n <= 32 and m % 64 == 0 else m])  # none: its order is not known on this machine


@pytest.mark.parametrize("chunk", [128, 256])
@pytest.mark.parametrize("m", [6, 7, 8, 9, 10, 11, 12, 128, 130])
def test_rows_that_are_left_over(m, chunk):
    """Each row is what it is among others."""
    a, b = draw(1, 132, 256), draw(1, 256, 256, seed=1)
    whole = products._multiply(a, b, None, chunk)
    assert torch.allclose(whole, a @ b, atol=1e-3)
    assert torch.equal(products._multiply(a[:, :m], b, None, chunk), whole[:, :m])


KNOWN = (1, 128, 96), (128 * 96, 96, 1), (1, 96, 64), (96 * 64, 1, 96), False, False


def test_a_matrix_is_packed_once_until_it_changes(threads):
    if not products.find_chunk(*KNOWN):
        pytest.skip("the order of torch's sums is not known on this machine")

    def function(x, y, weight):
        weight = weight + 0
        found = {"one": x @ weight.t(), "other": y @ weight.t()}
        weight.mul_(2)
        return {**found, "changed": x @ weight.t()}

    program = compare(function, draw(128, 96), draw(128, 96, seed=1), draw(64, 96, seed=2))
    assert [product.is_packed for product in program._products] == [False, True, False]
    copies = [product.packed.shape[1] for product in program._products]
    assert copies == [threads] * 3  # rows are shared, and each thread reads all of the matrix


def test_by_what_threads_share_a_product():
    def split(count, m, n, k, threads=2):
        a, b = torch.empty(count, m, k), torch.empty(count, k, n)
        return products.Product(a, b, torch.empty(count, m, n), k).split(threads)

    assert split(1, 256, 256, 256) == "by rows"
    assert split(1, 32, 512, 256) == "by columns"
    assert split(1, 64, 96, 256) == "by rows"  # too few columns for two panels
    assert split(2, 32, 512, 256) == "by matrices"
    assert split(3, 256, 256, 256) == "by rows"
    assert split(1, 32, 64, 64) == split(1, 256, 256, 256, threads=1) == "by the first"


def test_an_activation_is_taken_along_past_what_is_apart(threads):
    """A sum of something else, as the gradient of a bias is, may come between a product and its activation."""
    if not products.find_chunk(*KNOWN):
        pytest.skip("the order of torch's sums is not known on this machine")

    def function(x, weight, other):
        product = x @ weight.t()
        return {"sum": other.sum(0), "relu": product.relu()}

    program = compare(function, draw(128, 96), draw(64, 96, seed=1), draw(128, 192, seed=2))
    assert [product.relu for product in program._products] == [True]

    def not_apart(x, weight, other):
        product = x @ weight.t()
        return {"sum": product.sum(0), "relu": product.relu()}

    program = compare(not_apart, draw(128, 96), draw(64, 96, seed=1), draw(128, 192, seed=2))
    assert [product.relu for product in program._products] == [False]


def test_large_products_are_not_left_to_torch(threads):
    """As long as the order of torch's sums is found out, which is so on the machines that this was made for."""
    if not products.find_chunk((1, 256, 256), (65536, 256, 1), (1, 256, 256), (65536, 256, 1), True, False):
        pytest.skip("the order of torch's sums is not known on this machine")
    inputs = draw(256, 256), draw(256, 256), draw(256)
    program = compare(lambda a, b, bias: {"relu": torch.addmm(bias, a, b).relu()}, *inputs)
    assert program.foreign == []


@pytest.mark.parametrize(
    ("rows", "threads"),
    [(0, 2), (1, 2), (5, 1), (5, 2), (6, 2), (50, 1), (50, 2), (50, 3), (128, 2)],
    indirect=["threads"],
)
def test_rows_of_zeros_are_left_out(rows, threads):
    """As they come from the smaller of two critics; with few rows, with none, with all."""

    def function(x, chosen, weight, after):
        masked = x * (chosen < rows)
        return {"one": torch.where(after <= 0, 0.0, masked @ weight), "another": -masked @ weight}

    x, weight, after = draw(128, 96), draw(96, 64, seed=1), draw(128, 64, seed=2)
    chosen = torch.from_numpy(np.random.default_rng(0).permutation(128).astype(np.float32))[:, None]
    program = compare(function, x, chosen, weight, after, seeds=1)
    if program.foreign == []:
        assert "product_of_some(&" in program.source()


def test_what_is_multiplied_by_itself_is_not_lost(threads):
    """The derivative of an activation of a product, by the product itself."""

    def function(a, b):
        product = a @ b
        return {"masked": torch.ops.aten.threshold_backward(product, product, 0)}

    compare(function, draw(128, 96), draw(96, 64, seed=1))


def test_zero_times_what_is_infinite_is_not_zero(threads):
    x, weight = draw(128, 96), draw(96, 64, seed=1)
    weight[3, 5], weight[7, 9] = float("inf"), float("nan")
    mask = (torch.arange(128) % 2)[:, None].float()
    compare(lambda x, mask, weight: {"product": (x * (mask > 0)) @ weight}, x, mask, weight, seeds=1)


def test_many_columns_do_not_fill_the_stack():
    compare(lambda x: {"sum": x.sum(0)}, draw(8, 1 << 19))


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ()])
def test_kernels_for_other_machines(flags, monkeypatch):
    """Narrower vectors, and whatever the machine has: products are sums in the same order."""
    other = compiler.build("kernels.c", '#include "kernels.c"', flags)
    other.pack.argtypes, other.product.argtypes = products.library().pack.argtypes, products.library().product.argtypes
    for m, n, k in itertools.product((1, 5, 6, 13), (3, 16, 40, 64, 100), (1, 9, 40)):
        a, b, bias = draw(1, m, k), draw(1, k, n, seed=1), draw(1, 1, n, seed=2)
        expected = products._multiply(a, b, bias, 8)
        with monkeypatch.context() as patch:
            patch.setattr(products, "library", lambda: other)
            assert torch.equal(products._multiply(a, b, bias, 8), expected)
        assert torch.allclose(expected, torch.baddbmm(bias, a, b), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Whole gradient steps
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "width", "rows", "max_grad_norm"),
    [("relu", 16, 7, None), ("relu", 256, 64, 0.5), ("tanh", 16, 7, 0.5), ("tanh", 256, 64, None)],
)
def test_gradient_steps_go_on_to_the_bit(activation, width, rows, max_grad_norm, threads):
    """One network learns with recorded kernels, another with compiled ones from some step on."""
    nets = [network(activation, width) for _ in range(2)]
    stores = [ParameterStore(net, OptimizerConfig()) for net in nets]
    steps = [
        GradientStep(store, losses_of(net), module=net, max_grad_norm=max_grad_norm)
        for net, store in zip(nets, stores, strict=True)
    ]
    for turn in range(12):
        inputs = (0.01 / (turn + 1), draw(rows, 3, seed=turn), torch.arange(rows) % 4, 0.1 + 0.01 * turn)
        if turn == 6:
            recording = next(iter(steps[1]._step._recordings.values()))
            recording.takeover.run = lambda own=recording.takeover: _at_once(own)
        found = [step(*inputs) for step in steps]
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0]), turn
        assert torch.equal(stores[0].flat, stores[1].flat), turn
    recordings = [next(iter(step._step._recordings.values())) for step in steps]
    assert recordings[1].library is not None
    assert recordings[0].library is None
    assert len(recordings[1].kernels) < len(recordings[0].kernels)


def _at_once(own):
    """Compile and take over within one call."""
    compile_now(own)
    own._take_over()


# ---------------------------------------------------------------------------------------------------------------------
# When, and when not
# ---------------------------------------------------------------------------------------------------------------------


def test_short_runs_compile_nothing(monkeypatch):
    monkeypatch.setattr(takeover, "Library", None)
    function = Accelerated(lambda x: 2 * x)
    for _ in range(50):
        function(torch.ones(3))
    assert next(iter(function._recordings.values())).takeover._thread is None


def refused(monkeypatch, **changes):
    for name, value in changes.items():
        monkeypatch.setattr(takeover, name, value)
    net = nn.Linear(3, 4)
    function = Accelerated(lambda x: net(x).relu() * 2, net)
    warm(function, draw(5, 3))
    own = next(iter(function._recordings.values())).takeover
    recording = settle(function, draw(5, 3))
    assert recording.library is None
    x = draw(5, 3, seed=1)
    with torch.no_grad():
        assert torch.allclose(function(x), net(x).relu() * 2, atol=1e-6)
    return own.refusal


def test_a_compiler_that_fails_changes_nothing(monkeypatch):
    def build(*args):
        raise compiler.NotCompiledError("out of paper")

    assert "out of paper" in refused(monkeypatch, build=build)


def test_no_compiler_changes_nothing(monkeypatch):
    assert "no C compiler" in refused(monkeypatch, find_compiler=lambda: None)


def test_an_unforeseen_recording_changes_nothing(monkeypatch):
    def program(*args):
        raise ZeroDivisionError("of all things")

    assert "of all things" in refused(monkeypatch, Program=program)


def test_what_gives_other_numbers_is_not_used(monkeypatch):
    class Wrong(takeover.Library):
        def __init__(self, program):
            super().__init__(program)
            results = [tensor for tensor in program.pointers.tensors if tensor.numel() == 5 * 4]
            self.kernels.append(lambda: [result.fill_(3.0) for result in results])

    assert "different results" in refused(monkeypatch, Library=Wrong)


def test_fewer_threads_than_were_asked_for_do_all_of_the_work():
    """As a limit of the machine may have it: what a thread that is missing would have done is done by another."""
    program = """
import torch
from tests.accelerate.native_harness import settle
from tests.accelerate.test_native import draw
from rl_training.accelerate.recording import Accelerated
torch.set_num_threads(3)
function = Accelerated(lambda a, b: ((a @ b).relu() * 2).sum(0))
a, b = draw(256, 128), draw(128, 192, seed=1)
recording = settle(function, a, b)
assert recording.library is not None, "refused"
with torch.no_grad():
    assert torch.allclose(function(a, b), ((a @ b).relu() * 2).sum(0), rtol=1e-5)
"""
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_is_not_written_is_noticed(monkeypatch):
    """What the recorded kernels left in memory does not help compiled ones that forget something."""
    monkeypatch.setattr(takeover.Library, "__init__", _forgetful(takeover.Library.__init__))
    assert "different results" in refused(monkeypatch)


def _forgetful(init):
    def forgetful(self, program):
        init(self, program)
        self.kernels.pop(0)

    return forgetful


def test_without_more_threads_nothing_changes(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    function = Accelerated(lambda x: 2 * x)
    warm(function, torch.ones(3))
    monkeypatch.setattr(takeover, "SECONDS_BEFORE", -1.0)
    monkeypatch.setattr(takeover.threading.Thread, "start", start)
    assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    assert not takeover._compiling.locked()
    assert next(iter(function._recordings.values())).takeover is None


def test_a_compiler_that_is_not_one(monkeypatch):
    monkeypatch.setattr(compiler, "find_compiler", lambda: "/bin/false")
    with pytest.raises(compiler.NotCompiledError):
        compiler.build("this", "int one(void) { return 1; }")
    monkeypatch.setattr(compiler, "find_compiler", lambda: "/no/such/compiler")
    with pytest.raises(compiler.NotCompiledError):
        compiler.build("this", "int one(void) { return 1; }")


ENDS = """
import time
import torch
from rl_training.accelerate.native import takeover
from rl_training.accelerate.recording import Accelerated
takeover.SECONDS_BEFORE = -1.0
function = Accelerated(lambda a, b: (a @ b).relu())
begin = time.perf_counter()
while time.perf_counter() < begin + {seconds}:
    function(torch.ones(64, 64), torch.ones(64, 64))
{end}
"""


@pytest.mark.parametrize(("seconds", "end", "code"), [(0.05, "", 0), (0.5, "raise SystemExit(3)", 3), (1.5, "", 0)])
def test_a_program_may_end_while_something_is_compiled(seconds, end, code, tmp_path):
    """It ends as it would otherwise, and soon. Nothing is in the cache, so that compilers have to run."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", ENDS.format(seconds=seconds, end=end)]
    own = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=own)
    assert (ended.returncode, ended.stderr) == (code, "")
    assert time.perf_counter() - begin < 60


def test_a_compiler_that_hangs_is_stopped(monkeypatch, tmp_path):
    (tmp_path / "cc").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setattr(compiler, "find_compiler", lambda: str(tmp_path / "cc"))
    monkeypatch.setattr(compiler, "SECONDS", 0.2)
    with pytest.raises(compiler.NotCompiledError, match="stopped"):
        compiler.build("this", "int one(void) { return 1; }")


KILLED = """
import os, threading, time
from rl_training.accelerate.native import compiler
compiler.find_compiler = lambda: {cc!r}
threading.Thread(target=compiler.build, args=("this", "int one(void) {{ return 1; }}"), daemon=True).start()
while not os.path.exists({began!r}):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


def test_nothing_of_a_compiler_stays_behind_a_killed_program(monkeypatch, tmp_path):
    """Neither what the compiler has started, nor, from the next start on, files."""
    cc, began = tmp_path / "cc", tmp_path / "began"
    cc.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > $TMPDIR/part\nmv $TMPDIR/part {began}\nwait\n")
    cc.chmod(0o755)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = KILLED.format(cc=str(cc), began=str(began))
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(temporary)}, timeout=120)
    assert killed.returncode == -9
    pids = began.read_text().split()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]

    (left,) = temporary.iterdir()
    other = temporary / f"rl_training_{os.getpid()}_under_way"
    other.mkdir()
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(temporary))
    compiler._tidy.cache_clear()
    compiler.build("this", "int one(void) { return 1; }")
    assert list(temporary.iterdir()) == [other], f"{left} is removed, and nothing of a process that lives"


def test_errors_in_c_are_told():
    with pytest.raises(compiler.NotCompiledError, match="recording"):
        compiler.build("a recording", "this is not C")
    assert isinstance(compiler.build("a recording", "int one(void) { return 1; }"), ctypes.CDLL)


def test_weights_that_were_moved_are_recorded_again():
    """A compiled recording knows addresses; a network that got new memory has a new one."""
    net = nn.Linear(3, 4)
    function = Accelerated(lambda x: net(x) * 2, net)
    settle(function, draw(5, 3))
    net.weight.data = torch.ones(4, 3)
    x = draw(5, 3, seed=1)
    with torch.no_grad():
        assert torch.allclose(function(x), net(x) * 2, atol=1e-6)


def test_memory_outlives_the_check():
    """Programs own memory, for packed matrices; it must not be given back while they run."""
    a, b = draw(64, 96), draw(128, 96, seed=1).t()
    function = Accelerated(lambda a, b: a @ b)
    recording = settle(function, a, b)
    assert isinstance(recording, Recording)
    assert recording.takeover is None
    junk = [torch.full((96 * 128,), float("nan")) for _ in range(50)]
    assert torch.isfinite(function(a, b)).all()
    del junk


# ---------------------------------------------------------------------------------------------------------------------
# Who waits for whom
# ---------------------------------------------------------------------------------------------------------------------


def test_threads_wait_only_where_they_must():
    x = torch.zeros(4, 8)
    mine, own, everybody = by_first(x, 2), by_share(x, 2), by_all(x, 2)
    for one, other, waits in [
        (Access(own, True), Access(own, False), False),  # each reads what it wrote
        (Access(own, True), Access(everybody, False), True),
        (Access(own, True), Access(mine, False), True),
        (Access(mine, True), Access(mine, True), False),
        (Access(everybody, False), Access(everybody, False), False),
        (Access(everybody, False), Access(own, True), True),
        (Access(by_share(x[:2], 2), True), Access(by_share(x[2:], 2), True), False),  # other memory
    ]:
        assert one.disturbs(other) == other.disturbs(one) == waits


def test_loops_are_joined_and_what_nobody_reads_is_not_written():
    function = Accelerated(lambda x, y: ((x + y) * 2 - y).relu())
    program = settle(function, draw(40, 40), draw(40, 40))
    source = program.library._program.source().split("void part_0_0")[1].split("void")[0]
    assert source.count("for (") == 1
    assert source.count("] = ") == 1
    assert isinstance(program.library._program, Program)


class TestCache:
    """Libraries are kept for the next run, where nobody else can put one."""

    SOURCE = "int two(void) { return 2; }"

    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path / "cache" / "rl_training"

    def test_what_was_compiled_is_not_compiled_again(self, home, monkeypatch):
        compiler.build("this", self.SOURCE)
        (kept,) = home.glob("*.so")
        assert kept.stat().st_mode & 0o077 == 0
        monkeypatch.setattr(compiler, "_run", lambda *_: pytest.fail("compiled again"))
        assert compiler.build("this", self.SOURCE).two() == 2

    def test_another_source_is_another_library(self, home):
        compiler.build("this", self.SOURCE)
        compiler.build("this", "int three(void) { return 3; }")
        assert len(list(home.glob("*.so"))) == 2

    @pytest.mark.parametrize("place", ["folder", "file"])
    def test_what_others_can_write_to_is_not_loaded(self, home, place, monkeypatch):
        compiler.build("this", self.SOURCE)
        (kept,) = home.glob("*.so")
        (home if place == "folder" else kept).chmod(0o777)
        runs = []
        run = compiler._run
        monkeypatch.setattr(compiler, "_run", lambda *args: (runs.append(args), run(*args)))
        assert compiler.build("this", self.SOURCE).two() == 2
        assert runs, "it was taken from a place that others can write to"

    def test_links_are_not_followed(self, home, tmp_path):
        home.parent.mkdir()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        home.symlink_to(elsewhere)
        assert compiler.cache_folder() is None
        assert compiler.build("this", self.SOURCE).two() == 2
        assert list(elsewhere.iterdir()) == []

    def test_damaged_libraries_are_compiled_again(self, home):
        compiler.build("this", self.SOURCE)
        (kept,) = home.glob("*.so")
        kept.unlink()
        kept.write_bytes(b"not a library")
        kept.chmod(0o700)
        assert compiler.build("this", self.SOURCE).two() == 2
