"""Learning from pixels through the whole loop, by configuration alone, and a little of a real game."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import rl_training
from rl_training import load
from rl_training.contracts.batches import Observation
from rl_training.contracts.plugins import ENCODERS
from rl_training.contracts.spec import FrameStack
from rl_training.envs import check_env, make_env
from rl_training.policies.encoders import ImageEncoder, ImpalaCNN, NatureCNN
from rl_training.runtime.off_policy import OffPolicyTrainer
from tests.envs.pixel_tasks import Glyphs, Motion

SHARED = {"encoder": "nature_cnn", "shared": True, "actor_sizes": (), "critic_sizes": ()}
ON_POLICY: dict[str, Any] = {"num_envs": 32, "learning_rate": 1e-3, "gamma": 0.0, "ent_coef": 0.01, "network": SHARED}
REPLAY: dict[str, Any] = {
    "num_envs": 16, "num_steps": 1, "updates_per_step": 1 / 8, "batch_size": 64, "learning_starts": 256,
    "learning_rate": 1e-3, "buffer_size": 5_000, "gamma": 0.0, "epsilon": 0.2, "target_update_every": 50,
    "network": {"encoder": "nature_cnn", "sizes": ()},
}  # fmt: skip
ATOMS = {"v_min": 0.0, "v_max": 1.0, "num_atoms": 11}
FRACTIONS = {"num_fractions": 8, "num_target_fractions": 8, "num_greedy_fractions": 8}
AGENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PPO": (3_072, {**ON_POLICY, "num_steps": 8, "minibatch_size": 64, "num_epochs": 4, "clip_coef": 0.3}),
    "A2C": (9_216, {**ON_POLICY, "num_steps": 1, "normalize_advantage": True, "optimizer": {"name": "adam"}}),
    "DQN": (3_072, REPLAY),
    "C51": (3_072, {**REPLAY, **ATOMS}),
    "QRDQN": (5_120, {**REPLAY, "num_quantiles": 8, "learning_rate": 3e-4}),
    "IQN": (3_584, {**REPLAY, **FRACTIONS, "learning_rate": 5e-4, "updates_per_step": 1 / 4}),
    "Rainbow": (4_096, {**REPLAY, **ATOMS, "epsilon": 0.0}),
}
"""Steps and settings."""


def make_agent(name: str, env: Any, **settings: Any) -> Any:
    return getattr(rl_training, name)(
        env, **{"seed": 1, "eval_every": 0, "num_threads": 1, **AGENTS[name][1], **settings}
    )


def score_before_and_after(agent: Any, num_steps: int, num_episodes: int = 100) -> tuple[float, float]:
    """Mean returns of the untrained and of the trained agent."""
    before = agent.evaluate(num_episodes).mean
    agent.learn(num_steps, progress=False)
    after = agent.evaluate(num_episodes).mean
    agent.close()
    return before, after


def score_at_other_places(name: str, num_steps: int, task: dict[str, Any], **settings: Any) -> tuple[float, float]:
    """Of strokes in places where there were none in training."""
    env, eval_env = functools.partial(Glyphs, **task), functools.partial(Glyphs, **task, held_out=True)
    return score_before_and_after(make_agent(name, env, eval_env=eval_env, **settings), num_steps)


@pytest.mark.parametrize(
    "task", [Glyphs, functools.partial(Glyphs, 18, "first", number=True, held_out=True, scrambled=True), Motion]
)
def test_tasks_are_sound(task: Any) -> None:
    assert [finding for finding in check_env(task) if finding.level == "error"] == []


def each(quick: Iterable[Any], names: Iterable[Any]) -> list[Any]:
    """Parameters: those in `quick` in every run of the tests, the others in the learning tests."""
    quick = list(quick)
    return [pytest.param(*_row(name), marks=() if name in quick else pytest.mark.learning) for name in names]


def _row(name: Any) -> tuple[Any, ...]:
    return name if isinstance(name, tuple) else (name,)


@pytest.mark.parametrize("name", each(["PPO", "DQN"], AGENTS))
def test_nature_cnn_reads_strokes_in_places_that_are_new_to_it(name: str) -> None:
    before, after = score_at_other_places(name, AGENTS[name][0], {})
    assert before <= 0.7
    assert after >= 0.9


@pytest.mark.parametrize("name", each(["DQN"], ["PPO", "DQN"]))
def test_impala_cnn_reads_strokes_in_places_that_are_new_to_it(name: str) -> None:
    network = {**AGENTS[name][1]["network"], "encoder": "impala_cnn"}
    before, after = score_at_other_places(name, {"PPO": 3_072, "DQN": 1_536}[name], {"size": 18}, network=network)
    assert before <= 0.7
    assert after >= 0.9


class Broken(ImageEncoder):
    """Channels that come last are not brought to the front, so that pixels of all channels stand side by side."""

    def images(self, obs: Observation) -> Tensor:
        """See `ImageEncoder.images`."""
        assert isinstance(obs, Tensor)
        return obs.reshape(obs.shape[0], self.layout.num_channels, *self.layout.size)


class BrokenNature(Broken, NatureCNN):
    """See `Broken`."""


class BrokenImpala(Broken, ImpalaCNN):
    """See `Broken`."""


class Flat(ImageEncoder):
    """All pixels, scaled as convolutions get them, and none of the convolutions."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.num_features = int(np.prod(space.shape))

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        return self.pixels(obs).flatten(1)


WIDE: dict[str, Any] = {"PPO": {"actor_sizes": (256, 256), "critic_sizes": (256, 256)}, "DQN": {"sizes": (256, 256)}}


CONTROLS: list[tuple[str, Any, dict[str, Any]]] = [
    ("PPO", Flat, {}),
    ("PPO", NatureCNN, {"scrambled": True}),
    ("PPO", BrokenNature, {}),
    ("DQN", Flat, {}),
    ("PPO", Flat, {"size": 18}),
    ("PPO", ImpalaCNN, {"size": 18, "scrambled": True}),
    ("PPO", BrokenImpala, {"size": 18}),
]


@pytest.mark.parametrize(("name", "encoder", "task"), each([CONTROLS[2], CONTROLS[4]], CONTROLS))
def test_nothing_else_reads_them(
    name: str, encoder: Any, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In as many steps, with equal settings: without convolutions, without neighbours, and with a wrong layout."""
    monkeypatch.setitem(ENCODERS._added, "control", encoder)
    network = {**AGENTS[name][1]["network"], "encoder": "control", **(WIDE[name] if encoder is Flat else {})}
    _, after = score_at_other_places(name, 3_072, task, network=network)
    assert after <= 0.8


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("PPO", {"channels": "first"}), ("PPO", {"number": True}), ("DQN", {"number": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task"), each([FORMS[2]], FORMS))
def test_strokes_are_read_in_other_forms(name: str, task: dict[str, Any]) -> None:
    network = {**AGENTS[name][1]["network"], "encoder": "auto"}  # by the space: the same, or one for each entry
    before, after = score_at_other_places(name, {"PPO": 6_144, "DQN": 4_096}[name], task, network=network)
    assert before <= 0.8
    assert after >= 0.9


SMALL = {"encoder": "impala_cnn"}
MOTION: dict[str, dict[str, Any]] = {
    "PPO": {"num_steps": 2, "num_epochs": 2, "learning_rate": 2e-3, "network": {**SHARED, **SMALL}},
    "DQN": {
        "updates_per_step": 1 / 16,
        "learning_starts": 128,
        "learning_rate": 2e-3,
        "network": {"sizes": (), **SMALL},
    },
}


STACKS = [(name, padding) for name in MOTION for padding in ("reset", "zero", None)]


@pytest.mark.parametrize(("name", "padding"), each([("PPO", None), ("PPO", "reset"), ("DQN", "zero")], STACKS))
def test_motion_is_seen_in_a_stack_only(name: str, padding: str | None) -> None:
    """7 is the best return, and 3.5 that of guessing."""
    stack = {"name": "FrameStackObservation", "kwargs": {"stack_size": 2, "padding_type": padding}}
    agent = make_agent(name, Motion, wrappers=[stack] if padding else [], **MOTION[name])
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


@pytest.mark.parametrize(("name", "vectorization"), [("PPO", "native"), ("DQN", "sync")])
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
    moviepy = pytest.importorskip("moviepy")
    pytest.importorskip("cv2")
    agent = pong_agent("PPO", num_envs=1)
    result = agent.record_video(tmp_path, 1)
    agent.close()
    (video,) = tmp_path.glob("*.mp4")
    assert video.stat().st_size > 1_000
    assert result.lengths == [40]
    clip = moviepy.VideoFileClip(str(video))
    assert clip.fps == pytest.approx(15), "60 frames a second, of which a step takes 4"
    assert clip.duration == pytest.approx(41 / 15, abs=0.1)
    clip.close()


def test_what_the_agent_sees_can_be_made_by_hand() -> None:
    """`make_env` plays by the same protocol, so a loop of one's own needs no wrappers."""
    pytest.importorskip("cv2")
    agent = pong_agent("PPO", num_envs=1)
    env = make_env("ALE/Pong-v5", atari=agent.config.atari)
    obs, _ = env.reset(seed=0)
    action, _ = agent.predict(obs)
    assert env.step(action)[0].shape == (4, 84, 84)
    agent.close()
