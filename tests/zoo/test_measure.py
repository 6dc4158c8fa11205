"""The queue of measurements: everything is in it, it continues, and it records the commit, also in a worktree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import measure
from scripts.measure import QUEUE, Stage, check_commit

from rl_training.contracts.errors import ConfigError
from rl_training.experiment.presets import presets
from rl_training.zoo.manifest import read_manifest
from rl_training.zoo.suites import learns_from_data

ROOT = Path(__file__).parents[2]
NOT_MEASURED = 5_000_001
"""Presets of more steps than this are published settings that nobody has measured here."""
SUITE = """
description: seconds
evaluation: {points: 2, episodes: 1, final_episodes: 2}
normalization: [{env_id: CartPole-v1, low: 22.1, high: 500, reference: the most that an episode can give}]
tasks:
  - {preset: a2c/cartpole, settings: {total_timesteps: 512}}
  - {preset: ppo/cartpole, settings: {total_timesteps: 256}}
  - {preset: ppo/cartpole, settings: {total_timesteps: 257}}
"""


def test_every_preset_that_can_be_afforded_is_measured_as_shipped() -> None:
    found = {task.preset for stage in QUEUE for task in stage.tasks() if not task.settings}
    learning = {name for name, preset in presets().items() if not learns_from_data(preset)}
    wanted = {name for name in learning if presets()[name].total_timesteps < NOT_MEASURED}
    # of Atari one run each of the two algorithms whose Pong fits into a day
    assert wanted - found == {"qrdqn/pong", "rainbow/pong"}
    assert found <= wanted


def test_classic_and_box2d_have_five_seeds() -> None:
    for suite in ("classic", "box2d"):
        every = [stage for stage in QUEUE if stage.suite == suite and stage == Stage(suite, 5)]
        assert every, f"a stage takes what earlier ones of {suite} leave"


def test_stages_choose_their_tasks() -> None:
    cheap = {task.preset for task in Stage("mujoco", 5, shipped=True, on_policy=True).tasks()}
    assert cheap >= {"ppo/hopper", "a2c/hopper", "trpo/ant"}
    assert not any(name.startswith(("sac/", "td3/", "ddpg/")) for name in cheap)
    short = Stage("mujoco", 3, most_steps=300_000).tasks()
    assert {"ddpg/ant", "td3/hopper", "sac/ant"} <= {task.preset for task in short if not task.settings}
    assert max(task.config.total_timesteps for task in short) == 300_000


def test_code_without_a_commit_is_not_measured() -> None:
    check_commit("0" * 40)
    with pytest.raises(ConfigError, match="no commit was found"):
        check_commit(None)
    with pytest.raises(ConfigError, match=r"tracked files differ.*git worktree add"):
        check_commit("0" * 40 + "-dirty")


def test_a_queue_continues_cheapest_first_and_a_broken_stage_does_not_stop_it(tmp_path: Path, capsys: Any) -> None:
    suite = tmp_path / "tiny.yaml"
    suite.write_text(SUITE, encoding="utf-8")
    stages = [Stage(str(tmp_path / "missing.yaml"), 1), Stage(str(suite), 1, most_steps=256), Stage(str(suite), 1)]
    assert measure.measure(stages, tmp_path) == 1
    out, err = capsys.readouterr()
    assert "stage 2 of 3: " in out
    assert "[1/1] ppo/cartpole total_timesteps=256 seed 0: done" in err, "only that task"
    assert "missing.yaml" in err
    assert err.index("ppo/cartpole total_timesteps=256") < err.index("a2c/cartpole total_timesteps=512")
    manifest = read_manifest(tmp_path / "tiny" / "manifest.json")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("benchmark.json")}
    assert [len(task.runs) for task in manifest.tasks] == [1, 1, 1]
    assert measure.measure([Stage(str(suite), 1)], tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("benchmark.json")} == written


def git(place: Path, *args: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", *identity, *args]
    return subprocess.run(command, cwd=place, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_recorded_in_a_worktree(tmp_path: Path) -> None:
    clone, tree = tmp_path / "clone", tmp_path / "tree"
    clone.mkdir()
    (clone / "file").write_text("one", encoding="utf-8")
    git(clone, "init", "--quiet")
    git(clone, "add", "file")
    git(clone, "commit", "--quiet", "-m", "one")
    git(clone, "worktree", "add", "--quiet", "--detach", str(tree))
    suite = tmp_path / "tiny.yaml"
    suite.write_text(SUITE, encoding="utf-8")
    arguments = [
        "zoo",
        "benchmark",
        str(suite),
        "--output-dir",
        str(tmp_path),
        "--seeds",
        "1",
        "--only",
        "ppo/cartpole total_timesteps=256",
    ]
    command = [sys.executable, "-m", "rl_training.cli", *arguments]
    done = subprocess.run(command, cwd=tree, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ((run,), *_) = [task.runs for task in read_manifest(tmp_path / "tiny" / "manifest.json").tasks]
    assert run.git_commit == git(clone, "rev-parse", "HEAD")
