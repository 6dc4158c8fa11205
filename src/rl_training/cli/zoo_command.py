"""`rl-training zoo list | show`: the presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.presets import get_preset, presets


@documented
@dataclass
class ZooArgs:
    """List the presets (`zoo list`), or show one (`zoo show ppo/cartpole`)."""

    action: Annotated[Literal["list", "show"], tyro.conf.Positional] = setting("list", "list or show.")
    name: Annotated[str, tyro.conf.Positional] = setting("", "For list: an algorithm. For show: a preset.")


def run(args: list[str]) -> int:
    """See the module."""
    summary = str(ZooArgs.__doc__).split("\n")[0]
    options = parsing.parse(ZooArgs, args, prog="rl-training zoo", description=summary)
    if options.action == "show":
        if not options.name:
            raise ConfigError("name a preset: `rl-training zoo show ppo/cartpole`; `rl-training zoo list` shows all")
        preset = get_preset(options.name)
        print(f"# preset {preset.name}: what differs from the defaults")
        print(preset.path.read_text(encoding="utf-8").rstrip())
        return 0
    table = Table("preset", "algorithm", "environment", "steps", box=None)
    for preset in presets().values():
        if options.name in ("", preset.algo):
            kwargs = " ".join(f"{key}={value}" for key, value in preset.env_kwargs.items())
            table.add_row(preset.name, preset.algo, f"{preset.env_id} {kwargs}".strip(), f"{preset.total_timesteps:,}")
    Console(width=None if Console().is_terminal else 120).print(table)
    return 0
