"""Videos of a policy."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import gymnasium as gym

from rl_training.contracts.errors import EnvError, MissingExtraError
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.envs.rendering import ReadableRender
from rl_training.experiment.build import Experiment
from rl_training.experiment.files import Outage
from rl_training.runtime.callbacks import Callback, Every, RunView
from rl_training.runtime.evaluator import Evaluator


def require_video() -> None:
    """Raise an error before any work if videos cannot be written."""
    if find_spec("moviepy") is None:
        raise MissingExtraError("recording video", "video")


def recorder(experiment: Experiment, directory: Path, prefix: str, num_episodes: int = 1) -> Evaluator:
    """An evaluator with one environment that records its first episodes to `directory` as mp4."""
    require_video()
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # otherwise pygame warns about a missing display
    env = experiment.make_single_env("rgb_array")
    if env.render_mode != "rgb_array":
        raise EnvError(
            f"{env} cannot be recorded: it needs the render mode rgb_array, its render modes are "
            f"{env.metadata.get('render_modes')}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about overwriting earlier videos, which have another prefix
        env = gym.wrappers.RecordVideo(
            ReadableRender(env),
            str(directory),
            name_prefix=prefix,
            episode_trigger=lambda episode: episode < num_episodes,
            disable_logger=True,
        )
    return experiment.evaluator_of(env)


@dataclass
class VideoCallback(Callback):
    """Records one episode every so many steps. A video that cannot be written (full disk) is reported and skipped."""

    transient: ClassVar[tuple[str, ...]] = ("outage",)
    make_evaluator: Callable[[str], Evaluator]
    """Creates an evaluator whose environment records; the argument is the file prefix."""
    every: Every
    seed: int = 0
    deterministic: bool = True
    stop: Callable[[], bool] | None = None
    """Whether to stop recording; the video is recorded again after a resume."""
    outage: Outage = field(default_factory=lambda: Outage("a video"), init=False)

    def on_start(self, run: RunView) -> None:
        """See `Callback.on_start`."""
        require_video()

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        if not self.every.completed(run.position):
            return
        try:
            self._film(run)
        except OSError as error:
            self.outage.began(error.strerror or error, "this video is missing")
        else:
            self.outage.ended("earlier ones are missing")

    def _film(self, run: RunView) -> None:
        evaluator = self.make_evaluator(f"step-{run.position}")
        try:
            seed = draw_seed(random_stream(self.seed, "video", run.position))
            evaluator.evaluate(run.policy, 1, deterministic=self.deterministic, seed=seed, stop=self.stop)
        finally:
            evaluator.close()
        self.every.last = run.position
