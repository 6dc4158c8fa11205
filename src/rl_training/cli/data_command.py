"""`rl-training data check | info | list | convert | plot | record`: recorded datasets."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import tyro

from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError, RLTrainingError
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.text import printable
from rl_training.data.dataset import Dataset, Finding, format_findings, write_dataset
from rl_training.data.dataset_checks import check_dataset
from rl_training.data.dataset_stepping import MAX_STEPS
from rl_training.data.formats import MINARI, SUFFIXES, check_target, minari_files
from rl_training.deploy.recording import RecordConfig, record
from rl_training.envs.factory import make_env
from rl_training.experiment.checkpointing import MANIFEST
from rl_training.experiment.datasets import open_dataset
from rl_training.reports.dataset_plot import draw_dataset, require_picture

USAGE = """usage: rl-training data check SOURCE [--env ID]      what is wrong with a dataset, or looks as if it were
       rl-training data info SOURCE                 metadata and statistics
       rl-training data list [FOLDER]               the datasets in a folder, and Minari's on this machine
       rl-training data convert SOURCE OUTPUT       write it in another format; a run's replay becomes a dataset
       rl-training data plot SOURCE                 returns, lengths and action ranges as a picture (extra `plot`)
       rl-training data record POLICY --steps N --output OUTPUT
                                                    record with an agent, a mixture of agents, or `random`

SOURCE is a file (.npz, .hdf5, .parquet), minari:<id>, a saved replay, or a run directory (the replay of its newest
checkpoint). OUTPUT ends in .npz or .parquet, or is minari:<id>. `rl-training data check --help` shows the options of
`check`, and so on."""

Path_ = Annotated[str, tyro.conf.Positional]
SOURCE = "File (.npz, .hdf5, .parquet), minari:<id>, saved replay, or run directory."
OUTPUT = "Where to write it: a file that ends in .npz or .parquet, or minari:<id>."
TRUST = "Allow the files of a run to name a module to import (package:Env-v0)."
DOWNLOAD = "Fetch a Minari dataset that is not on this machine."


@documented
@dataclass
class _Source:
    """What is read."""

    source: Path_ = setting(help=SOURCE)
    env: str | None = setting(None, "Environment id, for the true spaces; `check` also steps it.")
    env_kwargs: dict[str, Any] = setting(factory=dict, help="Keyword arguments of the environment.")
    download: bool = setting(False, DOWNLOAD)
    trust: bool = setting(False, TRUST)

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[Dataset, gymnasium.Env[Any, Any] | None]]:
        """The dataset, and the environment if one is named."""
        env = None if self.env is None else make_env(self.env, self.env_kwargs)
        try:
            yield open_dataset(self.source, env=env, download=self.download, trust=self.trust), env
        finally:
            if env is not None:
                env.close()


@documented
@dataclass
class CheckArgs(_Source):
    """Say what is wrong with a dataset, or looks as if it were. Exits with 1 if there are errors."""

    max_steps: int = setting(MAX_STEPS, "Rows that are stepped again in the environment, at most.", ge=1)
    json: bool = setting(False, "Print JSON.")


@documented
@dataclass
class InfoArgs(_Source):
    """Show metadata and statistics of a dataset."""

    json: bool = setting(False, "Print JSON.")


@documented
@dataclass
class ListArgs:
    """List the datasets in a folder, and Minari's on this machine."""

    folder: Annotated[Path, tyro.conf.Positional] = setting(Path("."), "Folder to look in.")


@documented
@dataclass
class ConvertArgs(_Source):
    """Write a dataset in another format. The replay of a run becomes a dataset."""

    output: Path_ = setting("", OUTPUT)


@documented
@dataclass
class PlotArgs(_Source):
    """Draw returns, lengths and action ranges of a dataset."""

    output: Path = setting(Path("dataset.png"), "Output file: .png, .svg or .pdf.")


@documented
@dataclass(kw_only=True)
class RecordArgs(RecordConfig):
    """Record a dataset with an agent, a mixture of agents, or random actions."""

    policy: Path_ = setting(help="Run directory, checkpoint, zoo:<algo>/<environment>, or random.")
    output: str = setting("", OUTPUT)
    trust: bool = setting(False, TRUST)


def run(args: list[str]) -> int:
    """See the module."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if args[0] not in ACTIONS:
        raise ConfigError(f"data: expected {', '.join(ACTIONS)}, got '{args[0]}'")
    cls, action = ACTIONS[args[0]]
    summary = str(cls.__doc__).split("\n")[0]
    options = parsing.parse(cls, args[1:], prog=f"rl-training data {args[0]}", description=summary)
    done: int = action(options)
    return done


def _check(options: CheckArgs) -> int:
    with options.opened() as (data, env):
        findings = check_dataset(data, env, options.max_steps)
    if options.json:
        entries = [vars(finding) for finding in findings]
        print(json.dumps({"source": options.source, "hash": data.hash, **_size(data), "findings": entries}, indent=2))
    else:
        print(printable(f"{options.source}: {_headline(data)}"))
        print(format_findings(findings))
    return int(any(finding.severity == "error" for finding in findings))


def _info(options: InfoArgs) -> int:
    with options.opened() as (data, _):
        numbers, about = data.statistics().to_dict(), data.metadata.to_dict()
    places = {"observation_space": str(data.observation_space), "action_space": str(data.action_space)}
    facts = {**places, "extras": list(data.extras), "hash": data.hash}
    if options.json:
        print(json.dumps({"source": options.source, **facts, "metadata": about, "statistics": numbers}, indent=2))
        return 0
    print(printable(f"{options.source}: {_headline(data)}"))
    lines = {**about, "versions": _pairs(about.get("versions", {})), **facts, **_rows(numbers)}
    width = max(map(len, lines))
    print("\n".join(printable(f"{name:<{width}}  {value}") for name, value in lines.items() if value not in ("", [])))
    return 0


def _pairs(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _rows(numbers: dict[str, Any]) -> dict[str, str]:
    """Statistics as text; of columns, range, mean and deviation by component."""
    rows = {name: f"{value:,.6g}" for name, value in numbers.items() if isinstance(value, (int, float))}
    columns = {"actions": numbers["actions"], **numbers["observations"]}
    for name, column in columns.items():
        for kind in ("low", "high", "mean", "std"):
            rows[f"{name} {kind}"] = _numbers(column[kind])
    return rows


def _numbers(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:.4g}"
    return " ".join(map(_numbers, value[:20])) + (f" ... ({len(value)} of them)" if len(value) > 20 else "")


def _list(options: ListArgs) -> int:
    if not options.folder.is_dir():
        raise ConfigError(f"'{options.folder}' is not a directory")
    paths = [path for path in sorted(options.folder.iterdir()) if path.suffix.lower() in SUFFIXES and path.is_file()]
    paths += [path.parent for path in sorted(options.folder.glob(f"*/{MANIFEST}"))]
    names = [*map(str, paths), *(f"{MINARI}{name}" for name in minari_files.local_datasets())]
    if not names:
        print(f"no datasets in {options.folder}, and none of Minari in {minari_files.root()}")
    width = max(map(len, names), default=0)
    for name in names:
        try:
            data = open_dataset(name)
        except RLTrainingError as error:
            text = f"not readable: {error}"
        else:
            text = f"{data.num_bytes / 2**20:>8,.1f} MB  {_headline(data)}"
        print(printable(f"{name:<{width}}  {text}"))
    return 0


def _convert(options: ConvertArgs) -> int:
    if not options.output:
        raise ConfigError("output: missing; use `rl-training data convert SOURCE OUTPUT`")
    check_target(options.output)
    with options.opened() as (data, _):
        _say(data.findings)
        place = write_dataset(data, options.output)
    print(printable(f"wrote {place}: {_headline(data)}"))
    return 0


def _plot(options: PlotArgs) -> int:
    require_picture(options.output)
    with options.opened() as (data, _):
        place = draw_dataset(data, options.source, options.output)
    print(printable(f"wrote {place}"))
    return 0


def _record(options: RecordArgs) -> int:
    if not options.output:
        raise ConfigError("output: missing; say where to write the dataset, as in --output data.npz")
    check_target(options.output)
    data = record(options.policy, options, trust=options.trust)
    place = write_dataset(data, options.output)
    print(printable(f"wrote {place}: {_headline(data)}"))
    known = "with" if "log_prob" in data.extras else "without"
    print(printable(f"behaviour: {data.metadata.behaviour_policy}; {known} log-probabilities of actions"))
    return 0


def _say(findings: list[Finding]) -> None:
    if findings:
        print(format_findings(findings), file=sys.stderr)


def _size(data: Dataset) -> dict[str, Any]:
    return {"env_id": data.metadata.env_id, "transitions": len(data), "episodes": data.num_episodes}


def _headline(data: Dataset) -> str:
    returns = data.episode_returns
    place = f" of {data.metadata.env_id}" if data.metadata.env_id else ""
    return (
        f"{len(data):,} transitions in {data.num_episodes:,} episodes{place}, "
        f"return {returns.mean():,.2f} +/- {returns.std():,.2f}"
    )


ACTIONS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "check": (CheckArgs, _check),
    "info": (InfoArgs, _info),
    "list": (ListArgs, _list),
    "convert": (ConvertArgs, _convert),
    "plot": (PlotArgs, _plot),
    "record": (RecordArgs, _record),
}
