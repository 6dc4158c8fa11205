"""Nothing that lives across iterations is left out of a checkpoint: no loose tensor, array, generator or counter.

Walks everything that a trainer reaches, before and after more training. Whatever has changed has to be in the state, or
be declared as scratch: by `transient`, or below with the reason.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

import rl_training
from rl_training.algorithms.registry import registry
from rl_training.contracts.spec import Regime
from rl_training.contracts.state import Stateful

SCRATCH = {
    "RolloutBuffer": "is filled and consumed within one iteration",
    "Timers": "timings of this process",
    "ProgressCallback": "what was shown when",
}
SCRATCH_ATTRIBUTES = {
    ("OnPolicyTrainer", "_timers"): "timings of this process",
    ("OnPolicyTrainer", "_total"): "the argument of the current call",
    ("OnPolicyTrainer", "_callback_state"): "what callbacks held when the last call ended; saved as their own state",
    ("OnPolicyTrainer", "_recorded"): "saved with the metrics, timings aside",
    ("OnPolicyTrainer", "_latest"): "saved with the metrics",
    ("OnPolicyTrainer", "_best_return"): "saved as best_return",
    ("Collector", "obs"): "saved in `in_flight`, with the environments",
    ("Collector", "episode_start"): "saved in `in_flight`, with the environments",
    ("AutoresetAdapter", "resetting"): "saved in the environments' snapshot",
    ("ParameterStore", "flat"): "the same memory as the policy's parameters, which are saved by name",
    ("ParameterStore", "grad"): "zeroed before each use",
    ("ParameterStore", "optimizer"): "its slots are saved by parameter name",
}


def reachable(root: Any) -> dict[int, Any]:
    """Objects of the package that can be reached through attributes and containers, by identity."""
    found: dict[int, Any] = {}
    queue = [root]
    while queue:
        item = queue.pop()
        if isinstance(item, (list, tuple, deque)):
            queue.extend(item)
        elif isinstance(item, dict):
            queue.extend(item.values())
        elif type(item).__module__.startswith(("rl_training", "tests")) and id(item) not in found:
            if isinstance(item, torch.nn.Module) or not hasattr(item, "__dict__"):
                continue  # modules are saved whole
            found[id(item)] = item
            queue.extend(vars(item).values())
    return found


def changing_part(value: Any) -> Any:
    """A value in a form that can be compared later; None for what is neither number nor container of numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    if isinstance(value, (bool, int, float, str, np.generic)):
        return value
    if isinstance(value, (list, tuple, deque)):
        return [changing_part(item) for item in value]
    if isinstance(value, dict):
        return {str(key): changing_part(item) for key, item in value.items()}
    return None


def snapshot(objects: dict[int, Any]) -> dict[tuple[int, str], Any]:
    """Every attribute of every object."""
    return {(key, name): changing_part(value) for key, item in objects.items() for name, value in vars(item).items()}


def loose_attributes(root: Any, train_more: Any) -> list[str]:
    """Attributes that change over training and that no checkpoint would hold."""
    objects = reachable(root)
    before = snapshot(objects)
    train_more()
    after = snapshot(objects)
    loose = []
    for (key, name), old in before.items():
        owner = objects[key]
        kind = type(owner).__name__
        if old == after.get((key, name)) or kind in SCRATCH or (kind, name) in SCRATCH_ATTRIBUTES:
            continue
        held = isinstance(owner, Stateful) and (name in owner.state_dict() or name in owner.transient)
        if not held:
            loose.append(f"{kind}.{name}")
    return sorted(set(loose))


def agent_with_everything(spec: Any) -> Any:
    """An agent with normalisation, evaluation and everything that may stop a run."""
    settings = {"num_envs": 2, "num_steps": 8, "normalize_obs": True, "normalize_reward": True, "seed": 1}
    stops = {"eval_every": 32, "eval_episodes": 1, "stop_reward": 1e9, "stop_patience": 1000, "max_seconds": 1e6}
    return getattr(rl_training, spec.title)("CartPole-v1", **settings, **stops)


ON_POLICY = [spec for spec in registry().values() if Regime.ON_POLICY in spec.regimes]


@pytest.mark.parametrize("spec", ON_POLICY, ids=lambda spec: spec.name)
def test_no_state_is_loose(spec: Any) -> None:
    agent = agent_with_everything(spec)
    agent.learn(64, progress=False)
    found = loose_attributes(agent._experiment.trainer, lambda: agent.learn(64, progress=False))
    agent.close()
    assert found == []


class Forgetful(rl_training.Callback):
    """Counts in a place that no checkpoint holds."""

    def __init__(self) -> None:
        self.count = 0

    def on_iteration(self, run: Any) -> None:
        self.count += 1


def test_a_loose_counter_is_found() -> None:
    agent = agent_with_everything(registry()["ppo"])
    callback = Forgetful()
    agent.learn(64, callback=callback, progress=False)
    trainer = agent._experiment.trainer
    found = loose_attributes(trainer, lambda: agent.learn(64, callback=callback, progress=False))
    agent.close()
    assert found == ["Forgetful.count"]


def test_a_loose_array_is_found() -> None:
    agent = agent_with_everything(registry()["ppo"])
    agent.learn(64, progress=False)
    trainer = agent._experiment.trainer
    trainer.algorithm.config.stray = np.zeros(3)  # in an object that is not Stateful

    def more() -> None:
        trainer.algorithm.config.stray += 1.0

    assert loose_attributes(trainer, more) == ["PPOConfig.stray"]
    agent.close()
