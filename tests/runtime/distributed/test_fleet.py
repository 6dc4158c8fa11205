"""Fleets: the same bits wherever workers run and however often they die, and what happens when they do not answer."""

import os
import random
import signal
from collections import deque
from dataclasses import replace

import pytest

from rl_training.api.agent import make_agent
from rl_training.api.session import train
from rl_training.contracts.errors import ConfigError, EnvError
from rl_training.contracts.state import same_state
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.distributed import fleet as module
from rl_training.runtime.distributed.backends import InlineBackend, WorkerLostError
from rl_training.testing.probes import PROBE, Probe
from rl_training.testing.resume import crash_and_resume, differences
from tests.small import small_settings

STEPS = 200
RUN = {"num_envs": 4, "eval_every": 0, "seed": 3, "device": "cpu", "accelerate": "off"}
NORMALIZED = {"normalize_obs": True, "normalize_reward": True}


def make(algo, workers, env=PROBE, **settings):
    agent = make_agent(algo, env, workers=workers, **{**RUN, **small_settings(algo), **settings})
    return agent, agent._experiment.trainer


def trained(algo, workers, callback=None, **settings):
    """State of the algorithm, the normalisers and the episodes after a short run."""
    agent, trainer = make(algo, workers, **settings)
    try:
        agent.learn(STEPS + 3, progress=False, callback=callback)
        collector = trainer.collector
        parts = [trainer.algorithm, collector.statistics, collector.obs_normalizer]
        state = [part.state_dict() for part in parts if part is not None]
        state[1] = {name: state[1][name] for name in ("returns", "lengths", "num_episodes")}
        assert trainer.env_steps == STEPS + 4
        return state
    finally:
        agent.close()


@pytest.mark.parametrize(("algo", "settings"), [("ppo", NORMALIZED), ("sac", {"env": "Pendulum-v1"})])
def test_one_worker_is_the_ordinary_run(algo, settings):
    ordinary = trained(algo, {}, **settings)
    assert same_state(trained(algo, {"count": 1, "backend": "inline"}, **settings), ordinary)


def killing(seed):
    """A callback that kills a worker process at some updates."""
    rng = random.Random(seed)
    killed = []

    def kill(run):
        lines = run.collector.backend.lines
        if rng.random() < 0.4 and len(killed) < 2:
            killed.append(rng.choice(list(lines)))
            os.kill(lines[killed[-1]].process.pid, signal.SIGKILL)

    kill.killed = killed
    return kill


@pytest.mark.parametrize(
    ("algo", "mode", "settings"), [("ppo", "pipelined", NORMALIZED), ("sac", "sync", {"env": "Pendulum-v1"})]
)
def test_killed_processes_end_with_the_bits_of_inline(algo, mode, settings):
    kill = killing(1)
    workers = {"count": 2, "mode": mode}
    inline = trained(algo, {**workers, "backend": "inline"}, **settings)
    assert same_state(trained(algo, {**workers, "backend": "process"}, callback=kill, **settings), inline)
    assert kill.killed


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["sync", "pipelined"])
@pytest.mark.parametrize("seed", range(10))
def test_many_kills(mode, seed):
    workers = {"count": 3, "mode": mode, "envs_per_worker": 2}
    settings = {"num_steps": 8, **NORMALIZED}

    def run(backend, callback=None):
        agent, trainer = make("ppo", {**workers, "backend": backend}, **settings)
        agent.learn(2_000, progress=False, callback=callback)
        state = trainer.algorithm.state_dict()
        agent.close()
        return state

    kill = killing(seed)
    assert same_state(run("process", kill), run("inline"))
    assert kill.killed


@pytest.mark.soak
def test_a_stopped_process_is_found_by_the_deadline():
    stopped = []

    def stop(run):
        if not stopped:
            stopped.append(run.collector.backend.lines[1].process.pid)
            os.kill(stopped[0], signal.SIGSTOP)

    workers = {"count": 2, "backend": "process"}
    found = trained("ppo", workers, callback=stop, env_timeout=5.0)
    assert stopped
    assert same_state(found, trained("ppo", {**workers, "backend": "inline"}))


@pytest.mark.parametrize("mode", ["sync", "pipelined", "async"])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_resumed_runs_are_exact(tmp_path, algo, mode):
    """Also async, inline: then nothing depends on time."""
    settings = {"prioritized": True} if algo == "dqn" else {}
    config = TrainConfig.from_dict(
        {
            **RUN,
            "algo": algo,
            "env_id": PROBE,
            "workers": {"count": 2, "backend": "inline", "mode": mode},
            "total_timesteps": 320,
            "checkpoint_every": 96,
            "log_every": 32,
            "eval_every": 64,
            "eval_episodes": 1,
            "tensorboard": False,
            "output_dir": tmp_path / "whole",
            "algorithm": small_settings(algo, **settings),
            **(NORMALIZED if mode != "async" else {}),
        }
    )
    whole = train(config, progress=False)
    assert whole.env_steps == 320
    resumed = crash_and_resume(config.replace(output_dir=tmp_path / "resumed"), [160])
    if mode == "async":  # a checkpoint waits for rollouts, so later ones begin at other times
        return
    assert differences(whole.run_dir, resumed) == []


def test_lag_of_each_mode():
    lags = {}
    for mode in ("sync", "pipelined", "async"):
        agent, trainer = make("ppo", {"count": 2, "backend": "inline", "mode": mode, "max_lag": 1})
        agent.learn(STEPS, progress=False)
        lags[mode] = [trainer.metrics()[f"workers/{name}"] for name in ("lag_min", "lag_max", "dropped")]
        assert trainer.env_steps == STEPS
        agent.close()
    assert lags["sync"] == [0, 0, 0]
    assert lags["pipelined"] == [1, 1, 0]
    assert lags["async"][1] == 1


class Unreliable(InlineBackend):
    """Loses the workers that a test says, each time before the answer with this number arrives."""

    can_lose_workers = True

    def __init__(self, build, setup, losses=(), silent=()):
        super().__init__(build, setup)
        self.losses, self.silent = list(losses), list(silent)
        self.number = 0

    def next(self, timeout):
        self.number += 1
        if self.number in self.silent:
            return None
        if self.number in self.losses:
            raise WorkerLostError(self.answers[0][0], "died (exit code -9)")
        return super().next(timeout)

    def start(self, index):
        if index in self.workers:  # what it had answered is lost
            self.workers.pop(index).close()
            self.answers = deque(item for item in self.answers if item[0] != index)
        super().start(index)


def with_backend(monkeypatch, **faults):
    """Runs whose inline workers are lost."""
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(module.Fleet, "_start", _started_with(faults, module.Fleet._start))


def _started_with(faults, start):
    def replaced(fleet):
        make = fleet.make_backend
        if fleet.backend is None:
            fleet.make_backend = lambda: Unreliable(*make.args[1:], **faults)
        start(fleet)

    return replaced


@pytest.mark.parametrize("faults", [{"losses": (5, 8, 9)}, {"silent": (6,)}, {"losses": (1,)}])
@pytest.mark.parametrize("mode", ["sync", "pipelined"])
def test_lost_workers_make_the_same_rollouts_again(monkeypatch, faults, mode):
    workers = {"count": 2, "backend": "inline", "mode": mode}
    whole = trained("ppo", workers, **NORMALIZED)
    with_backend(monkeypatch, **faults)
    assert same_state(trained("ppo", workers, **NORMALIZED), whole)


def test_it_gives_up_when_a_worker_is_lost_again_and_again(monkeypatch):
    with_backend(monkeypatch, losses=range(4, 100))
    with pytest.raises(EnvError, match=r"worker \d died \(exit code -9\), 6 times in a row.*env_timeout"):
        trained("ppo", {"count": 2, "backend": "inline"})


def test_an_error_in_a_worker_names_it():
    agent, trainer = make("ppo", {"count": 2, "backend": "process"}, env_kwargs={"kind": "walk", "actions": "Box"})
    try:
        trainer.collector.timeout = 60.0
        setup = trainer.collector.make_backend.args[2]
        setup["config"]["env_kwargs"] = {"kind": "walk", "actions": "nonsense"}
        with pytest.raises(EnvError, match=r"worker \d raised .*nonsense"):
            agent.learn(STEPS, progress=False)
    finally:
        agent.close()


def test_settings_that_cannot_work():
    base = {"algo": "ppo", "env_id": PROBE}
    with pytest.raises(ConfigError, match="workers: with mode async"):
        TrainConfig.from_dict({**base, "normalize_obs": True, "workers": {"count": 2, "mode": "async"}})
    with pytest.raises(ConfigError, match="workers: cannot be combined with her"):
        TrainConfig.from_dict({**base, "algo": "sac", "workers": {"count": 2}, "algorithm": {"her": True}})
    agent = make_agent("ppo", Probe, workers={"count": 2}, **RUN)
    with pytest.raises(ConfigError, match="workers: need an environment id"):
        agent.learn(STEPS, progress=False)


def test_environments_are_shared_out():
    base = {"algo": "ppo", "env_id": PROBE, "num_envs": 6}
    assert TrainConfig.from_dict({**base, "workers": {"count": 4}}).num_envs == 8
    config = TrainConfig.from_dict({**base, "workers": {"count": 4, "envs_per_worker": 3}})
    assert config.num_envs == 12
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert config.replace(workers={"envs_per_worker": 5}).num_envs == 20
    assert replace(config.workers, count=0).count == 0


def test_log_probabilities_are_those_of_the_weights_that_acted():
    """At a lag of one update, the learner's weights before the update give other ones."""
    agent, trainer = make("ppo", {"count": 2, "backend": "inline", "mode": "pipelined"}, learning_rate=0.01)
    algorithm, gaps = trainer.algorithm, []
    update = algorithm.update

    def judged(batch, progress):
        rows = batch.flatten()
        logprobs, _ = algorithm.policy.score(rows.obs, rows.actions)
        gaps.append(float((logprobs - rows.logprobs).abs().max()))
        return update(batch, progress)

    algorithm.update = judged
    agent.learn(STEPS, progress=False)
    agent.close()
    assert gaps[0] < 1e-6 < 1e-3 < min(gaps[1:])
