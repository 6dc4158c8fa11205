"""The results page and its plots: what was measured, what was published, and that they fall behind visibly."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts.comparison import Figure, Published, read_published, rows_of
from scripts.result_pictures import heat_map, score_picture
from scripts.results_page import Curves, all_rows, main, results_page

from rl_training.contracts.errors import ConfigError
from rl_training.experiment.files import write_json
from rl_training.experiment.presets import presets
from rl_training.reports.aggregates import competitors, learning_panels, overall_panel, shared_kinds
from rl_training.zoo.manifest import Manifest, RunResult, TaskResult, read_manifest, write_manifest
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
    runs = [with_best(run_result(seed, mean), mean + 1) for seed, mean in enumerate([400.0, 480.0, 490.0, 500.0])]
    text = page(tmp_path, task_result("ppo/cartpole", *runs))
    cells = row(text, "`ppo/cartpole`<br>CartPole-v1 | 100,000").strip("| ").split(" | ")
    assert cells[2] == "4"
    assert cells[3].startswith("**485.0** [")  # the middle two of four
    assert cells[3].endswith("]<br>400.0, 480.0, 490.0, 500.0")
    assert cells[4].startswith("**486.0** [")
    assert cells[5] == "2 s<br>abacus"
    assert cells[6] == "0123456789 (4)<br>2026-01-31"
    assert cells[7] == (
        "*one run, reached by 1 of our 4*: 500.0 (RL Zoo, one tuned run)<br>"
        "490.0 ± 6.1 over 3 seeds (CleanRL, 500,000 steps, training returns)"
    )
    assert "Protocol: 20 episodes after training, deterministic actions" in text
    assert "abacus" in text
    assert "Commits: 0123456789 (4)." in text


def test_what_cannot_be_relied_on_is_marked_and_ranked_nowhere(tmp_path: Path) -> None:
    good = task_result("trpo/cartpole", run_result(0, 60.0), run_result(1, 60.0))
    old = task_result("ppo/cartpole", run_result(0, 500.0), config_hash="another")
    bare = task_result("a2c/cartpole", run_result(0, 9.0, git_commit=None), config_hash="old", total_timesteps=100_000)
    text = page(tmp_path, good, old, bare)
    assert "| `ppo/cartpole` **stale**<br>CartPole-v1 | 100,000 | 1 | **500.0** |" in text
    assert "| `a2c/cartpole` **stale** **no commit**<br>CartPole-v1 | 500,000, measured for 100,000 | 1 |" in text
    bare = task_result("a2c/cartpole", run_result(0, 500.0, git_commit=None))
    assert "`a2c/cartpole` **no commit**<br>" in page(tmp_path, bare)
    assert "No two presets were measured alike yet." in text
    assert "not recorded (1)" in text


def test_a_preset_without_a_result_says_so(tmp_path: Path) -> None:
    text = results_page(tmp_path, PUBLISHED)
    unaffordable = text.count("published settings, not measured")
    assert unaffordable >= 5
    assert text.count("not yet measured") + unaffordable == len(presets())
    assert "| `dqn/atari`<br>ALE/* | 10,000,000 |  | published settings, not measured |" in text
    assert "*below*" not in text
    assert "*reached*" not in text


def with_best(run: RunResult, mean: float) -> RunResult:
    assert run.final is not None
    return dataclasses.replace(run, best=dataclasses.replace(run.final, mean=mean))


def test_presets_as_shipped_have_one_row_and_variants_a_section(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        task_result("qrdqn/mountaincar", run_result(0, -105.0), settings={"total_timesteps": 150_000}),
        task_result("qrdqn/mountaincar", run_result(0, -104.0), run_result(1, -200.0)),
        task_result("dqn/cartpole", with_best(run_result(0, 3.0), 9.0), judge="best"),
        task_result("ppo/cartpole", run_result(0, 3.0), settings={"algorithm": {"gamma": 0.9}}),
        task_result("ppo/pong", run_result(0, 3.0), deterministic=False),
    )
    shipped, variants = text.split("## Variants, other versions and budgets")
    assert "−104.0, −200.0" in row(shipped, "`qrdqn/mountaincar`<br>MountainCar-v0 | 120,000"), "a failed seed shows"
    assert "**−105.0**" in row(variants, "`qrdqn/mountaincar`<br>MountainCar-v0 | 150,000")
    assert shipped.count("| `qrdqn/mountaincar`") == 1
    assert "| 1 | **3.0** | **9.0** |" in row(shipped, "`dqn/cartpole`<br>CartPole-v1 | 50,000"), "final and best"
    changed = row(variants, "`ppo/cartpole` `gamma=0.9`<br>CartPole-v1 | 100,000")
    assert changed.endswith("|  |"), "other settings are not compared with what was published"
    assert "`ppo/pong` *sampled actions*" in shipped
    assert "Protocol of the rows *sampled actions*: 20 episodes after training, sampled actions" in text


@pytest.mark.parametrize(
    ("seeds", "scores", "verdict"),
    [
        (3, [99.0, 100.0, 101.0], "reached"),
        (3, [90.0], "within its spread over seeds"),
        (3, [89.9], "below"),
        (1, [100.0], "reached"),
        (1, [95.0], "below"),  # 10 is its deviation over episodes, which says nothing about other runs
        (1, [100.0, 20.0, 20.0], "one run, reached by 1 of our 3"),
    ],
)
def test_verdicts(seeds: int, scores: list[float], verdict: str) -> None:
    figure = Figure(preset="a/b", source="s", env_id="X-v0", mean=100.0, std=10.0, seeds=seeds, steps=1000)
    assert figure.verdict(scores) == verdict


def verdict_of(preset: str, figure: dict[str, Any], *runs: RunResult, **changes: Any) -> str | None:
    task = task_result(preset, *runs, **changes)
    found = Figure(**{"preset": preset, "source": "s", "mean": 100.0, "std": 10.0, "seeds": 3, **figure})
    (first, *others) = rows_of(presets()[preset], [Manifest(1, "mine", [task])], Published({}, [found], {}))
    chosen = next(row for row in [*others, first] if row.task is not None)
    return chosen.verdict(found)


def test_only_results_of_the_same_task_and_budget_are_compared() -> None:
    good, cartpole = run_result(0, 101.0), {"env_id": "CartPole-v1", "steps": 100_000}
    assert verdict_of("ppo/cartpole", cartpole, good) == "reached"
    assert verdict_of("ppo/cartpole", {**cartpole, "steps": 500_000}, good) == "reached in fewer steps"
    assert verdict_of("ppo/cartpole", {**cartpole, "steps": 500_000}, run_result(0, 95.0)) is None
    assert verdict_of("ppo/cartpole", {**cartpole, "steps": 50_000}, good) is None
    only_best = with_best(dataclasses.replace(good), 101.0)
    only_best = dataclasses.replace(only_best, final=None)
    assert verdict_of("ppo/cartpole", cartpole, only_best, judge="best") == "reached, best of 2"


def test_hopper_and_ant_from_before_mujoco_3_5_are_other_tasks() -> None:
    hopper = {"env_id": "Hopper-v3", "steps": 1_000_000}
    assert verdict_of("ppo/hopper", hopper, run_result(0, 101.0, versions={"mujoco": "4.0.0"})) is None
    assert verdict_of("ppo/hopper", hopper, run_result(0, 101.0, versions={"mujoco": "3.3.7"})) == "reached"
    cheetah = {"env_id": "HalfCheetah-v4", "steps": 1_000_000}
    assert verdict_of("ppo/halfcheetah", cheetah, run_result(0, 101.0, versions={"mujoco": "4.0.0"})) == "reached"
    walker = {"env_id": "Walker2d-v4", "steps": 1_000_000}
    assert verdict_of("sac/walker2d", walker, run_result(0, 101.0)) is None


def test_tasks_of_other_measurements_are_shown(tmp_path: Path) -> None:
    run = {"success_rate": 0.5, "date": "2026-01-31T00:00:00+00:00", "cpu": "abacus", "versions": {}}
    task = {"total_timesteps": 1000, "with_her": {"median": 0.5, "seeds": {"0": run}}, "without_her": {}}
    write_json(tmp_path / "some.json", {"protocol": "by hand", "tasks": {"dqn/task": task}})
    text = results_page(tmp_path, PUBLISHED)
    assert "| `dqn/task` | 1,000 | **50%** (50%) | not yet measured |" in text
    assert text.count("Protocol: by hand") == 1
    assert "abacus" in text


def test_only_what_was_measured_alike_is_ranked(tmp_path: Path) -> None:
    acrobot = Normalization("Acrobot-v1", -500.0, -100.0, "by hand")
    hopper = Normalization("Hopper-v4", 0.0, 100.0, "by hand")
    tasks = [
        task_result("ppo/cartpole", run_result(0, 50.0), run_result(1, 70.0)),
        task_result("ppo/acrobot", run_result(0, -300.0), run_result(1, -100.0), normalization=acrobot),
        task_result("trpo/cartpole", run_result(0, 60.0), run_result(1, 60.0)),
        task_result("a2c/cartpole", run_result(0, 90.0)),  # for 500,000 steps
        task_result("ppo/cartpole", run_result(0, 1.0), settings={"algorithm": {"gamma": 0.9}}),
        task_result("ppo/cartpole", run_result(0, 2.0), settings={"total_timesteps": 7}),
        task_result("ppo/hopper", run_result(0, 2.0)),
        task_result("ppo/hopper", run_result(0, 4.0), settings={"env_id": "Hopper-v4"}, normalization=hopper),
    ]
    found = {entry.label: entry for entry in competitors(tasks)}
    assert set(found) == {"PPO", "A2C", "TRPO", "PPO gamma=0.9"}
    ppo = found["PPO"]
    assert len(ppo.tasks) == 5, "no task hides another of the same environment"
    better = ppo.against(found["TRPO"])
    assert better is not None
    assert better.value == pytest.approx(0.5), "only CartPole for 100,000 steps is shared: one run above, one below"
    assert ppo.against(found["A2C"]) is None, "it had more steps"
    (cartpole,) = shared_kinds([ppo, found["TRPO"]])
    assert (cartpole.place, cartpole.steps, cartpole.judge) == ("CartPole-v1", 100_000, "final")
    assert ppo.overall([cartpole]).value == pytest.approx(0.6)
    assert [kind.place for kind in shared_kinds([ppo]) if "Hopper" in kind.place] == ["Hopper-v5"], "not v4 and v5"
    best = task_result("trpo/cartpole", with_best(run_result(0, 1.0), 99.0), judge="best")
    (trpo,) = competitors([best])
    assert ppo.against(trpo) is None, "the best of several policies is not a final policy"
    (trpo,) = competitors([best], "final")
    assert trpo.against(competitors(tasks[:1], "final")[0]) is not None
    text = page(tmp_path, *tasks)
    assert "| CartPole-v1 | 100,000 | PPO **0.60** [0.50, 0.70] (2)<br>TRPO **0.60** [0.60, 0.60] (2) |" in text


def test_steps_to_success_tell_hindsight_apart(tmp_path: Path) -> None:
    scale = Normalization("FetchReach-v4", -50.0, 0.0, "by hand")
    quick = run_result(0, -1.0, evaluations=[(500, -4.0, 1.0), (1000, -1.0, 1.0)])
    slow = run_result(0, -1.0, evaluations=[(500, -40.0, 1.0), (1000, -1.0, 1.0)])
    never = run_result(1, -9.0, evaluations=[(500, -40.0, 1.0), (1000, -9.0, 1.0)])
    runs = [dataclasses.replace(run, untrained=None) for run in (quick, slow, never)]
    without = {"algorithm": {"her": False}}
    text = page(
        tmp_path,
        task_result("sac/fetchreach", runs[0], normalization=scale),
        task_result("sac/fetchreach", *runs[1:], normalization=scale, settings=without),
    )
    assert "| `sac/fetchreach` | FetchReach-v4 | **500** (500) | evaluations |" in text
    assert "| `sac/fetchreach` `her=false` | FetchReach-v4 | **never** (1,000, never) | evaluations |" in text


def test_the_pictures_are_of_presets_as_shipped(tmp_path: Path) -> None:
    task = task_result("ppo/cartpole", run_result(0, 50.0), run_result(1, 70.0))
    variant = task_result("ppo/cartpole", run_result(0, 50.0), settings={"algorithm": {"gamma": 0.9}})
    rows = all_rows([Manifest(1, "classic", [task, variant])], read_published(PUBLISHED))
    cells = {(cell.algo, cell.place): cell for cell in heat_map(rows).cells}
    assert cells["PPO", "CartPole-v1"].scores == (0.5, 0.7)
    assert cells["A2C", "CartPole-v1"].scores == ()
    assert ("DrQv2", "Pendulum-v1 from pixels") in cells
    (line,) = score_picture(row for row in rows if row.is_shipped).lines
    assert (line.label, line.scores, line.is_reliable) == ("PPO, 100k, 2 seeds", (0.5, 0.7), True)
    zoo, cleanrl = line.published
    assert (zoo.score, zoo.spread, zoo.is_alike) == (5.0, 0.0, True), "one run has no spread over seeds"
    assert (cleanrl.score, cleanrl.spread, cleanrl.is_alike) == (4.9004, 0.0612, False), "500,000 steps"
    for picture in (heat_map(rows), score_picture(rows)):
        picture.write(tmp_path / "some.svg")
        assert picture.is_current(tmp_path / "some.svg")


def test_plots_are_of_the_results_and_always_the_same(tmp_path: Path) -> None:
    tasks = [task_result("ppo/cartpole", run_result(0, 50.0), run_result(1, 70.0))]
    (environment,), overall = learning_panels(tasks), overall_panel(competitors(tasks))
    assert environment.title == "CartPole-v1"
    (curve,) = environment.curves
    assert curve.solid.all()
    assert np.interp([0, 500, 1000], curve.steps, curve.center) == pytest.approx([10.0, 30.0, 60.0])
    assert (curve.low[-1], curve.high[-1]) == (50.0, 70.0)
    (pooled,) = overall.curves
    assert (pooled.steps[-1], pooled.num_runs, overall.in_steps) == (0.01, 2, False), "of 100,000 steps"
    assert np.interp([0, 0.01], pooled.steps, pooled.center) == pytest.approx([0.1, 0.6]), "normalised: of 100"
    curves = Curves(tasks)
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    curves.write(one)
    curves.write(two)
    assert one.read_bytes() == two.read_bytes()
    assert curves.is_current(one)
    other = Curves([task_result("ppo/cartpole", run_result(0, 51.0))])
    assert not other.is_current(one)
    assert ">CartPole-v1<" in one.read_text(encoding="utf-8")


def test_runs_without_evaluations_are_drawn_from_their_training(tmp_path: Path) -> None:
    run = run_result(0, 50.0, evaluations=None, training_returns=[(100, None), (500, 20.0), (1000, 40.0)])
    (environment,) = learning_panels([task_result("ppo/cartpole", run)])
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
    assert "classic-published.svg" in out
    assert "curves-ppo.svg" in out
    assert report(docs, results) == 0
    assert "**300.0**" in (docs / "results.md").read_text(encoding="utf-8")


def test_partial_results_are_added_and_those_without_a_commit_refused(docs: Path, tmp_path: Path, capsys: Any) -> None:
    results, runs = tmp_path / "results", tmp_path / "runs"
    for place in (results, runs / "classic", runs / "box2d", runs / "atari"):
        place.mkdir(parents=True)
    old = task_result("ppo/cartpole", *(run_result(seed, 1.0, git_commit=None) for seed in range(3)))
    write_manifest(results / "classic.json", Manifest(1, "classic", [old]))
    part = [task_result("ppo/cartpole", run_result(1, 500.0)), task_result("dqn/cartpole")]
    write_manifest(runs / "classic" / "manifest.json", Manifest(1, "classic", part))
    write_manifest(runs / "box2d" / "manifest.json", Manifest(1, "box2d", []))
    assert report(docs, results, "--add", *sorted(runs.iterdir())) == 0
    out = capsys.readouterr().out
    assert "box2d: no finished run yet" in out
    assert "atari: no finished run yet" in out
    (task,) = read_manifest(results / "classic.json").tasks
    assert task.scores() == [500.0], "runs without a commit are replaced, not patched"
    text = (docs / "results.md").read_text(encoding="utf-8")
    assert "| `ppo/cartpole`<br>CartPole-v1 | 100,000 | 1 | **500.0** |" in text
    before = (results / "classic.json").read_bytes()
    bare = task_result("ppo/cartpole", run_result(2, 500.0, git_commit=None))
    write_manifest(runs / "classic" / "manifest.json", Manifest(1, "classic", [bare]))
    assert report(docs, results, "--add", runs / "classic") == 2
    assert "ppo/cartpole seed 2 has no git commit" in capsys.readouterr().err
    assert (results / "classic.json").read_bytes() == before


def test_elsewhere_than_in_a_clone_it_says_what_is_missing(tmp_path: Path, capsys: Any) -> None:
    assert report(tmp_path, tmp_path) == 2
    assert "has no published.yaml" in capsys.readouterr().err
