"""Result manifests: what was measured, how, with which versions, where and when. One JSON file per suite.

Manifests are validated when read. `None` means not recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import ConfigError, RLTrainingError
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import Regime
from rl_training.envs.atari import is_atari
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.files import read_mapping, write_text
from rl_training.experiment.schema import INVALID, build, default_of, is_section, to_plain
from rl_training.zoo.suites import Judged, Normalization, task_name

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DECISIVE = (
    "algo", "env_id", "env_kwargs", "wrappers", "num_envs", "total_timesteps",
    "normalize_obs", "normalize_reward", "normalize_clip", "algorithm",
)  # fmt: skip
"""The run settings that affect results, besides the seed."""


def config_hash(config: TrainConfig) -> str:
    """A short hash of everything that affects a run's results, except seed, versions and machine."""
    data = _decisive(config)
    decisive = [*DECISIVE, *["atari"] * is_atari(config.env_id, config.env_kwargs)]
    decisive += ["action_masks"] * config.action_masks
    decisive += ["dataset", "data", "total_updates"] * (config.regime is Regime.OFFLINE)
    values = {name: data.get(name) for name in decisive}
    if values.get("dataset") is not None:  # its folder does not matter; what it holds is in the results
        values["dataset"] = Path(values["dataset"]).name
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _decisive(value: Any) -> Any:
    """Settings as plain data, without later additions that still have their default."""
    if not is_section(value):
        return to_plain(value)
    return {
        field.name: _decisive(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if not field.metadata.get("added_later") or getattr(value, field.name) != default_of(field)
    }


@documented
@dataclass(frozen=True)
class Evaluated:
    """The result of one evaluation."""

    mean: float = setting(help="Mean undiscounted return.")
    std: float = setting(help="Standard deviation over episodes.")
    episodes: int = setting(help="How many.", ge=1)
    step: int = setting(help="Environment steps, or gradient steps on recorded data, before it.", ge=0)
    returns: list[float] | None = setting(None, "The return of each episode.")

    @classmethod
    def of(cls, result: EvaluationResult, step: int) -> Evaluated:
        """Create from an evaluation result."""
        returns = [round(value, 3) for value in result.returns]
        return cls(round(result.mean, 3), round(result.std, 3), len(returns), step, returns)


@documented
@dataclass(frozen=True)
class RunResult:
    """The result of one seed of one task."""

    seed: int = setting(help="Seed of the run.", ge=0)
    env_steps: int = setting(help="Environment steps it was trained for; 0 for recorded data.", ge=0)
    wall_seconds: float = setting(help="Seconds of training, with logs and checkpoints, without evaluations.", ge=0)
    env_steps_per_second: float = setting(help="Speed of training; of recorded data, gradient steps.", ge=0)
    date: str = setting(help="When it was run, in UTC.")
    versions: dict[str, Any] = setting(help="Versions of this package and of those that affect results.")
    hardware: dict[str, Any] = setting(help="Processor, cores, threads, device.")
    git_commit: str | None = setting(
        None, "Git commit of the working directory or of this package; `-dirty` with changes."
    )
    run: str | None = setting(None, "Name of the run directory.")
    updates: int = setting(0, "Gradient steps on recorded data.", ge=0)
    data_hash: str | None = setting(None, "SHA-256 of the content of the recorded data.")
    untrained: Evaluated | None = setting(None, "The policy before training.")
    final: Evaluated | None = setting(None, "The policy at the end of training.")
    best: Evaluated | None = setting(None, "The best checkpoint of the training, in new episodes.")
    evaluations: list[tuple[int, float, float | None]] | None = setting(
        None, "Evaluations during training: step, mean, standard deviation over episodes."
    )
    training_returns: list[tuple[int, float | None]] | None = setting(
        None, "Mean return of the last training episodes, with exploration: step, mean."
    )

    def judged(self, judge: Judged) -> Evaluated | None:
        """The evaluation that counts: final or best policy."""
        return self.final if judge == "final" else self.best


@documented
@dataclass(frozen=True)
class TaskResult:
    """A task and the results of its runs."""

    preset: str = setting(help="Name of the preset.")
    settings: dict[str, Any] = setting(help="Settings that differ from the preset.")
    algo: str = setting(help="Algorithm.")
    env_id: str = setting(help="Environment.")
    env_kwargs: dict[str, Any] = setting(help="Keyword arguments of the environment.")
    wrappers: list[Any] = setting(help="Wrappers of the environment.")
    total_timesteps: int = setting(help="Environment steps to train for.", ge=1)
    config_hash: str = setting(help="Hash of everything that affects results, except the seed.")
    judge: Judged = setting(help="Which policy is scored: final or best.")
    deterministic: bool = setting(help="Whether evaluations used deterministic actions.")
    epsilon: float = setting(help="Probability of a random action in evaluations.", ge=0, le=1)
    final_episodes: int = setting(help="Episodes of the evaluations before and after training.", ge=1)
    points: int | None = setting(help="Evaluations during training.", ge=1)
    episodes: int | None = setting(help="Episodes per evaluation during training.", ge=1)
    normalization: Normalization = setting(help="Scale of the normalised scores.")
    runs: list[RunResult] = setting(help="Results, one per seed.")
    total_updates: int = setting(0, "Gradient steps to train for on recorded data; 0 without any.", ge=0)
    dataset: str | None = setting(None, "Name of the file with the recorded data.")

    def problems(self) -> list[str]:
        """Inconsistencies within the task."""
        seeds = [run.seed for run in self.runs]
        twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        hashes = {run.data_hash for run in self.runs}
        mixed = [f"runs: their data differs: {', '.join(sorted(map(str, hashes)))}"] if len(hashes) > 1 else []
        return [f"runs: duplicate seed {seed}" for seed in twice] + mixed

    @property
    def budget(self) -> int:
        """How long each run was trained: gradient steps on recorded data, otherwise environment steps."""
        return self.total_updates or self.total_timesteps

    @property
    def name(self) -> str:
        """The display name: `dqn/cartpole double=true`."""
        return task_name(self.preset, self.settings)

    @property
    def protocol(self) -> tuple[object, ...]:
        """The evaluation protocol."""
        return self.final_episodes, self.points, self.episodes, self.deterministic, self.epsilon

    def scores(self, judge: Judged | None = None) -> list[float]:
        """The mean return of each seed, of the policy that counts or of `judge`."""
        found = [run.judged(judge or self.judge) for run in self.runs]
        return [entry.mean for entry in found if entry is not None]


@documented
@dataclass(frozen=True)
class Manifest:
    """The results of a suite."""

    format: int = setting(help="Version of this format.", ge=1)
    suite: str = setting(help="Name of the suite.")
    tasks: list[TaskResult] = setting(help="What was measured.")

    def problems(self) -> list[str]:
        """Inconsistencies within the manifest."""
        keys = [(task.name, task.judge) for task in self.tasks]
        return [f"tasks: duplicate task '{name}'" for name, judge in sorted(set(keys)) if keys.count((name, judge)) > 1]


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; all problems are reported together."""
    data = read_mapping(path)
    version = data.get("format")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ConfigError(f"{path}: has format {version}, this version reads up to {FORMAT_VERSION}")
    problems: list[str] = []
    manifest = build(Manifest, data, str(path), problems)
    if manifest is INVALID or problems:
        raise ConfigError(problems)
    assert isinstance(manifest, Manifest)
    return manifest


def manifest_of(directory: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest of a benchmark directory, if it has one; and why it cannot be shown."""
    path = directory / MANIFEST
    if not os.path.lexists(path):
        return None, []
    try:
        manifest = read_manifest(path)
    except RLTrainingError as error:
        return None, [f"the manifest is not shown: {error}"]
    return (manifest if manifest.tasks else None), []


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest atomically."""
    write_text(path, dump(to_plain(manifest)))


def dump(data: Any) -> str:
    """JSON with one entry per line, but number lists (curves) on a single line."""
    text = json.dumps(data, indent=1)
    numbers = re.compile(r"\[[\s\d.,eE+nul-]*\]")
    text = numbers.sub(lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
    pairs = re.compile(r"\[\s+(\[[^\[\]{}\"]*\](?:,\s+\[[^\[\]{}\"]*\])*)\s+\]")
    return pairs.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


def check_commits(manifest: Manifest, where: str) -> None:
    """Refuse runs whose code nobody can find again."""
    missing = [f"{task.name} seed {run.seed}" for task in manifest.tasks for run in task.runs if not run.git_commit]
    if missing:
        raise ConfigError(
            [f"{where}: {name} has no git commit; measure it in a clone of the project" for name in missing]
        )


def merge(old: Manifest, new: Manifest) -> Manifest:
    """Merge two manifests.

    New seeds replace equal ones, all seeds measured with other settings, and all without a commit.
    """
    fresh = {(task.name, task.judge): task for task in new.tasks}
    merged = [_merge_task(task, fresh.pop((task.name, task.judge), None)) for task in old.tasks]
    return Manifest(FORMAT_VERSION, new.suite, [*merged, *fresh.values()])


def _merge_task(old: TaskResult, new: TaskResult | None) -> TaskResult:
    if new is None:
        return old
    same = (old.config_hash, old.protocol, _data(old)) == (new.config_hash, new.protocol, _data(new))
    kept = [run for run in old.runs if same and run.git_commit]
    runs = {run.seed: run for run in [*kept, *new.runs]}
    return dataclasses.replace(new, runs=[runs[seed] for seed in sorted(runs)])


def _data(task: TaskResult) -> set[str | None]:
    """Hashes of the recorded data that the runs learned from."""
    return {run.data_hash for run in task.runs}


def results_dir() -> Path:
    """The package's directory of result manifests."""
    return Path(str(resources.files("rl_training"))) / "zoo" / "results"


def read_results(directory: Path) -> list[Manifest]:
    """The manifests in a directory. JSON files without `suite` (other measurements) are skipped."""
    paths = sorted(directory.glob("*.json"))
    return [read_manifest(path) for path in paths if "suite" in read_mapping(path)]


def pick(candidates: Sequence[TaskResult], current_hash: str) -> TaskResult | None:
    """The result of a task to show: prefer current settings, then known commits, the most seeds, the newest."""

    def rank(task: TaskResult) -> tuple[bool, bool, int, str]:
        known = all(run.git_commit for run in task.runs)
        newest = max((run.date for run in task.runs), default="")
        return task.config_hash == current_hash, known, len(task.runs), newest

    return max(candidates, key=rank, default=None)
