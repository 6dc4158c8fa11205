"""Masks of invalid actions. A mask is part of the observation, under the key `action_mask`; 1 or true is valid.

Because it travels with the observation, buffers, replay, checkpoints and collectors know nothing of it.
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
"""Instead of the logit or value of an invalid action. Finite, because -inf times a discount of 0 would be NaN; so low
that its probability is exactly zero in float32."""


def mask_of(obs: Observation) -> Tensor:
    """The mask [B, A] within a batch of observations."""
    assert isinstance(obs, dict)
    return obs[ACTION_MASK].bool()


def mask_array(obs: ArrayObservation) -> AnyArray:
    """The mask [N, A] within observations that are arrays, as booleans."""
    assert isinstance(obs, dict)
    return obs[ACTION_MASK].astype(np.bool_, copy=False)


def put_mask(obs: Observation, mask: Tensor, masked: bool) -> Observation:
    """The observations with another mask, for a policy that heeds masks if `masked`."""
    if not masked:
        raise NotImplementedError("action_mask: this policy was made for an environment without action masks")
    assert isinstance(obs, dict)
    return {**obs, ACTION_MASK: mask}


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Logits or action values [B, A], those of invalid actions replaced by `MASKED`.

    Example:
        >>> import torch
        >>> apply_mask(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])).argmax().item()
        0
    """
    return values.masked_fill(~mask, MASKED)


class UnmaskedEncoder(Encoder):
    """Encodes what is left of an observation without its mask; a single entry `observation` as if it were alone."""

    def __init__(self, name: str, space: spaces.Dict, kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        rest = {key: part for key, part in space.spaces.items() if key != ACTION_MASK}
        if not rest:
            raise SpaceError(f"the observation has nothing but an action mask: {space}")
        self.single = set(rest) == {"observation"} and not isinstance(rest["observation"], spaces.Dict)
        self.encoder = make_encoder(name, rest["observation"] if self.single else spaces.Dict(rest), kwargs)
        self.num_features = self.encoder.num_features

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        obs = cast("dict[str, Tensor]", obs)
        features: Tensor = self.encoder(obs["observation"] if self.single else obs)
        return features

    def encode_arrays(self, obs: ArrayObservation) -> AnyArray | None:
        """What `forward` does, for arrays; None if that is left to torch."""
        encode = getattr(self.encoder, "encode_arrays", None)
        found: AnyArray | None = None
        if encode is not None and isinstance(obs, dict):
            found = encode(obs["observation"] if self.single else obs)
        return found


def make_policy_encoder(name: str, spec: EnvSpec, kwargs: Mapping[str, Any] | None = None) -> Encoder:
    """The encoder of a policy: like `make_encoder`, but a mask in the observation is no feature."""
    if not spec.action_masks:
        return make_encoder(name, spec.observation_space, kwargs)
    assert isinstance(spec.observation_space, spaces.Dict)
    return UnmaskedEncoder(name, spec.observation_space, kwargs)
