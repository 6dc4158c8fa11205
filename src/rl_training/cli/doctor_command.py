"""`rl-training doctor`: installed versions, devices and extras."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from rl_training.algorithms.registry import own_algorithms
from rl_training.cli import parsing
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.plugins import REGISTRIES
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.metadata import package_versions
from rl_training.experiment.presets import plugin_presets

EXTRAS = {
    "atari": ("ale_py", "cv2"),
    "box2d": ("Box2D",),
    "classic": ("pygame",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "hub": ("huggingface_hub",),
    "offline": ("minari", "h5py", "pyarrow"),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "mujoco": ("mujoco",),
    "plot": ("matplotlib", "scipy", "plotly", "pyarrow"),
    "ray": ("ray",),
    "robotics": ("gymnasium_robotics",),
    "tune": ("optuna", "plotly"),
    "video": ("moviepy", "pygame"),
    "wandb": ("wandb",),
}


@documented
@dataclass
class DoctorArgs:
    """Show versions, devices, what can be accelerated, which extras are installed, and plug-ins of other packages."""

    run: Annotated[Path | None, tyro.conf.Positional] = setting(
        None, "A run directory: also show which of its functions are accelerated, and why the others are not."
    )


def run(args: list[str]) -> int:
    """See the module."""
    options = parsing.parse(DoctorArgs, args, prog="rl-training doctor", description=str(DoctorArgs.__doc__))
    import torch

    from rl_training.accelerate import describe_machine

    for name, version in package_versions().items():
        print(f"{name:<14} {version}")
    print(f"{'system':<14} {platform.platform()}, {os.cpu_count()} cores")
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    print(f"{'devices':<14} {', '.join(['cpu', *cuda, *mps])}")
    print(f"{'accelerate':<14} {describe_machine()}")
    if options.run is not None:
        _show_acceleration(options.run)
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        state = f"missing; pip install '.[{extra}]'" if missing else "installed"
        print(f"extra {extra:<8} {state}")
    for line in plugin_lines():
        print(line)
    return 0


def _show_acceleration(path: Path) -> None:
    from rl_training.experiment.runs import RunDirectory

    run = RunDirectory(path)
    run.require()
    found = run.metadata().get("accelerate")
    if not isinstance(found, dict) or not isinstance(found.get("functions"), dict):
        raise CheckpointError(f"{path}: its metadata has no entry about acceleration")
    print(f"{'run':<14} {path}: accelerate={found.get('mode')}")
    for name, status in found["functions"].items():
        print(f"  {name:<24} {status}")


def plugin_lines() -> Iterator[str]:
    """What installed plug-ins register, and their errors."""
    own_algorithms()  # register the package's own names first
    for registered in REGISTRIES.values():
        for name, package, problem in registered.check_entry_points():
            yield f"plug-in {registered.kind} {name} ({package}): {problem or 'works'}"
    for source, own, problem in plugin_presets():
        yield f"plug-in presets ({source}): {problem or ', '.join(own)}"
