"""`rl-training export`: write a trained policy as one file for deployment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from rl_training.api.agent import load
from rl_training.cli import parsing
from rl_training.contracts.settings import documented, setting
from rl_training.deploy.export import SUFFIXES, ExportFormat, default_name, require_export


@documented
@dataclass
class ExportArgs:
    """Write an agent's deterministic policy as one file that acts without this package, checked against the agent."""

    path: Annotated[Path, tyro.conf.Positional] = setting(
        help="Run directory, checkpoint, or zoo:<algo>/<environment>."
    )
    format: ExportFormat = setting("onnx", "onnx (extra `export`) or torch-export.")
    output: Path | None = setting(
        None, "Output file; by default <algo>-<environment>.onnx or .pt2 in the working directory."
    )
    trust: bool = setting(False, "Allow the checkpoint to name a module to import (package:Env-v0).")


def run(args: list[str]) -> int:
    """See the module."""
    summary = str(ExportArgs.__doc__).split("\n")[0]
    options = parsing.parse(ExportArgs, args, prog="rl-training export", description=summary)
    require_export(options.output or Path(f"any{SUFFIXES[options.format]}"), options.format)
    agent = load(options.path, trust=options.trust, learner_only=True)
    try:
        output = options.output or Path(default_name(agent.config, options.format))
        about = agent.export(output, options.format)
        print(f"{agent} exported as {options.format}; its actions equal those of predict on random observations")
    finally:
        agent.close()
    for kind in ("inputs", "outputs"):
        print(f"{kind + ':':<9}", "; ".join(map(_shown, about[kind])))
    print(f"written:  {output} ({output.stat().st_size:,} bytes)")
    return 0


def _shown(port: dict[str, Any]) -> str:
    return f"{port['name']} {port['dtype']} [{', '.join(map(str, port['shape']))}]"
