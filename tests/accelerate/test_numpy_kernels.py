"""Numpy's rules give what torch gives: to the bit where IEEE 754 leaves no choice, within rounding elsewhere."""

import numpy as np
import pytest
import torch

from rl_training.accelerate.numpy_kernels import SMALL, SmallArithmetic, numpy_kernel

X, Y = (torch.from_numpy(np.random.default_rng(seed).standard_normal((6, 5), dtype=np.float32)) for seed in (0, 1))
ROW = X[0].clone()
COLUMN = torch.tensor([[0], [4], [2], [2], [1], [3]])
EXACT = {
    "add": lambda: X + Y, "broadcast": lambda: X + ROW, "number": lambda: X * 0.3, "sub": lambda: X - Y,
    "rsub": lambda: 1.0 - X, "div": lambda: X / Y, "by number": lambda: X / 3.0, "neg": lambda: -X,
    "abs": lambda: X.abs(), "reciprocal": lambda: X.reciprocal(),
    "square": lambda: X.square(), "minimum": lambda: torch.minimum(X, Y), "maximum": lambda: torch.maximum(X, Y),
    "relu": lambda: torch.cat([X, -0.0 * X]).relu(), "clamp": lambda: X.clamp(-0.5, 0.5),
    "clamp low": lambda: X.clamp(min=0.1), "clamp high": lambda: X.clamp(max=0.1),
    "clamp tensors": lambda: X.clamp(torch.tensor(-0.2), torch.tensor(0.3)),
    "where": lambda: torch.where(X > Y, X, 0.5),
    "gt": lambda: X > Y, "le": lambda: X <= 0.1, "eq": lambda: X == X, "and": lambda: (X > 0).logical_and(Y > 0),
    "float": lambda: (X > 0).float(), "cat": lambda: torch.cat([X, Y], dim=1), "amax": lambda: X.amax(1),
    "amin": lambda: X.amin(0, keepdim=True), "mixed types": lambda: X * torch.tensor(0.1, dtype=torch.float64),
    "integers": lambda: torch.arange(4) + 2, "transposed": lambda: X.T + Y.T, "in place": lambda: X.clone().mul_(Y),
    "masked": lambda: X.clone().masked_fill_(X > 0, 2.0), "scaled": lambda: torch.add(X, Y, alpha=0.5),
    "gather": lambda: X.gather(1, COLUMN), "gather from the end": lambda: X.gather(-1, COLUMN),
    "gather rows": lambda: X.gather(0, COLUMN[:1]), "gather two": lambda: X.gather(1, COLUMN.expand(6, 2)),
    "gather transposed": lambda: X.T.gather(1, COLUMN[:5]), "scatter": lambda: X.scatter_add(1, COLUMN, Y[:, :1]),
    "scatter part": lambda: X.scatter_add(1, COLUMN[:3], Y), "scatter rows": lambda: X.scatter_add(0, COLUMN[:2], Y),
}  # fmt: skip
CLOSE = {
    "sqrt": lambda: X.abs().sqrt(),
    "exp": lambda: X.exp(), "log": lambda: X.abs().log(), "tanh": lambda: X.tanh(), "sum": lambda: X.sum(),
    "sum of rows": lambda: X.sum(1), "kept": lambda: X.sum(0, keepdim=True), "mean": lambda: X.mean(),
    "mean of columns": lambda: X.mean(0), "mm": lambda: X @ Y.T, "addmm": lambda: torch.addmm(ROW, X, Y.T @ X),
    "scaled product": lambda: torch.addmm(ROW, X, Y.T @ X, beta=0.5),
    "sum of columns": lambda: X.sum(0), "sum of transposed": lambda: X.T.sum(0),
    "norm": lambda: X.norm(), "norm of columns": lambda: X.norm(dim=0), "sum of sizes": lambda: X.norm(p=1),
    "large norm": lambda: torch.linspace(-9, 9, 2 * SMALL).norm(), "norm of a part": lambda: X[:, 1].norm(),
    "sum as double": lambda: X.sum(dtype=torch.float64),
    "large tanh": lambda: torch.linspace(-9, 9, 2 * SMALL).tanh(),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    expected = EXACT[name]()
    with SmallArithmetic():
        found = EXACT[name]()
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
    if found.is_floating_point():
        assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("name", CLOSE)
def test_close(name):
    expected = CLOSE[name]()
    with SmallArithmetic():
        found = CLOSE[name]()
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)


def test_what_is_not_finite_passes_without_a_warning():
    bad = torch.tensor([float("nan"), float("inf"), 0.0])
    with SmallArithmetic():
        assert (bad / 0.0).isnan().tolist() == [True, False, True]
        assert bad.log().tolist()[1:] == [float("inf"), float("-inf")]
        assert bad.amax(0).isnan()


def test_large_tensors_and_other_types_are_left_to_torch():
    large = torch.ones(SMALL + 1)
    assert numpy_kernel("mul", (large, large), {}, large) is None
    half = torch.ones(3, dtype=torch.float16)
    assert numpy_kernel("mul", (half, half), {}, half) is None
    small = torch.ones(3)
    assert numpy_kernel("mul", (small, small), {}, small) is not None
    assert numpy_kernel("erf", (small,), {}, small) is None


def test_one_element_of_each_row_is_refused_if_it_is_outside():
    with SmallArithmetic(), pytest.raises((IndexError, RuntimeError)):
        X.gather(1, COLUMN + 5)
