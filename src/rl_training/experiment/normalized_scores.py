"""D4RL's normalised score: 0 is a random policy, 100 an expert (Fu et al. 2020, arXiv:2004.07219).

The table has the reference returns that D4RL publishes (d4rl/infos.py, commit 61b0d25). They were measured with older
versions of the environments; by convention they are used for the newer ones too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_training.data.dataset import DatasetMetadata


class Reference(NamedTuple):
    """The returns that count as 0 and as 100."""

    random: float
    expert: float

    def score(self, mean_return: float) -> float:
        """The normalised score of a return.

        Example:
            >>> Reference(-100.0, 300.0).score(0.0)
            25.0
        """
        return 100.0 * (mean_return - self.random) / (self.expert - self.random)


REFERENCES = {
    "HalfCheetah": Reference(-280.178953, 12135.0),
    "Hopper": Reference(-20.272305, 3234.3),
    "Walker2d": Reference(1.629008, 4592.3),
    "Ant": Reference(-325.6, 3879.7),
    "AdroitHandPen": Reference(96.262799, 3076.8331017826877),
    "AdroitHandHammer": Reference(-274.856578, 12794.134825156867),
    "AdroitHandDoor": Reference(-56.512833, 2880.5693087298737),
    "AdroitHandRelocate": Reference(-6.425911, 4233.877797728884),
    "PointMaze_Open": Reference(0.01, 20.66),
    "PointMaze_UMaze": Reference(23.85, 161.86),
    "PointMaze_Medium": Reference(13.13, 277.39),
    "PointMaze_Large": Reference(6.7, 273.99),
    "PointMaze_OpenDense": Reference(11.17817, 27.166538620695782),
    "PointMaze_UMazeDense": Reference(68.537689, 193.66285642381482),
    "PointMaze_MediumDense": Reference(44.264742, 297.4552547777125),
    "PointMaze_LargeDense": Reference(30.569041, 303.4857382709002),
    "AntMaze_UMaze": Reference(0.0, 1.0),
    "AntMaze_Medium": Reference(0.0, 1.0),
    "AntMaze_Large": Reference(0.0, 1.0),
    "FrankaKitchen": Reference(0.0, 4.0),
}
"""By environment id without version; D4RL's mazes, hands and kitchen under their names in gymnasium-robotics."""


def reference_of(env_id: str, metadata: DatasetMetadata | None = None) -> Reference | None:
    """The reference returns of an environment; those that a dataset states come first. None if there are none.

    Example:
        >>> reference_of("HalfCheetah-v5").score(12135.0), reference_of("CartPole-v1")
        (100.0, None)
    """
    if metadata is not None and (own := _reference(metadata.min_score, metadata.max_score)):
        return own
    return REFERENCES.get(re.sub(r"-v\d+$", "", env_id))


def recorded_reference(metadata: Mapping[str, Any], env_id: str) -> Reference | None:
    """The reference returns of a run, from its metadata file; anything may be missing or damaged there."""
    dataset = metadata.get("dataset")
    own = _reference(dataset.get("min_score"), dataset.get("max_score")) if isinstance(dataset, dict) else None
    return own or reference_of(env_id)


def _reference(low: Any, high: Any) -> Reference | None:
    known = all(isinstance(value, (int, float)) for value in (low, high))
    return Reference(float(low), float(high)) if known and high > low else None
