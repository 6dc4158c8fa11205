"""npz files: `observations, actions, rewards, next_observations, terminations, truncations, episode_id, env_id`.

Members are read one by one, without numpy's loader: nothing is unpickled, nothing is allocated that the file does not
really hold. Uncompressed members are memory-mapped in place; large compressed ones are unpacked once into the cache.
Ours are written uncompressed and aligned, so that they can be mapped.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from rl_training.contracts.arrays import AnyArray
from rl_training.data.dataset import (
    CHUNK_BYTES,
    SMALL_BYTES,
    Dataset,
    DatasetError,
    DatasetMetadata,
    HasSpaces,
    chunks,
    parts_of,
)
from rl_training.data.formats import rows, storage
from rl_training.data.formats.space_json import space_from_json, space_to_json

ALIGNMENT = 64
METADATA_BYTES = 64 * 2**20
"""Largest text that is read from a file."""
_PADDING = 0xD935
"""Identifier of the zip field that pads members to the alignment."""


def read(path: Path, env: HasSpaces | None) -> Dataset:
    """Read an npz file."""
    with storage.open_file(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                columns, texts = _read_members(archive, path)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error) as error:
            raise DatasetError(f"{path}: is damaged, or no npz file: {error}") from error
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            raise DatasetError(f"{path}: cannot be read: {error}") from error
    found = rows.sort_columns(columns, path, storage.cache_key(path, "rows"))
    describe(found, texts)
    return rows.build(found, env)


def describe(found: rows.Rows, texts: dict[str, str]) -> None:
    """Fill in what a file says about itself: our own `metadata`, or only `env_id` and `versions`."""
    data: Any = {}
    if "metadata" in texts:
        try:
            data = json.loads(texts["metadata"])
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{found.source}: its metadata is damaged: {error}") from error
    if not isinstance(data, dict):
        data = {}
    data.setdefault("env_id", texts.get("env_id", ""))
    if "versions" in texts:
        data.setdefault("versions", {"recorded with": texts["versions"]})
    found.metadata = DatasetMetadata.from_dict(data)
    if "observation_space" in data and "action_space" in data:
        found.observation_space = space_from_json(data["observation_space"])
        found.action_space = space_from_json(data["action_space"])


def about(dataset: Dataset) -> str:
    """Metadata and spaces as JSON, to be stored with the columns."""
    return json.dumps(
        {
            **dataset.metadata.to_dict(),
            "observation_space": space_to_json(dataset.observation_space),
            "action_space": space_to_json(dataset.action_space),
        }
    )


def _read_members(archive: zipfile.ZipFile, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(set(names)) != len(names):
        raise DatasetError(f"{path}: is damaged: it has several members of one name")
    storage.refuse_bomb(path, sum(member.file_size for member in members), path.stat().st_size)
    in_memory = sum(member.file_size for member in members) <= SMALL_BYTES
    columns: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for member in members:
        name = member.filename.removesuffix(".npy")
        where = f"{path}: {name!r:.80}"
        if member.flag_bits & 1:
            raise DatasetError(f"{where}: is encrypted")
        value = _read_member(archive, member, path, where, in_memory)
        if isinstance(value, str):
            texts[name] = value
        else:
            columns[name] = value
    return columns, texts


def _read_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, where: str, in_memory: bool
) -> AnyArray | str:
    with archive.open(member) as stream:
        shape, fortran, dtype = storage.read_npy_header(stream, where)
        offset = stream.tell()
        size = dtype.itemsize * int(np.prod([int(n) for n in shape], dtype=object)) if shape else dtype.itemsize
        if offset + size != member.file_size:
            raise DatasetError(
                f"{where}: is damaged: it claims {shape} of {dtype}, {size:,} bytes, and has {member.file_size - offset:,}"
            )
        if dtype.kind in "US":
            return _read_text(stream, shape, dtype, where)
        storage.check_dtype(where, dtype)
        if not shape or in_memory or (fortran and len(shape) > 1):
            if not in_memory and size > SMALL_BYTES:
                raise DatasetError(f"{where}: is stored column by column (Fortran order); rows cannot be read from it")
            return _load(stream, shape, fortran, dtype, where)
        if member.compress_type == zipfile.ZIP_STORED:
            _verify(stream)
            return storage.map_file(path, dtype, shape, _data_offset(path, member) + offset)
        return _unpack(stream, shape, dtype, storage.cache_key(path, "member", member.filename), where)


def _read_text(stream: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> str:
    """The first text of an array of texts: `env_id` may be one text, or one per row."""
    if dtype.itemsize > METADATA_BYTES or 0 in shape:
        raise DatasetError(f"{where}: is damaged: a text of {dtype.itemsize:,} bytes in an array of {shape!r:.80}")
    text = np.frombuffer(_exactly(stream, dtype.itemsize, where), dtype)[0] if dtype.itemsize else ""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _exactly(stream: IO[bytes], size: int, where: str) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise DatasetError(f"{where}: is damaged: it ends after {len(data):,} of {size:,} bytes")
    return data


def _load(stream: IO[bytes], shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any], where: str) -> AnyArray:
    data = bytearray()
    while piece := stream.read(CHUNK_BYTES):  # to the end, where the checksum is compared
        data += piece
    array = np.frombuffer(data, dtype)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _verify(stream: IO[bytes]) -> None:
    """Read to the end, where zipfile compares the checksum."""
    while stream.read(CHUNK_BYTES):
        pass


def _data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    """Where a member's data begins: its local header may be longer than the one in the directory."""
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        header = file.read(30)
    name_size, extra_size = struct.unpack("<HH", header[26:30])
    return int(member.header_offset + 30 + name_size + extra_size)


def _unpack(stream: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any], key: str, where: str) -> AnyArray:
    found = storage.cached(key)
    if found is None:
        row_bytes = max(1, dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64)))
        with storage.convert(key, row_bytes * shape[0]) as files:
            with files.column("column", dtype.newbyteorder("="), shape[1:]) as append:
                size = max(1, CHUNK_BYTES // row_bytes)
                for start in range(0, shape[0], size):
                    count = min(size, shape[0] - start)
                    data = _exactly(stream, count * row_bytes, where)
                    append(np.frombuffer(data, dtype).reshape(count, *shape[1:]))
            _verify(stream)
            files.finish({})
        found = storage.cached(key)
    if found is None:
        raise DatasetError(f"{storage.cache_root() / key}: is damaged; delete it")
    return found[0]["column"]


# Writing


def columns_to_write(dataset: Dataset) -> dict[str, Any]:
    """The columns of a dataset by their names in files."""
    return {
        **parts_of(dataset.observations),
        "actions": dataset.actions,
        "rewards": dataset.rewards,
        **parts_of(dataset.next_observations, "next_observations"),
        "terminations": dataset.terminated,
        "truncations": dataset.truncated,
        **{f"extras.{name}": column for name, column in dataset.extras.items()},
    }


def write(dataset: Dataset, path: Path) -> None:
    """Write an npz file, in pieces."""
    with replacing(path) as beside, zipfile.ZipFile(beside, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, column in columns_to_write(dataset).items():
            _write_column(archive, name, column)
        number = dataset.episode_of(np.arange(dataset.num_transitions)).astype(np.int32)
        _write_column(archive, "episode_id", number)
        for name, text in {"env_id": dataset.metadata.env_id, "metadata": about(dataset)}.items():
            _write_column(archive, name, np.array(text))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, which takes its place when the block ends without an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise DatasetError(f"{path}: could not be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _write_column(archive: zipfile.ZipFile, name: str, column: Any) -> None:
    member = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
    assert archive.fp is not None
    local = archive.fp.tell() + 30 + len(member.filename.encode()) + 20  # 20: sizes of large files
    member.extra = struct.pack("<HH", _PADDING, (pad := -(local + 4) % ALIGNMENT)) + bytes(pad)
    with archive.open(member, "w", force_zip64=True) as stream:
        header = {"descr": column.dtype.str, "fortran_order": False, "shape": tuple(map(int, column.shape))}
        np.lib.format.write_array_header_1_0(stream, header)  # type: ignore[no-untyped-call]
        if not column.shape:
            stream.write(column.tobytes())
            return
        for _, chunk in chunks(column):
            stream.write(np.ascontiguousarray(chunk).data.cast("B"))
