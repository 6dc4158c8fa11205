"""A recurrent actor-critic policy: encoder, recurrent network (memory), hidden layers, head."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.arrays import map_observation
from rl_training.contracts.batches import Observation
from rl_training.contracts.errors import DataError
from rl_training.contracts.spec import BoxActions, EnvSpec
from rl_training.contrib.recurrent.memory import Memory, MemoryConfig
from rl_training.policies.distributions import Distribution
from rl_training.policies.heads import ActionHead
from rl_training.policies.masks import make_policy_encoder, mask_of, put_mask
from rl_training.policies.networks import ActorCriticNetworkConfig, make_mlp, orthogonal_


class Sequences(NamedTuple):
    """The positions of the rows of a batch [M] in sequences [T, B], and the recurrent states at their beginning.

    Rows are in the time-major order of the true entries of `there`.
    """

    there: Tensor
    """Positions [T, B] that hold a row. The others are padding, or steps in which an environment was only reset."""
    starts: Tensor
    """Positions [T, B] at which an episode begins."""
    state: Tensor
    """States [B, S] before the first step."""


class MemoryTrunk(nn.Module):
    """An encoder followed by a memory."""

    def __init__(self, spec: EnvSpec, network: ActorCriticNetworkConfig, memory: MemoryConfig) -> None:
        super().__init__()
        self.encoder = make_policy_encoder(network.encoder, spec, network.encoder_kwargs)
        self.memory = Memory(self.encoder.num_features, memory, network.orthogonal_init)
        if network.orthogonal_init:
            orthogonal_(self.encoder)

    def step(self, obs: Observation, state: Tensor, start: Tensor) -> Tensor:
        """The state [B, S] after a batch of observations [B, ...]."""
        return self.memory.step(self.encoder(obs), state, start)

    def states(self, obs: Observation, state: Tensor, starts: Tensor) -> Tensor:
        """The states [T, B, S] after every observation [T, B, ...]."""
        features: Tensor = self.encoder(map_observation(lambda x: x.flatten(0, 1), obs))
        return self.memory.states(features.unflatten(0, starts.shape), state, starts)

    def forward(self, obs: Observation, sequences: Sequences, state: Tensor) -> Tensor:
        """The memory's output for each row, [M, H]."""
        features = self.encoder(obs)
        inputs = features.new_zeros(*sequences.there.shape, features.shape[-1])
        inputs[sequences.there] = features
        remembered: Tensor = self.memory(inputs, state, sequences.starts)[sequences.there]
        return remembered


class RecurrentActorCriticPolicy(nn.Module):
    """A stochastic actor and a critic, with separate memories or a shared one.

    The state [B, S] is the state of the actor's memory, followed by that of the critic's if it has its own.
    """

    def __init__(
        self,
        spec: EnvSpec,
        network: ActorCriticNetworkConfig,
        memory: MemoryConfig,
        box_actions: BoxActions = "clip",
    ) -> None:
        super().__init__()
        self.box_actions: BoxActions = box_actions
        self.masked = spec.action_masks
        self.shared_layers = network.shared
        count = 1 if memory.critic == "shared" else 2
        self.trunks = nn.ModuleList(MemoryTrunk(spec, network, memory) for _ in range(count))
        self.part_size = self._trunk(0).memory.state_size
        self.state_size = count * self.part_size

        self.actor, actor_width = make_mlp(
            memory.size, network.actor_sizes, network.activation, network.actor_options()
        )
        self.head = ActionHead(spec.action_space, actor_width, network.log_std_init)
        self.critic: nn.Module = nn.Identity()
        critic_width = actor_width
        if not self.shared_layers:
            self.critic, critic_width = make_mlp(
                memory.size, network.critic_sizes, network.activation, network.critic_options()
            )
        self.value_head = nn.Linear(critic_width, 1)
        if network.orthogonal_init:
            orthogonal_(self.actor)
            orthogonal_(self.critic)
            orthogonal_(self.head, gain=0.01)
            orthogonal_(self.value_head, gain=1.0)

    def forward(self, obs: Observation, state: Tensor, start: Tensor) -> tuple[Distribution, Tensor, Tensor]:
        """One step: the action distribution, the values [B] and the next state [B, S]."""
        parts = [trunk.step(obs, part, start) for trunk, part in self._with_parts(state)]
        remembered = [self._trunk(0).memory.output(part) for part in parts]
        return *self._answers(obs, remembered), torch.cat(parts, dim=-1)

    def mode(self, obs: Observation, state: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Deterministic actions, flat, and the next state [B, S]."""
        distribution, _, after = self(obs, state, start)
        return distribution.mode(), after

    @torch.no_grad()
    def states(self, obs: Observation, state: Tensor, starts: Tensor) -> Tensor:
        """The states [T, B, S] after every observation [T, B, ...]; without gradients."""
        return torch.cat([trunk.states(obs, part, starts) for trunk, part in self._with_parts(state)], dim=-1)

    def evaluate_actions(
        self, obs: Observation, actions: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values [M] of actions taken earlier, with backpropagation through time."""
        remembered = [trunk(obs, sequences, part) for trunk, part in self._with_parts(sequences.state)]
        distribution, values = self._answers(obs, remembered)
        return distribution.log_prob(self.head.flatten(actions)), distribution.entropy(), values

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
        """See `Policy.act`. A state of None means zeros; `episode_start` resets the state per row."""
        if action_mask is not None:
            obs = put_mask(obs, action_mask, self.masked)
        before, start = self._checked(obs, state, episode_start)
        distribution, values, after = self(obs, before, start)
        if deterministic:
            action = distribution.mode()
        else:
            assert rng is not None, "stochastic actions need an owned random stream"
            action = distribution.sample(self.head.draw_noise(rng, values.shape[0], values.device))
        extras = {"logprobs": distribution.log_prob(action), "values": values}
        return ActOutput(self.head.unflatten(action), extras, after)

    @torch.no_grad()
    def value(self, obs: Observation, state: Any = None, episode_start: Tensor | None = None) -> Tensor:
        """See `Policy.value`. Without a state, observations are treated as the first of their episodes."""
        values: Tensor = self(obs, *self._checked(obs, state, episode_start))[1]
        return values

    def no_memory(self, num_rows: int) -> Tensor:
        """The initial state [B, S] of episodes: zeros."""
        return torch.zeros(num_rows, self.state_size, device=self.value_head.weight.device)

    def _answers(self, obs: Observation, remembered: list[Tensor]) -> tuple[Distribution, Tensor]:
        """Distribution and values from the memory outputs of actor and critic (one output if they share a memory)."""
        features = self.actor(remembered[0])
        critic_features = features if self.shared_layers else self.critic(remembered[-1])
        mask = mask_of(obs) if self.masked else None
        return self.head(features, mask), self.value_head(critic_features).squeeze(-1)

    def _checked(self, obs: Observation, state: Any, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """State and episode starts on the policy's device, with defaults for None."""
        num_rows = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
        empty = self.no_memory(num_rows)
        found = empty if state is None else torch.as_tensor(state).to(empty)
        if found.shape != empty.shape:
            raise DataError(f"the policy's state has shape {tuple(found.shape)}, expected {tuple(empty.shape)}")
        if start is None:
            start = torch.zeros(num_rows, dtype=torch.bool)
        return found, start.to(empty.device, torch.bool).expand(num_rows)

    def _with_parts(self, state: Tensor) -> list[tuple[MemoryTrunk, Tensor]]:
        """Each trunk with its part of the state."""
        parts = state.split(self.part_size, dim=-1)
        return [(self._trunk(index), part) for index, part in enumerate(parts)]

    def _trunk(self, index: int) -> MemoryTrunk:
        trunk = self.trunks[index]
        assert isinstance(trunk, MemoryTrunk)
        return trunk
