"""Kill a process at every single file operation, and see what the next one finds.

`python -m tests.kill_harness <directory> <scenario> <checkpoint_keep> <exchange or renames> <stride>` prints what went
wrong as JSON. It is a process of its own because it forks: every kill and every look at what is left is a child.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_training import DQN, TrainConfig, load, resume, train
from rl_training.accelerate.native import compiler
from rl_training.contracts.errors import ConfigError
from rl_training.data import replay_buffer
from rl_training.data.dataset import write_dataset
from rl_training.deploy.recording import RecordConfig, record
from rl_training.experiment import checkpointing, files, metadata
from rl_training.experiment.checkpointing import checkpoints_of
from rl_training.runtime.callbacks import RunView
from rl_training.testing.resume import Crash, crash_at, differences, flat, only_run, same
from tests.small import small_settings

OWN = small_settings("dqn", buffer_size=30, learning_starts=4, batch_size=4)
CHANGES = {os.O_WRONLY, os.O_RDWR}
EVENTS = {"os.rename", "os.link", "os.mkdir", "os.rmdir", "os.remove", "os.truncate"}
SCENARIOS = ("save", "resume", "replace", "recover", "offline", "online")


class Killer:
    """Ends the process before its n-th file operation, and in the middle of writes."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.kinds: list[str] = []
        sys.addaudithook(self._hook)
        files.open = self._open  # type: ignore[attr-defined]
        save_file, swap = checkpointing.save_file, checkpointing.swap

        def torn_save(tensors: Any, path: Path) -> None:
            save_file(tensors, path)
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            self.count()
            path.write_bytes(content)

        def counted_swap(one: Path, other: Path) -> bool:
            self.count("swap")
            return swap(one, other)

        checkpointing.save_file, checkpointing.swap = torn_save, counted_swap
        os.fsync = lambda descriptor: self.count()  # type: ignore[assignment]

    def count(self, kind: str = "write") -> None:
        self.kinds.append(kind)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS or (event == "open" and isinstance(args[2], int) and args[2] & 3 in CHANGES):
            self.count(event)

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        return TornFile(builtins.open(*args, **kwargs), self)


class TornFile:
    """A file of which half of each write is on the disk before the rest."""

    def __init__(self, file: Any, killer: Killer) -> None:
        self.file, self.killer = file, killer

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        self.killer.count()
        self.file.write(data[half:])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> TornFile:
        return self

    def __exit__(self, *details: Any) -> None:
        self.file.close()


def in_child(action: Callable[[], object], report: Path) -> str | None:
    """What went wrong in a process of its own: None if nothing did, `killed` if it was."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                action()
        except BaseException:
            report.write_text(traceback.format_exc())
            code = 1
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
    return report.read_text() if os.WEXITSTATUS(status) else None


def check(condition: bool, what: object) -> None:
    if not condition:
        raise AssertionError(what)


Action = Callable[[Path, Callable[[], object]], None]
"""Prepares a place, calls what it is given, and does what is to be killed."""


def kill_everywhere(home: Path, stride: int, act: Action, look: Callable[[Path], None]) -> tuple[int, list[str]]:
    """Kill `act` at its operations and `look` at what is left each time: at each that puts something in its place, and
    at every so many others."""
    failures: list[str] = []
    kinds = _operations(home, act)
    numbers = [n for n, kind in enumerate(kinds, 1) if n % stride == 0 or kind in ("os.rename", "swap")]
    for number in numbers:
        place = home / str(number)
        place.mkdir()
        outcome = in_child(lambda: act(place, lambda: Killer(number)), home / "report")  # noqa: B023 - used at once
        wrong = in_child(lambda: look(place), home / "report")  # noqa: B023
        for what in {outcome, wrong} - {None, "killed"}:
            names = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
            failures.append(f"operation {number}: {what}\n{names}")
        shutil.rmtree(place)
    return len(kinds), failures


def _operations(home: Path, act: Action) -> list[str]:
    """The operations of `act` when nothing kills it."""

    def traced() -> None:
        killers: list[Killer] = []
        (home / "0").mkdir()
        act(home / "0", lambda: killers.append(Killer(0)))
        kinds = list(killers[0].kinds)
        (home / "trace").write_text(json.dumps(kinds))

    check(in_child(traced, home / "report") is None, "it fails without a kill")
    return list(json.loads((home / "trace").read_text()))


def all_same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(same(one, other, name) for name in one)


def state_of(agent: Any) -> dict[str, Any]:
    return flat(agent._experiment.trainer.state_dict())


def kill_agent_saves(home: Path, stride: int) -> tuple[int, list[str]]:
    """`agent.save` over an older one: `load` finds the old or the new one, and the next save tidies up."""
    agent = DQN("CartPole-v1", seed=1, eval_every=0, **OWN)
    agent.learn(20, progress=False)
    older = home / "older"
    agent.save(older)
    agent.learn(12, progress=False)
    newer = state_of(agent)
    old = load(older)
    states = {20: state_of(old), 32: newer}

    def act(place: Path, arm: Callable[[], object]) -> None:
        shutil.copytree(older, place / "agent")
        arm()
        agent.save(place / "agent")

    def look(place: Path) -> None:
        before = sorted(str(path) for path in place.rglob("*"))
        found = load(place / "agent")
        check(all_same(state_of(found), states[found.num_timesteps]), f"another state of {found.num_timesteps} steps")
        check(sorted(str(path) for path in place.rglob("*")) == before, "reading changed something")
        found.save(place / "agent")
        check(os.listdir(place) == ["agent"], os.listdir(place))
        check(all_same(state_of(load(place / "agent")), states[found.num_timesteps]), "saved again")

    return kill_everywhere(home, stride, act, look)


def kill_resumes(home: Path, scenario: str, keep: int, stride: int) -> tuple[int, list[str]]:
    """A resume: the next one ends like the run that was never killed, nothing is damaged and nothing lies about."""
    config = TrainConfig(
        algo="dqn", env_id="CartPole-v1", total_timesteps=24, output_dir=home / "whole", eval_every=0, log_every=8,
        checkpoint_every=8, checkpoint_keep=keep, tensorboard=False, algorithm=OWN,
    )  # fmt: skip
    config.output_dir.mkdir()
    train(config, progress=False)
    whole = only_run(config.output_dir)
    (whole / "evaluations.json").write_text("[]")
    template = home / "template"
    if scenario == "resume":  # one more checkpoint to write, and an older one to remove
        with contextlib.suppress(Crash):
            train(config.replace(output_dir=template), progress=False, callback=crash_at(18))
    else:  # it was killed after its last checkpoint, which is written again over itself
        shutil.copytree(whole, template / whole.name)
        about = json.loads((whole / "metadata.json").read_text())
        (template / whole.name / "metadata.json").write_text(json.dumps({**about, "status": "running"}))
    run = only_run(template)
    (run / "evaluations.json").write_text("[]")
    if scenario == "recover":  # it was killed between two renames, and while it wrote another file
        newest = run / "checkpoints" / "step_24"
        shutil.copytree(newest, newest.with_name(".step_24.999999999.tmp"))
        os.rename(newest, newest.with_name(".step_24.999999999.old"))
        newest.with_name(".best.999999999.tmp").mkdir()
        (run / ".metadata.json.999999999.tmp").write_text("{")
    names = [path.name for path in checkpoints_of(whole)]

    def act(place: Path, arm: Callable[[], object]) -> None:
        shutil.copytree(run, place / "run")
        arm()
        resume(place / "run", progress=False)

    def look(place: Path) -> None:
        found = place / "run"
        before = sorted(str(path) for path in found.rglob("*"))
        steps = load(found).num_timesteps
        check(steps == 24 or (scenario == "resume" and steps == 16), f"{steps} steps are found")
        check(sorted(str(path) for path in found.rglob("*")) == before, "reading changed something")
        try:
            resume(found, progress=False)
        except ConfigError as error:
            check("already been trained" in str(error), error)
        check(differences(found, whole) == [], differences(found, whole))
        check([path.name for path in checkpoints_of(found)] == names, "other checkpoints")
        check(sorted(os.listdir(found / "checkpoints")) == sorted(names), os.listdir(found / "checkpoints"))
        check(not list(found.rglob("*damaged*")), "a good one was called damaged")
        check(not list(found.rglob("*.tmp")) and not list(found.rglob("*.old")), "something lies about")

    return kill_everywhere(home, stride, act, look)


def kill_phases(home: Path, scenario: str, keep: int, stride: int) -> tuple[int, list[str]]:
    """A resume in the offline phase, and one that goes on online: the next one ends like the run never killed."""
    config = TrainConfig(
        algo="dqn", env_id="CartPole-v1", output_dir=home / "whole", eval_every=0, log_every=50, total_updates=150,
        dataset=str(write_dataset(record("random", RecordConfig(env_id="CartPole-v1", steps=60)), home / "data.npz")),
        checkpoint_every=50, checkpoint_keep=keep, tensorboard=False, algorithm=OWN,
    )  # fmt: skip
    change: dict[str, Any] = {"online": True, "total_timesteps": 60} if scenario == "online" else {}
    config.output_dir.mkdir()
    train(config, progress=False)
    whole = only_run(config.output_dir)
    if scenario == "online":
        shutil.copytree(whole, home / "template" / whole.name)
        resume(whole, progress=False, **change)
    else:

        def crash(run: RunView) -> None:
            if run.position >= 100:
                raise Crash

        with contextlib.suppress(Crash):
            train(config.replace(output_dir=home / "template"), progress=False, callback=crash)
    run = only_run(home / "template")
    for place in (run, whole):
        (place / "evaluations.json").write_text("[]")

    def act(place: Path, arm: Callable[[], object]) -> None:
        shutil.copytree(run, place / "run")
        arm()
        resume(place / "run", progress=False, **change)

    def look(place: Path) -> None:
        found = place / "run"
        try:
            resume(found, progress=False, **change)
        except ConfigError as error:
            check("already been trained" in str(error), error)
        check(differences(found, whole) == [], differences(found, whole))
        names = [path.name for path in checkpoints_of(whole)]
        check(sorted(os.listdir(found / "checkpoints")) == sorted(names), os.listdir(found / "checkpoints"))
        check(not list(found.rglob("*.tmp")) and not list(found.rglob("*.old")), "something lies about")

    return kill_everywhere(home, stride, act, look)


def main(directory: str, scenario: str, keep: str, how: str, stride: str) -> None:
    home = Path(directory)
    replay_buffer.SEGMENT_BYTES = 24 * 8
    compiler.find_compiler = metadata.find_compiler = lambda: None  # type: ignore[assignment] # no thread besides
    metadata.git_commit()  # once, for all children
    os.fsync = lambda descriptor: None  # type: ignore[assignment] # no power cut here
    if how == "renames":
        checkpointing.swap = lambda one, other: False
    if scenario == "save":
        found = kill_agent_saves(home, int(stride))
    elif scenario in ("offline", "online"):
        found = kill_phases(home, scenario, int(keep), int(stride))
    else:
        found = kill_resumes(home, scenario, int(keep), int(stride))
    print(json.dumps({"operations": found[0], "failures": found[1]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
