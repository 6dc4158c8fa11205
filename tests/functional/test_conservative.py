"""Losses for recorded data, against numbers computed by hand and against finite differences."""

import math

import pytest
import torch

from rl_training.functional.conservative import (
    conservative_penalty,
    gradient_similarity,
    maximum_mean_discrepancy,
    soft_clipped_value,
    vae_loss,
)


def test_the_penalty_by_hand():
    # critic 0: (e^1 / 0.5 + e^0 / 0.25) = 2e + 4; critic 1: (e^0 / 0.5 + e^2 / 0.25) = 2 + 4 e^2
    q = torch.tensor([[[1.0], [0.0]], [[0.0], [2.0]]])
    density = torch.tensor([[0.5], [0.25]]).log()
    found = conservative_penalty(q, density, torch.tensor([[3.0], [-1.0]]))
    expected = [math.log(2 * math.e + 4) - 3.0, math.log(2 + 4 * math.e**2) + 1.0]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_penalty_estimates_the_soft_maximum():
    """With Q(a) = a on [-1, 1], the integral of exp Q is e - 1 / e; N uniform samples estimate N times that."""
    count = 100_000
    actions = torch.rand(count, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = conservative_penalty(actions.view(1, -1, 1), torch.full((count, 1), math.log(0.5)), torch.zeros(1, 1))
    assert found.item() - math.log(count) == pytest.approx(math.log(math.e - 1 / math.e), abs=0.01)


def test_the_penalty_averages_rows():
    q, density = torch.randn(3, 4, 5), torch.randn(4, 5)
    data = torch.randn(3, 5)
    rows = [conservative_penalty(q[:, :, b : b + 1], density[:, b : b + 1], data[:, b : b + 1]) for b in range(5)]
    torch.testing.assert_close(conservative_penalty(q, density, data), torch.stack(rows).mean(0))


def test_soft_clipped_values_by_hand():
    q = torch.tensor([[1.0, 5.0], [3.0, 1.0], [2.0, 2.0]])
    assert soft_clipped_value(q, 1.0).tolist() == [1.0, 1.0]
    assert soft_clipped_value(q, 0.75).tolist() == [1.5, 2.0]


def test_the_loss_of_a_vae_by_hand():
    # error 1 of two entries: 0.5; KL of N(1, 1): 0.5; of N(0, e^2): (e^2 - 1) / 2 - 1; mean of both, times 2
    decoded, action = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    mean, log_std = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    expected = 0.5 + 2.0 * (0.5 + (math.e**2 - 1) / 2 - 1) / 2
    assert vae_loss(decoded, action, mean, log_std, 2.0).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kernel", ["laplacian", "gaussian"])
def test_the_discrepancy_against_a_loop(kernel):
    x, y = torch.randn(3, 4, 2), torch.randn(3, 5, 2) + 1.0

    def similarity(one, other):
        d = sum(abs(p - q) if kernel == "laplacian" else (p - q) ** 2 for p, q in zip(one, other, strict=True))
        return math.exp(-d / (2 * 0.7))

    def mean(rows, columns):
        return sum(similarity(p, q) for p in rows for q in columns) / (len(rows) * len(columns))

    for found, a, b in zip(maximum_mean_discrepancy(x, y, 0.7, kernel), x.tolist(), y.tolist(), strict=True):
        assert found.item() == pytest.approx(math.sqrt(mean(a, a) - 2 * mean(a, b) + mean(b, b) + 1e-6), rel=1e-4)


def test_equal_samples_have_no_discrepancy():
    x = torch.randn(2, 6, 3)
    assert maximum_mean_discrepancy(x, x, 20.0).tolist() == pytest.approx([1e-3, 1e-3], rel=1e-2)


def test_the_similarity_of_gradients_against_pairs():
    gradients = torch.randn(4, 6, 3)
    pairs = [torch.cosine_similarity(gradients[i], gradients[j], dim=1) for i in range(4) for j in range(4) if i != j]
    expected = sum(pairs).mean() / 3
    torch.testing.assert_close(gradient_similarity(gradients), expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_the_similarity_against_finite_differences():
    gradients = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gradient_similarity, (gradients,), eps=1e-6, atol=1e-6)
