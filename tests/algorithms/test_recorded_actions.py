"""BC, MARWIL, AWR, AWAC, CRR, IQL and XQL against plain computations with torch's own distributions and optimizers."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch.distributions import Categorical, Normal

from rl_training.algorithms.registry import registry
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.schedule import Cosine
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import OffPolicyNetworkConfig
from rl_training.policies.optimizers import OptimizerConfig

B, OBS, A, M = 12, 3, 2, 4
OBS_SPACE = spaces.Box(-1, 1, (OBS,))
SPACES = {"box": spaces.Box(-1, 1, (A,)), "discrete": spaces.Discrete(A)}
each_space = pytest.mark.parametrize("kind", SPACES)
SIZES = OffPolicyNetworkConfig(actor_sizes=(16, 8), critic_sizes=(16, 8))
RATE, CRITIC_RATE, TAU = 0.01, 0.02, 0.05


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads that share a busy core make small networks a hundred times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name, kind, seed=0, **settings):
    spec = registry()[name]
    names = spec.config.__dataclass_fields__
    common = {"learning_rate": RATE, "critic_learning_rate": CRITIC_RATE, "value_learning_rate": CRITIC_RATE}
    common |= {"tau": TAU, "optimizer": OptimizerConfig("sgd"), "network": SIZES}
    config = spec.config(**{key: value for key, value in {**common, **settings}.items() if key in names})
    rng = np.random.default_rng(seed)
    return spec.algorithm(config, EnvSpec(OBS_SPACE, SPACES[kind]), torch.device("cpu"), rng)


def make_batch(kind, seed=0):
    rng = torch.Generator().manual_seed(seed)
    action = torch.rand(B, A, generator=rng) * 2 - 1
    return TransitionBatch(
        obs=torch.randn(B, OBS, generator=rng),
        action=action if kind == "box" else (action[:, 0] > 0).long(),
        reward=torch.randn(B, generator=rng),
        discount=0.9 * (torch.arange(B) % 4 != 0).float(),
        next_obs=torch.randn(B, OBS, generator=rng),
        weight=torch.rand(B, generator=rng) + 0.5,
        indices=torch.arange(B),
        extras={"return_to_go": 3 * torch.randn(B, generator=rng)},
    )


class Reference:
    """The same learner in plain torch: leaf tensors, one critic at a time, the loss of each network as in its paper."""

    def __init__(self, algorithm, kind):
        self.kind, self.rng = kind, copy.deepcopy(algorithm.rng)
        parts = {name: getattr(algorithm.policy, name, None) for name in ("actor", "critic", "state_value")}
        self.nets = {name: self.leaves(part) for name, part in parts.items() if part is not None}
        self.targets = {name: self.leaves(part, False) for name, part in parts.items() if part is not None}
        self.losses, self.average = {}, None

    @staticmethod
    def leaves(module, learns=True):
        return {name: p.detach().clone().requires_grad_(learns) for name, p in module.named_parameters()}

    def noise(self, *shape):
        if self.kind == "box":
            return torch.from_numpy(self.rng.standard_normal((*shape, A), dtype=np.float32))
        return -torch.from_numpy(self.rng.standard_exponential((*shape, A), dtype=np.float32)).log()

    def outputs(self, weights, obs):
        x = obs
        for layer in ("trunk.hidden.0", "trunk.hidden.2"):
            x = F.relu(F.linear(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"]))
        return F.linear(x, weights["trunk.head.weight"], weights["trunk.head.bias"])

    def distribution(self, obs, weights=None):
        weights = weights or self.nets["actor"]
        outputs = self.outputs(weights, obs)
        return Normal(outputs.tanh(), weights["log_std"].exp()) if self.kind == "box" else Categorical(logits=outputs)

    def log_prob(self, batch):
        found = self.distribution(batch.obs).log_prob(batch.action)
        return found.sum(1) if self.kind == "box" else found

    def sample(self, obs, noise, weights=None):
        distribution = self.distribution(obs, weights)
        if self.kind == "box":
            return (distribution.mean + distribution.stddev * noise).clamp(-1, 1)
        return (distribution.logits + noise).argmax(1)

    @staticmethod
    def ensemble(weights, x):
        values = []
        for e in range(weights["members.layers.0.weight"].shape[0]):
            h = x
            for index in range(3):
                h = h @ weights[f"members.layers.{index}.weight"][e] + weights[f"members.layers.{index}.bias"][e, 0]
                h = F.relu(h) if index < 2 else h
            values.append(h)
        return values

    def q(self, obs, action, weights=None):
        weights = weights or self.nets["critic"]
        if self.kind == "box":
            return [value[:, 0] for value in self.ensemble(weights, torch.cat([obs, action], dim=1))]
        return [value[torch.arange(len(obs)), action] for value in self.ensemble(weights, obs)]

    def smallest(self, obs, action, weights=None):
        return torch.stack(self.q(obs, action, weights)).min(0).values

    def value(self, obs):
        return self.ensemble(self.nets["state_value"], obs)[0][:, 0]

    def learn(self, part, loss, rate):
        weights = self.nets[part]
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight -= rate * gradient
        self.losses[part] = loss.item()

    def learn_actor(self, batch, weight):
        self.learn("actor", -(weight * self.log_prob(batch)).mean(), RATE)

    def learn_critics(self, batch, target):
        errors = [q - target.detach() for q in self.q(batch.obs, batch.action)]
        self.learn("critic", sum((batch.weight * error**2).mean() / 2 for error in errors), CRITIC_RATE)

    def follow(self):
        with torch.no_grad():
            for part, target in self.targets.items():
                for name, value in target.items():
                    value.copy_((1 - TAU) * value + TAU * self.nets[part][name])

    # Algorithms

    def bc(self, batch):
        self.learn_actor(batch, torch.ones(B))

    def bc_deterministic(self, batch):
        error = self.outputs(self.nets["actor"], batch.obs).tanh() - batch.action
        self.learn("actor", (error**2).mean(), RATE)

    def returns(self, batch, weigh):
        advantage = batch.extras["return_to_go"] - self.value(batch.obs)
        self.learn("state_value", (batch.weight * advantage**2).mean() / 2, CRITIC_RATE)
        self.learn_actor(batch, weigh(advantage.detach()))

    def marwil(self, batch):
        def weigh(advantage):
            new = (advantage**2).mean()
            seen = [*(self.average or []), new]
            self.average = seen
            parts = [0.9 ** (len(seen) - 1 - i) for i in range(len(seen))]
            square = sum(part * x for part, x in zip(parts, seen, strict=True)) / sum(parts)
            return (1.5 * advantage / square.sqrt()).exp().clamp(max=5.0)

        self.returns(batch, weigh)

    def awr(self, batch):
        self.returns(batch, lambda a: ((a - a.mean()) / a.std() / 0.5).exp().clamp(max=5.0))

    def sampled(self, batch, target_actor, count, baseline, weigh):
        with torch.no_grad():
            actor = self.targets["actor"] if target_actor else None
            next_action = self.sample(batch.next_obs, self.noise(B), actor)
            next_q = self.smallest(batch.next_obs, next_action, self.targets["critic"])
        self.learn_critics(batch, batch.reward + batch.discount * next_q)
        with torch.no_grad():
            noise = self.noise(count, B)
            values = [self.smallest(batch.obs, self.sample(batch.obs, noise[m])) for m in range(count)]
            advantage = self.smallest(batch.obs, batch.action) - baseline(torch.stack(values))
        self.learn_actor(batch, weigh(advantage))
        self.follow()

    def awac(self, batch):
        def weigh(advantage):
            exponential = (advantage / 0.3).exp()
            return exponential / exponential.mean()

        self.sampled(batch, False, M, lambda q: q.mean(0), weigh)

    def crr(self, batch):
        self.sampled(batch, True, M, lambda q: q.mean(0), lambda a: (a / 0.3).exp().clamp(max=1.2))

    def crr_binary_max(self, batch):
        self.sampled(batch, True, M, lambda q: q.max(0).values, lambda a: (a > 0).float())

    def in_sample(self, batch, value_loss):
        with torch.no_grad():
            q = self.smallest(batch.obs, batch.action, self.targets["critic"])
        self.learn("state_value", (batch.weight * value_loss(q - self.value(batch.obs))).mean(), CRITIC_RATE)
        with torch.no_grad():
            weight = (4.0 * (q - self.value(batch.obs))).exp().clamp(max=1.5)
            target = batch.reward + batch.discount * self.value(batch.next_obs)
        self.learn_actor(batch, weight)
        self.learn_critics(batch, target)
        self.follow()

    def iql(self, batch):
        self.in_sample(batch, lambda u: torch.where(u < 0, 0.2, 0.8) * u**2)

    def xql(self, batch):
        def loss(u):
            z = (u / 0.5).clamp(max=1.0)
            return (z.exp() - z - 1) / math.exp(max(z.max().item(), -1.0))

        self.in_sample(batch, loss)


CASES = {
    "bc": ("bc", {}),
    "bc_deterministic": ("bc", {"deterministic": True}),
    "marwil": ("marwil", {"beta": 1.5, "average_rate": 0.1, "max_weight": 5.0}),
    "awr": ("awr", {"temperature": 0.5, "max_weight": 5.0}),
    "awac": ("awac", {"temperature": 0.3, "num_action_samples": M}),
    "crr": ("crr", {"temperature": 0.3, "max_weight": 1.2}),
    "crr_binary_max": ("crr", {"weighting": "binary", "advantage": "max"}),
    "iql": ("iql", {"expectile": 0.8, "inverse_temperature": 4.0, "max_weight": 1.5}),
    "xql": ("xql", {"loss_temperature": 0.5, "loss_clip": 1.0, "inverse_temperature": 4.0, "max_weight": 1.5}),
}
LOSSES = {"actor": "loss/policy", "critic": "loss/critic", "state_value": "loss/value"}


def close(module, expected):
    for name, value in module.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in CASES for kind in SPACES if (case, kind) != ("bc_deterministic", "discrete")],
)
def test_against_plain_torch(case, kind):
    name, settings = CASES[case]
    algorithm = make(name, kind, **settings)
    reference = Reference(algorithm, kind)
    for updates in range(4):  # recorded from the second or third on
        batch = make_batch(kind, updates)
        metrics = algorithm.update(batch, Progress(horizon=1000, updates=updates)).metrics
        getattr(reference, case)(batch)
        for part, loss in reference.losses.items():
            assert float(metrics[LOSSES[part]]) == pytest.approx(loss, rel=1e-4, abs=1e-6), (part, updates)
        for part, weights in reference.nets.items():
            close(getattr(algorithm.policy, part), weights)
        for target in [part for part in ("critic", "actor") if hasattr(algorithm, f"{part}_target")]:
            close(getattr(algorithm, f"{target}_target").module, reference.targets[target])
        assert algorithm.rng.bit_generator.state == reference.rng.bit_generator.state


def weights(algorithm):
    return torch.cat([p.detach().flatten() for p in algorithm.policy.actor.parameters()])


@each_space
def test_marwil_with_beta_0_is_behaviour_cloning(kind):
    marwil, bc = make("marwil", kind, beta=0.0), make("bc", kind)
    bc.policy.actor.load_state_dict(marwil.policy.actor.state_dict())
    start = weights(bc).clone()
    for seed in range(5):
        for algorithm in (marwil, bc):
            algorithm.update(make_batch(kind, seed), Progress())
    torch.testing.assert_close(weights(marwil), weights(bc))
    assert not torch.equal(weights(bc), start)


@each_space
@pytest.mark.parametrize("name", ["bc", "marwil", "awr", "awac", "crr", "iql", "xql"])
def test_validation_changes_nothing(name, kind):
    algorithm = make(name, kind)
    before = copy.deepcopy(algorithm.state_dict())
    found = algorithm.validate(make_batch(kind))
    assert found
    assert all(math.isfinite(float(value)) and not value.requires_grad for value in found.values())
    after = algorithm.state_dict()
    assert after["rng"] == before["rng"]
    assert all(torch.equal(before["policy"][key], after["policy"][key]) for key in before["policy"])


def test_marwils_running_average_is_part_of_its_state():
    one, two = make("marwil", "box"), make("marwil", "box", seed=1)
    for seed in range(3):
        one.update(make_batch("box", seed), Progress())
    assert one.mean_square[0] > 0
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(one.mean_square, two.mean_square)


def test_a_deterministic_clone_of_discrete_actions_is_refused():
    with pytest.raises(ConfigError, match="deterministic: is for Box actions, got Discrete"):
        make("bc", "discrete", deterministic=True)


def test_the_learning_rate_of_the_actor_alone_may_have_a_schedule():
    algorithm = make("iql", "box", learning_rate=Cosine(0.01, 0.0))
    algorithm.update(make_batch("box"), Progress(env_steps=0, offline_updates=1000, horizon=1000))
    before = weights(algorithm)
    critics = copy.deepcopy(algorithm.policy.critic.state_dict())
    algorithm.update(make_batch("box"), Progress(env_steps=0, offline_updates=1000, horizon=1000))
    assert torch.equal(weights(algorithm), before)
    assert any(not torch.equal(critics[key], value) for key, value in algorithm.policy.critic.state_dict().items())


@pytest.mark.parametrize("name", ["bc", "marwil"])
def test_algorithms_without_q_functions_have_no_critic(name):
    policy = make(name, "discrete").policy
    assert not hasattr(policy, "critic")
    values = policy.value(torch.zeros(5, OBS))
    assert values.shape == (5,)
    assert bool(values.isnan().all()) == (name == "bc")
