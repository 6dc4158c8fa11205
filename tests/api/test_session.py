"""Whole runs: what they leave behind, how they stop, and how they go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rl_training
from rl_training import PPO, TrainConfig, load, resume, train
from rl_training.api import session
from rl_training.cli import load_config, main
from rl_training.contracts.errors import CheckpointError, ConfigError, EnvError, MissingExtraError
from rl_training.experiment import restoring
from rl_training.experiment.checkpointing import load_checkpoint, save_checkpoint
from rl_training.experiment.runs import RunDirectory, find_runs

TINY_ALGORITHM = {
    "num_steps": 16,
    "minibatch_size": 32,
    "num_epochs": 1,
    "network": {"actor_sizes": [8], "critic_sizes": [8]},
}
TINY: dict[str, Any] = {
    "algo": "ppo",
    "env_id": "CartPole-v1",
    "seed": 7,
    "num_envs": 2,
    "total_timesteps": 128,
    "eval_every": 64,
    "eval_episodes": 2,
    "checkpoint_every": 32,
    "log_every": 32,
    "algorithm": TINY_ALGORITHM,
}


def a_config(tmp_path: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**TINY, "output_dir": tmp_path, **changes})


def flags(tmp_path: Path, **changes: Any) -> list[str]:
    """The same for the command line."""
    path = tmp_path / "tiny.yaml"
    path.write_text(a_config(tmp_path / "runs", **changes).to_yaml())
    return ["--config", str(path)]


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{index}]")
    elif isinstance(one, (torch.Tensor, np.ndarray)):
        assert np.array_equal(np.asarray(one.tolist()), np.asarray(other.tolist())), where
    else:
        assert one == other, where


def lines(run_dir: Path | None) -> list[dict[str, Any]]:
    assert run_dir is not None
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class Constant(gym.Env[Any, Any]):
    """Three steps with reward one, whatever the agent does."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own class attribute

    def __init__(self, fail_after: int | None = None) -> None:
        self.fail_after = fail_after
        self.total = 0
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample() * 0, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.total += 1
        if self.fail_after is not None and self.total > self.fail_after:
            raise RuntimeError("the robot fell off the table")
        return np.zeros(2, np.float32), 1.0, self.steps >= 3, False, {}


@pytest.fixture
def failing_env() -> Iterator[str]:
    gym.register("FailingForTests-v0", lambda **kwargs: Constant(fail_after=40))
    yield "FailingForTests-v0"
    gym.registry.pop("FailingForTests-v0")


# The run directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run that several tests look at."""
    return train(a_config(tmp_path_factory.mktemp("finished"), checkpoint_keep=2), progress=False)


def test_the_result_says_where_everything_is(finished: Any) -> None:
    assert finished.env_steps == 128
    assert finished.metrics["global_step"] == 128
    assert finished.stop_reason == "finished"
    assert finished.run_dir.name.startswith("ppo__CartPole-v1__seed7__")
    assert finished.checkpoint_path == finished.run_dir / "checkpoints" / "step_128"
    assert load_checkpoint(finished.checkpoint_path).metadata["env_steps"] == 128
    assert len(finished.final_evaluation.returns) == 2


def test_the_run_directory_is_complete(finished: Any) -> None:
    names = {path.name for path in finished.run_dir.iterdir()} - {".lock"}
    assert names == {
        *("config.yaml", "command.txt", "metadata.json", "metrics.jsonl", "tensorboard", "evaluations.json"),
        "checkpoints",
    }
    assert any((finished.run_dir / "tensorboard").iterdir())
    assert {path.name for path in finished.run_dir.rglob(".*")} <= {".lock"}, "no temporary files"


def test_the_newest_checkpoints_are_kept_and_the_best_apart(finished: Any) -> None:
    names = {path.name for path in (finished.run_dir / "checkpoints").iterdir()}
    assert names == {"step_96", "step_128", "best"}
    evaluations = RunDirectory(finished.run_dir).evaluations()
    best = max((entry for entry in evaluations if not entry.get("final")), key=lambda entry: float(entry["mean"]))
    assert load_checkpoint(finished.run_dir / "checkpoints" / "best").metadata["env_steps"] == best["step"]
    assert finished.best_return == best["mean"]


def test_the_resolved_config_gives_the_same_run(finished: Any) -> None:
    config = load_config(finished.run_dir / "config.yaml")
    assert config == a_config(finished.run_dir.parent, checkpoint_keep=2).replace(num_threads=1)


def test_metadata_has_what_a_result_depends_on(finished: Any) -> None:
    data = RunDirectory(finished.run_dir).metadata()
    assert data["seed"] == 7
    assert data["status"] == "finished"
    assert data["env_steps"] == 128
    assert data["best_return"] == finished.best_return
    assert data["versions"]["torch"] == torch.__version__
    assert data["versions"]["gymnasium"] == gym.__version__
    assert data["versions"]["rl_training"] == rl_training.__version__
    assert data["hardware"]["device"] == "cpu"
    assert data["hardware"]["torch_threads"] == 1
    assert "git_commit" in data
    assert data["resume_grade"]
    assert data["environment"]["description"] == "CartPole-v1"


def test_evaluations_are_written_with_every_episode(finished: Any) -> None:
    entries = json.loads((finished.run_dir / "evaluations.json").read_text())
    assert [(entry["step"], entry.get("final", False)) for entry in entries] == [(64, False), (128, False), (128, True)]
    for entry in entries:
        assert len(entry["returns"]) == len(entry["lengths"]) == 2
        assert entry["mean"] == pytest.approx(sum(entry["returns"]) / 2)


def test_metrics_have_a_line_for_every_period(finished: Any) -> None:
    steps = [line["global_step"] for line in lines(finished.run_dir) if "loss/policy" in line]
    assert steps == [32, 64, 96, 128]
    assert [line["global_step"] for line in lines(finished.run_dir) if "eval/return_mean" in line] == [64, 128]


def test_two_fresh_runs_with_equal_seeds_give_equal_bits(tmp_path: Path, finished: Any) -> None:
    again = train(a_config(tmp_path, checkpoint_keep=2), progress=False)
    files = ("state.safetensors", "state.json")
    one, two = ([(result.checkpoint_path / name).read_bytes() for name in files] for result in (finished, again))
    assert one == two
    deterministic = [
        [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines(result.run_dir)]
        for result in (finished, again)
    ]
    assert deterministic[0] == deterministic[1]
    other = train(a_config(tmp_path, seed=8), progress=False)
    assert (other.checkpoint_path / files[0]).read_bytes() != one[0]  # type: ignore[operator]


@pytest.mark.parametrize(("num_envs", "total"), [(1, 50), (3, 50), (8, 50), (2, 33)])
def test_the_step_budget_is_kept(tmp_path: Path, num_envs: int, total: int) -> None:
    result = train(a_config(tmp_path, num_envs=num_envs, total_timesteps=total, eval_every=0), progress=False)
    assert total <= result.env_steps < total + num_envs
    assert result.metrics["global_step"] == result.env_steps


def test_settings_that_turn_files_off(tmp_path: Path) -> None:
    result = train(
        a_config(tmp_path, tensorboard=False, eval_every=0, checkpoint_every=0, checkpoint_best=False), progress=False
    )
    assert result.run_dir is not None
    names = {path.name for path in result.run_dir.iterdir()} - {".lock"}
    assert names == {"config.yaml", "command.txt", "metadata.json", "metrics.jsonl", "checkpoints"}
    assert os.listdir(result.run_dir / "checkpoints") == ["step_128"]
    assert result.final_evaluation is None


def test_learning_without_a_run_directory_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent = PPO(TrainConfig(**TINY))
    result = agent.learn(progress=False)
    agent.learn(64, progress=False)
    agent.evaluate(2)
    agent.close()
    assert (result.run_dir, result.checkpoint_path) == (None, None)
    assert os.listdir(tmp_path) == []


def test_learning_with_a_run_directory_writes_the_same_files(tmp_path: Path) -> None:
    agent = PPO(TrainConfig(**TINY))
    result = agent.learn(96, progress=False, run_dir=tmp_path / "here")
    assert result.run_dir == tmp_path / "here"
    assert result.checkpoint_path == tmp_path / "here" / "checkpoints" / "step_96"
    assert load_config(tmp_path / "here" / "config.yaml").total_timesteps == 96, "what was asked for"
    agent.learn(32, progress=False, run_dir=tmp_path / "here")
    assert RunDirectory(tmp_path / "here").env_steps() == 128
    agent.close()
    other = PPO(TrainConfig(**TINY))
    with pytest.raises(ConfigError, match="holds a run of 128 steps"):
        other.learn(32, progress=False, run_dir=tmp_path / "here")
    other.close()


# Resume


def test_resume_goes_on_to_a_larger_total(tmp_path: Path) -> None:
    first = train(a_config(tmp_path), progress=False)
    second = resume(first.run_dir, total_timesteps=192, progress=False)
    assert second.run_dir == first.run_dir
    assert second.env_steps == second.metrics["global_step"] == 192
    assert second.checkpoint_path == first.run_dir / "checkpoints" / "step_192"  # type: ignore[operator]
    run = RunDirectory(first.run_dir)  # type: ignore[arg-type]
    assert run.metadata()["env_steps"] == 192
    assert run.status() == "finished"
    assert [entry["total_timesteps"] for entry in run.metadata()["history"]] == [128, 192]
    assert load_config(run.path / "config.yaml").total_timesteps == 192
    steps = [line["global_step"] for line in lines(run.path) if "loss/policy" in line]
    assert steps == [32, 64, 96, 128, 160, 192]
    assert [entry["step"] for entry in run.evaluations() if not entry.get("final")] == [64, 128, 192]
    assert len((run.path / "command.txt").read_text().splitlines()) == 2


def test_the_learner_is_the_same_right_after_loading(tmp_path: Path) -> None:
    """Parameters, optimizer, counters, random streams, normalisers, statistics."""
    config = a_config(tmp_path, normalize_obs=True, normalize_reward=True, eval_every=0)
    agent = PPO(config)
    agent.learn(progress=False)
    agent.save(tmp_path / "saved")
    other = load(tmp_path / "saved")
    before, after = agent._experiment.trainer.state_dict(), other._experiment.trainer.state_dict()
    assert_equal(before["algorithm"], after["algorithm"], "algorithm")
    assert_equal(before["progress"], after["progress"], "progress")
    for part in ("policy_rng", "env_rng", "obs_normalizer", "reward_normalizer", "statistics"):
        if part != "statistics":
            assert_equal(before["collector"][part], after["collector"][part], part)
        else:
            for name in ("returns", "lengths", "num_episodes"):
                assert_equal(before["collector"][part][name], after["collector"][part][name], name)
    assert before["progress"]["env_steps"] == 128
    assert before["progress"]["updates"] == 4
    assert "exp_avg" in before["algorithm"]["store"]
    for one in (agent, other):
        one.close()


def test_resuming_does_not_change_what_the_schedules_run_over(tmp_path: Path) -> None:
    schedule = {"schedule": "linear", "start": 1e-3}
    config = a_config(tmp_path, eval_every=0, algorithm={**TINY_ALGORITHM, "learning_rate": schedule})
    first = train(config, progress=False)
    with pytest.warns(UserWarning, match="the schedules of learning_rate ended at step 128"):
        resume(first.run_dir, total_timesteps=256, progress=False)
    rates = [line["train/learning_rate"] for line in lines(first.run_dir)]
    assert rates[:4] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert rates[4:] == pytest.approx([0.0] * 4)


def test_a_finished_run_is_not_resumed_without_more_steps(tmp_path: Path, finished: Any) -> None:
    with pytest.raises(ConfigError, match="already been trained for 128 of 128 steps"):
        resume(finished.run_dir, progress=False)
    with pytest.raises(CheckpointError, match="is not a run directory"):
        resume(tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="is not a run directory"):
        resume(finished.checkpoint_path, progress=False)


@pytest.mark.parametrize(("name", "before", "after"), [("total_timesteps", "128", "256"), ("eval_every", "64", "32")])
def test_an_edited_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, before: str, after: str
) -> None:
    def crash(run: Any) -> None:
        if run.env_steps == 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(a_config(tmp_path), callback=crash, progress=False)
    (run,) = tmp_path.iterdir()
    path = run / "config.yaml"
    text = path.read_text()
    path.write_text("# a remark\n" + text.replace(f"\n{name}: {before}\n", f"\n{name}: {after}\n"))
    assert path.read_text().count(after) > text.count(after)
    assert main(["resume", str(run), "--quiet"]) == 2
    option = f"--{name.replace('_', '-')}"
    assert f"{name}: is {after}, but the run was started with {before}" in (error := capsys.readouterr().err)
    assert option in error
    path.write_text("# a remark\n" + text)
    assert main(["resume", str(run), "--quiet", option, after]) == 0
    steps = [entry["step"] for entry in RunDirectory(run).evaluations() if not entry.get("final")]
    assert steps == ([64, 128, 192, 256] if name == "total_timesteps" else [64, 96, 128])


def test_what_a_resume_changed_stays_changed(tmp_path: Path) -> None:
    """Also if it was killed before its first checkpoint, or between its entry in the history and its config.yaml."""

    def crash(run: Any) -> None:
        raise KeyboardInterrupt

    result = train(a_config(tmp_path, total_timesteps=64), progress=False)
    assert result.run_dir is not None
    first = (result.run_dir / "config.yaml").read_text()
    with pytest.raises(KeyboardInterrupt):
        resume(result.run_dir, total_timesteps=96, callback=crash, progress=False)
    second = (result.run_dir / "config.yaml").read_text()
    assert first != second
    (result.run_dir / "config.yaml").write_text(first)
    with pytest.raises(KeyboardInterrupt):
        resume(result.run_dir, total_timesteps=96, callback=crash, progress=False)
    assert resume(result.run_dir, progress=False).env_steps == 96


def test_a_compiler_that_is_gone_changes_no_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = train(a_config(tmp_path, total_timesteps=64), progress=False)
    about = RunDirectory(result.run_dir).metadata()  # type: ignore[arg-type]
    other = {**about["hardware"], "c_compiler": "another", "system": "another"}
    assert restoring.differing_machine({**about, "hardware": other}, "cpu") is None
    changed = restoring.differing_machine({**about, "hardware": {**other, "cpu": "another"}}, "cpu")
    assert changed is not None
    assert changed.startswith("cpu another -> ")


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(a_config(tmp_path).to_yaml())
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run directory that contains one"):
        resume(tmp_path, progress=False)


@pytest.mark.parametrize("damage", ["state.safetensors", "manifest.json"])
def test_resume_from_the_one_before_a_damaged_one_and_over_it(tmp_path: Path, damage: str) -> None:
    first = train(a_config(tmp_path, eval_every=0), progress=False)
    assert first.checkpoint_path is not None
    (first.checkpoint_path / damage).unlink()
    with (
        pytest.warns(UserWarning, match=r"using step_96.*step_128"),
        pytest.warns(UserWarning, match=r"renamed to .*damaged_step_128"),
    ):
        second = resume(first.run_dir, progress=False)
    assert second.env_steps == 128
    assert load_checkpoint(first.checkpoint_path).metadata["env_steps"] == 128


def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    agent = PPO(TrainConfig(**TINY))
    agent.save(tmp_path / "saved")
    agent.close()
    with pytest.raises(CheckpointError, match="does not fit ppo on Acrobot-v1") as caught:
        load(tmp_path / "saved", env="Acrobot-v1")
    assert str(tmp_path / "saved") in str(caught.value)


def test_a_state_of_another_shape_is_a_checkpoint_error(tmp_path: Path) -> None:
    """As another version of the package may have written it."""
    agent = PPO(TrainConfig(**TINY))
    agent.save(tmp_path / "saved")
    agent.close()
    saved = load_checkpoint(tmp_path / "saved")
    del saved.state["progress"]
    save_checkpoint(saved.path, saved.state, saved.config, saved.metadata)
    with pytest.raises(CheckpointError, match=r"saved: does not fit ppo on CartPole-v1: .*progress"):
        load(tmp_path / "saved")


# Signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def send(run: Any) -> None:
        if run.env_steps == 64:
            os.kill(os.getpid(), signal.Signals[name])

    before = signal.getsignal(signal.Signals[name])
    result = train(a_config(tmp_path, checkpoint_every=0), callback=send, progress=False, on_signal="return")
    assert signal.getsignal(signal.Signals[name]) is before
    assert (result.stop_reason, result.env_steps) == (name, 64)
    assert result.final_evaluation is None
    assert RunDirectory(result.run_dir).status() == "stopped"  # type: ignore[arg-type]
    assert load_checkpoint(result.checkpoint_path).metadata["env_steps"] == 64  # type: ignore[arg-type]
    assert f"{name}: finishing this iteration, then saving to {result.run_dir}" in capsys.readouterr().err
    assert resume(result.run_dir, progress=False).env_steps == 128


def test_a_signal_that_arrives_with_the_last_step_does_not_undo_the_run(tmp_path: Path) -> None:
    def send(run: Any) -> None:
        if run.env_steps == 128:
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(a_config(tmp_path, eval_every=0), callback=send, progress=False, on_signal="return")
    assert (result.env_steps, result.interrupted) == (128, False)
    assert RunDirectory(result.run_dir).status() == "finished"  # type: ignore[arg-type]


def test_a_run_that_ends_for_good_is_not_interrupted(tmp_path: Path) -> None:
    """A resume would train past the end that the callback wanted."""

    def enough(run: Any) -> bool:
        if run.env_steps == 64:
            os.kill(os.getpid(), signal.SIGTERM)
        return bool(run.env_steps < 64)

    with pytest.warns(UserWarning, match="no final evaluation: SIGTERM"):
        result = train(a_config(tmp_path), callback=enough, progress=False, on_signal="return")
    assert (result.env_steps, result.interrupted) == (64, False)
    assert "enough" in result.stop_reason
    assert RunDirectory(result.run_dir).status() == "finished"  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "error"), [("SIGINT", KeyboardInterrupt), ("SIGTERM", SystemExit)])
@pytest.mark.parametrize("begun", ["train", "learn", "resume"])
def test_a_signal_ends_the_program_after_saving(tmp_path: Path, name: str, error: Any, begun: str) -> None:
    """A loop over seeds must stop, and a scheduler must not see success."""

    def send(run: Any) -> None:
        if run.env_steps == 64:
            os.kill(os.getpid(), signal.Signals[name])

    config = a_config(tmp_path, checkpoint_every=0, eval_every=0)
    number = signal.Signals[name]
    before = signal.getsignal(number)
    signal.signal(number, signal.SIG_DFL if name == "SIGTERM" else signal.default_int_handler)
    try:
        if begun == "resume":
            short = train(config.replace(total_timesteps=32), progress=False)
            with pytest.raises(error) as caught:
                resume(short.run_dir, total_timesteps=128, callback=send, progress=False)  # type: ignore[arg-type]
        elif begun == "learn":
            with pytest.raises(error) as caught:
                PPO(config).learn(callback=send, progress=False, run_dir=tmp_path / "mine")
        else:
            with pytest.raises(error) as caught:
                train(config, callback=send, progress=False)
    finally:
        signal.signal(number, before)
    run = RunDirectory(tmp_path / "mine") if begun == "learn" else find_runs(tmp_path)[0]
    assert run.status() == "stopped"
    saved = run.path / "checkpoints" / "step_64"
    assert load_checkpoint(saved).metadata["env_steps"] == 64
    assert f"saved: {saved}" in caught.value.__notes__[0]
    if error is SystemExit:
        assert caught.value.code == 128 + signal.SIGTERM
    assert resume(run.path, progress=False).env_steps == 128


def test_a_signal_without_a_run_directory_saves_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def send(run: Any) -> None:
        if run.env_steps == 64:
            os.kill(os.getpid(), signal.SIGINT)

    agent = PPO(TrainConfig(**TINY))
    with pytest.raises(KeyboardInterrupt) as caught:
        agent.learn(callback=send, progress=False)
    assert agent.num_timesteps == 64
    said = capsys.readouterr().err
    assert "nothing is written" in said
    assert "sav" not in said
    assert "nothing is written" in caught.value.__notes__[0]
    result = agent.learn(64, progress=False)  # the agent is as after any iteration
    assert (result.env_steps, result.interrupted) == (128, False)
    agent.close()


def test_a_program_with_its_own_handler_gets_the_signal_after_saving(tmp_path: Path) -> None:
    got: list[int] = []

    def send(run: Any) -> None:
        if run.env_steps == 64:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        result = train(a_config(tmp_path, eval_every=0), callback=send, progress=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
    assert (result.env_steps, result.interrupted) == (64, True)


def test_a_wrong_on_signal_is_refused_before_work() -> None:
    with pytest.raises(ConfigError, match="on_signal: got 'quiet', accepted: raise, return"):
        PPO(TrainConfig(**TINY)).learn(on_signal="quiet")  # type: ignore[arg-type]


def test_ctrl_c_in_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new process: stops cleanly, prints the command that goes on, and that command does go on."""
    arguments = flags(tmp_path, total_timesteps=10_000_000, eval_every=0, checkpoint_every=0)
    command = [sys.executable, "-m", "rl_training.cli", "train", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/*/metrics.jsonl")) or not lines(next(tmp_path.glob("runs/*"))):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    run_dir = next(tmp_path.glob("runs/*"))
    run = RunDirectory(run_dir)
    assert run.status() == "stopped"
    assert f"rl-training resume {run_dir}" in out
    steps = run.env_steps()
    assert steps > 0
    assert load_checkpoint(run_dir / "checkpoints" / f"step_{steps}").metadata["env_steps"] == steps
    assert main(["resume", str(run_dir), "--total-timesteps", str(steps + 64), "--quiet"]) == 0
    assert f"finished after {steps + 64:,} steps" in capsys.readouterr().out
    assert run.env_steps() == steps + 64


# Environments made in Python


@pytest.mark.parametrize("kind", ["instance", "lambda"])
def test_an_environment_made_in_python(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It evaluates and resumes from Python, and the command line says why it cannot make it again."""
    env: Any = Constant() if kind == "instance" else (lambda: Constant())
    config = a_config(tmp_path, env_id="Mine", num_envs=1)
    result = train(config, env=env, progress=False)
    assert result.best_return == 3.0
    run_dir = result.run_dir
    assert run_dir is not None
    assert RunDirectory(run_dir).metadata()["environment"]["source"] == "object"

    for command in (["eval", str(run_dir)], ["resume", str(run_dir), "--total-timesteps", "256"]):
        assert main(command) == 2
        message = capsys.readouterr().err
        assert "trained on an environment object" in message
        assert "cannot be recreated from files" in message
        assert "env=..." in message
        assert "Traceback" not in message
    with pytest.raises(ConfigError, match="trained on an environment object"):
        load(run_dir)

    again: Any = Constant() if kind == "instance" else (lambda: Constant())
    assert resume(run_dir, env=again, total_timesteps=160, progress=False).env_steps == 160
    agent = load(run_dir, env=Constant() if kind == "instance" else (lambda: Constant()))
    assert agent.num_timesteps == 160
    assert agent.evaluate(4).returns == [3.0] * 4
    agent.close()


def test_an_evaluation_environment_of_its_own(tmp_path: Path) -> None:
    agent = PPO(TrainConfig(**TINY), eval_env=lambda: gym.wrappers.TimeLimit(gym.make("CartPole-v1"), 5))
    result = agent.learn(progress=False)
    assert agent.evaluate(3).lengths == [5, 5, 5]
    assert result.best_return == 5.0
    agent.close()


def test_an_environment_that_cannot_be_copied_is_refused_before_training() -> None:
    class NoCopy(Constant):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("holds a socket")

    agent = PPO(NoCopy(), eval_every=64, **TINY_ALGORITHM)
    with pytest.raises(EnvError, match=r"cannot be copied for evaluation.*eval_env="):
        agent.learn(64, progress=False)
    assert agent.num_timesteps == 0


def test_an_id_given_beside_the_config_is_the_runs_environment(tmp_path: Path) -> None:
    result = train(a_config(tmp_path, eval_every=0), env="Acrobot-v1", progress=False)
    assert result.run_dir is not None
    assert result.run_dir.name.startswith("ppo__Acrobot-v1__seed7__")
    assert load_config(result.run_dir / "config.yaml").env_id == "Acrobot-v1"
    assert resume(result.run_dir, total_timesteps=160, progress=False).env_steps == 160


# Failures


def test_a_run_that_fails_is_recorded_as_failed(tmp_path: Path, failing_env: str) -> None:
    config = a_config(tmp_path, env_id=failing_env, eval_every=0)
    with pytest.raises(Exception, match="the robot fell off the table"):
        train(config, progress=False)
    (run,) = find_runs(tmp_path)
    assert run.status() == "failed"
    assert "the robot fell off the table" in run.metadata()["error"]
    assert 0 < run.env_steps() <= 80
    assert lines(run.path), "what was logged before is kept"


def test_the_command_line_says_that_a_run_failed(
    tmp_path: Path, failing_env: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags(tmp_path, env_id=failing_env, eval_every=0)
    assert main(["train", *arguments, "--quiet"]) == 1
    message, *environments_own = capsys.readouterr().err.split("\n\nTraceback")
    assert "the robot fell off the table" in message
    assert f"recorded as failed in {tmp_path}" in message
    assert len(message.strip().splitlines()) == 1, "one paragraph; where the environment raised may follow it"
    assert "cli/__init__.py" not in "".join(environments_own)
    assert main(["train", *arguments, "--quiet", "--debug"]) == 1
    assert "cli/__init__.py" in capsys.readouterr().err


def test_a_callback_that_fails_fails_the_run(tmp_path: Path) -> None:
    def broken(run: Any) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        train(a_config(tmp_path), callback=broken, progress=False)
    (run,) = find_runs(tmp_path)
    assert run.status() == "failed"
    assert run.metadata()["error"] == "ZeroDivisionError: mine"


def test_what_is_wrong_is_found_before_a_run_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        train(a_config(tmp_path, env_id="NoSuchEnv-v0"), progress=False)
    with pytest.raises(ConfigError, match="device"):
        train(a_config(tmp_path, device="nonsense"), progress=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "extra"),
    [({"wandb": True}, "wandb"), ({"mlflow": True}, "mlflow"), ({"video_every": 64}, "video")],
)
def test_a_missing_extra_is_found_before_a_run_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], extra: str
) -> None:
    from rl_training.deploy import video
    from rl_training.experiment.logging import mlflow, wandb

    for module in (video, wandb, mlflow):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf"pip install '.\[{extra}\]'"):
        train(a_config(tmp_path, **settings), progress=False)
    assert os.listdir(tmp_path) == []


# Ends of a run, by config


def test_stop_reward(tmp_path: Path) -> None:
    result = train(a_config(tmp_path, total_timesteps=10_000, stop_reward=1.0), progress=False)
    assert result.env_steps == 64
    assert "reached 1" in result.stop_reason
    run = RunDirectory(result.run_dir)  # type: ignore[arg-type]
    assert run.status() == "finished"
    assert run.metadata()["stop_reason"] == result.stop_reason
    assert {"step_64", "best"} <= {path.name for path in (run.path / "checkpoints").iterdir()}


def test_stop_reward_that_is_not_reached(tmp_path: Path) -> None:
    assert train(a_config(tmp_path, stop_reward=1e9), progress=False).stop_reason == "finished"


def test_stop_patience(tmp_path: Path) -> None:
    config = a_config(tmp_path, env_id="Mine", total_timesteps=10_000, stop_patience=2)
    result = train(config, env=lambda: Constant(), progress=False)
    assert result.env_steps == 3 * 64, "one best evaluation, and two that were no better"
    assert "no evaluation better than 3.00" in result.stop_reason


def test_patience_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
    config = a_config(tmp_path, env_id="Mine", total_timesteps=128, stop_patience=2)
    first = train(config, env=lambda: Constant(), progress=False)
    assert first.stop_reason == "finished"
    second = resume(first.run_dir, total_timesteps=10_000, env=lambda: Constant(), progress=False)
    assert second.env_steps == 3 * 64


def test_max_seconds(tmp_path: Path) -> None:
    result = train(a_config(tmp_path, total_timesteps=10**9, max_seconds=1e-6), progress=False)
    assert result.env_steps == 32
    assert "time limit" in result.stop_reason


def test_video_every(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    result = train(a_config(tmp_path, video_every=64, total_timesteps=64, eval_every=0), progress=False)
    assert result.run_dir is not None
    videos = list((result.run_dir / "videos").glob("*.mp4"))
    assert [path.stat().st_size > 0 for path in videos] == [True]
    assert "64" in videos[0].name


def test_a_film_that_a_signal_stopped_is_made_after_the_resume(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")

    class Filmed(gym.Wrapper[Any, Any, Any, Any]):
        sends = True

        def step(self, action: Any) -> Any:
            if self.render_mode and Filmed.sends:
                Filmed.sends = False
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(action)

    def make(mode: str | None = None) -> gym.Env[Any, Any]:
        return Filmed(gym.make("CartPole-v1", render_mode=mode))

    settings: dict[str, Any] = {"env": make, "eval_env": lambda: make("rgb_array"), "progress": False}
    settings["on_signal"] = "return"
    result = train(a_config(tmp_path, video_every=64, eval_every=0), **settings)
    assert (result.env_steps, result.interrupted) == (64, True)
    resumed = resume(result.run_dir, **settings)
    assert resumed.run_dir is not None
    assert {path.name.split("-episode")[0] for path in (resumed.run_dir / "videos").glob("*.mp4")} == {
        "step-64",
        "step-128",
    }


def test_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    def enough(run: Any) -> bool:
        return bool(run.env_steps < 64)

    result = train(a_config(tmp_path), callback=enough, progress=False)
    assert result.env_steps == 64
    assert "enough" in result.stop_reason


def test_signals_are_left_alone_outside_of_the_main_thread(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(train, a_config(tmp_path, eval_every=0), progress=False).result()
    assert result.env_steps == 128
    assert session.threading.current_thread() is session.threading.main_thread()
