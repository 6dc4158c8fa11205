"""Shared code for the docs generators: Markdown tables, and files that know whether they are current."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rl_training.contracts.errors import MissingExtraError


class Content(Protocol):
    """The content of a generated file."""

    def is_current(self, path: Path) -> bool:
        """Whether the file already has this content."""
        ...

    def write(self, path: Path) -> None:
        """Write the content to the file."""
        ...


@dataclass(frozen=True)
class Text:
    """The text of a page."""

    text: str

    def is_current(self, path: Path) -> bool:
        """See `Content.is_current`."""
        return path.is_file() and path.read_text(encoding="utf-8") == self.text

    def write(self, path: Path) -> None:
        """See `Content.write`."""
        path.write_text(self.text, encoding="utf-8")


@dataclass(frozen=True)
class Picture:
    """An SVG plot that records a hash of its data. Equal data need not give equal bytes (extra `plot`)."""

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to draw."""
        return True

    def data(self) -> Any:
        """Everything that is drawn, as plain data."""
        return asdict(self)

    def digest(self) -> str:
        """The hash of the data. It is written into the file, and marks it as current."""
        text = json.dumps([STYLE_VERSION, type(self).__name__, self.data()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_current(self, path: Path) -> bool:
        """See `Content.is_current`."""
        return path.is_file() and f"data {self.digest()}" in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        """See `Content.write`."""
        try:
            import matplotlib
        except ImportError as error:
            raise MissingExtraError("plots of results", "plot") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        # keep text as text and derive ids from the content: small, reproducible files
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rl_training", "font.size": 8}):
            about = {"Date": None, "Creator": None, "Description": f"data {self.digest()}"}
            self.figure().savefig(path, format="svg", metadata=about)

    def figure(self) -> Any:
        """The matplotlib figure."""
        raise NotImplementedError


STYLE_VERSION = 1
"""Increase when the style of plots changes, so that existing files count as stale."""


def write_stale(stale: Mapping[Path, Content], *, check: bool) -> int:
    """Write stale files, or with `check` only list them; returns the exit code."""
    for path, content in stale.items():
        print(f"{'stale' if check else 'wrote'}: {path}")
        if not check:
            content.write(path)
    return 1 if check and stale else 0


def number(value: float, form: str = ",.1f") -> str:
    """One decimal place, with a real minus sign."""
    return f"{value:{form}}".replace("-", "−")
