"""The base of PPO, A2C and TRPO: an actor-critic policy, and advantages bootstrapped at truncations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.arrays import ArrayObservation, map_observation
from rl_training.contracts.batches import RolloutBatch
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import choices, documented, log_uniform, setting, uniform
from rl_training.contracts.spec import BoxActions, EnvSpec, OnPolicyConfig
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.policies.actor_critic import ActorCriticPolicy
from rl_training.policies.networks import ActorCriticNetworkConfig, seeded_weights
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore


@documented
@dataclass
class AdvantageConfig(OnPolicyConfig):
    """Settings shared by on-policy algorithms that estimate advantages."""

    learning_rate: ScheduleOrFloat = setting(
        3e-4, "Learning rate, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    gae_lambda: float = setting(
        0.95,
        "Lambda of generalised advantage estimation; 1 is the Monte Carlo return.",
        ge=0,
        le=1,
        search=choices(0.8, 0.9, 0.95, 0.98, 1.0),
    )
    normalize_advantage: bool = setting(
        True, "Normalise advantages to zero mean and unit standard deviation in each minibatch."
    )
    max_grad_norm: float | None = setting(
        0.5, "Clip the gradient to this global norm; none to not clip.", gt=0, search=choices(0.3, 0.5, 1.0, 2.0, 5.0)
    )
    box_actions: BoxActions = setting(
        "clip", "How continuous actions are kept within the bounds of a Box action space."
    )
    network: ActorCriticNetworkConfig = setting(factory=ActorCriticNetworkConfig, help="Networks.")
    optimizer: OptimizerConfig = setting(factory=OptimizerConfig, help="Optimizer.")


AdvantageConfigT = TypeVar("AdvantageConfigT", bound=AdvantageConfig)


class AdvantageAlgorithm(Algorithm[AdvantageConfigT], Generic[AdvantageConfigT]):
    """Base class of on-policy algorithms: builds the policy, estimates advantages, splits rollouts into minibatches."""

    policy: ActorCriticPolicy

    def __init__(self, config: AdvantageConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        with seeded_weights(rng):
            self.policy = ActorCriticPolicy(spec, config.network, config.box_actions).to(device)
        self.policy.rollout_steps = config.num_steps
        self.policy.eval()  # training mode is used only during gradient steps

    def estimate_returns(self, rollout: RolloutBuffer) -> None:
        """Compute advantages and returns of a rollout, bootstrapped at its end and at every truncated episode."""
        assert rollout.last_obs is not None
        final_obs = rollout.stacked_final_obs()
        rollout.compute_returns_and_advantages(
            last_value=self._values(rollout.last_obs),
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            final_values=None if final_obs is None else self._values(final_obs),
        )

    def _values(self, obs: ArrayObservation) -> torch.Tensor:
        return self.policy.value(map_observation(lambda x: torch.from_numpy(x).to(self.device), obs)).cpu()

    def minibatches(self, data: RolloutBatch, size: int) -> Iterator[RolloutBatch]:
        """Shuffle a rollout and split it into minibatches of about `size` rows, all of nearly equal size."""
        order = torch.from_numpy(self.rng.permutation(data.num_rows))
        shuffled = data.rows(order.to(self.device))  # shuffled once, so that each minibatch is a view
        for part in order.tensor_split(max(1, round(data.num_rows / size))):
            start = part.storage_offset()
            yield shuffled.rows(slice(start, start + len(part)))


@documented
@dataclass
class ActorCriticConfig(AdvantageConfig):
    """Settings shared by algorithms that train actor and critic with one loss."""

    ent_coef: float = setting(0.0, "Entropy coefficient.", ge=0, search=choices(0.0, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1))
    vf_coef: float = setting(0.5, "Value loss coefficient.", ge=0, search=uniform(0.2, 2.0))


ActorCriticConfigT = TypeVar("ActorCriticConfigT", bound=ActorCriticConfig)


class ActorCriticAlgorithm(AdvantageAlgorithm[ActorCriticConfigT], Generic[ActorCriticConfigT]):
    """Base class of algorithms that train actor and critic with one optimizer and one loss."""

    def __init__(
        self, config: ActorCriticConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        self.store = ParameterStore(self.policy, config.optimizer)
        self.step = GradientStep(self.store, self.losses, module=self.policy, max_grad_norm=config.max_grad_norm)

    @abstractmethod
    def losses(self, *inputs: Any) -> dict[str, Tensor]:
        """The `loss` that a gradient step minimises, and its parts. A function of tensors only."""
