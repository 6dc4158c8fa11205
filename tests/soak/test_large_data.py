"""Training on data that is larger than the memory it may take.

`make test-soak` runs it; SOAK_GIGABYTES changes the size of the file, which is written to pytest's directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_training.data.dataset import Dataset, Indices, LazyColumn, write_dataset

pytestmark = pytest.mark.soak

GIGABYTES = float(os.environ.get("SOAK_GIGABYTES", "3"))
WIDTH, LENGTH = 100, 1000
LIMIT = 2 * 2**30
"""Memory that training may take, whatever the size of the file."""
TRAIN = """
import resource, sys
from rl_training.cli import main
code = main(sys.argv[1:])
print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


class Made(LazyColumn):
    """Numbers that differ from row to row and need no memory."""

    def _rows(self, rows: Indices) -> Any:
        return (np.sin(rows[:, None] * 0.37 + np.arange(self.shape[1]))).astype(np.float32)


@pytest.mark.parametrize("options", [[], ["--normalize-obs", "--data.reward-preset", "standardize"]])
def test_a_large_file_trains_within_two_gigabytes(options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("resource")
    num_rows = int(GIGABYTES * 2**30 / (2 * 4 * WIDTH)) // LENGTH * LENGTH  # files hold next observations as well
    ends = np.arange(num_rows) % LENGTH == LENGTH - 1
    data = Dataset(
        observations=Made((num_rows, WIDTH), np.dtype(np.float32)),  # type: ignore[arg-type]
        actions=np.zeros((num_rows, 1), np.float32),
        rewards=np.arange(num_rows, dtype=np.float32) % 7,
        terminated=np.zeros(num_rows, bool),
        truncated=ends,
        final_observations=np.zeros((num_rows // LENGTH, WIDTH), np.float32),
        observation_space=spaces.Box(-1, 1, (WIDTH,)),
        action_space=spaces.Box(-1, 1, (1,)),
    )
    path = write_dataset(data, tmp_path / "large.npz")
    size = path.stat().st_size
    assert size > 0.95 * GIGABYTES * 2**30
    try:
        words = ["train", "td3", "--dataset", str(path), "--total-updates", "2000", "--output-dir", str(tmp_path)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, *words, *options],
            capture_output=True, text=True, env=environment, timeout=3600,
        )  # fmt: skip
    finally:
        path.unlink()
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split("peak ")[1])
    print(f"\nsoak: {size / 2**30:.2f} GiB of data, {peak / 2**30:.2f} GiB of memory")
    assert peak < LIMIT
