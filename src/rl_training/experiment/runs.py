"""Run directories: all files of one run."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import CheckpointError, ConfigError
from rl_training.experiment.checkpointing import checkpoints_of, put_damaged_aside, recover_checkpoints, steps_of
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.files import (
    Outage,
    UnwritableError,
    append_line,
    is_alive,
    leftovers,
    read_json,
    read_mapping,
    refuse_links,
    safe_name,
    write_json,
    write_text,
)
from rl_training.experiment.lock import LOCK
from rl_training.experiment.logging import rewind_metrics
from rl_training.experiment.metadata import collect_metadata, command_line, utc_now
from rl_training.experiment.plugins import require_plugins
from rl_training.runtime.callbacks import Callback, RunView

CONFIG, METADATA, COMMAND = "config.yaml", "metadata.json", "command.txt"
EVALUATIONS, METRICS = "evaluations.json", "metrics.jsonl"


def make_run_dir(cfg: TrainConfig) -> Path:
    """Create `<output_dir>/<algo>__<env>__seed<k>__<utc stamp>/`; never shared by two runs.

    Without an environment, the name of the dataset takes its place.
    """
    stamp = utc_now().strftime("%Y%m%d-%H%M%S")
    place = cfg.env_id or Path(str(cfg.dataset)).stem
    name = f"{safe_name(cfg.algo)}__{safe_name(place)}__seed{cfg.seed}__{stamp}"
    try:
        cfg.output_dir.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            path = cfg.output_dir / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise ConfigError(f"output_dir: '{cfg.output_dir}' is not writable: {error}") from error
    raise ConfigError(f"output_dir: '{cfg.output_dir}' has too many runs named {name}")


@dataclass
class RunDirectory:
    """The directory of one run."""

    path: Path

    def join(self, env_steps: int) -> None:
        """Create the directory; refuse one that holds a run with more steps than this, as it belongs to another run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_links(self._places(), within=self.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"run_dir: '{self.path}' is not writable: {error}") from error
        newest = max(steps_of(self.path), default=0)
        if newest > env_steps:
            raise ConfigError(
                f"run_dir: '{self.path}' holds a run of {newest} steps, and this agent has {env_steps}. Continue that "
                "run with resume(run_dir), or pass a new directory."
            )

    def _places(self) -> Iterator[Path]:
        """All paths that are read or written in a run directory."""
        for name in (CONFIG, METADATA, COMMAND, EVALUATIONS, METRICS, LOCK, "checkpoints", "tensorboard", "videos"):
            yield self.path / name
        yield from (self.path / "checkpoints").glob("*")

    def require(self) -> None:
        """Refuse a directory that is not a run, has parts elsewhere, or needs plug-ins that are not installed."""
        if not os.path.isfile(self.path / CONFIG):
            raise CheckpointError(f"{self.path} is not a run directory: it has no {CONFIG}")
        metadata: dict[str, Any] = {}
        with contextlib.suppress(CheckpointError):  # missing or damaged: reported where it is needed
            metadata = self.metadata()
        require_plugins(metadata, str(self.path))
        refuse_links(self._places(), within=self.path)

    def recover(self) -> None:
        """Clean up after a process that was killed while writing here; the caller must hold the lock."""
        recover_checkpoints(self.path / "checkpoints")
        for left in leftovers(self.path).values():
            for path in left:
                if path.is_file():
                    path.unlink()

    def rewind(self, env_steps: int, *, again: bool = False) -> None:
        """Drop what a run wrote after the checkpoint it is resumed from; it will be written again.

        With `again`, also drop the entries at that step: its evaluation was interrupted and is repeated.
        """
        last = env_steps - 1 if again else env_steps
        rewind_metrics(self.path / METRICS, last)
        evaluations = self.evaluations()
        kept = [entry for entry in evaluations if entry["step"] <= last]
        if len(kept) < len(evaluations):
            write_json(self.path / EVALUATIONS, kept)
        for path in put_damaged_aside(self.path, env_steps):
            warnings.warn(f"a damaged checkpoint was renamed to {path}", stacklevel=2)

    def begin(
        self,
        config: TrainConfig,
        device: str,
        from_step: int = 0,
        *,
        settings: Mapping[str, Any] | None = None,
        learner_only: bool = False,
        **facts: Any,
    ) -> None:
        """Write config and metadata at the first start or a resume.

        `settings` are those that a resume may change; the history records them for every start.
        """
        append_line(self.path / COMMAND, command_line())
        before = self.metadata() if (self.path / METADATA).exists() else {}
        data = collect_metadata(device)
        earlier = before.get("history", [])
        if not isinstance(earlier, list):
            raise CheckpointError(f"{self.path / METADATA}: is damaged: 'history' is not a list")
        start = {"started": data["created"], "from_step": from_step, "total_timesteps": config.total_timesteps}
        start |= {"learner_only": True} if learner_only else {}
        history = [*earlier, start if settings is None else {**start, "settings": dict(settings)}]
        fresh = {
            "run_id": uuid.uuid4().hex[:12],
            "env_steps": 0,
            "best_return": None,
        }
        process = {"status": "running", "pid": os.getpid(), "host": socket.gethostname()}
        write_json(
            self.path / METADATA,
            {**fresh, **before, **data, "seed": config.seed, **facts, **process, "history": history},
        )
        write_text(self.path / CONFIG, config.to_yaml())

    def update(self, **changes: Any) -> None:
        """Change metadata entries."""
        write_json(self.path / METADATA, {**self.metadata(), **changes})

    def metadata(self) -> dict[str, Any]:
        """The metadata as stored."""
        return read_mapping(self.path / METADATA)

    def run_id(self) -> str:
        """The id under which external loggers know the run."""
        return safe_name(str(self.metadata().get("run_id")))

    def status(self) -> str:
        """running, finished, stopped or failed; `interrupted` if the process died without writing a status."""
        data = self.metadata()
        status = str(data.get("status", "unknown"))
        if status == "running" and data.get("host") == socket.gethostname() and not _runs(data.get("pid")):
            return "interrupted"
        return status

    def env_steps(self) -> int:
        """Steps so far: at the end of the run, or of its newest checkpoint if it is running or was killed."""
        steps = [int(path.name[5:]) for path in checkpoints_of(self.path)]
        written = self.metadata().get("env_steps", 0)
        if type(written) is not int:
            raise CheckpointError(f"{self.path / METADATA}: is damaged: 'env_steps' is {written!r:.60}")
        return max([written, *steps])

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations so far."""
        path = self.path / EVALUATIONS
        data = read_json(path) if os.path.lexists(path) else []
        if not isinstance(data, list):
            raise CheckpointError(f"{path}: is damaged: not a list")
        for entry in data:
            if not _is_evaluation(entry):
                raise CheckpointError(f"{path}: is damaged: {entry!r:.60} is not an evaluation")
        return data

    def best_return(self) -> float | None:
        """The best mean return of the evaluations during training (or of the final one, if there was no other)."""
        entries = self.evaluations()
        during = [entry for entry in entries if not entry.get("final")]
        return max((float(entry["mean"]) for entry in during or entries), default=None)

    def add_evaluation(self, env_steps: int, result: EvaluationResult, **extra: Any) -> None:
        """Append an evaluation; a final one replaces an earlier final one of the same step."""
        self.add_evaluations([_entry(env_steps, result, **extra)])

    def add_evaluations(self, entries: list[dict[str, Any]]) -> None:
        """Append several entries made by `_entry`."""
        finals = [entry["step"] for entry in entries if entry.get("final")]
        kept = [entry for entry in self.evaluations() if not (entry.get("final") and entry["step"] in finals)]
        write_json(self.path / EVALUATIONS, [*kept, *entries])


@dataclass
class EvaluationLog(Callback):
    """Writes evaluations.json. Entries that could not be written (full disk) are written with the next one."""

    transient: ClassVar[tuple[str, ...]] = ("waiting", "outage")
    run_dir: RunDirectory
    waiting: list[dict[str, Any]] = field(default_factory=list, init=False)
    outage: Outage = field(init=False)

    def __post_init__(self) -> None:
        self.outage = Outage(str(self.run_dir.path / EVALUATIONS))

    def on_evaluation(self, run: RunView, result: EvaluationResult) -> None:
        """See `Callback.on_evaluation`."""
        self.waiting.append(_entry(run.position, result))
        self._write()

    def close(self) -> None:
        """See `Callback.close`."""
        self._write()

    def _write(self) -> None:
        try:
            if self.waiting:
                self.run_dir.add_evaluations(self.waiting)
        except UnwritableError as error:
            self.outage.began(error, "evaluations are kept in memory until there is disk space")
        else:
            self.waiting.clear()
            self.outage.ended()


def _entry(env_steps: int, result: EvaluationResult, **extra: Any) -> dict[str, Any]:
    return {"step": env_steps, **extra, **result.as_dict()}


def find_runs(root: Path) -> list[RunDirectory]:
    """The run directories below a directory, newest first."""
    found = [RunDirectory(path.parent) for path in root.glob(f"*/{METADATA}") if (path.parent / CONFIG).is_file()]
    return sorted(found, key=lambda run: run.path.stat().st_mtime, reverse=True)


def _is_evaluation(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("step")) is int and isinstance(entry.get("mean"), float)


def _runs(pid: Any) -> bool:
    return type(pid) is int and is_alive(pid)
