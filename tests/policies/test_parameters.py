"""Flat parameters: the same steps as torch's own optimizers, and a state that comes back bit for bit."""

import copy

import pytest
import torch
from torch import nn

from rl_training.contracts.errors import CheckpointError
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import ParameterStore

OPTIMIZERS = {
    "adam": (
        OptimizerConfig("adam", eps=1e-5, betas=(0.8, 0.99)),
        lambda p: torch.optim.Adam(p, eps=1e-5, betas=(0.8, 0.99)),
    ),
    "adam-decay": (
        OptimizerConfig("adam", weight_decay=0.1),
        lambda p: torch.optim.Adam(p, eps=1e-5, weight_decay=0.1),
    ),
    "adamw": (
        OptimizerConfig("adamw", weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, eps=1e-5, weight_decay=0.1),
    ),
    "rmsprop": (
        OptimizerConfig("rmsprop", alpha=0.9, eps=1e-5),
        lambda p: torch.optim.RMSprop(p, alpha=0.9, eps=1e-5),
    ),
    "rmsprop-momentum": (
        OptimizerConfig("rmsprop", momentum=0.5),
        lambda p: torch.optim.RMSprop(p, eps=1e-5, momentum=0.5),
    ),
    "sgd": (
        OptimizerConfig("sgd"),
        lambda p: torch.optim.SGD(p, lr=1.0),
    ),
    "sgd-momentum": (
        OptimizerConfig("sgd", momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, weight_decay=0.01),
    ),
}
each_optimizer = pytest.mark.parametrize(("config", "reference"), OPTIMIZERS.values(), ids=OPTIMIZERS)


def make_module(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(module, step):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    return (module(x) - x.sum(1, keepdim=True)).square().mean()


def run(module, store, steps):
    for step in steps:
        store.step(loss_of(module, step), learning_rate=0.01, max_grad_norm=0.5)


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def gathered(store, flat):
    """The numbers of all parameters in a flat tensor, without what lies between them."""
    return torch.cat([flat[span] for span, _ in store.slices.values()])


class TestViews:
    def test_weights_are_those_of_the_module(self):
        module, before = make_module(), make_module()
        store = ParameterStore(module, OptimizerConfig())
        assert equal(module, before)
        assert torch.equal(gathered(store, store.flat), torch.cat([p.flatten() for p in before.parameters()]))

    def test_each_begins_at_a_multiple_of_64_bytes_and_nothing_is_learned_between_them(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig(weight_decay=0.1))
        run(module, store, range(3))
        assert [p.data_ptr() % 64 for p in module.parameters()] == [store.flat.data_ptr() % 64] * 4
        between = torch.ones_like(store.flat, dtype=torch.bool)
        for span, _ in store.slices.values():
            between[span] = False
        assert between.any()
        assert not store.flat[between].any()
        assert not store.grad[between].any()

    def test_both_ways(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig())
        with torch.no_grad():
            store.flat.fill_(0.5)
            assert all((p == 0.5).all() for p in module.parameters())
            module[2].bias.fill_(7.0)
        assert store.flat[store.slices["2.bias"][0]].tolist() == [7.0, 7.0]

    def test_gradients_are_views_too(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig())
        loss_of(module, 0).backward()
        assert store.grad.abs().sum() > 0
        assert torch.equal(gathered(store, store.grad), torch.cat([p.grad.flatten() for p in module.parameters()]))
        assert torch.equal(store.flat.grad, store.grad)

    def test_still_views_after_steps_and_a_load(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig())
        run(module, store, range(3))
        module.load_state_dict(make_module(1).state_dict())
        assert torch.equal(gathered(store, store.flat), torch.cat([p.flatten() for p in module.parameters()]))
        before = store.flat.clone()
        run(module, store, range(1))
        assert not torch.equal(store.flat, before)
        assert torch.equal(gathered(store, store.flat), torch.cat([p.flatten() for p in module.parameters()]))


class TestSteps:
    @each_optimizer
    @pytest.mark.parametrize("max_grad_norm", [None, 0.3])
    def test_as_torch_does_them(self, config, reference, max_grad_norm):
        ours, theirs = make_module(), make_module()
        store, optimizer = ParameterStore(ours, config), reference(theirs.parameters())
        norms = []
        for step in range(20):
            learning_rate = 0.02 * (1 - step / 40)  # a schedule
            norm = store.step(loss_of(ours, step), learning_rate=learning_rate, max_grad_norm=max_grad_norm)

            optimizer.zero_grad()
            loss_of(theirs, step).backward()
            expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm or float("inf"))
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            norms.append((norm.item(), expected.item()))
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
        for norm, expected in norms:
            assert norm == pytest.approx(expected, rel=1e-4)
        assert max(norm for norm, _ in norms) > 0.3  # clipping was at work

    def test_sgd_by_hand(self):
        # loss 3 a + 4 b: gradient (3, 4) of norm 5. Clipped to 1: (0.6, 0.8); learning rate 0.5: (-0.3, -0.4)
        module = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(module.weight)
        store = ParameterStore(module, OptimizerConfig("sgd"))
        norm = store.step(module(torch.tensor([3.0, 4.0])).sum(), learning_rate=0.5, max_grad_norm=1.0)
        assert norm.item() == 5.0
        assert module.weight[0].tolist() == pytest.approx([-0.3, -0.4], rel=1e-5)
        # a gradient within the limit is left as it is
        norm = store.step(module(torch.tensor([0.3, 0.4])).sum(), learning_rate=1.0, max_grad_norm=1.0)
        assert norm.item() == pytest.approx(0.5)
        assert module.weight[0].tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)

    def test_learning_rate_zero_changes_nothing(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig("adam"))
        store.step(loss_of(module, 0), learning_rate=0.0, max_grad_norm=None)
        assert equal(module, make_module())

    def test_gradients_do_not_add_up_over_steps(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig("sgd"))
        first = store.step(loss_of(module, 0), learning_rate=0.0, max_grad_norm=None)
        second = store.step(loss_of(module, 0), learning_rate=0.0, max_grad_norm=None)
        assert first.item() == second.item()


class TestState:
    @each_optimizer
    def test_round_trip(self, config, reference):
        first = make_module()
        first_store = ParameterStore(first, config)
        run(first, first_store, range(5))
        weights, slots = copy.deepcopy((first.state_dict(), first_store.state_dict()))

        second = make_module(seed=9)
        second_store = ParameterStore(second, config)
        run(second, second_store, range(2))  # a past of its own, which must not show
        second.load_state_dict(weights)
        second_store.load_state_dict(slots)
        assert equal(first, second)
        run(first, first_store, range(5, 10))
        run(second, second_store, range(5, 10))
        assert equal(first, second)

    @each_optimizer
    def test_round_trip_before_the_first_step(self, config, reference):
        first, second = make_module(), make_module()
        first_store, second_store = ParameterStore(first, config), ParameterStore(second, config)
        second_store.load_state_dict(copy.deepcopy(first_store.state_dict()))
        run(first, first_store, range(3))
        run(second, second_store, range(3))
        assert equal(first, second)

    @each_optimizer
    def test_the_state_is_the_same_after_a_load(self, config, reference):
        module = make_module()
        store = ParameterStore(module, config)
        run(module, store, range(3))
        before = copy.deepcopy(store.state_dict())
        store.load_state_dict(before)
        after = store.state_dict()
        assert after.keys() == before.keys()
        assert after["step"] == before["step"]
        for slot in before.keys() - {"kind", "step"}:
            assert all(torch.equal(before[slot][name], after[slot][name]) for name in before[slot])

    def test_slots_have_the_names_and_shapes_of_the_parameters(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig("adam"))
        run(module, store, range(4))
        state = store.state_dict()
        assert state["step"] == 4
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        for slot in ("exp_avg", "exp_avg_sq"):
            assert {name: tuple(tensor.shape) for name, tensor in state[slot].items()} == shapes
        assert state.keys() == {"kind", "step", "exp_avg", "exp_avg_sq"}

    def test_a_slot_belongs_to_its_parameter(self):
        # only the last bias has a gradient, so only its average is not zero
        module = make_module()
        store = ParameterStore(module, OptimizerConfig("adam", betas=(0.5, 0.5)))
        store.step(module[2].bias.sum(), learning_rate=0.1, max_grad_norm=None)
        averages = store.state_dict()["exp_avg"]
        assert averages["2.bias"].tolist() == [0.5, 0.5]  # 0.5 * 0 + 0.5 * 1
        assert all((averages[name] == 0).all() for name in ("0.weight", "0.bias", "2.weight"))

    def saved(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig("adam"))
        run(module, store, range(1))
        return copy.deepcopy(store.state_dict())

    def test_another_shape_is_refused(self):
        state = self.saved()
        state["exp_avg"]["0.bias"] = torch.zeros(4)
        with pytest.raises(CheckpointError, match=r"exp_avg of 0\.bias has shape"):
            ParameterStore(make_module(), OptimizerConfig("adam")).load_state_dict(state)

    def test_missing_and_unknown_parameters_are_refused(self):
        state = self.saved()
        state["exp_avg_sq"]["3.bias"] = state["exp_avg_sq"].pop("2.bias")
        with pytest.raises(CheckpointError, match=r"missing 2\.bias; unknown 3\.bias"):
            ParameterStore(make_module(), OptimizerConfig("adam")).load_state_dict(state)

    def test_a_refused_state_changes_nothing(self):
        module = make_module()
        store = ParameterStore(module, OptimizerConfig("adam"))
        run(module, store, range(2))
        state = self.saved()
        state["exp_avg_sq"]["2.bias"] = torch.zeros(9)
        with pytest.raises(CheckpointError):
            store.load_state_dict(state)
        assert store.state_dict()["step"] == 2

    def test_the_state_of_another_optimizer_is_refused(self):
        with pytest.raises(CheckpointError, match="the optimizer is RMSprop, the checkpoint's Adam"):
            ParameterStore(make_module(), OptimizerConfig("rmsprop")).load_state_dict(self.saved())


def test_what_was_not_a_number_is_gone_after_a_load():
    """Clipping by a norm that is NaN makes all gradients NaN, also those between the parameters."""
    module = make_module()
    store = ParameterStore(module, OptimizerConfig())
    run(module, store, range(1))
    weights, slots = copy.deepcopy(module.state_dict()), copy.deepcopy(store.state_dict())
    store.step(loss_of(module, 1) * float("nan"), learning_rate=0.01, max_grad_norm=0.5)
    module.load_state_dict(weights)
    store.load_state_dict(slots)
    norm = store.step(loss_of(module, 1), learning_rate=0.01, max_grad_norm=0.5)
    assert torch.isfinite(norm)
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("dtypes", [[], [torch.float32, torch.float64]])
def test_parameters_are_of_one_type(dtypes):
    module = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes])
    with pytest.raises(ValueError, match="must have the same dtype"):
        ParameterStore(module, OptimizerConfig())
