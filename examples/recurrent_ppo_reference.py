"""Recurrent PPO on CartPole without velocities, in one file: what a recurrent policy changes in PPO.

It imports nothing from rl_training. With equal seeds and settings the package collects the same transitions and learns
the same weights, up to rounding (tested in tests/parity/test_recurrent_ppo_reference.py). The parts that are the same
as in PPO are explained in ppo_cartpole_reference.py. Equation numbers refer to

    [PPO]  Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347
    [GAE]  Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation,
           arXiv:1506.02438

Run it:

    python examples/recurrent_ppo_reference.py                          # 200,000 steps: minutes
    python examples/recurrent_ppo_reference.py --total-timesteps 512    # a second
    python examples/recurrent_ppo_reference.py --help
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

SIZE = 64
"""Width of the LSTMs and of the hidden layers."""
SEEN = [0, 2]
"""Indices of position and angle. The velocities are hidden, which makes the task partially observable."""


@dataclass
class Args:
    """Recurrent PPO on CartPole without velocities."""

    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; by default the limit of the registered environment."""
    seed: int = 0
    """Seed of every random number."""
    total_timesteps: int = 200_000
    """Environment steps, over all environments."""
    num_envs: int = 8
    """Environments stepped together (N)."""
    num_steps: int = 128
    """Steps of each environment per rollout (T)."""
    sequence_length: int = 32
    """Steps of backpropagation through time (L)."""
    num_epochs: int = 10
    """Passes over each rollout."""
    minibatch_size: int = 256
    """Transitions per gradient step, as whole sequences."""
    learning_rate: float = 1e-3
    """Adam's step size; decreases linearly to zero."""
    clip_coef: float = 0.2
    """Clipping range of the probability ratio around 1 (epsilon in [PPO], eq. 7)."""
    gamma: float = 0.98
    """Discount."""
    gae_lambda: float = 0.95
    """Bias-variance trade-off of the advantages ([GAE], eq. 16)."""
    vf_coef: float = 1.0
    """Weight of the value loss (c1 in [PPO], eq. 9)."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus (c2 in [PPO], eq. 9)."""
    max_grad_norm: float = 0.5
    """Largest global norm of the gradient."""


def stream(seed: int, name: str) -> np.random.Generator:
    """A separate random generator for each use."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), 0])


class RecurrentActorCritic(nn.Module):
    """Two separate networks, each an LSTM followed by hidden layers: for action logits (pi) and for a value (V).

    The recurrent state [N, 4 * SIZE] is the hidden and cell state of the actor's LSTM, then those of the critic's.
    """

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()

        def lstm() -> nn.LSTMCell:
            cell = nn.LSTMCell(num_inputs, SIZE)
            for weight in (cell.weight_ih, cell.weight_hh):
                nn.init.orthogonal_(weight)
            for bias in (cell.bias_ih, cell.bias_hh):
                nn.init.zeros_(bias)
            return cell

        def mlp(num_outputs: int) -> nn.Sequential:
            hidden = [nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh()]
            return nn.Sequential(*hidden, nn.Linear(SIZE, num_outputs))

        self.actor_memory = lstm()
        self.critic_memory = lstm()
        self.actor = mlp(num_actions)
        self.critic = mlp(1)
        for layer in (self.actor[0], self.actor[2], self.critic[0], self.critic[2]):
            orthogonal(layer, math.sqrt(2))
        orthogonal(self.actor[4], 0.01)
        orthogonal(self.critic[4], 1.0)

    def forward(self, obs: Tensor, state: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step: log pi(a | history) [N, A], V(history) [N], and the next state. `start` [N] resets the state."""
        state = state * (~start).float().unsqueeze(-1)
        hidden_a, cell_a, hidden_c, cell_c = state.chunk(4, dim=-1)
        hidden_a, cell_a = self.actor_memory(obs, (hidden_a, cell_a))
        hidden_c, cell_c = self.critic_memory(obs, (hidden_c, cell_c))
        log_probs = F.log_softmax(self.actor(hidden_a), dim=-1)
        value = self.critic(hidden_c).squeeze(-1)
        return log_probs, value, torch.cat([hidden_a, cell_a, hidden_c, cell_c], dim=-1)


def orthogonal(layer: nn.Linear, gain: float) -> None:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)


def sample(log_probs: Tensor, rng: np.random.Generator) -> Tensor:
    """Actions [N], by the Gumbel-max trick."""
    draws = rng.standard_exponential(tuple(log_probs.shape), dtype=np.float32)
    noise = -np.log(np.maximum(draws, np.float32(1e-8)))
    return (log_probs + torch.from_numpy(noise)).argmax(dim=-1)


def of_actions(log_probs: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities [...] of the actions taken, from those of all actions [..., A]."""
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def train(args: Args, on_rollout: Callable[[dict[str, Tensor]], None] | None = None) -> dict[str, Any]:
    """Train, print progress, and return the losses of every update, the final return and the final parameters.

    `on_rollout` is called with every rollout and its advantages, before the gradient steps.
    """
    torch.set_num_threads(1)
    action_rng, shuffle_rng = stream(args.seed, "policy"), stream(args.seed, "algorithm")
    torch.manual_seed(int(shuffle_rng.integers(2**63)))

    limit = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
    envs = [gym.make("CartPole-v1", **limit) for _ in range(args.num_envs)]
    env_seed = int(stream(args.seed, "environment").integers(2**31))
    obs = np.stack([env.reset(seed=env_seed + i)[0][SEEN] for i, env in enumerate(envs)])

    net = RecurrentActorCritic(len(SEEN), int(envs[0].action_space.n))
    optimizer = torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=1e-5)

    # The recurrent state persists across rollouts, and is reset only where an episode begins.
    state = torch.zeros(args.num_envs, 4 * SIZE)
    start = torch.ones(args.num_envs, dtype=torch.bool)

    step, update = 0, 0
    running_returns = np.zeros(args.num_envs)
    finished_returns: deque[float] = deque(maxlen=100)
    history: list[dict[str, float]] = []

    while step < args.total_timesteps:
        learning_rate = args.learning_rate * (1.0 - step / args.total_timesteps)

        # 1. Collect T steps of N environments. Each row stores the state before it, and whether an episode begins.
        T = min(args.num_steps, math.ceil((args.total_timesteps - step) / args.num_envs))
        N = args.num_envs
        rollout = {
            "obs": torch.zeros(T, N, len(SEEN)),
            "states": torch.zeros(T, N, 4 * SIZE),
            "starts": torch.zeros(T, N, dtype=torch.bool),
            "actions": torch.zeros(T, N, dtype=torch.int64),
            "logprobs": torch.zeros(T, N),
            "values": torch.zeros(T, N),
            "next_values": torch.zeros(T, N),
            "rewards": torch.zeros(T, N),
            "terminated": torch.zeros(T, N, dtype=torch.bool),
            "truncated": torch.zeros(T, N, dtype=torch.bool),
        }
        for t in range(T):
            rollout["obs"][t] = torch.from_numpy(obs)
            rollout["states"][t] = state
            rollout["starts"][t] = start
            with torch.no_grad():
                log_probs, values, state = net(rollout["obs"][t], state, start)
            actions = sample(log_probs, action_rng)
            rollout["actions"][t] = actions
            rollout["logprobs"][t] = of_actions(log_probs, actions)
            rollout["values"][t] = values
            for i, env in enumerate(envs):
                shown, reward, terminated, truncated, _ = env.step(int(actions[i]))
                obs[i] = shown[SEEN]
                rollout["rewards"][t, i] = float(reward)
                rollout["terminated"][t, i] = terminated
                rollout["truncated"][t, i] = truncated and not terminated
                running_returns[i] += float(reward)
            # The value of the next observation of the same episode: before any reset, with the recurrent state after
            # this row.
            with torch.no_grad():
                nothing = torch.zeros(N, dtype=torch.bool)
                rollout["next_values"][t] = net(torch.from_numpy(obs), state, nothing)[1]
            start = rollout["terminated"][t] | rollout["truncated"][t]
            for i in start.nonzero().flatten().tolist():
                finished_returns.append(running_returns[i])
                running_returns[i] = 0.0
                obs[i] = envs[i].reset()[0][SEEN]
        step += T * N
        update += 1

        # 2. Compute advantages backwards in time ([GAE], eq. 10 and 16).
        advantages = torch.zeros(T, N)
        advantage = torch.zeros(N)
        for t in reversed(range(T)):
            future = rollout["next_values"][t] * ~rollout["terminated"][t]
            delta = rollout["rewards"][t] + args.gamma * future - rollout["values"][t]
            goes_on = ~(rollout["terminated"][t] | rollout["truncated"][t])
            advantage = delta + args.gamma * args.gae_lambda * goes_on * advantage
            advantages[t] = advantage
        rollout["advantages"] = advantages
        rollout["returns"] = advantages + rollout["values"]
        if on_rollout is not None:
            on_rollout(rollout)

        # 3. Split the rollout into sequences [L, B] of one environment each. Backpropagation through time needs
        #    consecutive rows, so rows cannot be shuffled one by one. The last sequences are padded if L does not divide
        #    T; `there` marks the rows that are not padding.
        L = min(args.sequence_length, T)
        W = math.ceil(T / L)
        rollout["there"] = torch.ones(T, N, dtype=torch.bool)
        sequences = {}
        for name, rows in rollout.items():
            padding = torch.zeros(W * L - T, *rows.shape[1:], dtype=rows.dtype)
            windows = torch.cat([rows, padding]).unflatten(0, (W, L))
            sequences[name] = windows.transpose(0, 1).flatten(1, 2)

        # 4. Several epochs of minibatches of whole sequences.
        num_minibatches = min(max(1, round(T * N / args.minibatch_size)), W * N)
        optimizer.param_groups[0]["lr"] = learning_rate
        gradient_steps: list[dict[str, Tensor]] = []
        for _ in range(args.num_epochs):
            for chosen in np.array_split(shuffle_rng.permutation(W * N), num_minibatches):
                minibatch = {name: values[:, chosen] for name, values in sequences.items()}

                # Run the sequence from its stored initial state. That state is stale, since the weights have changed
                # after it was collected; it is not recomputed until the next rollout. Episodes that begin inside a
                # sequence begin with a zero state, as in collection.
                memory = minibatch["states"][0]
                found_log_probs, found_values = [], []
                for t in range(L):
                    log_probs, values, memory = net(minibatch["obs"][t], memory, minibatch["starts"][t])
                    found_log_probs.append(log_probs)
                    found_values.append(values)

                # From here on rows are independent, and everything is plain PPO.
                there = minibatch["there"]
                log_probs, values = torch.stack(found_log_probs)[there], torch.stack(found_values)[there]
                flat = {name: rows[there] for name, rows in minibatch.items()}
                A = flat["advantages"]
                A = (A - A.mean()) / (A.std() + 1e-8)
                log_ratio = of_actions(log_probs, flat["actions"]) - flat["logprobs"]
                ratio = log_ratio.exp()
                clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
                policy_loss = -torch.minimum(ratio * A, clipped * A).mean()
                value_loss = 0.5 * (values - flat["returns"]).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy

                optimizer.zero_grad()
                loss.backward()
                gradient_norm = nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm)
                optimizer.step()

                found = {
                    "loss": loss,
                    "policy_loss": policy_loss,
                    "value_loss": value_loss,
                    "entropy": entropy,
                    "gradient_norm": gradient_norm,
                }
                gradient_steps.append({name: value.detach() for name, value in found.items()})

        # 5. Log.
        losses = {name: float(torch.stack([s[name] for s in gradient_steps]).mean()) for name in gradient_steps[0]}
        mean_return = float(np.mean(finished_returns)) if finished_returns else float("nan")
        history.append({"step": step, "mean_return": mean_return, **losses})
        if update % 20 == 1 or step >= args.total_timesteps:
            print(
                f"step {step:7d}   mean return {mean_return:6.1f}   policy loss {losses['policy_loss']:8.4f}   "
                f"value loss {losses['value_loss']:8.4f}   entropy {losses['entropy']:6.4f}"
            )

    for env in envs:
        env.close()
    print(f"final return: {mean_return:.1f} (mean of the last {len(finished_returns)} episodes of training)")
    parameters = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    return {"updates": history, "final_return": mean_return, "parameters": parameters}


if __name__ == "__main__":
    train(tyro.cli(Args))
