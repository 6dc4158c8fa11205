"""`rl-training hub push | pull`: agents on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting

USAGE = """usage: rl-training hub push PATH USER/NAME [options]    upload an agent with a model card
       rl-training hub pull USER/NAME [DIRECTORY]       download one as a checkpoint

Needs the extra `hub`. `rl-training hub push --help` and `rl-training hub pull --help` show the options."""


@documented
@dataclass
class PushArgs:
    """Upload an agent (its weights, no training state) and a model card with a fresh evaluation."""

    path: Annotated[Path, tyro.conf.Positional] = setting(
        help="Run directory, checkpoint, or zoo:<algo>/<environment>."
    )
    repo_id: Annotated[str, tyro.conf.Positional] = setting(help="Repository on the Hub: <user>/<name>.")
    num_episodes: int = setting(20, "Number of evaluation episodes for the model card.")
    video: bool = setting(False, "Record an episode as replay.mp4 (extra `video`).")
    private: bool = setting(False, "Create the repository as private.")
    trust: bool = setting(False, "Allow the checkpoint to name a module to import (package:Env-v0).")


@documented
@dataclass
class PullArgs:
    """Download an agent as a checkpoint. Only files that a checkpoint has are taken, and they are verified."""

    repo_id: Annotated[str, tyro.conf.Positional] = setting(help="Repository on the Hub: <user>/<name>.")
    directory: Annotated[Path | None, tyro.conf.Positional] = setting(
        None, "Directory for the checkpoint; by default the repository's name, in the working directory."
    )
    revision: str | None = setting(None, "Branch, tag or commit.")


def run(args: list[str]) -> int:
    """See the module."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    action, rest = args[0], args[1:]
    if action == "push":
        return _push(parsing.parse(PushArgs, rest, prog="rl-training hub push", description=_summary(PushArgs)))
    if action == "pull":
        return _pull(parsing.parse(PullArgs, rest, prog="rl-training hub pull", description=_summary(PullArgs)))
    raise ConfigError(f"hub: expected push or pull, got '{action}'")


def _summary(cls: type[object]) -> str:
    return str(cls.__doc__).split("\n")[0]


def _push(options: PushArgs) -> int:
    from rl_training.api.agent import load
    from rl_training.deploy.hub import require_hub

    require_hub()
    agent = load(options.path, trust=options.trust, learner_only=True)
    try:
        url = agent.push_to_hub(
            options.repo_id, num_episodes=options.num_episodes, video=options.video, private=options.private
        )
    finally:
        agent.close()
    print(f"pushed {agent} to {url}")
    return 0


def _pull(options: PullArgs) -> int:
    from rl_training.deploy.hub import download

    path = download(options.repo_id, options.directory or Path(options.repo_id.split("/")[-1]), options.revision)
    print(f"checkpoint: {path}")
    print(f"evaluate:   rl-training eval {path}")
    return 0
