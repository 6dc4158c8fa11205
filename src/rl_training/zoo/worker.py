"""One benchmark run in its own process: trained or resumed like any run, then evaluated.

The driver writes an order to the worker's standard input and keeps the pipe open. If the driver dies, the worker stops
as if interrupted: it saves, and can be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_training.algorithms.registry import get_spec
from rl_training.api import facades
from rl_training.api.agent import Agent, agent_of
from rl_training.api.session import resume, train
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.spec import Regime
from rl_training.experiment.checkpointing import checkpoints_of
from rl_training.experiment.config import NETWORK_LOGGERS, Layer, TrainConfig, read_config, resolve
from rl_training.experiment.files import read_mapping, write_text
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.restoring import load_experiment
from rl_training.experiment.runs import CONFIG, METRICS, RunDirectory
from rl_training.experiment.schema import INVALID, build, to_plain
from rl_training.runtime.callbacks import Callback, RunView
from rl_training.zoo.manifest import Evaluated, RunResult, config_hash, dump
from rl_training.zoo.suites import Protocol

RESULT = "benchmark.json"
"""The result file in a run directory; a run that has it is done."""
SECONDS = "time/training_seconds"
INTERRUPTED = 130


@dataclass
class Stopwatch(Callback):
    """Counts training time across resumes, excluding evaluations."""

    transient: ClassVar[tuple[str, ...]] = ("_began",)
    spent: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)

    def on_start(self, run: RunView) -> None:
        """See `Callback.on_start`."""
        self._began = time.perf_counter()

    def on_evaluation(self, run: RunView, result: object) -> None:
        """See `Callback.on_evaluation`."""
        self._began += run.metrics().get("time/evaluation_seconds", 0.0)

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        now = time.perf_counter()
        self.spent, self._began = self.spent + now - self._began, now
        run.record({SECONDS: self.spent})


def run_config(config: TrainConfig, protocol: Protocol, seed: int, directory: Path) -> TrainConfig:
    """A task's config for one seed, with the suite's evaluation and checkpoint intervals."""
    every = max(1, config.budget // protocol.points)
    return config.replace(
        seed=seed,
        output_dir=directory,
        num_threads=1,
        eval_every=every,
        eval_episodes=protocol.episodes,
        checkpoint_every=min(every, config.checkpoint_every or every),
        checkpoint_best=True,
        stop_reward=None,
        stop_patience=None,
        max_seconds=None,
    )


def identity(config: TrainConfig) -> tuple[Any, ...]:
    """The key that identifies a measurement: equal for runs that measure the same."""
    evaluation = (config.eval_every, config.eval_episodes, config.eval_deterministic, config.eval_epsilon)
    return (config_hash(config), config.seed, *evaluation)


def measure(config: TrainConfig, final_episodes: int, run: Path | None = None) -> RunResult | None:
    """Train or resume a run, and evaluate it. None if it was interrupted; a later call continues it.

    Progress is saved along the way: training in checkpoints, the result in the run's `benchmark.json`.
    """
    if run is not None and not checkpoints_of(run):  # stopped before its first checkpoint: nothing to resume
        shutil.rmtree(run)
        run = None
    if run is None:
        result = train(config, callback=Stopwatch(), progress=False, on_signal="return")
        assert result.run_dir is not None
        run = result.run_dir
    elif not is_trained(RunDirectory(run)):
        _continue(run, config)
    directory = RunDirectory(run)
    if not is_trained(directory):
        return None
    measured = evaluate_run(directory, config, final_episodes)
    write_result(directory, measured)
    return measured


def _continue(run: Path, config: TrainConfig) -> None:
    """Resume a run. Its files may name only what the suite does: the suite is trusted, the files are not."""
    if identity(read_config(run / CONFIG, trust=True)) != identity(config):
        raise CheckpointError(f"{run / CONFIG}: has other settings than the suite")
    loggers = {name: getattr(config, name) for name in NETWORK_LOGGERS}
    resume(run, callback=Stopwatch(), progress=False, trust=True, on_signal="return", **loggers)


def is_trained(run: RunDirectory) -> bool:
    """Whether a run has finished training."""
    return run.status() == "finished"


def evaluate_run(run: RunDirectory, config: TrainConfig, episodes: int) -> RunResult:
    """Evaluate the untrained, final and best policies of a finished run; the result also holds times and versions."""
    about, steps = run.metadata(), run.env_steps()
    updates, data = 0, about.get("dataset")
    if config.regime is Regime.OFFLINE:
        steps, updates = 0, steps  # the numbers of its checkpoints count gradient steps
    curve = [entry for entry in run.evaluations() if not entry.get("final")]
    training = list(read_metrics(run.path / METRICS))
    best = run.path / "checkpoints" / "best"
    seconds = max((entry[SECONDS] for entry in training if SECONDS in entry), default=0.0)
    return RunResult(
        seed=config.seed,
        env_steps=steps,
        wall_seconds=round(seconds, 1),
        env_steps_per_second=round((steps or updates) / seconds, 1) if seconds else 0.0,
        date=about["created"] if not about.get("history") else about["history"][0]["started"],
        versions=about["versions"],
        hardware={key: value for key, value in about["hardware"].items() if key != "system"},
        git_commit=about["git_commit"],
        run=run.path.name,
        updates=updates,
        data_hash=data.get("hash") if isinstance(data, dict) else None,
        untrained=_evaluate(_untrained(config), episodes),
        final=_evaluate(_load(run.path, config), episodes),
        best=_evaluate(_load(best, config), episodes) if best.is_dir() else None,
        evaluations=[(entry["step"], round(entry["mean"], 3), round(entry["std"], 3)) for entry in curve],
        training_returns=[(entry["step"], _latest_return(training, entry["step"])) for entry in curve],
    )


def write_result(run: RunDirectory, result: RunResult) -> None:
    """Write the run's `benchmark.json` atomically."""
    write_text(run.path / RESULT, dump(to_plain(result)))


def read_result(run: RunDirectory) -> RunResult | None:
    """The run's result, or None if it is not done or the file was not written by this version."""
    if not os.path.lexists(run.path / RESULT):
        return None
    try:
        found = build(RunResult, read_mapping(run.path / RESULT), RESULT, [])
    except CheckpointError:
        return None
    return None if found is INVALID else found


def _latest_return(training: list[dict[str, Any]], step: int) -> float | None:
    """The last logged mean return of training episodes at a step; None before the first episode ended."""
    found = [entry.get("rollout/return_mean") for entry in training if entry["global_step"] <= step]
    known = [value for value in found if value is not None]
    return round(known[-1], 3) if known else None


def _untrained(config: TrainConfig) -> Agent:
    agent: Agent = getattr(facades, get_spec(config.algo).title)(config)
    return agent


def _load(path: Path, config: TrainConfig) -> Agent:
    """Load an agent of a run in the suite's environment; the environment in the checkpoint is only compared with it."""
    experiment, _ = load_experiment(path, config=config)
    return agent_of(experiment)


def _evaluate(agent: Agent, episodes: int) -> Evaluated:
    try:
        return Evaluated.of(agent.evaluate(episodes), agent.position)
    finally:
        agent.close()


# ---------------------------------------------------------------------------------------------------------------------
# The process
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """The driver's instructions to a worker."""

    config: dict[str, Any]
    final_episodes: int
    run: str | None
    """The run directory to resume, if any."""
    trusted: bool = False
    """Whether the config may name a module to import, a path, or a logger that uses the network."""

    def line(self) -> bytes:
        """The first line of the worker's standard input."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


def stop_with_driver() -> None:
    """Interrupt this process when the driver dies, which closes the pipe from it."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):  # not sys.stdin: the interpreter needs its lock at exit
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Execute an order. On failure, the last line on standard error is the reason."""
    order = Order(**json.loads(sys.stdin.buffer.readline()))
    stop_with_driver()
    try:
        config = resolve([Layer(order.config, "suite", trusted=order.trusted)])
        done = measure(config, order.final_episodes, None if order.run is None else Path(order.run))
    except Exception as error:
        traceback.print_exc()
        reason = str(error).partition("\n\nTraceback")[0]
        print(f"{type(error).__name__}: {' '.join(reason.split())}", file=sys.stderr)
        return 1
    return INTERRUPTED if done is None else 0


if __name__ == "__main__":
    sys.exit(main())
