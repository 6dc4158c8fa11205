"""Trained agents that ship with the package: `zoo:ppo/CartPole-v1` is accepted in place of a checkpoint path.

Each is an ordinary weights-only checkpoint below `zoo/agents`, with its evaluation result in `result.json` beside it.
`scripts/make_zoo_agents.py` creates them.
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
from rl_training.experiment.presets import find_preset

PREFIX = "zoo:"
RESULT, CHECKPOINT = "result.json", "checkpoint"


@dataclass(frozen=True)
class ZooAgent:
    """One trained agent of the package."""

    name: str
    """The name of the preset it was trained with: `ppo/cartpole`."""
    path: Path
    """The checkpoint directory."""
    result: Mapping[str, Any]
    """How it was trained and its evaluation: `env_id`, `seed`, `env_steps`, `mean`, `std`, `episodes`, ..."""

    @property
    def env_id(self) -> str:
        """The environment it was trained in."""
        return str(self.result["env_id"])

    @property
    def address(self) -> str:
        """The address to pass to `load` or on the command line: by environment, or by preset if it has several."""
        algo = self.name.partition("/")[0]
        preset = find_preset(algo, self.env_id)
        is_first = preset is not None and preset.name == self.name
        return f"{PREFIX}{algo}/{self.env_id}" if is_first else f"{PREFIX}{self.name}"


@functools.cache
def zoo_agents() -> dict[str, ZooAgent]:
    """Every agent that ships with the package, by name."""
    root = Path(str(resources.files("rl_training"))) / "zoo" / "agents"
    found = {path.parent.relative_to(root).as_posix(): path.parent for path in sorted(root.glob(f"*/*/{RESULT}"))}
    return {name: ZooAgent(name, path / CHECKPOINT, read_mapping(path / RESULT)) for name, path in found.items()}


def is_zoo(path: str | Path) -> bool:
    """Whether a path names an agent of the package instead of a file on disk.

    Example:
        >>> is_zoo("zoo:ppo/CartPole-v1"), is_zoo("runs/zoo")
        (True, False)
    """
    return Path(path).as_posix().startswith(PREFIX)


def locate(path: str | Path) -> Path:
    """Path of a checkpoint or run; `zoo:<algo>/<environment>` is replaced by the path of that agent."""
    if not is_zoo(path):
        return Path(path)
    name = Path(path).as_posix().removeprefix(PREFIX)
    agents = zoo_agents()
    known = {agent.address.removeprefix(PREFIX): agent for agent in agents.values()} | agents
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean '{PREFIX}{near[0]}'?" if near else ""
        raise CheckpointError(
            f"the package ships no agent '{PREFIX}{name}'.{hint} List the agents with `rl-training zoo agents`, "
            "or train one: `rl-training train <algo> <environment>`"
        )
    return known[name].path
