"""Flat parameters: their memory layout, writing their gradients, and in-place scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_training.accelerate.kernels import ALIGNMENT
from rl_training.accelerate.native.layers import places_for_gradients
from rl_training.accelerate.recording import is_recording


def layout(tensors: Mapping[str, Tensor]) -> tuple[dict[str, tuple[slice, torch.Size]], int]:
    """The slice and shape of each tensor in one flat tensor, and the size of the flat tensor.

    Each tensor begins at a multiple of `ALIGNMENT`, as if allocated by torch, so that kernels round in the same way.

    Example:
        >>> layout({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)})
        ({'weight': (slice(0, 6, None), torch.Size([2, 3])), 'bias': (slice(16, 19, None), torch.Size([3]))}, 32)
    """
    slices: dict[str, tuple[slice, torch.Size]] = {}
    size = 0
    for name, tensor in tensors.items():
        slices[name] = (slice(size, size + tensor.numel()), tensor.shape)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT // tensor.element_size()
    return slices, size


def write_gradients(loss: Tensor, parameters: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Write the gradients of a loss to `places`, one per parameter; zeros if the loss does not depend on it."""
    with places_for_gradients(zip(parameters, places, strict=True)):
        found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    for gradient, place in zip(found, places, strict=True):
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply in-place by a factor of at most 1. A factor of 1 is skipped on the CPU, except in recordings."""
    if is_recording() or factor.device.type != "cpu" or not factor >= 1.0:  # also if the factor is NaN
        tensor.mul_(factor)
