"""Off-policy evaluation of agents against the true value of small tasks."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training import PPO, SAC, TD3
from rl_training.contracts.errors import ConfigError
from rl_training.data.dataset import Dataset, DatasetError

GAMMA = 0.5
ACTIONS = spaces.Discrete(2)
ONE_HOT = spaces.Box(0.0, 1.0, (2,))
BOUNDED = spaces.Box(-2.0, 2.0, (1,))
TABLE = {"sizes": (), "learning_rate": 2e-2, "batch_size": 128, "target_update_every": 40, "num_updates": 500}
"""Linear functions of one-hot observations: every table can be represented exactly."""
TINY = {"network": {"actor_sizes": [8], "critic_sizes": [8]}, "accelerate": "off"}


class Task(gym.Env):
    """Gives the spaces; the data comes from elsewhere."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}


def two_states(**changes):
    """All that can happen in the task of tests/functional/test_off_policy_evaluation.py, as often as under mu.

    State 0: action 0 pays 1 and terminates, action 1 goes to state 1; there, action 0 pays 2 and action 1 pays 6.
    """
    episodes = [[(0, 0, 1.0)]] * 3 + [[(0, 1, 0.0), (1, 0, 2.0)]] * 2 + [[(0, 1, 0.0), (1, 1, 6.0)]]
    behaviour = {(0, 0): 1 / 2, (0, 1): 1 / 2, (1, 0): 2 / 3, (1, 1): 1 / 3}
    steps = [step for episode in episodes for step in episode]
    columns = {
        "observations": np.eye(2, dtype=np.float32)[[state for state, _, _ in steps]],
        "actions": np.array([action for _, action, _ in steps]),
        "rewards": np.array([reward for _, _, reward in steps], np.float32),
        "terminated": np.concatenate([np.arange(len(e)) == len(e) - 1 for e in episodes]),
        "truncated": np.zeros(len(steps), bool),
        "final_observations": np.zeros((len(episodes), 2), np.float32),
        "observation_space": ONE_HOT,
        "action_space": ACTIONS,
        "extras": {"log_prob": np.log([behaviour[state, action] for state, action, _ in steps]).astype(np.float32)},
    }
    return Dataset(**{**columns, **changes})


@pytest.fixture(scope="module")
def agent():
    """Untrained, with initial weights large enough that its probabilities are far from a half."""
    agent = PPO(Task(ONE_HOT, ACTIONS), gamma=GAMMA, seed=4, accelerate="off")
    with torch.no_grad():
        agent.policy.head.linear.weight.mul_(100.0)
    return agent


def true_value(agent):
    """The sum over all that can happen, of probability times discounted return."""
    log_prob = agent.policy.log_prob(torch.eye(2).repeat(2, 1), torch.tensor([0, 0, 1, 1]))
    (a00, a10), (a01, a11) = log_prob.double().exp().reshape(2, 2).tolist()
    assert a00 + a01 == pytest.approx(1)
    assert max(abs(a00 - 0.5), abs(a11 - 1 / 3)) > 0.05  # not the behaviour policy
    return a00 * 1.0 + a01 * GAMMA * (a10 * 2.0 + a11 * 6.0)


@pytest.mark.parametrize("method", ["is", "wis", "pdis"])
def test_ratios_give_the_true_value(method, agent):
    found = agent.estimate_value(two_states(), method, deterministic=False)
    assert found.value == pytest.approx(true_value(agent), rel=1e-5)
    assert found.behaviour_value == pytest.approx((3 * 1 + 2 * 1 + 3) / 6)
    assert 1 < found.effective_episodes < 6
    assert (found.gamma, found.num_episodes, found.critics_std) == (GAMMA, 6, None)


@pytest.mark.parametrize("method", ["fqe", "dr"])
def test_fitted_q_gives_the_true_value(method, agent):
    found = agent.estimate_value(two_states(), method, deterministic=False, **TABLE)
    assert found.value == pytest.approx(true_value(agent), abs=0.06)
    assert found.critics_std < 0.05
    assert abs(found.value - found.behaviour_value) > 0.1
    if method == "dr":
        assert found.standard_error < 0.1 * agent.estimate_value(two_states(), "is", deterministic=False).standard_error


def test_doubly_robust_corrects_a_model_that_learned_nothing(agent):
    found = agent.estimate_value(two_states(), "dr", deterministic=False, num_updates=1)
    wrong = agent.estimate_value(two_states(), "fqe", deterministic=False, num_updates=1)
    assert found.value == pytest.approx(true_value(agent), rel=1e-4)
    assert abs(wrong.value - true_value(agent)) > 0.5


def test_deterministic_discrete_actions(agent):
    greedy = agent.policy.act(torch.eye(2), deterministic=True).action.tolist()
    expected = 1.0 if greedy[0] == 0 else GAMMA * (2.0, 6.0)[greedy[1]]
    for method in ("is", "wis", "pdis"):
        assert agent.estimate_value(two_states(), method).value == pytest.approx(expected, rel=1e-5)
    assert agent.estimate_value(two_states(), **TABLE).value == pytest.approx(expected, abs=0.05)


def test_a_truncated_episode_is_worth_what_would_have_followed():
    """Reward 1 for ever is worth 2; the episodes that were cut after three steps earned 1.75."""
    rows = np.arange(6)
    data = two_states(
        observations=np.tile([1.0, 0.0], (6, 1)).astype(np.float32),
        actions=rows % 2,
        rewards=np.ones(6, np.float32),
        terminated=np.zeros(6, bool),
        truncated=rows % 3 == 2,
        final_observations=np.tile([1.0, 0.0], (2, 1)).astype(np.float32),
        extras={"log_prob": np.full(6, math.log(0.5))},
    )
    agent = PPO(Task(ONE_HOT, ACTIONS), gamma=GAMMA, accelerate="off")
    found = agent.estimate_value(data, deterministic=False, **TABLE)
    assert found.behaviour_value == pytest.approx(1.75)
    assert found.value == pytest.approx(2.0, abs=0.02)
    doubly = agent.estimate_value(data, "dr", deterministic=False, **TABLE)
    assert doubly.value == pytest.approx(2.0, abs=0.05)
    assert agent.estimate_value(data, "pdis", deterministic=False).value == pytest.approx(1.75, abs=0.02)


def one_step(rows=2000, **changes):
    """Episodes of one step whose reward is the action, uniform between -2 and 2."""
    actions = np.random.default_rng(0).uniform(-2, 2, (rows, 1)).astype(np.float32)
    columns = {
        "observations": np.tile([1.0, 0.0], (rows, 1)).astype(np.float32),
        "actions": actions,
        "rewards": actions[:, 0],
        "terminated": np.ones(rows, bool),
        "truncated": np.zeros(rows, bool),
        "final_observations": np.zeros((rows, 2), np.float32),
        "observation_space": ONE_HOT,
        "action_space": BOUNDED,
        "extras": {"log_prob": np.full(rows, -math.log(4.0), np.float32)},
    }
    return Dataset(**{**columns, **changes})


def test_sampled_real_valued_actions():
    """The mean reward is that of the agent's actions in the units of the environment."""
    agent = SAC(Task(ONE_HOT, BOUNDED), seed=2, **TINY)
    obs = torch.tensor([[1.0, 0.0]]).repeat(100_000, 1)
    expected = 2.0 * agent.policy.act(obs, rng=np.random.default_rng(1)).action.mean().item()
    assert abs(expected) > 0.02
    for method in ("is", "wis", "pdis"):
        found = agent.estimate_value(one_step(), method, deterministic=False)
        assert abs(found.value - expected) < 3 * found.standard_error + 0.01
        assert found.standard_error < 0.05
    found = agent.estimate_value(one_step(200), deterministic=False, **TABLE)
    assert found.value == pytest.approx(expected, abs=0.05)


def test_densities_are_those_of_the_environments_actions():
    """The density of actions in [-2, 2] integrates to one."""
    agent = SAC(Task(ONE_HOT, BOUNDED), seed=2, **TINY)
    grid = np.linspace(-2, 2, 4002, dtype=np.float32)[1:-1, None]
    data = one_step(4000, actions=grid, rewards=np.ones(4000, np.float32))
    assert agent.estimate_value(data, "is", deterministic=False).value == pytest.approx(1.0, abs=2e-3)


def test_deterministic_real_valued_actions():
    agent = TD3(Task(ONE_HOT, BOUNDED), seed=1, **TINY)
    expected = 2.0 * agent.policy.mode(torch.tensor([[1.0, 0.0]])).item()
    found = agent.estimate_value(one_step(), **TABLE)
    assert found.value == pytest.approx(expected, abs=0.05)
    assert found.deterministic


def test_equal_seeds_give_equal_estimates(agent):
    def estimate(seed):
        return agent.estimate_value(two_states(), deterministic=False, num_updates=20, seed=seed).value

    assert estimate(1) == estimate(1) != estimate(2)


def test_the_agent_is_not_changed(agent):
    before = {name: value.clone() for name, value in agent.policy.state_dict().items()}
    agent.estimate_value(two_states(), num_updates=5)
    assert all(torch.equal(before[name], value) for name, value in agent.policy.state_dict().items())


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"extras": {}}, {"method": "wis"}, "wis needs the column 'log_prob' .* there is no extra columns; use fqe"),
        ({}, {"method": "magic"}, "method: expected one of fqe, is, wis, pdis, dr, got 'magic'"),
        ({}, {"gamma": 1.5}, "gamma: must be between 0 and 1"),
        ({}, {"num_update": 3}, "unknown key 'num_update'. Did you mean 'num_updates'"),
        ({}, {"num_critics": 0}, "num_critics: must be >= 1"),
    ],
)
def test_what_cannot_be_estimated(change, arguments, message, agent):
    with pytest.raises(ConfigError, match=message):
        agent.estimate_value(two_states(**change), deterministic=False, **arguments)


def test_deterministic_actions_have_no_density():
    with pytest.raises(ConfigError, match=r"deterministic real-valued actions have no density.*--stochastic"):
        TD3(Task(ONE_HOT, BOUNDED), **TINY).estimate_value(one_step(), "is")
    with pytest.raises(ConfigError, match="needs a policy with known action probabilities"):
        TD3(Task(ONE_HOT, BOUNDED), **TINY).estimate_value(one_step(), "is", deterministic=False)


def test_impossible_behaviour_is_refused(agent):
    impossible = two_states(extras={"log_prob": np.full(9, -np.inf)})
    with pytest.raises(DatasetError, match="column 'log_prob': 9 of 9 ratios are not finite"):
        agent.estimate_value(impossible, "is", deterministic=False)


def test_other_spaces_are_refused(agent):
    with pytest.raises(DatasetError, match="does not fit"):
        agent.estimate_value(one_step())
