"""Minari datasets: a directory with `data/metadata.json` and one group of an HDF5 file per episode.

They are read without Minari's own loader, which makes the environment that a file names. Minari itself is needed to
download only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import MissingExtraError
from rl_training.data.dataset import (
    SMALL_BYTES,
    Dataset,
    DatasetError,
    DatasetMetadata,
    Episode,
    Finding,
    HasSpaces,
    parts_of,
)
from rl_training.data.formats import hdf5, rows, storage
from rl_training.data.formats.space_json import flatten_dict, space_from_json, space_to_json

DATASET_ID = re.compile(r"([\w-]+/)*[\w-]+-v\d+")
EPISODE = re.compile(r"episode_(\d{1,12})")
VERSION = "0.5.4"
"""Version of Minari whose layout is written, if it is not installed."""
MAX_METADATA_BYTES = 64 * 2**20


def root() -> Path:
    """Where Minari keeps its datasets: `$MINARI_DATASETS_PATH` or `~/.minari/datasets`."""
    given = os.environ.get("MINARI_DATASETS_PATH")
    return Path(given).expanduser() if given else Path.home() / ".minari" / "datasets"


def local_datasets() -> list[str]:
    """Ids of the datasets on this machine."""
    found = sorted(root().glob("**/data/metadata.json")) if root().is_dir() else []
    return [path.parent.parent.relative_to(root()).as_posix() for path in found]


def locate(dataset_id: str, download: bool) -> Path:
    """The directory of a dataset; with `download`, it is fetched if it is not there."""
    check_id(dataset_id)
    path = root() / dataset_id
    if (path / "data" / "metadata.json").is_file():
        return path
    if not download:
        known = ", ".join(local_datasets()[:10]) or "none"
        raise DatasetError(
            f"minari:{dataset_id}: is not on this machine (looked in {path}; there are: {known}). It is "
            f"downloaded only if you ask for it: --download, or download=True"
        )
    try:
        import minari
    except ImportError as error:
        raise MissingExtraError("downloading Minari datasets", "offline") from error
    try:
        minari.download_dataset(dataset_id)
    except Exception as error:  # whatever the network and Minari raise
        raise DatasetError(f"minari:{dataset_id}: could not be downloaded: {error!s:.300}") from error
    return path


def check_id(dataset_id: str) -> None:
    """Refuse ids that are not of Minari's form, such as paths to elsewhere."""
    if not DATASET_ID.fullmatch(dataset_id):
        raise DatasetError(f"minari:{dataset_id!s:.80}: ids have the form namespace/name-v0")


def read(path: Path, env: HasSpaces | None) -> Dataset:
    """Read a Minari dataset from its directory."""
    data = path / "data" if (path / "data").is_dir() else path
    about = _read_metadata(data / "metadata.json")
    if about.get("data_format", "hdf5") != "hdf5":
        raise DatasetError(
            f"{path}: has the format {about['data_format']!r:.40}; Minari datasets are read in the format hdf5"
        )
    with hdf5.open_hdf5(data / "main_data.hdf5") as file:
        return _Reader(file, data / "main_data.hdf5", about, env).dataset()


def _read_metadata(path: Path) -> dict[str, Any]:
    with storage.open_file(path) as file:
        text = file.read(MAX_METADATA_BYTES + 1)
    try:
        about = json.loads(text) if len(text) <= MAX_METADATA_BYTES else None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: is damaged: {error!s:.200}") from error
    if not isinstance(about, dict):
        raise DatasetError(f"{path}: is damaged: it is no mapping, or too large")
    return about


def _json_of(value: Any) -> Any:
    """What a text in the metadata says: spaces and environments are JSON within JSON."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return json.loads(value)
    return None


def _describe(about: dict[str, Any], known: bool) -> DatasetMetadata:
    if isinstance(own := about.get("rl_training"), dict):
        return DatasetMetadata.from_dict(own)
    spec = _json_of(about.get("env_spec"))
    spec = spec if isinstance(spec, dict) else {}
    authors = about.get("author")
    return DatasetMetadata.from_dict(
        {
            "env_id": spec.get("id"),
            "env_kwargs": spec.get("kwargs"),
            "max_episode_steps": spec.get("max_episode_steps"),
            "behaviour_policy": about.get("algorithm_name"),
            "author": ", ".join(map(str, authors)) if isinstance(authors, list) else authors,
            "description": about.get("description"),
            "min_score": about.get("ref_min_score"),
            "max_score": about.get("ref_max_score"),
            "versions": {"minari": str(about.get("minari_version", "unknown"))},
            "spaces_known": known,
        }
    )


class _Reader:
    def __init__(self, file: Any, path: Path, about: dict[str, Any], env: HasSpaces | None) -> None:
        self.file, self.path, self.about, self.env = file, path, about, env
        self.findings: list[Finding] = []
        self.spaces = {name: self._space(name) for name in ("observation_space", "action_space")}
        numbers = {int(match[1]): name for name in file if (match := EPISODE.fullmatch(str(name)))}
        self.names = [numbers[number] for number in sorted(numbers)]
        if not self.names:
            raise DatasetError(f"{path}: has no episodes")

    def _space(self, name: str) -> spaces.Space[Any] | None:
        if self.env is not None:
            space: spaces.Space[Any] = getattr(self.env, name)
        elif name in self.about:
            space = space_from_json(_json_of(self.about[name]))
        else:
            return None
        return flatten_dict(space)

    def dataset(self) -> Dataset:
        claimed, columns = 0, 0
        lengths = []
        for name in self.names:
            found = self._columns(name)
            lengths.append(int(found["rewards"].shape[0]) if found["rewards"].shape else 0)
            claimed += sum(hdf5.claimed_bytes(column) for column in found.values())
            columns = max(columns, len(found))
        storage.refuse_bomb(self.path, claimed, self.path.stat().st_size)
        self._drop_empty(lengths)
        pieces = self._settle(self._episodes(), claimed)
        return self._build(pieces)

    def _drop_empty(self, lengths: list[int]) -> None:
        empty = lengths.count(0)
        self.names = [name for name, length in zip(self.names, lengths, strict=True) if length]
        if empty:
            self.findings.append(Finding("warning", "episodes", f"{empty} have no steps and are left out", empty))
        if not self.names:
            raise DatasetError(f"{self.path}: no episode has a step")

    def _columns(self, name: str) -> dict[str, Any]:
        """The columns of an episode; `observations/key` for parts of dicts."""
        link = self.file.get(name, getlink=True)
        if not isinstance(link, hdf5.import_h5py().HardLink):
            raise DatasetError(f"{self.path}: {name} is a link to elsewhere; links are not followed")
        if not isinstance(self.file[name], hdf5.import_h5py().Group):
            raise DatasetError(f"{self.path}: {name} is no group of columns")
        found = hdf5.leaves(self.file[name], f"{self.path}: {name}")
        missing = [key for key in ("actions", "rewards", "terminations", "truncations") if key not in found]
        if missing or not any(key.split("/")[0] == "observations" for key in found):
            raise DatasetError(f"{self.path}: {name} lacks {', '.join(missing) or 'observations'}")
        return found

    def _episodes(self) -> Iterator[dict[str, AnyArray]]:
        """The columns of each episode; observations with their last one, infos as `infos/...`."""
        for name in self.names:
            found = self._columns(name)
            length = int(found["rewards"].shape[0])
            episode: dict[str, AnyArray] = {}
            for key, column in found.items():
                where = f"{self.path}: {name}/{key!s:.60}"
                head = key.split("/")[0]
                if head == "infos":
                    if column.dtype.kind in storage.NUMBERS and column.shape[:1] in ((length,), (length + 1,)):
                        episode[key] = np.asarray(column[-length:])
                    continue
                if head not in ("observations", "actions", "rewards", "terminations", "truncations"):
                    continue
                values = self._values(key, column, where)
                if len(values) != length + (head == "observations"):
                    raise DatasetError(
                        f"{where}: has {len(values)} rows, of {length} steps; observations need one more than steps"
                    )
                episode[key] = values
            yield episode

    def _values(self, key: str, column: Any, where: str) -> AnyArray:
        space = self.spaces["observation_space"]
        if isinstance(space, spaces.Dict):
            space = space.spaces.get(key.partition("/")[2].replace("/", "."))
        is_image = key.startswith("observations") and isinstance(space, spaces.Box) and space.dtype == np.uint8
        if is_image and len(space.shape) in (2, 3) and column.shape[1:] != space.shape:  # type: ignore[union-attr,arg-type]
            return _decode_images(column, space.shape, where)  # type: ignore[union-attr,arg-type]
        storage.check_dtype(where, np.dtype(column.dtype))
        if not column.shape:
            raise DatasetError(f"{where}: is a single value, not a column")
        return np.asarray(column[...])

    def _settle(self, episodes: Iterator[dict[str, AnyArray]], claimed: int) -> dict[str, Any]:
        """Columns over all episodes, with last observations and lengths; in memory, or in the cache if large."""
        if claimed <= SMALL_BYTES:
            return self._in_memory(episodes)
        key = storage.cache_key(self.path, "minari", self.spaces["observation_space"])
        found = storage.cached(key)
        if found is None:
            with storage.convert(key, claimed) as files, contextlib.ExitStack() as stack:
                appends: dict[str, Any] = {}
                for episode in episodes:
                    for name, values in _parts(episode).items():
                        if name not in appends:
                            opened = files.column(name, values.dtype.newbyteorder("="), values.shape[1:])
                            appends[name] = (stack.enter_context(opened), values.shape[1:])
                        append, shape = appends[name]
                        if values.shape[1:] != shape:
                            raise DatasetError(f"{self.path}: {name!s:.60} differs in shape between episodes")
                        append(values)
                stack.close()
                files.finish({})
            found = storage.cached(key)
        if found is None:
            raise DatasetError(f"{storage.cache_root() / key}: is damaged; delete it")
        self.findings += rows.storage_findings(found[0])
        return {**found[0], "length": np.asarray(found[0]["length"])}

    def _in_memory(self, episodes: Iterator[dict[str, AnyArray]]) -> dict[str, Any]:
        lists: dict[str, list[AnyArray]] = {}
        for episode in episodes:
            for name, values in _parts(episode).items():
                lists.setdefault(name, []).append(values)
        columns = {}
        for name, pieces in lists.items():
            if len({piece.shape[1:] for piece in pieces}) > 1:
                if name.startswith("infos"):
                    continue
                raise DatasetError(f"{self.path}: {name!s:.60} differs in shape between episodes")
            joined = np.concatenate(pieces)
            columns[name] = joined.astype(joined.dtype.newbyteorder("="), copy=False)
        return columns

    def _build(self, columns: dict[str, Any]) -> Dataset:
        lengths = columns["length"]
        total = int(lengths.sum())
        ends = np.cumsum(lengths) - 1
        where = f"{self.path}: observations"
        keys = [name for name in columns if name.split("/")[0] == "observations"]
        bad = [name for name in keys if len(columns[name]) != total]
        if bad:
            raise DatasetError(f"{self.path}: {', '.join(bad)!s:.80} is not in all episodes")
        space, action_space = self.spaces["observation_space"], self.spaces["action_space"]
        parts: dict[str, tuple[AnyArray, AnyArray, spaces.Space[Any]]] = {}
        for name in keys:
            key = name.partition("/")[2].replace("/", ".")
            part = space.spaces.get(key) if isinstance(space, spaces.Dict) else space
            if isinstance(space, spaces.Dict) != bool(key) and space is not None:
                raise DatasetError(f"{where}: do not have the space {space!s:.120}")
            part = part or rows.infer_observation_space(columns[name])
            column, finals = (rows.fit(columns[x], part, where) for x in (name, f"final_{name}"))
            parts[key] = column, finals, part
        terminated, truncated = self._flags(columns, ends)
        action_space = action_space or rows.infer_action_space(columns["actions"])
        is_dict = "" not in parts
        rewards = columns["rewards"]
        extras = {
            name.removeprefix("infos/").replace("/", "."): column
            for name, column in columns.items()
            if name.startswith("infos/") and len(column) == total
        }
        return Dataset(
            observations={key: part[0] for key, part in parts.items()} if is_dict else parts[""][0],
            actions=rows.fit(columns["actions"], action_space, f"{self.path}: actions"),
            rewards=rewards if rewards.dtype in (np.float32, np.float64) else rewards.astype(np.float64),
            terminated=terminated,
            truncated=truncated,
            final_observations={key: part[1] for key, part in parts.items()} if is_dict else parts[""][1],
            observation_space=spaces.Dict({key: part[2] for key, part in parts.items()}) if is_dict else parts[""][2],
            action_space=action_space,
            extras=extras,
            metadata=_describe(self.about, None not in (self.spaces.values())),
            findings=self.findings,
        )

    def _flags(self, columns: dict[str, Any], ends: AnyArray) -> tuple[Any, Any]:
        terminated = np.asarray(columns["terminations"]).astype(bool).reshape(-1)
        truncated = np.asarray(columns["truncations"]).astype(bool).reshape(-1)
        last = np.zeros(len(terminated), bool)
        last[ends] = True
        if early := int(((terminated | truncated) & ~last).sum()):
            self.findings.append(
                Finding(
                    "warning",
                    "ends",
                    f"{early} rows before the last one of an episode are marked as ends; the marks are ignored",
                    early,
                )
            )
        unmarked = last & ~terminated & ~truncated
        if count := int(unmarked.sum()):
            self.findings.append(
                Finding("warning", "ends", f"{count} episodes stop without a mark; they count as truncated", count)
            )
        return terminated & last, (truncated & last) | unmarked


def _parts(episode: dict[str, AnyArray]) -> dict[str, AnyArray]:
    """An episode's columns, with its last observations and its length as columns of one row."""
    found: dict[str, AnyArray] = {"length": np.array([len(episode["rewards"])])}
    for name, values in episode.items():
        if name.split("/")[0] == "observations":
            found[name], found[f"final_{name}"] = values[:-1], values[-1:]
        elif name == "rewards":
            if values.size != len(values):
                raise DatasetError(f"rewards have the shape {values.shape}; one number per step is needed")
            found[name] = values.reshape(-1)
        else:
            found[name] = values
    return found


def _decode_images(column: Any, shape: tuple[int, ...], where: str) -> AnyArray:
    """Images that Minari stored as JPEG."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("reading images of Minari datasets", "offline") from error
    images = np.empty((len(column), *shape), np.uint8)
    for number in range(len(column)):
        try:
            with Image.open(io.BytesIO(np.asarray(column[number], np.uint8).tobytes()), formats=["JPEG"]) as image:
                if image.size != shape[1::-1]:
                    raise ValueError(f"{image.size[0]} x {image.size[1]} pixels")
                images[number] = np.asarray(image, np.uint8).reshape(shape)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DatasetError(f"{where}: image {number} is damaged: {error!s:.120}") from error
    return images


# Writing


def write(dataset: Dataset, dataset_id: str) -> Path:
    """Write a Minari dataset; one of the same id is replaced when the new one is complete."""
    check_id(dataset_id)
    h5py = hdf5.import_h5py()
    target = root() / dataset_id
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        (beside / "data").mkdir(parents=True)
        with h5py.File(beside / "data" / "main_data.hdf5", "w", track_order=True) as file:
            for number, episode in enumerate(dataset.episodes()):
                _write_episode(file.create_group(f"episode_{number}"), number, episode)
        size = (beside / "data" / "main_data.hdf5").stat().st_size
        about = {**_about(dataset), "dataset_id": dataset_id, "dataset_size": round(size / 2**20, 1)}
        (beside / "data" / "metadata.json").write_text(json.dumps(about))
        _replace(beside, target)
    except OSError as error:
        raise DatasetError(f"{target}: could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _replace(beside: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    try:
        beside.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_episode(group: Any, number: int, episode: Episode) -> None:
    group.attrs["id"], group.attrs["total_steps"] = number, len(episode)
    ends = np.arange(len(episode)) == len(episode) - 1
    columns = {
        **{name.replace(".", "/", 1): column for name, column in parts_of(episode.observations).items()},
        "actions": episode.actions,
        "rewards": episode.rewards,
        "terminations": ends & episode.terminated,
        "truncations": ends & episode.truncated,
        # infos have a first entry, of the reset
        **{f"infos/{name}": np.concatenate([column[:1], column]) for name, column in episode.extras.items()},
    }
    for name, column in columns.items():
        group.create_dataset(name, data=column, chunks=True, maxshape=(None, *column.shape[1:]))


def _about(dataset: Dataset) -> dict[str, Any]:
    given = dataset.metadata
    about: dict[str, Any] = {
        "total_episodes": dataset.num_episodes,
        "total_steps": dataset.num_transitions,
        "data_format": "hdf5",
        "jpeg_encoding": False,  # would lose bits
        "observation_space": json.dumps(space_to_json(dataset.observation_space, whole=True)),
        "action_space": json.dumps(space_to_json(dataset.action_space, whole=True)),
        "minari_version": _minari_version(),
        "algorithm_name": given.behaviour_policy,
        "author": [given.author] if given.author else [],
        "description": given.description,
        "rl_training": given.to_dict(),
    }
    if given.min_score is not None and given.max_score is not None:
        about |= {"ref_min_score": given.min_score, "ref_max_score": given.max_score}
    spec = gymnasium.registry.get(given.env_id)
    if spec is not None:
        changes = {"kwargs": {**spec.kwargs, **given.env_kwargs}}
        own = {**json.loads(spec.to_json()), **changes}
        about["env_spec"] = json.dumps(own)
    return about


def _minari_version() -> str:
    try:
        return packages.version("minari")
    except packages.PackageNotFoundError:
        return VERSION
