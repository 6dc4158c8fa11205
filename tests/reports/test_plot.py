"""`rl-training plot`: which files it writes, what is in them, and how it says no."""

from __future__ import annotations

import csv
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from rl_training.cli import main
from rl_training.experiment.runs import RunDirectory
from rl_training.reports import curves
from rl_training.zoo.manifest import Manifest, write_manifest
from tests.reports.made_up import write_run
from tests.reports.pages import Parsed, assert_self_contained
from tests.zoo.manifests import run_result, task_result

NASTY = '<script>window.harm = 1</script><a href="https://example.org/">$x_{"'


@pytest.fixture
def plot(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command in an empty directory; gives its code, and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*args: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["plot", *map(str, args)])
        return code, *capsys.readouterr()

    return run


def refused(result: tuple[int, str, str]) -> str:
    code, _, err = result
    assert code == 2
    assert "Traceback" not in err
    return err


def test_a_picture_and_a_page_of_real_runs(plot: Any, suite: Path, tmp_path: Path) -> None:
    code, out, err = plot(suite)
    assert code == 0
    assert err == ""
    assert out.splitlines() == [
        "Pendulum-v1: A2C, 1 seed(s), rollout/return_mean",
        "CartPole-v1: PPO gae_lambda=0.5, 1 seed(s), eval/return_mean",
        "CartPole-v1: PPO gae_lambda=0.95, 3 seed(s), eval/return_mean",
        "wrote curves.png",
        "wrote curves.html",
    ]
    header = (tmp_path / "curves.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert struct.unpack(">II", header[16:24]) > (800, 400)
    page = Parsed((tmp_path / "curves.html").read_text(encoding="utf-8"))
    assert_self_contained(page)
    assert [sorted({t["name"] for t in chart["traces"] if "name" in t}) for chart in page.charts] == [
        ["A2C (1 seed)"],
        ["PPO gae_lambda=0.5 (1 seed)", "PPO gae_lambda=0.95 (3 seeds)"],
    ]


def test_what_is_drawn_is_the_mean_and_the_band(plot: Any, tmp_path: Path) -> None:
    for seed, end in enumerate([2.0, 4.0, 9.0]):
        write_run(tmp_path / "runs" / f"s{seed}", evaluations=[(10, 1.0), (20, end)], seed=seed)
    assert plot("runs", "--output", "out/page.html")[0] == 0
    (chart,) = Parsed((tmp_path / "out" / "page.html").read_text()).charts
    low, high, line = chart["traces"]
    assert low["y"] == [1.0, 2.0]
    assert high["y"] == [1.0, 9.0]
    assert high["fill"] == "tonexty"
    assert line["x"] == [10.0, 20.0]
    assert line["y"] == [1.0, 5.0]
    assert line["text"] == ["1 (1 to 1)", "5 (2 to 9)"]


def test_one_seed_has_a_line_and_no_band(plot: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", evaluations=[(10, 1.0), (20, 2.0)])
    assert plot("run", "--output", "page.html")[0] == 0
    (chart,) = Parsed((tmp_path / "page.html").read_text()).charts
    assert [trace.get("name") for trace in chart["traces"]] == ["PPO (1 seed)"]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".html"])
def test_a_suffix_asks_for_one_file(plot: Any, suite: Path, tmp_path: Path, suffix: str) -> None:
    code, out, _ = plot(suite / "ppo-0", suite / "ppo-1", "--metric", "loss/policy", "--output", f"a{suffix}")
    assert code == 0
    assert "PPO, 2 seed(s), loss/policy" in out
    assert [path.name for path in tmp_path.iterdir()] == [f"a{suffix}"]
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>"}[suffix]
    assert (tmp_path / f"a{suffix}").read_bytes().startswith(start)


def test_the_same_runs_give_the_same_picture(plot: Any, suite: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert plot(suite, "--output", tmp_path / name)[0] == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_smoothing_and_the_interquartile_mean_change_the_curves(plot: Any, tmp_path: Path) -> None:
    for seed, value in enumerate([0.0, 2.0, 4.0, 100.0]):
        write_run(tmp_path / "runs" / f"s{seed}", {"loss/x": [(1, value), (2, 0.0)]}, seed=seed)

    def drawn(*options: Any) -> list[float]:
        assert plot("runs", "--metric", "loss/x", "--output", "page.html", *options)[0] == 0
        (chart,) = Parsed((tmp_path / "page.html").read_text()).charts
        values: list[float] = chart["traces"][-1]["y"]
        return values

    assert drawn() == [26.5, 0.0]
    assert drawn("--average", "iqm") == [3.0, 0.0]
    assert drawn("--smooth", 0.5) == pytest.approx([26.5, 26.5 / 3])


def test_tables_hold_runs_metrics_and_curves(plot: Any, suite: Path, tmp_path: Path) -> None:
    assert plot(suite, "--csv", "tables", "--parquet", "tables")[0] == 0
    names = ("runs", "metrics", "curves")
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {
        f"{n}.{s}" for n in names for s in ("csv", "parquet")
    }
    for name in names:
        typed = parquet.read_table(tmp_path / "tables" / f"{name}.parquet").to_pylist()
        with open(tmp_path / "tables" / f"{name}.csv", encoding="utf-8", newline="") as file:
            texts = list(csv.DictReader(file))
        assert [{key: "" if value is None else str(value) for key, value in row.items()} for row in typed] == texts
    runs = {row["run"]: row for row in parquet.read_table(tmp_path / "tables" / "runs.parquet").to_pylist()}
    assert set(runs) == {"a2c-0", "ppo-0", "ppo-1", "ppo-2", "ppo-lambda"}
    assert runs["ppo-lambda"]["config.gae_lambda"] == 0.5
    assert runs["ppo-1"]["seed"] == 1
    assert runs["ppo-1"]["status"] == "finished"
    assert runs["ppo-1"]["best_return"] == RunDirectory(suite / "ppo-1").best_return()
    assert runs["a2c-0"]["final_return_mean"] is None
    metrics = parquet.read_table(tmp_path / "tables" / "metrics.parquet").to_pylist()
    lines = [json.loads(line) for line in (suite / "ppo-1" / "metrics.jsonl").read_text().splitlines()]
    own = {(row["metric"], row["step"]): row["value"] for row in metrics if row["run"] == "ppo-1"}
    for line in lines:
        for metric, value in line.items():
            if metric not in ("global_step", "time/unix") and value is not None:  # two lines may have one step
                assert own[metric, line["global_step"]] == value
    drawn = [
        row
        for row in parquet.read_table(tmp_path / "tables" / "curves.parquet").to_pylist()
        if row["label"] == "PPO gae_lambda=0.95"
    ]
    at_end = [
        row["value"]
        for row in metrics
        if (row["metric"], row["step"], row["label"]) == ("eval/return_mean", 256, "PPO gae_lambda=0.95")
    ]
    assert len(at_end) == 3
    assert drawn[-1]["value"] == pytest.approx(np.mean(at_end))
    assert (drawn[-1]["low"], drawn[-1]["high"]) == (min(at_end), max(at_end))
    assert drawn[-1]["seeds"] == 3


def test_the_manifest_of_a_benchmark_is_a_table(plot: Any, tmp_path: Path) -> None:
    points = [(10, 1.0), (20, 2.0)]
    run = write_run(tmp_path / "runs" / "mine" / "a", evaluations=points)
    ppo = task_result("ppo/cartpole", run_result(0, 50.0), run_result(1, 70.0, git_commit=None))
    manifest = Manifest(1, "mine", [ppo, task_result("dqn/cartpole", run_result(0, 20.0), judge="best")])
    write_manifest(tmp_path / "runs" / "mine" / "manifest.json", manifest)
    assert plot("runs", "--csv", "tables", "--parquet", "tables")[0] == 0
    first, second, third = parquet.read_table(tmp_path / "tables" / "results.parquet").to_pylist()
    expected = {
        "suite": "mine", "task": "ppo/cartpole", "environment": "CartPole-v1", "score": 50.0, "normalized_score": 0.5,
        "config_hash": ppo.config_hash, "seed": 0, "final.mean": 50.0, "final.episodes": 20, "untrained.mean": 10.0,
        "wall_seconds": 2.0, "env_steps_per_second": 500.0, "versions.torch": "2.13.0", "hardware.cpu": "abacus",
        "git_commit": "0123456789abcdef", "date": "2026-01-31T00:00:00+00:00",
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected
    assert (second["seed"], second["score"], second["git_commit"]) == (1, 70.0, None)
    assert (third["judge"], third["score"], third["final.mean"]) == ("best", None, 20.0)
    assert (tmp_path / "tables" / "results.csv").read_text().startswith("suite,task,environment,score,")
    assert plot(run, "--csv", "of-a-run")[0] == 0
    assert not (tmp_path / "of-a-run" / "results.csv").exists(), "the benchmark was not asked for"


def test_runs_that_are_not_whole_are_said_and_the_others_drawn(plot: Any, suite: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("ppo-0", "ppo-1", "ppo-2"):
        shutil.copytree(suite / name, runs / name)
    (runs / "ppo-0" / "config.yaml").write_text("algo: [")
    killed = json.loads((runs / "ppo-1" / "metadata.json").read_text())
    (runs / "ppo-1" / "metadata.json").write_text(json.dumps({**killed, "status": "running", "pid": 2**22 + 1}))
    with open(runs / "ppo-1" / "metrics.jsonl", "a") as file:
        file.write('{"global_')
    write_run(runs / "begun", status="running", num_envs=2, algorithm={"num_steps": 16})
    code, out, err = plot(runs)
    assert code == 0
    assert "CartPole-v1: PPO, 2 seed(s)" in out
    assert "warning: ppo-0: is damaged and ignored: " in err
    assert "warning: ppo-1: was killed: shown up to its end (256 of 256 steps)" in err
    assert "warning: begun: has neither an evaluation nor a finished episode yet" in err
    assert "warning: begun: is still running: shown up to now (0 of 100,000 steps)" in err


def test_what_cannot_work_is_refused(plot: Any, suite: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "there are no runs in 'empty'" in refused(plot("empty"))
    assert "'nowhere' does not exist" in refused(plot("nowhere"))
    assert "paths: missing; pass run directories" in refused(plot())
    assert "Available: " in refused(plot(suite, "--metric", "eval/retrun_mean"))
    assert "smooth: must be at least 0" in refused(plot(suite, "--smooth", -1))
    assert "must end in .png, .svg, .pdf, .html" in refused(plot(suite, "--output", "curves.gif"))
    (tmp_path / "file").write_text("")
    assert "could not be written" in refused(plot(suite, "--output", "file/curves.png"))
    assert "cannot" in refused(plot(suite, "--output", "a.html", "--csv", "file"))
    (write_run(tmp_path / "bad") / "config.yaml").write_text("algo: [")
    assert "no run could be read" in refused(plot("bad"))


def test_without_the_extra_it_says_what_to_install(plot: Any, suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "find_spec", lambda name: None if name == "plotly" else object())
    assert "pip install '.[plot]'" in refused(plot(suite))


def test_names_from_files_are_shown_as_they_are(plot: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "a", {NASTY: [(1, 1.0), (2, 2.0)]})
    config = {"algo": NASTY, "env_id": f"\ud800_{NASTY}\x1b[31m", "seed": 0, "total_timesteps": 10**400}
    (path / "config.yaml").write_text(json.dumps(config))
    code, out, _ = plot("runs", "--metric", NASTY, "--csv", "tables", "--parquet", "tables")
    assert code == 0
    assert "\x1b" not in out
    page = Parsed((tmp_path / "curves.html").read_text(encoding="utf-8"))
    assert_self_contained(page)
    assert NASTY in page.text()
    assert page.charts[0]["traces"][0]["name"].startswith("&lt;script&gt;"), "plotly reads a little HTML in labels"
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert parquet.read_table(tmp_path / "tables" / "runs.parquet").to_pylist()[0]["algorithm"] == NASTY
