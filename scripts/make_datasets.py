"""Make the datasets that the offline benchmarks use: `make datasets`, or `python scripts/make_datasets.py --help`.

For each environment an agent is trained with its preset, and its checkpoints are judged in 20 episodes:

- `random`: uniformly random actions;
- `medium`: actions sampled from the first checkpoint whose mean return is at least halfway from random to the best;
- `medium-replay`: everything that the agent had seen when it was there, its replay;
- `expert`: actions sampled from the best checkpoint.

Equal seeds give equal data. What is there already is not made again. Files are written to a folder that git ignores.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_training import load, train
from rl_training.api.agent import split_settings
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.data.dataset import Dataset, DatasetError, read_dataset, write_dataset
from rl_training.deploy.recording import RANDOM, RecordConfig, record
from rl_training.experiment.checkpointing import checkpoints_of
from rl_training.experiment.config import Layer, resolve
from rl_training.experiment.datasets import open_dataset
from rl_training.experiment.presets import get_preset

KINDS = ("random", "medium", "medium-replay", "expert")
NUM_CHECKPOINTS = 20
EPISODES = 20


@dataclass(frozen=True)
class Recipe:
    """How the agent of an environment is trained."""

    preset: str
    budget: int
    """Environment steps of the training."""
    steps: int
    """Steps of each recorded dataset."""
    changes: dict[str, Any] = field(default_factory=dict)


RECIPES = {
    "pendulum": Recipe("sac/pendulum", 10_000, 100_000),
    "cartpole": Recipe("dqn/cartpole", 50_000, 100_000),
    "halfcheetah": Recipe("sac/halfcheetah", 1_000_000, 1_000_000),
}


def make(name: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Make the datasets of one environment that are not there yet."""
    preset = get_preset(recipe.preset)
    missing = [kind for kind in KINDS if not _is_made(folder / f"{name}-{kind}.npz")]
    settings = RecordConfig(env_id=preset.env_id, env_kwargs=preset.env_kwargs, steps=recipe.steps, seed=seed)
    if "random" in missing:
        _keep(record(RANDOM, settings), folder, name, "random")
    if {"medium", "medium-replay", "expert"} & set(missing):
        runs = folder / "runs" / name
        medium, expert = _choose(_checkpoints(recipe, seed, runs), seed)
        if "medium" in missing:
            _keep(record(str(medium), settings), folder, name, "medium")
        if "medium-replay" in missing:
            _keep(open_dataset(medium), folder, name, "medium-replay")
        if "expert" in missing:
            _keep(record(str(expert), settings), folder, name, "expert")
        shutil.rmtree(runs, ignore_errors=True)  # their replays take many times the space of the datasets


def _is_made(path: Path) -> bool:
    try:
        return len(read_dataset(path)) > 0
    except DatasetError:
        return False


def _checkpoints(recipe: Recipe, seed: int, runs: Path) -> list[Path]:
    """The checkpoints of the agent's training, in order."""
    preset = get_preset(recipe.preset)
    shutil.rmtree(runs, ignore_errors=True)
    every = max(1, recipe.budget // NUM_CHECKPOINTS)
    changes = {
        **split_settings(preset.algo, {**recipe.changes, "buffer_size": recipe.budget}),
        "seed": seed,
        "total_timesteps": recipe.budget,
        "checkpoint_every": every,
        "checkpoint_keep": NUM_CHECKPOINTS + 1,
        "checkpoint_best": False,
        "eval_every": 0,
        "tensorboard": False,
        "output_dir": runs,
    }
    result = train(resolve([preset.layer(), Layer(changes, "recipe")]), progress=sys.stderr.isatty())
    assert result.run_dir is not None
    return sorted(checkpoints_of(result.run_dir), key=lambda path: int(path.name.removeprefix("step_")))


def _choose(checkpoints: list[Path], seed: int) -> tuple[Path, Path]:
    """The checkpoints to record `medium` and `expert` with."""
    episodes = draw_seed(random_stream(seed, "datasets"))
    returns = []
    for path in checkpoints:
        agent = load(path, learner_only=True)
        try:
            returns.append(agent.evaluate(EPISODES, seed=episodes).mean)
        finally:
            agent.close()
        print(f"  {path.name}: mean return {returns[-1]:.1f}", flush=True)
    halfway = 0.5 * (returns[0] + max(returns))  # the first checkpoint has hardly learned
    medium = next(number for number, value in enumerate(returns) if value >= halfway)
    return checkpoints[medium], checkpoints[int(np.argmax(returns))]


def _keep(data: Dataset, folder: Path, name: str, kind: str) -> None:
    policy = data.metadata.behaviour_policy.replace(str(folder), "").replace("/runs/", "")
    about = f"{kind} data of {data.metadata.env_id}, made by scripts/make_datasets.py"
    data.metadata = dataclasses.replace(data.metadata, description=about, behaviour_policy=policy)
    path = write_dataset(data, folder / f"{name}-{kind}.npz")
    returns = data.episode_returns
    print(f"{path}: {len(data):,} transitions, return {returns.mean():.1f} +/- {returns.std():.1f}", flush=True)


def main(args: list[str] | None = None) -> None:
    """Make the datasets that the command line names."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"by default all: {', '.join(RECIPES)}")
    parser.add_argument("--output", type=Path, default=Path("datasets"), help="folder for the files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=int, help="steps of the agents' training; by default each has its own")
    parser.add_argument("--steps", type=int, help="steps of each recorded dataset; by default each has its own")
    options = parser.parse_args(args)
    if unknown := set(options.names) - RECIPES.keys():
        parser.error(f"no recipe for {', '.join(sorted(unknown))}")
    for name in options.names or RECIPES:
        recipe = RECIPES[name]
        recipe = dataclasses.replace(
            recipe, budget=options.budget or recipe.budget, steps=options.steps or recipe.steps
        )
        began = time.perf_counter()
        make(name, recipe, options.seed, options.output)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
