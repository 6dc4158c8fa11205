"""Torn writes, flipped bits, missing and empty files, full and read-only disks: named, survived, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_training
from rl_training import PPO, TrainConfig, load, resume, train
from rl_training.cli import main
from rl_training.contracts.errors import CheckpointError
from rl_training.experiment import checkpointing, files
from rl_training.experiment.checkpointing import FORMAT_VERSION, checkpoints_of, find_checkpoint, load_checkpoint
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.runs import RunDirectory
from rl_training.testing.resume import flat, same
from tests.resume_harness import ENVIRONMENT

CONTENT = ["state.safetensors", "state.json", "config.json", "metadata.json"]
FILES = ["manifest.json", *CONTENT]
OWN = {"num_steps": 16, "num_epochs": 1, "minibatch_size": 32, "network": {"actor_sizes": [4], "critic_sizes": [4]}}


def make_config(output: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "algo": "ppo",
        "env_id": "CartPole-v1",
        "num_envs": 2,
        "total_timesteps": 96,
        "output_dir": output,
        "eval_every": 0,
        "checkpoint_every": 32,
        "log_every": 32,
        "tensorboard": False,
        "algorithm": OWN,
    }
    return TrainConfig(**{**settings, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints step_32, step_64 and step_96."""
    result = train(make_config(tmp_path_factory.mktemp("runs")), progress=False)
    assert result.run_dir is not None
    assert len(checkpoints_of(result.run_dir)) == 3
    return result.run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def same_state(one: Path, other: Path) -> bool:
    a, b = flat(load_checkpoint(one).state), flat(load_checkpoint(other).state)
    return all(same(a, b, name) for name in a.keys() | b.keys())


def damaged_but_survived(run: Path, name: str) -> None:
    """The newest checkpoint is refused, and the one before it is used, which is said."""
    newest, before = checkpoints_of(run)[-1], checkpoints_of(run)[-2]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(newest)
    assert str(newest / name) in str(caught.value) or name == "manifest.json"
    assert str(newest) in str(caught.value)
    with pytest.warns(UserWarning, match=rf"using {before.name}, because newer checkpoints are damaged.*{newest.name}"):
        assert find_checkpoint(run).path == before


# Damage by accident


@pytest.mark.parametrize("name", FILES)
def test_torn_writes(run: Path, name: str) -> None:
    path = checkpoints_of(run)[-1] / name
    content, rng = path.read_bytes(), random.Random(name)
    for length in [0, 1, len(content) - 2, *(rng.randrange(len(content) - 1) for _ in range(10))]:
        path.write_bytes(content[:length])
        damaged_but_survived(run, name)
        holes = content[:length] + bytes(len(content) - length)  # blocks that never reached the disk
        if holes != content:
            path.write_bytes(holes)
            damaged_but_survived(run, name)


@pytest.mark.parametrize("name", CONTENT)
def test_every_flipped_bit_is_found(run: Path, name: str) -> None:
    path = checkpoints_of(run)[-1] / name
    content, rng = path.read_bytes(), random.Random(name)
    for place in (rng.randrange(8 * len(content)) for _ in range(25)):
        broken = bytearray(content)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        damaged_but_survived(run, name)


def test_flipped_bits_of_a_manifest_do_no_harm(run: Path, trained: Path) -> None:
    """It has no checksum of its own: what it says is then either damaged, or as true as before."""
    path = checkpoints_of(run)[-1] / "manifest.json"
    content, found = path.read_bytes(), 0
    places = range(0, 8 * len(content), 13)
    for place in places:
        broken = bytearray(content)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            checkpoint = find_checkpoint(run)
        assert checkpoint.path.name == ("step_64" if said else "step_96")
        found += bool(said)
        assert said or same_state(checkpoint.path, trained / "checkpoints" / "step_96")
    assert found > 0.8 * len(places)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "everything missing"])
def test_missing_and_empty_files_are_survived_to_the_end(run: Path, trained: Path, name: str, damage: str) -> None:
    newest = checkpoints_of(run)[-1]
    if damage == "missing":
        (newest / name).unlink()
    elif damage == "empty":
        (newest / name).write_bytes(b"")
    else:
        for file in FILES:
            (newest / file).unlink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        resume(run, progress=False)
    messages = [str(warning.message) for warning in said]
    assert any("using step_64, because newer checkpoints are damaged" in text for text in messages)
    assert any(str(run / "checkpoints" / "damaged_step_96") in text for text in messages)
    assert [path.name for path in checkpoints_of(run)] == ["step_32", "step_64", "step_96"]
    assert same_state(checkpoints_of(run)[-1], checkpoints_of(trained)[-1])
    assert [line["global_step"] for line in read_metrics(run / "metrics.jsonl")] == [32, 64, 96]


@pytest.mark.filterwarnings("always")
def test_the_command_line_says_what_it_uses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoints_of(run)[-1] / "state.json").write_bytes(b"")
    assert main(["resume", str(run), "--quiet"]) == 0
    error = capsys.readouterr().err
    assert "warning: using step_64, because newer checkpoints are damaged" in error
    assert str(run / "checkpoints" / "step_96" / "state.json") in error


def test_if_nothing_is_left_it_is_an_error_that_names_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in checkpoints_of(run):
        (path / "state.safetensors").write_bytes(b"")
    assert main(["resume", str(run), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert all(str(run / "checkpoints" / f"step_{step}" / "state.safetensors") in error for step in (32, 64, 96))
    assert "Traceback" not in error
    assert len(checkpoints_of(run)) == 3


# Formats


def set_format(checkpoint: Path, **changes: Any) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def test_a_newer_format_is_refused_with_the_version_needed(run: Path) -> None:
    newest = checkpoints_of(run)[-1]
    set_format(newest, format=FORMAT_VERSION + 1, package="99.1")
    said = rf"rl_training 99\.1 in format {FORMAT_VERSION + 1}.*reads up to format {FORMAT_VERSION}.*pip install -U"
    for action in (load, resume, find_checkpoint):
        with pytest.raises(CheckpointError, match=said):
            action(run)
    assert [path.name for path in checkpoints_of(run)] == ["step_32", "step_64", "step_96"], "it is not damaged"


def test_a_format_that_this_version_never_wrote_is_damage(run: Path) -> None:
    set_format(checkpoints_of(run)[-1], format=FORMAT_VERSION + 2, package=rl_training.__version__)
    damaged_but_survived(run, "manifest.json")


# Saves that fail


def failing(number: int) -> Any:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


PLACES = ["checkpointing.save_file", "checkpointing.sync_file", "checkpointing.sync_directory", "files.os.fsync"]
PLACES += ["files.os.replace", "checkpointing._replace", "checkpointing.Path.mkdir"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("place", PLACES)
def test_a_failing_save_is_said_and_loses_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    agent = load(run)
    before = {path.name: sorted(os.listdir(path)) for path in (run / "checkpoints").iterdir()}
    module, _, name = place.partition(".")
    with monkeypatch.context() as patch:
        patch.setattr(f"rl_training.experiment.{module}.{name}", failing(number))
        for target in (run / "checkpoints" / "step_96", run / "new"):
            with pytest.raises(CheckpointError) as caught:
                agent.save(target)
            assert str(target) in str(caught.value)
            assert os.strerror(number) in str(caught.value)
    agent.close()
    assert {path.name: sorted(os.listdir(path)) for path in (run / "checkpoints").iterdir()} == before
    assert not (run / "new").exists()
    assert load_checkpoint(run / "checkpoints" / "step_96").path.name == "step_96"


def test_a_replacement_that_fails_half_way_puts_the_old_one_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system cannot exchange two directories."""
    agent = load(run)
    target, real, calls = run / "checkpoints" / "step_96", os.rename, []
    monkeypatch.setattr(checkpointing, "swap", lambda one, other: False)

    def second_fails(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*args)

    monkeypatch.setattr("rl_training.experiment.checkpointing.os.rename", second_fails)
    with pytest.raises(CheckpointError, match="step_96: could not be written"):
        agent.save(target)
    agent.close()
    assert len(calls) == 3
    assert sorted(os.listdir(run / "checkpoints")) == ["step_32", "step_64", "step_96"]
    assert load_checkpoint(target)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["swap", "os.rename"])
def test_a_checkpoint_that_cannot_be_put_in_its_place(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    agent = load(run)
    target = run / "checkpoints" / "step_96" if name == "swap" else run / "checkpoints" / "new"
    before = sorted(os.listdir(run / "checkpoints"))
    with monkeypatch.context() as patch:
        patch.setattr(f"rl_training.experiment.checkpointing.{name}", failing(number))
        with pytest.raises(CheckpointError, match=rf"{target.name}: could not be written.*{os.strerror(number)}"):
            agent.save(target)
    agent.close()
    assert sorted(os.listdir(run / "checkpoints")) == before
    assert load_checkpoint(run / "checkpoints" / "step_96")


def test_a_place_below_a_file(run: Path) -> None:
    agent = load(run)
    with pytest.raises(CheckpointError, match=r"config\.yaml/agent: could not be written"):
        agent.save(run / "config.yaml" / "agent")
    agent.close()


def test_training_goes_on_after_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = checkpointing.save_file, []

    def sometimes(*args: Any) -> None:
        calls.append(args)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    monkeypatch.setattr(checkpointing, "save_file", sometimes)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = train(make_config(tmp_path, total_timesteps=160, checkpoint_keep=5), progress=False)
    assert result.run_dir is not None
    assert [path.name for path in checkpoints_of(result.run_dir)] == ["step_32", "step_128", "step_160"]
    messages = [str(warning.message) for warning in said if "training continues" in str(warning.message)]
    assert [name in text for name, text in zip(("step_64", "step_96"), messages, strict=True)] == [True, True]
    assert all("No space left on device" in text for text in messages)
    assert RunDirectory(result.run_dir).status() == "finished"


def test_older_checkpoints_are_removed_only_after_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = checkpointing.save_file, []

    def sometimes(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    monkeypatch.setattr(checkpointing, "save_file", sometimes)
    with pytest.warns(UserWarning, match="training continues"), pytest.raises(CheckpointError, match="step_160"):
        train(make_config(tmp_path, total_timesteps=160, checkpoint_keep=1), progress=False)
    (run,) = tmp_path.iterdir()
    assert [path.name for path in checkpoints_of(run)] == ["step_64"]
    assert load_checkpoint(checkpoints_of(run)[0])
    assert sorted(os.listdir(run / "checkpoints")) == ["step_64"]


def test_a_best_checkpoint_that_fails_does_not_take_the_next_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpointing.save_file

    def not_the_best(tensors: Any, path: Path) -> None:
        if ".best." in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path)

    monkeypatch.setattr(checkpointing, "save_file", not_the_best)
    with pytest.warns(UserWarning, match="best: could not be written"):
        train(make_config(tmp_path, eval_every=32, eval_episodes=1), progress=False)
    (run,) = tmp_path.iterdir()
    assert [path.name for path in checkpoints_of(run)] == ["step_32", "step_64", "step_96"]


def test_a_run_whose_last_save_fails_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(make_config(tmp_path / "runs", checkpoint_every=0).to_yaml())
    monkeypatch.setattr(checkpointing, "save_file", failing(errno.ENOSPC))
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--quiet"]) == 1
    (run,) = (tmp_path / "runs").iterdir()
    error = capsys.readouterr().err
    assert f"{run / 'checkpoints' / 'step_96'}: could not be written" in error
    assert "No space left on device" in error
    assert "Traceback" not in error
    assert RunDirectory(run).status() == "failed"


def test_a_disk_so_full_that_the_failure_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = files.write_text

    def fill(path: Path, text: str) -> None:
        if path.name == "metadata.json" and '"failed"' in text:
            raise CheckpointError(f"{path}: could not be written: No space left on device")
        real(path, text)

    (tmp_path / "config.yaml").write_text(make_config(tmp_path / "runs", checkpoint_every=0).to_yaml())
    monkeypatch.setattr(checkpointing, "save_file", failing(errno.ENOSPC))
    monkeypatch.setattr(files, "write_text", fill)
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert "step_96: could not be written" in error
    assert "could not be written" in error


# Real disks

SCRIPT = """
import json, os, resource, subprocess, sys, warnings
from pathlib import Path
from rl_training import PPO, load, resume
from rl_training.contracts.errors import RLTrainingError
from rl_training.experiment.checkpointing import checkpoints_of

root, kind = Path(sys.argv[1]), sys.argv[2]
os.chdir(root)
OWN = {"num_steps": 16, "num_epochs": 1, "minibatch_size": 32, "network": {"actor_sizes": [256], "critic_sizes": [256]}}
SETTINGS = {"num_envs": 2, "eval_every": 0, "checkpoint_every": 32, "log_every": 32, "tensorboard": False}
facts = {"checkpoints": {}}

def fill():
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        return
    left = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    Path("filler").write_bytes(bytes(max(0, left - 24_000)))

def empty():
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        Path("filler").unlink(missing_ok=True)

def error_of(action):
    try:
        action()
    except RLTrainingError as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return None

def watch(run):
    if run.env_steps == 64:
        fill()
    if run.env_steps == 128:
        empty()
    if run.env_steps == 192:
        fill()

agent = PPO("CartPole-v1", **SETTINGS, **OWN)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    facts["last"] = error_of(lambda: agent.learn(192, run_dir="run", progress=False, callback=watch))
facts["said"] = [str(warning.message) for warning in said]
empty()
facts["checkpoints"] = sorted(os.listdir("run/checkpoints"))
facts["sizes"] = [sum(f.stat().st_size for f in path.iterdir()) for path in checkpoints_of(Path("run"))]
facts["status"] = json.loads(Path("run/metadata.json").read_text())["status"]
facts["loaded"] = load("run").num_timesteps
if kind == "tmpfs":
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    facts["read-only save"] = error_of(lambda: agent.save("elsewhere"))
    facts["read-only replace"] = error_of(lambda: agent.save("run/checkpoints/step_160"))
    facts["read-only resume"] = error_of(lambda: resume("run", total_timesteps=500, progress=False))
    facts["read-only learn"] = error_of(lambda: agent.learn(32, run_dir="run", progress=False))
    facts["read-only new"] = error_of(lambda: agent.learn(32, run_dir="new", progress=False))
    facts["read-only load"] = load("run").num_timesteps
print(json.dumps(facts))
"""


def can_mount() -> bool:
    """Whether this machine lets us have a small disk of our own, which nobody else sees."""
    try:
        done = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def facts_of(directory: Path, kind: str) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT, str(directory), kind]
    if kind == "tmpfs":
        shell = 'mount -t tmpfs -o size=400k tmpfs "$1" && shift && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", shell, "sh", str(directory), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("kind", ["limit", "tmpfs"])
def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    if kind == "tmpfs" and not can_mount():
        pytest.skip("mounting is not allowed here")
    facts = facts_of(tmp_path, kind)
    assert min(facts["sizes"]) > 30_000, "what was written is larger than what was left"
    assert facts["checkpoints"] == ["step_128", "step_160", "step_32"], "three are kept, and none was lost to a failure"
    assert len(facts["said"]) == 3
    assert [f"step_{step}:" in text for step, text in zip((64, 96, 192), facts["said"], strict=True)] == [True] * 3
    assert all("training continues" in text and "could not be written" in text for text in facts["said"])
    assert "CheckpointError: run/checkpoints/step_192: could not be written" in facts["last"]
    assert "recorded" in facts["last"]
    assert facts["loaded"] == 160
    if kind == "tmpfs":
        assert "elsewhere: could not be written" in facts["read-only save"]
        assert "run/checkpoints/step_160: could not be written" in facts["read-only replace"]
        for action in ("resume", "learn", "new"):
            assert "Read-only file system" in facts[f"read-only {action}"], action
            assert "run" in facts[f"read-only {action}"] or "new" in facts[f"read-only {action}"]
        assert facts["read-only load"] == 160


def test_weights_of_a_checkpoint_that_was_replaced_many_times(tmp_path: Path) -> None:
    """Each replacement is whole: what is read is always what was written last."""
    agent = PPO("CartPole-v1", num_envs=2, eval_every=0, **OWN)
    for number in range(1, 4):
        agent.learn(32, progress=False)
        agent.save(tmp_path / "agent")
        assert load_checkpoint(tmp_path / "agent").metadata["env_steps"] == 32 * number
        weights = load_checkpoint(tmp_path / "agent").state["algorithm"]["policy"]
        own = agent.algorithm.state_dict()["policy"]
        assert all(np.array_equal(weights[name].numpy(), own[name].numpy()) for name in own)
    assert os.listdir(tmp_path) == ["agent"]
    agent.close()
