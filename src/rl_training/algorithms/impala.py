"""IMPALA: an actor-critic that corrects for the age of the acting policy (Espeholt et al. 2018, arXiv:1802.01561)."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.vtrace_actor_critic import VTraceAlgorithm, VTraceConfig
from rl_training.contracts.batches import Progress, RolloutBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.functional.policies import explained_variance, normalize, value_loss


@documented
@dataclass
class IMPALAConfig(VTraceConfig):
    """Settings of IMPALA.

    The paper uses RMSProp (`optimizer.name`) and sums its losses over the batch; here they are means, so learning rates
    of other implementations have to be adapted.
    """

    num_steps: int = setting(20, "Steps of each environment per rollout.", ge=1, search=choices(10, 20, 40, 80))
    learning_rate: ScheduleOrFloat = setting(
        6e-4, "Learning rate, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    normalize_advantage: bool = setting(
        False,
        "Normalise advantages to zero mean and unit standard deviation in each gradient step.",
        search=choices(False, True),
    )
    max_grad_norm: float | None = setting(
        40.0, "Clip the gradient to this global norm; none to not clip.", gt=0, search=choices(0.5, 5.0, 40.0)
    )
    ent_coef: float = setting(0.01, "Entropy coefficient.", ge=0, search=choices(0.0, 1e-3, 3e-3, 0.01, 0.03))


class IMPALAAlgorithm(VTraceAlgorithm[IMPALAConfig]):
    """One policy-gradient step per rollout, on V-trace advantages and value targets."""

    def losses(self, data: RolloutBatch) -> dict[str, Tensor]:
        """See `ActorCriticAlgorithm.losses`: for a whole rollout."""
        config = self.config
        advantages = normalize(data.advantages) if config.normalize_advantage else data.advantages
        logprobs, entropies, values = self.policy.evaluate_actions(data.obs, data.actions)
        policy_loss = -(advantages * logprobs).mean()
        critic_loss = value_loss(values, data.returns)
        entropy = entropies.mean()
        loss = policy_loss + config.vf_coef * critic_loss - config.ent_coef * entropy
        ratio = (logprobs - data.logprobs).exp().mean().detach()
        return {
            "loss": loss, "policy_loss": policy_loss, "critic_loss": critic_loss, "entropy": entropy, "ratio": ratio,
        }  # fmt: skip

    def update(self, batch: RolloutBuffer, progress: Progress) -> UpdateResult:
        """One gradient step on a rollout."""
        self.estimate_vtrace(batch, self.policy)
        data = batch.flatten(self.device)
        learning_rate = value_of(self.config.learning_rate, progress.fraction)
        found = self.step(learning_rate, data)
        return UpdateResult(
            metrics={
                "loss/policy": found["policy_loss"],
                "loss/critic": found["critic_loss"],
                "loss/total": found["loss"],
                "policy/entropy": found["entropy"],
                "policy/importance_ratio": found["ratio"],
                "value/explained_variance": explained_variance(data.values, data.returns),
                "train/gradient_norm": found["gradient_norm"],
                "train/learning_rate": learning_rate,
            }
        )


SPEC = AlgorithmSpec(
    name="impala",
    title="IMPALA",
    config=IMPALAConfig,
    algorithm=IMPALAAlgorithm,
    regimes=(Regime.ON_POLICY,),
    action_spaces=(spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box),
    paper="Espeholt et al. 2018, IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner "
    "Architectures, arXiv:1802.01561",
    default_num_envs=8,
)
