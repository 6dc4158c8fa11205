"""Workers as actors of a Ray cluster (Ray Core only); nothing else in the package imports ray."""

from __future__ import annotations

import os
import secrets
import time
from importlib.util import find_spec
from typing import Any

from rl_training.contracts.errors import EnvError, MissingExtraError
from rl_training.runtime.distributed.backends import WorkerLostError, answering, find
from rl_training.runtime.distributed.messages import Message, pack, unpack
from rl_training.runtime.distributed.settings import WorkersConfig
from rl_training.runtime.distributed.worker import RolloutWorker


class _Host:
    """The actor: a worker that takes and gives bytes."""

    def __init__(self, build: str, setup: bytes) -> None:
        self.build, self.setup = build, setup
        self.worker: RolloutWorker | None = None

    def begin(self, index: int) -> bytes:
        """Build the worker."""

        def built() -> Message:
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
        self.started_here = not ray.is_initialized()
        if self.started_here:
            _connect(ray, settings.address)
        self.host = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Host)
        self.actors: dict[int, Any] = {}
        self.calls: dict[Any, int] = {}
        """Answers that are owed, and by which worker."""
        self.packed: tuple[Message | None, Any] = (None, None)

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
        if self.started_here:
            self.ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    """Join the cluster, or start one that only this machine can reach."""
    common = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    try:
        if address is None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            ray.init(_node_ip_address="127.0.0.1", runtime_env={"env_vars": variables}, **common)
        else:
            del common["include_dashboard"]
            ray.init(address=address, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}, **common)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EnvError(
            f"workers.address: no Ray cluster could be reached at {address!r}: {error}. Start one with "
            "`ray start --head`, or leave the address out to start one on this machine"
        ) from error
