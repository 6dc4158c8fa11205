"""`rl-training tune` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_training.cli import main
from rl_training.cli.tune_command import parse_tune
from rl_training.experiment.yaml_io import parse_yaml
from rl_training.tuning.tune import TuneConfig

SMALL = [
    *("--timesteps", "64", "--episodes", "1", "--evaluations", "1"),
    *("--set", "num_envs=2", "num_steps=16", "--set", "num_epochs=1", "minibatch_size=16"),
]


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("algo: ppo\nenv_id: CartPole-v1\nnum_envs: 4\n")
    arguments = ["a2c", "Acrobot-v1", "--trials", "1e2", "--jobs", "3", "--timesteps", "5_000", "--timeout", "60"]
    arguments += ["--seed", "7", "--set", "gamma=0.9", "--set", "network.actor_sizes=[8, 8]", "learning_rate=1e-3"]
    arguments += ["--pruner", "none", "--sampler", "random", "--storage", "sqlite:///x.db", "--study-name", "mine"]
    arguments += [
        "--output-dir",
        "there",
        "--episodes",
        "5",
        "--evaluations",
        "0",
        "--seeds",
        "2",
        "--search",
        "s.yaml",
    ]
    config, quiet, show = parse_tune([*arguments, "--config", str(file), "--quiet"])
    assert config == TuneConfig(
        "a2c",
        "Acrobot-v1",
        trials=100,
        jobs=3,
        timesteps=5_000,
        timeout=60.0,
        seed=7,
        seeds=2,
        set={"gamma": 0.9, "network.actor_sizes": [8, 8], "learning_rate": 1e-3},
        pruner="none",
        sampler="random",
        storage="sqlite:///x.db",
        study_name="mine",
        output_dir=Path("there"),
        episodes=5,
        evaluations=0,
        search=Path("s.yaml"),
        config=file,
    )
    assert (quiet, show) == (True, False)
    named = parse_tune(["--config", str(file)])[0]
    assert (named.algo, named.env_id, named.config) == ("ppo", "CartPole-v1", file)


def test_a_study_shows_its_progress_and_where_everything_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "ppo", "CartPole-v1", "--trials", "2", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "study ppo__CartPole-v1__seed0: 0 of 2 trials done"
    assert lines[1].startswith("first trial: preset ppo/cartpole; 64 steps each, ")
    assert lines[2].split()[:3] == ["trial", "0", "score"]
    assert "best " in lines[2]
    assert "1/2, " in lines[2]
    assert lines[2].endswith(" left")
    assert lines[3].endswith("2/2")
    assert lines[4].startswith("2 trials (2 complete); best ")
    where = Path("runs/tune/ppo__CartPole-v1__seed0")
    assert lines[5:7] == [f"preset: {where / 'best.yaml'}", f"report: {where / 'report.html'}"]
    assert lines[7] == f"to train with it: rl-training train --config {where / 'best.yaml'}"
    assert main(["tune", "ppo", "CartPole-v1", "--trials", "3", "--quiet", *SMALL]) == 0
    assert capsys.readouterr().out.startswith("3 trials (")


def test_what_would_be_searched_is_shown_and_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "ppo", "CartPole-v1", "--show-search", "--set", "gamma=0.9"]) == 0
    shown = capsys.readouterr().out
    data = parse_yaml(shown, "output")
    assert data["learning_rate"] == {"low": 1e-5, "high": 1e-2, "log": True}
    assert "gamma" not in data
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.yaml").write_text(shown)
    assert main(["tune", "ppo", "CartPole-v1", "--show-search", "--search", "mine.yaml"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["algorithm and environment: missing", "rl-training tune ppo CartPole-v1"]),
        (["ppo"], ["algorithm and environment: missing"]),
        (["ppo", "CartPole-v1", "--trials", "many"], ["--trials"]),
        (["ppo", "CartPole-v1", "--trials", "0"], ["trials: must be >= 1"]),
        (["ppo", "CartPole-v1", "--trails", "3"], ["--trials"]),
        (["ppo", "CartPole-v1", "--set", "gamma"], ["expected KEY=VALUE, got 'gamma'"]),
        (["ppo", "CartPole-v1", "--set", "gama=1"], ["unknown key 'gama'. Did you mean 'gamma'?"]),
        (["ppo", "CartPole-v1", "--set", "env_id=x"], ["'env_id' has its own option, use the second argument"]),
        (["ppo", "CartPole-v1", "--search", "no.yaml"], ["no.yaml: cannot be read"]),
        (["ppo", "CartPole-v1", "--storage", "here"], ["storage: 'here'"]),
        (["ppo", "NoEnv-v0"], ["NoEnv"]),
        (["sac", "CartPole-v1"], ["SAC needs an action space of type Box"]),
    ],
)
def test_errors_are_one_message_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str],
    parts: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *arguments]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    for part in parts:
        assert part in message
    assert not list(tmp_path.rglob("study.db"))
