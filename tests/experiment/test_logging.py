"""Where metrics go: files that anything can read, a live bar or plain lines, and the numbers people look for."""

from __future__ import annotations

import importlib.machinery
import io
import json
import math
import os
import shutil
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from rich.console import Console

from rl_training import PPO, TrainConfig, resume, train
from rl_training.contracts.batches import EvaluationResult
from rl_training.experiment.logging import (
    JsonlLogger,
    LoggingCallback,
    ProgressCallback,
    TensorBoardLogger,
    WandbLogger,
)
from rl_training.experiment.logging import progress as progress_module
from rl_training.runtime.callbacks import Every

TINY: dict[str, Any] = {
    "num_envs": 2,
    "total_timesteps": 128,
    "eval_every": 64,
    "eval_episodes": 2,
    "log_every": 32,
    "algorithm": {"num_steps": 16, "minibatch_size": 32, "num_epochs": 1},
}


class View:
    """A run as far as loggers look at it."""

    def __init__(self, **metrics: float) -> None:
        self.env_steps = 0
        self.total_timesteps = 1000
        self.iterations = 0
        self.interrupted = False
        self.best_return: float | None = None
        self.interrupted = False
        self.values = {"rollout/return_mean": 12.34, **metrics}
        self.unit = "steps"

    @property
    def position(self) -> int:
        return self.env_steps

    @property
    def end(self) -> int:
        return self.total_timesteps

    def metrics(self) -> dict[str, float]:
        return dict(self.values)

    def at(self, env_steps: int) -> Any:
        self.env_steps = env_steps
        self.iterations += 1
        return self


class Record:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, metrics: Any) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


# Schedule


def test_metrics_are_read_on_the_loggers_own_schedule_and_once_at_the_end() -> None:
    logger, view = Record(), View()
    callback = LoggingCallback([logger], Every(100))
    for step in (50, 100, 150, 330, 350):
        callback.on_iteration(view.at(step))
    callback.on_stop(view)  # type: ignore[arg-type]
    callback.on_stop(view)  # type: ignore[arg-type]
    callback.close()
    assert [step for step, _ in logger.logged] == [100, 330, 350]
    assert logger.closed == 1


def test_evaluations_are_logged_when_they_happen() -> None:
    logger, view = Record(), View()
    callback = LoggingCallback([logger], Every(10_000))
    callback.on_evaluation(view.at(64), EvaluationResult([1.0, 3.0], [10, 20], [True, False]))
    callback.on_evaluation(view.at(128), EvaluationResult([1.0], [10]))
    assert logger.logged[0] == (
        64,
        {"eval/return_mean": 2.0, "eval/return_std": 1.0, "eval/length_mean": 15.0, "eval/success_rate": 0.5},
    )
    assert "eval/success_rate" not in logger.logged[1][1]


# metrics.jsonl


def test_jsonl_is_valid_json_and_nan_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1, "e": 3})
    assert path.read_text().endswith("\n"), "readable while the run goes on"
    logger.close()
    again = JsonlLogger(path)
    again.log(2, {"a": 1.0})
    again.close()

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    read = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    stamps = [line.pop("time/unix") for line in read]
    assert abs(stamps[-1] - time.time()) < 60
    assert read == [
        {"a": None, "b": None, "c": None, "d": 0.1, "e": 3, "global_step": 1},
        {"a": 1.0, "global_step": 2},
    ]


# TensorBoard


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_events_can_be_read(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log(10, {"loss/policy": 0.5, "loss/critic": math.nan, "global_step": 10})
    logger.log(20, {"loss/policy": 0.25, "loss/critic": 2.0})
    logger.close()
    assert scalars(tmp_path) == {"loss/policy": [(10, 0.5), (20, 0.25)], "loss/critic": [(20, 2.0)]}


# Weights & Biases


class FakeWandb(types.ModuleType):
    """As much of the wandb package as is used."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **kwargs: Any) -> Any:
        self.inits.append(kwargs)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_config_the_name_and_the_numbers(tmp_path: Path, wandb: FakeWandb) -> None:
    logger = WandbLogger(tmp_path / "my-run", {"seed": 3}, "abc")
    logger.log(5, {"loss/policy": 0.5})
    logger.close()
    assert wandb.inits[0]["config"] == {"seed": 3}
    assert wandb.inits[0]["name"] == "my-run"
    assert wandb.inits[0]["id"] == "abc"
    assert wandb.logged == [(5, {"loss/policy": 0.5})]
    assert wandb.finished == 1


def test_wandb_is_behind_a_flag_and_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, wandb: FakeWandb) -> None:
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", output_dir=tmp_path, **TINY)
    train(config, progress=False)
    assert wandb.inits == []
    result = train(config.replace(wandb=True), progress=False)
    resume(result.run_dir, trust=True, total_timesteps=192, progress=False)
    assert len(wandb.inits) == wandb.finished == 2
    assert wandb.inits[0]["id"] == wandb.inits[1]["id"]
    assert wandb.inits[1]["resume"] == "allow"
    assert result.run_dir is not None
    assert wandb.inits[0]["name"] == result.run_dir.name
    assert wandb.inits[0]["config"]["algorithm"]["num_steps"] == 16
    steps = [step for step, metrics in wandb.logged if "loss/policy" in metrics]
    assert steps == [32, 64, 96, 128, 160, 192]


def test_wandb_itself_in_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package: a run and its resume, without a network, leave the numbers in files of the run directory."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
        monkeypatch.setenv(name, value)
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", output_dir=tmp_path, wandb=True, **TINY)
    result = train(config, progress=False)
    assert result.run_dir is not None
    resume(result.run_dir, trust=True, total_timesteps=192, progress=False)
    run_id = json.loads((result.run_dir / "metadata.json").read_text())["run_id"]
    logs = sorted((result.run_dir / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(logs) == 2, "one for each start, both of the same run"
    assert all(b"loss/policy" in log.read_bytes() for log in logs)


# MLflow


def mlflow_client(home: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{home / 'mlflow.db'}")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection to elsewhere is an error."""

    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_mlflow_keeps_runs_beside_them_and_a_resumed_one_goes_on(
    tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**TINY, "checkpoint_every": 64}
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", output_dir=Path("runs"), mlflow=True, **settings)
    result = train(config, progress=False)
    assert result.run_dir is not None
    assert sorted(os.listdir(tmp_path)) == ["runs"], "nothing beside the output directory"
    client = mlflow_client(tmp_path / "runs")
    (experiment,) = [e for e in client.search_experiments() if e.name == "rl-training"]
    assert experiment.artifact_location.endswith("runs/mlartifacts")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == result.run_dir.name
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.num_steps"] == "16"
    assert run.data.params["seed"] == str(config.seed)
    about = json.loads((result.run_dir / "metadata.json").read_text())
    assert run.data.tags["version.torch"] == about["versions"]["torch"]
    assert run.data.tags["rl_training.run_id"] == about["run_id"]
    assert ("mlflow.source.git.commit" in run.data.tags) == (about["git_commit"] is not None)

    shutil.rmtree(result.run_dir / "checkpoints" / "step_128")  # as if it had been killed before
    shutil.rmtree(result.run_dir / "checkpoints" / "best", ignore_errors=True)
    resume(result.run_dir, trust=True, total_timesteps=192, progress=False)
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss/policy")
    assert [point.step for point in history] == [32, 64, 96, 128, 160, 192], "every step once"
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    written = {line["global_step"]: line["loss/policy"] for line in lines if "loss/policy" in line}
    assert [point.value for point in history] == [written[point.step] for point in history]
    assert run.data.metrics["eval/return_mean"] > 0
    assert "global_step" not in run.data.metrics


def test_mlflow_goes_where_its_variables_say_and_knows_of_failures(
    tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")

    def fail(run: Any) -> None:
        run.record({"share (%)": 0.5})
        if run.env_steps > 64:
            raise ZeroDivisionError

    config = TrainConfig(algo="ppo", env_id="CartPole-v1", output_dir=tmp_path / "runs", mlflow=True, **TINY)
    with pytest.raises(ZeroDivisionError):
        train(config, callback=fail, progress=False)
    assert not (tmp_path / "runs" / "mlflow.db").exists()
    client = mlflow_client(tmp_path / "elsewhere")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FAILED"
    assert run.data.metrics["share ___"] == 0.5


# The bar


def plain_console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=False, width=200), text


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    console, text = plain_console()
    callback, view = ProgressCallback("ppo CartPole-v1", console), View()
    callback.on_start(view)  # type: ignore[arg-type]
    callback.on_iteration(view.at(250))
    view.best_return = 56.78
    callback.on_iteration(view.at(500))
    callback.on_stop(view.at(1000))
    callback.close()
    lines = text.getvalue().splitlines()
    assert len(lines) == 3
    assert "\x1b" not in text.getvalue(), "no control codes"
    assert "\r" not in text.getvalue()
    assert lines[0].startswith("ppo CartPole-v1: 250/1,000 steps (25 %), ")
    assert "/s, return 12.3, " in lines[0]
    assert "best" not in lines[0]
    assert "500/1,000 steps (50 %)" in lines[1]
    assert "return 12.3, best 56.8" in lines[1]
    assert "s left" in lines[1]
    assert lines[2].endswith("0 s left")


def test_plain_lines_do_not_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    console, text = plain_console()
    callback, view = ProgressCallback("x", console), View()
    callback.on_start(view)  # type: ignore[arg-type]
    for step in range(1, 200):
        callback.on_iteration(view.at(step))
    assert text.getvalue() == ""
    callback.on_stop(view.at(1000))
    assert len(text.getvalue().splitlines()) == 1


def test_a_live_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160, legacy_windows=False)
    callback, view = ProgressCallback("ppo CartPole-v1", console), View()
    view.best_return = 56.78
    callback.on_start(view)  # type: ignore[arg-type]
    callback._shown = 0.0
    callback.on_iteration(view.at(250))
    callback.on_stop(view.at(1000))
    callback.close()
    callback.close()
    shown = text.getvalue()
    assert "\x1b[" in shown, "it is live"
    for part in ("ppo CartPole-v1", "1,000/1,000 steps", "100%", "/s", "return 12.3", "best 56.8", "0:00"):
        assert part in shown, part


def test_the_bar_is_closed_even_if_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cursor stays hidden and the traceback is painted over."""
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(progress_module, "Console", lambda **kwargs: console)
    made: list[Any] = []
    start = progress_module.Progress.start
    monkeypatch.setattr(progress_module.Progress, "start", lambda self: (made.append(self), start(self))[1])

    def fail(run: Any) -> None:
        raise ZeroDivisionError

    agent = PPO("CartPole-v1", **{**TINY, "eval_every": 0})
    with pytest.raises(ZeroDivisionError):
        agent.learn(64, callback=fail)
    agent.close()
    assert [bar.live.is_started for bar in made] == [False]


def test_learning_shows_progress_on_standard_error_and_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    agent = PPO("CartPole-v1", **TINY)
    agent.learn(64)
    shown = capsys.readouterr()
    assert "64/64 steps (100 %)" in shown.err
    assert shown.out == ""
    agent.learn(64, progress=False)
    agent.close()
    assert capsys.readouterr() == ("", "")


# The numbers people look for


class Succeeds(gym.Env[Any, Any]):
    """Two steps; every other episode is a success."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own class attribute
    episodes = 0
    steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episodes += 1
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        ended = self.steps == 2
        return np.zeros(1, np.float32), 0.5, ended, False, {"is_success": self.episodes % 2 == 0} if ended else {}


LOSSES = {"loss/policy", "loss/critic", "loss/total"}
EPISODES = {"rollout/return_mean", "rollout/length_mean"}
TIMES = {"time/env_steps_per_second", "time/env_fraction", "time/policy_fraction", "time/update_fraction"}
COMMON = {
    *LOSSES, *EPISODES, *TIMES, "policy/entropy", "value/explained_variance", "train/gradient_norm",
    "train/learning_rate", "global_step",
}  # fmt: skip
OWN = {"ppo": {"policy/approx_kl", "policy/clip_fraction"}, "a2c": set()}


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_the_metrics_people_look_for(tmp_path: Path, algo: str) -> None:
    settings = {**TINY, "algorithm": {"num_steps": 32}, "eval_every": 0}
    result = train(TrainConfig(algo=algo, env_id="CartPole-v1", output_dir=tmp_path, **settings), progress=False)
    assert result.run_dir is not None
    last = json.loads((result.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    expected = COMMON | OWN[algo]
    assert expected <= last.keys()
    assert expected <= result.metrics.keys()
    assert all(isinstance(last[name], (int, float)) for name in expected)
    assert last["global_step"] == 128
    assert last["time/env_steps_per_second"] > 0
    shares = [last[name] for name in TIMES if name.endswith("fraction")]
    assert all(share > 0 for share in shares)
    assert sum(shares) <= 1.0
    assert 0 < last["policy/entropy"] <= math.log(2) + 1e-6
    assert last["train/learning_rate"] == pytest.approx({"ppo": 3e-4, "a2c": 7e-4}[algo])
    assert last["rollout/return_mean"] == last["rollout/length_mean"] > 1  # CartPole gives one per step
    assert "rollout/success_rate" not in last
    tags = scalars(result.run_dir / "tensorboard")
    assert expected - {"global_step"} <= tags.keys()
    assert tags["loss/policy"][-1][0] == 128


def test_success_rate_where_the_environment_reports_it(tmp_path: Path) -> None:
    settings = {**TINY, "num_envs": 1}
    config = TrainConfig(algo="ppo", env_id="Succeeds", output_dir=tmp_path, **settings)
    result = train(config, env=lambda: Succeeds(), progress=False)
    assert result.metrics["rollout/success_rate"] == pytest.approx(0.5, abs=0.02)
    assert result.metrics["rollout/return_mean"] == 1.0
    assert result.metrics["rollout/length_mean"] == 2.0
    assert result.run_dir is not None
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all("rollout/success_rate" in line for line in lines if "loss/policy" in line)
    assert all(line["eval/success_rate"] == 0.5 for line in lines if "eval/return_mean" in line)
    entries = json.loads((result.run_dir / "evaluations.json").read_text())
    assert [entry["success_rate"] for entry in entries] == [0.5] * 3


def test_returns_are_the_mean_of_the_last_hundred_episodes(tmp_path: Path) -> None:
    class Rising(Succeeds):
        """The n-th episode is one step with reward n."""

        def step(self, action: Any) -> Any:
            return np.zeros(1, np.float32), float(self.episodes), True, False, {}

    agent = PPO(lambda: Rising(), num_envs=1, eval_every=0, num_steps=50, num_epochs=1)
    metrics = agent.learn(250, progress=False).metrics
    agent.close()
    assert metrics["rollout/return_mean"] == pytest.approx(np.mean(range(151, 251)))
    assert metrics["rollout/episodes"] == 250
