"""Adam, targets and norms in compiled recordings: torch's bits, each thread on what it wrote itself."""

import pytest
import torch
from torch import nn

from rl_training.accelerate.native import flat
from rl_training.accelerate.native.flat import Owners
from rl_training.accelerate.native.libraries import blas
from rl_training.accelerate.native.memory import Access, Statement, by_all, by_first, by_share
from rl_training.accelerate.recording import Accelerated
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore
from tests.accelerate.native_harness import HAS_COMPILER, settle
from tests.accelerate.test_native import compare, threads  # noqa: F401 - a fixture
from tests.accelerate.test_recording import draw

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")


def writing(ranges, is_wide=True):
    return Statement("", [Access(ranges, True)], is_wide)


class TestOwners:
    def test_each_goes_on_with_what_it_wrote(self):
        weights = torch.zeros(192)
        owners = Owners(2)
        owners.note(writing(by_share(weights[:64].view(2, 32), 2)))
        owners.note(writing(by_share(weights[64:].view(2, 64), 2)))
        assert owners.cuts([weights]) == (((0, 32), (64, 128)), ((32, 64), (128, 192)))

    def test_also_for_others_of_the_same_size(self):
        weights, target = torch.zeros(64), torch.zeros(64)
        owners = Owners(2)
        owners.note(writing(tuple(reversed(by_share(weights, 2)))))
        assert owners.cuts([target, weights]) == (((32, 64),), ((0, 32),))

    def test_who_wrote_last_counts(self):
        weights = torch.zeros(64)
        owners = Owners(2)
        owners.note(writing(by_share(weights, 2)))
        owners.note(writing(tuple(reversed(by_share(weights, 2)))))
        assert owners.cuts([weights]) == (((32, 64),), ((0, 32),))

    @pytest.mark.parametrize("kind", ["nothing is known", "one wrote all", "nobody knows who"])
    def test_else_they_share_evenly(self, kind):
        weights = torch.zeros(100)
        owners = Owners(2)
        if kind == "one wrote all":
            owners.note(writing(by_first(weights, 2), is_wide=False))
        elif kind == "nobody knows who":
            owners.note(writing(by_all(weights, 2)))
        (first,), (second,) = owners.cuts([weights])
        assert first == (0, 64)  # whole blocks
        assert second == (64, 100)

    def test_gaps_are_filled(self):
        weights = torch.zeros(96)
        owners = Owners(2)
        owners.note(writing(by_share(weights[:80], 2)))
        cuts = owners.cuts([weights])
        assert sorted(part for parts in cuts for part in parts)[0][0] == 0
        assert sum(high - low for parts in cuts for low, high in parts) == 96


@pytest.mark.parametrize("size", [64, 4096, 20_000, 20_005])
def test_targets_follow(size, threads):  # noqa: F811
    state = draw(size, seed=7)

    def function(x):
        moved = state.clone()
        moved.lerp_(x, 0.005)
        return {"y": moved + 0}

    program = compare(function, draw(size))
    assert "lerp_" not in program.foreign


@pytest.mark.parametrize("size", [100, 9_999, 10_000, 10_001, 70_003])
def test_norms(size, threads):  # noqa: F811
    """Those of few numbers are numpy's, see `numpy_kernels`."""
    program = compare(lambda x: {"y": x.norm()}, draw(size), seeds=20)
    assert ("linalg_vector_norm" in program.foreign) == (size <= 10_000 and not blas())


def test_a_large_share_is_left_to_torch():
    program = compare(lambda x: {"y": (x + 0).lerp_(x * 2, 0.9)}, draw(20_000))
    assert "lerp_" in program.foreign


class Twin(nn.Module):
    """Two networks at once, as critics are."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(draw(2, 8, 128, seed=1) / 8)
        self.second = nn.Parameter(draw(2, 128, 128, seed=2) / 64)
        self.bias = nn.Parameter(draw(2, 1, 128, seed=3))

    def forward(self, x):
        return torch.baddbmm(self.bias, torch.bmm(x.expand(2, -1, -1), self.first).relu(), self.second)


def learn(config, num_steps=6):
    """Steps of a twin; the recording, and its weights and state after each step."""
    net = Twin()
    net.__class__.__module__ = "rl_training.tests"  # as if it were the package's own
    store = ParameterStore(net, config)

    def losses(x):
        return {"loss": net(x).square().mean()}

    step = GradientStep(store, losses, module=net, max_grad_norm=None)
    x = draw(64, 8, seed=4)
    recording = settle(step._step, 1e-3, x)
    found = [step(1e-3 / (i + 1), x)["gradient_norm"] for i in range(num_steps)]
    return recording, [store.flat.detach().clone(), *store.optimizer.state[store.flat].values(), *found]


def statements(num_threads=2):
    """Those of a step of two networks, as C."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        recording, _ = learn(OptimizerConfig(eps=1e-8))
    finally:
        torch.set_num_threads(before)
    program = recording.library._program
    assert not {"_fused_adam_", "linalg_vector_norm"} & set(program.foreign)
    return [statement.code for segment in program._segments for statement in segment]


START, SIZE = 2 * 8 * 128, 128 * 128  # of the second layer, the first network's weights before the other's


def test_adam_is_divided_by_network():
    (adam,) = [text for text in statements() if "adam(" in text]
    assert f"{{{{{START + SIZE}, {START + 2 * SIZE}}}" in adam  # the first of the second thread's parts


@pytest.mark.parametrize(("num_threads", "is_shared"), [(1, 0), (2, 1)])
def test_weights_that_threads_share_are_written_past_the_caches(num_threads, is_shared):
    (adam,) = [text for text in statements(num_threads) if "adam(" in text]
    assert f", {is_shared}); }}" in adam


def test_norms_are_added_by_those_who_wrote_the_numbers():
    """In one order all the same, so they take turns; what is small is left to the one before."""
    turns = [text for text in statements() if "add_squares(" in text]
    assert [text.split(")")[0] for text in turns] == ["if (t == 0", "if (t == 1"]
    assert f"+ 0, {START + SIZE}," in turns[0]  # with both networks' first layers
    assert f"+ {START + SIZE}, {SIZE + 2 * 128}," in turns[1]  # with both biases
    assert ["memset" in text for text in turns] == [True, False]
    assert ["norm_from" in text for text in turns] == [False, True]


@pytest.mark.parametrize(
    ("config", "is_compiled"),
    [
        (OptimizerConfig(eps=1e-8), True),
        (OptimizerConfig(eps=1e-5, betas=(0.8, 0.99)), True),
        (OptimizerConfig(weight_decay=0.1), False),
        (OptimizerConfig(name="adamw", weight_decay=0.1), False),
    ],
)
def test_adam_has_torchs_bits(config, is_compiled, monkeypatch, threads):  # noqa: F811
    recording, mine = learn(config)
    names = recording.library._program.foreign
    assert any("adam" in name for name in names) != is_compiled
    monkeypatch.setattr(flat, "is_adam_known", lambda: False)
    recording, its = learn(config)
    assert any("adam" in name for name in recording.library._program.foreign)
    assert all(map(torch.equal, mine, its))


@pytest.mark.parametrize("name", ["is_adam_known", "is_lerp_known", "is_norm_known"])
def test_other_numbers_are_not_torchs(name, monkeypatch):
    assert getattr(flat, name)()

    class Library:
        """Computes something else."""

        def __getattr__(self, _):
            return lambda *args: 0.0

    monkeypatch.setattr(flat, "library", Library)
    assert not getattr(flat, name).__wrapped__()


def test_what_is_not_known_stays_torchs(monkeypatch):
    for name in ("is_adam_known", "is_lerp_known", "is_norm_known"):
        monkeypatch.setattr(flat, name, lambda: False)
    state = draw(20_000, seed=7)

    def function(x):
        moved = state.clone()
        moved.lerp_(x, 0.005)
        return {"y": moved + 0, "norm": x.norm()}

    recorded = Accelerated(function)
    recording = settle(recorded, draw(20_000))
    assert {"lerp_", "linalg_vector_norm"} <= set(recording.library._program.foreign)
