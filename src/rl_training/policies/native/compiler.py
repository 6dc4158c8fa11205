"""The C compiler of this machine, what it makes, and libraries that others have loaded."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-w")
SECONDS = 120
"""What a compiler may take."""
PREFIX = "rl_training_"
SHELL = """
exec 3<&0
"$@" </dev/null 3<&- & compiler=$!
{ read -r nothing <&3; kill -KILL 0; } & guard=$!
wait $compiler; code=$?
kill $guard
exit $code
"""
"""Runs a compiler, and ends the whole session when the other end of standard input is gone: so however this process
ends, no compiler, nor what that has started, stays behind."""


class NotCompiledError(Exception):
    """Why something was not compiled, or is not used."""


@functools.cache
def find_compiler() -> str | None:
    """The C compiler of this machine; None if there is none."""
    candidates = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


@functools.cache
def _threads() -> list[str]:
    """What is linked for threads: the library that torch brings along, or there would be twice as many threads."""
    torch = importlib.util.find_spec("torch")
    folder = Path(torch.origin).parent / "lib" if torch is not None and torch.origin else FOLDER
    return [str(path) for path in sorted(folder.glob("libgomp*.so*"))[:1]] or ["-fopenmp"]


def build(name: str, source: str, flags: tuple[str, ...] = ()) -> Any:
    """A library of C (`ctypes.CDLL`), which is not kept on disk. `source` is the package's own, from no other file."""
    compiler = find_compiler()
    if compiler is None:
        raise NotCompiledError("there is no C compiler")
    try:
        _tidy()
        with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}_") as folder:
            written, compiled, target = (Path(folder) / f"recording.{end}" for end in ("c", "o", "so"))
            written.write_text(source)
            for command in (
                [*FLAGS, *flags, f"-I{FOLDER}", "-c", str(written), "-o", str(compiled)],
                ["-shared", str(compiled), *(_threads() if "-fopenmp" in flags else []), "-lm", "-o", str(target)],
            ):
                _run([compiler, *command], folder)
            return ctypes.CDLL(str(target))
    except (OSError, NotCompiledError) as error:
        raise NotCompiledError(f"{name}: {error}") from error


def loaded(path: Path) -> Any:
    """A library (`ctypes.CDLL`) that this process has loaded already; None if it has not. Nothing is loaded here."""
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (AttributeError, OSError):  # there are systems on which one cannot ask
        return None


@functools.cache  # once in a process
def _tidy() -> None:
    """Remove the folders of processes that were killed while they compiled."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*_*"):
        pid = folder.name.removeprefix(PREFIX).partition("_")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # nothing of other users, and no links


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True


def _run(command: list[str], folder: str) -> None:
    """Wait for a command; not longer than it may take, and not longer than the program that wants it.

    What it needs on the way is written to the folder.
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
