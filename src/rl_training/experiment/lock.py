"""A lock that keeps two processes from training the same run.

The operating system holds it and releases it when the process ends, however it ends, so there are no stale locks. The
process id in the file is only used in messages.

It is a record lock (`lockf`), not a `flock` as in the filelock package: forked processes inherit a `flock`, so an
environment worker that outlives a killed run would keep the run locked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_training.contracts.errors import CheckpointError
from rl_training.experiment.files import refuse_links

LOCK = ".lock"
_held: set[Path] = set()
"""Paths locked by this process: record locks do not exclude a second lock by the same process."""


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Lock a run directory for this process; refused if another process holds it."""
    import fcntl  # POSIX only, like the signal handling of a run

    path = _place(run_dir)
    if path in _held:  # before opening: closing any handle of the file would release the lock
        raise CheckpointError(
            f"{run_dir} is already being trained by this process; a run can be trained only once at a time"
        )
    try:
        refuse_links([run_dir / LOCK], within=run_dir)
        opened = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    except OSError as error:
        raise CheckpointError(f"{run_dir / LOCK}: could not be written: {error.strerror}") from error
    with opened as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read(200).strip() or "another process"
            raise CheckpointError(
                f"{run_dir} is being trained by {owner}; a run can be trained by one process at a time"
            ) from error
        _held.add(path)
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield
        finally:
            _held.discard(path)
            file.truncate(0)


def _place(run_dir: Path) -> Path:
    """The lock file without links. Not `Path.resolve`, which raises an error for links that lead to themselves."""
    return Path(os.path.realpath(run_dir / LOCK))


def lock_owner(run_dir: Path) -> str | None:
    """The other process that holds a run directory, as written in the lock file; None if there is none."""
    import fcntl

    path = _place(run_dir)
    if path in _held or not path.is_file():  # opening and closing our own would release the lock
        return None
    with open(path, "r+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return file.read(200).strip() or "another process"
    return None
