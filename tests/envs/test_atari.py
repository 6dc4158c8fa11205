"""Atari games: played in C++ or in Python they are the same, and learning sees lives where reports see games."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rl_training import DQN, PPO
from rl_training.api.session import train
from rl_training.contracts.environment import VectorStep
from rl_training.contracts.errors import CheckpointError, ConfigError, MissingExtraError
from rl_training.data import replay_buffer
from rl_training.envs import check_env, make_env, make_vector_env, wrappers
from rl_training.envs.atari import AtariAdapter, AtariConfig, AtariGame, make_game, make_native_games
from rl_training.envs.factory import AnyVectorEnv, copy_env
from rl_training.envs.snapshot import restore_snapshot, take_snapshot
from rl_training.envs.vector import AutoresetAdapter
from rl_training.experiment.build import EPISODE_BOUNDARY, EXACT, build_experiment
from rl_training.experiment.checkpointing import load_checkpoint, save_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.collector import EpisodeStatistics
from rl_training.testing.resume import crash_and_resume, differences, flat, same

ale_py = pytest.importorskip("ale_py")
pytest.importorskip("cv2")
gym.register_envs(ale_py)

BREAKOUT, PONG, QBERT, INVADERS = (f"ALE/{name}-v5" for name in ("Breakout", "Pong", "Qbert", "SpaceInvaders"))
SMALL: dict[str, Any] = {"screen_size": 36, "frame_stack": 2}
TINY: dict[str, Any] = {"screen_size": 12, "frame_stack": 2}


def protocol(**settings: Any) -> AtariConfig:
    """Without random no-ops, so that equal actions make equal games."""
    return AtariConfig(**{"noop_max": 0, **settings})


def config(env_id: str = BREAKOUT, **settings: Any) -> TrainConfig:
    return TrainConfig(**{"algo": "ppo", "env_id": env_id, "num_envs": 2, "num_threads": 1, **settings})


def random_actions(space: Any, num_steps: int, num_envs: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(space.n, size=(num_steps, num_envs))


# ---------------------------------------------------------------------------------------------------------------------
# The same game twice
# ---------------------------------------------------------------------------------------------------------------------


def count_same_as_native(env_id: str, num_steps: int, **settings: Any) -> int:
    """Compares everything that both show over random games; how many of them ended."""
    played = protocol(**settings)
    native, games = make_native_games(env_id, played, 2), [make_game(env_id, played, {}) for _ in range(2)]
    assert native.single_observation_space == games[0].observation_space
    assert native.single_action_space == games[0].action_space
    obs, info = native.reset(seed=1)
    first = [game.reset(seed=2) for game in games]
    np.testing.assert_array_equal(obs, [shown for shown, _ in first])
    assert info["lives"].tolist() == [about["lives"] for _, about in first]
    num_ended = 0
    for number, actions in enumerate(random_actions(native.single_action_space, num_steps, 2)):
        obs, reward, terminated, truncated, info = native.step(actions)
        for env, game in enumerate(games):
            where = f"game {env}, step {number}"
            shown, *rest, about = game.step(int(actions[env]))
            assert rest == [float(reward[env]), bool(terminated[env]), bool(truncated[env])], where
            if any(rest[1:]):
                num_ended += 1
                np.testing.assert_array_equal(shown, info["final_obs"][env], where)
                shown, about = game.reset()
            np.testing.assert_array_equal(shown, obs[env], where)
            assert about["lives"] == info["lives"][env], where
    return num_ended


@pytest.mark.parametrize(
    ("env_id", "settings", "num_steps", "ends"),
    [
        (PONG, {}, 200, 0),
        (PONG, {"grayscale": False}, 100, 0),
        (BREAKOUT, {}, 300, 2),
        (BREAKOUT, {"grayscale": False}, 250, 2),
        (INVADERS, {}, 200, 0),
        (INVADERS, {"grayscale": False}, 100, 0),
    ],
    ids=["pong", "pong in colour", "breakout", "breakout in colour", "invaders", "invaders in colour"],
)
def test_both_show_the_same(env_id: str, settings: dict[str, Any], num_steps: int, ends: int) -> None:
    assert count_same_as_native(env_id, num_steps, **settings) >= ends


@pytest.mark.parametrize(
    ("settings", "num_steps", "ends"),
    [
        ({"max_pool": False}, 230, 2),
        ({"full_action_set": True}, 230, 2),
        ({"frame_stack": 1, "fire_reset": False}, 100, 0),
        ({"frame_skip": 1}, 300, 0),
        ({"frame_skip": 3}, 350, 2),
        # where a game is cut off within a step, its last screen depends on the frame at which it is
        *(({"max_frames": limit}, 60, 4) for limit in (100, 101, 102, 103)),
        *(({"max_frames": limit, "frame_skip": 3, "max_pool": False}, 70, 4) for limit in (100, 101, 102)),
    ],
    ids=str,
)
def test_both_show_the_same_by_any_protocol(settings: dict[str, Any], num_steps: int, ends: int) -> None:
    assert count_same_as_native(BREAKOUT, num_steps, **{**SMALL, **settings}) >= ends


@pytest.mark.parametrize(("env_id", "fire"), [(BREAKOUT, True), (BREAKOUT, False), ("ALE/Freeway-v5", True)])
def test_both_begin_after_as_many_frames(env_id: str, fire: bool) -> None:
    """Breakout has a FIRE to press, Freeway has none."""
    played = protocol(noop_max=4, fire_reset=fire, **TINY)
    native, game = make_native_games(env_id, played, 4), make_game(env_id, played, {})
    frames = {int(frame) for _ in range(20) for frame in native.reset()[1]["episode_frame_number"]}
    own = set()
    for _ in range(40):
        game.reset()
        own.add(game.ale.getEpisodeFrameNumber())
    assert own == frames
    assert frames == ({1, 2, 3} if fire and env_id == BREAKOUT else {0, 1, 2, 3})


@pytest.mark.parametrize("settings", [{}, {"sticky_actions": 0.25, "noop_max": 30}], ids=["fixed", "random"])
def test_native_games_of_one_seed_are_equal_whatever_the_threads(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ale_py import vector_env

    seen = []
    for num_threads in (1, 3):
        vector = functools.partial(vector_env.AtariVectorEnv, num_threads=num_threads)
        with monkeypatch.context() as patch:
            patch.setattr(vector_env, "AtariVectorEnv", vector)
            games = make_native_games(BREAKOUT, protocol(**TINY, max_frames=150, **settings), 4)
        rows = [games.reset(seed=5)[0]]
        for actions in random_actions(games.single_action_space, 80, 4):
            rows += [part.copy() for part in games.step(actions)[:4]]
        seen.append(rows)
    assert all(np.array_equal(one, other) for one, other in zip(*seen, strict=True))


def test_two_native_runs_of_one_seed_are_equal() -> None:
    states = []
    for _ in range(2):
        agent = PPO(
            config(atari=TINY, eval_every=0, seed=3, algorithm={"num_steps": 16, "minibatch_size": 16, "num_epochs": 1})
        )
        agent.learn(64, progress=False)
        states.append(flat(agent._experiment.trainer.state_dict()))
        agent.close()
    one, other = states
    assert [name for name in one.keys() | other.keys() if not same(one, other, name)] == []


# ---------------------------------------------------------------------------------------------------------------------
# What ale-py does that we have to know: if one of these fails, `envs.atari` may become simpler
# ---------------------------------------------------------------------------------------------------------------------


def ale_games(mode: AutoresetMode = AutoresetMode.SAME_STEP, **settings: Any) -> AnyVectorEnv:
    from ale_py.vector_env import AtariVectorEnv

    size = {"img_height": 12, "img_width": 12, "stack_num": 2, "noop_max": 0}
    games: AnyVectorEnv = AtariVectorEnv("breakout", 2, autoreset_mode=mode, **{**size, **settings})
    return games


def play_to_an_end(games: AnyVectorEnv) -> tuple[Any, ...]:
    """The first step that ended an episode of one game, but not of the other, and what was seen before it."""
    before, _ = games.reset(seed=0)
    for actions in random_actions(games.single_action_space, 400, 2):
        step = games.step(actions)
        if step[2].sum() == 1:
            return before, *step
        before = step[0].copy()
    raise AssertionError("no game ended")


class TestTrapsOfAlePy:
    def test_its_episodic_life_begins_a_new_game(self) -> None:
        _, _, _, terminated, _, info = play_to_an_end(ale_games(episodic_life=True))
        assert info["lives"][terminated].tolist() == [5], "as if nothing had been lost"
        assert info["episode_frame_number"][terminated].tolist() == [1]

    def test_its_life_loss_info_lets_the_game_go_on_but_gives_a_false_last_observation(self) -> None:
        _, obs, _, terminated, _, info = play_to_an_end(ale_games(life_loss_info=True))
        (env,) = np.flatnonzero(terminated)
        assert info["lives"][env] < 5
        assert info["episode_frame_number"][env] > 100
        assert not np.array_equal(info["final_obs"][env], obs[env])

    def test_it_cannot_leave_resets_to_us(self) -> None:
        with pytest.raises(ValueError, match="Invalid autoreset_mode: Disabled"):
            ale_games(AutoresetMode.DISABLED)

    def test_stacks_begin_black(self) -> None:
        obs, _ = ale_games().reset(seed=0)
        assert not obs[:, 0].any()
        assert obs[:, 1].any()

    def test_stacks_begin_black_in_the_next_game(self) -> None:
        _, obs, _, terminated, _, _ = play_to_an_end(ale_games())
        assert not obs[terminated, 0].any()
        assert obs[~terminated, 0].any()

    def test_last_observations_have_no_mask(self) -> None:
        before, _, _, terminated, _, info = play_to_an_end(ale_games())
        assert set(info) == {"env_id", "lives", "frame_number", "episode_frame_number", "final_obs"}
        assert info["final_obs"].shape == before.shape
        assert np.array_equal(info["final_obs"][terminated, 0], before[terminated, 1])

    def test_lives_at_an_end_are_those_of_the_next_game(self) -> None:
        _, _, _, terminated, _, info = play_to_an_end(ale_games())
        assert info["lives"][terminated].tolist() == [5]


# ---------------------------------------------------------------------------------------------------------------------
# Lives and scores
# ---------------------------------------------------------------------------------------------------------------------

VECTORS = ("native", "sync")


def make_games(vectorization: str, env_id: str, **settings: Any) -> AnyVectorEnv:
    """Games as a run gets them: native ones reset in the same step, others when they are told to."""
    given = config(env_id, vectorization=vectorization, atari=protocol(**{**TINY, **settings}))
    return make_vector_env(given, autoreset_mode=AutoresetMode.DISABLED)


def play(adapter: AutoresetAdapter, num_steps: int) -> tuple[list[VectorStep], list[Any]]:
    """Steps with random actions, and the lives that are left after each, from before the first one on."""
    adapter.reset(seed=0)
    steps, lives = [], [np.array(adapter.info["lives"])]
    for actions in random_actions(adapter.env.single_action_space, num_steps, 2):
        steps.append(adapter.step(actions))
        left = np.array(adapter.info["lives"])
        ended = steps[-1].finished
        left[ended] = lives[0][ended]
        lives.append(left)
    return steps, lives


@pytest.mark.parametrize("vectorization", VECTORS)
@pytest.mark.parametrize(
    ("episodic_life", "clip_rewards"), [(True, True), (False, False), (True, False)], ids=["both", "neither", "lives"]
)
def test_what_learning_sees_and_what_is_reported(vectorization: str, episodic_life: bool, clip_rewards: bool) -> None:
    """Against a plain adapter around the same games, in which a life is lost now and then, and all of them twice."""
    settings = {"frame_skip": 8, "episodic_life": episodic_life, "clip_rewards": clip_rewards}
    plain, lives = play(AutoresetAdapter(make_games(vectorization, QBERT, **settings)), 220)
    steps, _ = play(AtariAdapter(make_games(vectorization, QBERT, **settings), AtariConfig(**settings)), 220)
    statistics, scores, num_lost = EpisodeStatistics.start(2), np.zeros(2), 0
    for number, (step, game) in enumerate(zip(steps, plain, strict=True)):
        over = game.terminated | game.truncated
        lost = (lives[number + 1] < lives[number]) & ~over
        cut = lost if episodic_life else np.zeros(2, np.bool_)
        num_lost += int(lost.sum())
        scores += game.reward
        np.testing.assert_array_equal(step.score, game.reward)
        np.testing.assert_array_equal(step.reward, np.sign(game.reward) if clip_rewards else game.reward)
        np.testing.assert_array_equal(step.terminated, game.terminated | cut)
        np.testing.assert_array_equal(step.truncated, game.truncated)
        np.testing.assert_array_equal(step.finished, np.flatnonzero(over))
        np.testing.assert_array_equal(step.ended, np.flatnonzero(over | cut))
        np.testing.assert_array_equal(step.obs, game.obs)
        assert step.valid.all()
        assert (step.final_obs is None) == (not (over | cut).any())
        for row, env in enumerate(step.ended):
            assert isinstance(step.obs, np.ndarray)
            assert isinstance(step.final_obs, np.ndarray)
            if over[env]:
                assert isinstance(game.final_obs, np.ndarray)
                np.testing.assert_array_equal(step.final_obs[row], game.final_obs[list(game.ended).index(env)])
                assert not np.array_equal(step.final_obs[row], step.obs[env]), "the next game's first is another"
            else:
                np.testing.assert_array_equal(step.final_obs[row], step.obs[env])
        for env, episode in zip(step.finished, statistics.add(step), strict=True):
            assert episode.total == scores[env]
            scores[env] = 0
    assert statistics.num_episodes >= 2
    assert num_lost >= 3 * statistics.num_episodes
    assert max(statistics.returns) >= 50, "in rewards of 25"
    assert all(total % 25 == 0 for total in statistics.returns)


@pytest.mark.parametrize("vectorization", VECTORS)
def test_a_game_that_is_cut_off_is_truncated(vectorization: str) -> None:
    adapter = AtariAdapter(make_games(vectorization, BREAKOUT, max_frames=62), AtariConfig())
    steps, _ = play(adapter, 40)
    ends = [number for number, step in enumerate(steps) if len(step.ended)]
    assert ends == [15, 31], "after 62 frames, of which one pressed FIRE"
    for number in ends:
        assert steps[number].truncated.all()
        assert not steps[number].terminated.any()
        assert steps[number].finished.tolist() == [0, 1]


def test_the_last_observation_of_a_cut_is_its_own_array() -> None:
    """What is done to the observations to act on must not change the one that is stored."""
    steps, _ = play(AtariAdapter(make_games("native", BREAKOUT), AtariConfig()), 60)
    cut = next(step for step in steps if step.final_obs is not None)
    assert isinstance(cut.obs, np.ndarray)
    assert not np.shares_memory(cut.obs, cut.final_obs)


@pytest.mark.parametrize("vectorization", VECTORS)
def test_learning_and_evaluation_are_wired_so(vectorization: str) -> None:
    experiment = build_experiment(config(QBERT, vectorization=vectorization, atari=TINY))
    assert type(experiment.trainer.collector.env) is AtariAdapter
    assert type(experiment.evaluator.env) is AutoresetAdapter
    experiment.close()


@pytest.mark.parametrize("vectorization", VECTORS)
def test_evaluations_are_of_whole_games_and_unclipped(vectorization: str) -> None:
    atari = {**TINY, "frame_skip": 8}
    agent = PPO(QBERT, num_envs=2, vectorization=vectorization, atari=atari, eval_deterministic=False, seed=1)
    result = agent.evaluate(2)
    agent.close()
    assert min(result.lengths) > 100, "four lives, of which one is over sooner"
    assert max(result.returns) >= 25
    assert all(total % 25 == 0 for total in result.returns)


def test_returns_during_training_are_of_whole_games_and_unclipped() -> None:
    settings = {"num_steps": 64, "minibatch_size": 128, "num_epochs": 1, "network": {"encoder": "flat"}}
    agent = PPO(QBERT, num_envs=4, atari={**TINY, "frame_skip": 8}, eval_every=0, seed=1, num_threads=1, **settings)
    metrics = agent.learn(4 * 256, progress=False).metrics
    statistics = agent._experiment.trainer.collector.statistics
    agent.close()
    assert 4 <= statistics.num_episodes <= 8
    assert all(total % 25 == 0 for total in statistics.returns)
    assert metrics["rollout/return_mean"] >= 25
    assert metrics["rollout/length_mean"] > 100


# ---------------------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------------------


def trajectory(vector: AnyVectorEnv, seed: int) -> Any:
    vector.reset(seed=seed)
    return np.stack([vector.step(actions)[0] for actions in random_actions(vector.single_action_space, 40, 2)])


@pytest.mark.parametrize("vectorization", VECTORS)
class TestSettings:
    def test_sticky_actions(self, vectorization: str) -> None:
        plain, sticky = (make_games(vectorization, BREAKOUT, sticky_actions=p) for p in (0.0, 0.25))
        expected = trajectory(plain, 1)
        assert np.array_equal(trajectory(plain, 2), expected), "without them, games have nothing random"
        found = trajectory(sticky, 1)
        assert not np.array_equal(found, expected)
        assert np.array_equal(trajectory(sticky, 1), found)
        assert not np.array_equal(trajectory(sticky, 2), found)

    @pytest.mark.parametrize(("full", "num_actions"), [(False, 4), (True, 18)])
    def test_full_action_set(self, vectorization: str, full: bool, num_actions: int) -> None:
        games = make_games(vectorization, BREAKOUT, full_action_set=full)
        assert games.single_action_space == gym.spaces.Discrete(num_actions)
        games.reset(seed=0)
        games.step(np.full(2, num_actions - 1))

    @pytest.mark.parametrize(
        ("settings", "shape"),
        [
            ({"screen_size": 84, "frame_stack": 4}, (4, 84, 84)),
            ({"screen_size": 40, "frame_stack": 3}, (3, 40, 40)),
            ({"screen_size": 20, "frame_stack": 1}, (1, 20, 20)),
            ({"screen_size": 20, "frame_stack": 2, "grayscale": False}, (2, 20, 20, 3)),
        ],
        ids=str,
    )
    def test_shapes(self, vectorization: str, settings: dict[str, Any], shape: tuple[int, ...]) -> None:
        games = make_games(vectorization, BREAKOUT, **settings)
        obs, _ = games.reset(seed=0)
        assert games.single_observation_space == gym.spaces.Box(0, 255, shape, np.uint8)
        assert obs.shape == (2, *shape)
        assert obs.dtype == np.uint8
        assert obs.max() > 50

    def test_frame_skip_makes_games_shorter(self, vectorization: str) -> None:
        """With an action that does nothing, Breakout is over when the five balls are; each has to be served."""
        lengths = []
        for skip in (4, 8):
            games = make_games(vectorization, BREAKOUT, frame_skip=skip, max_frames=80)
            games.reset(seed=0)
            lengths.append(next(n for n in range(1, 50) if games.step(np.zeros(2, np.int64))[3].all()))
        assert lengths == [20, 10]


def test_settings_are_typed() -> None:
    with pytest.raises(ConfigError) as caught:
        config(atari={"frame_skip": 0, "sticky_actions": 2, "frame_stak": 3})
    assert "atari > frame_skip: must be >= 1" in str(caught.value)
    assert "atari > sticky_actions: must be >= 0 and <= 1" in str(caught.value)
    assert "Did you mean 'frame_stack'?" in str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "settings", "problem"),
    [
        ("CartPole-v1", {}, "'CartPole-v1' is not one"),
        (PONG, {"env_kwargs": {"obs_type": "ram"}}, f"'{PONG}' with env_kwargs obs_type does not use them"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(env_id: str, settings: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"atari: frame_stack, noop_max: settings of Atari games.*{problem}"):
        config(env_id, atari={"frame_stack": 8, "noop_max": 0}, **settings)
    config(env_id, atari={"frame_stack": 4}, **settings)  # the default


def test_settings_survive_a_file() -> None:
    given = config(atari={"sticky_actions": 0.25, "noop_max": 0})
    again = TrainConfig.from_dict(given.to_dict())
    assert again == given
    assert again.atari == AtariConfig(sticky_actions=0.25, noop_max=0)


WRAPPED = [{"name": "TimeLimit", "kwargs": {"max_episode_steps": 5}}]


@pytest.mark.parametrize(
    ("env_id", "settings", "vectorization"),
    [
        (PONG, {}, "native"),
        (PONG, {"vectorization": "sync"}, "sync"),
        (PONG, {"vectorization": "async"}, "async"),
        (PONG, {"wrappers": WRAPPED}, "sync"),
        (PONG, {"env_kwargs": {"difficulty": 1}}, "sync"),
        (PONG, {"env_kwargs": {"obs_type": "ram"}}, "sync"),
        ("CartPole-v1", {}, "sync"),
    ],
    ids=["game", "sync", "async", "wrappers", "arguments", "ram", "other"],
)
def test_default_vectorization(env_id: str, settings: dict[str, Any], vectorization: str) -> None:
    found = config(env_id, **settings)
    assert found.vectorization == vectorization
    assert TrainConfig.from_dict(found.to_dict()) == found


class TestArguments:
    def test_native_games_take_none(self) -> None:
        with pytest.raises(ConfigError, match=r"env_kwargs: native Atari does not take mode, difficulty; use sync"):
            make_vector_env(config(env_kwargs={"mode": 4, "difficulty": 1}, vectorization="native"))

    def test_others_do(self) -> None:
        games = make_vector_env(config(env_kwargs={"mode": 4, "difficulty": 1}, atari=protocol(**TINY)))
        plain = make_vector_env(config(vectorization="sync", atari=protocol(**TINY)))
        assert isinstance(games, SyncVectorEnv)
        assert isinstance(games.envs[0], AtariGame)
        assert not np.array_equal(trajectory(games, 0), trajectory(plain, 0))

    def test_wrong_ones_are_named(self) -> None:
        with pytest.raises(ConfigError, match=r"env_kwargs: .*colour"):
            make_env(BREAKOUT, {"colour": "red"})

    def test_those_that_are_settings_are_refused(self) -> None:
        with pytest.raises(ConfigError) as caught:
            make_env(BREAKOUT, {"frameskip": 2, "full_action_space": True, "continuous": True})
        assert "frameskip must be set as atari.frame_skip" in str(caught.value)
        assert "full_action_space must be set as atari.full_action_set" in str(caught.value)
        assert "continuous is not supported by the Atari preprocessing" in str(caught.value)

    def test_memory_is_a_plain_environment(self) -> None:
        experiment = build_experiment(config(PONG, env_kwargs={"obs_type": "ram"}))
        assert experiment.spec.observation_space.shape == (128,)
        assert experiment.spec.frame_stack is None
        assert type(experiment.trainer.collector.env) is AutoresetAdapter
        experiment.close()

    @pytest.mark.parametrize("vectorization", VECTORS)
    def test_unknown_games_suggest_one(self, vectorization: str) -> None:
        with pytest.raises(ConfigError, match=r"env_id: .*Did you mean: `Pong`"):
            make_vector_env(config("ALE/Pongg-v5", vectorization=vectorization))


class WithLives(gym.ObservationWrapper[Any, Any, Any]):
    """The screen, and beside it how many lives are left."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        lives = gym.spaces.Box(0, 9, (1,), np.int64)
        self.observation_space = gym.spaces.Dict({"screen": env.observation_space, "lives": lives})

    def observation(self, observation: Any) -> Any:
        game: Any = self.unwrapped
        return {"screen": observation, "lives": np.array([game.ale.lives()])}


class TestWrappers:
    def test_lives_are_cut_in_dicts_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As they are without the wrapper, entry by entry; also where another game ends in the same step."""
        monkeypatch.setitem(wrappers._WRAPPERS, "WithLives", WithLives)
        settings = {"frame_skip": 8, "max_frames": 900}
        games = [
            make_games("sync", QBERT, **settings),
            make_vector_env(
                config(QBERT, wrappers=[{"name": "WithLives"}], atari=protocol(**TINY, **settings)),
                autoreset_mode=AutoresetMode.DISABLED,
            ),
        ]
        (plain, lives), (steps, _) = (play(AtariAdapter(game, AtariConfig()), 220) for game in games)
        num_cut = 0
        for number, (step, expected) in enumerate(zip(steps, plain, strict=True)):
            np.testing.assert_array_equal(step.ended, expected.ended)
            assert isinstance(step.obs, dict)
            np.testing.assert_array_equal(step.obs["screen"], expected.obs)
            if expected.final_obs is None:
                continue
            assert isinstance(step.final_obs, dict)
            np.testing.assert_array_equal(step.final_obs["screen"], expected.final_obs)
            for row, env in enumerate(step.ended):
                if env not in step.finished:
                    num_cut += 1
                    assert step.final_obs["lives"][row] == lives[number + 1][env]
        assert num_cut >= 6

    def test_they_are_put_around_the_game(self) -> None:
        games = make_vector_env(config(PONG, wrappers=WRAPPED, atari=TINY))
        assert isinstance(games, SyncVectorEnv)
        assert isinstance(games.envs[0], gym.wrappers.TimeLimit)
        assert isinstance(games.envs[0].unwrapped, AtariGame)

    def test_lives_are_still_cut(self) -> None:
        experiment = build_experiment(config(PONG, wrappers=WRAPPED, atari=TINY))
        assert type(experiment.trainer.collector.env) is AtariAdapter
        experiment.close()


def test_a_ready_environment_is_left_as_it_is() -> None:
    """Who makes a game himself wants it so: no protocol, no cuts."""
    agent = PPO(gym.make(PONG, obs_type="ram"), eval_every=0)
    assert agent.config.vectorization == "sync"
    assert type(agent._experiment.trainer.collector.env) is AutoresetAdapter
    agent.close()


class TestGamesAsObjects:
    """`make_env` plays by the protocol, and so must the copy that an agent is evaluated in."""

    SETTINGS: ClassVar[dict[str, Any]] = {"max_frames": 400, "sticky_actions": 0.25, "full_action_set": True, **TINY}

    @pytest.mark.parametrize("wrap", [lambda game: game, lambda game: gym.wrappers.TimeLimit(game, 50)])
    def test_a_copy_is_the_same_game_in_the_same_state(self, wrap: Any) -> None:
        game = wrap(make_env(BREAKOUT, {"mode": 4}, atari=AtariConfig(**self.SETTINGS)))
        game.reset(seed=0)
        actions = random_actions(game.action_space, 60, 1)[:, 0]
        for action in actions[:20]:
            game.step(action)
        twin = copy_env(game)
        assert isinstance(twin, gym.Env)
        assert twin.unwrapped.config == game.unwrapped.config  # type: ignore[attr-defined]
        shown, again = ([env.step(action) for action in actions[20:]] for env in (game, twin))
        for (obs, *rest), (other, *others) in zip(shown, again, strict=True):
            np.testing.assert_array_equal(obs, other)
            assert rest == others

    def test_an_agent_is_evaluated_by_the_protocol(self) -> None:
        game = make_env(PONG, atari=AtariConfig(**self.SETTINGS))
        agent = PPO(game, num_steps=16, minibatch_size=16, num_epochs=1, eval_every=16, eval_episodes=1, num_threads=1)
        result = agent.learn(32, progress=False)
        assert result.final_evaluation is not None
        assert result.final_evaluation.lengths[0] <= 100, "400 frames, 4 to a step"
        assert agent._experiment.evaluator.env.env.single_observation_space == game.observation_space  # type: ignore[attr-defined]
        agent.close()

    def test_they_pass_the_check(self) -> None:
        assert [finding for finding in check_env(PONG, num_steps=50) if finding.level != "info"] == []


class TestMissingExtras:
    @pytest.mark.parametrize("vectorization", VECTORS)
    def test_ale_py(self, vectorization: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ale_py", None)
        monkeypatch.delitem(gym.registry, PONG)
        with pytest.raises(MissingExtraError, match=rf"'{PONG}'.*pip install '\.\[atari\]'"):
            make_vector_env(config(PONG, vectorization=vectorization))

    def test_opencv(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cv2", None)
        with pytest.raises(MissingExtraError, match=r"resizing Atari screens.*pip install '\.\[atari\]'"):
            make_env(PONG)


# ---------------------------------------------------------------------------------------------------------------------
# Snapshots and resuming
# ---------------------------------------------------------------------------------------------------------------------


def rows(game: gym.Env[Any, Any], actions: Any) -> list[Any]:
    """What a game shows, and the beginning of the next one where it ends."""
    seen: list[Any] = []
    for action in actions:
        obs, reward, terminated, truncated, info = game.step(int(action))
        seen.append((obs.tobytes(), reward, terminated, truncated, info))
        if terminated or truncated:
            seen.append(game.reset()[0].tobytes())
    return seen


@pytest.mark.parametrize(
    ("env_id", "settings"),
    [
        (BREAKOUT, {"sticky_actions": 0.25, "noop_max": 30, "max_frames": 500}),
        (BREAKOUT, {"grayscale": False, "frame_skip": 3}),
        (PONG, {"sticky_actions": 0.25, "max_frames": 700, "max_pool": False}),
    ],
    ids=["random", "colour", "pong"],
)
def test_a_copy_plays_on_equally(env_id: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Over several games, with all that is random about them, after a trip through a checkpoint's files."""
    original, copied = (make_env(env_id, atari=protocol(**SMALL, **settings)) for _ in range(2))
    actions = random_actions(original.action_space, 1, 450)[0]
    original.reset(seed=0)
    copied.reset(seed=1)
    rows(original, actions[:77])
    path = save_checkpoint(tmp_path / "checkpoint", {"game": take_snapshot(original)}, {}, {})
    restore_snapshot(copied, load_checkpoint(path).state["game"])
    seen = rows(original, actions[77:])
    assert rows(copied, actions[77:]) == seen
    assert sum(isinstance(row, bytes) for row in seen) >= 1, "no game ended"


def test_what_sticks_is_part_of_the_state() -> None:
    """Of all moments: what ale-py saves lacks the action before, which shows only where it is repeated at once."""
    original, copied = (make_env(BREAKOUT, atari=protocol(**TINY, sticky_actions=0.5)) for _ in range(2))
    original.reset(seed=0)
    copied.reset(seed=1)
    for before, after in random_actions(original.action_space, 60, 2):
        original.step(int(before))
        restore_snapshot(copied, take_snapshot(original))
        assert rows(copied, [after]) == rows(original, [after])


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    game = make_env(BREAKOUT, atari=protocol(**TINY, sticky_actions=0.25))
    game.reset(seed=0)
    snapshot = take_snapshot(game)
    expected = rows(game, [1, 2, 3] * 30)
    restore_snapshot(game, snapshot)
    assert rows(game, [1, 2, 3] * 30) == expected


def test_the_state_of_another_game_is_refused() -> None:
    games = [make_env(env_id, atari=protocol(**TINY)) for env_id in (BREAKOUT, PONG)]
    for game in games:
        game.reset(seed=0)
    with pytest.raises(CheckpointError, match="a different game"):
        restore_snapshot(games[1], take_snapshot(games[0]))


DAMAGE = """
import numpy as np
from rl_training.contracts.errors import CheckpointError
from rl_training.envs import make_env

game = make_env("ALE/Breakout-v5")
game.reset(seed=0)
good = game.get_state()
size, rng, refused = len(good["game"]), np.random.default_rng(0), 0
damaged = [good["game"][:0], good["game"][:1], good["game"][:-1], np.tile(good["game"], 2)]
damaged += [good["game"][: rng.integers(size)] for _ in range(20)]
damaged += [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(20)]
for _ in range(40):
    flipped = good["game"].copy()
    flipped[rng.integers(size)] ^= 1 << rng.integers(8)
    damaged.append(flipped)
for saved in damaged:
    try:
        game.set_state({**good, "game": saved})
    except CheckpointError:
        refused += 1
game.set_state(good)
game.step(0)
print(refused, "of", len(damaged))
"""


def test_damaged_states_are_refused_and_crash_nothing() -> None:
    """In a process of its own: ale-py reads whatever it is given, and may take the interpreter with it."""
    done = subprocess.run([sys.executable, "-c", DAMAGE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("84 of 84")


@pytest.mark.parametrize(("vectorization", "grade"), [("native", EPISODE_BOUNDARY), ("sync", EXACT), ("async", EXACT)])
def test_resume_grade(vectorization: str, grade: str) -> None:
    experiment = build_experiment(config(vectorization=vectorization, atari=TINY))
    found, reason = experiment.resume_grade()
    experiment.close()
    assert found == grade
    assert (reason is None) == (grade == EXACT)
    assert reason is None or "AtariVectorEnv" in reason


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"num_steps": 16, "minibatch_size": 16, "num_epochs": 1, "network": {"shared": True}}),
    "dqn": ("dqn", {}),
    "dqn-prioritized": ("dqn", {"prioritized": True, "n_step": 3, "double": True}),
}
REPLAY = {
    "buffer_size": 80, "batch_size": 8, "learning_starts": 20, "num_steps": 2, "updates_per_step": 0.25,
    "network": {"sizes": ()},
}  # fmt: skip


def small_run(name: str, directory: Path, **changes: Any) -> TrainConfig:
    """180 steps of games of 50, in which lives are lost."""
    algo, own = RUNS[name]
    settings: dict[str, Any] = {
        "algo": algo, "seed": 5, "total_timesteps": 180, "algorithm": own if algo == "ppo" else {**REPLAY, **own},
        "atari": {**SMALL, "noop_max": 4, "sticky_actions": 0.25, "max_frames": 200}, "vectorization": "sync",
        "eval_every": 90, "eval_episodes": 1, "log_every": 25, "checkpoint_every": 0, "checkpoint_best": False,
        "tensorboard": False, "output_dir": directory,
    }  # fmt: skip
    return config(BREAKOUT, **{**settings, **changes})


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay in files of a few rows each."""
    monkeypatch.setattr(replay_buffer, "SEGMENT_BYTES", 30_000)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("name", RUNS)
def test_crashed_and_resumed(name: str, tmp_path: Path) -> None:
    whole = train(small_run(name, tmp_path / "whole"), progress=False).run_dir
    changes = {"output_dir": tmp_path / "crashed", "checkpoint_every": 24, "checkpoint_keep": 2}
    crashed = crash_and_resume(small_run(name, tmp_path), (40, 90, 150), changes)
    assert whole is not None
    assert differences(whole, crashed, ignoring=["/callbacks/CheckpointCallback"]) == []


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_native_runs_resume_with_new_games(name: str, tmp_path: Path) -> None:
    """Replay has to see that what follows belongs to other games."""
    changes = {"vectorization": "native", "checkpoint_every": 24}
    run = crash_and_resume(small_run(name, tmp_path / "run"), (40, 90, 150), changes)
    agent = (PPO if name == "ppo" else DQN).load(run)
    assert agent.num_timesteps >= 180
    agent.close()
