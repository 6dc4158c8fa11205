"""The actor-critic policy of the on-policy algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.accelerate import Accelerated, ArrayNetwork
from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Observation, as_arrays, device_of, num_rows
from rl_training.contracts.spec import BoxActions, EnvSpec
from rl_training.policies.distributions import Distribution
from rl_training.policies.heads import ActionHead, StateDependentHead
from rl_training.policies.layers import LayerOptions
from rl_training.policies.masks import make_policy_encoder, mask_array, mask_of, put_mask
from rl_training.policies.networks import ActorCriticNetworkConfig, OwnNetwork, make_mlp, orthogonal_


class ActorCriticPolicy(nn.Module):
    """A stochastic actor and a state-value critic, with separate or shared encoder and hidden layers.

    The state that `act` returns is that of `StateDependentNoise` if it explores with gSDE, else None.
    """

    head: ActionHead
    rollout_steps: int = 1
    """Steps of a rollout: state-dependent noise may be kept for as long."""

    def __init__(self, spec: EnvSpec, network: ActorCriticNetworkConfig, box_actions: BoxActions = "clip") -> None:
        super().__init__()
        self.box_actions: BoxActions = box_actions
        self.shared = network.shared
        self.masked = spec.action_masks

        def trunk(sizes: tuple[int, ...], options: LayerOptions) -> tuple[nn.Sequential, int]:
            encoder = make_policy_encoder(network.encoder, spec, network.encoder_kwargs)
            layers, width = make_mlp(encoder.num_features, sizes, network.activation, options)
            return nn.Sequential(encoder, layers), width

        def own(name: str, num_outputs: int, kwargs: dict[str, Any], where: str) -> nn.Sequential:
            encoder = make_policy_encoder(network.encoder, spec, network.encoder_kwargs)
            return nn.Sequential(encoder, OwnNetwork(name, encoder.num_features, num_outputs, kwargs, where))

        if network.actor == "mlp":
            self.actor, actor_width = trunk(network.actor_sizes, network.actor_options())
            if network.exploration == "gsde":
                self.head = StateDependentHead(spec.action_space, actor_width, network)
            else:
                self.head = ActionHead(spec.action_space, actor_width, network.log_std_init)
        else:
            self.head = ActionHead(spec.action_space, None, network.log_std_init)
            self.actor = own(network.actor, self.head.num_outputs, network.actor_kwargs, "actor")
        self.critic: nn.Module = nn.Identity()
        self.value_head: nn.Module = nn.Identity()
        if self.shared:
            self.value_head = nn.Linear(actor_width, 1)
        elif network.critic == "mlp":
            self.critic, critic_width = trunk(network.critic_sizes, network.critic_options())
            self.value_head = nn.Linear(critic_width, 1)
        else:
            self.critic = own(network.critic, 1, network.critic_kwargs, "critic")
        if network.orthogonal_init:
            orthogonal_(self.actor)
            orthogonal_(self.critic)
            orthogonal_(self.head, gain=0.01)
            orthogonal_(self.value_head, gain=1.0)
        self._outputs = ArrayNetwork(self._acting_layers)
        self._decide = Accelerated(self._decision, self)
        self._score = Accelerated(self._scores, self)

    def _acting_layers(self) -> list[nn.Module]:
        return [self.actor, self.head.linear]

    def distribution(self, obs: Observation) -> Distribution:
        """The action distribution, without the values."""
        distribution: Distribution = self.head(self.actor(obs), mask_of(obs) if self.masked else None)
        return distribution

    def mode(self, obs: Observation) -> Tensor:
        """Deterministic actions, flat: [B] or [B, D]."""
        return self.distribution(obs).mode()

    def values(self, obs: Observation) -> Tensor:
        """The values [B], with gradients, without the action distribution."""
        values: Tensor = self.value_head((self.actor if self.shared else self.critic)(obs)).squeeze(-1)
        return values

    def forward(self, obs: Observation) -> tuple[Distribution, Tensor]:
        """The action distribution and the values [B]."""
        features = self.actor(obs)
        critic_features = features if self.shared else self.critic(obs)
        mask = mask_of(obs) if self.masked else None
        return self.head(features, mask), self.value_head(critic_features).squeeze(-1)

    def act(
        self,
        obs: Observation,
        *,
        deterministic: bool = False,
        action_mask: Tensor | None = None,
        state: Any = None,
        episode_start: Tensor | None = None,
        rng: np.random.Generator | None = None,
    ) -> ActOutput:
        """See `Policy.act`. Extras, when exploring: `logprobs` and `values`."""
        assert deterministic or rng is not None, "stochastic actions need a random generator: pass rng"
        if action_mask is not None:
            obs = put_mask(obs, action_mask, self.masked)
        quick = self._choose(as_arrays(obs), None if deterministic else rng)
        if quick is not None:
            action = torch.from_numpy(quick)
            extras = {} if deterministic else dict(zip(("logprobs", "values"), self.score(obs, action), strict=True))
            return ActOutput(action, extras)
        noise = after = None
        if rng is not None and not deterministic:
            if self.head.sde is None:
                noise = self.head.draw_noise(rng, num_rows(obs), device_of(obs))
            else:
                after = self.head.sde.advance(state, num_rows(obs), self.rollout_steps, rng)
                noise = after["matrices"]
        action, extras = self._decide(obs, noise)
        return ActOutput(self.head.unflatten(action), extras, after)

    @torch.no_grad()
    def act_on_arrays(self, obs: ArrayObservation, rng: np.random.Generator) -> AnyArray | None:
        """See `ArrayPolicy.act_on_arrays`."""
        return self._choose(obs, rng)

    def _choose(self, obs: Any, rng: np.random.Generator | None) -> AnyArray | None:
        """Actions computed by numpy, deterministic without rng; None if torch has to compute them.

        Torch computes state-dependent noise: only `act` has the state that holds the noise matrices.
        """
        outputs = None if self.head.sde is not None and rng is not None else self._outputs(obs)
        if outputs is None:
            return None
        return self.head.choose(outputs, rng, mask_array(obs) if self.masked else None)

    @torch.no_grad()
    def _decision(self, obs: Observation, noise: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Flat actions, deterministic without noise, and the log-probabilities and values that a rollout stores."""
        distribution, values = self(obs)
        action = distribution.mode() if noise is None else distribution.sample(noise)
        return action, {"logprobs": distribution.log_prob(action), "values": values}

    def score(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values [B] of actions taken earlier, without gradients."""
        return self._score(obs, actions)

    @torch.no_grad()
    def _scores(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor]:
        distribution, values = self(obs)
        return distribution.log_prob(self.head.flatten(actions)), values

    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """See `StochasticPolicy.log_prob`."""
        return self.score(obs, action)[0]

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """See `Policy.value`."""
        return self.values(obs)

    def evaluate_actions(self, obs: Observation, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values [B] of actions taken earlier, with gradients."""
        distribution, values = self(obs)
        return distribution.log_prob(self.head.flatten(actions)), distribution.entropy(), values
