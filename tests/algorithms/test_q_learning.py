"""DQN and its kin: one update against plain numpy, what it touches, and small problems with known values."""

import copy
import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.algorithms.c51 import C51Config
from rl_training.algorithms.registry import registry
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import EnvSpec, Regime
from rl_training.policies.noisy import noisy_layers
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.q_networks import QNetworkConfig

A, B, D = 3, 6, 4
NAMES = ["dqn", "c51", "qrdqn", "iqn", "rainbow"]
SPEC = EnvSpec(spaces.Box(-9.0, 9.0, (D,)), spaces.Discrete(A))
SMALL = {
    "dqn": {},
    "c51": {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0},
    "rainbow": {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0},
    "qrdqn": {"num_quantiles": 4},
    "iqn": {"num_fractions": 4, "num_target_fractions": 5, "num_greedy_fractions": 6, "embedding_size": 7},
}
PLAIN = {"double": False, "dueling": False, "noisy": False}
FORMS = [dict(zip(PLAIN, flags, strict=True)) for flags in itertools.product((False, True), repeat=3)]

each_algorithm = pytest.mark.parametrize("name", NAMES)
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(k for k in form if form[k]) or "plain")


@pytest.fixture(autouse=True)
def one_thread():
    """On networks this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name, *, seed=0, spec=SPEC, **settings):
    settings = {"network": QNetworkConfig((8, 8)), **SMALL[name], **PLAIN, **settings}
    algorithm = registry()[name]
    return algorithm.algorithm(algorithm.config(**settings), spec, torch.device("cpu"), np.random.default_rng(seed))


def make_batch(seed=0, rows=B):
    rng = np.random.default_rng(seed)
    return TransitionBatch(
        obs=torch.from_numpy(rng.normal(size=(rows, D)).astype(np.float32)),
        action=torch.from_numpy(rng.integers(A, size=rows)),
        reward=torch.from_numpy(rng.normal(size=rows).astype(np.float32)),
        discount=torch.from_numpy(rng.choice([0.0, 0.9, 0.81], size=rows).astype(np.float32)),
        next_obs=torch.from_numpy(rng.normal(size=(rows, D)).astype(np.float32)),
        weight=torch.from_numpy(rng.uniform(0.5, 1.0, size=rows).astype(np.float32)),
        indices=torch.arange(rows),
    )


def progress(updates=0, env_steps=0):
    return Progress(env_steps=env_steps, horizon=1000, updates=updates)


def weights(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def differing(one, two):
    return {name for name in one if not torch.equal(one[name], two[name])}


def part_ways(algorithm, seed=7):
    """Give the target network other weights than the online network, so that mixing them up shows."""
    with torch.no_grad():
        noise = np.random.default_rng(seed).normal(size=algorithm.target.flat.shape, scale=0.3)
        algorithm.target.flat.add_(torch.from_numpy(noise).float())


# ----------------------------------------------------------------------------------------------------------------------
# The loss, once more in plain numpy
# ----------------------------------------------------------------------------------------------------------------------


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class NumpyNetwork:
    """The network in numpy: weights as they are now, with the noise that `noise_of` will have held."""

    def __init__(self, algorithm, module):
        self.config = algorithm.config
        self.p = {name: value.double().numpy() for name, value in weights(module).items()}
        self.module = module

    def linear(self, name, x):
        weight, bias = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        if f"{name}.weight_sigma" in self.p:
            layer = self.module.get_submodule(name)
            weight = weight + self.p[f"{name}.weight_sigma"] * layer.weight_noise.double().numpy()
            bias = bias + self.p[f"{name}.bias_sigma"] * layer.bias_noise.double().numpy()
        return x @ weight.T + bias

    def duel(self, outputs):
        if not self.config.dueling:
            return outputs
        return outputs[:, :1] + outputs[:, 1:] - outputs[:, 1:].mean(1, keepdims=True)

    def features(self, obs):
        hidden = np.maximum(self.linear("hidden.1", obs.double().numpy()), 0)
        return np.maximum(self.linear("hidden.3", hidden), 0)

    def __call__(self, obs):
        return self.duel(self.linear("head", self.features(obs)).reshape(len(obs), A + self.config.dueling, -1))

    def at(self, obs, fractions):
        waves = np.cos(np.pi * np.arange(self.config.embedding_size) * fractions[:, :, None])
        embedding = np.maximum(self.linear("embedding", waves), 0)
        rows = self.linear("head", self.features(obs)[:, None] * embedding)
        return self.duel(rows.transpose(0, 2, 1))


def numpy_rows(algorithm, online, target, batch, rng):
    """Loss, priority and value of each row, from the papers."""
    name = next(name for name in NAMES if type(algorithm) is registry()[name].algorithm)
    config, rows = algorithm.config, np.arange(len(batch.reward))
    action, reward, discount = (x.numpy() for x in (batch.action, batch.reward, batch.discount))
    chooser = online if config.double else target
    if name == "dqn":
        best = chooser(batch.next_obs)[:, :, 0].argmax(1)
        error = online(batch.obs)[rows, action, 0] - (reward + discount * target(batch.next_obs)[rows, best, 0])
        huber = np.where(np.abs(error) <= 1, 0.5 * error**2, np.abs(error) - 0.5)
        loss = huber if config.loss == "huber" else error**2
        return loss, np.abs(error), online(batch.obs)[rows, action, 0]
    if name in ("c51", "rainbow"):
        support = np.linspace(config.v_min, config.v_max, config.num_atoms)
        best = (softmax(chooser(batch.next_obs)) @ support).argmax(1)
        next_probs = softmax(target(batch.next_obs))[rows, best]
        moved = np.clip(reward[:, None] + discount[:, None] * support, config.v_min, config.v_max)
        near = np.maximum(0, 1 - np.abs(moved[:, :, None] - support) / (support[1] - support[0]))
        projected = (next_probs[:, :, None] * near).sum(1)
        predicted = softmax(online(batch.obs))[rows, action]
        divergence = (projected * (np.log(np.maximum(projected, 1e-300)) - np.log(predicted))).sum(1)
        return divergence, divergence, predicted @ support
    if name == "qrdqn":
        best = chooser(batch.next_obs).mean(2).argmax(1)
        next_quantiles = target(batch.next_obs)[rows, best]
        predicted = online(batch.obs)[rows, action]
        fractions = np.broadcast_to((np.arange(config.num_quantiles) + 0.5) / config.num_quantiles, predicted.shape)
    else:
        fractions = rng.random((len(rows), config.num_fractions), dtype=np.float32)
        next_fractions = rng.random((len(rows), config.num_target_fractions), dtype=np.float32)
        middles = np.tile((np.arange(config.num_greedy_fractions) + 0.5) / config.num_greedy_fractions, (len(rows), 1))
        best = chooser.at(batch.next_obs, middles).mean(2).argmax(1)
        next_quantiles = target.at(batch.next_obs, next_fractions)[rows, best]
        predicted = online.at(batch.obs, fractions)[rows, action]
    goal = reward[:, None] + discount[:, None] * next_quantiles
    u = goal[:, None, :] - predicted[:, :, None]
    huber = np.where(np.abs(u) <= config.kappa, 0.5 * u**2, config.kappa * (np.abs(u) - 0.5 * config.kappa))
    loss = (np.abs(fractions[:, :, None] - (u < 0)) * huber / config.kappa).mean(2).sum(1)
    return loss, loss, predicted.mean(1)


def check_against_numpy(algorithm):
    part_ways(algorithm)
    network, batch = algorithm.policy.network, make_batch()
    rng = copy.deepcopy(algorithm.rng)
    online, target = NumpyNetwork(algorithm, network), NumpyNetwork(algorithm, algorithm.target.module)
    result = algorithm.update(batch, progress())
    # the stream gives the noise of both networks first; after the update, it still stands in their buffers
    rng.standard_normal(2 * sum(x.in_features + x.out_features for x in noisy_layers(network)), dtype=np.float32)
    loss, priority, value = numpy_rows(algorithm, online, target, batch, rng)
    assert algorithm.rng.bit_generator.state == rng.bit_generator.state
    assert result.metrics["loss/critic"].item() == pytest.approx((batch.weight.numpy() * loss).mean(), rel=1e-4)
    assert result.metrics["value/q_mean"].item() == pytest.approx(value.mean(), rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(result.priorities.numpy(), priority, rtol=1e-3, atol=1e-5)
    assert result.priorities.shape == (B,)
    assert not result.priorities.requires_grad


@each_algorithm
@each_form
def test_the_loss_is_that_of_the_paper(name, form):
    check_against_numpy(make(name, **form))


def test_the_squared_loss_of_dqn():
    check_against_numpy(make("dqn", loss="mse"))


@pytest.mark.parametrize("name", ["qrdqn", "iqn"])
def test_another_kappa(name):
    check_against_numpy(make(name, kappa=0.25))


def test_double_changes_the_target():
    # the same networks and batch, and not the same loss
    losses = []
    for double in (False, True):
        algorithm = make("dqn", double=double)
        part_ways(algorithm)
        losses.append(algorithm.update(make_batch(), progress()).metrics["loss/critic"].item())
    assert losses[0] != losses[1]


@each_algorithm
def test_termination_hides_what_comes_next(name):
    results = []
    for scale in (1.0, 100.0):
        batch = make_batch()
        batch = batch._replace(discount=torch.zeros(B), next_obs=scale * batch.next_obs)
        results.append(make(name).update(batch, progress()).metrics["loss/critic"].item())
    assert results[0] == pytest.approx(results[1], rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# What an update does
# ----------------------------------------------------------------------------------------------------------------------


@each_algorithm
@each_form
def test_every_form_makes_a_step(name, form):
    algorithm = make(name, **form)
    network, target = algorithm.policy.network, algorithm.target.module
    before, target_before = weights(network), weights(target)
    result = algorithm.update(make_batch(), progress())
    assert result.num_updates == 1
    assert set(result.metrics) == {
        "loss/critic", "value/q_mean", "policy/epsilon", "train/learning_rate", "train/gradient_norm",
    }  # fmt: skip
    assert all(np.isfinite(float(value)) for value in result.metrics.values())
    assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in result.metrics.values())
    assert differing(before, weights(network)) == set(before)  # every parameter has moved ...
    assert differing(target_before, weights(target)) == set()  # ... and none of the target
    assert all(p.grad is None for p in target.parameters())
    assert not algorithm.policy.training
    assert not any(layer.noise_on for module in (network, target) for layer in noisy_layers(module))


@each_algorithm
def test_the_target_follows_when_it_is_due(name):
    algorithm = make(name, target_update_every=3, learning_rate=1e-2)
    network, target = algorithm.policy.network, algorithm.target.module
    copied = []
    for updates in range(7):
        algorithm.update(make_batch(updates), progress(updates))
        copied.append(differing(weights(network), weights(target)) == set())
    assert copied == [False, False, True, False, False, True, False]  # after gradient steps 3 and 6


def test_the_target_follows_by_tau():
    algorithm = make("dqn", target_update_every=1, tau=0.25, learning_rate=1e-2)
    before = algorithm.target.flat.clone()
    algorithm.update(make_batch(), progress())
    torch.testing.assert_close(
        algorithm.target.flat, 0.75 * before + 0.25 * algorithm.store.flat.detach()[: len(before)]
    )
    assert not torch.equal(algorithm.target.flat, before)


@each_algorithm
def test_weights_scale_the_loss(name):
    losses, batch = [], make_batch()
    for weight in (torch.ones(B), 0.5 * torch.ones(B), torch.tensor([1.0] + [0.0] * (B - 1))):
        algorithm = make(name, max_grad_norm=None)
        result = algorithm.update(batch._replace(weight=weight), progress())
        losses.append((result.metrics["loss/critic"].item(), result.metrics["train/gradient_norm"].item()))
    assert losses[1] == pytest.approx((0.5 * losses[0][0], 0.5 * losses[0][1]), rel=1e-5)
    # a single row with weight: the sixth part of its own loss
    alone = TransitionBatch(*(x[:1] for x in batch[:7]))._replace(weight=torch.ones(1))
    if name != "iqn":  # whose fractions depend on the number of rows
        single = make(name).update(alone, progress()).metrics["loss/critic"].item()
        assert losses[2][0] == pytest.approx(single / B, rel=1e-4)


@each_algorithm
def test_priorities_do_not_depend_on_weights(name):
    one, two = (make(name).update(make_batch()._replace(weight=w * torch.ones(B)), progress()) for w in (1.0, 0.1))
    assert torch.equal(one.priorities, two.priorities)
    assert (one.priorities >= 0).all()
    assert (one.priorities > 0).any()


@each_algorithm
def test_gradients_are_clipped(name):
    norms = []
    for max_grad_norm in (None, 0.1):
        algorithm = make(name, max_grad_norm=max_grad_norm, optimizer=OptimizerConfig("sgd"), learning_rate=1.0)
        before = algorithm.store.flat.detach().clone()
        batch = make_batch()._replace(reward=10 * torch.ones(B))
        result = algorithm.update(batch, progress())
        norms.append((result.metrics["train/gradient_norm"].item(), (algorithm.store.flat - before).norm().item()))
    assert norms[0][1] == pytest.approx(norms[0][0], rel=1e-4)
    assert norms[1][0] == pytest.approx(norms[0][0], rel=1e-4)
    assert norms[1][1] == pytest.approx(0.1, rel=1e-3)


def test_schedules():
    algorithm = make("dqn", learning_rate=Linear(1e-2, 0.0), epsilon=Linear(1.0, 0.0, until=0.5))
    assert algorithm.policy.epsilon.item() == 1.0
    assert algorithm.explore(progress(env_steps=250)) is algorithm.policy
    assert algorithm.policy.epsilon.item() == 0.5
    metrics = algorithm.update(make_batch(), progress(env_steps=250)).metrics
    assert metrics["policy/epsilon"] == 0.5
    assert metrics["train/learning_rate"] == pytest.approx(7.5e-3)
    before = weights(algorithm.policy)
    algorithm.update(make_batch(), progress(env_steps=1000))
    assert differing(before, weights(algorithm.policy)) == set()  # a learning rate of zero


@each_algorithm
@pytest.mark.parametrize("noisy", [False, True])
def test_equal_seeds_give_equal_bits_whatever_the_global_streams_do(name, noisy):
    results = []
    for global_seed, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002
        before = torch.get_rng_state()
        algorithm = make(name, noisy=noisy, seed=seed)
        for updates in range(3):
            algorithm.update(make_batch(updates), progress(updates))
        assert torch.equal(torch.get_rng_state(), before)
        results.append(weights(algorithm.policy))
    assert differing(results[0], results[1]) == set()
    assert differing(results[0], results[2]) != set()


@each_algorithm
@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=["plain", "all"])
def test_the_state_comes_back_bit_for_bit(name, form):
    first, second = (make(name, **form, seed=seed, target_update_every=2, learning_rate=1e-2) for seed in (0, 9))
    for updates in range(3):
        first.update(make_batch(updates), progress(updates))
    second.update(make_batch(8), progress())  # a past of its own, which must not show
    first.explore(progress(env_steps=30))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.policy.epsilon.item() == first.policy.epsilon.item()
    for updates in range(3, 7):
        results = [algorithm.update(make_batch(updates), progress(updates)) for algorithm in (first, second)]
        assert torch.equal(results[0].priorities, results[1].priorities)
    for one, two in ((first.policy, second.policy), (first.target.module, second.target.module)):
        assert differing(weights(one), weights(two)) == set()
    actions = [x.policy.act(make_batch(rows=50).obs, rng=np.random.default_rng(0)).action for x in (first, second)]
    assert torch.equal(*actions)


@each_algorithm
def test_the_state_names_every_part(name):
    algorithm = make(name, noisy=True)
    state = algorithm.state_dict()
    assert set(state) == {"rng", "policy", "store", "target"}
    assert set(state["policy"]) == {"epsilon"} | set(dict(algorithm.policy.named_parameters()))
    assert {f"network.{key}" for key in state["target"]["module"]} == set(state["policy"]) - {"epsilon"}


@each_algorithm
def test_starting_from_trained_weights(name):
    trained, fresh = make(name, seed=1), make(name)
    trained.update(make_batch(), progress())
    optimizer = copy.deepcopy(fresh.store.state_dict())
    fresh.start_from(copy.deepcopy(dict(trained.policy.state_dict())))
    assert differing(weights(trained.policy), weights(fresh.policy)) == set()
    assert differing(weights(fresh.policy.network), weights(fresh.target.module)) == set()
    assert fresh.store.state_dict() == optimizer


def test_dict_observations():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
    obs = {"a": torch.zeros(B, 2), "b": torch.ones(B, dtype=torch.int64)}
    for name in NAMES:
        algorithm = make(name, spec=EnvSpec(space, SPEC.action_space), double=True)
        result = algorithm.update(make_batch()._replace(obs=obs, next_obs=obs), progress())
        assert torch.isfinite(result.priorities).all()


# ----------------------------------------------------------------------------------------------------------------------
# Settings
# ----------------------------------------------------------------------------------------------------------------------


@each_algorithm
def test_specs(name):
    spec = registry()[name]
    assert spec.regimes == (Regime.OFF_POLICY, Regime.OFFLINE)
    assert spec.action_spaces == (spaces.Discrete,)
    assert spec.default_num_envs == 1


def test_defaults_of_the_family():
    for name in NAMES:
        config = registry()[name].config()
        assert (config.buffer_size, config.batch_size, config.learning_starts) == (1_000_000, 32, 100)
        assert (config.num_steps, config.updates_per_step, config.gamma) == (4, 0.25, 0.99)
        assert (config.tau, config.target_update_every, config.max_grad_norm) == (1.0, 2500, 10.0)
        assert config.optimizer == OptimizerConfig(eps=1e-8)
        assert config.problems() == []


def test_rainbow_is_c51_with_everything():
    config = registry()["rainbow"].config()
    assert isinstance(config, C51Config)
    assert config.double
    assert config.dueling
    assert config.noisy
    assert config.prioritized
    assert (config.n_step, config.priority_exponent, config.epsilon) == (3, 0.5, 0.0)
    plain = C51Config()
    assert (plain.double, plain.dueling, plain.noisy, plain.prioritized) == (False,) * 4


@pytest.mark.parametrize(("v_min", "v_max"), [(1.0, 1.0), (2.0, -2.0)])
def test_a_support_without_width_is_refused(v_min, v_max):
    (problem,) = C51Config(v_min=v_min, v_max=v_max).problems()
    assert problem == f"v_min: must be below v_max, got {v_min:g} and {v_max:g}"


# ----------------------------------------------------------------------------------------------------------------------
# Small problems with known answers
# ----------------------------------------------------------------------------------------------------------------------

TABLE = EnvSpec(spaces.Discrete(2), spaces.Discrete(2))
SOLVERS = {
    "dqn": {},
    "c51": {"num_atoms": 6, "v_min": 0.0, "v_max": 5.0},
    "rainbow": {"num_atoms": 6, "v_min": 0.0, "v_max": 5.0, "double": True, "dueling": True, "noisy": True},
    "qrdqn": {"num_quantiles": 5},
    "iqn": {"num_fractions": 8, "num_target_fractions": 8, "num_greedy_fractions": 8, "embedding_size": 16},
}


def learn(name, batch, steps, **settings):
    settings = {"network": QNetworkConfig((32,)), "target_update_every": 10, **SOLVERS[name], **settings}
    algorithm = make(name, spec=TABLE, learning_rate=Linear(1e-2, 1e-3), **settings)
    for updates in range(steps):
        algorithm.update(batch, Progress(env_steps=updates, horizon=steps, updates=updates))
    return algorithm.policy.network.q_values(torch.tensor([0, 1])).tolist()


def table(*rows):
    """Rows of (state, action, reward, discount, next state)."""
    state, action, reward, discount, next_state = (torch.tensor(column) for column in zip(*rows, strict=True))
    return TransitionBatch(
        state, action, reward.float(), discount.float(), next_state, torch.ones(len(rows)), torch.arange(len(rows))
    )


@each_algorithm
def test_a_decision_process_of_two_states(name):
    # State 1: action 0 ends with 4; action 1 stays there, so is worth 0.5 * 4 = 2.
    # State 0: action 0 leads to state 1 for nothing, 0.5 * 4 = 2; action 1 ends with 1.
    batch = table((1, 0, 4, 0.0, 0), (1, 1, 0, 0.5, 1), (0, 0, 0, 0.5, 1), (0, 1, 1, 0.0, 0))
    q_values = learn(name, batch, 500)
    assert q_values[0] == pytest.approx([2.0, 1.0], abs=0.15)
    assert q_values[1] == pytest.approx([4.0, 2.0], abs=0.15)


@each_algorithm
def test_a_bandit_whose_rewards_vary(name):
    # action 0 gives 0 or 4, action 1 always 1, in either state: means 2 and 1
    rows = [(state, 0, reward, 0.0, 0) for state in (0, 1) for reward in (0, 4)]
    rows += [(state, 1, 1, 0.0, 0) for state in (0, 1)]
    q_values = learn(name, table(*rows), 400, **({"loss": "mse"} if name == "dqn" else {}))
    for values in q_values:
        assert values == pytest.approx([2.0, 1.0], abs=0.3)


def test_distributions_of_the_bandit():
    batch = table(*[(0, action, reward, 0.0, 0) for action, reward in ((0, 0), (0, 4), (1, 1), (1, 1))])
    c51 = make("c51", spec=TABLE, learning_rate=1e-2, **SOLVERS["c51"])
    quantiles = make("qrdqn", spec=TABLE, learning_rate=1e-2, num_quantiles=4, kappa=0.1)
    for updates in range(400):
        c51.update(batch, progress(updates))
        quantiles.update(batch, progress(updates))
    state = torch.tensor([0])
    probs = c51.policy.network(state).softmax(2)[0].tolist()
    assert probs[0] == pytest.approx([0.5, 0, 0, 0, 0.5, 0], abs=0.05)  # atoms 0 to 5
    assert probs[1] == pytest.approx([0, 1, 0, 0, 0, 0], abs=0.05)
    found = quantiles.policy.network(state)[0].tolist()
    assert found[0] == pytest.approx([0, 0, 4, 4], abs=0.2)
    assert found[1] == pytest.approx([1, 1, 1, 1], abs=0.2)
