"""The time that a run takes: training, over resumes, without evaluations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rl_training.data.dataset import read_dataset, write_dataset
from rl_training.experiment.config import TrainConfig
from rl_training.zoo import worker
from rl_training.zoo.suites import Protocol
from rl_training.zoo.worker import SECONDS, Stopwatch, measure, run_config
from tests.runtime.test_offline import pendulum_data


class FakeRun:
    def __init__(self) -> None:
        self.recorded: dict[str, float] = {}

    def metrics(self) -> dict[str, float]:
        return self.recorded

    def record(self, metrics: dict[str, float]) -> None:
        self.recorded.update(metrics)


def test_the_stopwatch_counts_training_over_resumes_and_no_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(worker.time, "perf_counter", lambda: now[0])
    run: Any = FakeRun()
    watch = Stopwatch()
    watch.on_start(run)
    now[0] += 3.0  # an iteration
    watch.on_iteration(run)
    now[0] += 2.0 + 5.0  # another one, and an evaluation before callbacks are called
    run.record({"time/evaluation_seconds": 5.0})
    watch.on_evaluation(run, None)
    watch.on_iteration(run)
    assert run.recorded[SECONDS] == pytest.approx(5.0)

    resumed = Stopwatch()
    resumed.load_state_dict(watch.state_dict())
    now[0] += 1000.0  # between the two processes
    resumed.on_start(run)
    now[0] += 1.0
    resumed.on_iteration(run)
    assert run.recorded[SECONDS] == pytest.approx(6.0)
    assert time.perf_counter() == now[0]


def test_a_run_is_evaluated_and_saved_as_the_suite_says(tmp_path: Path) -> None:
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", total_timesteps=1_000, checkpoint_every=70, stop_reward=3.0)
    run = run_config(config, Protocol(points=4, episodes=7), 5, tmp_path)
    assert (run.seed, run.eval_every, run.eval_episodes, run.checkpoint_every) == (5, 250, 7, 70)
    assert (run.num_threads, run.stop_reward, run.output_dir) == (1, None, tmp_path)
    assert run_config(config.replace(checkpoint_every=0), Protocol(points=4), 0, tmp_path).checkpoint_every == 250
    assert run_config(config, Protocol(points=5_000), 0, tmp_path).eval_every == 1


def test_a_run_on_recorded_data_counts_updates(tmp_path: Path) -> None:
    path = write_dataset(pendulum_data(), tmp_path / "data.npz")
    small = {"network": {"actor_sizes": [8], "critic_sizes": [8]}, "batch_size": 16}
    config = TrainConfig(
        algo="td3", env_id="Pendulum-v1", dataset=str(path), total_updates=100, algorithm=small, tensorboard=False
    )
    config = run_config(config, Protocol(points=2, episodes=1), 0, tmp_path / "runs")
    assert config.eval_every == 50
    found = measure(config, final_episodes=1)
    assert found is not None
    assert found.final is not None
    assert found.untrained is not None
    assert (found.env_steps, found.updates, found.untrained.step, found.final.step) == (0, 100, 0, 100)
    assert found.data_hash == read_dataset(path).hash
    assert [step for step, *_ in found.evaluations or []] == [50, 100]
    assert found.env_steps_per_second > 0
