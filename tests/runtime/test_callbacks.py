"""Callbacks: each by itself with a made-up run, their order in a real one, and what survives a checkpoint."""

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from rl_training import PPO, Callback
from rl_training.contracts.batches import EvaluationResult
from rl_training.runtime import callbacks
from rl_training.runtime.callbacks import (
    EvaluationCallback,
    Every,
    FunctionCallback,
    StopAfterSeconds,
    StopOnNoImprovement,
    StopOnReward,
    as_callbacks,
)

SMALL = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "device": "cpu"}


class FakeRun:
    """As much of a run as callbacks may see."""

    def __init__(self):
        self.env_steps = self.iterations = self.updates = 0
        self.total_timesteps = 1_000
        self.policy = object()
        self.best_return = None
        self.reason, self.evaluations, self.recorded = None, [], {}

    @property
    def position(self):
        return self.env_steps

    def metrics(self):
        return {"global_step": self.env_steps, **self.recorded}

    def record(self, metrics):
        self.recorded.update(metrics)

    def report_evaluation(self, result):
        self.evaluations.append(result)

    def stop(self, reason):
        self.reason = reason


def evaluation(mean):
    return EvaluationResult([mean - 1.0, mean + 1.0], [10, 10])


# Ending a run


def test_stop_on_reward():
    run, callback = FakeRun(), StopOnReward(100.0)
    callback.on_evaluation(run, evaluation(99.9))
    assert run.reason is None
    callback.on_evaluation(run, evaluation(100.0))
    assert "100" in run.reason


def test_stop_on_no_improvement():
    run, callback = FakeRun(), StopOnNoImprovement(patience=2)
    for mean in (1.0, 0.0, 2.0, 2.0):  # an equal one is not better
        callback.on_evaluation(run, evaluation(mean))
    assert run.reason is None
    assert (callback.best, callback.waited) == (2.0, 1)
    callback.on_evaluation(run, evaluation(1.9))
    assert "2.00" in run.reason


def test_stop_on_no_improvement_remembers():
    callback = StopOnNoImprovement(patience=2)
    for mean in (5.0, 4.0):
        callback.on_evaluation(FakeRun(), evaluation(mean))
    run, resumed = FakeRun(), StopOnNoImprovement(patience=2)
    resumed.load_state_dict(callback.state_dict())
    resumed.on_evaluation(run, evaluation(4.5))
    assert run.reason is not None
    assert callback.state_dict() == {"best": 5.0, "waited": 1}, "patience is a setting, not state"


class FakeClock:
    def __init__(self):
        self.now = 1_000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(callbacks, "time", clock)
    return clock


def test_time_limit(clock):
    run, callback = FakeRun(), StopAfterSeconds(60.0)
    callback.on_start(run)
    clock.now += 59
    callback.on_iteration(run)
    assert run.reason is None
    clock.now += 1
    callback.on_iteration(run)
    assert "60" in run.reason


def test_time_limit_counts_over_resumes_but_not_between_them(clock):
    callback = StopAfterSeconds(60.0)
    callback.on_start(FakeRun())
    clock.now += 40
    callback.on_iteration(FakeRun())
    run, resumed = FakeRun(), StopAfterSeconds(60.0)
    resumed.load_state_dict(callback.state_dict())
    clock.now += 10_000
    resumed.on_start(run)
    clock.now += 19
    resumed.on_iteration(run)
    assert run.reason is None
    clock.now += 1
    resumed.on_iteration(run)
    assert run.reason is not None
    assert resumed.spent == pytest.approx(60.0)


@pytest.mark.parametrize(("answer", "stops"), [(False, True), (np.False_, True), (None, False), (True, False)])
def test_a_function_ends_the_run_by_returning_false(answer, stops):
    def decide(run):
        return answer

    run = FakeRun()
    FunctionCallback(decide).on_iteration(run)
    assert (run.reason is not None) == stops
    assert not stops or "decide" in run.reason


def test_functions_without_a_name_are_fine():
    run = FakeRun()
    FunctionCallback(functools.partial(lambda answer, run: answer, False)).on_iteration(run)
    assert run.reason is not None


def test_callbacks_from_what_users_give():
    one, function = StopOnReward(1.0), len
    assert as_callbacks(None) == []
    assert as_callbacks(one) == [one]
    found = as_callbacks([one, function, [one, None]])
    assert [type(item) for item in found] == [StopOnReward, FunctionCallback, StopOnReward]
    assert found[1].function is function


# Periods


def test_every_is_due_once_in_each_period():
    every = Every(100)
    due = [steps for steps in range(0, 1_001, 30) if every.due(steps)]
    assert due == [120, 210, 300, 420, 510, 600, 720, 810, 900]


def test_every_does_not_catch_up():
    every = Every(10)
    assert [every.due(steps) for steps in (5, 57, 58, 59, 60)] == [False, True, False, False, True]


def test_every_zero_is_never():
    assert not any(Every(0).due(steps) for steps in (0, 1, 10**9))


def test_every_remembers():
    every, resumed = Every(100), Every(100)
    assert every.due(250)
    resumed.load_state_dict(every.state_dict())
    assert not resumed.due(299)
    assert resumed.due(300)
    assert every.state_dict() == {"last": 250}


def test_every_goes_on_with_another_period():
    # a resumed run may evaluate less often than before: it must not wait until it has caught up in periods
    before, after = Every(100), Every(1_000)
    assert before.due(2_050)
    after.load_state_dict(before.state_dict())
    assert [step for step in range(2_100, 5_100, 100) if after.due(step)] == [3_000, 4_000, 5_000]


# Evaluation during training


def test_evaluations_are_made_when_due_and_reported():
    calls = []

    def evaluate(policy, num_episodes, *, deterministic, seed):
        calls.append((policy, num_episodes, deterministic, seed))
        return evaluation(float(len(calls)))

    run, callback = FakeRun(), EvaluationCallback(evaluate, Every(100), num_episodes=7, deterministic=False, seed=3)
    for steps in (50, 100, 150, 200):
        run.env_steps = steps
        callback.on_iteration(run)
    assert [result.mean for result in run.evaluations] == [1.0, 2.0]
    assert [call[:3] for call in calls] == [(run.policy, 7, False)] * 2
    assert calls[0][3] != calls[1][3], "fresh start states each time"
    assert run.recorded["time/evaluation_seconds"] > 0

    # a resumed one goes on with the seed that the other would have used
    resumed = EvaluationCallback(evaluate, Every(100), num_episodes=7, deterministic=False, seed=3)
    resumed.load_state_dict(callback.state_dict())
    run.env_steps = 300
    resumed.on_iteration(run)
    callback.on_iteration(run)
    assert len(calls) == 4
    assert calls[2] == calls[3]
    assert calls[2][3] not in (calls[0][3], calls[1][3])


# In a run


@dataclass
class Diary(Callback):
    """Writes down what it is told; `events` is shared, so the order over callbacks shows."""

    name: str
    events: list
    fail_at: str | None = None
    iterations: int = field(default=0, init=False)

    def note(self, event):
        self.events.append(f"{self.name}.{event}")
        if event == self.fail_at:
            raise RuntimeError(f"{self.name} fails at {event}")

    def on_start(self, run):
        self.note("start")

    def on_iteration(self, run):
        self.iterations += 1
        self.note(f"iteration{run.iterations}")

    def on_evaluation(self, run, result):
        self.note("evaluation")

    def on_stop(self, run):
        self.note("stop")

    def close(self):
        self.note("close")


def learn(*given, steps=64, **settings):
    agent = PPO("CartPole-v1", **{**SMALL, "eval_every": 0, **settings})
    try:
        return agent.learn(steps, callback=list(given), progress=False)
    finally:
        agent.close()


def both(event):
    return [f"a.{event}", f"b.{event}"]


def test_order_of_hooks():
    events = []
    learn(Diary("a", events), Diary("b", events))
    assert events == [*both("start"), *both("iteration1"), *both("iteration2"), *both("stop"), *both("close")]


def test_evaluations_reach_everybody_before_the_iteration_does():
    events = []
    learn(Diary("a", events), Diary("b", events), eval_every=64, eval_episodes=1)
    middle = [*both("iteration1"), *both("evaluation"), *both("iteration2")]
    assert events == [*both("start"), *middle, *both("stop"), *both("close")]


@pytest.mark.parametrize("fail_at", ["start", "iteration1", "stop"])
def test_callbacks_are_closed_however_the_run_ends(fail_at):
    events = []
    with pytest.raises(RuntimeError, match="a fails"):
        learn(Diary("a", events, fail_at), Diary("b", events))
    assert events[-2:] == both("close")
    assert "b.stop" not in events, "it is not told of an end that was none"


def test_a_callback_that_cannot_close_does_not_keep_the_others_open():
    events = []
    with pytest.raises(RuntimeError, match="a fails at close"):
        learn(Diary("a", events, "close"), Diary("b", events))
    assert events[-2:] == both("close")


def test_all_callbacks_hear_of_the_iteration_that_stops():
    events = []
    result = learn(Diary("a", events), lambda run: False, Diary("b", events), steps=1_000)
    assert result.env_steps == 32
    assert events == [*both("start"), *both("iteration1"), *both("stop"), *both("close")]
    assert "lambda" in result.stop_reason


def test_what_a_callback_sees():
    seen = []

    def look(run):
        seen.append((run.env_steps, run.total_timesteps, run.iterations, run.updates))
        metrics = run.metrics()
        assert metrics["global_step"] == run.env_steps
        assert all(isinstance(value, (int, float)) for value in metrics.values())
        assert math.isfinite(metrics["loss/total"])

    learn(look)
    assert [row[:3] for row in seen] == [(32, 64, 1), (64, 64, 2)]
    assert seen[1][3] == 2 * seen[0][3] > 0


def test_a_new_callback_begins_anew_and_the_same_one_goes_on():
    agent = PPO("CartPole-v1", eval_every=0, **SMALL)
    same = Diary("a", [])
    agent.learn(64, callback=[same, Diary("b", [])], progress=False)
    new = Diary("b", [])
    agent.learn(64, callback=[same, new], progress=False)
    assert (same.iterations, new.iterations) == (4, 2)


def test_callbacks_get_what_they_remembered_from_a_checkpoint_but_keep_their_settings(tmp_path):
    agent = PPO("CartPole-v1", eval_every=0, **SMALL)
    agent.learn(64, callback=Diary("a", []), progress=False)
    agent.save(tmp_path / "agent")
    resumed = Diary("b", [])
    PPO.load(tmp_path / "agent").learn(64, callback=resumed, progress=False)
    assert (resumed.iterations, resumed.name) == (4, "b")


def test_settings_end_runs():
    result = learn(steps=1_000, eval_every=32, eval_episodes=1, stop_reward=1.0)
    assert result.env_steps == 32
    assert "reached 1" in result.stop_reason
    assert result.best_return >= 1.0
    # a policy that never changes does not get better for long
    result = learn(steps=1_000, eval_every=32, eval_episodes=2, stop_patience=1, learning_rate=0.0)
    assert result.env_steps < 1_000
    assert "no evaluation better" in result.stop_reason


def test_max_seconds_ends_a_run(clock):
    def tick(run):
        clock.now += 10

    result = learn(tick, steps=10_000, max_seconds=25.0)
    # the limit looks before `tick` does: 0, 10, 20, 30 seconds
    assert result.env_steps == 4 * 32
    assert "25" in result.stop_reason
