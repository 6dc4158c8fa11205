"""File formats of recorded datasets: one module each; `read` and `write` choose by suffix or prefix."""

from __future__ import annotations

import os
from pathlib import Path

from rl_training.data.dataset import Dataset, DatasetError, HasSpaces

SUFFIXES = {".npz": "npz", ".hdf5": "hdf5", ".h5": "hdf5", ".parquet": "parquet", ".pq": "parquet"}
MINARI = "minari:"


def read(source: str | Path, env: HasSpaces | None, download: bool) -> Dataset:
    """See `read_dataset`."""
    if isinstance(source, str) and source.startswith(MINARI):
        from rl_training.data.formats import minari_files

        return minari_files.read(minari_files.locate(source.removeprefix(MINARI), download), env)
    path = Path(source).expanduser()
    if not _exists(path):
        raise DatasetError(f"{path}: does not exist")
    if path.is_dir():
        from rl_training.data.formats import minari_files

        if not any(os.path.lexists(path / name) for name in ("data/metadata.json", "metadata.json")):
            raise DatasetError(f"{path}: is a directory, but no Minari dataset, run or saved replay")
        return minari_files.read(path, env)
    kind = SUFFIXES.get(path.suffix.lower())
    if kind == "npz":
        from rl_training.data.formats import npz

        return npz.read(path, env)
    if kind == "hdf5":
        from rl_training.data.formats import hdf5

        return hdf5.read(path, env)
    if kind == "parquet":
        from rl_training.data.formats import parquet

        return parquet.read(path, env)
    raise DatasetError(f"{path}: datasets end in {', '.join(SUFFIXES)}, are a Minari directory, or minari:<id>")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a loop of links, a name that is too long, a null byte
        return False


def write(dataset: Dataset, target: str | Path) -> Path:
    """See `write_dataset`."""
    if isinstance(target, str) and target.startswith(MINARI):
        from rl_training.data.formats import minari_files

        return minari_files.write(dataset, target.removeprefix(MINARI))
    path = Path(target).expanduser()
    kind = SUFFIXES.get(path.suffix.lower())
    if kind == "npz":
        from rl_training.data.formats import npz

        npz.write(dataset, path)
    elif kind == "parquet":
        from rl_training.data.formats import parquet

        parquet.write(dataset, path)
    else:
        raise DatasetError(f"{path}: datasets are written to .npz, .parquet or minari:<id>")
    return path


def check_target(target: str | Path) -> None:
    """Raise an error before any work if `write` could not write there: the suffix, the extra, the directory."""
    if isinstance(target, str) and target.startswith(MINARI):
        from rl_training.data.formats import hdf5, minari_files

        minari_files.check_id(target.removeprefix(MINARI))
        hdf5.import_h5py()
        return
    path = Path(target).expanduser()
    kind = SUFFIXES.get(path.suffix.lower())
    if kind == "parquet":
        from rl_training.data.formats import parquet

        parquet.import_parquet()
    elif kind != "npz":
        raise DatasetError(f"{path}: datasets are written to .npz, .parquet or minari:<id>")
    if path.is_dir():
        raise DatasetError(f"{path}: is a directory")
    parent = next((place for place in path.absolute().parents if place.exists()), path)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise DatasetError(f"{path}: cannot be written: {parent} is not a directory that can be written to")
