"""Functions of numpy and torch that compiled recordings call themselves: the same bits, or calls from Python."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_training.accelerate.native import libraries
from rl_training.accelerate.native.libraries import blas, numpy_loop, vector_functions
from rl_training.accelerate.numpy_kernels import SMALL
from tests.accelerate.native_harness import HAS_COMPILER
from tests.accelerate.test_native import compare, threads  # noqa: F401 - a fixture
from tests.accelerate.test_recording import draw

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")

SPECIAL = torch.tensor([0.0, -0.0, 1e-45, 100.0, -100.0, 20.0, 20.01, float("nan"), float("inf"), -float("inf")])


@pytest.fixture
def nothing_found(monkeypatch):
    """No library has what is looked for."""
    found = (numpy_loop, vector_functions, blas, libraries._is_known, libraries.is_dot_known)
    for function in found:
        function.cache_clear()
    monkeypatch.setattr(libraries, "loaded", lambda path: None)
    monkeypatch.setattr(libraries, "_OF_NUMPY", {"exp": np.exp2, "log": np.log2, "tanh": np.arctan2})
    yield
    for function in found:
        function.cache_clear()


FUNCTIONS = {"exp": torch.exp, "log": lambda x: x.abs().log(), "tanh": torch.tanh}


class TestFunctionsOfOneNumber:
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_by_numpys_loops(self, name, threads):  # noqa: F811
        def function(*inputs):
            return {str(len(x)): FUNCTIONS[name](3 * x) for x in inputs}

        program = compare(function, *(draw(size) for size in (1, 7, 37, 1536, 4096)), seeds=5)
        assert (name in program.foreign) == (numpy_loop(name) is None)

    def test_large_ones_are_torchs_but_for_tanh(self, threads):  # noqa: F811
        program = compare(lambda x: {"exp": x.exp(), "tanh": x.tanh()}, draw(100, 97))
        assert SMALL < 100 * 97
        assert program.foreign == (["exp"] if numpy_loop("tanh") else ["exp", "tanh"])

    def test_columns_of_a_matrix_are_left_to_numpy(self):
        program = compare(lambda x: {"y": x[:, :3].exp()}, draw(64, 6))
        assert "exp" in program.foreign

    def test_what_is_not_a_number_stays_so(self):
        x = SPECIAL.repeat(32)
        compare(lambda x: {"exp": x.exp(), "log": x.log(), "tanh": x.tanh(), "softplus": F.softplus(x)}, x, seeds=1)

    @pytest.mark.parametrize("size", [(256, 6), (8, 32), (33, 31), (400, 100)])
    def test_softplus_and_its_gradient(self, size, threads):  # noqa: F811
        def function(x, gradient):
            return {"y": F.softplus(x), "back": torch.ops.aten.softplus_backward(gradient, x, 1, 20)}

        program = compare(function, 10 * draw(*size), draw(*size, seed=1))
        is_whole = torch.Size(size).numel() % 32 == 0 and torch.Size(size).numel() < 32_768
        assert (program.foreign == []) == (is_whole and vector_functions() is not None)

    def test_another_softplus_is_left_to_torch(self):
        program = compare(lambda x: {"y": F.softplus(x, beta=2)}, draw(8, 32))
        assert program.foreign == ["softplus"]


def random_product(a_shape, b_shape, a_turned, b_turned):
    def function(a, b, bias):
        a = a.t().contiguous().t() if a_turned else a
        b = b.t().contiguous().t() if b_turned else b
        return {"mm": torch.mm(a, b), "addmm": torch.addmm(bias, a, b)}

    return compare(function, draw(*a_shape), draw(*b_shape, seed=1), draw(b_shape[1], seed=2))


class TestSmallProductsAndSums:
    @pytest.mark.parametrize("a_turned", [False, True])
    @pytest.mark.parametrize("b_turned", [False, True])
    @pytest.mark.parametrize(
        ("m", "k", "n"), [(256, 64, 2), (256, 64, 1), (1, 256, 64), (2, 256, 64), (64, 2, 64), (64, 64, 6), (64, 1, 64)]
    )
    def test_products(self, m, k, n, a_turned, b_turned):
        program = random_product((m, k), (k, n), a_turned, b_turned)
        if blas():
            assert not {"mm", "addmm"} & set(program.foreign)

    @pytest.mark.parametrize("shape", [(2, 64), (2, 33), (3, 100), (17, 33)])
    def test_a_matrix_and_itself_are_left_to_numpy(self, shape):
        """Numpy computes half of the result then, in another order."""
        program = compare(lambda x: {"y": x @ x.t()}, draw(*shape), seeds=20)
        assert program.foreign in ([], ["mm"])

    def test_zeros_have_the_sign_that_numpy_gives_them(self):
        column, row = SPECIAL[:, None], torch.tensor([[0.0, -0.0, -1.0, 2.0]])
        compare(lambda a, b: {"one": 1 / (a @ b), "kept": 1 / a.sum(1)}, column, row, seeds=1)

    def test_one_number_as_a_matrix(self):
        """Numpy leaves out a product with zero, whatever it is multiplied with."""
        compare(lambda a, b: {"left": a @ b, "right": b @ a.t()}, SPECIAL[:, None], torch.zeros(1, 1), seeds=1)

    def test_numbers_of_other_types_by_default(self):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            compare(lambda x: {"y": x.sum(0)}, torch.zeros(256, 1, dtype=torch.float32))
        finally:
            torch.set_default_dtype(before)

    def test_a_single_number_is_left_to_numpy(self):
        assert {"mm", "addmm"} <= set(random_product((1, 64), (64, 1), False, False).foreign)

    @pytest.mark.parametrize("shape", [(64, 6), (256, 12), (64, 64), (256, 1), (1, 5), (2, 2)])
    def test_sums_of_columns(self, shape, threads):  # noqa: F811
        program = compare(lambda x: {"y": x.sum(0), "kept": x.sum(0, keepdim=True)}, draw(*shape), seeds=5)
        if blas():
            assert program.foreign == []

    def test_sums_of_columns_that_lie_apart_are_left_to_numpy(self):
        assert "sum" in compare(lambda x: {"y": x[:, ::2].sum(0)}, draw(64, 6)).foreign


def test_without_these_libraries_all_is_called_from_python(nothing_found):
    def function(x, y):
        small = {"mm": x @ y, "sum": x.sum(0), "norm": x.norm()}
        return {**small, "exp": x.exp(), "log": x.abs().log(), "tanh": x.tanh(), "softplus": F.softplus(x)}

    program = compare(function, draw(64, 8), draw(8, 1, seed=1))
    wanted = {"mm", "sum", "linalg_vector_norm", "exp", "log", "tanh", "softplus"}
    assert wanted <= set(program.foreign)


def test_a_loop_that_gives_other_numbers_is_not_used(monkeypatch):
    numpy_loop.cache_clear()

    class Similar:
        """Looks like numpy's tanh where it lies, and computes something else."""

        types = np.tanh.types

        def __call__(self, x):
            return np.tanh(x) * np.float32(1.0000001)

    class Place:
        @staticmethod
        def from_address(address):
            return real.from_address(id(np.tanh))

    real = libraries._Ufunc
    monkeypatch.setattr(libraries, "_Ufunc", Place)
    monkeypatch.setattr(libraries, "_OF_NUMPY", {"tanh": Similar()})
    try:
        assert numpy_loop("tanh") is None
    finally:
        numpy_loop.cache_clear()
