"""Stops and resumes runs, and compares their results bitwise with a run that was never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.api.session import resume, train
from rl_training.contracts.state import Segment
from rl_training.envs.factory import EnvLike
from rl_training.experiment.checkpointing import checkpoints_of, load_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import read_metrics
from rl_training.runtime.callbacks import RunView


def only_run(output_dir: Path) -> Path:
    """The one run below a directory."""
    (run,) = [path for path in output_dir.iterdir() if path.is_dir()]
    return run


class Crash(BaseException):
    """Ends a run like a kill: without warning."""


def crash_at(step: int) -> Callable[[RunView], None]:
    """A callback that crashes the run once it is at this step: of the environment, or a gradient step offline."""

    def crash(run: RunView) -> None:
        if run.position >= step:
            raise Crash

    return crash


def crash_and_resume(
    config: TrainConfig, steps: Sequence[int], changes: Mapping[str, Any] | None = None, env: EnvLike | None = None
) -> Path:
    """Run in this process, crash at these steps and resume each time; returns the run directory."""
    config = config.replace(**(changes or {}))
    with _crashing():
        train(config, env=env, progress=False, callback=crash_at(steps[0]))
    run = only_run(config.output_dir)
    for step in steps[1:]:
        with _crashing():
            resume(run, env=env, progress=False, callback=crash_at(step))
    resume(run, env=env, progress=False)
    return run


@contextmanager
def _crashing() -> Iterator[None]:
    try:
        yield
    except Crash:
        return
    raise AssertionError("the run ended before the step at which it was to crash")


def differences(run: Path, other: Path, ignoring: Sequence[str] = ()) -> list[str]:
    """Every entry of the last checkpoint, the metrics and the evaluations in which two runs differ, except timings."""
    state, other_state = (flat(load_checkpoint(checkpoints_of(path)[-1]).state) for path in (run, other))
    names = [name for name in state.keys() | other_state.keys() if not name.startswith(tuple(ignoring))]
    found = [f"state {name}" for name in names if not same(state, other_state, name)]
    if _metrics(run) != _metrics(other):
        found.append("metrics.jsonl")
    if _events(run) != _events(other):
        found.append("tensorboard")
    if (run / "evaluations.json").read_text() != (other / "evaluations.json").read_text():
        found.append("evaluations.json")
    return found


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of a state by path; a replay buffer counts by its rows, whatever files they are in."""
    if isinstance(value, dict) and "segments" in value:
        return flat(_rows(value), name)
    if isinstance(value, (dict, list)) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for k, item in items for key, leaf in flat(item, f"{name}/{k}").items()}
    return {name: value}


def _rows(replay: dict[str, Any]) -> dict[str, Any]:
    """A saved replay buffer with its segments joined; a shared file may begin with rows that were dropped since."""
    oldest, num_envs = replay["oldest"], replay["num_envs"]
    columns: dict[str, list[Any]] = {}
    for segment in replay["segments"]:
        assert isinstance(segment, Segment)
        tensors = {name: np.asarray(tensor) for name, tensor in segment.tensors().items()}
        start, _ = tensors.pop("times")
        skipped = max(0, oldest - start) * num_envs
        there = tensors["ended"] >= skipped
        tensors["ended"] = tensors["ended"] + start * num_envs
        for name, column in tensors.items():
            by_end = name == "ended" or name.startswith("final_")
            columns.setdefault(name, []).append(column[there] if by_end else column[skipped:])
    rest = {name: value for name, value in replay.items() if name != "segments"}
    return {**rest, "rows": {name: np.concatenate(parts) for name, parts in columns.items()}}


def same(state: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    """Whether an entry of two flat states is the same, bit for bit."""
    if name not in state or name not in other:
        return False
    a, b = state[name], other[name]
    if hasattr(a, "shape"):
        a, b = np.asarray(a), np.asarray(b)
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def _events(run: Path) -> dict[str, list[tuple[int, float]]]:
    if not (run / "tensorboard").exists():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if not name.startswith("time/")]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
