"""The pages in a real browser: they draw, play and adapt, request nothing, and run nothing that they were given."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_training.cli import main
from tests.reports.chromium import Tab, chromium, find_chromium
from tests.reports.made_up import write_run

pytestmark = pytest.mark.browser

NASTY = '</script><script>window.harm = 1</script><img src=x onerror="window.harm = 1"><a href="https://example.org/">'
DRAWN = "document.documentElement.hasAttribute('data-drawn')"
INK = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    program = find_chromium()
    if program is None:
        pytest.fail("these tests need Chromium: `apt-get install chromium`, or your system's package of it")
    with chromium(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def opened(tab: Tab) -> Iterator[Tab]:
    """The tab at the size of a desk, in light, with nothing noted yet."""
    tab.requests.clear()
    tab.complaints.clear()
    tab.size(1280, 900)
    tab.scheme("light")
    yield tab
    tab.call("Page.navigate", url="about:blank")


def assert_quiet(tab: Tab, page: Path) -> None:
    assert tab.requests == [page.resolve().as_uri()]
    assert tab.complaints == []


def fits(tab: Tab) -> bool:
    return bool(tab.run("document.documentElement.scrollWidth <= window.innerWidth"))


def test_a_run_is_shown_with_curves_and_a_film(opened: Tab, suite: Path, tmp_path: Path) -> None:
    run = shutil.copytree(suite / "ppo-0", tmp_path / "ppo-0")
    assert main(["report", str(run)]) == 0
    page = run / "report.html"
    opened.open(page)
    opened.wait(DRAWN)
    lines = (
        "[...document.querySelectorAll('#chart-0 .scatterlayer path.js-line')].filter(p => p.getAttribute('d')).length"
    )
    assert opened.run(lines) == 2
    assert opened.run("document.querySelectorAll('#chart-0 .scatterlayer path.point').length") >= 10, (
        "each episode a dot"
    )
    assert opened.run("document.querySelectorAll('.chart .main-svg').length") >= 10
    assert opened.run("document.querySelector('video').play().then(() => true)")
    opened.wait("document.querySelector('video').currentTime > 0.1")
    assert opened.run("document.querySelector('video').videoWidth") > 100
    opened.run("document.querySelector('video').pause()")
    assert fits(opened)
    opened.screenshot(tmp_path / "light.png")
    assert_quiet(opened, page)


def test_light_and_dark_follow_the_system_also_while_it_is_open(opened: Tab, suite: Path, tmp_path: Path) -> None:
    page = tmp_path / "suite.html"
    assert main(["report", str(suite), "--output", str(page)]) == 0
    opened.open(page)
    opened.wait(DRAWN)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = opened.run(ground), opened.run(INK)
    assert light[0] == "rgb(255, 255, 255)"
    opened.scheme("dark")
    opened.wait(f"{ground} === 'rgb(20, 24, 28)'")
    opened.wait(f"{INK} !== '{light[1]}'")
    opened.screenshot(tmp_path / "dark.png")
    assert_quiet(opened, page)


def test_a_phone_shows_all_of_it_in_its_width(opened: Tab, suite: Path, tmp_path: Path) -> None:
    opened.size(390, 844, mobile=True)
    for name, source in (("run", suite / "ppo-0"), ("suite", suite)):
        page = tmp_path / f"{name}.html"
        assert main(["report", str(source), "--output", str(page)]) == 0
        opened.open(page)
        opened.wait(DRAWN)
        assert fits(opened)
        widest = (
            "Math.max(...[...document.querySelectorAll('.chart .main-svg')].map(s => s.getBoundingClientRect().right))"
        )
        assert opened.run(widest) <= 390
        opened.screenshot(tmp_path / f"phone-{name}.png")


def test_folded_charts_are_drawn_to_size_when_they_are_opened(opened: Tab, suite: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(suite / "ppo-0"), "--output", str(page)]) == 0
    opened.open(page)
    opened.wait(DRAWN)
    opened.run("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    box = "[...document.querySelectorAll('.grid .chart')]"
    opened.wait(f"{box}.every(b => Math.abs(b.querySelector('.main-svg').clientWidth - b.clientWidth) < 3)")
    assert fits(opened)
    opened.screenshot(tmp_path / "opened.png")


def test_the_page_of_plot_is_drawn(opened: Tab, suite: Path, tmp_path: Path) -> None:
    page = tmp_path / "curves.html"
    assert main(["plot", str(suite), "--output", str(page)]) == 0
    opened.open(page)
    opened.wait(DRAWN)
    assert opened.run("document.documentElement.getAttribute('data-drawn')") == "2"
    assert opened.run("[...document.querySelectorAll('.legendtext')].map(e => e.textContent)") == [
        *("A2C (1 seed)", "PPO gae_lambda=0.5 (1 seed)", "PPO gae_lambda=0.95 (3 seeds)"),
    ]
    band = "[...document.querySelectorAll('#chart-1 .js-fill')].some(e => e.getAttribute('d').length > 20)"
    assert opened.run(band)
    opened.screenshot(tmp_path / "curves.png")
    assert_quiet(opened, page)


def test_what_files_say_does_not_run(opened: Tab, tmp_path: Path) -> None:
    points = [(1, 1.0), (2, 2.0)]
    path = write_run(tmp_path / "run", {f"loss/{NASTY}": points, "rollout/return_mean": points}, points)
    config = {"algo": NASTY, "env_id": NASTY, "seed": NASTY, NASTY: NASTY}
    (path / "config.yaml").write_text(json.dumps(config))
    (path / "metadata.json").write_text(json.dumps({"status": NASTY, "versions": {NASTY: NASTY}}))
    (path / "command.txt").write_text(NASTY)
    for source in (path, tmp_path):
        page = tmp_path / "page.html"
        assert main(["report", str(source), "--output", str(page)]) == 0
        opened.open(page)
        opened.wait(DRAWN)
        opened.run("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
        assert opened.run("window.harm") is None
        assert opened.run("document.querySelectorAll('main img, main a, svg a').length") == 0
        assert NASTY in opened.run("document.querySelector('h1').textContent") or source == tmp_path
    assert opened.complaints == []


def test_even_a_script_that_got_in_would_not_run(opened: Tab, suite: Path, tmp_path: Path) -> None:
    """The second line of defence, tried by putting one there."""
    page = tmp_path / "page.html"
    assert main(["report", str(suite / "ppo-0"), "--output", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    page.write_text(
        text.replace("<main>", "<main><script>window.harm = 1</script><img src=x onerror='window.harm = 1'>")
    )
    opened.open(page)
    opened.wait(DRAWN)
    assert opened.run("window.harm") is None
    assert any("Content Security Policy" in text for text in opened.complaints)
