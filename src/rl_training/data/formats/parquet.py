"""Parquet files: the columns of npz files. Vectors are lists of fixed size; shapes and metadata are in the schema.

Files of others may use lists of variable type (all of one length) and structs (Dict observations).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import MissingExtraError
from rl_training.data.dataset import SMALL_BYTES, Dataset, DatasetError, HasSpaces, chunks
from rl_training.data.formats import npz, rows, storage

KEY = b"rl_training"
"""Our entry in the schema's metadata: JSON with `about` (metadata, spaces) and `shapes` of columns."""
ROW_GROUP_BYTES = 32 * 2**20
MAX_COLUMNS = 10_000
PHYSICAL_BYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
"""Bytes of numbers by how Parquet stores them; all others have 8."""


def import_parquet() -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet; they are part of the extra `offline`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("reading and writing Parquet files", "offline") from error
    return pyarrow, pyarrow.parquet


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    pyarrow, parquet = import_parquet()
    with storage.open_file(path) as file:
        try:
            with parquet.ParquetFile(file, pre_buffer=False) as opened:
                yield opened
        except DatasetError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, MemoryError, OverflowError) as error:
            raise DatasetError(f"{path}: is damaged, or no Parquet file: {error!s:.200}") from error


def read(path: Path, env: HasSpaces | None) -> Dataset:
    """Read a Parquet file, one batch of rows at a time."""
    with _open(path) as file:
        about = _about(file, path)
        columns, texts = _read_columns(file, path, about.get("shapes", {}))
    if "about" in about:
        texts["metadata"] = json.dumps(about["about"])
    found = rows.sort_columns(columns, path, storage.cache_key(path, "rows"))
    npz.describe(found, texts)
    return rows.build(found, env)


def _about(file: Any, path: Path) -> dict[str, Any]:
    text = (file.schema_arrow.metadata or {}).get(KEY)
    if text is None:
        return {}
    try:
        data = json.loads(text)
        shapes = {str(name): tuple(int(n) for n in shape) for name, shape in data.get("shapes", {}).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(f"{path}: its metadata is damaged: {error!s:.200}") from error
    return {**data, "shapes": shapes}


def _read_columns(file: Any, path: Path, shapes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    pyarrow, _ = import_parquet()
    names = [field.name for field in file.schema_arrow]
    if len(names) > MAX_COLUMNS or len(set(names)) != len(names):
        raise DatasetError(f"{path}: has {len(names)} columns, or several of one name")
    num_rows = int(file.metadata.num_rows)
    columns: dict[str, Any] = {}
    texts: dict[str, str] = {}
    width = 0
    if num_rows <= 0:
        raise DatasetError(f"{path}: has no rows")
    for field in file.schema_arrow:
        for _, leaf_type in _leaves(field.name, field.type, pyarrow):
            width += _width(leaf_type, pyarrow)
    storage.refuse_bomb(path, max(width * num_rows, _stored_bytes(file.metadata)), path.stat().st_size)
    for field in file.schema_arrow:
        if pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type):
            texts[field.name] = _first_text(file, field.name)
            continue
        for name, leaf_type in _leaves(field.name, field.type, pyarrow):
            if _width(leaf_type, pyarrow):
                pieces = _pieces(file, field.name, name, path)
                columns[name] = _gather(pieces, num_rows, shapes.get(name), f"{path}: {name!r:.80}", path, name)
            elif _is_needed(name):
                raise DatasetError(f"{path}: {name!r:.80} has the type {leaf_type!s:.80}; columns are numbers")
    return columns, texts


def _stored_bytes(metadata: Any) -> int:
    """Bytes of all numbers that a file says it holds, those in lists of variable length included."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(column.num_values * PHYSICAL_BYTES.get(column.physical_type, 8) for column in columns)


def _is_needed(name: str) -> bool:
    head = name.partition(".")[0]
    return any(head in aliases for aliases in rows.ALIASES.values())


def _leaves(name: str, kind: Any, pyarrow: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The columns of a struct, by name joined with dots; other columns as they are."""
    if pyarrow.types.is_struct(kind) and depth < 8:
        for number in range(kind.num_fields):
            yield from _leaves(f"{name}.{kind.field(number).name}", kind.field(number).type, pyarrow, depth + 1)
    else:
        yield name, kind


def _is_list(kind: Any, pyarrow: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _width(kind: Any, pyarrow: Any) -> int:
    """Bytes of a row as far as they are known; 0 for what is not numbers."""
    count = 1
    while _is_list(kind, pyarrow):
        count *= kind.list_size if pyarrow.types.is_fixed_size_list(kind) else 1
        kind = kind.value_type
    types = pyarrow.types
    if types.is_boolean(kind):
        return count
    is_number = types.is_integer(kind) or types.is_floating(kind)
    return count * (kind.bit_width // 8) if is_number else 0


def _first_text(file: Any, name: str) -> str:
    for batch in file.iter_batches(batch_size=1, columns=[name], use_threads=False):
        value = batch.column(0)[0].as_py()
        return "" if value is None else str(value)
    return ""


def _pieces(file: Any, field: str, name: str, path: Path) -> Iterator[AnyArray]:
    """A column in pieces [n, ...]."""
    for batch in file.iter_batches(batch_size=8192, columns=[name], use_threads=False):
        array = batch.column(0)
        for part in name.removeprefix(field).split(".")[1:]:
            _refuse_missing(array, path, name)
            array = array.field(part)
        yield _to_numpy(array, path, name)


def _refuse_missing(array: Any, path: Path, name: str) -> None:
    if array.null_count:
        raise DatasetError(f"{path}: {name!r:.80} has {array.null_count} missing values (null)")


def _to_numpy(array: Any, path: Path, name: str) -> AnyArray:
    pyarrow, _ = import_parquet()
    shape: list[int] = [len(array)]
    while _is_list(array.type, pyarrow):
        _refuse_missing(array, path, name)
        count = len(array)
        if not pyarrow.types.is_fixed_size_list(array.type):
            lengths = np.unique(np.asarray(array.value_lengths()))
            if len(lengths) > 1:
                raise DatasetError(f"{path}: {name!r:.80} has rows of {lengths[0]} to {lengths[-1]} numbers")
        array = array.flatten()
        shape.append(len(array) // max(1, count))
    _refuse_missing(array, path, name)
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(shape)


def _gather(pieces: Iterator[AnyArray], num_rows: int, shape: Any, where: str, path: Path, name: str) -> AnyArray:
    first = next(pieces, None)
    if first is None:
        raise DatasetError(f"{where}: is damaged: it has no rows")
    storage.check_dtype(where, first.dtype)
    row_shape = first.shape[1:] if shape is None else tuple(shape)
    if int(np.prod(row_shape, dtype=object)) != int(np.prod(first.shape[1:], dtype=np.int64)):
        raise DatasetError(f"{where}: is damaged: rows of {first.shape[1:]} do not have the shape {row_shape!r:.80}")
    row_bytes = max(1, first[:1].nbytes)

    def checked() -> Iterator[AnyArray]:
        count = 0
        for piece in _chain(first, pieces):
            count += len(piece)
            if piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype or count > num_rows:
                raise DatasetError(f"{where}: is damaged: its rows differ in size, or are more than the file says")
            yield piece.reshape(len(piece), *row_shape)
        if count != num_rows:
            raise DatasetError(f"{where}: is damaged: it has {count} of {num_rows} rows")

    if row_bytes * num_rows <= SMALL_BYTES // 4:
        return np.concatenate(list(checked()))
    key = storage.cache_key(path, "parquet", name)
    return storage.spill(key, row_bytes * num_rows, first.dtype, row_shape, checked())


def _chain(first: AnyArray, rest: Iterator[AnyArray]) -> Iterator[AnyArray]:
    yield first
    yield from rest


# Writing


def write(dataset: Dataset, path: Path) -> None:
    """Write a Parquet file, in pieces."""
    pyarrow, parquet = import_parquet()
    columns = npz.columns_to_write(dataset)
    columns["episode_id"] = dataset.episode_of(np.arange(dataset.num_transitions)).astype(np.int32)
    shapes = {name: [int(n) for n in column.shape[1:]] for name, column in columns.items() if column.ndim > 2}
    about = json.dumps({"about": json.loads(npz.about(dataset)), "shapes": shapes})
    fields = [(name, _arrow_type(column, pyarrow)) for name, column in columns.items()]
    schema = pyarrow.schema(fields, metadata={KEY: about.encode()})
    widest = max(columns.values(), key=lambda column: column.nbytes)
    with npz.replacing(path) as beside:
        try:
            with parquet.ParquetWriter(beside, schema, compression="zstd") as writer:
                for place, _ in chunks(widest, ROW_GROUP_BYTES):
                    arrays = [
                        _to_arrow(np.asarray(column[place]), kind, pyarrow)
                        for column, (_, kind) in zip(columns.values(), fields, strict=True)
                    ]
                    writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
        except pyarrow.ArrowException as error:
            raise DatasetError(f"{path}: could not be written: {error!s:.200}") from error


def _arrow_type(column: Any, pyarrow: Any) -> Any:
    kind = pyarrow.from_numpy_dtype(column.dtype.newbyteorder("="))
    size = int(np.prod(column.shape[1:], dtype=np.int64))
    return kind if column.ndim == 1 else pyarrow.list_(kind, size)


def _to_arrow(rows_: AnyArray, kind: Any, pyarrow: Any) -> Any:
    flat = pyarrow.array(np.ascontiguousarray(rows_).reshape(-1))
    return flat if rows_.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, type=kind)
