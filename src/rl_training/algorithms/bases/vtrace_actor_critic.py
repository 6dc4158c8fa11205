"""The base of IMPALA and APPO: advantages and value targets that correct for the age of the acting policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rl_training.algorithms.bases.on_policy_actor_critic import ActorCriticAlgorithm, ActorCriticConfig
from rl_training.contracts.arrays import ArrayObservation, map_observation
from rl_training.contracts.settings import choices, documented, setting
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.policies.actor_critic import ActorCriticPolicy


@documented
@dataclass
class VTraceConfig(ActorCriticConfig):
    """Settings shared by actor-critics that learn from rollouts of older policies."""

    gae_lambda: float = setting(1.0, "Lambda of the value targets: the decay of V-trace's corrections.", ge=0, le=1)
    clip_rho: float = setting(
        1.0, "Upper limit of the importance ratio of each step; it decides whose values are learned.", gt=0
    )
    clip_c: float = setting(
        1.0, "Upper limit of the importance ratios that carry corrections back in time.", gt=0, search=choices(0.5, 1.0)
    )


VTraceConfigT = TypeVar("VTraceConfigT", bound=VTraceConfig)


class VTraceAlgorithm(ActorCriticAlgorithm[VTraceConfigT], Generic[VTraceConfigT]):
    """Base class of actor-critics with V-trace."""

    def estimate_vtrace(self, rollout: RolloutBuffer, judge: ActorCriticPolicy) -> None:
        """Compute V-trace advantages and value targets with the ratios and values of a policy.

        Episodes that were cut are bootstrapped at their true last observation. The values in the rollout become those
        of `judge`.
        """
        assert rollout.last_obs is not None
        size = rollout.size

        def rows(store: Tensor) -> Tensor:
            return store[:size].flatten(0, 1).to(self.device)

        def values(obs: ArrayObservation) -> Tensor:
            return judge.value(map_observation(lambda x: torch.from_numpy(x).to(self.device), obs)).cpu()

        logprobs, judged = judge.score(map_observation(rows, rollout.obs), rows(rollout.actions))
        rollout.values[:size] = judged.view(size, -1).cpu()
        final_obs = rollout.stacked_final_obs()
        rollout.compute_vtrace(
            logprobs.view(size, -1).cpu(),
            last_value=values(rollout.last_obs),
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            clip_rho=self.config.clip_rho,
            clip_c=self.config.clip_c,
            final_values=None if final_obs is None else values(final_obs),
        )
