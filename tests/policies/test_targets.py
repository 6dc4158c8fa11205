"""Target networks: they follow in one call, learn nothing themselves, and are saved like any module."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.contracts.state import Stateful
from rl_training.policies.noisy import NoisyLinear, noisy_layers, reset_noise
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import ParameterStore
from rl_training.policies.targets import Target


def make_module(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def make(seed=0, module=None):
    module = make_module(seed) if module is None else module
    store = ParameterStore(module, OptimizerConfig("sgd"))
    return module, store, Target(module, store)


def step(module, store):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    store.step((module(x) - 1).square().sum(), learning_rate=0.05, max_grad_norm=None)


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(one, two):
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) for name in one)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def lies_in(module, tensor):
    """Whether all parameters of a module are views of a tensor."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return all(begin <= p.data_ptr() and p.data_ptr() + p.nbytes <= end for p in module.parameters())


def test_starts_as_a_copy():
    module, _, target = make()
    assert type(target.module) is type(module)
    assert equal(state(target.module), state(module))
    assert not {p.data_ptr() for p in module.parameters()} & {p.data_ptr() for p in target.module.parameters()}


def test_nothing_in_it_has_a_gradient():
    _, _, target = make()
    assert not any(p.requires_grad for p in target.module.parameters())
    assert not target.module(torch.ones(2, 3)).requires_grad
    assert not target.module.training


def test_learning_leaves_it_alone():
    module, store, target = make()
    before = state(target.module)
    step(module, store)
    assert equal(state(target.module), before)
    assert not equal(state(module), before)


@pytest.mark.parametrize("tau", [0.005, 0.5])
def test_follows_by_a_share(tau):
    module, store, target = make()
    start = flat(module)
    step(module, store)
    target.update(tau)
    torch.testing.assert_close(flat(target.module), (1 - tau) * start + tau * flat(module))
    target.update(tau)
    torch.testing.assert_close(flat(target.module), (1 - tau) ** 2 * start + (1 - (1 - tau) ** 2) * flat(module))


def test_a_share_of_one_is_a_copy():
    module, store, target = make()
    step(module, store)
    target.update(1.0)
    assert equal(state(target.module), state(module))


def test_buffers_are_copied_whatever_the_share():
    module, store, target = make()
    step(module.train(), store)
    assert module[1].running_mean.abs().sum() > 0
    assert target.module[1].running_mean.abs().sum() == 0
    target.update(0.005)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(target.module[1], name), getattr(module[1], name))
        assert getattr(target.module[1], name).data_ptr() != getattr(module[1], name).data_ptr()


def test_frozen_parameters_are_copied():
    module = make_module()
    module[0].requires_grad_(False)
    module, store, target = make(module=module)
    assert set(store.slices) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    with torch.no_grad():
        module[0].weight.fill_(2.0)  # as a load does
    target.update(1.0)
    assert equal(state(target.module), state(module))


def test_parameters_are_views_of_one_tensor():
    module, store, target = make()
    with torch.no_grad():
        target.flat.fill_(0.5)
    assert all((p == 0.5).all() for p in target.module.parameters())
    assert target.flat.data_ptr() != store.flat.data_ptr()
    step(module, store)
    target.update(1.0)
    assert torch.equal(flat(target.module), flat(module))
    assert lies_in(target.module, target.flat)
    assert lies_in(module, store.flat)


def test_a_part_of_a_larger_module():
    # a store and a target for each part, as actors and critics have them
    whole = nn.ModuleDict({"actor": make_module(0), "critic": make_module(1)})
    _, store, target = make(module=whole["critic"])
    actor = state(whole["actor"])
    step(whole["critic"], store)
    target.update(1.0)
    assert equal(state(target.module), state(whole["critic"]))
    assert equal(state(whole["actor"]), actor)


def test_a_part_of_what_a_store_owns():
    # one store for an encoder and its critics, of which only the critics have a target
    whole = nn.ModuleDict({"encoder": nn.Linear(3, 3), "critic": make_module(1), "last": nn.Linear(2, 2)})
    store = ParameterStore(whole, OptimizerConfig("sgd"))
    target = Target(whole["critic"], store)
    start = flat(whole["critic"])
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    store.step(
        whole["last"](whole["critic"](whole["encoder"](x))).square().sum(), learning_rate=0.05, max_grad_norm=None
    )
    assert torch.equal(flat(target.module), start)
    target.update(0.5)
    torch.testing.assert_close(flat(target.module), 0.5 * start + 0.5 * flat(whole["critic"]))
    target.update(1.0)
    assert equal(state(target.module), state(whole["critic"]))
    assert lies_in(target.module, target.flat)
    assert target.flat.numel() < store.flat.numel()


def test_a_store_of_another_module_is_refused():
    module, other = make_module(), nn.Linear(3, 2)
    with pytest.raises(ValueError, match="a different module"):
        Target(module, ParameterStore(other, OptimizerConfig()))
    with pytest.raises(ValueError, match="a different module"):
        Target(module, ParameterStore(copy.deepcopy(module), OptimizerConfig()))


class Owner(Stateful):
    """As an algorithm owns its parts."""

    def __init__(self, seed):
        self.module, self.store, self.target = make(seed)


def test_the_state_is_that_of_the_module():
    owner = Owner(0)
    assert set(owner.target.state_dict()) == {"module"}
    assert set(owner.state_dict()["target"]["module"]) == set(owner.module.state_dict())


def test_round_trip():
    first, second = Owner(0), Owner(1)
    for owner, steps in ((first, 3), (second, 1)):
        for _ in range(steps):
            step(owner.module, owner.store)
        owner.target.update(0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert equal(state(second.target.module), state(first.target.module))
    assert not equal(state(second.target.module), state(second.module))
    assert lies_in(second.target.module, second.target.flat)
    for owner in (first, second):
        step(owner.module, owner.store)
        owner.target.update(0.1)
    assert equal(state(second.target.module), state(first.target.module))
    assert lies_in(second.target.module, second.target.flat)


def test_torch_can_load_it_as_well():
    module, _, target = make()
    target.module.load_state_dict(make_module(5).state_dict())
    assert torch.equal(flat(target.module), flat(make_module(5)))
    target.update(1.0)
    assert torch.equal(flat(target.module), flat(module))
    assert lies_in(target.module, target.flat)


def test_noise_is_not_followed():
    module, _, target = make(module=nn.Sequential(NoisyLinear(3, 2)))
    reset_noise(module, np.random.default_rng(0))
    target.update(1.0)
    assert not noisy_layers(target.module)[0].noise_on
    assert (noisy_layers(target.module)[0].weight_noise == 0).all()
