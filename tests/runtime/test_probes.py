"""Probes: environments so small that the right values and actions are known, trained through the whole loop.

Each isolates one thing that can break: the critic, the discount, the observation, the action, the end of an episode.
Every test also shows that the untrained agent fails it.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training import A2C, PPO, Linear

GAMMA = 0.9
NUM_ENVS = 8
COMMON = {"num_envs": NUM_ENVS, "gamma": GAMMA, "eval_every": 0, "seed": 1, "device": "cpu"}
SMALL = {"actor_sizes": (16,), "critic_sizes": (16,)}
AGENTS = {
    "ppo": (PPO, {"num_steps": 8, "num_epochs": 4, "learning_rate": Linear(0.02)}),
    "a2c": (A2C, {"num_steps": 4, "learning_rate": Linear(0.02), "optimizer": {"name": "adam"}}),
}
STEPS = {"ppo": 3_000, "a2c": 6_000}

algorithms = pytest.mark.parametrize("algo", sorted(AGENTS))


def make_agent(algo: str, env: Any, **changes: Any) -> Any:
    cls, settings = AGENTS[algo]
    return cls(env, **{**COMMON, **settings, "network": SMALL, **changes})


def learn(agent: Any, algo: str) -> None:
    agent.learn(STEPS[algo], progress=False)


class Probe(gym.Env):
    """Base: observations of one number, two actions."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.begin(), {}

    def begin(self):
        return number(0)


def number(value):
    return np.array([value], np.float32)


class OneStep(Probe):
    """One step, reward 1."""

    def step(self, action):
        return number(0), 1.0, True, False, {}


@algorithms
def test_constant_reward_teaches_the_value(algo):
    agent = make_agent(algo, OneStep)
    assert abs(agent.value(number(0)) - 1.0) > 0.5
    learn(agent, algo)
    assert agent.value(number(0)) == pytest.approx(1.0, abs=0.02)


class Delayed(Probe):
    """Two steps, reward 1 at the end."""

    def begin(self):
        self.late = False
        return number(0)

    def step(self, action):
        ended, self.late = self.late, True
        return number(1), float(ended), ended, False, {}


@algorithms
def test_delayed_reward_is_discounted(algo):
    agent = make_agent(algo, Delayed)
    assert abs(agent.value(number(0)) - GAMMA) > 0.5
    learn(agent, algo)
    assert agent.value(np.stack([number(0), number(1)])) == pytest.approx([GAMMA, 1.0], abs=0.03)


class Sign(Probe):
    """One step; the observation is 1 or -1 and the reward is the observation."""

    def begin(self):
        self.sign = float(self.np_random.choice([-1, 1]))
        return number(self.sign)

    def step(self, action):
        return number(0), self.sign, True, False, {}


@algorithms
def test_the_value_depends_on_the_observation(algo):
    agent = make_agent(algo, Sign)
    both = np.stack([number(-1), number(1)])
    assert np.abs(agent.value(both) - [-1, 1]).max() > 0.5
    learn(agent, algo)
    assert agent.value(both) == pytest.approx([-1.0, 1.0], abs=0.05)


class ActionMatters(Probe):
    """One step; action 1 is rewarded with 1, action 0 with -1."""

    def step(self, action):
        return number(0), 1.0 if action == 1 else -1.0, True, False, {}


@algorithms
def test_the_policy_learns_an_action(algo):
    agent = make_agent(algo, ActionMatters)
    assert agent.evaluate(100, deterministic=False, seed=1).mean < 0.5
    assert agent.predict(number(0))[0] == 0
    learn(agent, algo)
    assert agent.predict(number(0))[0] == 1
    assert agent.evaluate(100, deterministic=False, seed=1).mean > 0.9


class Match(Sign):
    """One step; reward 1 for action 1 where the observation is 1 and for action 0 where it is -1, otherwise -1."""

    def step(self, action):
        return number(0), 1.0 if (action == 1) == (self.sign > 0) else -1.0, True, False, {}


@algorithms
def test_the_policy_depends_on_the_observation(algo):
    agent = make_agent(algo, Match)
    assert agent.evaluate(100, deterministic=False, seed=1).mean < 0.5
    learn(agent, algo)
    assert agent.predict(np.stack([number(-1), number(1)]))[0].tolist() == [0, 1]
    assert agent.evaluate(100, deterministic=False, seed=1).mean > 0.9


class Clock(gym.Env):
    """Shows a clock hand, ticks for ever, and pays 1 at every tick, or only when the hand begins a new round.

    With `ends` it terminates after so many ticks instead; then the hand, started at 0, is the time.
    """

    def __init__(self, hours, *, ends=None, each_tick=True, random_start=False):
        self.observation_space = spaces.Discrete(hours)
        self.action_space = spaces.Discrete(2)
        self.hours, self.ends, self.each_tick, self.random_start = hours, ends, each_tick, random_start

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ticks = 0
        self.hand = int(self.np_random.integers(self.hours)) if self.random_start else 0
        return self.hand, {}

    def step(self, action):
        self.ticks += 1
        self.hand = (self.hand + 1) % self.hours
        reward = 1.0 if self.each_tick or self.hand == 0 else 0.0
        return self.hand, reward, self.ticks == self.ends, False, {}


LIMIT = 4
FOREVER = 1 / (1 - GAMMA)  # 10: a reward of 1 that never ends
FINITE = [1 + 0.9 + 0.81 + 0.729, 1 + 0.9 + 0.81, 1 + 0.9, 1]  # the same, over after four steps
MODES = {"same-step": AutoresetMode.SAME_STEP, "next-step": AutoresetMode.NEXT_STEP, "disabled": AutoresetMode.DISABLED}

# one weight for each hour: a table
TABLE = {"actor_sizes": (), "critic_sizes": ()}
TABULAR = {
    "ppo": {"network": TABLE, "learning_rate": Linear(0.1)},
    "a2c": {"network": TABLE, "learning_rate": Linear(0.1)},
}


def cut_clock():
    return gym.wrappers.TimeLimit(Clock(LIMIT), LIMIT)


def ending_clock():
    return Clock(LIMIT, ends=LIMIT)


def both_clock():
    """Terminates at the very step at which the limit truncates it: termination wins."""
    return gym.wrappers.TimeLimit(Clock(LIMIT, ends=LIMIT), LIMIT)


@pytest.mark.parametrize(
    ("algo", "mode"), [*(("ppo", mode) for mode in [*MODES, "callable"]), ("a2c", "next-step"), ("a2c", "callable")]
)
@pytest.mark.parametrize(
    ("make", "values"),
    [
        pytest.param(cut_clock, [FOREVER] * LIMIT, id="truncated"),
        pytest.param(ending_clock, FINITE, id="terminated"),
        pytest.param(both_clock, FINITE, id="both"),
    ],
)
def test_truncation_is_not_termination(algo, mode, make, values):
    env = make if mode == "callable" else SyncVectorEnv([make] * NUM_ENVS, autoreset_mode=MODES[mode])
    agent = make_agent(algo, env, **TABULAR[algo])
    hours = np.arange(LIMIT)
    assert np.abs(agent.value(hours) - values).max() > 1
    learn(agent, algo)
    assert agent.value(hours) == pytest.approx(values, rel=0.02, abs=0.05)
    assert agent._experiment.trainer.metrics()["rollout/length_mean"] == LIMIT


HOURS = 5
ROUND = [GAMMA ** (HOURS - 1 - hour) / (1 - GAMMA**HOURS) for hour in range(HOURS)]  # 1 at the end of every round


@pytest.mark.parametrize(("algo", "mode"), [*(("ppo", mode) for mode in MODES), ("a2c", "next-step")])
def test_truncation_bootstraps_from_the_true_last_observation(algo, mode):
    """Episodes are cut after three ticks, wherever the hand is; the next one begins at a random hour."""

    def make():
        return gym.wrappers.TimeLimit(Clock(HOURS, each_tick=False, random_start=True), 3)

    agent = make_agent(algo, SyncVectorEnv([make] * NUM_ENVS, autoreset_mode=MODES[mode]), **TABULAR[algo])
    hours = np.arange(HOURS)
    assert np.abs(agent.value(hours) - ROUND).max() > 1
    learn(agent, algo)
    # hour 4 is worth 2.44 and hour 0 is worth 1.60: a value of some other hour would show
    assert agent.value(hours) == pytest.approx(ROUND, abs=0.1)


class Near(Probe):
    """One step; the nearer the action is to 0.5 the better. The bounds are not symmetric around zero."""

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(-1.0, 3.0, (1,), np.float32)

    def step(self, action):
        assert self.action_space.contains(action)
        return number(0), -float((action[0] - 0.5) ** 2), True, False, {}


@algorithms
@pytest.mark.parametrize("box_actions", ["clip", "rescale", "squash"])
def test_a_continuous_action_is_found(algo, box_actions):
    network = {**SMALL, "log_std_init": -1.0}
    agent = make_agent(algo, Near, network=network, box_actions=box_actions)
    assert abs(agent.predict(number(0))[0].item() - 0.5) > 0.3
    learn(agent, algo)
    assert agent.predict(number(0))[0].item() == pytest.approx(0.5, abs=0.1)
    assert agent.evaluate(20, deterministic=False, seed=1).mean > -0.2
