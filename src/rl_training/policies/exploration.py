"""Exploration: noise added to continuous actions, state-dependent noise, and uniformly random actions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.batches import Observation
from rl_training.contracts.errors import DataError, SpaceError
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import documented, setting, uniform
from rl_training.contracts.spec import BoxActions, EnvSpec
from rl_training.functional.policies import expln
from rl_training.policies.distributions import normal_noise
from rl_training.policies.masks import mask_of, put_mask
from rl_training.policies.networks import StochasticActorConfig


@documented
@dataclass
class NoiseConfig:
    """Action noise: added to actions in [-1, 1] while exploring."""

    kind: Literal["none", "gaussian", "ou"] = setting(
        "gaussian", "Noise: none, independent in each step (gaussian), or Ornstein-Uhlenbeck (ou)."
    )
    std: ScheduleOrFloat = setting(
        0.1, "Standard deviation (ou: of the driving noise); may be scheduled.", ge=0, search=uniform(0.0, 0.5)
    )
    theta: float = setting(0.15, "Mean reversion rate of correlated noise (ou).", ge=0)
    dt: float = setting(0.01, "Time step of correlated noise (ou).", gt=0)


def gaussian_noise(std: Tensor, normal: Tensor) -> Tensor:
    """Independent Gaussian noise [N, A] from standard normal samples."""
    return std * normal


def ou_noise(
    previous: Tensor | None, episode_start: Tensor | None, std: Tensor, normal: Tensor, *, theta: float, dt: float
) -> Tensor:
    """Ornstein-Uhlenbeck noise [N, A]: x + theta (0 - x) dt + std sqrt(dt) n, from standard normal samples n.

    x is the previous noise. It is 0 where an episode starts, and everywhere if `previous` is None.
    """
    driven = (math.sqrt(dt) * std) * normal
    if previous is None:
        return driven
    if episode_start is not None:
        previous = previous.masked_fill(episode_start.to(previous.device).unsqueeze(-1), 0.0)
    return previous * (1.0 - theta * dt) + driven


class StateDependentNoise(nn.Module):
    """The noise matrices of gSDE: their learned standard deviations, and when new ones are drawn (arXiv:2005.05719).

    Each environment has its own matrix [H, A], which turns the H features of the last hidden layer into noise. New
    matrices are drawn in the first step of each rollout, and every `sde_sample_freq` steps within it if that is
    positive. The matrices and the step within the rollout are the policy's state, so checkpoints save them.

    Example:
        >>> noise = StateDependentNoise(4, 2, StochasticActorConfig(exploration="gsde"))
        >>> state = noise.advance(None, num_rows=3, rollout_steps=8, rng=np.random.default_rng(0))
        >>> state["matrices"].shape, state["step"]
        (torch.Size([3, 4, 2]), 1)
    """

    def __init__(self, num_features: int, num_actions: int, network: StochasticActorConfig) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.sample_freq = network.sde_sample_freq
        self.transform = expln if network.use_expln else torch.exp
        shape = (num_features, num_actions if network.full_std else 1)
        self.log_std = nn.Parameter(torch.full(shape, float(network.log_std_init)))

    def std(self) -> Tensor:
        """Standard deviations [H, A] of the matrices' entries."""
        return self.transform(self.log_std).expand(-1, self.num_actions)

    @torch.no_grad()
    def advance(self, state: Any, num_rows: int, rollout_steps: int, rng: np.random.Generator) -> dict[str, Any]:
        """The state for the next step, with the `matrices` [N, H, A] to use in it. `state` is None at first."""
        std = self.std()
        step, shape = 0 if state is None else state["step"], (num_rows, *std.shape)
        if step == 0 or (self.sample_freq > 0 and step % self.sample_freq == 0):
            matrices = std * torch.from_numpy(normal_noise(rng, shape)).to(std.device)
        else:
            matrices = state["matrices"].to(std.device)
        if matrices.shape != shape:
            raise DataError(f"the noise matrices have shape {tuple(matrices.shape)}, expected {shape}")
        return {"matrices": matrices, "step": (step + 1) % rollout_steps}


def random_actions(rng: np.random.Generator, num_rows: int, num_actions: int, mask: Tensor | None) -> AnyArray:
    """Uniformly random actions [N] out of A; a mask [N, A] restricts them to the valid ones."""
    if mask is None:
        return rng.integers(num_actions, size=num_rows)
    draws = rng.random((num_rows, num_actions))
    best: AnyArray = np.where(mask.cpu().numpy(), draws, -1.0).argmax(axis=1)
    return best


class RandomPolicy:
    """Uniformly random actions that ignore the observation: whole numbers from 0, or in [-1, 1] for Box spaces."""

    box_actions: BoxActions = "rescale"

    def __init__(self, spec: EnvSpec) -> None:
        whole = (spaces.MultiDiscrete, spaces.MultiBinary)
        if not isinstance(spec.action_space, (spaces.Discrete, spaces.Box, *whole)):
            kind = type(spec.action_space).__name__
            raise SpaceError(f"random actions of {kind} are not supported: {spec.action_space}")
        if spec.action_masks and isinstance(spec.action_space, whole):
            raise SpaceError(f"random actions with masks are for Discrete action spaces, got {spec.action_space}")
        self.action_space = spec.action_space
        self.masked = spec.action_masks

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
        """See `Policy.act`. Actions are random even if `deterministic`."""
        if action_mask is not None:
            obs = put_mask(obs, action_mask, self.masked)
        assert rng is not None, "random actions need a random generator: pass rng"
        first = next(iter(obs.values())) if isinstance(obs, Mapping) else obs
        num_rows, space = first.shape[0], self.action_space
        if isinstance(space, spaces.Discrete):
            chosen = random_actions(rng, num_rows, int(space.n), mask_of(obs) if self.masked else None)
            action = torch.from_numpy(chosen)
        elif isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
            sizes = space.nvec if isinstance(space, spaces.MultiDiscrete) else 2
            action = torch.from_numpy(rng.integers(sizes, size=(num_rows, *space.shape)))
        else:
            action = torch.from_numpy(rng.random((num_rows, *space.shape), dtype=np.float32)) * 2.0 - 1.0
        return ActOutput(action.to(first.device), {})

    def value(self, obs: Observation) -> Tensor:
        """See `Policy.value`: not available, because a random policy has no critic."""
        raise NotImplementedError("a random policy has no values")
