"""Generate the parts of the docs that come from code: `python scripts/generate_docs.py` (`--check`: list stale ones).

- Blocks in the pages, between `<!-- generated:KIND ARGUMENT -->` and `<!-- end -->`: tables of settings, presets,
  algorithms, commands, search spaces and trained agents, and the names of wrappers.
- The results page and its plots, as `results_page.py` writes them.
- The line in each preset's file that says whether it is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts import results_page
from scripts.make_zoo_agents import picture_of
from scripts.pages import Content, Text, number, write_stale

from rl_training.algorithms.registry import own_algorithms
from rl_training.cli import COMMANDS
from rl_training.envs.atari import AtariConfig
from rl_training.envs.wrappers import wrapper_names
from rl_training.experiment.agents import zoo_agents
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.files import read_json
from rl_training.experiment.presets import presets
from rl_training.tuning.search_space import declared, space_to_plain
from rl_training.tuning.tune import TuneConfig
from rl_training.zoo.descriptions import presets_table, settings_text, table
from rl_training.zoo.manifest import Manifest, read_results, results_dir
from rl_training.zoo.measured import measured_presets
from rl_training.zoo.suites import Normalization, Protocol, SuiteFile, TaskFile, plain_text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PRESETS = results_dir().parent / "presets"
BLOCK = re.compile(r"(<!-- generated:(\w+)(?: ([^\n]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------------------------------


def config_classes() -> dict[str, type[Any]]:
    """The config dataclasses by name: of a run, Atari, a study, the algorithms, and their base classes."""
    configs = [
        base for spec in own_algorithms().values() for base in spec.config.__mro__ if dataclasses.is_dataclass(base)
    ]
    suite = (SuiteFile, TaskFile, Protocol, Normalization)
    return {cls.__name__: cls for cls in (TrainConfig, AtariConfig, TuneConfig, *suite, *configs)}


def settings_block(argument: str) -> str:
    """Tables of a config's settings, one per section: all (`NAME`), or only the differences (`NAME beyond BASE`)."""
    name, _, base = argument.partition(" beyond ")
    classes = config_classes()
    return settings_text(classes[name], classes[base] if base else None)


def presets_block(argument: str) -> str:
    """The presets of one or more algorithms, or of environments whose ids have a prefix (`ALE/`)."""
    words = argument.split()
    begin = tuple(word for word in words if word.endswith("/"))
    found = presets_table(p for p in presets().values() if p.algo in words or p.env_id.startswith(begin))
    curves = [curves_text(word) for word in words if word in own_algorithms()]
    return "\n\n".join([found, *curves])


def curves_text(algo: str) -> str:
    """An algorithm's own learning curves, for its page in `docs/algorithms`."""
    title = own_algorithms()[algo].title
    if not results_page.curves_of_algorithm(algo, all_results()):
        return f"No preset of {title} has learning curves yet; see the [results](../results.md)."
    picture = f"![Learning curves of {title}](../figures/{results_page.curves_name(algo)}.svg)"
    return f"{picture}\n\nThe presets of {title} as they ship: see the [results](../results.md) for how to read it."


@functools.cache
def all_results() -> list[Manifest]:
    """The package's result manifests."""
    return read_results(results_dir())


def page_of(algo: str) -> str:
    """The docs page of an algorithm: the page that lists its presets."""
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
        for spec in own_algorithms().values()
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


def search_block(_: str) -> str:
    """The search space of `tune`: each setting, its range or choices, and the algorithms they apply to."""
    algorithms: dict[tuple[str, str], list[str]] = {}
    for spec in own_algorithms().values():
        for name, entry in space_to_plain(declared(spec.config)).items():
            algorithms.setdefault((name, search_text(entry)), []).append(spec.name)
    everywhere = len(own_algorithms())
    rows = [
        [f"`{name}`", text, "all" if len(algos) == everywhere else ", ".join(f"`{algo}`" for algo in algos)]
        for (name, text), algos in sorted(algorithms.items())
    ]
    return table(["Setting", "Is searched", "Of"], rows)


def search_text(entry: Any) -> str:
    """A range or choices as text."""
    if isinstance(entry, list):
        return ", ".join(f"`{plain_text(value)}`" for value in entry)
    if "same_as" in entry:
        return f"the same as `{entry['same_as']}`"
    return f"`{plain_text(entry['low'])}` to `{plain_text(entry['high'])}`" + (", by factors" if "log" in entry else "")


def agents_block(_: str) -> str:
    """The trained agents that ship with the package."""
    rows = []
    for agent in zoo_agents().values():
        result = agent.result
        changes = " ".join(f"`{key}={plain_text(value)}`" for key, value in result["changes"].items())
        size = sum(file.stat().st_size for file in agent.path.iterdir())
        mean = f"{result['mean']:.1f} ± {result['std']:.1f}"
        rows.append(
            [
                f"`{agent.address}`",
                mean,
                f"{result['episodes']}",
                f"{result['env_steps']:,}",
                changes,
                f"{size / 1000:.0f} kB",
            ]
        )
    return table(["Agent", "Return", "Episodes", "Steps of training", "Changes to its preset", "Size"], rows)


def gallery_block(_: str) -> str:
    """The trained agents, each with its animated picture."""
    parts = []
    for agent in zoo_agents().values():
        picture = f"figures/agents/{picture_of(agent.name).name}"
        result = agent.result
        parts.append(
            f"### {agent.name}\n\n![{agent.name} in {agent.env_id}]({picture})\n\n"
            f"{agent.env_id}, mean return {number(result['mean'])} ± {number(result['std'])} over {result['episodes']} "
            f"episodes, after {result['env_steps']:,} steps: `rl-training eval {agent.address}`"
        )
    return "\n\n".join(parts)


def curves_block(name: str) -> str:
    """Progress of runs recorded by `collect_curves.py`: evaluations, with the training returns beside them."""
    rows = []
    for run in read_json(ROOT / "benchmarks" / "results" / f"{name}.json")["runs"]:
        for entry in run["evaluations"]:
            # the latest value up to then
            seen = max(
                (e for e in run["training"] if e["step"] <= entry["step"]), key=lambda e: e["step"], default=None
            )
            rows.append(
                [
                    f"`{run['algo']}`, seed {run['seed']}",
                    f"{entry['step']:,}",
                    f"{number(entry['mean'])} ± {number(entry['std'])}",
                    "" if seen is None else number(seen["return"]),
                    "" if seen is None else f"{seen['seconds'] / 60:.0f} min",
                ]
            )
    return table(["Run", "Steps", "Evaluation", "Training, last 100 games", "Time on the clock"], rows)


BLOCKS: dict[str, Callable[[str], str]] = {
    "curves": curves_block,
    "settings": settings_block,
    "presets": presets_block,
    "algorithms": algorithms_block,
    "commands": commands_block,
    "wrappers": wrappers_block,
    "search": search_block,
    "agents": agents_block,
    "gallery": gallery_block,
}


def fill(text: str) -> str:
    """A page with its blocks regenerated."""
    if not text.count("<!-- generated:") == len(BLOCK.findall(text)) == text.count("<!-- end -->"):
        raise ValueError("every `generated` comment needs its `end`, and the other way round")

    def write(match: re.Match[str]) -> str:
        head, kind, argument, end = match.groups(default="")
        return f"{head}\n{BLOCKS[kind](argument)}\n\n{end}"

    return BLOCK.sub(write, text)


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def generate(docs: Path = DOCS, results: Path | None = None) -> dict[Path, Content]:
    """Every page with generated content, and every plot, in their current form."""
    pages = {path: fill(path.read_text(encoding="utf-8")) for path in sorted(docs.rglob("*.md"))}
    blocks = {path: Text(text) for path, text in pages.items() if BLOCK.search(text)}
    results = results or results_dir()
    return {**blocks, **headers(results), **results_page.contents(docs, results)}


def headers(results: Path) -> dict[Path, Content]:
    """The package's preset files, each with the line that says whether it is measured."""
    found = measured_presets(read_results(results)).values()
    own = [about for about in found if about.preset.path.is_relative_to(PRESETS)]
    return {about.preset.path: Text(about.with_header(about.preset.path.read_text("utf-8"))) for about in own}


def stale(docs: Path = DOCS, results: Path | None = None) -> dict[Path, Content]:
    """The files that differ from their current form."""
    return {path: content for path, content in generate(docs, results).items() if not content.is_current(path)}


def main() -> int:
    """Write the pages, or list the stale ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    return write_stale(stale(), check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
