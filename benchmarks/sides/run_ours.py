"""This package: a run with a run directory, metrics, TensorBoard, checkpoints and checks at their defaults."""

from __future__ import annotations

import tempfile
from typing import Any

from clock import Clock, run
from tasks import Task


def config_of(task: Task, threads: int, directory: str) -> dict[str, Any]:
    sizes = [] if task.atari else list(task.sizes)  # the encoder of images brings its own
    network: dict[str, Any] = {"actor_sizes": sizes, "critic_sizes": sizes}
    if task.algo == "dqn":
        network = {"sizes": sizes}
    elif task.atari:
        network["shared"] = True
    return {
        "algo": task.algo,
        "env_id": task.env_id,
        "num_envs": task.num_envs,
        "total_timesteps": task.steps,
        "eval_every": 0,  # the peers do not evaluate unless they are told to
        "num_threads": threads or None,
        "output_dir": directory,
        "algorithm": {**task.settings, "network": network},
    }


def side(task: Task, threads: int, clock: Clock) -> None:
    from rl_training.experiment.config import Layer, resolve
    from rl_training.experiment.session import train

    clock.mark("imported")

    def watch(run: Any) -> None:
        if run.env_steps >= task.start:
            clock.mark("start")

    with tempfile.TemporaryDirectory() as directory:
        train(resolve([Layer(config_of(task, threads, directory), "benchmark")]), callback=watch, progress=False)


if __name__ == "__main__":
    run(side, ("rl-training", "torch", "gymnasium", "numpy"))
