"""D4RL's normalised score."""

import dataclasses

import pytest

from rl_training.contracts.batches import EvaluationResult
from rl_training.data.dataset import DatasetMetadata
from rl_training.experiment.logging.base import LoggingCallback
from rl_training.experiment.normalized_scores import REFERENCES, Reference, recorded_reference, reference_of
from rl_training.runtime.callbacks import Every


def test_published_numbers():
    """A TD3+BC return of 5,994 on HalfCheetah is about the 50.5 of a well-known table."""
    assert reference_of("HalfCheetah-v5").score(-280.178953) == 0.0
    assert reference_of("HalfCheetah-v5").score(12135.0) == 100.0
    assert reference_of("Hopper-v4").score((3234.3 - 20.272305) / 2) == pytest.approx(50.0)
    assert reference_of("Walker2d-v2") == Reference(1.629008, 4592.3)
    assert reference_of("AntMaze_UMaze-v5").score(0.5) == 50.0
    assert all(reference.expert > reference.random for reference in REFERENCES.values())


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetahBack-v5", "", "halfcheetah"])
def test_unknown_environments(env_id):
    assert reference_of(env_id) is None


def test_the_datasets_own_scale_comes_first():
    metadata = DatasetMetadata(min_score=10.0, max_score=20.0)
    assert reference_of("HalfCheetah-v5", metadata).score(15.0) == 50.0
    assert reference_of("CartPole-v1", metadata).score(25.0) == 150.0
    half = dataclasses.replace(metadata, max_score=None)
    assert reference_of("HalfCheetah-v5", half) == REFERENCES["HalfCheetah"]
    assert reference_of("CartPole-v1", dataclasses.replace(metadata, max_score=10.0)) is None


@pytest.mark.parametrize(
    "dataset", [None, "x", {}, {"min_score": "a", "max_score": 3}, {"min_score": 5, "max_score": 1}]
)
def test_damaged_metadata(dataset):
    assert recorded_reference({"dataset": dataset}, "Ant-v5") == REFERENCES["Ant"]
    assert recorded_reference({"dataset": dataset}, "CartPole-v1") is None


def test_evaluations_log_it():
    class Recorder:
        def __init__(self):
            self.seen = {}

        def log(self, step, metrics):
            self.seen.update(metrics)

        def close(self):
            pass

    class Run:
        position = 7

    result = EvaluationResult([100.0, 200.0], [10, 20])
    known, unknown = Recorder(), Recorder()
    LoggingCallback([known], Every(0), reference=Reference(50.0, 250.0)).on_evaluation(Run(), result)
    LoggingCallback([unknown], Every(0)).on_evaluation(Run(), result)
    assert known.seen["eval/normalized_score"] == 50.0
    assert "eval/normalized_score" not in unknown.seen
