"""Prioritised sampling and updates with `SumTree`, with cumulative sums, and with a binary tree in plain Python.

    python benchmarks/sum_tree.py

For each size and batch size: sample a batch in proportion to the priorities, and update the priorities of a batch. The
three are measured in turns, so that other load on the machine affects all of them. Times are CPU time of this process
in microseconds; the figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rl_training.data.sum_tree import SumTree
from rl_training.experiment.files import write_json
from rl_training.experiment.metadata import collect_metadata

OUTPUT = Path(__file__).parent / "results" / "sum_tree.json"
SIZES = (10_000, 100_000, 1_000_000)
BATCH_SIZES = (32, 256)
TURNS = 9
MIN_SECONDS = 0.02
"""Minimum duration of each measurement, so that the clock's resolution does not matter."""

Float64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Tree(Protocol):
    """The compared interface."""

    @property
    def total(self) -> float: ...

    def set(self, items: Indices, values: Float64) -> None: ...

    def find(self, masses: Float64) -> Indices: ...


class RunningSums:
    """No tree: cumulative sums over all items are computed for each batch. Updates cost nothing."""

    def __init__(self, num_items: int) -> None:
        self.values = np.zeros(num_items, np.float64)

    @property
    def total(self) -> float:
        return float(self.values.sum())

    def set(self, items: Indices, values: Float64) -> None:
        self.values[items] = values

    def find(self, masses: Float64) -> Indices:
        return np.searchsorted(self.values.cumsum(), masses, side="right")


class BinaryTree:
    """The textbook version: a heap of sums in a list, traversed item by item."""

    def __init__(self, num_items: int) -> None:
        self.num_leaves = 1 << (num_items - 1).bit_length()
        self.sums = [0.0] * (2 * self.num_leaves)

    @property
    def total(self) -> float:
        return self.sums[1]

    def set(self, items: Indices, values: Float64) -> None:
        sums = self.sums
        for item, value in zip(items.tolist(), values.tolist(), strict=True):
            node = item + self.num_leaves
            sums[node] = value
            while node > 1:
                node //= 2
                sums[node] = sums[2 * node] + sums[2 * node + 1]

    def find(self, masses: Float64) -> Indices:
        sums, found = self.sums, []
        for mass in masses.tolist():
            node = 1
            while node < self.num_leaves:
                node *= 2
                if mass >= sums[node]:
                    mass -= sums[node]
                    node += 1
            found.append(node - self.num_leaves)
        return np.array(found)


KINDS: dict[str, Callable[[int], Tree]] = {
    "sum_tree": SumTree,
    "running_sums": RunningSums,
    "python_binary_tree": BinaryTree,
}


def microseconds(action: Callable[[], object]) -> float:
    """CPU time of one call."""
    calls = 1
    while True:
        began = time.process_time()
        for _ in range(calls):
            action()
        seconds = time.process_time() - began
        if seconds >= MIN_SECONDS:
            return seconds / calls * 1e6
        calls = max(calls + 1, int(calls * MIN_SECONDS / max(seconds, MIN_SECONDS / 10) * 1.2))


def times_slower(times: list[float], reference: list[float]) -> float:
    """Median of the ratios over the turns."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def measure(size: int, batch_size: int) -> dict[str, Any]:
    """One row of the results."""
    rng = np.random.default_rng(0)
    values = rng.random(size)
    trees = {name: make(size) for name, make in KINDS.items()}
    for tree in trees.values():
        tree.set(np.arange(size), values)
    items, errors = rng.integers(size, size=batch_size), rng.random(batch_size)
    strata = (np.arange(batch_size) + rng.random(batch_size)) / batch_size
    answers = [tree.find(strata * tree.total) for tree in trees.values()]
    assert all(np.array_equal(answer, answers[0]) for answer in answers), "they do not do the same"

    def draw(tree: Tree) -> Indices:
        return tree.find(strata * tree.total)

    times: dict[str, dict[str, list[float]]] = {name: {"draw": [], "update": [], "both": []} for name in KINDS}
    for _ in range(TURNS):
        for name, tree in trees.items():
            one = times[name]
            one["draw"].append(microseconds(lambda tree=tree: draw(tree)))  # type: ignore[misc]
            one["update"].append(microseconds(lambda tree=tree: tree.set(items, errors)))  # type: ignore[misc]
            one["both"].append(one["draw"][-1] + one["update"][-1])
    medians = {
        name: {f"{part}_microseconds": round(statistics.median(found), 2) for part, found in one.items()}
        for name, one in times.items()
    }
    ratios = {name: round(times_slower(times[name]["both"], times["sum_tree"]["both"]), 2) for name in list(KINDS)[1:]}
    spread = [round(limit(times["sum_tree"]["both"]), 2) for limit in (min, max)]
    return {
        "size": size, "batch_size": batch_size, **medians, "sum_tree_both_range": spread, "times_slower": ratios,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output = parser.parse_args().output
    rows = []
    for size in SIZES:
        for batch_size in BATCH_SIZES:
            row = measure(size, batch_size)
            rows.append(row)
            both = {name: row[name]["both_microseconds"] for name in KINDS}
            print(
                f"{size:>9,} items, batch {batch_size:>3}: {both} us, times slower: {row['times_slower']}", flush=True
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    about = {"load_average": round(os.getloadavg()[0], 1), "clock": "process CPU time", "turns": TURNS}
    write_json(output, {**collect_metadata(), **about, "rows": rows})


if __name__ == "__main__":
    main()
