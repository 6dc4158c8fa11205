"""Write what the docs take from the code: `python scripts/generate_docs.py` (`--check`: only say what is stale).

- Blocks in the pages, between `<!-- generated:KIND ARGUMENT -->` and `<!-- end -->`: tables of settings, presets,
  algorithms and commands, and the names of wrappers.
- `docs/results.md`, from `src/rl_training/zoo/results/*.json` (written by `measure_presets.py`) and
  `docs/published.yaml` (what others published).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from rl_training.algorithms.registry import registry
from rl_training.cli import COMMANDS
from rl_training.contracts.schedule import Schedule
from rl_training.contracts.spec import AlgorithmConfig
from rl_training.envs.wrappers import WrapperConfig, wrapper_names
from rl_training.experiment.config import TrainConfig, resolve
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
    """The dataclasses of settings by name: the run's, and each algorithm's."""
    return {cls.__name__: cls for cls in (TrainConfig, *(spec.config for spec in registry().values()))}


def settings_block(name: str) -> str:
    """Tables of a config's settings: its own, and one for each section in it."""
    cls = config_classes()[name]
    sections = {
        field.name: field.default_factory
        for field in dataclasses.fields(cls)
        if isinstance(hint := typing.get_type_hints(cls)[field.name], type)
        and dataclasses.is_dataclass(hint)
        and field.default_factory is not dataclasses.MISSING
    }
    parts = [settings_table(cls, skip=sections)]
    for section, factory in sections.items():
        default = factory()
        parts.append(f"In the section `{section}`:")
        parts.append(settings_table(type(default), default, prefix=f"{section}."))
    return "\n\n".join(parts)


def settings_table(cls: type[Any], defaults: Any = None, prefix: str = "", skip: Iterable[str] = ()) -> str:
    """One row per field: name, type, default, range, help."""
    hints = typing.get_type_hints(cls)
    rows = [
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
    return table(["Setting", "Type", "Default", "Range", "What it does"], rows)


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
        return "`none`" if type(None) in typing.get_args(hint) else "from the algorithm"
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


def presets_block(algo: str) -> str:
    """The presets of an algorithm."""
    rows = []
    for preset in presets().values():
        if preset.algo == algo:
            config = resolve([preset.layer()])
            rows.append(
                [f"`{preset.name}`", environment_text(preset), f"{config.total_timesteps:,}", f"{config.num_envs}"]
            )
    return table(["Preset", "Environment", "Steps", "Environments side by side"], rows)


def environment_text(preset: Preset) -> str:
    """The environment of a preset, with its arguments."""
    kwargs = " ".join(f"`{key}={plain_text(value)}`" for key, value in preset.env_kwargs.items())
    return f"{preset.env_id} {kwargs}".strip()


def algorithms_block(_: str) -> str:
    """All algorithms in the registry."""
    rows = [
        [
            f"[{spec.title}](algorithms/{spec.name}.md)",
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

What the presets reach when they are really trained. Every preset is in the table; one without a measurement says so.
The numbers come from the files in `src/rl_training/zoo/results`, which `scripts/measure_presets.py` writes; to measure
a preset yourself, run `python scripts/measure_presets.py ppo/cartpole --seeds 0 1 2` in a clone.
"""

READING = """\
*Median* is the median over the seeds of each seed's mean return; *seeds* gives mean ± deviation over the evaluation
episodes of one seed each; *untrained* is the median of the same evaluation before any training. Three seeds show
whether a preset works; they are too few to rank algorithms by small differences.
"""

PUBLISHED_HEAD = """\
## Published figures

What other projects report for the same algorithm on the same environment, or on the version of it that they used. Their
protocols differ from ours and from each other's, so read them as the size to expect, not as a score to beat.
"""


def results_page(results_dir: Path = RESULTS, published_file: Path = DOCS / "published.yaml") -> str:
    """The whole results page."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results_dir.glob("*.json"))]
    measured = {name: entry for data in files for name, entry in data.get("presets", {}).items()}
    published = read_yaml(published_file)
    parts = [RESULTS_HEAD]
    parts += [f"Protocol: {protocol}.\n" for protocol in sorted({data["protocol"] for data in files})]
    rows = [result_row(preset, measured.get(name), published) for name, preset in sorted(presets().items())]
    parts.append(table(["Preset", "Steps", "Median", "Seeds", "Untrained", "Published"], rows) + "\n")
    if measured:
        parts.append(READING)
    parts += [PUBLISHED_HEAD, published_table(published) + "\n"]
    parts += [
        f"- {source['name']}: {source['protocol']} ({source['where']})." for source in published["sources"].values()
    ]
    if measured:
        parts += ["\n## Where it was measured\n", *where_lines(measured)]
    return "\n".join(parts) + "\n"


def result_row(preset: Preset, entry: dict[str, Any] | None, published: dict[str, Any]) -> list[str]:
    """One preset: what it reached, and what others published."""
    figures = []
    for figure in published["figures"]:
        if figure["preset"] == preset.name:
            other = "" if figure["env_id"] == preset.env_id else f", on {figure['env_id']}"
            figures.append(f"{number(figure['mean'])} ({published['sources'][figure['source']]['short']}{other})")
    about = [f"`{preset.name}`<br>{environment_text(preset)}", f"{preset.total_timesteps:,}"]
    if entry is None:
        return [*about, "not yet measured", "", "", "<br>".join(figures)]
    seeds = [f"{number(run['mean'])} ± {number(run['std'])}" for run in entry["seeds"].values()]
    median = f"**{number(entry['median'])}**"
    if not is_current(preset, entry):
        median += " (with earlier settings)"
    return [*about, median, "<br>".join(seeds), number(entry["untrained_median"]), "<br>".join(figures)]


def is_current(preset: Preset, entry: dict[str, Any]) -> bool:
    """Whether a preset still has the settings that were measured."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from measure_presets import config_hash
    finally:
        sys.path.pop(0)
    return bool(entry["config_hash"] == config_hash(resolve([preset.layer()])))


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


def where_lines(measured: dict[str, Any]) -> list[str]:
    """Machines, versions and dates behind the numbers."""
    runs = [run for entry in measured.values() for run in entry["seeds"].values()]
    dates = sorted(run["date"][:10] for run in runs)
    versions: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run["versions"].items():
            versions.setdefault(name, set()).add(version)
    machines = sorted({f"{run['cpu']}, {run['torch_threads']} torch thread(s) per run" for run in runs})
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
