"""Train presets and write down what they reach: `python scripts/measure_presets.py ppo/cartpole --seeds 0 1 2`.

Protocol: train with the preset's settings; then 20 deterministic episodes of the final policy (not of the best
checkpoint) in environments of its own. The untrained policy is evaluated the same way.

The results are merged into the output file after every run, so this may be interrupted and run in parts: seeds that
were measured with equal settings are skipped (`--again` measures them anew), those with other settings are dropped.
Evaluations during training are turned off: they do not change what is learned, and would be counted as training time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import rl_training
from rl_training.algorithms.registry import get_spec
from rl_training.experiment.config import TrainConfig, resolve
from rl_training.experiment.files import read_json, write_json
from rl_training.experiment.metadata import collect_metadata
from rl_training.experiment.presets import get_preset

OUTPUT = Path(__file__).parents[1] / "src/rl_training/zoo/results/foundation.json"
EPISODES = 20
PROTOCOL = f"{EPISODES} episodes of the final policy, deterministic actions, undiscounted unnormalised return"
CURVE_POINTS = 20
DECISIVE = (
    "algo", "env_id", "env_kwargs", "wrappers", "num_envs", "total_timesteps",
    "normalize_obs", "normalize_reward", "normalize_clip", "algorithm",
)  # fmt: skip
"""The settings that decide the numbers, besides the seed."""


def config_hash(config: TrainConfig) -> str:
    data = config.to_dict()
    text = json.dumps({name: data[name] for name in DECISIVE}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(name: str, seed: int) -> dict[str, Any]:
    """Train one seed of one preset, and evaluate it before and after."""
    preset = get_preset(name)
    agent = getattr(rl_training, get_spec(preset.algo).title).from_preset(name, seed=seed, eval_every=0)
    every = max(1, agent.config.total_timesteps // CURVE_POINTS)
    curve: list[list[float | None]] = []

    def follow(run: Any) -> None:
        if run.env_steps >= every * (len(curve) + 1):
            recent = run.metrics().get("rollout/return_mean")  # none before the first episode ends
            curve.append([run.env_steps, None if recent is None else round(recent, 2)])

    try:
        untrained = agent.evaluate(EPISODES)
        began = time.perf_counter()
        result = agent.learn(callback=follow, progress=False)
        seconds = time.perf_counter() - began
        if result.stop_reason != "finished":
            sys.exit(f"{name} seed {seed}: {result.stop_reason}; nothing written")
        trained = agent.evaluate(EPISODES)
        about = collect_metadata(agent.config.device)
        return {
            "mean": round(trained.mean, 3),
            "std": round(trained.std, 3),
            "untrained_mean": round(untrained.mean, 3),
            "untrained_std": round(untrained.std, 3),
            "env_steps": result.env_steps,
            "wall_seconds": round(seconds, 1),
            "env_steps_per_second": round(result.env_steps / seconds),
            "training_curve": curve,
            "date": about["created"],
            "cpu": about["hardware"]["cpu"],
            "torch_threads": about["hardware"]["torch_threads"],
            "versions": about["versions"],
        }
    finally:
        agent.close()


def merge(path: Path, name: str, config: TrainConfig, seed: int, run: dict[str, Any]) -> dict[str, Any]:
    """Add one run to the file, and return the preset's entry."""
    results = read_json(path) if path.is_file() else {}
    entry = results.setdefault("presets", {}).get(name, {})
    seeds = entry.get("seeds", {}) if entry.get("config_hash") == config_hash(config) else {}
    seeds = dict(sorted({**seeds, str(seed): run}.items(), key=lambda item: int(item[0])))
    means = [run["mean"] for run in seeds.values()]
    entry = {
        "algo": config.algo,
        "env_id": config.env_id,
        "env_kwargs": config.env_kwargs,
        "total_timesteps": config.total_timesteps,
        "config_hash": config_hash(config),
        "median": statistics.median(means),
        "mean": round(statistics.fmean(means), 3),
        "untrained_median": statistics.median(run["untrained_mean"] for run in seeds.values()),
        "seeds": seeds,
    }
    results["presets"][name] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"protocol": PROTOCOL, "presets": dict(sorted(results["presets"].items()))})
    return entry


def measured(path: Path, name: str, config: TrainConfig, seed: int) -> bool:
    entry = read_json(path)["presets"].get(name, {}) if path.is_file() else {}
    return entry.get("config_hash") == config_hash(config) and str(seed) in entry["seeds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", help="names like ppo/cartpole")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--again", action="store_true", help="measure seeds again that were measured before")
    args = parser.parse_args()
    configs = {name: resolve([get_preset(name).layer()]) for name in args.presets}
    for name, config in configs.items():
        for seed in args.seeds:
            if measured(args.output, name, config, seed) and not args.again:
                print(f"{name} seed {seed}: measured before")
                continue
            run = measure(name, seed)
            entry = merge(args.output, name, config, seed, run)
            print(
                f"{name} seed {seed}: {run['mean']:.1f} +/- {run['std']:.1f} (untrained {run['untrained_mean']:.1f}), "
                f"{run['wall_seconds']:.0f} s, {run['env_steps_per_second']} steps/s; "
                f"median of {len(entry['seeds'])}: {entry['median']:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
