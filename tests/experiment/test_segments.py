"""Replay in checkpoints: files that checkpoints share, what may be wrong with them, and that nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_training import DQN, TrainConfig, evaluate, load, resume, train
from rl_training.cli import main
from rl_training.contracts.errors import CheckpointError, NonFiniteError
from rl_training.data import replay_buffer
from rl_training.experiment import checkpointing
from rl_training.experiment.checkpointing import checkpoints_of, find_checkpoint, load_checkpoint, save_checkpoint
from rl_training.testing.resume import flat, same
from tests.small import small_settings

ROWS = 10
"""Steps in one segment: a row of CartPole has 24 bytes of observation and action."""
OWN = small_settings("dqn", prioritized=True, buffer_size=59, importance_exponent=0.5, epsilon=0.2)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "SEGMENT_BYTES", 24 * ROWS)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power cut here


def make_config(output: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "algo": "dqn", "env_id": "CartPole-v1", "total_timesteps": 104, "output_dir": output, "eval_every": 0,
        "checkpoint_every": 26, "log_every": 50, "tensorboard": False, "algorithm": OWN, "checkpoint_keep": 4,
    }  # fmt: skip
    return TrainConfig(**{**settings, **changes})


def make_run(output: Path, **changes: Any) -> Path:
    run = train(make_config(output, **changes), progress=False).run_dir
    assert run is not None
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after 26, 52, 78 and 104 steps; replay keeps 59 of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_buffer, "SEGMENT_BYTES", 24 * ROWS)
        return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, in which no file is shared."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def inodes(checkpoint: Path) -> dict[int, str]:
    return {file.stat().st_ino: file.name for file in checkpoint.glob("segment_*")}


def segments(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("segment_*"))


def same_state(one: Path, other: Path) -> list[str]:
    a, b = flat(load_checkpoint(one).state), flat(load_checkpoint(other).state)
    return [name for name in a.keys() | b.keys() if not same(a, b, name)]


# Sharing


def test_unchanged_segments_are_shared_and_only_new_rows_are_written(trained: Path) -> None:
    first, second, third, fourth = checkpoints_of(trained)
    assert [len(segments(path)) for path in (first, second, third, fourth)] == [3, 6, 7, 7]
    assert len(inodes(first).keys() & inodes(second).keys()) == 2, "rows 0-9, 10-19; 20-25 were not complete"
    assert len(inodes(second).keys() & inodes(third).keys()) == 4, "10-19 to 40-49; 0-9 are gone, 50-51 not complete"
    assert len(inodes(third).keys() & inodes(fourth).keys()) == 3, "40-49 to 60-69"
    for path in (first, second, third, fourth):
        last = segments(path)[-1]
        assert last.stat().st_nlink == 1, "what still grows belongs to one checkpoint alone"


def test_where_there_are_no_links_files_are_copied(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    run = make_run(tmp_path)
    paths = checkpoints_of(run)
    assert len(paths) == 4
    assert len({inode for path in paths for inode in inodes(path)}) == sum(len(segments(path)) for path in paths)
    assert same_state(paths[-1], checkpoints_of(trained)[-1]) == []


def test_removed_checkpoints_are_not_missed(trained: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint_every=9, checkpoint_keep=1)
    (only,) = checkpoints_of(run)
    assert only.name == "step_104"
    assert [name for name in same_state(only, checkpoints_of(trained)[-1]) if "CheckpointCallback" not in name] == []


def test_the_run_goes_on_when_somebody_removed_its_checkpoints(trained: Path, tmp_path: Path) -> None:
    def remove(view: Any) -> None:
        if view.env_steps == 80:
            for path in checkpoints_of(next(tmp_path.iterdir())):
                shutil.rmtree(path)

    train(make_config(tmp_path), progress=False, callback=remove)
    (run,) = tmp_path.iterdir()
    (only,) = checkpoints_of(run)
    assert same_state(only, checkpoints_of(trained)[-1]) == []


def small_agent(**changes: Any) -> DQN:
    return DQN("CartPole-v1", seed=1, eval_every=0, **{**OWN, **changes})


def state_of(agent: Any) -> dict[str, Any]:
    return flat(agent._experiment.trainer.state_dict())


def test_saved_elsewhere_and_the_original_deleted(tmp_path: Path) -> None:
    agent = small_agent()
    agent.learn(40, progress=False)
    agent.save(tmp_path / "original")
    agent.learn(30, progress=False)
    agent.save(tmp_path / "other" / "place")
    assert inodes(tmp_path / "original").keys() & inodes(tmp_path / "other" / "place").keys()
    shutil.rmtree(tmp_path / "original")
    again = load(tmp_path / "other" / "place")
    shutil.rmtree(tmp_path / "other")  # what it was loaded from is not needed any more either
    expected, found = state_of(agent), state_of(again)
    assert [name for name in expected.keys() | found.keys() if not same(expected, found, name)] == []
    again.save(tmp_path / "third")
    assert load(tmp_path / "third").num_timesteps == 70


def test_saved_over_itself_again_and_again(tmp_path: Path) -> None:
    agent = small_agent()
    for _ in range(6):
        agent.learn(23, progress=False)
        agent.save(tmp_path / "agent")
        assert os.listdir(tmp_path) == ["agent"]
        found, expected = state_of(load(tmp_path / "agent")), state_of(agent)
        assert [name for name in expected.keys() | found.keys() if not same(expected, found, name)] == []


def test_a_copy_of_the_directory_is_complete(trained: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", checkpoints_of(trained)[-1], tmp_path / "copy"], check=True)
    assert same_state(tmp_path / "copy", checkpoints_of(trained)[-1]) == []
    agent = load(tmp_path / "copy")
    agent.learn(10, progress=False)
    agent.close()


# Damage by accident


def damages(path: Path) -> list[tuple[str, Callable[[], object]]]:
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    return [
        ("truncated", lambda: path.write_bytes(content[:-7])),
        ("empty", lambda: path.write_bytes(b"")),
        ("a flipped bit", lambda: path.write_bytes(flipped)),
        ("a flipped bit in the header", lambda: path.write_bytes(bytes([content[0] ^ 1]) + content[1:])),
        ("other content", lambda: path.write_bytes(b"x" * len(content))),
        ("missing", path.unlink),
        ("a directory", path.mkdir),
    ]


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_damaged_segment_is_named_and_the_checkpoint_before_is_used(run: Path, number: int) -> None:
    newest = checkpoints_of(run)[-1]
    path = segments(newest)[number]
    for what, damage in damages(path):
        damage()
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(newest)
        assert str(path) in str(caught.value), what
        with pytest.warns(UserWarning, match="using step_78, because newer checkpoints are damaged.*step_104"):
            assert find_checkpoint(run).path.name == "step_78"


def test_a_run_whose_newest_replay_is_damaged_ends_as_if_it_were_not(run: Path, trained: Path) -> None:
    segments(checkpoints_of(run)[-1])[2].write_bytes(b"")
    with pytest.warns(UserWarning, match="using step_78"):
        resume(run, progress=False)
    assert same_state(checkpoints_of(run)[-1], checkpoints_of(trained)[-1]) == []


def test_swapped_segments_are_found(run: Path) -> None:
    newest = checkpoints_of(run)[-1]
    one, other = segments(newest)[1:3]
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"segment_0000[12]\.safetensors: is damaged"):
        load_checkpoint(newest)


def test_a_shared_file_that_is_damaged_damages_all_that_share_it_and_all_are_named(tmp_path: Path) -> None:
    """The price of sharing. What does not share it still loads."""
    run = make_run(tmp_path)
    second, third, fourth = checkpoints_of(run)[1:]
    inode = min((inodes(third).keys() & inodes(fourth).keys()) - inodes(second).keys())
    path = fourth / inodes(fourth)[inode]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with open(path, "r+b") as file:  # in place
        file.write(content)
    with pytest.warns(UserWarning, match=r"using step_52, .*step_104.*step_78"):
        assert find_checkpoint(run).path.name == "step_52"


def test_a_file_that_was_changed_after_it_was_saved_is_not_shared_again(tmp_path: Path) -> None:
    agent = small_agent()
    agent.learn(40, progress=False)
    agent.save(tmp_path / "one")
    for path in segments(tmp_path / "one"):
        with open(path, "r+b") as file:
            file.write(b"damaged!")
        os.utime(path, ns=(1, 1))
    agent.save(tmp_path / "two")
    found, expected = state_of(load(tmp_path / "two")), state_of(agent)
    assert [name for name in expected if not same(expected, found, name)] == []


# Acting needs no replay


def rot(path: Path) -> None:
    """Flip a bit in place, as a disk does: neither size nor time change."""
    about = path.stat()
    with open(path, "r+b") as file:
        file.seek(about.st_size - 3)
        byte = file.read(1)
        file.seek(about.st_size - 3)
        file.write(bytes([byte[0] ^ 4]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.fixture
def rotten(run: Path) -> Path:
    """A run in which the replay of every checkpoint is damaged, and nothing else."""
    for path in checkpoints_of(run):
        rot(segments(path)[0])
    return run


def test_acting_does_not_need_the_replay(rotten: Path, trained: Path, tmp_path: Path) -> None:
    expected = evaluate(trained, 2).returns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(rotten, 2).returns == expected
        assert main(["eval", str(rotten), "--num-episodes", "1"]) == 0
        assert main(["export", str(rotten), "--format", "torch-export", "--output", str(tmp_path / "policy.pt2")]) == 0
        make_run(tmp_path / "new", init_from=rotten, total_timesteps=26)
        load(rotten, learner_only=True).close()
    newest = checkpoints_of(rotten)[-1]
    with pytest.warns(UserWarning, match=r"segment_00000.*is damaged.*The weights are intact: the agent can act"):
        agent = load(rotten)
    assert agent.num_timesteps == 104, "the newest"
    assert agent.evaluate(2).returns == expected
    agent.save(tmp_path / "weights", weights_only=True)
    with pytest.raises(CheckpointError, match=rf"{newest}.*learner_only=True"):
        agent.learn(10, progress=False)
    agent.close()


def test_a_run_whose_replay_is_damaged_everywhere_can_go_on_without_it(rotten: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"intact.*rl-training resume {rotten} --learner-only") as caught:
        resume(rotten, total_timesteps=130, progress=False)
    assert "step_104" in str(caught.value)
    assert sorted(os.listdir(rotten / "checkpoints")) == ["step_104", "step_26", "step_52", "step_78"], "as they were"
    assert main(["resume", str(rotten), "--learner-only", "--total-timesteps", "130", "--quiet"]) == 0
    assert [path.name for path in checkpoints_of(rotten)][-1] == "step_130"
    assert not list(rotten.rglob("damaged_*"))
    agent = load(rotten)  # the new checkpoint is whole
    assert isinstance(agent, DQN)
    assert agent._off_policy().sampler.buffer.num_transitions == 26, "the replay began anew"
    agent.learn(5, progress=False)
    agent.close()
    history = json.loads((rotten / "metadata.json").read_text())["history"]
    assert [entry.get("learner_only", False) for entry in history] == [False, True]


def test_a_learner_only_resume_keeps_weights_and_optimizer(rotten: Path, trained: Path) -> None:
    expected = load(trained)._experiment.trainer.algorithm.state_dict()
    found = load(rotten, learner_only=True)._experiment.trainer.algorithm.state_dict()
    one, other = flat(expected), flat(found)
    assert one.keys() == other.keys()
    assert all(same(one, other, name) for name in one)


@pytest.mark.parametrize("restored", [False, True])
def test_a_shared_file_that_rots_is_found_within_some_saves_and_written_anew(tmp_path: Path, restored: bool) -> None:
    agent = small_agent()
    agent.learn(50, progress=False)
    agent.save(tmp_path / "0")
    if restored:
        agent = DQN.load(tmp_path / "0")
    count = len(segments(tmp_path / "0"))
    rot(segments(tmp_path / "0")[2])
    said: list[str] = []
    for number in range(1, count + 1):  # one in sixteen each time, and at least one
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            agent.save(tmp_path / str(number))
        said += [str(warning.message) for warning in caught if "written again" in str(warning.message)]
    assert len(said) == 1
    assert "segment_00002.safetensors: is damaged: its checksum differs" in said[0]
    found, expected = state_of(load(tmp_path / str(count))), state_of(agent)
    assert [name for name in expected.keys() | found.keys() if not same(expected, found, name)] == []


def test_of_many_shared_files_each_is_verified_within_sixteen_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_buffer, "SEGMENT_BYTES", 24)
    agent = small_agent()
    agent.learn(50, progress=False)
    agent.save(tmp_path / "0")
    real, seen = checkpointing._digest, []

    def watched(path: Path) -> str:
        seen.append(path.name)
        return real(path)

    monkeypatch.setattr(checkpointing, "_digest", watched)
    names = {path.name for path in segments(tmp_path / "0")}
    assert len(names) > 32
    for number in range(1, 17):
        agent.save(tmp_path / str(number))
    assert names <= set(seen)
    assert sum(name.startswith("segment") for name in seen) < 3 * len(names), "not all of them each time"


def test_a_damaged_file_is_not_made_good_by_saving_it_again(run: Path) -> None:
    """What was read but not restored has no copy in memory."""
    saved = load_checkpoint(checkpoints_of(run)[-1])
    for path in segments(saved.path):
        rot(path)
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(CheckpointError, match="checksum differs"):
        save_checkpoint(run / "again", saved.state, saved.config, saved.metadata)


# Disks


def test_a_full_disk_while_a_segment_is_written(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpointing.save_file

    def full(tensors: Any, path: Path) -> None:
        if path.name.startswith("segment") and ".step_52." in str(path):
            Path(path).write_bytes(b"half of i")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpointing, "save_file", full)
    with pytest.warns(UserWarning, match=r"continues without this checkpoint: .*step_52.*No space left on device"):
        run = make_run(tmp_path)
    assert sorted(os.listdir(run / "checkpoints")) == ["step_104", "step_26", "step_78"]
    assert same_state(checkpoints_of(run)[-1], checkpoints_of(trained)[-1]) == []


def test_a_disk_that_is_full_when_a_segment_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    agent = small_agent()
    agent.learn(40, progress=False)
    agent.save(tmp_path / "one")
    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match=r"two: could not be written: .*No space left"):
        agent.save(tmp_path / "two")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["one"]
    agent.save(tmp_path / "two")
    assert same_state(tmp_path / "one", tmp_path / "two") == []


# Tampering: every checksum is right


def reseal(checkpoint: Path) -> None:
    """Make the manifest say what is there."""
    names = [path.name for path in checkpoint.iterdir() if path.name != "manifest.json"]
    sizes = {name: (checkpoint / name).stat().st_size for name in names}
    files = {name: {"sha256": checkpointing._digest(checkpoint / name), "size": sizes[name]} for name in names}
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "files": files}))


def edit_segment(change: Callable[[dict[str, torch.Tensor]], object], number: int = 1) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        path = segments(checkpoint)[number]
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    return edit


def put(name: str, new: Callable[[torch.Tensor], torch.Tensor], number: int = 1) -> Callable[[Path], None]:
    return edit_segment(lambda tensors: tensors.update({name: new(tensors[name]).contiguous()}), number)


def edit_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        path = checkpoint / "state.json"
        state = json.loads(path.read_text())
        change(state["sampler"]["buffer"])
        path.write_text(json.dumps(state))

    return edit


def edit_priorities(change: Callable[[torch.Tensor], object], name: str = "tree/values") -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        tensors = {key: tensor.clone() for key, tensor in load_file(checkpoint / "state.safetensors").items()}
        change(tensors[f"sampler/indexer/{name}"])
        save_file(tensors, checkpoint / "state.safetensors")

    return edit


def everywhere(value: float) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.fill_(value)


def second_to(value: float) -> Callable[[torch.Tensor], object]:
    def change(tensor: torch.Tensor) -> None:
        tensor[1] = value

    return change


TAMPERING: dict[str, Callable[[Path], None]] = {
    "a column is missing": edit_segment(lambda tensors: tensors.pop("reward")),
    "a column is unknown": edit_segment(lambda tensors: tensors.update(extra=torch.zeros(1))),
    "a column is short": put("reward", lambda x: x[:-1]),
    "a column is long": put("reward", lambda x: torch.cat([x, x])),
    "a column has another shape": put("obs", lambda x: x[:, :2]),
    "observations are doubles": put("obs", lambda x: x.double()),
    "rewards are halves": put("reward", lambda x: x.to(torch.bfloat16)),
    "rewards are integers": put("reward", lambda x: x.long()),
    "ends are numbers": put("terminated", lambda x: x.float()),
    "actions are reals": put("action", lambda x: x.float()),
    "actions that do not exist": put("action", lambda x: x + 2),
    "negative actions": put("action", lambda x: x - 2),
    "times are reals": put("times", lambda x: x.float()),
    "times are negative": put("times", lambda x: x - 1000),
    "times are huge": put("times", lambda x: torch.tensor([0, 2**62])),
    "times are later": put("times", lambda x: x + 1),
    "times end before they begin": put("times", lambda x: x.flip(0)),
    "no times": put("times", lambda x: x[:0]),
    "an end outside": put("ended", lambda x: torch.tensor([10**6]), -1),
    "a negative end": put("ended", lambda x: torch.tensor([-1]), -1),
    "ends are reals": put("ended", lambda x: x.double()),
    "last observations are missing": put("final_obs", lambda x: torch.cat([x, x[:1] if len(x) else torch.ones(1, 4)])),
    "rows are missing at the beginning": edit_state(lambda state: state["segments"].pop(0)),
    "rows are missing in the middle": edit_state(lambda state: state["segments"].pop(2)),
    "rows are missing at the end": edit_state(lambda state: state["segments"].pop()),
    "rows come twice": edit_state(lambda state: state["segments"].insert(1, state["segments"][1])),
    "rows are out of order": edit_state(lambda state: state["segments"].reverse()),
    "no segments": edit_state(lambda state: state.update(segments=[])),
    "segments are something else": edit_state(lambda state: state.update(segments={"a": 1})),
    "a segment is something else": edit_state(lambda state: state["segments"].append(3)),
    "more rows than there are": edit_state(lambda state: state.update(added=105)),
    "fewer rows than there are": edit_state(lambda state: state.update(added=60)),
    "a negative number of rows": edit_state(lambda state: state.update(added=-1)),
    "rows in half": edit_state(lambda state: state.update(added=103.5)),
    "the oldest after the newest": edit_state(lambda state: state.update(oldest=1000)),
    "another number of environments": edit_state(lambda state: state.update(num_envs=2)),
    "no environments": edit_state(lambda state: state.update(num_envs=0)),
    "an unknown entry": edit_state(lambda state: state.update(more=1)),
    "a missing entry": edit_state(lambda state: state.pop("next_obs")),
    "a next observation of another kind": edit_state(lambda state: state.update(next_obs=[1.0, 2.0, 3.0, 4.0])),
    "priorities are negative": edit_priorities(second_to(-1.0)),
    "priorities are not numbers": edit_priorities(second_to(float("nan"))),
    "priorities are infinite": edit_priorities(second_to(float("inf"))),
    "priorities of rows that are not there": edit_priorities(everywhere(1.0)),
    "no priorities": edit_priorities(everywhere(0.0)),
    "the largest priority is not a number": edit_priorities(everywhere(float("nan")), "largest"),
    "the largest priority is negative": edit_priorities(everywhere(-1.0), "largest"),
}


@pytest.mark.parametrize("name", ["segment_00099.safetensors", "state.safetensors", [1]], ids=str)
def test_a_state_that_names_other_files_is_refused(run: Path, name: Any) -> None:
    newest = checkpoints_of(run)[-1]
    edit_state(lambda state: state["segments"].append({"$segment": name}))(newest)
    reseal(newest)
    with pytest.raises(CheckpointError, match="refers to a missing segment"):
        load(newest)


@pytest.mark.parametrize("what", TAMPERING)
def test_a_replay_that_cannot_be_is_refused(run: Path, what: str) -> None:
    newest = checkpoints_of(run)[-1]
    TAMPERING[what](newest)
    reseal(newest)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match="The weights are intact: the agent can act, but cannot continue training"):
        agent = load(newest)
    for action in (lambda: agent.learn(5, progress=False), lambda: agent.save(run / "new")):
        with pytest.raises(CheckpointError, match=r"learner_only=True.*weights_only=True") as caught:
            action()
        assert str(newest) in str(caught.value)
    agent.close()
    with warnings.catch_warnings():  # what the files do not name can be an accident, and the one before is used
        warnings.simplefilter("ignore")
        found = find_checkpoint(run).path
    if found == newest:
        with pytest.raises(CheckpointError):
            resume(run, progress=False)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert {path: after.get(path) for path in before if path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }, "nothing is lost"


def test_the_same_run_is_good_without_tampering(run: Path) -> None:
    newest = checkpoints_of(run)[-1]
    put("times", lambda x: x)(newest)
    edit_state(lambda state: None)(newest)
    edit_priorities(lambda tensor: None)(newest)
    reseal(newest)
    agent = load(newest)
    agent.learn(5, progress=False)
    agent.close()


@pytest.mark.parametrize("name", ["segment_00001.safetensors", "segment_00099.safetensors"])
@pytest.mark.parametrize("kind", ["file", "directory", "nothing"])
def test_links_to_elsewhere_are_not_followed(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    newest = checkpoints_of(run)[-1]
    outside = tmp_path / "outside"
    if kind == "file":
        shutil.copy(newest / "segment_00001.safetensors", outside)
    elif kind == "directory":
        outside.mkdir()
    listed = json.loads((newest / "manifest.json").read_text())
    listed["files"].setdefault(name, listed["files"]["segment_00001.safetensors"])
    (newest / name).unlink(missing_ok=True)
    (newest / name).symlink_to(outside)
    (newest / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=rf"{name}: is a link to a path outside"):
        load(newest)


@pytest.mark.parametrize(
    "name",
    ["segment_1.safetensors", "segment_00000.safetensors.exe", "../segment_00000.safetensors", "code.py"],
)  # fmt: skip
def test_a_manifest_with_other_names(run: Path, name: str) -> None:
    newest = checkpoints_of(run)[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["segment_00000.safetensors"]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged: it lists files that no checkpoint has"):
        load(newest)


def test_a_segment_that_is_not_listed(run: Path) -> None:
    newest = checkpoints_of(run)[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["files"]["segment_00002.safetensors"]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"state\.json: refers to a missing segment"):
        load(newest)


def test_a_segment_that_is_no_tensors_at_all(run: Path) -> None:
    newest = checkpoints_of(run)[-1]
    (newest / "segment_00001.safetensors").write_bytes(b"\x80\x04\x95\x00")  # how a pickle begins
    reseal(newest)
    with pytest.warns(UserWarning, match=r"segment_00001\.safetensors: is damaged"):
        agent = load(newest)
    with pytest.raises(CheckpointError, match=r"segment_00001\.safetensors: is damaged"):
        agent.learn(5, progress=False)
    agent.close()


# Parts of an agent's replay


def test_values_that_no_observation_has_do_no_harm_before_they_are_used(run: Path) -> None:
    """Not a number in an observation: the update finds it and says so."""
    newest = checkpoints_of(run)[-1]
    for number in range(len(segments(newest))):
        put("obs", lambda x: torch.full_like(x, float("nan")), number)(newest)
    reseal(newest)
    agent = load(newest)
    with pytest.raises(NonFiniteError, match="gave NaN or infinity"):
        agent.learn(20, progress=False)
    agent.close()
