"""The working directory may be a stranger's: of the modules in it, only one that was typed or trusted is imported."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_training.cli import main
from rl_training.experiment.checkpointing import checkpoints_of

OPTIONAL = ("dill", "pynvml", "gymnasium_robotics", "opt_einsum", "pydot", "tensorflow", "lz4")
"""Modules that libraries try to import and that are not installed here."""
PLANTED = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"
TINY = [
    *("--total-timesteps", "64", "--num-envs", "2", "--eval-every", "0", "--algorithm.num-steps", "16"),
    *("--algorithm.minibatch-size", "32", "--algorithm.num-epochs", "1", "--quiet"),
]
PACKAGE = {
    "my_package/__init__.py": """
        import gymnasium
        import my_helper
        gymnasium.register("MyEnv-v0", entry_point="my_entry:MyEnv", max_episode_steps=my_helper.STEPS)
    """,
    "my_package/late.py": "OBSERVATION = 0.5",
    "my_helper.py": "STEPS = 8",
    "my_entry.py": """
        import gymnasium
        import numpy as np

        class MyEnv(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(-1, 1, (2,))
            action_space = gymnasium.spaces.Discrete(2)

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                from my_package.late import OBSERVATION

                return np.full(2, OBSERVATION, np.float32), {}

            def step(self, action):
                return np.zeros(2, np.float32), float(action), False, False, {}
    """,
}
SUITE = """
description: one run
seeds: 1
evaluation: {points: 2, episodes: 1, final_episodes: 2}
normalization: [{env_id: "my_package:MyEnv-v0", low: 0, high: 8, reference: by hand}]
tasks:
  - preset: ppo/cartpole
    settings:
      env_id: "my_package:MyEnv-v0"
      total_timesteps: 64
      num_envs: 2
      algorithm: {num_steps: 16, minibatch_size: 32}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The program as it is installed: a script in a directory of its own. Arguments: lists of them, as JSON."""
    script = tmp_path_factory.mktemp("bin") / "rl-training"
    script.write_text(
        "import json, sys\nfrom rl_training.cli import main\nif __name__ == '__main__':\n"
        "    print(json.dumps([main(args) for args in json.loads(sys.argv[1])]))\n"
    )
    return [sys.executable, str(script)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    assert main(["train", "ppo", "CartPole-v1", "--output-dir", str(directory), *TINY]) == 0
    (run,) = directory.iterdir()
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with modules whose names libraries ask for."""
    for name in OPTIONAL:
        (tmp_path / f"{name}.py").write_text(PLANTED)
    return tmp_path


@pytest.fixture
def package(folder: Path) -> Path:
    """The folder, with the user's own package in it."""
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def call(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )


def codes(program: list[str], folder: Path, *commands: list[str]) -> tuple[list[int], str]:
    """The exit codes of commands that one process carries out, and all that it said."""
    done = call([*program, json.dumps(commands)], folder)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stdout + done.stderr


def ran(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.ran"))


def rewrite_config(checkpoint: Path, **changes: Any) -> None:
    """A checkpoint as a stranger could have written it: good, with another config."""
    config = {**json.loads((checkpoint / "config.json").read_text()), **changes}
    data = json.dumps(config).encode()
    (checkpoint / "config.json").write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["config.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_no_command_runs_modules_of_the_working_directory(program: list[str], trained: Path, folder: Path) -> None:
    shutil.copytree(trained, folder / "run")
    (folder / "fetch.yaml").write_text("algo: ppo\nenv_id: FetchReach-v4\n")
    shutil.copytree(checkpoints_of(trained)[-1], folder / "fetch")
    rewrite_config(folder / "fetch", env_id="FetchReach-v4")
    found, said = codes(
        *(program, folder),
        ["runs", "."],
        ["eval", "run", "--num-episodes", "1"],
        ["resume", "run", "--total-timesteps", "128", "--quiet"],
        ["train", "ppo", "CartPole-v1", *TINY],
        ["train", "--config", "fetch.yaml", "--quiet"],
        ["eval", "fetch"],
    )
    assert (found, ran(folder)) == ([0, 0, 0, 0, 2, 2], [])
    assert said.count("pip install '.[robotics]'") == 2


def test_python_dash_m_runs_no_modules_of_the_working_directory(trained: Path, folder: Path) -> None:
    done = call([sys.executable, "-m", "rl_training.cli", "eval", str(trained), "--num-episodes", "1"], folder)
    assert (done.returncode, ran(folder)) == (0, []), done.stderr


def test_a_package_in_the_working_directory_is_found_by_its_name(program: list[str], package: Path) -> None:
    train = ["train", "ppo", "my_package:MyEnv-v0", *TINY, "--output-dir", "runs"]
    found, said = codes(program, package, [*train, "--vectorization", "async"])
    assert found == [0], said
    (run,) = (package / "runs").iterdir()
    done = call([sys.executable, "-m", "rl_training.cli", "eval", str(run), "--num-episodes", "1", "--trust"], package)
    assert done.returncode == 0, done.stderr
    assert ran(package) == []


def test_a_benchmark_of_a_package_in_the_working_directory(program: list[str], package: Path) -> None:
    (package / "suite.yaml").write_text(SUITE)
    found, said = codes(program, package, ["zoo", "benchmark", "suite.yaml", "--jobs", "1", "--quiet", "--trust"])
    assert found == [0], said
    assert "1 of 1 runs done" in said
    assert ran(package) == []


def test_a_study_of_a_package_in_the_working_directory(program: list[str], package: Path) -> None:
    (package / "multiprocessing.py").write_text(PLANTED)  # what a process that is started anew imports first
    settings = ["num_envs=2", "num_steps=16", "minibatch_size=32", "num_epochs=1"]
    options = ["--trials", "1", "--jobs", "2", "--timesteps", "64", "--episodes", "1", "--evaluations", "0"]
    found, said = codes(program, package, ["tune", "ppo", "my_package:MyEnv-v0", *options, "--set", *settings])
    assert found == [0], said
    assert ran(package) == []


def test_a_config_file_of_a_study_is_not_trusted_to_name_a_module(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(package)
    (package / "evil.py").write_text(PLANTED)
    (package / "study.yaml").write_text("algo: ppo\nenv_id: evil:CartPole-v1\n")
    assert main(["tune", "--config", "study.yaml", "--trials", "1", "--timesteps", "64"]) == 2
    assert "would import the module 'evil'" in capsys.readouterr().err
    assert ran(package) == []


def test_the_path_is_as_before_when_a_module_has_been_imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_training import PPO

    monkeypatch.chdir(package)
    before = list(sys.path)
    agent = PPO("my_package:MyEnv-v0", num_envs=1)
    agent.close()
    assert sys.path == before
    with pytest.raises(Exception, match="my_absent_package"):
        PPO("my_absent_package:MyEnv-v0", num_envs=1)
    assert sys.path == before
    for name in ("my_package", "my_package.late", "my_helper", "my_entry"):
        sys.modules.pop(name, None)
