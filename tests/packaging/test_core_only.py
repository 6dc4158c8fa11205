"""The core dependencies are enough, and are imported only when they are needed.

The extras are installed where the tests run, so a subprocess hides them: every installed distribution that the core
dependencies of pyproject.toml do not bring along is made invisible, just as if it had never been installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

# Modules of the extras: hidden even if their distribution says nothing of them, and all expected to be hidden.
EXTRA_MODULES = {
    *("ale_py", "mujoco", "Box2D", "pygame", "moviepy", "imageio", "wandb", "cv2", "matplotlib", "pandas"),
    *("optuna", "plotly", "scipy", "pyarrow"),
    *("mkdocs", "material", "mkdocstrings", "pytest", "_pytest", "xdist", "ruff", "mypy", "importlinter", "build"),
}

# Runs first in the subprocess. Not a blocker that raises, but finders that find nothing: `importlib.util.find_spec`
# answers None and `importlib.metadata` knows nothing, as on a machine without the extras.
HIDE = """
import importlib.metadata, json, re, sys
from importlib.machinery import PathFinder

hidden_modules, core_distributions = (set(names) for names in json.loads(sys.argv.pop(1)))

class CoreOnlyFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in hidden_modules else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*args, **kwargs):
        for found in importlib.metadata.MetadataPathFinder.find_distributions(*args, **kwargs):
            if re.sub("[-_.]+", "-", found.metadata["Name"] or "").lower() in core_distributions:
                yield found

    @staticmethod
    def invalidate_caches():
        PathFinder.invalidate_caches()

sys.meta_path[:] = [CoreOnlyFinder if finder is PathFinder else finder for finder in sys.meta_path]
assert CoreOnlyFinder in sys.meta_path
loaded = sorted(hidden_modules & sys.modules.keys())
assert not loaded, f"loaded before they could be hidden: {loaded}"

def run(argv):
    from rl_training.cli import main
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    assert code in (None, 0), f"{argv}: exit code {code!r}"
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def core_distributions() -> set[str]:
    """The distributions that `pip install rl-training` brings, by canonical name, itself among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {canonical(project["name"])}
    todo = [Requirement(text) for text in project["dependencies"]]
    done: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonical(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in done:
                continue
            done.add((name, extra))
            found.add(name)
            children = map(Requirement, metadata.distribution(name).requires or ())
            todo += [child for child in children if child.marker is None or child.marker.evaluate({"extra": extra})]
    return found


def hidden_modules(core: set[str]) -> set[str]:
    """Top-level modules that belong to no core distribution."""
    owners = metadata.packages_distributions()
    core_modules = {module for module, names in owners.items() if core & {canonical(name) for name in names}}
    assert {"torch", "gymnasium", "numpy", "tyro", "yaml", "safetensors", "rich"} <= core_modules
    assert not EXTRA_MODULES & core_modules, "a core dependency now brings an extra's module"
    return (set(owners) | EXTRA_MODULES) - core_modules - {"rl_training"}


def run_python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run code in a fresh interpreter; everything that it prints."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    result = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}"
    return result.stdout


@pytest.fixture(scope="module")
def core_only() -> str:
    """The argument that tells HIDE what to hide."""
    core = core_distributions()
    return json.dumps([sorted(hidden_modules(core)), sorted(core)])


def test_extras_are_out_of_sight(core_only: str) -> None:
    assert EXTRA_MODULES - set(json.loads(core_only)[0]) == set()


def test_hidden_modules_look_absent(core_only: str) -> None:
    code = """
        import importlib.util
        assert importlib.util.find_spec("pytest") is None
        assert importlib.util.find_spec("numpy") is not None
        for name in ("pytest", "wandb", "mujoco"):
            try:
                __import__(name)
            except ModuleNotFoundError:
                pass
            else:
                raise AssertionError(name)
        try:
            importlib.metadata.version("pytest")
        except importlib.metadata.PackageNotFoundError:
            pass
        else:
            raise AssertionError("pytest has a version")
        print(importlib.metadata.version("numpy"))
    """
    assert run_python(HIDE + textwrap.dedent(code), core_only).strip() == metadata.version("numpy")


def test_core_alone_imports_every_public_name(core_only: str) -> None:
    code = """
        import rl_training
        for name in getattr(rl_training, "__all__", ()):
            getattr(rl_training, name)
        import rl_training.config, rl_training.runs, rl_training.trainer
    """
    run_python(HIDE + textwrap.dedent(code), core_only)


def test_core_alone_trains_and_evaluates(core_only: str, tmp_path: Path) -> None:
    train = ["train", "ppo", "CartPole-v1", "--total-timesteps", "512", "--output-dir", str(tmp_path), "--quiet"]
    run_python(HIDE + "run(json.loads(sys.argv.pop(1)))", core_only, json.dumps(train), cwd=tmp_path)
    (config,) = tmp_path.rglob("config.yaml")
    run_dir = config.parent
    assert list(run_dir.rglob("*.safetensors")), "no checkpoint was written"

    evaluate = ["eval", str(run_dir), "--num-episodes", "2"]
    shown = run_python(HIDE + "run(json.loads(sys.argv.pop(1)))", core_only, json.dumps(evaluate), cwd=tmp_path)
    assert re.search(r"\d", shown), f"evaluation says nothing: {shown!r}"


def test_core_alone_has_the_zoo_but_for_statistics_and_plots(core_only: str, tmp_path: Path) -> None:
    run_python(HIDE + "import rl_training.zoo.benchmark, rl_training.zoo.worker, rl_training.zoo.progress", core_only)
    shown = run_python(HIDE + 'run(["zoo", "benchmark", "--list"])', core_only, cwd=tmp_path)
    assert "smoke" in shown
    report = json.dumps(["plot", str(tmp_path)])
    code = HIDE + "from rl_training.cli import main\nprint('code', main(json.loads(sys.argv.pop(1))))"
    refused = run_python(code, core_only, report, cwd=tmp_path)
    assert "pip install '.[plot]'" in refused
    assert "code 2" in refused


def modules_after(code: str, *arguments: str) -> set[str]:
    """The modules in memory after `code` has run."""
    probe = "\nimport sys; print('\\nMODULES', *sorted(sys.modules))"
    return set(run_python(textwrap.dedent(code) + probe, *arguments).rpartition("MODULES")[2].split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = modules_after("import rl_training")
    assert "rl_training" in loaded
    assert loaded & {"torch", "tensorboard", "gymnasium", "wandb"} == set()


def test_help_does_not_import_torch() -> None:
    code = """
        import runpy, sys
        sys.argv[0] = "rl-training"
        try:
            runpy.run_module("rl_training.cli", run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            assert stop.code in (None, 0), stop.code
        else:
            raise AssertionError("--help did not exit")
    """
    loaded = modules_after(code, "--help")
    assert "rl_training.cli" in loaded
    assert loaded & {"torch", "tensorboard", "wandb"} == set()
