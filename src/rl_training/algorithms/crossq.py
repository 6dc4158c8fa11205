"""CrossQ (Bhatt et al. 2024, arXiv:1902.05605): SAC with batch-normalised critics and without target networks.

One forward pass evaluates the critics on current and next state-action pairs together. Both are then normalised with
the same statistics, which is what makes batch norm work here and target networks superfluous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.sac import SACAlgorithm, SACConfig
from rl_training.contracts.batches import Observation, TransitionBatch
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.ensembles import soft_target
from rl_training.policies.actors import StochasticNetworkConfig
from rl_training.policies.layers import Norm
from rl_training.policies.optimizers import OptimizerConfig


def _quick_adam() -> OptimizerConfig:
    return OptimizerConfig(eps=1e-8, betas=(0.5, 0.999))


@documented
@dataclass(kw_only=True)
class CrossQNetworkConfig(StochasticNetworkConfig):
    """Networks of a stochastic actor and its critics, with batch renormalisation and wide critics."""

    critic_sizes: tuple[int, ...] = setting(
        (2048, 2048),
        "Widths of each critic's hidden layers.",
        ge=1,
        search=choices((512, 512), (1024, 1024), (2048, 2048)),
    )
    actor_norm: Norm = setting("batch_renorm", "Normalisation in the actor's hidden layers.", added_later=True)
    critic_norm: Norm = setting("batch_renorm", "Normalisation in the critic's hidden layers.", added_later=True)


@documented
@dataclass
class CrossQConfig(SACConfig):
    """Settings of CrossQ. The defaults are the paper's, except for `learning_starts` (there 5,000)."""

    learning_rate: ScheduleOrFloat = setting(
        1e-3, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-4, 1e-2)
    )
    tau: float = setting(0.005, "Not used, because there are no target networks; must not be changed.", ge=0, le=1)
    policy_delay: int = setting(
        3, "Gradient steps of the critics per gradient step of the actor and the temperature.", ge=1
    )
    network: CrossQNetworkConfig = setting(factory=CrossQNetworkConfig, help="Networks.")
    optimizer: OptimizerConfig = setting(factory=_quick_adam, help="Optimizer.")

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.tau != type(self).tau:
            found.append(f"tau: CrossQ has no target networks; leave it at {type(self).tau}, got {self.tau}")
        return found

    def unused(self) -> set[str]:
        """See `AlgorithmConfig.unused`."""
        return super().unused() | {"tau"}


class CrossQAlgorithm(SACAlgorithm[CrossQConfig]):
    """SAC whose targets come from the critics themselves, in the same forward pass as their predictions.

    Only the network that a gradient step trains is in training mode: the critics' step uses the actor's running
    statistics, and the actor's step those of the critics.
    """

    has_critic_target = False
    trains_one_network = True

    def critic_losses(self, batch: TransitionBatch, *, noise: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.critic_losses`: predictions and next values are from one forward pass."""
        with torch.no_grad():
            next_action, next_log_prob = self.policy.actor.sample(batch.next_obs, noise)
        actions = torch.cat((batch.action.reshape(next_action.shape), next_action))
        q_pred, next_q = self.policy.critic(joined(batch.obs, batch.next_obs), actions).chunk(2, dim=1)
        q_target = soft_target(batch.reward, batch.discount, next_q.detach(), next_log_prob, alpha)
        return self.td_losses(batch, q_pred, q_target)


def joined(first: Observation, second: Observation) -> Observation:
    """Two batches of observations as one."""
    if isinstance(first, dict):
        assert isinstance(second, dict)
        return {key: torch.cat((part, second[key])) for key, part in first.items()}
    assert isinstance(second, Tensor)
    return torch.cat((first, second))


SPEC = AlgorithmSpec(
    name="crossq",
    title="CrossQ",
    config=CrossQConfig,
    algorithm=CrossQAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Bhatt et al. 2024, CrossQ: Batch Normalization in Deep Reinforcement Learning for Greater Sample Efficiency "
    "and Simplicity, arXiv:1902.05605",
)
