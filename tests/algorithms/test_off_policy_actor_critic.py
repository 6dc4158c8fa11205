"""DDPG, TD3 and SAC against plain computations with torch's own layers, distributions and optimizers."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch.distributions import Normal

from rl_training.accelerate.recording import SEEN_BEFORE
from rl_training.algorithms.ddpg import DDPGAlgorithm, DDPGConfig
from rl_training.algorithms.sac import SACAlgorithm, SACConfig
from rl_training.algorithms.td3 import TD3Algorithm, TD3Config
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import EnvSpec
from rl_training.experiment.schema import build, to_plain
from rl_training.policies.actors import OffPolicyNetworkConfig
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.optimizers import OptimizerConfig

B, OBS, A = 12, 3, 2
SPEC = EnvSpec(spaces.Box(-1, 1, (OBS,)), spaces.Box(-1, 1, (A,)))
CPU = torch.device("cpu")
ALGORITHMS = {
    "ddpg": (DDPGAlgorithm, DDPGConfig),
    "td3": (TD3Algorithm, TD3Config),
    "sac": (SACAlgorithm, SACConfig),
}
each_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
each_size = pytest.mark.parametrize("num_critics", [1, 2, 10])
each_optimizer = pytest.mark.parametrize("optimizer", ["sgd", "adam"])


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads that share a busy core make small networks a hundred times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name, seed=0, spec=SPEC, **settings):
    algorithm, config = ALGORITHMS[name]
    network = OffPolicyNetworkConfig(actor_sizes=(16, 8), critic_sizes=(16, 8))
    return algorithm(config(**{"network": network, **settings}), spec, CPU, np.random.default_rng(seed))


def make_batch(seed=0, weight=None, rows=B):
    rng = torch.Generator().manual_seed(seed)
    terminated = torch.arange(rows) % 4 == 0
    return TransitionBatch(
        obs=torch.randn(rows, OBS, generator=rng),
        action=torch.rand(rows, A, generator=rng) * 2 - 1,
        reward=torch.randn(rows, generator=rng),
        discount=0.9 * (~terminated).float(),
        next_obs=torch.randn(rows, OBS, generator=rng),
        weight=torch.rand(rows, generator=rng) + 0.5 if weight is None else weight,
        indices=torch.arange(rows),
    )


def at(updates=0, fraction=0.0):
    return Progress(env_steps=int(1000 * fraction), horizon=1000, updates=updates)


def state_of(algorithm):
    return copy.deepcopy(algorithm.state_dict())


def assert_equal(one, two):
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


def same(before, module):
    return all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())


class Reference:
    """The same learner in plain torch: leaf tensors, one critic at a time, a separate optimizer for each network."""

    def __init__(self, algorithm, optimizer):
        self.rng = copy.deepcopy(algorithm.rng)
        self.actor = self.leaves(algorithm.policy.actor)
        self.critic = self.leaves(algorithm.policy.critic)
        self.target_actor = {name: value.detach().clone() for name, value in self.actor.items()}
        self.target_critic = {name: value.detach().clone() for name, value in self.critic.items()}
        self.log_alpha = torch.zeros((), requires_grad=True)
        make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        self.actor_optimizer = make(self.actor.values(), lr=0.01)
        self.critic_optimizer = make(self.critic.values(), lr=0.02)
        self.alpha_optimizer = make([self.log_alpha], lr=0.01)

    @staticmethod
    def leaves(module):
        return {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}

    def noise(self):
        return torch.from_numpy(self.rng.standard_normal((B, A), dtype=np.float32))

    @staticmethod
    def outputs(weights, obs):
        x = F.relu(F.linear(obs, weights["trunk.hidden.0.weight"], weights["trunk.hidden.0.bias"]))
        x = F.relu(F.linear(x, weights["trunk.hidden.2.weight"], weights["trunk.hidden.2.bias"]))
        return F.linear(x, weights["trunk.head.weight"], weights["trunk.head.bias"])

    @staticmethod
    def q(weights, obs, action):
        values = []
        for e in range(weights["members.layers.0.weight"].shape[0]):
            x = torch.cat([obs, action], dim=1)
            for index in range(3):
                layer = f"members.layers.{index}"
                x = F.linear(x, weights[f"{layer}.weight"][e].T, weights[f"{layer}.bias"][e, 0])
                x = F.relu(x) if index < 2 else x
            values.append(x[:, 0])
        return values

    def sample(self, obs, noise):
        outputs = self.outputs(self.actor, obs)
        distribution = Normal(outputs[:, :A], outputs[:, A:].clamp(-20, 2).exp())
        u = distribution.mean + distribution.stddev * noise
        return u.tanh(), (distribution.log_prob(u) - torch.log(1 - u.tanh() ** 2)).sum(1)

    def learn(self, optimizer, loss):
        optimizer.zero_grad()
        loss.backward(inputs=optimizer.param_groups[0]["params"])
        optimizer.step()
        return loss.item()

    def learn_critics(self, batch, target):
        errors = [q - target for q in self.q(self.critic, batch.obs, batch.action)]
        loss = sum((batch.weight * error**2).mean() / 2 for error in errors)
        self.priorities = sum(error.detach().abs() for error in errors) / len(errors)
        return self.learn(self.critic_optimizer, loss)

    def follow(self, tau):
        for target, online in ((self.target_actor, self.actor), (self.target_critic, self.critic)):
            for name, value in target.items():
                value.copy_((1 - tau) * value + tau * online[name].detach())

    def deterministic_update(self, batch, sigma=0.0, delayed=False):
        with torch.no_grad():
            action = self.outputs(self.target_actor, batch.next_obs).tanh()
            if sigma:
                action = (action + (sigma * self.noise()).clamp(-0.5, 0.5)).clamp(-1, 1)
            smallest = torch.stack(self.q(self.target_critic, batch.next_obs, action)).min(0).values
        critic_loss = self.learn_critics(batch, batch.reward + batch.discount * smallest)
        if delayed:
            return critic_loss, None
        action = self.outputs(self.actor, batch.obs).tanh()
        policy_loss = self.learn(self.actor_optimizer, -self.q(self.critic, batch.obs, action)[0].mean())
        self.follow(0.05)
        return critic_loss, policy_loss

    def soft_update(self, batch, target_entropy=-A):
        alpha = self.log_alpha.exp().item()
        with torch.no_grad():
            action, log_prob = self.sample(batch.next_obs, self.noise())
            smallest = torch.stack(self.q(self.target_critic, batch.next_obs, action)).min(0).values
        target = batch.reward + batch.discount * (smallest - alpha * log_prob)
        critic_loss = self.learn_critics(batch, target)
        action, log_prob = self.sample(batch.obs, self.noise())
        smallest = torch.stack(self.q(self.critic, batch.obs, action)).min(0).values
        policy_loss = self.learn(self.actor_optimizer, (alpha * log_prob - smallest).mean())
        excess = log_prob.detach() + target_entropy
        alpha_loss = self.learn(self.alpha_optimizer, (-self.log_alpha.exp() * excess).mean())
        self.follow(0.05)
        return critic_loss, policy_loss, alpha_loss, -log_prob.mean().item()

    def check(self, algorithm, priorities):
        def close(module, expected):
            for name, value in module.named_parameters():
                torch.testing.assert_close(value.detach(), expected[name].detach(), rtol=1e-4, atol=1e-6)

        close(algorithm.policy.actor, self.actor)
        close(algorithm.policy.critic, self.critic)
        close(algorithm.critic_target.module, self.target_critic)
        if hasattr(algorithm, "actor_target"):
            close(algorithm.actor_target.module, self.target_actor)
        torch.testing.assert_close(priorities, self.priorities, rtol=1e-4, atol=1e-5)
        assert algorithm.rng.bit_generator.state == self.rng.bit_generator.state


def plain_settings(num_critics, optimizer):
    return {
        "num_critics": num_critics,
        "optimizer": OptimizerConfig(optimizer, eps=1e-8),
        "learning_rate": 0.01,
        "critic_learning_rate": 0.02,
        "tau": 0.05,
    }


@each_size
@each_optimizer
class TestAgainstPlainTorch:
    def test_ddpg(self, num_critics, optimizer):
        algorithm = make("ddpg", **plain_settings(num_critics, optimizer))
        reference = Reference(algorithm, optimizer)
        for updates in range(3):
            batch = make_batch(updates)
            result = algorithm.update(batch, at(updates))
            losses = reference.deterministic_update(batch)
            assert float(result.metrics["loss/critic"]) == pytest.approx(losses[0], rel=1e-4)
            assert float(result.metrics["loss/policy"]) == pytest.approx(losses[1], rel=1e-4)
            reference.check(algorithm, result.priorities)

    def test_td3(self, num_critics, optimizer):
        algorithm = make("td3", **plain_settings(num_critics, optimizer))
        reference = Reference(algorithm, optimizer)
        for updates in range(4):
            batch = make_batch(updates)
            result = algorithm.update(batch, at(updates))
            losses = reference.deterministic_update(batch, sigma=0.2, delayed=updates in (0, 2))
            assert float(result.metrics["loss/critic"]) == pytest.approx(losses[0], rel=1e-4)
            assert result.metrics.get("loss/policy") == (losses[1] and pytest.approx(losses[1], rel=1e-4))
            reference.check(algorithm, result.priorities)

    def test_sac(self, num_critics, optimizer):
        algorithm = make("sac", **plain_settings(num_critics, optimizer))
        reference = Reference(algorithm, optimizer)
        for updates in range(3):
            batch, before = make_batch(updates), reference.log_alpha.exp().item()
            metrics = algorithm.update(batch, at(updates))
            critic, policy, alpha, entropy = reference.soft_update(batch)
            found = {name: float(value) for name, value in metrics.metrics.items()}
            assert found["loss/critic"] == pytest.approx(critic, rel=1e-4)
            assert found["loss/policy"] == pytest.approx(policy, rel=1e-4)
            assert found["loss/temperature"] == pytest.approx(alpha, rel=1e-4)
            assert found["policy/entropy"] == pytest.approx(entropy, rel=1e-4)
            assert found["train/temperature"] == pytest.approx(before)
            assert algorithm.temperature.log_alpha.item() == pytest.approx(reference.log_alpha.item(), abs=1e-6)
            reference.check(algorithm, metrics.priorities)


@each_algorithm
class TestEvery:
    def test_metrics_are_detached(self, name):
        result = make(name).update(make_batch(), at(1))
        assert {"loss/critic", "loss/policy", "value/q_mean", "train/learning_rate", "train/gradient_norm"} <= set(
            result.metrics
        )
        assert result.num_updates == 1
        assert not result.priorities.requires_grad
        for value in result.metrics.values():
            assert math.isfinite(float(value))
            assert not getattr(value, "requires_grad", False)

    def test_terminated_rows_do_not_bootstrap(self, name):
        batch = make_batch()._replace(discount=torch.zeros(B))
        algorithm = make(name)
        q = algorithm.policy.critic(batch.obs, batch.action)
        priorities = algorithm.update(batch, at()).priorities
        torch.testing.assert_close(priorities, (q - batch.reward).abs().mean(0))

    def test_weights_choose_what_is_learned(self, name):
        # a row without weight does not move the critics
        kept = torch.ones(B)
        kept[5] = 0
        learned = []
        for reward in (0.0, 100.0):
            batch = make_batch(weight=kept)
            batch.reward[5] = reward
            algorithm = make(name)
            priorities = algorithm.update(batch, at(1)).priorities
            learned.append(copy.deepcopy(algorithm.policy.state_dict()))
            assert (priorities[5] > 90) == (reward == 100.0)  # the errors themselves are not weighed
        assert_equal(dict(learned[0]), dict(learned[1]))

    def test_weights_scale_the_loss(self, name):
        one = make(name).update(make_batch(weight=torch.ones(B)), at()).metrics["loss/critic"]
        two = make(name).update(make_batch(weight=2 * torch.ones(B)), at()).metrics["loss/critic"]
        assert float(two) == pytest.approx(2 * float(one))

    @pytest.mark.parametrize("steps", [2, 3])  # in the middle of TD3's delay, and after it
    def test_state_round_trip(self, name, steps):
        one, two = make(name, seed=0), make(name, seed=1)
        for updates in range(steps):
            one.update(make_batch(updates), at(updates))
        two.load_state_dict(state_of(one))
        assert_equal(state_of(one), state_of(two))
        for updates in range(steps, steps + 3):
            results = [algorithm.update(make_batch(updates), at(updates)) for algorithm in (one, two)]
            assert torch.equal(results[0].priorities, results[1].priorities)
        assert_equal(state_of(one), state_of(two))

    def test_weights_come_from_the_stream(self, name):
        before = torch.get_rng_state()
        one, two, other = make(name, seed=3), make(name, seed=3), make(name, seed=4)
        for algorithm in (one, two, other):
            algorithm.update(make_batch(), at(1))
        assert_equal(state_of(one), state_of(two))
        assert not same(dict(one.policy.state_dict()), other.policy)
        assert torch.equal(torch.get_rng_state(), before)

    def test_targets_begin_as_copies_and_follow_slowly(self, name):
        algorithm = make(name, tau=0.25)
        online, target = algorithm.policy.critic, algorithm.critic_target.module
        assert same(dict(online.state_dict()), target)
        before = copy.deepcopy(target.state_dict())
        algorithm.update(make_batch(), at(1))
        for key, value in target.state_dict().items():
            torch.testing.assert_close(value, 0.75 * before[key] + 0.25 * online.state_dict()[key])

    def test_start_from_copies_into_the_targets(self, name):
        trained, fresh = make(name, seed=0, tau=0.5), make(name, seed=1, tau=0.5)
        for updates in range(3):
            trained.update(make_batch(updates), at(updates))
        fresh.start_from(copy.deepcopy(trained.state_dict()["policy"]))
        assert same(dict(trained.policy.state_dict()), fresh.policy)
        assert same(dict(trained.policy.critic.state_dict()), fresh.critic_target.module)
        if name != "sac":
            assert same(dict(trained.policy.actor.state_dict()), fresh.actor_target.module)
        assert fresh.state_dict()["actor_store"]["step"] == 0  # everything else as in a new run

    def test_actor_step_leaves_the_critics_gradient_alone(self, name):
        algorithm = make(name)
        norm = algorithm.update(make_batch(), at(1)).metrics["train/gradient_norm"]
        assert algorithm.critic_store.grad.norm().item() == pytest.approx(float(norm))

    def test_gradients_are_clipped(self, name):
        algorithm = make(name, max_grad_norm=1e-3, learning_rate=1.0, optimizer=OptimizerConfig("sgd"))
        before = [algorithm.actor_store.flat.detach().clone(), algorithm.critic_store.flat.detach().clone()]
        norm = algorithm.update(make_batch(), at(1)).metrics["train/gradient_norm"]
        assert float(norm) > 1e-3  # reported as it was
        for old, store in zip(before, (algorithm.actor_store, algorithm.critic_store), strict=True):
            assert (store.flat.detach() - old).norm().item() == pytest.approx(1e-3, rel=0.01)

    def test_scheduled_learning_rates(self, name):
        algorithm = make(name, learning_rate=Linear(1e-2, 0.0))
        before = algorithm.policy.state_dict()
        before = {key: value.clone() for key, value in before.items()}
        metrics = algorithm.update(make_batch(), at(1, fraction=1.0)).metrics
        assert metrics["train/learning_rate"] == 0
        assert same(before, algorithm.policy)  # none for the critics means the same schedule
        assert algorithm.learning_rates(at(fraction=0.5)) == {"actor_rate": 0.005, "critic_rate": 0.005}
        other = make(name, learning_rate=Linear(1e-2, 0.0), critic_learning_rate=0.1)
        assert other.learning_rates(at(fraction=0.5)) == {"actor_rate": 0.005, "critic_rate": 0.1}

    def test_scheduled_exploration(self, name):
        algorithm = make(name, noise=NoiseConfig("gaussian", Linear(1.0, 0.0)))
        policy = algorithm.explore(at(fraction=0.25))
        assert policy is algorithm.policy
        assert algorithm.state_dict()["policy"]["noise_std"].item() == 0.75

    def test_training_mode_ends_with_the_update(self, name):
        algorithm = make(name)
        assert not algorithm.policy.training
        algorithm.update(make_batch(), at(1))
        assert not any(module.training for module in algorithm.policy.modules())

    @pytest.mark.parametrize("shape", [(), (2, 2)])
    def test_other_shapes(self, name, shape):
        space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
        algorithm = make(name, spec=EnvSpec(space, spaces.Box(-1, 1, shape)))
        obs = {"a": torch.randn(B, 2), "b": torch.arange(B) % 3}
        batch = make_batch()._replace(obs=obs, next_obs=obs, action=torch.rand(B, *shape))
        assert torch.isfinite(algorithm.update(batch, at(1)).priorities).all()
        assert algorithm.policy.act(obs, deterministic=True).action.shape == (B, *shape)

    def test_settings_from_a_file(self, name):
        config, problems = ALGORITHMS[name][1], []
        schedule = {"schedule": "linear", "start": 1e-3, "end": 1e-4}
        data = {"critic_learning_rate": schedule, "noise": {"kind": "ou", "std": 0.2}, "network": {"actor_sizes": [8]}}
        made = build(config, data, name, problems)
        assert not problems
        assert made.critic_learning_rate == Linear(1e-3, 1e-4)
        assert made.noise.kind == "ou"
        assert build(config, to_plain(made), name, problems) == made
        assert build(config, {"critic_learning_rate": None}, name, problems).critic_learning_rate is None
        assert not problems

    def test_finds_the_best_action(self, name):
        # a bandit: the reward is highest at 0.5 in one dimension and -0.3 in the other
        best = torch.tensor([0.5, -0.3])
        settings = {"temperature": 0.001} if name == "sac" else {}
        settings["network"] = OffPolicyNetworkConfig((32, 32), (32, 32))
        algorithm = make(name, learning_rate=1e-3, critic_learning_rate=5e-3, **settings)
        for updates in range(600):
            batch = make_batch(updates, weight=torch.ones(64), rows=64)
            reward = -(batch.action - best).square().sum(1)
            algorithm.update(batch._replace(reward=reward, discount=torch.zeros(64)), at(updates))
        action = algorithm.policy.act(make_batch(rows=64).obs, deterministic=True).action
        assert (action - best).abs().mean().item() < 0.2


class TestRecording:
    """An update is recorded as a whole; `Accelerated` itself is tested elsewhere."""

    @pytest.mark.parametrize(
        ("name", "settings", "num_recordings"),
        [
            ("ddpg", {}, 1),
            ("td3", {}, 2),  # with the actor and without
            ("td3", {"policy_delay": 1, "max_grad_norm": 0.5}, 1),
            ("sac", {}, 1),
            ("sac", {"temperature": 0.2, "policy_delay": 3}, 2),
            ("sac", {"max_grad_norm": 0.5, "num_critics": 3}, 1),
        ],
    )
    def test_replays_have_the_bits_of_what_is_written(self, name, settings, num_recordings):
        quick, plain = make(name, **settings), make(name, **settings)
        for updates in range(4 * (SEEN_BEFORE + 2)):
            plain.gradient_steps._seen.clear()  # each call is its first, so it is never recorded
            found, expected = (a.update(make_batch(updates), at(updates)) for a in (quick, plain))
            assert_equal(found.metrics, expected.metrics)
            assert torch.equal(found.priorities, expected.priorities)
            assert_equal(quick.state_dict(), plain.state_dict())
        assert quick.gradient_steps.num_recordings == num_recordings
        assert plain.gradient_steps.num_recordings == 0

    @each_algorithm
    def test_one_that_is_restored_goes_on_with_the_same_bits(self, name):
        first, second = make(name), make(name, seed=1)
        until = 2 * (SEEN_BEFORE + 2)
        for updates in range(until):
            first.update(make_batch(updates), at(updates))
        second.load_state_dict(state_of(first))
        for updates in range(until, 2 * until):
            for algorithm in (first, second):
                algorithm.update(make_batch(updates), at(updates))
            assert_equal(first.state_dict(), second.state_dict())

    def test_only_the_parts_are_recorded_where_more_may_happen_between_them(self):
        class Slow(SACAlgorithm):
            """Its targets follow at every third update, which it counts in Python."""

            count = 0

            def update_targets(self, tau):
                self.count += 1
                if self.count % 3 == 0:
                    super().update_targets(1.0)

        algorithm = Slow(SACConfig(), SPEC, CPU, np.random.default_rng(0))
        changes = []
        for updates in range(9):
            before = algorithm.critic_target.flat.clone()
            algorithm.update(make_batch(updates), at(updates))
            changes.append(not torch.equal(before, algorithm.critic_target.flat))
        assert changes == [False, False, True] * 3
        assert "Slow may do more than compute tensors" in algorithm.gradient_steps.status()
        assert algorithm.critic_step._step.num_recordings == 1


class TestDelays:
    def changes(self, name, updates, **settings):
        """Which parts an update changes."""
        algorithm = make(name, **settings)
        parts = {"actor": algorithm.policy.actor, "critic": algorithm.policy.critic}
        parts["critic_target"] = algorithm.critic_target.module
        if name != "sac":
            parts["actor_target"] = algorithm.actor_target.module
        before = copy.deepcopy({key: dict(part.state_dict()) for key, part in parts.items()})
        algorithm.update(make_batch(), at(updates))
        return {key for key, part in parts.items() if not same(before[key], part)}

    @pytest.mark.parametrize(("delay", "due"), [(1, {0, 1, 2, 3, 4, 5}), (2, {1, 3, 5}), (3, {2, 5})])
    def test_td3(self, delay, due):
        for updates in range(6):
            expected = {"critic", "actor", "critic_target", "actor_target"} if updates in due else {"critic"}
            assert self.changes("td3", updates, policy_delay=delay) == expected

    def test_sac(self):
        # the targets follow the critics at every step, as there is none of the actor
        assert self.changes("sac", 0, policy_delay=2) == {"critic", "critic_target"}
        assert self.changes("sac", 1, policy_delay=2) == {"critic", "critic_target", "actor"}

    def test_defaults(self):
        assert DDPGConfig().num_critics == 1
        assert TD3Config().policy_delay == 2
        assert SACConfig().policy_delay == 1
        assert SACConfig().noise.kind == "none"
        assert TD3Config().noise == DDPGConfig().noise == NoiseConfig("gaussian", 0.1)


class TestTargetNoise:
    def test_none(self):
        # without noise and delay, TD3 with one critic is DDPG
        td3 = make("td3", target_noise=0.0, policy_delay=1, num_critics=1)
        ddpg = make("ddpg")
        for updates in range(3):
            td3.update(make_batch(updates), at(updates))
            ddpg.update(make_batch(updates), at(updates))
        for part in ("policy", "critic_target", "actor_target", "actor_store", "critic_store"):
            assert_equal(state_of(td3)[part], state_of(ddpg)[part])

    def test_clip(self):
        # noise clipped to nothing is no noise
        one, two = make("td3", target_noise=5.0, target_noise_clip=0.0), make("td3", target_noise=0.0)
        first, second = one.update(make_batch(), at()), two.update(make_batch(), at())
        assert torch.equal(first.priorities, second.priorities)


class TestTemperature:
    def test_fixed(self):
        algorithm = make("sac", temperature=0.3)
        before = algorithm.temperature.log_alpha.item()
        for updates in range(3):
            metrics = algorithm.update(make_batch(updates), at(updates)).metrics
            assert metrics["train/temperature"] == 0.3
            assert "loss/temperature" not in metrics
        assert algorithm.temperature.log_alpha.item() == before

    def test_fixed_equals_learned_before_it_learns(self):
        fixed, learned = make("sac", temperature=0.5), make("sac", initial_temperature=0.5)
        first, second = (algorithm.update(make_batch(), at()) for algorithm in (fixed, learned))
        torch.testing.assert_close(first.priorities, second.priorities)
        torch.testing.assert_close(fixed.actor_store.flat, learned.actor_store.flat)

    @pytest.mark.parametrize(("target_entropy", "grows"), [(100.0, True), (-100.0, False)])
    def test_learned(self, target_entropy, grows):
        algorithm = make("sac", target_entropy=target_entropy, initial_temperature=0.2)
        assert algorithm.temperature.log_alpha.exp().item() == pytest.approx(0.2)
        algorithm.update(make_batch(), at())
        assert (algorithm.temperature.log_alpha.exp().item() > 0.2) == grows

    def test_default_target_is_minus_the_number_of_dimensions(self):
        assert make("sac").target_entropy == -2
        assert make("sac", spec=EnvSpec(SPEC.observation_space, spaces.Box(-1, 1, (2, 3)))).target_entropy == -6
        assert make("sac", target_entropy=-0.5).target_entropy == -0.5
