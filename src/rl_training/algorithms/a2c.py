"""Advantage actor-critic, the synchronous form of A3C (Mnih et al. 2016, arXiv:1602.01783)."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.on_policy_actor_critic import ActorCriticAlgorithm, ActorCriticConfig
from rl_training.contracts.batches import Progress, RolloutBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.functional.policies import explained_variance, normalize, value_loss
from rl_training.policies.optimizers import OptimizerConfig


def _rmsprop() -> OptimizerConfig:
    return OptimizerConfig(name="rmsprop", eps=1e-5)


@documented
@dataclass
class A2CConfig(ActorCriticConfig):
    """Settings of A2C.

    The defaults are those of Stable-Baselines3, for 8 environments. The value loss here is half the squared error, so
    the same `vf_coef` gives it half the weight.
    """

    num_steps: int = setting(
        5, "Steps of each environment per rollout.", ge=1, le=1_000_000, search=choices(5, 8, 16, 32, 64)
    )
    learning_rate: ScheduleOrFloat = setting(
        7e-4, "Learning rate, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    gae_lambda: float = setting(
        1.0,
        "Lambda of generalised advantage estimation; 1 is the n-step return.",
        ge=0,
        le=1,
        search=choices(0.8, 0.9, 0.95, 0.98, 1.0),
    )
    normalize_advantage: bool = setting(
        False,
        "Normalise advantages to zero mean and unit standard deviation in each gradient step.",
        search=choices(False, True),
    )
    optimizer: OptimizerConfig = setting(
        factory=_rmsprop, help="Optimizer.", search={"name": choices("adam", "rmsprop")}
    )


class A2CAlgorithm(ActorCriticAlgorithm[A2CConfig]):
    """One policy-gradient step per rollout."""

    def losses(self, data: RolloutBatch) -> dict[str, Tensor]:
        """See `ActorCriticAlgorithm.losses`: for a whole rollout."""
        config = self.config
        advantages = normalize(data.advantages) if config.normalize_advantage else data.advantages
        logprobs, entropies, values = self.policy.evaluate_actions(data.obs, data.actions)
        policy_loss = -(advantages * logprobs).mean()
        critic_loss = value_loss(values, data.returns)
        entropy = entropies.mean()
        loss = policy_loss + config.vf_coef * critic_loss - config.ent_coef * entropy
        return {"loss": loss, "policy_loss": policy_loss, "critic_loss": critic_loss, "entropy": entropy}

    def update(self, batch: RolloutBuffer, progress: Progress) -> UpdateResult:
        """One gradient step on a rollout."""
        self.estimate_returns(batch)
        data = batch.flatten(self.device)
        learning_rate = value_of(self.config.learning_rate, progress.fraction)
        found = self.step(learning_rate, data)
        return UpdateResult(
            metrics={
                "loss/policy": found["policy_loss"],
                "loss/critic": found["critic_loss"],
                "loss/total": found["loss"],
                "policy/entropy": found["entropy"],
                "value/explained_variance": explained_variance(data.values, data.returns),
                "train/gradient_norm": found["gradient_norm"],
                "train/learning_rate": learning_rate,
            }
        )


SPEC = AlgorithmSpec(
    name="a2c",
    title="A2C",
    config=A2CConfig,
    algorithm=A2CAlgorithm,
    regimes=(Regime.ON_POLICY,),
    action_spaces=(spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box),
    paper="Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning, arXiv:1602.01783",
    default_num_envs=8,
)
