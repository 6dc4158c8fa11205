"""Processing of datasets, with numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from rl_training.contracts.errors import ConfigError
from rl_training.data import processing
from rl_training.data.dataset import DatasetError, LazyColumn
from rl_training.data.processing import DataConfig, fit_normalizer, n_step_returns, process, returns_to_go
from tests.data.recorded import any_space, three_episodes


def test_defaults_change_nothing() -> None:
    data = three_episodes()
    train, validation, _ = process(data, DataConfig())
    assert train is data
    assert validation is None


@pytest.mark.parametrize(
    ("settings", "returns"),
    [
        ({"min_length": 2}, [7, 4]),
        ({"min_return": 5}, [7, 10]),
        ({"max_return": 7}, [7, 4]),
        ({"best_fraction": 0.3}, [10]),
        ({"best_fraction": 0.67}, [7, 10]),
        ({"best_fraction": 0.5, "min_length": 2}, [7]),
        ({"best_fraction": 0.001}, [10]),
    ],
)
def test_filters(settings: dict[str, float], returns: list[float]) -> None:
    train = process(three_episodes(), DataConfig(**settings)).train  # type: ignore[arg-type]
    assert train.episode_returns.tolist() == returns


def test_a_filter_that_leaves_nothing_says_what_there_is() -> None:
    with pytest.raises(DatasetError, match=r"longest has 4 steps .* from 4 to 10"):
        process(three_episodes(), DataConfig(min_return=11))


def test_down_sampling_and_split_are_by_episode_and_seed() -> None:
    data = any_space(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), (2,) * 20)
    config = DataConfig(sample_fraction=0.5, validation_fraction=0.2, seed=3)
    train, validation, _ = process(data, config)
    assert validation is not None
    assert (train.num_episodes, validation.num_episodes) == (8, 2)
    assert process(data, config).train.hash == train.hash
    assert process(data, DataConfig(sample_fraction=0.5, validation_fraction=0.2, seed=4)).train.hash != train.hash
    firsts = [float(part.rewards[row]) for part in (train, validation) for row in part.episode_starts]
    assert len(set(firsts)) == 10


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({"reward_shift": 1, "reward_scale": 2}, [4, 6, 10, 22, 4, 4, 4, 4]),
        ({"reward_preset": "sparse_maze"}, [0, 1, 3, 9, 0, 0, 0, 0]),
        ({"reward_preset": "sparse_maze", "reward_scale": 2, "reward_clip": 4}, [0, 2, 4, 4, 0, 0, 0, 0]),
        ({"reward_clip": 2.5}, [1, 2, 2.5, 2.5, 1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("small", [True, False])
def test_rewards(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, float], rewards: list[float], small: bool
) -> None:
    if not small:
        monkeypatch.setattr(processing, "SMALL_BYTES", 0)
    data = three_episodes()
    train = process(data, DataConfig(**settings)).train  # type: ignore[arg-type]
    assert isinstance(train.rewards, LazyColumn) is not small
    assert np.asarray(train.rewards).tolist() == rewards
    assert train.observations is data.observations
    assert train.episode_returns.sum() == sum(rewards)


def test_iql_locomotion_makes_the_range_of_returns_1000() -> None:
    train = process(three_episodes(), DataConfig(reward_preset="iql_locomotion")).train
    assert np.asarray(train.rewards)[:4] == pytest.approx([1000 / 6, 2000 / 6, 4000 / 6, 10000 / 6])
    assert np.ptp(train.episode_returns) == pytest.approx(1000)
    with pytest.raises(DatasetError, match="all 1 episodes have 4"):
        process(three_episodes().select([2]), DataConfig(reward_preset="iql_locomotion"))


def test_standardize_uses_the_training_part_for_both_parts() -> None:
    data = any_space(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), (2,) * 10)
    train, validation, _ = process(data, DataConfig(reward_preset="standardize", validation_fraction=0.2))
    assert validation is not None
    assert np.mean(train.rewards) == pytest.approx(0, abs=1e-6)
    assert np.std(train.rewards) == pytest.approx(1, abs=1e-6)
    raw, raw_validation, _ = process(data, DataConfig(validation_fraction=0.2))
    assert raw_validation is not None
    expected = (np.asarray(raw_validation.rewards) - np.mean(raw.rewards)) / np.std(raw.rewards)
    assert np.asarray(validation.rewards) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(DatasetError, match="all rewards are 1"):
        process(three_episodes().select([2]), DataConfig(reward_preset="standardize"))


def test_normalizer_has_the_moments_of_the_training_part() -> None:
    data = three_episodes()
    np.asarray(data.observations)[:, 1] = 5
    normalizer = fit_normalizer(process(data, DataConfig()).train)
    assert normalizer.moments[""].mean.tolist() == [3.5, 5]
    scaled = normalizer(np.array([[3.5 + np.sqrt(5.25), 5.001]], np.float32))
    assert np.asarray(scaled) == pytest.approx(
        np.array([[1.0, 1.0]]), abs=0.02
    )  # 0.001 is one deviation, not a thousand


def test_normalizer_leaves_images_alone_and_refuses_nan() -> None:
    space = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "x": spaces.Box(-1, 1, (2,))})
    data = any_space(space, spaces.Discrete(2))
    normalizer = fit_normalizer(data)
    assert list(normalizer.moments) == ["x"]
    assert isinstance(data.observations, dict)
    data.observations["x"][0, 0] = np.nan
    with pytest.raises(DatasetError, match=r"observations.x: NaN or infinity"):
        fit_normalizer(data)


def test_returns_to_go() -> None:
    data = three_episodes()
    assert returns_to_go(data, 0.5).tolist() == [3, 4, 4, 10, 1.875, 1.75, 1.5, 1]
    assert returns_to_go(data).tolist() == [7, 6, 4, 10, 4, 3, 2, 1]
    assert data.rewards.tolist() == [1, 2, 4, 10, 1, 1, 1, 1]


def test_n_step_returns_stop_at_ends_and_bootstrap_unless_terminated() -> None:
    found = n_step_returns(three_episodes(), 2, 0.5)
    assert found.returns.tolist() == [2, 4, 4, 10, 1.5, 1.5, 1.5, 1]
    assert found.discounts.tolist() == [0.25, 0, 0, 0.5, 0.25, 0.25, 0.25, 0.5]
    assert found.last_rows.tolist() == [1, 2, 2, 3, 5, 6, 7, 7]
    assert n_step_returns(three_episodes(), 100, 1.0).returns.tolist() == returns_to_go(three_episodes()).tolist()


def test_further_columns_are_computed_on_demand_from_changed_rewards() -> None:
    config = DataConfig(columns=("return_to_go", "next_action", "n_step_return"), n_step=2, reward_scale=2)
    train = process(three_episodes(), config).train
    assert np.asarray(train.extras["return_to_go"]).tolist() == [14, 12, 8, 20, 8, 6, 4, 2]
    assert np.asarray(train.extras["next_action"]).tolist() == [1, 2, 2, 0, 2, 0, 1, 1]
    assert np.asarray(train.extras["n_step_return"]).tolist() == [6, 12, 8, 20, 4, 4, 4, 2]
    assert np.asarray(train.extras["n_step_discount"]).tolist() == [1, 0, 0, 1, 1, 1, 1, 1]
    assert np.asarray(train.select([2]).extras["next_action"]).tolist() == [2, 0, 1, 1]


def test_settings_that_cannot_work_are_all_named() -> None:
    config = DataConfig(min_return=2, max_return=1, reward_scale=0, n_step=3, best_fraction=2.0)
    with pytest.raises(ConfigError) as error:
        process(three_episodes(), config)
    assert len(error.value.problems) == 4
    assert "best_fraction: must be > 0 and <= 1, got 2.0" in str(error.value)
