"""Columns in memory or in files: memory maps that stay small, and the cache of converted files.

Small columns are loaded. Large ones that cannot be mapped in place (compressed, HDF5, Parquet) are converted once, in
pieces, to .npy files in `~/.cache/rl_training/datasets` (or `$XDG_CACHE_HOME`). The cache may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from rl_training.contracts.arrays import AnyArray, BoolArray
from rl_training.data.dataset import SMALL_BYTES, DatasetError, chunks

NUMBERS = frozenset("biuf")
"""Kinds of dtypes that columns may have."""
RESIDENT_BYTES = 256 * 2**20
"""Pages of one mapped column that may stay in this process's memory."""
FAULT_BYTES = 512 * 1024
"""How much the kernel may map around a page that is touched: it maps neighbours that are in its cache."""
SUSPICIOUS_BYTES, SUSPICIOUS_RATIO = 2**30, 500
"""Content that is larger than this, and than its file by this factor, is refused as a decompression bomb."""
CACHE_FORMAT = 1


class MappedColumn(np.memmap[Any, Any]):
    """A memory-mapped column that gives its pages back to the system, so that the process stays small.

    Pages stay in the system's page cache, which is not this process's memory: reading them again is fast.
    """

    _touched = 0

    def __getitem__(self, index: Any) -> Any:
        many = RESIDENT_BYTES // FAULT_BYTES
        if isinstance(index, np.ndarray) and index.ndim == 1 and index.dtype != np.bool_ and len(index) > many:
            found = np.empty((len(index), *self.shape[1:]), self.dtype)
            for start in range(0, len(index), many):  # pages are given back in between
                found[start : start + many] = self[index[start : start + many]]
            return found
        rows = super().__getitem__(index)
        if (
            isinstance(rows, np.ndarray)
            and self.ndim
            and isinstance(mapping := getattr(self, "_mmap", None), mmap.mmap)
        ):
            row_bytes = self.nbytes // max(1, len(self))
            scattered = isinstance(index, np.ndarray)
            self._touched += len(rows) * max(row_bytes, FAULT_BYTES) if scattered and rows.ndim else rows.nbytes
            if self._touched > RESIDENT_BYTES:
                self._touched = 0
                if hasattr(mapping, "madvise"):
                    mapping.madvise(mmap.MADV_DONTNEED)
        return rows

    def take(self, indices: Any, axis: Any = 0, *_: Any, **__: Any) -> Any:
        """Rows, as `numpy.ndarray.take` with axis 0."""
        assert axis == 0, "only rows can be taken"
        return self[np.asarray(indices)]


def map_file(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> AnyArray:
    """A column that is stored in a file, from `offset` on."""
    return MappedColumn(path, dtype=dtype, mode="r", offset=offset, shape=shape)


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading; pipes and devices, which may never end, are refused."""
    try:
        file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115 - the caller closes
    except OSError as error:
        raise DatasetError(f"{path}: cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DatasetError(f"{path}: is not a regular file")
    return file


def refuse_bomb(where: object, content_bytes: int, file_bytes: int) -> None:
    """Refuse content that is out of proportion to its file, before anything is allocated for it."""
    if content_bytes > SUSPICIOUS_BYTES and content_bytes > SUSPICIOUS_RATIO * max(1, file_bytes):
        raise DatasetError(
            f"{where}: claims {content_bytes / 2**30:,.1f} GiB of content in a file of {file_bytes:,} bytes; "
            "it is damaged or a decompression bomb, and is not read"
        )


def check_dtype(where: str, dtype: np.dtype[Any]) -> None:
    """Refuse columns that are not numbers or truth values."""
    if dtype.kind not in NUMBERS or dtype.itemsize > 8:
        raise DatasetError(f"{where}: has dtype {dtype}; columns are numbers or truth values")


# The cache


def cache_root() -> Path:
    """The directory of converted datasets."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "rl_training" / "datasets"


def cache_key(path: Path, *details: object) -> str:
    """A name for the converted columns of a file as it is now: another content, place or date gives another name."""
    about = path.stat()
    parts = [CACHE_FORMAT, path.resolve(), about.st_size, about.st_mtime_ns, about.st_ino, *details]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _own_cache() -> Path:
    """The cache's directory, which has to be this user's own."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = root.lstat()
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode)):
        raise DatasetError(f"{root}: is not a directory of this user; set XDG_CACHE_HOME to one that is")
    return root


class ColumnFiles:
    """Writes columns to files, piece by piece, and maps them when all are complete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: list[str] = []

    @contextlib.contextmanager
    def column(self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> Iterator[Any]:
        """A function that appends rows to a new column."""
        path = self._directory / f"{len(self._names):03}.npy"  # never the column's own name, which a file chose
        self._names.append(name)
        num_rows = 0
        with open(path, "wb") as file:
            _write_header(file, dtype, (0, *row_shape))

            def append(rows: AnyArray) -> None:
                nonlocal num_rows
                np.ascontiguousarray(rows, dtype).tofile(file)
                num_rows += len(rows)

            yield append
            file.seek(0)
            _write_header(file, dtype, (num_rows, *row_shape))

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the list of columns; only then does the directory count as complete."""
        (self._directory / "columns.json").write_text(json.dumps({"names": self._names, "about": about}))


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """A .npy header of fixed length, so that it can be written again when the number of rows is known."""
    text = repr({"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)})
    file.write(b"\x93NUMPY\x02\x00" + (1024 - 12).to_bytes(4, "little") + text.ljust(1024 - 13).encode() + b"\n")


@contextlib.contextmanager
def convert(key: str, num_bytes: int) -> Iterator[ColumnFiles]:
    """Write converted columns to the cache; they appear there only when the block ends without an error."""
    root = _own_cache()
    free = shutil.disk_usage(root).free
    if num_bytes > free:
        raise DatasetError(
            f"{root}: the converted columns need {num_bytes / 2**30:,.1f} GiB and {free / 2**30:,.1f} are free; free "
            "some, or set XDG_CACHE_HOME to another disk"
        )
    beside = root / f".{key}.{os.getpid()}.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(mode=0o700)
    try:
        yield ColumnFiles(beside)
        with contextlib.suppress(FileExistsError):
            _rename(beside, root / key)
    except OSError as error:
        raise DatasetError(f"{root}: the converted columns could not be written: {error.strerror}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:  # another process was faster
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def cached(key: str) -> tuple[dict[str, AnyArray], dict[str, Any]] | None:
    """Converted columns by name, and what was noted about them; None if they are not in the cache."""
    directory = cache_root() / key
    try:
        listed = json.loads((directory / "columns.json").read_text())
        columns = {}
        for number, name in enumerate(listed["names"]):
            path = directory / f"{number:03}.npy"
            with open(path, "rb") as file:
                shape, fortran, dtype = _read_header(file)
                offset = file.tell()
            if fortran or path.stat().st_size != offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
                return None
            columns[str(name)] = map_file(path, dtype, shape, offset)
        return columns, dict(listed["about"])
    except (OSError, ValueError, KeyError, TypeError, DatasetError):
        return None


def spill(
    key: str, num_bytes: int, dtype: np.dtype[Any], row_shape: tuple[int, ...], pieces: Iterable[AnyArray]
) -> AnyArray:
    """A mapped column of these pieces in the cache; pieces are not read if it is there already."""
    found = cached(key)
    if found is None:
        with convert(key, num_bytes) as files:
            with files.column("column", dtype.newbyteorder("="), row_shape) as append:
                for piece in pieces:
                    append(piece)
            files.finish({})
        found = cached(key)
    if found is None:
        raise DatasetError(f"{cache_root() / key}: is damaged; delete it")
    return found[0]["column"]


def converted_bytes(columns: Mapping[str, Any]) -> int:
    """Bytes of these columns that are in the cache."""
    root = str(cache_root())
    in_cache = [c for c in columns.values() if isinstance(c, np.memmap) and str(c.filename or "").startswith(root)]
    return sum(int(column.nbytes) for column in in_cache)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    return read_npy_header(file, "a converted column")


def read_npy_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype of an .npy stream, which is left at its first row. Objects are refused."""
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=10_000)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file, max_header_size=10_000)
        else:
            raise ValueError(f"version {version} of the .npy format")
    except (ValueError, TypeError, EOFError, SyntaxError, RecursionError, MemoryError) as error:
        raise DatasetError(f"{where}: is damaged: {error!s:.200}") from error
    if dtype.hasobject:
        raise DatasetError(f"{where}: holds pickled Python objects, which could run code; they are not read")
    if any(type(size) is not int or size < 0 for size in shape):
        raise DatasetError(f"{where}: is damaged: it claims the shape {shape!r:.80}")
    return tuple(shape), bool(fortran), dtype


def settle(columns: Mapping[str, Any], keep: BoolArray | None, key: str) -> dict[str, AnyArray]:
    """Columns as arrays: small ones in memory, large ones mapped. `keep` chooses rows.

    Columns may be arrays, memory maps or open HDF5 datasets. What is large and cannot be mapped as it is, is copied to
    the cache.
    """
    total = sum(int(column.nbytes) for column in columns.values())
    if total <= SMALL_BYTES:
        return {name: _load(column, keep) for name, column in columns.items()}
    settled = {n: _load(column, keep) for n, column in columns.items() if column.nbytes <= SMALL_BYTES // 8}
    ready = {n: c for n, c in columns.items() if n not in settled and isinstance(c, np.memmap) and keep is None}
    ready = {name: column for name, column in ready.items() if column.dtype.isnative}
    rest = {name: column for name, column in columns.items() if name not in settled and name not in ready}
    if rest and (found := cached(key)) is None:
        with convert(key, sum(int(column.nbytes) for column in rest.values())) as files:
            for name, column in rest.items():
                with files.column(name, column.dtype.newbyteorder("="), column.shape[1:]) as append:
                    for place, chunk in chunks(column):
                        append(chunk if keep is None else chunk[keep[place]])
            files.finish({})
        found = cached(key)
    if rest:
        if found is None or not set(rest) <= set(found[0]):
            raise DatasetError(f"{cache_root() / key}: is damaged; delete it")
        settled.update({name: found[0][name] for name in rest})
    return {name: (settled | ready)[name] for name in columns}


def _load(column: Any, keep: BoolArray | None) -> AnyArray:
    array = np.array(column[...], dtype=column.dtype.newbyteorder("="), order="C", subok=False)
    return array if keep is None else array[keep]
