"""`rl-training tune`: hyper-parameter search."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError
from rl_training.experiment.config import module_problems
from rl_training.experiment.yaml_io import dump_yaml, read_yaml
from rl_training.tuning.search_space import space_to_plain
from rl_training.tuning.tune import TuneConfig, TuneResult, make_plan, tune

DESCRIPTION = """Search for better hyper-parameters, starting from the preset if there is one (extra `tune`).

  rl-training tune ppo CartPole-v1 --trials 50 --jobs 2
  rl-training tune ppo CartPole-v1 --set num_envs=4 network.activation=relu --timesteps 20_000

The same command again continues the study. Settings have their Python names: learning_rate, network.actor_sizes.
Also: --show-search prints the search space, to edit and pass as --search FILE; --quiet shows only the result;
--debug adds tracebacks to errors."""


def run(args: list[str]) -> int:
    """See the module."""
    config, quiet, show_search = parse_tune(args)
    if show_search:
        print(dump_yaml(space_to_plain(make_plan(config).space)), end="")
        return 0
    result = tune(config, progress=not quiet)
    return report(result)


def parse_tune(args: list[str]) -> tuple[TuneConfig, bool, bool]:
    """The study's config, whether to be quiet, and whether to only show the search space."""
    positional: list[str] = []
    while args and not args[0].startswith("-") and len(positional) < 2:
        positional.append(args[0])
        args = args[1:]
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--quiet", action="store_true")
    first.add_argument("--show-search", "--show_search", action="store_true")
    first.add_argument("--set", nargs="+", action="extend", default=[])
    first.add_argument("--config", type=Path)
    try:
        known, options = first.parse_known_args(args)
        given = parsing.key_values(known.set)
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"command line: {error}") from error
    names = dict(zip(("algo", "env_id"), positional, strict=False))
    if known.config is not None:  # may name the algorithm and environment, as for `train`
        data = read_yaml(known.config)
        names = {**{name: str(data[name]) for name in ("algo", "env_id") if name in data}, **names}
    if "-h" not in options and "--help" not in options and len(names) < 2:
        raise ConfigError(
            "algorithm and environment: missing; use `rl-training tune ppo CartPole-v1` or `rl-training tune "
            "--config FILE`"
        )
    flags = [part for name, value in names.items() for part in (f"--{name.replace('_', '-')}", value)]
    config = parsing.parse(TuneConfig, [*flags, *options], prog="rl-training tune", description=DESCRIPTION)
    typed = {*positional, *(option.rpartition("=")[2] for option in options)}
    if (
        config.env_id not in typed
        and not config.trust
        and (problems := module_problems(config.env_id, str(known.config)))
    ):
        raise ConfigError(problems)
    config.config = known.config
    config.set = given
    return _checked(config), known.quiet, known.show_search


def _checked(config: TuneConfig) -> TuneConfig:
    """The config with all checks applied, including the separately read parts."""
    fields: dict[str, Any] = vars(config)
    return TuneConfig(**fields)


def report(result: TuneResult) -> int:
    """Print the result and where its files are; returns the exit code."""
    from rl_training.tuning.report import counted, needs_trust

    first = "failed" if result.first_score is None else f"{result.first_score:.2f}"
    print(f"{counted(result.counts)}; best {result.best_score:.2f} (trial {result.best_trial}), first trial {first}")
    print(f"preset: {result.files['preset']}")
    print(f"report: {result.files['report']}")
    trust = " --trust" if needs_trust(result.best) else ""
    print(f"to train with it: rl-training train --config {shlex.quote(str(result.files['preset']))}{trust}")
    if not result.interrupted:
        return 0
    print("to continue the study: run the same command again")
    return 128 + result.signal
