"""A page as a browser without scripts sees it: elements, their attributes and texts."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta"}
REMOTE = re.compile(r"(?i)^\s*(?:https?:|ftp:|file:|javascript:|//)")


class Parsed(HTMLParser):
    """All elements of a page, in order, and the texts of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, *tags: str) -> str:
        hidden = ("script", "style")
        return "\n".join(text for tag, text in self.texts if (tag in tags if tags else tag not in hidden))

    @property
    def charts(self) -> list[dict[str, Any]]:
        """The data of the charts; one whose box is missing would not be drawn."""
        (block,) = [text for tag, text in self.texts if tag == "script" and text.startswith("[")]
        charts: list[dict[str, Any]] = json.loads(block)
        boxes = [attributes.get("id") for attributes in self.of("div")]
        assert all(chart["id"] in boxes for chart in charts)
        return charts

    @property
    def videos(self) -> list[bytes]:
        head = "data:video/mp4;base64,"
        sources = [str(attributes["src"]) for attributes in self.of("video")]
        assert all(source.startswith(head) for source in sources)
        return [base64.b64decode(source.removeprefix(head), validate=True) for source in sources]


def assert_self_contained(page: Parsed) -> None:
    """Nothing is loaded, and nothing leads away: no address in any attribute, in the style, or in data for links."""
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "a"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} has {name}"
            assert not REMOTE.match(value or ""), f"{tag} {name}={value}"
            assert "url(" not in (value or "")
    assert [attributes.get("src") for attributes in page.of("script")] == [None] * len(page.of("script"))
    style = page.text("style")
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [a["content"] for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert str(policy).startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in str(policy).replace("http-equiv", "")
