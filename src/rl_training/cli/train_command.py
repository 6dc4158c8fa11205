"""`rl-training train`: start a run from a preset, a config file and options."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_training.algorithms.registry import registry
from rl_training.api.session import train
from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.text import printable
from rl_training.experiment.config import NETWORK_LOGGERS, Layer, TrainConfig, resolve
from rl_training.experiment.presets import Preset, presets, resolve_with_preset
from rl_training.experiment.yaml_io import read_yaml
from rl_training.runtime.trainer import TrainResult

DESCRIPTION = """Train an agent.

  rl-training train ppo CartPole-v1 [options]            with the preset, if there is one
  rl-training train --config my.yaml [options]           with a config file (on top of the preset, if there is one)

Precedence: defaults < preset < --config < options. Settings of the algorithm may be written without `algorithm.`:
--clip-coef 0.1. Also: --print-config prints the resolved config and exits; --no-preset uses the defaults instead of the
preset; --quiet shows only errors and the result; --trust
allows a config file to name a module to import (package:Env-v0) or to log over the network; --profile writes a table
of the time per part and a trace (for chrome://tracing or Perfetto) to the run directory; --debug adds tracebacks to
errors. The options below show the values that would be used."""


def run(args: list[str]) -> int:
    """See the module."""
    profile = "--profile" in args
    print_config = "--print-config" in args
    config, preset, quiet = parse_train([arg for arg in args if arg not in ("--profile", "--print-config")])
    if print_config:
        print(printable(config.to_yaml().rstrip(), keep="\n"))
        return 0
    say = (lambda text: None) if quiet else print
    if preset is not None:
        say(f"preset {preset.name}")
    else:
        say(printable(f"no preset for {config.algo} on {config.env_id}: using the defaults{_hint(config)}"))
    result = train(config, progress=not quiet, profile=profile, on_signal="return")
    return report(result, has_env=bool(config.env_id))


def _hint(config: TrainConfig) -> str:
    """Presets for the same environment with other arguments."""
    others = [preset for preset in presets().values() if (preset.algo, preset.env_id) == (config.algo, config.env_id)]
    named = [f"{p.name} (--env-kwargs {' '.join(map(_option, p.env_kwargs.items()))})" for p in others if p.env_kwargs]
    return f". There is {', '.join(named)}" if named else ""


def _option(item: tuple[str, Any]) -> str:
    key, value = item
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def parse_train(args: list[str]) -> tuple[TrainConfig, Preset | None, bool]:
    """The resolved config, its preset, and whether to be quiet.

    The available options depend on the algorithm, so the algorithm and the files are read first.
    """
    positional: list[str] = []
    while args and not args[0].startswith("-") and len(positional) < 2:
        positional.append(args[0])
        args = args[1:]
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--quiet", action="store_true")
    first.add_argument("--trust", action="store_true")
    first.add_argument("--no-preset", action="store_true")
    try:
        known, options = first.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    typed = said(options)
    typed.update(zip(("algo", "env_id"), positional, strict=False))
    layers = [] if known.config is None else [Layer(read_yaml(known.config), str(known.config), known.trust)]
    wants_help = "-h" in options or "--help" in options
    if wants_help:
        layers.insert(0, Layer({"algo": next(iter(registry())), "env_id": "CartPole-v1"}, "help"))  # any algorithm
    elif known.config is None and ("algo" not in typed or not {"env_id", "dataset"} & typed.keys()):
        raise ConfigError(
            "algorithm and environment: missing; use `rl-training train ppo CartPole-v1`, `rl-training train "
            "iql --dataset FILE "
            "--total-updates N`, or `rl-training train --config FILE`"
        )
    layers.append(Layer(typed, "command line"))
    preset = None
    if known.no_preset:
        base = resolve(layers, combinations=False)
    else:
        base, preset = resolve_with_preset(layers, combinations=False)  # options may still fix them
    options = spelled_out(options, base)
    changes = parsing.parse_changes(base, options, prog="rl-training train", description=DESCRIPTION)

    def source_of(name: str) -> str:
        """The file that sets a value, or the command line."""
        return next((layer.source for layer in reversed(layers) if name in layer.data), "command line")

    return base.updated(changes, "command line", source_of), preset, known.quiet


def spelled_out(options: list[str], config: TrainConfig) -> list[str]:
    """Options with `algorithm.` in front of the settings of the algorithm, which may be left out.

    Example:
        >>> spelled_out(["--clip-coef", "0.1"], TrainConfig(algo="ppo", env_id="CartPole-v1"))
        ['--algorithm.clip-coef', '0.1']
    """
    run = {field.name for field in dataclasses.fields(TrainConfig)}
    own = {field.name for field in dataclasses.fields(config.algorithm)} - run

    def spelled(option: str) -> str:
        name = option[2:].partition("=")[0].partition(".")[0].replace("-", "_")
        is_own = option.startswith("--") and (name in own or name.removeprefix("no_") in own)
        return f"--algorithm.{option[2:]}" if is_own else option

    return [spelled(option) for option in options]


def said(options: list[str]) -> dict[str, Any]:
    """The options that select the preset, and those that a file is not trusted to set."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scan.add_argument("--algo")
    scan.add_argument("--env-id", "--env_id", dest="env_id")
    scan.add_argument("--dataset")
    scan.add_argument("--env-kwargs", "--env_kwargs", dest="env_kwargs", nargs="*")
    for name in NETWORK_LOGGERS:
        scan.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    try:
        found = {key: value for key, value in vars(scan.parse_known_args(options)[0]).items() if value is not None}
        if "env_kwargs" in found:
            found["env_kwargs"] = parsing.key_values(found["env_kwargs"])
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"command line: {error}") from error
    return found


def report(result: TrainResult, *, has_env: bool = True) -> int:
    """Print how the run ended and where its files are; returns the exit code."""
    done = f"{result.env_steps:,} steps" if result.env_steps else f"{result.updates:,} updates"
    print(f"{result.stop_reason} after {done}")
    if result.final_evaluation is not None:
        final = result.final_evaluation
        print(f"evaluation: mean return {final.mean:.2f} +/- {final.std:.2f} over {len(final.returns)} episodes")
        if final.num_cut:
            print(f"truncated because they did not end: {final.num_cut} of these episodes (eval_max_steps)")
    if result.best_return is not None:
        print(f"best evaluation during training: {result.best_return:.2f}")
    print(f"run directory: {result.run_dir}")
    print(f"checkpoint:    {result.checkpoint_path}")
    if result.interrupted:
        print(f"to continue:   rl-training resume {shlex.quote(str(result.run_dir))}")
    elif not has_env:
        print(f"to evaluate:   rl-training eval {shlex.quote(str(result.run_dir))} --env-id <environment>")
    else:
        watch = " --render" if find_spec("pygame") else ""  # a core install cannot open a window
        label = "to watch:   " if watch else "to evaluate:"
        print(f"{label}   rl-training eval {shlex.quote(str(result.run_dir))}{watch}")
    sys.stdout.flush()
    return 128 + signal.Signals[result.stop_reason].value if result.interrupted else 0
