"""Findings of a check, and the report that collects them."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "info"]
LEVELS: tuple[Level, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    level: Level
    topic: str
    message: str

    def __str__(self) -> str:
        return f"{self.level:<7}  {self.topic}: {self.message}"


def format_findings(findings: Sequence[Finding]) -> str:
    """Findings as text to print: a summary line, then one line each.

    Example:
        >>> print(format_findings([Finding("warning", "seeding", "every seed starts in the same state")]))
        1 warning.
        warning  seeding: every seed starts in the same state
    """
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS[:2]}
    parts = [f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count]
    return "\n".join([f"{', '.join(parts) or 'No problems found'}.", *map(str, findings)])


class CannotGoOn(Exception):  # noqa: N818 - not an error: what is wrong has been reported
    """The check cannot continue."""


class Report:
    """Collects findings, each kind once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}

    def add(self, level: Level, topic: str, message: str, kind: str | None = None) -> None:
        """Add a finding, unless one of the same kind (by default: with the same message) was added before."""
        self._found.setdefault((topic, kind or message), Finding(level, topic, message))

    def fatal(self, topic: str, message: str) -> CannotGoOn:
        """Add an error after which the check cannot continue; returns the exception to raise."""
        self.add("error", topic, message)
        return CannotGoOn(message)

    def findings(self) -> list[Finding]:
        """Errors first; within a level in the order in which they were found."""
        return sorted(self._found.values(), key=lambda finding: LEVELS.index(finding.level))


def error_text(error: BaseException) -> str:
    """Type and message of an exception, as at the end of a traceback."""
    return "".join(traceback.format_exception_only(error)).strip()
