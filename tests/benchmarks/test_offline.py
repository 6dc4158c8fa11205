"""The offline benchmark: which tasks there are, and that both sides get the same settings."""

from __future__ import annotations

import argparse
import sys

import numpy as np
import pytest

from benchmarks import harness, offline

sys.path.append(str(harness.SIDES))
import offline_ours
import offline_tasks

from rl_training.algorithms.registry import get_spec, registry
from rl_training.experiment.config import TrainConfig


def tasks_of(**changes):
    options = {"algos": list(offline_tasks.LEARNING_RATES), "sides": list(offline.SIDES), **changes}
    return argparse.Namespace(**options)


def test_algorithms_that_a_side_lacks_are_named_and_left_out(capsys):
    found = offline.chosen(tasks_of(algos=["bc", "awac"], sides=["d3rlpy"]), ["cartpole-replay", "pendulum-replay"])
    assert found == [
        ("d3rlpy", "bc", "cartpole-replay"),
        ("d3rlpy", "bc", "pendulum-replay"),
        ("d3rlpy", "awac", "pendulum-replay"),
    ]
    assert "left out: d3rlpy, awac on cartpole-replay: has no discrete form there" in capsys.readouterr().out


def test_names_that_do_not_exist_here_are_named(monkeypatch):
    known = {name: spec for name, spec in registry().items() if name != "bc"}
    monkeypatch.setattr(offline, "registry", lambda: known)
    assert offline.why_not("ours", "bc", "pendulum-replay") == "this version has no algorithm of that name yet"
    assert offline.why_not("ours", "iql", "pendulum-replay") is None


@pytest.mark.parametrize("algo", sorted(offline_tasks.LEARNING_RATES.keys() & registry().keys()))
def test_shared_settings_are_accepted(algo):
    settings = offline_ours.settings(algo, discrete=False)
    assert settings["batch_size"] == offline_tasks.BATCH_SIZE
    config = TrainConfig(algo=algo, env_id="Pendulum-v1", algorithm=settings)
    assert isinstance(config.algorithm, get_spec(algo).config)
    assert any(name.endswith("learning_rate") for name in settings)
    assert set(settings["network"].values()) == {offline_tasks.SIZES}


def test_a_run_that_was_measured_is_skipped(tmp_path, monkeypatch):
    made = []

    def run_side(side, command, environments, **options):
        made.append(command[command.index("--seed") + 1])
        return {"mean": 1.0, "seconds": 2.0}

    monkeypatch.setattr(offline, "run_side", run_side)
    args = tasks_of(
        algos=["bc"], sides=["d3rlpy"], datasets=["pendulum-replay"], seeds=[0, 1, 2], updates=5, max_runs=2,
        output=tmp_path / "offline.json", data=tmp_path, environments=tmp_path,
    )  # fmt: skip
    assert offline.measure_scores(args) == 0
    assert made == ["0", "1"]
    args.max_runs = None
    assert offline.measure_scores(args) == 0
    assert made == ["0", "1", "2"]


def test_speed_data_is_a_dataset(tmp_path):
    columns = offline_tasks.read_columns(offline_tasks.write_speed_data(tmp_path / "speed.npz", rows=400))
    assert columns["observations"].shape == (400, 17)
    assert columns["actions"].shape == (400, 6)
    assert np.flatnonzero(columns["truncations"]).tolist() == [199, 399]
    assert not offline_tasks.discrete(columns["actions"])
