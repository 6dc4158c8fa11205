"""What to do about mistakes in environments: the same advice during training as `check_env` gives."""

from __future__ import annotations

import traceback
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from rl_training.contracts.errors import ConfigError, EnvError

OLD_STEP = (
    "step() returned four values: that is the old Gym API (obs, reward, done, info). Return five: "
    "(obs, reward, terminated, truncated, info), with truncated=True for time limits and terminated=True for real ends"
)
OLD_RESET = "reset() must return (obs, info) with a dict info"
SIGNATURE = "its signature must be reset(self, *, seed=None, options=None)"
REWARD = "the reward must be a number for each step: return float(reward)"
SHAPE = "an observation has another shape than its observation_space says: return that shape, or change the space"
CHECK = "Check an environment before training with rl_training.envs.check_env(env)"


def advice(error: BaseException | str, doing: str) -> str:
    """What probably caused an exception in the vector environment, and what to do; empty if unknown."""
    text = str(error)
    found = ""
    if "not enough values to unpack (expected 5, got 4)" in text:
        found = OLD_STEP
    elif doing == "reset" and ("values to unpack (expected 2" in text or "cannot unpack non-iterable" in text):
        found = OLD_RESET
    elif "unexpected keyword argument 'seed'" in text or "unexpected keyword argument 'options'" in text:
        found = SIGNATURE
    elif "setting an array element with a sequence" in text:
        found = REWARD
    elif any(part in text for part in ("Output array is the wrong shape", "could not broadcast", "same shape")):
        found = SHAPE if isinstance(error, str) else _shape_advice(error)
    is_name = found.startswith(("step()", "reset()"))
    return f". {found if is_name else found[:1].upper() + found[1:]}. {CHECK}" if found else ""


def _shape_advice(error: BaseException) -> str:
    """Names the shapes, if the failing call was that of a vector environment; empty if it was the environment's own."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    vectors = [frame.f_locals.get("self") for frame in frames if isinstance(frame.f_locals.get("self"), VectorEnv)]
    inside = any(isinstance(frame.f_locals.get("self"), gym.Env) for frame in frames)
    if not vectors or inside:
        return ""
    vector: Any = vectors[-1]
    space = vector.single_observation_space
    shapes = [getattr(obs, "shape", None) for obs in getattr(vector, "_env_obs", ()) if obs is not None]
    wrong = [shape for shape in shapes if shape is not None and shape != space.shape]
    return f"an observation has shape {wrong[0]}, its space says {space.shape}" if wrong and space.shape else SHAPE


def require_env_like(env: Any) -> None:
    """Refuse what cannot be an environment; the error says what is accepted."""
    if env is None or isinstance(env, (str, gym.Env, VectorEnv)):
        if isinstance(env, str) and env.endswith("Policy"):
            raise ConfigError(
                f"env: got '{env}', which is a policy's name. Networks follow from the observation space: pass only "
                "the environment, PPO(env), and change networks with the setting `network`"
            )
        if isinstance(env, (gym.Env, VectorEnv)) and is_envpool(env):
            _refuse_envpool(env)
        return
    if is_envpool(env):
        _refuse_envpool(env)
    if not callable(env):
        raise ConfigError(
            f"env: got {env!r} ({type(env).__name__}), accepted: an environment id, a callable that returns an "
            "environment, a gymnasium.Env, or a gymnasium.vector.VectorEnv"
        )


def require_single(env: Any) -> Any:
    """What a callable returned, if that is a single environment."""
    if isinstance(env, VectorEnv):
        raise EnvError(
            f"the callable returned a vector environment ({env}); a callable makes one single environment, and "
            "num_envs says how many. Pass the vector environment itself: PPO(make())"
        )
    if not isinstance(env, gym.Env):
        raise EnvError(
            f"the callable returned {env!r} ({type(env).__name__}), which is not a gymnasium.Env: derive its class "
            "from gymnasium.Env and return the environment"
        )
    return env


def is_envpool(env: Any) -> bool:
    """Whether an object is a pool of the package EnvPool, which has the interface of Gymnasium only in part."""
    return any(cls.__module__.split(".")[0] == "envpool" for cls in type(env).__mro__)


def _refuse_envpool(env: Any) -> None:
    raise ConfigError(
        f"env: {type(env).__name__} is an EnvPool environment, which is not a gymnasium.vector.VectorEnv: its infos "
        "and its autoreset differ. Use the environment's id with vectorization='async', or derive a "
        "gymnasium.vector.VectorEnv around it (metadata['autoreset_mode'] is NEXT_STEP)"
    )
