"""Upper bound of training speed: only the matrix products and convolutions of updates, and the environment.

    python benchmarks/limits.py          # about a minute

For tasks with networks large enough to be compute-bound. The products that the algorithm requires run on torch's own
kernels, in preallocated memory, with one thread or one per core, whichever is faster. Nothing else is done: no
activations, losses, optimizer, replay, Python; layers too small to matter are left out. The time of stepping the
environment is added. No implementation that uses these kernels can be faster; the gap to it shows what is left to gain.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import RESULTS, about, merge_results
from benchmarks.sides.tasks import TASKS, Task

from rl_training.envs.atari import AtariAdapter, AtariConfig, make_native_games

OUTPUT = RESULTS / "limits.json"
NATURE = ((4, 84, 32, 8, 4), (32, 20, 64, 4, 2), (64, 9, 64, 3, 1))
"""The convolutions of Mnih et al. 2015: input channels, image size, output channels, kernel size, stride."""
NATURE_LINEAR = (3136, 512)

Product = Callable[[], Any]


class Layers:
    """Matrix products of the layers of equal networks: `forward`, and backward to `weights` and `inputs`."""

    def __init__(self, num_networks: int, sizes: tuple[int, ...], batch: int, num_wanted: int = 0) -> None:
        self.forward: list[Product] = []
        self.weights: list[Product] = []
        self.inputs: list[Product] = []
        """The first is the gradient of the last `num_wanted` network inputs; it is not always needed."""
        for before, after in itertools.pairwise(sizes):
            x, gradient = torch.randn(num_networks, batch, before), torch.randn(num_networks, batch, after)
            weight = torch.randn(num_networks, before, after)
            self.forward.append(_product(x, weight))
            self.weights.append(_product(x.mT, gradient))
            wanted = weight if self.inputs else weight[:, before - num_wanted :]
            self.inputs.append(_product(gradient, wanted.mT))


class Convolutions:
    """The same for the convolutions of Mnih et al. 2015 and the layer after them."""

    def __init__(self, batch: int) -> None:
        linear = Layers(1, NATURE_LINEAR, batch, num_wanted=NATURE_LINEAR[0])
        self.forward, self.weights, self.inputs = linear.forward, linear.weights, linear.inputs
        for channels, size, new, kernel, stride in NATURE:
            x = torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last)
            weight = torch.randn(new, channels, kernel, kernel).contiguous(memory_format=torch.channels_last)
            gradient = torch.randn_like(torch.conv2d(x, weight, stride=stride))
            self.forward.append(lambda x=x, w=weight, s=stride: torch.conv2d(x, w, stride=s))
            self.weights.append(_back(gradient, x, weight, stride, [False, True, False]))
            if channels != NATURE[0][0]:  # no gradient with respect to pixels
                self.inputs.append(_back(gradient, x, weight, stride, [True, False, False]))


def _product(a: Tensor, b: Tensor) -> Product:
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2])
    return lambda: torch.bmm(a, b, out=out)


def _back(gradient: Tensor, x: Tensor, weight: Tensor, stride: int, wanted: list[bool]) -> Product:
    def product() -> Any:
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1, wanted
        )

    return product


def sac(task: Task) -> Iterator[tuple[float, list[Product]]]:
    """Per step: actor twice, critics and target critics, backward through the critics, and again with new actions."""
    inputs, actions = 17, 6
    actor = Layers(1, (inputs, *task.sizes, 2 * actions), int(task.settings["batch_size"]))
    critics = Layers(2, (inputs + actions, *task.sizes), int(task.settings["batch_size"]), actions)
    yield 1.0, 2 * actor.forward + actor.weights + actor.inputs[1:]
    yield 1.0, 3 * critics.forward + critics.weights + critics.inputs[1:] + critics.inputs


def td3(task: Task) -> Iterator[tuple[float, list[Product]]]:
    """Per step: target actor, critics and target critics, backward; every other step the actor through one critic."""
    inputs, actions = 17, 6
    actor = Layers(1, (inputs, *task.sizes, actions), int(task.settings["batch_size"]))
    batch, sizes = int(task.settings["batch_size"]), (inputs + actions, *task.sizes)
    critics, critic = (Layers(num_networks, sizes, batch, actions) for num_networks in (2, 1))
    yield 1.0, actor.forward + 2 * critics.forward + critics.weights + critics.inputs[1:]
    yield (
        1 / int(task.settings["policy_delay"]),
        actor.forward + actor.weights + actor.inputs[1:] + critic.forward + critic.inputs,
    )


def ppo_pong(task: Task) -> Iterator[tuple[float, list[Product]]]:
    """Per step: its share of acting in all environments, and of each epoch's minibatch, forward and backward."""
    batch = int(task.settings["minibatch_size"])
    acting, learning = Convolutions(task.num_envs), Convolutions(batch)
    yield 1 / task.num_envs, acting.forward
    yield int(task.settings["num_epochs"]) / batch, learning.forward + learning.weights + learning.inputs


def dqn_pong(task: Task) -> Iterator[tuple[float, list[Product]]]:
    """Per step: acting in one environment, and its share of an update: targets, values, backward."""
    acting, learning = Convolutions(1), Convolutions(int(task.settings["batch_size"]))
    yield 1.0, acting.forward
    yield float(task.settings["updates_per_step"]), 2 * learning.forward + learning.weights + learning.inputs


LIMITS = {"sac_halfcheetah": sac, "td3_halfcheetah": td3, "ppo_pong": ppo_pong, "dqn_pong": dqn_pong}


def seconds_of(function: Callable[[], Any], repeats: int) -> list[float]:
    """The time of each of several calls, after warm-up calls."""
    found = []
    for turn in range(repeats + repeats // 10):
        began = time.perf_counter()
        function()
        if turn >= repeats // 10:
            found.append(time.perf_counter() - began)
    return found


def quickest(function: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, with the faster number of threads."""
    found = []
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        found.append(statistics.median(seconds_of(function, repeats)))
    return min(found)


def seconds_of_step(task: Task, num_steps: int) -> float:
    """The time of one environment step with random actions."""
    rng = np.random.default_rng(0)
    if task.atari:
        import ale_py

        gym.register_envs(ale_py)
        config = AtariConfig()
        games = AtariAdapter(make_native_games(task.env_id, config, task.num_envs), config)
        games.reset(seed=0)
        found = seconds_of(lambda: games.step(rng.integers(0, 6, task.num_envs)), num_steps)
        games.close()
        return statistics.median(found) / task.num_envs
    env = gym.make(task.env_id)
    env.reset(seed=0)
    low, high = env.action_space.low, env.action_space.high  # type: ignore[attr-defined]
    found = seconds_of(lambda: env.step(rng.uniform(low, high).astype(np.float32)), min(num_steps, 900))
    env.close()
    return statistics.median(found)


def measure(name: str, repeats: int) -> dict[str, float]:
    """Seconds per environment step, and the resulting upper bound of speed."""
    task = TASKS[name]

    def run(products: list[Product]) -> None:
        for product in products:
            product()

    with torch.no_grad():
        arithmetic = sum(share * quickest(functools.partial(run, p), repeats) for share, p in LIMITS[name](task))
    environment = seconds_of_step(task, repeats)
    return {"arithmetic": arithmetic, "environment": environment, "steps_per_second": 1 / (arithmetic + environment)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    for name in args.task:
        found = measure(name, args.repeats)
        print(f"{name}: {found['steps_per_second']:.1f} steps/s at most", flush=True)
        merge_results(args.output, "tasks", {name: {**found, "about": about()}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
