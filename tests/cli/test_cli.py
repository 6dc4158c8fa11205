"""The command line: what it does, what it prints, and how it says no."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rl_training
from rl_training import TrainConfig, train
from rl_training.algorithms.ppo import PPOConfig
from rl_training.cli import COMMANDS, load_config, main
from rl_training.contracts.schedule import Cosine, Linear
from rl_training.experiment.presets import presets
from rl_training.experiment.runs import RunDirectory
from rl_training.zoo.manifest import read_results, results_dir
from rl_training.zoo.measured import measured

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("--num-envs", "2", "--eval-every", "64", "--eval-episodes", "2", "--algorithm.num-steps", "16"),
    *("--algorithm.minibatch-size", "32", "--algorithm.num-epochs", "1"),
]


class Cli:
    """Runs the program in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.out = self.err = ""

    def __call__(self, *args: Any) -> int:
        self.capsys.readouterr()
        code = main([str(arg) for arg in args])
        self.out, self.err = self.capsys.readouterr()
        return code

    def refuses(self, *args: Any) -> str:
        """Exit code 2, one message on standard error, no traceback."""
        assert self(*args) == 2
        assert "Traceback" not in self.err + self.out
        assert self.err.strip()
        return self.err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that several tests look at."""
    directory = tmp_path_factory.mktemp("runs")
    arguments = ["train", "ppo", "CartPole-v1", "--total-timesteps", "128", "--output-dir", str(directory), "--quiet"]
    assert main([*arguments, "--checkpoint-every", "64", *TINY]) == 0
    (run,) = directory.iterdir()
    return run


def settings_of(directory: Path) -> TrainConfig:
    (run,) = directory.iterdir()
    return load_config(run / "config.yaml")


# Help and version


def test_help_lists_every_command(cli: Cli) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert cli(*arguments) == 0
        assert all(re.search(rf"^  {name} ", cli.out, re.MULTILINE) for name in COMMANDS)
    known = {"train", "eval", "ope", "resume", "runs", "data", "plot", "report", "zoo", "tune", "export", "hub"}
    known |= {"doctor", "check-env"}
    assert set(COMMANDS) == known


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli: Cli, command: str) -> None:
    assert cli(command, "--help") == 0
    assert f"rl-training {command}" in cli.out


def test_help_of_train_shows_the_settings_of_the_algorithm_and_the_values_of_the_preset(cli: Cli) -> None:
    assert cli("train", "ppo", "CartPole-v1", "--help") == 0
    assert "--algorithm.clip-coef" in cli.out
    assert "--checkpoint-every" in cli.out
    assert cli("train", "a2c", "CartPole-v1", "--help") == 0
    assert "--algorithm.clip-coef" not in cli.out
    assert "--algorithm.num-steps" in cli.out


def test_version(cli: Cli) -> None:
    assert cli("--version") == 0
    assert cli.out.strip() == f"rl_training {rl_training.__version__}"


def test_python_dash_m_is_the_same_program() -> None:
    def run(*args: str) -> Any:
        command = [sys.executable, "-m", "rl_training.cli", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert run("--version").stdout.strip() == f"rl_training {rl_training.__version__}"
    wrong = run("trian")
    assert wrong.returncode == 2
    assert "Did you mean 'train'?" in wrong.stderr


# train


def test_train_says_what_it_did_and_where_everything_is(cli: Cli, tmp_path: Path) -> None:
    code = cli(
        *("train", "ppo", "CartPole-v1", "--total-timesteps", 128, "--output-dir", tmp_path),
        *("--checkpoint-every", 64, *TINY),
    )
    assert code == 0
    (run,) = tmp_path.iterdir()
    assert "preset ppo/cartpole" in cli.out
    assert "finished after 128 steps" in cli.out
    assert re.search(r"evaluation: mean return \d+\.\d+ \+/- \d+\.\d+ over 2 episodes", cli.out)
    assert f"run directory: {run}" in cli.out
    assert f"{run}/checkpoints/step_128" in cli.out
    assert "128/128 steps (100 %)" in cli.err, "progress as plain lines: this is no terminal"
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"step_64", "step_128"}


def test_train_finds_the_preset(run_dir: Path) -> None:
    config = load_config(run_dir / "config.yaml")
    preset = presets()["ppo/cartpole"]
    assert config.algorithm.gamma == preset.data["algorithm"]["gamma"]
    assert config.algorithm.num_steps == 16  # type: ignore[attr-defined]


def test_train_names_presets_with_other_arguments(cli: Cli) -> None:
    assert "DrQv2 needs images" in cli.refuses("train", "drqv2", "Pendulum-v1")
    assert "There is drqv2/pendulum-pixels (--env-kwargs render_mode=rgb_array)" in cli.out


def test_train_on_a_family_asks_for_one_of_it(cli: Cli) -> None:
    path = presets()["ppo/atari"].path
    problem = cli.refuses("train", "--config", path)
    assert "env_id: 'ALE/*' is a pattern for many environments; choose a game with --env-id ALE/Pong-v5" in problem


def test_train_refuses_settings_of_atari_elsewhere(cli: Cli) -> None:
    problem = cli.refuses("train", "ppo", "CartPole-v1", "--atari.frame-stack", 8)
    assert "command line > atari: frame_stack: settings of Atari games" in problem


def test_train_without_a_preset_says_that_it_uses_the_defaults(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--total-timesteps", 64, "--output-dir", tmp_path, "--eval-every", 0, "--num-envs", 2]
    assert cli("train", "ppo", "FrozenLake-v1", *arguments) == 0
    assert "no preset for ppo on FrozenLake-v1: using the defaults" in cli.out
    assert settings_of(tmp_path).algorithm == PPOConfig()


def test_train_from_a_config_file_with_options_on_top(cli: Cli, tmp_path: Path) -> None:
    """The line that the documentation begins with, made short."""
    code = cli(
        *("train", "--config", ROOT / "configs" / "ppo" / "cartpole.yaml", "--seed", 3, "--algorithm.clip-coef", 0.1),
        *("--total-timesteps", 64, "--output-dir", tmp_path, *TINY),
    )
    assert code == 0
    config = settings_of(tmp_path)
    assert config.seed == 3
    assert config.algorithm.clip_coef == 0.1  # type: ignore[attr-defined]
    assert config.algorithm.gamma == presets()["ppo/cartpole"].data["algorithm"]["gamma"]
    (run,) = tmp_path.iterdir()
    assert run.name.startswith("ppo__CartPole-v1__seed3__")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--algorithm.learning-rate", "{schedule: linear, start: 3e-4}", Linear(3e-4)),
        ("--algorithm.learning-rate", "{schedule: cosine, start: 1e-3, end: 1e-5}", Cosine(1e-3, 1e-5)),
        ("--algorithm.learning-rate", "1e-3", 1e-3),
        ("--algorithm.clip-coef", "0.1", 0.1),
        ("--algorithm.clip_coef", "0.1", 0.1),
        ("--algorithm.target-kl", "0.02", 0.02),
        ("--algorithm.target-kl", "none", None),
        ("--algorithm.max-grad-norm", "None", None),
        ("--algorithm.network.activation", "relu", "relu"),
        ("--algorithm.optimizer.eps", "1e-7", 1e-7),
        ("--total-timesteps", "1e6", 1_000_000),
        ("--total-timesteps", "100_000", 100_000),
        ("--stop-reward", "-100", -100.0),
        ("--vectorization", "async", "async"),
    ],
)
def test_options_are_typed(option: str, value: str, expected: Any) -> None:
    from rl_training.cli.train_command import parse_train

    config, _, _ = parse_train(["ppo", "CartPole-v1", option, value])
    found: Any = config
    for name in option.removeprefix("--").replace("-", "_").split("."):
        found = getattr(found, name)
    assert found == expected
    assert type(found) is type(expected)


def test_several_values_flags_and_wrappers() -> None:
    from rl_training.cli.train_command import parse_train

    arguments = ["--algorithm.network.actor-sizes", "32", "16", "--normalize-obs", "--no-tensorboard"]
    wrapper = ["--wrappers", "{name: TimeLimit, kwargs: {max_episode_steps: 9}}", "{name: ClipReward}"]
    config, _, _ = parse_train(["ppo", "CartPole-v1", *arguments, *wrapper])
    assert config.algorithm.network.actor_sizes == (32, 16)  # type: ignore[attr-defined]
    assert (config.normalize_obs, config.tensorboard) == (True, False)
    assert [(w.name, w.kwargs) for w in config.wrappers] == [
        ("TimeLimit", {"max_episode_steps": 9}),
        ("ClipReward", {}),
    ]


def test_environment_arguments_choose_the_preset_and_reach_the_environment(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--total-timesteps", 64, "--output-dir", tmp_path, *TINY, "--eval-every", 0]
    assert cli("train", "ppo", "LunarLander-v3", "--env-kwargs", "continuous=true", "gravity=-9.0", *arguments) == 0
    config = settings_of(tmp_path)
    assert config.env_kwargs == {"continuous": True, "gravity": -9.0}
    (run,) = tmp_path.iterdir()
    agent = rl_training.load(run)
    assert agent._experiment.spec.action_space.shape == (2,), "continuous"
    agent.close()

    from rl_training.cli.train_command import parse_train

    discrete = parse_train(["ppo", "LunarLander-v3"])[1]
    continuous = parse_train(["ppo", "LunarLander-v3", "--env-kwargs", "continuous=true"])[1]
    assert discrete is not None
    assert continuous is not None
    assert discrete.name != continuous.name


def test_the_resolved_config_of_a_run_gives_the_same_run_again(cli: Cli, tmp_path: Path, run_dir: Path) -> None:
    code = cli("train", "--config", run_dir / "config.yaml", "--output-dir", tmp_path, "--quiet")
    assert code == 0
    assert settings_of(tmp_path) == load_config(run_dir / "config.yaml").replace(output_dir=tmp_path)
    (again,) = tmp_path.iterdir()
    weights = [path / "checkpoints" / "step_128" / "state.safetensors" for path in (run_dir, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_quiet_prints_only_the_last_lines(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--total-timesteps", 64, "--output-dir", tmp_path, *TINY]
    assert cli("train", "ppo", "CartPole-v1", *arguments, "--quiet") == 0
    assert cli.err == ""
    assert "preset" not in cli.out
    assert cli.out.startswith("finished after 64 steps")


# eval


def test_eval_of_a_run_and_of_a_checkpoint(cli: Cli, run_dir: Path) -> None:
    for path in (run_dir, run_dir / "checkpoints" / "step_64", run_dir / "checkpoints" / "best"):
        assert cli("eval", path, "--num-episodes", 3, "--seed", 5) == 0
        assert "over 3 episodes (deterministic actions)" in cli.out
        assert re.search(r"mean return \d+\.\d\d \+/- \d+\.\d\d, from \d+\.\d\d to \d+\.\d\d", cli.out)
        assert re.search(r"mean length \d+\.\d", cli.out)
    before = cli.out
    assert cli("eval", run_dir / "checkpoints" / "best", "--num-episodes", 3, "--seed", 5) == 0
    assert cli.out == before, "equal seeds, equal episodes"
    assert cli("eval", run_dir, "--num-episodes", 2, "--stochastic") == 0
    assert "sampled actions" in cli.out


def test_eval_chooses_actions_as_the_run_did_unless_told(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--total-timesteps", 32, "--output-dir", tmp_path, "--no-eval-deterministic", "--quiet"]
    assert cli("train", "ppo", "CartPole-v1", *arguments, *TINY) == 0
    (run,) = tmp_path.iterdir()
    for flags, how in (([], "sampled"), (["--stochastic"], "sampled"), (["--deterministic"], "deterministic")):
        assert cli("eval", run, "--num-episodes", 1, *flags) == 0
        assert f"({how} actions)" in cli.out
    assert "use only one of them" in cli.refuses("eval", run, "--stochastic", "--deterministic")


def test_eval_prints_the_share_of_random_actions(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--total-timesteps", 32, "--output-dir", tmp_path, "--eval-epsilon", 0.005, "--quiet"]
    assert cli("train", "ppo", "CartPole-v1", *arguments, *TINY) == 0
    (run,) = tmp_path.iterdir()
    for flags, how in (([], "deterministic"), (["--stochastic"], "sampled")):
        assert cli("eval", run, "--num-episodes", 1, *flags) == 0
        assert f"({how} actions, 0.5% random actions)" in cli.out


def test_eval_writes_nothing_into_the_run(cli: Cli, run_dir: Path) -> None:
    before = sorted(path for path in run_dir.rglob("*"))
    assert cli("eval", run_dir, "--num-episodes", 1) == 0
    assert sorted(path for path in run_dir.rglob("*")) == before


def test_eval_with_video(cli: Cli, run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    assert cli("eval", run_dir, "--num-episodes", 1, "--video", "--video-dir", tmp_path) == 0
    assert f"videos in {tmp_path}" in cli.out
    assert len(list(tmp_path.glob("*.mp4"))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is always a screen")
def test_videos_are_recorded_without_a_display(run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    screen = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in screen}
    options = ["--num-episodes", "1", "--video", "--video-dir", str(tmp_path)]
    command = [sys.executable, "-m", "rl_training.cli", "eval", str(run_dir), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "XDG_RUNTIME_DIR" not in done.stderr
    assert len(list(tmp_path.glob("*.mp4"))) == 1


def test_eval_with_rendering_shows_one_window(cli: Cli, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert cli("eval", run_dir, "--num-episodes", 1, "--render") == 0
    assert "over 1 episodes" in cli.out


# resume


@pytest.mark.filterwarnings("ignore:the schedules of")  # those of the preset
@pytest.mark.filterwarnings("ignore:the schedules")
def test_resume(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--total-timesteps", 64, "--output-dir", tmp_path, *TINY, "--quiet"]
    assert cli("train", "ppo", "CartPole-v1", *arguments) == 0
    (run,) = tmp_path.iterdir()
    assert "already been trained for 64 of 64 steps" in cli.refuses("resume", run)
    assert cli("resume", run, "--total-timesteps", 128) == 0
    assert "finished after 128 steps" in cli.out
    assert f"{run}/checkpoints/step_128" in cli.out
    assert RunDirectory(run).env_steps() == 128


# zoo


def test_zoo_list_shows_every_preset(cli: Cli) -> None:
    assert cli("zoo", "list") == 0
    for name, preset in presets().items():
        line = next(line for line in cli.out.splitlines() if line.split()[:1] == [name])
        assert preset.env_id in line
        assert f"{preset.total_timesteps:,}" in line
        assert line.rstrip().endswith(measured(preset, read_results(results_dir())).text)
    assert cli("zoo", "list", "a2c") == 0
    assert "a2c/cartpole" in cli.out
    assert "ppo/" not in cli.out


def test_zoo_show(cli: Cli) -> None:
    assert cli("zoo", "show", "ppo/cartpole") == 0
    assert "env_id: CartPole-v1" in cli.out
    assert presets()["ppo/cartpole"].path.read_text().strip() in cli.out
    assert "Did you mean 'ppo/cartpole'?" in cli.refuses("zoo", "show", "ppo/cartpol")
    assert "preset or algorithm: missing" in cli.refuses("zoo", "show")
    cli.refuses("zoo", "destroy")


# runs


def test_runs_is_a_table_of_status_steps_and_best_return(cli: Cli, run_dir: Path) -> None:
    run = RunDirectory(run_dir)
    assert cli("runs", run_dir.parent) == 0
    line = next(line for line in cli.out.splitlines() if run_dir.name in line)
    assert line.split()[1:3] == ["finished", "128"]
    assert f"{run.best_return():.2f}" in line
    heading = cli.out.splitlines()[0]
    assert all(word in heading for word in ("status", "steps", "best return"))


def test_runs_shows_damaged_and_unfinished_runs_too(cli: Cli, tmp_path: Path) -> None:
    for name, metadata in (
        ("broken", '{"status": '),
        ("failed", json.dumps({"status": "failed", "env_steps": 1500})),
        ("killed", json.dumps({"status": "running", "pid": 2**22 + 1, "host": __import__("socket").gethostname()})),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("")
        (tmp_path / name / "metadata.json").write_text(metadata)
    assert cli("runs", tmp_path) == 0
    rows = {line.split()[0]: line.split()[1:] for line in cli.out.splitlines()}
    assert rows["broken"] == ["damaged"]
    assert rows["failed"][:3] == ["failed", "1,500", "-"]
    assert rows["killed"][0] == "interrupted"


def test_runs_of_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("runs", tmp_path) == 0
    assert "no runs in" in cli.out
    assert "is not a directory" in cli.refuses("runs", tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    assert "'runs' is not a directory" in cli.refuses("runs")


# doctor


def test_doctor(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_training.cli import doctor_command

    assert cli("doctor") == 0
    assert re.search(rf"^rl_training +{re.escape(rl_training.__version__)}$", cli.out, re.MULTILINE)
    for name in ("python", "torch", "gymnasium", "numpy", "system", "devices", "cpu"):
        assert name in cli.out
    monkeypatch.setattr(doctor_command, "find_spec", lambda name: None)
    assert cli("doctor") == 0
    for extra in ("atari", "box2d", "export", "hub", "mlflow", "mujoco", "video", "wandb"):
        assert f"missing; pip install '.[{extra}]'" in cli.out
    monkeypatch.setattr(doctor_command, "find_spec", lambda name: object())
    assert cli("doctor") == 0
    assert "missing" not in cli.out


def test_doctor_knows_every_extra_that_users_choose_from() -> None:
    import tomllib

    from rl_training.cli.doctor_command import EXTRAS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"all", "dev", "docs"}


# How it says no


def test_an_unknown_command_gets_the_nearest_one(cli: Cli) -> None:
    assert "unknown command 'trian'. Did you mean 'train'?" in cli.refuses("trian")
    assert "Commands: train, eval" in cli.refuses("xyzzy")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train"], ["rl-training train ppo CartPole-v1", "--config FILE"]),
        (["train", "ppo"], ["algorithm and environment: missing"]),
        (["train", "ppoo", "CartPole-v1"], ["unknown algorithm 'ppoo'", "Did you mean 'ppo'?"]),
        (["train", "ppo", "CartPol-v1"], ["env_id", "CartPole"]),
        (["train", "ppo", "CartPole-v1", "--config", "no.yaml"], ["no.yaml: cannot be read: No such file"]),
        (["train", "--config"], ["--config", "expected one argument"]),
        (["train", "ppo", "CartPole-v1", "--env-kwargs", "oops"], ["expected KEY=VALUE, got 'oops'"]),
        (["train", "ppo", "CartPole-v1", "--env-kwargs", "oops=1"], ["env_kwargs", "oops"]),
        (["train", "ppo", "CartPole-v1", "--device", "warp"], ["device: 'warp' is not available here"]),
        (["train", "ppo", "CartPole-v1", "--algorithm.clip-coef", "-1"], ["command line", "clip_coef: must be > 0"]),
        (["train", "ppo", "CartPole-v1", "--algorithm.clip-coef", "x"], ["clip_coef: expected a number or a schedule"]),
        (["train", "ppo", "CartPole-v1", "--algorithm.clip-coef", "{a: "], ["clip-coef"]),
        (["train", "ppo", "CartPole-v1", "--seed", "x"], ["--seed"]),
        (["train", "ppo", "CartPole-v1", "--seed", "1.5"], ["--seed", "whole number"]),
        (["train", "ppo", "CartPole-v1", "--vectorization", "synch"], ["synch", "sync", "async", "native"]),
        (["train", "ppo", "CartPole-v1", "--wrappers", "{name: Nope}"], ["unknown wrapper 'Nope'"]),
        (["train", "ppo", "CartPole-v1", "third"], ["third"]),
        (["eval"], ["PATH"]),
        (["eval", "nowhere"], ["nowhere does not exist"]),
        (["eval", "nowhere", "--num-episodes", "0"], ["num_episodes: must be at least 1"]),
        (["resume", "nowhere"], ["nowhere is not a run directory"]),
    ],
)
def test_errors_are_one_message_and_exit_code_2(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    message = cli.refuses(*arguments)
    for part in parts:
        assert part in message
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_all_wrong_options_at_once(cli: Cli) -> None:
    arguments = ["--seed", "-1", "--num-envs", "0", "--eval-every", "0", "--stop-reward", "5"]
    message = cli.refuses("train", "ppo", "CartPole-v1", *arguments)
    for part in ("seed: must be >= 0", "num_envs: must be >= 1", "stop_reward: needs evaluations"):
        assert f"command line > {part}" in message


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--totl-timesteps", "--total-timesteps"),
        ("--algorithm.clip-coff", "--algorithm.clip-coef"),
    ],
)
def test_an_unknown_flag_gets_a_suggestion(cli: Cli, flag: str, near: str) -> None:
    message = cli.refuses("train", "ppo", "CartPole-v1", flag, "1")
    assert "Unrecognized options" in message
    assert near in message


def test_an_unknown_flag_of_another_command(cli: Cli, run_dir: Path) -> None:
    message = cli.refuses("eval", run_dir, "--num-episode", "3")
    assert "--num-episodes" in message


def test_problems_of_a_file_name_the_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("algo: ppo\nenv_id: CartPole-v1\nsed: 1\nalgorithm: {lerning_rate: 1}\n")
    message = cli.refuses("train", "--config", path)
    assert f"{path}: unknown key 'sed'. Did you mean 'seed'?" in message
    assert f"{path} > algorithm: unknown key 'lerning_rate'. Did you mean 'learning_rate'?" in message


def test_debug_adds_the_traceback(cli: Cli) -> None:
    assert cli("eval", "nowhere", "--debug") == 2
    assert "Traceback (most recent call last)" in cli.err
    assert "nowhere does not exist" in cli.err


def test_a_bug_is_one_line_and_exit_code_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_training.cli import doctor_command

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(doctor_command, "package_versions", broken)
    assert cli("doctor") == 1
    assert "ZeroDivisionError: a bug" in cli.err
    assert "Add --debug" in cli.err
    assert len(cli.err.strip().splitlines()) == 1
    assert cli("doctor", "--debug") == 1
    assert "Traceback (most recent call last)" in cli.err


def test_ctrl_c_before_the_run_has_begun(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_training.cli import doctor_command

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_command, "package_versions", interrupt)
    assert cli("doctor") == 130
    assert "Traceback" not in cli.err


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a whole config is resolved, and how often it is checked that its settings go together."""
    counts = {"_finish": 0, "problems": 0}

    def counting(name: str) -> None:
        method = getattr(TrainConfig, name)

        def count(self: TrainConfig, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(self, *args, **kwargs)

        monkeypatch.setattr(TrainConfig, name, count)

    for name in counts:
        counting(name)
    return counts


def test_a_config_is_resolved_and_checked_once_for_a_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counted(monkeypatch)
    fixed = ["--algorithm.learning-rate", "1e-3", "--algorithm.clip-coef", "0.2"]  # no schedule that would be over
    options = [*TINY, *fixed, "--total-timesteps", "64"]
    assert cli("train", "ppo", "CartPole-v1", *options, "--output-dir", str(tmp_path)) == 0
    assert counts == {"_finish": 1, "problems": 1}

    (run,) = tmp_path.iterdir()
    counts.update(_finish=0, problems=0)
    assert cli("resume", str(run), "--total-timesteps", "128") == 0
    # the run's config (for the defaults of the options), the same with the options, and the checkpoint's own
    assert counts == {"_finish": 3, "problems": 3}


# Spelling, presets, printing, checking


def test_settings_of_the_algorithm_may_be_written_without_its_name(cli: Cli) -> None:
    assert cli("train", "ppo", "CartPole-v1", "--clip-coef", "0.125", "--no-normalize-advantage", "--print-config") == 0
    short = cli.out
    assert "clip_coef: 0.125" in short
    assert "normalize_advantage: false" in short
    long = ["--algorithm.clip-coef", "0.125", "--algorithm.no-normalize-advantage"]
    assert cli("train", "ppo", "CartPole-v1", *long, "--print-config") == 0
    assert cli.out == short


def test_a_preset_can_be_left_out(cli: Cli) -> None:
    assert cli("train", "ppo", "CartPole-v1", "--no-preset", "--print-config") == 0
    assert cli.out.strip() == TrainConfig(algo="ppo", env_id="CartPole-v1").to_yaml().strip()
    assert cli("train", "ppo", "CartPole-v1", "--print-config") == 0
    assert cli.out.strip() != TrainConfig(algo="ppo", env_id="CartPole-v1").to_yaml().strip()


def test_check_env(cli: Cli) -> None:
    assert cli("check-env", "CartPole-v1", "--num-steps", "300") == 0
    assert "No problems found." in cli.out
    assert cli("check-env", "Nothing-v0") == 1
    assert "could not be made" in cli.out


def test_results_as_json(cli: Cli, tmp_path: Path) -> None:
    config: dict[str, Any] = {"num_envs": 2, "total_timesteps": 64, "eval_every": 0, "output_dir": str(tmp_path)}
    run = train(TrainConfig(algo="ppo", env_id="CartPole-v1", **config, algorithm={"num_steps": 16}), progress=False)
    assert cli("eval", run.run_dir, "--num-episodes", "3", "--json") == 0
    found = json.loads(cli.out)
    assert len(found["returns"]) == 3
    assert found["mean"] == pytest.approx(sum(found["returns"]) / 3)
    assert cli("runs", tmp_path, "--json") == 0
    (line,) = cli.out.splitlines()
    facts = json.loads(line)
    assert (facts["status"], facts["env_steps"], facts["resume_grade"]) == ("finished", 64, "exact")
