"""The typed face of the facades: current, well formed, and of use to a type checker."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import rl_training
from rl_training.algorithms.registry import registry
from rl_training.api import stubs
from rl_training.experiment.config import TrainConfig

PACKAGE = Path(rl_training.__file__).parent
STUB = PACKAGE / "api" / "facades.pyi"


def test_the_stub_is_current() -> None:
    assert STUB.read_text(encoding="utf-8") == stubs.render(), "run: python -m rl_training.api.stubs"


def test_every_setting_of_every_algorithm_is_a_keyword() -> None:
    text = stubs.render()
    for spec in registry().values():
        body = text.split(f"class {spec.title}(Agent):")[1].split("\nclass ")[0]
        init, preset = body.split("def from_preset(")
        names = {field.name for cls in (TrainConfig, spec.config) for field in dataclasses.fields(cls)}
        for name in names - {"algo", "env_id"}:
            assert f"\n        {name}: " in init, name
            assert f"\n        {name}: " in preset, name


def test_the_stub_is_as_ruff_would_write_it() -> None:
    pytest.importorskip("ruff")
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, str(STUB)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


SNIPPET = """
from rl_training import A2C, PPO

agent = PPO("CartPole-v1", num_envs=8, seed=1, clip_coef=0.1, network={"shared": True})
agent = PPO.from_preset("CartPole-v1", seed=1)
other = A2C("CartPole-v1", learning_rate=1e-3, output_dir="runs", vectorization="async")
reveal_type(agent)
PPO("CartPole-v1", clip_coff=0.1)
A2C("CartPole-v1", clip_coef=0.1)
PPO("CartPole-v1", seed="one")
PPO("CartPole-v1", vectorization="threads")
PPO.from_preset("CartPole-v1", sed=1)
"""


def test_mypy_accepts_right_keywords_and_rejects_wrong_ones(tmp_path: Path) -> None:
    """Only the stub itself is analysed: following torch's types would take a minute."""
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    flags = ["--follow-imports=skip", "--config-file=", "--no-error-summary", f"--cache-dir={tmp_path / 'cache'}"]
    modules = ["rl_training", "rl_training.api.facades", "snippet"]
    command = [sys.executable, "-m", "mypy", *flags, *(part for name in modules for part in ("-m", name))]
    environment = {"MYPYPATH": f"{PACKAGE.parent}:{tmp_path}", "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    found = [line.removeprefix("snippet.py:") for line in done.stdout.splitlines() if line.startswith("snippet.py:")]
    lines = SNIPPET.splitlines()
    number = {part: next(i for i, line in enumerate(lines, 1) if part in line) for part in ("clip_coff", "sed=1")}
    errors = {int(line.split(":")[0]): line for line in found if " error: " in line}
    first, last = number["clip_coff"], number["sed=1"]
    assert sorted(errors) == list(range(first, last + 1)), done.stdout + done.stderr
    assert 'Unexpected keyword argument "clip_coff"' in errors[first]
    assert 'Unexpected keyword argument "clip_coef" for "A2C"' in errors[first + 1]
    assert 'incompatible type "str"; expected "int"' in errors[first + 2]
    assert "Literal['sync', 'async', 'native']" in errors[first + 3]
    assert 'Unexpected keyword argument "sed"' in errors[last]
    assert any('Revealed type is "rl_training.api.facades.PPO"' in line for line in found)
