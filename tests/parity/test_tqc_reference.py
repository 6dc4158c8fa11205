"""The one-file reference of TQC and the package: equal seeds and initial weights, equal numbers.

As for SAC (test_sac_reference.py): most tests let the networks of both sides compute in double precision, where
rounding is out of the way and the slightest other difference is seen.
"""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch

from examples import tqc_reference as reference
from rl_training import TQC
from rl_training.algorithms.tqc import TQCAlgorithm

# As for SAC. In single precision a hidden unit or a distance that is almost exactly zero may come out positive on one
# side only; then a few weights part by more than rounding.
DOUBLE, SINGLE = 1e-10, 1e-5
GAMMA = float(np.float32(0.99))
"""A discount that is the same number in both precisions: batches hold it in single precision."""

METRICS = {
    "critic_loss": "loss/critic",
    "actor_loss": "loss/policy",
    "alpha_loss": "loss/temperature",
    "q_mean": "value/q_mean",
    "alpha": "train/temperature",
    "entropy": "policy/entropy",
}


class Short(gym.Wrapper):
    """A pendulum that terminates when it turns too fast."""

    def step(self, action):
        # the package casts, the reference in double precision does not
        obs, reward, _, truncated, info = super().step(np.asarray(action, np.float32))
        return obs, reward, bool(abs(obs[2]) > 4.0), truncated, info


gym.register("TQCParity-v0", lambda: Short(gym.make("Pendulum-v1").unwrapped), max_episode_steps=12)


class Run:
    """What one side did: the replay, every batch, metrics of every gradient step, returns, and final weights."""

    def __init__(self):
        self.replay, self.batches, self.updates, self.returns, self.weights = {}, [], [], [], {}


def settings(**changes):
    """20 gradient steps, with truncated episodes, on a pole that terminates and on a pendulum that does not."""
    values = {"env_id": "TQCParity-v0", "seed": 3, "total_timesteps": 80, "learning_starts": 60, "batch_size": 32}
    sizes = {"num_critics": 3, "num_quantiles": 7, "buffer_size": 1_000}
    return reference.Args(**{**values, **sizes, "gamma": GAMMA, **changes})


def run_reference(args, initial):
    run = Run()

    def start(networks):
        for name, network in networks.items():
            network.load_state_dict({key: initial[f"{name}.{key}"] for key in network.state_dict()})

    def watch(update):
        batch = {name: update[name] for name in ("obs", "action", "reward", "next_obs")}
        run.batches.append({**batch, "discount": args.gamma * (~update["terminated"]).float()})
        run.updates.append({name: float(update[name]) for name in METRICS})

    with contextlib.redirect_stdout(None):
        result = reference.train(args, start, watch)
    run.replay, run.returns, run.weights = result["replay"], result["returns"], result["parameters"]
    return run


def agent_like(args, **changes):
    limit = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
    same = ("seed", "buffer_size", "learning_starts", "batch_size", "learning_rate", "gamma", "tau")
    same += ("initial_temperature", "target_entropy", "num_critics", "num_quantiles", "num_dropped")
    values = {name: getattr(args, name) for name in same}
    return TQC(args.env_id, env_kwargs=limit, eval_every=0, device="cpu", **{**values, **changes})


def run_both(args, agent=None):
    """The package's run, with weights before it, and the reference's from the same weights."""
    run = Run()
    agent = agent or agent_like(args)
    trainer = agent._experiment.trainer
    initial = weights_of(trainer.algorithm)
    update = TQCAlgorithm.update

    def watched(algorithm, batch, progress):
        result = update(algorithm, batch, progress)
        run.batches.append({name: getattr(batch, name) for name in ("obs", "action", "reward", "next_obs", "discount")})
        run.updates.append({ours: float(result.metrics[theirs]) for ours, theirs in METRICS.items()})
        return result

    with mock.patch.object(TQCAlgorithm, "update", watched):
        agent.learn(args.total_timesteps, progress=False)
    run.replay = rows_of(trainer.sampler.buffer)
    run.returns = list(trainer.collector.statistics.returns)
    run.weights = weights_of(trainer.algorithm)
    agent.close()
    return run_reference(args, initial), run


def rows_of(buffer):
    index = buffer.everything()
    columns = {name: getattr(buffer, name)[index] for name in ("action", "reward", "terminated", "truncated")}
    return {**columns, "obs": buffer.observations(index), "next_obs": buffer.next_observations(index)}


def weights_of(algorithm):
    """Under the reference's names. Layers of the ensemble hold [E, inputs, outputs], `nn.Linear` [outputs, inputs]."""
    trunk = algorithm.policy.actor.trunk
    found = {"log_alpha": algorithm.temperature.log_alpha}
    for index, layer in (("0", trunk.hidden[0]), ("2", trunk.hidden[2]), ("4", trunk.head)):
        found |= {f"actor.{index}.weight": layer.weight, f"actor.{index}.bias": layer.bias}
    for part, critic in (("critics", algorithm.policy.critic), ("target_critics", algorithm.critic_target.module)):
        for index, layer in zip(("0", "2", "4"), critic.members.layers, strict=True):
            for member in range(critic.members.num_members):
                found[f"{part}.{member}.{index}.weight"] = layer.weight[member].mT
                found[f"{part}.{member}.{index}.bias"] = layer.bias[member].squeeze(0)
    return {name: weight.detach().clone() for name, weight in found.items()}


def assert_same_data(ours, theirs, tolerance=0.0):
    """In single precision actions differ, from the first gradient step on, by what the weights differ."""
    for name, column in ours.replay.items():
        np.testing.assert_allclose(column, theirs.replay[name], rtol=0.0, atol=tolerance, err_msg=name)
    assert ours.returns[-100:] == pytest.approx(theirs.returns, rel=tolerance, abs=0.0)
    for index, (a, b) in enumerate(zip(ours.batches, theirs.batches, strict=True)):
        for name in a:
            assert torch.allclose(a[name].double(), b[name].double(), 0.0, tolerance), f"{name} of batch {index}"


def assert_same_learning(ours, theirs, tolerance=DOUBLE):
    for index, (a, b) in enumerate(zip(ours.updates, theirs.updates, strict=True)):
        for name in METRICS:
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), f"{name} of update {index}"
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        off = (weight - theirs.weights[name]).abs()
        assert off.mean() <= 0.1 * tolerance, name
        assert off.max() <= (tolerance if tolerance == DOUBLE else 100 * tolerance), name


def assert_notices(ours, theirs):
    """Both sides acted alike until they learned, and then not even a tolerance 10,000 times as large would do."""
    assert torch.equal(ours.batches[0]["obs"], theirs.batches[0]["obs"])
    with pytest.raises(AssertionError):
        assert_same_learning(ours, theirs, tolerance=1e4 * DOUBLE)


@pytest.fixture
def double_precision(monkeypatch):
    """Networks are made and evaluated in float64, in the package and in the reference; replay stays as it is."""
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: linear(x.double(), self.weight, self.bias))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("changes", [{}, {"num_dropped": 0, "tau": 0.1}, {"num_critics": 1, "num_dropped": 5}])
def test_equal_seeds_equal_numbers(changes):
    ours, theirs = run_both(settings(**changes))

    # the run is worth comparing: episodes that end in both ways, terminated rows in batches, a target that lags
    assert theirs.replay["terminated"].sum() > 2
    assert theirs.replay["truncated"].sum() > 2
    assert len(ours.updates) == 20
    assert sum(int((batch["discount"] == 0).sum()) for batch in ours.batches) > 20
    assert not torch.allclose(ours.weights["critics.0.0.weight"], ours.weights["target_critics.0.0.weight"])
    assert ours.weights["log_alpha"] != 0
    assert all(weight.dtype == torch.float64 for run in (ours, theirs) for weight in run.weights.values())

    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs)


def test_the_defaults_are_the_preset():
    args = reference.Args(seed=3, total_timesteps=105)
    agent = TQC.from_preset(args.env_id, seed=args.seed, eval_every=0, device="cpu")
    assert agent.config.total_timesteps == reference.Args().total_timesteps
    ours, theirs = run_both(args, agent)
    assert len(ours.updates) == 5
    assert_same_data(ours, theirs, SINGLE)
    assert_same_learning(ours, theirs, SINGLE)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("change", [{"num_dropped": 1}, {"kappa": 0.99}, {"tau": 0.00501}], ids=str)
def test_a_package_with_another_setting_is_noticed(change):
    args = settings(total_timesteps=70)
    assert_notices(*run_both(args, agent_like(args, **change)))


@pytest.mark.usefixtures("double_precision")
def test_a_package_whose_actor_takes_the_smallest_critic_is_noticed(monkeypatch):
    def smallest(policy, obs, action):
        return policy.critic(obs, action).mean(2)

    monkeypatch.setattr("rl_training.policies.actors.MeanCriticPolicy.q_values", smallest)
    assert_notices(*run_both(settings(total_timesteps=70)))


def test_the_reference_does_not_import_the_package():
    nodes = list(ast.walk(ast.parse(Path(reference.__file__).read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not [name for name in imported if name.startswith("rl_training")]


def test_the_reference_runs_as_a_script(tmp_path):
    done = subprocess.run(
        [sys.executable, reference.__file__, "--total-timesteps", "105", "--seed", "1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["step", "105"]
    assert all(part in lines[0] for part in ("mean return", "critic loss", "actor loss", "entropy"))
    assert lines[-1].startswith("final return: ")
    assert list(tmp_path.iterdir()) == []
