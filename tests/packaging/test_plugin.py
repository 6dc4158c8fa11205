"""The example package, installed as a user would, and used by the command line in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_training.testing.resume import differences
from tests import resume_harness
from tests.resume_harness import ENVIRONMENT, command, kill_and_resume, run_through

ROOT = Path(__file__).parents[2]
TRAIN = ["train", "vpg", "CartPole-v1", "--total-timesteps", 3000, "--eval-every", 1000, "--checkpoint-every", 500]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the package is installed from its source, without a network."""
    scratch = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "plugin", scratch / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(scratch / "site"), str(source)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return scratch / "site"


@pytest.fixture
def plugged(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started see the package."""
    path = os.pathsep.join([str(site), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setitem(resume_harness.ENVIRONMENT, "PYTHONPATH", path)


def call(*args: object) -> tuple[int, str]:
    done = subprocess.run(command(*args), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.usefixtures("plugged")
def test_train_kill_resume_eval_and_what_is_said_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_through(*TRAIN, "--output-dir", tmp_path / "whole")
    assert "encoder: fourier" in (whole / "config.yaml").read_text(), "with its preset"
    killed, _ = kill_and_resume(TRAIN, tmp_path / "killed", [0.0])
    assert differences(whole, killed) == []
    code, text = call("eval", killed, "--num-episodes", 2)
    assert code == 0, text

    monkeypatch.setitem(resume_harness.ENVIRONMENT, "PYTHONPATH", str(ROOT / "src"))
    for command_line in (("resume", killed, "--total-timesteps", 5000), ("eval", killed)):
        code, text = call(*command_line)
        assert code == 2, text
        for what in ("the algorithm 'vpg'", "the encoder 'fourier'"):
            assert f"{what} of the package rl-training-example 0.1.0, which is not registered" in text
        assert "pip install 'rl-training-example==0.1.0'" in text


@pytest.mark.usefixtures("plugged")
def test_doctor_and_zoo_know_it() -> None:
    code, text = call("doctor")
    assert code == 0
    for line in ("encoder fourier", "algorithm vpg", "presets"):
        assert f"plug-in {line} (rl-training-example 0.1.0): " in text
    assert "plug-in algorithm vpg (rl-training-example 0.1.0): works" in text
    assert "vpg/cartpole" in call("zoo", "list", "vpg")[1]
    code, text = call("zoo", "show", "vpg")
    assert code == 0
    assert text.startswith("# VPG")
    assert "| `baseline` | bool | `true` |  | Subtract the critic's value from the return. |" in text
    assert "| `vpg/cartpole` | CartPole-v1 | 20,000 | 8 |" in text


@pytest.mark.usefixtures("plugged")
def test_its_own_tests_pass() -> None:
    tests = ROOT / "examples" / "plugin" / "tests"
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tests)]
    run = [sys.executable, "-m", "pytest", *options, str(tests)]
    done = subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
