"""The vanilla policy gradient: REINFORCE with a learned baseline (Williams 1992, doi:10.1007/BF00992696)."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.on_policy_actor_critic import ActorCriticAlgorithm, ActorCriticConfig
from rl_training.contracts.batches import Progress, RolloutBatch, UpdateResult
from rl_training.contracts.schedule import value_of
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.functional.policies import normalize, value_loss


@documented
@dataclass
class VPGConfig(ActorCriticConfig):
    """Settings of the vanilla policy gradient."""

    baseline: bool = setting(True, "Subtract the critic's value from the return.")


class VPGAlgorithm(ActorCriticAlgorithm[VPGConfig]):
    """One policy-gradient step on each rollout."""

    def losses(self, data: RolloutBatch) -> dict[str, Tensor]:
        """See `ActorCriticAlgorithm.losses`."""
        weights = data.advantages if self.config.baseline else data.returns
        if self.config.normalize_advantage:
            weights = normalize(weights)
        logprobs, entropy, values = self.policy.evaluate_actions(data.obs, data.actions)
        policy_loss = -(weights * logprobs).mean()
        critic_loss = value_loss(values, data.returns)
        loss = policy_loss + self.config.vf_coef * critic_loss - self.config.ent_coef * entropy.mean()
        return {"loss": loss, "policy_loss": policy_loss, "critic_loss": critic_loss}

    def update(self, batch: RolloutBuffer, progress: Progress) -> UpdateResult:
        """Learn from one rollout."""
        self.estimate_returns(batch)
        learning_rate = value_of(self.config.learning_rate, progress.fraction)
        found = self.step(learning_rate, batch.flatten(self.device))
        losses = {"loss/policy": found["policy_loss"], "loss/critic": found["critic_loss"]}
        return UpdateResult({**losses, "train/gradient_norm": found["gradient_norm"]})


SPEC = AlgorithmSpec(
    name="vpg",
    title="VPG",
    config=VPGConfig,
    algorithm=VPGAlgorithm,
    regimes=(Regime.ON_POLICY,),
    action_spaces=(spaces.Discrete, spaces.Box),
    paper="Williams 1992, Simple Statistical Gradient-Following Algorithms, doi:10.1007/BF00992696",
    default_num_envs=8,
)
