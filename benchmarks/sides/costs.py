"""How saving, loading and memory are measured on every side."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPEATS = 5
TRANSITIONS = 100_000


def measure_checkpoints(saves: Sequence[Callable[[], Any]], load: Callable[[], Any], directory: Path) -> dict[str, Any]:
    """Seconds of each save and of as many loads, and the size of the last saved directory."""
    found = {"save_seconds": [timed(save) for save in saves], "load_seconds": [timed(load) for _ in saves]}
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {**found, "megabytes": sum(file.stat().st_size for file in files) / 1e6}


def timed(action: Callable[[], Any]) -> float:
    """Seconds that an action takes; its result is freed after timing."""
    began = time.perf_counter()
    made = action()
    seconds = time.perf_counter() - began
    del made
    return seconds


def report(measurements: dict[str, Callable[[], dict[str, Any]]], packages: tuple[str, ...]) -> None:
    """Run the measurement that the command line names, and print it as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=measurements)
    parser.add_argument("--spawned", type=float, default=None, help="not used here")
    args = parser.parse_args()
    print(json.dumps({**measurements[args.what](), "versions": {name: version(name) for name in packages}}))
