"""Shared code of the benchmarks: a virtual environment per side, measured processes, and result files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training.experiment.files import read_json, write_json
from rl_training.experiment.metadata import collect_metadata

HERE = Path(__file__).parent
ROOT = HERE.parent
SIDES = HERE / "sides"
RESULTS = HERE / "results"
ENVIRONMENTS = ROOT / ".peers"
FORMAT = 1
"""Version of the result files; increased when older files cannot be read any more."""

SHARED = ["torch==2.13.0", "gymnasium==1.4.0", "numpy==2.4.6", "mujoco==4.0.0", "imageio==2.38.1", "packaging==26.3"]
PEERS = {
    "sb3": ["stable-baselines3==2.9.2", "sb3-contrib==2.9.2", "ale-py==0.12.1", "opencv-python==5.0.0.93", *SHARED],
    "sbx": ["sbx-rl==0.28.0", "jax==0.10.2", *SHARED],
}
"""Packages installed for each peer, besides its own dependencies."""
OFFLINE_PEERS = {"d3rlpy": ["torch==2.13.0", "d3rlpy==2.8.1", "numpy==2.4.6"]}
"""Peers of the benchmarks with recorded data."""
AFTERWARDS = {"d3rlpy": ["gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1"]}
"""Installed in a second step: d3rlpy names an older gymnasium, and all sides are evaluated in the same environments."""
NAMES = {"ours": "rl_training", "sb3": "Stable-Baselines3", "sbx": "SBX", "d3rlpy": "d3rlpy"}
THREAD_VARIABLES = (
    "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "XLA_FLAGS", "NPROC", "PJRT_NPROC",
)  # fmt: skip
"""Not inherited from the calling process: each side sets its own."""


class SideError(RuntimeError):
    """One side failed. The others continue."""


def python_of(side: str, environments: Path) -> Path:
    """The interpreter of a side; a peer's virtual environment is created first if needed."""
    if side == "ours":
        return Path(sys.executable)
    directory = environments.resolve() / side
    python, made = directory / "bin" / "python", directory / ".made"
    if not made.exists():
        print(f"making an environment for {side} in {directory} ...", flush=True)
        venv.create(directory, with_pip=True)
        for packages in filter(None, ({**PEERS, **OFFLINE_PEERS}[side], AFTERWARDS.get(side))):
            done = subprocess.run(
                [python, "-m", "pip", "install", "--quiet", *packages], stderr=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                raise SideError(f"its environment could not be made: {last_line(done.stderr)}")
        made.touch()
    return python


def variables(side: str, threads: int) -> dict[str, str]:
    """The environment variables of a side's process. With 0 threads, the side chooses."""
    found = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    if side != "ours":
        found.pop("PYTHONPATH", None)
    if threads:
        found["OMP_NUM_THREADS"] = str(threads)
    return found


def run_side(
    side: str, command: Sequence[str], environments: Path, *, threads: int = 0, timeout: float = 1800.0
) -> dict[str, Any]:
    """Run `python COMMAND` of a side, and return the JSON in its last printed line.

    Raises:
        SideError: it failed, timed out or printed something else.
    """
    full = [str(python_of(side, environments)), *command]
    try:
        done = subprocess.run(
            full, capture_output=True, text=True, env=variables(side, threads), timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SideError(f"took more than {timeout:g} seconds") from error
    if done.returncode:
        raise SideError(last_line(done.stderr) or f"ended with code {done.returncode}")
    try:
        found = json.loads(last_line(done.stdout))
    except ValueError as error:
        raise SideError(f"printed no result, but: {last_line(done.stdout)[:200]}") from error
    if not isinstance(found, dict):
        raise SideError(f"printed no result, but: {found}")
    return found


def script(name: str, *args: str) -> list[str]:
    """The command that runs a side's script, with the start time of its process."""
    return [str(SIDES / name), *args, "--spawned", repr(time.time())]


def last_line(text: str) -> str:
    """The last non-empty line."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def rounded(value: Any, digits: int = 5) -> Any:
    """Numbers rounded to significant digits, in nested data."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def about() -> dict[str, Any]:
    """Date, versions, commit, hardware and load. The commit is that of the package's source."""
    found = collect_metadata()
    found["hardware"].pop("torch_threads", None)  # of this process, which measures nothing
    return {**found, "git_commit": commit(), "load": round(os.getloadavg()[0], 2)}


def commit() -> str | None:
    """The measured commit, with `-dirty` if the source differs from it (result files may differ)."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "src")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def read_results(path: Path) -> dict[str, Any]:
    """A result file, or an empty one if there is none or its format differs."""
    if path.is_file():
        found: dict[str, Any] = read_json(path)
        if found.get("format") == FORMAT:
            return found
        print(f"{path} has another format, and is written anew", flush=True)
    return {"format": FORMAT}


def merge_results(path: Path, section: str, results: dict[str, Any]) -> None:
    """Merge results into a section of a file; other entries stay unchanged."""
    found = read_results(path)
    found[section] = {**found.get(section, {}), **rounded(results)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
