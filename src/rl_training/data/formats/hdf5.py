"""HDF5 files in the layout of D4RL: columns at the top level, further ones in `infos/`.

A file may point to others (links, external and virtual storage) or ask for plug-ins that decode it. None of that is
followed: such files are refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import MissingExtraError
from rl_training.data.dataset import Dataset, DatasetError, DatasetMetadata, HasSpaces
from rl_training.data.formats import rows, storage

MAX_DEPTH = 8
MAX_OBJECTS = 1_000_000
FILTERS = frozenset({1, 2, 3, 4, 5, 6, 32000})
"""Filters that are part of the library: deflate, shuffle, checksum, szip, n-bit, scale-offset, lzf."""


def import_h5py() -> Any:
    """The h5py module; it is part of the extra `offline`."""
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError("reading and writing HDF5 files", "offline") from error
    return h5py


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """An HDF5 file, open for reading; whatever goes wrong while it is open is a `DatasetError`."""
    h5py = import_h5py()
    storage.open_file(path).close()  # refuses pipes and devices
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            yield file
    except DatasetError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise DatasetError(f"{path}: is damaged, or no HDF5 file: {error!s:.200}") from error


def leaves(group: Any, where: str) -> dict[str, Any]:
    """All datasets below a group that hold something, by their path in it. Links to elsewhere are refused."""
    h5py = import_h5py()
    found: dict[str, Any] = {}
    pending = [("", group, 0)]
    while pending:
        prefix, current, depth = pending.pop()
        if depth > MAX_DEPTH or len(found) + len(pending) > MAX_OBJECTS:
            raise DatasetError(f"{where}: is nested too deeply, or has too many parts")
        for name in current:
            link = current.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise DatasetError(f"{where}: {prefix + name!r:.80} is a link to elsewhere; links are not followed")
            item = current[name]
            if isinstance(item, h5py.Group):
                pending.append((f"{prefix}{name}/", item, depth + 1))
            elif isinstance(item, h5py.Dataset) and item.shape is not None:
                check_dataset(item, f"{where}: {prefix + name!r:.80}")
                found[prefix + name] = item
    return dict(sorted(found.items()))


def check_dataset(dataset: Any, where: str) -> None:
    """Refuse data outside of the file, and filters that need a plug-in."""
    if dataset.is_virtual or dataset.external:
        raise DatasetError(f"{where}: is stored in another file; such storage is not read")
    plist = dataset.id.get_create_plist()
    unknown = {plist.get_filter(number)[0] for number in range(plist.get_nfilters())} - FILTERS
    if unknown:
        raise DatasetError(f"{where}: needs a plug-in (filter {min(unknown)}) to be decoded; plug-ins are not loaded")


def claimed_bytes(dataset: Any) -> int:
    """The memory that reading a dataset takes: its rows, or one of its pieces if that is larger."""
    item = dataset.dtype.itemsize
    return int(max(math.prod(dataset.shape) * item, math.prod(dataset.chunks or (0,)) * item))


def read(path: Path, env: HasSpaces | None) -> Dataset:
    """Read an HDF5 file."""
    with open_hdf5(path) as file:
        if "observations" not in file and any(str(name).startswith("episode_") for name in file):
            raise DatasetError(f"{path}: is part of a Minari dataset; name its directory, or minari:<id>")
        found = leaves(file, str(path))
        columns = {name: column for name, column in found.items() if name.partition("/")[0] != "metadata"}
        storage.refuse_bomb(path, sum(map(claimed_bytes, columns.values())), path.stat().st_size)
        sorted_columns = rows.sort_columns(columns, path, storage.cache_key(path, "rows"))
        sorted_columns.metadata = DatasetMetadata(behaviour_policy=_policy(found))
        return rows.build(sorted_columns, env)


def _policy(found: dict[str, Any]) -> str:
    """What D4RL's files say about their policy."""
    item = found.get("metadata/algorithm")
    if item is None or item.shape != () or item.dtype.kind not in "OS" or item.dtype.itemsize > 10_000:
        return ""
    text = item[()]
    return text.decode("utf-8", "replace")[:1000] if isinstance(text, bytes) else ""
