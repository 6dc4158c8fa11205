"""IQL on recorded data in one file: the algorithm from top to bottom, in order of execution.

It imports nothing from rl_training. With equal seeds, settings and initial weights the package samples the same batches
and learns the same weights, up to rounding (tested in tests/parity/test_iql_reference.py), so this file can be read as
the package's specification. Equation numbers refer to

    [IQL]  Kostrikov et al. 2022, Offline Reinforcement Learning with Implicit Q-Learning, arXiv:2110.06169

The data is an npz file with the arrays observations, actions, rewards, next_observations, terminations and truncations,
one row per step, in order of time. Run it:

    python examples/iql_reference.py pendulum.npz --env-id Pendulum-v1
    python examples/iql_reference.py pendulum.npz --env-id Pendulum-v1 --total-updates 200 --eval-episodes 1
    python examples/iql_reference.py --help
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn


@dataclass
class Args:
    """IQL for flat Box observations and actions. The defaults are those of the paper for locomotion."""

    dataset: Annotated[str, tyro.conf.Positional]
    """The npz file."""
    env_id: str = "Pendulum-v1"
    """Gymnasium environment id, for the bounds of actions and for the evaluation."""
    seed: int = 0
    """Seed of every random number."""
    total_updates: int = 50_000
    """Gradient steps of every network."""
    batch_size: int = 256
    """Transitions per gradient step."""
    learning_rate: float = 3e-4
    """Adam's step size; the actor's falls to 0 along half a cosine wave."""
    gamma: float = 0.99
    """Discount."""
    tau: float = 0.005
    """Weight of the online parameters in each target network update."""
    expectile: float = 0.7
    """Expectile of the Q-values that V(s) learns."""
    inverse_temperature: float = 3.0
    """Beta: 0 is behaviour cloning."""
    max_weight: float = 100.0
    """Largest weight of an action."""
    scale_rewards: bool = True
    """Divide rewards by the range of the data's returns and multiply by 1000, as the paper does for locomotion."""
    eval_episodes: int = 10
    """Episodes of the evaluation at the end."""


def stream(seed: int, name: str) -> np.random.Generator:
    """A separate random generator for each use."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), 0])


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(num_inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(256, num_outputs))


def log_likelihood(actor: nn.Module, log_std: Tensor, obs: Tensor, action: Tensor) -> Tensor:
    """log pi(a | s), [B], of a normal distribution around tanh of the network's outputs."""
    log_std = log_std.clamp(-5.0, 2.0)
    z = (action - actor(obs).tanh()) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(dim=-1)


def read(args: Args, low: np.ndarray, high: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of the dataset; actions in [-1, 1], rewards scaled."""
    with np.load(args.dataset, allow_pickle=False) as file:
        D = {name: file[name] for name in file.files}
    factor = 1.0
    if args.scale_rewards:
        ends = np.flatnonzero(D["terminations"] | D["truncations"])
        ends = np.union1d(ends, len(D["rewards"]) - 1)  # the last episode may be unfinished
        returns = np.add.reduceat(D["rewards"].astype(np.float64), np.concatenate([[0], ends[:-1] + 1]))
        factor = 1000.0 / (returns.max() - returns.min())
    action = np.clip(D["actions"], low, high)
    return {
        "obs": D["observations"].astype(np.float32),
        "action": np.clip((action - low) / (0.5 * (high - low)) - 1.0, -1.0, 1.0).astype(np.float32),
        "reward": (D["rewards"].astype(np.float64) * factor).astype(np.float32),
        "next_obs": D["next_observations"].astype(np.float32),  # also the last observation of an episode
        "terminated": D["terminations"].astype(np.bool_),  # a truncated episode bootstraps from its last observation
    }


def train(
    args: Args,
    on_start: Callable[[dict[str, nn.Module]], None] | None = None,
    on_update: Callable[[dict[str, Tensor]], None] | None = None,
) -> dict[str, Any]:
    """Train, print progress, and return the final parameters and the evaluation's returns.

    `on_start` is called with the networks and may change their weights. `on_update` is called with every batch and its
    losses, after the gradient steps.
    """
    torch.set_num_threads(1)  # networks of this size are slower with more threads
    sample_rng = stream(args.seed, "dataset")
    torch.manual_seed(int(stream(args.seed, "algorithm").integers(2**63)))  # only for initial weights

    env = gym.make(args.env_id)
    low, high = env.action_space.low, env.action_space.high
    D = read(args, low, high)
    num_rows, num_inputs, A = len(D["reward"]), D["obs"].shape[1], D["action"].shape[1]

    # The policy pi: a network for the mean, and standard deviations that do not depend on the state. Two critics
    # Q(s, a), whose minimum reduces overestimated values; and V(s).
    actor, log_std = mlp(num_inputs, A), nn.Parameter(torch.zeros(A))
    q1, q2, v = mlp(num_inputs + A, 1), mlp(num_inputs + A, 1), mlp(num_inputs, 1)
    if on_start is not None:
        on_start({"actor": actor, "q1": q1, "q2": q2, "v": v})
    q1_target, q2_target = copy.deepcopy(q1), copy.deepcopy(q2)
    actor_optimizer = torch.optim.Adam([log_std, *actor.parameters()], lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=args.learning_rate)
    value_optimizer = torch.optim.Adam(v.parameters(), lr=args.learning_rate)

    for update in range(args.total_updates):
        # 1. A batch of recorded transitions, sampled with replacement.
        rows = sample_rng.integers(num_rows, size=args.batch_size)
        batch = {name: torch.from_numpy(column[rows]) for name, column in D.items()}
        obs, action = batch["obs"].float(), batch["action"]
        inputs = torch.cat([obs, action], dim=1)

        # 2. V(s): the expectile of Q(s, a) over the recorded actions ([IQL], eq. 5). An error counts `expectile` where
        #    V is too low and 1 - `expectile` where it is too high, so V is near the best recorded action's value. No
        #    other action's value is ever needed.
        with torch.no_grad():
            q = torch.minimum(q1_target(inputs), q2_target(inputs)).squeeze(1)
        u = q - v(obs).squeeze(1)
        value_loss = (torch.where(u < 0.0, 1.0 - args.expectile, args.expectile) * u.square()).mean()
        value_optimizer.zero_grad()
        value_loss.backward()
        value_optimizer.step()

        # 3. The actor imitates the recorded actions, weighted by their advantage ([IQL], eq. 7).
        with torch.no_grad():
            advantage = q - v(obs).squeeze(1)
            weight = (args.inverse_temperature * advantage).exp().clamp(max=args.max_weight)
        actor_loss = -(weight * log_likelihood(actor, log_std, obs, action)).mean()
        for group in actor_optimizer.param_groups:
            group["lr"] = args.learning_rate * 0.5 * (1.0 + math.cos(math.pi * update / args.total_updates))
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        # 4. The critics learn the reward plus the discounted value of the next state ([IQL], eq. 6).
        with torch.no_grad():
            next_value = v(batch["next_obs"].float()).squeeze(1)
            y = batch["reward"] + args.gamma * ~batch["terminated"] * next_value
        q1_pred, q2_pred = q1(inputs).squeeze(1), q2(inputs).squeeze(1)
        critic_loss = 0.5 * (q1_pred - y).square().mean() + 0.5 * (q2_pred - y).square().mean()
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        # 5. The target networks: an exponential moving average of the critics' weights.
        with torch.no_grad():
            for network, target in ((q1, q1_target), (q2, q2_target)):
                for new, old in zip(network.parameters(), target.parameters(), strict=True):
                    old.copy_(args.tau * new + (1.0 - args.tau) * old)

        found = {"value_loss": value_loss, "actor_loss": actor_loss, "critic_loss": critic_loss}
        found |= {"q_mean": 0.5 * (q1_pred.mean() + q2_pred.mean()), "weight_mean": weight.mean()}
        found = {name: value.detach() for name, value in found.items()}
        if on_update is not None:
            on_update({**batch, **found})
        if (update + 1) % 1_000 == 0 or update + 1 == args.total_updates:
            shown = "   ".join(f"{name.replace('_', ' ')} {float(value):8.3f}" for name, value in found.items())
            print(f"update {update + 1:7d}   {shown}")

    # 6. Evaluate the mean action.
    returns: list[float] = []
    for episode in range(args.eval_episodes):
        total, ended = 0.0, False
        state, _ = env.reset(seed=args.seed if episode == 0 else None)
        while not ended:
            with torch.no_grad():
                unit = actor(torch.from_numpy(state[None]).float()).tanh()[0].numpy()
            state, reward, terminated, truncated, _ = env.step(low + (unit + 1.0) * (0.5 * (high - low)))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    if returns:
        print(f"mean return: {np.mean(returns):.1f} over {len(returns)} episodes")

    parameters = {"log_std": log_std.detach()}
    networks = {"actor": actor, "q1": q1, "q2": q2, "q1_target": q1_target, "q2_target": q2_target, "v": v}
    for name, network in networks.items():
        parameters |= {f"{name}.{key}": value for key, value in network.state_dict().items()}
    return {"parameters": parameters, "returns": returns}


if __name__ == "__main__":
    train(tyro.cli(Args))
