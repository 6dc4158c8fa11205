"""State through a checkpoint's encoding: what can be encoded comes back exactly, everything else is refused."""

from __future__ import annotations

import random
from collections import OrderedDict, deque, namedtuple
from enum import IntEnum

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers.utils import RunningMeanStd

from rl_training.contracts.state import same_state
from rl_training.envs.encoding import BIT_GENERATORS, SnapshotError, decode, encode
from rl_training.envs.snapshot import restore_snapshot, take_snapshot
from rl_training.experiment.checkpointing import load_checkpoint, round_trip, save_checkpoint


def there_and_back(value, current=None):
    return decode(round_trip({"env": encode(value, "value")})["env"], current)


@pytest.mark.parametrize("name", BIT_GENERATORS)
@pytest.mark.parametrize("has_current", [False, True], ids=["new", "in place of another"])
def test_numpy_generators(name, has_current, tmp_path):
    generator = np.random.Generator(BIT_GENERATORS[name](5))
    generator.random(7, np.float32)  # half of a 64-bit word is left over
    path = save_checkpoint(tmp_path / "checkpoint", {"env": encode(generator, "value")}, {}, {})
    current = np.random.default_rng() if has_current else None
    back = decode(load_checkpoint(path).state["env"], current)
    assert type(back.bit_generator).__name__ == name
    assert back.integers(2**60, size=99).tolist() == generator.integers(2**60, size=99).tolist()
    assert back.spawn(1)[0].random() == generator.spawn(1)[0].random()


def test_a_generator_is_restored_in_place():
    generator, current = (np.random.default_rng(3) for _ in range(2))
    generator.random(4)
    assert there_and_back(generator, current) is current
    assert current.random() == generator.random()


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_legacy_generators(name):
    legacy = np.random.RandomState(BIT_GENERATORS[name](5))
    legacy.normal()  # the second of a pair is kept
    back = there_and_back(legacy)
    assert type(back) is np.random.RandomState
    assert back.normal(size=9).tolist() == legacy.normal(size=9).tolist()


def test_python_generators():
    python = random.Random(4)
    python.gauss(0, 1)
    back = there_and_back(python)
    assert [back.gauss(0, 1) for _ in range(5)] == [python.gauss(0, 1) for _ in range(5)]


DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "F", "D"]
DTYPES += [">f8", ">i4", "M8[ns]", "m8[s]", "S3", "U2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_all_dtypes(dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for case in (array, array[:0], array[0, 0, :1].reshape(()), array[:, ::2, ::-1]):
        back = there_and_back(case)
        assert (back.dtype, back.dtype.byteorder) == (case.dtype, case.dtype.byteorder)
        assert back.shape == case.shape
        assert back.tobytes() == case.tobytes()
    scalar = array[1, 2, 3]
    assert there_and_back(scalar) == scalar
    assert dtype == "U2" or type(there_and_back(scalar)) is type(scalar)


def test_the_memory_order_of_arrays():
    array = np.random.default_rng(0).normal(size=(5, 6, 7)).transpose(2, 0, 1)
    for case in (array, np.asfortranarray(array)):
        back = there_and_back(case)
        assert np.array_equal(back, case)
        assert back.strides == case.strides


def test_other_plain_data():
    numbers = [0, -1, 2**63, -(2**200), 0.1, -0.0, float("inf"), float("nan"), "\ud800 ü", "", None, True]
    value = {"numbers": numbers, (1, ("a", None)): deque([1, 2], maxlen=2), 2: deque([3]), "t": ((), [], {})}
    back = there_and_back(value)
    assert same_state(back["numbers"], numbers)
    assert list(back) == list(value)
    assert [(list(q), q.maxlen) for q in (back[(1, ("a", None))], back[2])] == [([1, 2], 2), ([3], None)]
    assert back["t"] == value["t"]


def test_running_moments_of_an_own_get_state():
    moments = RunningMeanStd(shape=(2,))
    moments.update(np.ones((3, 2)))
    back = there_and_back({"moments": moments})["moments"]
    assert same_state(vars(back), vars(moments))


Pair = namedtuple("Pair", "a b")
Mode = IntEnum("Mode", "A B")
CYCLE: list = []
CYCLE.append(CYCLE)
DEEP: tuple = ()
for _ in range(200):
    DEEP = (DEEP,)


class OwnGenerator(np.random.PCG64):
    """A bit generator that numpy does not have."""


REFUSED = {
    "a set": {1, 2},
    "bytes": b"x",
    "complex": 1j,
    "objects": np.array([None]),
    "long doubles": np.zeros(2, np.longdouble),
    "a long double": np.longdouble(1),
    "complex long doubles": np.zeros(2, np.clongdouble),
    "fields": np.zeros(2, "i4,f8"),
    "a matrix": np.ma.zeros(3),
    "a namedtuple": Pair(1, 2),
    "an enum in a list": [Mode.A],
    "an ordered dict": OrderedDict(a=1),
    "a huge integer": 10**5000,
    "an iterator": iter([1]),
    "a system generator": random.SystemRandom(),
    "an own bit generator": np.random.Generator(OwnGenerator(1)),
    "a cycle": CYCLE,
    "deep nesting": DEEP,
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(value):
    with pytest.raises(SnapshotError, match="value"):
        encode({"a": value}, "value")


def test_shared_objects_stay_shared():
    generator, array, items = np.random.default_rng(0), np.zeros(3), [1]
    value = {"g": generator, "same g": np.random.Generator(generator.bit_generator), "a": array, "l": items}
    value.update({"again": (generator, array, items), "other": np.zeros(3)})
    back = there_and_back(value)
    assert back["again"][0] is back["g"]
    assert back["same g"].random() != back["g"].random()
    assert back["again"][1] is back["a"]
    assert back["again"][1] is not back["other"]
    assert back["again"][2] is back["l"]


def test_overlapping_arrays_are_refused():
    array = np.zeros(6)
    with pytest.raises(SnapshotError, match=r"value\['b'\] shares memory with value\['a'\]"):
        encode({"a": array, "b": array[2:]}, "value")
    encode({"a": array[:2], "b": array[2:]}, "value")
    legacy = np.random.RandomState(np.random.PCG64(1))
    with pytest.raises(SnapshotError, match="bit generator of another"):
        encode({"a": legacy, "b": np.random.Generator(legacy._bit_generator)}, "value")


class Drawing(gym.Env):
    """Rewards from a generator that is given, and from the space of actions."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, stream):
        self.action_space = spaces.Discrete(1000)
        self.stream = stream

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(self.stream.random()), False, False, {}

    def get_state(self):
        return {"stream": self.stream}

    def set_state(self, state):
        self.stream = state["stream"]


class Noisy(gym.Wrapper):
    """Adds noise from a generator that is given."""

    def __init__(self, env, stream):
        super().__init__(env)
        self.noise = stream

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward + float(self.noise.random()), terminated, truncated, info

    def get_state(self):
        return {"noise": self.noise}

    def set_state(self, state):
        self.noise = state["noise"]


class Exploring(gym.ActionWrapper):
    """Keeps nothing, but draws from the space of actions."""

    def action(self, action):
        return self.action_space.sample() % 2


def rewards_after(make, act=lambda env: 0):
    """Rewards of an environment, and of one that was restored to where it was before them."""
    original, restored = make(), make()
    for env, seed in ((original, 0), (restored, 1)):
        env.reset(seed=seed)
        for _ in range(seed + 3):
            env.step(act(env))
    snapshot = round_trip({"env": take_snapshot(original)})["env"]
    restore_snapshot(restored, snapshot)
    return [[env.step(act(env))[:2] for _ in range(20)] for env in (original, restored)]


def assert_goes_on(make):
    original, restored = rewards_after(make)
    assert [reward for _, reward in original] == [reward for _, reward in restored]
    assert [obs.tolist() for obs, _ in original] == [obs.tolist() for obs, _ in restored]


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_a_generator_that_an_environment_and_its_wrapper_share(name):
    def make():
        stream = np.random.Generator(BIT_GENERATORS[name](8))
        return Noisy(Drawing(stream), stream)

    assert_goes_on(make)


def test_the_generator_of_a_space():
    def make():
        env = Exploring(gym.make("CartPole-v1"))
        env.action_space.seed(7)
        return env

    def make_shared():
        env = Exploring(gym.make("CartPole-v1"))
        env.reset(seed=2)
        env.action_space._np_random = env.unwrapped.np_random
        return env

    assert_goes_on(make)
    restored = make_shared()
    restore_snapshot(restored, round_trip({"env": take_snapshot(make_shared())})["env"])
    assert restored.action_space._np_random is restored.unwrapped._np_random


def test_the_variables_of_a_function():
    def make():
        stream, seen = np.random.default_rng(1), [0]
        calls = 0

        def noisy(reward):
            nonlocal calls
            calls += 1
            seen[0] += 1
            return reward + float(stream.random()) + 10 * seen[0] + 1000 * calls

        return gym.wrappers.TransformReward(gym.make("Pendulum-v1"), lambda reward: noisy(reward))

    original, restored = rewards_after(make, act=lambda env: np.zeros(1, np.float32))
    assert [reward for _, reward in original] == [reward for _, reward in restored]


class Slotted(gym.Wrapper):
    """Counts its steps where `vars` does not look."""

    __slots__ = ("steps",)

    def __init__(self, env):
        super().__init__(env)
        self.steps = 0


class SlottedLater(Slotted):
    """Inherits the slots."""

    def __init__(self, env):
        gym.Wrapper.__init__(self, env)


class Counter:
    """Something to call that remembers."""

    def __call__(self, reward):
        return reward


STREAM = np.random.default_rng(0)


class Global(gym.RewardWrapper):
    """Draws from a generator of the module."""

    def reward(self, reward):
        return reward + STREAM.random()


class OfTheClass(gym.RewardWrapper):
    """Draws from a generator of the class."""

    stream = np.random.default_rng(0)

    def reward(self, reward):
        return reward + self.stream.random()


def closing(env):
    """A wrapper whose method remembers."""
    seen = []

    class Closing(gym.RewardWrapper):
        def reward(self, reward):
            seen.append(reward)
            return reward

    return Closing(env)


def transformed(function):
    return lambda env: gym.wrappers.TransformReward(env, function)


def default(reward, seen=[]):  # noqa: B006
    return reward


HIDDEN = {
    "slots": (Slotted, "Slotted"),
    "inherited slots": (SlottedLater, "SlottedLater"),
    "a generator of the module": (Global, "'STREAM'"),
    "a generator of the class": (OfTheClass, "OfTheClass.stream"),
    "a method with variables": (closing, "'seen'"),
    "a callable object": (transformed(Counter()), "Counter"),
    "a method of a generator": (transformed(STREAM.normal), "may keep state"),
    "a default value": (transformed(default), "data of its own"),
    "a function of a global generator": (transformed(lambda reward: reward + STREAM.random()), "'STREAM'"),
    "a variable of unknown type": (transformed((lambda it: lambda reward: next(it))(iter("ab"))), "iterator"),
}


@pytest.mark.parametrize(("wrap", "named"), HIDDEN.values(), ids=HIDDEN.keys())
def test_hidden_state_is_refused(wrap, named):
    with pytest.raises(SnapshotError, match=named):
        take_snapshot(wrap(gym.make("CartPole-v1")))


@pytest.mark.parametrize(
    "function", [np.tanh, np.sign, abs, lambda reward: reward * 2], ids=["tanh", "sign", "abs", "lambda"]
)
def test_functions_without_state_are_no_obstacle(function):
    assert "func" not in take_snapshot(transformed(function)(gym.make("CartPole-v1")))[0]["state"]
