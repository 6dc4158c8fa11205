"""What other packages add: found by entry points, imported only when asked for, and unable to break this package."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_training
from rl_training.algorithms import registry as algorithms
from rl_training.algorithms.registry import ALGORITHMS, get_spec, own_algorithms, register_algorithm, registry
from rl_training.cli import main
from rl_training.contracts import plugins
from rl_training.contracts.errors import CheckpointError, ConfigError
from rl_training.contracts.plugins import ENCODERS, REGISTRIES, Registry
from rl_training.experiment import presets as preset_files
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.plugins import plugins_of, require_plugins
from rl_training.policies.encoders import FlatEncoder

Install = Callable[..., None]

ALGORITHM = """
import dataclasses
from rl_training.algorithms import a2c
SPEC = dataclasses.replace(a2c.SPEC, name="{name}", title="{title}")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts distributions with entry points and modules on the path; they are gone after the test."""
    own_algorithms()
    for known in REGISTRIES.values():
        monkeypatch.setattr(known, "_added", {})
        monkeypatch.setattr(known, "_loaded", {})
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def forget() -> None:
        for cached in (plugins.entry_points, plugins._distributions, preset_files.presets, algorithms._warn):
            cached.cache_clear()

    def add(package: str, points: dict[str, dict[str, str]], files: dict[str, str] | None = None) -> None:
        info = site / f"{package.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        groups = [
            f"[rl_training.{group}]\n" + "\n".join(f"{k} = {v}" for k, v in p.items()) for group, p in points.items()
        ]
        (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
        for name, text in (files or {}).items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text)
        forget()

    forget()
    yield add
    forget()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(site)):
            del sys.modules[name]


def plain(name: str) -> dict[str, Any]:
    return {"algo": name, "env_id": "CartPole-v1"}


def test_an_algorithm_of_another_package_is_found_by_name_and_by_its_class(install: Install) -> None:
    install(
        "my-algos", {"algorithms": {"mine": "mine_a:SPEC"}}, {"mine_a.py": ALGORITHM.format(name="mine", title="Mine")}
    )
    assert "mine_a" not in sys.modules
    assert "mine" in ALGORITHMS.names()
    assert "mine_a" not in sys.modules, "names are known without importing anything"
    spec = get_spec("mine")
    assert (spec.layer, spec.title) == ("plugin", "Mine")
    assert "mine" in registry()
    assert "mine" not in own_algorithms()
    agent = rl_training.Mine("CartPole-v1", num_envs=2, eval_every=0)  # type: ignore[attr-defined]
    assert agent.metadata["plugins"] == [
        {"kind": "algorithm", "name": "mine", "package": "my-algos", "version": "1.2", "module": "mine_a"}
    ]
    agent.close()
    assert type(rl_training.make_agent("mine", "CartPole-v1", num_envs=2)).__name__ == "Mine"


def test_the_value_may_be_a_module(install: Install) -> None:
    install(
        "my-algos", {"algorithms": {"whole": "mine_b"}}, {"mine_b.py": ALGORITHM.format(name="whole", title="Whole")}
    )
    assert get_spec("whole").title == "Whole"


def test_a_broken_plugin_is_a_warning_and_an_error_only_when_it_is_asked_for(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("bad-algos", {"algorithms": {"bad": "bad_a:SPEC"}}, {"bad_a.py": "import no_such_module\n"})
    with pytest.warns(
        UserWarning, match=r"the algorithm 'bad' of the package bad-algos 1\.2 cannot be imported: Module"
    ):
        assert set(registry()) == set(own_algorithms())
    with pytest.raises(
        ConfigError, match=r"algo: the algorithm 'bad' of the package bad-algos 1\.2 cannot be imported"
    ):
        get_spec("bad")
    assert TrainConfig(algo="ppo", env_id="CartPole-v1").algo == "ppo"
    assert main(["train", "bad", "CartPole-v1"]) == 2
    assert "No module named 'no_such_module'" in capsys.readouterr().err
    assert main(["doctor"]) == 0
    assert "plug-in algorithm bad (bad-algos 1.2): the algorithm 'bad'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("point", "text", "expected"),
    [
        (
            "mine",
            ALGORITHM.format(name="other", title="Mine"),
            "its entry point is named 'mine', but its SPEC is named 'other'",
        ),
        ("mine", ALGORITHM.format(name="mine", title="PPO"), "'PPO' is the title of rl_training's own ppo"),
        ("mine", "SPEC = 3", "expected an AlgorithmSpec, or a module that has one named SPEC, got 3"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(install: Install, point: str, text: str, expected: str) -> None:
    install("my-algos", {"algorithms": {point: "mine_c:SPEC"}}, {"mine_c.py": text})
    with pytest.raises(ConfigError, match="is refused: .*" + expected.partition("(")[0]):
        get_spec(point)


def test_the_packages_own_names_cannot_be_taken(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    own = get_spec("ppo")
    install(
        "bad-algos", {"algorithms": {"ppo": "bad_b:SPEC"}, "encoders": {"flat": "bad_b:SPEC"}}, {"bad_b.py": "1 / 0"}
    )
    assert get_spec("ppo") is own
    assert ENCODERS.get("flat") is FlatEncoder
    with pytest.raises(ConfigError, match="algorithm 'ppo': the name is taken by rl_training itself"):
        register_algorithm(own)
    with pytest.raises(ConfigError, match="encoder 'auto': the name is taken by rl_training itself"):
        rl_training.register_encoder("auto")(FlatEncoder)
    assert main(["doctor"]) == 0
    assert "plug-in algorithm ppo (bad-algos 1.2): algorithm 'ppo': the name is taken by" in capsys.readouterr().out


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    for package in ("first", "second"):
        source = ALGORITHM.format(name="twin", title="Twin")
        install(package, {"algorithms": {"twin": f"{package}_t:SPEC"}}, {f"{package}_t.py": source})
    with pytest.raises(ConfigError, match="algorithm 'twin': provided by several installed packages") as caught:
        get_spec("twin")
    assert "first 1.2" in str(caught.value)
    assert "second 1.2" in str(caught.value)


def test_presets_of_another_package(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"kit/__init__.py": "", "kit/ppo/taxi.yaml": "algo: ppo\nenv_id: Taxi-v3\ntotal_timesteps: 123\n"}
    install("kit", {"presets": {"kit": "kit"}}, files)
    assert preset_files.get_preset("ppo/taxi").total_timesteps == 123
    found = preset_files.find_preset("ppo", "Taxi-v3")
    assert found is not None
    assert found.name == "ppo/taxi"
    assert main(["zoo", "list", "ppo"]) == 0
    assert "ppo/taxi" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"kit2/__init__.py": "", "kit2/ppo/cartpole.yaml": "algo: ppo\nenv_id: X\n"},
            "these names are already in use: ppo/c",
        ),
        ({"kit2/__init__.py": "", "kit2/ppo/x.yaml": "algo: [\n"}, "x.yaml"),
        ({"kit2/__init__.py": "1 / 0"}, "ZeroDivisionError"),
    ],
)
def test_broken_presets_are_left_out(install: Install, files: dict[str, str], expected: str) -> None:
    own = set(preset_files.presets())
    install("kit", {"presets": {"kit": "kit2"}}, files)
    with pytest.warns(UserWarning, match=f"the presets of kit 1.2 are ignored: .*{expected}"):
        assert set(preset_files.presets()) == own


def test_a_missing_plugin_is_named_and_nothing_is_imported_for_it(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        "my-algos", {"algorithms": {"mine": "mine_d:SPEC"}}, {"mine_d.py": ALGORITHM.format(name="mine", title="MineD")}
    )
    agent = rl_training.make_agent("mine", "CartPole-v1", num_envs=2, eval_every=0, output_dir=tmp_path / "runs")
    saved = agent.save(tmp_path / "agent")
    agent.close()
    short = {"total_timesteps": 64, "num_envs": 2, "eval_every": 0, "output_dir": tmp_path / "runs"}
    result = rl_training.train(TrainConfig.from_dict({**plain("mine"), **short}), progress=False)
    about = json.loads((saved / "metadata.json").read_text())
    assert about["plugins"][0]["package"] == "my-algos"

    for path in (tmp_path / "site").glob("my_algos*/entry_points.txt"):
        path.write_text("")  # as if it were not installed; its module could still be imported
    plugins.entry_points.cache_clear()
    ALGORITHMS._loaded.clear()
    del sys.modules["mine_d"]
    expected = (
        "needs the algorithm 'mine' of the package my-algos 1.2, which is not registered. "
        "Install it with: pip install 'my-algos==1.2'"
    )
    for action in (lambda: rl_training.load(saved), lambda: rl_training.resume(result.run_dir)):
        with pytest.raises(CheckpointError) as caught:
            action()
        assert expected in str(caught.value)
    assert main(["resume", str(result.run_dir)]) == 2
    assert expected in capsys.readouterr().err
    assert "mine_d" not in sys.modules


def test_damaged_metadata_is_passed_over() -> None:
    for entries in (None, 3, ["x"], [{"kind": 3}], [{"kind": "algorithm", "name": "ppo", "module": "os"}]):
        require_plugins({"plugins": entries}, "here")
    with pytest.raises(CheckpointError, match="here: needs the encoder 'x' of the module os, which is not registered"):
        require_plugins({"plugins": [{"kind": "encoder", "name": "x", "module": "os"}]}, "here")


def test_what_a_script_registers_is_known_and_its_module_is_written_down(install: Install) -> None:
    spec = dataclasses.replace(get_spec("a2c"), name="scripted", title="Scripted")
    assert register_algorithm(spec).layer == "plugin"
    rl_training.register_encoder("scripted")(type("Mine", (FlatEncoder,), {"__module__": "__main__"}))
    config = TrainConfig.from_dict({**plain("scripted"), "algorithm": {"network": {"encoder": "scripted"}}})
    found = plugins_of(config)
    assert [(entry["kind"], entry["name"]) for entry in found] == [("algorithm", "scripted"), ("encoder", "scripted")]
    assert (found[1]["package"], found[1]["module"]) == (None, "__main__")
    assert plugins_of(TrainConfig(algo="ppo", env_id="CartPole-v1")) == []


def test_another_version_is_noticed(install: Install) -> None:
    install("my-algos", {})
    from rl_training.experiment.plugins import changed_plugins

    entry = {"kind": "algorithm", "name": "mine", "package": "my-algos", "version": "1.1", "module": "m"}
    assert changed_plugins({"plugins": [entry]}) == ["my-algos 1.1 -> 1.2"]
    assert changed_plugins({"plugins": [{**entry, "version": "1.2"}]}) == []


def test_a_registry_names_the_nearest_and_all() -> None:
    colours: Registry[str] = Registry("colour", "rl_training.no_such_group", also=("any",))
    colours.builtin("red")("r")
    colours.register("green")("g")
    assert colours.names() == ["any", "green", "red"]
    assert colours.problem("any") is None
    assert colours.problem("rad") == "unknown colour 'rad'. Did you mean 'red'? Known: any, green, red"
    with pytest.raises(ConfigError, match="colour 'red': the name is taken by rl_training itself"):
        colours.register("red")("other")
    colours.unregister("green")
    assert colours.problem("green") is not None


def test_paths_in_arguments_of_registered_parts_are_not_taken_from_files(tmp_path: Path) -> None:
    from rl_training.experiment.config import read_config

    path = tmp_path / "c.yaml"
    path.write_text("algo: ppo\nenv_id: CartPole-v1\nalgorithm: {network: {encoder_kwargs: {file: /etc/passwd}}}\n")
    with pytest.raises(ConfigError, match="encoder_kwargs > file: '/etc/passwd' is a local path"):
        read_config(path)
    assert read_config(path, trust=True).algo == "ppo"
