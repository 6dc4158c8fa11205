"""Agents that learn from replay: what they answer, what they keep, and what they refuse."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rl_training
from rl_training import DDPG, DQN, PPO, SAC, TD3, Agent, TrainConfig, load, resume, train
from rl_training.algorithms.bases.q_learning import QLearningAlgorithm
from rl_training.algorithms.registry import registry
from rl_training.contracts.errors import CheckpointError, ConfigError, EnvError, SpaceError
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.settings import OffPolicyConfig
from rl_training.experiment.checkpointing import checkpoints_of, load_checkpoint
from rl_training.testing.resume import Crash, crash_at, flat, only_run, same
from tests.small import small_env, small_settings

BY_TITLE = {spec.title: spec for spec in registry().values()}
OFF_POLICY = [spec.title for spec in registry().values() if issubclass(spec.config, OffPolicyConfig)]
DISCRETE = [spec.title for spec in registry().values() if issubclass(spec.algorithm, QLearningAlgorithm)]
CONTINUOUS = [title for title in OFF_POLICY if spaces.Box in BY_TITLE[title].action_spaces]
ONLY_CONTINUOUS = [title for title in CONTINUOUS if spaces.Discrete not in BY_TITLE[title].action_spaces]
OF_VECTORS = [title for title in CONTINUOUS if not BY_TITLE[title].needs_images]


def make(title: str, env: Any = None, **settings: Any) -> Agent:
    """A small agent of that class."""
    spec = BY_TITLE[title]
    names = set(spec.config.__dataclass_fields__)
    steady = {key: value for key, value in {"epsilon": 0.2, "importance_exponent": 0.5}.items() if key in names}
    own = small_settings(spec, **{**steady, **{key: value for key, value in settings.items() if key in names}})
    rest = {key: value for key, value in settings.items() if key not in names}
    return getattr(rl_training, title)(env or small_env(spec), **{"seed": 1, "eval_every": 0, **rest, **own})  # type: ignore[no-any-return]


def buffer_of(agent: Agent) -> ReplayBuffer:
    return agent._off_policy().sampler.buffer


class Bounded(gym.Env[Any, Any]):
    """Takes actions between odd bounds and keeps what it was given."""

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own class attribute

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = action_space
        self.given: list[Any] = []
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.given.append(np.array(action))
        self.steps += 1
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), 0.0, False, self.steps == 7, {}


# Predicting


@pytest.mark.parametrize("title", OFF_POLICY)
def test_shapes_of_predictions(title: str) -> None:
    agent = make(title)
    space = agent._experiment.spec
    obs = np.stack([space.observation_space.sample() for _ in range(4)])
    for deterministic in (True, False):
        action, state = agent.predict(obs[0], deterministic=deterministic)
        assert space.action_space.contains(action)
        assert state is None
        actions, _ = agent.predict(obs, deterministic=deterministic)
        assert actions.shape == (4, *space.action_space.shape)
        assert actions.dtype == space.action_space.dtype
    assert isinstance(agent.value(obs[0]), float)
    assert agent.value(obs).shape == (4,)
    # up to rounding, which depends on the number of rows
    np.testing.assert_allclose(agent.predict(obs)[0][0], agent.predict(obs[:1])[0][0], rtol=1e-5)
    agent.close()


@pytest.mark.parametrize("title", DISCRETE)
def test_the_value_is_that_of_the_best_action(title: str) -> None:
    agent = make(title)
    agent.learn(30, progress=False)
    obs = np.linspace(-0.2, 0.2, 20, dtype=np.float32).reshape(5, 4)
    with torch.no_grad():
        q_values = agent.policy.network.q_values(torch.from_numpy(obs)).numpy()  # type: ignore[attr-defined]
    assert q_values.shape == (5, 2)
    assert np.array_equal(agent.value(obs), q_values.max(axis=1))
    assert np.array_equal(agent.predict(obs)[0], q_values.argmax(axis=1))
    agent.close()


@pytest.mark.parametrize("title", OF_VECTORS)
def test_the_value_is_the_smallest_critics_at_the_policys_action(title: str) -> None:
    agent = make(title, "Pendulum-v1", num_critics=3)
    agent.learn(30, progress=False)
    obs = np.linspace(-0.5, 0.5, 15, dtype=np.float32).reshape(5, 3)
    action = agent.predict(obs)[0] / np.float32(2.0)  # the torque's bounds are -2 and 2
    policy: Any = agent.policy
    with torch.no_grad():
        if policy.state_value is not None:
            expected = policy.state_value(torch.from_numpy(obs)).numpy()
        else:
            expected = policy.q_values(torch.from_numpy(obs), torch.from_numpy(action)).numpy().min(axis=0)
    assert agent.value(obs) == pytest.approx(expected, rel=1e-5)
    agent.close()


def test_the_first_action_of_a_space_that_does_not_start_at_zero() -> None:
    agent = make("DQN", functools.partial(Bounded, spaces.Discrete(3, start=5)), epsilon=1.0)
    agent.learn(60, progress=False)
    given = agent._experiment.trainer.collector.env.env.envs[0].given  # type: ignore[attr-defined]
    assert {int(action) for action in given} == {5, 6, 7}
    assert set(buffer_of(agent).action[:50].tolist()) == {0, 1, 2}
    assert agent.predict(np.zeros(3, np.float32))[0] in (5, 6, 7)
    agent.close()


BOUNDS = [(-0.1, 0.3), (-3.0, 7.0), (0.1, 1e6), (-1e-3, 1.0), (5.0, 5.5)]


@pytest.mark.parametrize("title", [title for title in OF_VECTORS if title != "BCQ"])  # its actor moves decoded actions
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_bounds_are_reached_exactly(title: str, low: float, high: float) -> None:
    space = spaces.Box(np.float32(low), np.float32(high), (2, 2), np.float32)
    agent = make(title, functools.partial(Bounded, space))
    for bias, bound in ((100.0, space.high), (-100.0, space.low)):
        with torch.no_grad():
            head = agent.policy.actor.trunk.head  # type: ignore[attr-defined]
            head.bias.fill_(bias)
        assert np.array_equal(agent.predict(np.zeros(3, np.float32))[0], bound)
    agent.close()


@pytest.mark.parametrize("title", OF_VECTORS)
def test_replay_keeps_actions_as_the_policy_sees_them(title: str) -> None:
    space = spaces.Box(np.float32(3.0), np.float32(7.0), (2, 2), np.float32)
    agent = make(title, functools.partial(Bounded, space), learning_starts=15)
    agent.learn(40, progress=False)
    given = np.stack(agent._experiment.trainer.collector.env.env.envs[0].given)  # type: ignore[attr-defined]
    kept = buffer_of(agent).action[:40]
    assert np.abs(kept).max() <= 1.0
    assert 5.0 + 2.0 * kept == pytest.approx(given, abs=1e-5)
    assert given.min() < 4.0  # random actions fill the space
    assert given.max() > 6.0
    agent.close()


# What is refused, before any work


@pytest.mark.parametrize("title", ONLY_CONTINUOUS)
def test_continuous_control_of_discrete_actions_names_what_to_use(title: str) -> None:
    with pytest.raises(SpaceError, match=rf"{title} needs an action space of type Box, got Discrete\(2\).*DQN"):
        make(title, "CartPole-v1")


@pytest.mark.parametrize("title", DISCRETE)
def test_action_values_of_continuous_actions_name_what_to_use(title: str) -> None:
    with pytest.raises(SpaceError, match=rf"{title} needs an action space of type Discrete, got Box.*SAC or TD3"):
        make(title, "Pendulum-v1")


@pytest.mark.parametrize("title", OF_VECTORS)
def test_bounds_that_are_not_finite_are_refused(title: str) -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    with pytest.raises(SpaceError, match="finite bounds"):
        make(title, functools.partial(Bounded, space))


def test_hindsight_without_goals_is_refused() -> None:
    with pytest.raises(SpaceError, match="her needs a Dict observation space with achieved_goal, desired_goal"):
        make("SAC", her=True)


def test_hindsight_without_a_reward_function_is_refused() -> None:
    class Mute(Bounded):
        def __init__(self) -> None:
            super().__init__(spaces.Discrete(2))
            part = spaces.Box(-1, 1, (3,), np.float32)
            self.observation_space = spaces.Dict(observation=part, achieved_goal=part, desired_goal=part)

    with pytest.raises(EnvError, match="her needs an environment with a method compute_reward"):
        make("DQN", Mute, her=True)


def test_an_on_policy_agent_keeps_no_replay(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", num_envs=1, eval_every=0)
    with pytest.raises(ConfigError, match="PPO is on-policy and has no replay buffer"):
        agent.save_replay(tmp_path / "replay")
    with pytest.raises(ConfigError, match="has no replay buffer"):
        agent.load_replay(tmp_path / "replay")
    agent.close()


# Replay on its own


def rows_of(agent: Agent) -> dict[str, Any]:
    buffer = buffer_of(agent)
    index = buffer.everything()
    return {name: column[index] for name, column in buffer._columns().items()}


@pytest.mark.parametrize("capacity", [200, 30, 500])
@pytest.mark.parametrize("prioritized", [False, True])
def test_replay_goes_from_one_agent_to_another(tmp_path: Path, capacity: int, prioritized: bool) -> None:
    first = make("DQN", num_envs=2)
    first.learn(80, progress=False)
    first.save_replay(tmp_path / "replay")
    second = make("DQN", num_envs=2, buffer_size=capacity, prioritized=prioritized, seed=2)
    second.learn(20, progress=False)
    second.load_replay(tmp_path / "replay")
    kept = min(80, capacity)
    assert buffer_of(second).num_transitions == kept
    expected, found = rows_of(first), rows_of(second)
    for name, column in expected.items():
        if name != "truncated":  # episodes in flight end where they are
            assert np.array_equal(column[-kept:], found[name]), name
    assert (found["truncated"][-2:] | found["terminated"][-2:]).all()
    second.learn(20, progress=False)
    assert buffer_of(second).num_transitions == min(100, capacity)
    second.save(tmp_path / "agent")
    again = load(tmp_path / "agent")
    one, other = (flat(agent._experiment.trainer.state_dict()) for agent in (second, again))
    assert [name for name in one.keys() | other.keys() if not same(one, other, name)] == []
    for agent in (first, second, again):
        agent.close()


def test_an_empty_replay(tmp_path: Path) -> None:
    first, second = make("SAC"), make("SAC", seed=2)
    first.save_replay(tmp_path / "replay")
    second.learn(20, progress=False)
    second.load_replay(tmp_path / "replay")
    assert buffer_of(second).num_transitions == 0
    second.learn(20, progress=False)
    assert buffer_of(second).num_transitions == 20


def test_replay_that_does_not_fit(tmp_path: Path) -> None:
    pendulum, cartpole = make("SAC"), make("DQN", num_envs=2)
    for agent, name in ((pendulum, "pendulum"), (cartpole, "cartpole")):
        agent.learn(20, progress=False)
        agent.save_replay(tmp_path / name)
        agent.save(tmp_path / f"{name}-agent")
    before = rows_of(cartpole)
    problems = {
        "pendulum": "pendulum: this replay buffer does not fit the environment",
        "pendulum-agent": "this replay buffer does not fit the environment: the saved state does not fit a replay",
        "cartpole-agent": "this replay buffer does not fit the environment: the saved state does not fit a replay",
        "nowhere": "nowhere",
        "directory": "directory is not a checkpoint",
    }
    (tmp_path / "directory").mkdir()
    for name, message in problems.items():
        with pytest.raises(CheckpointError, match=message):
            cartpole.load_replay(tmp_path / name)
    one = make("DQN", num_envs=1)
    with pytest.raises(
        CheckpointError,
        match=r"cartpole: this replay buffer does not fit .*: it was saved with 2 environments, this run has 1",
    ):
        one.load_replay(tmp_path / "cartpole")
    after = rows_of(cartpole)
    assert all(np.array_equal(before[name], after[name]) for name in before), "what it had is still there"
    with pytest.raises(CheckpointError, match="does not fit"):
        load(tmp_path / "cartpole")  # a replay is no agent
    for agent in (pendulum, cartpole, one):
        agent.close()


def test_prior_replay_that_is_not_there_is_found_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        make("SAC", prior_replay=tmp_path / "nowhere")
    other = make("DQN")
    other.learn(20, progress=False)
    other.save_replay(tmp_path / "replay")
    with pytest.raises(CheckpointError, match="replay: this replay buffer does not fit the environment"):
        make("SAC", prior_replay=tmp_path / "replay")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_environment_that_is_given(mode: AutoresetMode) -> None:
    vector = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=mode)
    agent = make("DQN", vector)
    agent.learn(90, progress=False)
    assert agent.num_timesteps in (90, 91, 92)
    assert buffer_of(agent).num_transitions == agent.num_timesteps
    vector.close()


# Grades of resuming


def small_config(output: Path, algo: str = "dqn", **changes: Any) -> TrainConfig:
    own = small_settings(algo, **{key: changes.pop(key) for key in ("checkpoint_replay",) if key in changes})
    env_id = "CartPole-v1" if algo == "dqn" else "Pendulum-v1"
    settings: dict[str, Any] = {
        "algo": algo, "env_id": env_id, "total_timesteps": 120, "output_dir": output, "eval_every": 0,
        "checkpoint_every": 30, "tensorboard": False, "algorithm": own, "num_envs": 2,
    }  # fmt: skip
    return TrainConfig(**{**settings, **changes})


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_without_replay_in_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str], algo: str) -> None:
    config = small_config(tmp_path, algo, checkpoint_replay=False)
    with pytest.raises(Crash):
        train(config, callback=crash_at(70))
    said = capsys.readouterr().err
    assert (
        "resume grade: learner-only (checkpoint_replay is off: a resumed run starts with an empty replay buffer)"
        in said
    )
    run = only_run(tmp_path)
    assert json.loads((run / "metadata.json").read_text())["resume_grade"] == "learner-only"
    newest = checkpoints_of(run)[-1]
    assert load_checkpoint(newest).metadata["resume_grade"] == "learner-only"
    assert not list(newest.glob("segment_*"))
    agent = load(newest)
    steps, updates = agent.num_timesteps, agent._experiment.trainer.updates
    assert buffer_of(agent).num_transitions == 0
    agent.learn(8, progress=False)
    assert agent._experiment.trainer.updates == updates, "learning waits until there is something to learn from"
    agent.learn(20, progress=False)
    assert updates < agent._experiment.trainer.updates <= updates + (28 - 10) // 2
    assert agent.num_timesteps == steps + 28
    agent.close()
    result = resume(run)
    assert "resume grade: learner-only" in capsys.readouterr().err
    assert result.env_steps == 120


def test_an_environment_that_cannot_be_snapshotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_env = functools.partial(Bounded, spaces.Discrete(2))
    config = small_config(tmp_path, env_id="Bounded")
    with pytest.raises(Crash):
        train(config, env=make_env, callback=crash_at(70))
    said = capsys.readouterr().err
    assert "resume grade: episode-boundary" in said
    assert "has no get_state and set_state" in said
    run = only_run(tmp_path)
    saved = load_checkpoint(checkpoints_of(run)[-1])
    assert saved.metadata["resume_grade"] == "episode-boundary"
    agent = load(checkpoints_of(run)[-1], env=make_env)
    buffer = buffer_of(agent)
    rows = buffer.everything()[-2:]
    assert (buffer.truncated[rows] | buffer.terminated[rows]).all(), "episodes in flight end where the run stopped"
    before = buffer.num_transitions
    agent.close()
    with pytest.raises(Crash):
        resume(run, env=make_env, callback=crash_at(100))
    result = resume(run, env=make_env, progress=False)
    assert result.env_steps == 120
    assert before < 120
    # nothing was lost: the replay has every step, and no window of it crosses from one life into the next
    agent = load(checkpoints_of(run)[-1], env=make_env)
    assert buffer_of(agent).num_transitions == 120
    agent.close()


def test_a_checkpoint_for_another_number_of_environments(tmp_path: Path) -> None:
    agent = make("DQN", lambda: gym.make("CartPole-v1"), num_envs=2)
    agent.learn(40, progress=False)
    agent.save(tmp_path / "agent")
    agent.close()
    other = gym.make("CartPole-v1")
    with pytest.warns(
        UserWarning, match="the replay buffer starts empty: it was saved with 2 environments, this run has 1"
    ):
        again = load(tmp_path / "agent", env=other)
    assert buffer_of(again).num_transitions == 0
    again.learn(40, progress=False)
    assert again.num_timesteps == 80
    other.close()


@pytest.mark.parametrize("cls", [DQN, DDPG, TD3, SAC])
def test_started_from_trained_weights(cls: Any, tmp_path: Path) -> None:
    trained = make(cls.__name__)
    trained.learn(40, progress=False)
    trained.save(tmp_path / "trained")
    fresh = make(cls.__name__, init_from=tmp_path / "trained", seed=7)
    obs = np.stack([trained._experiment.spec.observation_space.sample() for _ in range(5)])
    assert np.array_equal(fresh.predict(obs)[0], trained.predict(obs)[0])
    assert np.array_equal(fresh.value(obs), trained.value(obs))
    assert (fresh.num_timesteps, buffer_of(fresh).num_transitions) == (0, 0)
    shutil.rmtree(tmp_path / "trained")
    fresh.learn(30, progress=False)
    for agent in (trained, fresh):
        agent.close()
