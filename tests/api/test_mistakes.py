"""Usual mistakes of users: each error says what was given and what to do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_training import PPO, SAC, TrainConfig, load, resume
from rl_training.contracts.errors import CheckpointError, ConfigError, EnvError, NonFiniteError, SpaceError
from rl_training.experiment.checkpointing import load_checkpoint, save_checkpoint

SMALL: dict[str, Any] = {"num_envs": 2, "num_steps": 16, "eval_every": 0}
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


class Plain(gym.Env[Any, Any]):
    """Ten steps; subclasses make one mistake each."""

    observation_space: Any = BOX
    action_space: Any = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), 1.0, self.steps >= 10, False, {}

    def observe(self) -> Any:
        return np.zeros(3, np.float32)


class LateShape(Plain):
    def observe(self) -> Any:
        return np.zeros(4 if self.steps > 2 else 3, np.float32)


class WrongShape(Plain):
    def observe(self) -> Any:
        return np.zeros(4, np.float32)


class OldStep(Plain):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:3], {})


class OldReset(Plain):
    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]


class OldSignature(Plain):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class ArrayReward(Plain):
    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, np.ones(2), *rest


class NoReward(Plain):
    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, None, *rest


def learn(env: Any, cls: Any = PPO, **settings: Any) -> None:
    agent = cls(env, **{**SMALL, **settings})
    try:
        agent.learn(32, progress=False)
    finally:
        agent.close()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (WrongShape, r"An observation has shape \(4,\), its space says \(3,\)"),
        (LateShape, r"An observation has shape \(4,\), its space says \(3,\)"),
        (OldStep, r"old Gym API .* Return five"),
        (OldReset, r"reset\(\) must return \(obs, info\)"),
        (OldSignature, r"reset\(self, \*, seed=None, options=None\)"),
        (ArrayReward, r"The reward must be a number"),
    ],
)
def test_an_environment_that_breaks_the_interface(env: Any, said: str) -> None:
    with pytest.raises(EnvError, match=said) as caught:
        learn(env)
    assert "check_env(env)" in str(caught.value).partition("\n\nTraceback")[0]


def test_the_same_advice_from_a_worker() -> None:
    with pytest.raises(EnvError, match="old Gym API"):
        learn(OldStep, vectorization="async")


def test_an_error_of_the_environment_itself_gets_no_advice() -> None:
    class Broken(Plain):
        def step(self, action: Any) -> Any:
            np.zeros(3) + np.zeros(4)

    with pytest.raises(EnvError, match="could not be broadcast together") as caught:
        learn(Broken)
    assert "check_env" not in str(caught.value)


def test_a_reward_of_none() -> None:
    with pytest.raises(NonFiniteError, match="reward of None is read as NaN"):
        learn(NoReward)


def test_a_callable_that_returns_something_else() -> None:
    with pytest.raises(EnvError, match=r"returned a vector environment .* PPO\(make\(\)\)"):
        learn(lambda: gym.make_vec("CartPole-v1", 2))
    with pytest.raises(EnvError, match="returned None"):
        learn(lambda: None)


@pytest.mark.parametrize("more", [(), ("CartPole-v1",)])
def test_a_policy_name_first(more: Any) -> None:
    with pytest.raises(ConfigError, match=r"[Nn]etworks follow from the observation space"):
        PPO("MlpPolicy", *more)


@pytest.mark.parametrize("env", [3, ["CartPole-v1"], {"env_id": "CartPole-v1"}])
def test_what_is_no_environment(env: Any) -> None:
    with pytest.raises(ConfigError, match="accepted: an environment id, a callable"):
        PPO(env)


def test_an_envpool_environment() -> None:
    pool = type("CartPoleGymnasiumEnvPool", (Plain,), {"__module__": "envpool.classic_control"})
    with pytest.raises(ConfigError, match=r"is an EnvPool environment.*vectorization='async'"):
        PPO(pool())


def test_an_entry_of_the_observation_that_is_text() -> None:
    class Mission(Plain):
        observation_space = spaces.Dict({"image": BOX, "mission": spaces.Text(20)})

    with pytest.raises(SpaceError, match=r"'mission' is a Text.*FilterObservation\(env, \['image'\]\)"):
        learn(Mission)


def test_a_wrapper_class() -> None:
    with pytest.raises(ConfigError, match=r"ClipReward is a class.*register_wrapper\('ClipReward'\)\(ClipReward\)"):
        PPO("CartPole-v1", wrappers=[gym.wrappers.ClipReward])


def test_unbounded_actions() -> None:
    class Unbounded(Plain):
        action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    with pytest.raises(SpaceError, match=r"TransformAction.*PPO, A2C and TRPO also take infinite ones"):
        SAC(Unbounded)


def test_weights_of_another_environment(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", **SMALL)
    agent.save(tmp_path / "saved")
    agent.close()
    with pytest.raises(CheckpointError, match="holds ppo on CartPole-v1, and this run is ppo on Acrobot-v1"):
        PPO("Acrobot-v1", init_from=tmp_path / "saved", **SMALL)


def test_a_run_that_was_killed_before_its_first_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TrainConfig(algo="ppo", env_id="CartPole-v1").to_yaml())
    (tmp_path / "metadata.json").write_text('{"status": "running"}')
    for use in (load, resume):
        with pytest.raises(CheckpointError, match=r"ended before it saved one.*rl-training train --config"):
            use(tmp_path)


def test_a_checkpoint_with_an_encoder_that_is_not_registered(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", **SMALL)
    saved = load_checkpoint(agent.save(tmp_path / "saved"))
    agent.close()
    saved.config["algorithm"]["network"]["encoder"] = "mine"
    save_checkpoint(saved.path, saved.state, saved.config, saved.metadata)
    with pytest.raises(ConfigError, match=r"unknown encoder 'mine'(.|\n)*registered before loading"):
        load(saved.path)


# Settings without effect


def test_files_without_a_run_directory() -> None:
    agent = PPO("CartPole-v1", **SMALL, checkpoint_every=10)
    with pytest.warns(UserWarning, match=r"^checkpoint_every: no effect without a run directory; pass learn\(run_dir="):
        agent.learn(32, progress=False)
    agent.close()


def test_a_training_that_ends_before_learning_starts() -> None:
    agent = SAC("Pendulum-v1", learning_starts=100, eval_every=0)
    with pytest.warns(UserWarning, match="ends at step 100, and learning_starts is 100"):
        agent.learn(100, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert agent.learn(1, progress=False).updates > 0
    agent.close()


# Habits of SB3 users


def test_parameters_are_copied_from_one_agent_to_another() -> None:
    one, other = (PPO("CartPole-v1", **SMALL, seed=seed) for seed in (1, 2))
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    assert not np.array_equal(one.value(obs), other.value(obs))
    parameters = one.get_parameters()
    other.set_parameters(parameters)
    before = one.value(obs)
    assert np.array_equal(before, other.value(obs))
    other.learn(32, progress=False)
    assert np.array_equal(before, one.value(obs)), "the agents share no memory"
    other.set_parameters(parameters)
    assert np.array_equal(before, other.value(obs)), "the copy has not changed"


def test_what_an_agent_shows() -> None:
    agent = PPO("CartPole-v1", **SMALL)
    assert agent.env is not None
    assert (agent.env.num_envs, str(agent.device)) == (2, "cpu")
    with pytest.raises(ConfigError, match="has no replay buffer"):
        _ = agent.replay_buffer
    off_policy = SAC("Pendulum-v1", buffer_size=64, eval_every=0)
    assert off_policy.replay_buffer.num_rows * off_policy.replay_buffer.num_envs == 64
