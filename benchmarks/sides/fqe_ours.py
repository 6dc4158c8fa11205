"""Fitted Q evaluation with this package, and what the other side and the truth need."""

from __future__ import annotations

import argparse
import time

import numpy as np
import offline_tasks as tasks
import torch

from rl_training import Agent, load
from rl_training.data.dataset import read_dataset

POLICY, ENV = "zoo:td3/Pendulum-v1", "Pendulum-v1"
NUM_EPISODES = 100


def export(agent: Agent, path: str) -> None:
    """Write the actor's linear layers, and actions on random observations to check a copy with."""
    linears = [part for part in agent.policy.actor.modules() if isinstance(part, torch.nn.Linear)]  # type: ignore[attr-defined]
    arrays = {f"weight{i}": layer.weight.detach().numpy() for i, layer in enumerate(linears)}
    arrays |= {f"bias{i}": layer.bias.detach().numpy() for i, layer in enumerate(linears)}
    obs = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    np.savez(path, obs=obs, action=agent.predict(obs)[0] / 2.0, **arrays)


def true_value(agent: Agent, gamma: float) -> tuple[float, float]:
    """Mean discounted return in the environment and its standard error; 200 steps are nearly all of it."""
    import gymnasium as gym

    env, returns = gym.make(ENV), []
    for episode in range(NUM_EPISODES):
        obs, _ = env.reset(seed=tasks.FIRST_SEED + episode)
        total, discount, ended = 0.0, 1.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(agent.predict(obs)[0])
            total, discount, ended = total + discount * float(reward), discount * gamma, terminated or truncated
        returns.append(total)
    return float(np.mean(returns)), float(np.std(returns) / NUM_EPISODES**0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--export", default=None, help="only write the policy to this file, and print its true value")
    parser.add_argument("--updates", type=int, default=5_000)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spawned", type=float, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    agent = load(POLICY)
    if args.export is not None:
        export(agent, args.export)
        mean, error = true_value(agent, args.gamma)
        tasks.report(value=mean, standard_error=error, episodes=NUM_EPISODES)
        return
    data = read_dataset(args.file, env=agent.spec)
    began = time.perf_counter()
    found = agent.estimate_value(
        data,
        gamma=args.gamma,
        seed=args.seed,
        num_updates=args.updates,
        num_critics=1,
        sizes=tasks.SIZES,
        batch_size=tasks.BATCH_SIZE,
    )
    tasks.report(**found.as_dict(), seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main()
