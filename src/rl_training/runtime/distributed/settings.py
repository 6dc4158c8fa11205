"""Settings of the workers that collect experience."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_training.contracts.settings import documented, setting

BackendName = Literal["inline", "process", "ray"]
Mode = Literal["sync", "pipelined", "async"]


@documented
@dataclass
class WorkersConfig:
    """Where experience is collected. Results depend on count, envs_per_worker and mode, never on the backend."""

    count: int = setting(0, "Number of workers; 0 to collect in the training process itself.", ge=0)
    envs_per_worker: int | None = setting(
        None, "Environments of each worker (num_envs becomes count times this); none to divide num_envs.", ge=1
    )
    backend: BackendName = setting(
        "process",
        "Where workers run: process (on this machine), ray (on a Ray cluster), inline (one after another in the "
        "training process, for debugging).",
    )
    mode: Mode = setting(
        "sync",
        "sync (collect, then learn), pipelined (collect with the weights before the last update, while learning), or "
        "async (nobody waits; results are not repeatable).",
    )
    max_lag: int = setting(
        4, "async: updates by which the weights of a rollout may be out of date; older rollouts are dropped.", ge=0
    )
    address: str | None = setting(
        None, "ray: address of the cluster, 'auto' for the one this machine belongs to; none to start one here."
    )
