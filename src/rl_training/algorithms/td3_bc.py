"""TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860): TD3 whose actor is also pulled towards the recorded actions."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.td3 import TD3Algorithm, TD3Config
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime


@documented
@dataclass
class TD3BCConfig(TD3Config):
    """Settings of TD3+BC. The defaults are the paper's; it also normalises observations (`normalize_obs`)."""

    learning_rate: ScheduleOrFloat = setting(
        3e-4, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    q_weight: float = setting(
        2.5,
        "Weight of the Q-values, divided by their mean absolute value, against behaviour cloning (alpha in the paper).",
        ge=0,
        search=log_uniform(0.5, 20.0),
    )


class TD3BCAlgorithm(TD3Algorithm[TD3BCConfig]):
    """TD3 with a behaviour-cloning term in the actor's loss."""

    def actor_losses(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: eq. 3 and 5 of the paper."""
        action = self.policy.actor(batch.obs)
        q = self.policy.critic(batch.obs, action, slice(1))
        cloning = (action - batch.action.flatten(1)).square().mean()
        return {"loss": cloning - self.config.q_weight * q.mean() / q.detach().abs().mean()}


SPEC = AlgorithmSpec(
    name="td3_bc",
    title="TD3BC",
    config=TD3BCConfig,
    algorithm=TD3BCAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Fujimoto and Gu 2021, A Minimalist Approach to Offline Reinforcement Learning, arXiv:2106.06860",
)
