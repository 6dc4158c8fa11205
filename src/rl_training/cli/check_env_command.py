"""`rl-training check-env`: check that an environment does what training expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from rl_training.cli import parsing
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.text import printable


@documented
@dataclass
class CheckEnvArgs:
    """Check an environment with random actions: spaces, steps, seeds, time limits, autoreset, snapshots."""

    env_id: Annotated[str, tyro.conf.Positional] = setting(help="Environment id, or package:Env-v0.")
    num_steps: int = setting(2000, "Random steps to take.", ge=1)
    seed: int = setting(0, "Seed of the environment and of the actions.", ge=0)


def run(args: list[str]) -> int:
    """See the module; the exit code is 1 if there are errors."""
    options = parsing.parse(CheckEnvArgs, args, prog="rl-training check-env", description=str(CheckEnvArgs.__doc__))
    from rl_training.envs import check_env, format_findings

    findings = check_env(options.env_id, num_steps=options.num_steps, seed=options.seed)
    print(printable(format_findings(findings), keep="\n"))
    return int(any(finding.level == "error" for finding in findings))
