"""Trained agents that ship with the package: `zoo:ppo/CartPole-v1` wherever a checkpoint's path is asked for.

Each is an ordinary checkpoint of weights below `zoo/agents`, with what it reached in `result.json` beside it.
`scripts/make_zoo_agents.py` makes them.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import CheckpointError
from rl_training.experiment.files import read_mapping

PREFIX = "zoo:"
RESULT, CHECKPOINT = "result.json", "checkpoint"


@dataclass(frozen=True)
class ZooAgent:
    """One trained agent of the package."""

    name: str
    """Like the preset that it was trained with: `ppo/cartpole`."""
    path: Path
    """Its checkpoint."""
    result: Mapping[str, Any]
    """How it was trained and what it reached: `env_id`, `seed`, `env_steps`, `mean`, `std`, `episodes`, ..."""

    @property
    def env_id(self) -> str:
        """The environment it plays."""
        return str(self.result["env_id"])

    @property
    def address(self) -> str:
        """What to give to `load` or on the command line."""
        return f"{PREFIX}{self.name.partition('/')[0]}/{self.env_id}"


@functools.cache
def zoo_agents() -> dict[str, ZooAgent]:
    """Every agent that ships with the package, by name."""
    root = Path(str(resources.files("rl_training"))) / "zoo" / "agents"
    found = {path.parent.relative_to(root).as_posix(): path.parent for path in sorted(root.glob(f"*/*/{RESULT}"))}
    return {name: ZooAgent(name, path / CHECKPOINT, read_mapping(path / RESULT)) for name, path in found.items()}


def is_zoo(path: str | Path) -> bool:
    """Whether it names an agent of the package instead of a place on the disk.

    Example:
        >>> is_zoo("zoo:ppo/CartPole-v1"), is_zoo("runs/zoo")
        (True, False)
    """
    return Path(path).as_posix().startswith(PREFIX)


def locate(path: str | Path) -> Path:
    """The place of a checkpoint or run: a path as it is, or that of the agent that `zoo:<algo>/<environment>` names."""
    if not is_zoo(path):
        return Path(path)
    name = Path(path).as_posix().removeprefix(PREFIX)
    agents = zoo_agents()
    known = {agent.address.removeprefix(PREFIX): agent for agent in agents.values()} | agents
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean '{PREFIX}{near[0]}'?" if near else ""
        raise CheckpointError(
            f"the package ships no agent '{PREFIX}{name}'.{hint} `rl-training zoo agents` shows those that there are; "
            f"for others train one: `rl-training train <algo> <environment>`"
        )
    return known[name].path
