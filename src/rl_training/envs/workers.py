"""Environments in worker processes that never hang, outlive the run or end it without an error message.

Extends Gymnasium's `AsyncVectorEnv` with what long runs need: a worker that dies or hangs is reported by its number
within a time limit, errors show the worker's traceback, only the main process handles Ctrl-C and SIGTERM, workers exit
when the main process is gone, and snapshots can be taken and restored.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from rl_training.contracts.errors import EnvError
from rl_training.envs.advice import advice
from rl_training.envs.encoding import SnapshotError
from rl_training.envs.snapshot import restore_snapshot, take_snapshot

CLOSE_SECONDS = 5.0
WATCH_SECONDS = 0.5
"""Interval at which a worker checks that the main process still exists."""
START_ATTEMPTS = 2
"""A process forked from one with many threads may die at its start; seen once in tens of thousands."""
T = TypeVar("T")


class WorkerVectorEnv(AsyncVectorEnv[Any, Any]):
    """One process per environment, observations through shared memory."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        timeout: float,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
    ) -> None:
        self.timeout = timeout
        self.processes = []
        main_process = os.getpid()
        guarded = [lambda fn=fn: _make_in_worker(fn, main_process) for fn in env_fns]
        for attempt in range(START_ATTEMPTS):
            try:
                super().__init__(guarded, autoreset_mode=autoreset_mode)
                # at the end of a program, multiprocessing sends SIGTERM, which workers ignore, and waits for them
                Finalize(self, _kill, (self.processes,), exitpriority=0)
                return
            except (EOFError, OSError) as error:  # a worker exited before its first message
                self.close_extras()
                codes = [process.exitcode for process in self.processes]
                if attempt + 1 == START_ATTEMPTS:
                    raise EnvError(
                        f"an environment worker died while starting (exit codes {codes}): {error}"
                    ) from error
            except BaseException:
                _kill(self.processes)
                raise

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See `VectorEnv.reset`."""
        return self._ask(lambda: self.reset_async(seed=seed, options=options), self.reset_wait, "reset")

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """See `VectorEnv.step`."""
        return self._ask(lambda: self.step_async(actions), self.step_wait, "step")

    def take_snapshots(self) -> list[Any]:
        """One snapshot per environment; `SnapshotError` if one cannot be taken."""
        snapshots = list(self._ask(lambda: self.call_async("snapshot"), self.call_wait, "snapshot"))
        for refusal in snapshots:
            if isinstance(refusal, str):
                raise SnapshotError(refusal)
        return snapshots

    def restore_snapshots(self, snapshots: list[Any]) -> None:
        """Restore every environment."""

        def send() -> None:
            for pipe, snapshot in zip(self.parent_pipes, snapshots, strict=True):
                pipe.send(("_setattr", ("snapshot", snapshot)))

        def receive() -> None:
            self._raise_if_errors([pipe.recv()[1] for pipe in self.parent_pipes])

        self._ask(send, receive, "restore")

    def _ask(self, send: Callable[[], None], receive: Callable[[], T], doing: str) -> T:
        """Send a request to all workers and receive every answer; an `EnvError` if one dies or times out."""
        try:
            send()
            self._await_answers(doing)
            return receive()
        except (EOFError, OSError) as error:  # the other end of a pipe is gone
            self._refuse_dead(doing)
            raise EnvError(f"an environment worker cannot be reached during {doing}: {error}") from error

    def _await_answers(self, doing: str) -> None:
        waiting = dict(zip(self.parent_pipes, range(self.num_envs), strict=True))
        deadline = time.monotonic() + self.timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                numbers = ", ".join(str(number) for number in sorted(waiting.values()))
                raise EnvError(
                    f"environment worker {numbers} did not answer {doing} within {self.timeout:g} s (env_timeout): "
                    "it hangs or is too slow"
                )
            for pipe in ready:
                del waiting[pipe]  # type: ignore[arg-type]

    def _refuse_dead(self, doing: str) -> None:
        for number, process in enumerate(self.processes):
            process.join(timeout=0.5)
            if not process.is_alive():
                raise EnvError(f"environment worker {number} died during {doing} (exit code {process.exitcode})")

    def _raise_if_errors(self, successes: Any) -> None:
        """Raise an error with the worker's traceback as text: its exception may not be constructible here."""
        if all(successes):
            return
        number, kind, value, trace = self.error_queue.get(timeout=CLOSE_SECONDS)
        hint = advice(str(value), "reset" if "reset" in trace else "step")
        raise EnvError(f"environment worker {number} raised {kind.__name__}: {value}{hint}\n\n{trace}")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask workers to close, wait a little, then kill those that did not."""
        for pipe, process in zip(self.parent_pipes, self.processes, strict=True):
            if process.is_alive():
                try:
                    pipe.send(("close", None))
                except OSError:
                    continue
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.parent_pipes:
            pipe.close()
        self.error_queue.close()
        self.error_queue.cancel_join_thread()


class _WorkerEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Outermost wrapper inside a worker: lets `call` and `set_attr` carry snapshots."""

    @property
    def snapshot(self) -> list[dict[str, Any]] | str:
        """The state, or why it cannot be taken (a refusal must not end the worker)."""
        try:
            return take_snapshot(self.env)
        except SnapshotError as error:
            return str(error)
        except Exception as error:  # an environment's own get_state
            return f"taking a snapshot raised {type(error).__name__}: {error}"

    @snapshot.setter
    def snapshot(self, value: list[dict[str, Any]]) -> None:
        restore_snapshot(self.env, value)


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()


def _make_in_worker(make: Callable[[], gym.Env[Any, Any]], main_process: int) -> gym.Env[Any, Any]:
    """Create an environment; in a worker, leave signals to the main process and exit when it is gone.

    SIGTERM gets an empty handler instead of SIG_IGN, which programs that the environment starts would inherit.
    """
    if os.getpid() != main_process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _pass_over)
        threading.Thread(target=_end_with, args=(main_process,), daemon=True).start()
    return _WorkerEnv(make())


def _pass_over(number: int, frame: types.FrameType | None) -> None:
    """Do nothing: a process group's SIGTERM reaches the main process too, which saves and closes its workers."""


def _end_with(main_process: int) -> None:
    """Exit when the main process is gone; polls, because sibling workers keep each other's pipes open."""
    while os.getppid() == main_process:
        time.sleep(WATCH_SECONDS)
    os._exit(1)
