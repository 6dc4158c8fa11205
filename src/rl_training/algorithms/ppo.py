"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.on_policy_actor_critic import ActorCriticAlgorithm, ActorCriticConfig
from rl_training.contracts.batches import Progress, RolloutBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.functional.policies import (
    approx_kl,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    normalize,
    value_loss,
)
from rl_training.policies.parameters import GradientStep


@documented
@dataclass
class PPOConfig(ActorCriticConfig):
    """Settings of PPO.

    The defaults are those of Stable-Baselines3, with its 2048 steps spread over 8 environments. The value loss here is
    half the squared error, as in CleanRL, so the same `vf_coef` gives it half the weight.
    """

    minibatch_size: int = setting(
        64,
        "Minibatch size in transitions (each rollout is split into equal parts of about this size).",
        ge=1,
        le=10_000_000,
        search=choices(32, 64, 128, 256, 512),
    )
    num_epochs: int = setting(
        10, "Epochs (passes over each rollout).", ge=1, le=10_000, search=choices(1, 3, 5, 10, 20)
    )
    clip_coef: ScheduleOrFloat = setting(
        0.2, "Clip range of the probability ratio, a number or a schedule.", gt=0, search=uniform(0.1, 0.4)
    )
    clip_value_coef: float | None = setting(None, "Clip range of the value function; none to not clip.", gt=0)
    target_kl: float | None = setting(
        None, "Stop the epochs early when the approximate KL divergence exceeds this; none for no limit.", gt=0
    )

    def rows_per_update(self, num_envs: int) -> int:
        """See `AlgorithmConfig.rows_per_update`."""
        return self.minibatch_size


def ppo_loss(
    minibatch: Mapping[str, Tensor],
    *,
    clip_coef: float | Tensor,
    ent_coef: float,
    vf_coef: float,
    clip_value_coef: float | None = None,
) -> dict[str, Tensor]:
    """The loss of one minibatch, as a pure function of tensors [B].

    Keys: `logprobs` (new, with gradient), `old_logprobs`, `advantages`, `returns`, `values` (old, used only for
    clipping), `new_values` and `entropy` (with gradient). Advantages are not normalised here: PPO normalises them per
    minibatch before it calls this function.

    Returns `loss = policy_loss + vf_coef * value_loss - ent_coef * entropy_loss`, where

    - `policy_loss` is the mean of -min(ratio * A, clip(ratio, 1 - clip_coef, 1 + clip_coef) * A);
    - `value_loss` is half the mean squared error (clipped around the old values if `clip_value_coef` is given);
    - `entropy_loss` is the mean entropy (larger means more random), subtracted as a bonus;

    and, without gradient, `approx_kl` (the mean of (r - 1) - log r) and `clip_fraction`.
    """
    log_ratio = minibatch["logprobs"] - minibatch["old_logprobs"]
    ratio = log_ratio.exp()
    policy_loss = clipped_surrogate(ratio, minibatch["advantages"], clip_coef)
    if clip_value_coef is None:
        critic_loss = value_loss(minibatch["new_values"], minibatch["returns"])
    else:
        critic_loss = clipped_value_loss(
            minibatch["new_values"], minibatch["values"], minibatch["returns"], clip_value_coef
        )
    entropy = minibatch["entropy"].mean()
    with torch.no_grad():
        kl = approx_kl(log_ratio)
        clip_fraction = ((ratio - 1.0).abs() > clip_coef).float().mean()
    return {
        "loss": policy_loss + vf_coef * critic_loss - ent_coef * entropy,
        "policy_loss": policy_loss,
        "value_loss": critic_loss,
        "entropy_loss": entropy,
        "approx_kl": kl,
        "clip_fraction": clip_fraction,
    }


Evaluation = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities, entropies and values [B] of a minibatch under the current policy, with gradients."""


def minibatch_losses(config: PPOConfig, rows: RolloutBatch, judged: Evaluation, clip_coef: Tensor) -> dict[str, Tensor]:
    """`ppo_loss` of a minibatch, given its evaluation by the current policy."""
    logprobs, entropy, new_values = judged
    return ppo_loss(
        {
            "logprobs": logprobs,
            "old_logprobs": rows.logprobs,
            "advantages": normalize(rows.advantages) if config.normalize_advantage else rows.advantages,
            "returns": rows.returns,
            "values": rows.values,
            "new_values": new_values,
            "entropy": entropy,
        },
        clip_coef=clip_coef.to(rows.advantages.dtype),
        ent_coef=config.ent_coef,
        vf_coef=config.vf_coef,
        clip_value_coef=config.clip_value_coef,
    )


def ppo_epochs(
    config: PPOConfig,
    step: GradientStep,
    data: RolloutBatch,
    epoch: Callable[[], Iterable[tuple[Any, ...]]],
    progress: Progress,
) -> UpdateResult:
    """Run several epochs over a rollout, with one gradient step per minibatch.

    `epoch()` yields the minibatches of `data` for one epoch, each as the arguments of `step` after `clip_coef`.
    """
    learning_rate = value_of(config.learning_rate, progress.fraction)
    clip_coef = value_of(config.clip_coef, progress.fraction)
    steps: list[dict[str, Tensor]] = []
    for _ in range(config.num_epochs):
        epoch_start = len(steps)
        for minibatch in epoch():
            steps.append(step(learning_rate, clip_coef, *minibatch))
        if config.target_kl is not None and _mean(steps[epoch_start:], "approx_kl") > config.target_kl:
            break
    return UpdateResult(
        metrics={
            "loss/policy": _mean(steps, "policy_loss"),
            "loss/critic": _mean(steps, "value_loss"),
            "loss/total": _mean(steps, "loss"),
            "policy/entropy": _mean(steps, "entropy_loss"),
            "policy/approx_kl": steps[-1]["approx_kl"],
            "policy/clip_fraction": _mean(steps, "clip_fraction"),
            "policy/clip_coef": clip_coef,
            "value/explained_variance": explained_variance(data.values, data.returns),
            "train/gradient_norm": _mean(steps, "gradient_norm"),
            "train/learning_rate": learning_rate,
        },
        num_updates=len(steps),
    )


def _mean(steps: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([step[name] for step in steps]).mean()


class PPOAlgorithm(ActorCriticAlgorithm[PPOConfig]):
    """Several epochs of minibatch steps on the clipped surrogate objective per rollout."""

    def losses(self, clip_coef: Tensor, rows: RolloutBatch) -> dict[str, Tensor]:
        """See `ActorCriticAlgorithm.losses`: for one minibatch."""
        return minibatch_losses(self.config, rows, self.policy.evaluate_actions(rows.obs, rows.actions), clip_coef)

    def update(self, batch: RolloutBuffer, progress: Progress) -> UpdateResult:
        """Several epochs of gradient steps on a rollout."""
        self.estimate_returns(batch)
        data = batch.flatten(self.device)

        def epoch() -> Iterator[tuple[RolloutBatch]]:
            for minibatch in self.minibatches(data, self.config.minibatch_size):
                yield (minibatch,)

        return ppo_epochs(self.config, self.step, data, epoch, progress)


SPEC = AlgorithmSpec(
    name="ppo",
    title="PPO",
    config=PPOConfig,
    algorithm=PPOAlgorithm,
    regimes=(Regime.ON_POLICY,),
    action_spaces=(spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box),
    paper="Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347",
    default_num_envs=8,
)
