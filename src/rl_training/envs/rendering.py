"""Error messages for environments that cannot be rendered."""

from __future__ import annotations

import os
import re
from typing import Any

import gymnasium as gym

from rl_training.contracts.errors import EnvError

_OPENGL = re.compile(r"opengl|gladLoadGL|glGetError|glfw|\begl|osmesa", re.IGNORECASE)
"""Matches the errors of MuJoCo, glfw and PyOpenGL without a display."""


def rendering_hint(error: Exception) -> str:
    """A hint to append to a rendering error; empty if there is no known fix.

    Example:
        >>> rendering_hint(RuntimeError("gladLoadGL error"))[:49]
        ' MuJoCo draws with OpenGL, which needs a display,'
    """
    if not _OPENGL.search(str(error)):
        return ""
    now = os.environ.get("MUJOCO_GL")
    return (
        " MuJoCo renders with OpenGL, which needs a display, or the environment variable MUJOCO_GL=egl (or osmesa) "
        f"set before Python starts and that library installed; MUJOCO_GL is {now or 'not set'}."
    )


class ReadableRender(gym.Wrapper[Any, Any, Any, Any]):
    """Adds a hint to rendering errors."""

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        try:
            return super().render()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}."
            raise EnvError(f"{self.env} cannot be rendered: {reason}{rendering_hint(error)}") from error
