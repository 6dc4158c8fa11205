"""The C compiler of this machine, and what it makes."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-w")
SECONDS = 120
"""What a compiler may take."""


class NotCompiledError(Exception):
    """Why something was not compiled, or is not used."""


@functools.cache
def find_compiler() -> str | None:
    """The C compiler of this machine; None if there is none."""
    candidates = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def build(name: str, source: str, flags: tuple[str, ...] = ()) -> Any:
    """A library of C (`ctypes.CDLL`), which is not kept on disk. `source` is the package's own, from no other file."""
    compiler = find_compiler()
    if compiler is None:
        raise NotCompiledError("there is no C compiler")
    with tempfile.TemporaryDirectory(prefix="rl_training_") as folder:
        written, target = Path(folder) / "source.c", Path(folder) / "library.so"
        written.write_text(source)
        command = [compiler, *FLAGS, *flags, f"-I{FOLDER}", str(written), "-o", str(target), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            return ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
            raise NotCompiledError(f"{name}: {said[:300] or error}") from error
