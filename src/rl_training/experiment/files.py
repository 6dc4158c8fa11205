"""Small file helpers: whole or not at all, and never through a link that leads elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
    write_text(path, json_text(data))


def json_text(data: Any) -> str:
    """What `write_json` writes."""
    return json.dumps(data, indent=2) + "\n"


def read_json(path: Path) -> Any:
    """Plain data from a JSON file; the error names the file."""
    require_file(path)
    try:
        return parse_json(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8
        raise CheckpointError(f"{path}: is damaged: {error}") from error


def parse_json(text: str, path: Path) -> Any:
    """Plain data from the text of a JSON file; the error names the file."""
    try:
        data = json.loads(text)
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
    """Refuse links out of a directory: it may come from a stranger, and what it leads to is not theirs."""
    home = os.path.realpath(within)
    for path in paths:
        if os.path.islink(path) and os.path.commonpath([home, os.path.realpath(path)]) != home:
            raise CheckpointError(f"{path}: is a link to outside of {within}, which is not followed")


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
