"""Trust regions: natural-gradient directions without matrices, and steps that keep their promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, *, num_iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve A x = b for x, where `product(v)` is A v for a symmetric positive definite A (Hestenes and Stiefel 1952).

    Ends early when the squared residual is down to `tolerance` of b's, or in a direction in which A has no curvature.

    Example:
        >>> a = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> conjugate_gradient(lambda v: a @ v, torch.tensor([2.0, 4.0]), num_iterations=2)
        tensor([1., 1.])
    """
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    squared = residual @ residual
    enough = tolerance * squared  # not an absolute size: gradients are as small as the rewards
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
    """Products (F + damping) v, with F the Hessian of a mean KL at its minimum, by differentiating twice."""
    gradient = flatten(torch.autograd.grad(kl, parameters, create_graph=True, materialize_grads=True))

    def product(v: Tensor) -> Tensor:
        rows = torch.autograd.grad(gradient @ v, parameters, retain_graph=True, materialize_grads=True)
        return flatten(rows) + damping * v

    return product


def flatten(tensors: tuple[Tensor, ...]) -> Tensor:
    """Tensors of any shape as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def assign(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Write a flat vector into parameters, in place: torch's own function makes them views of the vector instead.

    Where memory begins decides how some kernels round, so a resumed run would differ.
    """
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, vector.split(sizes), strict=True):
        parameter.copy_(part.view_as(parameter))


def largest_step(direction: Tensor, curvature: Tensor, target_kl: float) -> Tensor:
    """The direction, as long as a quadratic KL of `target_kl` allows (Schulman et al. 2015, appendix C).

    `curvature` is the matrix product F direction, so the KL of a step s * direction is s^2 / 2 * direction . curvature.
    """
    return torch.sqrt(2.0 * target_kl / (direction @ curvature).clamp(min=1e-12)) * direction


class LineSearch(NamedTuple):
    """The share of the full step that was taken (0 for none), and what was found there."""

    share: float
    gain: Tensor
    kl: Tensor


def line_search(
    evaluate: Callable[[float], tuple[Tensor, Tensor]], *, max_kl: float, shrink: float, num_tries: int
) -> LineSearch:
    """The first of the shares 1, shrink, shrink^2, ... whose surrogate gains and whose KL stays within `max_kl`.

    `evaluate(share)` is the gain of the surrogate and the KL after that share of the full step. If none will do, the
    share is 0, and evaluated last, so that what `evaluate` sets is left there.
    """
    share = 1.0
    for _ in range(num_tries):
        gain, kl = evaluate(share)
        if bool(gain > 0) and bool(kl <= max_kl):  # false for NaN as well
            return LineSearch(share, gain, kl)
        share *= shrink
    return LineSearch(0.0, *evaluate(0.0))
