"""Environments go on exactly where a snapshot left them, after a trip through a checkpoint's files."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest

from rl_training.contracts.errors import CheckpointError
from rl_training.envs.encoding import SnapshotError, decode, encode
from rl_training.envs.snapshot import (
    restore_snapshot,
    restore_vector_snapshot,
    take_snapshot,
    take_vector_snapshot,
)
from rl_training.experiment.checkpointing import load_checkpoint, save_checkpoint

CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]
TOY = ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"]
WALKERS = ("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "Swimmer", "Walker2d")
MUJOCO = [f"{name}-v5" for name in (*WALKERS, "InvertedDoublePendulum", "InvertedPendulum", "Pusher", "Reacher")]
WRAPPED = {
    "frame stack": lambda env: gym.wrappers.FrameStackObservation(env, 4),
    "normalisation": lambda env: gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(env)),
    "episode statistics": gym.wrappers.RecordEpisodeStatistics,
    "sticky actions": lambda env: gym.wrappers.StickyAction(env, 0.25),
    "time in the observation": gym.wrappers.TimeAwareObservation,
    "delay": lambda env: gym.wrappers.DelayObservation(env, 2),
    "rescaled actions": lambda env: gym.wrappers.RescaleAction(env, -1.0, 1.0),
    "a reward function": lambda env: gym.wrappers.TransformReward(env, lambda reward: 2 * reward),
}


def through_files(snapshot, tmp_path):
    """A snapshot as it comes back from a checkpoint."""
    path = save_checkpoint(tmp_path / "checkpoint", {"env": snapshot}, {}, {})
    return load_checkpoint(path).state["env"]


def rows(env, actions):
    """What an environment shows over a sequence of actions, resetting itself as a collector would."""
    seen = []
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        seen.append((np.asarray(obs).tolist(), float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            seen.append(np.asarray(env.reset()[0]).tolist())
    return seen


def assert_goes_on(make, tmp_path, warm_up=230, steps=250):
    """The restored environment and the original show the same, bit for bit, over episode ends."""
    original, restored = make(), make()
    original.action_space.seed(0)
    original.reset(seed=0)
    rows(original, [original.action_space.sample() for _ in range(warm_up)])
    restored.reset(seed=12345)
    restore_snapshot(restored, through_files(take_snapshot(original), tmp_path))
    actions = [original.action_space.sample() for _ in range(steps)]
    assert rows(original, actions) == rows(restored, actions)


@pytest.mark.parametrize("env_id", [*CLASSIC, *TOY])
def test_classic_control_and_toy_text(env_id, tmp_path):
    assert_goes_on(lambda: gym.make(env_id), tmp_path)


@pytest.mark.parametrize("env_id", MUJOCO)
def test_mujoco(env_id, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_goes_on(lambda: gym.make(env_id), tmp_path, warm_up=30, steps=60)


def test_positions_and_velocities_alone_are_not_enough_for_ant():
    # the trap this module exists for: if it closes one day, the snapshot may become simpler
    original, copied = gym.make("Ant-v5"), gym.make("Ant-v5")
    original.reset(seed=0)
    copied.reset(seed=0)
    original.action_space.seed(0)
    for _ in range(30):
        original.step(original.action_space.sample())
    copied.unwrapped.set_state(original.unwrapped.data.qpos, original.unwrapped.data.qvel)
    actions = [original.action_space.sample() for _ in range(20)]
    assert rows(original, actions) != rows(copied, actions)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_stateful_wrappers(wrap, tmp_path):
    assert_goes_on(lambda: wrap(gym.make("Pendulum-v1")), tmp_path)


class OwnState(gym.Env):
    """An environment that implements the protocol."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.memory = {"walked": [], 7: (1, np.float32(2.5))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._show(), {}

    def step(self, action):
        self.memory["walked"].append(int(action))
        done = len(self.memory["walked"]) % 40 == 0
        return self._show(), float(self.np_random.random()), done, False, {}

    def _show(self):
        return np.array([sum(self.memory["walked"]), self.np_random.random()], np.float32)

    def get_state(self):
        return {"memory": self.memory, "random": self.np_random}

    def set_state(self, state):
        self.memory = state["memory"]
        self.np_random = state["random"]


def test_the_documented_protocol(tmp_path):
    assert_goes_on(OwnState, tmp_path)
    assert_goes_on(lambda: gym.wrappers.TimeLimit(OwnState(), 25), tmp_path)


class Unknown(OwnState):
    """The same without the protocol."""

    get_state = None


class Counting(gym.Wrapper):
    """A wrapper with memory that nobody told us about."""

    def __init__(self, env):
        super().__init__(env)
        self.seen = []


class Stateless(gym.RewardWrapper):
    """A wrapper without memory."""

    def reward(self, reward):
        return -reward


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Unknown, "Unknown"),
        (lambda: Counting(gym.make("CartPole-v1")), "Counting"),
        (lambda: gym.make("LunarLander-v3"), "LunarLander"),
    ],
    ids=["environment", "wrapper", "box2d"],
)
def test_what_cannot_be_taken_is_refused_by_name(make, named):
    with pytest.raises(SnapshotError, match=named):
        take_snapshot(make())


def test_a_wrapper_without_memory_is_no_obstacle(tmp_path):
    assert_goes_on(lambda: Stateless(gym.make("CartPole-v1")), tmp_path)


def test_another_make_up_is_refused():
    snapshot = take_snapshot(gym.make("CartPole-v1"))
    with pytest.raises(CheckpointError, match="CartPole"):
        restore_snapshot(gym.make("Pendulum-v1"), snapshot)


def test_plain_data_keeps_its_types(tmp_path):
    value = {"a": (1, 2.5, None, True, "x"), 3: [np.float32(0.1), np.arange(3, dtype=np.int8)], "n": {"m": ()}}
    back = decode(through_files(encode(value, "value"), tmp_path), None)
    assert back["a"] == value["a"]
    assert type(back[3][0]) is np.float32
    assert back[3][0] == np.float32(0.1)
    assert back[3][1].dtype == np.int8
    assert back["n"] == {"m": ()}
    with pytest.raises(SnapshotError, match=r"value\['f'\] is a object"):
        encode({"f": object()}, "value")


def vector_rows(env, actions):
    """What a vector environment shows; next-step environments reset themselves."""
    return [tuple(np.asarray(part).tolist() for part in env.step(action)[:4]) for action in actions]


@pytest.mark.parametrize("mode", ["vector_entry_point", "sync"])
def test_vector_environments_in_the_middle_of_a_reset(mode, tmp_path):
    # next-step autoreset: at the moment of the snapshot some environments are about to reset
    original, restored = (gym.make_vec("CartPole-v1", num_envs=6, vectorization_mode=mode) for _ in range(2))
    original.action_space.seed(0)
    original.reset(seed=0)
    restored.reset(seed=1)
    done = np.zeros(6, bool)
    while not done.any():
        _, _, terminated, truncated, _ = original.step(original.action_space.sample())
        done = terminated | truncated
    restore_vector_snapshot(restored, through_files(take_vector_snapshot(original), tmp_path), done)
    actions = [original.action_space.sample() for _ in range(80)]
    assert vector_rows(original, actions) == vector_rows(restored, actions)
