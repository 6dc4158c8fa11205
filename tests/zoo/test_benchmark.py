"""The driver of benchmarks, in processes of its own: however it is interrupted, it never repeats what is done."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_training.cli import main
from rl_training.experiment.checkpointing import checkpoints_of
from rl_training.experiment.lock import lock_owner, run_lock
from rl_training.experiment.runs import RunDirectory, find_runs
from rl_training.zoo.manifest import Manifest, read_manifest
from rl_training.zoo.worker import RESULT
from tests.envs.slow_tasks import BREAK, SLOW

ROOT = Path(__file__).parents[2]
TOTAL = 2_400
SUITE = f"""
description: one run that is quick and one that takes seconds
seeds: 1
evaluation: {{points: 6, episodes: 1, final_episodes: 20}}
normalization:
  - {{env_id: CartPole-v1, low: 22.1, high: 500, reference: the most that an episode can give}}
  - {{env_id: "{SLOW}", low: 0, high: 10, reference: by hand}}
tasks:
  - {{preset: ppo/cartpole, settings: {{total_timesteps: 256}}}}
  - preset: ppo/cartpole
    settings:
      env_id: "{SLOW}"
      total_timesteps: {TOTAL}
      num_envs: 1
      algorithm: {{minibatch_size: 16, num_epochs: 1}}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SUITE, encoding="utf-8")
    return path


def command(suite: Path, output: Path, *more: str) -> list[str]:
    arguments = ["zoo", "benchmark", str(suite), "--output-dir", str(output), "--jobs", "2", "--trust", *more]
    return [sys.executable, "-m", "rl_training.cli", *arguments]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **changes}


def call(suite: Path, output: Path, *more: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(suite, output, *more), cwd=ROOT, env=environment(**changes), capture_output=True, text=True, timeout=300
    )


def wait_for(happened: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.02)


def quick_and_slow(directory: Path) -> tuple[RunDirectory | None, RunDirectory | None]:
    runs = find_runs(directory) if directory.is_dir() else []
    slow = [run for run in runs if "SlowWalk" in run.path.name]
    return next((run for run in runs if run not in slow), None), next(iter(slow), None)


def halfway(directory: Path) -> bool:
    """Whether the quick run is done and the slow one has something to go on from, but much to do."""
    quick, slow = quick_and_slow(directory)
    return bool(quick and (quick.path / RESULT).exists() and slow and checkpoints_of(slow.path))


def files_of(run: RunDirectory) -> dict[str, tuple[int, str]]:
    """When each file was last written, and what is in it."""
    paths = [path for path in sorted(run.path.rglob("*")) if path.is_file()]
    return {str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in paths}


def measured(manifest: Manifest) -> list[Any]:
    """What a benchmark found, without times and places."""
    return [
        (task.name, run.seed, run.env_steps, run.untrained, run.final, run.best, run.evaluations, run.training_returns)
        for task in manifest.tasks
        for run in task.runs
    ]


def kill_driver(driver: subprocess.Popen[str], directory: Path) -> None:
    driver.send_signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL


def kill_everything(driver: subprocess.Popen[str], directory: Path) -> None:
    _, slow = quick_and_slow(directory)
    assert slow is not None
    driver.send_signal(signal.SIGKILL)
    os.kill(slow.metadata()["pid"], signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL


def press_ctrl_c(driver: subprocess.Popen[str], directory: Path) -> None:
    driver.send_signal(signal.SIGINT)
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 128 + signal.SIGINT
    assert "1 of 2 runs done" in out
    _, slow = quick_and_slow(directory)
    assert slow is not None
    assert slow.status() == "stopped", "it was to save before it ended"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """What the suite comes to when nobody interrupts it."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "tiny.yaml").write_text(SUITE, encoding="utf-8")
    done = call(directory / "tiny.yaml", directory)
    assert done.returncode == 0, done.stderr
    return read_manifest(directory / "tiny" / "manifest.json")


@pytest.mark.parametrize("interrupt", [kill_driver, kill_everything, press_ctrl_c])
def test_an_interrupted_benchmark_goes_on_where_it_was(
    interrupt: Callable[..., None], suite: Path, tmp_path: Path, undisturbed: Manifest
) -> None:
    directory = tmp_path / "out" / "tiny"
    driver = subprocess.Popen(
        command(suite, tmp_path / "out"), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    wait_for(lambda: halfway(directory) or driver.poll() is not None, "half of the work")
    interrupt(driver, directory)
    quick, slow = quick_and_slow(directory)
    assert quick is not None
    assert slow is not None
    assert not (slow.path / RESULT).exists(), "too late: everything was done"
    before = files_of(quick)

    again = call(suite, tmp_path / "out")  # at once: a worker that lost its driver may still be saving
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 of 2 runs done" in again.stdout
    assert files_of(quick) == before, "what was done was touched"
    assert len(find_runs(directory)) == 2, "a run was begun anew"
    assert slow.env_steps() == TOTAL
    assert len(slow.metadata()["history"]) == 2, "it was not resumed"
    assert measured(read_manifest(directory / "manifest.json")) == measured(undisturbed)


def test_workers_end_with_their_driver(suite: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out" / "tiny"
    driver = subprocess.Popen(command(suite, tmp_path / "out", "--quiet"), cwd=ROOT, env=environment())
    wait_for(lambda: halfway(directory), "half of the work")
    kill_driver(driver, directory)  # type: ignore[arg-type]
    _, slow = quick_and_slow(directory)
    assert slow is not None
    wait_for(lambda: lock_owner(slow.path) is None, "the worker to stop", 30)
    assert slow.status() == "stopped"
    assert 0 < slow.env_steps() < TOTAL


def test_a_failed_run_is_shown_and_retried(suite: Path, tmp_path: Path) -> None:
    failed = call(suite, tmp_path, **{BREAK: "700"})
    assert failed.returncode == 1
    assert "1 of 2 runs done" in failed.stdout
    reason = next(line for line in failed.stdout.splitlines() if line.startswith("failed: "))
    assert "SlowWalk" in reason
    assert "the walk is closed" in reason
    log = reason.partition("(log: ")[2].rstrip(")")
    assert "RuntimeError" in Path(log).read_text(encoding="utf-8")
    manifest = read_manifest(tmp_path / "tiny" / "manifest.json")
    assert [task.env_id for task in manifest.tasks] == ["CartPole-v1"], "the other one is in the manifest"

    mended = call(suite, tmp_path)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    _, slow = quick_and_slow(tmp_path / "tiny")
    assert slow is not None
    assert len(slow.metadata()["history"]) == 2, "it went on from its last checkpoint"


# What needs no interruption runs in this process, on CartPole alone.

SMALL = """
description: seconds
evaluation: {points: 2, episodes: 2, final_episodes: 20}
normalization: [{env_id: CartPole-v1, low: 22.1, high: 500, reference: the most that an episode can give}]
tasks:
  - {preset: ppo/cartpole, settings: {total_timesteps: 256}}
  - {preset: dqn/cartpole, settings: {total_timesteps: 600}, judge: best}
"""


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a suite that was run with one seed."""
    directory = tmp_path_factory.mktemp("small")
    (directory / "small.yaml").write_text(SMALL, encoding="utf-8")
    arguments = ["zoo", "benchmark", str(directory / "small.yaml"), "--output-dir", str(directory), "--seeds", "1"]
    assert main(arguments) == 0
    return directory


@pytest.fixture
def small(run_once: Path, tmp_path: Path) -> Path:
    """A copy of it: what a test changes there, others must not see."""
    return shutil.copytree(run_once, tmp_path / "small")


def test_the_manifest_has_everything(small: Path) -> None:
    manifest = read_manifest(small / "small" / "manifest.json")
    ppo, dqn = manifest.tasks
    assert (ppo.name, dqn.name) == ("ppo/cartpole total_timesteps=256", "dqn/cartpole total_timesteps=600")
    assert (ppo.judge, dqn.judge, ppo.final_episodes, ppo.points, ppo.episodes) == ("final", "best", 20, 2, 2)
    (run,) = dqn.runs
    assert run.evaluations is not None
    assert [step for step, _, _ in run.evaluations] == [512, 600], "after 300 and 600, in iterations of 256"
    assert run.untrained is not None
    assert run.final is not None
    assert run.best is not None
    assert (run.untrained.step, run.final.step) == (0, 600)
    assert run.best.step in (512, 600)
    assert run.final.returns is not None
    assert len(run.final.returns) == 20
    assert run.final.mean == pytest.approx(sum(run.final.returns) / 20)
    assert dqn.scores() == [run.best.mean]
    assert run.env_steps == 600
    assert run.wall_seconds > 0
    assert run.env_steps_per_second > 0
    assert {"rl_training", "torch", "gymnasium"} <= run.versions.keys()
    assert {"cpu", "cores", "torch_threads"} <= run.hardware.keys()
    assert run.hardware["torch_threads"] == 1
    (directory,) = [found.path.name for found in find_runs(small / "small") if found.path.name.startswith("dqn")]
    assert run.run == directory


def test_what_is_done_is_not_done_again_and_more_seeds_are_added(small: Path, capsys: Any) -> None:
    before = {run.path: files_of(run) for run in find_runs(small / "small")}
    arguments = ["zoo", "benchmark", str(small / "small.yaml"), "--output-dir", str(small), "--only", "ppo/cartpole"]
    assert main([*arguments, "--seeds", "2", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 runs done" in out
    assert f"rl-training report {small / 'small'} --video" in out
    after = find_runs(small / "small")
    assert len(after) == len(before) + 1
    assert {run.path: files_of(run) for run in after if run.path in before} == before
    ppo, dqn = read_manifest(small / "small" / "manifest.json").tasks
    assert [run.seed for run in ppo.runs] == [0, 1]
    assert [run.seed for run in dqn.runs] == [0], "a task that was not asked for now is still there"


def test_other_settings_are_another_run(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "small.yaml"
    other.write_text(SMALL.replace("total_timesteps: 256", "total_timesteps: 128"), encoding="utf-8")
    count = len(find_runs(small / "small"))
    assert main(["zoo", "benchmark", str(other), "--output-dir", str(small), "--only", "ppo/*", "--seeds", "1"]) == 0
    assert len(find_runs(small / "small")) == count + 1
    names = [task.name for task in read_manifest(small / "small" / "manifest.json").tasks]
    assert names == ["ppo/cartpole total_timesteps=128", "dqn/cartpole total_timesteps=600"]


def test_more_final_episodes_only_evaluate(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "small.yaml"
    other.write_text(SMALL.replace("final_episodes: 20", "final_episodes: 25"), encoding="utf-8")
    (run,) = [run for run in find_runs(small / "small") if run.path.name.startswith("dqn")]
    trained = run.metadata()
    assert main(["zoo", "benchmark", str(other), "--output-dir", str(small), "--only", "dqn/*", "--seeds", "1"]) == 0
    assert run.metadata() == trained
    assert json.loads((run.path / RESULT).read_text(encoding="utf-8"))["final"]["episodes"] == 25


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(small: Path, tmp_path: Path) -> None:
    source = next(run for run in find_runs(small / "small") if run.path.name.startswith("ppo"))
    broken = tmp_path / "small" / source.path.name
    broken.mkdir(parents=True)
    for name in ("config.yaml", "metadata.json"):
        (broken / name).write_bytes((source.path / name).read_bytes())
    suite = tmp_path / "small.yaml"
    suite.write_text(SMALL.replace("256", str(source.env_steps())), encoding="utf-8")
    assert main(["zoo", "benchmark", str(suite), "--output-dir", str(tmp_path), "--only", "ppo/*", "--seeds", "1"]) == 0
    (run,) = find_runs(tmp_path / "small")
    assert checkpoints_of(run.path)


def test_two_drivers_do_not_share_a_directory(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    with run_lock(tmp_path / "tiny"):
        second = call(suite, tmp_path)
    assert second.returncode == 2
    assert "is used by another benchmark (process" in second.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smok"], "Did you mean 'smoke'?"),
        ([], "suite: missing; choose "),
        (["smoke", "--only", "ppo/cartpol"], "Did you mean 'ppo/cartpole'?"),
        (["smoke", "--seeds", "0", "--jobs", "0"], "--jobs: must be at least 1, got 0"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["zoo", "benchmark", *arguments, "--output-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_suites_are_listed(capsys: Any) -> None:
    assert main(["zoo", "benchmark", "--list"]) == 0
    out = capsys.readouterr().out
    for name in ("smoke", "classic", "box2d", "mujoco", "atari"):
        assert f"\n {name} " in out
