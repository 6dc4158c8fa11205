"""Checkpoints: whole or not at all, verified when read, and unable to run code."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_training
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import CheckpointError
from rl_training.experiment import checkpointing
from rl_training.experiment.checkpointing import (
    FORMAT_VERSION,
    CheckpointCallback,
    checkpoints_of,
    find_checkpoint,
    load_checkpoint,
    recover_checkpoints,
    save_checkpoint,
)
from rl_training.experiment.files import swap
from rl_training.runtime.callbacks import Every

SOURCE = Path(rl_training.__file__).parent
FILES = ["config.json", "manifest.json", "metadata.json", "state.json", "state.safetensors"]


def a_state() -> dict[str, Any]:
    return {
        "weights": {"actor.weight": torch.arange(6.0).reshape(2, 3), "actor.bias": torch.tensor([0.5, -0.0])},
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
        "array": np.array([[True, False]]),
        "double": np.array([1 / 3]),
        "view": torch.arange(12.0).reshape(3, 4).T,
        "rng": np.random.default_rng(3).bit_generator.state,
        "counters": {"steps": 2**60, "best": None, "share": 1 / 3, "name": "ünï", "flags": [True, [1, 2.5, "x"]]},
        "low": float("-inf"),
        "nothing": {},
        "a": {"b": torch.tensor(1), "list": [torch.tensor(2), np.array(3.0)]},
        "a/b": torch.tensor(4),
        "a/list/0": torch.tensor(5),
    }


def save(path: Path, **changes: Any) -> Path:
    return save_checkpoint(path, {**a_state(), **changes}, {"algo": "ppo"}, {"seed": 1})


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, (torch.Tensor, np.ndarray)):
        assert type(found) is type(expected)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert np.array_equal(np.asarray(found.tolist()), np.asarray(expected.tolist()))
    else:
        assert found == expected
        assert type(found) is type(expected)


# Round trip and format


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path / "deep" / "er" / "saved")
    checkpoint = load_checkpoint(path)
    assert_equal(checkpoint.state, a_state())
    assert checkpoint.config == {"algo": "ppo"}
    assert checkpoint.metadata == {"seed": 1}
    assert checkpoint.path == path


def test_a_random_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rng.random(7)
    save(tmp_path / "saved", rng=rng.bit_generator.state)
    other = np.random.default_rng()
    other.bit_generator.state = load_checkpoint(tmp_path / "saved").state["rng"]
    assert np.array_equal(rng.random(10), other.random(10))


def test_the_format_is_safetensors_json_and_a_manifest_with_checksums(tmp_path: Path) -> None:
    path = save(tmp_path / "saved")
    assert sorted(os.listdir(path)) == FILES
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == FORMAT_VERSION
    assert manifest["package"] == rl_training.__version__
    assert sorted(manifest["files"]) == [name for name in FILES if name != "manifest.json"]
    for name, entry in manifest["files"].items():
        assert entry["size"] == (path / name).stat().st_size
        assert len(entry["sha256"]) == 64


def test_what_cannot_be_saved_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, TypeError)):
        save(tmp_path / "saved", wrong=object())
    assert not list(tmp_path.iterdir())


# Atomic


def test_no_temporary_files_are_left(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    save(tmp_path / "saved", scalar=torch.tensor(4))
    assert os.listdir(tmp_path) == ["saved"]
    assert load_checkpoint(tmp_path / "saved").state["scalar"] == 4


@pytest.mark.parametrize("failing", ["save_file", "write_json", "_digest", "sync_directory", "_replace"])
def test_a_failed_write_keeps_the_old_checkpoint_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save(tmp_path / "saved")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointing, failing, fail)
    with pytest.raises(CheckpointError, match=r"saved: could not be written: .*No space left"):
        save(tmp_path / "saved", scalar=torch.tensor(4))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["saved"]
    assert load_checkpoint(tmp_path / "saved").state["scalar"] == 3


def test_nothing_is_at_its_place_before_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    replace = checkpointing._replace

    def watch(new: Path, place: Path) -> None:
        seen.append(place.exists())
        load_checkpoint(new)  # complete, and verified
        replace(new, place)

    monkeypatch.setattr(checkpointing, "_replace", watch)
    save(tmp_path / "saved")
    assert seen == [False]


def test_an_existing_directory_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(
        CheckpointError, match="exists and is not a checkpoint, so it is not overwritten; choose another path"
    ):
        save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file exists and is not a checkpoint"):
        save(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "thesis"]


def test_an_empty_directory_and_the_remains_of_a_checkpoint_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")
    (tmp_path / "empty" / "manifest.json").unlink()
    save(tmp_path / "empty")
    assert_equal(load_checkpoint(tmp_path / "empty").state, a_state())


# What a killed process leaves

DEAD = 999_999_999
"""No process has this number."""


def test_there_is_always_a_checkpoint_at_its_place(tmp_path: Path) -> None:
    """Whatever a replacement asks of the system, before and after it the old one or the new one is there."""
    save(tmp_path / "saved")
    seen: list[int] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if watching and event in ("os.rename", "os.remove", "os.rmdir"):
            watching.clear()  # not while it looks
            seen.append(int(load_checkpoint(tmp_path / "saved").state["scalar"]))
            watching.append(True)

    watching: list[bool] = []
    sys.addaudithook(watch)
    watching.append(True)
    save(tmp_path / "saved", scalar=torch.tensor(4))
    watching.clear()
    assert seen[0] == 3
    assert seen[-1] == 4
    assert seen == sorted(seen)


def killed_between_two_renames(place: Path, *, new: bool) -> None:
    """As a process leaves it on a system that cannot exchange two directories."""
    save(place, scalar=torch.tensor(7))
    os.rename(place, place.with_name(f".{place.name}.{DEAD}.old"))
    beside = save(place.with_name(f".{place.name}.{DEAD}.tmp"), scalar=torch.tensor(8))
    if not new:
        (beside / "manifest.json").unlink()  # which is written last


@pytest.mark.parametrize("new", [False, True])
def test_what_was_set_aside_is_found_by_readers_which_change_nothing(tmp_path: Path, new: bool) -> None:
    killed_between_two_renames(tmp_path / "agent", new=new)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for read in (load_checkpoint, find_checkpoint):
        assert read(tmp_path / "agent").state["scalar"] == (8 if new else 7)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    save(tmp_path / "agent", scalar=torch.tensor(9))
    assert os.listdir(tmp_path) == ["agent"], "the next save tidies up"


def test_a_run_with_nothing_but_a_checkpoint_that_was_set_aside(tmp_path: Path) -> None:
    run = a_run(tmp_path, 10)
    killed_between_two_renames(run / "checkpoints" / "step_20", new=True)
    assert find_checkpoint(run).state["scalar"] == 8
    shutil.rmtree(run / "checkpoints" / "step_10")
    assert find_checkpoint(run).state["scalar"] == 8
    recover_checkpoints(run / "checkpoints")
    assert os.listdir(run / "checkpoints") == ["step_20"]
    assert find_checkpoint(run).path.name == "step_20"
    assert find_checkpoint(run).state["scalar"] == 8


def test_a_half_written_checkpoint_is_no_checkpoint(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    run = a_run(tmp_path, 10)
    half = save(run / "checkpoints" / f".step_20.{DEAD}.tmp")
    (half / "manifest.json").unlink()
    assert find_checkpoint(run).state["scalar"] == 10
    assert not recwarn.list
    recover_checkpoints(run / "checkpoints")
    assert os.listdir(run / "checkpoints") == ["step_10"]


def test_of_what_was_set_aside_a_good_one_is_put_back(tmp_path: Path) -> None:
    killed_between_two_renames(tmp_path / "agent", new=True)
    (tmp_path / f".agent.{DEAD}.tmp" / "state.json").write_text("{}")
    assert load_checkpoint(tmp_path / "agent").state["scalar"] == 7
    recover_checkpoints(tmp_path)
    assert os.listdir(tmp_path) == ["agent"]
    assert load_checkpoint(tmp_path / "agent").state["scalar"] == 7


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    living = save(tmp_path / f".agent.{os.getppid()}.tmp")
    with pytest.raises(CheckpointError, match="agent does not exist"):
        find_checkpoint(tmp_path / "agent")
    recover_checkpoints(tmp_path)
    save(tmp_path / "agent")
    assert living.is_dir()


def test_a_link_is_not_taken_for_what_was_set_aside(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "elsewhere" / "saved")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / f".agent.{DEAD}.old").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="agent does not exist"):
        find_checkpoint(tmp_path / "here" / "agent")


def test_two_directories_are_exchanged_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    if swap(tmp_path / "one", tmp_path / "other"):  # where the system can
        assert os.listdir(tmp_path / "one") == ["other"]
        assert os.listdir(tmp_path / "other") == ["one"]
        with pytest.raises(FileNotFoundError):
            swap(tmp_path / "one", tmp_path / "missing")


# Damage


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "saved")
    (path / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert name in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "saved")
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path / name) in str(caught.value)
    assert "damaged" in str(caught.value)


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
def test_every_damaged_byte_is_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "saved")
    content = (path / name).read_bytes()
    for place in {0, len(content) // 3, len(content) - 1}:
        broken = bytearray(content)
        broken[place] ^= 1
        (path / name).write_bytes(bytes(broken))
        with pytest.raises(CheckpointError, match="checksum differs") as caught:
            load_checkpoint(path)
        assert str(path / name) in str(caught.value)


def test_a_damaged_manifest_is_never_more_than_a_checkpoint_error(tmp_path: Path) -> None:
    path = save(tmp_path / "saved")
    content = (path / "manifest.json").read_bytes()
    errors: list[str] = []
    places = range(0, len(content), 5)
    for place in places:
        broken = bytearray(content)
        broken[place] = 0xFF if place % 2 else ord("9")
        (path / "manifest.json").write_bytes(bytes(broken))
        try:
            load_checkpoint(path)  # harmless where it changed nothing or only white space and the package's version
        except CheckpointError as error:
            errors.append(str(error))
    assert len(errors) > len(places) // 2
    assert all(str(path) in text for text in errors)


@pytest.mark.parametrize("manifest", ["[]", "1", "null", "{}", '{"format": "1"}', '{"format": 1, "files": []}'])
def test_a_manifest_of_another_shape_is_damaged(tmp_path: Path, manifest: str) -> None:
    path = save(tmp_path / "saved")
    (path / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        load_checkpoint(path)


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = save(tmp_path / "saved")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format"] = FORMAT_VERSION + 1
    manifest["package"] = "9.9"
    (path / "manifest.json").write_text(json.dumps(manifest))
    message = rf"9\.9 in format {FORMAT_VERSION + 1}.*reads up to format {FORMAT_VERSION}.*pip install -U"
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


# Of a run


def a_run(tmp_path: Path, *steps: int) -> Path:
    for step in steps:
        save(tmp_path / "run" / "checkpoints" / f"step_{step}", scalar=torch.tensor(step))
    return tmp_path / "run"


def test_the_newest_is_found_by_number_not_by_name(tmp_path: Path) -> None:
    run = a_run(tmp_path, 1000, 200, 30)
    save(run / "checkpoints" / "best", scalar=torch.tensor(5))
    assert [path.name for path in checkpoints_of(run)] == ["step_30", "step_200", "step_1000"]
    assert find_checkpoint(run).state["scalar"] == 1000
    assert find_checkpoint(str(run / "checkpoints" / "step_30")).state["scalar"] == 30
    assert find_checkpoint(run / "checkpoints" / "best").state["scalar"] == 5


@pytest.mark.parametrize("damage", ["state.safetensors", "manifest.json", "everything"])
def test_a_damaged_newest_is_reported_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    run = a_run(tmp_path, 10, 20, 30)
    newest = run / "checkpoints" / "step_30"
    if damage == "everything":
        shutil.rmtree(newest)
        newest.mkdir()
    else:
        (newest / damage).unlink()
    with pytest.warns(UserWarning, match=r"using step_20, because newer checkpoints are damaged: .*step_30"):
        found = find_checkpoint(run)
    assert found.state["scalar"] == 20


def test_good_checkpoints_are_used_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert find_checkpoint(a_run(tmp_path, 10, 20)).state["scalar"] == 20
    assert not recwarn.list


def test_if_all_are_damaged_all_are_named(tmp_path: Path) -> None:
    run = a_run(tmp_path, 10, 20)
    for path in checkpoints_of(run):
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no valid checkpoint.*step_20.*step_10"):
        find_checkpoint(run)


def test_what_is_neither_a_checkpoint_nor_a_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run directory"):
        find_checkpoint(tmp_path)


class View:
    """As much of a run as the callback asks for."""

    env_steps = 0
    position = property(lambda self: self.env_steps)
    iterations = 1
    interrupted = False

    def __init__(self) -> None:
        self.recorded: dict[str, float] = {}

    def record(self, metrics: Any) -> None:
        self.recorded.update(metrics)


def evaluation(mean: float) -> EvaluationResult:
    return EvaluationResult([mean], [1])


def test_keep_last_and_keep_best(tmp_path: Path) -> None:
    run, view = tmp_path / "run", View()
    callback = CheckpointCallback(
        lambda path: save(path, scalar=torch.tensor(view.env_steps)), run / "checkpoints", Every(10), keep=2
    )
    for step, mean in ((5, 1.0), (10, 3.0), (20, 2.0), (30, None), (41, 3.0)):
        view.env_steps = step
        if mean is not None:
            callback.on_evaluation(view, evaluation(mean))  # type: ignore[arg-type]
        callback.on_iteration(view)  # type: ignore[arg-type]
    assert [path.name for path in checkpoints_of(run)] == ["step_30", "step_41"]
    assert load_checkpoint(run / "checkpoints" / "best").state["scalar"] == 10
    assert all(number > 0 for number in view.recorded.values()), "what saving costs is recorded"
    view.env_steps = 45
    callback.on_stop(view)  # type: ignore[arg-type]
    callback.on_stop(view)  # type: ignore[arg-type]
    assert [path.name for path in checkpoints_of(run)] == ["step_41", "step_45"]


def test_best_can_be_turned_off_and_zero_means_only_the_last(tmp_path: Path) -> None:
    run, view = tmp_path / "run", View()
    callback = CheckpointCallback(lambda path: save(path), run / "checkpoints", Every(0), keep_best=False)
    view.env_steps = 10
    callback.on_evaluation(view, evaluation(1.0))  # type: ignore[arg-type]
    callback.on_iteration(view)  # type: ignore[arg-type]
    assert not run.exists()
    callback.on_stop(view)  # type: ignore[arg-type]
    assert os.listdir(run / "checkpoints") == ["step_10"]


# Nothing can run code


def calls_of(tree: ast.AST) -> list[str]:
    """Dotted names of everything that is called in a module."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            names.append(ast.unparse(node.func))
    return names


MODULES = sorted(SOURCE.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"),
    *("np.load", "numpy.load", "pd.read_pickle", "os.system", "os.popen"),
}


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(SOURCE)) for path in MODULES])
def test_no_module_can_load_something_that_runs(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module.split(".")[0], *(alias.name for alias in node.names)}
    assert not imported & FORBIDDEN_MODULES
    assert not set(calls_of(tree)) & FORBIDDEN_CALLS
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "yaml.load":
            assert "Loader=_Loader" in ast.unparse(node), "only our subclass of the safe loader"


def test_the_search_for_forbidden_calls_finds_them() -> None:
    tree = ast.parse("import torch\ndef f(x):\n    return torch.load(x) or eval(x)")
    assert set(calls_of(tree)) == {"torch.load", "eval"}


def test_our_yaml_loader_is_safe() -> None:
    import yaml

    from rl_training.experiment import yaml_io

    assert issubclass(yaml_io._Loader, yaml.SafeLoader)
    unsafe = set(yaml.UnsafeLoader.yaml_multi_constructors) - set(yaml.SafeLoader.yaml_multi_constructors)
    assert not unsafe & set(yaml_io._Loader.yaml_multi_constructors)
