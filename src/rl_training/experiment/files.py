"""Small file helpers: whole or not at all, and never through a link that leads elsewhere."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import CheckpointError

MAX_DEPTH = 100
"""How deeply JSON may be nested; what the package writes is far from it."""


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: written beside, synced, renamed. A failure leaves the old one and names it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise CheckpointError(f"{path}: could not be written: {error.strerror}") from error


def append_line(path: Path, text: str) -> None:
    """Add a line to a file."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise CheckpointError(f"{path}: could not be written: {error.strerror}") from error


def write_json(path: Path, data: Any) -> None:
    """Replace a JSON file in one step."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def open_file(path: Path) -> io.BufferedReader:
    """Open a file to read it; what is no regular file is an `OSError`.

    A named pipe would have us wait for ever for its other end, and a device may have no end. It is looked at after it
    was opened, so that it cannot be exchanged in between.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a regular file."""
    with open_file(path) as file:
        return file.read().decode("utf-8", errors)


def read_json(path: Path) -> Any:
    """Plain data from a JSON file; the error names the file."""
    require_file(path)
    try:
        data = json.loads(read_text(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from error
    if _is_deep(data):
        raise CheckpointError(f"{path}: is damaged: nested more than {MAX_DEPTH} deep")
    return data


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: is damaged: not a mapping")
    return data


def require_file(path: Path) -> None:
    """Refuse what is no file, and what is a link to somewhere outside of its directory."""
    refuse_links([path], within=path.parent)
    if not os.path.isfile(path):
        problem = "is not a file" if os.path.lexists(path) else "is missing"
        raise CheckpointError(f"{path}: {problem}")


def refuse_links(paths: Iterable[Path], *, within: Path) -> None:
    """Refuse links out of a directory: it may come from a stranger, and what it leads to is not theirs.

    What is neither a file nor a directory is refused as well: to open a named pipe is to wait for its other end.
    """
    home = os.path.realpath(within)
    for path in paths:
        if os.path.islink(path) and os.path.commonpath([home, os.path.realpath(path)]) != home:
            raise CheckpointError(f"{path}: is a link to outside of {within}, which is not followed")
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise CheckpointError(f"{path}: is neither a file nor a directory")


def sync_file(path: Path) -> None:
    """Wait until a file that was written is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power cut (where the system allows it)."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def safe_name(name: str) -> str:
    """A file name that every filesystem accepts: `ALE/Pong-v5` becomes `ALE-Pong-v5`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "unnamed"


def _is_deep(data: Any) -> bool:
    """Whether a tree has more than `MAX_DEPTH` levels; level by level, since a deep one would exhaust the stack."""
    level = [data]
    for _ in range(MAX_DEPTH):
        nested = [item for item in level if isinstance(item, (dict, list))]
        if not nested:
            return False
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return True
