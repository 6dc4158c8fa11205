"""Checkpoints: a directory with tensors in safetensors, everything else in JSON, and a manifest with checksums.

Loading one cannot run code. A checkpoint is written to a temporary directory, synced and renamed, so that a reader
sees a complete checkpoint or none. An existing one is swapped with it atomically; where the system cannot do that, it
is renamed first, and is found under that name if the process is killed in between.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.state import Segment
from rl_training.experiment.agents import locate
from rl_training.experiment.files import (
    json_text,
    leftovers,
    open_file,
    parse_json,
    read_mapping,
    refuse_links,
    require_file,
    swap,
    sync_directory,
    sync_file,
    write_json,
)
from rl_training.runtime.callbacks import Callback, Every, RunView
from rl_training.version import __version__

FORMAT_VERSION = 3
"""Format 2 added segments: large parts of the state in separate files, shared between checkpoints. Format 3 added
weights-only checkpoints: only the state that acting needs."""
MANIFEST, TENSORS, STATE, CONFIG, METADATA = (
    "manifest.json", "state.safetensors", "state.json", "config.json", "metadata.json",
)  # fmt: skip
_CONTENT = (TENSORS, STATE, CONFIG, METADATA)
_TENSOR, _ARRAY, _SEGMENT = "$tensor", "$array", "$segment"
"""Keys that mark references from the JSON state to the safetensors files."""
_SEGMENT_NAME = re.compile(r"segment_[0-9]{5,9}\.safetensors")
_STEP = re.compile(r"step_([0-9]+)")
VERIFIED_WITHIN = 16
"""Number of saves within which every shared file is verified again."""


class NewerFormatError(CheckpointError):
    """A checkpoint written by a newer version of the package."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: the run's state, its config as plain data, and its metadata."""

    state: dict[str, Any]
    config: dict[str, Any]
    metadata: dict[str, Any]
    path: Path


def save_checkpoint(path: Path, state: dict[str, Any], config: dict[str, Any], metadata: dict[str, Any]) -> Path:
    """Write a checkpoint directory; an existing one is replaced only when the new one is complete."""
    path = Path(path)
    if path.exists() and not _replaceable(path):
        raise CheckpointError(f"{path} exists and is not a checkpoint, so it is not overwritten; choose another path")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        tensors: dict[str, Tensor] = {}
        segments: dict[str, Segment] = {}
        tree = _split(state, "", tensors, segments)
        save_file(tensors, beside / TENSORS)
        _verify_shared(list(segments.values()))
        digests = {name: _write_segment(segment, beside / name) for name, segment in segments.items()}
        write_json(beside / STATE, tree)
        write_json(beside / CONFIG, config)
        write_json(beside / METADATA, metadata)
        sync_file(beside / TENSORS)
        digests.update({name: _digest(beside / name) for name in _CONTENT})
        files = {name: {"sha256": digest, "size": (beside / name).stat().st_size} for name, digest in digests.items()}
        write_json(beside / MANIFEST, {"format": FORMAT_VERSION, "package": __version__, "files": files})
        sync_directory(beside)
        _replace(beside, path)
        for name, segment in segments.items():
            if segment.complete:
                segment.file, segment.sha256, segment.stamp = path / name, digests[name], _stamp(path / name)
        for left in leftovers(path.parent).get(path, []):  # of earlier processes that were killed
            shutil.rmtree(left, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(beside, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError, CheckpointError)):
            raise CheckpointError(f"{path}: could not be written: {error.__cause__ or error}") from error
        raise
    return path


def load_checkpoint(path: Path, *, learner_only: bool = False) -> Checkpoint:
    """Read and verify a checkpoint; every problem is a `CheckpointError` that names the file.

    With `learner_only`, the replay segments are not read: acting does not need them. If a process was killed while
    replacing the checkpoint, the one it left under a temporary name is read.
    """
    path = Path(path)
    if os.path.lexists(path / MANIFEST):
        return _load(path, learner_only)
    for aside in _set_aside(path):
        try:
            return _load(aside, learner_only)
        except NewerFormatError:
            raise
        except CheckpointError:
            continue
    raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}")


def _load(path: Path, learner_only: bool) -> Checkpoint:
    manifest = read_mapping(path / MANIFEST)
    _check_format(manifest, path)
    listed = manifest.get("files")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path / MANIFEST}: is damaged: it lists no files")
    segments = {name for name in listed if _SEGMENT_NAME.fullmatch(name)}
    if unknown := sorted(listed.keys() - set(_CONTENT) - segments):
        raise CheckpointError(f"{path / MANIFEST}: is damaged: it lists files that no checkpoint has: {unknown!r:.80}")
    for name in _CONTENT:
        _verify(path / name, listed.get(name))
    refuse_links([path / name for name in sorted(segments)], within=path)
    found = {name: _segment(path / name, listed[name], verify=not learner_only) for name in sorted(segments)}
    tensors = _read_tensors(path / TENSORS)
    state = _join(read_mapping(path / STATE), tensors, found, path / STATE)
    return Checkpoint(state, read_mapping(path / CONFIG), read_mapping(path / METADATA), path)


def round_trip(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint would return it, without writing to disk. Segments stay as they are."""
    tensors: dict[str, Tensor] = {}
    segments: dict[str, Segment] = {}
    text = json_text(_split(state, "", tensors, segments))
    back: dict[str, Any] = _join(parse_json(text, Path(STATE)), load(save(tensors)), segments, Path(STATE))
    return back


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from error


def _segment(path: Path, entry: Any, *, verify: bool) -> Segment:
    """A segment backed by a file; without `verify`, it is verified when read, and its file is not shared until then."""

    def tensors() -> dict[str, Tensor]:
        if segment.file is None:  # not verified yet, or damaged
            _verify(path, entry)
        return _read_tensors(path)

    segment = Segment(tensors)
    if verify:
        _verify(path, entry)
        segment.file, segment.sha256, segment.stamp = path, entry["sha256"], _stamp(path)
    return segment


def _verify_shared(segments: list[Segment]) -> None:
    """Verify some of the shared files, those unverified longest; a damaged file is no longer shared."""
    shared = [segment for segment in segments if _is_shareable(segment)]
    for segment in shared:
        segment.unverified += 1
    due = sorted(shared, key=lambda segment: -segment.unverified)[: -(-len(shared) // VERIFIED_WITHIN)]
    for segment in due:
        assert segment.file is not None
        try:
            damage = None if _digest(segment.file) == segment.sha256 else "its checksum differs from the manifest's"
        except OSError as error:
            damage = str(error.strerror)
        segment.unverified = 0
        if damage is not None:
            warnings.warn(
                f"{segment.file}: is damaged: {damage}. It is written again from memory; earlier checkpoints that "
                "share it cannot restore their replay buffer",
                stacklevel=4,
            )
            segment.file = None


def _is_shareable(segment: Segment) -> bool:
    return segment.file is not None and segment.file.is_file() and _stamp(segment.file) == segment.stamp


def _write_segment(segment: Segment, path: Path) -> str:
    """Write a segment, or link to the file of an earlier checkpoint that has it; returns its checksum."""
    if segment.file is not None and _is_shareable(segment):
        try:
            os.link(segment.file, path)
        except OSError:  # another file system, or no hard links
            shutil.copyfile(segment.file, path)
            sync_file(path)
        return segment.sha256
    save_file(segment.tensors(), path)
    sync_file(path)
    return _digest(path)


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_ino, about.st_mtime_ns


def _check_format(manifest: dict[str, Any], path: Path) -> None:
    version, package = manifest.get("format"), manifest.get("package")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{path / MANIFEST}: is damaged: it states no format version")
    if version > FORMAT_VERSION and package == __version__:  # corruption: this version writes no such format
        raise CheckpointError(
            f"{path / MANIFEST}: is damaged: rl_training {package} does not write format {version!r:.20}"
        )
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path} was written by rl_training {package} in format {version!r:.20}; this version "
            f"({__version__}) reads up to format {FORMAT_VERSION}. Upgrade with: pip install -U rl-training"
        )


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The numbered checkpoints of a run, oldest first."""
    found = [p for p in (run_dir / "checkpoints").glob("step_*") if re.fullmatch("[0-9]+", p.name[5:]) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def steps_of(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints, oldest first; includes those a killed process left under a temporary name."""
    home = run_dir / "checkpoints"
    found = {int(path.name[5:]) for path in checkpoints_of(run_dir)}
    for path in home.glob(f".step_*/{MANIFEST}"):
        name = path.parent.name[1:].rsplit(".", 2)[0]
        if _STEP.fullmatch(name) and path.parent in _set_aside(home / name):
            found.add(int(name[5:]))
    return sorted(found)


def _set_aside(place: Path) -> list[Path]:
    """Checkpoints left under a temporary name by a killed process, for one path; newest first."""
    whole = [path for path in leftovers(place.parent).get(place, []) if (path / MANIFEST).is_file()]
    return sorted(whole, key=lambda path: -(path / MANIFEST).stat().st_mtime_ns)


def find_checkpoint(path: str | Path, *, learner_only: bool = False) -> Checkpoint:
    """The checkpoint at a path, or the newest valid one of a run directory. Damaged newer ones are reported.

    With `learner_only`, a checkpoint with a damaged replay counts as valid. `zoo:ppo/CartPole-v1` names an agent that
    ships with the package.
    """
    path = locate(path)
    if not os.path.exists(path) and not _set_aside(path):
        raise CheckpointError(f"{path} does not exist")
    if os.path.lexists(path / MANIFEST) or not os.path.exists(path):
        return load_checkpoint(path, learner_only=learner_only)
    refuse_links([path / "checkpoints"], within=path)
    errors: list[str] = []
    for step in reversed(steps_of(path)):
        candidate = path / "checkpoints" / f"step_{step}"
        try:
            refuse_links([candidate], within=path)
            checkpoint = load_checkpoint(candidate, learner_only=learner_only)
        except NewerFormatError:
            raise  # not damaged: falling back to an older one would lose progress
        except CheckpointError as error:
            errors.append(str(error))
            continue
        if errors:
            warnings.warn(
                f"using {candidate.name}, because newer checkpoints are damaged: {'; '.join(errors)}", stacklevel=2
            )
        return checkpoint
    if errors:
        raise CheckpointError(f"{path} has no valid checkpoint: {'; '.join(errors)}")
    if (Path(path) / "config.yaml").is_file() and (Path(path) / "metadata.json").is_file():
        raise CheckpointError(
            f"{path} is a run directory without a checkpoint: the run ended before it saved one (checkpoint_every), so "
            f"there is nothing to continue. Start it again: rl-training train --config {path}/config.yaml"
        )
    raise CheckpointError(f"{path} is neither a checkpoint nor a run directory that contains one")


def _split(value: Any, name: str, tensors: dict[str, Tensor], segments: dict[str, Segment]) -> Any:
    """Move tensors, arrays and segments out of a state tree and leave references in their place."""
    if isinstance(value, Segment):
        file = f"segment_{len(segments):05}.safetensors"
        segments[file] = value
        return {_SEGMENT: file}
    while name in tensors:  # keys that contain a slash may collide
        name += "'"
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value).contiguous()
        return {_ARRAY: name}
    if isinstance(value, Tensor):
        tensors[name] = value.detach().contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        prefix = f"{name}/" if name else ""
        return {key: _split(item, f"{prefix}{key}", tensors, segments) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(item, f"{name}/{index}", tensors, segments) for index, item in enumerate(value)]
    return value


def _join(value: Any, tensors: dict[str, Tensor], segments: dict[str, Segment], where: Path) -> Any:
    """The inverse of `_split`."""
    if isinstance(value, dict):
        if set(value) == {_SEGMENT}:
            if not isinstance(value[_SEGMENT], str) or value[_SEGMENT] not in segments:
                raise CheckpointError(f"{where}: refers to a missing segment: {value[_SEGMENT]!r:.80}")
            return segments[value[_SEGMENT]]
        for kind in (_TENSOR, _ARRAY):
            if set(value) == {kind}:
                name = value[kind]
                tensor = tensors.get(name) if isinstance(name, str) else None
                if tensor is None:
                    raise CheckpointError(f"{where}: refers to a missing tensor: {name!r:.80}")
                return tensor if kind == _TENSOR else _as_array(tensor, where)
        return {key: _join(item, tensors, segments, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_join(item, tensors, segments, where) for item in value]
    return value


def _as_array(tensor: Tensor, where: Path) -> AnyArray:
    try:
        array: AnyArray = tensor.numpy()
    except TypeError as error:  # numpy has no bfloat16
        raise CheckpointError(f"{where}: {error}") from error
    return array


def is_checkpoint_file(name: str) -> bool:
    """Whether a checkpoint may contain a file with that name.

    Example:
        >>> is_checkpoint_file("state.safetensors"), is_checkpoint_file("setup.py")
        (True, False)
    """
    return name in (MANIFEST, *_CONTENT) or _SEGMENT_NAME.fullmatch(name) is not None


def _digest(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(path: Path, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: is not listed in the manifest")
    require_file(path)
    if path.stat().st_size != entry.get("size"):
        raise CheckpointError(f"{path}: is damaged: {path.stat().st_size} bytes instead of {entry.get('size')!r:.40}")
    if _digest(path) != entry.get("sha256"):
        raise CheckpointError(f"{path}: is damaged: its checksum differs from the manifest's")


def _replaceable(path: Path) -> bool:
    """Whether a path is a directory that holds only a checkpoint, complete or damaged, or is empty."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).exists() or all(is_checkpoint_file(entry.name) for entry in path.iterdir())


def _replace(new: Path, place: Path) -> None:
    if place.exists() and swap(new, place):
        sync_directory(place.parent)
        shutil.rmtree(new, ignore_errors=True)  # the old one after the swap
        return
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(place, old)
    try:
        os.rename(new, place)
    except BaseException:
        if old.exists():
            os.rename(old, place)
        raise
    sync_directory(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_checkpoints(directory: Path) -> None:
    """Clean up after processes that were killed while saving.

    If a checkpoint is missing, the newest one left under a temporary name is restored, a valid one if possible. All
    other leftovers are removed.
    """
    for place, left in leftovers(directory).items():
        left = [path for path in left if path.is_dir()]
        if not os.path.lexists(place / MANIFEST):
            aside = sorted(_set_aside(place), key=_is_good, reverse=True)
            if aside and (not place.exists() or _replaceable(place)):
                shutil.rmtree(place, ignore_errors=True)  # no manifest: incomplete
                os.rename(aside[0], place)
                sync_directory(directory)
        for path in left:
            shutil.rmtree(path, ignore_errors=True)


def _is_good(path: Path) -> bool:
    try:
        _load(path, learner_only=True)
    except CheckpointError as error:
        return isinstance(error, NewerFormatError)
    return True


def put_damaged_aside(run_dir: Path, newer_than: int) -> list[Path]:
    """Rename the damaged checkpoints that a resume skipped, those newer than `newer_than`, to `damaged_...`."""
    aside = []
    for path in checkpoints_of(run_dir):
        if int(path.name[5:]) > newer_than:
            target = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            os.rename(path, target)
            aside.append(target)
    return aside


@dataclass
class CheckpointCallback(Callback):
    """Saves a checkpoint every so many steps, keeps the newest few, and stores the best one separately. Runs last.

    A failed save (full disk) is reported and training continues, since the next may succeed; only a failure of the
    last save ends the run with an error.
    """

    transient: ClassVar[tuple[str, ...]] = ("improved", "saved_at")
    save: Callable[[Path], Path]
    """Writes a checkpoint to a path and returns it."""
    directory: Path
    every: Every
    keep: int = 3
    keep_best: bool = True
    best: float | None = field(default=None, init=False)
    improved: bool = field(default=False, init=False)
    saved_at: int = field(default=-1, init=False)

    def on_evaluation(self, run: RunView, result: EvaluationResult) -> None:
        """See `Callback.on_evaluation`."""
        if self.best is None or result.mean > self.best:
            self.best, self.improved = result.mean, True

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        due = self.every.due(run.position)
        improved, self.improved = self.improved, False
        if improved and self.keep_best:
            self._try(lambda: self.save(self.directory / "best"))
        if due:
            self._try(lambda: self._save_step(run))

    def on_stop(self, run: RunView) -> None:
        """See `Callback.on_stop`."""
        if self.saved_at != run.position and run.iterations > 0:
            self._save_step(run)

    @staticmethod
    def _try(save: Callable[[], object]) -> None:
        try:
            save()
        except CheckpointError as error:
            warnings.warn(f"training continues without this checkpoint: {error}", stacklevel=2)

    def _save_step(self, run: RunView) -> None:
        began = time.perf_counter()
        path = self.save(self.directory / f"step_{run.position}")
        size = sum(file.stat().st_size for file in path.iterdir())
        run.record({"time/checkpoint_seconds": time.perf_counter() - began, "time/checkpoint_megabytes": size / 1e6})
        self.saved_at = run.position
        for old in checkpoints_of(self.directory.parent)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
