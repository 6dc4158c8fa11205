"""Named random streams: reproducible, and independent of one another."""

import numpy as np
import pytest

from rl_training.contracts.random import draw_seed, random_stream


def numbers(*key, count=8):
    return random_stream(*key).random(count).tolist()


def test_the_same_key_gives_the_same_numbers():
    assert numbers(7, "policy", 2) == numbers(7, "policy", 2)
    assert numbers(7, "policy") == numbers(7, "policy", 0)


def test_streams_are_the_same_on_every_machine():
    # 0xCBF43926 is the published check value of CRC-32, the checksum of "123456789"; hash() would differ by process
    assert numbers(7, "123456789", 2) == np.random.default_rng([7, 0xCBF43926, 2]).random(8).tolist()


@pytest.mark.parametrize("other", [(8, "policy", 0), (7, "environment", 0), (7, "policy", 1), (7, "Policy", 0)])
def test_another_seed_name_or_index_gives_others(other):
    assert not set(numbers(7, "policy", 0)) & set(numbers(*other))


def test_streams_do_not_shift_one_another():
    alone = random_stream(1, "policy").random(4).tolist()
    policy, sampler = random_stream(1, "policy"), random_stream(1, "sampler")
    mixed = []
    for _ in range(4):
        sampler.random(3)
        mixed.append(policy.random())
    assert mixed == alone


def test_streams_are_uncorrelated():
    # correlation of independent streams has deviation 1 / sqrt(n) = 0.01
    keys = [(seed, name, index) for seed in (0, 1) for name in ("policy", "environment") for index in (0, 1)]
    draws = np.array([random_stream(*key).standard_normal(10_000) for key in keys])
    correlation = np.corrcoef(draws) - np.eye(len(keys))
    assert np.abs(correlation).max() < 0.04


def test_no_two_of_many_keys_meet():
    keys = [(seed, name, i) for seed in range(20) for name in ("algorithm", "policy", "environment") for i in range(5)]
    firsts = {random_stream(*key).integers(2**63) for key in keys}
    assert len(firsts) == len(keys)


def test_global_streams_are_left_alone():
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    random_stream(0, "policy").random(100)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


def test_negative_seeds_are_refused():
    with pytest.raises(ValueError, match="non-negative"):
        random_stream(-1, "policy")


def test_draw_seed():
    seeds = [draw_seed(random_stream(seed, "environment")) for seed in range(200)]
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == 200
    rng = random_stream(0, "environment")
    assert draw_seed(rng) != draw_seed(rng)  # the stream moves on
