"""`rl-training data`: what it prints, the traps of published files by name, and hostile files refused."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_training.cli import main
from rl_training.data.dataset import read_dataset, write_dataset
from rl_training.data.formats import storage
from rl_training.deploy.recording import RecordConfig, record
from tests.data.recorded import small_columns, three_episodes

Columns = dict[str, Any]


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


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


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Columns]:
    """Columns of small recordings, by environment."""
    steps = {"Pendulum-v1": 1200, "CartPole-v1": 300}
    return {
        env_id: small_columns(record("random", RecordConfig(env_id=env_id, steps=count)))
        for env_id, count in steps.items()
    }


# What the commands do


def test_record_check_info_list_convert_and_plot(cli: Cli, tmp_path: Path) -> None:
    assert cli("data") == cli("data", "--help") == 0
    assert "rl-training data record" in cli.out
    options = ("--steps", 250, "--epsilon", 0.2, "--licence", "MIT", "--seed", 3)
    assert cli("data", "record", "zoo:dqn/CartPole-v1", "--mix", "random:0.5", *options, "--output", "d.npz") == 0
    assert "wrote d.npz: 250 transitions" in cli.out
    assert "0.5 random, epsilon 0.2; with log-probabilities" in cli.out
    assert cli("data", "check", "d.npz", "--env", "CartPole-v1") == 0
    assert "agree with the environment in all 250 rows" in cli.out
    assert cli("data", "check", "d.npz", "--json") == 0
    data = read_dataset("d.npz")
    found = json.loads(cli.out)
    assert (found["transitions"], found["hash"]) == (250, data.hash)
    assert cli("data", "info", "d.npz") == 0
    assert "licence            MIT" in cli.out
    assert cli("data", "info", "d.npz", "--json") == 0
    facts = json.loads(cli.out)
    assert facts["metadata"]["seeds"] == [3]
    assert facts["statistics"]["num_transitions"] == 250
    assert facts["extras"] == ["policy", "log_prob"]
    pytest.importorskip("pyarrow")
    pytest.importorskip("h5py")
    assert cli("data", "convert", "d.npz", "d.parquet") == 0
    assert cli("data", "convert", "d.parquet", "minari:group/d-v0") == 0
    assert cli("data", "convert", "minari:group/d-v0", "back.npz") == 0
    assert read_dataset("back.npz").hash == data.hash
    Path("broken.npz").write_bytes(b"x")
    assert cli("data", "list", ".") == 0
    lines = cli.out.splitlines()
    assert [line.split()[0] for line in lines] == ["back.npz", "broken.npz", "d.npz", "d.parquet", "minari:group/d-v0"]
    assert "not readable" in lines[1]
    pytest.importorskip("matplotlib")
    for name in ("p.png", "p.svg"):
        assert cli("data", "plot", "d.npz", "--output", name) == 0
        assert Path(name).stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope",), "expected check, info"),
        (("check", "none.npz"), "does not exist"),
        (("check", "d.npz", "--env", "Nope-v0"), "doesn't exist"),
        (("check", "d.npz", "--env", "CartPole-v1"), "rows have the shape"),
        (("convert", "d.npz"), "output: missing"),
        (("convert", "d.npz", "d.txt"), "datasets are written to"),
        (("convert", "d.npz", "minari:../x"), "ids have the form"),
        (("convert", "d.npz", "d.npz/x.npz"), "cannot be written"),
        (("list", "none"), "is not a directory"),
        (("plot", "d.npz", "--output", "p.txt"), "must end in .png"),
        (("record", "random", "--steps", "10"), "output: missing"),
        (("record", "random", "--steps", "10", "--output", "x.npz"), "env_id: is missing"),
        (("record", "nowhere", "--steps", "10", "--output", "x.npz"), "does not exist"),
        (("check", "minari:group/none-v0"), "is not on this machine"),
    ],
)
def test_wrong_requests(words: tuple[str, ...], message: str, cli: Cli) -> None:
    write_dataset(three_episodes(), "d.npz")
    before = sorted(os.listdir())
    assert cli("data", *words) == 2
    assert message in cli.err
    assert "Traceback" not in cli.err
    assert sorted(os.listdir()) == before


def test_a_run_without_an_environment_is_evaluated_and_continued_in_one(cli: Cli) -> None:
    assert cli("data", "record", "random", "--env-id", "Pendulum-v1", "--steps", 60, "--output", "d.npz") == 0
    small = ("--algorithm.network.actor-sizes", 8, "--algorithm.network.critic-sizes", 8, "--no-tensorboard")
    assert cli("train", "td3", "--dataset", "d.npz", "--total-updates", 10, "--quiet", *small) == 0
    assert "--env-id <environment>" in cli.out
    (run,) = Path("runs").iterdir()
    assert run.name.startswith("td3__d__seed0__")
    assert cli("eval", run, "--num-episodes", 1) == 2
    assert "give --env-id" in cli.err
    assert cli("resume", run, "--online", "--total-timesteps", 20, "--quiet") == 2
    assert "give --env-id" in cli.err
    assert cli("eval", run, "--num-episodes", 1, "--env-id", "Pendulum-v1") == 0
    there = ("--env-id", "Pendulum-v1", "--eval-every", 0)
    assert cli("resume", run, "--online", "--total-timesteps", 20, "--quiet", *there) == 0
    assert "finished after 20 steps" in cli.out
    assert cli("eval", run, "--num-episodes", 1) == 0
    assert cli("resume", run, "--total-timesteps", 30, "--quiet", "--env-id", "CartPole-v1") == 2
    assert "env_id: was 'Pendulum-v1' and cannot become 'CartPole-v1'" in cli.err


# Traps of published files


def limits_as_terminal(columns: Columns) -> None:
    columns["terminations"] = columns["terminations"] | columns["truncations"]
    columns["truncations"] = np.zeros_like(columns["terminations"])


def two_terminals(columns: Columns) -> None:
    ends = columns["terminations"]
    columns["terminals"] = ends | np.append(ends[1:], False)
    for name in ("terminations", "next_observations", "episode_id"):
        del columns[name]


def no_next(columns: Columns) -> None:
    del columns["next_observations"]


def outside(columns: Columns) -> None:
    columns["actions"] = columns["actions"] * 1.5


def scaled(columns: Columns) -> None:
    columns["actions"] = columns["actions"] / 2


def filtered(columns: Columns) -> None:
    mean, std = columns["observations"].mean(0), columns["observations"].std(0)
    for name in ("observations", "next_observations"):
        columns[name] = (columns[name] - mean) / std


def filtered_on_the_way(columns: Columns) -> None:
    """By a filter whose statistics change: the next observation was normalised before the step, the other one after."""
    columns["next_observations"] = columns["next_observations"] * np.linspace(1, 2, len(columns["rewards"]))[:, None]


def with_nan(columns: Columns) -> None:
    columns["observations"] = columns["observations"].copy()
    columns["observations"][7, 0] = np.nan


def cut(columns: Columns) -> None:
    for name, column in columns.items():
        columns[name] = np.delete(column, np.s_[250:260], axis=0)
    del columns["episode_id"]


def only_dones(columns: Columns) -> None:
    columns["dones"] = columns.pop("terminations") | columns.pop("truncations")


def shuffled(columns: Columns) -> None:
    order = np.random.default_rng(0).permutation(len(columns["rewards"]))
    for name, column in columns.items():
        columns[name] = column[order]
    for name in ("episode_id", "terminations", "truncations"):
        del columns[name]


def no_ends(columns: Columns) -> None:
    for name in ("episode_id", "terminations", "truncations", "next_observations"):
        del columns[name]


def another_reward(columns: Columns) -> None:
    columns["rewards"] = columns["rewards"] * 0.1 + 3


@pytest.mark.parametrize(
    ("env_id", "trap", "code", "plain", "stepped"),
    [
        ("Pendulum-v1", limits_as_terminal, 1, "time limits marked as terminal", "the environment goes on"),
        ("CartPole-v1", two_terminals, 0, "marked as ended on their last two rows", ""),
        ("Pendulum-v1", no_next, 0, "the last step of 6 truncated episodes is left out", ""),
        ("Pendulum-v1", outside, 1, "", "are outside of the bounds"),
        ("Pendulum-v1", scaled, 1, "", "they look scaled to [-1, 1]"),
        ("Pendulum-v1", scaled, 1, "", "the stored actions are scaled"),
        ("Pendulum-v1", filtered, 1, "they look filtered", "another next observation than the environment"),
        ("Pendulum-v1", filtered_on_the_way, 1, "observations were filtered", ""),
        ("Pendulum-v1", with_nan, 1, "NaN or infinity in 1 of 1200 rows, the first is row 7", ""),
        ("Pendulum-v1", cut, 0, "1 episodes are cut in the middle", "are truncated before the time limit of 200"),
        ("CartPole-v1", only_dones, 1, "only `dones` is stored", "marked as terminated, and the environment goes on"),
        ("Pendulum-v1", shuffled, 0, "rows are single transitions, not in time order", ""),
        ("Pendulum-v1", no_ends, 1, "no row ends an episode", ""),
        ("Pendulum-v1", another_reward, 1, "", "they are 0.1 times the environment's, plus 3"),
    ],
)
def test_traps_are_named(
    env_id: str,
    trap: Callable[[Columns], None],
    code: int,
    plain: str,
    stepped: str,
    recorded: dict[str, Columns],
    cli: Cli,
) -> None:
    columns = dict(recorded[env_id])
    np.savez("good.npz", allow_pickle=False, **columns)
    assert cli("data", "check", "good.npz") == 0
    for text in filter(None, (plain, stepped)):
        assert text not in cli.out
    trap(columns)
    np.savez("bad.npz", allow_pickle=False, **columns)
    found = cli("data", "check", "bad.npz")
    assert plain in cli.out
    with_env = cli("data", "check", "bad.npz", "--env", env_id)
    assert stepped in cli.out
    assert max(found, with_env) == code


# Hostile files


def npz_bytes(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def npy(shape: str, descr: str = "'<f4'", content: bytes = b"") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + content


def good(path: Path) -> bytes:
    if path.suffix == ".hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for name, column in small_columns(three_episodes()).items():
                file.create_dataset(name, data=column)
    else:
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow")
        write_dataset(three_episodes(), path)
    return path.read_bytes()


def half(path: Path) -> None:
    content = good(path)
    path.write_bytes(content[: len(content) // 2])


def without_its_end(path: Path) -> None:
    content = good(path)
    path.write_bytes(content[:-7])


def garbage(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(5000))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def pickled(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (path.with_name("ran"),))

    np.savez(path, allow_pickle=True, **{**small_columns(three_episodes()), "x": np.array([Evil()], object)})


def absurd_npz(path: Path) -> None:
    path.write_bytes(npz_bytes(observations=npy("(1000000000000, 100)")))


def code_in_a_header(path: Path) -> None:
    path.write_bytes(npz_bytes(observations=npy("(__import__('pathlib').Path('ran').touch(),)")))


def bomb(path: Path) -> None:
    path.write_bytes(npz_bytes(observations=npy("(10000000,)", "'|u1'", bytes(10**7))))


def texts(path: Path) -> None:
    columns = small_columns(three_episodes())
    np.savez(path, allow_pickle=False, **{**columns, "actions": np.array(["x"] * 8)})


def other_lengths(path: Path) -> None:
    columns = small_columns(three_episodes())
    np.savez(path, allow_pickle=False, **{**columns, "actions": columns["actions"][:5]})


def hdf5_with(change: Callable[[Any, Any], None]) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        h5py = pytest.importorskip("h5py")
        good(path)
        with h5py.File(path, "a") as file:
            del file["rewards"]
            change(file, h5py)

    plant.__name__ = change.__name__
    return plant


def external_link(file: Any, h5py: Any) -> None:
    file["rewards"] = h5py.ExternalLink("/etc/passwd", "/rewards")


def external_storage(file: Any, h5py: Any) -> None:
    file.create_dataset("rewards", (8,), "u1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])


def absurd_hdf5(file: Any, h5py: Any) -> None:
    for name in list(file):
        del file[name]
    for name in ("observations", "actions", "rewards"):
        file.create_dataset(name, (10**12, 4), "f4", chunks=(1000, 4))


def absurd_chunks(file: Any, h5py: Any) -> None:
    file.create_dataset("rewards", (8,), "f8", chunks=(5 * 10**8,), maxshape=(None,))


def parquet_with(rewards: Any) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        column = rewards(pa)
        columns = {name: list(x) for name, x in small_columns(three_episodes()).items()}
        columns = {name: x * (len(column) // 8) for name, x in columns.items()}
        pq.write_table(pa.table({**columns, "rewards": column}), path)

    return plant


def many_zeros(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    zeros = pa.array(np.zeros(2 * 10**6))
    pq.write_table(pa.table(dict.fromkeys(("observations", "actions", "rewards"), zeros)), path)


def long_lists(path: Path) -> None:
    """A few rows, each of which is a list of very many zeros."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    lists = pa.ListArray.from_arrays(np.arange(0, 3 * 10**6 + 1, 10**6), pa.array(np.zeros(3 * 10**6)))
    pq.write_table(pa.table({"observations": lists, "actions": [0, 1, 0], "rewards": [0.0, 1.0, 0.0]}), path)


def minari_with_a_pipe(path: Path) -> None:
    (path / "data").mkdir(parents=True)
    os.mkfifo(path / "data" / "metadata.json")


def minari_that_loops(path: Path) -> None:
    (path / "data").mkdir(parents=True)
    (path / "data" / "metadata.json").write_text("{}")
    (path / "data" / "main_data.hdf5").symlink_to("main_data.hdf5")


def damaged_replay(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"format_version": 3, "files": {}}')


def damaged_run(path: Path) -> None:
    path.mkdir()
    (path / "config.yaml").write_text("algo: sac\nenv_id: os:Evil-v0\n")


PLANTED = [
    *((how, f"d.{kind}") for how in (half, without_its_end, garbage, empty) for kind in ("npz", "hdf5", "parquet")),
    *((how, f"d.{kind}") for how in (pipe, directory, loop, device) for kind in ("npz", "hdf5", "parquet")),
    *((how, "d.npz") for how in (pickled, absurd_npz, code_in_a_header, bomb, texts, other_lengths)),
    *((hdf5_with(how), "d.hdf5") for how in (external_link, external_storage, absurd_hdf5, absurd_chunks)),
    (many_zeros, "d.parquet"),
    (long_lists, "d.parquet"),
    (parquet_with(lambda pa: pa.array([b"x"] * 8)), "d.parquet"),
    (parquet_with(lambda pa: pa.array([None, *[1.0] * 7])), "d.parquet"),
    (parquet_with(lambda pa: pa.array([{"a": 1.0}] * 8)), "d.parquet"),
    (minari_with_a_pipe, "folder"),
    (minari_that_loops, "folder"),
    (damaged_replay, "folder"),
    (damaged_run, "folder"),
]


@pytest.mark.parametrize(("plant", "name"), PLANTED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_planted_files_end_in_a_readable_error(
    plant: Callable[[Path], None], name: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SUSPICIOUS_BYTES", 5 * 10**6)
    plant(tmp_path / name)
    before = contents(tmp_path)
    for words in (
        ("data", "check", name),
        ("data", "convert", name, "out.npz"),
        ("train", "td3", "Pendulum-v1", "--dataset", name, "--total-updates", 1, "--quiet"),
    ):
        assert cli(*words) == 2, cli.out + cli.err
        assert "Error: " in cli.err
        assert "Traceback" not in cli.err
        assert len(cli.err) < 1000
    assert contents(tmp_path) == before  # nothing was run, lost, or left behind


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory that can be read."""
    found = {}
    for place, folders, names in os.walk(directory):
        for name in [*folders, *names]:
            path = Path(place) / name
            is_file = path.is_file() and not path.is_symlink() if not path.is_symlink() else False
            found[str(path.relative_to(directory))] = path.read_bytes() if is_file else b""
    return found
