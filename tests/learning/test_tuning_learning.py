"""A study of twenty short trials finds settings that are better than those it began with."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from rl_training import train
from rl_training.cli import load_config
from rl_training.tuning.tune import TuneConfig, tune

pytestmark = pytest.mark.learning


def test_twenty_trials_improve_on_the_first_and_their_preset_on_the_one_before(tmp_path: Path) -> None:
    config = TuneConfig("ppo", "CartPole-v1", trials=20, timesteps=8_000, output_dir=tmp_path)
    result = tune(config, progress=False)
    assert sum(result.counts.values()) == 20
    assert result.first_score is not None
    assert result.best_score > result.first_score
    best = load_config(result.files["preset"]).replace(output_dir=tmp_path, eval_episodes=30)
    returns = []
    for seed in range(3):  # others than that with which it was found
        final = train(best.replace(seed=seed), progress=False).final_evaluation
        assert final is not None
        returns.append(final.mean)
    assert statistics.median(returns) > result.first_score
