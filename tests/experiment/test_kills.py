"""A kill at every single file operation of a save, a resume, and `agent.save` over an older one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kill_harness import SCENARIOS
from tests.resume_harness import ENVIRONMENT

ROOT = Path(__file__).parents[2]


def facts_of(directory: Path, *args: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.kill_harness", directory, *args]
    done = subprocess.run(
        list(map(str, command)), env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("scenario", "keep", "how", "stride"),
    [
        ("save", 1, "exchange", 10),
        ("replace", 1, "renames", 10),
        ("resume", 3, "exchange", 20),
        ("recover", 1, "renames", 20),
        ("offline", 1, "exchange", 40),
        ("online", 3, "exchange", 40),
    ],
)
def test_kills_at_some_file_operations(tmp_path: Path, scenario: str, keep: int, how: str, stride: int) -> None:
    facts = facts_of(tmp_path, scenario, keep, how, stride)
    assert facts["failures"] == []
    assert facts["operations"] > 40


@pytest.mark.soak
@pytest.mark.parametrize("how", ["exchange", "renames"])
@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kills_at_every_file_operation(tmp_path: Path, scenario: str, keep: int, how: str) -> None:
    facts = facts_of(tmp_path, scenario, keep, how, 1)
    assert facts["failures"] == []
    assert facts["operations"] > 40
