"""For the docs build: renames the heading `Example:` in docstrings to `Examples:`, which griffe recognises."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example: (.+)$", r"\1Examples:\n\1    \2\n", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
