"""Make the agents that ship with the package from benchmark runs: `python scripts/make_zoo_agents.py DIR ...`.

Each directory is that of a suite, finished or not: `runs/measured/*/`. Of each preset as it ships, the seed with the
best checkpoint is taken; if that is too large, one with a smaller network from the suite `agents`. It is evaluated in
100 new deterministic episodes, and shipped with its weights alone if it is good and small enough. `--pictures` makes
the animated pictures of the gallery (extra `video`): of new agents, and of those without one; else of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from rl_training import load
from rl_training.contracts.errors import RLTrainingError
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.experiment.agents import CHECKPOINT, RESULT, ZooAgent
from rl_training.experiment.checkpointing import load_checkpoint
from rl_training.experiment.files import read_mapping, write_json
from rl_training.experiment.metadata import utc_now
from rl_training.experiment.presets import presets
from rl_training.zoo.manifest import MANIFEST, RunResult, TaskResult, config_hash, read_manifest
from rl_training.zoo.suites import flat_settings, task_config

ROOT = Path(__file__).parents[1]
AGENTS = ROOT / "src/rl_training/zoo/agents"
PICTURES = ROOT / "docs/figures/agents"
EPISODES = 100
MAX_BYTES = 300_000
"""The most that an agent may take, and a picture."""
GOOD = 0.85
"""The least normalised score: 0 is a random policy, 1 the suite's reference."""
WIDTH, MAX_FRAMES, MILLISECONDS = 240, 120, 50


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A finished run whose best policy may be shipped."""

    task: TaskResult
    run: RunResult
    path: Path

    @property
    def order(self) -> tuple[bool, float]:
        """Presets as they ship come first, then better ones."""
        assert self.run.best is not None
        return bool(self.task.settings), -self.run.best.mean


def candidates(directory: Path) -> Iterator[Candidate]:
    """The runs of a suite with a best checkpoint that have the current settings of their preset."""
    if not (directory / MANIFEST).exists():
        return
    for task in read_manifest(directory / MANIFEST).tasks:
        preset = presets().get(task.preset)
        small = {key for key, _ in flat_settings(task.settings)} <= {"network"}
        if (
            preset is None
            or not small
            or config_hash(task_config(preset, task.settings, task.name)) != task.config_hash
        ):
            continue
        for run in task.runs:
            path = directory / (run.run or "") / "checkpoints" / "best"
            if run.best is not None and path.is_dir():
                yield Candidate(task, run, path)


def make(candidate: Candidate) -> str | None:
    """Evaluate a candidate and put it into the package; why not, if it is not good or small enough."""
    task, run = candidate.task, candidate.run
    agent = load(candidate.path)
    try:
        fresh = draw_seed(random_stream(run.seed, "zoo agent"))
        judged = agent.evaluate(EPISODES, deterministic=True, seed=fresh)
        with tempfile.TemporaryDirectory() as scratch:
            saved = agent.save(Path(scratch) / CHECKPOINT, weights_only=True)
            size = sum(file.stat().st_size for file in saved.iterdir())
            score = task.normalization.score(judged.mean)
            said = f"{task.name} seed {run.seed}: {judged.mean:.1f} +/- {judged.std:.1f}, {size:,} bytes"
            print(f"{said}, normalised {score:.2f}", flush=True)
            if size > MAX_BYTES:
                return f"more than {MAX_BYTES:,} bytes"
            if score < GOOD:
                return f"its normalised score is below {GOOD}"
            place = AGENTS / task.preset
            about = {
                "env_id": task.env_id,
                "seed": run.seed,
                "changes": dict(flat_settings(task.settings)),
                "env_steps": load_checkpoint(saved).metadata["env_steps"],
                "mean": round(judged.mean, 2),
                "std": round(judged.std, 2),
                "episodes": EPISODES,
                "episode_seed": fresh,
                "normalized": round(score, 3),
                "date": utc_now().date().isoformat(),
                "commit": run.git_commit,
                "versions": {name: text for name, text in run.versions.items() if isinstance(text, str)},
            }
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            shutil.copytree(saved, place / CHECKPOINT, copy_function=shutil.copyfile)  # with default permissions
            write_json(place / RESULT, about)
    finally:
        agent.close()
    return None


def make_all(directories: Sequence[Path], only: Sequence[str]) -> list[str]:
    """Make the agents of all presets in these directories; returns the names of those that were written."""
    found: dict[str, list[Candidate]] = {}
    for directory in directories:
        for candidate in candidates(directory):
            found.setdefault(candidate.task.preset, []).append(candidate)
    written = []
    for name, options in sorted(found.items()):
        if only and name not in only:
            continue
        kinds = {bool(candidate.task.settings): candidate for candidate in sorted(options, key=lambda o: o.order)[::-1]}
        for _, candidate in sorted(kinds.items()):  # the best of the preset as it ships, then of a smaller network
            problem = make(candidate)
            if problem is None:
                written.append(name)
                break
            print(f"{candidate.task.name}: not shipped: {problem}", flush=True)
    return written


def picture_of(name: str) -> Path:
    """The file with the animated picture of an agent."""
    return PICTURES / f"{name.replace('/', '-')}.webp"


def film(agent: ZooAgent) -> Path:
    """Record one episode as a small animated picture."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as scratch:
        playing = load(agent.path)
        try:
            playing.record_video(Path(scratch), seed=int(agent.result["episode_seed"]), deterministic=True)
        finally:
            playing.close()
        (video,) = Path(scratch).glob("*.mp4")
        images = [Image.fromarray(frame) for frame in frames_of(video)]
    height = round(WIDTH * images[0].height / images[0].width)
    small = [image.resize((WIDTH, height), Image.Resampling.LANCZOS) for image in images]
    for quality in (70, 50, 30, 10):
        data = io.BytesIO()
        more = {"save_all": True, "append_images": small[1:], "duration": MILLISECONDS, "loop": 0, "method": 4}
        small[0].save(data, "WEBP", quality=quality, **more)
        if data.tell() <= MAX_BYTES:
            break
        small = small[: max(20, len(small) * 3 // 4)]
    path = picture_of(agent.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.getvalue())
    return path


def frames_of(video: Path) -> list[Any]:
    """Evenly chosen frames of the beginning of a video, at most `MAX_FRAMES`."""
    import imageio.v3 as iio

    frames = list(iio.imiter(video))
    step = max(1, min(4, -(-len(frames) // MAX_FRAMES)))  # beyond four frames at once motion looks wrong
    return frames[::step][:MAX_FRAMES]


def shipped() -> dict[str, ZooAgent]:
    """The agents in the package, also those that were just written."""
    paths = {path.parent.relative_to(AGENTS).as_posix(): path.parent for path in sorted(AGENTS.glob(f"*/*/{RESULT}"))}
    return {name: ZooAgent(name, path / CHECKPOINT, read_mapping(path / RESULT)) for name, path in paths.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path, help="directories of suites")
    parser.add_argument("--only", nargs="+", default=[], help="only these presets")
    parser.add_argument("--pictures", action="store_true", help="make pictures of what was written")
    args = parser.parse_args(argv)
    try:
        written = make_all(args.directories, args.only)
        if args.pictures:
            for name, agent in shipped().items():
                wanted = name in written or (not args.directories and (not args.only or name in args.only))
                if wanted or not picture_of(name).exists():
                    path = film(agent)
                    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)
    except RLTrainingError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
