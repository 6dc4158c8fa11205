"""File helpers: atomic writes, and no following of symbolic links out of a directory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import re
import stat
import sys
import warnings
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import CheckpointError

MAX_DEPTH = 100
"""Maximum nesting depth of JSON; the package itself writes far less."""
MAX_WAITING = 10_000
"""Maximum number of pieces kept in memory while the disk is full."""
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]+)\.(?P<kind>tmp|old)")
_NO_SWAP = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}
"""Error codes of systems that cannot swap two directories."""


class UnwritableError(CheckpointError):
    """A file cannot be written: full disk, no permission."""


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically (temporary file, sync, rename). On failure the old file stays; the error names it."""
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
        raise UnwritableError(f"{path}: could not be written: {error.strerror}") from error


def append_line(path: Path, text: str) -> None:
    """Add a line to a file."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise UnwritableError(f"{path}: could not be written: {error.strerror}") from error


def write_json(path: Path, data: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json_text(data))


def json_text(data: Any) -> str:
    """The text that `write_json` writes."""
    return json.dumps(data, indent=2) + "\n"


def open_file(path: Path) -> io.BufferedReader:
    """Open a file for reading; an `OSError` if it is not a regular file.

    Opening a named pipe would block, and a device may never end. The type is checked after opening, so that the file
    cannot be replaced in between.
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
        return parse_json(read_text(path), path)
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
    """Refuse anything but a regular file, and links to files outside its directory."""
    refuse_links([path], within=path.parent)
    if not os.path.isfile(path):
        problem = "is not a file" if os.path.lexists(path) else "is missing"
        raise CheckpointError(f"{path}: {problem}")


def refuse_links(paths: Iterable[Path], *, within: Path) -> None:
    """Refuse links that lead out of a directory, which may come from an untrusted source.

    Anything that is neither a file nor a directory is refused too: opening a named pipe would block.
    """
    home = os.path.realpath(within)
    for path in paths:
        if os.path.islink(path) and os.path.commonpath([home, os.path.realpath(path)]) != home:
            raise CheckpointError(f"{path}: is a link to a path outside of {within}; such links are not followed")
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise CheckpointError(f"{path}: is neither a file nor a directory")


def sync_file(path: Path) -> None:
    """Wait until a written file is on disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power failure (where the system supports it)."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def swap(one: Path, other: Path) -> bool:
    """Swap two directories atomically; False if the system or the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        failed = library.renameat2(here, first, here, second, exchange)
    elif sys.platform == "darwin" and hasattr(library, "renamex_np"):
        failed = library.renamex_np(first, second, 2)  # RENAME_SWAP
    else:
        return False
    number = ctypes.get_errno()
    if failed and number not in _NO_SWAP:
        raise OSError(number, os.strerror(number), str(other))
    return not failed


def leftovers(directory: Path) -> dict[Path, list[Path]]:
    """Temporary files and directories left by killed processes, by the path they were written for.

    Files and directories are written as `.name.<pid>.tmp` beside their path; on systems that cannot swap directories,
    one that is being replaced is renamed to `.name.<pid>.old`. Those of other running processes are left out.
    """
    found: dict[Path, list[Path]] = {}
    try:
        hidden = [path for path in directory.iterdir() if path.name.startswith(".")]
    except (OSError, ValueError):  # no such directory, or no such name
        return found
    for path in hidden:
        match = _LEFTOVER.fullmatch(path.name)
        pid = 0 if match is None else int(match["pid"])
        if match is not None and (pid == os.getpid() or not is_alive(pid)) and not path.is_symlink():
            found.setdefault(path.with_name(match["name"]), []).append(path)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process with that id runs on this machine."""
    if pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


class Outage:
    """Reports once that something cannot be written while training continues, and once that writing works again."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.active = False

    def began(self, reason: object, consequence: str) -> None:
        """Report a failure, unless it was reported already and nothing was written since."""
        if not self.active:
            warnings.warn(
                f"training continues, but {self.what} could not be written: {reason}; {consequence}", stacklevel=3
            )
        self.active = True

    def ended(self, note: str = "nothing is missing") -> None:
        """Report that writing works again, if it did not."""
        if self.active:
            warnings.warn(f"{self.what} can be written again; {note}", stacklevel=3)
        self.active = False


class Appender:
    """A file that grows by pieces, each written completely or not at all.

    Pieces that cannot be written (full disk) are kept in memory, up to `MAX_WAITING`, and written when there is space.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise UnwritableError(f"{path}: could not be written: {error.strerror}") from error
        self._size = self._file.seek(0, os.SEEK_END)
        self._torn = False
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._outage = Outage(str(path))

    def write(self, piece: bytes) -> None:
        """Append a piece, after those still waiting."""
        self._waiting.append(piece)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._write_waiting()

    def close(self) -> None:
        """Write waiting pieces if possible, then close the file."""
        self._write_waiting()
        missing = self._lost + len(self._waiting)
        if self._waiting:
            warnings.warn(f"{self.path}: the last {missing} entries could not be written", stacklevel=2)
        with contextlib.suppress(OSError):  # some systems report a failed write again
            self._file.close()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._outage.began(error.strerror, "new entries are kept in memory until there is disk space")
        else:
            self._outage.ended(f"{self._lost} entries are missing" if self._lost else "nothing is missing")
            self._lost = 0

    def _append(self, piece: bytes) -> None:
        if self._torn:
            self._file.truncate(self._size)
        self._torn = True
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            self._file.truncate(self._size)  # no reader shall see half an entry
            self._torn = False
            raise
        self._torn = False
        self._size += len(piece)


def safe_name(name: str) -> str:
    """A file name that every filesystem accepts: `ALE/Pong-v5` becomes `ALE-Pong-v5`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "unnamed"


def _is_deep(data: Any) -> bool:
    """Whether a tree has more than `MAX_DEPTH` levels; iterative, since recursion would overflow the stack."""
    level = [data]
    for _ in range(MAX_DEPTH):
        nested = [item for item in level if isinstance(item, (dict, list))]
        if not nested:
            return False
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return True
