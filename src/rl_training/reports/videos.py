"""Videos for reports: existing videos of a run, or a new one of its best checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_training.contracts.errors import CheckpointError
from rl_training.deploy.video import require_video
from rl_training.experiment.files import open_file, refuse_links
from rl_training.reports.records import RunRecord

MAX_VIDEO, MAX_VIDEOS = 20_000_000, 60_000_000
"""Maximum bytes of one video in a page, and of all: larger pages open slowly or not at all."""


@dataclass(frozen=True)
class Video:
    """An mp4 file and its caption."""

    data: bytes
    caption: str


def video_of_run(run: RunRecord, *, record: bool, trust: bool) -> tuple[Video | None, list[str]]:
    """The newest video of a run, or a new one if it has none and `record` is set; and reasons if there is none."""
    if record:
        require_video()
    problems: list[str] = []
    found = _newest(run, problems)
    if found is None and record:
        try:
            _record(run, trust)
        except Exception as error:  # environments and drivers may raise anything; write the page anyway
            problems.append(f"{run.name}: no video could be recorded: {type(error).__name__}: {error}")
        else:
            found = _newest(run, problems)
    return found, problems


def videos_of_suite(
    runs: Sequence[RunRecord], labels: Sequence[str], *, record: bool, trust: bool
) -> tuple[list[Video], list[str]]:
    """One video per algorithm and environment, of the best run that has one."""
    if record:
        require_video()
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for run, label in zip(runs, labels, strict=True):
        groups.setdefault((run.environment, label), []).append(run)
    videos: list[Video] = []
    problems: list[str] = []
    for (environment, label), members in groups.items():
        best_first = sorted(members, key=lambda run: -_score(run))
        found = next((shot for run in best_first if (shot := _newest(run, problems))), None)
        if found is None and record:
            found, said = video_of_run(best_first[0], record=True, trust=trust)
            problems += said
        if found is None:
            continue
        if sum(len(shot.data) for shot in videos) + len(found.data) > MAX_VIDEOS:
            problems.append(f"the video of {label} on {environment} is left out: the page would be too large")
            continue
        videos.append(Video(found.data, f"{label} on {environment}: {found.caption}"))
    return videos, problems


def _score(run: RunRecord) -> float:
    return float("-inf") if run.best_return is None else run.best_return


def _newest(run: RunRecord, problems: list[str]) -> Video | None:
    directory = run.path / "videos"
    try:
        refuse_links([directory], within=run.path)
        files = sorted(directory.glob("*.mp4"), key=lambda path: path.stat().st_mtime, reverse=True)
        refuse_links(files, within=run.path)
    except (OSError, CheckpointError) as error:
        problems.append(f"{run.name}: its videos cannot be read: {error}")
        return None
    for path in files:
        if path.stat().st_size > MAX_VIDEO:
            problems.append(f"{run.name}: {path.name} has {path.stat().st_size / 1e6:.0f} MB and is left out")
            continue
        with open_file(path) as file:
            data = file.read()
        if data[4:8] == b"ftyp":
            return Video(data, f"{path.name}, seed {run.seed}")
        problems.append(f"{run.name}: {path.name} is not a complete mp4 file and is left out")
    return None


def _record(run: RunRecord, trust: bool) -> None:
    """Record one episode of the best checkpoint, or of the newest as a fallback, into the run's `videos`."""
    from rl_training.api.agent import load

    refuse_links([run.path / "videos", run.path / "checkpoints"], within=run.path)
    best = run.path / "checkpoints" / "best"
    try:
        agent = load(_own(best, run.path) if best.is_dir() else run.path, trust=trust)
    except CheckpointError:
        agent = load(run.path, trust=trust)
    try:
        agent.record_video(run.path / "videos", 1)
    finally:
        agent.close()


def _own(path: Path, home: Path) -> Path:
    refuse_links([path], within=home)
    return path
