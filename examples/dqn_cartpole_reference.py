"""DQN on CartPole in one file: the algorithm from top to bottom, in order of execution.

It imports nothing from rl_training. With equal seeds and settings the package collects the same transitions, samples
the same batches and learns the same weights, up to rounding (tested in tests/parity/test_dqn_reference.py), so this
file can be read as the package's specification. The symbols and steps are those of algorithm 1 of

    [DQN]  Mnih et al. 2015, Human-level control through deep reinforcement learning, Nature 518

Run it:

    python examples/dqn_cartpole_reference.py                           # 50,000 steps: learns CartPole
    python examples/dqn_cartpole_reference.py --total-timesteps 1100    # a second
    python examples/dqn_cartpole_reference.py --help
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn


@dataclass
class Args:
    """DQN on an environment with a flat Box observation and a Discrete action. The defaults are tuned for CartPole."""

    env_id: str = "CartPole-v1"
    """Gymnasium environment id."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; by default the limit of the registered environment."""
    seed: int = 0
    """Seed of every random number."""
    total_timesteps: int = 50_000
    """Environment steps."""
    num_hidden: int = 256
    """Width of each of the two hidden layers."""
    buffer_size: int = 100_000
    """Capacity of the replay buffer D, in transitions (N in [DQN])."""
    learning_starts: int = 1_000
    """Steps with random actions before the first gradient step."""
    num_steps: int = 256
    """Environment steps between rounds of gradient steps."""
    updates_per_step: float = 0.5
    """Gradient steps per environment step; each round makes those that are due."""
    batch_size: int = 64
    """Transitions per gradient step."""
    learning_rate: float = 2.3e-3
    """Adam's step size."""
    gamma: float = 0.99
    """Discount."""
    epsilon_start: float = 1.0
    """Initial probability of a random action."""
    epsilon_end: float = 0.04
    """Final probability of a random action."""
    epsilon_fraction: float = 0.16
    """Fraction of all steps over which epsilon decreases linearly."""
    target_update_every: int = 128
    """Gradient steps between copies of Q to the target network (C in [DQN])."""
    max_grad_norm: float = 10.0
    """Largest global norm of the gradient."""


def stream(seed: int, name: str) -> np.random.Generator:
    """A separate random generator for each use: drawing more actions never changes a batch or an initial state."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), 0])


def train(args: Args, on_update: Callable[[dict[str, Tensor]], None] | None = None) -> dict[str, Any]:
    """Train, print progress, and return the episode returns, the replay buffer and the final parameters.

    `on_update` is called with every batch and its losses, after the gradient step.
    """
    torch.set_num_threads(1)  # networks of this size are slower with more threads
    action_rng, sample_rng = stream(args.seed, "policy"), stream(args.seed, "sampler")
    # Torch's global random state is used only for the initial weights.
    torch.manual_seed(int(stream(args.seed, "algorithm").integers(2**63)))

    # We reset the environment ourselves, so we get the final observation of each episode.
    limit = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
    env = gym.make(args.env_id, **limit)
    obs, _ = env.reset(seed=int(stream(args.seed, "environment").integers(2**31)))
    num_inputs, num_actions = obs.shape[0], int(env.action_space.n)

    # Q(s, .; theta): the values of all actions in one pass. Q_hat has the older weights theta^-.
    Q = nn.Sequential(
        *(nn.Linear(num_inputs, args.num_hidden), nn.ReLU()),
        *(nn.Linear(args.num_hidden, args.num_hidden), nn.ReLU()),
        nn.Linear(args.num_hidden, num_actions),
    )
    Q_hat = copy.deepcopy(Q)
    optimizer = torch.optim.Adam(Q.parameters(), lr=args.learning_rate)

    # The replay buffer D: a ring buffer, in which a new transition overwrites the oldest one.
    D = {
        "obs": np.zeros((args.buffer_size, num_inputs), np.float32),
        "action": np.zeros(args.buffer_size, np.int64),
        "reward": np.zeros(args.buffer_size, np.float32),
        "next_obs": np.zeros((args.buffer_size, num_inputs), np.float32),  # also the final observation of an episode
        "terminated": np.zeros(args.buffer_size, np.bool_),  # true end of the episode: the future value is 0
    }
    updates, found, returns, running_return, best_return = 0, {}, [], 0.0, float("-inf")

    for step in range(args.total_timesteps):
        # 1. Act. "With probability epsilon select a random action, otherwise select argmax_a Q(s, a; theta)."
        if step < args.learning_starts:
            action = int(action_rng.integers(num_actions))
        else:
            fallen = min(1.0, step / args.total_timesteps / args.epsilon_fraction)
            epsilon = args.epsilon_start + (args.epsilon_end - args.epsilon_start) * fallen
            with torch.no_grad():
                greedy = int(Q(torch.from_numpy(obs[None])).argmax())
            # Always draw both numbers, so that the generator's state does not depend on the outcome.
            explore, anything = action_rng.random() < epsilon, int(action_rng.integers(num_actions))
            action = anything if explore else greedy

        # 2. "Store transition in D." `truncated` is not stored: a time limit ends the episode, but the target still
        #    bootstraps from the final observation.
        next_obs, reward, terminated, truncated, _ = env.step(action)
        slot = step % args.buffer_size
        D["obs"][slot], D["action"][slot], D["reward"][slot] = obs, action, reward
        D["next_obs"][slot], D["terminated"][slot] = next_obs, terminated
        obs = next_obs
        running_return += float(reward)
        if terminated or truncated:
            returns.append(running_return)
            running_return = 0.0
            obs, _ = env.reset()

        # 3. The gradient steps that are due.
        end_of_round = (step + 1) % args.num_steps == 0 or step + 1 == args.total_timesteps
        due = int(args.updates_per_step * max(0, step + 1 - args.learning_starts)) - updates if end_of_round else 0
        for _ in range(due):
            # "Sample random minibatch of transitions from D", with replacement; index 0 is the oldest transition.
            size = min(step + 1, args.buffer_size)
            rows = (step + 1 - size + sample_rng.integers(size, size=args.batch_size)) % args.buffer_size
            batch = {name: torch.from_numpy(column[rows]) for name, column in D.items()}

            # "Set y = r if the episode terminates, otherwise r + gamma max_a' Q_hat(s', a'; theta^-)." The target
            # network's older weights keep the targets stable.
            with torch.no_grad():
                next_value = Q_hat(batch["next_obs"]).max(dim=1).values
                y = batch["reward"] + args.gamma * ~batch["terminated"] * next_value
            q = Q(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)

            # Clipping the error to [-1, 1] in the gradient ([DQN], methods) is the Huber loss: half the square of small
            # errors, linear in large ones, so that a few outliers do not dominate the step.
            error = q - y
            loss = torch.where(error.abs() <= 1.0, 0.5 * error.square(), error.abs() - 0.5).mean()

            optimizer.zero_grad()
            loss.backward()
            gradient_norm = nn.utils.clip_grad_norm_(Q.parameters(), args.max_grad_norm)
            optimizer.step()
            updates += 1

            # "Every C steps reset Q_hat = Q."
            if updates % args.target_update_every == 0:
                Q_hat.load_state_dict(Q.state_dict())

            found = {"loss": loss.detach(), "q_mean": q.detach().mean(), "gradient_norm": gradient_norm}
            if on_update is not None:
                on_update({**batch, **found})

        # 4. Log. The returns of DQN fluctuate: a small change of Q may change many greedy actions at once.
        if (step + 1) % 5_000 == 0 or step + 1 == args.total_timesteps:
            mean_return = float(np.mean(returns[-20:])) if returns else float("nan")
            best_return = max(best_return, mean_return)
            losses = "   ".join(f"{name.replace('_', ' ')} {float(found[name]):8.4f}" for name in found)
            print(f"step {step + 1:7d}   mean return {mean_return:6.1f}   {losses}")

    env.close()
    print(f"final return: {mean_return:.1f} (mean of the last 20 episodes of training; best line: {best_return:.1f})")
    order = np.arange(max(0, args.total_timesteps - args.buffer_size), args.total_timesteps) % args.buffer_size
    return {
        "final_return": mean_return,
        "returns": returns,
        "replay": {name: column[order] for name, column in D.items()},  # oldest first
        "parameters": {name: parameter.detach().clone() for name, parameter in Q.named_parameters()},
        "target_parameters": {name: parameter.detach().clone() for name, parameter in Q_hat.named_parameters()},
    }


if __name__ == "__main__":
    train(tyro.cli(Args))
