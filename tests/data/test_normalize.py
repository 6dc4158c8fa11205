"""Running normalisation against plain numpy and hand-written loops."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl_training.contracts.errors import CheckpointError
from rl_training.data.normalize import ObservationNormalizer, RewardNormalizer, RunningMoments

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DICT = spaces.Dict(
    {
        "position": BOX,
        "precise": spaces.Box(-np.inf, np.inf, (2,), np.float64),
        "image": spaces.Box(0, 255, (2, 2, 1), np.uint8),
        "counts": spaces.Box(-9, 9, (2,), np.int64),
        "code": spaces.Discrete(5),
        "bits": spaces.MultiBinary(2),
    }
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def dict_batch(rng: np.random.Generator, size: int) -> dict[str, Any]:
    return {
        "position": rng.normal(3.0, 2.0, (size, 3)).astype(np.float32),
        "precise": rng.normal(-7.0, 0.5, (size, 2)),
        "image": rng.integers(256, size=(size, 2, 2, 1)).astype(np.uint8),
        "counts": rng.integers(-9, 10, size=(size, 2)),
        "code": rng.integers(5, size=size),
        "bits": rng.integers(2, size=(size, 2)).astype(np.int8),
    }


class TestRunningMoments:
    def test_equal_numpy_over_everything_seen(self, rng: np.random.Generator) -> None:
        batches = [rng.normal(5.0, 3.0, (size, 2, 3)) for size in (1, 7, 1, 64, 3)]
        moments = RunningMoments((2, 3))
        for seen, batch in enumerate(batches, start=1):
            moments.update(batch)
            everything = np.concatenate(batches[:seen])
            np.testing.assert_allclose(moments.mean, everything.mean(axis=0), rtol=1e-12)
            np.testing.assert_allclose(moments.var, everything.var(axis=0), rtol=1e-12, atol=1e-15)
            assert moments.count == len(everything)

    def test_scalars(self) -> None:
        moments = RunningMoments()
        moments.update(np.array([1.0, 2.0]))
        moments.update(np.array([6.0]))
        assert moments.mean == pytest.approx(3.0)
        assert moments.var == pytest.approx(14.0 / 3.0)

    def test_an_empty_batch_changes_nothing(self) -> None:
        moments = RunningMoments((2,))
        moments.update(np.zeros((0, 2)))
        assert (moments.mean.tolist(), moments.var.tolist(), float(moments.count)) == ([0.0, 0.0], [1.0, 1.0], 0.0)

    def test_a_small_spread_around_a_large_number_survives(self) -> None:
        """The textbook formula E[x**2] - E[x]**2 gives zero or less here."""
        values = 1e8 + np.arange(1000) % 2
        moments = RunningMoments()
        for chunk in np.split(values, 100):
            moments.update(chunk)
        assert moments.var == pytest.approx(0.25, rel=1e-6)

    def test_float32_batches_are_summed_in_float64(self, rng: np.random.Generator) -> None:
        values = rng.normal(1e4, 3.0, 5000).astype(np.float32)
        moments = RunningMoments()
        moments.update(values)
        assert moments.mean == pytest.approx(values.mean(dtype=np.float64), rel=1e-12)
        assert moments.var == pytest.approx(values.var(dtype=np.float64), rel=1e-12)


class TestObservations:
    def test_mean_and_deviation(self, rng: np.random.Generator) -> None:
        normalizer = ObservationNormalizer(BOX)
        batch = rng.normal(100.0, 5.0, (500, 3)).astype(np.float32)
        normalizer.update(batch)
        found = normalizer(batch)
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, (batch - batch.mean(0)) / batch.std(0), atol=1e-3)

    def test_before_anything_was_seen_observations_pass(self) -> None:
        found = ObservationNormalizer(BOX)(np.array([[1.0, -2.0, 3.0]], np.float32))
        np.testing.assert_allclose(found, [[1.0, -2.0, 3.0]], rtol=1e-6)  # type: ignore[arg-type]

    def test_clip(self) -> None:
        normalizer = ObservationNormalizer(BOX, clip=2.0)
        found = normalizer(np.array([[5.0, -5.0, 0.5]], np.float32))
        np.testing.assert_allclose(found, [[2.0, -2.0, 0.5]], rtol=1e-6)  # type: ignore[arg-type]

    def test_a_constant_entry_becomes_zero(self) -> None:
        normalizer = ObservationNormalizer(BOX)
        batch = np.full((10, 3), 7.0, np.float32)
        normalizer.update(batch)
        assert np.asarray(normalizer(batch)).tolist() == np.zeros((10, 3)).tolist()

    def test_calling_does_not_change_the_statistics(self, rng: np.random.Generator) -> None:
        normalizer = ObservationNormalizer(BOX)
        normalizer.update(rng.normal(size=(10, 3)))
        before = copy.deepcopy(normalizer.state_dict())
        first = np.asarray(normalizer(rng.normal(9.0, 9.0, (50, 3)))).copy()
        np.testing.assert_equal(normalizer.state_dict(), before)
        assert first.shape == (50, 3)

    def test_given_observations_are_not_changed(self, rng: np.random.Generator) -> None:
        normalizer = ObservationNormalizer(BOX)
        batch = rng.normal(4.0, 2.0, (5, 3)).astype(np.float32)
        before = batch.copy()
        normalizer.update(batch)
        normalizer(batch)
        np.testing.assert_array_equal(batch, before)

    def test_only_real_valued_boxes_of_a_dict_are_touched(self, rng: np.random.Generator) -> None:
        normalizer = ObservationNormalizer(DICT)
        batch = dict_batch(rng, 40)
        normalizer.update(batch)
        found = normalizer(batch)
        assert isinstance(found, dict)
        assert set(normalizer.moments) == {"position", "precise"}
        assert found.keys() == batch.keys()
        for key in ("position", "precise"):
            expected = (batch[key] - batch[key].mean(0)) / batch[key].std(0)
            np.testing.assert_allclose(found[key], expected, atol=1e-4)
            assert found[key].dtype == np.float32
        for key in ("image", "counts", "code", "bits"):
            assert found[key] is batch[key]

    @pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.Box(0, 255, (4,), np.uint8), spaces.MultiBinary(4)])
    def test_other_observations_pass_as_they_are(self, space: spaces.Space[Any]) -> None:
        normalizer = ObservationNormalizer(space)
        batch = np.stack([space.sample() for _ in range(3)])
        normalizer.update(batch)
        assert normalizer(batch) is batch

    def test_state_round_trip(self, rng: np.random.Generator) -> None:
        normalizer, other = ObservationNormalizer(DICT), ObservationNormalizer(DICT)
        for _ in range(3):
            normalizer.update(dict_batch(rng, 8))
        other.load_state_dict(copy.deepcopy(normalizer.state_dict()))
        batch = dict_batch(rng, 8)
        np.testing.assert_equal(other(batch), normalizer(batch))
        # and they go on alike
        normalizer.update(batch)
        other.update(batch)
        np.testing.assert_equal(other.state_dict(), normalizer.state_dict())

    def test_state_of_another_space_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="position"):
            ObservationNormalizer(BOX).load_state_dict(ObservationNormalizer(DICT).state_dict())


class TestRewards:
    def test_against_a_loop(self, rng: np.random.Generator) -> None:
        num_envs, gamma, clip, eps = 3, 0.9, 2.0, 1e-8
        normalizer = RewardNormalizer(num_envs, gamma, clip, eps)
        returns, seen = [0.0] * num_envs, []
        for _ in range(60):
            reward = rng.normal(1.0, 4.0, num_envs)
            ended, valid = rng.random(num_envs) < 0.2, rng.random(num_envs) < 0.8
            ended &= valid
            for env in range(num_envs):
                if valid[env]:
                    returns[env] = returns[env] * gamma + reward[env]
                    seen.append(returns[env])
                if ended[env]:
                    returns[env] = 0.0
            deviation = np.sqrt((np.var(seen) if seen else 1.0) + eps)
            found = normalizer(reward, ended, valid)
            np.testing.assert_allclose(found, np.clip(reward / deviation, -clip, clip), rtol=1e-5)
            np.testing.assert_allclose(normalizer.returns, returns, rtol=1e-12)
            assert found.dtype == np.float32

    def test_the_sign_and_zero_of_rewards_are_kept(self, rng: np.random.Generator) -> None:
        """Centring would turn a reward of zero into a punishment."""
        normalizer = RewardNormalizer(4, 0.99)
        nobody, everybody = np.zeros(4, np.bool_), np.ones(4, np.bool_)
        for _ in range(20):
            normalizer(rng.normal(5.0, 1.0, 4), nobody, everybody)
        found = normalizer(np.array([0.0, 1.0, -1.0, 2.0]), nobody, everybody)
        assert np.sign(found).tolist() == [0.0, 1.0, -1.0, 1.0]

    def test_rows_that_only_reset_leave_no_trace(self) -> None:
        gamma, valid = 0.5, np.array([True, False])
        with_row, without = RewardNormalizer(2, gamma), RewardNormalizer(1, gamma)
        for reward in (1.0, 3.0, -2.0):
            with_row(np.array([reward, 0.0]), np.zeros(2, np.bool_), valid)
            without(np.array([reward]), np.zeros(1, np.bool_), np.ones(1, np.bool_))
        np.testing.assert_equal(with_row.moments.state_dict(), without.moments.state_dict())
        assert with_row.returns.tolist() == [*without.returns, 0.0]

    def test_state_round_trip(self, rng: np.random.Generator) -> None:
        normalizer, other = RewardNormalizer(2, 0.9), RewardNormalizer(2, 0.9)
        ended, valid = np.array([False, True]), np.ones(2, np.bool_)
        for _ in range(5):
            normalizer(rng.normal(size=2), ended, valid)
        other.load_state_dict(copy.deepcopy(normalizer.state_dict()))
        reward = rng.normal(size=2)
        np.testing.assert_array_equal(other(reward, ended, valid), normalizer(reward, ended, valid))
        np.testing.assert_equal(other.state_dict(), normalizer.state_dict())
