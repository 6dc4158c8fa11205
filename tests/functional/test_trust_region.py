"""Trust regions: conjugate gradients, Fisher products, KL divergences and line searches against independent sums."""

import numpy as np
import pytest
import torch
from torch import distributions as td
from torch import nn

from rl_training.functional.trust_region import (
    conjugate_gradient,
    fisher_product,
    flatten,
    largest_step,
    line_search,
)
from rl_training.policies.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    MultiCategorical,
    frozen,
    kl_divergence,
)
from rl_training.policies.masks import apply_mask


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def positive_definite(size, seed=0):
    root = normal(size, size, seed=seed)
    return root @ root.T + 0.1 * torch.eye(size, dtype=torch.float64)


class TestConjugateGradient:
    @pytest.mark.parametrize("size", [1, 3, 10])
    @pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
    def test_solves_what_a_direct_solver_solves(self, size, scale):
        a, b = positive_definite(size), scale * normal(size, seed=1)
        x = conjugate_gradient(lambda v: a @ v, b, num_iterations=3 * size, tolerance=1e-20)
        torch.testing.assert_close(x, torch.linalg.solve(a, b), rtol=1e-6, atol=0)

    def test_the_residual_shrinks_with_iterations(self):
        a, b = positive_definite(20), normal(20, seed=1)
        errors = [
            (b - a @ conjugate_gradient(lambda v: a @ v, b, num_iterations=count)).norm().item() for count in (1, 5, 40)
        ]
        assert errors[0] > errors[1] > errors[2]

    def test_stops_when_the_residual_is_small_enough(self):
        a, calls = positive_definite(10), []

        def product(v):
            calls.append(v)
            return a @ v

        conjugate_gradient(product, normal(10, seed=1), num_iterations=1000)
        assert len(calls) < 40

    def test_nothing_to_solve(self):
        x = conjugate_gradient(lambda v: pytest.fail("not needed"), torch.zeros(3), num_iterations=5)
        assert torch.equal(x, torch.zeros(3))

    @pytest.mark.parametrize("diagonal", [[2.0, 0.0], [0.0, 0.0], [2.0, -1.0]])
    def test_directions_without_curvature_leave_it_finite(self, diagonal):
        a = torch.diag(torch.tensor(diagonal))
        x = conjugate_gradient(lambda v: a @ v, torch.tensor([1.0, 1.0]), num_iterations=10)
        assert torch.isfinite(x).all()


# What is compared with what: our distribution of raw outputs, and torch's of the same outputs
WIDTH = 6


def multi_kl(p, q):
    parts = zip(p.split([2, 4], dim=-1), q.split([2, 4], dim=-1), strict=True)
    return sum(td.kl_divergence(td.Categorical(logits=a), td.Categorical(logits=b)) for a, b in parts)


def gaussian(outputs):
    return DiagGaussian(outputs[:, :3], outputs[:, 3:])


def torch_gaussian(outputs):
    return td.Independent(td.Normal(outputs[:, :3], outputs[:, 3:].exp()), 1)


KINDS = {
    "categorical": (Categorical, lambda p, q: td.kl_divergence(td.Categorical(logits=p), td.Categorical(logits=q))),
    "multi": (lambda x: MultiCategorical(x, [2, 4]), multi_kl),
    "bernoulli": (
        Bernoulli,
        lambda p, q: td.kl_divergence(
            td.Independent(td.Bernoulli(logits=p), 1), td.Independent(td.Bernoulli(logits=q), 1)
        ),
    ),
    "gaussian": (gaussian, lambda p, q: td.kl_divergence(torch_gaussian(p), torch_gaussian(q))),
}
each_kind = pytest.mark.parametrize(("make", "expected"), KINDS.values(), ids=KINDS)


class TestKL:
    @each_kind
    def test_as_torch_has_it(self, make, expected):
        p, q = normal(5, WIDTH), normal(5, WIDTH, seed=1)
        found = kl_divergence(make(p), make(q))
        assert found.shape == (5,)
        torch.testing.assert_close(found, expected(p, q))

    @each_kind
    def test_none_from_itself(self, make, expected):
        p = normal(5, WIDTH).float()
        assert torch.equal(kl_divergence(make(p), make(p)), torch.zeros(5))

    def test_shared_deviations_of_a_gaussian(self):
        mean, other, log_std, other_log_std = normal(5, 3), normal(5, 3, seed=1), normal(3, seed=2), normal(3, seed=3)
        found = kl_divergence(DiagGaussian(mean, log_std), DiagGaussian(other, other_log_std))
        p, q = td.Normal(mean, log_std.exp()), td.Normal(other, other_log_std.exp())
        torch.testing.assert_close(found, td.kl_divergence(p, q).sum(-1))

    @pytest.mark.parametrize("kind", ["categorical", "multi"])
    def test_masked_is_that_of_the_valid_actions(self, kind):
        make, _ = KINDS[kind]
        p, q = normal(1, WIDTH).float(), normal(1, WIDTH, seed=1).float()
        mask = torch.tensor([[True, False, True, False, True, True]])
        found = kl_divergence(make(apply_mask(p, mask)), make(apply_mask(q, mask)))
        if kind == "categorical":
            parts = [[0, 2, 4, 5]]
        else:
            parts = [[0], [2, 4, 5]]
        subsets = [(td.Categorical(logits=p[0, part]), td.Categorical(logits=q[0, part])) for part in parts]
        expected = sum(td.kl_divergence(a, b) for a, b in subsets)
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)

    def test_gradients_of_masked_ones_are_finite(self):
        p, q = normal(4, WIDTH).float(), normal(4, WIDTH, seed=1).float().requires_grad_()
        mask = torch.zeros(4, WIDTH, dtype=torch.bool)
        mask[:, 1:3] = True
        kl_divergence(Categorical(apply_mask(p, mask)), Categorical(apply_mask(q, mask))).sum().backward()
        assert torch.isfinite(q.grad).all()
        assert torch.equal(q.grad[~mask], torch.zeros(16))

    def test_of_two_kinds_is_refused(self):
        with pytest.raises(AssertionError):
            kl_divergence(Categorical(normal(2, 3)), Bernoulli(normal(2, 3)))

    def test_a_frozen_gaussian_does_not_follow_the_network(self):
        log_std = nn.Parameter(torch.zeros(2))
        with torch.no_grad():
            old = frozen(DiagGaussian(torch.zeros(1, 2), log_std))
            log_std += 1.0
        new = DiagGaussian(torch.zeros(1, 2), log_std)
        expected = td.kl_divergence(td.Normal(0.0, 1.0), td.Normal(0.0, float(np.e))) * 2
        torch.testing.assert_close(kl_divergence(old, new)[0], expected)
        assert not old.log_std.requires_grad


class TestFisherProduct:
    @each_kind
    def test_is_the_hessian_of_the_kl(self, make, expected):
        obs = normal(7, 2)
        weights = normal(2, WIDTH, seed=1).requires_grad_()
        bias = normal(WIDTH, seed=2).requires_grad_()
        old = make((obs @ weights + bias).detach())

        def mean_kl(flat):
            w, b = flat[: 2 * WIDTH].view(2, WIDTH), flat[2 * WIDTH :]
            return kl_divergence(old, make(obs @ w + b)).mean()

        flat = flatten((weights, bias)).detach()
        hessian = torch.autograd.functional.hessian(mean_kl, flat)
        product = fisher_product(kl_divergence(old, make(obs @ weights + bias)).mean(), [weights, bias], damping=0.1)
        v = normal(len(flat), seed=3)
        torch.testing.assert_close(product(v), hessian @ v + 0.1 * v)
        torch.testing.assert_close(product(2 * v), 2 * product(v))  # may be asked again

    def test_parameters_that_do_not_matter_have_only_the_damping(self):
        used, unused = normal(3).requires_grad_(), normal(2).requires_grad_()
        old = Categorical(used.detach().unsqueeze(0))
        product = fisher_product(kl_divergence(old, Categorical(used.unsqueeze(0))).mean(), [used, unused], damping=0.5)
        v = normal(5, seed=1)
        torch.testing.assert_close(product(v)[3:], 0.5 * v[3:])


class TestLargestStep:
    def test_its_quadratic_kl_is_the_target(self):
        f, direction = positive_definite(5), normal(5, seed=1)
        step = largest_step(direction, f @ direction, target_kl=0.02)
        torch.testing.assert_close(0.5 * step @ f @ step, torch.tensor(0.02, dtype=torch.float64))
        torch.testing.assert_close(step / step.norm(), direction / direction.norm())

    def test_no_direction_no_step(self):
        assert torch.equal(largest_step(torch.zeros(3), torch.zeros(3), 0.01), torch.zeros(3))


def tensors(*numbers):
    return tuple(torch.tensor(float(number)) for number in numbers)


class TestLineSearch:
    def search(self, gain, kl, **settings):
        seen = []

        def evaluate(share):
            seen.append(share)
            return tensors(gain(share), kl(share))

        found = line_search(evaluate, **{"max_kl": 0.01, "shrink": 0.5, "num_tries": 5, **settings})
        assert seen[-1] == found.share, "what was set last is what was chosen"
        return found, seen

    def test_the_whole_step_if_it_will_do(self):
        found, seen = self.search(gain=lambda s: s, kl=lambda s: 0.01 * s)
        assert (found.share, seen) == (1.0, [1.0])
        assert (found.gain.item(), found.kl.item()) == (1.0, pytest.approx(0.01))

    def test_shrinks_until_the_kl_is_within_the_limit(self):
        found, seen = self.search(gain=lambda s: s, kl=lambda s: 0.05 * s * s)
        assert (found.share, seen) == (0.25, [1.0, 0.5, 0.25])

    def test_shrinks_until_there_is_a_gain(self):
        found, _ = self.search(gain=lambda s: 0.3 - s, kl=lambda s: 0.0)
        assert found.share == 0.25

    @pytest.mark.parametrize(
        ("gain", "kl"), [(-1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (float("nan"), 0.0), (1.0, float("nan"))]
    )
    def test_stays_where_it_is_if_nothing_will_do(self, gain, kl):
        found, seen = self.search(lambda s: gain if s else 0.0, lambda s: kl if s else 0.0, num_tries=3)
        assert seen == [1.0, 0.5, 0.25, 0.0]
        assert (found.share, found.gain.item(), found.kl.item()) == (0.0, 0.0, 0.0)
