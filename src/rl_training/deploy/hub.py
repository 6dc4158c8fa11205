"""Agents on the Hugging Face Hub: weights-only checkpoints with a model card, loaded by the safe checkpoint loader."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import CheckpointError, HubError, MissingExtraError
from rl_training.experiment.checkpointing import MANIFEST, is_checkpoint_file, load_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.yaml_io import dump_yaml
from rl_training.version import __version__

CARD, VIDEO = "README.md", "replay.mp4"
WANTED = ("*.json", "*.safetensors")

TEXT = """
# {title} on {env_id}

A {title} agent that plays `{env_id}`, trained with rl_training {version} for {steps:,} environment steps (seed {seed}).

| Episodes | Actions | Mean return | Standard deviation |
| --- | --- | --- | --- |
| {episodes} | {actions} | {mean:.2f} | {std:.2f} |
{video}
## Use

```bash
pip install '.[hub]'
rl-training hub pull {repo_id} my-agent
rl-training eval my-agent
```

```python
from rl_training import load_from_hub

agent = load_from_hub("{repo_id}")
print(agent.evaluate(num_episodes=10).mean)
```

The files are safetensors and JSON: loading them runs no code.

## Config

```yaml
{config}
```
"""


def require_hub() -> None:
    """Raise an error before any work if huggingface_hub is not installed."""
    if find_spec("huggingface_hub") is None:
        raise MissingExtraError("the Hugging Face Hub", "hub")


def model_card(
    repo_id: str, title: str, config: TrainConfig, env_steps: int, result: EvaluationResult, *, video: bool = False
) -> str:
    """The README of a repository: Hub metadata, then text for readers."""
    reached = {"type": "mean_reward", "name": "mean_reward", "value": f"{result.mean:.2f} +/- {result.std:.2f}"}
    place = {"name": config.env_id, "type": config.env_id}
    task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
    front: dict[str, Any] = {
        "library_name": "rl_training",
        "pipeline_tag": "reinforcement-learning",
        "tags": [config.env_id, title, "reinforcement-learning", "deep-reinforcement-learning", "rl_training"],
        "model-index": [{"name": title, "results": [{"task": task, "dataset": place, "metrics": [reached]}]}],
    }
    text = TEXT.format(
        title=title,
        env_id=config.env_id,
        version=__version__,
        steps=env_steps,
        seed=config.seed,
        episodes=len(result.returns),
        actions="likeliest" if config.eval_deterministic else "sampled",
        mean=result.mean,
        std=result.std,
        video=f"\n<video controls autoplay loop src='{VIDEO}'></video>\n" if video else "",
        repo_id=repo_id,
        config=config.to_yaml().rstrip(),
    )
    return f"---\n{dump_yaml(front)}---\n{text}"


def upload(folder: Path, repo_id: str, *, private: bool = False) -> str:
    """Upload a folder to one of the user's repositories; returns its URL."""
    require_hub()
    from huggingface_hub import HfApi

    with _explained(repo_id):
        api = HfApi()
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=f"rl_training {__version__}",
            delete_patterns=[*WANTED, VIDEO],  # remove files of an earlier agent
        )
    return str(url)


def download(repo_id: str, directory: Path, revision: str | None = None) -> Path:
    """Download a checkpoint and verify it. Only files that belong to a checkpoint are downloaded."""
    require_hub()
    from huggingface_hub import snapshot_download

    if os.path.lexists(directory):
        raise CheckpointError(f"{directory} exists already and is not overwritten; choose another directory")
    with _explained(repo_id):
        cached = Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(WANTED)))
    files = [file for file in sorted(cached.iterdir()) if is_checkpoint_file(file.name) and file.is_file()]
    if MANIFEST not in [file.name for file in files]:
        raise CheckpointError(f"{repo_id} is not an agent of rl_training: it has no {MANIFEST}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".hub-") as scratch:
        copy = Path(scratch) / directory.name
        copy.mkdir()
        for file in files:  # the Hub's cache uses links, which the loader does not follow
            shutil.copyfile(file, copy / file.name)
        load_checkpoint(copy)
        os.rename(copy, directory)
    return directory


@contextlib.contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Convert any exception of the Hub client into one error with a remedy."""
    try:
        yield
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise HubError(
            f"{repo_id}: {reason} (a repository is named <user>/<name>; `hf auth login` or HF_TOKEN gives access to "
            "your own)"
        ) from error
