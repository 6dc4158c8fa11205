"""Samplers: n-step tables by hand, prioritised sampling, mixtures, types, and normalisation when sampling."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.contracts.batches import Progress, Step
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import EnvSpec
from rl_training.data.normalize import ObservationNormalizer, RewardNormalizer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.samplers import MixedSampler, PrioritizedIndexer, ReplaySampler, UniformIndexer
from tests.data.tape import SPEC, Tape, numbers, recorded

START = Progress(env_steps=0, horizon=100)


class Given:
    """Draws what it is told to: all rows, or those of some times."""

    def __init__(self, times=None, env=0):
        self.times, self.env = times, env

    def draw(self, buffer, batch_size, progress):
        index = buffer.everything()
        if self.times is not None:
            index = buffer.at(np.array(self.times), np.full(len(self.times), self.env))
        return index[:batch_size], np.ones(min(batch_size, index.size), np.float32)

    def added(self, buffer):
        pass


def batch_of(buffer, n_step, times=None, env=0):
    """Rows as (observation, n-step reward, discount, next observation), with gamma 1/2."""
    sampler = ReplaySampler(buffer, Given(times, env), gamma=0.5, n_step=n_step)
    count = len(times) if times is not None else buffer.everything().size
    batch = sampler.sample(count, START)
    columns = (batch.obs, batch.reward, batch.discount, batch.next_obs)
    return list(zip(*(numbers(column) for column in columns), strict=True))


# n-step returns


def test_one_step():
    assert batch_of(recorded("..T.C", rewards=[1, 2, 4, 8, 16]), 1) == [
        (0, 1, 0.5, 1),
        (1, 2, 0.5, 2),
        (2, 4, 0.0, 3),
        (10, 8, 0.5, 11),
        (11, 16, 0.5, 12),
    ]


def test_termination_ends_the_sum_and_the_bootstrap():
    assert batch_of(recorded("...T...", rewards=[1, 2, 4, 8, 16, 32, 64]), 3) == [
        (0, 1 + 1 + 1, 0.125, 3),
        (1, 2 + 2 + 2, 0.0, 4),
        (2, 4 + 4, 0.0, 4),
        (3, 8, 0.0, 4),
        (10, 16 + 16 + 16, 0.125, 13),
        (11, 32 + 32, 0.25, 13),
        (12, 64, 0.5, 13),
    ]


def test_truncation_ends_the_sum_and_bootstraps_from_the_true_last_observation():
    assert batch_of(recorded("..C..", rewards=[1, 2, 4, 8, 16]), 3) == [
        (0, 1 + 1 + 1, 0.125, 3),
        (1, 2 + 2, 0.25, 3),
        (2, 4, 0.5, 3),
        (10, 8 + 8, 0.25, 12),
        (11, 16, 0.5, 12),
    ]


def test_both_at_once_is_termination():
    assert batch_of(recorded(".B", rewards=[1, 2]), 3) == [(0, 2, 0.0, 2), (1, 2, 0.0, 2)]


def test_episodes_of_one_step():
    assert batch_of(recorded("TCT.", rewards=[1, 2, 4, 8]), 4) == [
        (0, 1, 0.0, 1), (10, 2, 0.5, 11), (20, 4, 0.0, 21), (30, 8, 0.5, 31),
    ]  # fmt: skip


def test_shorter_than_n_at_the_write_head():
    buffer = ReplayBuffer(SPEC, 10)
    tape = Tape(buffer).play("...", rewards=[1, 2, 4])
    assert batch_of(buffer, 5) == [(0, 1 + 1 + 1, 0.125, 3), (1, 2 + 2, 0.25, 3), (2, 4, 0.5, 3)]
    tape.play("...", rewards=[8, 16, 32])
    assert batch_of(buffer, 5, times=[0, 1, 2]) == [
        (0, 5, 1 / 32, 5), (1, 10, 1 / 32, 6), (2, 4 * 4, 1 / 16, 6),
    ]  # fmt: skip


def test_round_the_ring():
    # the newest 4 of 7 rows: the ring has 5, so rows 3, 4 are its last and 5, 6 its first
    buffer = ReplayBuffer(SPEC, capacity=4)
    Tape(buffer).play(".......", rewards=[1, 2, 4, 8, 16, 32, 64])
    assert buffer.ring == 5
    assert batch_of(buffer, 3) == [
        (3, 8 + 8 + 8, 0.125, 6),
        (4, 16 + 16 + 16, 0.125, 7),
        (5, 32 + 32, 0.25, 7),
        (6, 64, 0.5, 7),
    ]


def test_ends_round_the_ring():
    buffer = ReplayBuffer(SPEC, capacity=4)
    Tape(buffer).play("....CT.", rewards=[1, 2, 4, 8, 16, 32, 64])
    assert batch_of(buffer, 3) == [
        (3, 8 + 8, 0.25, 5),
        (4, 16, 0.5, 5),
        (10, 32, 0.0, 11),
        (20, 64, 0.5, 21),
    ]


def test_next_step_environments():
    # rewards of rows that only reset count for nobody
    buffer = recorded("..Tr.Cr.", next_step=True, rewards=[1, 2, 4, 999, 8, 16, 999, 32])
    assert batch_of(buffer, 3, times=[0, 1, 2, 4, 5, 7]) == [
        (0, 1 + 1 + 1, 0.0, 3),
        (1, 2 + 2, 0.0, 3),
        (2, 4, 0.0, 3),
        (10, 8 + 8, 0.25, 12),
        (11, 16, 0.5, 12),
        (20, 32, 0.5, 21),
    ]


def test_environments_are_apart():
    buffer = recorded("..T.", ".C..", rewards=[[1, 2, 4, 8], [10, 20, 40, 80]])
    assert batch_of(buffer, 2, times=[0, 1, 2, 3]) == [
        (0, 2, 0.25, 2), (1, 4, 0.0, 3), (2, 4, 0.0, 3), (10, 8, 0.5, 11),
    ]  # fmt: skip
    assert batch_of(buffer, 2, times=[0, 1, 2, 3], env=1) == [
        (1000, 20, 0.25, 1002), (1001, 20, 0.5, 1002), (1010, 80, 0.25, 1012), (1011, 80, 0.5, 1012),
    ]  # fmt: skip


# Uniform sampling


def prioritized_sampler(buffer, *, alpha=0.5, beta=1.0, seed=0, **kwargs):
    indexer = PrioritizedIndexer(buffer, np.random.default_rng(seed), alpha=alpha, beta=beta)
    indexer.loaded(buffer)
    return ReplaySampler(buffer, indexer, gamma=0.5, **kwargs)


def uniform_sampler(buffer, *, seed=0, **kwargs):
    return ReplaySampler(buffer, UniformIndexer(np.random.default_rng(seed)), gamma=0.5, **kwargs)


def counts_of(sampler, batch_size, num_batches):
    """How often each observation was drawn."""
    counts = {}
    for _ in range(num_batches):
        for number in numbers(sampler.sample(batch_size, START).obs):
            counts[number] = counts.get(number, 0) + 1
    return counts


def test_uniform_draws_are_uniform_and_only_of_transitions():
    buffer = ReplayBuffer(SPEC, capacity=12)
    Tape(buffer, next_step=True).play("....Tr...Tr.....Tr...")
    valid = [obs for obs, ok in zip(numbers(buffer.obs), buffer.valid, strict=True) if ok]
    counts = counts_of(uniform_sampler(buffer), 64, 200)
    assert len(counts) == buffer.num_transitions == 10
    assert counts.keys() <= set(valid)
    expected = 64 * 200 / 10
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert abs(statistic - 9) < 4 * np.sqrt(18)


def test_uniform_weights_are_one():
    batch = uniform_sampler(recorded("...T..")).sample(5, START)
    assert batch.weight.tolist() == [1, 1, 1, 1, 1]


def test_equal_streams_draw_equal_batches():
    buffer = recorded("...T..")
    first, second, other = (uniform_sampler(buffer, seed=seed) for seed in (1, 1, 2))
    batches = [sampler.sample(50, START).indices.tolist() for sampler in (first, second, other)]
    assert batches[0] == batches[1] != batches[2]
    state = first.state_dict()["indexer"]
    drawn = first.sample(50, START).indices.tolist()
    other.indexer.load_state_dict(state)
    assert other.sample(50, START).indices.tolist() == drawn


def test_not_ready_before_the_first_transition():
    sampler = uniform_sampler(ReplayBuffer(SPEC, 5))
    assert not sampler.ready
    tape = Tape(sampler, next_step=True)
    tape.play("r")
    assert not sampler.ready
    tape.play(".")
    assert sampler.ready


# Prioritised sampling


def with_errors(*errors, **kwargs):
    """One transition for each error."""
    sampler = prioritized_sampler(recorded("." * len(errors)), **kwargs)
    sampler.update_priorities(torch.arange(len(errors)), torch.tensor(errors))
    return sampler


def test_probabilities():
    # alpha 1/2 makes 1, 4 and 9 to 1, 2 and 3 of 6: in a batch of 6 strata there is one, two and three of them
    sampler = with_errors(1.0, -4.0, 9.0, alpha=0.5)
    assert sampler.indexer.tree.levels[0][:3].tolist() == pytest.approx([1, 2, 3], rel=1e-5)
    assert sampler.sample(6, START).indices.tolist() == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("alpha", "leaves"), [(0.0, [1, 1, 1]), (0.5, [1, 2, 3]), (1.0, [1, 4, 9]), (2.0, [1, 16, 81])]
)
def test_exponents(alpha, leaves):
    tree = with_errors(1.0, 4.0, 9.0, alpha=alpha).indexer.tree
    assert tree.levels[0][:3].tolist() == pytest.approx(leaves, rel=1e-5)


@pytest.mark.parametrize(
    ("beta", "weights"),
    [
        # n P(i) is 1/2, 1 and 3/2, so the complete correction is 2, 1 and 2/3; the largest becomes 1
        (1.0, [1.0, 0.5, 0.5, 1 / 3, 1 / 3, 1 / 3]),
        (0.5, [1.0, 0.70711, 0.70711, 0.57735, 0.57735, 0.57735]),
        (0.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_importance_weights(beta, weights):
    batch = with_errors(1.0, 4.0, 9.0, alpha=0.5, beta=beta).sample(6, START)
    assert batch.weight.tolist() == pytest.approx(weights, rel=1e-4)


@pytest.mark.parametrize(
    ("env_steps", "smallest"),
    [
        (0, 0.64439),  # 3^-0.4
        (50, 0.46347),  # 3^-0.7
        (100, 0.33333),  # 3^-1
        (200, 0.33333),
    ],
)
def test_the_correction_follows_its_schedule(env_steps, smallest):
    sampler = with_errors(1.0, 4.0, 9.0, alpha=0.5, beta=Linear(0.4, 1.0))
    weight = sampler.sample(6, Progress(env_steps=env_steps, horizon=100)).weight
    assert weight[0] == 1.0
    assert weight[-1].item() == pytest.approx(smallest, rel=1e-4)


def test_weights_are_scaled_by_the_largest_in_the_batch():
    # the transition of probability 1e-6 is not drawn, and the others have equal weights
    batch = with_errors(1e-6, 1.0, 1.0, alpha=1.0).sample(4, START)
    assert batch.indices.tolist() == [1, 1, 2, 2]
    assert batch.weight.tolist() == [1, 1, 1, 1]


def test_an_error_of_zero_can_still_be_drawn():
    sampler = with_errors(0.0, 0.0, alpha=1.0)
    assert sampler.indexer.tree.levels[0][:2].tolist() == [1e-6, 1e-6]
    assert sampler.sample(4, START).indices.tolist() == [0, 0, 1, 1]


def test_new_transitions_have_the_largest_priority_so_far():
    sampler = prioritized_sampler(ReplayBuffer(SPEC, 10), alpha=0.5)
    tape = Tape(sampler).play("..")
    leaves = sampler.indexer.tree.levels[0]
    assert leaves[:3].tolist() == [1, 1, 0]  # one to begin with; the row after the newest is none
    sampler.update_priorities(torch.tensor([0]), torch.tensor([9.0]))
    tape.play(".")
    assert leaves[:4].tolist() == pytest.approx([3, 1, 3, 0])
    sampler.update_priorities(torch.tensor([0, 2]), torch.tensor([0.25, 0.0]))
    tape.play(".")
    # the largest ever, not of those there are
    assert leaves[:5].tolist() == pytest.approx([0.5, 1, 1e-3, 3, 0], rel=1e-5)


def test_no_priority_for_rows_that_only_reset():
    sampler = prioritized_sampler(ReplayBuffer(SPEC, 10, 2))
    Tape(sampler, 2, next_step=True).play(".Tr.", "Tr..")
    assert sampler.indexer.tree.levels[0][:10].tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0]
    assert sampler.indexer.tree.total == 6 == sampler.buffer.num_transitions


def test_no_priority_for_rows_that_are_gone():
    sampler = prioritized_sampler(ReplayBuffer(SPEC, 3))
    Tape(sampler).play("....")
    assert sampler.buffer.ring == 4
    assert sampler.indexer.tree.levels[0][:4].tolist() == [0, 1, 1, 1]  # row 0 is next to be written
    Tape(sampler).play("..")
    assert sampler.indexer.tree.levels[0][:4].tolist() == [1, 1, 0, 1]


def test_a_longer_ring_keeps_only_what_belongs_to_the_buffer(monkeypatch):
    # 9 rows and the one after them, in segments of 3: in a ring of 12, two rows are gone but not yet written over
    monkeypatch.setattr("rl_training.data.replay_buffer.SEGMENT_BYTES", 36)
    sampler = prioritized_sampler(ReplayBuffer(SPEC, 9))
    assert sampler.buffer.ring == 12
    Tape(sampler).play("............")
    assert sampler.indexer.tree.levels[0][:12].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    Tape(sampler).play("....")
    assert sampler.indexer.tree.levels[0][:12].tolist() == [1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]


def test_stratified_draws_are_in_proportion():
    """Closer than independent draws would be: their statistic would be about 19, with a deviation of 6."""
    rng = np.random.default_rng(5)
    errors = rng.random(20) + 0.05
    sampler = with_errors(*errors.tolist(), alpha=1.0)
    counts = np.zeros(20)
    for _ in range(300):
        counts += np.bincount(sampler.sample(32, START).indices.numpy(), minlength=20)
    expected = 300 * 32 * errors / errors.sum()
    assert np.sum((counts - expected) ** 2 / expected) < 19 - 6
    assert np.abs(counts / expected - 1).max() < 0.15


def test_priorities_may_be_left_out():
    sampler = with_errors(1.0, 4.0)
    before = sampler.indexer.tree.levels[0].copy()
    sampler.update_priorities(torch.tensor([0, 1]), None)
    assert np.array_equal(sampler.indexer.tree.levels[0], before)


def test_priorities_and_their_largest_are_saved():
    sampler = with_errors(1.0, 4.0, 9.0)
    copied = prioritized_sampler(ReplayBuffer(SPEC, 100), seed=7)
    copied.load_state_dict(sampler.state_dict())
    for a, b in zip(sampler.sample(20, START)[:-1], copied.sample(20, START)[:-1], strict=True):
        assert torch.equal(a, b)
    Tape(copied).play(".")
    assert copied.indexer.tree.levels[0][3] == pytest.approx(3.0)


def test_another_buffer_begins_with_equal_priorities():
    sampler = with_errors(1.0, 4.0, 9.0)
    sampler.replace(recorded("..Tr..", next_step=True))
    assert sampler.indexer.tree.levels[0][:7].tolist() == pytest.approx([3, 3, 3, 0, 3, 3, 0])
    assert sampler.sample(4, START).weight.tolist() == [1, 1, 1, 1]


# Mixtures


def mixed(ratio=0.5, prioritized=False):
    """New data are in environment 0, prior ones begin with observation 50."""
    make = prioritized_sampler if prioritized else uniform_sampler
    prior = ReplayBuffer(SPEC, 10)
    tape = Tape(prior)
    tape.episode = [5]
    tape.play("....")
    online = ReplayBuffer(SPEC, 10)
    Tape(online).play("....")
    return MixedSampler(make(online, seed=1), make(prior, seed=2), ratio)


@pytest.mark.parametrize(
    ("ratio", "batch_size", "num_prior"),
    [(0.5, 8, 4), (0.25, 8, 2), (0.1, 256, 26), (0.0, 8, 0), (1.0, 8, 8), (0.5, 5, 2), (0.5, 1, 0), (0.9, 1, 1)],
)
def test_the_share_of_prior_data(ratio, batch_size, num_prior):
    drawn = numbers(mixed(ratio).sample(batch_size, START).obs)
    assert len(drawn) == batch_size
    assert [number >= 50 for number in drawn] == [False] * (batch_size - num_prior) + [True] * num_prior


def test_every_column_is_joined():
    batch = mixed(0.5).sample(6, START)
    assert {name: tuple(column.shape) for name, column in batch._asdict().items() if name != "extras"} == {
        "obs": (6, 1), "action": (6,), "reward": (6,), "discount": (6,), "next_obs": (6, 1), "weight": (6,),
        "indices": (6,),
    }  # fmt: skip
    assert torch.equal(batch.next_obs, batch.obs + 1)
    assert torch.equal(batch.reward, batch.obs[:, 0] % 10 + 1)


def test_priorities_go_to_where_the_rows_came_from():
    sampler = mixed(0.5, prioritized=True)
    batch = sampler.sample(8, START)
    assert batch.indices.tolist() == [0, 1, 2, 3] * 2
    sampler.update_priorities(batch.indices, torch.tensor([0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0]))
    assert sampler.online.indexer.tree.levels[0][:4].tolist() == pytest.approx([1e-3, 1, 2, 3], rel=1e-5)
    assert sampler.prior.indexer.tree.levels[0][:4].tolist() == pytest.approx([4, 5, 6, 7])
    sampler.update_priorities(batch.indices, None)


@pytest.mark.parametrize(("ratio", "online", "prior"), [(0.0, [2, 2, 2, 2], [1] * 4), (1.0, [1] * 4, [2, 2, 2, 2])])
def test_priorities_of_a_single_source(ratio, online, prior):
    sampler = mixed(ratio, prioritized=True)
    batch = sampler.sample(4, START)
    sampler.update_priorities(batch.indices, torch.full((4,), 4.0))
    assert sampler.online.indexer.tree.levels[0][:4].tolist() == pytest.approx(online)
    assert sampler.prior.indexer.tree.levels[0][:4].tolist() == pytest.approx(prior)


def test_new_steps_go_to_the_first_source():
    sampler = mixed()
    prior = sampler.prior.buffer
    Tape(sampler).play("..")
    assert (sampler.buffer.num_transitions, prior.num_transitions) == (6, 4)
    sampler.replace(recorded("."))
    assert sampler.online.buffer.num_transitions == 1
    assert sampler.prior.buffer is prior


def test_a_mixture_waits_for_new_data():
    sampler = MixedSampler(uniform_sampler(ReplayBuffer(SPEC, 5)), uniform_sampler(recorded("...")))
    assert not sampler.ready
    Tape(sampler).play(".")
    assert sampler.ready


def test_a_mixture_goes_on_from_its_state():
    sampler, copied = mixed(prioritized=True), mixed(prioritized=True)
    sampler.update_priorities(sampler.sample(8, START).indices, torch.rand(8))
    Tape(sampler).play("..T")
    copied.load_state_dict(sampler.state_dict())
    for a, b in zip(sampler.sample(20, START)[:-1], copied.sample(20, START)[:-1], strict=True):
        assert torch.equal(a, b)


def test_a_mixture_of_dict_observations():
    space = spaces.Dict({"number": SPEC.observation_space})
    buffer = ReplayBuffer(EnvSpec(space, SPEC.action_space), 10)
    Tape(buffer, observe=lambda rows: {"number": np.array(rows, np.float32)[:, None]}).play("...")
    batch = MixedSampler(uniform_sampler(buffer), uniform_sampler(buffer)).sample(6, START)
    assert batch.obs["number"].shape == batch.next_obs["number"].shape == (6, 1)


# Types


def test_types_of_the_columns():
    batch = prioritized_sampler(recorded("..T."), n_step=3).sample(4, START)
    assert {name: str(column.dtype) for name, column in batch._asdict().items() if name != "extras"} == {
        "obs": "torch.float32", "action": "torch.int64", "reward": "torch.float32", "discount": "torch.float32",
        "next_obs": "torch.float32", "weight": "torch.float32", "indices": "torch.int64",
    }  # fmt: skip


PARTS = {
    "code": (spaces.Discrete(7), torch.int64),
    "bits": (spaces.MultiBinary(5), torch.int8),
    "image": (spaces.Box(0, 255, (2, 4, 4), np.uint8), torch.uint8),
    "double": (spaces.Box(-1, 1, (3,), np.float64), torch.float32),
}


def random_steps(space, count, rng_seed=0):
    """Steps with samples of a space; the second one ends an episode."""
    space.seed(rng_seed)
    seen = [space.sample() for _ in range(count + 2)]
    batched = [{key: np.stack([x[key]]) for key in x} if isinstance(x, dict) else np.stack([x]) for x in seen]
    yes, no, one = np.ones(1, np.bool_), np.zeros(1, np.bool_), np.ones(1)
    for time in range(count):
        ends = time == 1
        yield Step(
            batched[time], batched[time], np.zeros(1, np.int64), {}, one, one, no, yes if ends else no, yes,
            np.flatnonzero(yes if ends else no), batched[-1] if ends else None, None, batched[time + 1],
        )  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_observations_keep_their_types(name):
    space, dtype = PARTS[name]
    buffer = ReplayBuffer(EnvSpec(space, spaces.Discrete(2)), 10)
    steps = list(random_steps(space, 3))
    for step in steps:
        buffer.add(step)
    batch = ReplaySampler(buffer, Given(), gamma=0.5).sample(3, START)
    assert batch.obs.dtype == batch.next_obs.dtype == dtype
    following = [steps[1].obs, steps[1].final_obs, steps[2].next_obs]
    for found, expected in ((batch.obs, [step.obs for step in steps]), (batch.next_obs, following)):
        assert np.array_equal(found.numpy(), np.concatenate(expected).astype(found.numpy().dtype))


def test_dict_observations():
    space = spaces.Dict({name: part for name, (part, _) in PARTS.items()})
    buffer = ReplayBuffer(EnvSpec(space, spaces.Discrete(2)), 10)
    steps = list(random_steps(space, 3))
    for step in steps:
        buffer.add(step)
    batch = ReplaySampler(buffer, Given(), gamma=0.5, n_step=2).sample(3, START)
    # the first two steps end with the episode's true last observation, the third is the newest
    following = [steps[1].final_obs, steps[1].final_obs, steps[2].next_obs]
    for name, (_, dtype) in PARTS.items():
        assert batch.obs[name].dtype == batch.next_obs[name].dtype == dtype
        for found, expected in ((batch.obs, [step.obs for step in steps]), (batch.next_obs, following)):
            array = found[name].numpy()
            assert np.array_equal(array, np.concatenate([obs[name] for obs in expected]).astype(array.dtype))


def test_a_batch_is_no_view_of_the_buffer():
    buffer = recorded("..T.")
    batch = ReplaySampler(buffer, Given(), gamma=0.5).sample(4, START)
    for tensor in (batch.obs, batch.next_obs, batch.action, batch.reward):
        tensor.fill_(77)
    assert numbers(buffer.obs)[:4] == [0, 1, 2, 10]
    assert numbers(buffer.final_obs)[0] == 3
    assert buffer.reward[:4].tolist() == [1, 2, 3, 4]
    assert buffer.action[:4].tolist() == [0, 1, 2, 3]


# Normalisation


def test_observations_are_normalised_with_the_statistics_of_now():
    normalizer = ObservationNormalizer(SPEC.observation_space, clip=3.0, eps=0.0)
    buffer = recorded("..C.")
    sampler = ReplaySampler(buffer, Given(), gamma=0.5, obs_normalizer=normalizer)
    normalizer.update(np.array([[0.0], [2.0]]))  # mean 1, deviation 1
    batch = sampler.sample(4, START)
    assert numbers(batch.obs) == [-1, 0, 1, 3]  # 10 is clipped
    assert numbers(batch.next_obs) == [0, 1, 2, 3]
    normalizer.moments[""].mean[:] = 2.0
    normalizer.moments[""].var[:] = 4.0
    batch = sampler.sample(4, START)
    assert numbers(batch.obs) == [-1, -0.5, 0, 3]
    assert numbers(batch.next_obs) == [-0.5, 0, 0.5, 3]
    assert numbers(buffer.obs)[:4] == [0, 1, 2, 10], "the buffer keeps what the environment showed"


def test_what_the_policy_saw_is_not_stored():
    buffer, no = ReplayBuffer(SPEC, 5), np.zeros(1, np.bool_)
    raw, seen = np.full((1, 1), 8.0, np.float32), np.full((1, 1), -0.5, np.float32)
    reward, scaled = np.array([4.0]), np.array([0.25])
    buffer.add(Step(raw, seen, no, {}, reward, scaled, no, ~no, ~no, np.array([0]), raw + 1, seen + 1, raw + 2))
    batch = ReplaySampler(buffer, Given(), gamma=0.5).sample(1, START)
    assert (batch.obs.item(), batch.reward.item(), batch.next_obs.item()) == (8.0, 4.0, 9.0)


def test_rewards_are_scaled_step_by_step():
    normalizer = RewardNormalizer(1, gamma=0.5, clip=10.0, eps=0.0)
    normalizer.moments.var[...] = 4.0
    sampler = ReplaySampler(
        recorded("..T", rewards=[2, 100, -4]), Given(), gamma=0.5, n_step=2, reward_normalizer=normalizer
    )
    # 2 and -4 become 1 and -2, and 100 is clipped to 10: as the sum of clipped rewards, not clipped as a sum
    assert numbers(sampler.sample(3, START).reward) == [1 + 5, 10 - 1, -2]
    normalizer.moments.var[...] = 16.0
    assert numbers(sampler.sample(3, START).reward) == [0.5 + 5, 10 - 0.5, -1]
    assert sampler.buffer.reward[:3].tolist() == [2, 100, -4]


def test_sampling_leaves_the_statistics_alone():
    observations, rewards = ObservationNormalizer(SPEC.observation_space), RewardNormalizer(1, gamma=0.5)
    sampler = uniform_sampler(recorded("..T."), obs_normalizer=observations, reward_normalizer=rewards)
    sampler.sample(8, START)
    assert observations.moments[""].count == rewards.moments.count == 0
    assert set(sampler.state_dict()) == {"buffer", "indexer"}, "the collector saves them"
