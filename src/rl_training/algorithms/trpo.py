"""Trust region policy optimisation (Schulman et al. 2015, arXiv:1502.05477)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.algorithms.bases.on_policy_actor_critic import AdvantageAlgorithm, AdvantageConfig
from rl_training.contracts.batches import Observation, Progress, RolloutBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, integers, log_uniform, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.functional.policies import explained_variance, normalize, value_loss
from rl_training.functional.trust_region import (
    LineSearch,
    assign,
    conjugate_gradient,
    fisher_product,
    flatten,
    largest_step,
    line_search,
)
from rl_training.policies.distributions import frozen, kl_divergence
from rl_training.policies.networks import TrainingMode
from rl_training.policies.parameters import GradientStep, ParameterStore


@documented
@dataclass
class TRPOConfig(AdvantageConfig):
    """Settings of TRPO. The defaults are those of SB3-contrib, with its 2048 steps spread over 8 environments."""

    learning_rate: ScheduleOrFloat = setting(
        1e-3, "Learning rate of the critic, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    max_grad_norm: float | None = setting(
        None, "Clip the critic's gradient to this global norm; none to not clip.", gt=0
    )
    target_kl: float = setting(
        0.01,
        "Trust region: largest mean KL divergence from the old policy to the new one.",
        gt=0,
        search=log_uniform(1e-3, 0.1),
    )
    cg_iterations: int = setting(
        15, "Iterations of the conjugate gradient method.", ge=1, le=10_000, search=integers(5, 30)
    )
    cg_damping: float = setting(
        0.1, "Damping: added to the diagonal of the Fisher matrix.", ge=0, search=log_uniform(1e-3, 0.5)
    )
    line_search_tries: int = setting(10, "Step sizes that the line search tries.", ge=1, le=10_000)
    line_search_shrink: float = setting(
        0.8, "Factor between step sizes of the line search.", gt=0, lt=1, search=uniform(0.5, 0.9)
    )
    critic_epochs: int = setting(
        10, "Epochs of the critic (passes over each rollout).", ge=1, le=10_000, search=integers(5, 30)
    )
    minibatch_size: int = setting(
        128, "Transitions per gradient step of the critic.", ge=1, le=10_000_000, search=choices(32, 64, 128, 256, 512)
    )

    def rows_per_update(self, num_envs: int) -> int:
        """See `AlgorithmConfig.rows_per_update`: for the critic, which makes most of the updates."""
        return self.minibatch_size

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.network.shared:
            found.append("network > shared: must be false for TRPO, which updates the actor separately from the critic")
        return found


class TRPOAlgorithm(AdvantageAlgorithm[TRPOConfig]):
    """One natural-gradient step of the actor per rollout, within a KL limit; the critic is trained separately."""

    def __init__(self, config: TRPOConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        critic = nn.ModuleList([self.policy.critic, self.policy.value_head])
        self.critic_store = ParameterStore(critic, config.optimizer)
        self.training = TrainingMode(self.policy)
        self.critic_step = GradientStep(
            self.critic_store, self.critic_losses, module=self.policy, max_grad_norm=config.max_grad_norm
        )

    def critic_losses(self, obs: Observation, returns: Tensor) -> dict[str, Tensor]:
        """The value loss of a minibatch."""
        return {"loss": value_loss(self.policy.values(obs), returns)}

    def update(self, batch: RolloutBuffer, progress: Progress) -> UpdateResult:
        """One step of the actor and several epochs of the critic on a rollout."""
        config = self.config
        self.estimate_returns(batch)
        data = batch.flatten(self.device)
        if config.normalize_advantage:
            data = data._replace(advantages=normalize(data.advantages))
        learning_rate = value_of(config.learning_rate, progress.fraction)
        with self.training:
            surrogate, search = self._move_actor(data)
        critic_losses, norms = self._fit_critic(data, learning_rate)
        with torch.no_grad():
            entropy = self.policy.distribution(data.obs).entropy().mean()
        return UpdateResult(
            metrics={
                "loss/policy": -(surrogate + search.gain),
                "loss/critic": critic_losses.mean(),
                "policy/entropy": entropy,
                "policy/approx_kl": search.kl,
                "policy/step_share": search.share,
                "value/explained_variance": explained_variance(data.values, data.returns),
                "train/gradient_norm": norms.mean(),
                "train/learning_rate": learning_rate,
            },
            num_updates=len(critic_losses) + 1,
        )

    def _move_actor(self, data: RolloutBatch) -> tuple[Tensor, LineSearch]:
        """Maximise E[pi / pi_old A] within a mean KL (eq. 14): natural gradient, then line search along it."""
        config, policy = self.config, self.policy
        parameters = [p for part in (policy.actor, policy.head) for p in part.parameters() if p.requires_grad]
        actions = policy.head.flatten(data.actions)

        current = policy.distribution(data.obs)
        with torch.no_grad():
            old = frozen(policy.distribution(data.obs))
            old_log_prob = old.log_prob(actions)
        surrogate = (torch.exp(current.log_prob(actions) - old_log_prob) * data.advantages).mean()
        gradient = flatten(torch.autograd.grad(surrogate, parameters, retain_graph=True, materialize_grads=True))
        product = fisher_product(kl_divergence(old, current).mean(), parameters, config.cg_damping)
        direction = conjugate_gradient(product, gradient, num_iterations=config.cg_iterations)
        step = largest_step(direction, product(direction), config.target_kl)
        surrogate, start = surrogate.detach(), flatten(tuple(parameters)).detach()

        @torch.no_grad()
        def evaluate(share: float) -> tuple[Tensor, Tensor]:
            assign(parameters, start + share * step if share else start)  # 0 * inf would be NaN
            new = policy.distribution(data.obs)
            ratio = torch.exp(new.log_prob(actions) - old_log_prob)
            return (ratio * data.advantages).mean() - surrogate, kl_divergence(old, new).mean()

        return surrogate, line_search(
            evaluate, max_kl=config.target_kl, shrink=config.line_search_shrink, num_tries=config.line_search_tries
        )

    def _fit_critic(self, data: RolloutBatch, learning_rate: float) -> tuple[Tensor, Tensor]:
        """Train the critic for several epochs; returns the losses and gradient norms of all steps."""
        losses, norms = [], []
        for _ in range(self.config.critic_epochs):
            for rows in self.minibatches(data, self.config.minibatch_size):
                found = self.critic_step(learning_rate, rows.obs, rows.returns)
                losses.append(found["loss"])
                norms.append(found["gradient_norm"])
        return torch.stack(losses), torch.stack(norms)


SPEC = AlgorithmSpec(
    name="trpo",
    title="TRPO",
    config=TRPOConfig,
    algorithm=TRPOAlgorithm,
    regimes=(Regime.ON_POLICY,),
    action_spaces=(spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box),
    paper="Schulman et al. 2015, Trust Region Policy Optimization, arXiv:1502.05477",
    default_num_envs=8,
)
