"""ReBRAC (Tarasov et al. 2023, arXiv:2305.09836): TD3 that penalises the distance from recorded actions twice."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.td3 import TD3Algorithm, TD3Config
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import SameAs, choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.ensembles import pessimistic_target
from rl_training.functional.policies import smoothed_action
from rl_training.policies.actors import OffPolicyNetworkConfig
from rl_training.policies.layers import Norm


@documented
@dataclass(kw_only=True)
class ReBRACNetworkConfig(OffPolicyNetworkConfig):
    """Networks of an actor and its critics, with three hidden layers, and layer norm in the critics."""

    actor_sizes: tuple[int, ...] = setting(
        (256, 256, 256),
        "Widths of the actor's hidden layers.",
        ge=1,
        search=choices((256, 256), (256, 256, 256), (400, 300)),
    )
    critic_sizes: tuple[int, ...] = setting(
        (256, 256, 256), "Widths of each critic's hidden layers.", ge=1, search=SameAs("network.actor_sizes")
    )
    critic_norm: Norm = setting("layer", "Normalisation in the critic's hidden layers.", added_later=True)


@documented
@dataclass
class ReBRACConfig(TD3Config):
    """Settings of ReBRAC. The defaults are those of the paper for the locomotion tasks of D4RL."""

    batch_size: int = setting(1024, "Transitions per gradient step.", ge=1, search=choices(256, 512, 1024))
    learning_rate: ScheduleOrFloat = setting(
        1e-3, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    actor_penalty: float = setting(
        0.01, "Weight of the distance from recorded actions in the actor's loss.", ge=0, search=log_uniform(1e-4, 1.0)
    )
    critic_penalty: float = setting(
        0.01, "Weight of the distance from recorded next actions in targets.", ge=0, search=log_uniform(1e-4, 1.0)
    )
    network: ReBRACNetworkConfig = setting(factory=ReBRACNetworkConfig, help="Networks.")


class ReBRACAlgorithm(TD3Algorithm[ReBRACConfig]):
    """TD3 with decoupled penalties in the actor's loss and in the targets, and layer norm in the critics."""

    columns = ("next_action",)

    def q_target(self, batch: TransitionBatch, *, noise: Tensor | None) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: the value of the next action minus its penalty."""
        next_action: Tensor = self.actor_target.module(batch.next_obs)
        if noise is not None:
            next_action = smoothed_action(next_action, self.config.target_noise * noise, self.config.target_noise_clip)
        distance = (next_action - batch.extras["next_action"].flatten(1)).square().sum(1)
        next_q = self.critic_target.module(batch.next_obs, next_action) - self.config.critic_penalty * distance
        return pessimistic_target(batch.reward, batch.discount, next_q)

    def actor_losses(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`."""
        action = self.policy.actor(batch.obs)
        q = self.policy.critic(batch.obs, action).amin(0)
        distance = (action - batch.action.flatten(1)).square().sum(1)
        return {"loss": self.config.actor_penalty * distance.mean() - q.mean() / q.detach().abs().mean()}


SPEC = AlgorithmSpec(
    name="rebrac",
    title="ReBRAC",
    config=ReBRACConfig,
    algorithm=ReBRACAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Tarasov et al. 2023, Revisiting the Minimalist Approach to Offline RL, arXiv:2305.09836",
)
