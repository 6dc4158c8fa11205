"""Networks, encoders and optimizers of others, by name, in every kind of policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rl_training import load, make_agent, register_encoder, register_network, register_optimizer
from rl_training.algorithms.registry import get_spec
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.plugins import ENCODERS, NETWORKS, OPTIMIZERS
from rl_training.contracts.random import random_stream
from rl_training.policies.encoders import Encoder, make_encoder
from rl_training.policies.networks import OwnNetwork, orthogonal_
from rl_training.policies.optimizers import OptimizerConfig, check_optimizer
from rl_training.policies.parameters import ParameterStore
from rl_training.testing.small import small_settings


class Norm(nn.Module):
    """A class from outside of torch and of the package."""

    def __init__(self, num_inputs: int, num_outputs: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_inputs, width), nn.LayerNorm(width), nn.Linear(width, num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 2
        return self.layers(x)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ENCODERS, NETWORKS, OPTIMIZERS):
        monkeypatch.setattr(registry, "_added", {})
    register_network("norm")(Norm)


def agent_of(algo: str, network: dict[str, Any], **settings: Any) -> Any:
    spec = get_spec(algo)
    env = "CartPole-v1" if spaces.Discrete in spec.action_spaces else "Pendulum-v1"
    own = {**small_settings(spec), **settings}
    own["network"] = {**own.get("network", {}), **network}
    return make_agent(algo, env, num_envs=2, eval_every=0, **own)


ACTOR = {"actor": "norm", "actor_kwargs": {"width": 5}}
CRITIC = {"critic": "norm", "critic_kwargs": {"width": 6}}


@pytest.mark.parametrize(
    ("algo", "network", "settings"),
    [
        ("ppo", {**ACTOR, **CRITIC}, {}),
        ("ppo", ACTOR, {}),
        ("trpo", CRITIC, {}),
        ("sac", {**ACTOR, **CRITIC}, {}),
        ("td3", CRITIC, {}),
        ("tqc", {**ACTOR, **CRITIC}, {}),
        ("redq", CRITIC, {}),
        ("droq", CRITIC, {}),
        ("crossq", {**ACTOR, **CRITIC}, {}),
        ("dqn", CRITIC, {"dueling": True}),
        ("c51", CRITIC, {}),
        ("iqn", CRITIC, {}),
    ],
)
def test_every_kind_of_network_learns_and_is_saved(
    algo: str, network: dict[str, Any], settings: dict[str, Any], tmp_path: Any
) -> None:
    agent = agent_of(algo, network, **settings)
    own = [part for part in agent.policy.modules() if isinstance(part, Norm)]
    widths = {part.layers[0].out_features for part in own}
    assert widths == {value["width"] for key, value in network.items() if key.endswith("kwargs")}
    before = [p.detach().clone() for part in own for p in part.parameters()]
    agent.learn(64, progress=False)
    after = [p.detach() for part in own for p in part.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), "all of their weights learn"
    again = load(agent.save(tmp_path / "agent"))
    obs = np.stack([agent._experiment.spec.observation_space.sample() for _ in range(3)])
    np.testing.assert_array_equal(again.predict(obs)[0], agent.predict(obs)[0])
    np.testing.assert_array_equal(again.value(obs), agent.value(obs))
    agent.close()
    again.close()


@pytest.mark.parametrize(
    ("algo", "network", "settings", "expected"),
    [
        ("ppo", {"actor": "nrom"}, {}, r"network > actor: unknown network 'nrom'\. Did you mean 'norm'\?"),
        ("ppo", {"actor": "norm", "actor_kwargs": {"wide": 3}}, {}, "actor_kwargs: the network 'norm' cannot be"),
        ("ppo", {"critic_kwargs": {"width": 3}}, {}, "critic_kwargs: are for a registered network"),
        ("ppo", {"critic": "norm", "shared": True}, {}, "shared: needs actor and critic to be 'mlp', got 'mlp'"),
        ("recurrent_ppo", {"actor": "norm"}, {}, "network > actor: must be 'mlp'; registered networks"),
        ("dqn", {"critic": "norm"}, {"noisy": True}, "'norm' has no noisy layers; set noisy to false"),
        ("sac", {"critic": "narrow"}, {}, r"asked for 1 outputs, so inputs of shape \(2, 4\) should give"),
        ("sac", {"actor": "broken"}, {}, r"'broken' fails on a batch of shape \(2, 3\): ZeroDivisionError"),
        ("sac", {"actor": "number"}, {}, "'number' must return a torch.nn.Module, got 3"),
        ("ppo", {"encoder": "flat", "encoder_kwargs": {"depth": 1}}, {}, "encoder_kwargs: the encoder 'flat' cannot"),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_anything_is_trained(
    algo: str, network: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (1 // 0)

    register_network("narrow")(lambda num_inputs, num_outputs: nn.Linear(num_inputs, 7))
    register_network("broken")(lambda num_inputs, num_outputs: Broken())
    register_network("number")(lambda num_inputs, num_outputs: 3)
    with pytest.raises(ConfigError, match=expected):
        agent_of(algo, network, **settings)


def test_their_weights_begin_as_their_factory_left_them() -> None:
    def constant(num_inputs: int, num_outputs: int) -> nn.Linear:
        layer = nn.Linear(num_inputs, num_outputs)
        nn.init.constant_(layer.weight, 0.25)
        return layer

    register_network("constant")(constant)
    own, ours = OwnNetwork("constant", 3, 2, {}, "actor"), nn.Linear(3, 2)
    orthogonal_(nn.Sequential(own, ours))
    assert torch.equal(own.module.weight, torch.full((2, 3), 0.25))  # type: ignore[union-attr,arg-type]
    assert torch.equal(ours.bias, torch.zeros(2))


def test_encoders_take_arguments_also_inside_of_a_dict() -> None:
    @register_encoder("scaled")
    class Scaled(Encoder):
        def __init__(self, space: Any, factor: float = 1.0) -> None:
            super().__init__()
            self.factor, self.num_features = factor, space.shape[0]

        def forward(self, obs: Any) -> torch.Tensor:
            return obs * self.factor

    encoder = make_encoder("scaled", spaces.Box(-1, 1, (2,)), {"factor": 3.0})
    assert encoder(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]
    agent = agent_of("sac", {"encoder": "scaled", "encoder_kwargs": {"factor": 2.0}})
    assert {part.factor for part in agent.policy.modules() if isinstance(part, Scaled)} == {2.0}
    assert agent.config.to_dict()["algorithm"]["network"]["encoder_kwargs"] == {"factor": 2.0}
    agent.close()


# Optimizers

WORKING = ["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def step(store: ParameterStore, module: nn.Module, seed: int) -> None:
    x = torch.from_numpy(random_stream(seed, "x").normal(size=(5, 3)).astype(np.float32))
    store.step(module(x).square().mean(), learning_rate=0.01, max_grad_norm=None)


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("steps", [0, 3])
def test_classes_of_torch_do_what_they_do_and_come_back_bit_for_bit(name: str, steps: int) -> None:
    config = OptimizerConfig(name, kwargs={"momentum": 0.9} if name == "SGD" else {})
    module, plain = make_module(), make_module()
    store = ParameterStore(module, config)
    torchs = getattr(torch.optim, name)(plain.parameters(), lr=0.01, **config.kwargs)
    for seed in range(steps):
        step(store, module, seed)
        torchs.zero_grad()
        x = torch.from_numpy(random_stream(seed, "x").normal(size=(5, 3)).astype(np.float32))
        plain(x).square().mean().backward()
        torchs.step()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    other = make_module()
    restored = ParameterStore(other, config)
    step(restored, other, 99)  # a past of its own, which must not show
    restored.load_state_dict(store.state_dict())
    other.load_state_dict(module.state_dict())
    for seed in (5, 6):
        step(store, module, seed)
        step(restored, other, seed)
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_slots_are_saved_by_the_names_of_weights() -> None:
    module = make_module()
    store = ParameterStore(module, OptimizerConfig("NAdam"))
    step(store, module, 0)
    state = store.state_dict()
    assert state["kind"] == "NAdam"
    assert state["step"] == 1
    assert set(state["exp_avg"]) == {name for name, _ in module.named_parameters()}
    assert set(state["numbers"]) == {"mu_product"}


class Shared(torch.optim.SGD):
    """Scales its steps by the norm of a whole parameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()
        super().step()


class Counting(torch.optim.SGD):
    """Counts in its group."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        super().step()


class Lists(torch.optim.SGD):
    """Keeps a list."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("history", []).append(1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LBFGS", "LBFGS cannot be used: a step on one flat parameter fails"),
        ("SparseAdam", "SparseAdam cannot be used"),
        ("Adafactor", "treats each parameter as a whole"),
        ("shared", "treats each parameter as a whole"),
        ("counting", "it changes count of its parameter group, which checkpoints do not save"),
        ("lists", "it keeps history, which is neither a number nor a tensor of the parameter's shape"),
        ("nothing", "'nothing' must return a torch.optim.Optimizer, got 3"),
    ],
)
def test_optimizers_that_cannot_be_used_are_refused_with_the_reason(name: str, expected: str) -> None:
    for own in (Shared, Counting, Lists):
        register_optimizer(own.__name__.lower())(own)
    register_optimizer("nothing")(lambda params: 3)
    with pytest.raises(ConfigError, match=expected):
        ParameterStore(make_module(), OptimizerConfig(name))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"name": "adamm"}, r"optimizer > name: unknown optimizer 'adamm'\. Did you mean 'adam"),
        (
            {"name": "adam", "kwargs": {"amsgrad": True}},
            "kwargs: only for other optimizers; adam takes its settings directly",
        ),
        (
            {"name": "RAdam", "kwargs": {"lr": 1}},
            "kwargs: 'lr' is not accepted here; set the algorithm's learning_rate",
        ),
        ({"name": "RAdam", "kwargs": {"wd": 1}}, "optimizer > kwargs: the optimizer 'RAdam' cannot be called with"),
        (
            {"name": "RAdam", "kwargs": {"eps": -1}},
            r"optimizer > kwargs: the optimizer 'RAdam' cannot be made with {'eps': -1}: ValueError",
        ),
    ],
)
def test_settings_of_optimizers_are_checked(optimizer: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        agent_of("ppo", {}, optimizer=optimizer)


def test_what_is_known_of_our_own_optimizers_is_what_they_keep() -> None:
    for config in (OptimizerConfig("adam"), OptimizerConfig("adamw"), OptimizerConfig("rmsprop", momentum=0.5)):
        known, found = ParameterStore(make_module(), config).slots, check_optimizer(config, torch.device("cpu"))
        assert known.tensors == found.tensors
        assert known.numbers.keys() == found.numbers.keys()


@pytest.mark.parametrize("algo", ["ppo", "sac", "dqn"])
def test_algorithms_learn_with_another_optimizer(algo: str) -> None:
    agent = agent_of(algo, {}, optimizer={"name": "NAdam", "kwargs": {"weight_decay": 0.01}}, learning_rate=1e-2)
    before = [p.detach().clone() for p in agent.policy.parameters()]
    agent.learn(64, progress=False)
    assert any(not torch.equal(a, b) for a, b in zip(before, agent.policy.parameters(), strict=True))
    agent.close()
