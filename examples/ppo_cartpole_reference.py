"""PPO on CartPole in one file: the algorithm from top to bottom, in order of execution.

It imports nothing from rl_training. With equal seeds and settings the package collects the same transitions and learns
the same weights, up to rounding (tested in tests/parity/test_ppo_reference.py), so this file can be read as the
package's specification. Equation numbers refer to

    [PPO]  Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347
    [GAE]  Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation,
           arXiv:1506.02438

Run it:

    python examples/ppo_cartpole_reference.py                          # about 100,000 steps: solves CartPole
    python examples/ppo_cartpole_reference.py --total-timesteps 256    # a second
    python examples/ppo_cartpole_reference.py --help
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


@dataclass
class Args:
    """PPO on an environment with a Box observation and a Discrete action. The defaults are tuned for CartPole."""

    env_id: str = "CartPole-v1"
    """Gymnasium environment id."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; by default the limit of the registered environment."""
    seed: int = 0
    """Seed of every random number."""
    total_timesteps: int = 100_000
    """Environment steps, over all environments."""
    num_envs: int = 8
    """Environments stepped together (N)."""
    num_steps: int = 32
    """Steps of each environment per rollout (T)."""
    num_epochs: int = 20
    """Passes over each rollout (K in [PPO], algorithm 1)."""
    minibatch_size: int = 256
    """Transitions per gradient step (M in [PPO], algorithm 1)."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    clip_coef: float = 0.2
    """Clipping range of the probability ratio around 1 (epsilon in [PPO], eq. 7)."""
    anneal: bool = True
    """Decrease the learning rate and the clipping range linearly to zero."""
    gamma: float = 0.98
    """Discount."""
    gae_lambda: float = 0.8
    """Bias-variance trade-off of the advantages ([GAE], eq. 16)."""
    vf_coef: float = 1.0
    """Weight of the value loss (c1 in [PPO], eq. 9)."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus (c2 in [PPO], eq. 9)."""
    max_grad_norm: float = 0.5
    """Largest global norm of the gradient."""


def stream(seed: int, name: str) -> np.random.Generator:
    """A separate random generator for each use: drawing more actions never changes a shuffle or an initial state."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), 0])


class ActorCritic(nn.Module):
    """Two separate networks: from observations to action logits (the policy pi), and to a state value (V)."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()

        def mlp(num_outputs: int) -> nn.Sequential:
            hidden = [nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
            return nn.Sequential(*hidden, nn.Linear(64, num_outputs))

        self.actor = mlp(num_actions)
        self.critic = mlp(1)
        # Orthogonal weights keep the scale of the signal through the layers. The actor's last layer is almost zero, so
        # that the initial policy is almost uniform for every observation.
        for layer in (self.actor[0], self.actor[2], self.critic[0], self.critic[2]):
            orthogonal(layer, math.sqrt(2))
        orthogonal(self.actor[4], 0.01)
        orthogonal(self.critic[4], 1.0)

    def log_probs(self, obs: Tensor) -> Tensor:
        """log pi(a | s) of every action, [B, A]."""
        return F.log_softmax(self.actor(obs), dim=-1)

    def value(self, obs: Tensor) -> Tensor:
        """V(s), [B]."""
        return self.critic(obs).squeeze(-1)


def orthogonal(layer: nn.Linear, gain: float) -> None:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)


def sample(log_probs: Tensor, rng: np.random.Generator) -> Tensor:
    """Sample actions [N] by the Gumbel-max trick: the argmax of log p + Gumbel noise is distributed like p.

    Minus the log of an exponential sample is Gumbel noise. torch.distributions would work too, but it uses torch's
    global random state, which all code in the process shares.
    """
    draws = rng.standard_exponential(tuple(log_probs.shape), dtype=np.float32)
    noise = -np.log(np.maximum(draws, np.float32(1e-8)))  # a sample of exactly zero would give infinite noise
    return (log_probs + torch.from_numpy(noise)).argmax(dim=-1)


def of_actions(log_probs: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities [B] of the actions taken, from those of all actions [B, A]."""
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def train(args: Args, on_rollout: Callable[[dict[str, Tensor]], None] | None = None) -> dict[str, Any]:
    """Train, print progress, and return the losses of every update, the final return and the final parameters.

    `on_rollout` is called with every rollout and its advantages, before the gradient steps.
    """
    torch.set_num_threads(1)  # networks of this size are slower with more threads
    action_rng, shuffle_rng = stream(args.seed, "policy"), stream(args.seed, "algorithm")
    torch.manual_seed(int(shuffle_rng.integers(2**63)))  # torch's global random state is only for initial weights

    # A plain list of environments. A vector environment resets automatically, and final observations are easily lost;
    # here we reset ourselves, so we get them.
    limit = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
    envs = [gym.make(args.env_id, **limit) for _ in range(args.num_envs)]
    env_seed = int(stream(args.seed, "environment").integers(2**31))
    obs = np.stack([env.reset(seed=env_seed + i)[0] for i, env in enumerate(envs)])

    net = ActorCritic(int(np.prod(envs[0].observation_space.shape)), int(envs[0].action_space.n))
    # Adam's default epsilon, 1e-8, lets weights with tiny gradients take full-size steps; 1e-5 damps them.
    optimizer = torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=1e-5)

    step, update = 0, 0
    running_returns = np.zeros(args.num_envs)  # of the unfinished episodes
    finished_returns: deque[float] = deque(maxlen=100)
    history: list[dict[str, float]] = []

    while step < args.total_timesteps:
        # Schedules use the steps before this rollout, so that the learning rate of the last update is not zero.
        remaining = 1.0 - step / args.total_timesteps if args.anneal else 1.0
        learning_rate, clip_coef = args.learning_rate * remaining, args.clip_coef * remaining

        # 1. Collect T steps of N environments with the current policy ([PPO], algorithm 1, "run policy pi_old").
        #    The last rollout is shorter, to keep to the total number of steps.
        T = min(args.num_steps, math.ceil((args.total_timesteps - step) / args.num_envs))
        N = args.num_envs
        rollout = {
            "obs": torch.zeros(T, N, *obs.shape[1:]),
            "next_obs": torch.zeros(T, N, *obs.shape[1:]),  # also the final observation of an episode
            "actions": torch.zeros(T, N, dtype=torch.int64),
            "logprobs": torch.zeros(T, N),
            "values": torch.zeros(T, N),
            "rewards": torch.zeros(T, N),
            "terminated": torch.zeros(T, N, dtype=torch.bool),  # true end: the future value is 0
            "truncated": torch.zeros(T, N, dtype=torch.bool),  # time limit: bootstrap from the final observation
        }
        for t in range(T):
            with torch.no_grad():
                seen = torch.from_numpy(obs)
                log_probs = net.log_probs(seen)
                actions = sample(log_probs, action_rng)
                rollout["obs"][t] = seen
                rollout["actions"][t] = actions
                rollout["logprobs"][t] = of_actions(log_probs, actions)
                rollout["values"][t] = net.value(seen)
            for i, env in enumerate(envs):
                obs[i], reward, terminated, truncated, _ = env.step(int(actions[i]))
                rollout["next_obs"][t, i] = torch.from_numpy(obs[i])
                rollout["rewards"][t, i] = float(reward)
                rollout["terminated"][t, i] = terminated
                rollout["truncated"][t, i] = truncated and not terminated  # if both are set, it is a termination
                running_returns[i] += float(reward)
                if terminated or truncated:
                    finished_returns.append(running_returns[i])
                    running_returns[i] = 0.0
                    obs[i], _ = env.reset()
        step += T * N
        update += 1

        # 2. Compute advantages backwards in time.
        with torch.no_grad():
            next_values = net.value(rollout["next_obs"].flatten(0, 1)).view(T, N)
        advantages = torch.zeros(T, N)
        advantage = torch.zeros(N)
        for t in reversed(range(T)):
            # The TD error ([GAE], eq. 10). After termination the future value is 0. After truncation it is the value of
            # the final observation, which estimates the rewards that would have followed.
            future = next_values[t] * ~rollout["terminated"][t]
            delta = rollout["rewards"][t] + args.gamma * future - rollout["values"][t]
            # The discounted sum of TD errors ([GAE], eq. 16). It stops at every episode end, terminated or truncated:
            # the next row belongs to another episode.
            goes_on = ~(rollout["terminated"][t] | rollout["truncated"][t])
            advantage = delta + args.gamma * args.gae_lambda * goes_on * advantage
            advantages[t] = advantage
        rollout["advantages"] = advantages
        rollout["returns"] = advantages + rollout["values"]  # lambda-returns, the targets of the critic
        if on_rollout is not None:
            on_rollout(rollout)

        # 3. Several epochs of minibatches over the same rollout ([PPO], algorithm 1, "optimize surrogate L").
        batch = {name: rows.flatten(0, 1) for name, rows in rollout.items()}
        num_minibatches = max(1, round(T * N / args.minibatch_size))
        optimizer.param_groups[0]["lr"] = learning_rate
        gradient_steps: list[dict[str, Tensor]] = []
        for _ in range(args.num_epochs):
            for rows in np.array_split(shuffle_rng.permutation(T * N), num_minibatches):
                minibatch = {name: values[rows] for name, values in batch.items()}
                log_probs = net.log_probs(minibatch["obs"])

                # Normalised per minibatch, so that the step size does not depend on the scale of the rewards.
                A = minibatch["advantages"]
                A = (A - A.mean()) / (A.std() + 1e-8)

                # The clipped surrogate ([PPO], eq. 7). The minimum makes it pessimistic: moving the ratio beyond
                # 1 +- epsilon in the direction of the advantage does not improve it, so the gradient is zero there.
                log_ratio = of_actions(log_probs, minibatch["actions"]) - minibatch["logprobs"]
                ratio = log_ratio.exp()
                clipped = ratio.clamp(1.0 - clip_coef, 1.0 + clip_coef)
                policy_loss = -torch.minimum(ratio * A, clipped * A).mean()

                # Half the mean squared error of the critic, and the entropy of the policy.
                value_loss = 0.5 * (net.value(minibatch["obs"]) - minibatch["returns"]).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean()

                # [PPO], eq. 9, with the opposite sign, because we minimise.
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy

                optimizer.zero_grad()
                loss.backward()
                gradient_norm = nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm)
                optimizer.step()

                with torch.no_grad():
                    # KL(old || new), by an estimator that is never negative: the mean of (r - 1) - log r.
                    approx_kl = (ratio - 1.0 - log_ratio).mean()
                    clip_fraction = ((ratio - 1.0).abs() > clip_coef).float().mean()
                found = {
                    "loss": loss,
                    "policy_loss": policy_loss,
                    "value_loss": value_loss,
                    "entropy": entropy,
                    "approx_kl": approx_kl,
                    "clip_fraction": clip_fraction,
                    "gradient_norm": gradient_norm,
                }
                gradient_steps.append({name: value.detach() for name, value in found.items()})

        # 4. Log the means over the gradient steps, and the KL of the last one.
        losses = {name: float(torch.stack([s[name] for s in gradient_steps]).mean()) for name in gradient_steps[0]}
        losses["approx_kl"] = float(gradient_steps[-1]["approx_kl"])
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
