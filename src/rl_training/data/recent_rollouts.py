"""The latest rollouts, kept to be used again."""

from __future__ import annotations

from collections import deque
from typing import Any

from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.state import Stateful, check_keys


class RecentRollouts(Stateful):
    """A circular buffer of exported rollouts (`RolloutBuffer.export`), which checkpoints save.

    Example:
        >>> recent = RecentRollouts(2)
        >>> for number in range(3):
        ...     recent.add({"rewards": number})
        >>> [rollout["rewards"] for rollout in recent.rollouts]
        [1, 2]
    """

    def __init__(self, size: int) -> None:
        self.rollouts: deque[dict[str, Any]] = deque(maxlen=size)
        """Oldest first."""

    def add(self, rollout: dict[str, Any]) -> None:
        """Keep a rollout; the oldest one is dropped if there are too many."""
        self.rollouts.append(rollout)

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful.state_dict`."""
        return {"rollouts": list(self.rollouts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stateful.load_state_dict`."""
        check_keys("the kept rollouts", ("rollouts",), state)
        if len(state["rollouts"]) > (self.rollouts.maxlen or 0):
            raise CheckpointError(f"{len(state['rollouts'])} rollouts were kept, at most {self.rollouts.maxlen} fit")
        self.rollouts.clear()
        self.rollouts.extend(state["rollouts"])
