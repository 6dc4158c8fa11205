"""File formats of recorded datasets: one module each; `read` and `write` choose by suffix or prefix."""

from __future__ import annotations

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
    if not path.exists():
        raise DatasetError(f"{path}: does not exist")
    if path.is_dir():
        from rl_training.data.formats import minari_files

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
