"""Files from a stranger: what they may not ask for, and what must not hold up or mislead whoever looks at them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_training import TrainConfig, load, resume, train
from rl_training.api import session
from rl_training.cli import main
from rl_training.contracts.errors import CheckpointError, ConfigError
from rl_training.contracts.text import printable
from rl_training.experiment import metadata
from rl_training.experiment.build import resolve_device
from rl_training.experiment.checkpointing import checkpoints_of
from rl_training.experiment.config import Layer, resolve
from rl_training.experiment.files import open_file, refuse_links
from rl_training.experiment.lock import lock_owner, run_lock
from rl_training.experiment.runs import RunDirectory
from rl_training.experiment.yaml_io import dump_yaml, parse_yaml, read_yaml
from rl_training.zoo import worker

SMALL: dict[str, Any] = {
    "algo": "ppo", "env_id": "CartPole-v1", "num_envs": 1, "total_timesteps": 32, "eval_every": 0, "tensorboard": False,
    "algorithm": {"num_steps": 16, "minibatch_size": 16, "num_epochs": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TrainConfig.from_dict({**SMALL, "output_dir": str(tmp_path_factory.mktemp("runs"))})
    found = train(config, progress=False).run_dir
    assert found is not None
    return found


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run of a stranger, to change as they like."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def rewrite(run: Path, **changes: Any) -> None:
    """Other settings in a run's config and in its checkpoints, whose checksums are right."""
    (run / "config.yaml").write_text(dump_yaml({**read_yaml(run / "config.yaml"), **changes}))
    for checkpoint in checkpoints_of(run):
        rewrite_checkpoint(checkpoint, **changes)


def rewrite_checkpoint(checkpoint: Path, **changes: Any) -> None:
    data = json.dumps({**json.loads((checkpoint / "config.json").read_text()), **changes}).encode()
    (checkpoint / "config.json").write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["config.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


# Loggers on the network


class FakeLogger:
    """In place of one that would connect."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The loggers on the network that were opened."""
    names: list[str] = []

    def open_logger(name: str) -> FakeLogger:
        names.append(name)
        return FakeLogger()

    monkeypatch.setattr(session, "WandbLogger", lambda *_: open_logger("wandb"))
    monkeypatch.setattr(session, "MlflowLogger", lambda *_: open_logger("mlflow"))
    for name in ("require_wandb", "require_mlflow"):
        monkeypatch.setattr(session, name, lambda: None)
    return names


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_config_file_does_not_log_over_the_network(
    tmp_path: Path, name: str, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stranger.yaml"
    file.write_text(dump_yaml({**SMALL, name: True, "output_dir": str(tmp_path / "runs")}))
    command = ["train", "--config", str(file), "--quiet"]
    assert main(command) == 2
    assert f"{name}: files may not enable logging over the network by default" in capsys.readouterr().err
    assert main([*command, f"--no-{name}"]) == 0
    assert opened == []
    for count, allowed in enumerate((f"--{name}", "--trust"), start=1):
        assert main([*command, allowed]) == 0
        assert opened == [name] * count


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_that_is_resumed_does_not_log_over_the_network(
    run: Path, name: str, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(run, **{name: True})
    command = ["resume", str(run), "--quiet", "--total-timesteps"]
    assert main([*command, "48"]) == 2
    assert "files may not enable logging over the network by default" in capsys.readouterr().err
    assert opened == []
    for count, allowed in enumerate((f"--{name}", "--trust"), start=1):
        assert main([*command, str(32 + 16 * count), allowed]) == 0
        assert opened == [name] * count
    assert main([*command, "80", f"--no-{name}"]) == 0
    assert opened == [name, name]


def test_an_environment_that_is_given_trusts_no_logger(run: Path, opened: list[str]) -> None:
    rewrite(run, wandb=True)
    with pytest.raises(ConfigError, match="wandb: files may not enable logging"):
        resume(run, env="CartPole-v1", total_timesteps=64, progress=False)
    assert opened == []
    resume(run, env="CartPole-v1", total_timesteps=64, progress=False, wandb=True)
    assert opened == ["wandb"]


def test_an_agent_that_is_loaded_does_not_log_over_the_network(run: Path, tmp_path: Path, opened: list[str]) -> None:
    rewrite(run, wandb=True)
    for trust in (False, True):
        agent = load(run, trust=trust)
        assert agent.config.wandb == trust
        agent.close()
    agent = load(run, env="CartPole-v1")
    agent.learn(16, run_dir=tmp_path / "more", progress=False)
    agent.close()
    assert opened == []


def test_what_python_says_is_trusted() -> None:
    assert TrainConfig.from_dict({**SMALL, "wandb": True}).wandb
    assert resolve([Layer({**SMALL, "wandb": True}, "file", trusted=False), Layer({"wandb": True}, "keywords")]).wandb


# Git


@pytest.mark.parametrize("linked", [False, True])
def test_no_program_that_a_repository_names_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    home, ran = tmp_path / "repository", tmp_path / "ran"

    def git(*args: str, where: Path = home) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "protocol.file.allow=always"]
        done = subprocess.run(["git", *identity, *args], cwd=where, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def inner(place: Path) -> None:
        place.mkdir()
        git("init", "--quiet", "--initial-branch", "main", where=place)
        (place / "a.txt").write_text("1")
        (place / ".gitattributes").write_text("*.txt filter=planted\n")
        git("add", ".", where=place)
        git("commit", "--quiet", "-m", "first", where=place)

    inner(tmp_path / "part")
    inner(home)
    git("submodule", "add", "--quiet", str(tmp_path / "part"), "part")
    git("commit", "--quiet", "-m", "second")
    place = home
    if linked:
        place = tmp_path / "linked"
        git("worktree", "add", "--quiet", "-b", "other", str(place))
        git("pack-refs", "--all")
    script = tmp_path / "planted.sh"
    script.write_text(f"#!/bin/sh\necho $0 >> {ran}\ncat\n")
    script.chmod(0o755)
    for where in (home, home / "part"):
        for key in ("core.fsmonitor", "filter.planted.clean", "filter.planted.smudge", "core.sshCommand", "core.pager"):
            git("config", key, str(script), where=where)
    os.utime(place / "a.txt", (1, 1))  # so that its content has to be compared
    monkeypatch.chdir(place)
    metadata._git_commit.cache_clear()
    commit = git("-c", "core.fsmonitor=false", "rev-parse", "HEAD", where=place)
    ran.unlink(missing_ok=True)
    assert metadata.git_commit() == commit
    (place / "a.txt").write_text("2")
    metadata._git_commit.cache_clear()
    assert metadata.git_commit() == commit + "-dirty"
    assert not ran.exists()


@pytest.mark.parametrize(
    "head", ["", "ref: refs/heads/../../secret", "ref: /etc/passwd", "ref: refs/heads/none", "0" * 39]
)
def test_a_repository_with_a_wrong_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    (tmp_path / ".git" / "objects").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text(head)
    (tmp_path / ".git" / "packed-refs").write_text("")
    assert metadata._git_commit(str(tmp_path)) is None


# The worker of a benchmark


def test_a_worker_does_not_trust_the_checkpoints_of_a_run(run: Path, tmp_path: Path) -> None:
    config = TrainConfig.from_dict({**SMALL, "output_dir": str(tmp_path)})
    (tmp_path / "planted_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    about = RunDirectory(run)
    worker._load(run, config).close()
    for checkpoint in checkpoints_of(run):
        rewrite_checkpoint(checkpoint, env_id="planted_module:CartPole-v1")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(ConfigError, match="env_id: was 'planted_module:CartPole-v1'"):
            worker.evaluate_run(about, config, 1)
        about.update(status="stopped")
        with pytest.raises(ConfigError, match="env_id: was"):
            worker.measure(config, 1, run)
        rewrite(run, env_id="planted_module:CartPole-v1")
        with pytest.raises(CheckpointError, match="has other settings than the suite"):
            worker.measure(config, 1, run)
    assert not (tmp_path / "ran").exists()


def test_a_worker_logs_where_the_suite_says(run: Path, tmp_path: Path, opened: list[str]) -> None:
    config = TrainConfig.from_dict({**SMALL, "output_dir": str(tmp_path)})
    RunDirectory(run).update(status="stopped")
    rewrite(run, wandb=True)
    assert worker.measure(config, 1, run) is not None
    assert opened == []


# Paths


@pytest.mark.parametrize(
    "path",
    [
        ".hidden/evil.xml",
        ".evil.xml",
        "./evil.xml",
        "../evil.xml",
        "a/../../evil.xml",
        "a/.b/evil.xml",
        "/evil.xml",
        "~/evil.xml",
        "~other/evil.xml",
        "a/..",
        ".\\evil.xml",
        "\\\\host\\evil.xml",
        "C:/evil.xml",
        "file:///evil.xml",
    ],
)
def test_a_file_does_not_give_an_environment_a_path(path: str) -> None:
    for kwargs in ({"xml_file": path}, {"files": [{"name": path}]}):
        with pytest.raises(ConfigError, match="is a local path"):
            resolve([Layer({**SMALL, "env_kwargs": kwargs}, "file", trusted=False)])
        assert resolve([Layer({**SMALL, "env_kwargs": kwargs}, "command line")]).env_kwargs == kwargs


@pytest.mark.parametrize("text", ["ant.xml", "fetch/reach.xml", "4x4", "human", "a:b", "D4RL/door/human-v2", ""])
def test_other_text_for_an_environment_is_no_path(text: str) -> None:
    assert resolve([Layer({**SMALL, "env_kwargs": {"x": text}}, "file", trusted=False)]).env_kwargs == {"x": text}


# YAML that takes long


@pytest.mark.parametrize("text", ["1" * 200_000 + "x", "1_" * 100_000 + "x", "+" + "1" * 200_000 + ".5x"])
def test_a_long_text_that_begins_like_a_number_is_read_at_once(text: str) -> None:
    began = time.process_time()
    assert parse_yaml(f"a: {text}", "file") == {"a": text}
    assert time.process_time() - began < 5, "a time that grows with the square of the length takes minutes"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("1.5e3", 1500.0),
        (".5e1", 5.0),
        ("1.", 1.0),
        ("1.e2", 100.0),
        ("-.5", -0.5),
        ("+1_0.2_5", 10.25),
        (".inf", float("inf")),
        ("-.INF", -float("inf")),
        ("1_000e-3", 1.0),
        ("e3", "e3"),
        (".", "."),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("_1.5", "_1.5"),
        (".e3", ".e3"),
        ("1e3.5", "1e3.5"),
    ],
)
def test_numbers_in_yaml(text: str, value: Any) -> None:
    found = parse_yaml(text, "file")
    assert (found, type(found)) == (value, type(value))


# Named pipes


def test_a_named_pipe_is_not_opened_as_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_file(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_yaml(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a directory"):
        refuse_links([tmp_path / "pipe"], within=tmp_path)


READ_EVERYTHING = """
import sys
from rl_training.cli import main

config, *runs = sys.argv[1:]
for command in (["train", "--config"], ["tune", "--config"], ["zoo", "benchmark"]):
    assert main([*command, config]) == 2
for run in runs:
    main(["runs", run + "/.."])
    main(["eval", run, "--num-episodes", "1"])
    main(["resume", run, "--total-timesteps", "48", "--quiet"])
main(["report", runs[-1]])  # it reads what the others do, and films
print("through")
"""


def test_named_pipes_in_place_of_files_hold_up_no_command(run: Path, tmp_path: Path) -> None:
    (run / "videos").mkdir()
    for older in checkpoints_of(run)[:-1]:
        shutil.rmtree(older)
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "metadata.json", "metrics.jsonl", "command.txt", "manifest.json", ".lock"} <= names
    runs = []
    for number, file in enumerate([*files, Path("evaluations.json"), Path("videos/a.mp4")]):
        runs.append(tmp_path / f"runs{number}" / "run")
        shutil.copytree(run, runs[-1])
        (runs[-1] / file).unlink(missing_ok=True)
        os.mkfifo(runs[-1] / file)
    os.mkfifo(tmp_path / "pipe.yaml")
    command = [sys.executable, "-c", READ_EVERYTHING, str(tmp_path / "pipe.yaml"), *map(str, runs)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.stdout.endswith("through\n"), done.stderr


# Terminals


EVIL = "\x1b]0;title\x07\x1b[2J\r\x9b31m"


def test_text_for_a_terminal() -> None:
    assert printable(EVIL) == "\\x1b]0;title\\x07\\x1b[2J\\r\\x9b31m"
    assert printable("plain \u00e4 text") == "plain \u00e4 text"


def test_errors_and_warnings_do_not_act_on_the_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "evil.yaml"
    file.write_text(
        json.dumps({**SMALL, "seed": EVIL, EVIL: 1, "env_id": f"CartPole{EVIL}-v1", "env_kwargs": {EVIL: 1}})
    )
    suite = tmp_path / "suite.yaml"
    suite.write_text(json.dumps({"description": EVIL, "tasks": [{"preset": EVIL}], EVIL: 1}))
    evil_run = Path(shutil.copytree(run, tmp_path / f"runs{EVIL}" / EVIL))
    rewrite_checkpoint(checkpoints_of(run)[-1], **{EVIL: EVIL})
    RunDirectory(evil_run).update(status=EVIL, resume_grade=EVIL)
    os.truncate(checkpoints_of(evil_run)[-1] / "state.json", 3)
    commands = [
        *(["train", "--config", str(file)], ["tune", "--config", str(file)], ["zoo", "benchmark", str(suite)]),
        *(["eval", str(run)], ["eval", str(run), "--debug"], ["eval", str(evil_run)], ["runs", str(evil_run.parent)]),
        *(["resume", str(evil_run), "--total-timesteps", "64"], ["resume", str(evil_run), "--help"]),
    ]
    for command in commands:
        main(command)
        out, err = capsys.readouterr()
        assert out + err
        assert not set(out + err) & set("\x1b\x07\r\x9b"), command


def test_settings_hold_no_control_characters(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(run, env_id=f"CartPole{EVIL}-v1")
    assert main(["resume", str(run), "--help"]) == 2
    out, err = capsys.readouterr()
    assert "expected text without control characters" in err
    assert "\x1b" not in out + err


# Settings beyond any machine


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_envs": 10**6}, "num_envs: must be >= 1 and <= 65,536, got 1000000"),
        ({"eval_episodes": 10**12}, "eval_episodes: must be >= 1 and <= 1,000,000"),
        ({"num_threads": 10**6}, "num_threads: must be >= 1 and <= 1,024"),
        ({"algorithm": {"num_steps": 10**12}}, "num_steps: must be >= 1 and <= 1,000,000"),
        ({"algorithm": {"num_epochs": 10**9}}, "num_epochs: must be"),
        ({"algorithm": {"network": {"actor_sizes": [10**7]}}}, "actor_sizes: must be >= 1 and <= 16,384"),
        ({"algorithm": {"network": {"critic_sizes": [8] * 10_000}}}, "critic_sizes: must have at most 100 entries"),
    ],
)
def test_settings_beyond_any_machine_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(algo="ppo", env_id="CartPole-v1", **changes)
    assert named in str(caught.value)


@pytest.mark.parametrize("device", ["meta", "hpu", "privateuseone", "cuda:99", "nonsense"])
def test_devices_that_compute_nothing_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device: '{device}' is not available here: .+"):
        resolve_device(device)


def test_a_number_of_a_million_digits_is_read_in_time() -> None:
    began = time.monotonic()
    for text in ("1" * 10**5 + "x", "1." + "_" * 10**5 + "x", "1_" * 10**5 + ".x", "1e" + "5" * 10**5 + "x"):
        assert parse_yaml(f"a: {text}", "file") == {"a": text}
    assert time.monotonic() - began < 10


def test_a_lock_that_links_to_itself(tmp_path: Path) -> None:
    os.symlink(tmp_path / ".lock", tmp_path / ".lock")
    with pytest.raises(CheckpointError, match="Too many levels of symbolic links"), run_lock(tmp_path):
        pass
    assert lock_owner(tmp_path) is None
