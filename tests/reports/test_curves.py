"""Reading runs, telling them apart, and averaging them: against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.schedule import Linear
from rl_training.reports.curves import common_grid, label_runs, make_panels, sample, smoothed
from rl_training.reports.records import Series, find_run_dirs, read_run, read_runs
from tests.reports.made_up import write_run

NAN = math.nan


def array(*values: float) -> np.ndarray:
    return np.array(values, float)


# Maths


def test_smoothing_is_an_average_that_starts_without_bias() -> None:
    # weights 1/2, then (1/2, 1/4) / 3/4, then (1/2, 1/4, 1/8) / 7/8
    assert smoothed(array(4, 8, 0), 0.5).tolist() == pytest.approx([4, (4 + 1) / 0.75, (0 + 2 + 0.5) / 0.875])
    assert smoothed(array(4, 8), 0.0).tolist() == [4, 8]


def test_equal_steps_are_kept_and_others_become_a_grid() -> None:
    steps, slack = common_grid([array(10, 20, 30), array(10, 20)])
    assert (steps.tolist(), slack) == ([10, 20, 30], 0)
    steps, slack = common_grid([array(0, 50, 100), array(7, 52, 97)])
    assert (steps.tolist(), slack) == ([0, 50, 100], 50)


def test_a_series_is_linear_in_between_and_unknown_beyond_its_ends() -> None:
    found = sample(Series(array(10, 20), array(0, 5)), array(0, 10, 14, 20, 30, 40), 0.0)
    assert found.tolist() == pytest.approx([NAN, 0, 2, 5, NAN, NAN], nan_ok=True)
    held = sample(Series(array(10, 20), array(0, 5)), array(0, 30, 40), 10.0)
    assert held.tolist() == pytest.approx([0, 5, NAN], nan_ok=True)


# Curves


def test_a_curve_is_the_mean_over_seeds_with_how_many_there_were(tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(10, 1.0), (20, 3.0), (30, 5.0)], seed=0)
    write_run(tmp_path / "b", evaluations=[(10, 3.0), (20, 5.0)], seed=1, status="failed")
    runs, problems = read_runs(find_run_dirs([tmp_path])[0])
    assert problems == ["b: failed: shown up to its end (20 of 100,000 steps)"]
    (panel,), notes = make_panels(runs)
    (curve,) = panel.curves
    assert (panel.title, panel.metric, curve.label) == ("CartPole-v1", "eval/return_mean", "PPO")
    assert curve.steps.tolist() == [10, 20, 30]
    assert curve.center.tolist() == [2, 4, 5]
    assert curve.low.tolist() == pytest.approx([1, 3, NAN], nan_ok=True)
    assert curve.counts.tolist() == [2, 2, 1]
    assert "not all of its 2 seeds reach step 30" in notes[0]


def test_runs_of_other_steps_are_compared_in_between(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"rollout/return_mean": [(0, 0.0), (50, 50.0), (100, 100.0)]}, seed=0)
    write_run(tmp_path / "b", {"rollout/return_mean": [(10, 10.0), (40, 40.0), (100, 100.0)]}, seed=1)
    ((panel,), notes) = make_panels(read_runs(find_run_dirs([tmp_path])[0])[0])
    assert panel.metric == "rollout/return_mean"
    assert panel.curves[0].steps.tolist() == [0, 50, 100]
    assert panel.curves[0].center.tolist() == [5, 50, 100]  # b is held at 10 for the first
    assert notes == []


def test_the_final_evaluation_counts_where_there_is_no_other(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", evaluations=[(10, 1.0)])
    entries = json.loads((path / "evaluations.json").read_text())
    entries += [{"step": 10, "mean": 7.0, "final": True}, {"step": 20, "mean": 9.0, "final": True}]
    (path / "evaluations.json").write_text(json.dumps(entries))
    run = read_run(path)
    assert run.series["eval/return_mean"].values.tolist() == [1, 9]
    assert run.last_evaluation == entries[-1]
    assert run.best_return == 1


def test_evaluations_are_drawn_where_there_are_any(tmp_path: Path) -> None:
    training = {"rollout/return_mean": [(10, 1.0), (20, 2.0)]}
    write_run(tmp_path / "a", training, [(10, 5.0), (20, 6.0)], env_id="CartPole-v1")
    write_run(tmp_path / "b", training, [(20, 6.0)], env_id="Acrobot-v1")  # one point is no curve
    write_run(tmp_path / "c", {}, [(20, 6.0)], env_id="Pendulum-v1", algo="a2c")
    write_run(tmp_path / "d", training, seed=1, env_id="CartPole-v1")
    panels, notes = make_panels(read_runs(find_run_dirs([tmp_path])[0])[0])
    assert {panel.title: panel.metric for panel in panels} == {
        "CartPole-v1": "eval/return_mean",
        "Acrobot-v1": "rollout/return_mean",
        "Pendulum-v1": "eval/return_mean",
    }
    assert notes == ["d: has no metric eval/return_mean; ignored"]


def test_a_repeated_seed_is_no_further_evidence(tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluations=[(10, 1.0), (20, 1.0)], seed=3)
    write_run(tmp_path / "b", evaluations=[(10, 1.0), (20, 1.0), (30, 1.0)], seed=3)
    (panel,), notes = make_panels(read_runs(find_run_dirs([tmp_path])[0])[0])
    assert [run.name for run in panel.curves[0].runs] == ["b"]
    assert notes == ["a: repeats seed 3 of b with the same settings; ignored"]


# Labels


def test_settings_that_differ_are_in_the_label_and_seeds_are_not(tmp_path: Path) -> None:
    settings = [
        {"seed": 0, "algorithm": {"n_step": 1}},
        {"seed": 1, "algorithm": {"n_step": 3}, "eval_episodes": 5, "device": "cpu"},
        {"seed": 0, "algorithm": {"n_step": 1}, "env_id": "Acrobot-v1"},
        {"seed": 0, "algo": "ppo"},
    ]
    paths = [write_run(tmp_path / str(i), **{"algo": "dqn", **own}) for i, own in enumerate(settings)]
    assert label_runs([read_run(path) for path in paths]) == ["DQN n_step=1", "DQN n_step=3", "DQN", "PPO"]


def test_another_total_is_another_experiment_only_with_schedules(tmp_path: Path) -> None:
    def labels(name: str, **algorithm: object) -> list[str]:
        paths = [
            write_run(tmp_path / f"{name}{total}", total_timesteps=total, seed=total, algorithm=algorithm)
            for total in (100, 200)
        ]
        return label_runs([read_run(path) for path in paths])

    assert labels("plain") == ["PPO", "PPO"]
    assert labels("fading", learning_rate=Linear(1e-3)) == ["PPO total_timesteps=100", "PPO total_timesteps=200"]


def test_arguments_and_wrappers_make_another_environment(tmp_path: Path) -> None:
    def environment(name: str, **settings: object) -> str:
        return read_run(write_run(tmp_path / name, **settings)).environment  # type: ignore[arg-type]

    assert (
        environment("a", env_id="LunarLander-v3", env_kwargs={"continuous": True}) == "LunarLander-v3 continuous=true"
    )
    assert environment("b", wrappers=[{"name": "HideVelocity"}]) == "CartPole-v1 + HideVelocity"


# Runs that are not as they should be


def test_runs_are_found_a_few_levels_deep_and_once(tmp_path: Path) -> None:
    deep = write_run(tmp_path / "suite" / "CartPole-v1" / "ppo")
    write_run(tmp_path / "suite" / "a" / "b" / "c" / "too-deep")
    (tmp_path / "suite" / "link").symlink_to("/")
    found, notes = find_run_dirs([tmp_path / "suite", deep])
    assert found == [deep]
    assert notes == []
    (tmp_path / "empty").mkdir()
    assert find_run_dirs([deep, tmp_path / "empty"]) == ([deep], [f"there are no runs in '{tmp_path / 'empty'}'"])


def test_no_runs_is_an_error_that_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there are no runs in .* A run directory contains a config\.yaml"):
        find_run_dirs([tmp_path])
    with pytest.raises(ConfigError, match="'nowhere' does not exist"):
        find_run_dirs([tmp_path, Path("nowhere")])
    with pytest.raises(ConfigError, match="paths: missing; pass run directories"):
        find_run_dirs([])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metadata.json", "{", "metadata.json: is damaged"),
        ("metadata.json", '{"env_steps": "many", "status": "finished"}', "'env_steps' is 'many'"),
        ("evaluations.json", "[1, 2]", "evaluations.json: is damaged"),
        ("evaluations.json", "\x00", "evaluations.json: is damaged"),
        ("metrics.jsonl", 'no\n{"global_step": 5, "loss/x": 1.0}\n', "1 lines of metrics.jsonl are damaged"),
    ],
)
def test_a_damaged_part_is_named_and_the_rest_is_read(tmp_path: Path, file: str, content: str, said: str) -> None:
    path = write_run(tmp_path / "a", {"loss/x": [(5, 1.0)]}, [(5, 1.0)])
    (path / file).write_text(content)
    run = read_run(path)
    assert any(said in text for text in run.problems)
    assert run.series["loss/x"].values.tolist() == [1]


@pytest.mark.parametrize("content", ["", "[1]", "a: [", "\x00", "algo: ppo\nalgo: ppo"])
def test_a_run_without_a_readable_config_is_left_out_and_named(tmp_path: Path, content: str) -> None:
    (write_run(tmp_path / "bad", evaluations=[(1, 1.0)]) / "config.yaml").write_text(content)
    write_run(tmp_path / "good", evaluations=[(1, 1.0)])
    runs, problems = read_runs(find_run_dirs([tmp_path])[0])
    assert [run.name for run in runs] == ["good"]
    assert [text[:29] for text in problems] == ["bad: is damaged and ignored: "]


def test_a_line_that_is_being_written_is_not_damage(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", {"loss/x": [(5, 1.0)]}, status="running")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 6, "lo')
    run = read_run(path)
    assert run.problems == []
    assert run.env_steps == 5


def test_numbers_that_are_none_are_not_drawn(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", {"loss/x": [(5, 1.0), (6, None)], "loss/none": [(5, None)]})
    (path / "evaluations.json").write_text(
        '[{"step": 1, "mean": NaN}, {"step": 2, "mean": 1e400}, {"step": 3, "mean": 4.0, "lengths": ["x", true]},'
        f'{{"step": 1{"0" * 400}, "mean": 1.0}}]'
    )
    run = read_run(path)
    assert run.series["loss/x"].steps.tolist() == [5]
    assert "loss/none" not in run.series
    assert run.series["eval/return_mean"].steps.tolist() == [3]
    assert "eval/length_mean" not in run.series


def test_a_run_whose_parts_lie_elsewhere_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "a", evaluations=[(1, 1.0)])
    (path / "metadata.json").unlink()
    (tmp_path / "secret.json").write_text("{}")
    (path / "metadata.json").symlink_to(tmp_path / "secret.json")
    runs, problems = read_runs([path])
    assert runs == []
    assert "is a link to a path outside" in problems[0]


def test_settings_of_others_are_read_as_they_are(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", evaluations=[(1, 1.0), (2, 1.0)])
    (path / "config.yaml").write_text("algo: theirs\nenv_id: Their-v0\nseed: 4\nalgorithm: {depth: 3}\n")
    run = read_run(path)
    assert (run.title, run.environment, run.seed) == ("theirs", "Their-v0", 4)
    (panel,), _ = make_panels([run])
    assert panel.curves[0].label == "theirs"


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / "a", {"loss/x": [(5, 1.0)]}))]
    with pytest.raises(ConfigError, match=r"no run has the metric 'loss/y'\. Available: loss/x"):
        make_panels(runs, metric="loss/y")
    with pytest.raises(ConfigError, match="smooth: must be at least 0 and less than 1, got 1"):
        make_panels(runs, smooth=1.0)
    with pytest.raises(ConfigError, match=r"nothing to plot yet\na: has neither an evaluation"):
        make_panels(runs)
