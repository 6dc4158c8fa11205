"""Benchmarks against peers: what is computed from their runs, and that all sides are given the same work."""

from __future__ import annotations

import doctest
import sys

import numpy as np
import pytest
import torch
from benchmarks.sides.tasks import TASKS, Task
from gymnasium import spaces
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import harness, limits, page, scaling, summaries, throughput
from rl_training.experiment.config import Layer, resolve
from rl_training.policies.encoders import NatureCNN

sys.path.append(str(harness.SIDES))  # where the scripts find each other, in environments without this package
import run_ours
import run_sb3


def runs(*speeds):
    return [{"steps_per_second": speed} for speed in speeds]


# Numbers


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(summaries).failed == 0
    assert doctest.testmod(summaries).attempted >= 5


def test_a_spread_is_of_what_there_is():
    assert summaries.spread_of(runs(1.0, 9.0, 2.0), "steps_per_second") == (2.0, 1.0, 9.0)
    assert summaries.spread_of([{"seconds_to_first_step": None}], "seconds_to_first_step") is None
    assert summaries.spread([]) is None


def test_ratios_are_taken_turn_by_turn():
    # a slow turn slows both sides: its ratio is that of the others, that of the medians would not be
    ours, theirs = runs(300.0, 30.0, 310.0), runs(100.0, 10.0, 100.0)
    assert summaries.ratios(ours, theirs) == pytest.approx([3.0, 3.0, 3.1])
    assert summaries.ratios(ours, theirs[:1]) == pytest.approx([3.0])  # a side that failed later
    assert summaries.ratios([], theirs) == []


def test_equally_fast_with_one_thread_is_better():
    assert summaries.fastest({"2": 5.0, "1": 5.0}) == 1
    assert summaries.fastest({"1": 5.0, "16": 6.0}) == 16


def test_time_to_a_step_is_measured_if_the_run_was_that_long():
    run = {"seconds_to_start": 10.0, "steps_per_second": 100.0, "steps": 2_000, "seconds": 33.0}
    assert summaries.seconds_to(20_000, run, start=400) == pytest.approx(10 + 196)
    assert summaries.seconds_to(2_000, run, start=400) == 33.0


def test_the_part_that_takes_most_is_named():
    assert summaries.Shares(0.5, 0.2, 0.1).largest == "environment"
    assert summaries.Shares(0.1, 0.2, 0.6).largest == "learning"
    assert summaries.Shares(0.1, 0.2, 0.2).rest == pytest.approx(0.5)
    assert summaries.Shares(0.1, 0.2, 0.2).largest == "the rest"


# Tasks


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_a_valid_run_that_ends_with_an_iteration(name):
    task = TASKS[name]
    config = resolve([Layer(run_ours.config_of(task, 0, "runs"), "benchmark")])
    assert config.num_threads is None
    assert task.steps % task.iteration == 0
    assert task.start % task.iteration == 0
    assert task.settings.get("learning_starts", 0) < task.start < task.steps
    shorter = task.measuring(0.01)
    assert task.start < shorter.steps <= task.steps
    assert shorter.steps % task.iteration == 0


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.peers])
def test_every_setting_of_a_task_reaches_the_peers(name, monkeypatch):
    monkeypatch.setattr(run_sb3, "gaussian", lambda env_id, std: (env_id, std))
    task = TASKS[name]
    _, kwargs = run_sb3.arguments(task, {"tanh": "tanh", "relu": "relu"})  # raises for what it does not know
    assert kwargs["gamma"] == task.settings["gamma"]
    assert kwargs["policy_kwargs"]["optimizer_kwargs"] == {"eps": task.settings["optimizer"]["eps"]}
    assert kwargs["policy_kwargs"]["net_arch"] == list(task.sizes)
    if "vf_coef" in task.settings:
        assert kwargs["vf_coef"] == task.settings["vf_coef"] / 2  # their value loss is twice ours


def test_updates_of_dqn_are_as_frequent_there():
    _, kwargs = run_sb3.arguments(TASKS["dqn_pong"], {})
    assert (kwargs["train_freq"], kwargs["gradient_steps"]) == (4, 1)
    assert kwargs["target_update_interval"] == 4 * TASKS["dqn_pong"].settings["target_update_every"]


def test_a_setting_that_peers_do_not_know_is_refused():
    task = Task("", "sac", "HalfCheetah-v5", 2, 1, {**TASKS["sac_halfcheetah"].settings, "n_step": 3})
    with pytest.raises(KeyError, match="n_step"):
        run_sb3.arguments(task, {"relu": "relu"})


# Comparisons


def fake_runner(speeds, fails=()):
    """A runner that fails where it is told to, and the calls that it gets."""
    calls = []

    def run(side, threads, steps):
        calls.append((side, threads, steps))
        if (side, sum(call[0] == side for call in calls)) in fails:
            raise harness.SideError("no memory left")
        return {"steps_per_second": speeds[side, threads], "steps": steps}

    return run, calls


def test_sides_take_turns_with_the_best_threads(monkeypatch):
    monkeypatch.setattr(throughput.os, "cpu_count", lambda: 4)
    run, calls = fake_runner({("ours", 0): 9.0, ("sb3", 1): 2.0, ("sb3", 4): 3.0, ("sbx", 1): 5.0, ("sbx", 4): 4.0})
    task = TASKS["sac_halfcheetah"]
    sides = throughput.compare(task, ["sb3", "sbx"], 2, run, full=True)
    trials = 2 * 2 * throughput.NUM_TRIALS
    assert [call[:2] for call in calls[: trials // 2]] == [("sb3", 1), ("sb3", 4)] * throughput.NUM_TRIALS
    turn = [("ours", 0, task.steps), ("sb3", 4, task.steps), ("sbx", 1, task.steps)]
    assert calls[trials : trials + 6] == turn * 2
    assert [call[2] for call in calls[trials + 6 :]] == [20_000] * 3
    assert sides["sb3"].trials == {"1": 2.0, "4": 3.0}
    assert (sides["ours"].trials, sides["ours"].error) == ({}, None)


def test_one_disturbed_trial_does_not_choose_the_threads(monkeypatch):
    monkeypatch.setattr(throughput.os, "cpu_count", lambda: 2)
    found = {1: iter([5.0, 5.1, 5.2]), 2: iter([1.0, 8.0, 7.0]), 0: iter([9.0])}
    sides = throughput.compare(
        TASKS["sac_halfcheetah"], ["sb3"], 0, lambda side, threads, steps: {"steps_per_second": next(found[threads])}
    )
    assert (sides["sb3"].threads, sides["sb3"].trials) == (2, {"1": 5.1, "2": 7.0})


def test_a_side_that_fails_is_left_out_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(throughput.os, "cpu_count", lambda: 1)
    speeds = {("ours", 0): 9.0, ("sb3", 1): 2.0, ("sbx", 1): 5.0}
    run, calls = fake_runner(speeds, fails={("sbx", 1), ("sb3", throughput.NUM_TRIALS + 2)})
    sides = throughput.compare(TASKS["ppo_cartpole"], ["sb3", "sbx"], 3, run)
    assert [len(side.runs) for side in sides.values()] == [3, 1, 0]
    assert [side.error for side in sides.values()] == [None, "no memory left", "no memory left"]
    assert [call[0] for call in calls].count("sbx") == 1


def test_peers_without_the_algorithm_are_not_asked():
    run, calls = fake_runner({("ours", 0): 1.0, ("sb3", 1): 1.0, ("sb3", 2): 1.0})
    throughput.compare(TASKS["recurrent_ppo_cartpole"], ["sbx"], 1, run)
    assert {call[0] for call in calls} == {"ours"}


# Files and processes


def test_results_are_merged_task_by_task(tmp_path, capsys):
    path = tmp_path / "results" / "some.json"
    harness.merge_results(path, "tasks", {"a": {"speed": 1.23456789}, "b": 1})
    harness.merge_results(path, "tasks", {"b": 2})
    harness.merge_results(path, "about", {"load": 0.5})
    assert harness.read_results(path) == {
        "format": harness.FORMAT,
        "tasks": {"a": {"speed": 1.2346}, "b": 2},
        "about": {"load": 0.5},
    }
    path.write_text('{"a": {}}')
    assert harness.read_results(path) == {"format": harness.FORMAT}
    assert "another format" in capsys.readouterr().out


def test_threads_are_left_to_each_side(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "src")
    assert "OMP_NUM_THREADS" not in harness.variables("ours", 0)
    assert harness.variables("ours", 0)["PYTHONPATH"] == "src"
    assert harness.variables("sb3", 2)["OMP_NUM_THREADS"] == "2"
    assert "PYTHONPATH" not in harness.variables("sb3", 2)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('too small')", "ValueError: too small"),
        ("print('hello')", "printed no result, but: hello"),
        ("print(3)", "printed no result, but: 3"),
        ("import time; time.sleep(9)", "took more than"),
    ],
)
def test_what_went_wrong_in_a_process_is_said(code, message, tmp_path):
    with pytest.raises(harness.SideError, match=message):
        harness.run_side("ours", ["-c", code], tmp_path, timeout=0.5 if "sleep" in code else 30)


def test_the_last_line_of_a_process_is_its_result(tmp_path):
    assert harness.run_side("ours", ["-c", "print('noise'); print('{\"a\": 1}')"], tmp_path) == {"a": 1}


@pytest.mark.parametrize("name", scaling.SWEEPS)
def test_every_point_of_a_sweep_is_a_valid_config(name):
    sweep = scaling.SWEEPS[name]
    for value in sweep.values:
        assert resolve([Layer(sweep.config(value), "benchmark")]).algo in name + " ppo"


# Limits


def multiplications(name, parts):
    """Multiplications of all products per step, from the shapes that the products were made of."""
    with FlopCounterMode(display=False) as counter:
        total = 0.0
        for share, products in parts(TASKS[name]):
            before = counter.get_total_flops()
            for product in products:
                product()
            total += share * (counter.get_total_flops() - before) / 2
    return total


def test_the_limit_has_the_products_of_an_update_and_no_others():
    rows, width, seen, actions = 256, 256, 17, 6

    def passes(num_inputs, num_outputs):  # first layer, second layer, last layer
        return np.array([num_inputs * width, width * width, width * num_outputs])

    actor, critic, not_first = passes(seen, 2 * actions), passes(seen + actions, 0), np.array([0, 1, 1])
    to_actions = passes(actions, 0)  # nobody asks how observations should change
    sac = 2 * actor + actor + actor * not_first + 2 * (3 * critic + critic + critic * not_first + to_actions)
    assert multiplications("sac_halfcheetah", limits.sac) == rows * sac.sum()
    actor = passes(seen, actions)
    slow = actor + actor + actor * not_first + critic + to_actions
    td3 = actor + 2 * (2 * critic + critic + critic * not_first) + slow / 2
    assert multiplications("td3_halfcheetah", limits.td3) == rows * td3.sum()


def test_the_limit_of_convolutions_is_that_of_the_encoder():
    encoder = NatureCNN(spaces.Box(0, 255, (4, 84, 84), np.uint8))
    with FlopCounterMode(display=False) as counter:
        features = encoder(torch.zeros(32, 4, 84, 84, dtype=torch.uint8))
        forward = counter.get_total_flops() / 2
        torch.autograd.grad(features.sum(), list(encoder.parameters()))
        both = counter.get_total_flops() / 2
    # acting on one of them; a quarter of an update: the target's values, and what was counted here
    assert multiplications("dqn_pong", limits.dqn_pong) == forward / 32 + (forward + both) / 4


def test_the_page_shows_how_near_to_the_limit_the_sides_are():
    limit = {"steps_per_second": 200.0, "arithmetic": 0.004, "environment": 0.001}
    task = {"task": {"title": "Some task"}, **entry([100.0], [50.0])}
    rows = page.limit_rows(page.Results(tasks={"a": task}, limits={"a": limit, "b": limit}))
    assert rows == [["Some task", "200", "4.00 ms", "1.00 ms", "50%", "25%", "–"]]


# The page


def test_the_page_shows_what_was_measured():
    found = page.stale()
    names = [str(path.relative_to(page.ROOT)) for path in found]
    assert not found, f"stale: {names}; run `python benchmarks/page.py`"


def test_a_changed_result_and_a_missing_plot_are_noticed(tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    for path in page.RESULTS.glob("*.json"):
        (results / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    data = page.read_json(results / "throughput.json")
    data["tasks"]["ppo_cartpole"]["sides"]["ours"]["runs"] = [
        {**run, "steps_per_second": 123_456.0} for run in data["tasks"]["ppo_cartpole"]["sides"]["ours"]["runs"]
    ]
    page_file, plot = page.DOCS / page.PAGE, page.DOCS / page.FIGURES / "throughput.svg"
    (results / "throughput.json").write_text(harness.json.dumps(data), encoding="utf-8")
    assert {page_file, plot} <= set(page.stale(results=results))
    assert "123,456" in page.stale(results=results)[page_file].text
    assert set(page.stale(docs=tmp_path)) == {tmp_path / path.relative_to(page.DOCS) for path in page.contents()}


def entry(ours, theirs, error=None):
    return {
        "task": {"title": "Some task"},
        "sides": {"ours": {"runs": runs(*ours), "error": None}, "sb3": {"runs": runs(*theirs), "error": error}},
    }


def test_what_is_slower_is_called_so():
    row = page.throughput_table({"a": entry([50.0, 40.0, 45.0], [100.0, 100.0, 100.0])}).splitlines()[2]
    assert row == ("| Some task | **45.0** (40.0 to 50.0) | **100** | – | **0.45** (0.40 to 0.50) slower | – |")


def test_what_failed_is_shown():
    tasks = {"a": entry([50.0], [], error="ImportError: no such module")}
    assert page.throughput_table(tasks).splitlines()[2] == "| Some task | **50.0** | failed | – | – | – |"
    assert "- Some task, Stable-Baselines3: ImportError: no such module" in page.failures(tasks)


def test_too_few_or_shortened_runs_are_called_trials():
    task = TASKS["ppo_cartpole"]

    def tasks(repeats, steps):
        return {"ppo_cartpole": {"repeats": repeats, "task": {"steps": steps}}}

    assert not page.is_trial(tasks(3, task.steps))
    assert page.is_trial(tasks(2, task.steps))
    assert page.is_trial(tasks(3, task.measuring(0.5).steps))


def test_a_page_without_results_says_so():
    text = page.page(page.Results())
    assert "Nothing has been measured yet." in text
    assert "## Training" not in text
