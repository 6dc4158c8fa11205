"""Randomized ensembled double Q-learning (Chen et al. 2021, arXiv:2101.05982): SAC with many critics, updated often.

Targets take the minimum over a few critics, drawn at random for each update from a large ensemble. That keeps the bias
of the values small and steady, so that 20 gradient steps per environment step do not diverge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.sac import SACAlgorithm, SACConfig
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.ensembles import soft_target
from rl_training.policies.actors import MeanCriticPolicy


@documented
@dataclass
class REDQConfig(SACConfig):
    """Settings of REDQ. The defaults are the paper's, except for `learning_starts` (there 5,000)."""

    updates_per_step: float = setting(
        20.0,
        "Gradient steps per environment step, counted over all environments (0.25, 1, 20).",
        ge=0,
        search=choices(5.0, 10.0, 20.0),
    )
    num_critics: int = setting(10, "Number of critics; the actor maximises their mean.", ge=1)
    num_target_critics: int = setting(
        2, "Critics drawn at random for each update; targets use their minimum.", ge=1, search=choices(1, 2, 3)
    )
    policy_delay: int = setting(
        20, "Gradient steps of the critics per gradient step of the actor and the temperature.", ge=1
    )

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.num_target_critics > self.num_critics:
            found.append(
                f"num_target_critics: must be at most num_critics ({self.num_critics}), got {self.num_target_critics}"
            )
        return found


REDQConfigT = TypeVar("REDQConfigT", bound=REDQConfig)


class REDQAlgorithm(SACAlgorithm[REDQConfigT], Generic[REDQConfigT]):
    """SAC with an ensemble of critics: targets use a random few of them, the actor the mean of all.

    If the critics have dropout, it is active in targets too, as in DroQ.
    """

    policy_class = MeanCriticPolicy
    drops_in_target = True

    def target_draws(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """See `SACAlgorithm.target_draws`: also the indices [M] of the critics that the target uses."""
        config = self.config
        members = self.rng.choice(config.num_critics, config.num_target_critics, replace=False)
        return {**super().target_draws(batch), "members": torch.from_numpy(members).to(self.device)}

    def q_target(  # type: ignore[override]  # `critic_losses` passes what `target_draws` returns
        self, batch: TransitionBatch, *, noise: Tensor, members: Tensor, alpha: Tensor
    ) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: the soft target, with the critics `members` only."""
        next_action, next_log_prob = self.policy.actor.sample(batch.next_obs, noise)
        next_q = self.critic_target.module(batch.next_obs, next_action, members)
        return soft_target(batch.reward, batch.discount, next_q, next_log_prob, alpha)


SPEC = AlgorithmSpec(
    name="redq",
    title="REDQ",
    config=REDQConfig,
    algorithm=REDQAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Chen et al. 2021, Randomized Ensembled Double Q-Learning: Learning Fast Without a Model, arXiv:2101.05982",
)
