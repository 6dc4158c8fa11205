"""d3rlpy: one algorithm on one dataset, or the speed of its updates."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import d3rlpy
import numpy as np
import offline_tasks as tasks
import torch
from d3rlpy.algos import qlearning

BOX = {
    "bc": "BCConfig",
    "awac": "AWACConfig",
    "iql": "IQLConfig",
    "cql": "CQLConfig",
    "cal_ql": "CalQLConfig",
    "td3_bc": "TD3PlusBCConfig",
    "rebrac": "ReBRACConfig",
    "bcq": "BCQConfig",
    "bear": "BEARConfig",
    "crr": "CRRConfig",
}
DISCRETE = {"bc": "DiscreteBCConfig", "cql": "DiscreteCQLConfig", "bcq": "DiscreteBCQConfig"}
"""The discrete variants that there are."""


def make(algo: str, discrete: bool, updates: int) -> Any:
    """The algorithm with the shared settings; the others are d3rlpy's defaults."""
    names = DISCRETE if discrete else BOX
    if algo not in names:
        raise SystemExit(f"d3rlpy {version('d3rlpy')} has no {algo} for {'Discrete' if discrete else 'Box'} actions")
    config_class = getattr(qlearning, names[algo])
    known = config_class.__dataclass_fields__
    actor, critic = tasks.LEARNING_RATES[algo]
    encoder = d3rlpy.models.VectorEncoderFactory(list(tasks.SIZES))
    wanted = {
        "batch_size": tasks.BATCH_SIZE,
        "gamma": tasks.GAMMA,
        "learning_rate": critic,
        "actor_learning_rate": actor,
        "critic_learning_rate": critic,
        "imitator_learning_rate": critic,
        "encoder_factory": encoder,
        "actor_encoder_factory": encoder,
        "critic_encoder_factory": encoder,
        "value_encoder_factory": encoder,
        "imitator_encoder_factory": encoder,
        "warmup_steps": min(40_000, updates // 5),
    }
    if algo == "rebrac":  # its defaults have layer norm, as its paper
        layers = d3rlpy.models.VectorEncoderFactory(list(tasks.SIZES), use_layer_norm=True)
        wanted["critic_encoder_factory"] = layers
    return config_class(**{name: value for name, value in wanted.items() if name in known}).create(device="cpu:0")


def load(columns: dict[str, np.ndarray[Any, Any]], half_width: float) -> Any:
    """The data, with actions in [-1, 1], where d3rlpy's policies act."""
    actions = columns["actions"]
    if tasks.discrete(actions):
        actions = actions.reshape(-1, 1)
    else:
        actions = (actions.reshape(len(actions), -1) / half_width).astype(np.float32)
    return d3rlpy.dataset.MDPDataset(
        columns["observations"].astype(np.float32),
        actions,
        columns["rewards"].astype(np.float32),
        columns["terminations"].astype(np.float32),
        columns["truncations"].astype(np.float32),
    )


def main() -> None:
    args = tasks.arguments()
    torch.set_num_threads(1)
    d3rlpy.seed(args.seed)
    columns = tasks.read_columns(args.file)
    discrete = tasks.discrete(columns["actions"])
    half_width = 2.0 if "pendulum" in args.dataset else 1.0
    dataset = load(columns, half_width)
    algo = make(args.algo, discrete, args.updates)
    algo.build_with_dataset(dataset)

    def update(count: int) -> None:
        for _ in range(count):
            algo.update(dataset.sample_transition_batch(tasks.BATCH_SIZE))

    about = {"version": version("d3rlpy"), "torch": torch.__version__, "gymnasium": version("gymnasium")}
    if args.dataset == "speed":
        tasks.report(updates_per_second=tasks.timed(update, args.warmup, args.updates), **about)
        return
    began = time.perf_counter()
    update(args.updates)
    seconds = time.perf_counter() - began

    def act(obs: np.ndarray[Any, Any]) -> Any:
        action = algo.predict(obs[None])[0]
        return int(action) if discrete else action * half_width

    returns = tasks.evaluate(tasks.DATASETS[args.dataset], act)
    tasks.report(returns=returns, mean=float(np.mean(returns)), seconds=seconds, updates=args.updates, **about)


if __name__ == "__main__":
    main()
