"""rl_training: reinforcement learning with PyTorch and Gymnasium.

Example:
    >>> from rl_training import PPO
    >>> agent = PPO("CartPole-v1")  # doctest: +SKIP
    >>> agent.learn(100_000)  # doctest: +SKIP

Names are imported when they are first used, so that `import rl_training` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rl_training.version import __version__ as __version__

if TYPE_CHECKING:  # the same names as in _HOMES, for editors and type checkers
    from rl_training.algorithms.registry import register_algorithm as register_algorithm
    from rl_training.api.agent import Agent as Agent
    from rl_training.api.agent import evaluate as evaluate
    from rl_training.api.agent import load as load
    from rl_training.api.agent import load_from_hub as load_from_hub
    from rl_training.api.agent import make_agent as make_agent
    from rl_training.api.facades import *  # noqa: F403 - the facades, from the generated stub
    from rl_training.api.policy_selection import rank_policies as rank_policies
    from rl_training.api.session import resume as resume
    from rl_training.api.session import train as train
    from rl_training.contracts.schedule import (
        Constant as Constant,
    )
    from rl_training.contracts.schedule import (
        Cosine as Cosine,
    )
    from rl_training.contracts.schedule import (
        Linear as Linear,
    )
    from rl_training.contracts.schedule import (
        Piecewise as Piecewise,
    )
    from rl_training.data.samplers import register_sampler as register_sampler
    from rl_training.experiment.config import TrainConfig as TrainConfig
    from rl_training.experiment.logging.base import register_logger as register_logger
    from rl_training.policies.encoders import register_encoder as register_encoder
    from rl_training.policies.networks import register_network as register_network
    from rl_training.policies.optimizers import register_optimizer as register_optimizer
    from rl_training.runtime.callbacks import Callback as Callback
    from rl_training.runtime.callbacks import RunView as RunView
    from rl_training.runtime.trainer import TrainResult as TrainResult

_HOMES = {
    "Agent": "api.agent",
    "evaluate": "api.agent",
    "load": "api.agent",
    "load_from_hub": "api.agent",
    "make_agent": "api.agent",
    "rank_policies": "api.policy_selection",
    "register_algorithm": "algorithms.registry",
    "register_encoder": "policies.encoders",
    "register_logger": "experiment.logging.base",
    "register_network": "policies.networks",
    "register_optimizer": "policies.optimizers",
    "register_sampler": "data.samplers",
    "Constant": "contracts.schedule",
    "Cosine": "contracts.schedule",
    "Linear": "contracts.schedule",
    "Piecewise": "contracts.schedule",
    "TrainConfig": "experiment.config",
    "resume": "api.session",
    "train": "api.session",
    "Callback": "runtime.callbacks",
    "RunView": "runtime.callbacks",
    "TrainResult": "runtime.trainer",
}


def __getattr__(name: str) -> Any:
    """A public name, imported from its home."""
    if name.startswith("__"):
        raise AttributeError(f"module 'rl_training' has no attribute '{name}'")
    home = _HOMES.get(name, "api.facades")
    try:
        value = getattr(importlib.import_module(f"rl_training.{home}"), name)
    except AttributeError:
        raise AttributeError(f"module 'rl_training' has no attribute '{name}'") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    facades = importlib.import_module("rl_training.api.facades")
    return sorted([*_HOMES, *dir(facades), "__version__"])
