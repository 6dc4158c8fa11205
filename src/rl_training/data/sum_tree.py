"""Sum tree: samples one of n items in proportion to its value in O(log n), many at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.state import Stateful, check_keys

Float64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

FAN_OUT = 32
"""Children per node. More than two, because a level costs a few numpy calls, however many items are involved: a million
leaves need four levels instead of twenty."""


class SumTree(Stateful):
    """Values of n items and their sums by level; parents are summed from their children, so no errors accumulate.

    Example:
        >>> tree = SumTree(4)
        >>> tree.set(np.array([0, 2]), np.array([1.0, 3.0]))
        >>> tree.total, tree.find(np.array([0.5, 1.5])).tolist()
        (4.0, [0, 2])
    """

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.levels: list[Float64] = []
        """From the leaves to the root; each is zero-padded to a multiple of the fan-out."""
        size = num_items
        while size > 1 or not self.levels:
            self.levels.append(np.zeros(-(-size // FAN_OUT) * FAN_OUT, np.float64))
            size = self.levels[-1].size // FAN_OUT
        self.levels.append(np.zeros(1, np.float64))

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self.levels[-1][0])

    def values(self, items: Indices) -> Float64:
        """The values of some items."""
        return self.levels[0].take(items)

    def set(self, items: Indices, values: Float64) -> None:
        """Set the values (not negative) of items and update the sums above; the last of duplicate items counts."""
        self.levels[0][items] = values
        nodes = items
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            nodes = nodes // FAN_OUT
            if nodes.size > above.size:
                nodes = np.unique(nodes)
            above[nodes] = below.reshape(-1, FAN_OUT).take(nodes, axis=0).sum(axis=1)

    def find(self, masses: Float64) -> Indices:
        """For each number in [0, total), the item whose interval of the cumulative sum contains it."""
        items = np.zeros(masses.shape, np.int64)
        rows = np.arange(masses.size)
        left = masses
        for level in self.levels[-2::-1]:
            cumulated = level.reshape(-1, FAN_OUT).take(items, axis=0).cumsum(axis=1)
            # rounding may put a mass at the very end: take the last child with a nonzero value, never an empty one
            left = np.minimum(left, np.nextafter(cumulated[:, -1], 0.0))
            child = (cumulated <= left[:, None]).sum(axis=1)
            before = cumulated[rows, child - 1]
            before[child == 0] = 0.0
            left = left - before
            items = items * FAN_OUT + child
        return items

    def state_dict(self) -> dict[str, Any]:
        """The leaves; the sums are recomputed from them."""
        return {"values": self.levels[0][: self.num_items]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the leaves and recompute all sums."""
        check_keys("the priorities", ("values",), state)
        values = np.asarray(state["values"])
        if values.shape != (self.num_items,) or values.dtype != np.float64:
            raise CheckpointError(f"expected {self.num_items} priorities, got {values.dtype} of shape {values.shape}")
        if not np.isfinite(values).all() or (values < 0).any():
            raise CheckpointError("priorities must be finite and not negative")
        self.levels[0][: self.num_items] = values
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            above[: below.size // FAN_OUT] = below.reshape(-1, FAN_OUT).sum(axis=1)
