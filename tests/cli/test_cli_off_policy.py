"""The command line with agents that learn from replay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rl_training.cli import main

ENVS = {"dqn": "CartPole-v1", "sac": "Pendulum-v1"}
SIZES = {
    "dqn": ["--algorithm.network.sizes", "8", "--algorithm.epsilon", "0.2"],
    "sac": ["--algorithm.network.actor-sizes", "8", "--algorithm.network.critic-sizes", "8"],
}
TINY = [
    *("--num-envs", "2", "--algorithm.buffer-size", "60", "--algorithm.batch-size", "8"),
    *("--algorithm.learning-starts", "10", "--algorithm.num-steps", "2", "--algorithm.updates-per-step", "0.5"),
    *("--eval-every", "50", "--eval-episodes", "1", "--checkpoint-every", "40"),
]


def run(*args: Any) -> int:
    return main([str(arg) for arg in args])


@pytest.mark.parametrize("algo", ENVS)
def test_train_eval_resume(algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", algo, ENVS[algo], *TINY, *SIZES[algo], "--total-timesteps", 100, "--output-dir", tmp_path]
    assert run(*arguments) == 0
    assert "resume grade: exact" in capsys.readouterr().err
    (directory,) = tmp_path.iterdir()
    assert list((directory / "checkpoints" / "step_100").glob("segment_*"))
    assert run("eval", directory, "--num-episodes", 2) == 0
    capsys.readouterr()
    assert run("resume", directory, "--quiet") == 2
    assert "has already been trained for 100 of 100 steps" in capsys.readouterr().err
    assert run("resume", directory, "--total-timesteps", 140, "--quiet") == 0
    metadata = json.loads((directory / "metadata.json").read_text())
    assert (metadata["env_steps"], metadata["status"], metadata["resume_grade"]) == (140, "finished", "exact")


NONSENSE = {
    "hindsight without goals": ("sac", "Pendulum-v1", ["--algorithm.her"], "her needs a Dict observation space"),
    "the wrong actions": ("sac", "CartPole-v1", [], "SAC needs an action space of type Box.*DQN"),
    "too large a share": ("sac", "Pendulum-v1", ["--algorithm.prior-ratio", "1.5"], "prior_ratio"),
    "no replay": ("sac", "Pendulum-v1", ["--algorithm.buffer-size", "0"], "buffer_size"),
    "a missing replay": ("sac", "Pendulum-v1", ["--algorithm.prior-replay", "/nowhere"], "/nowhere"),
    "a wrong strategy": ("dqn", "CartPole-v1", ["--algorithm.her-strategy", "past"], "her.strategy"),
    "a wrong support": ("c51", "CartPole-v1", ["--algorithm.v-min", "1000000"], "v_min"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_before_any_work(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    algo, env, flags, message = NONSENSE[name]
    assert run("train", algo, env, *flags, "--output-dir", tmp_path / "runs") == 2
    out, err = capsys.readouterr()
    assert re.search(message, err, re.DOTALL), err
    assert "Traceback" not in out + err
    assert not (tmp_path / "runs").exists()


def test_a_flag_as_people_may_write_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("train", "sac", "Pendulum-v1", "--algorithm.her", "true", "--output-dir", tmp_path / "runs")
    out, err = capsys.readouterr()
    assert code == 2
    assert "her" in err or "true" in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "runs").exists()
