"""Atari 2600 games: one protocol, in ale-py's native vector environment or in a single Python environment.

The protocol is that of Mnih et al. (2015): every action is repeated for some frames, the last two of which are
max-pooled (sprites flicker), the screen becomes a small greyscale image, and the last few images are stacked.
`AtariGame` does this in Python for one game, and supports videos and snapshots. The native vector environment does it
in C++ for many games in threads, and supports neither. Both give the same observations.

For learning, an episode may end when a life is lost, and rewards may be clipped to their signs. `AtariAdapter` does
both outside of the game, which continues: the reported return is always the score of a whole game.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray, map_observation
from rl_training.contracts.environment import VectorStep
from rl_training.contracts.errors import CheckpointError, ConfigError, MissingExtraError
from rl_training.contracts.settings import documented, setting
from rl_training.envs.vector import AutoresetAdapter

Frame = npt.NDArray[np.uint8]

PREFIX = "ALE/"
SETTINGS = {
    "frameskip": "frame_skip",
    "repeat_action_probability": "sticky_actions",
    "full_action_space": "full_action_set",
    "max_num_frames_per_episode": "max_frames",
}
"""Keyword arguments of ale-py's environment, and the corresponding settings."""


@documented
@dataclass
class AtariConfig:
    """How Atari games (`ALE/*`) are played and shown. The defaults are the protocol of Mnih et al. (2015)."""

    frame_skip: int = setting(4, "Frames for which each action is repeated (frame skip).", ge=1, le=1_000)
    max_pool: bool = setting(True, "Maximum over the last two frames, because sprites flicker.")
    screen_size: int = setting(84, "Width and height of the images.", ge=1, le=4_096)
    grayscale: bool = setting(True, "Grayscale images instead of RGB.")
    frame_stack: int = setting(4, "Frames stacked into one observation.", ge=1, le=1_000)
    noop_max: int = setting(30, "Games begin with a random number of no-op frames, less than this.", ge=0, le=100_000)
    fire_reset: bool = setting(True, "Press FIRE at the beginning of games that have it.")
    sticky_actions: float = setting(
        0.0,
        "Sticky actions: probability that a frame repeats the previous action; 0.25 in Machado et al. (2018).",
        ge=0,
        le=1,
    )
    full_action_set: bool = setting(False, "Use all 18 actions instead of those that have an effect in the game.")
    max_frames: int = setting(108_000, "Frames after which a game is truncated; the default is 30 minutes.", ge=1)
    episodic_life: bool = setting(
        True, "In training, the loss of a life ends the episode; reported returns are of whole games."
    )
    clip_rewards: bool = setting(
        True, "In training, rewards are clipped to their sign; reported returns are unclipped."
    )


def is_atari(env_id: str, env_kwargs: dict[str, Any]) -> bool:
    """Whether the Atari protocol applies; with an explicit `obs_type`, the game is a plain environment."""
    return env_id.startswith(PREFIX) and "obs_type" not in env_kwargs


def make_game(env_id: str, config: AtariConfig, env_kwargs: dict[str, Any]) -> AtariGame:
    """One game; `env_kwargs` are those of ale-py's environment, such as its mode and difficulty."""
    problems = [f"env_kwargs: {name} must be set as atari.{SETTINGS[name]}" for name in env_kwargs if name in SETTINGS]
    problems += [
        f"env_kwargs: {name} is not supported by the Atari preprocessing; add obs_type to use the plain environment"
        for name in ("continuous", "sound_obs")
        if env_kwargs.get(name)
    ]
    if problems:
        raise ConfigError(problems)
    own = {
        "frameskip": 1,
        "repeat_action_probability": 0.0,
        "full_action_space": config.full_action_set,
        "max_num_frames_per_episode": config.max_frames,
        "disable_env_checker": True,
    }
    return AtariGame(gym.make(env_id, **{**own, **env_kwargs}), config)


def make_native_games(env_id: str, config: AtariConfig, num_envs: int) -> VectorEnv[Any, Any, Any]:
    """Many games in ale-py's C++ vector environment, one thread per core."""
    from ale_py.vector_env import AtariVectorEnv

    spec = gym.spec(env_id)
    # its own options would start a new game with every life, and lose the scores by clipping
    games: VectorEnv[Any, Any, Any] = AtariVectorEnv(
        spec.kwargs["game"],
        num_envs,
        autoreset_mode=AutoresetMode.SAME_STEP,
        frameskip=config.frame_skip,
        maxpool=config.max_pool,
        img_height=config.screen_size,
        img_width=config.screen_size,
        grayscale=config.grayscale,
        stack_num=config.frame_stack,
        noop_max=config.noop_max,
        use_fire_reset=config.fire_reset,
        repeat_action_probability=config.sticky_actions,
        full_action_space=config.full_action_set,
        max_num_frames_per_episode=config.max_frames,
        reward_clipping=False,
    )
    return games


class AtariGame(gym.Env[Frame, int]):
    """One game with the observations of ale-py's native vector environment, and with snapshots.

    Observations are stacks [frame_stack, screen_size, screen_size], oldest first, with a fourth dimension of three
    colours if they are not greyscale. Frames before the start of a game are black.
    """

    def __init__(self, game: gym.Env[Any, Any], config: AtariConfig) -> None:
        try:
            import cv2  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("resizing Atari screens", "atari") from error
        unwrapped: Any = game.unwrapped
        self.game = unwrapped
        self.ale: Any = self.game.ale
        self.config = config
        self.spec, self.render_mode = unwrapped.spec, game.render_mode
        # a video has one frame per step, and the console draws 60 per second
        self.metadata = {**game.metadata, "render_fps": 60 / config.frame_skip}
        self.action_space = game.action_space
        self.actions = self.ale.getLegalActionSet() if config.full_action_set else self.ale.getMinimalActionSet()
        self.fire = next((action for action in self.actions if action.name == "FIRE"), None)
        self.action = self.actions[0]

        colours = () if config.grayscale else (3,)
        shape = (config.frame_stack, config.screen_size, config.screen_size, *colours)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.raw = np.zeros((2, *self.ale.getScreenDims(), *colours), np.uint8)
        """The last two frames of the last step, newest first; `_show` max-pools both into the first."""
        self.stack = np.zeros(shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        self.game.reset(seed=seed)
        noops = int(self.game.np_random.integers(self.config.noop_max)) if self.config.noop_max else 0
        presses = [self.fire] if self.fire is not None and self.config.fire_reset else []
        self.action = self.actions[0]
        for action in [*presses, *[self.actions[0]] * (noops - len(presses))]:
            self._act(action)
            if self.ale.game_over():
                self.ale.reset_game()
        self.stack[:] = 0
        self.raw[:] = 0
        self._look(0)
        self._show()
        return self.stack.copy(), self._info()

    def step(self, action: int) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        reward, terminated, truncated = 0, False, False
        for remaining in range(self.config.frame_skip - 1, -1, -1):
            truncated = self.ale.game_truncated()  # checked before each frame: the next step may be the truncated one
            if truncated:
                break
            reward += self._act(self.actions[int(action)])
            terminated = self.ale.game_over(with_truncation=False)
            if terminated:
                break
            if remaining < 2:
                self._look(remaining)
        self._show()
        return self.stack.copy(), float(reward), terminated, truncated, self._info()

    def _act(self, action: Any) -> int:
        """Play one frame; sticky actions are drawn here, because ale-py's saved state lacks the previous action."""
        sticky = self.config.sticky_actions
        if sticky == 0 or self.game.np_random.random() >= sticky:
            self.action = action
        reward: int = self.ale.act(self.action, 1.0)
        return reward

    def _look(self, place: int) -> None:
        if self.config.grayscale:
            self.ale.getScreenGrayscale(self.raw[place])
        else:
            self.ale.getScreenRGB(self.raw[place])

    def _show(self) -> None:
        """Add the screen to the frame stack."""
        import cv2

        if self.config.max_pool:  # in-place: if a game ends within a step, this is still the screen
            np.maximum(self.raw[0], self.raw[1], out=self.raw[0])
        size = (self.config.screen_size, self.config.screen_size)
        self.stack[:-1] = self.stack[1:]
        self.stack[-1] = cv2.resize(self.raw[0], size, interpolation=cv2.INTER_AREA)

    def _info(self) -> dict[str, Any]:
        return {"lives": self.ale.lives()}

    def render(self) -> Any:
        """See `gymnasium.Env.render`."""
        return self.game.render()

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        self.game.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> AtariGame:
        """A new game in the same state: ale-py's own objects cannot be copied."""
        assert self.spec is not None
        twin = AtariGame(gym.make(copy.deepcopy(self.spec)), copy.deepcopy(self.config))
        twin.set_state(copy.deepcopy(self.get_state()))
        memo[id(self)] = twin
        return twin

    def get_state(self) -> dict[str, Any]:
        """See `rl_training.envs.snapshot`."""
        saved = self.game.clone_state(include_rng=True).serialize()
        return {
            "game": np.frombuffer(saved, np.uint8),
            "digest": hashlib.sha256(saved).hexdigest(),
            "action": self.actions.index(self.action),
            "raw": self.raw,
            "stack": self.stack,
            "random": self.game.np_random,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse of `get_state`."""
        from ale_py import ALEState

        saved = np.asarray(state["game"], np.uint8).tobytes()
        if hashlib.sha256(saved).hexdigest() != state["digest"]:  # ale-py does not check, and may crash the interpreter
            raise CheckpointError("the saved state of the game is damaged")
        try:
            self.game.restore_state(ALEState(saved))
        except (RuntimeError, ValueError, SystemError) as error:
            raise CheckpointError("the saved state is of a different game or a different version of ale-py") from error
        self.action = self.actions[state["action"]]
        self.raw[:] = state["raw"]
        self.stack[:] = state["stack"]
        self.game.np_random = state["random"]


class AtariAdapter(AutoresetAdapter):
    """Ends episodes at a lost life and clips rewards, for learning; scores and whole games are reported separately.

    After a lost life the next episode begins with the observation that ended the last one.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], config: AtariConfig) -> None:
        super().__init__(env)
        self.config = config
        self.lives = np.zeros(env.num_envs, np.int64)

    def reset(self, seed: int | None = None) -> ArrayObservation:
        """See `AutoresetAdapter.reset`."""
        obs = super().reset(seed)
        self.lives[:] = self.info["lives"]
        return obs

    def step(self, action: AnyArray) -> VectorStep:
        """See `AutoresetAdapter.step`."""
        step = super().step(action)
        done = step.terminated | step.truncated
        lost = (self.info["lives"] < self.lives) & ~done
        self.lives[:] = np.where(done, self.reset_info.get("lives", self.info["lives"]), self.info["lives"])
        reward = np.sign(step.reward) if self.config.clip_rewards else step.reward
        if not self.config.episodic_life or not lost.any():
            return step._replace(reward=reward)
        terminated = step.terminated | lost
        ended = np.flatnonzero(terminated | step.truncated)
        final_obs = map_observation(lambda x: x[ended], step.obs)
        if step.final_obs is not None:
            _put(final_obs, np.isin(ended, step.ended), step.final_obs)
        return step._replace(reward=reward, terminated=terminated, ended=ended, final_obs=final_obs)

    def take_snapshot(self) -> dict[str, Any] | str:
        """See `Environments.take_snapshot`."""
        snapshot = super().take_snapshot()
        return snapshot if isinstance(snapshot, str) else {**snapshot, "lives": self.lives.copy()}

    def restore_snapshot(self, snapshot: dict[str, Any]) -> None:
        """See `Environments.restore_snapshot`."""
        super().restore_snapshot(snapshot)
        self.lives[:] = np.asarray(snapshot["lives"])


def _put(obs: ArrayObservation, where: BoolArray, values: ArrayObservation) -> None:
    """Write rows of observations, in all entries of a dict."""
    if isinstance(obs, dict):
        assert isinstance(values, dict)
        for key, part in obs.items():
            part[where] = values[key]
    else:
        obs[where] = values
