"""Write what the docs take from the code: `python scripts/generate_docs.py` (`--check`: only say what is stale).

- Blocks in the pages, between `<!-- generated:KIND ARGUMENT -->` and `<!-- end -->`: tables of settings, presets,
  algorithms and commands, and the names of wrappers.
- `docs/results.md`, from `src/rl_training/zoo/results/*.json` (written by `measure_presets.py`) and
  `docs/published.yaml` (what others published).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rl_training.algorithms.registry import registry
from rl_training.cli import COMMANDS
from rl_training.contracts.schedule import Schedule
from rl_training.contracts.spec import AlgorithmConfig
from rl_training.envs.atari import AtariConfig
from rl_training.envs.wrappers import WrapperConfig, wrapper_names
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.presets import Preset, presets
from rl_training.experiment.schema import to_plain
from rl_training.experiment.yaml_io import read_yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "src/rl_training/zoo/results"
BLOCK = re.compile(r"(<!-- generated:(\w+)(?: ([^\n]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def config_classes() -> dict[str, type[Any]]:
    """The dataclasses of settings by name: the run's, Atari's, each algorithm's, and what these derive from."""
    configs = [base for spec in registry().values() for base in spec.config.__mro__ if dataclasses.is_dataclass(base)]
    return {cls.__name__: cls for cls in (TrainConfig, AtariConfig, *configs)}


def settings_block(argument: str) -> str:
    """Tables of a config's settings, one for each section: all (`NAME`), or what differs (`NAME beyond BASE`)."""
    name, _, base = argument.partition(" beyond ")
    tables = settings_tables(name)
    if base:
        known = settings_tables(base)
        tables = {key: [row for row in rows if row not in known.get(key, [])] for key, rows in tables.items()}
    head = ["Setting", "Type", "Default", "Range", "What it does"]
    return "\n\n".join(
        (f"In the section `{section}`:\n\n" if section else "") + table(head, rows)
        for section, rows in tables.items()
        if rows
    )


def settings_tables(name: str) -> dict[str, list[list[str]]]:
    """The rows of a config's own settings (under an empty name) and of each section in it."""
    cls = config_classes()[name]
    sections = {
        field.name: field.default_factory
        for field in dataclasses.fields(cls)
        if isinstance(hint := typing.get_type_hints(cls)[field.name], type)
        and dataclasses.is_dataclass(hint)
        and field.default_factory is not dataclasses.MISSING
    }
    tables = {"": settings_rows(cls, skip=sections)}
    for section, factory in sections.items():
        default = factory()
        tables[section] = settings_rows(type(default), default, prefix=f"{section}.")
    return tables


def settings_rows(cls: type[Any], defaults: Any = None, prefix: str = "", skip: Iterable[str] = ()) -> list[list[str]]:
    """One row per field: name, type, default, range, help."""
    hints = typing.get_type_hints(cls)
    return [
        [
            f"`{prefix}{field.name}`",
            type_text(hints[field.name]),
            default_text(field, hints[field.name], defaults),
            range_text(field),
            field.metadata["help"],
        ]
        for field in dataclasses.fields(cls)
        if field.name not in skip
    ]


def type_text(hint: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin in (tuple, list):
        items = [arg for arg in args if arg is not Ellipsis]
        count = f"{len(items)} " if origin is tuple and Ellipsis not in args else ""
        return f"list of {count}{type_text(items[0])}s"
    if origin is dict:
        return "mapping"
    names = {int: "int", float: "float", bool: "bool", str: "text", Path: "path", type(None): "none"}
    if hint in names:
        return names[hint]
    words = {Schedule: "schedule", AlgorithmConfig: "mapping", WrapperConfig: "wrapper"}
    return words.get(hint, f"`{hint.__name__}`")


def default_text(field: dataclasses.Field[Any], hint: Any, defaults: Any) -> str:
    """The default as it is written in a config file."""
    if defaults is not None:
        value = getattr(defaults, field.name)
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "`none`" if type(None) in typing.get_args(hint) else "depends"
    return f"`{plain_text(to_plain(value))}`"


def plain_text(value: Any) -> str:
    """Plain data on one line, numbers as people write them."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return f"{value:g}" if value == 0 or abs(value) >= 1e-2 else re.sub(r"\.?0*e-0?", "e-", f"{value:e}")
    if isinstance(value, list):
        return f"[{', '.join(map(plain_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {plain_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def range_text(field: dataclasses.Field[Any]) -> str:
    """The declared range of a number."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[key]} {field.metadata[key]:g}" for key in signs if field.metadata.get(key) is not None]
    return ", ".join(bounds)


def presets_block(argument: str) -> str:
    """The presets of an algorithm, or of several; or those of environments whose ids begin in some way (`ALE/`)."""
    words, rows = argument.split(), []
    begin = tuple(word for word in words if word.endswith("/"))
    for preset in presets().values():
        if preset.algo in words or preset.env_id.startswith(begin):
            config = TrainConfig.from_dict(preset.data)
            rows.append(
                [f"`{preset.name}`", environment_text(preset), f"{config.total_timesteps:,}", f"{config.num_envs}"]
            )
    return table(["Preset", "Environment", "Steps", "Environments side by side"], rows) if rows else "None yet."


def environment_text(preset: Preset, env_id: str = "") -> str:
    """The environment of a preset, or another one, with its arguments."""
    kwargs = " ".join(f"`{key}={plain_text(value)}`" for key, value in preset.env_kwargs.items())
    return f"{env_id or preset.env_id} {kwargs}".strip()


def page_of(algo: str) -> str:
    """Where in the docs an algorithm is described: the page that lists its presets."""
    for path in sorted((DOCS / "algorithms").glob("*.md")):
        for _, kind, argument, _ in BLOCK.findall(path.read_text(encoding="utf-8")):
            if kind == "presets" and algo in argument.split():
                return f"algorithms/{path.name}"
    raise ValueError(f"no page in docs/algorithms has the presets of {algo}")


def algorithms_block(_: str) -> str:
    """All algorithms in the registry."""
    rows = [
        [
            f"[{spec.title}]({page_of(spec.name)}#{spec.title.lower()})",
            f"`{spec.name}`",
            spec.layer,
            ", ".join(regime.value for regime in spec.regimes),
            ", ".join(space.__name__ for space in spec.action_spaces),
            spec.paper,
        ]
        for spec in registry().values()
    ]
    return table(["Algorithm", "`algo`", "Layer", "Data", "Actions", "Paper"], rows)


def commands_block(_: str) -> str:
    """The commands of the command line."""
    rows = []
    for name, text in COMMANDS.items():
        what, colon, example = text.partition(": ")
        rows.append([f"`{name}`", what, f"`{example}`" if colon else ""])
    return table(["Command", "What it does", "Example"], rows)


def wrappers_block(_: str) -> str:
    """The wrappers that a config may name."""
    return ", ".join(f"`{name}`" for name in wrapper_names()) + "."


BLOCKS: dict[str, Callable[[str], str]] = {
    "settings": settings_block,
    "presets": presets_block,
    "algorithms": algorithms_block,
    "commands": commands_block,
    "wrappers": wrappers_block,
}


def fill(text: str) -> str:
    """A page with its blocks written anew."""
    if not text.count("<!-- generated:") == len(BLOCK.findall(text)) == text.count("<!-- end -->"):
        raise ValueError("every `generated` comment needs its `end`, and the other way round")

    def write(match: re.Match[str]) -> str:
        head, kind, argument, end = match.groups(default="")
        return f"{head}\n{BLOCKS[kind](argument)}\n\n{end}"

    return BLOCK.sub(write, text)


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------

RESULTS_HEAD = """\
# Results

<!-- Generated by scripts/generate_docs.py; do not edit. -->

What the presets reach when they are really trained. Every preset is in a table; one without a measurement says so.
The numbers come from the files in `src/rl_training/zoo/results`, which `scripts/measure_presets.py` writes; to measure
a preset yourself, run `python scripts/measure_presets.py ppo/cartpole --seeds 0 1 2` in a clone.
"""

READING = """\
*Median* is the median over the seeds of each seed's mean return; *seeds* gives mean ± deviation over the evaluation
episodes of one seed each; *untrained* is the median of the same evaluation before any training. Three seeds show
whether a preset works; they are too few to rank algorithms by small differences. Some presets were also measured on
another version of their environment or for fewer steps, to compare with what others published.
"""

HINDSIGHT_HEAD = """\
## Hindsight

The same settings on tasks with goals, with [hindsight](algorithms/hindsight.md) and without. The tasks are in
`tests/envs/goal_tasks.py`, with their settings; `python -m scripts.measure_hindsight` measures them.
"""

MEMORY_HEAD = """\
## Memory

The same settings on tasks that ask at the end of an episode for what was shown only at its beginning, for
[RecurrentPPO](algorithms/recurrent-ppo.md) and for PPO, which has no memory. The tasks are in
`tests/envs/memory_tasks.py`, with their settings; `python -m scripts.measure_memory` measures them.
"""


class TaskKind(NamedTuple):
    """Tasks that are measured with something and without it."""

    head: str
    sides: tuple[str, str]
    columns: tuple[str, str]


TASKS = (
    TaskKind(HINDSIGHT_HEAD, ("with_her", "without_her"), ("With hindsight", "Without")),
    TaskKind(MEMORY_HEAD, ("recurrent_ppo", "ppo"), ("RecurrentPPO", "PPO")),
)

PUBLISHED_HEAD = """\
## Published figures

What other projects report for the same algorithm on the same environment, or on the version of it that they used. Their
protocols differ from ours and from each other's, so read them as the size to expect, not as a score to beat.
"""


def results_page(results_dir: Path = RESULTS, published_file: Path = DOCS / "published.yaml") -> str:
    """The whole results page."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results_dir.glob("*.json"))]
    files = [data for data in found if "presets" in data]
    measured = {name: entry for data in files for name, entry in data["presets"].items()}
    tasks = [data for data in found if "tasks" in data]
    published = read_yaml(published_file)
    parts = [RESULTS_HEAD, *protocol_lines(files)]
    if measured:
        parts.append(READING)
    head = ["Preset", "Steps", "Median", "Seeds", "Untrained", "Published"]
    for algo in sorted({preset.algo for preset in presets().values()}):
        own = [preset for _, preset in sorted(presets().items()) if preset.algo == algo]
        rows = [row for preset in own for row in result_rows(preset, measured, published)]
        parts.append(f"## {registry()[algo].title}\n\n{table(head, rows)}\n")
    parts += [tasks_part(data) for data in tasks]
    parts += [PUBLISHED_HEAD, published_table(published) + "\n"]
    parts += [
        f"- {source['name']}: {source['protocol']} ({source['where']})." for source in published["sources"].values()
    ]
    runs = [run for entry in measured.values() for run in entry["seeds"].values()]
    runs += [run for data in tasks for task in data["tasks"].values() for run in task_runs(task)]
    if runs:
        parts += ["\n## Where it was measured\n", *where_lines(runs)]
    return "\n".join(parts) + "\n"


def protocol_lines(files: Iterable[dict[str, Any]]) -> list[str]:
    """How it was measured; entries that were measured otherwise have a mark in their name."""
    lines = {f"Protocol: {data['protocol']}.\n" for data in files}
    own = {
        f"Protocol of the rows *{mark_of(name)}*: {entry['protocol']}.\n"
        for data in files
        for name, entry in data["presets"].items()
        if mark_of(name)
    }
    return [*sorted(lines), *sorted(own)]


def mark_of(name: str) -> str:
    """What sets a measurement apart besides other settings: `best` in `dqn/cartpole total_timesteps=100000 best`."""
    return "best" if name.endswith(" best") else ""


def changes_of(entry: dict[str, Any] | None) -> dict[str, Any]:
    """The settings in which a measurement differs from its preset."""
    return {} if entry is None else entry.get("changes", {})


def result_rows(preset: Preset, measured: dict[str, Any], published: dict[str, Any]) -> list[list[str]]:
    """A preset as it is, and as it was measured with other settings.

    A published figure stands in the row of its environment and number of steps; else in a row of its number of steps;
    else in the first.
    """
    entries = {preset.name: measured.get(preset.name)}
    entries.update({name: measured[name] for name in sorted(measured) if name.split()[0] == preset.name})
    configs = {name: measuring().configure(preset.name, changes_of(entry)) for name, entry in entries.items()}
    figures: dict[str, list[str]] = {name: [] for name in entries}
    for figure in published["figures"]:
        if figure["preset"] == preset.name:
            near = [name for name, config in configs.items() if config.total_timesteps == figure["steps"]]
            same = [name for name in near if configs[name].env_id == figure["env_id"]]
            name = [*same, *near, preset.name][0]
            figures[name].append(figure_text(figure, configs[name], published))
    return [result_row(preset, name, configs[name], entries[name], figures[name]) for name in entries]


def figure_text(figure: dict[str, Any], config: TrainConfig, published: dict[str, Any]) -> str:
    """A published value, its source, and in what it is about something else than the row that it stands in."""
    about = [published["sources"][figure["source"]]["short"]]
    if figure["env_id"] != config.env_id:
        about.append(f"on {figure['env_id']}")
    if figure["steps"] != config.total_timesteps:
        about.append(f"{figure['steps']:,} steps")
    return f"{number(figure['mean'])} ({', '.join(about)})"


def result_row(
    preset: Preset, name: str, config: TrainConfig, entry: dict[str, Any] | None, figures: list[str]
) -> list[str]:
    """One measurement: what it reached, and what others published."""
    shown = ("env_id", "total_timesteps")  # in columns of their own
    others = [f"`{key}={plain_text(value)}`" for key, value in changes_of(entry).items() if key not in shown]
    label = " ".join([f"`{preset.name}`", *others, *([f"*{mark_of(name)}*"] if mark_of(name) else [])])
    about = [f"{label}<br>{environment_text(preset, config.env_id)}", f"{config.total_timesteps:,}"]
    if entry is None:
        return [*about, "not yet measured", "", "", "<br>".join(figures)]
    seeds = [f"{number(run['mean'])} ± {number(run['std'])}" for run in entry["seeds"].values()]
    median = f"**{number(entry['median'])}**"
    if entry["config_hash"] != measuring().config_hash(config):
        median += " (with earlier settings)"
    return [*about, median, "<br>".join(seeds), number(entry["untrained_median"]), "<br>".join(figures)]


def tasks_part(data: dict[str, Any]) -> str:
    """Success on tasks that need something, with it and without."""
    kind = next(kind for kind in TASKS if all(kind.sides[0] in task for task in data["tasks"].values()))
    rows = [
        [f"`{name}`", f"{task['total_timesteps']:,}", *(success_text(task[side]) for side in kind.sides)]
        for name, task in data["tasks"].items()
    ]
    tasks = table(["Task", "Steps", *kind.columns], rows)
    return f"{kind.head}\nProtocol: {data['protocol']}; the median, and each seed.\n\n{tasks}\n"


def success_text(side: dict[str, Any]) -> str:
    """The median success and that of each seed, in percent."""
    if not side:
        return "not yet measured"
    seeds = ", ".join(f"{run['success_rate']:.0%}" for run in side["seeds"].values())
    return f"**{side['median']:.0%}** ({seeds})"


def task_runs(task: dict[str, Any]) -> list[dict[str, Any]]:
    """All runs of a task, on both sides."""
    sides = [side for kind in TASKS for side in kind.sides if side in task]
    return [run for side in sides for run in task[side].get("seeds", {}).values()]


def measuring() -> types.ModuleType:
    """The script that measures, which knows what a measurement's settings were."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return importlib.import_module("measure_presets")
    finally:
        sys.path.pop(0)


def published_table(published: dict[str, Any]) -> str:
    """What others published, each with its environment and source."""
    rows = [
        [
            f"`{figure['preset']}`",
            figure["env_id"],
            f"{figure['steps']:,}",
            f"{number(figure['mean'])} ± {number(figure['std'])}",
            str(figure["seeds"]),
            published["sources"][figure["source"]]["short"],
        ]
        for figure in published["figures"]
    ]
    return table(["For preset", "Measured on", "Steps", "Return", "Runs", "Source"], rows)


def where_lines(runs: list[dict[str, Any]]) -> list[str]:
    """Machines, versions and dates behind the numbers."""
    dates = sorted(run["date"][:10] for run in runs)
    versions: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run["versions"].items():
            versions.setdefault(name, set()).add(version)
    machines = sorted({f"{run['cpu']}, {run.get('torch_threads', 1)} torch thread(s) per run" for run in runs})
    return [
        f"- Dates: {dates[0]} to {dates[-1]}; {len(runs)} runs.",
        f"- Machines: {'; '.join(machines)}.",
        f"- Versions: {', '.join(f'{name} {_either(found)}' for name, found in versions.items())}.",
    ]


def _either(found: set[str]) -> str:
    return " / ".join(sorted(found))


def number(value: float) -> str:
    """One digit after the point, with a real minus sign."""
    return f"{value:,.1f}".replace("-", "−")


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def generate(docs: Path = DOCS, results_dir: Path = RESULTS) -> dict[Path, str]:
    """Every page that has something generated in it, as it should read."""
    pages = {path: fill(path.read_text(encoding="utf-8")) for path in sorted(docs.rglob("*.md"))}
    pages = {path: text for path, text in pages.items() if BLOCK.search(text)}
    return {**pages, docs / "results.md": results_page(results_dir, docs / "published.yaml")}


def stale(docs: Path = DOCS, results_dir: Path = RESULTS) -> dict[Path, str]:
    """The pages that differ from what they should read."""
    pages = generate(docs, results_dir)
    return {p: text for p, text in pages.items() if not p.exists() or p.read_text(encoding="utf-8") != text}


def main() -> int:
    """Write the pages, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    found = stale()
    for path, text in found.items():
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
