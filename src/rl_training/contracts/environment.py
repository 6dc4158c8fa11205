"""What the runtime needs of environments, whatever makes and steps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray


class VectorStep(NamedTuple):
    """One step of N environments, in the same form for every autoreset mode."""

    obs: ArrayObservation
    """Observations [N, ...] to act on next."""
    reward: AnyArray
    terminated: BoolArray
    truncated: BoolArray
    valid: BoolArray
    """False where the environment only reset itself: not a transition."""
    acting: BoolArray
    """False where the environment is about to reset itself: its `obs` is the last of an episode, not one to act on."""
    ended: npt.NDArray[np.intp]
    """Indices [K] of episodes that ended."""
    final_obs: ArrayObservation | None
    """Their true last observations [K, ...]; None when no episode ended."""
    end_info: Mapping[str, Any]
    """Infos of the last step of the episodes that ended, as arrays over all N environments."""
    score: AnyArray
    """What is reported as return when summed: the reward itself, unless learning is from another one."""
    finished: npt.NDArray[np.intp]
    """Indices of whole episodes that ended: `ended`, unless learning cuts episodes into parts."""
    num_valid: int
    """How many environments made a transition: where `valid` is true."""


class Environments(Protocol):
    """N environments that reset themselves and never lose a final observation."""

    @property
    def num_envs(self) -> int:
        """Number of environments, N."""
        ...

    def reset(self, seed: int | None = None) -> ArrayObservation:
        """Reset all, and return the first observations [N, ...]."""
        ...

    def step(self, action: AnyArray) -> VectorStep:
        """Step all; actions in the environment's own units."""
        ...

    def take_snapshot(self) -> Any:
        """The state of all environments as plain data, or a sentence that says why it cannot be taken."""
        ...

    def restore_snapshot(self, snapshot: Any) -> None:
        """Go on from a state that `take_snapshot` gave."""
        ...

    def close(self) -> None:
        """Release what the environments hold."""
        ...


class ActionMapping(Protocol):
    """From the policy's actions to the environment's."""

    def to_env(self, action: AnyArray) -> AnyArray:
        """Actions [N, ...] as the environment expects them."""
        ...
