"""Where workers run: the interface, workers in this process, and workers in processes of their own."""

from __future__ import annotations

import importlib
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from rl_training.runtime.distributed.messages import Message, pack, unpack
from rl_training.runtime.distributed.settings import WorkersConfig
from rl_training.runtime.distributed.worker import RolloutWorker

GRACE_SECONDS = 5.0
"""Time for workers to close their environments before they are killed."""
BuildWorker = Callable[[Message, int], RolloutWorker]


class WorkerLostError(Exception):
    """A worker that is gone; its request may be made again once it was started anew."""

    def __init__(self, index: int, reason: str) -> None:
        self.index = index
        super().__init__(reason)


class Backend(Protocol):
    """Starts workers and carries messages. The first message of a worker is `obstacle`, or `error`."""

    can_lose_workers: bool

    def start(self, index: int) -> None:
        """Start a worker; one that has this number is ended first."""
        ...

    def submit(self, index: int, order: Message, acting: Message | None) -> None:
        """Give a worker an order, with the weights to act with and their version."""
        ...

    def next(self, timeout: float) -> tuple[int, Message] | None:
        """The next message of any worker; None if there is none within the time limit.

        Raises:
            WorkerLostError: a worker is gone.
        """
        ...

    def stop(self) -> None:
        """End all workers."""
        ...


def find(name: str) -> BuildWorker:
    """The function that builds workers, by `module:function`."""
    module, _, function = name.partition(":")
    build: BuildWorker = getattr(importlib.import_module(module), function)
    return build


def make_backend(settings: WorkersConfig, build: str, setup: Message) -> Backend:
    """The backend that the settings name; `build` is the function that builds a worker from `setup`."""
    if settings.backend == "inline":
        return InlineBackend(build, setup)
    if settings.backend == "process":
        return ProcessBackend(build, setup)
    from rl_training.runtime.distributed.ray_backend import RayBackend

    return RayBackend(build, setup, settings)


class InlineBackend:
    """Workers in this process, one after another: an order is carried out when it is submitted."""

    can_lose_workers = False

    def __init__(self, build: str, setup: Message) -> None:
        self.build, self.setup = find(build), setup
        self.workers: dict[int, RolloutWorker] = {}
        self.answers: deque[tuple[int, Message]] = deque()

    def start(self, index: int) -> None:
        """See `Backend.start`."""
        self.workers[index] = self.build(self.setup, index)
        self.answers.append((index, {"obstacle": self.workers[index].obstacle}))

    def submit(self, index: int, order: Message, acting: Message | None) -> None:
        """See `Backend.submit`."""
        self.answers.append((index, self.workers[index].run({**order, "acting": acting})))

    def next(self, timeout: float) -> tuple[int, Message] | None:
        """See `Backend.next`."""
        return self.answers.popleft() if self.answers else None

    def stop(self) -> None:
        """See `Backend.stop`."""
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()


class ProcessBackend:
    """Workers in processes of their own, each at a pipe that a thread reads and writes.

    The processes are started as new programs: nothing is inherited, and scripts need no main guard. The threads keep
    the training process from waiting for a worker that hangs with a full pipe.
    """

    can_lose_workers = True

    def __init__(self, build: str, setup: Message) -> None:
        self.setup = {**setup, "build": build, "path": [entry for entry in sys.path if isinstance(entry, str)]}
        self.arrived: queue.SimpleQueue[tuple[_Line, bytes | WorkerLostError]] = queue.SimpleQueue()
        self.lines: dict[int, _Line] = {}
        self.packed: tuple[Message | None, bytes] = (None, b"")
        """The last weights that were sent; they are the same for all workers."""

    def start(self, index: int) -> None:
        """See `Backend.start`."""
        if index in self.lines:
            self.lines.pop(index).end(0.0)
        self.lines[index] = _Line(index, self.arrived)
        self.lines[index].orders.put(pack({**self.setup, "index": index}))

    def submit(self, index: int, order: Message, acting: Message | None) -> None:
        """See `Backend.submit`."""
        if acting is not None and self.packed[0] is not acting:
            self.packed = acting, pack(acting)
        self.lines[index].orders.put(pack({**order, "has_weights": acting is not None}))
        if acting is not None:
            self.lines[index].orders.put(self.packed[1])

    def next(self, timeout: float) -> tuple[int, Message] | None:
        """See `Backend.next`."""
        while True:
            try:
                line, found = self.arrived.get(timeout=max(0.0, timeout))
            except queue.Empty:
                return None
            if self.lines.get(line.index) is not line:  # of a worker that was replaced
                continue
            if isinstance(found, WorkerLostError):
                raise found
            return line.index, {**unpack(found), "num_bytes": len(found)}

    def stop(self) -> None:
        """See `Backend.stop`."""
        lines, self.lines = list(self.lines.values()), {}
        for line in lines:
            line.orders.put(None)
        for line in lines:
            line.end(GRACE_SECONDS)


class _Line:
    """The process of one worker, and the thread that talks to it."""

    def __init__(self, index: int, arrived: queue.SimpleQueue[tuple[_Line, bytes | WorkerLostError]]) -> None:
        self.index, self.arrived = index, arrived
        self.orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-m", "rl_training.runtime.distributed.host", str(theirs.fileno()), str(os.getpid())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()

    def _write(self) -> None:
        while (order := self.orders.get()) is not None:
            try:
                self.pipe.send_bytes(order)
            except (OSError, ValueError):  # the reader reports it
                return
        close_quietly(self.pipe.send_bytes, b"")

    def _read(self) -> None:
        try:
            while True:
                self.arrived.put((self, self.pipe.recv_bytes()))
        except (EOFError, OSError, ValueError, TypeError):
            code: Any = None
            try:
                code = self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
            self.arrived.put((self, WorkerLostError(self.index, f"died (exit code {code})")))

    def end(self, seconds: float) -> None:
        """End the process: it has so long to do that itself."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.orders.put(None)
        close_quietly(self.pipe.close)


def close_quietly(call: Callable[..., Any], *given: Any) -> None:
    """Call something at the end of a worker that may be gone already."""
    try:
        call(*given)
    except (OSError, ValueError):
        return


def serve(pipe: Connection) -> None:
    """A worker's life: build it, then carry out orders until an empty one comes, or the training process is gone."""
    setup = unpack(pipe.recv_bytes())
    sys.path[:] = setup["path"]
    worker: RolloutWorker | None = None

    def built(index: int) -> Message:
        nonlocal worker
        worker = find(setup["build"])(setup, index)
        return {"obstacle": worker.obstacle}

    pipe.send_bytes(pack(answering(built, setup["index"])))
    try:
        while worker is not None and (data := pipe.recv_bytes()):
            order = unpack(data)
            order["acting"] = unpack(pipe.recv_bytes()) if order["has_weights"] else None
            pipe.send_bytes(pack(answering(worker.run, order)))
    except (EOFError, OSError):
        pass
    if worker is not None:
        worker.close()


def answering(call: Callable[..., Message], *given: Any) -> Message:
    """What a call returns; an exception becomes a message, because its class may not exist on the other side."""
    try:
        return call(*given)
    except Exception as error:
        import traceback

        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
