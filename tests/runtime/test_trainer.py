"""The trainer: its parts from plain Python, its step budget, its counters, and runs that repeat bit by bit."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training import A2C, PPO, Callback, Linear
from rl_training.algorithms.ppo import PPOAlgorithm, PPOConfig
from rl_training.contracts.algorithm import ActOutput, Algorithm
from rl_training.contracts.batches import EvaluationResult, UpdateResult
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import AlgorithmConfig, EnvSpec
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.envs.actions import ActionMap
from rl_training.envs.vector import AutoresetAdapter
from rl_training.runtime.collector import Collector
from rl_training.runtime.on_policy import OnPolicyTrainer

TINY = {"network": {"actor_sizes": (8,), "critic_sizes": (8,)}, "eval_every": 0, "device": "cpu"}
QUICK = {**TINY, "num_epochs": 1, "minibatch_size": 1_000}


class LeftPolicy:
    """Always action 0."""

    box_actions = "clip"

    def act(self, obs, **_):
        zeros = torch.zeros(len(obs))
        return ActOutput(zeros.long(), {"logprobs": zeros, "values": zeros})

    def value(self, obs):
        return torch.zeros(len(obs))


class Recorder(Algorithm):
    """Learns nothing; remembers what it was given, and where the run stood."""

    def __init__(self, spec, num_updates=2):
        super().__init__(AlgorithmConfig(), spec, torch.device("cpu"), random_stream(0, "algorithm"))
        self.policy = LeftPolicy()
        self.num_updates, self.rows, self.env_steps = num_updates, [], []

    def update(self, batch, progress):
        self.rows.append(batch.flatten().num_rows)
        self.env_steps.append(progress.env_steps)
        return UpdateResult({"loss/total": torch.tensor(float(len(self.rows)))}, num_updates=self.num_updates)


def make_collector(vector, seed=0):
    return Collector(
        AutoresetAdapter(vector),
        ActionMap(vector.single_action_space),
        policy_rng=random_stream(seed, "policy"),
        env_rng=random_stream(seed, "environment"),
    )


def make_trainer(vector, num_steps=8, algorithm=Recorder):
    spec = EnvSpec(vector.single_observation_space, vector.single_action_space)
    buffer = RolloutBuffer.for_spec(spec, num_steps, vector.num_envs)
    return OnPolicyTrainer(algorithm(spec), make_collector(vector), buffer)


def cartpoles(num_envs=2, mode=AutoresetMode.SAME_STEP):
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * num_envs, autoreset_mode=mode)


def numbers(metrics):
    """Metrics that must repeat: all but times."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def weights(agent):
    return {name: parameter.detach().clone() for name, parameter in agent.policy.named_parameters()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# By itself


def test_parts_from_plain_python():
    trainer = make_trainer(cartpoles(2), num_steps=8)
    result = trainer.run(40)
    assert trainer.algorithm.rows == [16, 16, 8], "the last rollout is cut to the budget"
    assert trainer.algorithm.env_steps == [0, 16, 32], "an update sees the steps before its rollout"
    assert (result.env_steps, trainer.iterations, trainer.updates) == (40, 3, 6)
    assert result.stop_reason == "finished"
    assert result.metrics["loss/total"] == 3.0
    assert result.metrics["global_step"] == 40
    assert result.metrics["train/updates"] == 6
    assert {"time/env_steps_per_second", "rollout/episodes"} <= result.metrics.keys()
    trainer.close()


def test_a_second_run_goes_on():
    trainer = make_trainer(cartpoles(2), num_steps=8)
    trainer.run(16)
    obs = trainer.collector.obs
    trainer.run(16)
    assert trainer.algorithm.rows == [16], "nothing left to do"
    assert trainer.collector.obs is obs
    trainer.run(48)
    assert trainer.algorithm.rows == [16, 16, 16]
    assert trainer.algorithm.env_steps == [0, 16, 32]
    assert trainer.progress.horizon == 16, "the first run fixes the horizon of schedules"


def test_a_real_algorithm_from_plain_python():
    def make_ppo(spec):
        config = PPOConfig(num_epochs=2, minibatch_size=32)
        return PPOAlgorithm(config, spec, torch.device("cpu"), random_stream(1, "algorithm"))

    trainer = make_trainer(cartpoles(2), num_steps=32, algorithm=make_ppo)
    before = trainer.policy.value_head.weight.detach().clone()
    result = trainer.run(128)
    assert result.metrics["train/updates"] == 2 * 2 * 2
    assert math.isfinite(result.metrics["loss/total"])
    assert not torch.equal(before, trainer.policy.value_head.weight)


class OneStep(gym.Env):
    """Every step ends an episode."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, True, False, {}


def test_a_rollout_of_resets_is_not_learned_from():
    """Next-step environments with one-step episodes: every second rollout of length one holds no transition."""
    trainer = make_trainer(SyncVectorEnv([OneStep] * 3, autoreset_mode=AutoresetMode.NEXT_STEP), num_steps=1)
    result = trainer.run(9)
    assert trainer.algorithm.rows == [3, 3, 3]
    assert (result.env_steps, trainer.iterations, trainer.updates) == (9, 5, 6)
    assert result.metrics["rollout/episodes"] == 9


# Step budgets


class CountSteps(gym.Wrapper):
    """Counts over all copies."""

    total = 0

    def step(self, action):
        type(self).total += 1
        return super().step(action)


@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize("num_steps", [1, 7, 32])
@pytest.mark.parametrize("total", [1, 40, 101])
def test_the_budget_is_kept(num_envs, num_steps, total):
    CountSteps.total = 0
    agent = PPO(lambda: CountSteps(gym.make("CartPole-v1")), num_envs=num_envs, num_steps=num_steps, **QUICK)
    result = agent.learn(total, progress=False)
    assert total <= result.env_steps < total + num_envs
    assert CountSteps.total == result.env_steps == agent.num_timesteps == result.metrics["global_step"]
    result = agent.learn(total, progress=False)
    assert 2 * total <= result.env_steps < 2 * total + 2 * num_envs
    assert CountSteps.total == result.env_steps


@pytest.mark.parametrize("num_envs", [1, 3, 8])
@pytest.mark.parametrize("num_steps", [1, 7, 32])
@pytest.mark.parametrize("total", [1, 40, 301])
def test_the_budget_is_kept_by_native_environments(num_envs, num_steps, total):
    """Rows in which a next-step environment only resets are neither counted nor learned from."""
    agent = PPO("CartPole-v1", vectorization="native", num_envs=num_envs, num_steps=num_steps, **QUICK)
    trainer, rows = agent._experiment.trainer, []
    result = agent.learn(
        total, progress=False, callback=lambda run: rows.append(int(trainer.buffer.valid[: trainer.buffer.size].sum()))
    )
    assert total <= result.env_steps < total + num_envs
    assert sum(rows) == result.env_steps
    finished = result.metrics.get("rollout/length_mean", 0.0) * result.metrics["rollout/episodes"]
    in_flight = trainer.collector.statistics.running_length.sum()
    assert finished + in_flight == pytest.approx(result.env_steps)


def test_native_and_sync_have_episodes_of_the_same_lengths():
    """The adapter hides the way to reset: the same policy survives equally long in both."""
    lengths = {}
    for vectorization in ("sync", "native"):
        agent = PPO("CartPole-v1", vectorization=vectorization, num_envs=8, num_steps=64, learning_rate=0.0, **QUICK)
        lengths[vectorization] = agent.learn(4_000, progress=False).metrics["rollout/length_mean"]
    assert lengths["sync"] == pytest.approx(lengths["native"], rel=0.3)
    assert 15 < lengths["native"] < 30  # a random policy


# Schedules


@pytest.mark.parametrize(("cls", "extra"), [(PPO, {"num_epochs": 1}), (A2C, {})])
def test_schedules_follow_the_saved_counters(cls, extra):
    agent = cls("CartPole-v1", num_envs=2, num_steps=8, learning_rate=Linear(1.0e-3), **{**TINY, **extra})
    rates = []
    agent.learn(80, callback=lambda run: rates.append(run.metrics()["train/learning_rate"]), progress=False)
    assert rates == pytest.approx([1e-3 * (1 - steps / 80) for steps in range(0, 80, 16)])
    rates.clear()
    with pytest.warns(UserWarning, match="schedules of learning_rate ended at step 80"):
        agent.learn(32, callback=lambda run: rates.append(run.metrics()["train/learning_rate"]), progress=False)
    assert rates == [0.0, 0.0], "beyond the horizon that the first call fixed"


# Stopping and failing


def test_stop_ends_the_run_after_the_iteration():
    trainer = make_trainer(cartpoles(2), num_steps=8)

    class StopAt(Callback):
        def on_iteration(self, run):
            if run.iterations == 2:
                run.stop("enough")
                run.stop("and again")

    result = trainer.run(1_000, [StopAt()])
    assert (result.env_steps, result.stop_reason) == (32, "enough"), "the first reason counts"
    assert trainer.run(64).stop_reason == "finished", "a stop is not for ever"


def test_stop_before_the_start():
    class StopAtOnce(Callback):
        def on_start(self, run):
            run.stop("not today")

    trainer = make_trainer(cartpoles(2))
    result = trainer.run(1_000, [StopAtOnce()])
    assert (result.env_steps, result.stop_reason, trainer.iterations) == (0, "not today", 0)


def test_the_best_evaluation_is_remembered():
    class Evaluate(Callback):
        def on_iteration(self, run):
            run.report_evaluation(EvaluationResult([[5.0, 7.0, 6.0][run.iterations - 1]], [1]))

    trainer = make_trainer(cartpoles(2), num_steps=8)
    assert trainer.best_return is None
    assert trainer.run(48, [Evaluate()]).best_return == 7.0
    copy = make_trainer(cartpoles(2), num_steps=8)
    copy.load_state_dict(trainer.state_dict())
    assert copy.best_return == 7.0
    assert (copy.env_steps, copy.iterations, copy.updates) == (48, 3, 6)


# Runs that repeat


RUNS = {
    "ppo": (PPO, {"num_steps": 32, "num_epochs": 3, "minibatch_size": 32, "ent_coef": 0.01}, {}),
    "a2c": (A2C, {"num_steps": 8}, {}),
    "ppo-normalised": (PPO, {"num_steps": 32, "num_epochs": 2}, {"normalize_obs": True, "normalize_reward": True}),
    "ppo-native": (PPO, {"num_steps": 32, "num_epochs": 2}, {"vectorization": "native"}),
}


def run(name, seed=1, steps=600, **changes):
    """Weights after a run, and the metrics of every iteration."""
    cls, own, common = RUNS[name]
    agent = cls("CartPole-v1", seed=seed, num_envs=4, **{**TINY, **own, **common, **changes})
    history = []
    agent.learn(steps, callback=lambda view: history.append(numbers(view.metrics())), progress=False)
    agent.close()
    return weights(agent), history


@pytest.mark.parametrize("name", RUNS)
def test_equal_seeds_give_equal_bits(name):
    (first, history), (second, same_history) = run(name), run(name)
    assert same_bits(first, second)
    assert len(history) > 4
    for a, b in zip(history, same_history, strict=True):
        np.testing.assert_equal(a, b)  # exact; NaN is equal to NaN
    other, other_history = run(name, seed=2)
    assert not same_bits(first, other)
    assert all(not torch.equal(first[key], other[key]) for key in first if key.endswith("weight"))
    assert history[-1]["loss/total"] != other_history[-1]["loss/total"]


def test_evaluation_does_not_change_training():
    plain, history = run("ppo")
    watched, watched_history = run("ppo", eval_every=100, eval_episodes=3, eval_deterministic=False)
    assert same_bits(plain, watched)
    np.testing.assert_equal(history, watched_history)


def test_using_the_agent_does_not_change_training():
    plain, _ = run("ppo-normalised", steps=512)
    cls, own, common = RUNS["ppo-normalised"]
    agent = cls("CartPole-v1", seed=1, num_envs=4, **{**TINY, **own, **common})

    def use(view):
        torch.rand(3)
        np.random.random(3)  # noqa: NPY002 - the global state is what must not matter
        agent.predict(np.zeros(4, np.float32), deterministic=False)
        agent.value(np.zeros(4, np.float32))
        agent.evaluate(3, deterministic=False, seed=view.iterations)

    agent.evaluate(2)
    agent.learn(512, callback=use, progress=False)
    assert same_bits(plain, weights(agent))


def test_the_state_of_torch_and_numpy_does_not_matter():
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    plain, _ = run("a2c", steps=200)
    before = torch.get_rng_state()
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    state = torch.get_rng_state()
    other, _ = run("a2c", steps=200)
    assert same_bits(plain, other)
    assert torch.equal(state, torch.get_rng_state()), "and training leaves the global state alone"
    assert not torch.equal(before, state)


def test_more_environments_keep_the_streams_of_the_others():
    """Initial weights and first observations do not depend on who else draws."""
    few, many = (PPO("CartPole-v1", seed=1, num_envs=n, num_steps=1, **QUICK) for n in (2, 4))
    assert same_bits(weights(few), weights(many))
    for agent in (few, many):
        agent.learn(1, progress=False)
    first = [agent._experiment.trainer.buffer.obs[0].numpy() for agent in (few, many)]
    assert np.array_equal(first[0], first[1][:2])


def test_the_algorithm_and_the_policy_have_streams_of_their_own():
    """More shuffles (epochs) change what is learned, but not the noise of the first rollout after them."""
    once, often = (
        PPO("CartPole-v1", seed=1, num_envs=2, num_steps=16, learning_rate=0.0, **{**TINY, "num_epochs": n})
        for n in (1, 4)
    )
    rollouts = []
    for agent in (once, often):
        agent.learn(96, progress=False)
        rollouts.append(agent._experiment.trainer.buffer.obs.numpy().copy())
    assert np.array_equal(*rollouts)
