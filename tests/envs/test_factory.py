"""Making environments: what is accepted, and what is said when it is not."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rl_training.contracts.errors import ConfigError, EnvError, MissingExtraError
from rl_training.envs import make_env, make_vector_env, register_wrapper
from rl_training.envs import wrappers as wrappers_module
from rl_training.envs.factory import copy_env, describe_env, module_of
from rl_training.envs.wrappers import WrapperConfig, apply_wrappers, wrapper_names
from rl_training.experiment.config import TrainConfig


def config(env_id: str = "CartPole-v1", **settings: Any) -> TrainConfig:
    return TrainConfig(algo="ppo", env_id=env_id, **settings)


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


class TestOneEnvironment:
    def test_by_id(self) -> None:
        env = make_env("CartPole-v1")
        assert env.spec is not None
        assert env.spec.id == "CartPole-v1"

    def test_keyword_arguments_arrive(self) -> None:
        assert make_env("FrozenLake-v1", {"map_name": "8x8"}).observation_space == gym.spaces.Discrete(64)

    def test_render_mode_arrives(self) -> None:
        assert make_env("CartPole-v1", render_mode="rgb_array").render_mode == "rgb_array"

    def test_given_keyword_arguments_are_not_changed(self) -> None:
        kwargs: dict[str, Any] = {"sutton_barto_reward": True}
        make_env("CartPole-v1", kwargs, render_mode="rgb_array")
        assert kwargs == {"sutton_barto_reward": True}

    @pytest.mark.parametrize(
        ("env_id", "match"),
        [
            ("CartPol-v1", "env_id: .*CartPol.*Did you mean.*CartPole"),
            ("CartPole-v99", "env_id: .*v99"),
            ("Nowhere/Thing-v0", "env_id: Namespace Nowhere not found"),
            ("what is this?", "env_id: Malformed"),
        ],
    )
    def test_unknown_ids(self, env_id: str, match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            make_env(env_id)

    @pytest.mark.filterwarnings("ignore:.*out of date")
    def test_old_versions_name_the_new_one(self) -> None:
        with pytest.raises(ConfigError, match=r"env_id: .*LunarLander-v3"):
            make_env("LunarLander-v2")

    def test_wrong_keyword_arguments(self) -> None:
        with pytest.raises(ConfigError, match=r"env_kwargs: 'CartPole-v1'.*colour"):
            make_env("CartPole-v1", {"colour": "red"})

    def test_other_failures_name_the_environment(self) -> None:
        with pytest.raises(EnvError, match=r"'FrozenLake-v1' could not be made: KeyError"):
            make_env("FrozenLake-v1", {"map_name": "no such map"})

    @pytest.mark.parametrize(
        ("message", "extra"),
        [
            ("MuJoCo is not installed, run `pip install gymnasium[mujoco]`", "mujoco"),
            ("Box2D is not installed", "box2d"),
            ("pygame is not installed", "classic"),
        ],
    )
    def test_missing_extras_say_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, message: str, extra: str
    ) -> None:
        def make(*_: Any, **__: Any) -> Any:
            raise gym.error.DependencyNotInstalled(message)

        monkeypatch.setattr(gym, "make", make)
        with pytest.raises(MissingExtraError, match=rf"'Some-v1'.*pip install '.\[{extra}\]'"):
            make_env("Some-v1")

    @pytest.mark.parametrize(
        ("env_id", "module", "extra"),
        [("ALE/Pong-v5", "ale_py", "atari"), ("FetchReach-v4", "gymnasium_robotics", "robotics")],
    )
    def test_missing_packages_that_register_themselves(
        self, monkeypatch: pytest.MonkeyPatch, env_id: str, module: str, extra: str
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(gym.registry, env_id, raising=False)
        with pytest.raises(MissingExtraError, match=rf"'{env_id}'.*pip install '\.\[{extra}\]'"):
            make_env(env_id)

    def test_own_environments_may_be_named_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gymnasium_robotics", None)
        gym.register("FetchReachMine-v0", cartpole)
        try:
            assert make_env("FetchReachMine-v0").observation_space.shape == (4,)
        finally:
            del gym.registry["FetchReachMine-v0"]


class TestVectorEnvironment:
    def test_from_a_config(self) -> None:
        env = make_vector_env(config(), num_envs=4)
        assert isinstance(env, SyncVectorEnv)
        assert env.num_envs == 4
        assert env.single_observation_space.shape == (4,)

    def test_number_of_environments_comes_from_the_config(self) -> None:
        assert make_vector_env(config(num_envs=3)).num_envs == 3

    @pytest.mark.parametrize("mode", list(AutoresetMode))
    def test_autoreset_mode(self, mode: AutoresetMode) -> None:
        env = make_vector_env(config(), num_envs=1, autoreset_mode=mode)
        assert env.metadata["autoreset_mode"] is mode

    def test_async(self) -> None:
        env = make_vector_env(config(vectorization="async"), num_envs=2)
        try:
            assert isinstance(env, AsyncVectorEnv)
            assert env.num_envs == 2
        finally:
            env.close()

    def test_async_fails_before_workers_are_started(self) -> None:
        with pytest.raises(ConfigError, match="env_kwargs"):
            make_vector_env(config(vectorization="async", env_kwargs={"colour": 1}), num_envs=2)

    def test_native(self) -> None:
        env = make_vector_env(config(vectorization="native", env_kwargs={"sutton_barto_reward": True}), num_envs=5)
        env.reset(seed=0)
        _, reward, *_ = env.step(np.zeros(5, np.int64))
        assert not isinstance(env, (SyncVectorEnv, AsyncVectorEnv))
        assert reward.tolist() == [0.0] * 5

    def test_native_by_an_id_that_is_given(self) -> None:
        env = make_vector_env(config("Pendulum-v1", vectorization="native"), num_envs=2, env="CartPole-v1")
        assert type(env.unwrapped).__name__ == "CartPoleVectorEnv"

    def test_native_without_a_vector_implementation(self) -> None:
        with pytest.raises(ConfigError, match=r"vectorization: 'Pendulum-v1' has no native .*use sync or async"):
            make_vector_env(config("Pendulum-v1", vectorization="native"))

    def test_native_with_wrong_keyword_arguments(self) -> None:
        with pytest.raises(ConfigError, match=r"env_kwargs: .*colour"):
            make_vector_env(config(vectorization="native", env_kwargs={"colour": 1}))

    def test_native_with_an_unknown_id(self) -> None:
        with pytest.raises(ConfigError, match=r"env_id: .*Did you mean"):
            make_vector_env(config("CartPol-v1", vectorization="native"))

    def test_callable(self) -> None:
        env = make_vector_env(config("anything"), num_envs=2, env=cartpole)
        assert isinstance(env, SyncVectorEnv)
        assert [type(one.unwrapped).__name__ for one in env.envs] == ["CartPoleEnv"] * 2
        assert env.envs[0] is not env.envs[1]

    def test_class(self) -> None:
        from gymnasium.envs.classic_control import CartPoleEnv

        assert make_vector_env(config("anything"), num_envs=2, env=CartPoleEnv).num_envs == 2

    def test_id(self) -> None:
        env = make_vector_env(config("anything"), num_envs=1, env="Pendulum-v1")
        assert isinstance(env.single_action_space, gym.spaces.Box)

    def test_instance(self) -> None:
        instance = cartpole()
        env = make_vector_env(config("anything"), num_envs=1, env=instance)
        assert isinstance(env, SyncVectorEnv)
        assert env.envs[0] is instance

    def test_instance_cannot_be_several(self) -> None:
        with pytest.raises(ConfigError, match="num_envs must be 1, got 2"):
            make_vector_env(config("anything"), num_envs=2, env=cartpole())

    def test_vector_environment_is_taken_as_it_is(self) -> None:
        given = SyncVectorEnv([cartpole] * 3)
        assert make_vector_env(config("anything"), num_envs=1, env=given) is given

    @pytest.mark.parametrize("env", [None, "CartPole-v1", cartpole])
    def test_wrappers_are_applied_whatever_is_given(self, env: Any) -> None:
        settings = config(wrappers=[WrapperConfig("TimeAwareObservation")])
        assert make_vector_env(settings, num_envs=1, env=env).single_observation_space.shape == (5,)

    def test_wrappers_are_applied_to_an_instance(self) -> None:
        settings = config(wrappers=[WrapperConfig("TimeAwareObservation")])
        assert make_vector_env(settings, num_envs=1, env=cartpole()).single_observation_space.shape == (5,)


class TestWrappers:
    def test_first_is_innermost(self) -> None:
        wrappers = [WrapperConfig("ClipReward", {"max_reward": 1.0}), WrapperConfig("TimeAwareObservation")]
        env = make_env("CartPole-v1", wrappers=wrappers)
        assert isinstance(env, gym.wrappers.TimeAwareObservation)
        assert isinstance(env.env, gym.wrappers.ClipReward)

    def test_lists_become_tuples(self) -> None:
        env = make_env("CartPole-v1", wrappers=[WrapperConfig("ReshapeObservation", {"shape": [2, 2]})])
        assert env.observation_space.shape == (2, 2)

    def test_own_wrappers_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wrappers_module, "_WRAPPERS", dict(wrappers_module._WRAPPERS))

        @register_wrapper("HalveReward")
        class HalveReward(gym.RewardWrapper[Any, Any]):
            def __init__(self, env: gym.Env[Any, Any], factor: float = 0.5) -> None:
                super().__init__(env)
                self.factor = factor

            def reward(self, reward: Any) -> Any:
                return reward * self.factor

        env = make_env("CartPole-v1", wrappers=[WrapperConfig("HalveReward", {"factor": 0.25})])
        env.reset(seed=0)
        assert env.step(0)[1] == 0.25
        assert "HalveReward" in wrapper_names()

    def test_unknown_name_suggests_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown wrapper 'TimeLimt'\. Did you mean 'TimeLimit'\?"):
            make_env("CartPole-v1", wrappers=[WrapperConfig("TimeLimt")])

    def test_unknown_name_lists_the_known(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown wrapper 'os\.system'\. Known: .*ClipAction.*TimeLimit"):
            apply_wrappers(cartpole(), [WrapperConfig("os.system", {"command": "echo"})])

    @pytest.mark.parametrize(
        ("name", "kwargs"),
        [
            ("TimeLimit", {"steps": 10}),
            ("TimeLimit", {"max_episode_steps": -1}),
            ("FilterObservation", {"filter_keys": ["a"]}),
        ],
    )
    def test_what_a_wrapper_refuses_is_named(self, name: str, kwargs: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"wrappers: {name}: "):
            apply_wrappers(cartpole(), [WrapperConfig(name, kwargs)])


class Uncopyable(gym.Env[Any, Any]):
    """Holds something that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a socket cannot be copied")


class TestCopies:
    def test_an_instance_is_copied(self) -> None:
        env = cartpole()
        env.reset(seed=0)
        twin = copy_env(env)
        assert isinstance(twin, gym.Env)
        assert twin is not env
        before = env.unwrapped.state.copy()  # type: ignore[attr-defined]
        twin.step(0)
        assert env.unwrapped.state.tolist() == before.tolist()  # type: ignore[attr-defined]

    @pytest.mark.parametrize("env", ["CartPole-v1", cartpole])
    def test_ids_and_callables_are_their_own_copy(self, env: Any) -> None:
        assert copy_env(env) is env

    def test_what_cannot_be_copied_is_said(self) -> None:
        with pytest.raises(EnvError, match=r"cannot be copied for evaluation.*a socket.*eval_env="):
            copy_env(Uncopyable())

    def test_what_a_spec_makes_is_a_copy_only_with_the_same_spaces(self) -> None:
        """Whatever was put around the environment by hand is not in its spec."""
        env = Uncopyable()
        env.spec = gym.spec("CartPole-v1")
        env.observation_space, env.action_space = gym.make("CartPole-v1").observation_space, spaces.Discrete(2)
        assert isinstance(copy_env(env), gym.Env)
        env.observation_space = spaces.Box(-1, 1, (3,))
        with pytest.raises(EnvError, match=r"made again from its spec, it has the spaces .*eval_env="):
            copy_env(env)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        (cartpole, "cartpole"),
        (lambda: cartpole(), "custom"),
        (Uncopyable(), "Uncopyable"),
        (Uncopyable, "Uncopyable"),
    ],
    ids=["id", "function", "lambda", "instance", "class"],
)
def test_names_of_environments(env: Any, name: str) -> None:
    assert describe_env(env) == name


def test_registered_environments_are_named_by_id() -> None:
    assert describe_env(cartpole()) == "CartPole-v1"


@pytest.mark.parametrize(("env_id", "module"), [("CartPole-v1", None), ("os:Env-v0", None), ("mine:Env-v0", "mine")])
def test_modules_that_an_id_would_import(env_id: str, module: str | None) -> None:
    assert module_of(env_id) == module


def test_importing_the_package_does_not_import_torch() -> None:
    import subprocess

    code = "import sys, rl_training.envs; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
