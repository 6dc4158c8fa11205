"""Good environments pass the check; each way of being broken is found, and only that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rl_training.envs import Finding, check_env, format_findings

Parts = tuple[Any, dict[str, Any]]


class Walk(gym.Env[Any, Any]):
    """A good environment: a random walk that ends at the edge. What is broken below is derived from it."""

    observation_space: spaces.Space[Any] = spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Parts:
        super().reset(seed=seed)
        self.length = 0
        self.place = self.np_random.uniform(-1.0, 1.0, 2)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.length += 1
        self.place = self.place + self.np_random.normal(0.0, 0.5, 2)
        terminated = bool(np.abs(self.place).max() > 5.0)
        return self.observe(), self.reward(), terminated, False, {}

    def observe(self) -> Any:
        return np.clip(self.place, -10.0, 10.0).astype(np.float32)

    def reward(self) -> Any:
        return float(-np.abs(self.place).sum())


def problems(env: Any, num_steps: int = 600) -> list[Finding]:
    return [finding for finding in check_env(env, num_steps=num_steps) if finding.level != "info"]


def notes(env: Any, topic: str, num_steps: int = 600) -> list[str]:
    found = check_env(env, num_steps=num_steps)
    return [finding.message for finding in found if (finding.level, finding.topic) == ("info", topic)]


def only(findings: list[Finding], level: str, topic: str) -> str:
    """The message of the one finding that there should be."""
    assert [(finding.level, finding.topic) for finding in findings] == [(level, topic)], format_findings(findings)
    return findings[0].message


# ---------------------------------------------------------------------------------------------------------------------
# Good ones
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4"])
def test_good_environments_by_id(env_id: str) -> None:
    findings = check_env(env_id)
    assert {finding.level for finding in findings} <= {"info"}, format_findings(findings)


@pytest.mark.parametrize("env", [Walk, Walk(), lambda: gym.make("CartPole-v1")], ids=["class", "instance", "callable"])
def test_good_environments_by_other_means(env: Any) -> None:
    assert problems(env) == []


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("cls", [SyncVectorEnv, AsyncVectorEnv])
def test_good_vector_environments(cls: Any, mode: AutoresetMode) -> None:
    findings = check_env(lambda: cls([Walk] * 2, autoreset_mode=mode), num_steps=400)
    assert {finding.level for finding in findings} <= {"info"}, format_findings(findings)
    assert "episodes" not in {finding.topic for finding in findings}, "autoreset was never seen"


def test_native_vector_environment() -> None:
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    assert problems(env) == []


def test_dict_observations() -> None:
    class Good(Walk):
        observation_space = spaces.Dict(
            {
                "place": Walk.observation_space,
                "length": spaces.Discrete(10_000),
                "signs": spaces.MultiBinary(2),
                "codes": spaces.MultiDiscrete([3, 3]),
            }
        )

        def observe(self) -> Any:
            signs = self.place > 0
            return {
                "place": super().observe(),
                "length": self.length,
                "signs": signs.astype(np.int8),
                "codes": signs.astype(np.int64),
            }

    assert problems(Good) == []


# ---------------------------------------------------------------------------------------------------------------------
# What check_env does with what it is given
# ---------------------------------------------------------------------------------------------------------------------


class Closing(Walk):
    closed = 0

    def close(self) -> None:
        type(self).closed += 1


def test_what_is_given_stays_open_and_what_is_made_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Closing, "closed", 0)
    check_env(Closing(), num_steps=5)
    assert Closing.closed == 0
    check_env(Closing, num_steps=5)
    assert Closing.closed == 1


def test_a_broken_environment_that_was_made_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Closing, "closed", 0)
    monkeypatch.setattr(Closing, "reset", lambda self, **_: None)
    assert check_env(Closing)[0].level == "error"
    assert Closing.closed == 1


def test_the_action_space_of_the_environment_is_not_reseeded() -> None:
    env = Walk()
    env.action_space = spaces.Discrete(1000)
    env.action_space.seed(3)
    check_env(env, num_steps=5)
    found = [env.action_space.sample() for _ in range(5)]
    env.action_space.seed(3)
    assert found == [env.action_space.sample() for _ in range(5)]


def test_unknown_id() -> None:
    assert "Did you mean" in only(check_env("CartPol-v1"), "error", "making")


def test_a_callable_that_raises() -> None:
    def broken() -> Any:
        raise RuntimeError("no licence")

    assert "RuntimeError: no licence" in only(check_env(broken), "error", "making")


@pytest.mark.parametrize("env", [lambda: object(), dict])
def test_something_else_than_an_environment(env: Any) -> None:
    assert "not a gymnasium.Env" in only(check_env(env), "error", "making")


def test_close_that_raises() -> None:
    class Broken(Walk):
        def close(self) -> None:
            raise OSError("already gone")

    assert "OSError: already gone" in only(problems(Broken), "error", "closing")


def test_gymnasium_does_not_warn_beside_our_findings(recwarn: pytest.WarningsRecorder) -> None:
    class Double(Walk):
        def observe(self) -> Any:
            return super().observe().astype(np.float64)

    check_env(gym.wrappers.PassiveEnvChecker(Double()))
    assert [str(warning.message) for warning in recwarn] == []


# ---------------------------------------------------------------------------------------------------------------------
# Spaces
# ---------------------------------------------------------------------------------------------------------------------


def test_missing_space() -> None:
    class Broken(Walk):
        observation_space = None  # type: ignore[assignment]

    assert "observation_space must be" in only(check_env(Broken), "error", "spaces")


def test_unsupported_observation_space() -> None:
    class Broken(Walk):
        observation_space = spaces.Tuple([Walk.observation_space])

        def observe(self) -> Any:
            return (super().observe(),)

    assert "Tuple" in only(problems(Broken), "error", "spaces")


def test_nested_dict() -> None:
    class Broken(Walk):
        observation_space = spaces.Dict({"a": spaces.Dict({"b": Walk.observation_space})})

        def observe(self) -> Any:
            return {"a": {"b": super().observe()}}

    assert "'a' is a Dict inside a Dict" in only(problems(Broken), "error", "spaces")


def test_unsupported_action_space() -> None:
    class Broken(Walk):
        action_space = spaces.Dict({"a": spaces.Discrete(2)})

    assert "the action space is a Dict" in only(problems(Broken), "error", "spaces")


def test_unbounded_actions() -> None:
    class Broken(Walk):
        action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    assert "infinite bounds" in only(problems(Broken), "warning", "spaces")


# ---------------------------------------------------------------------------------------------------------------------
# reset and step
# ---------------------------------------------------------------------------------------------------------------------


def test_reset_without_seed() -> None:
    class Broken(Walk):
        def reset(self) -> Parts:  # type: ignore[override]
            return super().reset()

    message = only(check_env(Broken), "error", "reset")
    assert "unexpected keyword argument 'seed'" in message
    assert "reset(self, *, seed=None, options=None)" in message


def test_reset_without_options() -> None:
    class Broken(Walk):
        def reset(self, *, seed: int | None = None) -> Parts:  # type: ignore[override]
            return super().reset(seed=seed)

    assert "reset(self, *, seed=None, options=None)" in only(check_env(Broken), "error", "reset")


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (np.zeros(2, np.float32), "ndarray"),
        ((np.zeros(2, np.float32), None), "(ndarray, NoneType)"),
        ((1, 2, 3), "int"),
    ],
)
def test_reset_of_another_form(result: Any, found: str) -> None:
    class Broken(Walk):
        def reset(self, **_: Any) -> Any:
            return result

    message = only(check_env(Broken), "error", "reset")
    assert "(obs, info)" in message
    assert found in message


def test_reset_that_raises() -> None:
    class Broken(Walk):
        def reset(self, **_: Any) -> Any:
            raise KeyError("goal")

    assert "KeyError: 'goal'" in only(check_env(Broken), "error", "reset")


def test_step_that_exits() -> None:
    class Exits(Walk):
        def step(self, action: Any) -> Any:
            raise SystemExit("no licence")

    assert any("raised SystemExit: no licence" in finding.message for finding in check_env(Exits))


def test_step_that_raises() -> None:
    class Broken(Walk):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError("division by zero")

    assert "ZeroDivisionError: division by zero" in only(check_env(Broken), "error", "step")


class OldStep(Walk):
    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


@pytest.mark.parametrize("make", [OldStep, lambda: gym.wrappers.TimeLimit(OldStep(), 10)], ids=["bare", "wrapped"])
def test_old_step(make: Callable[[], Any]) -> None:
    message = only(check_env(make), "error", "step")
    assert "old Gym API" in message
    assert "(obs, reward, terminated, truncated, info)" in message


def test_step_of_another_form() -> None:
    class Broken(Walk):
        def step(self, action: Any) -> Any:
            return super().step(action)[:3]

    assert "got 3 values" in only(check_env(Broken), "error", "step")


def test_info_that_is_no_dict() -> None:
    class Broken(Walk):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], None)

    assert "must be a dict, got NoneType" in only(check_env(Broken), "error", "step")


@pytest.mark.parametrize("flag", [0, 0.0, None, np.zeros(2)])
def test_flags_that_are_not_booleans(flag: Any) -> None:
    class Broken(Walk):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, _, info = super().step(action)
            return obs, reward, terminated, flag, info

    assert "truncated must be True or False" in only(problems(Broken), "error", "step")


def test_numpy_booleans_are_fine() -> None:
    class Good(Walk):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, np.bool_(terminated), np.bool_(truncated), info

    assert problems(Good) == []


# ---------------------------------------------------------------------------------------------------------------------
# Observations and rewards
# ---------------------------------------------------------------------------------------------------------------------


def broken_observation(change: Callable[[Any], Any], space: spaces.Space[Any] | None = None) -> type[Walk]:
    class Broken(Walk):
        observation_space = space if space is not None else Walk.observation_space

        def observe(self) -> Any:
            return change(super().observe())

    return Broken


@pytest.mark.parametrize(
    ("change", "space", "level", "text"),
    [
        (lambda obs: obs.astype(np.float64), None, "warning", "dtype float64, its space says float32"),
        (lambda obs: obs, spaces.Box(0, 255, (2,), np.uint8), "error", "dtype float32, its space says uint8"),
        (lambda obs: obs[:1], None, "error", "shape (1,), its space says (2,)"),
        (lambda obs: obs.tolist(), None, "error", "must be a numpy array of dtype float32, got a list"),
        (lambda obs: obs * np.float32(np.nan), None, "error", "NaN"),
        (lambda obs: obs + np.float32(np.inf), None, "error", "infinite values"),
        (lambda obs: obs + np.float32(50), None, "warning", "outside its space: entry (0,)"),
        (lambda obs: 7 + int(obs[0] > 0), spaces.Discrete(3), "error", "not in its space Discrete(3)"),
        (lambda obs: 1.5 + obs[0], spaces.Discrete(3), "error", "dtype float32, its space says int64"),
        (lambda obs: "left", spaces.Discrete(3), "error", "must be a number, got a str"),
        (lambda obs: {"b": obs}, spaces.Dict({"a": Walk.observation_space}), "error", "keys ['a'], got the keys ['b']"),
        (lambda obs: obs, spaces.Dict({"a": Walk.observation_space}), "error", "got a ndarray"),
    ],
)
def test_observations(change: Any, space: Any, level: str, text: str) -> None:
    assert text in only(problems(broken_observation(change, space)), level, "observation")


def test_parts_of_a_dict_are_named() -> None:
    space = spaces.Dict({"good": Walk.observation_space, "bad": Walk.observation_space})
    env = broken_observation(lambda obs: {"good": obs, "bad": obs.astype(np.float64)}, space)
    assert "the observation 'bad' returned by reset()" in only(problems(env), "warning", "observation")


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (np.nan, "the reward is nan"),
        (-np.inf, "the reward is -inf"),
        (np.zeros(1), "ndarray of shape (1,): return float(reward)"),
        (None, "NoneType"),
        (1 + 2j, "complex"),
    ],
)
def test_rewards(reward: Any, text: str) -> None:
    class Broken(Walk):
        def reward(self) -> Any:
            return reward

    assert text in only(problems(Broken), "error", "reward")


@pytest.mark.parametrize("reward", [1, 1.0, np.float32(1), np.int64(1), True])
def test_numbers_of_all_kinds_are_rewards(reward: Any) -> None:
    class Good(Walk):
        def reward(self) -> Any:
            return reward

    assert problems(Good) == []


# ---------------------------------------------------------------------------------------------------------------------
# Seeding
# ---------------------------------------------------------------------------------------------------------------------


def test_a_start_that_ignores_the_seed() -> None:
    class Broken(Walk):
        def reset(self, **_: Any) -> Parts:
            return super().reset(seed=np.random.default_rng().integers(2**31).item())

    assert "two resets with the same seed" in only(problems(Broken), "error", "seeding")


def test_steps_that_ignore_the_seed() -> None:
    class Broken(Walk):
        def reward(self) -> Any:
            return float(np.random.default_rng().random())

    assert "from step 1 of episode 1 on" in only(problems(Broken), "error", "seeding")


def test_a_reset_without_seed_that_draws_a_new_one() -> None:
    class Broken(Walk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Parts:
            return super().reset(seed=np.random.default_rng().integers(2**31).item() if seed is None else seed)

    assert "draws a new seed" in only(problems(Broken), "error", "seeding")


def test_something_left_over_from_earlier_episodes() -> None:
    class Broken(Walk):
        total = 0
        episode = 0

        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            self.total += self.episode > 0
            return obs, reward + (1e-6 * self.total if self.episode > 0 else 0.0), terminated, truncated, info

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Parts:
            self.episode = 0 if seed is not None else self.episode + 1
            return super().reset(seed=seed)

    assert "keeps state of earlier episodes" in only(problems(Broken), "warning", "seeding")


def test_one_seed_for_all() -> None:
    class Broken(Walk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Parts:
            return super().reset(seed=0 if seed is not None else None)

    assert "every seed gives the same first observation" in only(problems(Broken), "warning", "seeding")


def test_deterministic_environments_are_fine() -> None:
    class Deterministic(Walk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Parts:
            self.place, self.length = np.zeros(2), 0
            return self.observe(), {}

        def step(self, action: Any) -> Any:
            self.length += 1
            self.place = self.place + action - 1
            return self.observe(), self.reward(), bool(abs(self.place[0]) > 5), False, {}

    assert problems(Deterministic) == []
    assert any("deterministic" in note for note in notes(Deterministic, "seeding"))


def test_one_start_and_chance_later_is_fine() -> None:
    class SameStart(Walk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Parts:
            super().reset(seed=seed)
            self.place = np.zeros(2)
            return self.observe(), {}

    assert problems(SameStart) == []
    assert any("randomness comes later" in note for note in notes(SameStart, "seeding"))


# ---------------------------------------------------------------------------------------------------------------------
# Ends of episodes
# ---------------------------------------------------------------------------------------------------------------------


class Endless(Walk):
    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        self.place = np.clip(self.place, -5.0, 5.0)
        return obs, reward, False, truncated, info


class OwnLimit(Endless):
    """Ends after ten steps, as a termination."""

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, self.length >= 10, truncated, info


def with_spec(env: gym.Env[Any, Any], max_episode_steps: int) -> gym.Env[Any, Any]:
    """As registration leaves it, but without the wrapper that truncates."""
    env.spec = gym.envs.registration.EnvSpec("Test-v0", entry_point="x:y", max_episode_steps=max_episode_steps)
    return env


def test_an_environment_without_end() -> None:
    (warning,) = [finding for finding in check_env(Endless, num_steps=300) if finding.level == "warning"]
    assert (warning.topic, "TimeLimit" in warning.message) == ("time limit", True)


@pytest.mark.parametrize(("env_id", "warned"), [("CliffWalking-v1", True), ("CartPole-v1", False)])
def test_an_id_without_a_time_limit(env_id: str, warned: bool) -> None:
    found = [finding.topic for finding in check_env(env_id) if finding.level != "info"]
    assert found == ["time limit"] * warned


def test_a_time_limit_that_truncates_is_fine() -> None:
    env = gym.wrappers.TimeLimit(Endless(), 10)
    assert problems(env) == []
    assert notes(env, "truncation") == []


def test_a_time_limit_that_terminates() -> None:
    env = with_spec(OwnLimit(), 10)
    assert "A time limit is truncated=True" in only(problems(env), "error", "truncation")


def test_a_time_limit_that_is_not_kept() -> None:
    env = with_spec(Endless(), 10)
    assert "went on after 10 steps" in only(problems(env), "error", "truncation")


def test_a_time_limit_that_is_counted_twice() -> None:
    env = gym.wrappers.TimeLimit(OwnLimit(), 10)
    assert "truncated and terminated" in only(problems(env), "warning", "truncation")


def test_episodes_of_one_length_are_mentioned() -> None:
    assert problems(OwnLimit) == []
    assert any("exactly 10 steps" in note for note in notes(OwnLimit, "truncation"))


def test_a_limit_that_was_not_reached_is_mentioned() -> None:
    assert any("limit of 500 steps" in note for note in notes("CartPole-v1", "truncation"))


class Reusing(Walk):
    """Writes every observation into the same array."""

    def observe(self) -> Any:
        if not hasattr(self, "array"):
            self.array = np.zeros(2, np.float32)
        self.array[:] = super().observe()
        return self.array


def test_observations_that_are_overwritten() -> None:
    message = only(problems(Reusing), "warning", "final observation")
    assert "return a copy" in message


def test_overwritten_observations_below_a_dict() -> None:
    class Broken(Reusing):
        observation_space = spaces.Dict({"place": Walk.observation_space})

        def observe(self) -> Any:
            return {"place": super().observe()}

    assert "return a copy" in only(problems(Broken), "warning", "final observation")


def test_success_is_noticed() -> None:
    class Successful(Walk):
        def step(self, action: Any) -> Any:
            *parts, info = super().step(action)
            return *parts, {**info, "is_success": False}

    assert len(notes(Successful, "success")) == 1
    assert notes(Walk, "success") == []


# ---------------------------------------------------------------------------------------------------------------------
# Snapshots
# ---------------------------------------------------------------------------------------------------------------------


class Saving(Walk):
    def get_state(self) -> dict[str, Any]:
        return {"place": self.place, "length": self.length, "rng": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.place, self.length = state["place"], state["length"]
        self.np_random.bit_generator.state = state["rng"]


def test_exact_snapshots() -> None:
    assert any("restored exactly" in note for note in notes(Saving, "snapshot"))
    assert any("restored exactly" in note for note in notes("CartPole-v1", "snapshot"))


def test_snapshots_that_forget_the_random_generator() -> None:
    class Forgetful(Saving):
        def set_state(self, state: dict[str, Any]) -> None:
            self.place, self.length = state["place"], state["length"]

    assert problems(Forgetful) == []
    assert any("the steps after a restore differ" in note for note in notes(Forgetful, "snapshot"))


def test_snapshots_that_are_not_plain_data() -> None:
    class Opaque(Saving):
        def get_state(self) -> Any:
            return {"self": object()}

    assert problems(Opaque) == []
    assert any("not plain data" in note for note in notes(Opaque, "snapshot"))


def test_no_snapshots() -> None:
    assert any("begins new episodes" in note for note in notes(Walk, "snapshot"))


def test_set_state_with_other_arguments_is_not_the_protocol() -> None:
    """MuJoCo's environments have set_state(qpos, qvel)."""

    class LikeMujoco(Walk):
        def get_state(self) -> Any:
            raise AssertionError("must not be called")

        def set_state(self, qpos: Any, qvel: Any) -> None:
            raise AssertionError("must not be called")

    assert any("begins new episodes" in note for note in notes(LikeMujoco, "snapshot"))


def test_snapshots_that_raise() -> None:
    class Raising(Saving):
        def set_state(self, state: Any) -> None:
            raise RuntimeError("not today")

    assert problems(Raising) == []
    assert any("RuntimeError: not today" in note for note in notes(Raising, "snapshot"))


def test_snapshots_after_which_steps_fail() -> None:
    class Spoiled(Saving):
        def set_state(self, state: Any) -> None:
            self.place = None

    assert problems(Spoiled) == []
    assert any("after a restore step(" in note for note in notes(Spoiled, "snapshot"))


# ---------------------------------------------------------------------------------------------------------------------
# Vector environments
# ---------------------------------------------------------------------------------------------------------------------


def vector(
    mode: AutoresetMode, cls: type[SyncVectorEnv[Any, Any]] = SyncVectorEnv, env: Any = Walk
) -> VectorEnv[Any, Any, Any]:
    return cls([env] * 3, autoreset_mode=mode)


def claims(env: VectorEnv[Any, Any, Any], mode: Any) -> VectorEnv[Any, Any, Any]:
    env.metadata = {"autoreset_mode": mode}
    return env


def test_a_vector_without_mode() -> None:
    env = vector(AutoresetMode.NEXT_STEP)
    env.metadata = {}
    assert "next-step is assumed" in only(problems(env), "warning", "autoreset")


def test_a_vector_with_an_unknown_mode() -> None:
    env = claims(vector(AutoresetMode.NEXT_STEP), "sometimes")
    assert "'sometimes'" in only(problems(env), "error", "autoreset")


def test_same_step_that_says_next_step() -> None:
    found = problems(claims(vector(AutoresetMode.SAME_STEP), AutoresetMode.NEXT_STEP))
    assert {(finding.level, finding.topic) for finding in found} == {("error", "autoreset")}
    assert any("has 'final_obs'" in finding.message for finding in found)
    assert any("it is a transition" in finding.message for finding in found)


def test_next_step_that_says_same_step() -> None:
    env = claims(vector(AutoresetMode.NEXT_STEP), AutoresetMode.SAME_STEP)
    assert "no 'final_obs'" in only(problems(env), "error", "autoreset")


def test_same_step_without_an_entry() -> None:
    class Broken(SyncVectorEnv[Any, Any]):
        def step(self, actions: Any) -> Any:
            *parts, info = super().step(actions)
            if "final_obs" in info:
                info["final_obs"][:] = None
            return *parts, info

    assert "no entry" in only(problems(vector(AutoresetMode.SAME_STEP, Broken)), "error", "final observation")


def test_same_step_with_overwritten_final_observations() -> None:
    env = vector(AutoresetMode.SAME_STEP, env=Reusing)
    assert "always equals the first observation" in only(problems(env), "warning", "final observation")


def test_disabled_that_resets_everything() -> None:
    class Broken(SyncVectorEnv[Any, Any]):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return super().reset(seed=seed)

    assert "resets more than the mask" in only(problems(vector(AutoresetMode.DISABLED, Broken)), "error", "autoreset")


def test_native_cartpole_does_not_pass_for_disabled() -> None:
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    assert "resets more than the mask" in only(problems(claims(env, AutoresetMode.DISABLED)), "error", "autoreset")


@pytest.mark.parametrize(
    ("position", "value", "text"),
    [
        (1, [0.0] * 3, "reward must be an array of numbers of shape (3,), got list"),
        (1, np.zeros((3, 1)), "got float64(3, 1)"),
        (2, np.zeros(3), "terminated must be an array of booleans"),
        (3, np.zeros(1, np.bool_), "truncated must be an array of booleans of shape (3,), got bool(1,)"),
    ],
)
def test_vector_steps_of_another_form(position: int, value: Any, text: str) -> None:
    class Broken(SyncVectorEnv[Any, Any]):
        def step(self, actions: Any) -> Any:
            parts = list(super().step(actions))
            parts[position] = value
            return tuple(parts)

    assert text in only(problems(vector(AutoresetMode.NEXT_STEP, Broken)), "error", "step")


def test_vector_rewards_that_are_not_finite() -> None:
    class Broken(SyncVectorEnv[Any, Any]):
        def step(self, actions: Any) -> Any:
            obs, reward, *rest = super().step(actions)
            return obs, np.where(reward < -3, np.inf, reward), *rest

    assert "not finite" in only(problems(vector(AutoresetMode.SAME_STEP, Broken)), "error", "reward")


def test_vector_observations_of_another_dtype() -> None:
    class Broken(SyncVectorEnv[Any, Any]):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return obs.astype(np.float64), *rest

    assert "dtype float64" in only(problems(vector(AutoresetMode.NEXT_STEP, Broken)), "warning", "observation")


@pytest.mark.parametrize(
    ("when", "level", "text"),
    [
        ("reset", "error", "two resets with the same seed"),
        ("step", "error", "from step 1 on"),
        ("later", "warning", "after episodes have ended"),
    ],
)
def test_vector_seeding(when: str, level: str, text: str) -> None:
    class Broken(Walk):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Parts:
            fresh = np.random.default_rng().integers(2**31).item()
            result = super().reset(seed=fresh if when == "reset" or (when == "later" and seed is None) else seed)
            if when == "step":
                self.np_random = np.random.default_rng()
            return result

    assert text in only(problems(vector(AutoresetMode.SAME_STEP, env=Broken)), level, "seeding")


def test_vector_environments_that_share_a_seed() -> None:
    class Broken(SyncVectorEnv[Any, Any]):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return super().reset(seed=[seed] * 3 if isinstance(seed, int) else seed, options=options)

    assert "a seed of its own" in only(problems(vector(AutoresetMode.NEXT_STEP, Broken)), "warning", "seeding")


def test_a_vector_without_ends_is_mentioned() -> None:
    env = vector(AutoresetMode.NEXT_STEP, env=Endless)
    assert problems(env, num_steps=90) == []
    assert any("autoreset could not be checked" in note for note in notes(env, "episodes", num_steps=90))


@pytest.mark.filterwarnings("ignore:.*ERROR:")
def test_a_worker_that_fails() -> None:
    class Broken(Walk):
        def step(self, action: Any) -> Any:
            raise ValueError("worker trouble")

    assert "worker trouble" in only(problems(lambda: AsyncVectorEnv([Broken])), "error", "step")


# ---------------------------------------------------------------------------------------------------------------------
# Reports
# ---------------------------------------------------------------------------------------------------------------------


def test_findings_are_readable() -> None:
    assert str(Finding("error", "step", "too high")) == "error    step: too high"


def test_findings_are_values() -> None:
    finding = Finding("info", "a", "b")
    assert finding == Finding("info", "a", "b")
    with pytest.raises(AttributeError):
        finding.level = "error"  # type: ignore[misc]


def test_errors_come_first_and_each_kind_once() -> None:
    class Broken(Walk):
        action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

        def reward(self) -> Any:
            return np.nan

    findings = check_env(Broken)
    assert [finding.level for finding in findings][:2] == ["error", "warning"]
    assert len({(finding.level, finding.topic) for finding in findings}) == len(findings)


def test_format() -> None:
    findings = [Finding("error", "a", "x"), Finding("error", "b", "y"), Finding("warning", "c", "z")]
    assert format_findings(findings) == "2 errors, 1 warning.\nerror    a: x\nerror    b: y\nwarning  c: z"
    assert format_findings([]) == "No problems found."
    assert format_findings([Finding("info", "a", "x")]) == "No problems found.\ninfo     a: x"
