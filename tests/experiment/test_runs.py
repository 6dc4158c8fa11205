"""Run directories: safe names that never collide, and a status that tells the truth."""

from __future__ import annotations

import datetime
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl_training import TrainConfig
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import CheckpointError, ConfigError
from rl_training.experiment import metadata, runs
from rl_training.experiment.runs import RunDirectory, find_runs
from rl_training.runs import make_run_dir


def a_config(tmp_path: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{"algo": "ppo", "env_id": "CartPole-v1", "seed": 7, "output_dir": tmp_path, **changes})


def begun(tmp_path: Path, **changes: Any) -> RunDirectory:
    run = RunDirectory(make_run_dir(a_config(tmp_path)))
    run.begin(a_config(tmp_path), "cpu", environment={"source": "id"}, resume_grade="exact")
    run.update(**changes)
    return run


@pytest.fixture
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.datetime(2030, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    monkeypatch.setattr(runs, "utc_now", lambda: now)


# Names


def test_the_name_says_what_the_run_is(tmp_path: Path, frozen_clock: None) -> None:
    path = make_run_dir(a_config(tmp_path))
    assert path.name.startswith("ppo__CartPole-v1__seed7__")
    assert path.name == "ppo__CartPole-v1__seed7__20300102-030405"
    assert path.is_dir()
    assert path.parent == tmp_path


def test_two_runs_of_the_same_second_do_not_collide(tmp_path: Path, frozen_clock: None) -> None:
    made = [make_run_dir(a_config(tmp_path)) for _ in range(5)]
    assert len(set(made)) == 5
    assert all(path.is_dir() for path in made)
    assert all(path.name.startswith("ppo__CartPole-v1__seed7__20300102-030405") for path in made)


def test_runs_that_start_at_the_same_moment_do_not_collide(tmp_path: Path, frozen_clock: None) -> None:
    config = a_config(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_run_dir(config), range(64)))
    assert len(set(made)) == 64
    assert {path.name for path in made} == {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("env_id", "part"),
    [
        ("ALE/Pong-v5", "ALE-Pong-v5"),
        ("my_package:MyEnv-v0", "my_package-MyEnv-v0"),
        ("../../etc/passwd", "etc-passwd"),
        ("a b\tc\nd", "a-b-c-d"),
        ('<>:"/\\|?*', "unnamed"),
        ("ünïcode-v0", "n-code-v0"),
        ("dots..", "dots"),
        ("x" * 500, "x" * 80),
    ],
)
def test_names_are_safe_on_every_filesystem(tmp_path: Path, env_id: str, part: str) -> None:
    path = make_run_dir(a_config(tmp_path, env_id=env_id))
    assert path.parent == tmp_path
    assert path.name.split("__")[1] == part
    assert re.fullmatch(r"[A-Za-z0-9._-]+", path.name)
    assert len(path.name) < 200
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_output_directory_is_made(tmp_path: Path) -> None:
    assert make_run_dir(a_config(tmp_path / "a" / "b c")).parent == tmp_path / "a" / "b c"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_cannot_be_written_is_a_config_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"output_dir: .* is not writable") as caught:
        make_run_dir(a_config(tmp_path / place))
    assert str(tmp_path / place) in str(caught.value)
    assert (tmp_path / "file").read_text() == "in the way"


def test_permission_denied_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", deny)
    with pytest.raises(ConfigError, match=r"is not writable: .*Permission denied"):
        make_run_dir(a_config(tmp_path / "new"))


# What is written at the start


def test_what_is_known_at_the_start_is_written(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert sorted(os.listdir(run.path)) == ["command.txt", "config.yaml", "metadata.json"]
    data = run.metadata()
    assert data["seed"] == 7
    assert data["status"] == "running"
    assert {"python", "torch", "gymnasium", "numpy", "rl_training"} <= set(data["versions"])
    assert {"cpu", "cores", "device", "machine", "system"} <= set(data["hardware"])
    assert "git_commit" in data
    assert data["resume_grade"] in ("exact", "episode-boundary", "learner-only")
    assert data["history"][0]["total_timesteps"] == 100_000
    assert (run.path / "command.txt").read_text().strip()


def test_the_git_commit_is_of_the_place_or_of_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*args: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        done = subprocess.run(["git", *identity, *args], cwd=repository, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    (repository / "a.txt").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (repository / "a.txt").write_text("2")
    monkeypatch.chdir(repository)
    assert begun(tmp_path / "out").metadata()["git_commit"] == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    installed = repository / "environment" / "metadata.py"  # inside a repository, but not a part of it
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr(metadata, "__file__", str(installed))
    assert begun(tmp_path / "out").metadata()["git_commit"] is None
    git("add", ".")
    git("commit", "--quiet", "-m", "second")
    metadata._git_commit.cache_clear()
    assert begun(tmp_path / "out").metadata()["git_commit"] == git("rev-parse", "HEAD")


def test_a_second_start_keeps_the_history_and_the_identity(tmp_path: Path) -> None:
    run = begun(tmp_path, best_return=3.0)
    first = run.metadata()
    run.begin(a_config(tmp_path, total_timesteps=200), "cpu", 50, environment={"source": "id"})
    second = run.metadata()
    assert [entry["total_timesteps"] for entry in second["history"]] == [100_000, 200]
    assert [entry["from_step"] for entry in second["history"]] == [0, 50]
    assert second["run_id"] == first["run_id"]
    assert second["best_return"] == 3.0
    assert len((run.path / "command.txt").read_text().splitlines()) == 2
    assert begun(tmp_path).metadata()["run_id"] != first["run_id"]


# Status


def a_dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_status_that_was_written_is_told(tmp_path: Path, status: str) -> None:
    assert begun(tmp_path, status=status).status() == status


def test_running_means_that_the_process_is_there(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert run.status() == "running"
    run.update(pid=a_dead_process())
    assert run.status() == "interrupted"
    run.update(host=f"not-{socket.gethostname()}")
    assert run.status() == "running", "another machine's processes cannot be seen from here"


def test_damaged_metadata_is_named(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run.path / "metadata.json").write_text('{"status": "runn')
    with pytest.raises(CheckpointError, match=r"metadata\.json: is damaged"):
        run.status()
    (run.path / "metadata.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"metadata\.json: is damaged"):
        run.status()


# Evaluations


def test_evaluations_after_a_resume_replace_those_of_the_lost_steps(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for step, mean in ((10, 1.0), (20, 5.0), (30, 2.0)):
        run.add_evaluation(step, EvaluationResult([mean, mean], [3, 4], [True, False]))
    run.rewind(10)  # the checkpoint that the run goes on from
    run.rewind(15)
    run.add_evaluation(20, EvaluationResult([4.0], [3]))
    entries = run.evaluations()
    assert [(entry["step"], entry["mean"]) for entry in entries] == [(10, 1.0), (20, 4.0)]
    assert entries[0] == {
        "step": 10, "mean": 1.0, "std": 0.0, "returns": [1.0, 1.0], "lengths": [3, 4], "success_rate": 0.5,
    }  # fmt: skip
    assert run.best_return() == 4.0


def test_the_best_return_of_a_run_that_never_ended_is_known(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert run.best_return() is None
    run.add_evaluation(10, EvaluationResult([3.0], [1]))
    run.add_evaluation(20, EvaluationResult([1.0], [1]))
    run.add_evaluation(20, EvaluationResult([9.0], [1]), final=True)
    assert run.best_return() == 3.0
    other = begun(tmp_path)
    other.add_evaluation(20, EvaluationResult([9.0], [1]), final=True)
    assert other.best_return() == 9.0


# Finding


def test_runs_are_found_newest_first_and_nothing_else_is(tmp_path: Path) -> None:
    made = [begun(tmp_path) for _ in range(3)]
    for age, run in enumerate(made):
        os.utime(run.path, (1000 - age, 1000 - age))
    (tmp_path / "notes").mkdir()
    (tmp_path / "saved-agent").mkdir()
    (tmp_path / "saved-agent" / "metadata.json").write_text("{}")
    assert [run.path for run in find_runs(tmp_path)] == [run.path for run in made]
    assert find_runs(tmp_path / "notes") == []


def test_an_agent_does_not_join_a_run_that_is_further_than_itself(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run.path / "checkpoints" / "step_100").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run of 100 steps, and this agent has 99"):
        run.join(99)
    run.join(100)
    fresh = RunDirectory(tmp_path / "new" / "run")
    fresh.join(0)
    assert fresh.path.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir: .* is not writable"):
        RunDirectory(tmp_path / "file" / "run").join(0)
