"""`rl-training zoo list | show | agents | benchmark`: presets, trained agents, and suites."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from rl_training.algorithms.registry import get_spec
from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.text import printable
from rl_training.experiment.agents import zoo_agents
from rl_training.experiment.presets import get_preset, presets

if TYPE_CHECKING:
    from rl_training.zoo.benchmark import Job, Outcome


@documented
@dataclass
class ZooArgs:
    """Presets, trained agents and benchmark suites.

    `zoo list` lists the presets and `zoo show ppo/cartpole` shows one; `zoo show ppo` prints tables of an algorithm's
    settings and presets; `zoo agents` lists the trained agents that ship with the package; `zoo benchmark --help`
    describes suites.
    """

    action: Annotated[Literal["list", "show", "agents", "benchmark"], tyro.conf.Positional] = setting(
        "list", "What to do."
    )
    name: Annotated[str, tyro.conf.Positional] = setting(
        "", "For list and agents: an algorithm. For show: a preset or an algorithm."
    )


@documented
@dataclass
class BenchmarkArgs:
    """Train the presets of a suite in parallel processes, and collect the results.

    Another call continues: finished runs are not repeated, unfinished ones are resumed.
    """

    suite: Annotated[str, tyro.conf.Positional] = setting("", "Name of a suite, or a YAML file with one.")
    show: Annotated[bool, tyro.conf.arg(name="list")] = setting(False, "List the suites and exit.")
    only: tuple[str, ...] = setting((), "Only these tasks, by preset: ppo/cartpole '*/pendulum'.")
    seeds: int | None = setting(None, "Number of seeds per task; by default that of the suite.", ge=1)
    jobs: int | None = setting(None, "Parallel runs, each with one thread; by default one per core.", ge=1)
    output_dir: Path = setting(Path("runs"), "Directory for runs and manifest, in a subdirectory <suite>/.")
    quiet: bool = setting(False, "Show only errors and the result.")
    trust: bool = setting(False, "Allow the file to name a module to import (package:Env-v0).")


def run(args: list[str]) -> int:
    """See the module."""
    if args[:1] == ["benchmark"]:
        return _benchmark(args[1:])
    options = parsing.parse(ZooArgs, args, prog="rl-training zoo", description=_summary(ZooArgs))
    if options.action == "show":
        if not options.name:
            raise ConfigError(
                "preset or algorithm: missing; use `rl-training zoo show ppo/cartpole`. List all with "
                "`rl-training zoo list`"
            )
        if "/" not in options.name:
            from rl_training.zoo.descriptions import describe

            print(describe(get_spec(options.name)))
            return 0
        preset = get_preset(options.name)
        print(f"# preset {preset.name}: differences from the defaults")
        print(preset.path.read_text(encoding="utf-8").rstrip())
        return 0
    _print(_agents(options.name) if options.action == "agents" else _presets(options.name))
    return 0


def _agents(algo: str) -> Table:
    table = Table("agent", "trained for", "mean return", "episodes", box=None)
    for agent in zoo_agents().values():
        if algo in ("", agent.name.partition("/")[0]):
            result = agent.result
            score = f"{result['mean']:.1f} +/- {result['std']:.1f}"
            table.add_row(agent.address, f"{result['env_steps']:,} steps", score, str(result["episodes"]))
    return table


def _presets(algo: str) -> Table:
    from rl_training.zoo.manifest import read_results, results_dir
    from rl_training.zoo.measured import measured

    manifests = read_results(results_dir())
    table = Table("preset", "algorithm", "environment", "steps", "measured", box=None)
    for preset in presets().values():
        if algo in ("", preset.algo):
            kwargs = " ".join(f"{key}={value}" for key, value in preset.env_kwargs.items())
            about = f"{preset.env_id} {kwargs}".strip(), f"{preset.total_timesteps:,}"
            table.add_row(preset.name, preset.algo, *about, measured(preset, manifests).text)
    return table


def _benchmark(args: list[str]) -> int:
    options = parsing.parse(BenchmarkArgs, args, prog="rl-training zoo benchmark", description=_summary(BenchmarkArgs))
    from rl_training.zoo.suites import get_suite, suites

    if options.show:
        _print(_table_of_suites())
        return 0
    problems = [
        f"--{name}: must be at least 1, got {value}"
        for name, value in (("seeds", options.seeds), ("jobs", options.jobs))
        if value is not None and value < 1
    ]
    if not options.suite:
        problems.append(f"suite: missing; choose {', '.join(suites())}, or a YAML file. --list describes them")
    if problems:
        raise ConfigError(problems)
    from rl_training.zoo.benchmark import Benchmark
    from rl_training.zoo.progress import showing

    suite = get_suite(options.suite, trust=options.trust)
    tasks = suite.select(options.only)
    benchmark = Benchmark(suite, options.output_dir, seeds=options.seeds, jobs=options.jobs, tasks=tasks)
    with showing(f"{suite.name}, {benchmark.slots} at a time", quiet=options.quiet) as view:
        outcome = benchmark.run(view)
    _say_outcome(outcome, benchmark.log_file)
    return outcome.exit_code


def _table_of_suites() -> Table:
    from rl_training.zoo.suites import get_suite, suites

    table = Table("suite", "tasks", "seeds", "steps", "description", box=None)
    for suite in map(get_suite, suites()):
        steps = sum(task.config.budget for task in suite.tasks) * suite.seeds
        table.add_row(suite.name, f"{len(suite.tasks)}", f"{suite.seeds}", f"{steps:,}", suite.description)
    return table


def _say_outcome(outcome: Outcome, log_file: Callable[[Job], Path]) -> None:
    """Print results, failures with their reasons, and paths."""
    from rl_training.zoo.manifest import MANIFEST
    from rl_training.zoo.progress import summary

    _print(summary(outcome))
    done = sum(job.state == "done" for job in outcome.jobs)
    print(f"{done} of {len(outcome.jobs)} runs done")
    failed = [job for job in outcome.jobs if job.state == "failed"]
    for job in failed:
        print(printable(f"failed: {job.name}: {job.note} (log: {log_file(job)})"))
    print(f"manifest: {outcome.directory / MANIFEST}")
    if outcome.manifest.tasks:
        print(f"to see a report: rl-training report {shlex.quote(str(outcome.directory))} --video")
    if done < len(outcome.jobs):
        print("to continue: run the same command again")


def _summary(cls: type[object]) -> str:
    """The docstring of an arguments class, without the attribute list."""
    return str(cls.__doc__).partition("\n\nAttributes:")[0].replace("\n    ", "\n")


def _print(table: Table) -> None:
    """Print a table; without a terminal, names are never truncated."""
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
