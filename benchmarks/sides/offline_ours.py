"""This package: one algorithm on one dataset, or the speed of its updates."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import offline_tasks as tasks
import torch

from rl_training import Agent, __version__, make_agent
from rl_training.algorithms.registry import get_spec

RATES = {"learning_rate": 0, "actor_learning_rate": 0, "critic_learning_rate": 1, "imitator_learning_rate": 1}
"""Settings that are learning rates, by the entry of `LEARNING_RATES` that they take."""
SIZES = ("sizes", "actor_sizes", "critic_sizes", "value_sizes", "imitator_sizes")


def settings(algo: str, discrete: bool) -> dict[str, Any]:
    """The shared settings, of those that the algorithm has; the others are its defaults."""
    config = get_spec(algo).config()
    known = {field.name for field in dataclasses.fields(config)}
    rates = tasks.LEARNING_RATES[algo]
    wanted: dict[str, Any] = {"batch_size": tasks.BATCH_SIZE, "gamma": tasks.GAMMA}
    wanted |= {name: rates[1 if discrete else place] for name, place in RATES.items()}
    network = {field.name for field in dataclasses.fields(config.network)} if "network" in known else set()  # type: ignore[attr-defined]
    wanted["network"] = {name: tasks.SIZES for name in SIZES if name in network}
    return {name: value for name, value in wanted.items() if name in known}


def main() -> None:
    args = tasks.arguments()
    discrete = tasks.discrete(tasks.read_columns(args.file)["actions"])
    common = {"seed": args.seed, "eval_every": 0, "num_threads": 1, **settings(args.algo, discrete)}
    about = {"version": __version__, "torch": torch.__version__}
    if args.dataset == "speed":
        agent: Agent = make_agent(args.algo, dataset=str(args.file), **common)

        def update(count: int) -> None:
            agent.learn_offline(total_updates=count, progress=False)

        tasks.report(updates_per_second=tasks.timed(update, args.warmup, args.updates), **about)
        return
    data = tasks.DATASETS[args.dataset]
    agent = make_agent(args.algo, data.env_id, **common)
    began = time.perf_counter()
    agent.learn_offline(args.file, args.updates, progress=False)
    seconds = time.perf_counter() - began
    returns = tasks.evaluate(data, lambda obs: agent.predict(obs)[0])
    tasks.report(returns=returns, mean=float(np.mean(returns)), seconds=seconds, updates=args.updates, **about)


if __name__ == "__main__":
    main()
