"""Return distributions: projections and quantile losses by hand, and against loops that spell them out."""

import numpy as np
import pytest
import torch

from rl_training.functional import distributional
from rl_training.functional.distributional import (
    categorical_projection,
    ensemble_quantile_loss,
    kl_divergence,
    quantile_huber_loss,
    soft_quantile_target,
    truncated_mixture,
)

ATOMS = torch.tensor([0.0, 1.0, 2.0, 3.0])

PROJECTIONS = [
    pytest.param([0.1, 0.2, 0.3, 0.4], 0.0, 1.0, [0.1, 0.2, 0.3, 0.4], id="nothing moves"),
    pytest.param([1, 0, 0, 0], 2.0, 1.0, [0, 0, 1, 0], id="onto an atom"),
    pytest.param([0, 0, 0, 1], 0.0, 1.0, [0, 0, 0, 1], id="onto the last atom"),
    pytest.param([1, 0, 0, 0], 0.25, 1.0, [0.75, 0.25, 0, 0], id="between two atoms"),
    # atoms go to 0.5, 1, 1.5, 2
    pytest.param([0.25] * 4, 0.5, 0.5, [0.125, 0.5, 0.375, 0], id="shrunk and moved"),
    pytest.param([0.5, 0, 0, 0.5], 2.5, 1.0, [0, 0, 0.25, 0.75], id="above the support"),
    # atoms go to -1.5, -0.5, 0.5, 1.5
    pytest.param([0.25] * 4, -1.5, 1.0, [0.625, 0.25, 0.125, 0], id="below the support"),
    pytest.param([0.1, 0.2, 0.3, 0.4], 2.0, 0.0, [0, 0, 1, 0], id="terminated, on an atom"),
    pytest.param([0.1, 0.2, 0.3, 0.4], 1.25, 0.0, [0, 0.75, 0.25, 0], id="terminated, between atoms"),
    pytest.param([0.1, 0.2, 0.3, 0.4], 99.0, 0.0, [0, 0, 0, 1], id="terminated, far above"),
    pytest.param([0.1, 0.2, 0.3, 0.4], -99.0, 0.0, [1, 0, 0, 0], id="terminated, far below"),
]


@pytest.mark.parametrize(("probs", "reward", "discount", "expected"), PROJECTIONS)
def test_projection(probs, reward, discount, expected):
    found = categorical_projection(
        torch.tensor([probs], dtype=torch.float32), torch.tensor([reward]), torch.tensor([discount]), ATOMS
    )
    assert found.tolist()[0] == pytest.approx(expected, abs=1e-6)


def test_projection_of_a_batch():
    probs, reward, discount, expected = (
        torch.tensor([case.values[i] for case in PROJECTIONS], dtype=torch.float32) for i in range(4)
    )
    torch.testing.assert_close(categorical_projection(probs, reward, discount, ATOMS), expected)


def test_what_lands_on_an_atom_is_exact():
    # all of it, to the bit: no mass leaks to a neighbour
    reward, discount = torch.tensor([0.0, 1.0, -1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    for atom in range(4):
        probs = torch.zeros(4, 4)
        probs[:, atom] = 1.0
        found = categorical_projection(probs, reward, discount, ATOMS)
        goal = (atom * discount + reward).clamp(0, 3).long()
        assert found.tolist() == torch.nn.functional.one_hot(goal, 4).float().tolist()


def loop(probs, reward, discount, support):
    """The same, atom by atom: mass goes to a neighbour by its nearness in units of the spacing."""
    spacing = support[1] - support[0]
    projected = np.zeros_like(probs)
    for b in range(len(probs)):
        for k, z in enumerate(support):
            moved = np.clip(reward[b] + discount[b] * z, support[0], support[-1])
            for j, atom in enumerate(support):
                projected[b, j] += probs[b, k] * max(0.0, 1 - abs(moved - atom) / spacing)
    return projected


@pytest.mark.parametrize(("v_min", "v_max", "K"), [(-10, 10, 51), (-1, 3, 2), (0, 500, 11)])
def test_random_distributions_against_the_loop(v_min, v_max, K):
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(K), size=30)
    reward = rng.normal(scale=v_max, size=30)
    discount = rng.choice([0.0, 0.5, 0.99, 1.0], size=30)
    support = np.linspace(v_min, v_max, K)
    expected = loop(probs, reward, discount, support)
    arrays = (probs, reward, discount, support)
    found = categorical_projection(*(torch.from_numpy(x) for x in arrays))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    single = categorical_projection(*(torch.from_numpy(x).float() for x in arrays))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), expected, atol=1e-4)


def test_mass_is_conserved_and_never_negative():
    rng = np.random.default_rng(1)
    probs = torch.from_numpy(rng.dirichlet(np.ones(51), size=200)).float()
    reward = torch.from_numpy(rng.normal(scale=20, size=200)).float()
    discount = torch.from_numpy(rng.random(200)).float()
    found = categorical_projection(probs, reward, discount, torch.linspace(-10, 10, 51))
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(200), rtol=0, atol=1e-5)


def test_the_mean_moves_as_returns_do():
    # as long as nothing leaves the support, projecting keeps the mean: E = reward + discount * E
    rng = np.random.default_rng(2)
    support = torch.linspace(-10, 10, 51, dtype=torch.float64)
    probs = torch.from_numpy(rng.dirichlet(np.ones(51), size=20))
    reward, discount = torch.from_numpy(rng.uniform(-1, 1, 20)), torch.full((20,), 0.9, dtype=torch.float64)
    found = categorical_projection(probs, reward, discount, support) @ support
    torch.testing.assert_close(found, reward + discount * (probs @ support), rtol=0, atol=1e-9)


def test_projection_leaves_its_inputs_as_they_are():
    inputs = [torch.full((2, 4), 0.25), torch.ones(2), torch.ones(2), ATOMS.clone()]
    before = [x.clone() for x in inputs]
    categorical_projection(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_kl_divergence():
    # 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75); equal ones; impossible atoms of the target cost nothing
    target = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.0, 1.0]])
    predicted = torch.tensor([[0.25, 0.75], [0.2, 0.8], [0.5, 0.5]])
    expected = [0.5 * np.log(2) + 0.5 * np.log(2 / 3), 0.0, np.log(2)]
    assert kl_divergence(target, predicted.log()).tolist() == pytest.approx(expected, abs=1e-6)


def test_kl_divergence_has_the_gradient_of_the_cross_entropy():
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 5)
    (found,) = torch.autograd.grad(kl_divergence(target, logits.log_softmax(1)).sum(), logits)
    torch.testing.assert_close(found, logits.detach().softmax(1) - target)


QUANTILES = [
    # the median: half of Huber's loss. u = 0.5 and -0.5 cost 0.125 each: 0.5 * 0.125
    pytest.param([0.0], [0.5, -0.5], [0.5], 1.0, 0.0625, id="median, small errors"),
    # u = 3 and -3 cost 2.5 each: 0.5 * 2.5
    pytest.param([0.0], [3.0, -3.0], [0.5], 1.0, 1.25, id="median, large errors"),
    # u = 3 weighs 0.9, u = -3 weighs 0.1: (0.9 * 2.5 + 0.1 * 2.5) / 2
    pytest.param([0.0], [3.0, -3.0], [0.9], 1.0, 1.25, id="ninth decile, both sides"),
    pytest.param([0.0], [3.0], [0.9], 1.0, 2.25, id="ninth decile, too low"),
    pytest.param([0.0], [-3.0], [0.9], 1.0, 0.25, id="ninth decile, too high"),
    pytest.param([1.0], [1.0], [0.9], 1.0, 0.0, id="right"),
    # kappa 2: huber(3, 2) = 2 * (3 - 1) = 4, over kappa 2
    pytest.param([0.0], [3.0], [0.25], 2.0, 0.5, id="larger kappa"),
    # kappa 0.5: huber(3, 0.5) = 0.5 * (3 - 0.25) = 1.375, over 0.5 = 2.75
    pytest.param([0.0], [3.0], [0.25], 0.5, 0.6875, id="smaller kappa"),
    # pred 0 at 0.25: u = 1, 2 cost 0.5, 1.5: 0.25 * mean(0.5, 1.5) = 0.25
    # pred 3 at 0.75: u = -2, -1 cost 1.5, 0.5: 0.25 * mean = 0.25
    pytest.param([0.0, 3.0], [1.0, 2.0], [0.25, 0.75], 1.0, 0.5, id="two by two"),
    # pred 2 at 0.25: u = -1, 0, 1 cost 0.75 * 0.5, 0, 0.25 * 0.5, mean 1/6
    # pred 0 at 0.5: u = 1, 2, 3 cost 0.5 * (0.5, 1.5, 2.5), mean 0.75
    pytest.param([2.0, 0.0], [1.0, 2.0, 3.0], [0.25, 0.5], 1.0, 1 / 6 + 0.75, id="two by three"),
]


@pytest.mark.parametrize(("pred", "target", "fractions", "kappa", "expected"), QUANTILES)
def test_quantile_huber_loss(pred, target, fractions, kappa, expected):
    found = quantile_huber_loss(torch.tensor([pred]), torch.tensor([target]), torch.tensor(fractions), kappa)
    assert found.tolist() == pytest.approx([expected])


def pairwise(pred, target, fractions, kappa):
    """The papers' formula, left to autograd."""
    u = target[:, None, :] - pred[:, :, None]
    cost = torch.where(u.abs() <= kappa, 0.5 * u.square(), kappa * (u.abs() - 0.5 * kappa))
    weight = (fractions.expand_as(pred)[:, :, None] - (u.detach() < 0).double()).abs()
    return (weight * cost / kappa).mean(2).sum(1)


@pytest.mark.parametrize("kappa", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("per_row", [False, True])
def test_values_and_gradients_against_the_formula(kappa, per_row):
    rng = np.random.default_rng(0)
    pred, weight = torch.from_numpy(rng.normal(size=(6, 5))).requires_grad_(), torch.from_numpy(rng.random(6))
    target = torch.from_numpy(rng.normal(size=(6, 7)))
    fractions = torch.from_numpy(rng.random((6, 5) if per_row else 5))
    found, expected = (fn(pred, target, fractions, kappa) for fn in (quantile_huber_loss, pairwise))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((weight * loss).sum(), pred)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_large_batches_are_compared_in_parts(monkeypatch):
    rng = np.random.default_rng(1)
    pred, target, fractions = (torch.from_numpy(rng.random((7, k))) for k in (3, 4, 3))
    expected = quantile_huber_loss(pred, target, fractions)
    for pairs in (1, 12, 36, 48):  # 12 pairs in a row
        monkeypatch.setattr(distributional, "PAIRS_AT_ONCE", pairs)
        torch.testing.assert_close(quantile_huber_loss(pred, target, fractions), expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(quantile_huber_loss(pred, target, fractions[0])[:1], expected[:1])


def test_rows_do_not_mix():
    pred, target = torch.zeros(2, 3), torch.tensor([[0.0, 0.0], [9.0, 9.0]])
    found = quantile_huber_loss(pred, target, torch.tensor([0.1, 0.5, 0.9]))
    assert found[0] == 0.0
    assert found[1] > 0.0


def test_quantile_inputs_are_left_as_they_are_and_targets_get_no_gradient():
    pred, target = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    fractions = torch.tensor([0.1, 0.5, 0.9])
    quantile_huber_loss(pred, target, fractions).sum().backward()
    assert pred.grad is not None
    assert target.grad is None
    assert (pred == 0).all()
    assert (target == 1).all()
    assert fractions.tolist() == pytest.approx([0.1, 0.5, 0.9])


def test_the_minimum_is_at_the_quantiles():
    # of the numbers 0 to 99, with a kappa too small to matter
    target = torch.arange(100.0).unsqueeze(0)
    fractions = torch.tensor([0.1, 0.5, 0.9])
    pred = torch.full((1, 3), 50.0, requires_grad=True)
    optimizer = torch.optim.Adam([pred], lr=0.5)
    for _ in range(600):
        optimizer.zero_grad()
        quantile_huber_loss(pred, target, fractions, kappa=0.01).sum().backward()
        optimizer.step()
    assert pred[0].tolist() == pytest.approx([9.5, 49.5, 89.5], abs=1.0)


def test_the_largest_of_all_pooled_quantiles_are_dropped():
    # two critics, two rows, three quantiles: of one row both of the largest are the first critic's
    quantiles = torch.tensor([[[1.0, 9.0, 8.0], [3.0, 2.0, 1.0]], [[2.0, 0.0, 5.0], [7.0, -1.0, 1.5]]])
    assert truncated_mixture(quantiles, 2).tolist() == [[0.0, 1.0, 2.0, 5.0], [-1.0, 1.0, 1.5, 2.0]]
    assert truncated_mixture(quantiles, 0)[1].tolist() == [-1.0, 1.0, 1.5, 2.0, 3.0, 7.0]


def test_soft_quantile_target():
    # 1 + 0.5 * (4 + 0.5 * 2), 1 + 0.5 * (-2 + 0.5 * 2); terminated: the reward alone
    reward, discount, log_prob = torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.0]), torch.tensor([-2.0, 5.0])
    target = soft_quantile_target(reward, discount, torch.tensor([[4.0, -2.0], [6.0, 7.0]]), log_prob, 0.5)
    assert target.tolist() == [[3.5, 0.5], [3.0, 3.0]]


def test_quantile_loss_of_an_ensemble():
    # one row, fractions 0.25 and 0.75, targets 0 and 4. The first critic predicts 0 and 2:
    #   0.25 * (0 + 3.5) / 2 = 0.4375; u = -2 and 2: (0.25 * 1.5 + 0.75 * 1.5) / 2 = 0.75
    # the second 4 and 4.5: u = -4 and 0: 0.75 * 3.5 / 2 = 1.3125; u = -4.5 and -0.5: 0.25 * (4 + 0.125) / 2 = 0.515625
    pred = torch.tensor([[[0.0, 2.0]], [[4.0, 4.5]]], requires_grad=True)
    loss = ensemble_quantile_loss(pred, torch.tensor([[0.0, 4.0]]))
    assert loss.tolist() == pytest.approx([(0.4375 + 0.75) / 2 + (1.3125 + 0.515625) / 2])
    loss.sum().backward()
    # minus |fraction - (u < 0)| clip(u), averaged over targets and quantiles
    expected = [-(0.25 * 1) / 4, -(-0.25 + 0.75) / 4, 0.75 / 4, (0.25 + 0.25 * 0.5) / 4]
    assert pred.grad.flatten().tolist() == pytest.approx(expected)
