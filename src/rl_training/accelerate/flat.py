"""Flat parameters: where they lie, where their gradients are written, and how these are scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_training.accelerate.kernels import ALIGNMENT
from rl_training.accelerate.native.layers import places_for_gradients
from rl_training.accelerate.recording import is_recording


def layout(tensors: Mapping[str, Tensor]) -> tuple[dict[str, tuple[slice, torch.Size]], int]:
    """Where each tensor lies in one flat tensor, and how long that is.

    Each begins at a multiple of `ALIGNMENT`, as it would by itself, so kernels round in the same way.

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
    """Write the gradients of a loss to places, one per parameter; zeros where it does not depend on one."""
    with places_for_gradients(zip(parameters, places, strict=True)):
        found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    for gradient, place in zip(found, places, strict=True):
        if gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply in place by a factor of at most 1. A factor of 1 is skipped where its value may be read."""
    if is_recording() or factor.device.type != "cpu" or not factor >= 1.0:  # also where the factor is NaN
        tensor.mul_(factor)
