"""Action heads: the distribution of an action space, its number of network outputs, and its sampling noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.contracts.arrays import AnyArray, FloatArray
from rl_training.contracts.errors import SpaceError
from rl_training.policies.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    StateDependentGaussian,
    gumbel_noise,
    logistic_noise,
    normal_noise,
)
from rl_training.policies.exploration import StateDependentNoise
from rl_training.policies.masks import MASKED, apply_mask
from rl_training.policies.networks import StochasticActorConfig

NoiseFn = Callable[[np.random.Generator, tuple[int, ...]], FloatArray]


class ActionHead(nn.Module):
    """The last layer of a stochastic actor, for any supported action space.

    If `num_features` is None it has no linear layer: its input is then the `num_outputs` distribution parameters.
    """

    def __init__(self, space: spaces.Space[Any], num_features: int | None, log_std_init: float = 0.0) -> None:
        super().__init__()
        self.log_std: nn.Parameter | None = None
        self.sde: StateDependentNoise | None = None
        self.shape: tuple[int, ...] = tuple(space.shape or ())
        self.single_choice = isinstance(space, spaces.Discrete)  # flat actions are [B]; a Box of shape () has [B, 1]
        self.noise: NoiseFn = gumbel_noise
        self.make: Callable[[Tensor], Distribution] = Categorical
        if isinstance(space, spaces.Discrete):
            num_outputs = int(space.n)
        elif isinstance(space, spaces.MultiDiscrete):
            sizes = [int(n) for n in space.nvec.flat]
            num_outputs = sum(sizes)
            self.make = lambda logits: MultiCategorical(logits, sizes)
        elif isinstance(space, spaces.MultiBinary):
            num_outputs = int(np.prod(space.shape))
            self.noise, self.make = logistic_noise, Bernoulli
        elif isinstance(space, spaces.Box):
            num_outputs = int(np.prod(space.shape))
            self.log_std = nn.Parameter(torch.full((num_outputs,), float(log_std_init)))
            self.noise, self.make = normal_noise, self._gaussian
        else:
            raise SpaceError(
                f"actions of {type(space).__name__} are not supported: {space}. "
                "Supported are Discrete, MultiDiscrete, MultiBinary and Box."
            )
        self.num_outputs = num_outputs
        self.linear = nn.Identity() if num_features is None else nn.Linear(num_features, num_outputs)

    def _gaussian(self, mean: Tensor) -> DiagGaussian:
        assert self.log_std is not None
        return DiagGaussian(mean, self.log_std)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Distribution:
        """The distribution over flat actions [B] or [B, D]; actions that a mask marks invalid have probability 0."""
        outputs = self.linear(features)
        return self.make(outputs if mask is None else apply_mask(outputs, mask))

    def draw_noise(self, rng: np.random.Generator, batch_size: int, device: torch.device) -> Tensor:
        """Noise for `Distribution.sample`, drawn from `rng`."""
        return torch.from_numpy(self.noise(rng, (batch_size, self.num_outputs))).to(device)

    def choose(self, outputs: AnyArray, rng: np.random.Generator | None, mask: AnyArray | None = None) -> AnyArray:
        """Actions from the linear layer's outputs [N, ...], in the shape of the action space; the mode without rng.

        The numpy version of `Distribution.sample` and `mode`. A mask [N, ...] marks valid actions.
        """
        if mask is not None:
            outputs = np.where(mask, outputs, np.float32(MASKED))
        noise = None if rng is None else self.noise(rng, outputs.shape)
        if self.single_choice:
            best: AnyArray = (outputs if noise is None else outputs + noise).argmax(axis=1)
            return best
        if self.sde is not None:  # noise matrices are the state of `act`, so `rng` is None here
            flat: AnyArray = outputs
        elif self.log_std is not None and noise is not None:
            flat = outputs + np.exp(self.log_std.detach().numpy()) * noise
        else:
            distribution = self.make(torch.from_numpy(outputs))
            flat = (distribution.mode() if noise is None else distribution.sample(torch.from_numpy(noise))).numpy()
        return flat.reshape(len(flat), *self.shape)

    def unflatten(self, action: Tensor) -> Tensor:
        """Actions [B, ...] in the shape of the action space."""
        return action.reshape(action.shape[0], *self.shape)

    def flatten(self, action: Tensor) -> Tensor:
        """The inverse of `unflatten`."""
        return action if self.single_choice else action.reshape(action.shape[0], -1)


class StateDependentHead(ActionHead):
    """The last layer of an actor that explores with gSDE; its noise is a function of the last hidden layer.

    Gradients of the noise do not reach the hidden layers: those are trained for the mean action only.
    """

    def __init__(self, space: spaces.Space[Any], num_features: int, network: StochasticActorConfig) -> None:
        if not isinstance(space, spaces.Box):
            raise SpaceError(
                f"network > exploration: 'gsde' is noise for continuous actions (Box), got {space}; use 'gaussian', "
                "which other actions ignore"
            )
        super().__init__(space, num_features)
        self.log_std = None  # `sde` has its own
        self.sde = StateDependentNoise(num_features, self.num_outputs, network)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> StateDependentGaussian:
        """See `ActionHead.forward`."""
        assert self.sde is not None
        return StateDependentGaussian(self.linear(features), features.detach(), self.sde.std())
