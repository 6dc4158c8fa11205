"""Self-contained HTML pages: style, scripts, data and videos are inline, nothing is loaded.

Content from files is escaped: `element` escapes all text, and chart data is JSON without `<`. In addition, the page's
Content-Security-Policy forbids all requests, and all scripts except its own two, which it lists by hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from rl_training.reports.records import clean

COLORS = (
    *("#2f7fc1", "#d9722b", "#2f9e6b", "#c2508f", "#8a6fd1", "#b08c1e", "#3aa0a8", "#c9504a", "#7b8794", "#6b9e2f"),
    *("#4a5fd0", "#a0522d", "#5f8f78", "#e58fa0", "#b07fd8", "#8f9e5a"),
)
"""Distinguishable on light and dark backgrounds; the first ten, in this order, also for colour-blind readers."""


class Html(str):
    """A string that is already HTML."""


Content = Html | str | int | float | None


def element(tag: str, *content: Content, **attributes: str | None) -> Html:
    """An element with escaped content; `class_` means `class`, and an empty attribute has no value."""
    named = [(name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None]
    inside = "".join(f' {name}="{html.escape(value)}"' if value else f" {name}" for name, value in named)
    return Html(f"<{tag}{inside}>{join(content)}</{tag}>")


def join(content: Iterable[Content]) -> Html:
    """Concatenate pieces, escaped unless they are HTML."""
    pieces = (part if isinstance(part, Html) else html.escape(str(part)) for part in content if part is not None)
    return Html("".join(pieces))


def section(title: str, *content: Content, id_: str | None = None) -> Html:
    """A section with a heading."""
    return element("section", element("h2", title), *content, id_=id_)


def fold(summary: str, *content: Content, open_: bool = False) -> Html:
    """A collapsible part, collapsed unless `open_`."""
    return element("details", element("summary", summary), *content, open_="" if open_ else None)


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]], *, numeric: Iterable[int] = ()) -> Html:
    """A table that scrolls if it is wider than the page."""
    right = set(numeric)

    def cells(tag: str, row: Sequence[Content]) -> Html:
        return join(element(tag, cell, class_="n" if i in right else None) for i, cell in enumerate(row))

    body = join(element("tr", cells("td", row)) for row in rows)
    header = element("thead", element("tr", cells("th", head))) if head else None
    return element("div", element("table", header, element("tbody", body)), class_="scroll")


def facts(entries: Mapping[str, Content]) -> Html:
    """A list of names and values."""
    rows = join(
        element("tr", element("th", name, scope="row"), element("td", value)) for name, value in entries.items()
    )
    return element("div", element("table", element("tbody", rows), class_="facts"), class_="scroll")


def video_element(data: bytes, caption: str) -> Html:
    """An inline mp4 video."""
    source = "data:video/mp4;base64," + base64.b64encode(data).decode("ascii")
    video = element("video", src=source, controls="", loop="", muted="", playsinline="")
    return element("figure", video, element("figcaption", caption))


def plot_text(text: str) -> str:
    """Escape text for plotly, which interprets some HTML in labels, including links."""
    return html.escape(clean(text), quote=False)


@dataclass
class Page:
    """A page under construction: its parts, and the data of its charts."""

    title: str
    parts: list[Html] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *parts: Html) -> None:
        """Append parts."""
        self.parts.extend(parts)

    def chart(
        self, title: str, traces: Sequence[Mapping[str, Any]], *, height: int, small: bool = False, **layout: Any
    ) -> Html:
        """Create a chart element to be placed by the caller; data in plotly's format, without background colours."""
        name = f"chart-{len(self.charts)}"
        chart = {"id": name, "small": small, "traces": list(traces), "layout": {"height": height, **layout}}
        self.charts.append(chart)
        box = element("div", "", id_=name, class_="chart", style=f"height:{height}px", role="img", aria_label=title)
        return element("figure", element("figcaption", title, class_="over"), box)

    def render(self) -> str:
        """The page as HTML text."""
        scripts = [_plotly(), _beside("page.js")] if self.charts else []
        hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts) or "'none'"
        policy = (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            "media-src data:; base-uri 'none'; form-action 'none'"
        )
        data = Html(safe_json(self.charts))
        body = [
            element("main", *self.parts),
            element("script", data, type_="application/json", id_="charts"),
            *(element("script", Html(script)) for script in scripts),
        ]
        head = [
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            element("title", self.title),
            element("style", Html(_beside("page.css"))),
        ]
        text = f'<!doctype html>\n<html lang="en"><head>{join(head)}</head>\n<body>{join(body)}</body></html>\n'
        return clean(text)


def safe_json(data: Any) -> str:
    """JSON that is safe inside a script element: nothing in it closes the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    # browsers hash scripts with normalised line endings
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")


def _beside(name: str) -> str:
    """The text of a file beside this module."""
    return (resources.files("rl_training") / "reports" / name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
