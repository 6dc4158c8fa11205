"""Measure what the results page shows, cheapest first: `make measure`, or `python scripts/measure.py --output-dir DIR`.

Each stage is a part of a suite, run by the benchmark driver: one process and one thread at a time (`--jobs` for more),
at the lowest priority, with checkpoints. Interrupt it at any moment and start it again: it continues. A new preset
joins by the patterns of the suites. Add what is finished, however little, to the results at any time:
`python scripts/results_page.py --add DIR/*/`.

Each run records the commit of its code, so start it in a clean clone or a worktree of its own, not where you edit.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.algorithms.registry import get_spec
from rl_training.contracts.errors import ConfigError, RLTrainingError
from rl_training.contracts.spec import Regime
from rl_training.experiment.metadata import git_commit
from rl_training.zoo.benchmark import Benchmark
from rl_training.zoo.progress import showing
from rl_training.zoo.suites import Task, get_suite


@dataclass(frozen=True)
class Stage:
    """Some tasks of a suite, with a number of seeds."""

    suite: str
    seeds: int
    only: tuple[str, ...] = ()
    """Names of tasks or patterns; empty for all."""
    shipped: bool = False
    """Only presets as they are."""
    on_policy: bool = False
    """Only on-policy algorithms, whose steps are cheap."""
    most_steps: int | None = None
    """Only tasks of at most that many steps."""

    def tasks(self) -> list[Task]:
        """What it measures."""
        return [task for task in get_suite(self.suite).select(self.only) if self._has(task)]

    def _has(self, task: Task) -> bool:
        cheap = Regime.ON_POLICY in get_spec(task.config.algo).regimes
        short = self.most_steps is None or task.config.total_timesteps <= self.most_steps
        return short and (cheap or not self.on_policy) and not (self.shipped and task.settings)


QUEUE = (
    Stage("classic", 5, shipped=True, on_policy=True),
    Stage("classic", 5, shipped=True),
    Stage("box2d", 5, most_steps=300_000, on_policy=True),
    Stage("mujoco", 5, shipped=True, on_policy=True),
    Stage("box2d", 5, on_policy=True),
    Stage("agents", 3),
    Stage("robotics", 5),
    Stage("box2d", 5, most_steps=300_000),
    Stage("classic", 5),
    Stage("mujoco", 1, most_steps=300_000),
    Stage("atari", 1, only=("ppo/pong",)),
    Stage("mujoco", 3, on_policy=True),
    Stage("mujoco", 3, most_steps=300_000),
    Stage("box2d", 5),
    Stage("atari", 1, only=("dqn/pong",)),
    Stage("mujoco", 1),
    Stage("atari", 1, only=("ppo/breakout total_timesteps=5_000_000",)),
)


def measure(stages: Sequence[Stage], output_dir: Path, *, jobs: int = 1) -> int:
    """Run the stages one after the other; failures do not stop the others. Returns the exit code."""
    code = 0
    for number, stage in enumerate(stages, 1):
        try:
            tasks = stage.tasks()
            if not tasks:
                continue
            title = f"stage {number} of {len(stages)}: {stage.suite}"
            print(f"{title}, {len(tasks)} tasks, {stage.seeds} seeds", flush=True)
            benchmark = Benchmark(get_suite(stage.suite), output_dir, seeds=stage.seeds, jobs=jobs, tasks=tasks)
            with showing(title) as view:
                outcome = benchmark.run(view)
        except RLTrainingError as error:  # one preset that a suite cannot take; the other suites go on
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            code = 1
            continue
        for job in outcome.jobs:
            if job.state == "failed":
                print(f"failed: {job.name}: {job.note} (log: {benchmark.log_file(job)})", file=sys.stderr, flush=True)
        if outcome.signal:
            return outcome.exit_code
        code = max(code, outcome.exit_code)
    return code


def check_commit(commit: str | None) -> None:
    """Refuse to measure code that nobody can find again."""
    if commit is None or commit.endswith("-dirty"):
        found = "no commit was found" if commit is None else "tracked files differ from their commit"
        raise ConfigError(
            f"results need the commit of the code they were measured with, and {found}; commit, or measure in a "
            "worktree: git worktree add --detach ../measured"
        )


def show(stages: Sequence[Stage]) -> None:
    """Print the stages with their tasks."""
    for number, stage in enumerate(stages, 1):
        print(f"{number}. {stage.suite}, {stage.seeds} seeds")
        for task in sorted(stage.tasks(), key=lambda task: task.config.total_timesteps):
            print(f"   {task.name} ({task.config.env_id}, {task.config.total_timesteps:,} steps)")


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/measured"), help="runs and manifests, per suite")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, each with one thread")
    parser.add_argument("--suite", action="append", default=[], help="only the stages of this suite; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the stages and exit")
    args = parser.parse_args(argv)
    stages = [stage for stage in QUEUE if not args.suite or stage.suite in args.suite]
    if not stages:
        parser.error(f"--suite: choose from {', '.join(dict.fromkeys(stage.suite for stage in QUEUE))}")
    if args.list:
        show(stages)
        return 0
    try:
        check_commit(git_commit())
        return measure(stages, args.output_dir, jobs=args.jobs)
    except RLTrainingError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    os.nice(19)
    sys.exit(main())
