"""`rl-training resume`: continue a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_training.algorithms.registry import registry
from rl_training.api.session import resume
from rl_training.cli import parsing
from rl_training.cli.train_command import report, said, spelled_out
from rl_training.contracts.errors import ConfigError
from rl_training.experiment.config import NETWORK_LOGGERS, TrainConfig, read_config
from rl_training.experiment.restoring import MAY_CHANGE
from rl_training.experiment.runs import CONFIG, RunDirectory

DESCRIPTION = f"""Continue a run from its newest valid checkpoint.

  rl-training resume RUN [--total-timesteps N] [options]

Also: --quiet, --trust (allow the run's config to name a module to import or to log over the network), --debug,
--learner-only (restore only weights and optimizer, and start with an empty replay buffer and new episodes; use it if
the saved ones are damaged). The options below show the run's values. These may change:
{", ".join(sorted(MAY_CHANGE - {"init_from", "output_dir"}))}."""


def run(args: list[str]) -> int:
    """See the module."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--quiet", action="store_true")
    first.add_argument("--trust", action="store_true")
    first.add_argument("--learner-only", action="store_true")
    known, options = first.parse_known_args(args)
    if options and options[0] in ("-h", "--help"):
        default = TrainConfig(algo=next(iter(registry())), env_id="CartPole-v1")  # any algorithm will do
        parsing.parse_changes(default, options, prog="rl-training resume", description=DESCRIPTION)
    if not options or options[0].startswith("-"):
        raise ConfigError("run: missing; use `rl-training resume runs/<run>`. List the runs with `rl-training runs`")
    path, options = Path(options[0]), options[1:]
    RunDirectory(path).require()
    base = read_config(path / CONFIG, trust=True)  # read only: `resume` checks trust
    options = spelled_out(options, base)
    changes = parsing.parse_changes(base, options, prog="rl-training resume", description=DESCRIPTION)
    changes |= {name: f"--no-{name}" not in options for name in NETWORK_LOGGERS if name in said(options)}
    result = resume(
        path,
        progress=not known.quiet,
        trust=known.trust,
        learner_only=known.learner_only,
        on_signal="return",
        **changes,
    )
    return report(result, has_env=bool(changes.get("env_id", base.env_id)))
