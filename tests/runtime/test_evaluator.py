"""The evaluator: whole episodes, an equal share for each environment, frozen statistics, seeds of its own."""

from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training import PPO, TrainConfig
from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.spec import EnvSpec
from rl_training.data.normalize import ObservationNormalizer
from rl_training.envs.actions import ActionMap
from rl_training.envs.vector import AutoresetAdapter
from rl_training.policies.exploration import RandomPolicy
from rl_training.runtime.evaluator import Evaluator

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
SMALL = {"num_steps": 16, "num_epochs": 1, "eval_every": 0, "device": "cpu"}


class Fixed(gym.Env):
    """Episodes of a fixed length that pay 100 times that length at the end. Long ones are truncated, and successes."""

    def __init__(self, length):
        self.observation_space = spaces.Box(-10.0, 10.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        ended, long = self.steps == self.length, self.length > 2
        info = {"is_success": long} if ended else {}
        reward = 100.0 * self.length if ended else 0.0
        return np.full(1, self.steps, np.float32), reward, ended and not long, ended and long, info


LENGTHS = (1, 2, 9)


class Recorder:
    """Action 0 if deterministic, otherwise a coin; remembers what it was shown."""

    box_actions = "clip"

    def __init__(self):
        self.seen, self.states, self.deterministic = [], [], []

    def act(self, obs, *, deterministic=False, action_mask=None, state=None, episode_start=None, rng=None):
        self.seen.append(obs.clone())
        self.states.append(state)
        self.deterministic.append(deterministic)
        coins = torch.zeros(len(obs), dtype=torch.int64)
        if not deterministic:
            coins = torch.from_numpy(rng.integers(2, size=len(obs)))
        return ActOutput(coins, {}, len(self.seen))


def make_evaluator(vector, **kwargs):
    return Evaluator(AutoresetAdapter(vector), ActionMap(vector.single_action_space), **kwargs)


def fixed(mode):
    return SyncVectorEnv([lambda n=n: Fixed(n) for n in LENGTHS], autoreset_mode=mode)


def cartpoles(mode=AutoresetMode.DISABLED, num_envs=2):
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * num_envs, autoreset_mode=mode)


@modes
@pytest.mark.parametrize("num_episodes", [1, 2, 3, 4, 7, 9])
def test_each_environment_plays_its_share(mode, num_episodes):
    """Short episodes would be over-represented if whoever finishes first counted."""
    result = make_evaluator(fixed(mode)).evaluate(Recorder(), num_episodes)
    assert len(result.returns) == len(result.lengths) == num_episodes
    share = {length: num_episodes // 3 + (env < num_episodes % 3) for env, length in enumerate(LENGTHS)}
    assert Counter(result.lengths) == Counter(share)
    assert sorted(result.returns) == sorted(100.0 * length for length in result.lengths), "every episode is whole"


@modes
def test_successes_are_counted(mode):
    result = make_evaluator(fixed(mode)).evaluate(Recorder(), 6)
    assert sorted(result.successes) == [False] * 4 + [True] * 2
    assert result.success_rate == pytest.approx(2 / 6)
    assert make_evaluator(cartpoles(mode)).evaluate(Recorder(), 2).success_rate is None


@modes
def test_equal_seeds_equal_episodes(mode):
    evaluator = make_evaluator(cartpoles(mode))
    first = evaluator.evaluate(Recorder(), 6, deterministic=False, seed=5)
    again = evaluator.evaluate(Recorder(), 6, deterministic=False, seed=5)
    other = evaluator.evaluate(Recorder(), 6, deterministic=False, seed=6)
    fresh = make_evaluator(cartpoles(mode)).evaluate(Recorder(), 6, deterministic=False, seed=5)
    assert first == again == fresh
    assert first != other
    assert first.returns == [float(length) for length in first.lengths]


def test_start_states_come_from_the_seed():
    evaluator = make_evaluator(cartpoles())
    starts = {}
    for seed in (1, 1, 2):
        policy = Recorder()
        evaluator.evaluate(policy, 2, seed=seed)
        start = policy.seen[0]
        assert torch.equal(start, starts.setdefault(seed, start))
    assert not torch.equal(starts[1], starts[2])


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_policy_is_asked_as_wanted(deterministic):
    policy = Recorder()
    make_evaluator(fixed(AutoresetMode.DISABLED)).evaluate(policy, 3, deterministic=deterministic)
    assert set(policy.deterministic) == {deterministic}
    assert policy.states == [None, *range(1, len(policy.states))]


def test_the_normaliser_is_used_and_left_alone():
    vector = fixed(AutoresetMode.DISABLED)
    normalizer = ObservationNormalizer(vector.single_observation_space)
    normalizer.update(np.array([[2.0], [6.0]]))  # mean 4, deviation 2
    before = normalizer.state_dict()
    before = {name: value.copy() for name, value in before["moments"][""].items()}
    policy = Recorder()
    make_evaluator(vector, obs_normalizer=normalizer).evaluate(policy, 3)
    np.testing.assert_equal(normalizer.state_dict()["moments"][""], before)
    assert policy.seen[0].tolist() == [[-2.0]] * 3, "zero, seen through mean 4 and deviation 2"


# Through the agent


def test_normalisation_is_frozen_in_evaluation():
    agent = PPO("CartPole-v1", num_envs=2, normalize_obs=True, normalize_reward=True, **SMALL)
    agent.learn(200, progress=False)
    collector = agent._experiment.trainer.collector
    statistics = (collector.obs_normalizer.moments[""], collector.reward_normalizer.moments)
    before = [(float(m.count), m.mean.copy(), m.var.copy()) for m in statistics]
    result = agent.evaluate(5)
    np.testing.assert_equal([(float(m.count), m.mean, m.var) for m in statistics], before)
    assert result.returns == [float(length) for length in result.lengths], "returns are raw, not normalised"
    agent.learn(200, progress=False)
    assert float(statistics[0].count) > before[0][0]


def test_evaluation_leaves_training_environments_alone():
    agent = PPO("CartPole-v1", num_envs=2, **SMALL)
    agent.learn(64, progress=False)
    collector = agent._experiment.trainer.collector
    streams = (collector.env_rng, collector.policy_rng)
    obs, before = collector.obs.copy(), [stream.bit_generator.state for stream in streams]
    state = collector.env.env.envs[0].unwrapped.state
    episodes = collector.statistics.num_episodes
    agent.evaluate(5, deterministic=False)
    assert np.array_equal(collector.obs, obs)
    assert [stream.bit_generator.state for stream in streams] == before
    assert np.array_equal(collector.env.env.envs[0].unwrapped.state, state)
    assert collector.statistics.num_episodes == episodes


@modes
def test_an_environment_object_is_copied_for_evaluation(mode):
    vector = cartpoles(mode, num_envs=3)
    agent = PPO(vector, **SMALL)
    agent.learn(64, progress=False)
    obs = agent._experiment.trainer.collector.obs.copy()
    assert agent.evaluate(4, seed=1) == agent.evaluate(4, seed=1)
    assert agent._experiment.evaluator.env.env is not vector
    assert np.array_equal(agent._experiment.trainer.collector.obs, obs)
    agent.learn(64, progress=False)


def test_an_evaluation_environment_of_its_own():
    agent = PPO("CartPole-v1", eval_env=lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1"), 5), num_envs=2, **SMALL)
    result = agent.evaluate(4)
    assert result.lengths == [5] * 4


def test_at_least_one_episode():
    agent = PPO("CartPole-v1", num_envs=1, **SMALL)
    with pytest.raises(ConfigError, match="num_episodes"):
        agent.evaluate(0)
    assert len(agent.evaluate(1).returns) == 1


def test_the_default_seed_of_an_agent_is_its_own():
    agent, same, other = (PPO("CartPole-v1", num_envs=2, seed=seed, **SMALL) for seed in (1, 1, 2))
    first = agent.evaluate(4, deterministic=False)
    assert first == agent.evaluate(4, deterministic=False) == same.evaluate(4, deterministic=False)
    assert first != other.evaluate(4, deterministic=False)


class Counting(Fixed):
    """Pays for action 1."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(action), *rest


@pytest.mark.parametrize(("epsilon", "low", "high"), [(0.0, 0, 0), (0.2, 0.04, 0.18), (1.0, 0.4, 0.6)])
def test_some_actions_are_random_if_so_set(epsilon, low, high):
    """The policy always takes action 0, and a random one is action 1 in half of all cases."""
    vector = SyncVectorEnv([lambda: Counting(100)] * 2, autoreset_mode=AutoresetMode.DISABLED)
    random_policy = RandomPolicy(EnvSpec(vector.single_observation_space, vector.single_action_space))
    evaluator = make_evaluator(vector, random_policy=random_policy if epsilon else None, epsilon=epsilon)
    result = evaluator.evaluate(Recorder(), 4, seed=1)
    assert low <= result.mean / 100 <= high
    assert evaluator.evaluate(Recorder(), 4, seed=1) == result
    assert epsilon == 0 or evaluator.evaluate(Recorder(), 4, seed=2) != result


def test_an_agent_evaluates_as_its_settings_say():
    agent = PPO("CartPole-v1", num_envs=2, eval_deterministic=False, eval_epsilon=0.5, seed=1, **SMALL)
    assert agent.evaluate(4) == agent.evaluate(4, deterministic=False)
    assert agent.evaluate(4) != agent.evaluate(4, deterministic=True)
    exact = PPO("CartPole-v1", num_envs=2, seed=1, **SMALL)
    assert exact.evaluate(4) == exact.evaluate(4, deterministic=True)
    assert exact.evaluate(4) != agent.evaluate(4, deterministic=True), "of which half are random"


def test_results_sum_themselves_up():
    result = EvaluationResult([1.0, 2.0, 6.0], [1, 2, 3], [True, False, True])
    assert result.mean == 3.0
    assert result.std == pytest.approx(np.sqrt(14 / 3))
    assert result.success_rate == pytest.approx(2 / 3)
    assert result.as_dict()["returns"] == [1.0, 2.0, 6.0]
    assert "success_rate" not in EvaluationResult([1.0], [1]).as_dict()


# Episodes without end


class Endless(Fixed):
    """Ends by itself only after `length` steps; every step pays 1."""

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1.0, terminated, truncated, info


@modes
def test_an_episode_without_end_is_truncated_and_counted(mode):
    vector = SyncVectorEnv([lambda: Endless(10**9)] * 2, autoreset_mode=mode)
    evaluator = make_evaluator(vector, max_steps=5)
    with pytest.warns(UserWarning, match=r"3 of 3 evaluation episodes .* after 5 steps \(eval_max_steps\)"):
        result = evaluator.evaluate(Recorder(), 3)
    assert (result.returns, result.lengths, result.num_cut) == ([5.0] * 3, [5] * 3, 3)
    assert result.as_dict()["num_cut"] == 3


@modes
def test_other_episodes_are_whole_beside_truncated_ones(mode):
    """The second environment's episodes end by themselves, one step after the first one's are cut."""
    vector = SyncVectorEnv([lambda: Endless(10**9), lambda: Endless(3)], autoreset_mode=mode)
    with pytest.warns(UserWarning, match="2 of 4"):
        result = make_evaluator(vector, max_steps=5).evaluate(Recorder(), 4)
    assert (sorted(result.lengths), result.num_cut) == ([3, 3, 5, 5], 2)


@modes
def test_an_episode_that_ends_at_the_limit_is_not_cut(mode):
    vector = SyncVectorEnv([lambda: Endless(5)], autoreset_mode=mode)
    result = make_evaluator(vector, max_steps=5).evaluate(Recorder(), 3)
    assert (result.lengths, result.num_cut) == ([5, 5, 5], 0)


@modes
def test_the_end_of_a_truncated_episode_is_not_counted_again(mode):
    """It ends after 7 steps, when the other environment still plays."""
    vector = SyncVectorEnv([lambda: Endless(7), lambda: Endless(4)], autoreset_mode=mode)
    with pytest.warns(UserWarning, match="eval_max_steps"):
        result = make_evaluator(vector, max_steps=5).evaluate(Recorder(), 6)
    assert (sorted(result.lengths), result.num_cut) == ([4, 4, 4, 5, 5, 5], 3)


def test_an_id_without_a_time_limit_trains_and_evaluates(tmp_path):
    """CliffWalking pays -1 per step, and a deterministic untrained policy never arrives."""
    settings = {"num_envs": 2, "total_timesteps": 64, "eval_every": 32, "eval_episodes": 3, "eval_max_steps": 20}
    agent = PPO("CliffWalking-v1", **{**SMALL, **settings})
    with pytest.warns(UserWarning, match="eval_max_steps"):
        result = agent.learn(progress=False, run_dir=tmp_path / "run")
    assert result.stop_reason == "finished"
    assert result.final_evaluation.num_cut > 0
    assert max(result.final_evaluation.lengths) <= 20
    assert PPO("CliffWalking-v1").config.eval_max_steps == 10_000
    game = TrainConfig(algo="ppo", env_id="ALE/Pong-v5", atari={"frame_skip": 2})
    assert game.eval_max_steps == 54_000
