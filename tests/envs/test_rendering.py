"""An environment that cannot be rendered says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from rl_training import PPO
from rl_training.contracts.errors import ConfigError, EnvError
from rl_training.envs.rendering import rendering_hint
from rl_training.envs.wrappers import WrapperConfig, apply_wrappers

HINT = re.escape("MUJOCO_GL=egl (or osmesa)")


@pytest.mark.parametrize(
    ("text", "helped"),
    [
        ("gladLoadGL error", True),
        ("an OpenGL platform library has not been loaded into this process", True),
        ("'NoneType' object has no attribute 'glGetError'", True),
        ("Cannot initialize a EGL device display.", True),
        ("'NoneType' object has no attribute 'eglQueryString'", True),
        ("the font is missing", False),
        ("a neglected file", False),
    ],
)
def test_which_errors_get_a_hint(text: str, helped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    hint = rendering_hint(RuntimeError(text))
    assert ("MUJOCO_GL=egl (or osmesa)" in hint and "MUJOCO_GL is glfw" in hint) == helped


class Blind(gym.Env[Any, Any]):
    """As MuJoCo's environments are without a display."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)
    render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, True, False, {}

    def render(self) -> Any:
        raise RuntimeError("gladLoadGL error")


def test_videos(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    agent = PPO(Blind, num_envs=1, eval_every=0)
    with pytest.raises(EnvError, match=f"cannot be rendered: RuntimeError: gladLoadGL error.*{HINT}"):
        agent.record_video(tmp_path)
    agent.close()


def test_pixels_as_observations() -> None:
    with pytest.raises(ConfigError, match=f"AddRenderObservation: gladLoadGL error.*{HINT}"):
        apply_wrappers(Blind(), [WrapperConfig("AddRenderObservation")])
