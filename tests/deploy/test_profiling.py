"""Profiles: every part of a run is measured, nothing is counted twice, and nothing stays behind."""

import json

import pytest

from rl_training.api.session import train
from rl_training.cli import main
from rl_training.deploy.profiling import MAX_EVENTS, PROFILE, TRACE, Profiler
from rl_training.experiment.config import TrainConfig

SMALL = {
    "ppo": {"num_steps": 32, "num_epochs": 1, "minibatch_size": 32},
    "dqn": {"learning_starts": 16, "num_steps": 1, "updates_per_step": 1, "batch_size": 8, "buffer_size": 200},
}
PARTS = {
    "ppo": {"collect", "env", "act", "store", "update", "evaluate", "log", "checkpoint"},
    "dqn": {"collect", "env", "act", "store", "sample", "update", "evaluate", "log", "checkpoint"},
}


@pytest.mark.parametrize("algo", SMALL)
def test_the_parts_of_a_run(algo, tmp_path):
    config = TrainConfig(
        algo=algo,
        env_id="CartPole-v1",
        num_envs=1,
        total_timesteps=64,
        eval_every=32,
        eval_episodes=1,
        log_every=16,
        output_dir=tmp_path,
        algorithm=SMALL[algo],
    )
    result = train(config, progress=False, profile=True)
    profile = json.loads((result.run_dir / PROFILE).read_text())
    parts = {part["name"]: part for part in profile["parts"]}
    assert set(parts) == PARTS[algo]
    assert parts["env"]["calls"] == 64
    assert parts["act"]["calls"] > 64  # evaluations act as well
    assert parts["update"]["calls"] == (2 if algo == "ppo" else 48)
    assert all(0 <= part["own_seconds"] <= part["seconds"] + 1e-9 for part in parts.values())
    assert sum(part["own_seconds"] for part in parts.values()) <= profile["wall_seconds"]
    inside = sum(parts[name]["seconds"] for name in ("env", "store"))
    assert parts["collect"]["seconds"] - parts["collect"]["own_seconds"] >= inside - 1e-6
    trace = json.loads((result.run_dir / TRACE).read_text())["traceEvents"]
    assert {event["name"] for event in trace} == PARTS[algo]
    assert all(event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0 for event in trace)


def test_what_was_watched_is_as_before():
    class Counter:
        def count(self):
            return 1

    counter, profiler = Counter(), Profiler()

    def fail():
        assert counter.count() == 1
        assert "count" in vars(counter)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), profiler.watching([(counter, "count", "work")]):
        fail()
    assert vars(counter) == {}
    assert profiler.parts()[0].calls == 1


def test_a_trace_has_an_end_and_the_table_goes_on():
    counter, profiler = type("Counter", (), {"count": lambda self: None})(), Profiler()
    with profiler.watching([(counter, "count", "work")]):
        for _ in range(MAX_EVENTS + 5):
            counter.count()
    assert len(profiler.events) == MAX_EVENTS
    assert profiler.parts()[0].calls == MAX_EVENTS + 5
    assert "work" in profiler.table()


def test_from_the_command_line(tmp_path, capsys):
    args = ["train", "ppo", "CartPole-v1", "--profile", "--total-timesteps", "64", "--eval-every", "0", "--quiet"]
    args += ["--algorithm.num-steps", "16", "--num-envs", "2", "--output-dir", str(tmp_path)]
    assert main(args) == 0
    assert "collect" in capsys.readouterr().err
    (run,) = tmp_path.iterdir()
    assert (run / PROFILE).is_file()
    assert (run / TRACE).is_file()
