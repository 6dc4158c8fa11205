"""Actor-critics for one discrete action: a categorical actor, critics of all actions, and the policy that has both.

They have the methods of the actors and critics for continuous actions, so that algorithms that need only these
(`sample`, `log_prob`, `critic(obs, action)`) are the same for both kinds of actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.accelerate import Accelerated, ArrayNetwork
from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Observation, as_arrays, device_of, num_rows
from rl_training.contracts.errors import SpaceError
from rl_training.contracts.spec import BoxActions, EnvSpec
from rl_training.functional.values import at_action
from rl_training.policies.actors import OffPolicyNetworkConfig, Trunk
from rl_training.policies.distributions import Categorical, gumbel_noise
from rl_training.policies.encoders import Encoder
from rl_training.policies.ensemble import StateValue, make_members
from rl_training.policies.exploration import random_actions
from rl_training.policies.layers import Members
from rl_training.policies.masks import MASKED, apply_mask, make_policy_encoder, mask_array, mask_of, put_mask


def num_choices(spec: EnvSpec) -> int:
    """The number A of actions of a Discrete action space."""
    if not isinstance(spec.action_space, spaces.Discrete):
        raise SpaceError(f"this network needs a Discrete action space, got {spec.action_space}")
    return int(spec.action_space.n)


class CategoricalActor(nn.Module):
    """A categorical distribution over A actions; actions that a mask marks invalid have probability 0."""

    def __init__(self, spec: EnvSpec, network: OffPolicyNetworkConfig, encoder: Encoder | None = None) -> None:
        super().__init__()
        if encoder is None:
            encoder = make_policy_encoder(network.encoder, spec, network.encoder_kwargs)
        self.trunk = Trunk(spec, network, num_choices(spec), encoder)
        self.masked = spec.action_masks

    def forward(self, obs: Observation) -> Tensor:
        """Logits [B, A]."""
        logits: Tensor = self.trunk(obs)
        if not self.masked:
            return logits
        mask = mask_of(obs)
        return apply_mask(logits, mask | ~mask.any(dim=1, keepdim=True))  # the last observation may have no valid one

    def distribution(self, obs: Observation) -> Categorical:
        """The distribution over actions."""
        return Categorical(self(obs))

    def sample(self, obs: Observation, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B] from Gumbel noise [B, A], and their log-probabilities [B]."""
        distribution = self.distribution(obs)
        action = distribution.sample(noise)
        return action, distribution.log_prob(action)

    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """Log-probabilities [B] of actions [B]."""
        return self.distribution(obs).log_prob(action)

    def mode(self, obs: Observation) -> Tensor:
        """The actions [B] with the highest probability."""
        logits: Tensor = self(obs)
        return logits.argmax(dim=1)


class DiscreteCritic(nn.Module):
    """E Q-functions Q(s, .) of all A actions, with one shared encoder."""

    def __init__(
        self, spec: EnvSpec, network: OffPolicyNetworkConfig, num_critics: int, encoder: Encoder | None = None
    ) -> None:
        super().__init__()
        if encoder is None:
            encoder = make_policy_encoder(network.encoder, spec, network.encoder_kwargs)
        self.encoder = encoder
        self.members = make_members(num_critics, encoder.num_features, num_choices(spec), network)

    def q_values(self, obs: Observation, members: Members | None = None) -> Tensor:
        """Q-values [E, B, A] of all actions; `members` selects critics. Masks are not applied."""
        values: Tensor = self.members(self.encoder(obs), members)
        return values

    def forward(self, obs: Observation, action: Tensor, members: Members | None = None) -> Tensor:
        """Q-values [E, B] of actions [B]; see `EnsembleCritic.forward`."""
        values = self.q_values(obs, members)
        return at_action(values.transpose(0, 1).transpose(1, 2), action).transpose(0, 1)

    def of_several(self, obs: Observation, actions: Tensor) -> Tensor:
        """Q-values [E, M, B] of M actions for each observation, [M, B]; equal actions have exactly equal values."""
        values = self.q_values(obs)
        return values.gather(2, actions.T.expand(values.shape[0], -1, -1)).transpose(1, 2)


class DiscreteActorCriticPolicy(nn.Module):
    """A categorical actor and its critics. Samples actions to explore; there is no further noise.

    With `num_critics=0` it has no critics; with `state_value` it also has a network of state values.
    """

    box_actions: BoxActions = "clip"
    rollout_steps: int = 1
    """See `ContinuousPolicy.rollout_steps`; has no effect here."""

    def __init__(
        self,
        spec: EnvSpec,
        network: OffPolicyNetworkConfig,
        num_critics: int,
        own_encoder: Callable[[], Encoder | None] = lambda: None,
        *,
        state_value: bool = False,
    ) -> None:
        super().__init__()
        self.num_actions = num_choices(spec)
        self.masked = spec.action_masks
        self.actor = CategoricalActor(spec, network, own_encoder())
        self.num_critics = num_critics
        if num_critics:
            self.critic = DiscreteCritic(spec, network, num_critics, own_encoder())
        self.state_value = StateValue(spec, network, own_encoder()) if state_value else None
        self._outputs = ArrayNetwork(self._acting_layers)
        self._mode = Accelerated(self.mode, self)
        self._sample = Accelerated(self._sampled, self)

    def _acting_layers(self) -> list[nn.Module]:
        """The layers that compute the logits; empty if they are not a chain."""
        trunk = self.actor.trunk
        return [trunk.encoder, trunk.hidden, trunk.head] if type(trunk) is Trunk else []

    def mode(self, obs: Observation) -> Tensor:
        """Deterministic actions [B]."""
        return self.actor.mode(obs)

    def _sampled(self, obs: Observation, noise: Tensor) -> Tensor:
        return self.actor.sample(obs, noise)[0]

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> Tensor:
        """The noise [..., A] that `actor.sample` takes: standard Gumbel."""
        return torch.from_numpy(gumbel_noise(rng, (*leading, self.num_actions)))

    def act_on_arrays(self, obs: ArrayObservation, rng: np.random.Generator | None) -> AnyArray | None:
        """See `ArrayPolicy.act_on_arrays`. Deterministic actions without rng."""
        outputs = self._outputs(obs)
        if outputs is None:
            return None
        if self.masked:
            mask = mask_array(obs)
            outputs = np.where(mask | ~mask.any(axis=1, keepdims=True), outputs, np.float32(MASKED))
        noise = 0.0 if rng is None else gumbel_noise(rng, outputs.shape)
        best: AnyArray = (outputs + noise).argmax(axis=1)
        return best

    @torch.no_grad()
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
        """See `Policy.act`."""
        assert deterministic or rng is not None, "stochastic actions need a random generator: pass rng"
        if action_mask is not None:
            obs = put_mask(obs, action_mask, self.masked)
        quick = self.act_on_arrays(as_arrays(obs), None if deterministic else rng)
        if quick is not None:
            return ActOutput(torch.from_numpy(quick), {})
        if deterministic or rng is None:
            return ActOutput(self._mode(obs), {})
        return ActOutput(self._sample(obs, self.draw_noise(rng, num_rows(obs)).to(device_of(obs))), {})

    @torch.no_grad()
    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """See `StochasticPolicy.log_prob`."""
        return self.actor.log_prob(obs, action)

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """See `Policy.value`: of the state-value network, or the minimum over the critics of the expected Q-value.

        NaN without both.
        """
        if self.state_value is not None:
            return self.state_value(obs)  # type: ignore[no-any-return]
        if not self.num_critics:
            return torch.full((num_rows(obs),), torch.nan)
        values = (self.actor.distribution(obs).log_probs.exp() * self.critic.q_values(obs)).sum(-1)
        return values.amin(0)


class GreedyPolicy(nn.Module):
    """Takes the action with the largest minimum over the critics; explores by random actions."""

    box_actions: BoxActions = "clip"
    epsilon: Tensor

    def __init__(self, spec: EnvSpec, network: OffPolicyNetworkConfig, num_critics: int) -> None:
        super().__init__()
        self.num_actions = num_choices(spec)
        self.masked = spec.action_masks
        self.critic = DiscreteCritic(spec, network, num_critics)
        self.register_buffer("epsilon", torch.zeros(()))
        self._mode = Accelerated(self.mode, self)

    def allowed(self, obs: Observation, values: Tensor) -> Tensor:
        """Q-values [B, A] with those of actions that must not be taken masked."""
        if not self.masked:
            return values
        mask = mask_of(obs)
        return apply_mask(values, mask | ~mask.any(dim=1, keepdim=True))

    def mode(self, obs: Observation) -> Tensor:
        """Greedy actions [B]."""
        return self.allowed(obs, self.critic.q_values(obs).amin(0)).argmax(dim=1)

    @torch.no_grad()
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
        """See `Policy.act`."""
        if action_mask is not None:
            obs = put_mask(obs, action_mask, self.masked)
        greedy = self._mode(obs)
        if deterministic:
            return ActOutput(greedy, {})
        assert rng is not None, "exploration needs a random generator: pass rng"
        explore = rng.random(len(greedy)) < self.epsilon.item()
        anything = random_actions(rng, len(greedy), self.num_actions, mask_of(obs) if self.masked else None)
        chosen = np.where(explore, anything, greedy.cpu().numpy())
        return ActOutput(torch.from_numpy(chosen).to(greedy.device), {})

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """See `Policy.value`: the largest Q-value."""
        return self.allowed(obs, self.critic.q_values(obs).amin(0)).amax(dim=1)


class ConstrainedGreedyPolicy(GreedyPolicy):
    """Greedy among the actions that a model of the behaviour finds probable enough.

    That is, with at least `threshold` times the probability of the most probable action.
    """

    def __init__(self, spec: EnvSpec, network: OffPolicyNetworkConfig, num_critics: int, threshold: float) -> None:
        super().__init__(spec, network, num_critics)
        self.behaviour = CategoricalActor(spec, network)
        self.threshold = threshold

    def allowed(self, obs: Observation, values: Tensor) -> Tensor:
        """See `GreedyPolicy.allowed`."""
        log_probs = self.behaviour.distribution(obs).log_probs
        probable = (log_probs - log_probs.amax(dim=1, keepdim=True)).exp() >= self.threshold
        return apply_mask(super().allowed(obs, values), probable)
