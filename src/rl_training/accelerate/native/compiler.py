"""The C compiler of this machine, the cache of compiled libraries, and access to loaded libraries."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-w")
SECONDS = 120
"""Time limit for a compiler."""
PREFIX = "rl_training_"
MAX_KEPT = 256
"""Number of libraries in the cache; the oldest are removed."""
SHELL = """
exec 3<&0
nice -n 19 "$@" </dev/null 3<&- & compiler=$!
{ read -r nothing <&3; kill -KILL 0; } & guard=$!
wait $compiler; code=$?
kill $guard
exit $code
"""
"""Runs a compiler, and kills its whole process group when standard input is closed: so however this process ends, no
compiler or child of it keeps running. It has the lowest priority, so that it does not slow down runs."""


class NotCompiledError(Exception):
    """Why something was not compiled, or is not used."""


@functools.cache
def find_compiler() -> str | None:
    """The C compiler of this machine; None if there is none."""
    candidates = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


@functools.cache
def _threads() -> list[str]:
    """The OpenMP library to link: the one shipped with torch, because a second one would double the threads."""
    torch = importlib.util.find_spec("torch")
    folder = Path(torch.origin).parent / "lib" if torch is not None and torch.origin else FOLDER
    return [str(path) for path in sorted(folder.glob("libgomp*.so*"))[:1]] or ["-fopenmp"]


def build(name: str, source: str, flags: tuple[str, ...] = ()) -> Any:
    """Compile C source to a library (`ctypes.CDLL`). `source` must come from this package only.

    The library is kept in the user's cache, so that the next run need not compile it again.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NotCompiledError("there is no C compiler")
    try:
        cache = cache_folder()
        kept = None if cache is None else cache / f"{_key(compiler, source, flags)}.so"
        if kept is not None and (library := _load_kept(kept)) is not None:
            return library
        _tidy()
        with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}_") as folder:
            written, compiled, target = (Path(folder) / f"recording.{end}" for end in ("c", "o", "so"))
            written.write_text(source)
            for command in (
                [*FLAGS, *flags, f"-I{FOLDER}", "-c", str(written), "-o", str(compiled)],
                ["-shared", str(compiled), *(_threads() if "-fopenmp" in flags else []), "-lm", "-o", str(target)],
            ):
                _run([compiler, *command], folder)
            if kept is not None:
                _keep(target, kept)
            return ctypes.CDLL(str(target))
    except (OSError, NotCompiledError) as error:
        raise NotCompiledError(f"{name}: {error}") from error


def cache_folder() -> Path | None:
    """The cache of compiled libraries: a folder that only its owner can write to. None if there is no such folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home) / "rl_training"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(folder) else None
    except OSError:
        return None


def _is_private(path: Path) -> bool:
    """Whether a path is not a symbolic link, and only this user can write to it."""
    about = path.lstat()
    return not stat.S_ISLNK(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022


def _key(compiler: str, source: str, flags: tuple[str, ...]) -> str:
    """The cache key of a library: a hash of its source, the headers, the compiler, and the processor."""
    about = os.stat(compiler)
    headers = [path.read_text() for path in sorted(FOLDER.glob("*.h"))]
    parts = (source, *headers, *FLAGS, *flags, *_threads(), os.path.realpath(compiler), about.st_mtime_ns, _processor())
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


@functools.cache
def _processor() -> str:
    """The processor's name and features, if the system reports them: `-march=native` depends on these."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _load_kept(path: Path) -> Any:
    """A library from the cache; None if there is none, or another user could write to it."""
    try:
        return ctypes.CDLL(str(path)) if _is_private(path) else None
    except OSError:
        return None


def _keep(library: Path, path: Path) -> None:
    """Copy a library into the cache atomically; errors, such as a full disk, are ignored."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        shutil.copyfile(library, beside)
        beside.chmod(0o700)
        os.replace(beside, path)
        for old in sorted(path.parent.glob("*.so"), key=lambda p: p.stat().st_mtime)[:-MAX_KEPT]:
            old.unlink()
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()


def loaded(path: Path) -> Any:
    """A library (`ctypes.CDLL`) that is already loaded in this process; None if it is not. Loads nothing."""
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (AttributeError, OSError):  # not supported on all systems
        return None


@functools.cache  # once per process
def _tidy() -> None:
    """Remove the folders of processes that were killed while they compiled."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*_*"):
        pid = folder.name.removeprefix(PREFIX).partition("_")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # cannot remove other users' folders; follows no links


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True


def _run(command: list[str], folder: str) -> None:
    """Run a command; it is killed after the time limit, and when the main thread ends.

    `folder` holds its temporary files.
    """
    until = time.monotonic() + SECONDS
    said = Path(folder) / "errors"
    with (
        open(said, "wb") as errors,
        subprocess.Popen(
            ["/bin/sh", "-c", SHELL, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        ) as process,
    ):
        while True:
            try:
                process.wait(timeout=0.05)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > until or not threading.main_thread().is_alive():
                    os.killpg(process.pid, signal.SIGKILL)
                    raise NotCompiledError("the compiler was stopped") from None
    if process.returncode:
        text = said.read_text(errors="replace")[:300]
        raise NotCompiledError(text or f"it ended with {process.returncode}")
