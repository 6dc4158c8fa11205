"""The environment interface of the runtime, independent of how environments are created and stepped."""

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
    """Reward that is summed for the reported return; equal to `reward` unless learning uses a modified one."""
    finished: npt.NDArray[np.intp]
    """Indices of whole episodes that ended; equal to `ended` unless learning splits episodes into parts."""
    num_valid: int
    """How many environments made a transition: where `valid` is true."""


class Environments(Protocol):
    """N environments with autoreset that always return the final observation of an episode."""

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
        """The state of all environments as plain data, or a string that says why it cannot be taken."""
        ...

    def restore_snapshot(self, snapshot: Any) -> None:
        """Restore a state that `take_snapshot` returned."""
        ...

    def close(self) -> None:
        """Release the environments' resources."""
        ...


class ActionMapping(Protocol):
    """Maps the policy's actions to the environment's."""

    def to_env(self, action: AnyArray) -> AnyArray:
        """Actions [N, ...] as the environment expects them."""
        ...
