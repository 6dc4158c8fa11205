"""What runs every algorithm names none: trainers, collectors, the wiring and the command line know regimes only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rl_training
from rl_training.algorithms.registry import registry

SOURCE = Path(rl_training.__file__).parent
FILES = sorted(
    [*(SOURCE / "runtime").rglob("*.py"), *(SOURCE / "cli").rglob("*.py"), SOURCE / "experiment" / "build.py"]
)
NAMES = sorted({name for spec in registry().values() for name in (spec.name, spec.title)})
WORD = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(NAMES)})(?![A-Za-z0-9])", re.IGNORECASE)


def names_in(source: str) -> list[str]:
    """Algorithms that code names; what only people read (docstrings, comments, help texts) may."""
    tree = ast.parse(source)
    prose = {
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in prose:
            found += [] if " " in node.value.strip() else WORD.findall(node.value)
        elif isinstance(node, ast.Name):
            found += WORD.findall(node.id)
        elif isinstance(node, ast.Attribute):
            found += WORD.findall(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for text in names for name in WORD.findall(text.replace("_", " ").replace(".", " "))]
            found += [text for text in names if text.startswith(tuple(spec.title for spec in registry().values()))]
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES])
def test_no_algorithm_is_named(path: Path) -> None:
    assert names_in(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        'if algo == "ppo":\n    pass',
        "from rl_training.algorithms.sac import SACAlgorithm",
        "from rl_training.algorithms import dqn",
        "import rl_training.algorithms.td3",
        "x = registry.PPO",
        'SPECIAL = {"rainbow": 1}',
    ],
)
def test_the_search_finds(source: str) -> None:
    assert names_in(source)


def test_the_search_leaves_prose_alone() -> None:
    assert names_in('"""Trains PPO."""\n# sac\nx = "for example: train ppo CartPole-v1"\n') == []
