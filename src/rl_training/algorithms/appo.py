"""APPO: PPO for rollouts of older policies, with V-trace and a target network (Luo et al. 2020, arXiv:1912.00167)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.vtrace_actor_critic import VTraceAlgorithm, VTraceConfig
from rl_training.contracts.batches import Progress, RolloutBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.data.recent_rollouts import RecentRollouts
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.functional.policies import (
    approx_kl,
    clipped_surrogate,
    explained_variance,
    normalize,
    target_ratio,
    value_loss,
)
from rl_training.policies.actor_critic import ActorCriticPolicy
from rl_training.policies.targets import Target


@documented
@dataclass
class APPOConfig(VTraceConfig):
    """Settings of APPO."""

    num_steps: int = setting(64, "Steps of each environment per rollout.", ge=1, search=choices(16, 32, 64, 128))
    minibatch_size: int = setting(
        128,
        "Minibatch size in transitions (each rollout is split into equal parts of about this size).",
        ge=1,
        search=choices(64, 128, 256, 512),
    )
    num_epochs: int = setting(1, "Epochs (passes over each kept rollout) per update.", ge=1, search=choices(1, 2, 4))
    num_rollouts: int = setting(
        4, "Rollouts that are kept; each is used in so many updates.", ge=1, search=choices(1, 2, 4, 8)
    )
    clip_coef: ScheduleOrFloat = setting(
        0.2, "Clip range of the probability ratio, a number or a schedule.", gt=0, search=uniform(0.1, 0.4)
    )
    clip_target: float = setting(2.0, "Upper limit of the ratio of the acting policy to the target policy.", gt=0)
    target_update_every: int = setting(1, "Updates between copies of the policy to the target.", ge=1)
    tau: float = setting(1.0, "Soft update coefficient of the target; 1 copies the policy.", gt=0, le=1)

    def rows_per_update(self, num_envs: int) -> int:
        """See `AlgorithmConfig.rows_per_update`."""
        return self.minibatch_size


class APPOAlgorithm(VTraceAlgorithm[APPOConfig]):
    """Clipped minibatch steps on the latest rollouts, each judged by a target copy of the policy."""

    def __init__(self, config: APPOConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.target: Target[ActorCriticPolicy] = Target(self.policy, self.store)
        self.recent = RecentRollouts(config.num_rollouts)

    def start_from(self, weights: dict[str, Any]) -> None:
        """See `Algorithm.start_from`. The target gets the same weights."""
        super().start_from(weights)
        self.target.update()

    def losses(self, clip_coef: Tensor, rows: RolloutBatch, target_logprobs: Tensor) -> dict[str, Tensor]:
        """See `ActorCriticAlgorithm.losses`: for one minibatch."""
        config = self.config
        advantages = normalize(rows.advantages) if config.normalize_advantage else rows.advantages
        logprobs, entropies, values = self.policy.evaluate_actions(rows.obs, rows.actions)
        ratio = target_ratio(logprobs, target_logprobs, rows.logprobs, config.clip_target)
        policy_loss = clipped_surrogate(ratio, advantages, clip_coef.to(advantages.dtype))
        critic_loss = value_loss(values, rows.returns)
        entropy = entropies.mean()
        return {
            "loss": policy_loss + config.vf_coef * critic_loss - config.ent_coef * entropy,
            "policy_loss": policy_loss,
            "critic_loss": critic_loss,
            "entropy": entropy,
            "approx_kl": approx_kl(logprobs - target_logprobs).detach(),
            "ratio": (logprobs - rows.logprobs).exp().mean().detach(),
        }

    def update(self, batch: RolloutBuffer, progress: Progress) -> UpdateResult:
        """Gradient steps on the kept rollouts, oldest first; the target follows."""
        config = self.config
        learning_rate = value_of(config.learning_rate, progress.fraction)
        clip_coef = value_of(config.clip_coef, progress.fraction)
        self.recent.add(batch.export())
        steps: list[dict[str, Tensor]] = []
        data = target_logprobs = None
        for rollout in self.recent.rollouts:
            batch.join([rollout])
            self.estimate_vtrace(batch, self.target.module)
            data = batch.flatten(self.device)
            target_logprobs, _ = self.target.module.score(data.obs, data.actions)
            for _ in range(config.num_epochs):
                order = torch.from_numpy(self.rng.permutation(data.num_rows)).to(self.device)
                for part in order.tensor_split(max(1, round(data.num_rows / config.minibatch_size))):
                    steps.append(self.step(learning_rate, clip_coef, data.rows(part), target_logprobs[part]))
        if (progress.iterations + 1) % config.target_update_every == 0:
            self.target.update(config.tau)
        assert data is not None
        return UpdateResult(dict(self._metrics(steps, data, learning_rate)), num_updates=len(steps))

    def _metrics(
        self, steps: list[dict[str, Tensor]], data: RolloutBatch, learning_rate: float
    ) -> Mapping[str, Tensor | float]:
        names = {
            "loss/policy": "policy_loss",
            "loss/critic": "critic_loss",
            "loss/total": "loss",
            "policy/entropy": "entropy",
            "policy/approx_kl": "approx_kl",
            "policy/importance_ratio": "ratio",
            "train/gradient_norm": "gradient_norm",
        }
        means = {label: torch.stack([step[name] for step in steps]).mean() for label, name in names.items()}
        explained = explained_variance(data.values, data.returns)
        return {**means, "value/explained_variance": explained, "train/learning_rate": learning_rate}


SPEC = AlgorithmSpec(
    name="appo",
    title="APPO",
    config=APPOConfig,
    algorithm=APPOAlgorithm,
    regimes=(Regime.ON_POLICY,),
    action_spaces=(spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box),
    paper="Luo et al. 2020, IMPACT: Importance Weighted Asynchronous Architectures with Clipped Target Networks, "
    "arXiv:1912.00167",
    default_num_envs=8,
)
