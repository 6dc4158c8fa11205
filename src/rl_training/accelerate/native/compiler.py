"""The C compiler of this machine, what it makes, and libraries that others have loaded."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
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
        with tempfile.TemporaryDirectory(prefix="rl_training_") as folder:
            written, compiled, target = (Path(folder) / f"recording.{end}" for end in ("c", "o", "so"))
            written.write_text(source)
            for command in (
                [*FLAGS, *flags, f"-I{FOLDER}", "-c", str(written), "-o", str(compiled)],
                ["-shared", str(compiled), *(_threads() if "-fopenmp" in flags else []), "-lm", "-o", str(target)],
            ):
                _run([compiler, *command])
            return ctypes.CDLL(str(target))
    except (OSError, NotCompiledError) as error:
        raise NotCompiledError(f"{name}: {error}") from error


def loaded(path: Path) -> Any:
    """A library (`ctypes.CDLL`) that this process has loaded already; None if it has not. Nothing is loaded here."""
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (AttributeError, OSError):  # there are systems on which one cannot ask
        return None


def _run(command: list[str]) -> None:
    """Wait for a command; not longer than it may take, and not longer than the program that wants it."""
    until = time.monotonic() + SECONDS
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while True:
            try:
                _, said = process.communicate(timeout=0.05)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > until or not threading.main_thread().is_alive():
                    process.kill()
                    raise NotCompiledError("the compiler was stopped") from None
    if process.returncode:
        raise NotCompiledError(said.decode(errors="replace")[:300] or f"it ended with {process.returncode}")
