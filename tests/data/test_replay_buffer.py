"""The replay buffer: what it keeps, what followed what, round the ring, in files, and against the whole history."""

import copy
import functools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rl_training.data.replay_buffer as module
from rl_training.contracts.batches import Progress, Step
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.spec import EnvSpec
from rl_training.contracts.state import Segment, same_state
from rl_training.data.replay_buffer import OtherNumberOfEnvsError, ReplayBuffer
from rl_training.data.samplers import PrioritizedIndexer, ReplaySampler, UniformIndexer
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.replay import read_replay, save_replay
from tests.data.tape import SPEC, Tape, numbers, recorded

PROGRESS = Progress(env_steps=0, horizon=1)
ZERO = np.array([0])


def table(buffer):
    """Rows as (observation, what was really seen next), oldest first."""
    index = buffer.everything()
    return list(zip(numbers(buffer.observations(index)), numbers(buffer.next_observations(index)), strict=True))


# Against the whole history


class LongTape(Tape):
    """Numbers that do not repeat in long plays."""

    per_env = 1_000_000
    per_episode = 1_000


class Shelf:
    """Stands in for the files of checkpoints: a segment that was written before is shared, not written again."""

    def __init__(self):
        self.files = {}

    def save(self, state):
        """What would be read from a checkpoint of this state: nothing that training may still change."""
        state = {**state, "buffer": {**state["buffer"]}}
        segments = [self._keep(segment) for segment in state["buffer"].pop("segments")]
        state = copy.deepcopy(state)
        state["buffer"]["segments"] = segments
        return state

    def _keep(self, segment):
        path = segment.file
        if path is None:
            path = Path(f"file_{len(self.files)}")
            self.files[path] = {name: tensor.clone() for name, tensor in segment.tensors().items()}
            if segment.complete:
                segment.file = path
        return Segment(functools.partial(self.files.get, path), file=path)


class RandomRun:
    """Random episodes in a random buffer, and beside it everything that ever happened, as plain lists."""

    gamma = 0.5  # with whole rewards, sums of halves are exact

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.num_envs = int(self.rng.choice([1, 3]))
        self.capacity = int(self.rng.integers(1, 41))
        self.n_step = int(self.rng.integers(1, 6))
        self.prioritized = bool(self.rng.random() < 0.5)
        self.next_step = bool(self.rng.random() < 0.5)
        self.sampler = self.make_sampler(self.capacity)
        self.tape = LongTape(self.sampler, self.num_envs, next_step=self.next_step)
        self.history = self.tape.history
        self.resetting = [False] * self.num_envs
        self.begin = 0
        self.largest, self.priorities = 1.0, {}
        self.shelf = Shelf()

    def make_sampler(self, capacity):
        buffer, rng = ReplayBuffer(SPEC, capacity, self.num_envs), np.random.default_rng(1)
        indexer = PrioritizedIndexer(buffer, rng, alpha=0.6, beta=0.4) if self.prioritized else UniformIndexer(rng)
        return ReplaySampler(buffer, indexer, gamma=self.gamma, n_step=self.n_step)

    @property
    def buffer(self):
        return self.sampler.buffer

    @property
    def oldest(self):
        return max(self.begin, len(self.history) - math.ceil(self.capacity / self.num_envs))

    def present(self):
        """Times and environments of all rows that the buffer should have, oldest first."""
        return [(time, env) for time in range(self.oldest, len(self.history)) for env in range(self.num_envs)]

    # What happens

    def step(self):
        letters = ["r" if resetting else self.rng.choice(list("......TCB")) for resetting in self.resetting]
        self.resetting = [self.next_step and letter in "TCB" for letter in letters]
        self.tape.step(letters, [int(reward) for reward in self.rng.integers(-8, 9, self.num_envs)])
        for env, letter in enumerate(letters):
            self.priorities[len(self.history) - 1, env] = 0.0 if letter == "r" else self.largest

    def reload(self):
        """Go on with another buffer that was loaded, perhaps of another size: the newest rows that fit.

        The file of the oldest ones may hold more, which the other had let go of: they do not come back.
        """
        state = self.shelf.save(self.sampler.state_dict())
        self.check_exact_copy(state)
        before = self.oldest
        self.capacity = int(self.rng.choice([self.capacity, self.rng.integers(1, 41)]))
        buffer = ReplayBuffer(SPEC, self.capacity, self.num_envs)
        buffer.load_state_dict(state["buffer"])
        self.begin = max(before, len(self.history) - buffer.num_rows)
        self.sampler.replace(buffer)
        for time, env in self.present():
            self.priorities[time, env] = self.largest if self.history[time][env].valid else 0.0

    def restart(self):
        """New environments: the episodes in flight are cut off where they are."""
        self.buffer.close_episodes()
        if self.history:
            last = self.history[-1]
            self.history[-1] = [row if row.ends or not row.valid else row._replace(truncated=True) for row in last]
        self.tape.restart()
        self.resetting = [False] * self.num_envs

    # What must hold

    def check_rows(self):
        buffer, index = self.buffer, self.buffer.everything()
        rows = [self.history[time][env] for time, env in self.present()]
        assert buffer.num_transitions == sum(row.valid for row in rows)
        assert list(zip(buffer.times(index), index % self.num_envs, strict=True)) == self.present()
        assert numbers(buffer.observations(index)) == [row.obs for row in rows]
        assert [following for following, row in zip(numbers(buffer.next_observations(index)), rows, strict=True)
                if row.valid] == [row.following for row in rows if row.valid]  # fmt: skip
        for name in ("action", "reward", "terminated", "truncated", "valid"):
            assert getattr(buffer, name)[index].tolist() == [getattr(row, name) for row in rows], name
        assert len(buffer.free_finals) + np.count_nonzero(buffer.final_row >= 0) == len(buffer.final_obs)
        if self.prioritized:
            leaves = self.sampler.indexer.tree.levels[0]
            assert leaves[index].tolist() == pytest.approx([self.priorities[place] for place in self.present()])
            assert leaves.sum() == pytest.approx(leaves[index].sum()), "what is not there is never drawn"

    def check_batch(self):
        batch = self.sampler.sample(24, PROGRESS)
        index = batch.indices.numpy()
        for row, (time, env) in enumerate(zip(self.buffer.times(index), index % self.num_envs, strict=True)):
            assert self.oldest <= time < len(self.history)
            start = self.history[time][env]
            assert start.valid
            total, length = 0.0, 0
            while True:
                step = self.history[time + length][env]
                total += self.gamma**length * step.reward
                length += 1
                if step.ends or length == self.n_step or time + length == len(self.history):
                    break
            discount = 0.0 if step.terminated else self.gamma**length
            assert (float(batch.obs[row]), float(batch.next_obs[row])) == (start.obs, step.following)
            assert (int(batch.action[row]), float(batch.reward[row])) == (start.action, total)
            assert float(batch.discount[row]) == discount
        return batch

    def learn(self, batch):
        errors = torch.from_numpy(self.rng.random(24))
        self.sampler.update_priorities(batch.indices, errors)
        index = batch.indices.numpy()
        for time, env, error in zip(self.buffer.times(index), index % self.num_envs, errors.tolist(), strict=True):
            self.priorities[time, env] = (error + 1e-6) ** 0.6
            self.largest = max(self.largest, self.priorities[time, env])

    def check_exact_copy(self, state):
        """One of the same size goes on bit by bit."""
        copied = self.make_sampler(self.capacity)
        copied.load_state_dict(state)
        if self.sampler.ready:
            before = self.sampler.indexer.rng.bit_generator.state
            for mine, other in zip(self.sampler.sample(8, PROGRESS), copied.sample(8, PROGRESS), strict=True):
                assert same_state(mine, other)
            self.sampler.indexer.rng.bit_generator.state = before


@pytest.mark.parametrize("seed", range(60))
def test_against_the_whole_history(seed, monkeypatch):
    run = RandomRun(seed)
    monkeypatch.setattr(module, "SEGMENT_BYTES", int(run.rng.choice([1, 50, 400, 10**6])))
    run.sampler.replace(ReplayBuffer(SPEC, run.capacity, run.num_envs))  # with segments of that size
    for time in range(160):
        run.step()
        run.check_rows()
        if time % 4 == 0 and run.sampler.ready:
            run.learn(run.check_batch())
        if run.rng.random() < 0.06:
            run.reload()
        if run.rng.random() < 0.03:
            run.restart()


def test_the_random_runs_meet_everything():
    """The sixty runs above are not all alike."""
    runs = [RandomRun(seed) for seed in range(60)]
    assert {run.n_step for run in runs} == {1, 2, 3, 4, 5}
    assert {(run.num_envs, run.prioritized, run.next_step) for run in runs} == {
        (n, p, s) for n in (1, 3) for p in (False, True) for s in (False, True)
    }
    assert any(run.capacity % run.num_envs for run in runs)
    assert min(run.capacity for run in runs) <= 2


# What is kept


def test_each_observation_is_stored_once():
    buffer = recorded("..T.", rewards=[5, 6, 7, 8])
    assert numbers(buffer.obs)[:5] == [0, 1, 2, 10, 11]  # the newest row's next observation is the head of the ring
    assert numbers(buffer.final_obs)[0] == 3  # and what the episode ended with is kept apart
    assert buffer.reward[:4].tolist() == [5, 6, 7, 8]
    assert buffer.action[:4].tolist() == [0, 1, 2, 3]
    assert buffer.terminated[:4].tolist() == [False, False, True, False]
    assert buffer.num_transitions == 4


def test_what_was_really_seen_next():
    expected = [(0, 1), (1, 2), (2, 3), (10, 11), (11, 12), (20, 21), (30, 31)]
    assert table(recorded("..T.CB.")) == expected


def test_next_step_environments():
    # the row after an end shows the last observation again, resets, and is no transition
    buffer = recorded("..Tr.", next_step=True)
    assert numbers(buffer.observations(buffer.everything())) == [0, 1, 2, 3, 10]
    assert buffer.valid[:5].tolist() == [True, True, True, False, True]
    assert buffer.num_transitions == 4
    assert [pair for pair, valid in zip(table(buffer), buffer.valid, strict=False) if valid] == [
        (0, 1), (1, 2), (2, 3), (10, 11),
    ]  # fmt: skip


def test_flags_of_rows_that_only_reset_do_not_count():
    buffer = ReplayBuffer(SPEC, 10)
    obs, flag = np.zeros((1, 1), np.float32), np.ones(1, np.bool_)
    nobody = np.zeros(0, np.intp)
    buffer.add(Step(obs, obs, flag, {}, flag, flag, flag, flag, ~flag, nobody, None, None, obs))
    assert not buffer.terminated[0]
    assert not buffer.truncated[0]
    assert buffer.num_transitions == 0


def test_environments_end_apart():
    buffer = recorded(".T..", "..C.", "....")
    assert table(buffer) == [
        (0, 1), (1000, 1001), (2000, 2001),
        (1, 2), (1001, 1002), (2001, 2002),
        (10, 11), (1002, 1003), (2002, 2003),
        (11, 12), (1010, 1011), (2003, 2004),
    ]  # fmt: skip
    assert buffer.ends == [[1], [2], []]


def test_the_oldest_rows_go_first():
    buffer = ReplayBuffer(SPEC, capacity=3)
    tape = Tape(buffer).play("..T")
    assert table(buffer) == [(0, 1), (1, 2), (2, 3)]
    tape.play(".")
    assert table(buffer) == [(1, 2), (2, 3), (10, 11)]
    tape.play("...")
    assert table(buffer) == [(11, 12), (12, 13), (13, 14)]
    assert buffer.num_transitions == 3
    assert buffer.ends == [[]]


@pytest.mark.parametrize(("capacity", "num_envs", "rows"), [(1, 1, 1), (1, 3, 1), (7, 3, 3), (9, 3, 3), (100, 16, 7)])
def test_room_for_at_least_what_was_asked_for(capacity, num_envs, rows):
    buffer = ReplayBuffer(SPEC, capacity, num_envs)
    Tape(buffer, num_envs).play(*["." * 20] * num_envs)
    assert buffer.num_rows == rows
    assert buffer.num_transitions == rows * num_envs >= capacity


def test_last_observations_are_forgotten_with_their_rows():
    buffer = ReplayBuffer(SPEC, capacity=10)
    Tape(buffer).play("T" * 500)
    assert len(buffer.final_obs) == 64
    assert np.count_nonzero(buffer.final_row >= 0) == 10
    assert buffer.ends == [list(range(490, 500))]


def test_arrays_are_copied():
    # environments may write into their arrays again
    buffer, obs, final, after = (ReplayBuffer(SPEC, 10), *(np.full((1, 1), x, np.float32) for x in (1, 2, 3)))
    yes, no = np.ones(1, np.bool_), np.zeros(1, np.bool_)
    buffer.add(Step(obs, obs, no, {}, no, no, no, yes, yes, np.array([0]), final, None, after))
    for array in (obs, final, after):
        array[:] = 99
    assert table(buffer) == [(1, 2)]
    assert numbers(buffer.obs)[1] == 3


# Spaces


def one_step(buffer, obs, action, following):
    no, yes = np.zeros(1, np.bool_), np.ones(1, np.bool_)
    nobody = np.zeros(0, np.intp)
    batched = [{key: np.stack([value]) for key, value in x.items()} if isinstance(x, dict) else np.stack([x])
               for x in (obs, following)]  # fmt: skip
    buffer.add(
        Step(batched[0], batched[0], np.stack([action]), {}, np.ones(1), np.ones(1), no, no, yes, nobody, None, None,
             batched[1])
    )  # fmt: skip


OBSERVATIONS = {
    "image": (spaces.Box(0, 255, (4, 8, 8), np.uint8), np.uint8),
    "code": (spaces.Discrete(7), np.int64),
    "bits": (spaces.MultiBinary(5), np.int8),
    "codes": (spaces.MultiDiscrete([3, 4]), np.int64),
    "float32": (spaces.Box(-1, 1, (3,), np.float32), np.float32),
    "float64": (spaces.Box(-1, 1, (3,), np.float64), np.float32),
    "int16": (spaces.Box(-300, 300, (2,), np.int16), np.int16),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_types_of_observations(name):
    space, dtype = OBSERVATIONS[name]
    space.seed(1)
    first, second = space.sample(), space.sample()
    buffer = ReplayBuffer(EnvSpec(space, spaces.Discrete(2)), 10)
    one_step(buffer, first, 1, second)
    for kept, given in ((buffer.observations(ZERO), first), (buffer.next_observations(ZERO), second)):
        assert kept.dtype == dtype
        assert np.array_equal(kept[0], np.asarray(given, dtype))
    assert buffer.final_obs.dtype == dtype


def test_dict_observations():
    space = spaces.Dict({name: OBSERVATIONS[name][0] for name in ("image", "code", "float64")})
    space.seed(1)
    first, second = space.sample(), space.sample()
    buffer = ReplayBuffer(EnvSpec(space, spaces.Discrete(2)), 10)
    one_step(buffer, first, 1, second)
    for kept, given in ((buffer.observations(ZERO), first), (buffer.next_observations(ZERO), second)):
        assert {key: x.dtype.name for key, x in kept.items()} == {
            "code": "int64", "float64": "float32", "image": "uint8",
        }  # fmt: skip
        for key, value in given.items():
            assert np.array_equal(kept[key][0], np.asarray(value, kept[key].dtype))


@pytest.mark.parametrize(
    ("space", "action", "dtype"),
    [
        (spaces.Discrete(3, start=5), np.int64(2), np.int64),
        (spaces.Box(-2, 2, (2,), np.float64), np.array([0.5, -0.25]), np.float32),
        (spaces.MultiDiscrete([3, 4]), np.array([2, 3]), np.int64),
        (spaces.MultiBinary(3), np.array([1, 0, 1]), np.int64),
    ],
)
def test_types_of_actions(space, action, dtype):
    buffer = ReplayBuffer(EnvSpec(SPEC.observation_space, space), 10)
    one_step(buffer, np.zeros(1), action, np.ones(1))
    assert buffer.action.dtype == dtype
    assert buffer.action[0].tolist() == action.tolist()


def test_memory_of_a_full_buffer():
    # HalfCheetah: 17 + 6 floats, a reward, three flags, and where the last observation is
    spec = EnvSpec(spaces.Box(-np.inf, np.inf, (17,), np.float64), spaces.Box(-1, 1, (6,)))
    buffer = ReplayBuffer(spec, 1_000_000)
    per_transition = (17 + 6 + 1) * 4 + 3 + 4
    assert buffer.num_bytes == buffer.num_slots * per_transition
    assert 1_000_001 <= buffer.num_slots < 1.1 * 1_000_001


# Episodes and windows


def spans(buffer, *times, env=0):
    first, last = buffer.episodes(buffer.at(np.array(times), np.full(len(times), env)))
    return list(zip(first.tolist(), last.tolist(), strict=True))


def test_episodes():
    buffer = recorded("..T.CB..")
    assert spans(buffer, *range(8)) == [(0, 2), (0, 2), (0, 2), (3, 4), (3, 4), (5, 5), (6, 7), (6, 7)]


def test_episodes_do_not_have_the_rows_that_only_reset():
    buffer = recorded(".Tr..Cr.", next_step=True)
    assert spans(buffer, 0, 1, 3, 4, 5, 7) == [(0, 1), (0, 1), (3, 5), (3, 5), (3, 5), (7, 7)]


def test_episodes_as_far_as_they_are_in_the_buffer():
    buffer = ReplayBuffer(SPEC, capacity=4)
    tape = Tape(buffer).play("....T.")
    assert spans(buffer, 2, 3, 4, 5) == [(2, 4), (2, 4), (2, 4), (5, 5)]
    tape.play("......")
    assert spans(buffer, 8, 11) == [(8, 11), (8, 11)]


def test_an_episode_whose_reset_row_is_the_oldest():
    buffer = ReplayBuffer(SPEC, capacity=3)
    Tape(buffer, next_step=True).play("Tr..")
    assert buffer.valid[buffer.everything()].tolist() == [False, True, True]
    assert spans(buffer, 2, 3) == [(2, 3), (2, 3)]


def test_episodes_of_each_environment():
    buffer = recorded("..T.", "T..C")
    assert spans(buffer, 0, 3) == [(0, 2), (3, 3)]
    assert spans(buffer, 0, 3, env=1) == [(0, 0), (1, 3)]
    first, last = buffer.episodes(buffer.at(np.array([1, 1]), np.array([0, 1])))
    assert (first.tolist(), last.tolist()) == ([0, 1], [2, 3])


def test_windows():
    window = recorded("..T..").window(np.arange(5), 3)
    assert window.used.astype(int).tolist() == [
        [1, 1, 1],
        [1, 1, 0],  # the episode ends
        [1, 0, 0],
        [1, 1, 0],  # no more has happened
        [1, 0, 0],
    ]
    assert window.steps[1].tolist() == [1, 2, 3]


def test_windows_round_the_ring():
    buffer = ReplayBuffer(SPEC, capacity=4)
    Tape(buffer).play(".......")
    assert (buffer.oldest, buffer.ring) == (3, 5)
    window = buffer.window(buffer.everything(), 3)
    assert window.steps.tolist() == [[3, 4, 0], [4, 0, 1], [0, 1, 2], [1, 2, 3]]
    assert window.used.astype(int).tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]


# New environments


def test_open_episodes_are_closed_where_they_are():
    buffer = ReplayBuffer(SPEC, 10, 2)
    tape = Tape(buffer, 2).play("...", ".T.")
    buffer.close_episodes()
    assert buffer.truncated[buffer.everything()].tolist() == [False, False, False, False, True, True]
    assert buffer.ends == [[2], [1, 2]]
    tape.restart()
    tape.play("..", "..")
    assert table(buffer)[4:] == [(2, 3), (1010, 1011), (10, 11), (1020, 1021), (11, 12), (1021, 1022)]
    assert buffer.window(np.array([2]), 5).used[0].tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(("letters", "next_step"), [("..T", False), ("..Tr", True), ("..T", True)])
def test_closed_episodes_stay_as_they_are(letters, next_step):
    buffer = recorded(letters, next_step=next_step)
    before = table(buffer)
    buffer.close_episodes()
    assert table(buffer) == before
    assert not buffer.truncated.any()
    assert buffer.ends == [[2]]


def test_closing_an_empty_buffer():
    buffer = ReplayBuffer(SPEC, 10)
    buffer.close_episodes()
    assert (buffer.added, buffer.num_transitions) == (0, 0)


# Files


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of ten rows in a buffer of 49: a row of SPEC has 12 bytes of observations and actions."""
    monkeypatch.setattr(module, "SEGMENT_BYTES", 120)


def files(path):
    return {file.name: file.stat().st_ino for file in path.glob("segment_*")}


@pytest.mark.usefixtures("short_segments")
def test_whole_segments_are_written_once(tmp_path):
    buffer = ReplayBuffer(SPEC, 49)
    tape = Tape(buffer).play("....T" * 5)  # 25 rows: two whole segments and a half
    first = files(save_replay(tmp_path / "first", buffer, {}))
    tape.play(".....T")
    second = files(save_replay(tmp_path / "second", buffer, {}))
    assert len(first) == 3
    assert len(second) == 4
    shared = [name for name in first if second[name] == first[name]]
    assert shared == ["segment_00000.safetensors", "segment_00001.safetensors"]
    tape.play("." * 30)  # 61 rows, of which 12 are gone
    third = files(save_replay(tmp_path / "third", buffer, {}))
    assert len(set(third.values()) & set(second.values())) == 2, "10 to 19 and 20 to 29; 30 was not whole before"
    for name in ("first", "second", "third"):
        found = load_checkpoint(tmp_path / name).state["replay"]
        again = ReplayBuffer(SPEC, 49)
        again.load_state_dict(found)
        assert again.added == {"first": 25, "second": 31, "third": 61}[name]
    assert table(again) == table(buffer)


@pytest.mark.usefixtures("short_segments")
def test_a_loaded_buffer_shares_the_files_it_came_from(tmp_path):
    buffer = recorded("....T" * 5, capacity=49)
    first = files(save_replay(tmp_path / "first", buffer, {}))
    again = ReplayBuffer(SPEC, 49)
    again.load_state_dict(load_checkpoint(tmp_path / "first").state["replay"])
    second = files(save_replay(tmp_path / "second", again, {}))
    assert len(set(first.values()) & set(second.values())) == 2


@pytest.mark.usefixtures("short_segments")
def test_a_checkpoint_that_was_removed_is_not_missed(tmp_path):
    buffer = recorded("....T" * 5, capacity=49)
    for file in save_replay(tmp_path / "first", buffer, {}).iterdir():
        os.remove(file)
    save_replay(tmp_path / "second", buffer, {})
    assert table(read_replay(tmp_path / "second", SPEC)) == table(buffer)


@pytest.mark.usefixtures("short_segments")
def test_another_replay_in_the_same_place_is_not_mistaken_for_this_one(tmp_path):
    buffer = recorded("....T" * 5, capacity=49)
    other = recorded("..T.." * 5, capacity=49, rewards=[7] * 25)
    save_replay(tmp_path / "place", buffer, {})
    save_replay(tmp_path / "place", other, {})
    save_replay(tmp_path / "mine", buffer, {})
    assert table(read_replay(tmp_path / "mine", SPEC)) == table(buffer)


@pytest.mark.usefixtures("short_segments")
def test_a_saved_segment_is_written_again_when_its_last_episode_is_closed(tmp_path):
    buffer = recorded("." * 20, capacity=49)
    first = files(save_replay(tmp_path / "first", buffer, {}))
    buffer.close_episodes()
    second = files(save_replay(tmp_path / "second", buffer, {}))
    assert [name for name in first if second[name] == first[name]] == ["segment_00000.safetensors"]
    again = ReplayBuffer(SPEC, 49)
    again.load_state_dict(load_checkpoint(tmp_path / "second").state["replay"])
    assert again.truncated[19]
    assert again.ends == [[19]]


@pytest.mark.parametrize("lengths", [(10, 5), (5, 10), (4, 6), (6, 4), (3, 100), (100, 3)])
def test_segments_of_another_length(tmp_path, monkeypatch, lengths):
    """Saved, loaded and saved again by a buffer whose segments begin elsewhere: no row is lost or comes twice."""
    monkeypatch.setattr(module, "SEGMENT_BYTES", 12 * lengths[0])
    buffer = ReplayBuffer(SPEC, 25)
    tape = Tape(buffer).play("....T.." * 3)
    save_replay(tmp_path / "before", buffer, {})
    tape.play("....T.." * 2)
    save_replay(tmp_path / "first", buffer, {})
    monkeypatch.setattr(module, "SEGMENT_BYTES", 12 * lengths[1])
    second = ReplayBuffer(SPEC, 25)
    second.load_state_dict(load_checkpoint(tmp_path / "first").state["replay"])
    save_replay(tmp_path / "second", second, {})
    third = ReplayBuffer(SPEC, 25)
    third.load_state_dict(load_checkpoint(tmp_path / "second").state["replay"])
    assert table(third) == table(second) == table(buffer)
    assert read_replay(tmp_path / "second", SPEC).num_rows == 25


def test_the_newest_rows_that_fit():
    large, small = recorded("....T.....", capacity=10), ReplayBuffer(SPEC, 4)
    small.load_state_dict(large.state_dict())
    assert table(small) == table(large)[6:]
    larger = ReplayBuffer(SPEC, 30)
    larger.load_state_dict(small.state_dict())
    assert table(larger) == table(large)[6:]
    assert (larger.oldest, larger.num_transitions) == (6, 4)


def test_another_number_of_environments():
    with pytest.raises(OtherNumberOfEnvsError, match="it was saved with 2 environments, this run has 1"):
        ReplayBuffer(SPEC, 10).load_state_dict(recorded("..", "..").state_dict())


def test_a_replay_of_another_environment(tmp_path):
    save_replay(tmp_path / "replay", recorded("..T."), {})
    other = EnvSpec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    with pytest.raises(CheckpointError, match=r"replay: this replay buffer does not fit the environment: .* shape"):
        read_replay(tmp_path / "replay", other)
    parts = EnvSpec(spaces.Dict({"a": SPEC.observation_space}), spaces.Discrete(2))
    with pytest.raises(CheckpointError, match=r"missing final_obs\.a, obs\.a; unknown final_obs, obs"):
        read_replay(tmp_path / "replay", parts)


def test_a_replay_that_is_read_ends_its_open_episodes(tmp_path):
    save_replay(tmp_path / "replay", recorded("..T."), {})
    buffer = read_replay(tmp_path / "replay", SPEC)
    assert buffer.num_rows == 4, "just large enough"
    assert buffer.truncated[buffer.everything()].tolist() == [False, False, False, True]
    assert table(buffer) == [(0, 1), (1, 2), (2, 3), (10, 11)]


def damaged(state, what):
    segment = state["segments"][0]
    tensors = dict(segment.tensors())
    if what == "a column is missing":
        del tensors["reward"]
    elif what == "a column is short":
        tensors["reward"] = tensors["reward"][:-1]
    elif what == "a column is of another type":
        tensors["reward"] = tensors["reward"].double()
    elif what == "an end outside":
        tensors["ended"] = torch.tensor([99])
    elif what == "times that do not fit":
        tensors["times"] = torch.tensor([3, 7])
    elif what == "times without numbers":
        tensors["times"] = torch.zeros(0, dtype=torch.int64)
    elif what == "final observations are missing":
        tensors["final_obs"] = tensors["final_obs"][:0]
    elif what == "no segments":
        return {**state, "segments": []}
    elif what == "no segment":
        return {**state, "segments": [3]}
    elif what == "a counter is no number":
        return {**state, "added": "4"}
    elif what == "a counter is negative":
        return {**state, "added": -4}
    elif what == "the oldest row is not there":
        return {**state, "oldest": -1}
    elif what == "the oldest row is yet to come":
        return {**state, "oldest": 5}
    elif what == "twice":
        return {**state, "segments": [segment, segment]}
    elif what == "no next observation":
        return {**state, "next_obs": np.zeros((2, 1), np.float32)}
    return {**state, "segments": [Segment(lambda: tensors)]}


@pytest.mark.parametrize(
    "what",
    [
        "a column is missing", "a column is short", "a column is of another type", "an end outside",
        "times that do not fit", "times without numbers", "final observations are missing", "no segments",
        "no segment", "a counter is no number", "a counter is negative", "twice", "no next observation",
        "the oldest row is not there", "the oldest row is yet to come",
    ],
)  # fmt: skip
def test_damaged_state_is_refused(what):
    state = recorded("..T.").state_dict()
    with pytest.raises(CheckpointError):
        ReplayBuffer(SPEC, 10).load_state_dict(damaged(state, what))
