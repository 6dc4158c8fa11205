"""A disk that is full for a while: training goes on, and what could not be written then is written later."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from rl_training import PPO, TrainConfig, resume, train
from rl_training.experiment import files
from rl_training.experiment.files import Appender, UnwritableError
from rl_training.experiment.logging import JsonlLogger, read_metrics
from rl_training.experiment.runs import RunDirectory
from rl_training.testing.resume import differences, only_run
from tests.experiment.test_damaged_files import can_mount
from tests.resume_harness import ENVIRONMENT

SCRIPT = """
import json, os, resource, sys, warnings
from pathlib import Path
from rl_training import PPO

root, kind = Path(sys.argv[1]), sys.argv[2]
os.chdir(root)
OWN = {"num_steps": 16, "num_epochs": 1, "minibatch_size": 32, "network": {"actor_sizes": [8], "critic_sizes": [8]}}
SETTINGS = {"num_envs": 2, "eval_every": 32, "eval_episodes": 2, "checkpoint_every": 64, "log_every": 32}
NEVER = resource.RLIM_INFINITY
whole = []

def fill():
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, NEVER))  # within a line of the metrics
    if kind == "tmpfs":
        with open("filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                pass

def empty():
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (NEVER, NEVER))
    Path("filler").unlink(missing_ok=True)

def watch(run):
    text = Path("run/metrics.jsonl").read_text() if Path("run/metrics.jsonl").exists() else ""
    whole.append(text.endswith(chr(10)) or not text)
    if run.env_steps == 64:
        fill()
    if run.env_steps == 192:
        empty()

agent = PPO("CartPole-v1", **SETTINGS, **OWN)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    agent.learn(256, run_dir="run", progress=False, callback=watch)
(root / "facts.json").write_text(json.dumps({"said": [str(w.message) for w in said], "whole": whole}))
if kind == "tmpfs":
    import shutil
    shutil.copytree("run", sys.argv[3])
    shutil.copy("facts.json", sys.argv[3])
"""


def run_with(directory: Path, kind: str, *more: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(directory), kind, *map(str, more)]
    if kind == "tmpfs":
        shell = 'mount -t tmpfs -o size=600k tmpfs "$1" && shift && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", shell, "sh", str(directory), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["limit", "tmpfs"])
def test_nothing_is_missing_after_a_disk_was_full_for_a_while(tmp_path: Path, kind: str) -> None:
    if kind == "tmpfs" and not can_mount():
        pytest.skip("mounting is not allowed here")
    for name in ("never", kind):
        (tmp_path / name).mkdir()
    run_with(tmp_path / "never", "never")
    if kind == "tmpfs":
        run_with(tmp_path / kind, kind, tmp_path / "copy")
        run, facts = tmp_path / "copy", json.loads((tmp_path / "copy" / "facts.json").read_text())
    else:
        run_with(tmp_path / kind, kind)
        run, facts = tmp_path / kind / "run", json.loads((tmp_path / kind / "facts.json").read_text())
    assert differences(run, tmp_path / "never" / "run") == []
    assert all(facts["whole"]), "at no time there is half a line"
    for name in ("metrics.jsonl", "events.out.tfevents", "evaluations.json"):
        failed = [text for text in facts["said"] if name in text and "training continues, but" in text]
        again = [text for text in facts["said"] if name in text and "can be written again; nothing is missing" in text]
        assert len(failed) == len(again) <= 1, (name, facts["said"])
        assert failed or kind == "tmpfs", f"{name} may fit into what is left of its last page"
    assert any("training continues, but" in text for text in facts["said"])
    assert any("training continues without this checkpoint" in text for text in facts["said"])


def full_from(file: Any, room: int) -> Any:
    """A file on a disk with so much room; returns what makes more."""

    class Disk:
        left = room

        def write(self, data: Any) -> int:
            taken = min(len(data), self.left)
            if taken == 0:
                raise OSError(28, "No space left on device")
            file.write(data[:taken])
            self.left -= taken
            return taken

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

    return Disk()


def test_pieces_are_written_whole_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appender = Appender(tmp_path / "file")
    disk = appender._file = full_from(appender._file, 10)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for piece in (b"first\n", b"second\n", b"third\n"):
            appender.write(piece)
            assert (tmp_path / "file").read_bytes() == b"first\n"
        disk.left = 100
        appender.write(b"fourth\n")
    assert (tmp_path / "file").read_bytes() == b"first\nsecond\nthird\nfourth\n"
    assert len(said) == 2, "one when it began and one when it was over"
    assert "No space left on device" in str(said[0].message)
    assert "can be written again; nothing is missing" in str(said[1].message)
    appender.close()


def test_what_is_kept_in_memory_is_bounded_and_what_is_lost_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_WAITING", 3)
    appender = Appender(tmp_path / "file")
    disk = appender._file = full_from(appender._file, 0)
    with pytest.warns(UserWarning, match="could not be written: No space left"):
        appender.write(b"0\n")
    for number in range(1, 5):
        appender.write(f"{number}\n".encode())
    disk.left = 100
    with pytest.warns(UserWarning, match="can be written again; 2 entries are missing"):
        appender.close()
    assert (tmp_path / "file").read_text() == "2\n3\n4\n"


def test_what_cannot_be_written_to_the_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appender = Appender(tmp_path / "file")
    appender._file = full_from(appender._file, 0)
    with pytest.warns(UserWarning, match="could not be written: No space left"):
        appender.write(b"x")
    with pytest.warns(UserWarning, match="the last 1 entries could not be written"):
        appender.close()


def test_half_a_line_from_a_crash_is_not_joined_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1.0, "global_step": 1}\n{"a": 2.0, "glo')
    logger = JsonlLogger(path)
    logger.log(3, {"a": 3.0})
    logger.close()
    assert [(entry["global_step"], entry["a"]) for entry in read_metrics(path)] == [(1, 1.0), (3, 3.0)]
    assert len(path.read_text().splitlines()) == 2


def test_a_run_whose_end_cannot_be_recorded_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(
        algo="ppo", env_id="CartPole-v1", num_envs=2, total_timesteps=64, eval_every=0, output_dir=tmp_path,
        tensorboard=False, algorithm={"num_steps": 16},
    )  # fmt: skip

    def full(*args: Any, **changes: Any) -> None:
        raise UnwritableError("metadata.json: could not be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "update", full)
        with pytest.warns(UserWarning, match="could not be written: metadata.json"):
            result = train(config, progress=False)
    assert result.env_steps == 64
    run = only_run(tmp_path)
    assert RunDirectory(run).status() == "running"
    resume(run, progress=False)
    assert RunDirectory(run).status() == "finished"


def test_a_film_that_cannot_be_written_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_training.api.session.recorder", full)
    monkeypatch.setattr("rl_training.api.session.require_video", lambda: None)
    agent = PPO("CartPole-v1", num_envs=2, eval_every=0, video_every=32, tensorboard=False, num_steps=16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        agent.learn(96, run_dir=tmp_path / "run", progress=False)
    agent.close()
    assert ["a video could not be written: No space left" in str(warning.message) for warning in said] == [True]
