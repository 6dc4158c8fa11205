"""DrQ-v2 against numbers by hand and a plain computation in torch; what it shifts, and what learns from what."""

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from rl_training import DQN, DrQv2
from rl_training.algorithms.drqv2 import DrQv2Algorithm, DrQv2Config
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.errors import SpaceError
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.pixels import PixelNetworkConfig
from tests.envs.pixel_tasks import DOT, Dot
from tests.small import small_settings

B, A, SIZE = 6, 2, 16
IMAGE = spaces.Box(0, 255, (3, SIZE, SIZE), np.uint8)
ACTIONS = spaces.Box(-1, 1, (A,))
CPU = torch.device("cpu")


def make(space=IMAGE, seed=0, **settings):
    network = PixelNetworkConfig(actor_sizes=(8,), critic_sizes=(8,), feature_size=5)
    config = DrQv2Config(**{"network": network, **settings})
    return DrQv2Algorithm(config, EnvSpec(space, ACTIONS, env_id="Fake-v0"), CPU, np.random.default_rng(seed))


def images(seed=0, shape=IMAGE.shape, rows=B):
    return torch.randint(0, 256, (rows, *shape), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def make_batch(seed=0, obs=None, next_obs=None):
    rng = torch.Generator().manual_seed(seed)
    return TransitionBatch(
        obs=images(10 * seed + 1) if obs is None else obs,
        action=torch.rand(B, A, generator=rng) * 2 - 1,
        reward=torch.randn(B, generator=rng),
        discount=0.9 * (torch.arange(B) % 3 > 0).float(),
        next_obs=images(10 * seed + 2) if next_obs is None else next_obs,
        weight=torch.rand(B, generator=rng) + 0.5,
        indices=torch.arange(B),
    )


def at(fraction=0.0, updates=0):
    return Progress(env_steps=int(1000 * fraction), horizon=1000, updates=updates)


def state_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(before, module):
    return all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())


def inputs_of(module):
    """What a module is given from now on."""
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args))
    return seen


# ----------------------------------------------------------------------------------------------------------------------
# The maths
# ----------------------------------------------------------------------------------------------------------------------


def test_targets_and_losses_by_hand():
    # critics that say 1 and 3 whatever they see, and an actor that says 0
    algorithm = make(learning_rate=0.0)
    for module in (algorithm.policy.critic, algorithm.critic_target.module):
        for layer in module.members.layers:
            layer.weight.data.zero_()
            layer.bias.data.zero_()
        module.members.layers[-1].bias.data.copy_(torch.tensor([1.0, 3.0]).view(2, 1, 1))
    ones = torch.ones(B)
    batch = make_batch()._replace(reward=0.5 * ones, discount=0.9 * ones, weight=ones)
    result = algorithm.update(batch, at())
    # y = 0.5 + 0.9 * min(1, 3) = 1.4, errors -0.4 and 1.6: 0.5 * (0.16 + 2.56)
    assert float(result.metrics["loss/critic"]) == pytest.approx(1.36)
    assert float(result.metrics["loss/policy"]) == pytest.approx(-1.0)  # the smaller one
    assert float(result.metrics["value/q_mean"]) == pytest.approx(2.0)
    assert result.priorities.tolist() == pytest.approx([1.0] * B)


class Reference:
    """The same learner in plain torch, with padding and cropping, a convolution and a critic at a time."""

    def __init__(self, algorithm, optimizer):
        self.config, self.rng = algorithm.config, copy.deepcopy(algorithm.rng)
        policy = algorithm.policy
        self.encoder, self.actor, self.critic = map(self.leaves, (policy.encoder, policy.actor, policy.critic))
        self.target = {name: value.detach().clone() for name, value in self.critic.items()}
        make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        self.actor_optimizer = make(self.actor.values(), lr=0.01)
        self.critic_optimizer = make([*self.encoder.values(), *self.critic.values()], lr=0.02)

    @staticmethod
    def leaves(module):
        return {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}

    def augment(self, obs):
        pad = self.config.shift
        corners = self.rng.integers(-pad, pad, size=(B, 2), endpoint=True) + pad
        padded = F.pad(obs.float(), (pad,) * 4, mode="replicate")
        return torch.stack([x[:, i : i + SIZE, j : j + SIZE] for x, (i, j) in zip(padded, corners, strict=True)])

    def encode(self, obs):
        x = self.augment(obs) / 255 - 0.5
        for index, stride in ((0, 2), (2, 1), (4, 1), (6, 1)):
            name = f"convolutions.{index}"
            x = F.relu(F.conv2d(x, self.encoder[f"{name}.weight"], self.encoder[f"{name}.bias"], stride=stride))
        return x.flatten(1)

    @staticmethod
    def narrow(weights, prefix, features):
        linear, norm = f"{prefix}encoder.layers.0", f"{prefix}encoder.layers.1"
        x = F.linear(features, weights[f"{linear}.weight"], weights[f"{linear}.bias"])
        return F.layer_norm(x, x.shape[1:], weights[f"{norm}.weight"], weights[f"{norm}.bias"]).tanh()

    def act(self, features, std):
        noise = (std * torch.from_numpy(self.rng.standard_normal((B, A), dtype=np.float32))).clamp(-0.3, 0.3)
        x = self.narrow(self.actor, "trunk.", features)
        x = F.relu(F.linear(x, self.actor["trunk.hidden.0.weight"], self.actor["trunk.hidden.0.bias"]))
        mean = F.linear(x, self.actor["trunk.head.weight"], self.actor["trunk.head.bias"]).tanh()
        noisy = (mean + noise).clamp(-1, 1)
        return mean + (noisy - mean).detach()

    def q(self, weights, features, action):
        inputs, values = torch.cat([self.narrow(weights, "", features), action], dim=1), []
        for e in range(2):
            x = inputs
            for index in range(2):
                layer = f"members.layers.{index}"
                x = F.linear(x, weights[f"{layer}.weight"][e].T, weights[f"{layer}.bias"][e, 0])
                x = F.relu(x) if index == 0 else x
            values.append(x[:, 0])
        return values

    @staticmethod
    def learn(optimizer, loss):
        optimizer.zero_grad()
        loss.backward(inputs=optimizer.param_groups[0]["params"])
        optimizer.step()
        return loss.item()

    def update(self, batch, std):
        features = self.encode(batch.obs)
        with torch.no_grad():
            next_features = self.encode(batch.next_obs)
            next_action = self.act(next_features, std)
            y = batch.reward + batch.discount * torch.minimum(*self.q(self.target, next_features, next_action))
        errors = [q - y for q in self.q(self.critic, features, batch.action)]
        critic_loss = self.learn(self.critic_optimizer, sum((batch.weight * e**2).mean() / 2 for e in errors))
        features = features.detach()
        q = torch.minimum(*self.q(self.critic, features, self.act(features, std)))
        policy_loss = self.learn(self.actor_optimizer, -q.mean())
        for name, value in self.target.items():
            value.copy_(0.95 * value + 0.05 * self.critic[name].detach())
        return critic_loss, policy_loss, sum(e.detach().abs() for e in errors) / 2


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_against_plain_torch(optimizer):
    algorithm = make(
        optimizer=OptimizerConfig(optimizer, eps=1e-8),
        learning_rate=0.01,
        critic_learning_rate=0.02,
        tau=0.05,
        shift=2,
        noise=NoiseConfig(std=Linear(1.0, 0.1)),
    )
    reference = Reference(algorithm, optimizer)
    for updates, (fraction, std) in enumerate(((0.0, 1.0), (0.5, 0.55), (1.0, 0.1))):
        batch = make_batch(updates)
        result = algorithm.update(batch, at(fraction, updates))
        critic_loss, policy_loss, priorities = reference.update(batch, std)
        assert float(result.metrics["loss/critic"]) == pytest.approx(critic_loss, rel=1e-4)
        assert float(result.metrics["loss/policy"]) == pytest.approx(policy_loss, rel=1e-4)
        torch.testing.assert_close(result.priorities, priorities, rtol=1e-4, atol=1e-5)
        policy = algorithm.policy
        for module, expected in (
            (policy.encoder, reference.encoder),
            (policy.actor, reference.actor),
            (policy.critic, reference.critic),
            (algorithm.critic_target.module, reference.target),
        ):
            for name, value in module.named_parameters():
                torch.testing.assert_close(value.detach(), expected[name].detach(), rtol=1e-3, atol=2e-5)
    assert algorithm.rng.bit_generator.state == reference.rng.bit_generator.state


# ----------------------------------------------------------------------------------------------------------------------
# Who learns from what
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("actor_rate", "critic_rate"), [(0.01, 0.0), (0.0, 0.01)])
def test_the_encoder_learns_with_the_critics_and_not_with_the_actor(actor_rate, critic_rate):
    algorithm = make(learning_rate=actor_rate, critic_learning_rate=critic_rate)
    parts = (algorithm.policy.encoder, algorithm.policy.critic, algorithm.policy.actor)
    before = [state_of(part) for part in parts]
    algorithm.update(make_batch(), at())
    unchanged = [same(state, part) for state, part in zip(before, parts, strict=True)]
    assert unchanged == ([True, True, False] if actor_rate else [False, False, True])


def test_no_gradient_of_the_actors_loss_reaches_the_encoder():
    algorithm = make()
    seen = inputs_of(algorithm.policy.actor)
    by_critics = inputs_of(algorithm.policy.critic)
    algorithm.update(make_batch(), at())
    assert [features.requires_grad for (features,) in seen] == [False, False]  # of the next observations, and of these
    assert [args[0].requires_grad for args in by_critics] == [True, False]  # in their own loss, and in the actor's
    assert torch.equal(by_critics[0][0], by_critics[1][0])  # one pass through the encoder serves both


def test_the_encoder_has_no_slow_copy():
    algorithm = make(tau=0.25)
    online, target = algorithm.policy.critic, algorithm.critic_target.module
    assert not any(isinstance(layer, torch.nn.Conv2d) for layer in target.modules())
    assert same(state_of(online), target)
    before = state_of(target)
    algorithm.update(make_batch(), at())
    for name, value in target.state_dict().items():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * online.state_dict()[name])


def test_the_gradient_passes_by_the_bounds():
    # noise that pushes every action to the bound, where a clamp would leave no gradient
    algorithm = make()
    features = torch.zeros(B, algorithm.policy.encoder.num_features)  # so that actions are the bias alone
    algorithm.policy.actor.trunk.head.bias.data.fill_(1.5)
    head = algorithm.policy.actor.trunk.head.bias
    mean = algorithm.policy.actor(features)
    action = algorithm.sample(features, torch.full((B, A), 9.0))
    torch.testing.assert_close(action.detach(), torch.ones(B, A))
    gradients = [torch.autograd.grad(x.sum(), head)[0] for x in (mean, action)]
    assert torch.equal(*gradients)
    assert (gradients[0] > 0).all()


# ----------------------------------------------------------------------------------------------------------------------
# Noise
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 1.0), (0.15, 0.55), (0.3, 0.1), (1.0, 0.1)])
def test_noise_fades(fraction, expected):
    assert make().explore(at(fraction)).noise_std.item() == pytest.approx(expected)


def test_noise_while_exploring_is_not_clipped():
    algorithm = make(noise=NoiseConfig(std=0.5))
    policy, obs = algorithm.explore(at()), images(rows=64)
    noise = policy.act(obs, rng=np.random.default_rng(0)).action - policy.act(obs, deterministic=True).action
    assert noise.abs().max() > 0.8


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_target_actions_are_clipped(clip):
    algorithm = make(noise=NoiseConfig(std=5.0), noise_clip=clip, shift=0)
    batch, seen = make_batch(), inputs_of(algorithm.critic_target.module)
    with torch.no_grad():
        mean = algorithm.policy.actor(algorithm.policy.encoder(batch.next_obs))
    algorithm.update(batch, at())
    ((_, action),) = seen
    assert action.abs().max() <= 1.0 + 1e-6
    distance = (action - mean).abs()
    assert distance.max().item() == pytest.approx(clip, abs=1e-6)
    inside = (mean.abs() + clip) < 1
    assert (distance[inside] > 0.99 * clip - 1e-6).float().mean() > 0.8  # noise this large is nearly always clipped


def test_the_noise_inside_of_updates_follows_the_schedule():
    algorithm = make(noise=NoiseConfig(std=Linear(1.0, 0.0)), shift=0)
    batch, seen = make_batch(), inputs_of(algorithm.critic_target.module)
    with torch.no_grad():
        mean = algorithm.policy.actor(algorithm.policy.encoder(batch.next_obs))
    algorithm.update(batch, at(fraction=1.0))
    torch.testing.assert_close(seen[0][1], mean)


# ----------------------------------------------------------------------------------------------------------------------
# Shifts
# ----------------------------------------------------------------------------------------------------------------------

LAYOUTS = [(3, 16, 16), (16, 16, 3), (2, 16, 18), (3, 16, 16, 1), (2, 3, 16, 16), (16, 18)]


@pytest.mark.parametrize("shape", LAYOUTS)
def test_what_is_shifted_is_height_and_width(shape):
    space = spaces.Box(0, 255, shape, np.uint8)
    algorithm = make(space, shift=3)
    rng = copy.deepcopy(algorithm.rng)
    obs = images(shape=shape)
    found = algorithm.policy.encoder.pixels(algorithm.shifted(obs))
    pixels = algorithm.policy.encoder.pixels(obs)
    offsets = rng.integers(-3, 3, size=(B, 2), endpoint=True)
    padded = F.pad(pixels, (3,) * 4, mode="replicate")
    height, width = pixels.shape[-2:]
    for row, (down, right) in enumerate(offsets + 3):
        assert torch.equal(found[row], padded[row, :, down : down + height, right : right + width])
    assert len({tuple(offset) for offset in offsets}) > 1


def test_only_images_are_shifted():
    space = spaces.Dict(
        camera=spaces.Box(0, 255, (16, 16, 3), np.uint8),
        speed=spaces.Box(-1, 1, (4,)),
        table=spaces.Box(0, 255, (4, 16), np.uint8),
    )
    obs = {"camera": images(shape=(16, 16, 3)), "speed": torch.randn(B, 4), "table": images(shape=(4, 16))}
    algorithm = make(space)
    shifted = algorithm.shifted(obs)
    assert list(shifted) == list(obs)
    assert shifted["speed"] is obs["speed"]
    assert shifted["table"] is obs["table"]
    assert not torch.equal(shifted["camera"], obs["camera"])
    result = algorithm.update(make_batch(obs=obs, next_obs={key: value.flip(0) for key, value in obs.items()}), at())
    assert math.isfinite(float(result.metrics["loss/critic"]))


@pytest.mark.parametrize("shift", [0, 4])
def test_both_observations_of_an_update_are_shifted(shift):
    algorithm, batch = make(shift=shift), make_batch()
    seen = inputs_of(algorithm.policy.encoder)
    algorithm.update(batch, at())
    assert [torch.equal(obs, given) for (obs,), given in zip(seen, (batch.obs, batch.next_obs), strict=True)] == [
        shift == 0
    ] * 2


def test_nothing_is_shifted_when_acting():
    algorithm, obs = make(), images()
    before = copy.deepcopy(algorithm.rng.bit_generator.state)
    seen = inputs_of(algorithm.policy.encoder)
    policy = algorithm.explore(at())
    policy.act(obs, rng=np.random.default_rng(0))
    policy.act(obs, deterministic=True)
    policy.value(obs)
    assert all(given is obs for (given,) in seen)
    assert len(seen) == 3
    assert algorithm.rng.bit_generator.state == before


# ----------------------------------------------------------------------------------------------------------------------
# Spaces and settings
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,)),
        spaces.Box(0, 255, (4, 16), np.uint8),  # too low
        spaces.Box(0.0, 1.0, (16, 16, 3)),  # no bytes
        spaces.Discrete(4),
        spaces.Dict({"speed": spaces.Box(-1, 1, (2,))}),
    ],
    ids=["vector", "table", "reals", "discrete", "dict"],
)
def test_observations_without_images_are_refused(space):
    with pytest.raises(SpaceError, match=r"DrQv2 needs images.*from 'Fake-v0'.*use TD3 or SAC.*AddRenderObs"):
        make(space)


def test_a_vector_environment_is_refused_by_the_agent():
    with pytest.raises(SpaceError, match=r"DrQv2 needs images.*Pendulum-v1.*TD3 or SAC"):
        DrQv2("Pendulum-v1")


def test_who_takes_vectors_is_not_sent_to_an_algorithm_of_images():
    with pytest.raises(SpaceError, match="For Box actions use") as caught:
        DQN("Pendulum-v1")
    assert "DrQv2" not in str(caught.value)
    with pytest.raises(SpaceError, match=r"For Box actions use.* DrQv2 or"):
        DQN(Dot)


def test_the_defaults_are_the_papers():
    config = DrQv2Config()
    assert (config.learning_rate, config.tau, config.n_step, config.batch_size) == (1e-4, 0.01, 3, 256)
    assert (config.shift, config.noise_clip, config.num_critics, config.gamma) == (4, 0.3, 2, 0.99)
    assert config.noise == NoiseConfig(std=Linear(1.0, 0.1, until=0.3))
    assert config.network.feature_size == 50
    assert config.network.encoder == "drq_cnn"
    assert config.network.actor_sizes == config.network.critic_sizes == (1024, 1024)


# ----------------------------------------------------------------------------------------------------------------------
# Agents
# ----------------------------------------------------------------------------------------------------------------------


def make_agent(env=DOT, **settings):
    run = {"seed": 1, "eval_every": 0, **{key: settings.pop(key) for key in ("wrappers",) if key in settings}}
    return DrQv2(env, **run, **small_settings("drqv2", **settings))


def test_the_value_is_the_smallest_critics_at_the_policys_action():
    agent = make_agent(num_critics=3)
    agent.learn(20, progress=False)
    obs = np.stack([agent._experiment.spec.observation_space.sample() for _ in range(5)])
    policy, action = agent.policy, agent.predict(obs)[0] / np.float32(2.0)  # the bounds are -2 and 2
    with torch.no_grad():
        critics = policy.critic(policy.encoder(torch.from_numpy(obs)), torch.from_numpy(action)).numpy()
    assert critics.shape == (3, 5)
    assert agent.value(obs) == pytest.approx(critics.min(axis=0), rel=1e-4)
    agent.close()


def test_bounds_are_reached_and_replay_keeps_actions_as_the_policy_sees_them():
    space = spaces.Box(np.float32(3.0), np.float32(7.0), (2, 2), np.float32)
    agent = make_agent(lambda: Dot(space), learning_starts=15)
    agent.learn(40, progress=False)
    given = np.stack(agent._experiment.trainer.collector.env.env.envs[0].given)
    kept = agent._off_policy().sampler.buffer.action[:40]
    assert np.abs(kept).max() <= 1.0
    assert 5.0 + 2.0 * kept == pytest.approx(given, abs=1e-5)
    for bias, bound in ((100.0, space.high), (-100.0, space.low)):
        agent.policy.actor.trunk.head.bias.data.fill_(bias)
        assert np.array_equal(agent.predict(np.zeros((16, 16, 1), np.uint8))[0], bound)
    agent.close()


def test_frames_of_a_stack_are_stored_once():
    agent = make_agent(wrappers=[{"name": "FrameStackObservation", "kwargs": {"stack_size": 3}}])
    assert agent._experiment.spec.observation_space.shape == (3, 16, 16, 1)
    agent.learn(30, progress=False)
    assert agent._off_policy().sampler.buffer.obs.shape[1:] == (16, 16, 1)
    agent.close()


class Lamp(gym.Env):
    """A picture of some brightness, which the action has to name."""

    observation_space, action_space = spaces.Box(0, 255, (16, 16, 1), np.uint8), spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.brightness = self.np_random.uniform(-0.9, 0.9)
        return np.full((16, 16, 1), 127.5 * (1 + self.brightness), np.uint8), {}

    def step(self, action):
        reward = -abs(float(action[0]) - self.brightness)
        return self.reset()[0], reward, False, True, {}


def test_an_agent_learns_from_pixels():
    sizes = {"network": {"actor_sizes": (32,), "critic_sizes": (32,)}, "batch_size": 32, "buffer_size": 1_000}
    noise = {"noise": {"std": Linear(0.5, 0.1)}}
    agent = make_agent(Lamp, **sizes, **noise, gamma=0.0, learning_rate=2e-3, learning_starts=100, updates_per_step=1)
    before = agent.evaluate(40).mean
    agent.learn(500, progress=False)
    after = agent.evaluate(40).mean
    agent.close()
    assert before < -0.3
    assert after > -0.15
