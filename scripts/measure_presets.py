"""Train presets and write down what they reach: `python scripts/measure_presets.py ppo/cartpole --seeds 0 1 2`.

Protocol: train with the preset's settings; then 20 deterministic episodes of the final policy (not of the best
checkpoint) in environments of its own. The untrained policy is evaluated the same way. With `--best` the policy is the
best of 20 that are evaluated along the way, and the 20 episodes are fresh ones.

The results are merged into the output file after every run, so this may be interrupted and run in parts: seeds that
were measured with equal settings are skipped (`--again` measures them anew), those with other settings are dropped.
Evaluations during training do not change what is learned, and are not counted as training time.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rl_training
from rl_training.algorithms.registry import get_spec
from rl_training.api.agent import Agent, split_settings
from rl_training.contracts.spec import Regime
from rl_training.envs.atari import is_atari
from rl_training.experiment.config import Layer, TrainConfig, resolve
from rl_training.experiment.files import read_json, write_json
from rl_training.experiment.metadata import collect_metadata
from rl_training.experiment.presets import get_preset
from rl_training.experiment.yaml_io import parse_yaml

RESULTS = Path(__file__).parents[1] / "src/rl_training/zoo/results"
EPISODES = 20
CHECKPOINT_EPISODES = 10
CURVE_POINTS = 20
PROTOCOL = f"{EPISODES} episodes of the final policy, deterministic actions, undiscounted unnormalised return"
BEST_PROTOCOL = (
    f"{EPISODES} fresh episodes of the best of {CURVE_POINTS} policies, each judged by {CHECKPOINT_EPISODES} episodes "
    "during training; deterministic actions, undiscounted unnormalised return"
)
DECISIVE = (
    "algo", "env_id", "env_kwargs", "wrappers", "num_envs", "total_timesteps",
    "normalize_obs", "normalize_reward", "normalize_clip", "algorithm",
)  # fmt: skip
"""The settings that decide the numbers, besides the seed."""


def config_hash(config: TrainConfig) -> str:
    data = config.to_dict()
    decisive = [*DECISIVE, *["atari"] * is_atari(config.env_id, config.env_kwargs)]
    text = json.dumps({name: data[name] for name in decisive}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def configure(name: str, changes: Mapping[str, Any]) -> TrainConfig:
    """A preset with other settings: fields of `TrainConfig` or of the algorithm's config."""
    preset = get_preset(name)
    place = {key: value for key, value in changes.items() if key == "env_id"}
    if preset.is_family:
        place.setdefault("env_id", preset.env_id)
    settings = {key: value for key, value in changes.items() if key != "env_id"}
    return resolve([preset.layer(), Layer({**split_settings(preset.algo, settings), **place}, "--set")])


class Follower:
    """Writes down the learning curve, and if asked to keeps the policy that does best along the way."""

    def __init__(self, agent: Agent, best: bool) -> None:
        self.agent = agent
        self.best = best
        self.every = max(1, agent.config.total_timesteps // CURVE_POINTS)
        self.curve: list[list[float | None]] = []
        self.evaluations: list[list[float]] = []
        self.best_weights: dict[str, Any] = {}
        self.seconds = 0.0
        """Time that the evaluations took."""

    def __call__(self, run: Any) -> None:
        if run.env_steps < self.every * (len(self.curve) + 1):
            return
        recent = run.metrics().get("rollout/return_mean")  # none before the first episode ends
        self.curve.append([run.env_steps, None if recent is None else round(recent, 2)])
        if self.best:
            began = time.perf_counter()
            mean = self.agent.evaluate(CHECKPOINT_EPISODES, seed=len(self.curve)).mean
            if all(mean > earlier for _, earlier in self.evaluations):
                self.best_weights = copy.deepcopy(run.policy.state_dict())
            self.evaluations.append([run.env_steps, round(mean, 2)])
            self.seconds += time.perf_counter() - began


def measure(config: TrainConfig, seed: int, *, best: bool = False) -> dict[str, Any]:
    """Train one seed, and evaluate it before and after."""
    agent: Agent = getattr(rl_training, get_spec(config.algo).title)(config.replace(seed=seed, eval_every=0))
    follower = Follower(agent, best)
    try:
        untrained = agent.evaluate(EPISODES)
        began = time.perf_counter()
        result = agent.learn(callback=follower, progress=False)
        seconds = time.perf_counter() - began - follower.seconds
        if result.stop_reason != "finished":
            sys.exit(f"{config.algo} {config.env_id} seed {seed}: {result.stop_reason}; nothing written")
        if best:
            agent.policy.load_state_dict(follower.best_weights)  # type: ignore[attr-defined]
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
            "training_curve": follower.curve,
            **({"evaluations": follower.evaluations} if best else {}),
            "date": about["created"],
            "cpu": about["hardware"]["cpu"],
            "torch_threads": about["hardware"]["torch_threads"],
            "versions": about["versions"],
        }
    finally:
        agent.close()


def merge(path: Path, name: str, config: TrainConfig, seed: int, run: dict[str, Any], about: Mapping[str, Any]) -> Any:
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
        **about,
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


def output_file(config: TrainConfig) -> Path:
    on_policy = Regime.ON_POLICY in get_spec(config.algo).regimes
    return RESULTS / ("foundation.json" if on_policy else "off_policy.json")


def change(text: str) -> tuple[str, Any]:
    """`key=value`, with the value read as YAML."""
    key, equals, value = text.partition("=")
    if not equals:
        sys.exit(f"--set: expected KEY=VALUE, got '{text}'")
    return key, parse_yaml(value, f"--set {key}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", help="names like ppo/cartpole")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings, in YAML")
    parser.add_argument("--best", action="store_true", help="evaluate the best policy on the way, not the final one")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="by default a file of the package's results")
    parser.add_argument("--again", action="store_true", help="measure seeds again that were measured before")
    args = parser.parse_args()
    changes = dict(map(change, args.set))
    suffix = "".join(f" {text}" for text in args.set) + " best" * args.best
    about = {"protocol": BEST_PROTOCOL if args.best else PROTOCOL, "changes": changes}
    configs = {f"{name}{suffix}": configure(name, changes) for name in args.presets}
    for name, config in configs.items():
        output = args.output or output_file(config)
        for seed in args.seeds:
            if measured(output, name, config, seed) and not args.again:
                print(f"{name} seed {seed}: measured before")
                continue
            run = measure(config, seed, best=args.best)
            entry = merge(output, name, config, seed, run, about)
            print(
                f"{name} seed {seed}: {run['mean']:.1f} +/- {run['std']:.1f} (untrained {run['untrained_mean']:.1f}), "
                f"{run['wall_seconds']:.0f} s, {run['env_steps_per_second']} steps/s; "
                f"median of {len(entry['seeds'])}: {entry['median']:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
