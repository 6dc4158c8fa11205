"""The agent: every line of the public API, with every kind of environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rl_training
from rl_training import (
    A2C,
    PPO,
    Agent,
    Callback,
    DrQv2,
    Linear,
    TrainConfig,
    TrainResult,
    evaluate,
    load,
    resume,
    train,
)
from rl_training.algorithms.ppo import PPOConfig
from rl_training.contracts.errors import CheckpointError, ConfigError, DataError, SpaceError
from rl_training.experiment.presets import find_preset

SMALL: dict[str, Any] = {"num_steps": 16, "minibatch_size": 32, "num_epochs": 1, "eval_every": 0}


class Scripted(gym.Env[Any, Any]):
    """Four steps of whatever spaces it is given."""

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own class attribute

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} ({type(action)}) is not in {self.action_space}"
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 4, False, {}


VECTOR = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict(
    {
        "position": spaces.Box(-1, 1, (2,), np.float64),
        "gear": spaces.Discrete(4, start=1),
        "lights": spaces.MultiBinary(3),
        "dials": spaces.MultiDiscrete([2, 5]),
    }
)
ACTION_SPACES = [
    spaces.Discrete(3),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Box(-2, 2, (2,), np.float32),
    spaces.Box(-2, 2, (2,), np.float64),
]


def agent_for(observations: spaces.Space[Any], actions: spaces.Space[Any], **settings: Any) -> Any:
    return PPO(lambda: Scripted(observations, actions), num_envs=2, seed=3, **{**SMALL, **settings})


def weights(agent: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in agent.policy.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The block of the public API, line by line


@pytest.mark.filterwarnings("ignore:the schedules of")  # those of the preset end with the first call of learn
@pytest.mark.filterwarnings("ignore:the schedules")
def test_the_public_api_block(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", num_envs=8, seed=1, clip_coef=0.1)
    assert (agent.config.num_envs, agent.config.seed) == (8, 1)
    assert agent.config.algorithm == PPOConfig(clip_coef=0.1), "algorithm defaults, and one keyword"
    agent.close()

    agent = PPO.from_preset("CartPole-v1", seed=1, eval_every=0)
    assert isinstance(agent, PPO)
    preset = find_preset("ppo", "CartPole-v1")
    assert preset is not None
    assert agent.config.algorithm.num_steps == preset.data["algorithm"]["num_steps"]  # type: ignore[attr-defined]
    assert agent.config.seed == 1

    calls: list[int] = []
    result = agent.learn(512, callback=lambda run: calls.append(run.env_steps), progress=False)
    assert isinstance(result, TrainResult)
    assert result.env_steps == 512 == agent.num_timesteps
    assert calls == [256, 512]
    assert agent.learn(256, progress=False).env_steps == 768, "again = continue"

    obs = np.zeros(4, np.float32)
    action, state = agent.predict(obs, deterministic=True)
    assert action in (0, 1)
    assert state is None
    actions, _ = agent.predict(np.zeros((5, 4), np.float32), deterministic=True)
    assert actions.shape == (5,)
    values = agent.value(obs)
    assert isinstance(values, float)

    metrics = agent.evaluate(num_episodes=10)
    assert len(metrics.returns) == len(metrics.lengths) == 10
    assert metrics.mean == pytest.approx(np.mean(metrics.returns))
    assert metrics.std == pytest.approx(np.std(metrics.returns))

    agent.save(tmp_path / "saved")
    agent.close()
    agent = PPO.load(tmp_path / "saved", env=None)
    assert isinstance(agent, PPO)
    agent.close()
    agent = load(tmp_path / "saved")  # type: ignore[assignment]
    assert isinstance(agent, PPO)
    assert agent.num_timesteps == 768
    agent.close()


def test_train_evaluate_resume(tmp_path: Path) -> None:
    small = {key: value for key, value in SMALL.items() if key != "eval_every"}
    config = TrainConfig(
        algo="ppo", env_id="CartPole-v1", output_dir=tmp_path, num_envs=2, total_timesteps=64, eval_every=0,
        algorithm=small,  # type: ignore[arg-type]
    )  # fmt: skip
    result = train(config, progress=False)
    assert result.checkpoint_path is not None
    assert result.checkpoint_path.is_dir()
    assert result.metrics["global_step"] == 64
    for path in (result.checkpoint_path, result.run_dir, str(result.run_dir)):
        found = evaluate(path, num_episodes=3, seed=5)  # type: ignore[arg-type]
        assert len(found.returns) == 3
    assert evaluate(result.checkpoint_path, 3, seed=5).returns == found.returns
    assert resume(result.run_dir, total_timesteps=96, progress=False).env_steps == 96


def test_without_a_number_learning_goes_by_the_config() -> None:
    agent = PPO("CartPole-v1", num_envs=2, total_timesteps=70, **SMALL)
    assert agent.learn(progress=False).env_steps == 70
    assert agent.learn(progress=False).env_steps == 140
    agent.close()


@pytest.mark.parametrize("wrong", [0, -5, 1.5, "many", True])
def test_a_wrong_number_of_steps_is_refused(wrong: Any) -> None:
    agent = PPO("CartPole-v1", num_envs=1, **SMALL)
    with pytest.raises(ConfigError, match="total_timesteps: expected a whole number of at least 1"):
        agent.learn(wrong, progress=False)
    agent.close()


def test_learning_twice_is_one_run_in_two_parts() -> None:
    """Equal seeds: 64 + 64 steps end where 128 end (constant schedules)."""
    one, two = (PPO("CartPole-v1", num_envs=2, seed=5, **SMALL) for _ in range(2))
    one.learn(128, progress=False)
    two.learn(64, progress=False)
    two.learn(64, progress=False)
    assert one.num_timesteps == two.num_timesteps == 128
    assert same(weights(one), weights(two))
    for agent in (one, two):
        agent.close()


# What an agent is made from


def test_from_a_config() -> None:
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", seed=9, num_envs=3)
    agent = PPO(config)
    assert agent.config == config.replace(num_threads=1), "chosen when the observations are known"
    agent.close()
    agent = PPO(config, clip_coef=0.3, seed=10)
    assert (agent.config.seed, agent.config.num_envs) == (10, 3)
    assert agent.config.algorithm == PPOConfig(clip_coef=0.3)
    assert config.seed == 9
    agent.close()
    with pytest.raises(ConfigError, match="config is for 'ppo', but this class is A2C"):
        A2C(config)


def test_from_an_id_with_arguments() -> None:
    agent = PPO("LunarLander-v3", env_kwargs={"continuous": True}, num_envs=1, **SMALL)
    assert agent.predict(np.zeros(8, np.float32))[0].shape == (2,)
    agent.close()


def test_from_a_callable() -> None:
    agent = PPO(lambda: Scripted(VECTOR, spaces.Discrete(2)), **SMALL)
    assert agent.config.num_envs == 8, "a callable makes as many as the algorithm wants"
    assert agent.learn(64, progress=False).metrics["rollout/return_mean"] == 4.0
    assert agent.evaluate(3).returns == [4.0, 4.0, 4.0]
    agent.close()


def test_from_an_instance() -> None:
    agent = PPO(Scripted(VECTOR, spaces.Discrete(2)), **SMALL)
    assert agent.config.num_envs == 1
    assert agent.learn(32, progress=False).env_steps == 32
    assert agent.evaluate(3).lengths == [4, 4, 4]
    agent.close()
    with pytest.raises(ConfigError, match=r"num_envs: .*callable"):
        PPO(Scripted(VECTOR, spaces.Discrete(2)), num_envs=4)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_from_a_ready_vector_environment(mode: AutoresetMode) -> None:
    def vector() -> Any:
        make = [lambda: Scripted(VECTOR, spaces.Discrete(2))] * 3
        return SyncVectorEnv(make, autoreset_mode=mode)

    agent = PPO(vector(), **SMALL)
    assert agent.config.num_envs == 3
    result = agent.learn(60, progress=False)
    assert 60 <= result.env_steps < 63
    assert result.metrics["rollout/return_mean"] == 4.0
    assert result.metrics["rollout/length_mean"] == 4.0
    assert agent.evaluate(5).returns == [4.0] * 5
    agent.close()
    with pytest.raises(ConfigError, match="got 4, but the vector environment has 3"):
        PPO(vector(), num_envs=4)


def test_an_evaluation_environment_of_its_own() -> None:
    class Shorter(Scripted):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:2], True, False, {})

    def make() -> Any:
        return Shorter(VECTOR, spaces.Discrete(2))

    for eval_env in (make, make(), SyncVectorEnv([make, make])):
        agent = PPO(lambda: Scripted(VECTOR, spaces.Discrete(2)), eval_env=eval_env, num_envs=2, **SMALL)
        assert agent.learn(32, progress=False).metrics["rollout/length_mean"] == 4.0
        assert agent.evaluate(4).lengths == [1, 1, 1, 1]
        agent.close()


def test_evaluation_does_not_disturb_training() -> None:
    """Its environments, seeds and statistics are its own."""
    one, two = (PPO("CartPole-v1", num_envs=2, seed=5, normalize_obs=True, **SMALL) for _ in range(2))
    one.learn(64, progress=False)
    two.learn(64, progress=False)
    one.evaluate(3)
    one.predict(np.zeros(4, np.float32), deterministic=False)
    one.learn(64, progress=False)
    two.learn(64, progress=False)
    assert same(weights(one), weights(two))
    for agent in (one, two):
        agent.close()


def test_equal_seeds_give_equal_evaluations() -> None:
    agent = PPO("CartPole-v1", num_envs=2, **SMALL)
    kwargs: dict[str, Any] = {"deterministic": False}
    assert agent.evaluate(5, seed=1, **kwargs).returns == agent.evaluate(5, seed=1, **kwargs).returns
    assert agent.evaluate(5, seed=1, **kwargs).returns != agent.evaluate(5, seed=2, **kwargs).returns
    with pytest.raises(ConfigError, match="num_episodes: must be at least 1"):
        agent.evaluate(0)
    agent.close()


# Keywords are checked


@pytest.mark.parametrize(
    ("keyword", "near"),
    [("clip_coff", "clip_coef"), ("sed", "seed"), ("learning_rat", "learning_rate"), ("n_steps", "num_steps")],
)
def test_a_wrong_keyword_gets_the_nearest_name(keyword: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"PPO: unknown key '{keyword}'. Did you mean '{near}'"):
        PPO("CartPole-v1", **{keyword: 1})
    with pytest.raises(ConfigError, match=f"Did you mean '{near}'"):
        PPO.from_preset("CartPole-v1", **{keyword: 1})
    with pytest.raises(ConfigError, match=f"Did you mean '{near}'"):
        PPO(TrainConfig(algo="ppo", env_id="CartPole-v1"), **{keyword: 1})


def test_all_wrong_keywords_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        PPO("CartPole-v1", clip_coff=1, gamma=2, seed="x", stop_reward=1, eval_every=0)  # type: ignore[arg-type, call-arg]
    text = str(caught.value)
    for part in ("clip_coff", "gamma: must be >= 0 and <= 1", "seed: expected a whole number", "stop_reward: needs"):
        assert part in text
    assert len(caught.value.problems) == 4


def test_another_algorithms_setting_is_unknown() -> None:
    with pytest.raises(ConfigError, match="A2C: unknown key 'clip_coef'"):
        A2C("CartPole-v1", clip_coef=0.1)  # type: ignore[call-arg]


def test_keywords_may_be_typed_values_mappings_or_a_whole_section() -> None:
    agent = PPO(
        "CartPole-v1",
        learning_rate=Linear(1e-3),
        network={"actor_sizes": (8,), "activation": "relu"},
        algorithm=PPOConfig(gamma=0.5),
        clip_coef=0.3,
    )
    settings = agent.config.algorithm
    assert isinstance(settings, PPOConfig)
    assert (settings.gamma, settings.clip_coef, settings.learning_rate) == (0.5, 0.3, Linear(1e-3))
    assert (settings.network.actor_sizes, settings.network.activation) == ((8,), "relu")
    agent.close()


def test_a_space_that_cannot_be_handled_is_named() -> None:
    with pytest.raises(SpaceError, match="Tuple"):
        PPO(lambda: Scripted(spaces.Tuple([VECTOR, VECTOR]), spaces.Discrete(2)))
    with pytest.raises(SpaceError, match="Tuple"):
        PPO(lambda: Scripted(VECTOR, spaces.Tuple([spaces.Discrete(2)])))


# Presets


def test_from_preset_by_id_arguments_and_name() -> None:
    for name in ("CartPole-v1", "ppo/cartpole", "cartpole"):
        agent = PPO.from_preset(name)
        assert agent.config.env_id == "CartPole-v1"
        agent.close()
    continuous = PPO.from_preset("LunarLander-v3", env_kwargs={"continuous": True}, num_envs=1)
    assert continuous.config.env_kwargs == {"continuous": True}
    assert isinstance(continuous._experiment.spec.action_space, spaces.Box)
    continuous.close()
    agent = PPO.from_preset("CartPole-v1", clip_coef=0.05, num_envs=3)
    assert (agent.config.num_envs, agent.config.algorithm.clip_coef) == (3, 0.05)  # type: ignore[attr-defined]
    agent.close()


def test_there_is_no_preset_for_everything() -> None:
    with pytest.raises(ConfigError, match=r"no ppo preset for 'NoSuchEnv-v0'.*CartPole-v1"):
        PPO.from_preset("NoSuchEnv-v0")
    with pytest.raises(ConfigError, match="no a2c preset"):
        A2C.from_preset("ppo/cartpole")
    with pytest.raises(ConfigError, match=r"presets for: Pendulum-v1 with env_kwargs=\{'render_mode': 'rgb_array'\}"):
        DrQv2.from_preset("Pendulum-v1")


def test_a_preset_on_another_environment() -> None:
    agent = PPO.from_preset("ppo/cartpole", env_id="Acrobot-v1")
    assert agent.config.env_id == "Acrobot-v1"
    assert agent.config.algorithm == PPO.from_preset("CartPole-v1").config.algorithm
    agent.close()


def test_a_preset_for_a_family_needs_one_of_it() -> None:
    pytest.importorskip("ale_py")
    for name in ("ppo/atari", "atari", "ALE/*"):
        with pytest.raises(
            ConfigError, match=r"'ALE/\*' is a pattern for many.* choose a game .*ALE/Pong-v5 .*env_id="
        ):
            PPO.from_preset(name)
    agent = PPO.from_preset("ppo/atari", env_id="ALE/Pong-v5", num_envs=1)
    assert agent.config.env_id == "ALE/Pong-v5"
    assert not agent.config.eval_deterministic
    agent.close()


@pytest.mark.parametrize("env", [lambda: gym.make("CartPole-v1"), gym.make("CartPole-v1")])
def test_settings_of_atari_are_not_for_environments_that_were_made_elsewhere(env: Any) -> None:
    with pytest.raises(ConfigError, match="atari: applies only to environments created by id"):
        PPO(env, atari={"frame_stack": 4})


# predict and value


@pytest.mark.parametrize("space", ACTION_SPACES, ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_predicted_actions_are_what_the_environment_expects(space: spaces.Space[Any], deterministic: bool) -> None:
    """Inside the space, in its dtype, one at a time and in batches."""
    agent = agent_for(VECTOR, space)
    action, _ = agent.predict(VECTOR.sample(), deterministic=deterministic)
    assert space.contains(action), repr(action)
    assert np.asarray(action).dtype == space.dtype
    assert np.asarray(action).shape == space.shape
    batch, _ = agent.predict(np.stack([VECTOR.sample() for _ in range(5)]), deterministic=deterministic)
    assert isinstance(batch, np.ndarray)
    assert batch.dtype == space.dtype
    assert batch.shape == (5, *space.shape)  # type: ignore[misc]
    assert all(space.contains(row) for row in batch)
    agent.learn(32, progress=False)  # the environment checks every action, too
    agent.close()


def test_a_batch_gives_what_its_rows_give() -> None:
    agent = agent_for(VECTOR, spaces.Box(-1, 1, (2,), np.float32))
    batch = np.random.default_rng(0).uniform(-1, 1, (4, 3)).astype(np.float32)
    actions, _ = agent.predict(batch)
    values = agent.value(batch)
    assert values.shape == (4,)
    for row, action, value in zip(batch, actions, values, strict=True):
        np.testing.assert_allclose(agent.predict(row)[0], action, rtol=1e-5, atol=1e-6)
        assert agent.value(row) == pytest.approx(float(value), rel=1e-5, abs=1e-6)
    agent.close()


def test_dict_observations_one_and_many() -> None:
    agent = agent_for(DICT, spaces.Discrete(2))
    one = DICT.sample()
    assert agent.predict(one)[0] in (0, 1)
    assert isinstance(agent.value(one), float)
    samples = [DICT.sample() for _ in range(6)]
    many = {key: np.stack([sample[key] for sample in samples]) for key in DICT.spaces}
    assert agent.predict(many)[0].shape == (6,)
    assert agent.value(many).shape == (6,)
    agent.learn(32, progress=False)
    with pytest.raises(DataError, match="expected an observation with the keys"):
        agent.predict({"position": one["position"]})
    with pytest.raises(DataError, match="some entries of the observation have a batch dimension and some do not"):
        agent.predict({**many, "gear": one["gear"]})
    agent.close()


@pytest.mark.parametrize(
    ("space", "one", "many"),
    [
        (spaces.Discrete(5), 3, [1, 2]),
        (spaces.MultiDiscrete([3, 4]), [1, 2], [[1, 2], [0, 3], [2, 2]]),
        (spaces.MultiBinary(2), [0, 1], [[0, 1], [1, 1]]),
        (spaces.Box(0, 255, (3,), np.uint8), [0, 128, 255], [[0, 128, 255]]),
        (spaces.Box(-1, 1, (3,), np.float64), [0.5, 0, -1], [[0.5, 0, -1]] * 2),
    ],
    ids=str,
)
def test_plain_lists_are_taken_as_observations(space: spaces.Space[Any], one: Any, many: Any) -> None:
    agent = agent_for(space, spaces.Discrete(2))
    assert agent.predict(one)[0] in (0, 1)
    assert agent.predict(many)[0].shape == (len(many),)
    agent.close()


def test_an_observation_of_the_wrong_shape_is_refused() -> None:
    agent = agent_for(VECTOR, spaces.Discrete(2))
    for wrong in (np.zeros(4), np.zeros((2, 4)), np.zeros((1, 2, 3)), 1.0):
        with pytest.raises(DataError, match=r"expected an observation of shape \(3,\) or a batch of them"):
            agent.predict(wrong)
    agent.close()


def test_sampling_and_the_likeliest_action() -> None:
    agent = agent_for(VECTOR, spaces.Discrete(2))
    obs = np.zeros((200, 3), np.float32)
    assert len(set(agent.predict(obs, deterministic=True)[0].tolist())) == 1
    assert len(set(agent.predict(obs, deterministic=False)[0].tolist())) == 2
    agent.close()


def test_normalisation_is_part_of_predicting_and_is_not_changed_by_it() -> None:
    agent = agent_for(VECTOR, spaces.Box(-1, 1, (1,), np.float32), normalize_obs=True)
    agent.learn(64, progress=False)
    before = json.dumps(_plain(agent._experiment.trainer.collector.obs_normalizer.state_dict()))
    first = agent.predict(np.full(3, 0.3))[0]
    agent.predict(np.full((50, 3), 100.0))
    agent.evaluate(2)
    assert np.array_equal(agent.predict(np.full(3, 0.3))[0], first)
    assert json.dumps(_plain(agent._experiment.trainer.collector.obs_normalizer.state_dict())) == before
    agent.close()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


# save and load


@pytest.mark.parametrize("cls", [PPO, A2C])
def test_a_loaded_agent_predicts_the_same_and_goes_on_learning(tmp_path: Path, cls: Any) -> None:
    agent = cls("CartPole-v1", num_envs=2, seed=3, num_steps=16, eval_every=0, normalize_obs=True)
    agent.learn(64, progress=False)
    assert agent.save(tmp_path / "saved") == tmp_path / "saved"
    other = cls.load(tmp_path / "saved")
    assert type(other) is cls
    assert other.config == agent.config
    assert same(weights(agent), weights(other))
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    assert np.array_equal(agent.predict(obs)[0], other.predict(obs)[0])
    assert np.array_equal(agent.value(obs), other.value(obs))
    assert agent.evaluate(3, seed=1).returns == other.evaluate(3, seed=1).returns
    result = other.learn(32, progress=False)
    assert result.env_steps == 96
    assert not same(weights(agent), weights(other))
    for one in (agent, other):
        one.close()


def test_loading_the_wrong_class_says_what_it_is(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", num_envs=1, **SMALL)
    agent.save(tmp_path / "saved")
    agent.close()
    with pytest.raises(CheckpointError, match=r"holds a 'ppo' agent, not 'a2c'.*load\(path\) takes any"):
        A2C.load(tmp_path / "saved")
    assert isinstance(load(tmp_path / "saved"), PPO)


def test_loading_what_is_not_there() -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        PPO.load("nowhere")


def test_an_agent_of_an_object_is_loaded_with_an_environment(tmp_path: Path) -> None:
    agent = agent_for(VECTOR, spaces.Discrete(2))
    agent.learn(32, progress=False)
    agent.save(tmp_path / "saved")
    obs = np.zeros((3, 3), np.float32)
    expected = agent.value(obs)
    agent.close()
    with pytest.raises(ConfigError, match=r"trained on an environment object.*env=\.\.\."):
        PPO.load(tmp_path / "saved")
    again = PPO.load(tmp_path / "saved", env=lambda: Scripted(VECTOR, spaces.Discrete(2)))
    assert np.array_equal(again.value(obs), expected)
    assert again.learn(32, progress=False).env_steps == 64
    again.close()


def test_an_id_given_when_loading_is_remembered(tmp_path: Path) -> None:
    """The agent can then be loaded again from its file alone."""
    agent = PPO(gym.make("CartPole-v1"), **SMALL)
    agent.save(tmp_path / "one")
    agent.close()
    agent = PPO.load(tmp_path / "one", env="CartPole-v1")
    agent.save(tmp_path / "two")
    agent.close()
    agent = PPO.load(tmp_path / "two")
    assert agent.config.env_id == "CartPole-v1"
    agent.close()


def test_saving_twice_replaces_and_saving_over_something_else_does_not(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", num_envs=1, **SMALL)
    agent.save(str(tmp_path / "saved"))
    agent.learn(16, progress=False)
    agent.save(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not overwritten"):
        agent.save(tmp_path / "other")
    agent.close()
    again = load(tmp_path / "saved")
    assert again.num_timesteps == 16
    again.close()


# Metadata


def test_agents_carry_their_metadata_and_put_it_into_save(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", num_envs=1, seed=11, **SMALL)
    data = agent.metadata
    assert data["seed"] == 11
    assert data["config"] == agent.config.to_dict()
    assert data["versions"]["torch"] == torch.__version__
    assert data["versions"]["rl_training"] == rl_training.__version__
    assert data["env_steps"] == 0
    agent.learn(16, progress=False)
    agent.save(tmp_path / "saved")
    agent.close()
    saved = json.loads((tmp_path / "saved" / "metadata.json").read_text())
    assert saved["seed"] == 11
    assert saved["env_steps"] == 16
    assert saved["versions"] == data["versions"]
    assert saved["hardware"] == data["hardware"]
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == data["config"]


# The rest


def test_a_callback_object_sees_a_typed_view() -> None:
    class Watch(Callback):
        seen: list[str]

        def __init__(self) -> None:
            self.seen = []

        def on_start(self, run: Any) -> None:
            self.seen.append("start")

        def on_iteration(self, run: Any) -> None:
            assert run.metrics()["global_step"] == run.env_steps
            self.seen.append(f"{run.env_steps}/{run.total_timesteps}")

        def on_stop(self, run: Any) -> None:
            self.seen.append("stop")

        def close(self) -> None:
            self.seen.append("close")

    watch = Watch()
    agent = PPO("CartPole-v1", num_envs=2, **SMALL)
    agent.learn(64, callback=[watch], progress=False)
    agent.close()
    assert watch.seen == ["start", "32/64", "64/64", "stop", "close"]


def test_facades_are_classes_with_names_docs_and_a_readable_repr() -> None:
    assert PPO.__name__ == "PPO"
    assert PPO is rl_training.PPO
    assert issubclass(PPO, Agent)
    assert "arXiv:1707.06347" in str(PPO.__doc__)
    assert {"PPO", "A2C", "TrainConfig", "train", "load"} <= set(dir(rl_training))
    agent = PPO("CartPole-v1", num_envs=1, seed=4, **SMALL)
    assert repr(agent) == "PPO('CartPole-v1', seed=4, steps=0)"
    agent.close()
    with pytest.raises(AttributeError, match="no attribute 'PP0'"):
        _ = rl_training.PP0


def test_filming(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    agent = PPO("CartPole-v1", num_envs=2, **SMALL)
    found = agent.record_video(tmp_path, num_episodes=2, seed=1)
    agent.close()
    assert len(found.returns) == 2
    assert len(list(tmp_path.glob("*.mp4"))) == 2
