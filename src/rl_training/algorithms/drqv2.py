"""DrQ-v2: continuous control from pixels (Yarats et al. 2021, arXiv:2107.09645)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.off_policy_actor_critic import (
    OffPolicyActorCriticAlgorithm,
    OffPolicyActorCriticConfig,
)
from rl_training.contracts.batches import Observation, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.errors import SpaceError
from rl_training.contracts.images import has_images, image_layout, is_image
from rl_training.contracts.schedule import Linear, ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, log_uniform, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.augment import shift_images
from rl_training.functional.ensembles import pessimistic_target
from rl_training.functional.policies import smoothed_action
from rl_training.policies.ensemble import EnsembleCritic
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.pixels import PixelNetworkConfig, PixelPolicy


def _fading_noise() -> NoiseConfig:
    return NoiseConfig(std=Linear(1.0, 0.1, until=0.3))


@documented
@dataclass
class DrQv2Config(OffPolicyActorCriticConfig):
    """Settings of DrQ-v2. The defaults are the paper's, for tasks of medium difficulty and an action repeat of 2."""

    learning_starts: int = setting(
        2_000, "Environment steps before the first gradient step.", ge=0, search=choices(500, 1_000, 2_000, 4_000)
    )
    updates_per_step: float = setting(
        0.5,
        "Gradient steps per environment step, counted over all environments (0.25, 1, 20).",
        ge=0,
        search=choices(0.25, 0.5, 1.0),
    )
    n_step: int = setting(
        3, "Rewards summed before bootstrapping (n-step returns).", ge=1, le=10_000, search=choices(1, 3, 5)
    )
    learning_rate: ScheduleOrFloat = setting(
        1e-4, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-3)
    )
    tau: float = setting(
        0.01,
        "Soft update coefficient of the target networks.",
        ge=0,
        le=1,
        search=log_uniform(1e-3, 0.1),
    )
    shift: int = setting(
        4, "Largest random shift of images in each direction, in pixels (4 suits 84 x 84).", ge=0, le=1_000
    )
    noise_clip: float = setting(
        0.3, "Clip range of the action noise in updates; its standard deviation is noise.std.", ge=0
    )
    network: PixelNetworkConfig = setting(factory=PixelNetworkConfig, help="Networks.")
    noise: NoiseConfig = setting(
        factory=_fading_noise,
        help="Exploration noise added to actions.",
        search={"std": {"end": uniform(0.05, 0.3), "until": uniform(0.1, 0.8)}},
    )


class DrQv2Algorithm(OffPolicyActorCriticAlgorithm[DrQv2Config]):
    """DDPG with two critics on randomly shifted images; only the critics' loss trains the encoder."""

    policy: PixelPolicy
    policy_class = PixelPolicy
    critic_parts = ("encoder", "critic")  # the encoder has no target network

    def __init__(self, config: DrQv2Config, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        space = spec.observation_space
        if not has_images(space):
            raise SpaceError(
                "DrQv2 needs images: a Box of uint8 with 2, 3 or 4 dimensions, or a Dict that contains one; got "
                f"{space} from '{spec.env_id}'. For such observations use TD3 or SAC; to learn from rendered images, "
                "add the wrapper AddRenderObservation."
            )
        super().__init__(config, spec, device, rng)
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        images = {key: image_layout(part) for key, part in parts.items() if is_image(part)}
        self.image_dims = {key: (layout.order[-2], layout.order[-1]) for key, layout in images.items()}

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update the encoder and the critics, then the actor, then the targets."""
        rates = self.start_update(batch, progress)
        std = value_of(self.config.noise.std, progress.fraction)
        shifted = batch._replace(obs=self.shifted(batch.obs), next_obs=self.shifted(batch.next_obs))
        next_noise, noise = std * self.draw_noise(batch), std * self.draw_noise(batch)
        return self.result(self.gradient_steps(shifted, next_noise=next_noise, noise=noise, **rates), rates)

    def gradient_steps(
        self, batch: TransitionBatch, *, next_noise: Tensor, noise: Tensor, actor_rate: float, critic_rate: float
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`. The actor uses the features of the critic update."""
        critic = self.critic_step(critic_rate, batch, noise=next_noise)
        actor = self.actor_step(actor_rate, batch._replace(obs=critic["features"]), noise=noise)
        self.update_targets(self.config.tau)
        return {**self.critic_metrics(critic), "loss/policy": actor["loss"]}

    def critic_losses(self, batch: TransitionBatch, **inputs: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.critic_losses`. Also returns the encoder's features."""
        features = self.policy.encoder(batch.obs)
        found = super().critic_losses(batch._replace(obs=features), **inputs)
        return {**found, "features": features}

    def q_values(self, critic: EnsembleCritic, obs: Observation, action: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_values`."""
        return super().q_values(critic, self.policy.encoder(obs), action)

    def q_target(self, batch: TransitionBatch, *, noise: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: for the next action with clipped noise."""
        next_features = self.policy.encoder(batch.next_obs)
        next_q = self.critic_target.module(next_features, self.sample(next_features, noise))
        return pessimistic_target(batch.reward, batch.discount, next_q)

    def actor_losses(self, batch: TransitionBatch, *, noise: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`. The batch has features, so the encoder is not trained."""
        features = batch.obs
        assert isinstance(features, Tensor)
        return {"loss": -self.policy.critic(features, self.sample(features, noise)).amin(0).mean()}

    def sample(self, features: Tensor, noise: Tensor) -> Tensor:
        """The actor's actions [B, A] with clipped noise. The gradient is that of the action before noise and clipping.

        So actions that the noise pushed to a bound still get a gradient.
        """
        mean: Tensor = self.policy.actor(features)
        return mean + (smoothed_action(mean, noise, self.config.noise_clip) - mean).detach()

    def shifted(self, obs: Observation) -> Observation:
        """Observations with randomly shifted images, each by its own offset; other entries are unchanged."""
        if isinstance(obs, dict):
            return {key: self._shift(key, part) for key, part in obs.items()}
        return self._shift("", obs)

    def _shift(self, key: str, images: Tensor) -> Tensor:
        if key not in self.image_dims:
            return images
        largest = self.config.shift
        offsets = self.rng.integers(-largest, largest, size=(images.shape[0], 2), endpoint=True)
        return shift_images(images, torch.from_numpy(offsets).to(images.device), self.image_dims[key])


SPEC = AlgorithmSpec(
    name="drqv2",
    title="DrQv2",
    config=DrQv2Config,
    algorithm=DrQv2Algorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Yarats et al. 2021, Mastering Visual Continuous Control: Improved Data-Augmented RL, arXiv:2107.09645",
    needs_images=True,
)
