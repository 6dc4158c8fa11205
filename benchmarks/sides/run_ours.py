"""This package: a run with a run directory, metrics, TensorBoard, checkpoints and checks at their defaults."""

from __future__ import annotations

import tempfile
from typing import Any

from clock import Clock, run
from tasks import Task


def config_of(task: Task, threads: int, directory: str) -> dict[str, Any]:
    """The config of a run."""
    sizes = list(task.sizes)  # after the encoder, if observations are images
    network: dict[str, Any] = {"actor_sizes": sizes, "critic_sizes": sizes, "activation": task.activation}
    if task.algo == "dqn":
        network = {"sizes": sizes, "activation": task.activation}
    elif task.atari:
        network["shared"] = True
    return {
        "algo": task.algo,
        "env_id": task.env_id,
        "num_envs": task.num_envs,
        "total_timesteps": task.steps,
        "eval_every": 0,  # the peers do not evaluate by default
        "num_threads": threads or None,
        "output_dir": directory,
        "algorithm": {**task.settings, "network": network},
    }


def side(task: Task, threads: int, clock: Clock) -> None:
    from rl_training.api.session import train
    from rl_training.experiment.config import Layer, resolve

    clock.mark("imported")
    clock.await_first_step(task.env_id)

    def watch(run: Any) -> None:
        if run.env_steps >= task.start and clock.threads is None:
            import torch  # not before rl_training, which sets up its threads

            clock.threads = torch.get_num_threads()
            clock.mark("start")

    with tempfile.TemporaryDirectory() as directory:
        config = resolve([Layer(config_of(task, threads, directory), "benchmark")])
        train(config, callback=watch, progress=False)
        clock.mark("end")


if __name__ == "__main__":
    run(side, ("rl-training", "torch", "gymnasium", "numpy"))
