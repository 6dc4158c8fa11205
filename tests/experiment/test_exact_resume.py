"""A run that is killed at any moment and resumed ends with the same bits as one that was never stopped."""

from __future__ import annotations

import signal

import pytest

import rl_training
from rl_training import load
from rl_training.algorithms.registry import registry
from rl_training.contracts.spec import Regime
from tests.resume_harness import (
    _flat,
    _same,
    differences,
    kill_and_resume,
    kill_at,
    only_run,
    random_delays,
    run_through,
)

NORMALIZED = {"normalize_obs": True, "normalize_reward": True}
ON_POLICY = [spec for spec in registry().values() if Regime.ON_POLICY in spec.regimes]


def agent(spec, env, **settings):
    """A small agent that evaluates now and then."""
    own = {"num_steps": 16} if "num_steps" in spec.config.__dataclass_fields__ else {}
    settings = {"num_envs": 2, "seed": 3, "eval_every": 200, "eval_episodes": 2, **own, **settings}
    return getattr(rl_training, spec.title)(env, **settings)


def state_of(trained):
    """Everything a checkpoint would hold."""
    return _flat(trained._experiment.trainer.state_dict())


@pytest.mark.parametrize("spec", ON_POLICY, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"vectorization": "native", **NORMALIZED}),
        ("CartPole-v1", {"vectorization": "async"}),
        ("Pendulum-v1", NORMALIZED),
        ("Acrobot-v1", {"wrappers": [{"name": "FrameStackObservation", "kwargs": {"stack_size": 3}}]}),
        ("Ant-v5", NORMALIZED),
        ("Ant-v5", {"vectorization": "async"}),
        ("Taxi-v4", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "plain",
)
def test_saved_and_loaded_in_the_middle(spec, env, settings, tmp_path):
    whole = agent(spec, env, **settings)
    whole.learn(600, progress=False)
    stopped = agent(spec, env, **settings)
    stopped.learn(600, progress=False, callback=lambda run: run.env_steps < 250)
    assert stopped.num_timesteps < 600
    stopped.save(tmp_path / "agent")
    stopped.close()
    resumed = load(tmp_path / "agent")
    resumed.learn(600 - resumed.num_timesteps, progress=False)
    expected, found = state_of(whole), state_of(resumed)
    whole.close()
    resumed.close()
    assert [name for name in expected.keys() | found.keys() if not _same(expected, found, name)] == []


ARGS = ["train", "ppo", "CartPole-v1", "--num-envs", 4, "--seed", 5, "--total-timesteps", 6000]
ARGS += ["--algorithm.num-steps", 32, "--algorithm.num-epochs", 4, "--algorithm.minibatch-size", 32]
ARGS += ["--eval-every", 700, "--eval-episodes", 2, "--checkpoint-every", 300, "--log-every", 200]


def test_killed_at_random_moments(tmp_path):
    whole = run_through(*ARGS, "--output-dir", tmp_path / "whole")
    killed, hits = kill_and_resume(ARGS, tmp_path / "killed", random_delays(seed=1, count=3, longest=1.0))
    assert hits >= 1
    assert differences(whole, killed) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_stopped_by_a_signal(number, tmp_path):
    whole = run_through(*ARGS, "--output-dir", tmp_path / "whole")
    assert kill_at([*ARGS, "--output-dir", tmp_path / "stopped"], tmp_path / "stopped", 0.2, number)
    stopped = only_run(tmp_path / "stopped")
    run_through("resume", stopped)
    assert differences(whole, stopped) == []


def test_extended_after_its_end_like_any_run_with_that_history(tmp_path):
    runs = []
    for name in ("one", "two"):
        run = run_through(*ARGS, "--total-timesteps", 1000, "--output-dir", tmp_path / name)
        runs.append(run_through("resume", run, "--total-timesteps", 2000))
    assert differences(*runs) == []


def test_the_comparison_sees_a_difference(tmp_path):
    one = run_through(*ARGS, "--total-timesteps", 600, "--output-dir", tmp_path / "one")
    other = run_through(*ARGS, "--total-timesteps", 600, "--seed", 6, "--output-dir", tmp_path / "other")
    found = differences(one, other)
    assert {"metrics.jsonl", "tensorboard", "evaluations.json"} <= set(found)
    assert any(name.startswith("state /algorithm/policy") for name in found)
