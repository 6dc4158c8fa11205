"""SBX (Stable-Baselines3 on JAX)."""

from __future__ import annotations

import os
from typing import Any

from clock import Clock, run
from run_sb3 import arguments, watcher
from tasks import Task

LEFT_OUT = {"dqn": ("max_grad_norm",)}
"""Arguments that SBX does not support: its DQN does not clip gradients, which is slightly less work."""


def limit_threads(threads: int) -> None:
    """Set the size of XLA's thread pool before JAX is imported; there is no flag for it."""
    os.environ["NPROC"] = os.environ["PJRT_NPROC"] = str(threads)
    if threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"


def side(task: Task, threads: int, clock: Clock) -> None:
    if threads:
        limit_threads(threads)
    import flax.linen as nn
    import sbx
    import torch
    from stable_baselines3.common.env_util import make_vec_env

    clock.mark("imported")
    if threads:
        torch.set_num_threads(threads)
    clock.await_first_step(task.env_id)
    env = make_vec_env(task.env_id, n_envs=task.num_envs, seed=0)
    classes: dict[str, Any] = {
        "ppo": sbx.PPO,
        "dqn": sbx.DQN,
        "sac": sbx.SAC,
        "td3": sbx.TD3,
        "tqc": sbx.TQC,
        "crossq": sbx.CrossQ,
    }
    policy, kwargs = arguments(task, {"tanh": nn.tanh, "relu": nn.relu}, LEFT_OUT.get(task.algo, ()))
    classes[task.algo](policy, env, **kwargs).learn(task.steps, callback=watcher(task, clock))
    clock.mark("end")


if __name__ == "__main__":
    run(side, ("sbx-rl", "jax", "gymnasium", "numpy"))
