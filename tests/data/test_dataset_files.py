"""Files of datasets: round trips, the traps of published files, and files that are damaged or hostile."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_training.data import dataset as dataset_module
from rl_training.data.dataset import Dataset, DatasetError, DatasetMetadata, read_dataset, write_dataset
from rl_training.data.formats import npz, rows, storage
from tests.data.recorded import any_space, small_columns, three_episodes

SPACES: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(np.array([-1, -2], np.float32), np.array([1, 2], np.float32)),
    "image": spaces.Box(0, 255, (3, 36, 40), np.uint8),
    "float64": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "discrete": spaces.Discrete(5, start=-1),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "multi_binary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3), "c": spaces.MultiBinary(2)}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-2, 2, (3,)),
    "discrete": spaces.Discrete(3),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(3),
}


@pytest.fixture(autouse=True)
def _directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def need(target: str) -> None:
    if target.startswith("minari"):
        pytest.importorskip("h5py")
    if target.endswith("parquet"):
        pytest.importorskip("pyarrow")


def messages(dataset: Dataset) -> str:
    return "\n".join(map(str, dataset.findings))


@pytest.mark.parametrize("target", ["data.npz", "data.parquet", "minari:group/data-v0"])
@pytest.mark.parametrize(
    ("space", "actions"), [(name, "box") for name in SPACES] + [("vector", name) for name in ACTIONS]
)
def test_every_format_keeps_every_space(tmp_path: Path, target: str, space: str, actions: str) -> None:
    need(target)
    data = any_space(SPACES[space], ACTIONS[actions])
    data.extras["log_prob"] = np.arange(6, dtype=np.float32)
    data.metadata = DatasetMetadata(env_id="Own-v0", seeds=[3], licence="MIT", min_score=-1.5, spaces_known=True)
    place = target if target.startswith("minari") else tmp_path / target
    written = write_dataset(data, place)
    again = read_dataset(place)
    assert written.exists()
    assert again.hash == data.hash
    assert (again.observation_space, again.action_space) == (data.observation_space, data.action_space)
    assert again.metadata == data.metadata
    assert again.findings == []
    write_dataset(three_episodes(), place)  # replaces
    assert read_dataset(place).num_episodes == 3
    assert [path for path in tmp_path.rglob("*") if ".tmp" in path.name or ".old" in path.name] == []


def test_large_files_are_mapped_and_equal_to_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = any_space(spaces.Box(-1, 1, (50,)), spaces.Discrete(3), (40, 30, 20))
    path, packed = tmp_path / "data.npz", tmp_path / "packed.npz"
    write_dataset(data, path)
    np.savez_compressed(packed, allow_pickle=False, **small_columns(data))
    for module in (npz, storage, dataset_module):
        monkeypatch.setattr(module, "SMALL_BYTES", 1000)
    monkeypatch.setattr(dataset_module, "CHUNK_BYTES", 999)
    again, unpacked = read_dataset(path), read_dataset(packed)
    assert isinstance(again.observations, np.memmap)
    assert again.hash == data.hash
    assert "converted" not in messages(again)
    assert isinstance(unpacked.observations, np.memmap)
    assert (np.asarray(unpacked.observations) == np.asarray(data.observations)).all()
    assert f"converted once to {storage.cache_root()}" in messages(unpacked)
    chosen = again.select([2, 0])
    assert chosen.hash == data.select([2, 0]).hash


@pytest.mark.parametrize("target", ["data.parquet", "minari:data-v0", "data.hdf5"])
def test_large_files_of_other_formats_are_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    need(target)
    data = any_space(spaces.Box(-1, 1, (50,)), spaces.Discrete(3), (40, 30, 20))
    place: Any = target if target.startswith("minari") else tmp_path / target
    if target.endswith("hdf5"):
        d4rl_file(place, small_columns(data))
    else:
        write_dataset(data, place)
    from rl_training.data.formats import minari_files, parquet

    for module in (storage, parquet, minari_files):
        monkeypatch.setattr(module, "SMALL_BYTES", 1000)
    first, second = read_dataset(place), read_dataset(place)
    assert isinstance(first.observations, np.memmap)
    assert "converted once" in messages(second)
    assert first.hash == second.hash
    assert (np.asarray(second.observations) == np.asarray(data.observations)).all()


# What published files do


def d4rl_file(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file.create_dataset(name, data=column, **options)
    return path


def test_d4rl_layout(tmp_path: Path) -> None:
    given = small_columns(three_episodes())
    path = d4rl_file(
        tmp_path / "data.hdf5",
        {
            "observations": given["observations"],
            "next_observations": given["next_observations"],
            "actions": np.zeros((8, 1), np.float32),
            "rewards": given["rewards"],
            "terminals": given["terminations"],
            "timeouts": given["truncations"],
            "infos/qpos": np.zeros((8, 2)),
            "infos/action_log_probs": np.arange(8.0),
            "metadata/policy/weight": np.zeros((3, 3)),
            "metadata/algorithm": b"SAC",
        },
    )
    data = read_dataset(path)
    assert data.episode_lengths.tolist() == [3, 1, 4]
    assert sorted(data.extras) == ["log_prob", "qpos"]
    assert data.metadata.behaviour_policy == "SAC"
    assert np.asarray(data.next_observations)[:, 0].tolist() == [1, 2, 100, 101, 5, 6, 7, 102]


def npz_file(path: Path, columns: dict[str, Any]) -> Path:
    np.savez(path, allow_pickle=False, **columns)
    return path


def test_without_next_observations_the_last_step_of_truncated_episodes_is_left_out(tmp_path: Path) -> None:
    given = small_columns(three_episodes())
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    data = read_dataset(npz_file(tmp_path / "data.npz", {name: given[name] for name in names}))
    # the truncated episode of one step has no transition left; that of four steps has three
    assert data.episode_lengths.tolist() == [3, 3]
    assert data.terminated.tolist() == [0, 0, 1, 0, 0, 0]
    assert data.truncated.tolist() == [0, 0, 0, 0, 0, 1]
    assert np.asarray(data.next_observations)[:, 0].tolist() == [1, 2, 2, 5, 6, 7]
    assert "the last step of 2 truncated episodes is left out" in messages(data)
    assert "last observation of 1 terminated episodes is unknown" in messages(data)


@pytest.mark.parametrize("with_id", [True, False])
@pytest.mark.parametrize("with_next", [True, False])
def test_terminals_on_two_rows_end_one_episode(tmp_path: Path, with_id: bool, with_next: bool) -> None:
    lengths = (5, 4, 6)
    data = any_space(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), lengths)
    given = small_columns(data)
    given["terminations"] = np.zeros(15, bool)
    given["terminations"][[3, 4, 7, 8, 13, 14]] = True
    given["truncations"] = np.zeros(15, bool)
    for name, kept in (("episode_id", with_id), ("next_observations", with_next)):
        if not kept:
            del given[name]
    read = read_dataset(npz_file(tmp_path / "data.npz", given))
    assert read.episode_lengths.tolist() == [5, 4, 6]
    assert read.terminated.sum() == 3
    assert "3 episodes are marked as ended on their last two rows" in messages(read)


def test_episodes_that_are_cut_in_the_middle_are_found_by_their_next_observations(tmp_path: Path) -> None:
    data = any_space(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), (20, 20, 20))
    given = small_columns(data)
    del given["episode_id"]
    given["truncations"] = np.zeros(60, bool)  # only the first episode has its mark
    read = read_dataset(npz_file(tmp_path / "data.npz", given))
    assert read.episode_lengths.tolist() == [20, 20, 20]
    assert read.terminated.sum() == 1
    assert "1 episodes are cut in the middle" in messages(read)
    assert (np.asarray(read.next_observations) == given["next_observations"]).all()


def test_filtered_observations_are_kept_as_stored_and_said(tmp_path: Path) -> None:
    given = small_columns(any_space(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), (20, 20)))
    given["next_observations"] = given["next_observations"] * 1.5
    read = read_dataset(npz_file(tmp_path / "data.npz", given))
    assert "observations were filtered" in messages(read)
    assert (np.asarray(read.next_observations) == given["next_observations"]).all()
    written = write_dataset(read, tmp_path / "again.npz")
    assert (np.asarray(read_dataset(written).next_observations) == given["next_observations"]).all()


def test_only_dones(tmp_path: Path) -> None:
    given = small_columns(three_episodes())
    given["dones"] = given.pop("terminations") | given.pop("truncations")
    del given["episode_id"]
    read = read_dataset(npz_file(tmp_path / "data.npz", given))
    assert read.episode_lengths.tolist() == [3, 1, 4]
    assert "only `dones` is stored" in messages(read)


def test_flags_as_numbers_columns_of_one_and_whole_actions_as_reals(tmp_path: Path) -> None:
    given = small_columns(three_episodes())
    given["rewards"] = given["rewards"][:, None].astype(np.float16)
    given["terminals"] = given.pop("terminations").astype(np.float32)[:, None]
    given["actions"] = given["actions"].astype(np.float64)[:, None]
    env = three_episodes()
    read = read_dataset(npz_file(tmp_path / "data.npz", given), env=env)
    assert read.rewards.tolist() == env.rewards.tolist()
    assert read.terminated.tolist() == env.terminated.tolist()
    assert (str(read.actions.dtype), read.actions.shape) == ("int64", (8,))
    assert read.metadata.spaces_known
    given["actions"] = given["actions"] + 0.5
    path = npz_file(tmp_path / "data.npz", given)
    with pytest.raises(DatasetError, match="not whole"):
        read_dataset(path, env=env)


def test_spaces_are_inferred_if_nobody_knows_them() -> None:
    assert rows.infer_action_space(np.array([0, 2, 1])) == spaces.Discrete(3)
    assert rows.infer_action_space(np.array([[0.5, -1], [0.25, 2]], np.float32)) == spaces.Box(
        np.array([0.25, -1], np.float32), np.array([0.5, 2], np.float32)
    )
    assert rows.infer_observation_space(np.zeros((2, 4, 4), np.uint8)) == spaces.Box(0, 255, (4, 4), np.uint8)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    given = small_columns(three_episodes())
    del given["rewards"]
    with pytest.raises(DatasetError, match=r"has no column rewards; it has actions, .*episode_id"):
        read_dataset(npz_file(tmp_path / "data.npz", given))


# Minari


def minari_directory(tmp_path: Path) -> Path:
    pytest.importorskip("h5py")
    return write_dataset(three_episodes(), "minari:group/data-v0")


def test_minari_itself_reads_what_we_write(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    minari_directory(tmp_path)
    loaded = minari.load_dataset("group/data-v0")
    assert (loaded.total_episodes, loaded.total_steps) == (3, 8)
    episode = loaded[0]
    assert episode.observations[:, 0].tolist() == [0, 1, 2, 100]
    assert episode.terminations.tolist() == [False, False, True]


def test_we_read_what_minari_itself_writes(tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer

    space = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "image": spaces.Box(0, 255, (32, 48, 3), np.uint8)})
    image = np.full((4, 32, 48, 3), 100, np.uint8)
    buffer = EpisodeBuffer(
        id=0,
        seed=0,
        observations={"x": np.zeros((4, 2), np.float32), "image": image},
        actions=np.array([0, 1, 0]),
        rewards=np.array([1.0, 2.0, 3.0]),
        terminations=np.array([False, False, True]),
        truncations=np.zeros(3, bool),
        infos={"success": np.array([0, 0, 0, 1])},
    )
    minari.create_dataset_from_buffers(
        "cart/pole-v3",
        [buffer],
        env="CartPole-v1",
        observation_space=space,
        action_space=spaces.Discrete(2),
        algorithm_name="left",
        author="A",
        author_email="a@b.c",
        code_permalink="https://example.org",
        description="x",
    )
    data = read_dataset("minari:cart/pole-v3")
    assert (data.metadata.env_id, data.metadata.max_episode_steps) == ("CartPole-v1", 500)
    assert data.metadata.behaviour_policy == "left"
    assert data.metadata.spaces_known
    assert (data.observation_space, data.action_space) == (space, spaces.Discrete(2))
    assert isinstance(data.observations, dict)
    assert np.abs(data.observations["image"].astype(int) - 100).max() <= 2  # JPEG
    assert data.extras["success"].tolist() == [0, 0, 1]
    assert (data.terminated.tolist(), data.truncated.tolist()) == ([0, 0, 1], [0, 0, 0])


def test_minari_is_downloaded_only_on_demand(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"not on this machine .*--download"):
        read_dataset("minari:group/data-v0")
    with pytest.raises(DatasetError, match="ids have the form"):
        read_dataset("minari:../../etc/passwd-v0")


def test_damaged_minari_metadata(tmp_path: Path) -> None:
    path = minari_directory(tmp_path)
    about = path / "data" / "metadata.json"
    good = json.loads(about.read_text())
    space = {"type": "Box", "dtype": "float32", "shape": [2**40], "low": 0, "high": 1}
    for changed in (
        "{",
        "[]",
        json.dumps({**good, "observation_space": "{}"}),
        json.dumps({**good, "observation_space": json.dumps(space)}),
        json.dumps({**good, "action_space": json.dumps({"type": "Text"})}),
        json.dumps({**good, "data_format": "arrow"}),
    ):
        about.write_text(changed)
        with pytest.raises(DatasetError):
            read_dataset(path)
    # an entry point in the file is never imported
    spec = {"id": "Evil-v0", "entry_point": "os:system", "kwargs": {"command": f"touch {tmp_path}/ran"}}
    about.write_text(json.dumps({**good, "env_spec": json.dumps(spec)}))
    assert read_dataset(path).num_episodes == 3
    assert not (tmp_path / "ran").exists()


# Damaged and hostile files


def test_every_truncation_of_an_npz_file_is_refused(tmp_path: Path) -> None:
    whole = write_dataset(three_episodes(), tmp_path / "data.npz").read_bytes()
    path = tmp_path / "cut.npz"
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(DatasetError, match=r"cut\.npz"):
            read_dataset(path)


@pytest.mark.parametrize("suffix", ["npz", "parquet", "hdf5"])
def test_changed_bytes_are_refused_or_read_but_never_crash(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    if suffix == "hdf5":
        d4rl_file(path, small_columns(three_episodes()))
    else:
        need(suffix)
        write_dataset(three_episodes(), path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        changed = bytearray(whole)
        for place in rng.integers(0, len(whole), 8):
            changed[place] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            read_dataset(path)
        except DatasetError:
            refused += 1
    assert refused > 0


def member(content: bytes, name: str = "observations.npy") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def header(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("(1000000000000, 100)"), "claims"),
        (header("(-1, 2)"), "claims the shape"),
        (header("(99999999999999999999999,)"), "claims"),
        (header("(2,)", "'|O'") + b"x" * 16, "pickled Python objects"),
        (header("(2,)", "[('a', '<f4')]") + b"x" * 8, "columns are numbers"),
        (header("(2,)", "'<c8'") + b"x" * 16, "columns are numbers"),
        (header("(__import__('os').system('true'),)"), "damaged"),
        (b"not an array", "damaged"),
        (b"", "damaged"),
    ],
)
def test_hostile_members(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(member(content))
    with pytest.raises(DatasetError, match=message):
        read_dataset(path)


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    given = {**small_columns(three_episodes()), "extra": np.array([Evil()], dtype=object)}
    np.savez(tmp_path / "data.npz", allow_pickle=True, **given)
    with pytest.raises(DatasetError, match="pickled Python objects"):
        read_dataset(tmp_path / "data.npz")
    assert not (tmp_path / "ran").exists()


def test_zip_bombs_are_refused_before_they_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SUSPICIOUS_BYTES", 10**6)
    path = tmp_path / "data.npz"
    path.write_bytes(member(header("(10000000,)", "'|u1'") + bytes(10**7)))
    with pytest.raises(DatasetError, match="decompression bomb"):
        read_dataset(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    import os

    with pytest.raises(DatasetError, match="does not exist"):
        read_dataset(tmp_path / "none.npz")
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(DatasetError, match=r"datasets end in .npz, .hdf5"):
        read_dataset(tmp_path / "data.txt")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DatasetError, match="not a regular file"):
        read_dataset(tmp_path / "pipe.npz")


def test_hdf5_links_external_storage_and_odd_types_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    given = small_columns(three_episodes())
    secret = d4rl_file(tmp_path / "secret.hdf5", {"rewards": np.ones(8)})
    path = tmp_path / "data.hdf5"

    def external_link(file: Any) -> None:
        del file["rewards"]
        file["rewards"] = h5py.ExternalLink(str(secret), "/rewards")

    def soft_link(file: Any) -> None:
        del file["rewards"]
        file["rewards"] = h5py.SoftLink("/actions")

    def external_storage(file: Any) -> None:
        del file["rewards"]
        file.create_dataset("rewards", (8,), "f8", external=[(str(secret), 0, h5py.h5f.UNLIMITED)])

    def virtual(file: Any) -> None:
        del file["rewards"]
        layout = h5py.VirtualLayout((8,), "f8")
        layout[:] = h5py.VirtualSource(str(secret), "rewards", (8,))
        file.create_virtual_dataset("rewards", layout)

    def texts(file: Any) -> None:
        del file["rewards"]
        file.create_dataset("rewards", data=["x"] * 8)

    def compound(file: Any) -> None:
        del file["rewards"]
        file.create_dataset("rewards", data=np.zeros(8, [("a", "f4"), ("b", "i4")]))

    def references(file: Any) -> None:
        del file["rewards"]
        file.create_dataset("rewards", data=[file.ref] * 8, dtype=h5py.ref_dtype)

    def huge(file: Any) -> None:
        for name in list(file):
            del file[name]
        for name in ("observations", "actions", "rewards"):
            file.create_dataset(name, (10**12, 4), "f4", chunks=(1000, 4))

    def huge_chunks(file: Any) -> None:
        del file["rewards"]
        file.create_dataset("rewards", (8,), "f8", chunks=(5 * 10**8,), maxshape=(None,))

    def a_cycle(file: Any) -> None:
        file["loop"] = file["/"]

    for damage, message in (
        (external_link, "links are not followed"),
        (soft_link, "links are not followed"),
        (external_storage, "another file"),
        (virtual, "another file"),
        (texts, "columns are numbers"),
        (compound, "columns are numbers"),
        (references, "columns are numbers"),
        (huge, "claims"),
        (huge_chunks, "claims"),
        (a_cycle, "nested too deeply"),
    ):
        path.unlink(missing_ok=True)
        d4rl_file(path, given)
        with h5py.File(path, "a") as file:
            damage(file)
        with pytest.raises(DatasetError, match=message):
            read_dataset(path)


def test_parquet_of_others(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    given = small_columns(three_episodes())
    path = tmp_path / "data.parquet"

    def write(**changes: Any) -> Path:
        columns: dict[str, Any] = {name: list(column) for name, column in given.items()}
        columns |= {"env_id": ["Own-v0"] * 8, **changes}
        pq.write_table(pa.table({name: column for name, column in columns.items() if column is not None}), path)
        return path

    data = read_dataset(write())
    assert data.metadata.env_id == "Own-v0"
    assert data.episode_lengths.tolist() == [3, 1, 4]
    assert np.asarray(data.observations).tolist() == given["observations"].tolist()
    parts = [{"a": row, "b": 1} for row in given["observations"].tolist()]
    data = read_dataset(write(observations=parts, next_observations=None))
    assert isinstance(data.observations, dict)
    assert data.observations["a"].shape[1:] == (2,)
    for changes, message in (
        ({"rewards": [None, *given["rewards"][1:]]}, "missing values"),
        ({"rewards": ["x"] * 8}, "has no column rewards"),
        ({"rewards": [b"x"] * 8}, "columns are numbers"),
        ({"observations": [[1.0]] * 7 + [[1.0, 2.0]]}, "rows of 1 to 2 numbers"),
    ):
        with pytest.raises(DatasetError, match=message):
            read_dataset(write(**changes))


@pytest.mark.parametrize("target", ["data.npz", "data.parquet", "minari:group/data-v0"])
def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need(target)
    place: Any = target if target.startswith("minari") else tmp_path / target
    write_dataset(three_episodes(), place)

    class Broken(np.ndarray[Any, Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError(28, "No space left on device")

    broken = any_space(SPACES["vector"], ACTIONS["box"])
    broken.extras["late"] = np.zeros(6).view(Broken)
    with pytest.raises(DatasetError, match="No space left"):
        write_dataset(broken, place)
    assert read_dataset(place).num_episodes == 3
    assert [path for path in tmp_path.rglob("*") if ".tmp" in path.name] == []
