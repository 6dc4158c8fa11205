"""The results page and its plots: what was measured, what was published, and that they fall behind visibly."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts.comparison import Figure, read_published
from scripts.results_page import SuiteCurves, main, results_page

from rl_training.contracts.errors import ConfigError
from rl_training.experiment.files import write_json
from rl_training.experiment.presets import presets
from rl_training.reports.aggregates import competitors, learning_panels
from rl_training.zoo.manifest import Manifest, TaskResult, read_manifest, write_manifest
from rl_training.zoo.suites import Normalization
from tests.zoo.manifests import run_result, task_result

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = DOCS / "published.yaml"


def page(directory: Path, *tasks: TaskResult) -> str:
    write_manifest(directory / "classic.json", Manifest(1, "classic", list(tasks)))
    return results_page(directory, PUBLISHED)


def row(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {start} |"))


def test_a_row_has_everything_and_the_published_figure(tmp_path: Path) -> None:
    runs = [run_result(seed, mean) for seed, mean in enumerate([400.0, 480.0, 490.0, 500.0])]
    text = page(tmp_path, task_result("ppo/cartpole", *runs))
    cells = row(text, "`ppo/cartpole`<br>CartPole-v1 | 100,000").strip("| ").split(" | ")
    assert cells[2].startswith("**485.0** [")  # the middle two of four
    assert cells[3] == "485.0"
    assert cells[4] == "400.0 ± 1.0<br>480.0 ± 1.0<br>490.0 ± 1.0<br>500.0 ± 1.0"
    assert cells[5] == "10.0"
    assert cells[6] == (
        "*below*: 500.0 (RL Zoo, one tuned run)<br>"
        "*within its spread*: 490.0 (CleanRL, 500,000 steps, training returns)"
    )
    assert "Protocol: 20 episodes of the final policy, deterministic actions" in text
    assert "- `ppo/cartpole` (CartPole-v1, 100,000 steps): 485.0 against 500.0 (RL Zoo, one tuned run)" in text
    assert "abacus" in text
    assert "Commits: 0123456789 (4)." in text


def test_what_is_not_recorded_or_not_current_is_said(tmp_path: Path) -> None:
    text = page(tmp_path, task_result("ppo/cartpole", run_result(0, 500.0, git_commit=None), config_hash="another"))
    assert "| **500.0** (with earlier settings) | 500.0 |" in row(text, "`ppo/cartpole`<br>CartPole-v1 | 100,000")
    assert "Commits: not recorded (1)." in text


def test_a_preset_without_a_result_says_so(tmp_path: Path) -> None:
    text = results_page(tmp_path, PUBLISHED)
    assert text.count("not yet measured") == len(presets())
    assert "*below*" not in text
    assert "*reached*" not in text


def test_other_versions_settings_and_policies_have_rows_of_their_own(tmp_path: Path) -> None:
    best = run_result(0, 3.0)
    both = dataclasses.replace(best, best=dataclasses.replace(best.final, mean=9.0))
    text = page(
        tmp_path,
        task_result("ppo/hopper", run_result(0, 2500.0), settings={"env_id": "Hopper-v4"}),
        task_result("dqn/cartpole", both, judge="best"),
        task_result("ppo/cartpole", best, settings={"algorithm": {"gamma": 0.9}}),
        task_result("ppo/pong", best, deterministic=False),
    )
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("| `ppo/hopper`<br>Hopper-v5 | 1,000,000 |"))
    assert "not yet measured" in lines[place]
    assert "CleanRL" not in lines[place], "its figure is of Hopper-v4, which has a row of its own"
    assert lines[place + 1].startswith("| `ppo/hopper`<br>Hopper-v4 | 1,000,000 | **2,500.0** |")
    figures = (
        "*reached*: 2,382.9 (CleanRL, training returns)<br>*reached*: 2,410.4 (RL Zoo, on Hopper-v3, one tuned run)"
    )
    assert lines[place + 1].endswith(f"| {figures} |")
    assert "**3.0**" in row(text, "`dqn/cartpole`<br>CartPole-v1 | 50,000")
    assert "**9.0**" in row(text, "`dqn/cartpole` *best*<br>CartPole-v1 | 50,000")
    assert "Protocol of the rows *best*: 20 fresh episodes of the best of 2 policies, each judged by 10" in text
    changed = row(text, "`ppo/cartpole` `gamma=0.9`<br>CartPole-v1 | 100,000")
    assert changed.endswith("|  |"), "other settings are not compared with what was published"
    assert "`ppo/pong` *sampled actions*" in text
    assert "Protocol of the rows *sampled actions*: 20 episodes of the final policy, sampled actions" in text


@pytest.mark.parametrize(("score", "verdict"), [(100.0, "reached"), (90.0, "within its spread"), (89.9, "below")])
def test_verdicts(score: float, verdict: str) -> None:
    figure = Figure(preset="a/b", source="s", env_id="X-v0", mean=100.0, std=10.0, seeds=3, steps=1000)
    assert figure.verdict(score) == verdict


def test_tasks_of_other_measurements_are_shown(tmp_path: Path) -> None:
    run = {"success_rate": 0.5, "date": "2026-01-31T00:00:00+00:00", "cpu": "abacus", "versions": {}}
    task = {"total_timesteps": 1000, "with_her": {"median": 0.5, "seeds": {"0": run}}, "without_her": {}}
    write_json(tmp_path / "some.json", {"protocol": "by hand", "tasks": {"dqn/task": task}})
    text = results_page(tmp_path, PUBLISHED)
    assert "| `dqn/task` | 1,000 | **50%** (50%) | not yet measured |" in text
    assert text.count("Protocol: by hand") == 1
    assert "abacus" in text


def test_algorithms_are_aggregated_over_environments(tmp_path: Path) -> None:
    scale = Normalization("Acrobot-v1", -500.0, -100.0, "by hand")
    tasks = [
        task_result("ppo/cartpole", run_result(0, 50.0), run_result(1, 70.0)),
        task_result("ppo/acrobot", run_result(0, -300.0), run_result(1, -100.0), normalization=scale),
        task_result("a2c/cartpole", run_result(0, 60.0), run_result(1, 60.0)),
        task_result("ppo/cartpole", run_result(0, 1.0), settings={"algorithm": {"gamma": 0.9}}),
        task_result("ppo/cartpole", run_result(0, 2.0), settings={"total_timesteps": 7}),
    ]
    found = {entry.label: entry for entry in competitors(Manifest(1, "classic", tasks))}
    assert set(found) == {"PPO", "A2C", "PPO gamma=0.9"}
    # 0.5 0.7 0.5 1.0: without the lowest and the highest
    assert found["PPO"].overall().value == pytest.approx(0.6)
    assert (found["PPO"].num_runs, len(found["PPO"].tasks)) == (4, 2)
    better = found["PPO"].against(found["A2C"])
    assert better is not None
    assert better.value == pytest.approx(0.5), "only CartPole is shared: one run above, one below"
    text = page(tmp_path, *tasks)
    assert "| PPO | 2 | 4 | **0.60** [" in text
    assert "| A2C |  | 0.50 |" in text


def test_plots_are_of_the_results_and_always_the_same(tmp_path: Path) -> None:
    manifest = Manifest(1, "classic", [task_result("ppo/cartpole", run_result(0, 50.0), run_result(1, 70.0))])
    environment, overall = learning_panels(manifest)
    assert environment.title == "CartPole-v1"
    (curve,) = environment.curves
    assert curve.solid.all()
    assert np.interp([0, 500, 1000], curve.steps, curve.center) == pytest.approx([10.0, 30.0, 60.0])
    assert (curve.low[-1], curve.high[-1]) == (50.0, 70.0)
    (pooled,) = overall.curves
    assert (pooled.steps[-1], pooled.num_runs, overall.in_steps) == (0.01, 2, False), "of 100,000 steps"
    assert np.interp([0, 0.01], pooled.steps, pooled.center) == pytest.approx([0.1, 0.6]), "normalised: of 100"
    curves = SuiteCurves(manifest)
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    curves.write(one)
    curves.write(two)
    assert one.read_bytes() == two.read_bytes()
    assert curves.is_current(one)
    other = SuiteCurves(Manifest(1, "classic", [task_result("ppo/cartpole", run_result(0, 51.0))]))
    assert not other.is_current(one)
    assert ">CartPole-v1<" in one.read_text(encoding="utf-8")


def test_runs_without_evaluations_are_drawn_from_their_training(tmp_path: Path) -> None:
    run = run_result(0, 50.0, evaluations=None, training_returns=[(100, None), (500, 20.0), (1000, 40.0)])
    (environment, _) = learning_panels(Manifest(1, "classic", [task_result("ppo/cartpole", run)]))
    (curve,) = environment.curves
    assert not curve.solid.any(), "it is dashed"
    assert (curve.steps[0], curve.center[0], curve.steps[-1], curve.center[-1]) == (500.0, 20.0, 1000.0, 40.0)


def test_published_figures_belong_to_presets_and_sources() -> None:
    published = read_published(PUBLISHED)
    assert {figure.preset for figure in published.figures} <= set(presets())
    assert {figure.source for figure in published.figures} == set(published.sources)
    assert set(published.follow_up) <= {figure.preset for figure in published.figures}


def test_wrong_published_figures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "published.yaml"
    text = PUBLISHED.read_text(encoding="utf-8")
    path.write_text(
        text.replace("source: cleanrl,", "source: clean,").replace("    short: RL Zoo\n", "    shrt: RL Zoo\n")
    )
    with pytest.raises(ConfigError) as caught:
        read_published(path)
    found = "\n".join(caught.value.problems)
    assert "there is no source 'clean'" in found
    assert "unknown key 'shrt'. Did you mean 'short'?" in found


# The command


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    shutil.copy(PUBLISHED, tmp_path / "docs")
    return tmp_path / "docs"


def report(docs: Path, results: Path, *more: Any) -> int:
    return main(["--docs-dir", str(docs), "--results-dir", str(results), *map(str, more)])


def test_the_report_is_written_and_checked(docs: Path, tmp_path: Path, capsys: Any) -> None:
    results = tmp_path / "results"
    results.mkdir()
    suite = tmp_path / "runs" / "classic"
    suite.mkdir(parents=True)
    write_manifest(suite / "manifest.json", Manifest(1, "classic", [task_result("ppo/cartpole", run_result(0, 500.0))]))
    assert report(docs, results, "--add", suite) == 0
    assert read_manifest(results / "classic.json").tasks[0].scores() == [500.0]
    assert "**500.0**" in (docs / "results.md").read_text(encoding="utf-8")
    assert (docs / "figures" / "classic.svg").is_file()
    assert report(docs, results, "--check") == 0

    write_manifest(suite / "manifest.json", Manifest(1, "classic", [task_result("ppo/cartpole", run_result(1, 300.0))]))
    with pytest.raises(SystemExit, match="2"):
        report(docs, results, "--add", suite, "--check")
    assert report(docs, results, "--check") == 0, "nothing was added"
    shutil.copy(suite / "manifest.json", results / "classic.json")
    capsys.readouterr()
    assert report(docs, results, "--check") == 1
    out = capsys.readouterr().out
    assert "stale" in out
    assert "results.md" in out
    assert "classic.svg" in out
    assert report(docs, results) == 0
    assert "**300.0**" in (docs / "results.md").read_text(encoding="utf-8")


def test_elsewhere_than_in_a_clone_it_says_what_is_missing(tmp_path: Path, capsys: Any) -> None:
    assert report(tmp_path, tmp_path) == 2
    assert "has no published.yaml" in capsys.readouterr().err
