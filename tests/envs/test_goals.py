"""Environments with goals: finding their reward functions, asking them for many goals, and learning in hindsight."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rl_training import DQN, TD3
from rl_training.contracts.batches import Progress
from rl_training.contracts.errors import EnvError, NonFiniteError, SpaceError
from rl_training.envs.goals import PROBE_ROWS, GoalFunction, check_goal_space, goal_functions
from rl_training.envs.workers import WorkerVectorEnv
from tests.envs.goal_tasks import BitFlipping, PointReaching, PointReachingOneByOne, PointTouching

RNG = np.random.default_rng(0)
ACHIEVED, DESIRED = RNG.integers(0, 2, (2, 100, 3)).astype(np.float32)
REACHED = (ACHIEVED == DESIRED).all(axis=1)
POINT = {"num_dims": 2, "num_steps": 5, "step_size": 0.5, "radius": 0.3}


class Asked:
    """A goal function that remembers how often it was asked, and with what."""

    def __init__(self, function):
        self.function = function
        self.calls = []

    def __call__(self, achieved, desired, info):
        self.calls.append((achieved.shape, info))
        return self.function(achieved, desired)

    @property
    def batches(self):
        return sum(len(shape) == 2 for shape, _ in self.calls)


def for_batches(achieved, desired):
    return (achieved == desired).all(axis=-1) - 1.0


def with_if(achieved, desired):
    return 0.0 if np.abs(achieved - desired).max() == 0 else -1.0


def with_ambiguous_if(achieved, desired):
    distance = np.linalg.norm(achieved - desired, axis=-1)
    return 0.0 if distance < 0.1 else -1.0  # raises for a batch


def with_assertion(achieved, desired):
    assert achieved.shape == (3,)
    return for_batches(achieved, desired)


def with_norm_of_everything(achieved, desired):
    return -float(np.linalg.norm(achieved - desired) > 0.1)


def elementwise(achieved, desired):
    return -np.abs(achieved - desired) if achieved.ndim == 2 else for_batches(achieved, desired)


def with_the_first_goal_only(achieved, desired):
    """A batch gives one number per row, but of the wrong goals."""
    if achieved.ndim == 2:
        desired = desired[0]
    return for_batches(achieved, desired)


class TestGoalFunction:
    def test_a_function_that_takes_batches_is_asked_once(self):
        asked = Asked(for_batches)
        function = GoalFunction(asked, "compute_reward")
        for _ in range(3):
            assert np.array_equal(function(ACHIEVED, DESIRED), REACHED - 1.0)
        assert function.vectorized is True
        assert asked.batches == 1 + 3, "one to find out, and one for each call"
        assert len(asked.calls) == PROBE_ROWS + 1 + 3

    @pytest.mark.parametrize(
        "single",
        [
            with_if,
            with_ambiguous_if,
            with_assertion,
            with_norm_of_everything,
            elementwise,
            with_the_first_goal_only,
        ],
    )
    def test_others_are_asked_row_by_row(self, single):
        asked = Asked(single)
        function = GoalFunction(asked, "compute_reward")
        for _ in range(2):
            assert np.array_equal(function(ACHIEVED, DESIRED), REACHED - 1.0)
        assert function.vectorized is False
        assert asked.batches == 1, "it is tried once"

    def test_one_row_tells_nothing(self):
        # a function of everything at once would give one number for one row as well
        function = GoalFunction(Asked(with_norm_of_everything), "compute_reward")
        assert function(ACHIEVED[:1], DESIRED[:1]).tolist() == [REACHED[0] - 1.0]
        assert function.vectorized is None
        assert np.array_equal(function(ACHIEVED, DESIRED), REACHED - 1.0)

    def test_there_is_no_info(self):
        # replay does not keep it: each goal gets an empty one of its own
        asked = Asked(for_batches)
        GoalFunction(asked, "compute_reward")(ACHIEVED[:3], DESIRED[:3])
        assert [info for _, info in asked.calls] == [{}, {}, {}, [{}, {}, {}], [{}, {}, {}]]

    @pytest.mark.parametrize("answer", [bool, np.bool_, int, np.float64, lambda x: np.array(x, np.float32)])
    def test_answers_of_any_type(self, answer):
        function = GoalFunction(lambda a, d, info: answer((a == d).all()), "compute_terminated")
        found = function(ACHIEVED, DESIRED)
        assert found.dtype == np.float32
        assert np.array_equal(found, REACHED)

    def test_no_goals(self):
        assert GoalFunction(Asked(for_batches), "compute_reward")(ACHIEVED[:0], DESIRED[:0]).shape == (0,)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -1e39])
    @pytest.mark.parametrize("takes_batches", [True, False])
    def test_what_is_not_finite_in_float32_is_refused(self, bad, takes_batches):
        def answer(achieved, desired, info):
            assert takes_batches or achieved.ndim == 1
            same = (np.asarray(achieved) == np.asarray(desired)).all(axis=-1)
            return np.where(same, bad, 1.0)

        function = GoalFunction(answer, "compute_reward")
        assert function(ACHIEVED, ACHIEVED + 1).tolist() == [1.0] * len(ACHIEVED)
        with pytest.raises(NonFiniteError, match="compute_reward returned a number that is not finite in float32"):
            function(ACHIEVED, ACHIEVED)

    def test_what_a_function_raises_is_told_with_its_name(self):
        def needs_info(achieved, desired, info):
            return info["distance"]

        with pytest.raises(EnvError, match=r"compute_reward raised KeyError: 'distance'.* an empty info"):
            GoalFunction(needs_info, "compute_reward")(ACHIEVED, DESIRED)


# Spaces


def goal_space(**changes):
    part = spaces.Box(-1, 1, (2,))
    parts = {"observation": spaces.Box(-1, 1, (5,)), "achieved_goal": part, "desired_goal": part, **changes}
    return spaces.Dict({key: value for key, value in parts.items() if value is not None})


def test_goal_spaces():
    check_goal_space(goal_space(), "Env-v0")
    check_goal_space(goal_space(more=spaces.Discrete(2)), "Env-v0")


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.Dict({"observation": spaces.Box(-1, 1, (2,))}),
        goal_space(achieved_goal=None),
        goal_space(desired_goal=None),
        goal_space(observation=None),
        goal_space(desired_goal=spaces.Box(-1, 1, (3,))),
    ],
)
def test_spaces_without_goals_are_refused(space):
    with pytest.raises(SpaceError, match=r"her needs a Dict observation space with .* from 'Env-v0'"):
        check_goal_space(space, "Env-v0")


# Finding the functions


class WithoutReward(BitFlipping):
    """A goal environment that keeps its reward function to itself."""

    compute_reward = None

    def step(self, action):
        self.bits = self.bits.copy()
        self.bits[action] ^= 1
        return self._observe(), -1.0, False, False, {}


class Bare(gym.Env):
    """Goals, but no such function."""

    observation_space = goal_space(observation=spaces.Box(-1, 1, (2,)))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {key: np.zeros(2, np.float32) for key in self.observation_space.spaces}, {}

    def step(self, action):
        return {key: np.zeros(2, np.float32) for key in self.observation_space.spaces}, 0.0, False, False, {}


class Batched(VectorEnv):
    """A vector environment of one piece, which has the functions itself."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium has it
    num_envs = 2
    single_observation_space, single_action_space = Bare.observation_space, Bare.action_space
    observation_space = gym.vector.utils.batch_space(single_observation_space, 2)
    action_space = gym.vector.utils.batch_space(single_action_space, 2)

    def compute_reward(self, achieved, desired, info):
        return -np.abs(achieved - desired).sum(axis=-1)

    def reset(self, *, seed=None, options=None):
        return {key: np.zeros((2, 2), np.float32) for key in self.single_observation_space.spaces}, {}

    def step(self, action):
        no = np.zeros(2, np.bool_)
        return self.reset()[0], np.zeros(2), no, no, {}


def sync(make):
    return SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


def point(cls):
    return lambda: gym.wrappers.TimeLimit(cls(**POINT), 5)


def workers(make):
    return WorkerVectorEnv([make] * 2, autoreset_mode=AutoresetMode.SAME_STEP, timeout=60.0)


@pytest.mark.parametrize("vector", [sync, workers])
def test_functions_of_single_environments(vector):
    env = vector(point(PointTouching))
    try:
        reward, terminated = goal_functions(env, "Env-v0")
        achieved, desired = np.zeros((2, 2), np.float32), np.array([[0.1, 0.1], [0.9, 0.9]], np.float32)
        assert reward(achieved, desired).tolist() == [0.0, -1.0]
        assert terminated(achieved, desired).tolist() == [1.0, 0.0]
    finally:
        env.close()


def test_functions_below_a_vector_wrapper():
    reward, terminated = goal_functions(gym.wrappers.vector.RecordEpisodeStatistics(sync(point(PointReaching))), "Env")
    assert reward(np.zeros((2, 2)), np.zeros((2, 2))).tolist() == [0.0, 0.0]
    assert terminated is None, "this one does not end at its goal"


def test_functions_of_a_vector_environment():
    reward, terminated = goal_functions(Batched(), "Env-v0")
    assert reward(np.zeros((3, 2)), np.ones((3, 2))).tolist() == [-2.0, -2.0, -2.0]
    assert terminated is None


@pytest.mark.parametrize("vector", [sync, workers])
def test_an_environment_without_a_reward_function(vector):
    env = vector(Bare)
    try:
        with pytest.raises(EnvError, match=r"compute_reward\(achieved_goal, desired_goal, info\); 'Env-v0' has none"):
            goal_functions(env, "Env-v0")
    finally:
        env.close()


def test_a_reward_function_that_is_none():
    with pytest.raises(EnvError, match="'Env-v0' has none"):
        goal_functions(sync(lambda: WithoutReward(3)), "Env-v0")


# Learning


SMALL = {
    "her": True, "buffer_size": 500, "batch_size": 16, "learning_starts": 20, "eval_every": 0, "device": "cpu",
}  # fmt: skip
QUICK = {**SMALL, "num_steps": 1, "updates_per_step": 0.25, "network": {"sizes": (8,)}}


def bits():
    return BitFlipping(4)


def relabelled(agent):
    """Whether batches have goals other than those that were desired when they were collected."""
    sampler = agent._experiment.trainer.sampler
    batch = sampler.sample(200, Progress(env_steps=0, horizon=1))
    stored = sampler.buffer.observations(batch.indices.numpy())["desired_goal"]
    return (batch.obs["desired_goal"].numpy() != stored).any(axis=1).mean()


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        (bits, {"num_envs": 2}),
        (bits, {"num_envs": 2, "vectorization": "async"}),
        (bits(), {}),
        (SyncVectorEnv([bits] * 3, autoreset_mode=AutoresetMode.SAME_STEP), {}),
        (SyncVectorEnv([bits] * 3, autoreset_mode=AutoresetMode.NEXT_STEP), {}),
        (Batched(), {}),
    ],
    ids=["sync", "async", "object", "vector", "next-step", "native"],
)
def test_hindsight_wherever_the_environments_are(env, settings):
    agent = DQN(env, **QUICK, **settings)
    try:
        agent.learn(60, progress=False)
        assert agent._experiment.trainer.updates == 10
        if not isinstance(env, Batched):  # which stands still: what is achieved is what is desired
            assert 0.5 < relabelled(agent) < 0.95  # of the 80 % some get the goal that they had
    finally:
        agent.close()


@pytest.mark.parametrize("cls", [PointReaching, PointReachingOneByOne, PointTouching])
def test_hindsight_with_real_actions(cls):
    agent = TD3(
        lambda: cls(**POINT), **SMALL, updates_per_step=0.25, network={"actor_sizes": (8,), "critic_sizes": (8,)}
    )
    agent.learn(60, progress=False)
    hindsight = agent._experiment.trainer.sampler.hindsight
    assert hindsight.compute_reward.vectorized is (cls is not PointReachingOneByOne)
    assert (hindsight.compute_terminated is not None) is (cls is PointTouching)
    assert relabelled(agent) > 0.6


def test_settings_of_hindsight():
    agent = DQN(bits, **QUICK, her_strategy="final", her_ratio=0.3)
    hindsight = agent._experiment.trainer.sampler.hindsight
    assert (hindsight.strategy, hindsight.ratio) == ("final", 0.3)
    assert DQN(bits, **{**QUICK, "her": False})._experiment.trainer.sampler.hindsight is None


def test_environments_that_hindsight_is_not_for():
    with pytest.raises(SpaceError, match=r"her needs a Dict observation space.* from 'CartPole-v1'"):
        DQN("CartPole-v1", **QUICK)
    with pytest.raises(EnvError, match="her needs an environment with a method compute_reward"):
        DQN(Bare, **QUICK)
