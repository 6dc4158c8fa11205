"""Errors that users see. Each says what was given, what is accepted and where to change it."""

from __future__ import annotations

from collections.abc import Sequence


class RLTrainingError(Exception):
    """Base of every error that the package raises on purpose."""


class ConfigError(RLTrainingError):
    """A configuration that cannot work. Carries every problem found, not only the first."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class SpaceError(RLTrainingError):
    """An observation or action space that the package or the algorithm cannot handle."""


class EnvError(RLTrainingError):
    """An environment that cannot be made, or that breaks the Gymnasium contract."""


class NonFiniteError(RLTrainingError):
    """NaN or infinity in an observation, a reward, a loss or a gradient; the run cannot go on from it."""


class DataError(RLTrainingError):
    """Data that does not have the declared shape, type or values."""


class CheckpointError(RLTrainingError):
    """A checkpoint that is missing, damaged, of a newer format, or of another run."""


class ExportError(RLTrainingError):
    """An agent that cannot be exported, or whose exported model acts differently."""


class HubError(RLTrainingError):
    """The Hugging Face hub could not be reached, or refused the request."""


class MissingExtraError(RLTrainingError):
    """An optional dependency that is not installed; the message names the extra to install."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs an optional dependency. Install it in a clone of the repository with: "
            f"pip install '.[{extra}]'"
        )
