"""A run that is killed at any moment and resumed ends with the same bits as one that was never stopped."""

from __future__ import annotations

import functools
import os
import signal

import gymnasium as gym
import pytest

import rl_training
from rl_training import load
from rl_training.algorithms.registry import registry
from rl_training.api.session import resume, train
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import Regime
from rl_training.data import replay_buffer
from rl_training.data.dataset import write_dataset
from rl_training.experiment.checkpointing import checkpoints_of, load_checkpoint
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.runs import RunDirectory
from rl_training.testing.resume import Crash, crash_and_resume, crash_at, differences, flat, only_run, same
from rl_training.testing.small import recorded_data
from tests.envs.goal_tasks import BitFlipping, PointTouching
from tests.envs.pixel_tasks import DOT
from tests.resume_harness import kill_and_resume, kill_at, random_delays, run_through
from tests.small import small_env, small_settings

NORMALIZED = {"normalize_obs": True, "normalize_reward": True}
GSDE = {"exploration": "gsde", "log_std_init": -1.0}
ON_POLICY = [spec for spec in registry().values() if Regime.ON_POLICY in spec.regimes]


def agent(spec, env, **settings):
    """A small agent that evaluates now and then."""
    own = {"num_steps": 16} if "num_steps" in spec.config.__dataclass_fields__ else {}
    settings = {"num_envs": 2, "seed": 3, "eval_every": 80, "eval_episodes": 2, **own, **settings}
    return getattr(rl_training, spec.title)(env, **settings)


def state_of(trained):
    """Everything a checkpoint would hold."""
    return flat(trained._experiment.trainer.state_dict())


SHORT = {"env_kwargs": {"max_episode_steps": 40}}
ENVIRONMENTS = {
    "CartPole": ("CartPole-v1", {}),
    "CartPole-native": ("CartPole-v1", {"vectorization": "native", **NORMALIZED}),
    "CartPole-async": ("CartPole-v1", {"vectorization": "async"}),
    "Pendulum": ("Pendulum-v1", {**SHORT, **NORMALIZED}),
    "frames": ("Acrobot-v1", {**SHORT, "wrappers": [{"name": "FrameStackObservation", "kwargs": {"stack_size": 3}}]}),
    "Ant": ("Ant-v5", {**SHORT, **NORMALIZED}),
    "Ant-async": ("Ant-v5", {**SHORT, "vectorization": "async"}),
    "Taxi": ("Taxi-v4", SHORT),
}


@pytest.mark.parametrize("spec", ON_POLICY, ids=lambda spec: spec.name)
@pytest.mark.parametrize("name", ["CartPole", "Pendulum"])
def test_saved_and_loaded_in_the_middle(spec, name, tmp_path):
    """Every algorithm, with discrete and with continuous actions."""
    check_saved_and_loaded(spec, *ENVIRONMENTS[name], tmp_path)


@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if name not in ("CartPole", "Pendulum")])
def test_saved_and_loaded_in_each_environment(name, tmp_path):
    """What an environment adds to the state does not depend on the algorithm."""
    check_saved_and_loaded(registry()["ppo"], *ENVIRONMENTS[name], tmp_path)


def test_saved_and_loaded_with_a_recurrent_policy_and_workers(tmp_path):
    check_saved_and_loaded(registry()["recurrent_ppo"], *ENVIRONMENTS["CartPole-async"], tmp_path)


@pytest.mark.parametrize("name", ["ppo", "a2c", "trpo"])
def test_saved_and_loaded_with_state_dependent_noise(name, tmp_path):
    check_saved_and_loaded(
        registry()[name], "Pendulum-v1", {**SHORT, "network": {**GSDE, "sde_sample_freq": 5}}, tmp_path
    )


def check_saved_and_loaded(spec, env, settings, tmp_path):
    whole = agent(spec, env, **settings)
    whole.learn(240, progress=False)
    stopped = agent(spec, env, **settings)
    stopped.learn(240, progress=False, callback=lambda run: run.env_steps < 100)
    assert stopped.num_timesteps < 240
    stopped.save(tmp_path / "agent")
    stopped.close()
    resumed = load(tmp_path / "agent")
    resumed.learn(240 - resumed.num_timesteps, progress=False)
    expected, found = state_of(whole), state_of(resumed)
    whole.close()
    resumed.close()
    assert [name for name in expected.keys() | found.keys() if not same(expected, found, name)] == []


# Off-policy: replay, priorities, hindsight and noise are state as well

NATIVE, ASYNC = {"vectorization": "native"}, {"vectorization": "async"}


class Snapshot:
    """Environments of plain attributes that say how to take their state."""

    def get_state(self):
        return {name: value for name, value in vars(self).items() if not isinstance(value, gym.Space)}

    def set_state(self, state):
        vars(self).update(state)


class SnapshotFlipping(Snapshot, BitFlipping):
    pass


class SnapshotTouching(Snapshot, PointTouching):
    pass


FRAMES = {"wrappers": [{"name": "FrameStackObservation", "kwargs": {"stack_size": 3}}]}
PRIORITIZED = {"prioritized": True, "importance_exponent": Linear(0.4, 1.0)}
OFF_POLICY = {
    "dqn": ("dqn", "CartPole-v1", {}, {}),
    "dqn-double": ("dqn", "CartPole-v1", {"double": True}, {}),
    "dqn-dueling": ("dqn", "CartPole-v1", {"dueling": True, "tau": 0.3}, {}),
    "dqn-noisy": ("dqn", "CartPole-v1", {"noisy": True}, {}),
    "dqn-n-step": ("dqn", "CartPole-v1", {"n_step": 3}, {}),
    "dqn-prioritized": ("dqn", "CartPole-v1", PRIORITIZED, {}),
    "dqn-several-envs": ("dqn", "CartPole-v1", {"n_step": 2, **PRIORITIZED}, {"num_envs": 3}),
    "dqn-async": ("dqn", "CartPole-v1", {}, {"num_envs": 2, **ASYNC}),
    "dqn-native": ("dqn", "CartPole-v1", {"n_step": 3}, {"num_envs": 3, **NATIVE, **NORMALIZED}),
    "dqn-native-prioritized": ("dqn", "CartPole-v1", PRIORITIZED, {"num_envs": 3, **NATIVE}),
    "dqn-many-updates": ("dqn", "CartPole-v1", {"num_steps": 3, "updates_per_step": 0.29}, {"num_envs": 2}),
    "dqn-hindsight": ("dqn", functools.partial(SnapshotFlipping, 6), {"her": True, **PRIORITIZED}, {"num_envs": 2}),
    "c51": ("c51", "CartPole-v1", {}, {}),
    "qrdqn": ("qrdqn", "CartPole-v1", {}, {}),
    "iqn": ("iqn", "CartPole-v1", {}, {}),
    "rainbow": ("rainbow", "CartPole-v1", {}, {}),
    "ddpg-ou": ("ddpg", "Pendulum-v1", {"noise": {"kind": "ou", "std": Linear(0.3, 0.1)}}, {"num_envs": 2}),
    "td3": ("td3", "Pendulum-v1", {"random_steps": 30}, {}),
    "drqv2": ("drqv2", DOT, {"noise": {"std": Linear(1.0, 0.1)}}, {"num_envs": 2}),
    "drqv2-frames": ("drqv2", DOT, PRIORITIZED, FRAMES),
    "sac": ("sac", "Pendulum-v1", {}, {}),
    "sac-gsde": (
        "sac",
        "Pendulum-v1",
        {"network": {"actor_sizes": (8,), "critic_sizes": (8,), **GSDE}, "num_steps": 4},
        {},
    ),
    "sac-frames-float64": ("sac", "InvertedPendulum-v5", {}, {"num_envs": 2, **FRAMES}),
    "sac-normalized": ("sac", "Pendulum-v1", {"policy_delay": 2}, {"num_envs": 2, **NORMALIZED}),
    "tqc": ("tqc", "Pendulum-v1", {"n_step": 2, **PRIORITIZED}, {"num_envs": 2}),
    "tqc-gsde": (
        "tqc",
        "Pendulum-v1",
        {"network": {"actor_sizes": (8,), "critic_sizes": (8,), **GSDE}, "num_steps": 4},
        {},
    ),
    "redq": ("redq", "Pendulum-v1", {}, {"num_envs": 2}),
    "droq": ("droq", "Pendulum-v1", PRIORITIZED, {}),
    "droq-hindsight": ("droq", functools.partial(SnapshotTouching, 2, 20, 0.5, 0.3), {"her": True}, {}),
    "crossq": ("crossq", "Pendulum-v1", {"n_step": 2, **PRIORITIZED}, {}),
    "crossq-hindsight": ("crossq", functools.partial(SnapshotTouching, 2, 20, 0.5, 0.3), {"her": True}, {}),
    "sac-hindsight": (
        "sac",
        functools.partial(SnapshotTouching, 2, 20, 0.5, 0.3),
        {"her": True, "n_step": 2, "her_strategy": "episode"},
        {},
    ),
}


@pytest.fixture
def short_segments(monkeypatch):
    """Replay in files of a few rows each."""
    monkeypatch.setattr(replay_buffer, "SEGMENT_BYTES", 200)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # these runs crash, the machine does not


def small_run(name, directory, **more):
    """The config of a run of 180 steps with a replay of 60 transitions, and the environment's class if it has no id."""
    algo, env, own, settings = OFF_POLICY[name]
    own = small_settings(algo, **{"buffer_size": 60, "learning_starts": 20, **own, **more})
    given = None if isinstance(env, str) else env
    config = TrainConfig(
        algo=algo, env_id=env if given is None else "goals", seed=5, total_timesteps=180, algorithm=own,
        eval_every=70, eval_episodes=1, log_every=25, checkpoint_every=0, checkpoint_best=False,
        tensorboard=False, output_dir=directory, **settings,
    )  # fmt: skip
    return config, given


CRASHES = (14, 45, 131, 132, 170)
"""Within the random steps, before the replay is full, and after it has gone round its ring twice."""


def check_that_crashes_leave_no_trace(config, env, tmp_path):
    whole = train(config.replace(output_dir=tmp_path / "whole"), env=env, progress=False).run_dir
    changes = {"output_dir": tmp_path / "crashed", "checkpoint_every": 12, "checkpoint_keep": 2}
    crashed = crash_and_resume(config, CRASHES, changes, env)
    assert differences(whole, crashed, ignoring=["/callbacks/CheckpointCallback"]) == []


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("name", OFF_POLICY)
def test_crashed_and_resumed_off_policy(name, tmp_path):
    check_that_crashes_leave_no_trace(*small_run(name, tmp_path), tmp_path)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("more", [{}, PRIORITIZED], ids=["uniform", "prioritized"])
def test_crashed_and_resumed_with_prior_data(more, tmp_path):
    prior = agent(registry()["sac"], "Pendulum-v1", **small_settings("sac"), eval_every=0)
    prior.learn(90, progress=False)
    prior.save_replay(tmp_path / "prior")
    prior.close()
    config, _ = small_run("sac", tmp_path, prior_replay=tmp_path / "prior", prior_ratio=0.3, **more)
    check_that_crashes_leave_no_trace(config, None, tmp_path)


# Offline: crashed in the phase on recorded data, at the switch, and after it

OFFLINE = [spec for spec in registry().values() if Regime.OFFLINE in spec.regimes and not spec.needs_images]


def phases(spec, directory, crashes):
    """A run of 150 gradient steps on recorded data and, if it can, 60 online; crashed at these positions."""
    env_id = small_env(spec)
    directory.mkdir()
    data = write_dataset(recorded_data(gym.make(env_id), 100), directory / "data.npz")
    config = TrainConfig(
        algo=spec.name, env_id=env_id, seed=5, dataset=str(data), total_updates=150, normalize_obs=True,
        algorithm=small_settings(spec), eval_every=100, eval_episodes=1, log_every=50, checkpoint_every=10,
        checkpoint_best=False, tensorboard=False, output_dir=directory,
    )  # fmt: skip
    online = {"online": True, "total_timesteps": 60} if Regime.OFF_POLICY in spec.regimes else None
    offline_crashes = [step for step in crashes if step <= 150]
    if offline_crashes:
        run = crash_and_resume(config, offline_crashes)
    else:
        run = train(config, progress=False).run_dir
    if online is not None:
        later = [step for step in crashes if step > 150]
        for step in later:
            with pytest.raises(Crash):
                resume(run, progress=False, callback=crash_at(step), **online)
        resume(run, progress=False, **online)
    return run


@pytest.mark.parametrize("spec", OFFLINE, ids=lambda spec: spec.name)
def test_crashed_and_resumed_offline_and_on_going_online(spec, tmp_path):
    whole = phases(spec, tmp_path / "whole", ())
    crashed = phases(spec, tmp_path / "crashed", (100, 150, 152, 190))
    assert differences(whole, crashed, ignoring=["/callbacks/CheckpointCallback"]) == []


def test_the_comparison_sees_a_difference_in_replay(tmp_path):
    config, _ = small_run("dqn", tmp_path)
    one = train(config.replace(output_dir=tmp_path / "one"), progress=False).run_dir
    saved = checkpoints_of(one)[-1]
    state = load_checkpoint(saved).state
    other = flat(state)
    rows = next(name for name in other if name.endswith("/rows/reward"))
    assert other[rows].shape == (60,)
    changed = {**other, rows: other[rows].copy()}
    changed[rows][7] += 1e-7
    assert [name for name in other if not same(other, changed, name)] == [rows]


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


class Signalling(gym.Wrapper):
    """Asks this process to stop at these steps of all its copies, each once."""

    steps, stops = 0, ()

    def step(self, action):
        Signalling.steps += 1
        if Signalling.steps in Signalling.stops:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)


def signalling():
    return Signalling(gym.make("CartPole-v1"))


EVALUATED = TrainConfig(
    algo="ppo",
    env_id="CartPole-v1",
    num_envs=2,
    total_timesteps=384,
    eval_every=128,
    eval_episodes=4,
    checkpoint_every=96,
    log_every=64,
    normalize_obs=True,
    algorithm={"num_steps": 32, "num_epochs": 2, "minibatch_size": 32},
)


def stopped_in_evaluations(config, stops):
    """A run that gets signals at these steps of its evaluations, and where it stopped each time."""
    Signalling.steps, Signalling.stops = 0, stops
    places = []
    result = train(config, eval_env=signalling, progress=False, on_signal="return")
    while result.interrupted:
        places.append((result.env_steps, result.stop_reason))
        assert (result.final_evaluation, RunDirectory(result.run_dir).status()) == (None, "stopped")
        result = resume(result.run_dir, eval_env=signalling, progress=False, on_signal="return")
    return result, places


def best_of(run):
    return flat(load_checkpoint(run / "checkpoints" / "best").state)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    result, places = stopped_in_evaluations(EVALUATED.replace(output_dir=directory), ())
    assert places == []
    return result, Signalling.steps


@pytest.mark.parametrize("share", [[0.02], [0.4], [0.7, 0.75], [0.99], [0.01, 0.2, 0.4, 0.6, 0.8, 1.0]])
def test_stopped_in_the_middle_of_evaluations(share, never_stopped, tmp_path):
    """What was begun is not recorded; it is made again after the resume, before anything else."""
    whole, num_steps = never_stopped
    stops = {max(1, int(part * num_steps)) for part in share}
    result, places = stopped_in_evaluations(EVALUATED.replace(output_dir=tmp_path), stops)
    assert len(places) >= 1
    assert {name for _, name in places} == {"SIGTERM"}
    assert differences(whole.run_dir, result.run_dir) == []
    assert (result.best_return, result.final_evaluation) == (whole.best_return, whole.final_evaluation)
    best, other = best_of(whole.run_dir), best_of(result.run_dir)
    assert [name for name in best.keys() | other.keys() if not same(best, other, name)] == []


def test_killed_after_an_evaluation_that_was_made_again(never_stopped, tmp_path):
    """The evaluation is in the files, and the newest checkpoint is still from before it."""
    whole, _ = never_stopped
    config = EVALUATED.replace(output_dir=tmp_path)
    Signalling.steps, Signalling.stops = 0, (3,)
    run = train(config, eval_env=signalling, progress=False, on_signal="return").run_dir
    assert RunDirectory(run).evaluations() == []
    for _ in range(2):
        with pytest.raises(Crash):
            resume(run, eval_env=signalling, callback=crash_at(192), checkpoint_every=0, progress=False)
        assert [entry["step"] for entry in RunDirectory(run).evaluations()] == [128]
    resume(run, eval_env=signalling, checkpoint_every=96, progress=False)
    assert differences(whole.run_dir, run) == []


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
