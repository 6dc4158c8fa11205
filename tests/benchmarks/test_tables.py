"""The tables of spaces and tiers on the page about speed, and what the sides' processes inherit."""

from benchmarks.harness import variables
from benchmarks.sides.space_tasks import CELLS, length

from benchmarks import page

ABOUT = {"created": "2026-01-01", "git_commit": None, "load": 0.5}


def test_a_cell_that_failed_has_a_dash():
    cells = {
        "ppo Discrete": {"median": {"ours": 3000.0, "sb3": 1500.0}, "ratio": 2.0, "errors": {}},
        "sac Box": {"median": {"ours": 45.67}, "ratio": None, "errors": {"sb3": "out of memory"}},
    }
    rows = page.spaces_table(cells).splitlines()[2:]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["ppo Discrete", "3,000", "1,500", "**2.00**"],
        ["sac Box", "45.7", "–", "–"],
    ]


def test_tiers_have_a_column_where_anything_was_measured():
    tasks = {
        "sac": {"median": {"plain": 100.0, "sb3": 80.0}, "seconds": {"plain": [9.0], "sb3": [9.0]}, "total": 0},
        "sac to 1000": {"median": {"plain": 100.0}, "seconds": {"plain": [10.0, 20.0, 40.0]}, "total": 1000},
    }
    lines = page.tiers_table(tasks).splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["Task", "plain", "SB3"]
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == ["sac to 1000", "50.0", "–"]
    assert "- `plain`: plain torch: accelerate=off, acting too." in lines


def test_both_tables_are_on_the_page():
    cell = {"median": {"ours": 2.0, "sb3": 1.0}, "ratio": 2.0, "errors": {}, "about": {**ABOUT, "hardware": HARDWARE}}
    tier = {"median": {"plain": 1.0}, "seconds": {"plain": [1.0]}, "total": 0, "about": cell["about"]}
    text = page.page(page.Results(spaces={"ppo Box": cell}, tiers={"ppo_cartpole": tier}))
    assert "## Observation and action spaces" in text
    assert "| ppo_cartpole |" in text
    assert "a processor, 2 cores" in text


HARDWARE = {"cpu": "a processor", "cores": 2, "machine": "x86_64", "system": "Linux"}


def test_peers_do_not_inherit_how_our_threads_wait(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert "GOMP_SPINCOUNT" not in variables("sb3", 1)
    assert variables("sb3", 1)["OMP_NUM_THREADS"] == "1"


def test_a_trial_has_fewer_steps():
    assert "ppo image 32" in CELLS
    assert length("ppo Box") == (16_384, 8_192)
    assert length("ppo Box", 4) == (4_096, 2_048)
    assert length("ppo image 32", 2) == (1_024, 512)
