"""PPO's loss: signs and factors, computed by hand."""

import math

import pytest
import torch

from rl_training.algorithms.ppo import ppo_loss

WITH_GRADIENT = ("logprobs", "new_values", "entropy")
WEIGHTS = {"clip_coef": 0.2, "ent_coef": 0.1, "vf_coef": 0.5}


def minibatch(**changes):
    """Four rows with ratios 1.5, 0.5, 0.5, 1.5 and advantages 2, 2, -2, -2."""
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5])
    ratio = torch.tensor([1.5, 0.5, 0.5, 1.5])
    rows = {
        "logprobs": old + ratio.log(),
        "old_logprobs": old,
        "advantages": torch.tensor([2.0, 2.0, -2.0, -2.0]),
        "returns": torch.tensor([3.0, 1.0, 0.0, -2.0]),
        "values": torch.zeros(4),
        "new_values": torch.tensor([2.0, 0.25, 2.0, -1.0]),
        "entropy": torch.tensor([0.5, 1.0, 1.5, 2.0]),
        **changes,
    }
    return {name: value.clone().requires_grad_(name in WITH_GRADIENT) for name, value in rows.items()}


def numbers(losses):
    return {name: value.item() for name, value in losses.items()}


def test_every_number():
    found = numbers(ppo_loss(minibatch(), **WEIGHTS))
    # min(r A, clip(r) A): 1.2*2 = 2.4; 0.5*2 = 1; 0.8*-2 = -1.6; 1.5*-2 = -3; minus their mean -1.2/4
    assert found["policy_loss"] == pytest.approx(0.3)
    # errors -1, -0.75, 2, 1: half of (1 + 0.5625 + 4 + 1) / 4
    assert found["value_loss"] == pytest.approx(6.5625 / 8)
    assert found["entropy_loss"] == pytest.approx(1.25)  # the mean entropy, positive
    assert found["loss"] == pytest.approx(0.3 + 0.5 * 6.5625 / 8 - 0.1 * 1.25)
    # (r - 1) - ln r: twice 0.5 - ln 1.5 and twice -0.5 - ln 0.5; the mean is -(ln 1.5 + ln 0.5) / 2 = -ln(0.75) / 2
    assert found["approx_kl"] == pytest.approx(-math.log(0.75) / 2)
    assert found["clip_fraction"] == 1.0


def test_value_clipping():
    # within 0.5 of the old value 0: kept 0.5, 0.25, 0.5, -0.5, errors 2.5, 0.75, 0.5, 1.5;
    # the larger squares: 6.25 (kept), 0.5625 (the same), 4 (as predicted), 2.25 (kept)
    clipped = numbers(ppo_loss(minibatch(), **WEIGHTS, clip_value_coef=0.5))
    assert clipped["value_loss"] == pytest.approx((6.25 + 0.5625 + 4 + 2.25) / 8)
    plain = numbers(ppo_loss(minibatch(), **WEIGHTS))
    assert clipped["policy_loss"] == plain["policy_loss"]
    assert clipped["loss"] - plain["loss"] == pytest.approx(0.5 * (clipped["value_loss"] - plain["value_loss"]))


def test_without_value_clipping_old_values_do_not_matter():
    changed = numbers(ppo_loss(minibatch(values=torch.full((4,), 99.0)), **WEIGHTS))
    assert changed == numbers(ppo_loss(minibatch(), **WEIGHTS))


def test_a_better_action_made_likelier_lowers_the_loss():
    old = torch.full((4,), -1.0)
    same = ppo_loss(minibatch(logprobs=old, old_logprobs=old, advantages=torch.ones(4)), **WEIGHTS)
    likelier = ppo_loss(minibatch(logprobs=old + 0.1, old_logprobs=old, advantages=torch.ones(4)), **WEIGHTS)
    assert same["policy_loss"].item() == pytest.approx(-1.0)
    assert likelier["loss"].item() < same["loss"].item()


def test_more_entropy_lowers_the_loss_by_its_coefficient():
    # entropy one higher in every row, ent_coef 0.1
    low = ppo_loss(minibatch(entropy=torch.zeros(4)), **WEIGHTS)
    high = ppo_loss(minibatch(entropy=torch.ones(4)), **WEIGHTS)
    assert (high["loss"] - low["loss"]).item() == pytest.approx(-0.1)


def test_coefficients_of_zero_leave_the_policy_loss():
    losses = numbers(ppo_loss(minibatch(), clip_coef=0.2, ent_coef=0.0, vf_coef=0.0))
    assert losses["loss"] == losses["policy_loss"]


def test_advantages_are_used_as_they_are():
    # ten times the advantages, ten times the loss; and a constant added is not taken off again
    rows = minibatch()
    tenfold = ppo_loss({**rows, "advantages": 10 * rows["advantages"]}, **WEIGHTS)["policy_loss"].item()
    assert tenfold == pytest.approx(3.0)
    # advantages 1: min over (1.5, 1.2), (0.5, 0.8), the same again: 1.2, 0.5, 0.5, 1.2 with mean 0.85
    ones = ppo_loss({**rows, "advantages": torch.ones(4)}, **WEIGHTS)["policy_loss"].item()
    assert ones == pytest.approx(-0.85)


def test_gradients_of_the_new_quantities():
    rows = minibatch()
    ppo_loss(rows, **WEIGHTS)["loss"].backward()
    # policy: -A r / 4 where the unclipped term is the smaller (rows 1 and 3), else 0
    assert rows["logprobs"].grad.tolist() == pytest.approx([0.0, -0.25, 0.0, 0.75])
    # values: vf_coef (v - R) / 4
    assert rows["new_values"].grad.tolist() == pytest.approx([-0.125, -0.09375, 0.25, 0.125])
    # entropy: -ent_coef / 4
    assert rows["entropy"].grad.tolist() == pytest.approx([-0.025] * 4)


@pytest.mark.parametrize("part", ["policy_loss", "value_loss", "entropy_loss"])
def test_each_part_moves_one_quantity_only(part):
    rows = minibatch()
    ppo_loss(rows, **WEIGHTS, clip_value_coef=0.5)[part].backward()
    moved = {name for name in rows if rows[name].grad is not None}
    assert moved == {{"policy_loss": "logprobs", "value_loss": "new_values", "entropy_loss": "entropy"}[part]}


def test_diagnostics_have_no_gradient():
    losses = ppo_loss(minibatch(), **WEIGHTS)
    assert {name for name, value in losses.items() if not value.requires_grad} == {"approx_kl", "clip_fraction"}


@pytest.mark.parametrize(("clip_coef", "expected"), [(0.05, 0.75), (0.2, 0.5), (0.4, 0.25), (0.6, 0.0)])
def test_clip_fraction_counts_ratios_out_of_range(clip_coef, expected):
    ratio = torch.tensor([1.0, 1.1, 0.7, 1.5])  # distances 0, 0.1, 0.3, 0.5
    old = torch.full((4,), -1.0)
    rows = minibatch(logprobs=old + ratio.log(), old_logprobs=old)
    found = ppo_loss(rows, clip_coef=clip_coef, ent_coef=0.0, vf_coef=0.0)
    assert found["clip_fraction"].item() == expected


def test_an_unchanged_policy():
    # ratio 1: the loss is minus the mean advantage, nothing is clipped, and the KL is zero
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5])
    rows = minibatch(logprobs=old, old_logprobs=old, advantages=torch.tensor([1.0, 2.0, 3.0, 6.0]))
    found = numbers(ppo_loss(rows, **WEIGHTS))
    assert (found["policy_loss"], found["approx_kl"], found["clip_fraction"]) == (-3.0, 0.0, 0.0)
