"""`rl-training eval`: evaluate a trained agent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rl_training.api.agent import load
from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.agents import is_zoo
from rl_training.experiment.files import refuse_links, safe_name


@documented
@dataclass
class EvalArgs:
    """Evaluate a run (its newest checkpoint), a checkpoint, or an agent of the zoo (zoo:ppo/CartPole-v1)."""

    path: Annotated[Path, tyro.conf.Positional] = setting(
        help="Run directory, checkpoint, or zoo:<algo>/<environment>."
    )
    env_id: str | None = setting(
        None, "Environment to evaluate in; by default the agent's own. Needed if it was trained from data without one."
    )
    num_episodes: int = setting(10, "Number of episodes.")
    seed: int | None = setting(None, "Seed of the episodes; by default derived from the run's seed.")
    stochastic: bool = setting(False, "Sample actions; by default as in the run's evaluations.")
    deterministic: bool = setting(False, "Use deterministic actions; by default as in the run's evaluations.")
    video: bool = setting(False, "Record the episodes as mp4 files (extra `video`).")
    video_dir: Path | None = setting(
        None,
        "Directory for videos; by default `videos` beside the checkpoint or in the run directory, or here for "
        "zoo agents.",
    )
    render: bool = setting(False, "Render the episodes on the screen.")
    json: bool = setting(False, "Print the result as JSON.")
    trust: bool = setting(False, "Allow the file to name a module to import (package:Env-v0).")


def run(args: list[str]) -> int:
    """See the module."""
    options = parsing.parse(EvalArgs, args, prog="rl-training eval", description=str(EvalArgs.__doc__).split("\n")[0])
    if options.num_episodes < 1:
        raise ConfigError(f"num_episodes: must be at least 1, got {options.num_episodes}")
    if options.stochastic and options.deterministic:
        raise ConfigError("--stochastic and --deterministic: use only one of them")
    agent = load(options.path, options.env_id, trust=options.trust, learner_only=True)
    deterministic = options.deterministic or (agent.config.eval_deterministic and not options.stochastic)
    try:
        if options.video:
            directory = options.video_dir or _video_dir(options.path)
            result = agent.record_video(directory, options.num_episodes, deterministic=deterministic, seed=options.seed)
        elif options.render:
            result = agent.render(options.num_episodes, deterministic=deterministic, seed=options.seed)
        else:
            result = agent.evaluate(options.num_episodes, deterministic=deterministic, seed=options.seed)
        if not options.json:
            print(f"{agent} over {len(result.returns)} episodes ({_how(deterministic, agent.config.eval_epsilon)})")
    finally:
        agent.close()
    if options.json:
        print(json.dumps({"path": str(options.path), "deterministic": deterministic, **result.as_dict()}))
        return 0
    print(
        f"mean return {result.mean:.2f} +/- {result.std:.2f}, "
        f"from {min(result.returns):.2f} to {max(result.returns):.2f}"
    )
    print(f"mean length {sum(result.lengths) / len(result.lengths):.1f}")
    if result.num_cut:
        print(f"{result.num_cut} episodes truncated after {agent.config.eval_max_steps:,} steps (eval_max_steps)")
    if result.success_rate is not None:
        print(f"success rate {result.success_rate:.2f}")
    if options.video:
        print(f"videos in {directory}")
    return 0


def _how(deterministic: bool, epsilon: float) -> str:
    """How actions were chosen, including the run's settings."""
    chosen = "deterministic actions" if deterministic else "sampled actions"
    return f"{chosen}, {100 * epsilon:g}% random actions" if epsilon > 0 else chosen


def _video_dir(path: Path) -> Path:
    """A run's `videos` directory; for a checkpoint, a directory beside it (checkpoints are never written to).

    Agents of the zoo are inside the package, so their videos go to the working directory.
    """
    if is_zoo(path):
        return Path(safe_name(path.as_posix()) + "-videos")
    if not (path / "config.yaml").exists():
        return path.parent / f"{path.name}-videos"
    refuse_links([path / "videos"], within=path)
    return path / "videos"
