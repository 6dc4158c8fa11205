"""SBX (Stable-Baselines3 on JAX)."""

from __future__ import annotations

import os
from typing import Any

from clock import Clock, run
from run_sb3 import arguments
from tasks import Task


def side(task: Task, threads: int, clock: Clock) -> None:
    if threads == 1:  # XLA has no other switch for it
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import sbx
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    clock.mark("imported")
    if threads:
        torch.set_num_threads(threads)

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps > task.start:
                clock.mark("start")
            return True

    env = make_vec_env(task.env_id, n_envs=task.num_envs, seed=0)
    classes: dict[str, Any] = {"ppo": sbx.PPO, "dqn": sbx.DQN, "sac": sbx.SAC, "td3": sbx.TD3}
    policy, kwargs = arguments(task)
    classes[task.algo](policy, env, **kwargs).learn(task.steps, callback=Watch())


if __name__ == "__main__":
    run(side, ("sbx-rl", "jax", "gymnasium", "numpy"))
