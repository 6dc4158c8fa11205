"""Creation of environments; no other module creates them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_training.contracts.errors import ConfigError, EnvError, MissingExtraError, RLTrainingError
from rl_training.envs.advice import require_env_like, require_single
from rl_training.envs.atari import AtariConfig, is_atari, make_game, make_native_games
from rl_training.envs.masks import ActionMask, CheckedMasks
from rl_training.envs.sync import SequentialVectorEnv
from rl_training.envs.vector import AnyVectorEnv
from rl_training.envs.workers import WorkerVectorEnv
from rl_training.envs.wrappers import WrapperConfig, apply_wrappers

Vectorization = Literal["sync", "async", "native"]
SingleEnv = gym.Env[Any, Any]
EnvLike = str | Callable[[], SingleEnv] | SingleEnv | AnyVectorEnv
"""What users may pass: an id, a callable that returns an environment, an environment, or a vector environment."""

_EXTRAS = {"mujoco": "mujoco", "box2d": "box2d", "pygame": "classic", "ale_py": "atari", "moviepy": "video"}
_ROBOTICS = (
    "FetchPickAndPlace", "FetchPush", "FetchReach", "FetchSlide", "HandManipulate", "HandReach",
    "AdroitHand", "AntMaze_", "PointMaze_", "FrankaKitchen-",
)  # fmt: skip
_REGISTERED_BY = ((("ALE/",), "ale_py", "atari"), (_ROBOTICS, "gymnasium_robotics", "robotics"))
"""Prefixes of ids, the module whose import registers them, and the extra that installs it."""


class EnvSettings(Protocol):
    """The part of a `TrainConfig` that this module reads."""

    env_id: str
    env_kwargs: dict[str, Any]
    wrappers: list[WrapperConfig]
    atari: AtariConfig
    vectorization: Vectorization
    num_envs: int
    env_timeout: float
    action_masks: bool


def make_env(
    env_id: str,
    env_kwargs: dict[str, Any] | None = None,
    wrappers: list[WrapperConfig] | None = None,
    render_mode: str | None = None,
    action_masks: bool = False,
    atari: AtariConfig | None = None,
) -> SingleEnv:
    """One environment by id, with its registered wrappers, and with its action mask as part of the observation.

    Atari games use the protocol of `atari`, or the default one.

    Example:
        >>> make_env("CartPole-v1").spec.id
        'CartPole-v1'
    """
    kwargs = dict(env_kwargs or {})
    if render_mode is not None:
        kwargs["render_mode"] = render_mode
    _register_known(env_id)
    try:
        import_named(env_id)
        if is_atari(env_id, kwargs):
            return wrap_env(make_game(env_id, atari or AtariConfig(), kwargs), wrappers or [], action_masks)
        return wrap_env(gym.make(env_id, **kwargs), wrappers or [], action_masks)
    except RLTrainingError:
        raise
    except (Exception, SystemExit) as error:
        raise _readable(env_id, kwargs, error) from error


def wrap_env(env: SingleEnv, wrappers: list[WrapperConfig], action_masks: bool) -> SingleEnv:
    """An environment with the wrappers of a config."""
    env = apply_wrappers(env, wrappers)
    return ActionMask(env) if action_masks else env


def make_vector_env(
    cfg: EnvSettings,
    num_envs: int | None = None,
    *,
    env: EnvLike | None = None,
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
    render_mode: str | None = None,
) -> AnyVectorEnv:
    """A vector environment from the config, or around a given environment.

    Sync and async vectors use `autoreset_mode`; native and existing vector environments keep their own mode.

    Example:
        >>> from rl_training import TrainConfig
        >>> make_vector_env(TrainConfig(algo="ppo", env_id="CartPole-v1"), num_envs=4)
        SequentialVectorEnv(num_envs=4)
    """
    require_env_like(env)
    count = cfg.num_envs if num_envs is None else num_envs
    if isinstance(env, VectorEnv):
        return CheckedMasks(env) if cfg.action_masks else env
    if cfg.vectorization == "native" and (env is None or isinstance(env, str)):
        native = _make_native(env or cfg.env_id, cfg, count)
        return CheckedMasks(native) if cfg.action_masks else native
    make: Callable[[], SingleEnv]
    if isinstance(env, gym.Env):
        if count != 1:
            raise ConfigError(
                f"num_envs: a single environment object was given, so num_envs must be 1, got {count}. Pass a "
                "callable that makes environments to run several"
            )
        instance = wrap_env(env, cfg.wrappers, cfg.action_masks)
        return SequentialVectorEnv([lambda: instance], autoreset_mode=autoreset_mode)
    if env is None or isinstance(env, str):
        env_id, kwargs, wrappers = env or cfg.env_id, cfg.env_kwargs, cfg.wrappers

        def make() -> SingleEnv:
            return make_env(env_id, kwargs, wrappers, render_mode, cfg.action_masks, cfg.atari)
    else:
        given = env

        def make() -> SingleEnv:
            return wrap_env(require_single(given()), cfg.wrappers, cfg.action_masks)

    if cfg.vectorization == "async":
        make().close()  # a broken environment should fail here, with its own error, not in a worker
        return WorkerVectorEnv([make] * count, timeout=cfg.env_timeout, autoreset_mode=autoreset_mode)
    return SequentialVectorEnv([make] * count, autoreset_mode=autoreset_mode)


def copy_env(env: EnvLike) -> EnvLike:
    """A copy of an environment for evaluation; ids and callables are returned unchanged."""
    if isinstance(env, str) or not isinstance(env, (gym.Env, VectorEnv)):
        return env
    try:
        twin = _copied(env)
        own, found = ((one.observation_space, one.action_space) for one in (env, twin))
        if own != found:  # the spec may lack changes made after creation
            raise EnvError(f"made again from its spec, it has the spaces {found} instead of {own}")
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"{env} cannot be copied for evaluation ({type(error).__name__}: {error}). Pass a separate one with "
            "eval_env=..., or turn evaluation during training off with eval_every=0."
        ) from error
    return twin


def _copied(env: SingleEnv | AnyVectorEnv) -> SingleEnv | AnyVectorEnv:
    try:
        return copy.deepcopy(env)
    except Exception:
        if not isinstance(env, gym.Env) or env.spec is None:
            raise
        return gym.make(env.spec)


def describe_env(env: EnvLike) -> str:
    """A name for an environment object, for run directories and messages."""
    if isinstance(env, str):
        return env
    if isinstance(env, (gym.Env, VectorEnv)):
        return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    name = getattr(env, "__qualname__", type(env).__name__).split(".")[-1]
    return "custom" if name == "<lambda>" else name


def module_of(env_id: str) -> str | None:
    """The module that `package:Env-v0` would import, or None if there is none or it is imported already."""
    module, colon, _ = env_id.partition(":")
    return module if colon and module not in sys.modules else None


def import_named(env_id: str) -> None:
    """Import the module of `package:Env-v0`, from the working directory if it is not installed.

    Only ids that a person typed or trusted get here (`resolve` refuses those of other files). The working directory is
    on `sys.path` only while that module and the class of its environment are imported. Otherwise a library that tries
    to import a module that is not installed would run a file of that name.
    """
    module = module_of(env_id)
    if module is None:
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        inner = error.name is None or not f"{module}.".startswith(f"{error.name}.")  # an import inside the module
        if inner or os.getcwd() in sys.path:
            raise
        with _working_directory_searched():
            importlib.import_module(module)
            spec = gym.registry.get(env_id.partition(":")[2])
            if spec is not None and isinstance(spec.entry_point, str):
                load_env_creator(spec.entry_point)


@contextlib.contextmanager
def _working_directory_searched() -> Iterator[None]:
    """Append the working directory to `sys.path`; last, so that it shadows nothing that is installed."""
    directory = os.getcwd()
    sys.path.append(directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed the path itself
            sys.path.remove(directory)


def _make_native(env_id: str, cfg: EnvSettings, num_envs: int) -> AnyVectorEnv:
    _register_known(env_id)
    if cfg.wrappers:
        raise ConfigError(
            "wrappers: native vectorization cannot wrap single environments; use vectorization sync or async"
        )
    atari = is_atari(env_id, cfg.env_kwargs)
    if atari and cfg.env_kwargs:
        raise ConfigError(f"env_kwargs: native Atari does not take {', '.join(cfg.env_kwargs)}; use sync or async")
    try:
        import_named(env_id)
        if atari:
            return make_native_games(env_id, cfg.atari, num_envs)
        return gym.make_vec(
            env_id, num_envs=num_envs, vectorization_mode="vector_entry_point", **copy.deepcopy(cfg.env_kwargs)
        )
    except (Exception, SystemExit) as error:
        if isinstance(error, gym.error.Error) and "vector entry point" in str(error):
            raise ConfigError(
                f"vectorization: '{env_id}' has no native vector implementation; use sync or async"
            ) from error
        raise _readable(env_id, cfg.env_kwargs, error) from error


def _register_known(env_id: str) -> None:
    """Import the known packages that register their environments only on import."""
    if env_id in gym.registry:
        return
    for prefixes, module, extra in _REGISTERED_BY:
        if env_id.startswith(prefixes):
            try:
                gym.register_envs(importlib.import_module(module))
            except ImportError as error:
                raise MissingExtraError(f"'{env_id}'", extra) from error


def _readable(env_id: str, kwargs: dict[str, Any], error: Exception | SystemExit) -> Exception:
    """Turn an exception of `gym.make` into an error that says what to do."""
    text = str(error).lower()
    if isinstance(error, (gym.error.DependencyNotInstalled, ImportError)):
        for word, extra in _EXTRAS.items():
            if word in text:
                return MissingExtraError(f"'{env_id}'", extra)
    if isinstance(error, (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv)) or "malformed environment id" in text:
        return ConfigError(f"env_id: {error}")
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        return ConfigError(f"env_kwargs: '{env_id}' does not accept these keyword arguments ({kwargs}): {error}")
    if isinstance(error, NotImplementedError) and not text:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return EnvError(
            f"'{env_id}' could not be made: {where.name} does not support one of its spaces, such as text. Choose the "
            "entries to use first, with gymnasium.wrappers.FilterObservation"
        )
    return EnvError(f"'{env_id}' could not be made: {type(error).__name__}: {error}")
