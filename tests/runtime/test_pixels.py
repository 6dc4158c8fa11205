"""Learning from pixels through the whole loop, by configuration alone, and a little of a real game."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_training
from rl_training import load
from rl_training.contracts.spec import FrameStack
from rl_training.envs import check_env, make_env
from rl_training.runtime.off_policy import OffPolicyTrainer
from tests.envs.pixel_tasks import Motion, Patterns

SHARED = {"encoder": "impala_cnn", "shared": True, "actor_sizes": (), "critic_sizes": ()}
ON_POLICY: dict[str, Any] = {
    "num_envs": 32, "num_steps": 2, "learning_rate": 2e-3, "gamma": 0.0, "ent_coef": 0.01, "network": SHARED
}  # fmt: skip
REPLAY: dict[str, Any] = {
    "num_envs": 16, "num_steps": 1, "updates_per_step": 1 / 16, "batch_size": 64, "learning_starts": 128,
    "learning_rate": 2e-3, "buffer_size": 4_000, "gamma": 0.0, "epsilon": 0.2, "target_update_every": 50,
    "network": {"encoder": "impala_cnn", "sizes": ()},
}  # fmt: skip
ATOMS = {"v_min": 0.0, "v_max": 1.0, "num_atoms": 11}
FRACTIONS = {"num_fractions": 8, "num_target_fractions": 8, "num_greedy_fractions": 8}
AGENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PPO": (3_000, {**ON_POLICY, "minibatch_size": 64, "num_epochs": 2, "clip_coef": 0.3}),
    "A2C": (6_000, {**ON_POLICY, "optimizer": {"name": "adam"}}),
    "DQN": (2_000, REPLAY),
    "C51": (2_400, {**REPLAY, **ATOMS}),
    "QRDQN": (2_000, {**REPLAY, "num_quantiles": 8}),
    "IQN": (2_400, {**REPLAY, **FRACTIONS}),
    "Rainbow": (2_000, {**REPLAY, **ATOMS, "updates_per_step": 1 / 8, "epsilon": 0.0}),
}
"""Steps and settings."""


def make_agent(name: str, env: Any, **settings: Any) -> Any:
    return getattr(rl_training, name)(
        env, **{"seed": 1, "eval_every": 0, "num_threads": 1, **AGENTS[name][1], **settings}
    )


def score_before_and_after(agent: Any, num_steps: int, num_episodes: int = 50) -> tuple[float, float]:
    """Mean returns of the untrained and of the trained agent."""
    before = agent.evaluate(num_episodes).mean
    agent.learn(num_steps, progress=False)
    after = agent.evaluate(num_episodes).mean
    agent.close()
    return before, after


@pytest.mark.parametrize("task", [Patterns, functools.partial(Patterns, number=True), Motion])
def test_tasks_are_sound(task: Any) -> None:
    assert [finding for finding in check_env(task) if finding.level == "error"] == []


def test_no_single_pixel_tells_the_pattern() -> None:
    task = Patterns()
    images: list[list[Any]] = [[] for _ in range(3)]
    for seed in range(600):
        image, _ = task.reset(seed=seed)
        assert image[..., 0].mean() == 127.5
        images[task.answer].append(image[..., 0] / 255)
    means = np.array([np.mean(group, axis=0) for group in images])
    assert np.abs(means - 0.5).max() < 0.15


@pytest.mark.parametrize("name", AGENTS)
def test_patterns_are_read(name: str) -> None:
    before, after = score_before_and_after(make_agent(name, Patterns), AGENTS[name][0])
    assert before <= 0.6
    assert after >= 0.85


@pytest.mark.parametrize(("name", "num_steps"), [("PPO", 5_000), ("DQN", 2_000)])
@pytest.mark.parametrize("task", [{"channels": "first"}, {"number": True}], ids=["channels first", "image and number"])
def test_patterns_are_read_in_other_forms(name: str, num_steps: int, task: dict[str, Any]) -> None:
    network = {**AGENTS[name][1]["network"], "encoder": "auto"}  # by the space: the same, or one for each entry
    agent = make_agent(name, functools.partial(Patterns, **task), network=network)
    before, after = score_before_and_after(agent, num_steps)
    assert before <= 0.6
    assert after >= 0.85


@pytest.mark.parametrize("name", ["PPO", "DQN"])
@pytest.mark.parametrize("padding", ["reset", "zero", None])
def test_motion_is_seen_in_a_stack_only(name: str, padding: str | None) -> None:
    """7 is the best return, and 3.5 that of guessing."""
    stack = {"name": "FrameStackObservation", "kwargs": {"stack_size": 2, "padding_type": padding}}
    agent = make_agent(name, Motion, wrappers=[stack] if padding else [])
    expected = FrameStack(2, "first" if padding == "reset" else "zero") if padding else None
    assert agent._experiment.spec.frame_stack == expected
    if padding and isinstance(agent._experiment.trainer, OffPolicyTrainer):
        assert agent._experiment.trainer.sampler.buffer.obs.shape[1:] == (6, 6, 1), "each frame is stored once"
    before, after = score_before_and_after(agent, 2_400, num_episodes=20)
    assert before <= 5.0
    assert after >= 6.5 if padding else after <= 5.0


# ---------------------------------------------------------------------------------------------------------------------
# A real game
# ---------------------------------------------------------------------------------------------------------------------

PONG: dict[str, dict[str, Any]] = {
    "PPO": {"num_envs": 4, "num_steps": 32, "minibatch_size": 64, "num_epochs": 1},
    "DQN": {"buffer_size": 500, "learning_starts": 100, "num_steps": 4},
}


def pong_agent(name: str, **settings: Any) -> Any:
    """By the preset, with games of a few seconds."""
    pytest.importorskip("ale_py")
    atari = {"max_frames": 160, "noop_max": 4}
    given = {**PONG[name], "atari": atari, "eval_every": 0, "num_threads": 1, "seed": 1, **settings}
    return getattr(rl_training, name).from_preset("ALE/Pong-v5", **given)


@pytest.mark.parametrize("name", PONG)
@pytest.mark.parametrize("vectorization", ["native", "sync"])
def test_pong_from_training_to_prediction(name: str, vectorization: str, tmp_path: Path) -> None:
    if vectorization == "sync":
        pytest.importorskip("cv2")
    agent = pong_agent(name, vectorization=vectorization)
    assert agent._experiment.spec.observation_space.shape == (4, 84, 84)
    result = agent.learn(320, progress=False, callback=lambda run: run.env_steps < 256)
    assert all(np.isfinite(value) for value in result.metrics.values())
    evaluation = agent.evaluate(1)
    assert evaluation.lengths == [40]
    saved = agent.save(tmp_path / "agent")
    again = load(saved)
    obs = np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84), dtype=np.uint8)
    np.testing.assert_array_equal(again.predict(obs)[0], agent.predict(obs)[0])
    np.testing.assert_array_equal(again.value(obs), agent.value(obs))
    assert again.evaluate(1).returns == evaluation.returns
    again.learn(64, progress=False)
    agent.close()
    again.close()


def test_pong_is_filmed(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    pytest.importorskip("cv2")
    agent = pong_agent("PPO", num_envs=1)
    result = agent.record_video(tmp_path, 1)
    agent.close()
    (film,) = tmp_path.glob("*.mp4")
    assert film.stat().st_size > 1_000
    assert result.lengths == [40]


def test_what_the_agent_sees_can_be_made_by_hand() -> None:
    """`make_env` plays by the same protocol, so a loop of one's own needs no wrappers."""
    pytest.importorskip("cv2")
    agent = pong_agent("PPO", num_envs=1)
    env = make_env("ALE/Pong-v5", atari=agent.config.atari)
    obs, _ = env.reset(seed=0)
    action, _ = agent.predict(obs)
    assert env.step(action)[0].shape == (4, 84, 84)
    agent.close()
