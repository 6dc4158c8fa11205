"""TQC on Pendulum in one file: the algorithm from top to bottom, in order of execution.

It imports nothing from rl_training. With equal seeds, settings and initial weights the package collects the same
transitions, samples the same batches and learns the same weights, up to rounding (tested in
tests/parity/test_tqc_reference.py), so this file can be read as the package's specification. Equation numbers refer to

    [TQC]  Kuznetsov et al. 2020, Controlling Overestimation Bias with Truncated Mixture of Continuous Distributional
           Quantile Critics, arXiv:2005.04269
    [SAC]  Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications, arXiv:1812.05905

Run it:

    python examples/tqc_reference.py                          # 20,000 steps: learns Pendulum, in minutes
    python examples/tqc_reference.py --total-timesteps 120    # seconds
    python examples/tqc_reference.py --help
"""

from __future__ import annotations

import copy
import math
import zlib
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
    """TQC on an environment with flat Box observations and actions. The defaults are tuned for Pendulum."""

    env_id: str = "Pendulum-v1"
    """Gymnasium environment id."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many steps; by default the limit of the registered environment."""
    seed: int = 0
    """Seed of every random number."""
    total_timesteps: int = 20_000
    """Environment steps. Each is followed by one gradient step of every network."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer D, in transitions."""
    learning_starts: int = 100
    """Steps with random actions before the first gradient step."""
    batch_size: int = 256
    """Transitions per gradient step."""
    learning_rate: float = 1e-3
    """Adam's step size for the actor, the critics and the temperature."""
    gamma: float = 0.99
    """Discount."""
    num_critics: int = 5
    """Critics N."""
    num_quantiles: int = 25
    """Quantiles M of each critic."""
    num_dropped: int = 2
    """Quantiles d dropped from the target per critic: of all N M pooled quantiles, the largest N d."""
    tau: float = 0.005
    """Weight of the online parameters in each target network update."""
    initial_temperature: float = 1.0
    """Initial temperature alpha."""
    target_entropy: float | None = None
    """Target entropy of the temperature; by default minus the number of action dimensions ([SAC], table 1)."""


def stream(seed: int, name: str) -> np.random.Generator:
    """A separate random generator for each use: drawing more actions never changes a batch or an initial state."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), 0])


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(num_inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(256, num_outputs))


def sample(actor: nn.Module, obs: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Actions [B, A] in [-1, 1] and their log-probabilities log pi(a | s), [B].

    The action is a function of the network's outputs and of noise, a = f(s, noise) ([SAC], eq. 8), so gradients flow
    from the critics through the action into the actor.
    """
    mean, log_std = actor(obs).chunk(2, dim=-1)
    log_std = log_std.clamp(-20.0, 2.0)  # keeps the standard deviation in a safe range
    noise = torch.from_numpy(rng.standard_normal(tuple(mean.shape), dtype=np.float32))
    u = mean + log_std.exp() * noise

    # The density of tanh(u) is that of u divided by the slope of tanh, 1 - tanh(u)^2 ([SAC], appendix C). If tanh(u) is
    # almost 1, that difference loses all precision; 4 / (e^u + e^-u)^2 is the same number, and its log is accurate.
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
    log_slope = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
    return u.tanh(), (log_normal - log_slope).sum(dim=-1)


def quantile_huber_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Quantile regression of pred [B, M] towards target [B, K] ([TQC], eq. 10, for one critic).

    An output that is to be the quantile at the fraction tau pays tau times the distance of targets above it, and
    1 - tau times the distance of targets below it. Close to 0, the distance is smoothed to a parabola.
    """
    M = pred.shape[1]
    tau = (torch.arange(M) + 0.5) / M  # the midpoints of M equal parts of [0, 1]
    u = target[:, None, :] - pred[:, :, None]  # every target minus every prediction, [B, M, K]
    distance = torch.where(u.abs() <= 1.0, 0.5 * u.square(), u.abs() - 0.5)
    weight = (tau[None, :, None] - (u.detach() < 0).to(u.dtype)).abs()
    return (weight * distance).mean()  # over the batch, over predictions and over targets


def train(
    args: Args,
    on_start: Callable[[dict[str, nn.Module]], None] | None = None,
    on_update: Callable[[dict[str, Tensor]], None] | None = None,
) -> dict[str, Any]:
    """Train, print progress, and return the episode returns, the replay buffer and the final parameters.

    `on_start` is called with the networks and may change their weights. `on_update` is called with every batch and its
    losses, after the gradient steps.
    """
    torch.set_num_threads(1)  # networks of this size are slower with more threads
    action_rng, sample_rng = stream(args.seed, "policy"), stream(args.seed, "sampler")
    noise_rng = stream(args.seed, "algorithm")
    torch.manual_seed(int(noise_rng.integers(2**63)))  # torch's global random state is only for initial weights

    # We reset the environment ourselves, so we get the final observation of each episode.
    limit = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
    env = gym.make(args.env_id, **limit)
    low, high = env.action_space.low, env.action_space.high
    obs, _ = env.reset(seed=int(stream(args.seed, "environment").integers(2**31)))
    num_inputs, A = obs.shape[0], env.action_space.shape[0]

    # The policy pi (two outputs per action: mean and log standard deviation), and N critics. A critic has M outputs:
    # not the expected return of an action, but quantiles of the return's distribution.
    N, M = args.num_critics, args.num_quantiles
    actor = mlp(num_inputs, 2 * A)
    critics = nn.ModuleList(mlp(num_inputs + A, M) for _ in range(N))
    if on_start is not None:
        on_start({"actor": actor, "critics": critics})
    target_critics = copy.deepcopy(critics)
    # The logarithm of the temperature is learned, so that the temperature stays positive.
    log_alpha = torch.tensor(math.log(args.initial_temperature), requires_grad=True)
    target_entropy = -float(A) if args.target_entropy is None else args.target_entropy
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.learning_rate)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=args.learning_rate)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=args.learning_rate)

    # The replay buffer D: a ring buffer, in which a new transition overwrites the oldest one.
    D = {
        "obs": np.zeros((args.buffer_size, num_inputs), np.float32),
        "action": np.zeros((args.buffer_size, A), np.float32),  # in [-1, 1], before rescaling
        "reward": np.zeros(args.buffer_size, np.float32),
        "next_obs": np.zeros((args.buffer_size, num_inputs), np.float32),  # also the final observation of an episode
        "terminated": np.zeros(args.buffer_size, np.bool_),  # true end of the episode: the future value is 0
    }
    found, returns, running_return = {}, [], 0.0

    for step in range(args.total_timesteps):
        # 1. Act: first uniformly at random, so that the buffer covers the action space; then sample from the policy.
        if step < args.learning_starts:
            action = action_rng.random(A, dtype=np.float32) * 2.0 - 1.0
        else:
            with torch.no_grad():
                action = sample(actor, torch.from_numpy(obs[None]).float(), action_rng)[0][0].numpy()

        # 2. Store the transition. `truncated` is not stored: a time limit ends the episode, but the target still
        #    bootstraps from the final observation.
        next_obs, reward, terminated, truncated, _ = env.step(low + (action + 1.0) * (0.5 * (high - low)))
        slot = step % args.buffer_size
        D["obs"][slot], D["action"][slot], D["reward"][slot] = obs, action, reward
        D["next_obs"][slot], D["terminated"][slot] = next_obs, terminated
        obs = next_obs
        running_return += float(reward)
        if terminated or truncated:
            returns.append(running_return)
            running_return = 0.0
            obs, _ = env.reset()

        # 3. One gradient step of each network, on a batch sampled with replacement; index 0 is the oldest transition.
        if step >= args.learning_starts:
            size = min(step + 1, args.buffer_size)
            rows = (step + 1 - size + sample_rng.integers(size, size=args.batch_size)) % args.buffer_size
            batch = {name: torch.from_numpy(column[rows]) for name, column in D.items()}
            alpha = log_alpha.detach().exp()

            # 3a. The critics. For an action sampled from the current policy, the quantiles of all target critics are
            #     pooled and sorted. The largest are dropped, because they are the ones that overestimate ([TQC],
            #     section 3). Each that is left is one target, with the entropy bonus of the action ([TQC], eq. 12).
            with torch.no_grad():
                next_action, next_log_prob = sample(actor, batch["next_obs"], noise_rng)
                next_inputs = torch.cat([batch["next_obs"], next_action], dim=1)
                pooled = torch.cat([critic(next_inputs) for critic in target_critics], dim=1)  # [B, N M]
                kept = pooled.sort(dim=1).values[:, : N * M - N * args.num_dropped]
                soft_values = kept - alpha * next_log_prob[:, None]
                y = batch["reward"][:, None] + args.gamma * ~batch["terminated"][:, None] * soft_values
            inputs = torch.cat([batch["obs"], batch["action"]], dim=1)
            q_pred = [critic(inputs) for critic in critics]
            critic_loss = sum((quantile_huber_loss(q, y) for q in q_pred), start=torch.zeros(()))
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()

            # 3b. The actor, with newly sampled actions: maximise value and entropy. The value is the mean of all
            #     quantiles of all critics: nothing is dropped here ([TQC], eq. 13). The critics get gradients too, but
            #     these are zeroed before the critics' next step.
            action_now, log_prob = sample(actor, batch["obs"], noise_rng)
            inputs_now = torch.cat([batch["obs"], action_now], dim=1)
            q_now = torch.stack([critic(inputs_now) for critic in critics]).mean(dim=(0, 2))
            actor_loss = (alpha * log_prob - q_now).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()

            # 3c. The temperature ([SAC], eq. 18): it grows while the policy's entropy is below the target.
            alpha_loss = (-log_alpha.exp() * (log_prob.detach() + target_entropy)).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()

            # 3d. Update the target networks: an exponential moving average of the critics' weights.
            with torch.no_grad():
                for new, old in zip(critics.parameters(), target_critics.parameters(), strict=True):
                    old.copy_(args.tau * new + (1.0 - args.tau) * old)

            q_mean = torch.stack([q.detach().mean() for q in q_pred]).mean()
            losses = {"critic_loss": critic_loss, "actor_loss": actor_loss, "alpha_loss": alpha_loss}
            found = {name: loss.detach() for name, loss in losses.items()}
            found |= {"q_mean": q_mean, "alpha": alpha, "entropy": -log_prob.detach().mean()}
            if on_update is not None:
                on_update({**batch, **found})

        # 4. Log.
        if (step + 1) % 1_000 == 0 or step + 1 == args.total_timesteps:
            mean_return = float(np.mean(returns[-10:])) if returns else float("nan")
            shown = "   ".join(f"{name.replace('_', ' ')} {float(value):8.3f}" for name, value in found.items())
            print(f"step {step + 1:7d}   mean return {mean_return:8.1f}   {shown}")

    env.close()
    print(f"final return: {mean_return:.1f} (mean of the last {len(returns[-10:])} episodes of training)")
    networks = {"actor": actor, "critics": critics, "target_critics": target_critics}
    order = np.arange(max(0, args.total_timesteps - args.buffer_size), args.total_timesteps) % args.buffer_size
    return {
        "final_return": mean_return,
        "returns": returns,
        "replay": {name: column[order] for name, column in D.items()},  # oldest first
        "parameters": {
            "log_alpha": log_alpha.detach().clone(),
            **{f"{n}.{name}": x.detach().clone() for n, net in networks.items() for name, x in net.named_parameters()},
        },
    }


if __name__ == "__main__":
    train(tyro.cli(Args))
