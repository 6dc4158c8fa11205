"""Kill runs in processes of their own and resume them; see `rl_training.testing.resume` for those in this process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rl_training.experiment.checkpointing import checkpoints_of
from rl_training.testing.resume import only_run

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def command(*args: Any) -> list[str]:
    """The command line as a new process."""
    return [sys.executable, "-m", "rl_training.cli", *map(str, args)]


def run_through(*args: Any) -> Path:
    """Train or resume to the end; the run directory."""
    done = subprocess.run(command(*args, "--quiet"), env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return _run_dir(done.stdout)


def _run_dir(text: str) -> Path:
    return Path(next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("run directory")))


def kill_at(args: list[Any], output_dir: Path, delay: float, number: int = signal.SIGKILL) -> bool:
    """Start a run, wait for its first checkpoint, then so many seconds more, and send a signal; whether it hit."""
    process = subprocess.Popen(
        command(*args, "--quiet"), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        runs = list(output_dir.iterdir()) if output_dir.exists() else []
        if runs and checkpoints_of(runs[0]):
            break
        time.sleep(0.005)
    time.sleep(delay)
    hit = process.poll() is None
    if hit:
        process.send_signal(number)
    process.communicate(timeout=120)
    return hit


def kill_and_resume(args: list[Any], output_dir: Path, delays: list[float]) -> tuple[Path, int]:
    """A run that is killed again and again, and finally let through; how many of the kills hit."""
    hits = int(kill_at([*args, "--output-dir", output_dir], output_dir, delays[0]))
    run = only_run(output_dir)
    for delay in delays[1:]:
        if _is_finished(run):
            break
        hits += int(kill_at(["resume", run], output_dir, delay))
    if not _is_finished(run):
        run_through("resume", run)
    return run, hits


def _is_finished(run: Path) -> bool:
    return bool(json.loads((run / "metadata.json").read_text())["status"] == "finished")


def random_delays(seed: int, count: int, longest: float) -> list[float]:
    """Moments to kill at, different for each seed."""
    rng = random.Random(seed)
    return [rng.uniform(0.0, longest) for _ in range(count)]
