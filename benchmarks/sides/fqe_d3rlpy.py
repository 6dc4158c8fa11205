"""Fitted Q evaluation with d3rlpy, of a policy whose weights come from a file."""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version

import d3rlpy
import numpy as np
import offline_d3rlpy
import offline_tasks as tasks
import torch

LEARNING_RATE = 3e-4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--policy", required=True)
    parser.add_argument("--updates", type=int, default=5_000)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spawned", type=float, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    d3rlpy.seed(args.seed)
    dataset = offline_d3rlpy.load(tasks.read_columns(args.file), half_width=2.0)
    weights = tasks.read_columns(args.policy)
    count = sum(name.startswith("weight") for name in weights)
    sizes = [len(weights[f"weight{i}"]) for i in range(count - 1)]
    encoder = d3rlpy.models.VectorEncoderFactory(sizes)
    algo = d3rlpy.algos.TD3Config(actor_encoder_factory=encoder).create(device="cpu:0")
    algo.build_with_dataset(dataset)
    linears = [part for part in algo.impl.policy.modules() if isinstance(part, torch.nn.Linear)]
    assert len(linears) == count
    with torch.no_grad():
        for i, layer in enumerate(linears):
            layer.weight.copy_(torch.from_numpy(weights[f"weight{i}"]))
            layer.bias.copy_(torch.from_numpy(weights[f"bias{i}"]))
    assert np.allclose(algo.predict(weights["obs"]), weights["action"], atol=1e-5), "not the same policy"
    config = d3rlpy.ope.FQEConfig(
        learning_rate=LEARNING_RATE,
        encoder_factory=d3rlpy.models.VectorEncoderFactory(list(tasks.SIZES)),
        batch_size=tasks.BATCH_SIZE,
        gamma=args.gamma,
    )
    fqe = d3rlpy.ope.FQE(algo=algo, config=config)
    fqe.build_with_dataset(dataset)
    began = time.perf_counter()
    for _ in range(args.updates):
        fqe.update(dataset.sample_transition_batch(tasks.BATCH_SIZE))
    seconds = time.perf_counter() - began
    first = np.stack([episode.observations[0] for episode in dataset.episodes])
    value = float(np.mean(fqe.predict_value(first, algo.predict(first))))
    tasks.report(value=value, seconds=seconds, num_episodes=len(first), version=version("d3rlpy"))


if __name__ == "__main__":
    main()
