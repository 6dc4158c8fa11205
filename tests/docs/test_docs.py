"""What the README and the docs say is run, and what is generated in them is current.

A page's blocks run in order, in one directory and one namespace. HTML comments before a block tell the test what to do:

    <!-- test: skip -->               not run; only what installs, opens a window, needs a network or calls make
    <!-- test: 50_000 -> 1_000 -->    a smaller number in the test's copy (several: separated by `; `)
    <!-- test: exit 2 -->             a command that must fail with that code
    <!-- test: output -->             a text block that must be what the block before it printed (`...`: anything)

A block with a title is a file: it is written, not run.
"""

from __future__ import annotations

import contextlib
import doctest
import glob
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
import pytest
from scripts import generate_docs, results_page

from rl_training import A2C, DQN, PPO, SAC
from rl_training.algorithms.registry import registry
from rl_training.cli import main
from rl_training.contracts.plugins import REGISTRIES
from rl_training.envs import wrappers

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+)(?: title=\"(?P<title>[^\"]+)\")?$")
COMMENT = re.compile(r"^<!-- test: (.+) -->$")
NOT_RUN = re.compile(
    r"^(make |git clone |cd |pip install |source |rl-training hub |rl-training .* (--render|--workers.backend ray))"
)


@dataclass
class Block:
    language: str
    title: str | None
    code: str
    line: int
    skip: bool = False
    output: bool = False
    exit_code: int = 0
    changes: list[tuple[str, str]] = field(default_factory=list)

    def small(self) -> str:
        """The code as the test runs it. A change that changes nothing is a mistake in the page."""
        code = self.code
        for old, new in self.changes:
            assert old in code, f"line {self.line}: '{old}' is not in the block"
            code = code.replace(old, new)
        return code


def blocks(path: Path) -> list[Block]:
    found: list[Block] = []
    notes: str | None = None
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if match := COMMENT.match(line):
            notes = match[1]
        elif match := FENCE.match(line):
            end = lines.index("```", number)
            block = Block(match[1], match["title"], "\n".join(lines[number:end]) + "\n", number + 1)
            for note in (notes or "").split("; ") if notes else []:
                apply_note(block, note)
            found.append(block)
            number, notes = end + 1, None
        elif line.startswith("```"):
            raise AssertionError(f"{path.name}, line {number}: a block without a language")
        elif line.strip():
            assert notes is None, f"{path.name}, line {number}: a test comment that is not before a block"
    return found


def apply_note(block: Block, note: str) -> None:
    if note == "skip":
        block.skip = True
    elif note == "output":
        block.output = True
    elif note.startswith("exit "):
        block.exit_code = int(note.removeprefix("exit "))
    else:
        old, arrow, new = note.partition(" -> ")
        assert arrow, f"line {block.line}: unknown note '{note}'"
        block.changes.append((old, new))


def commands(code: str) -> list[list[str]]:
    """The commands of a shell block, with patterns for run directories filled in."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            found.append(words)
    return found


def expand(words: list[str]) -> list[str]:
    expanded = []
    for word in words:
        if "*" in word:
            matches = glob.glob(word)
            assert len(matches) == 1, f"{word} should be one path, found {matches}"
            word = matches[0]
        expanded.append(word)
    return expanded


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RUN_PAGES = [page for page in PAGES if any(block.language in ("python", "bash") for block in blocks(page))]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A new directory and an empty namespace; what a page registers or imports is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(wrappers, "_WRAPPERS", dict(wrappers._WRAPPERS))
    for registered in REGISTRIES.values():
        monkeypatch.setattr(registered, "_added", {})
    with contextlib.suppress(ImportError):
        importlib.import_module("ale_py")  # registers its games when it is first imported, and never again
    known = set(gym.registry)
    module = types.ModuleType("docs_page")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "docs_page", module)
    yield module.__dict__
    for name in set(gym.registry) - known:
        del gym.registry[name]
    for name in [name for name, found in sys.modules.items() if _file(found).startswith(str(tmp_path))]:
        del sys.modules[name]


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_the_code_on_the_page_runs(page, reader, tmp_path, capsys):
    printed = ""
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.output:
            assert same_output(block.code, printed), f"{where}: the page says\n{block.code}\nbut it was\n{printed}"
        if block.skip or block.language not in ("python", "bash", "yaml"):
            continue
        if block.title is not None:
            write(tmp_path / block.title, block)
            continue
        capsys.readouterr()
        if block.language == "bash":
            for words in commands(block.small()):
                assert run_command(expand(words)) == block.exit_code, f"{where}: {words}\n{capsys.readouterr()}"
        elif block.language == "python":
            padding = "\n" * (block.line - 1)  # so that tracebacks name the line of the page
            exec(compile(padding + block.small(), str(page), "exec"), reader)
        captured = capsys.readouterr()
        printed = captured.out + captured.err


def write(path: Path, block: Block) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.small(), encoding="utf-8")


def run_command(words: list[str]) -> int:
    if words[:3] == ["python", "-m", "rl_training.cli"]:
        words = ["rl-training", *words[3:]]
    script = words[:2] == ["python", "scripts/results_page.py"]
    assert script or words[0] == "rl-training", f"cannot be run by the test: {words}"
    try:
        return results_page.main(words[2:]) if script else main(words[1:])
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def same_output(want: str, got: str) -> bool:
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


def _file(module: object) -> str:
    return str(getattr(module, "__file__", None) or "")


def test_contributing_example_needs_no_other_edit(tmp_path):
    """The three files of the page, put into a copy of the package, and its commands."""
    shutil.copytree(ROOT / "src", tmp_path / "src")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    written, ran = [], []
    for block in blocks(ROOT / "CONTRIBUTING.md"):
        if block.title is not None:
            assert not (tmp_path / block.title).exists(), f"{block.title} exists: the example would overwrite it"
            write(tmp_path / block.title, block)
            written.append(block.title)
        elif block.language == "bash" and not block.skip:
            for words in commands(block.small()):
                command = {"python": [], "rl-training": ["-m", "rl_training.cli"]}[words[0]]
                result = subprocess.run(
                    [sys.executable, *command, *words[1:]],
                    cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
                )  # fmt: skip
                assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
                ran.append(result.stdout)
    assert len(written) == 3
    assert "2 passed" in ran[0]
    assert "preset reinforce/cartpole" in ran[1]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_only_what_cannot_be_run_is_skipped(page):
    for block in blocks(page):
        if block.skip:
            assert block.language == "bash", f"{page.name}, line {block.line}"
            for line in block.code.splitlines():
                assert NOT_RUN.match(f"{line} "), f"{page.name}, line {block.line}: '{line}' could be run"


def test_what_is_generated_is_current():
    stale = [str(path.relative_to(ROOT)) for path in generate_docs.stale()]
    assert not stale, f"stale: {stale}; run `python scripts/generate_docs.py` "


def test_a_changed_block_and_a_changed_result_are_noticed(tmp_path):
    docs = shutil.copytree(DOCS, tmp_path / "docs")
    page = docs / "algorithms" / "ppo.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| `num_epochs` | int |", "| `num_epochs` | text |"))
    results = tmp_path / "results"
    results.mkdir()  # as if nothing had been measured
    stale = generate_docs.stale(docs, results)
    assert page in stale
    assert "| `num_epochs` | int |" in stale[page].text
    text = stale[docs / "results.md"].text
    missing = text.count("not yet measured") + text.count("published settings, not measured")
    assert missing == len(generate_docs.presets())
    assert any(path.suffix == ".yaml" for path in stale), "the headers of presets say it too"


def test_settings_beyond_a_base_are_those_that_differ():
    block = generate_docs.settings_block("RainbowConfig beyond C51Config")
    assert "| `n_step` | int | `3` |" in block
    assert "`v_min`" not in block
    assert "`noise.kind`" in generate_docs.settings_block("SACConfig beyond OffPolicyActorCriticConfig")
    assert "`noise.std`" not in generate_docs.settings_block("SACConfig beyond OffPolicyActorCriticConfig")


def test_every_algorithm_has_a_page():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for spec in registry().values():
        page = generate_docs.page_of(spec.name)
        assert page in nav
        headings = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert spec.title in headings  # what the table of algorithms links to


def test_readme_names_what_exists():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", readme):
        assert (ROOT / target).exists(), target
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = readme.partition("| Extra |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(project["optional-dependencies"])


@pytest.mark.parametrize("title", ["PPO", "SAC"])
def test_an_update_is_read_in_few_files(title):
    """The reading order names files that exist, and they stay short; blank lines count too."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Reading an update")[2]
    lines = re.search(rf"^{title}[^\n]*:\n\n((?:\|.*\n)+)", section, re.MULTILINE)[1].splitlines()[2:]
    files = [re.match(r"\| \d \| `([^`]+)` \|", line)[1] for line in lines]
    assert 4 <= len(files) <= 8
    assert sum(len((ROOT / "src/rl_training" / file).read_text().splitlines()) for file in files) <= 1_000


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
    assert named
    assert named <= targets


def test_every_metric_is_in_the_table():
    page = (DOCS / "checkpoints.md").read_text(encoding="utf-8")
    table = page.partition("| Metric | Meaning |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`(\w+/\w+)`", table))
    reported = set()
    for cls in (PPO, A2C):
        agent = cls("CartPole-v1", num_envs=2, num_steps=32, eval_every=0)
        reported |= set(agent.learn(128, progress=False).metrics)
    for cls, env_id in ((DQN, "CartPole-v1"), (SAC, "Pendulum-v1")):
        agent = cls(env_id, learning_starts=10, updates_per_step=0.1, eval_every=0)
        reported |= set(agent.learn(64, progress=False).metrics)
    assert reported - {"global_step"} <= documented
    elsewhere = {
        "rollout/success_rate",
        "time/evaluation_seconds",
        "time/checkpoint_seconds",
        "time/checkpoint_megabytes",
        "loss/value",
        "value/v_mean",
        "policy/weight_mean",
    }
    assert elsewhere >= {name for name in documented - reported if not name.startswith("eval/")}
