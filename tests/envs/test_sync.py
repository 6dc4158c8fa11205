"""Environments stepped one after the other: equal to Gymnasium's `SyncVectorEnv` in all it shows."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training.envs.sync import Infos, SequentialVectorEnv


class Odd(gym.Env):
    """Episodes of 1 to 4 steps, infos that come and go, and observations that are overwritten in place."""

    def __init__(self, space):
        self.observation_space = space
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.array = np.zeros(3, np.float64)

    def observe(self):
        self.array[:] = self.np_random.random(3)
        if isinstance(self.observation_space, gym.spaces.Discrete):
            return int(10 * self.array[0])
        if isinstance(self.observation_space, gym.spaces.Dict):
            return {"a": self.array, "b": self.array[:1]}
        return self.array

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {"start": True}

    def step(self, action):
        draw = self.np_random.random()
        info = {"action": action.copy()} if draw < 0.5 else {}
        return self.observe(), float(action.sum()), bool(draw < 0.2), bool(draw > 0.9), info


BOX = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
SPACES = {
    "box": BOX,
    "discrete": gym.spaces.Discrete(10),
    "dict": gym.spaces.Dict({"a": BOX, "b": gym.spaces.Box(0.0, 1.0, (1,), np.float64)}),
}


def same(mine, its):
    mine = dict(mine) if isinstance(mine, Infos) else mine
    assert type(mine) is type(its)
    if isinstance(mine, dict):
        assert mine.keys() == its.keys()
        for key in mine:
            same(mine[key], its[key])
    elif isinstance(mine, np.ndarray) and mine.dtype == object:
        for result in zip(mine, its, strict=True):
            same(*result)
    else:
        np.testing.assert_array_equal(mine, its)
        assert getattr(mine, "dtype", None) == getattr(its, "dtype", None)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("space", SPACES)
def test_it_is_equal_to_gymnasiums(space, mode):
    makers = [lambda: Odd(SPACES[space])] * 3
    mine, its = (cls(makers, autoreset_mode=mode) for cls in (SequentialVectorEnv, SyncVectorEnv))
    for result in zip(mine.reset(seed=5), its.reset(seed=5), strict=True):
        same(*result)
    rng, kept = np.random.default_rng(0), []
    for _ in range(60):
        action = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        steps = mine.step(action), its.step(action)
        for result in zip(*steps, strict=True):
            same(*result)
        kept.append(steps)
        over = steps[0][2] | steps[0][3]
        if mode is AutoresetMode.DISABLED and over.any():
            for result in zip(*(env.reset(options={"reset_mask": over}) for env in (mine, its)), strict=True):
                same(*result)
    for step, expected in kept:  # nothing that was returned has been written into since
        for result in zip(step, expected, strict=True):
            same(*result)


def test_what_is_wrong_is_refused_as_by_gymnasium():
    env = SequentialVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.DISABLED)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="zip"):
        env.step(np.array([0]))
    for _ in range(200):
        over = env.step(np.array([1, 0]))[2]
        if over.any():
            break
    with pytest.raises(AssertionError):  # an episode that is over must be reset first
        env.step(np.array([1, 0]))


@pytest.mark.parametrize("given", [np.zeros(1), np.zeros((3, 1)), np.float32(0.0)])
def test_an_observation_of_another_shape_is_refused(given):
    class Wrong(Odd):
        def observe(self):
            return given

    env = SequentialVectorEnv([lambda: Wrong(BOX)] * 2, autoreset_mode=AutoresetMode.DISABLED)
    env.observations = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"shape|dimensionality"):
        env.step(np.zeros((2, 2), np.float32))


def test_observations_may_be_lists():
    class Listing(Odd):
        def observe(self):
            return [0.25, 0.5, 0.75]

    env = SequentialVectorEnv([lambda: Listing(BOX)] * 2, autoreset_mode=AutoresetMode.DISABLED)
    env.reset(seed=0)
    obs, *_ = env.step(np.zeros((2, 2), np.float32))
    assert obs.dtype == np.float32
    assert obs.tolist() == [[0.25, 0.5, 0.75]] * 2
