"""Recording datasets: true ends, noise, mixtures, log-probabilities."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training import PPO, SAC, TD3, load
from rl_training.contracts.errors import ConfigError, SpaceError
from rl_training.contracts.spec import EnvSpec
from rl_training.data.dataset_checks import check_dataset
from rl_training.deploy.recording import BehaviourPolicy, RecordConfig, _Member, _random_member, record
from rl_training.envs.actions import ActionMap
from rl_training.envs.factory import make_env

CPU = torch.device("cpu")


def test_random_actions_with_true_ends():
    data = record("random", RecordConfig(env_id="CartPole-v1", steps=300, seed=3))
    assert len(data) == 300
    assert data.terminated[data.episode_ends].tolist() == [True] * (data.num_episodes - 1) + [False]
    assert data.truncated.sum() == 1  # the last one, which is cut
    assert np.allclose(data.extras["log_prob"], math.log(0.5))
    assert data.metadata.max_episode_steps == 500
    assert data.metadata.seeds == [3]
    env = make_env("CartPole-v1")
    findings = check_dataset(data, env)
    assert [finding.severity for finding in findings] == ["note", "note"]
    assert "agree with the environment in all 300 rows" in findings[1].message
    # the same again by seed, and other data by another seed
    assert record("random", RecordConfig(env_id="CartPole-v1", steps=300, seed=3)).hash == data.hash
    assert record("random", RecordConfig(env_id="CartPole-v1", steps=300, seed=4)).hash != data.hash


def test_time_limits_are_truncations_with_their_last_observation():
    data = record("random", RecordConfig(env_id="Pendulum-v1", steps=450))
    assert data.episode_lengths.tolist() == [200, 200, 50]
    assert not data.terminated.any()
    assert np.allclose(data.extras["log_prob"], -math.log(4.0))
    env = make_env("Pendulum-v1")
    env.reset(seed=0)
    env.unwrapped.state = [math.atan2(data.observations[199, 1], data.observations[199, 0]), data.observations[199, 2]]
    assert np.allclose(env.step(data.actions[199])[0], data.final_observations[0], atol=1e-4)


def test_a_mixture_of_an_agent_and_random_actions():
    config = RecordConfig(steps=2000, mix=("random:0.5",), deterministic=True, licence="MIT", author="A")
    data = record("zoo:sac/Pendulum-v1", config)
    number = data.extras["policy"][data.episode_starts]
    assert set(number.tolist()) == {0, 1}
    assert (data.extras["policy"] == np.repeat(number, data.episode_lengths)).all()  # one policy per episode
    returns = data.episode_returns
    assert returns[number == 0].mean() > -400 > returns[number == 1].mean()
    assert "log_prob" not in data.extras  # a deterministic real-valued action has no density
    assert (data.metadata.licence, data.metadata.author, data.metadata.env_id) == ("MIT", "A", "Pendulum-v1")
    assert data.metadata.behaviour_policy.startswith("0.5 sac zoo:sac/Pendulum-v1 at step")


def test_log_probabilities_are_those_of_the_policy(tmp_path):
    agent = SAC("Pendulum-v1", seed=1, network={"actor_sizes": [8], "critic_sizes": [8]})
    data = record(str(agent.save(tmp_path / "agent")), RecordConfig(steps=50))
    with torch.no_grad():
        mean, log_std = agent.policy.actor(torch.from_numpy(data.observations))
        gaussian = torch.distributions.Normal(mean, log_std.exp())
        own = torch.from_numpy(data.actions) / 2.0
        expected = gaussian.log_prob(own.atanh()) - (1 - own**2).log() - math.log(2.0)
    assert np.allclose(data.extras["log_prob"], expected.squeeze(1).numpy(), atol=1e-3)


def test_log_probabilities_of_discrete_policies(tmp_path):
    agent = PPO("CartPole-v1", seed=1, num_envs=1)
    path = str(agent.save(tmp_path / "agent"))
    data = record(path, RecordConfig(steps=40))
    own, _ = agent.policy.score(torch.from_numpy(data.observations), torch.from_numpy(data.actions))
    assert np.allclose(data.extras["log_prob"], own.numpy(), atol=1e-5)
    mixed = record(path, RecordConfig(steps=40, epsilon=0.3))
    own, _ = agent.policy.score(torch.from_numpy(mixed.observations), torch.from_numpy(mixed.actions))
    assert np.allclose(np.exp(mixed.extras["log_prob"]), 0.7 * own.exp().numpy() + 0.15, atol=1e-5)


def test_log_probabilities_of_a_greedy_policy_with_random_actions():
    data = record("zoo:dqn/CartPole-v1", RecordConfig(steps=200, epsilon=0.5, deterministic=True))
    greedy, _ = load("zoo:dqn/CartPole-v1").predict(data.observations, deterministic=True)
    expected = np.where(data.actions == greedy, 0.75, 0.25)
    assert np.allclose(np.exp(data.extras["log_prob"]), expected, atol=1e-6)
    assert 20 < (data.actions != greedy).sum() < 80


def test_noise_around_a_deterministic_action():
    data = record("zoo:td3/Pendulum-v1", RecordConfig(steps=200, noise_std=0.2))
    mean, _ = load("zoo:td3/Pendulum-v1").predict(data.observations, deterministic=True)
    inside = (np.abs(data.actions) < 2).reshape(-1)
    around = (data.actions - mean) / 0.4  # 0.2 of half the width of [-2, 2]
    assert 0.8 < around[inside].std() < 1.2
    density = np.exp(-0.5 * around**2) / (0.4 * math.sqrt(2 * math.pi))
    assert np.allclose(np.exp(data.extras["log_prob"]), density.reshape(-1), atol=1e-3)


def squash_member(space):
    class Gaussian:
        """A standard normal before tanh."""

        box_actions = "squash"

        def act(self, obs, **options):
            raise NotImplementedError

        def value(self, obs):
            raise NotImplementedError

        def log_prob(self, obs, action):
            return torch.distributions.Normal(0.0, 1.0).log_prob(action).sum(-1)

    return _Member("g", 1.0, Gaussian(), ActionMap(space, "squash"), None, CPU, True)


def test_the_density_of_a_squashed_action_in_the_units_of_the_environment_sums_to_one():
    member = squash_member(spaces.Box(-3.0, 5.0, (1,)))
    actions = np.linspace(-3.0, 5.0, 4001)[1:-1, None]
    density = np.exp(member.own_log_prob(torch.zeros(len(actions), 1), actions))
    assert density.sum() * 8.0 / 4000 == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(4, start=2), -math.log(4)),
        (spaces.MultiDiscrete([2, 3]), -math.log(6)),
        (spaces.MultiBinary(3), -math.log(8)),
        (spaces.Box(-1.0, 3.0, (2,)), -2 * math.log(4)),
    ],
)
def test_random_actions_of_every_space(space, expected):
    spec = EnvSpec(spaces.Box(-1, 1, (2,)), space)
    policy = BehaviourPolicy([_random_member(spec, 1.0)], spec, RecordConfig(epsilon=0.5))
    rng = np.random.default_rng(0)
    found = [policy.act(torch.zeros(1, 2), episode_start=torch.tensor([True]), rng=rng) for _ in range(50)]
    assert all(space.contains(out.action.numpy()[0].astype(space.dtype)) for out in found)
    assert len({out.action.numpy().tobytes() for out in found}) > 3
    assert all(out.extras["log_prob"].item() == pytest.approx(expected) for out in found)


@pytest.mark.parametrize(
    ("policy", "changes", "error", "message"),
    [
        ("random", {}, ConfigError, "env_id: is missing"),
        ("random", {"env_id": "CartPole-v1", "noise_std": 0.1}, ConfigError, "noise_std: is for real-valued"),
        ("random", {"env_id": "CartPole-v1", "mix": ("random",)}, ConfigError, "expected PATH:share"),
        ("random", {"env_id": "CartPole-v1", "mix": ("random:0.6", "random:0.4")}, ConfigError, "leaves nothing"),
        ("zoo:sac/Pendulum-v1", {"env_id": "CartPole-v1"}, SpaceError, "observation_space Box.*action_space Box"),
    ],
)
def test_what_cannot_be_recorded(policy, changes, error, message):
    with pytest.raises(error, match=message):
        record(policy, dataclasses.replace(RecordConfig(), **changes))


def test_an_agent_that_normalises_sees_normalised_observations(tmp_path):
    agent = TD3("Pendulum-v1", normalize_obs=True, num_envs=1, network={"actor_sizes": [8], "critic_sizes": [8]})
    agent._experiment.trainer.collector.obs_normalizer.moments[""].mean[...] = 3.0
    data = record(str(agent.save(tmp_path / "agent")), RecordConfig(steps=5))
    expected, _ = agent.predict(data.observations, deterministic=True)
    assert np.allclose(data.actions, expected, atol=1e-5)
