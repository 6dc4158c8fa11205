"""The benchmark driver: starts a worker process per run, monitors the run's files, and collects the results.

All state is in the run directories. Runs are identified by their settings, so an interrupted benchmark continues where
it stopped: finished runs are not repeated, unfinished ones are resumed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_training.contracts.errors import CheckpointError, ConfigError, RLTrainingError
from rl_training.experiment.config import TrainConfig, read_config
from rl_training.experiment.files import refuse_links, safe_name
from rl_training.experiment.lock import lock_owner, run_lock
from rl_training.experiment.logging import last_metrics
from rl_training.experiment.runs import CONFIG, METRICS, RunDirectory, find_runs
from rl_training.zoo.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    RunResult,
    TaskResult,
    config_hash,
    write_manifest,
)
from rl_training.zoo.suites import Suite, Task
from rl_training.zoo.worker import Order, identity, is_trained, read_result, run_config

POLL_SECONDS = 0.25
LOGS = "logs"
State = Literal["waiting", "training", "evaluating", "done", "failed"]


@dataclass
class Job:
    """One requested run and its progress."""

    task: Task
    seed: int
    config: TrainConfig
    identity: tuple[Any, ...]
    state: State = "waiting"
    note: str = ""
    """Why it failed, or what it is waiting for."""
    steps: int = 0
    rate: float = 0.0
    """Environment steps, or gradient steps on recorded data, per second of its process, including all overhead."""
    latest: float | None = None
    """Mean return of its latest evaluation."""
    result: RunResult | None = None
    run: RunDirectory | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The display name."""
        return f"{self.task.name} seed {self.seed}"


class View(Protocol):
    """Displays the progress of a benchmark."""

    def update(self, jobs: Sequence[Job]) -> None:
        """Update the display."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The result of a benchmark call."""

    jobs: list[Job]
    manifest: Manifest
    directory: Path
    signal: int = 0
    """The signal that interrupted it, or 0."""

    @property
    def exit_code(self) -> int:
        """0 if all runs are done, 1 if some failed, 128 + n after signal n."""
        if self.signal:
            return 128 + self.signal
        return 1 if any(job.state == "failed" for job in self.jobs) else 0


class RunIndex:
    """The runs in a directory, looked up by identity. Each config is read once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[str, tuple[Any, ...] | None] = {}

    def runs(self) -> Iterator[tuple[tuple[Any, ...], RunDirectory]]:
        """All runs with their identities; directories that this version cannot read are skipped."""
        for run in find_runs(self.directory):
            name = run.path.name
            if name not in self._known:
                try:
                    self._known[name] = identity(read_config(run.path / CONFIG, trust=True))
                except RLTrainingError:
                    self._known[name] = None
            found = self._known[name]
            if found is not None:
                yield found, run

    def find(self, wanted: tuple[Any, ...]) -> RunDirectory | None:
        """The run with that identity and the most progress; the newest if there are several."""
        found = [run for known, run in self.runs() if known == wanted]
        return max(found, key=_progress, default=None)


def is_minari(source: str) -> bool:
    """Whether a dataset is named by its Minari id, not by a path."""
    return source.startswith("minari:")


def _progress(run: RunDirectory) -> tuple[bool, int]:
    try:
        return read_result(run) is not None, run.env_steps()
    except CheckpointError:
        return False, -1


class Benchmark:
    """Runs the tasks of a suite in worker processes, several at a time."""

    def __init__(
        self,
        suite: Suite,
        output_dir: Path,
        *,
        seeds: int | None = None,
        jobs: int | None = None,
        tasks: Sequence[Task] | None = None,
    ) -> None:
        """`tasks` of the suite, by default all; the manifest keeps what was measured of the others."""
        self.suite = suite
        self.directory = output_dir / suite.name
        self.slots = jobs or available_cores()
        tasks, count = suite.tasks if tasks is None else tasks, seeds or suite.seeds
        tasks = sorted(tasks, key=lambda task: task.config.total_timesteps)  # results come early
        # run every task with one seed before the next seed
        self.jobs = [self._job(task, seed) for seed in range(count) for task in tasks]
        self.index = RunIndex(self.directory)
        self._signals: list[int] = []

    def _job(self, task: Task, seed: int) -> Job:
        config = run_config(task.config, self.suite.evaluation, seed, self.directory)
        return Job(task, seed, config, identity(config))

    def run(self, view: View) -> Outcome:
        """Run all jobs that are not done yet. Returns when all are done or have failed, or after a signal."""
        try:
            (self.directory / LOGS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir: '{self.directory}' is not writable: {error}") from error
        self._require_data()
        owner = lock_owner(self.directory)
        if owner is not None:
            raise ConfigError(f"{self.directory} is used by another benchmark ({owner}); choose another --output-dir")
        with run_lock(self.directory), self._catching_signals():
            for job in self.jobs:
                self._look_for_result(job)
            self._collect()
            try:
                while self._is_busy():
                    self._start_jobs()
                    view.update(self.jobs)
                    time.sleep(POLL_SECONDS)
                    self._watch_jobs()
                view.update(self.jobs)
            finally:
                self._stop_workers(signal.SIGTERM)  # none left, unless an exception was raised
            return Outcome(self.jobs, self._collect(), self.directory, self._signals[0] if self._signals else 0)

    def _require_data(self) -> None:
        """Refuse to start if the recorded data of a job is missing."""
        named = sorted({job.config.dataset for job in self.jobs if job.config.dataset is not None})
        missing = [name for name in named if not (is_minari(name) or Path(name).exists())]
        if missing:
            raise ConfigError(
                [f"dataset: {name} does not exist" for name in missing]
                + ["make the datasets of the suites with `make datasets`, in the directory that has ./datasets"]
            )

    def _is_busy(self) -> bool:
        states = {job.state for job in self.jobs}
        return bool(states & {"training", "evaluating"}) or ("waiting" in states and not self._signals)

    def _look_for_result(self, job: Job) -> None:
        """Check whether the job is done, now or by an earlier call."""
        run = self.index.find(job.identity)
        result = None if run is None else read_result(run)
        if self._is_complete(result):
            job.state, job.result, job.note = "done", result, ""

    def _is_complete(self, result: RunResult | None) -> bool:
        """Whether a result has enough final episodes; if not, the run is only evaluated again."""
        final = None if result is None else result.final
        return final is not None and final.episodes == self.suite.evaluation.final_episodes

    def _start_jobs(self) -> None:
        running = sum(job.process is not None for job in self.jobs)
        for job in self.jobs:
            if running >= self.slots or self._signals:
                return
            if job.state == "waiting":
                run = self.index.find(job.identity)
                owner = None if run is None else lock_owner(run.path)
                if owner is not None:  # a worker of an earlier call that is still saving
                    job.note = f"its run directory is locked by {owner}"
                    continue
                self._start(job, run)
                running += 1

    def _start(self, job: Job, run: RunDirectory | None) -> None:
        command = [sys.executable, "-P", "-m", "rl_training.zoo.worker", self.suite.name, job.task.name, str(job.seed)]
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        refuse_links([self.log_file(job)], within=self.directory)
        with open(self.log_file(job), "ab") as log:
            job.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **one_thread},
                start_new_session=True,  # Ctrl-C goes to the driver, which stops the workers
            )
        begun = None if run is None else str(run.path)
        order = Order(job.config.to_dict(), self.suite.evaluation.final_episodes, begun, self.suite.trusted)
        assert job.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it exited at once; its log says why
            job.process.stdin.write(order.line())
            job.process.stdin.flush()
        job.state, job.note = "training", ""

    def log_file(self, job: Job) -> Path:
        """The log file with the output of a job's worker."""
        return self.directory / LOGS / f"{safe_name(job.task.preset)}-{job.identity[0]}-seed{job.seed}.log"

    def _watch_jobs(self) -> None:
        for job in self.jobs:
            if job.process is None:
                continue
            code = job.process.poll()
            self._read_progress(job)
            if code is not None:
                self._finish(job, code)

    def _read_progress(self, job: Job) -> None:
        """Read steps and returns from the run's files, which may be incomplete."""
        if job.run is None or not job.run.path.is_dir():
            job.run = self.index.find(job.identity)
        run = job.run
        if run is None:
            return
        with contextlib.suppress(CheckpointError):
            latest = last_metrics(run.path / METRICS)
            job.steps = int(latest.get("global_step", job.steps))
            job.rate = latest.get("time/env_steps_per_second") or latest.get("time/updates_per_second") or job.rate
            evaluations = run.evaluations()
            job.latest = evaluations[-1]["mean"] if evaluations else None
            job.state = "evaluating" if is_trained(run) else "training"

    def _finish(self, job: Job, code: int) -> None:
        assert job.process is not None
        assert job.process.stdin is not None
        job.process.stdin.close()
        job.process, job.state = None, "failed"
        self._look_for_result(job)
        if job.result is not None:
            self._collect()
        elif self._signals:
            job.state, job.note = "waiting", "interrupted"
        elif code < 0:
            job.note = f"its process was ended by {signal.Signals(-code).name}"
        else:
            job.note = _last_line(self.log_file(job)) or f"its process ended with code {code}"

    def _stop_workers(self, number: int) -> None:
        for job in self.jobs:
            if job.process is not None:
                job.process.send_signal(number)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """On the first signal, workers save and stop; a second one kills them."""

        def handle(number: int, frame: types.FrameType | None) -> None:
            self._signals.append(number)
            first = len(self._signals) == 1
            name = signal.Signals(number).name
            print(
                f"\n{name}: " + ("runs are saving; press again to stop immediately" if first else "ending"),
                file=sys.stderr,
            )
            self._stop_workers(signal.SIGTERM if first else signal.SIGKILL)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _collect(self) -> Manifest:
        """Write the manifest of all results in the directory, including seeds and tasks of earlier calls."""
        found: dict[str, dict[int, RunResult]] = {task.name: {} for task in self.suite.tasks}
        kinds = {self._kind(task): task.name for task in self.suite.tasks}
        for (digest, seed, *evaluation), run in self.index.runs():
            name, result = kinds.get((digest, *evaluation)), read_result(run)
            if name is not None and result is not None and self._is_complete(result):
                found[name].setdefault(seed, result)
        tasks = [self._task_result(task, found[task.name]) for task in self.suite.tasks if found[task.name]]
        manifest = Manifest(FORMAT_VERSION, self.suite.name, tasks)
        write_manifest(self.directory / MANIFEST, manifest)
        return manifest

    def _kind(self, task: Task) -> tuple[Any, ...]:
        digest, _, *evaluation = self._job(task, 0).identity
        return (digest, *evaluation)

    def _task_result(self, task: Task, runs: dict[int, RunResult]) -> TaskResult:
        config = task.config
        return TaskResult(
            preset=task.preset,
            settings=dict(task.settings),
            algo=config.algo,
            env_id=config.env_id,
            env_kwargs=config.env_kwargs,
            wrappers=config.to_dict()["wrappers"],
            total_timesteps=config.total_timesteps,
            total_updates=config.total_updates,
            dataset=None if config.dataset is None else Path(config.dataset).name,
            config_hash=config_hash(config),
            judge=task.judge,
            deterministic=config.eval_deterministic,
            epsilon=config.eval_epsilon,
            final_episodes=self.suite.evaluation.final_episodes,
            points=self.suite.evaluation.points,
            episodes=self.suite.evaluation.episodes,
            normalization=task.normalization,
            runs=[runs[seed] for seed in sorted(runs)],
        )


def available_cores() -> int:
    """The number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
