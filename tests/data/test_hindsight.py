"""Hindsight: new goals, rewards and ends by hand, and goals that never come from another episode.

What is achieved is the number of the observation (see `tests.data.tape`): after the first step of the first episode it
is 1. The desired goal is always 99, so nothing is ever reached but in hindsight.
"""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.contracts.batches import Progress
from rl_training.contracts.spec import EnvSpec
from rl_training.data.hindsight import Hindsight
from rl_training.data.normalize import ObservationNormalizer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.samplers import PrioritizedIndexer, ReplaySampler, UniformIndexer
from tests.data.tape import NUMBERS, Tape, numbers

START = Progress(env_steps=0, horizon=1)
GOALS = EnvSpec(
    spaces.Dict({"observation": NUMBERS, "achieved_goal": NUMBERS, "desired_goal": NUMBERS}), spaces.Discrete(1000)
)


def observe(found):
    array = np.array(found, np.float32)[:, None]
    return {"observation": array, "achieved_goal": array.copy(), "desired_goal": np.full_like(array, 99.0)}


def compute_reward(achieved, desired):
    """0 where the goal is reached, else -1."""
    return -(achieved != desired)[:, 0].astype(np.float32)


def compute_terminated(achieved, desired):
    return (achieved == desired)[:, 0]


class Rolls:
    """Stands in for a random generator: gives the numbers that it was given."""

    def __init__(self, *rolls):
        self.rolls = list(rolls)

    def random(self, size):
        roll = np.broadcast_to(self.rolls.pop(0), size)
        return np.array(roll, np.float64)


class Given:
    """Draws the given times of an environment."""

    def __init__(self, times, env=0):
        self.times, self.env = times, env

    def draw(self, buffer, batch_size, progress):
        return buffer.at(np.array(self.times), np.full(batch_size, self.env)), np.ones(batch_size, np.float32)


def played(*letters, capacity=100, next_step=False):
    buffer = ReplayBuffer(GOALS, capacity, len(letters))
    Tape(buffer, len(letters), next_step=next_step, observe=observe).play(*letters)
    return buffer


def batch_of(buffer, times, rolls, *, strategy="future", n_step=1, ends=False, env=0, relabelled=0.0, ratio=1.0):
    """Rows as (observation, goal, reward, discount, next observation), with gamma 1/2.

    `rolls` choose the step that a goal comes from: 0 is the first of those it may be, 0.99 the last.
    """
    hindsight = Hindsight(
        compute_reward,
        Rolls(relabelled, rolls),
        strategy=strategy,
        ratio=ratio,
        compute_terminated=compute_terminated if ends else None,
    )
    sampler = ReplaySampler(buffer, Given(times, env), gamma=0.5, n_step=n_step, hindsight=hindsight)
    batch = sampler.sample(len(times), START)
    assert torch.equal(batch.obs["desired_goal"], batch.next_obs["desired_goal"]), "a goal holds for both"
    assert torch.equal(batch.obs["observation"], batch.obs["achieved_goal"]), "what was achieved stays"
    columns = (
        batch.obs["observation"],
        batch.obs["desired_goal"],
        batch.reward,
        batch.discount,
        batch.next_obs["observation"],
    )
    return list(zip(*(numbers(column) for column in columns), strict=True))


# One step


def test_future_goals():
    # from step 1 of 5: achieved at steps 1 to 4 are 2 to 5
    buffer = played("....C")
    rolls = [0.0, 0.24, 0.25, 0.5, 0.75, 0.99]
    assert batch_of(buffer, [1] * 6, rolls) == [
        (1, 2, 0, 0.5, 2),
        (1, 2, 0, 0.5, 2),
        (1, 3, -1, 0.5, 2),
        (1, 4, -1, 0.5, 2),
        (1, 5, -1, 0.5, 2),
        (1, 5, -1, 0.5, 2),
    ]


def test_final_goals():
    assert batch_of(played("..C...C"), [0, 1, 2, 3, 6], 0.5, strategy="final") == [
        (0, 3, -1, 0.5, 1),
        (1, 3, -1, 0.5, 2),
        (2, 3, 0, 0.5, 3),
        (10, 14, -1, 0.5, 11),
        (13, 14, 0, 0.5, 14),
    ]


def test_episode_goals():
    # of the 4 steps of the second episode, whichever step the transition is
    buffer = played("..C...C")
    assert batch_of(buffer, [5] * 4 + [3], [0.0, 0.25, 0.5, 0.99, 0.99], strategy="episode") == [
        (12, 11, -1, 0.5, 13),
        (12, 12, -1, 0.5, 13),
        (12, 13, 0, 0.5, 13),
        (12, 14, -1, 0.5, 13),
        (10, 14, -1, 0.5, 11),
    ]


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_an_episode_of_one_step(strategy):
    assert batch_of(played(".CTC."), [2, 3], 0.7, strategy=strategy) == [(10, 11, 0, 0.0, 11), (20, 21, 0, 0.5, 21)]


def test_an_open_episode_counts_as_far_as_it_has_come():
    buffer = played("..T...")
    assert batch_of(buffer, [3, 4, 5], 0.99) == [(10, 13, -1, 0.5, 11), (11, 13, -1, 0.5, 12), (12, 13, 0, 0.5, 13)]
    assert batch_of(buffer, [3], 0.0, strategy="final") == [(10, 13, -1, 0.5, 11)]
    assert batch_of(buffer, [5], 0.0, strategy="episode") == [(12, 11, -1, 0.5, 13)]


def test_without_compute_terminated_ends_stay_as_they_were():
    # the goal 3 is reached in the last step, which had terminated; 13 in a step that had not
    assert batch_of(played("..T..C"), [2, 5], 0.0) == [(2, 3, 0, 0.0, 3), (12, 13, 0, 0.5, 13)]


def test_with_compute_terminated_a_reached_goal_is_an_end():
    buffer = played("....C")
    assert batch_of(buffer, [1, 1, 4], [0.0, 0.25, 0.0], ends=True) == [
        (1, 2, 0, 0.0, 2),
        (1, 3, -1, 0.5, 2),
        (4, 5, 0, 0.0, 5),
    ]


def test_with_compute_terminated_an_end_under_another_goal_is_none():
    # the episode terminated at 3; with the goal 1 it would have gone on, so the last observation is bootstrapped from
    assert batch_of(played("..T."), [2], 0.0, strategy="episode", ends=True) == [(2, 1, -1, 0.5, 3)]


# n steps


def test_rewards_of_all_steps_are_computed_anew():
    # goal 2 is reached in the second step: -1, 0, -1 with weights 1, 1/2, 1/4
    assert batch_of(played("....."), [0], 0.25, n_step=3) == [(0, 2, -1.25, 0.125, 3)]


def test_with_compute_terminated_the_sum_ends_at_the_goal():
    buffer = played(".....")
    # goals 1, 2, 3, 4 from step 0: reached after 1, 2 and 3 steps, and not within 3
    assert batch_of(buffer, [0] * 4, [0.0, 0.2, 0.4, 0.6], n_step=3, ends=True) == [
        (0, 1, 0.0, 0.0, 1),
        (0, 2, -1.0, 0.0, 2),
        (0, 3, -1.5, 0.0, 3),
        (0, 4, -1.75, 0.125, 3),
    ]


def test_n_steps_to_the_end_of_an_episode():
    buffer = played("..T..C.")
    # terminated, with an own end and with one that depends on the goal
    assert batch_of(buffer, [1, 1], [0.0, 0.99], n_step=3) == [(1, 2, -0.5, 0.0, 3), (1, 3, -1.0, 0.0, 3)]
    assert batch_of(buffer, [1, 1], [0.0, 0.99], n_step=3, ends=True) == [(1, 2, 0.0, 0.0, 2), (1, 3, -1.0, 0.0, 3)]
    # truncated
    assert batch_of(buffer, [4, 4], [0.0, 0.99], n_step=3) == [(11, 12, -0.5, 0.25, 13), (11, 13, -1.0, 0.25, 13)]
    # the newest step
    assert batch_of(buffer, [6], 0.0, n_step=3) == [(20, 21, 0.0, 0.5, 21)]


def test_n_steps_of_an_episode_that_would_have_gone_on():
    # terminated at 3 after two steps; with the goal 1 that is a truncation
    assert batch_of(played("..T.."), [1], 0.0, strategy="episode", n_step=3, ends=True) == [(1, 1, -1.5, 0.25, 3)]


@pytest.mark.parametrize("strategy", ["final", "future", "episode"])
def test_n_steps_by_brute_force(strategy):
    """All transitions of random episodes, with termination that depends on the goal."""
    rng = np.random.default_rng(3)
    buffer = ReplayBuffer(GOALS, 40)
    tape = Tape(buffer, observe=observe).play("".join(rng.choice(list("....TC"), 100)))
    for time in range(buffer.oldest, buffer.added):
        roll = rng.random()
        ((obs, goal, reward, discount, following),) = batch_of(
            buffer, [time], roll, strategy=strategy, n_step=4, ends=True
        )
        total = 0.0
        for length in range(1, 5):
            (step,) = tape.history[time + length - 1]
            reached = step.following == goal
            total += 0.0 if reached else -(0.5 ** (length - 1))
            if reached or step.ends or time + length == len(tape.history):
                break
        assert (obs, following) == (tape.history[time][0].obs, step.following)
        assert (reward, discount) == (total, 0.0 if reached else 0.5**length)


# Which rows


def test_only_the_chosen_rows_are_relabelled():
    buffer = played("...T")
    # rolls below the ratio are relabelled; others keep their rewards (1, 2, 3, 4 over time) and the goal 99
    assert batch_of(buffer, [0, 1, 2, 3], [0.0, 0.0], relabelled=[0.1, 0.5, 0.3, 0.9], ratio=0.5) == [
        (0, 1, 0, 0.5, 1),
        (1, 99, 2, 0.5, 2),
        (2, 3, 0, 0.5, 3),
        (3, 99, 4, 0.0, 4),
    ]


def test_other_rows_keep_their_ends():
    # with compute_terminated: the second row had terminated, and is not asked
    buffer = played("..T..")
    assert batch_of(buffer, [1, 1], [0.0], relabelled=[0.0, 0.9], ratio=0.5, n_step=3, ends=True) == [
        (1, 2, 0.0, 0.0, 2),
        (1, 99, 2 + 1.5, 0.0, 3),
    ]


def sampler_of(buffer, *, ratio, strategy="future", n_step=1, reward=compute_reward, seed=0, **kwargs):
    hindsight = Hindsight(reward, np.random.default_rng(seed), strategy=strategy, ratio=ratio)
    indexer = UniformIndexer(np.random.default_rng(seed + 1))
    return ReplaySampler(buffer, indexer, gamma=0.5, n_step=n_step, hindsight=hindsight, **kwargs)


@pytest.mark.parametrize("n_step", [1, 3])
def test_ratio_zero(n_step):
    def refuse(achieved, desired):
        raise AssertionError("nothing is to be relabelled")

    buffer = played("..T...T.")
    batch = sampler_of(buffer, ratio=0.0, n_step=n_step, reward=refuse).sample(64, START)
    plain = ReplaySampler(buffer, UniformIndexer(np.random.default_rng(1)), gamma=0.5, n_step=n_step).sample(64, START)
    assert (batch.obs["desired_goal"] == 99).all()
    for name in ("reward", "discount", "indices"):
        assert torch.equal(getattr(batch, name), getattr(plain, name))


def test_ratio_one():
    batch = sampler_of(played("..T...T."), ratio=1.0).sample(64, START)
    assert (batch.obs["desired_goal"] != 99).all()


def test_ratio_in_between():
    batch = sampler_of(played("..T...T."), ratio=0.8).sample(4_000, START)
    assert (batch.obs["desired_goal"] != 99).float().mean().item() == pytest.approx(0.8, abs=0.03)


def test_the_buffer_keeps_the_goals_that_were_desired():
    buffer = played("..T..")
    before = {key: column.copy() for key, column in buffer.obs.items()}
    sampler_of(buffer, ratio=1.0, n_step=2).sample(64, START)
    assert all(np.array_equal(before[key], column) for key, column in buffer.obs.items())
    assert (buffer.final_obs["desired_goal"][0] == 99).all()
    assert buffer.reward[:5].tolist() == [1, 2, 3, 4, 5]


# Never another episode


class LongTape(Tape):
    """Numbers that do not repeat."""

    per_env = 1_000_000
    per_episode = 1_000


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_goals_come_from_the_same_episode(strategy, next_step, num_envs):
    rng = np.random.default_rng(num_envs)
    buffer = ReplayBuffer(GOALS, 31, num_envs)
    tape = LongTape(buffer, num_envs, next_step=next_step, observe=observe)
    sampler = sampler_of(buffer, ratio=1.0, strategy=strategy)
    resetting = [False] * num_envs
    for time in range(120):
        letters = ["r" if row else rng.choice(list(".....TCB")) for row in resetting]
        resetting = [next_step and letter in "TCB" for letter in letters]
        tape.step(letters, [0.0] * num_envs)
        if time % 40 == 39:
            buffer.close_episodes()
            tape.restart()
            resetting = [False] * num_envs
        if time % 5 or not sampler.ready:
            continue
        present = {
            row.following
            for rows in tape.history[buffer.oldest :]
            for row in rows
            if row.valid
        }  # fmt: skip
        batch = sampler.sample(32, START)
        for obs, goal in zip(*(numbers(batch.obs[key]) for key in ("observation", "desired_goal")), strict=True):
            episode = sorted(number for number in present if number // 1000 == obs // 1000)
            assert goal in episode
            if strategy == "future":
                assert goal > obs
            elif strategy == "final":
                assert goal == episode[-1]


def test_each_future_goal_is_as_likely_as_any_other():
    buffer = played("....T....")
    hindsight = Hindsight(compute_reward, np.random.default_rng(0), ratio=1.0)
    goals = hindsight.goals(buffer, np.full(8_000, 1)).values
    found, counts = np.unique(goals, return_counts=True)
    assert found.tolist() == [2, 3, 4, 5]
    assert np.abs(counts / 2_000 - 1).max() < 0.06


# Together with the rest


def test_goals_of_any_shape():
    goal = spaces.Box(-10, 10, (2, 3), np.float32)
    spec = EnvSpec(
        spaces.Dict({"observation": NUMBERS, "achieved_goal": goal, "desired_goal": goal}), spaces.Discrete(1000)
    )
    buffer = ReplayBuffer(spec, 10)

    def show(found):
        whole = np.array(found, np.float32)[:, None, None] * np.ones((2, 3), np.float32)
        return {
            "observation": np.array(found, np.float32)[:, None],
            "achieved_goal": whole,
            "desired_goal": np.full_like(whole, 99.0),
        }

    Tape(buffer, observe=show).play("...C")
    shapes = []

    def reward(achieved, desired):
        shapes.append((achieved.shape, desired.shape))
        return -np.abs(achieved - desired).sum(axis=(1, 2))

    hindsight = Hindsight(reward, Rolls(0.0, 0.5), strategy="final", ratio=1.0)
    sampler = ReplaySampler(buffer, Given([0, 3]), gamma=0.5, n_step=2, hindsight=hindsight)
    batch = sampler.sample(2, START)
    assert shapes == [((4, 2, 3), (4, 2, 3))]
    assert (batch.obs["desired_goal"] == 4).all()
    assert batch.reward.tolist() == [-(3 + 0.5 * 2) * 6, 0]


def test_new_goals_are_normalised_like_others():
    normalizer = ObservationNormalizer(GOALS.observation_space, eps=0.0)
    normalizer.moments["desired_goal"].mean[:] = 1.0
    normalizer.moments["desired_goal"].var[:] = 4.0
    hindsight = Hindsight(compute_reward, Rolls(0.0, 0.0), strategy="final", ratio=1.0)
    sampler = ReplaySampler(played("....C"), Given([0, 4]), gamma=0.5, hindsight=hindsight, obs_normalizer=normalizer)
    batch = sampler.sample(2, START)
    assert numbers(batch.obs["desired_goal"]) == numbers(batch.next_obs["desired_goal"]) == [2, 2]  # (5 - 1) / 2
    assert numbers(batch.reward) == [-1, 0], "rewards are of the goals themselves"


def test_with_priorities():
    buffer = played("..T...T.")
    indexer = PrioritizedIndexer(buffer, np.random.default_rng(0))
    indexer.loaded(buffer)
    hindsight = Hindsight(compute_reward, np.random.default_rng(1), ratio=1.0)
    sampler = ReplaySampler(buffer, indexer, gamma=0.5, n_step=2, hindsight=hindsight)
    batch = sampler.sample(16, START)
    assert sorted(set(batch.indices.tolist())) == list(range(8))
    sampler.update_priorities(batch.indices, torch.ones(16))


def test_the_stream_of_goals_is_saved():
    first, second = (sampler_of(played("..T...T."), ratio=0.5, seed=seed) for seed in (1, 2))
    first.sample(10, START)
    second.load_state_dict(first.state_dict())
    a, b = first.sample(50, START), second.sample(50, START)
    assert torch.equal(a.obs["desired_goal"], b.obs["desired_goal"])
