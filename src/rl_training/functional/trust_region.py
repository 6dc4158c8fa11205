"""Trust regions: matrix-free natural-gradient directions, and a line search that enforces the KL limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, *, num_iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve A x = b for x, where `product(v)` is A v for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Stops early when the squared residual falls to `tolerance` times that of b, or when A has no positive curvature in
    the search direction.

    Example:
        >>> a = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> conjugate_gradient(lambda v: a @ v, torch.tensor([2.0, 4.0]), num_iterations=2)
        tensor([1., 1.])
    """
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    squared = residual @ residual
    enough = tolerance * squared  # relative, because gradients scale with the rewards
    for _ in range(num_iterations):
        if squared <= enough:
            break
        moved = product(direction)
        curvature = direction @ moved
        if not curvature > 0:
            break
        step = squared / curvature
        x = x + step * direction
        residual = residual - step * moved
        previous, squared = squared, residual @ residual
        direction = residual + (squared / previous) * direction
    return x


def fisher_product(kl: Tensor, parameters: Sequence[Tensor], damping: float) -> Callable[[Tensor], Tensor]:
    """Fisher-vector products (F + damping) v, with F the Hessian of a mean KL at its minimum, by double backward."""
    gradient = flatten(torch.autograd.grad(kl, parameters, create_graph=True, materialize_grads=True))

    def product(v: Tensor) -> Tensor:
        rows = torch.autograd.grad(gradient @ v, parameters, retain_graph=True, materialize_grads=True)
        return flatten(rows) + damping * v

    return product


def flatten(tensors: tuple[Tensor, ...]) -> Tensor:
    """Concatenate tensors of any shape into one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def assign(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Write a flat vector into parameters in-place; torch's own function makes them views of the vector instead.

    With views the memory alignment changes, and with it the rounding of some kernels, so a resumed run would differ.
    """
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, vector.split(sizes), strict=True):
        parameter.copy_(part.view_as(parameter))


def largest_step(direction: Tensor, curvature: Tensor, target_kl: float) -> Tensor:
    """The direction, scaled so that the quadratic KL equals `target_kl` (Schulman et al. 2015, appendix C).

    `curvature` is the matrix product F direction, so the KL of a step s * direction is s^2 / 2 * direction . curvature.
    """
    return torch.sqrt(2.0 * target_kl / (direction @ curvature).clamp(min=1e-12)) * direction


class LineSearch(NamedTuple):
    """The share of the full step that was taken (0 for none), and the surrogate's gain and the KL there."""

    share: float
    gain: Tensor
    kl: Tensor


def line_search(
    evaluate: Callable[[float], tuple[Tensor, Tensor]], *, max_kl: float, shrink: float, num_tries: int
) -> LineSearch:
    """The first of the shares 1, shrink, shrink^2, ... that improves the surrogate with a KL of at most `max_kl`.

    `evaluate(share)` returns the gain of the surrogate and the KL after that share of the full step. If no share is
    accepted, `evaluate(0)` is called last, so that anything it sets is back at a step of 0.
    """
    share = 1.0
    for _ in range(num_tries):
        gain, kl = evaluate(share)
        if bool(gain > 0) and bool(kl <= max_kl):  # false for NaN as well
            return LineSearch(share, gain, kl)
        share *= shrink
    return LineSearch(0.0, *evaluate(0.0))
