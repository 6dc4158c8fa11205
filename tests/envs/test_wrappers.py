"""Wrappers of our own, and environments that are seen as they are rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_training import DrQv2
from rl_training.contracts.errors import ConfigError
from rl_training.envs.factory import make_env
from rl_training.envs.snapshot import restore_snapshot, take_snapshot
from rl_training.envs.wrappers import ActionRepeat, WrapperConfig, wrapper_names
from rl_training.experiment.build import build_experiment
from rl_training.experiment.config import resolve
from rl_training.experiment.presets import get_preset
from tests.small import small_settings


class Counting(gym.Env[Any, Any]):
    """Rewards 1, 2, 3, ...; ends after `length` steps."""

    observation_space, action_space = spaces.Discrete(100), spaces.Discrete(2)

    def __init__(self, length: int, terminates: bool) -> None:
        self.length, self.terminates, self.time = length, terminates, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        assert self.time < self.length, "stepped after the end"
        self.time += 1
        over = self.time == self.length
        return self.time, self.time, over and self.terminates, over and not self.terminates, {"time": self.time}


@pytest.mark.parametrize("terminates", [True, False])
def test_action_repeat_sums_rewards_and_stops_at_the_end(terminates: bool) -> None:
    env = ActionRepeat(Counting(5, terminates), num_repeats=2)
    for _ in range(2):
        env.reset()
        assert env.step(0) == (2, 1.0 + 2.0, False, False, {"time": 2})
        assert env.step(0) == (4, 3.0 + 4.0, False, False, {"time": 4})
        assert env.step(0) == (5, 5.0, terminates, not terminates, {"time": 5})


def test_an_action_that_is_not_repeated() -> None:
    env = ActionRepeat(Counting(2, terminates=True), num_repeats=1)
    env.reset()
    assert env.step(0)[:2] == (1, 1.0)


def test_action_repeat_by_name() -> None:
    env = make_env("Pendulum-v1", wrappers=[WrapperConfig("ActionRepeat", {"num_repeats": 4})])
    env.reset(seed=0)
    ends = [env.step(env.action_space.sample())[3] for _ in range(50)]
    assert ends == [False] * 49 + [True]
    with pytest.raises(ConfigError, match="ActionRepeat: num_repeats must be at least 1, got 0"):
        make_env("Pendulum-v1", wrappers=[WrapperConfig("ActionRepeat", {"num_repeats": 0})])


# What is rendered, as observation

PIXELS = [
    WrapperConfig("ActionRepeat", {"num_repeats": 2}),
    WrapperConfig("AddRenderObservation"),
    WrapperConfig("ResizeObservation", {"shape": [20, 20]}),
    WrapperConfig("GrayscaleObservation"),
    WrapperConfig("FrameStackObservation", {"stack_size": 3}),
]
RENDERED = {"render_mode": "rgb_array"}


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("cv2")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def test_what_pixels_need_is_registered() -> None:
    assert {wrapper.name for wrapper in PIXELS} <= set(wrapper_names())


@pytest.mark.usefixtures("rendering")
@pytest.mark.parametrize("grey", [True, False])
def test_pendulum_in_pixels(grey: bool) -> None:
    wrappers = [wrapper for wrapper in PIXELS if grey or wrapper.name != "GrayscaleObservation"]
    env = make_env("Pendulum-v1", RENDERED, wrappers)
    assert env.observation_space == spaces.Box(0, 255, (3, 20, 20) if grey else (3, 20, 20, 3), np.uint8)
    first, _ = env.reset(seed=0)
    assert (first[0] == first[2]).all(), "the first frame fills the stack"
    seen = [env.step(np.array([2.0], np.float32))[0] for _ in range(3)]
    assert (seen[0][1:] == seen[1][:-1]).all()
    assert (seen[0][-1] != seen[2][-1]).any(), "it moves"
    env.close()


@pytest.mark.usefixtures("rendering")
def test_pixels_go_on_from_a_snapshot() -> None:
    one, two = (make_env("Pendulum-v1", RENDERED, PIXELS) for _ in range(2))
    one.reset(seed=0)
    two.reset(seed=1)
    actions = np.linspace(-2, 2, 12, dtype=np.float32)[:, None]
    for action in actions[:6]:
        one.step(action)
    restore_snapshot(two, take_snapshot(one))
    for action in actions[6:]:
        (obs, reward, *_), (other_obs, other_reward, *_) = one.step(action), two.step(action)
        assert np.array_equal(obs, other_obs)
        assert reward == other_reward
    one.close()
    two.close()


@pytest.mark.usefixtures("rendering")
def test_an_agent_sees_pixels_and_keeps_each_frame_once(tmp_path: Path) -> None:
    settings = small_settings("drqv2", n_step=2)
    agent = DrQv2("Pendulum-v1", env_kwargs=RENDERED, wrappers=PIXELS, seed=0, eval_every=0, **settings)
    grade, problem = agent._experiment.resume_grade()
    assert (grade, problem) == ("exact", None)
    agent.learn(30, progress=False)
    buffer = agent._off_policy().sampler.buffer
    assert buffer.obs.shape[1:] == (20, 20)
    stacks = buffer.observations(np.arange(10))
    assert stacks.shape == (10, 3, 20, 20)
    assert np.array_equal(stacks[1:, :-1], stacks[:-1, 1:])
    agent.save(tmp_path / "agent")
    again = DrQv2.load(tmp_path / "agent")
    assert np.array_equal(agent.predict(stacks)[0], again.predict(stacks)[0])
    for one in (agent, again):
        one.close()


@pytest.mark.usefixtures("rendering")
def test_the_preset_can_be_built() -> None:
    experiment = build_experiment(resolve([get_preset("drqv2/pendulum-pixels").layer()]))
    assert experiment.spec.frame_stack is not None
    assert experiment.spec.frame_stack.size == 3
    experiment.close()
