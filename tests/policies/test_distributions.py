"""Action distributions against `torch.distributions`, and their samples against their probabilities."""

import math

import numpy as np
import pytest
import torch
from torch import distributions as reference

from rl_training.policies.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    MultiCategorical,
    gumbel_noise,
    logistic_noise,
    normal_noise,
)

B = 50
INF = float("inf")


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def randint(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(2))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def noise_of(draw, shape, seed=0):
    return torch.from_numpy(draw(np.random.default_rng(seed), shape))


def chi_square(counts, probabilities):
    expected = np.asarray(probabilities) * np.sum(counts)
    return float(np.sum((np.asarray(counts) - expected) ** 2 / expected))


class TestCategorical:
    def test_log_prob_and_entropy(self):
        logits, action = 3 * randn(B, 5), randint(5, B)
        ours, theirs = Categorical(logits), reference.Categorical(logits=logits)
        close(ours.log_prob(action), theirs.log_prob(action))
        close(ours.entropy(), theirs.entropy())

    def test_hand_numbers(self):
        # probabilities 1/4 and 3/4
        dist = Categorical(torch.tensor([[0.0, math.log(3)]]))
        assert dist.log_prob(torch.tensor([1])).item() == pytest.approx(math.log(0.75))
        assert dist.entropy().item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))

    def test_gradients(self):
        logits = randn(B, 5).requires_grad_()
        action = randint(5, B)
        for ours, theirs in (
            (Categorical(logits).log_prob(action), reference.Categorical(logits=logits).log_prob(action)),
            (Categorical(logits).entropy(), reference.Categorical(logits=logits).entropy()),
        ):
            close(torch.autograd.grad(ours.sum(), logits)[0], torch.autograd.grad(theirs.sum(), logits)[0])

    def test_mode(self):
        dist = Categorical(torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]]))
        assert dist.mode().tolist() == [1, 0]

    def test_sample_frequencies(self):
        probabilities = [0.1, 0.2, 0.3, 0.4]
        logits = torch.tensor(probabilities).log().expand(20_000, 4)
        action = Categorical(logits).sample(noise_of(gumbel_noise, (20_000, 4)))
        assert action.dtype == torch.int64
        # 0.1 % of right samplers exceed 16.3 with 3 degrees of freedom
        assert chi_square(np.bincount(action, minlength=4), probabilities) < 16.3

    def test_sample_depends_on_the_noise_alone(self):
        # argmax of log p + noise, whatever else was drawn before
        dist = Categorical(torch.tensor([[0.0, 0.0, 0.0]]))
        assert dist.sample(torch.tensor([[0.1, 0.3, 0.2]])).tolist() == [1]
        assert dist.sample(torch.tensor([[0.4, 0.3, 0.2]])).tolist() == [0]

    def test_impossible_actions(self):
        logits = torch.tensor([[-INF, 0.0, math.log(3), -INF]]).expand(5_000, 4)
        dist = Categorical(logits)
        counts = np.bincount(dist.sample(noise_of(gumbel_noise, (5_000, 4))), minlength=4)
        assert counts[0] == counts[3] == 0
        assert chi_square(counts[1:3], [0.25, 0.75]) < 10.8  # 0.1 %, one degree of freedom
        assert dist.mode()[0] == 2
        assert dist.log_prob(torch.zeros(5_000, dtype=torch.int64))[0] == -INF
        expected = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)  # as if the others did not exist
        assert dist.entropy()[0].item() == pytest.approx(expected)

    def test_impossible_actions_have_finite_gradients(self):
        logits = torch.tensor([[-INF, 0.5, 1.0]]).requires_grad_()
        dist = Categorical(logits)
        (dist.entropy() + dist.log_prob(torch.tensor([1]))).sum().backward()
        assert torch.isfinite(logits.grad).all()
        assert logits.grad[0, 0] == 0
        assert logits.grad[0, 1] != 0


class TestMultiCategorical:
    SIZES = (2, 3, 4)

    def parts(self, logits):
        return [reference.Categorical(logits=part) for part in logits.split(self.SIZES, dim=-1)]

    def test_log_prob_and_entropy(self):
        logits = randn(B, 9)
        action = torch.stack([randint(size, B) for size in self.SIZES], dim=1)
        ours, theirs = MultiCategorical(logits, self.SIZES), self.parts(logits)
        close(ours.log_prob(action), sum(part.log_prob(action[:, i]) for i, part in enumerate(theirs)))
        close(ours.entropy(), sum(part.entropy() for part in theirs))

    def test_mode(self):
        logits = torch.tensor([[1.0, 0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 3.0]])
        assert MultiCategorical(logits, self.SIZES).mode().tolist() == [[0, 1, 3]]

    def test_choices_are_independent_with_their_probabilities(self):
        first, second = [0.3, 0.7], [0.2, 0.3, 0.5]
        logits = torch.tensor(first + second).log().expand(20_000, 5)
        action = MultiCategorical(logits, (2, 3)).sample(noise_of(gumbel_noise, (20_000, 5)))
        assert action.shape == (20_000, 2)
        joint = np.bincount(action[:, 0] * 3 + action[:, 1], minlength=6)
        # 5 degrees of freedom: 20.5 at 0.1 %
        assert chi_square(joint, [p * q for p in first for q in second]) < 20.5

    def test_impossible_actions(self):
        logits = torch.tensor([[0.0, -INF, -INF, 1.0, 1.0]]).expand(2_000, 5)
        dist = MultiCategorical(logits, (2, 3))
        action = dist.sample(noise_of(gumbel_noise, (2_000, 5)))
        assert set(action[:, 0].tolist()) == {0}
        assert set(action[:, 1].tolist()) == {1, 2}
        assert dist.entropy()[0].item() == pytest.approx(math.log(2))  # one choice left, and two even ones


class TestBernoulli:
    def test_log_prob_and_entropy(self):
        logits, action = 3 * randn(B, 4), randint(2, B, 4)
        ours, theirs = Bernoulli(logits), reference.Bernoulli(logits=logits)
        close(ours.log_prob(action), theirs.log_prob(action.double()).sum(-1))
        close(ours.entropy(), theirs.entropy().sum(-1))

    def test_gradients(self):
        logits = randn(B, 4).requires_grad_()
        ours, theirs = Bernoulli(logits).entropy(), reference.Bernoulli(logits=logits).entropy()
        close(torch.autograd.grad(ours.sum(), logits)[0], torch.autograd.grad(theirs.sum(), logits)[0])

    def test_hand_numbers(self):
        # probabilities of a one: 3/4 and 1/2
        dist = Bernoulli(torch.tensor([[math.log(3), 0.0]]))
        assert dist.log_prob(torch.tensor([[1, 0]])).item() == pytest.approx(math.log(0.75 * 0.5))

    def test_mode(self):
        assert Bernoulli(torch.tensor([[-1.0, 2.0, 0.5]])).mode().tolist() == [[0, 1, 1]]

    def test_sample_frequencies(self):
        probabilities = np.array([0.05, 0.5, 0.9])
        logits = torch.from_numpy(np.log(probabilities / (1 - probabilities))).float().expand(20_000, 3)
        action = Bernoulli(logits).sample(noise_of(logistic_noise, (20_000, 3)))
        assert action.dtype == torch.int64
        deviation = np.sqrt(probabilities * (1 - probabilities) / 20_000)
        assert (np.abs(action.float().mean(0).numpy() - probabilities) < 3.5 * deviation).all()

    def test_certain_bits(self):
        dist = Bernoulli(torch.tensor([[-1000.0, 1000.0]]).expand(2_000, 2))
        action = dist.sample(noise_of(logistic_noise, (2_000, 2)))
        assert action.sum(0).tolist() == [0, 2_000]
        assert dist.entropy()[0].item() == 0.0


class TestDiagGaussian:
    def test_log_prob_and_entropy(self):
        mean, log_std, action = randn(B, 3), randn(3) - 1, 2 * randn(B, 3) + 0.3
        ours = DiagGaussian(mean, log_std)
        theirs = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
        close(ours.log_prob(action), theirs.log_prob(action))
        close(ours.entropy(), theirs.entropy())
        assert ours.entropy().shape == (B,)

    def test_hand_numbers(self):
        # deviations 1 and 2, one of each away from the mean: two times -1/2 - ln sqrt(2 pi), and -ln 2
        dist = DiagGaussian(torch.zeros(1, 2), torch.tensor([0.0, math.log(2)]))
        expected = -1.0 - math.log(2 * math.pi) - math.log(2)
        assert dist.log_prob(torch.tensor([[1.0, -2.0]])).item() == pytest.approx(expected)
        # entropy: 1/2 ln(2 pi e) each, and ln 2 for the wider one
        assert dist.entropy().item() == pytest.approx(math.log(2 * math.pi * math.e) + math.log(2))

    def test_gradients(self):
        mean, log_std = randn(B, 3).requires_grad_(), randn(3).requires_grad_()
        action = 2 * randn(B, 3)
        ours = DiagGaussian(mean, log_std).log_prob(action).sum()
        theirs = reference.Normal(mean, log_std.exp()).log_prob(action).sum()
        for found, expected in zip(
            torch.autograd.grad(ours, (mean, log_std)), torch.autograd.grad(theirs, (mean, log_std)), strict=True
        ):
            close(found, expected)

    def test_mode_and_sample(self):
        dist = DiagGaussian(torch.tensor([[1.0, -1.0]]), torch.tensor([0.0, math.log(3)]))
        assert dist.mode().tolist() == [[1.0, -1.0]]
        assert dist.sample(torch.tensor([[2.0, -1.0]]))[0].tolist() == pytest.approx([3.0, -4.0])

    def test_sample_moments(self):
        dist = DiagGaussian(torch.tensor([1.0, -2.0]).expand(20_000, 2), torch.tensor([0.0, math.log(3)]))
        sample = dist.sample(noise_of(normal_noise, (20_000, 2)))
        assert sample.dtype == torch.float32
        # the mean of n has deviation std / sqrt(n), their deviation about std / sqrt(2 n): 0.0071 std and 0.005 std
        assert sample.mean(0).tolist() == pytest.approx([1.0, -2.0], abs=0.06)
        assert sample.std(0).tolist() == pytest.approx([1.0, 3.0], rel=0.02)


CUMULATIVE = {
    gumbel_noise: lambda x: math.exp(-math.exp(-x)),
    logistic_noise: lambda x: 1 / (1 + math.exp(-x)),
    normal_noise: lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))),
}


@pytest.mark.parametrize("draw", CUMULATIVE, ids=lambda draw: draw.__name__)
class TestNoise:
    def test_distribution(self, draw):
        sample = np.sort(draw(np.random.default_rng(0), (20_000,)).astype(np.float64))
        expected = np.array([CUMULATIVE[draw](x) for x in sample])
        # Kolmogorov-Smirnov: 0.1 % of right samplers exceed 1.95 / sqrt(n)
        assert np.abs(expected - np.arange(1, 20_001) / 20_000).max() < 1.95 / math.sqrt(20_000)

    def test_shape_and_type(self, draw):
        noise = draw(np.random.default_rng(0), (3, 4))
        assert noise.shape == (3, 4)
        assert noise.dtype == np.float32

    def test_numbers_come_from_the_stream_alone(self, draw):
        first, second = np.random.default_rng(5), np.random.default_rng(5)
        torch.manual_seed(0)
        a = draw(first, (6,))
        torch.manual_seed(1)
        b = draw(second, (6,))
        assert np.array_equal(a, b)
        assert not np.array_equal(b, draw(second, (6,)))  # and the stream moved on


class ZeroDraws:
    """A stream that gives what numpy's float32 exponential really gives once in some eight million draws."""

    def standard_exponential(self, shape, dtype):
        return np.zeros(shape, dtype)


def test_a_draw_of_zero_does_not_choose_an_impossible_action():
    with np.errstate(divide="raise"):
        noise = torch.from_numpy(gumbel_noise(ZeroDraws(), (1, 3)))
    assert torch.isfinite(noise).all()
    assert Categorical(torch.tensor([[-INF, 0.0, -1.0]])).sample(noise).tolist() == [1]
