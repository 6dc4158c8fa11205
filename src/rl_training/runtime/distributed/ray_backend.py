"""Workers as actors of a Ray cluster (Ray Core only); nothing else in the package imports ray."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from rl_training.contracts.errors import EnvError, MissingExtraError
from rl_training.runtime.distributed.backends import WorkerLostError, answering, find
from rl_training.runtime.distributed.messages import Message, pack, unpack
from rl_training.runtime.distributed.settings import WorkersConfig
from rl_training.runtime.distributed.worker import RolloutWorker

NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for the use of the network (on every system): with it, 127.0.0.1 becomes a public address."""
ATTEMPTS = "1"
"""How often to call a cluster that does not answer. One attempt takes 40 s, and Ray itself makes 20."""
QUIET = {"log_to_driver": False, "configure_logging": False}


class _Host:
    """The actor: a worker that takes and gives bytes."""

    def __init__(self, build: str, setup: bytes) -> None:
        self.build, self.setup = build, setup
        self.worker: RolloutWorker | None = None

    def begin(self, index: int) -> bytes:
        """Build the worker."""

        def built() -> Message:
            torch.set_num_threads(1)
            self.worker = find(self.build)(unpack(self.setup), index)
            return {"obstacle": self.worker.obstacle}

        return pack(answering(built))

    def run(self, order: bytes, acting: bytes | None) -> bytes:
        """Carry out an order."""
        assert self.worker is not None
        return pack(answering(self.worker.run, {**unpack(order), "acting": acting and unpack(acting)}))


class RayBackend:
    """One actor for each worker; orders are method calls, and weights go into the object store once per version.

    Rollouts are returned by value: an object that a worker had put into the store would be lost with its node.
    """

    can_lose_workers = True

    def __init__(self, build: str, setup: Message, settings: WorkersConfig) -> None:
        if find_spec("ray") is None:
            raise MissingExtraError("workers.backend ray", "ray")
        import ray

        self.ray, self.build, self.setup = ray, build, pack(setup)
        address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
        self.connected_here = not ray.is_initialized()
        self.started_here = self.connected_here and address == "local"
        self.actors: dict[int, Any] = {}
        self.calls: dict[Any, int] = {}
        """Answers that are owed, and by which worker."""
        self.packed: tuple[Message | None, Any] = (None, None)
        if self.connected_here:
            try:
                with _undisturbed():
                    if self.started_here:
                        _start(ray, settings.count)
                    else:
                        _join(ray, address)
            except BaseException:
                self.stop()
                raise
        self.host = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Host)

    def start(self, index: int) -> None:
        """See `Backend.start`."""
        if index in self.actors:
            self._forget(index)
        self.actors[index] = self.host.remote(self.build, self.setup)
        self.calls[self.actors[index].begin.remote(index)] = index

    def submit(self, index: int, order: Message, acting: Message | None) -> None:
        """See `Backend.submit`."""
        weights = None
        if acting is not None:
            if self.packed[0] is not acting:
                self.packed = acting, self.ray.put(pack(acting))
            weights = self.packed[1]
        self.calls[self.actors[index].run.remote(pack(order), weights)] = index

    def next(self, timeout: float) -> tuple[int, Message] | None:
        """See `Backend.next`."""
        if not self.calls:
            time.sleep(max(timeout, 0.0))
            return None
        ready, _ = self.ray.wait(list(self.calls), num_returns=1, timeout=max(timeout, 0.0))
        if not ready:
            return None
        index = self.calls.pop(ready[0])
        try:
            found: bytes = self.ray.get(ready[0])
        except self.ray.exceptions.RayError as error:
            self._forget(index)
            raise WorkerLostError(index, f"is gone ({type(error).__name__})") from error
        return index, {**unpack(found), "num_bytes": len(found)}

    def _forget(self, index: int) -> None:
        self.calls = {call: owner for call, owner in self.calls.items() if owner != index}
        actor = self.actors.pop(index, None)
        if actor is not None:
            self.ray.kill(actor)

    def stop(self) -> None:
        """See `Backend.stop`."""
        for index in list(self.actors):
            self._forget(index)
        if self.connected_here:
            self.ray.shutdown()
        if self.started_here:
            _reread_settings()


def _start(ray: Any, num_cpus: int) -> None:
    """Start a Ray that only this machine can reach, and only with a token that only its processes know."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault(NETWORK, "0")
    _reread_settings()
    try:
        ray.init(address="local", _node_ip_address="127.0.0.1", num_cpus=num_cpus, include_dashboard=False, **QUIET)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise EnvError(
            f"workers.backend ray: Ray could not be started on this machine: {error}. Name a running cluster in "
            "workers.address, or use workers.backend process"
        ) from error


def _join(ray: Any, address: str) -> None:
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", ATTEMPTS)
    try:
        ray.init(address=address, **QUIET)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise EnvError(
            f"workers.address: no Ray cluster could be reached at {address!r}: {error}. Start one with "
            "`ray start --head`, or leave the address out (and RAY_ADDRESS unset) to start one on this machine"
        ) from error


def _reread_settings() -> None:
    """Let Ray read its variables again: it did when it was imported, and keeps what it found, also the token."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(NETWORK, sys.platform == "linux")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the variables and the SIGTERM handler of this process as they are; starting Ray changes both."""
    variables, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        for name in {name for name, value in os.environ.items() if variables.get(name) != value}:
            del os.environ[name]
        os.environ.update({name: value for name, value in variables.items() if name not in os.environ})
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
