"""Datasets: episodes, true next observations, selections, hash, statistics."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from rl_training.data import dataset as module
from rl_training.data.dataset import Dataset, DatasetError, DatasetMetadata, Finding, format_findings
from tests.data.recorded import any_space, three_episodes


def test_episodes_have_true_ends() -> None:
    data = three_episodes()
    assert data.episode_starts.tolist() == [0, 3, 4]
    assert data.episode_ends.tolist() == [2, 3, 7]
    assert data.episode_lengths.tolist() == [3, 1, 4]
    assert data.episode_returns.tolist() == [7, 10, 4]
    episodes = list(data.episodes())
    assert [len(episode) for episode in episodes] == [3, 1, 4]
    assert [(episode.terminated, episode.truncated) for episode in episodes] == [(1, 0), (0, 1), (0, 1)]
    assert np.asarray(episodes[1].observations).tolist() == [[3, -3], [101, -101]]


def test_next_observations_are_the_following_row_or_the_true_last_one() -> None:
    after = three_episodes().next_observations
    assert np.asarray(after)[:, 0].tolist() == [1, 2, 100, 101, 5, 6, 7, 102]
    assert after[-1].tolist() == [102, -102]
    assert after[np.array([7, 0])][:, 0].tolist() == [102, 1]
    assert after[2:5][:, 0].tolist() == [100, 101, 5]
    assert after[np.arange(8) == 3][:, 0].tolist() == [101]
    with pytest.raises(IndexError, match="row 8 of 8"):
        after[8]


def test_columns_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(DatasetError, match="equally many rows"):
        three_episodes(rewards=np.zeros(7))
    with pytest.raises(DatasetError, match="last row must end"):
        three_episodes(truncated=np.zeros(8, bool))
    with pytest.raises(DatasetError, match="final_observations has 2 rows, of 3"):
        three_episodes(final_observations=np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("small", [True, False])
def test_select_keeps_episodes_together(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    if not small:
        monkeypatch.setattr(module, "SMALL_BYTES", 0)
    data = three_episodes(extras={"number": np.arange(8)})
    chosen = data.select([2, 0])
    assert isinstance(chosen.observations, np.ndarray) is small
    assert chosen.episode_lengths.tolist() == [4, 3]
    assert chosen.episode_returns.tolist() == [4, 7]
    assert np.asarray(chosen.observations)[:, 0].tolist() == [4, 5, 6, 7, 0, 1, 2]
    assert np.asarray(chosen.next_observations)[:, 0].tolist() == [5, 6, 7, 102, 1, 2, 100]
    assert np.asarray(chosen.extras["number"]).tolist() == [4, 5, 6, 7, 0, 1, 2]
    assert chosen.select([1]).hash == data.select([0]).hash
    with pytest.raises(DatasetError, match="0 to 2 can be selected"):
        data.select([3])


def test_split_is_by_episode() -> None:
    data = any_space(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), (2,) * 10)
    train, held_out = data.split(0.3, np.random.default_rng(0))
    assert (train.num_episodes, held_out.num_episodes) == (7, 3)
    firsts = {float(part.rewards[row]) for part in (train, held_out) for row in part.episode_starts}
    assert firsts == set(range(0, 20, 2))
    with pytest.raises(DatasetError, match="between 0 and 1"):
        data.split(1.0, np.random.default_rng(0))


def test_hash_is_of_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    data = three_episodes()
    assert data.hash == three_episodes(metadata=DatasetMetadata(env_id="A-v0")).hash
    changed = three_episodes()
    np.asarray(changed.final_observations)[1, 0] += 1
    assert changed.hash != data.hash
    ends = (data.truncated.copy(), data.terminated.copy())
    assert three_episodes(terminated=ends[0], truncated=ends[1]).hash != data.hash
    monkeypatch.setattr(module, "CHUNK_BYTES", 8)
    assert three_episodes().hash == data.hash


def test_statistics() -> None:
    found = three_episodes().statistics()
    assert (found.num_episodes, found.num_transitions, found.num_terminated, found.num_truncated) == (3, 8, 1, 2)
    assert (found.return_mean, found.return_min, found.return_median, found.return_max) == (7, 4, 7, 10)
    assert (found.length_mean, found.length_min, found.length_max) == (8 / 3, 1, 4)
    assert (found.reward_min, found.reward_max) == (1, 10)
    assert found.observations["observations"].low.tolist() == [0, -7]
    assert found.observations["observations"].mean.tolist() == [3.5, -3.5]
    assert found.observations["observations"].std == pytest.approx([np.sqrt(5.25)] * 2)
    assert (found.actions.low.item(), found.actions.high.item(), found.action_coverage) == (0, 2, 1.0)
    assert found.state_coverage == 1.0
    assert three_episodes(action_space=spaces.Discrete(6)).statistics().action_coverage == 0.5
    assert found.to_dict()["observations"]["observations"]["high"] == [7.0, 0.0]


def test_statistics_leave_out_nan() -> None:
    data = three_episodes()
    np.asarray(data.observations)[0, 0] = np.nan
    assert data.statistics().observations["observations"].mean == pytest.approx([4.0, -3.5])


def test_metadata_from_a_file_is_checked_by_type() -> None:
    given = {"env_id": "A-v0", "seeds": ["x"], "max_episode_steps": True, "min_score": 1, "other": 3}
    assert DatasetMetadata.from_dict(given) == DatasetMetadata(env_id="A-v0", min_score=1)
    assert DatasetMetadata.from_dict([1]) == DatasetMetadata()


def test_findings_are_printed_errors_first_without_control_characters() -> None:
    text = format_findings([Finding("note", "a", "x\x1b[2J"), Finding("error", "b", "y")])
    assert text.splitlines()[:2] == ["1 error.", "error    b: y"]
    assert "\x1b" not in text
    assert format_findings([]) == "No problems found."


def test_dict_observations() -> None:
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(4)})
    data = any_space(space, spaces.MultiBinary(3))
    assert isinstance(data, Dataset)
    episode = data.episode(1)
    assert isinstance(episode.observations, dict)
    assert episode.observations["a"].shape == (3, 2)
    assert episode.observations["b"].shape == (3,)
    finals = data.final_observations
    assert isinstance(finals, dict)
    assert (data.next_observations["a"][3] == finals["a"][0]).all()
    assert set(data.statistics().observations) == {"observations.a", "observations.b"}
