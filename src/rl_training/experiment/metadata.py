"""Everything besides the config that a result depends on: versions, commit, hardware."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_training.accelerate import find_compiler
from rl_training.experiment.files import read_text
from rl_training.version import __version__

PACKAGES = ("torch", "gymnasium", "numpy", "safetensors", "ale-py", "mujoco", "Box2D")


def package_versions() -> dict[str, str]:
    """Versions of the packages that affect results; packages that are not installed are left out."""
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
    """The current time in UTC."""
    return datetime.datetime.now(datetime.UTC)


def command_line() -> str:
    """The command line that started this process."""
    return shlex.join(sys.argv)


def git_commit() -> str | None:
    """The commit of the working directory's repository, with `-dirty` if it has changes.

    Outside of a repository, the commit of the clone that this package runs from; None if there is none.
    """
    here = Path(__file__)
    return _git_commit(os.getcwd()) or _git_commit(str(here.parent), here.name)


@functools.cache  # imported code does not change during a run, and every checkpoint asks for it
def _git_commit(directory: str, tracked: str | None = None) -> str | None:
    """The commit of the repository that contains a directory; None if git cannot tell.

    Git runs programs that a repository's configuration names (`core.fsmonitor`, `filter.*.clean`, those of submodules),
    and the repository may be untrusted. So the commit is read here, and git compares the files using a temporary
    repository with this commit and the original objects and index, but no configuration. Files changed by a filter (Git
    LFS, line endings) count as changed if their time or size differs from the index.
    """
    try:
        found = _find_repository(Path(directory))
        if found is None:
            return None
        root, repository = found
        common = _linked(repository / "commondir", repository)
        commit = _head(repository, common)
        with tempfile.TemporaryDirectory() as own:
            (Path(own) / "HEAD").write_text(commit + "\n", encoding="ascii")
            (Path(own) / "refs").mkdir()
            places = {"GIT_DIR": own, "GIT_WORK_TREE": root, "GIT_OBJECT_DIRECTORY": common / "objects"}
            no_config = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_OPTIONAL_LOCKS": "0"}
            mine = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
            index = {"GIT_INDEX_FILE": repository / "index"}
            environment = {**mine, **no_config, **{name: str(place) for name, place in {**places, **index}.items()}}

            def git(*args: str) -> str:
                command = ["git", "-C", directory, *args]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=10)
                return done.stdout.strip()

            if tracked is not None:  # the installation may lie inside an unrelated repository
                git("ls-files", "--error-unmatch", tracked)
            changed = git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
        return commit + ("-dirty" if changed else "")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _find_repository(directory: Path) -> tuple[Path, Path] | None:
    """The root of the working tree that contains a directory, and the path of its repository."""
    stop = {
        os.path.realpath(place) for place in os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep) if place
    }
    for root in (directory, *directory.parents):
        if os.path.realpath(root) in stop and root != directory:
            return None
        if (root / ".git").is_dir():
            return root, root / ".git"
        if (root / ".git").is_file():  # a linked working tree or a submodule
            return root, _linked(root / ".git", root, "gitdir: ")
    return None


def _linked(file: Path, base: Path, prefix: str = "") -> Path:
    """The directory named in a git file; `base` if there is no such file."""
    return base / read_text(file).strip().removeprefix(prefix) if file.exists() else base


def _head(repository: Path, common: Path) -> str:
    """The commit that is checked out."""
    head = read_text(repository / "HEAD").strip()
    name = head.removeprefix("ref: ")
    if name != head:
        if not re.fullmatch(r"refs(/[^/.][^/]*)+", name):
            raise ValueError(f"not a branch: {name}")
        loose = common / name
        if loose.exists():
            head = read_text(loose).strip()
        else:
            packed = read_text(common / "packed-refs").splitlines()
            head = next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
    if not re.fullmatch("[0-9a-f]{40}", head):
        raise ValueError(f"not a commit: {head}")
    return head


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
