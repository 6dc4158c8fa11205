"""Train the agents that ship with the package: `python scripts/make_zoo_agents.py` (or some: `ppo/cartpole ...`).

Each is trained with its preset and the changes listed below, with networks small enough to ship. If training evaluates
along the way, the best policy is kept. It is then evaluated in 100 new deterministic episodes, and not written if its
mean return is below its bar.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_training import load, train
from rl_training.api.agent import split_settings
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.experiment.agents import CHECKPOINT, RESULT
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.config import Layer, resolve
from rl_training.experiment.files import write_json
from rl_training.experiment.metadata import package_versions, utc_now
from rl_training.experiment.presets import get_preset

AGENTS = Path(__file__).parents[1] / "src/rl_training/zoo/agents"
EPISODES = 100
MAX_BYTES = 300_000


@dataclass(frozen=True)
class Recipe:
    bar: float
    """The minimum mean return for an agent to be shipped."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from the preset's."""


SMALL_Q = {"network": {"sizes": [64, 64]}}
SMALL_ACTOR = {"network": {"actor_sizes": [64, 64], "critic_sizes": [64, 64]}}
RECIPES = {
    "ppo/cartpole": Recipe(500.0),
    "trpo/cartpole": Recipe(500.0),
    "dqn/cartpole": Recipe(500.0, SMALL_Q),
    "dqn/acrobot": Recipe(-90.0, SMALL_Q),
    "trpo/mountaincar": Recipe(-115.0),
    "sac/pendulum": Recipe(-180.0, SMALL_ACTOR),
    "td3/pendulum": Recipe(-180.0, SMALL_ACTOR),
}


def make(name: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one agent, and put it into the package."""
    preset, recipe = get_preset(name), RECIPES[name]
    changes = {**split_settings(preset.algo, recipe.changes), "seed": seed, "tensorboard": False}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        layer = Layer({**changes, "output_dir": scratch, "eval_episodes": 20}, "recipe")
        result = train(resolve([preset.layer(), layer]), progress=False)
        assert result.run_dir is not None
        best = result.run_dir / "checkpoints" / "best"
        agent = load(best if best.exists() else result.run_dir)
        try:
            fresh = draw_seed(random_stream(seed, "zoo agent"))
            judged = agent.evaluate(EPISODES, deterministic=True, seed=fresh)
            saved = agent.save(Path(scratch) / CHECKPOINT, weights_only=True)
            config = agent.config
        finally:
            agent.close()
        about = {
            "env_id": config.env_id,
            "seed": seed,
            "changes": recipe.changes,
            "env_steps": load_checkpoint(saved).metadata["env_steps"],
            "mean": round(judged.mean, 2),
            "std": round(judged.std, 2),
            "episodes": EPISODES,
            "episode_seed": fresh,
            "date": utc_now().date().isoformat(),
            "versions": package_versions(),
        }
        size = sum(file.stat().st_size for file in saved.iterdir())
        seconds = time.perf_counter() - began
        print(
            f"{name} seed {seed}: {judged.mean:.1f} +/- {judged.std:.1f}, {size:,} bytes, {seconds:.0f} s", flush=True
        )
        if judged.mean < recipe.bar or size > MAX_BYTES:
            sys.exit(f"{name}: not written: the bar is {recipe.bar} and {MAX_BYTES:,} bytes. Try another --seed.")
        place = AGENTS / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        shutil.copytree(saved, place / CHECKPOINT, copy_function=shutil.copyfile)  # with default permissions
        write_json(place / RESULT, about)
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"by default all: {', '.join(RECIPES)}")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.names) - RECIPES.keys():
        parser.error(f"no recipe for {', '.join(sorted(unknown))}")
    for name in options.names or RECIPES:
        make(name, options.seed)


if __name__ == "__main__":
    main()
