"""Policy selection: which of several agents is best, judged from recorded data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.api.agent import load
from rl_training.contracts.errors import ConfigError
from rl_training.data.dataset import Dataset, read_dataset
from rl_training.deploy.off_policy_evaluation import Method, PolicyValue
from rl_training.experiment.checkpointing import checkpoints_of


@dataclass(frozen=True)
class RankedPolicy:
    """An agent and its estimated value."""

    path: Path
    estimate: PolicyValue


def rank_policies(
    paths: Sequence[str | Path],
    dataset: str | Path | Dataset,
    method: Method = "fqe",
    *,
    gamma: float | None = None,
    every_checkpoint: bool = False,
    trust: bool = False,
    **arguments: Any,
) -> list[RankedPolicy]:
    """Estimate the value of agents from one dataset, with the same method and seed, and sort them, best first.

    `paths` are runs, checkpoints or agents of the zoo; with `every_checkpoint`, all checkpoints of each run are
    candidates. All are compared at one discount factor: `gamma`, or that of the first agent. `arguments` are those of
    `Agent.estimate_value`. Agents without a finite estimate come last.

    Example:
        >>> best = rank_policies(["runs/a", "runs/b"], "data.npz")[0].path  # doctest: +SKIP
    """
    candidates = [found for path in paths for found in _candidates(Path(path), every_checkpoint)]
    if not candidates:
        raise ConfigError("path: missing; give runs, checkpoints or agents of the zoo")
    ranked = []
    for path in candidates:
        agent = load(path, trust=trust, learner_only=True)
        try:
            if not isinstance(dataset, Dataset):  # read once; some files need an agent's spaces
                dataset = read_dataset(dataset, env=agent.spec)
            gamma = agent.config.algorithm.gamma if gamma is None else gamma
            ranked.append(RankedPolicy(path, agent.estimate_value(dataset, method, gamma=gamma, **arguments)))
        finally:
            agent.close()
    return sorted(ranked, key=lambda entry: _order(entry.estimate.value))


def _order(value: float) -> tuple[bool, float]:
    return value != value, -value


def _candidates(path: Path, every_checkpoint: bool) -> list[Path]:
    return (checkpoints_of(path) if every_checkpoint else []) or [path]
