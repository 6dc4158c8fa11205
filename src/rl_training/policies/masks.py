"""Action masks. A mask is part of the observation, under the key `action_mask`; 1 or true marks a valid action.

So buffers, checkpoints and collectors need no code for masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Observation
from rl_training.contracts.errors import SpaceError
from rl_training.contracts.spec import ACTION_MASK, EnvSpec
from rl_training.policies.encoders import Encoder, make_encoder

MASKED = -1e8
"""Replaces the logit or value of an invalid action. Finite, because -inf times a discount of 0 is NaN; low enough for
a probability of exactly zero in float32."""


def mask_of(obs: Observation) -> Tensor:
    """The mask [B, A] of a batch of observations."""
    assert isinstance(obs, dict)
    return obs[ACTION_MASK].bool()


def mask_array(obs: ArrayObservation) -> AnyArray:
    """The boolean mask [N, A] of numpy observations."""
    assert isinstance(obs, dict)
    return obs[ACTION_MASK].astype(np.bool_, copy=False)


def put_mask(obs: Observation, mask: Tensor, masked: bool) -> Observation:
    """The observations with their mask replaced; `masked` is whether the policy supports masks."""
    if not masked:
        raise NotImplementedError("action_mask: this policy was made for an environment without action masks")
    assert isinstance(obs, dict)
    return {**obs, ACTION_MASK: mask}


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Logits or action values [B, A] with those of invalid actions replaced by `MASKED`.

    Example:
        >>> import torch
        >>> apply_mask(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])).argmax().item()
        0
    """
    return values.masked_fill(~mask, MASKED)


class UnmaskedEncoder(Encoder):
    """Encodes an observation without its mask; if only `observation` is left, it is encoded directly, not as a Dict."""

    def __init__(self, name: str, space: spaces.Dict, kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        rest = {key: part for key, part in space.spaces.items() if key != ACTION_MASK}
        if not rest:
            raise SpaceError(f"the observation contains only an action mask: {space}")
        self.single = set(rest) == {"observation"} and not isinstance(rest["observation"], spaces.Dict)
        self.encoder = make_encoder(name, rest["observation"] if self.single else spaces.Dict(rest), kwargs)
        self.num_features = self.encoder.num_features

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        obs = cast("dict[str, Tensor]", obs)
        features: Tensor = self.encoder(obs["observation"] if self.single else obs)
        return features

    def encode_arrays(self, obs: ArrayObservation) -> AnyArray | None:
        """`forward` for numpy arrays; None if torch has to compute it."""
        encode = getattr(self.encoder, "encode_arrays", None)
        found: AnyArray | None = None
        if encode is not None and isinstance(obs, dict):
            found = encode(obs["observation"] if self.single else obs)
        return found


def make_policy_encoder(name: str, spec: EnvSpec, kwargs: Mapping[str, Any] | None = None) -> Encoder:
    """The encoder of a policy: `make_encoder`, but leaves out the action mask."""
    if not spec.action_masks:
        return make_encoder(name, spec.observation_space, kwargs)
    assert isinstance(spec.observation_space, spaces.Dict)
    return UnmaskedEncoder(name, spec.observation_space, kwargs)
