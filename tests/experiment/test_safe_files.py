"""A file from a stranger cannot run code, reach outside its directory, or end in anything but an error that names it.

Every position that is read is planted with everything that could be thought of: files of a checkpoint (with a manifest
whose checksums fit, since whoever plants a file can also compute a checksum), files of a run directory, presets and
config files. An audit hook watches what the process does meanwhile.
"""

from __future__ import annotations

import ast
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import rl_training
from rl_training import PPO, TrainConfig, load, resume, train
from rl_training.accelerate.native.compiler import find_compiler
from rl_training.cli import load_config, main
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import RLTrainingError
from rl_training.experiment import presets as presets_module
from rl_training.experiment.checkpointing import checkpoints_of, find_checkpoint
from rl_training.experiment.config import read_config
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.runs import RunDirectory, find_runs

SOURCE = Path(rl_training.__file__).parent
CONTENT = ["state.safetensors", "state.json", "config.json", "metadata.json"]
FILES = ["manifest.json", *CONTENT]
SMALL = {
    "num_envs": 2,
    "normalize_obs": True,
    "normalize_reward": True,
    "eval_every": 80,  # once while it is made, not again in the tests
    "eval_episodes": 1,
    "stop_patience": 50,
}
OWN = {
    "num_steps": 16,
    "num_epochs": 1,
    "minibatch_size": 32,
    "network": {"actor_sizes": [4], "critic_sizes": [4]},
}

# What is watched


class Watch:
    """What the process did that it should not have done."""

    def __init__(self, outside: Path) -> None:
        self.outside = str(outside.resolve())
        self.found: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        is_own = event == "ctypes.dlopen" and "/rl_training_" in str(args[0])  # compiled from the package's own text
        if (
            event in ("os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "ctypes.dlopen") and not is_own
        ) or (event == "subprocess.Popen" and args[1][0] not in ("git", find_compiler())):
            self.found.append(f"{event} {args}")
        elif event in ("open", "os.rename", "os.remove", "os.truncate", "os.listdir") and args:
            if isinstance(args[0], (str, bytes)) and os.path.realpath(os.fsdecode(args[0])).startswith(self.outside):
                self.found.append(f"{event} {args[0]!r}")
        elif event == "import" and str(args[0]).startswith("planted"):
            self.found.append(f"import {args[0]}")


_watch: Watch | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watch is not None:
        _watch(event, args)


sys.addaudithook(_audit)  # cannot be removed again: it does nothing while nobody watches


def tree(directory: Path) -> dict[str, bytes]:
    """Names and contents of all files below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class Scene:
    """A place to plant in, with an outside that must stay as it is and a marker that must never appear."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.outside = root / "outside"
        self.inside = root / "inside"
        self.elsewhere = root / "elsewhere"
        for directory in (self.outside, self.inside, self.elsewhere):
            directory.mkdir()
        self.secret = self.outside / "secret.json"
        self.secret.write_text('{"format": 1, "files": {}}\n')
        (self.elsewhere / "planted_module.py").write_text(f"open({str(self.marker)!r}, 'w').close()\n")

    @property
    def marker(self) -> Path:
        return self.outside / "marker"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Nothing may run and nothing outside may be touched while this is open."""
        global _watch
        before = tree(self.outside)
        _watch = Watch(self.outside)
        try:
            yield
        finally:
            found, _watch = _watch.found, None
            assert found == []
            assert not self.marker.exists()
            assert tree(self.outside) == before
            assert "planted_module" not in sys.modules

    def refused(self, action: Callable[[], Any], *names: Any) -> str:
        """The action ends in one of our errors, which names what it should."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self.watched(), pytest.raises(RLTrainingError) as caught:
                action()
        message = str(caught.value)
        for name in names:
            assert str(name) in message, message
        return message


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene(tmp_path)
    monkeypatch.chdir(scene.elsewhere)
    monkeypatch.syspath_prepend(scene.elsewhere)
    return scene


# What is planted


class Evil:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def torch_file(evil: Evil, *, legacy: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"state": evil}, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


def numpy_file(evil: Evil) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([evil], dtype=object), allow_pickle=True)
    return file.getvalue()


def zip_file(evil: Evil) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../../escaped", "x")
        archive.writestr("data.pkl", pickle.dumps(evil))
    return file.getvalue()


BINARIES: dict[str, Callable[[Evil], bytes]] = {
    "pickle protocol 0": lambda evil: pickle.dumps(evil, 0),
    "pickle protocol 2": lambda evil: pickle.dumps(evil, 2),
    "pickle protocol 5": lambda evil: pickle.dumps(evil, 5),
    "torch.save": lambda evil: torch_file(evil, legacy=False),
    "old torch.save": lambda evil: torch_file(evil, legacy=True),
    "numpy object array": numpy_file,
    "zip": zip_file,
    "empty": lambda evil: b"",
    "zeros": lambda evil: bytes(4096),
    "not text": lambda evil: b"\xff\xfe\xfd" * 100,
    "yaml tag": lambda evil: f"x: !!python/object/apply:os.system ['touch {evil.marker}']\n".encode(),
    "python": lambda evil: f"__import__('os').system('touch {evil.marker}')\n".encode(),
}

WRONG_JSON: dict[str, str] = {
    "nested beyond the stack": "[" * 100_000,
    "nested deeply": "[" * 5000 + "]" * 5000,
    "nested a little less": '{"x": ' * 700 + "1" + "}" * 700,
    "a list": "[]",
    "a number": "1",
    "a string": '"../../outside/secret.json"',
    "null": "null",
    "true": "true",
    "NaN": "NaN",
    "an endless number": "9" * 5000,
    "half": '{"x": ',
    "two": "{} {}",
}


def reseal(checkpoint: Path) -> None:
    """Make the manifest fit the files, as whoever plants them would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in CONTENT:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def plant(checkpoint: Path, name: str, content: bytes | str) -> None:
    data = content.encode() if isinstance(content, str) else content
    (checkpoint / name).write_bytes(data)
    if name != "manifest.json":
        reseal(checkpoint)


# What is planted in


def make_agent() -> PPO:
    return PPO("CartPole-v1", **SMALL, **OWN)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint with everything in it."""
    agent = make_agent()
    agent.learn(96, progress=False)
    path = agent.save(tmp_path_factory.mktemp("saved") / "agent")
    agent.close()
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run directory that can go on."""
    output = tmp_path_factory.mktemp("runs")
    config = TrainConfig(
        algo="ppo",
        env_id="CartPole-v1",
        total_timesteps=96,
        output_dir=output,
        checkpoint_every=32,
        log_every=32,
        tensorboard=False,
        algorithm=OWN,
        **SMALL,
    )
    result = train(config, progress=False)
    assert result.run_dir is not None
    return result.run_dir


@pytest.fixture
def checkpoint(saved: Path, scene: Scene) -> Path:
    return Path(shutil.copytree(saved, scene.inside / "agent"))


@pytest.fixture
def run(trained: Path, scene: Scene) -> Path:
    return Path(shutil.copytree(trained, scene.inside / trained.name))


def go_on(run: Path) -> None:
    resume(run, total_timesteps=128, progress=False)


def test_what_is_planted_in_is_good_before(checkpoint: Path, run: Path, scene: Scene) -> None:
    with scene.watched():
        agent = load(checkpoint)
        agent.learn(32, progress=False)
        agent.close()
        go_on(run)


def test_the_watch_sees(scene: Scene, tmp_path: Path) -> None:
    """The other tests can fail."""
    global _watch
    evil = pickle.dumps(Evil(tmp_path / "seen"))
    _watch = Watch(scene.outside)
    try:
        pickle.loads(evil)
        scene.secret.read_text()
        with open(scene.inside / "link", "w"):
            pass
        __import__("planted_module")
    finally:
        found, _watch = _watch.found, None
        sys.modules.pop("planted_module")
    assert (tmp_path / "seen").exists()
    seen = " ".join(found)
    assert all(word in seen for word in ("os.system", "find_class", "secret.json", "import planted_module"))
    assert "link" not in seen


# Checkpoints


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", BINARIES)
def test_binaries_in_a_checkpoint(checkpoint: Path, scene: Scene, name: str, kind: str) -> None:
    plant(checkpoint, name, BINARIES[kind](Evil(scene.marker)))
    scene.refused(lambda: load(checkpoint), checkpoint / name)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "config.json", "metadata.json"])
@pytest.mark.parametrize("kind", WRONG_JSON)
def test_wrong_json_in_a_checkpoint(checkpoint: Path, scene: Scene, name: str, kind: str) -> None:
    plant(checkpoint, name, WRONG_JSON[kind])
    scene.refused(lambda: load(checkpoint), checkpoint / name)


@pytest.mark.parametrize(
    "escape",
    ["../../outside/secret.json", "../outside/../outside/secret.json", "{outside}/secret.json", "x" * 5000, "a\0b", ""],
    ids=["relative", "roundabout", "absolute", "over-long", "null byte", "empty"],
)
def test_names_in_a_manifest_that_lead_elsewhere(checkpoint: Path, scene: Scene, escape: str) -> None:
    name = escape.format(outside=scene.outside)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["state.json"]
    plant(checkpoint, "manifest.json", json.dumps(manifest))
    scene.refused(lambda: load(checkpoint), checkpoint / "manifest.json", "lists")
    del manifest["files"]["state.json"]
    plant(checkpoint, "manifest.json", json.dumps(manifest))
    scene.refused(lambda: load(checkpoint), checkpoint)


@pytest.mark.parametrize("entry", [None, [], "x", 1, {}, {"size": "x"}, {"size": 10**400}, {"sha256": []}])
@pytest.mark.parametrize("name", CONTENT)
def test_wrong_entries_of_a_manifest(checkpoint: Path, scene: Scene, name: str, entry: Any) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = entry
    plant(checkpoint, "manifest.json", json.dumps(manifest))
    scene.refused(lambda: load(checkpoint), checkpoint / name)


@pytest.mark.parametrize("version", [None, "1", 0, -1, 1.5, math.nan, [], True, 10**400])
def test_wrong_format_versions(checkpoint: Path, scene: Scene, version: Any) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    plant(checkpoint, "manifest.json", json.dumps({**manifest, "format": version}))
    scene.refused(lambda: load(checkpoint), checkpoint)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["{outside}/stolen", "../../outside/stolen"], ids=["absolute", "relative"])
def test_files_of_a_checkpoint_that_are_links_to_elsewhere(
    checkpoint: Path, scene: Scene, name: str, target: str
) -> None:
    shutil.move(checkpoint / name, scene.outside / "stolen")
    (checkpoint / name).symlink_to(target.format(outside=scene.outside))
    assert (checkpoint / name).is_file()
    scene.refused(lambda: load(checkpoint), checkpoint / name, "link")


@pytest.mark.parametrize("name", FILES)
def test_files_of_a_checkpoint_that_are_no_files(checkpoint: Path, scene: Scene, name: str) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)  # reading it would wait for ever
    scene.refused(lambda: load(checkpoint), checkpoint)
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    scene.refused(lambda: load(checkpoint), checkpoint)


WRONG_VALUES: list[Any] = [[], {}, "x", math.nan, 10**400, None, True, [[]], {"$tensor": []}, {"$array": "nothing"}]


def in_turn(values: list[Any], number: int, count: int) -> list[Any]:
    """Some of the values, others for each number: each place gets a few, and each value comes to many places."""
    return [values[(number * 3 + step * 4 + 1) % len(values)] for step in range(count)]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every node of a tree of JSON; of a list's items to the last, since they are alike."""
    yield path
    items: Any = (
        value.items() if isinstance(value, dict) else list(enumerate(value))[-1:] if isinstance(value, list) else ()
    )
    for key, item in items:
        yield from leaves(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a tree with one node replaced."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def is_environment(path: tuple[Any, ...]) -> bool:
    """Whether an environment is to make sense of it: only that can say what is wrong."""
    return path[:3] == ("collector", "in_flight", "env")


@pytest.fixture
def no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations only cost time here."""
    result = EvaluationResult([1.0], [1])
    monkeypatch.setattr("rl_training.runtime.evaluator.Evaluator.evaluate", lambda *args, **kwargs: result)


def try_to_go_on(checkpoint: Path, scene: Scene, where: Any, *, learn: bool = True) -> RLTrainingError | None:
    """Load an agent and train it: whatever is wrong, the only error is one of ours."""
    agent = None
    try:
        with scene.watched():
            agent = load(checkpoint)
            if learn:
                agent.learn(32, progress=False)
    except RLTrainingError as error:
        return error
    except Exception as error:
        pytest.fail(f"{where}: {type(error).__name__}: {error}")
    finally:
        if agent is not None:
            agent.close()
    return None


@pytest.mark.usefixtures("no_evaluation")
def test_wrong_types_anywhere_in_the_state(checkpoint: Path, scene: Scene) -> None:
    """Each node of the tree in turn. What is accepted, having the right type, must not end in a crash either."""
    good = json.loads((checkpoint / "state.json").read_text())
    accepted, refused = [], 0
    for number, path in enumerate(leaves(good)):
        for wrong in in_turn(WRONG_VALUES, number, 3):
            plant(checkpoint, "state.json", json.dumps(replaced(good, path, wrong)))
            error = try_to_go_on(checkpoint, scene, (path, wrong))
            if error is None:
                accepted.append(path)
            else:
                refused += 1
                assert is_environment(path) or str(checkpoint) in str(error), (path, error)
    assert refused > 3 * len(accepted)
    strict = {"env_steps", "horizon", "iterations", "updates", "step", "num_episodes", "num_evaluations", "last"}
    assert not [path for path in accepted if path and path[-1] in strict]


def test_acting_reads_no_state_of_evaluation_environments(checkpoint: Path) -> None:
    good = json.loads((checkpoint / "state.json").read_text())
    assert "evaluation" in good
    plant(checkpoint, "state.json", json.dumps({**good, "evaluation": []}))
    agent = load(checkpoint, learner_only=True)
    assert len(agent.evaluate(1).returns) == 1
    agent.close()
    broken = load(checkpoint)
    with pytest.raises(RLTrainingError, match="state of the evaluation environments does not fit"):
        broken.evaluate(1)
    broken.close()


def other_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    yield torch.zeros(0, dtype=tensor.dtype)
    yield torch.zeros(tensor.shape, dtype=torch.float16)
    yield torch.zeros(tensor.shape, dtype=torch.complex64)
    yield torch.zeros(tensor.shape, dtype=torch.bfloat16)
    yield torch.zeros(tensor.shape, dtype=torch.int32 if tensor.dtype != torch.int32 else torch.int16)


@pytest.mark.usefixtures("no_evaluation")
def test_wrong_tensors(checkpoint: Path, scene: Scene) -> None:
    """Each tensor in turn with another shape, with other types, and missing."""
    good = load_file(checkpoint / "state.safetensors")
    for number, (name, tensor) in enumerate(good.items()):
        for other in in_turn([*other_tensors(tensor), None], number, 3):
            tensors = {key: value for key, value in good.items() if key != name}
            tensors |= {} if other is None else {name: other}
            save_file(tensors, checkpoint / "state.safetensors")
            reseal(checkpoint)
            error = try_to_go_on(checkpoint, scene, name)
            if "in_flight" not in name and not name.startswith("evaluation/"):  # environments make sense of these
                assert str(checkpoint) in str(error), (name, error)


@pytest.mark.parametrize(
    "name", ["step", "reset", "__class__", "spec", "np_random", "metadata", "screen", "unwrapped", "../x"]
)
def test_an_environments_state_cannot_replace_more_than_state(checkpoint: Path, scene: Scene, name: str) -> None:
    good = json.loads((checkpoint / "state.json").read_text())
    level = good["collector"]["in_flight"]["env"]["env"][-1]["state"]["envs"][0][-1]
    level["state"][name] = "planted"
    plant(checkpoint, "state.json", json.dumps(good))
    scene.refused(lambda: load(checkpoint).learn(32, progress=False), checkpoint)


def test_an_environments_state_for_another_class(checkpoint: Path, scene: Scene) -> None:
    good = json.loads((checkpoint / "state.json").read_text())
    good["collector"]["in_flight"]["env"]["env"][-1]["class"] = "planted_module.Env"
    plant(checkpoint, "state.json", json.dumps(good))
    scene.refused(lambda: load(checkpoint).learn(32, progress=False), checkpoint, "planted_module.Env")


def test_wrong_types_anywhere_in_the_config(checkpoint: Path, scene: Scene) -> None:
    good = json.loads((checkpoint / "config.json").read_text())
    refused = 0
    for number, path in enumerate(leaves(good)):
        for wrong in in_turn([*WRONG_VALUES, "../../outside/secret.json"], number, 3):
            plant(checkpoint, "config.json", json.dumps(replaced(good, path, wrong)))
            error = try_to_go_on(checkpoint, scene, (path, wrong), learn=False)
            refused += error is not None
            assert error is None or str(checkpoint) in str(error) or path[-1] in str(error), (path, error)
    assert refused > 100


def test_wrong_types_anywhere_in_the_metadata(checkpoint: Path, scene: Scene) -> None:
    good = json.loads((checkpoint / "metadata.json").read_text())
    for number, path in enumerate(itertools.islice(leaves(good), 1, None)):
        for wrong in in_turn(WRONG_VALUES, number, 2):
            plant(checkpoint, "metadata.json", json.dumps(replaced(good, path, wrong)))
            assert try_to_go_on(checkpoint, scene, path, learn=False) is None


EVIL_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "module": ({"env_id": "planted_module:Env-v0"}, "would import the module 'planted_module'"),
    "dotted module": ({"env_id": "planted_module.sub:Env-v0"}, "would import the module"),
    "module twice": ({"env_id": "planted_module:x:y"}, "would import the module"),
    "entry point": ({"entry_point": "planted_module:Env"}, "unknown key 'entry_point'"),
    "path as env": ({"env_id": "../../outside/secret.json"}, "env_id"),
    "long env": ({"env_id": "x" * 100_000}, "env_id"),
    "wrapper": ({"wrappers": [{"name": "planted_module.Wrapper"}]}, "unknown wrapper"),
    "dotted wrapper": ({"wrappers": [{"name": "gymnasium.wrappers.TransformAction"}]}, "unknown wrapper"),
    "lambda wrapper": ({"wrappers": [{"name": "TransformReward", "kwargs": {"func": "exit"}}]}, "unknown wrapper"),
    "encoder": ({"algorithm": {"network": {"encoder": "os.system"}}}, "unknown encoder 'os.system'"),
    "activation": ({"algorithm": {"network": {"activation": "os.system"}}}, "activation"),
    "optimizer": ({"algorithm": {"optimizer": {"name": "planted_module.Adam"}}}, "optimizer"),
    "schedule": ({"algorithm": {"learning_rate": {"schedule": "os.system"}}}, "schedule"),
    "schedule of a list": ({"algorithm": {"learning_rate": {"schedule": ["linear"]}}}, "schedule"),
    "algorithm": ({"algo": "planted_module.PPO"}, "unknown algorithm"),
    "algorithm as path": ({"algo": "../../outside/secret"}, "unknown algorithm"),
    "absolute path": ({"env_kwargs": {"xml_file": "{outside}/secret.json"}}, "env_kwargs"),
    "relative path": ({"env_kwargs": {"xml_file": "../outside/secret.json"}}, "env_kwargs"),
    "hidden path": ({"env_kwargs": {"xml_file": "assets/../../outside/secret.json"}}, "env_kwargs"),
    "nested path": ({"env_kwargs": {"options": {"file": ["~/secret"]}}}, "env_kwargs"),
    "long key": ({"x" * 900: 1}, "unknown key"),
    "path as key": ({"../../outside/secret.json": 1}, "unknown key"),
    "python object": ({"py/object": "os.system"}, "unknown key"),
    "endless seed": ({"seed": 10**400}, "seed"),
    "device": ({"device": "planted_module"}, "device"),
}
"""What a config may not say, and what the error is about."""


def evil_config(kind: str, scene: Scene, base: dict[str, Any]) -> dict[str, Any]:
    """A complete config with something evil in it."""
    text = json.dumps(EVIL_CONFIGS[kind][0]).replace("{outside}", str(scene.outside))
    evil = json.loads(text)
    if "algorithm" in evil:
        evil["algorithm"] = {**base.get("algorithm", {}), **evil["algorithm"]}
    return {**base, **evil}


@pytest.mark.parametrize("kind", EVIL_CONFIGS)
def test_evil_configs_of_a_checkpoint(checkpoint: Path, scene: Scene, kind: str) -> None:
    good = json.loads((checkpoint / "config.json").read_text())
    plant(checkpoint, "config.json", json.dumps(evil_config(kind, scene, good)))
    message = scene.refused(lambda: load(checkpoint), EVIL_CONFIGS[kind][1])
    if kind not in ("path as env", "long env", "device"):  # found when the environment is made
        assert str(checkpoint / "config.json") in message


# Run directories


def damage(run: Path) -> None:
    """Damage the newest checkpoint, so that an older one is used."""
    (checkpoints_of(run)[-1] / "state.json").unlink()


@pytest.mark.parametrize("name", ["config.yaml", "metadata.json", "evaluations.json"])
@pytest.mark.parametrize("kind", BINARIES)
def test_binaries_in_a_run_directory(run: Path, scene: Scene, name: str, kind: str) -> None:
    (run / name).write_bytes(BINARIES[kind](Evil(scene.marker)))
    scene.refused(lambda: go_on(run), run / name)
    with scene.watched():
        assert main(["resume", str(run), "--total-timesteps", "128", "--quiet"]) == 2
        assert main(["runs", str(run.parent)]) == 0


@pytest.mark.parametrize("name", ["metadata.json", "evaluations.json"])
@pytest.mark.parametrize("kind", WRONG_JSON)
def test_wrong_json_in_a_run_directory(run: Path, scene: Scene, name: str, kind: str) -> None:
    if (name, kind) == ("evaluations.json", "a list"):
        return
    (run / name).write_text(WRONG_JSON[kind])
    scene.refused(lambda: go_on(run), run / name)
    with scene.watched():
        assert main(["runs", str(run.parent)]) == 0


@pytest.mark.parametrize("name", ["metadata.json", "evaluations.json"])
def test_wrong_types_anywhere_in_the_records_of_a_run(run: Path, scene: Scene, name: str) -> None:
    good = json.loads((run / name).read_text())
    directory, config = RunDirectory(run), read_config(run / "config.yaml")
    for number, path in enumerate(leaves(good)):
        for wrong in in_turn([*WRONG_VALUES, "[/bold]", "\x1b[2J", 1e400], number, 3):
            (run / name).write_text(json.dumps(replaced(good, path, wrong)))
            with scene.watched():
                assert main(["runs", str(run.parent)]) == 0
                error = error_of(directory.rewind, 10**6) or error_of(directory.begin, config, "cpu")
                assert error is None or str(run / name) in str(error)


def error_of(action: Callable[..., Any], *args: Any) -> RLTrainingError | None:
    """The error of ours that an action ends in, if it does; any other is not expected."""
    try:
        action(*args)
    except RLTrainingError as error:
        return error
    return None


@pytest.mark.parametrize("value", ["../../outside/x", "/etc/x", "x" * 1000, "", 5, None, ["x"]])
def test_the_id_of_a_run_is_not_a_path(run: Path, value: Any) -> None:
    """Weights & Biases makes directories with it."""
    RunDirectory(run).update(run_id=value)
    name = RunDirectory(run).run_id()
    assert "/" not in name
    assert 0 < len(name) <= 80


@pytest.mark.parametrize("pid", [0, -1, 10**30, True, "1", None, math.nan])
def test_a_process_number_that_cannot_be(run: Path, pid: Any) -> None:
    import socket

    directory = RunDirectory(run)
    directory.update(status="running", pid=pid, host=socket.gethostname())
    assert directory.status() == "interrupted"


@pytest.mark.parametrize("kind", BINARIES)
def test_binaries_as_metrics(run: Path, scene: Scene, kind: str) -> None:
    """Metrics are for people: training does not depend on them, so what cannot be read is dropped, and this is said."""
    good = (run / "metrics.jsonl").read_bytes()
    content = BINARIES[kind](Evil(scene.marker))
    (run / "metrics.jsonl").write_bytes(content + b"\n" + good)
    with scene.watched(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        go_on(run)
    assert [line["global_step"] for line in read_metrics(run / "metrics.jsonl")][-1] == 128
    about = [str(warning.message) for warning in said if str(run / "metrics.jsonl") in str(warning.message)]
    assert len(about) == 1


def test_wrong_types_anywhere_in_the_metrics(run: Path, scene: Scene) -> None:
    from rl_training.experiment.logging import TensorBoardLogger

    lines = (run / "metrics.jsonl").read_text().splitlines()
    good = json.loads(lines[0])
    planted = [json.dumps(replaced(good, path, wrong)) for path in leaves(good) for wrong in WRONG_VALUES]
    (run / "metrics.jsonl").write_text("\n".join(planted + lines) + "\n")
    with scene.watched(), pytest.warns(UserWarning, match=r"metrics\.jsonl: \d+ damaged lines were removed"):
        RunDirectory(run).rewind(10**6)
    history = list(read_metrics(run / "metrics.jsonl"))
    assert len(lines) <= len(history) < len(lines) + len(planted) // 3
    with scene.watched():
        TensorBoardLogger(run / "tensorboard", history).close()


LINKS = ["config.yaml", "metadata.json", "evaluations.json", "metrics.jsonl", "command.txt", ".lock"]


@pytest.mark.parametrize("name", LINKS)
def test_files_of_a_run_that_are_links_to_elsewhere(run: Path, scene: Scene, name: str) -> None:
    stolen = scene.outside / "stolen"
    shutil.move(run / name, stolen) if (run / name).exists() else stolen.write_text("precious")
    (run / name).symlink_to(stolen)
    scene.refused(lambda: go_on(run), run / name, "link")
    with scene.watched():
        assert main(["runs", str(run.parent)]) == 0


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "videos", "checkpoints/step_500", "checkpoints/best"])
def test_directories_of_a_run_that_are_links_to_elsewhere(run: Path, scene: Scene, name: str) -> None:
    stolen = scene.outside / "stolen"
    if (run / name).exists():
        shutil.move(run / name, stolen)
    else:
        stolen.mkdir()
    (run / name).symlink_to(stolen, target_is_directory=True)
    scene.refused(lambda: go_on(run), run / name, "link")


def test_a_linked_checkpoint_of_a_run_is_not_evaluated(run: Path, scene: Scene) -> None:
    newest = checkpoints_of(run)[-1]
    shutil.move(newest, scene.outside / newest.name)
    newest.symlink_to(scene.outside / newest.name, target_is_directory=True)
    with scene.watched(), pytest.warns(UserWarning, match=f"{newest.name}.*link"):
        found = find_checkpoint(run)
    assert found.path == checkpoints_of(run)[-2]


def test_a_link_that_the_user_made_is_followed(checkpoint: Path, run: Path, scene: Scene) -> None:
    for target in (checkpoint, run):
        link = scene.root / "link"
        link.symlink_to(target, target_is_directory=True)
        load(link).close()
        link.unlink()


@pytest.mark.parametrize("name", ["step_\u00b2", "step_-5", "step_x", "step_1e3", "step_", "step_ 5", ".step_5.1.old"])
def test_odd_names_of_checkpoints(run: Path, scene: Scene, name: str) -> None:
    (run / "checkpoints" / name).mkdir()
    before = [path.name for path in checkpoints_of(run)]
    assert name not in before
    with scene.watched():
        go_on(run)


@pytest.mark.parametrize("kind", EVIL_CONFIGS)
def test_evil_configs_of_a_run(run: Path, scene: Scene, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.loads((checkpoints_of(run)[-1] / "config.json").read_text())
    (run / "config.yaml").write_text(json.dumps(evil_config(kind, scene, good)))  # JSON is YAML
    message = scene.refused(lambda: go_on(run), EVIL_CONFIGS[kind][1])
    if kind not in ("path as env", "long env", "device"):
        assert str(run / "config.yaml") in message
    with scene.watched():
        assert main(["resume", str(run), "--quiet"]) == 2
    assert "Traceback" not in capsys.readouterr().err


# Config files and presets

EVIL_YAML = {
    "apply": "algo: !!python/object/apply:os.system ['touch {marker}']",
    "new": "algo: !!python/object/new:os.system ['touch {marker}']",
    "object": "algo: !!python/object:planted_module.Thing {{}}",
    "name": "algo: !!python/name:os.system",
    "module": "!!python/module:planted_module x",
    "tuple": "seed: !!python/tuple [1, 2]",
    "key": "? !!python/object/apply:os.system ['touch {marker}']\n: 1",
    "nested": "env_kwargs: {{x: [{{y: !!python/object/apply:os.system ['touch {marker}']}}]}}",
    "bomb": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]",
    "merge": "base: &b {{seed: 1}}\nalgorithm: {{<<: *b}}",
    "loop": "&a [*a]",
    "own tag": "algo: !planted x",
    "binary": "algo: !!binary AAAA",
    "bad binary": "algo: !!binary ???",
    "timestamp": "seed: !!timestamp x",
    "bool": "wandb: !!bool x",
    "int": "seed: !!int ''",
    "float": "gamma: !!float x",
    "set": "env_kwargs: !!set {{a, b}}",
    "omap": "env_kwargs: !!omap [a: 1]",
    "pairs": "wrappers: !!pairs [a: 1]",
    "deep lists": "x: " + "[" * 400 + "]" * 400,
    "deep maps": "x: " + "{{a: " * 150 + "1" + "}}" * 150,
    "deeper": "[" * 20_000,
    "endless int": "seed: " + "9" * 5000,
    "huge int": "seed: 1" + "0" * 400,
    "huge float": "max_seconds: 1" + "0" * 400,
    "two documents": "algo: ppo\n---\nalgo: a2c",
    "directive": "%TAG ! tag:yaml.org,2002:python/object/apply:\n---\nalgo: !os.system ['touch {marker}']",
    "duplicate": "algo: ppo\nalgo: a2c",
    "null byte": 'output_dir: "a\\0b"\nenv_id: CartPole-v1\nalgo: ppo',
}


@pytest.mark.parametrize("kind", EVIL_YAML)
def test_evil_yaml(scene: Scene, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = scene.inside / "config.yaml"
    path.write_text(EVIL_YAML[kind].format(marker=scene.marker))
    if kind != "null byte":  # found when the directory is made
        scene.refused(lambda: load_config(path), path)
        scene.refused(lambda: read_config(path, trust=True), path)
    with scene.watched():
        assert main(["train", "--config", str(path), "--quiet"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", BINARIES)
def test_binaries_as_config_files(scene: Scene, kind: str) -> None:
    path = scene.inside / "config.yaml"
    path.write_bytes(BINARIES[kind](Evil(scene.marker)))
    scene.refused(lambda: load_config(path), path)


@pytest.mark.parametrize("kind", EVIL_CONFIGS)
def test_evil_config_files(scene: Scene, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = scene.inside / "config.yaml"
    path.write_text(json.dumps(evil_config(kind, scene, {"algo": "ppo", "env_id": "CartPole-v1"})))
    with scene.watched():
        assert main(["train", "--config", str(path), "--total-timesteps", "64", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert EVIL_CONFIGS[kind][1] in error
    assert "Traceback" not in error


def test_an_alias_bomb_is_refused_before_it_grows(scene: Scene) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    path = scene.inside / "config.yaml"
    path.write_text(bomb)
    message = scene.refused(lambda: load_config(path), path, "alias", "line 2")
    assert len(message) < 300


@pytest.fixture
def preset_tree(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tree of presets of our own instead of the package's."""
    directory = scene.inside / "zoo" / "presets" / "ppo"
    directory.mkdir(parents=True)
    monkeypatch.setattr(presets_module, "resources", SimpleNamespace(files=lambda package: scene.inside))
    presets_module.presets.cache_clear()
    yield directory
    presets_module.presets.cache_clear()


def use_preset() -> None:
    PPO.from_preset("CartPole-v1").close()


def test_a_preset_of_that_tree_is_used(preset_tree: Path) -> None:
    (preset_tree / "cartpole.yaml").write_text("algo: ppo\nenv_id: CartPole-v1\nseed: 17\n")
    agent = PPO.from_preset("CartPole-v1")
    assert agent.config.seed == 17
    agent.close()


@pytest.mark.parametrize("kind", [kind for kind in EVIL_YAML if kind != "null byte"])
def test_evil_yaml_as_a_preset(preset_tree: Path, scene: Scene, kind: str) -> None:
    (preset_tree / "cartpole.yaml").write_text(EVIL_YAML[kind].format(marker=scene.marker))
    scene.refused(use_preset, "cartpole")


@pytest.mark.parametrize("kind", BINARIES)
def test_binaries_as_presets(preset_tree: Path, scene: Scene, kind: str) -> None:
    (preset_tree / "cartpole.yaml").write_bytes(BINARIES[kind](Evil(scene.marker)))
    scene.refused(use_preset, preset_tree / "cartpole.yaml")


@pytest.mark.parametrize("kind", [kind for kind in EVIL_CONFIGS if kind not in ("device", "endless seed")])
def test_evil_presets(preset_tree: Path, scene: Scene, kind: str) -> None:
    data = evil_config(kind, scene, {"algo": "ppo", "env_id": "CartPole-v1"})
    (preset_tree / "cartpole.yaml").write_text(json.dumps(data))
    with scene.watched(), pytest.raises(RLTrainingError) as caught:
        PPO.from_preset("ppo/cartpole")
    assert EVIL_CONFIGS[kind][1] in str(caught.value) or "there is no ppo preset" in str(caught.value)


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("key", ["algo", "env_id", "env_kwargs", "total_timesteps", "seed", "algorithm", "wrappers"])
def test_wrong_types_in_a_preset(preset_tree: Path, scene: Scene, key: str, wrong: Any) -> None:
    data = {"algo": "ppo", "env_id": "CartPole-v1", "env_kwargs": {}, key: wrong}
    text = json.dumps(data).replace("NaN", ".nan")
    (preset_tree / "cartpole.yaml").write_text(text)
    with scene.watched():
        error = error_of(use_preset)
        assert main(["zoo", "list"]) == (0 if key not in ("algo", "env_id", "env_kwargs", "total_timesteps") else ANY)
    assert error is None or "cartpole" in str(error).lower()


# Names given by people


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "x/" * 3000], ids=["long", "null byte", "deep"])
def test_impossible_paths(scene: Scene, name: str) -> None:
    for action in (load, resume, find_checkpoint, lambda path: read_config(path)):
        scene.refused(lambda action=action: action(name))  # type: ignore[misc]
    config = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 64}
    scene.refused(lambda: train(TrainConfig(**config, output_dir=Path(name)), progress=False), "output_dir")
    scene.refused(lambda: train(TrainConfig(**config, init_from=Path(name)), progress=False))
    if "\0" not in name:
        for command in ("eval", "resume", "runs"):
            assert main([command, name]) == 2


def test_names_of_environments_stay_within_the_output_directory(scene: Scene) -> None:
    from rl_training.experiment.runs import make_run_dir

    for env_id in ("../../outside/x", "/outside/x", "..", "x" * 500, "ALE/Pong-v5", ".", "-", "\n"):
        config = TrainConfig(algo="ppo", env_id=env_id, output_dir=scene.inside)
        path = make_run_dir(config)
        assert path.parent == scene.inside
        assert path.is_dir()
    assert len(find_runs(scene.inside)) == 0


# The source

LOADERS = {
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
    "runpy",
    "code",
    "codeop",
    "imp",
}
CALLS = {"eval", "exec", "compile", "__import__", "execfile", "breakpoint"}
METHODS = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.package", "torch.hub.load", "np.load", "numpy.load"),
    *("np.save", "numpy.save", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.full_load_all"),
    *("os.system", "os.popen", "os.execv", "os.spawnv", "importlib.reload", "ctypes.CDLL", "ctypes.cdll"),
}
IMPORTING = {
    "algorithms/registry.py": {"package_name", "f'{package_name}.{module_info.name}'"},  # our two packages
    "cli/__init__.py": {
        """f"rl_training.cli.{command.replace('-', '_')}_command\""""
    },  # after it was found in COMMANDS
    "__init__.py": {"f'rl_training.{home}'"},  # lazy public names
    "envs/factory.py": {"module"},  # of the two in _REGISTERED_BY
    "runtime/distributed/backends.py": {"module"},  # named by the process that started this worker
}
"""Modules that import by name, and the names that they may import: none of them comes from a file."""
LOADING = {
    "accelerate/native/compiler.py": {
        "ctypes.CDLL(str(target))",
        "ctypes.CDLL(str(path))",  # from the cache that only its owner can write to
        "ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)",  # fails if it is not loaded yet
    }
}
"""Modules that load libraries: what was compiled a moment ago, in a folder of its own, from the package's own text."""


def suspicious(source: str, name: str = "module.py") -> list[str]:
    """What in a module could load something that runs."""
    found = []
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    own_process = {id(call.func) for call in calls if ast.unparse(call).startswith("ctypes.CDLL(None")}  # loads nothing
    own_libraries = {id(call.func) for call in calls if ast.unparse(call) in LOADING.get(name, set())}
    for node in ast.walk(tree):
        if id(node) in own_process | own_libraries:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in LOADERS]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [text for text in names if text.split(".")[0] in LOADERS or text in METHODS]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            text = ast.unparse(node)
            found += [text] if text in CALLS or text in METHODS else []
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only", "shell"):
            found.append(f"{node.arg}=")
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            given = [ast.unparse(argument) for argument in [*node.args, *(k.value for k in node.keywords)]]
            if function == "yaml.load" and given[1:] != ["_Loader"]:
                found.append("yaml.load")
            if function.endswith("import_module") and not isinstance(node.args[0], ast.Constant):
                found += [] if given[0] in IMPORTING.get(name, set()) else [f"import_module({given[0]})"]
    return found


MODULES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(SOURCE)) for path in MODULES])
def test_nothing_in_the_source_could_run_what_a_file_says(path: Path) -> None:
    assert suspicious(path.read_text(encoding="utf-8"), str(path.relative_to(SOURCE))) == []


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "import pickle as p", "from pickle import loads", "import torch\ntorch.load(x)"),
        *("from torch import load", "f = eval", "yaml.load(x, Loader=yaml.Loader)", "yaml.load(x)", "np.load(x)"),
        *("g(allow_pickle=True)", "run(x, shell=True)", "importlib.import_module(data['module'])", "__import__(x)"),
        *("exec(compile(x, '', 'exec'))", "torch.save(x, y)", "yaml.unsafe_load(x)", "os.system(x)"),
        *("ctypes.CDLL(path)", "load = ctypes.CDLL", "ctypes.CDLL('library.so')"),
    ],
)
def test_the_search_of_the_source_finds(source: str) -> None:
    assert suspicious(source)


def test_the_search_of_the_source_lets_the_process_look_at_itself() -> None:
    assert suspicious("ctypes.CDLL(None).mallopt") == []
