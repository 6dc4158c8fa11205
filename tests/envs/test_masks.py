"""Environments with action masks: where the mask is found, how it becomes part of the observation, what is refused."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training import TrainConfig
from rl_training.contracts.errors import EnvError, SpaceError
from rl_training.envs.factory import make_env, make_vector_env, wrap_env
from rl_training.envs.masks import ActionMask, CheckedMasks, check_mask_space, has_choice, mask_size
from rl_training.envs.snapshot import restore_snapshot, take_snapshot
from rl_training.envs.vector import AutoresetAdapter
from tests.envs.masked_tasks import Forbidding, InvalidActionError

VECTOR = spaces.Box(-1.0, 1.0, (2,))


class Scripted(gym.Env):
    """Shows the masks of a list, one by one, in its info or observation; terminates at the end of it."""

    def __init__(self, masks, *, in_obs=False, truncates=False, mask_space=None, is_dict=False, action_space=None):
        self.masks, self.in_obs, self.truncates, self.is_dict = masks, in_obs, truncates, is_dict
        self.action_space = action_space or spaces.Discrete(3)
        parts = {"observation": VECTOR}
        if in_obs:
            parts["action_mask"] = mask_space or spaces.MultiBinary(3)
        elif is_dict:
            parts["speed"] = spaces.Box(-1.0, 1.0, (1,))
        self.observation_space = spaces.Dict(parts) if in_obs or is_dict else VECTOR

    def observe(self):
        mask = self.masks[self.time]
        info = {} if mask is None or self.in_obs else {"action_mask": mask}
        obs = {"observation": np.zeros(2, np.float32)}
        if self.in_obs:
            obs["action_mask"] = mask
        elif self.is_dict:
            obs["speed"] = np.ones(1, np.float32)
        return (obs if len(obs) > 1 else obs["observation"]), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe()

    def step(self, action):
        self.time += 1
        end = self.time == len(self.masks) - 1
        obs, info = self.observe()
        return obs, 0.0, end and not self.truncates, end and self.truncates, info


class TestHasChoice:
    @pytest.mark.parametrize(("mask", "expected"), [([0, 0, 1], True), ([0, 0, 0], False), ([1, 1, 1], True)])
    def test_discrete(self, mask, expected):
        assert bool(has_choice(np.array(mask), spaces.Discrete(3))) is expected

    def test_every_choice_of_a_multi_discrete(self):
        masks = np.array([[1, 0, 0, 0, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        assert has_choice(masks, spaces.MultiDiscrete([2, 3])).tolist() == [True, False, False, True]

    def test_sizes(self):
        assert mask_size(spaces.Discrete(4, start=2)) == 4
        assert mask_size(spaces.MultiDiscrete([2, 3])) == 5
        assert mask_size(spaces.MultiDiscrete([[2, 3], [4, 5]])) == 14

    @pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.MultiBinary(3)])
    def test_other_actions_have_no_masks(self, space):
        with pytest.raises(SpaceError, match="needs Discrete or MultiDiscrete actions"):
            mask_size(space)


class TestMaskSpace:
    @pytest.mark.parametrize(
        "part",
        [spaces.MultiBinary(3), spaces.Box(0, 1, (3,), np.int8), spaces.Box(0, 1, (3,)), spaces.MultiDiscrete([2] * 3)],
    )
    def test_any_space_of_the_right_shape(self, part):
        check_mask_space(spaces.Dict({"observation": VECTOR, "action_mask": part}), spaces.Discrete(3))

    @pytest.mark.parametrize(
        "space",
        [
            VECTOR,
            spaces.Dict({"observation": VECTOR}),
            spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(4)}),
            spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary((3, 1))}),
        ],
    )
    def test_missing_or_of_another_size(self, space):
        with pytest.raises(SpaceError, match=r"an entry 'action_mask' of shape \(3,\)"):
            check_mask_space(space, spaces.Discrete(3))


class TestActionMask:
    def test_from_info_to_the_observation(self):
        env = ActionMask(Scripted([[1, 0, 1], [0, 1, 0], None]))
        assert env.observation_space == spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(3)})
        obs, info = env.reset()
        assert env.observation_space.contains(obs)
        assert obs["action_mask"].tolist() == info["action_mask"] == [1, 0, 1]
        obs = env.step(0)[0]
        assert obs["action_mask"].tolist() == [0, 1, 0]

    def test_after_a_termination_it_may_be_missing(self):
        env = ActionMask(Scripted([[1, 0, 1], None]))
        env.reset()
        obs, _, terminated, _, _ = env.step(0)
        assert terminated
        assert env.observation_space.contains(obs)

    @pytest.mark.parametrize("in_obs", [False, True])
    def test_after_a_termination_it_may_leave_nothing(self, in_obs):
        env = ActionMask(Scripted([np.array(m, np.int8) for m in ([1, 0, 1], [0, 0, 0])], in_obs=in_obs))
        env.reset()
        assert env.step(0)[0]["action_mask"].tolist() == [0, 0, 0]

    def test_a_dict_keeps_its_entries(self):
        env = ActionMask(Scripted([[1, 0, 1], None], is_dict=True))
        assert set(env.observation_space.spaces) == {"observation", "speed", "action_mask"}
        obs, _ = env.reset()
        assert env.observation_space.contains(obs)

    def test_a_mask_in_the_observation_stays_as_it_is(self):
        space = spaces.Box(0, 1, (3,), np.float32)
        env = ActionMask(Scripted([np.array([1, 0, 1], np.float32)] * 2, in_obs=True, mask_space=space))
        assert env.observation_space["action_mask"] == space
        assert env.reset()[0]["action_mask"].dtype == np.float32

    @pytest.mark.parametrize(
        "mask",
        [np.array([True, False, True]), [1, 0, 1], (1.0, 0.0, 0.5), np.array([256, 0, 256]), np.uint8([1, 0, 9])],
    )
    def test_whatever_is_not_zero_is_valid(self, mask):
        obs, _ = ActionMask(Scripted([mask, None])).reset()
        assert obs["action_mask"].tolist() == [1, 0, 1]
        assert obs["action_mask"].dtype == np.int8

    @pytest.mark.parametrize(
        ("masks", "words"),
        [
            ([None], "info has no 'action_mask'"),
            ([[1, 0]], r"has shape \(2,\), expected \(3,\)"),
            ([[[1, 0, 1]]], r"has shape \(1, 3\)"),
            ([[0, 0, 0]], "leaves no valid action"),
        ],
    )
    def test_refused_at_a_reset(self, masks, words):
        with pytest.raises(EnvError, match=words):
            ActionMask(Scripted(masks)).reset()

    @pytest.mark.parametrize(("mask", "words"), [(None, "has no 'action_mask'"), ([0, 0, 0], "no valid action")])
    def test_after_a_truncation_it_is_needed(self, mask, words):
        env = ActionMask(Scripted([[1, 1, 1], mask], truncates=True))
        env.reset()
        with pytest.raises(EnvError, match=words):
            env.step(0)

    def test_one_empty_choice_of_many_is_refused(self):
        space = spaces.MultiDiscrete([2, 3])
        with pytest.raises(EnvError, match="no valid action"):
            ActionMask(Scripted([[1, 1, 0, 0, 0]], action_space=space)).reset()

    def test_snapshots_go_through_it(self):
        env = ActionMask(Forbidding("info"))
        obs, _ = env.reset(seed=3)
        saved = take_snapshot(env)

        def play(obs):
            masks = []
            for _ in range(5):
                obs, *_ = env.step(int(obs["action_mask"].argmax()))
                masks.append(obs["action_mask"].tolist())
            return masks

        first = play(obs)
        restore_snapshot(env, saved)
        assert play(obs) == first


class TestFactory:
    def config(self, **changes):
        return TrainConfig(algo="ppo", env_id="any", action_masks=True, num_envs=2, **changes)

    def test_the_mask_comes_after_the_wrappers(self):
        env = wrap_env(Forbidding("info"), [], action_masks=True)
        assert isinstance(env, ActionMask)
        assert not isinstance(wrap_env(Forbidding("info"), [], action_masks=False), ActionMask)

    def test_by_id(self):
        # Taxi says in its info which actions do something
        env = make_env("Taxi-v3" if "Taxi-v3" in gym.registry else "Taxi-v4", action_masks=True)
        obs, info = env.reset(seed=0)
        assert obs["action_mask"].tolist() == info["action_mask"].tolist()

    def test_without_masks_nothing_changes(self):
        assert make_env("CartPole-v1").observation_space.shape == (4,)

    @pytest.mark.parametrize("vectorization", ["sync", "async"])
    def test_callables(self, vectorization):
        config = self.config(vectorization=vectorization)
        env = AutoresetAdapter(make_vector_env(config, env=Forbidding, autoreset_mode=AutoresetMode.DISABLED))
        try:
            obs = env.reset(seed=0)
            for _ in range(40):
                obs = env.step(obs["action_mask"].argmax(axis=1)).obs
                assert obs["action_mask"].any(axis=1).all()
        finally:
            env.close()

    def test_box_actions_are_refused(self):
        with pytest.raises(SpaceError, match="needs Discrete or MultiDiscrete actions"):
            make_env("Pendulum-v1", action_masks=True)

    def test_the_task_forbids_what_it_says(self):
        env = Forbidding()
        obs, _ = env.reset(seed=0)
        with pytest.raises(InvalidActionError):
            env.step(int(obs["action_mask"].argmin()))


class TestReadyVectorEnvironments:
    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_play_through(self, mode):
        env = AutoresetAdapter(CheckedMasks(SyncVectorEnv([Forbidding] * 2, autoreset_mode=mode)))
        obs, ends = env.reset(seed=0), 0
        for _ in range(60):
            step = env.step(obs["action_mask"].argmax(axis=1))
            obs, ends = step.obs, ends + len(step.ended)
            assert obs["action_mask"][step.acting].any(axis=1).all()
        assert ends > 5

    def test_a_mask_without_a_valid_action_is_refused(self):
        masks = [np.ones(3, np.int8), np.zeros(3, np.int8), np.zeros(3, np.int8)]
        env = CheckedMasks(SyncVectorEnv([lambda: Scripted(masks, in_obs=True)] * 2))
        env.reset()
        with pytest.raises(EnvError, match="no valid action"):
            env.step(np.zeros(2, np.int64))

    def test_masks_in_the_info_are_refused(self):
        with pytest.raises(SpaceError, match="an entry 'action_mask'"):
            CheckedMasks(SyncVectorEnv([lambda: Forbidding("info")]))
