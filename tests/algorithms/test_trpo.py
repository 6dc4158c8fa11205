"""TRPO: one update against direct algebra, what every update promises, and every kind of space it takes."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as td

from rl_training import TRPO
from rl_training.algorithms.trpo import TRPOConfig
from rl_training.contracts.errors import ConfigError
from rl_training.functional.policies import normalize
from rl_training.policies.distributions import Bernoulli, Categorical, DiagGaussian, MultiCategorical

SMALL = {"actor_sizes": (8,), "critic_sizes": (8,)}
QUICK = {
    "num_envs": 2, "num_steps": 32, "critic_epochs": 2, "minibatch_size": 32, "eval_every": 0, "network": SMALL
}  # fmt: skip


class Guess(gym.Env):
    """Observations of any kind; an action is worth how near its numbers are to a fixed one. 5 steps."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.time += 1
        reward = -float(np.abs(np.asarray(action, np.float64) - 1.0).mean())
        return self.observation_space.sample(), reward, False, self.time == 5, {}


VECTOR = spaces.Box(-1.0, 1.0, (3,))
DICT = spaces.Dict({"speed": VECTOR, "gear": spaces.Discrete(3)})
PIXELS = spaces.Box(0, 255, (8, 8, 3), np.uint8)
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(2),
    "box": spaces.Box(-2.0, 2.0, (2,)),
}


def make(observation_space=VECTOR, action_space=ACTIONS["discrete"], **settings):
    return TRPO(lambda: Guess(observation_space, action_space), **{**QUICK, **settings})


def logits_of(distribution):
    """The same distribution by torch."""
    if isinstance(distribution, MultiCategorical):
        return [logits_of(part) for part in distribution.parts]
    if isinstance(distribution, Categorical):
        return td.Categorical(logits=distribution.log_probs.detach().clone())
    if isinstance(distribution, Bernoulli):
        return td.Independent(td.Bernoulli(logits=distribution.logits.detach().clone()), 1)
    assert isinstance(distribution, DiagGaussian)
    return td.Independent(td.Normal(distribution.mean.detach().clone(), distribution.log_std.detach().exp()), 1)


def torch_kl(p, q):
    if isinstance(p, list):
        return sum(torch_kl(a, b) for a, b in zip(p, q, strict=True))
    return td.kl_divergence(p, q)


class Recorder:
    """Watches every update from outside: the policy before and after it, its data and its metrics."""

    def __init__(self, agent):
        self.algorithm = agent.algorithm
        self.update = agent.algorithm.update
        self.seen = []
        agent.algorithm.update = self

    def __call__(self, batch, progress):
        before = copy.deepcopy(self.algorithm.policy)
        result = self.update(batch, progress)
        after = copy.deepcopy(self.algorithm.policy)
        data = batch.flatten()
        data = data._replace(**{name: getattr(data, name).clone() for name in ("actions", "advantages", "returns")})
        obs = data.obs
        obs = {key: value.clone() for key, value in obs.items()} if isinstance(obs, dict) else obs.clone()
        self.seen.append((before, after, data._replace(obs=obs), result))
        return result


def learn(agent, steps):
    recorder = Recorder(agent)
    agent.learn(steps, progress=False)
    agent.close()
    return recorder.seen


def weights(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def actor_names(policy):
    return [name for name, _ in policy.named_parameters() if name.startswith(("actor.", "head."))]


# ----------------------------------------------------------------------------------------------------------------------
# One update, once more with explicit matrices
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_one_update_by_explicit_matrices(kind):
    network = {"actor_sizes": (), "critic_sizes": ()}
    agent = make(action_space=ACTIONS[kind], cg_iterations=60, network=network, seed=1)
    ((before, after, data, result),) = learn(agent, 64)
    names, old_weights, obs = actor_names(before), weights(before), data.obs.double()
    sizes = [old_weights[name].numel() for name in names]
    start = torch.cat([old_weights[name].reshape(-1) for name in names]).double()
    actions, advantages = before.head.flatten(data.actions), normalize(data.advantages).double()

    def distribution(flat):
        """Without hidden layers, all there is: outputs that are linear in the observation."""
        parts = dict(zip(names, flat.split(sizes), strict=True))
        outputs = obs @ parts["head.linear.weight"].view(-1, 3).T + parts["head.linear.bias"]
        if kind == "discrete":
            return td.Categorical(logits=outputs)
        return td.Independent(td.Normal(outputs, parts["head.log_std"].exp().expand_as(outputs)), 1)

    old = distribution(start)

    def surrogate(flat):
        return ((distribution(flat).log_prob(actions) - old.log_prob(actions)).exp() * advantages).mean()

    def mean_kl(flat):
        return td.kl_divergence(old, distribution(flat)).mean()

    gradient = torch.autograd.functional.jacobian(surrogate, start)
    fisher = torch.autograd.functional.hessian(mean_kl, start) + 0.1 * torch.eye(len(start), dtype=torch.float64)
    direction = torch.linalg.solve(fisher, gradient)
    step = torch.sqrt(2 * 0.01 / (direction @ fisher @ direction)) * direction
    share = 1.0
    while not (surrogate(start + share * step) > surrogate(start) and mean_kl(start + share * step) <= 0.01):
        share *= 0.8
    expected = start + share * step
    found = torch.cat([weights(after)[name].reshape(-1) for name in names])
    assert result.metrics["policy/step_share"] == share
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-5)
    assert result.metrics["policy/approx_kl"].item() == pytest.approx(mean_kl(expected).item(), rel=1e-2)


def test_the_critic_by_hand():
    """One pass, one minibatch, plain gradient descent: w - lr * mean((v - return) * features)."""
    network = {"actor_sizes": (), "critic_sizes": ()}
    settings = {"critic_epochs": 1, "minibatch_size": 1000, "learning_rate": 0.1, "optimizer": {"name": "sgd"}}
    ((before, after, data, result),) = learn(make(network=network, **settings), 64)
    values = before.values(data.obs).detach()
    error = values - data.returns
    weight = before.value_head.weight.detach() - 0.1 * (error.unsqueeze(1) * data.obs).mean(0)
    bias = before.value_head.bias.detach() - 0.1 * error.mean()
    torch.testing.assert_close(after.value_head.weight.detach(), weight)
    torch.testing.assert_close(after.value_head.bias.detach(), bias)
    assert result.metrics["loss/critic"].item() == pytest.approx(0.5 * error.square().mean().item(), rel=1e-5)
    assert result.num_updates == 2  # the actor's step and the critic's


# ----------------------------------------------------------------------------------------------------------------------
# What every update promises
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ACTIONS)
def test_every_step_gains_and_stays_within_the_limit(kind):
    agent = make(action_space=ACTIONS[kind], target_kl=0.02, learning_rate=1e-3)
    shares = []
    for before, after, data, result in learn(agent, 64 * 12):
        kl = torch_kl(logits_of(before.distribution(data.obs)), logits_of(after.distribution(data.obs))).mean().item()
        assert kl <= 0.02 * 1.001
        assert result.metrics["policy/approx_kl"].item() == pytest.approx(kl, rel=1e-2, abs=1e-6)
        actions, advantages = before.head.flatten(data.actions), normalize(data.advantages)
        ratio = (after.distribution(data.obs).log_prob(actions) - before.distribution(data.obs).log_prob(actions)).exp()
        gain = (ratio * advantages).mean() - advantages.mean()
        share = result.metrics["policy/step_share"]
        assert gain.item() > 0 if share else gain.item() == pytest.approx(0.0, abs=1e-6)
        shares.append(share)
    assert np.mean(np.array(shares) > 0) > 0.8
    assert agent.algorithm.policy.training is False


def test_the_step_is_about_as_long_as_allowed():
    kls = [result.metrics["policy/approx_kl"].item() for *_, result in learn(make(seed=2), 64 * 6)]
    assert max(kls) > 0.003  # of 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_direction_that_is_not_finite_leaves_the_actor_as_it_was(bad, monkeypatch):
    def broken(product, b, **settings):
        return torch.full_like(b, bad)

    monkeypatch.setattr("rl_training.algorithms.trpo.conjugate_gradient", broken)
    ((before, after, _, result),) = learn(make(), 64)
    old, new = weights(before), weights(after)
    assert all(torch.equal(old[name], new[name]) for name in actor_names(before))
    assert result.metrics["policy/step_share"] == 0.0
    assert result.metrics["policy/approx_kl"].item() == 0.0


def test_a_search_that_must_shrink(monkeypatch):
    from rl_training.algorithms import trpo

    def too_long(*args):
        return 3.0 * trpo_largest_step(*args)

    trpo_largest_step = trpo.largest_step
    monkeypatch.setattr(trpo, "largest_step", too_long)
    ((*_, result),) = learn(make(line_search_shrink=0.5), 64)
    assert result.metrics["policy/step_share"] in (0.5, 0.25, 0.125)
    assert 0 < result.metrics["policy/approx_kl"].item() <= 0.01


def test_without_damping_it_still_works():
    """Weights of inputs that never vary have no curvature; the search is among the others."""
    constant = spaces.Box(0.5, 0.5, (3,))
    for *_, result in learn(make(constant, cg_damping=0.0), 64 * 4):
        assert result.metrics["policy/approx_kl"].item() <= 0.01
        assert np.isfinite(result.metrics["loss/policy"].item())


def test_actor_and_critic_learn_apart(monkeypatch):
    monkeypatch.setattr("rl_training.algorithms.trpo.largest_step", lambda direction, *_: torch.zeros_like(direction))
    ((before, after, *_),) = learn(make(), 64)
    old, new = weights(before), weights(after)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == set(old) - set(actor_names(before)), "without a step of the actor, the critic alone learns"


def test_without_a_learning_rate_the_actor_alone_learns():
    ((before, after, *_),) = learn(make(learning_rate=0.0), 64)
    old, new = weights(before), weights(after)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == set(actor_names(before))


def test_frozen_layers_stay_as_they_are():
    agent = make()
    layer = agent.policy.actor[1][0]
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    ((before, after, *_),) = learn(agent, 64)
    old, new = weights(before), weights(after)
    still = {name for name in actor_names(before) if torch.equal(old[name], new[name])}
    assert still == {"actor.1.0.weight", "actor.1.0.bias"}


# ----------------------------------------------------------------------------------------------------------------------
# Spaces and settings
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observation_space", [VECTOR, DICT, PIXELS], ids=["vector", "dict", "pixels"])
@pytest.mark.parametrize("kind", ACTIONS)
def test_every_kind_of_space(observation_space, kind):
    agent = make(observation_space, ACTIONS[kind])
    seen = learn(agent, 128)
    assert len(seen) == 2
    assert all(np.isfinite(float(value)) for *_, result in seen for name, value in result.metrics.items())
    action, _ = agent.predict(observation_space.sample())
    assert ACTIONS[kind].contains(np.asarray(action, ACTIONS[kind].dtype) if kind != "discrete" else int(action))


def test_it_learns_a_guess():
    agent = make(action_space=ACTIONS["multi-discrete"], num_steps=64, learning_rate=1e-2)
    before = agent.evaluate(20, deterministic=False).mean
    agent.learn(128 * 25, progress=False)
    after = agent.evaluate(20, deterministic=False).mean
    agent.close()
    assert before < -2.0
    assert after > -1.0  # 0 is the best of 5 steps


def test_a_shared_network_is_refused():
    with pytest.raises(ConfigError, match="shared: must be false for TRPO"):
        TRPO("CartPole-v1", network={"shared": True})


@pytest.mark.parametrize(
    ("name", "value"), [("target_kl", 0.0), ("cg_damping", -1.0), ("line_search_shrink", 1.0), ("cg_iterations", 0)]
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        TRPO("CartPole-v1", **{name: value})


def test_defaults_are_those_of_sb3_contrib():
    config = TRPOConfig()
    found = (config.learning_rate, config.gamma, config.gae_lambda, config.target_kl, config.cg_iterations)
    assert found == (1e-3, 0.99, 0.95, 0.01, 15)
    found = (config.cg_damping, config.line_search_tries, config.line_search_shrink, config.critic_epochs)
    assert found == (0.1, 10, 0.8, 10)
    assert (config.minibatch_size, config.normalize_advantage, config.max_grad_norm) == (128, True, None)
    assert config.num_steps * 8 == 2048
