"""`rl-training ope`: the value of trained policies, estimated from recorded data (off-policy evaluation)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rl_training.api.policy_selection import RankedPolicy, rank_policies
from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.text import printable
from rl_training.deploy.fitted_q import FQEConfig
from rl_training.deploy.off_policy_evaluation import METHODS, Method


@documented
@dataclass
class OpeArgs:
    """Estimate the mean discounted return of trained policies from recorded data, and rank them.

    Importance sampling (is, wis, pdis) and the doubly robust estimate (dr) need the column `log_prob` in the dataset:
    the log-probability of each recorded action under the policy that made the data. Fitted Q evaluation (fqe) does not.
    """

    path: Annotated[tuple[Path, ...], tyro.conf.Positional] = setting(
        (), "Run directories, checkpoints, or zoo:<algo>/<environment>."
    )
    dataset: str = setting("", "Recorded data: a file or minari:<id>.")
    method: Method = setting("fqe", "Method: fqe, is, wis, pdis or dr.")
    gamma: float | None = setting(None, "Discount factor; by default that of the first policy.")
    stochastic: bool = setting(False, "Evaluate sampled actions; by default as in the runs' evaluations.")
    deterministic: bool = setting(False, "Evaluate deterministic actions; by default as in the runs' evaluations.")
    every_checkpoint: bool = setting(False, "Compare all checkpoints of each run.")
    seed: int = setting(0, "Seed of networks, batches and sampled actions.")
    json: bool = setting(False, "Print the result as JSON.")
    trust: bool = setting(False, "Allow a run's config to name a module to import (package:Env-v0).")
    fqe: FQEConfig = setting(factory=FQEConfig, help="Fitted Q evaluation, for fqe and dr.")


def run(args: list[str]) -> int:
    """See the module."""
    options = parsing.parse(
        OpeArgs, args, prog="rl-training ope", description=str(OpeArgs.__doc__).split("\n\nAttr")[0]
    )
    problems = []
    if not options.path:
        problems.append("path: missing; give a run, a checkpoint, or zoo:<algo>/<environment>")
    if not options.dataset:
        problems.append("--dataset: missing; give a file with recorded data")
    if options.stochastic and options.deterministic:
        problems.append("--stochastic and --deterministic: use only one of them")
    if problems:
        raise ConfigError(problems)
    ranked = rank_policies(
        options.path,
        options.dataset,
        options.method,
        gamma=options.gamma,
        every_checkpoint=options.every_checkpoint,
        trust=options.trust,
        deterministic=options.deterministic or (False if options.stochastic else None),
        seed=options.seed,
        **{field.name: getattr(options.fqe, field.name) for field in dataclasses.fields(FQEConfig)},
    )
    if options.json:
        print(json.dumps([{"path": str(entry.path), **entry.estimate.as_dict()} for entry in ranked], indent=1))
    else:
        _say(ranked)
    return 0


def _say(ranked: list[RankedPolicy]) -> None:
    first = ranked[0].estimate
    print(f"{METHODS[first.method]}, gamma {first.gamma:g}, {first.num_episodes:,} episodes")
    print(f"behaviour policy (mean discounted return of the data): {first.behaviour_value:.4g}")
    for entry in ranked:
        found = entry.estimate
        notes = [f"+/- {found.standard_error:.2g}", "deterministic" if found.deterministic else "sampled actions"]
        if found.critics_std is not None:
            notes.append(f"deviation over Q-functions {found.critics_std:.2g}")
        if found.effective_episodes is not None:
            notes.append(f"{found.effective_episodes:.1f} effective episodes")
        print(printable(f"{found.value:.4g}  {entry.path}  ({', '.join(notes)})"))
