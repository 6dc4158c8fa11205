"""What a result depends on besides its config: versions, commit, hardware."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_training.accelerate import find_compiler
from rl_training.version import __version__

PACKAGES = ("torch", "gymnasium", "numpy", "safetensors", "ale-py", "mujoco", "Box2D")


def package_versions() -> dict[str, str]:
    """Versions of what numbers depend on; packages that are not installed are left out."""
    versions = {"rl_training": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def collect_metadata(device: str = "cpu") -> dict[str, Any]:
    """Versions, commit, hardware, threads, time."""
    import torch

    hardware = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "torch_threads": torch.get_num_threads(),
        "c_compiler": None if (compiler := find_compiler()) is None else Path(compiler).name,
    }
    return {
        "created": utc_now().isoformat(timespec="seconds"),
        "versions": package_versions(),
        "git_commit": git_commit(),
        "hardware": hardware,
    }


def utc_now() -> datetime.datetime:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def command_line() -> str:
    """The command that started this process, as it would be typed."""
    return shlex.join(sys.argv)


def git_commit() -> str | None:
    """The commit of the working directory's repository, with `-dirty` if it has changes.

    Outside of one it is that of the clone that this package is run from; None if there is no such either.
    """
    here = Path(__file__)
    return _git_commit(os.getcwd()) or _git_commit(str(here.parent), here.name)


@functools.cache  # what was imported stays, whatever is edited while a run goes on; and checkpoints ask often
def _git_commit(directory: str, tracked: str | None = None) -> str | None:
    def git(*args: str) -> str:
        command = ["git", "-C", directory, *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if tracked is not None:  # where this package is installed may lie in the repository of something else
            git("ls-files", "--error-unmatch", tracked)
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
