"""The one-file reference of IQL and the package: equal seeds, equal numbers.

The package's networks are one batched product per layer, and its Adam is fused, so results differ in rounding. Most
tests let the networks of both sides compute in double precision, where the slightest other difference is seen.
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

from examples import iql_reference as reference
from rl_training import IQL
from rl_training.algorithms.iql import IQLAlgorithm
from rl_training.data.recorded import RecordedTransitions
from rl_training.policies.targets import Target

DOUBLE, SINGLE = 1e-10, 1e-5
GAMMA = float(np.float32(0.99))
"""A discount that is the same number in both precisions: batches hold it in single precision."""
METRICS = {
    "value_loss": "loss/value",
    "actor_loss": "loss/policy",
    "critic_loss": "loss/critic",
    "q_mean": "value/q_mean",
    "weight_mean": "policy/weight_mean",
}
UPDATES = 60


class Steered(gym.Env):
    """Only its spaces matter: two actions with unequal bounds."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(np.array([-1.0, 0.5], np.float32), np.array([3.0, 1.0], np.float32))


gym.register("ParitySteered-v0", Steered, max_episode_steps=12)


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    """Episodes of random numbers: some terminated, some truncated, the last one unfinished."""
    rng, rows = np.random.default_rng(0), 205
    obs, final = rng.normal(size=(rows, 3)).astype(np.float32), rng.normal(size=(rows, 3)).astype(np.float32)
    last = np.arange(rows) % 10 == 9
    terminated = last & (np.arange(rows) % 20 < 10)
    ended = last | (np.arange(rows) == rows - 1)
    low, high = Steered.action_space.low, Steered.action_space.high
    path = tmp_path_factory.mktemp("data") / "steered.npz"
    np.savez(
        path,
        observations=obs,
        actions=rng.uniform(low, high, (rows, 2)).astype(np.float32),
        rewards=rng.normal(size=rows).astype(np.float32),
        next_observations=np.where(ended[:, None], final, np.roll(obs, -1, axis=0)),
        terminations=terminated,
        truncations=ended & ~terminated,
    )
    return path


class Run:
    """What one side did: every batch, metrics of every gradient step, and final weights."""

    def __init__(self):
        self.batches, self.updates, self.weights = [], [], {}


def settings(path, **changes):
    values = {"env_id": "ParitySteered-v0", "seed": 3, "total_updates": UPDATES, "batch_size": 64, "eval_episodes": 0}
    return reference.Args(str(path), **{**values, "gamma": GAMMA, **changes})


def agent_like(args, **changes):
    same = ("seed", "batch_size", "gamma", "tau", "expectile", "inverse_temperature", "max_weight")
    values = {name: getattr(args, name) for name in same}
    values |= {"learning_rate": {"schedule": "cosine", "start": args.learning_rate}}
    values |= {"critic_learning_rate": args.learning_rate}
    values |= {"data": {"reward_preset": "iql_locomotion"}} if args.scale_rewards else {}
    return IQL(args.env_id, eval_every=0, device="cpu", **{**values, **changes})


def run_both(args, agent=None):
    run = Run()
    agent = agent or agent_like(args)
    algorithm = agent._experiment.trainer.algorithm
    initial = weights_of(algorithm)
    update = IQLAlgorithm.update

    def watched(algorithm, batch, progress):
        result = update(algorithm, batch, progress)
        run.batches.append({name: getattr(batch, name) for name in ("obs", "action", "reward", "next_obs", "discount")})
        run.updates.append({ours: float(result.metrics[theirs]) for ours, theirs in METRICS.items()})
        return result

    with mock.patch.object(IQLAlgorithm, "update", watched):
        # the phase offline has an algorithm of its own, with the state of this one
        agent.learn_offline(args.dataset, args.total_updates, progress=False)
    run.weights = weights_of(agent._experiment.trainer.algorithm)
    agent.close()
    return run_reference(args, initial), run


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
        run.weights = reference.train(args, start, watch)["parameters"]
    return run


def weights_of(algorithm):
    """Under the reference's names. Layers of the ensemble hold [E, inputs, outputs], `nn.Linear` [outputs, inputs]."""
    policy = algorithm.policy
    trunk, found = policy.actor.trunk, {"log_std": policy.actor.log_std}
    for index, layer in (("0", trunk.hidden[0]), ("2", trunk.hidden[2]), ("4", trunk.head)):
        found |= {f"actor.{index}.weight": layer.weight, f"actor.{index}.bias": layer.bias}
    ensembles = [("q{}", policy.critic, 2), ("q{}_target", algorithm.critic_target.module, 2)]
    for pattern, critic, size in [*ensembles, ("v", policy.state_value, 1)]:
        for index, layer in zip(("0", "2", "4"), critic.members.layers, strict=True):
            for member in range(size):
                name = pattern.format(member + 1)
                found[f"{name}.{index}.weight"] = layer.weight[member].mT
                found[f"{name}.{index}.bias"] = layer.bias[member].squeeze(0)
    return {name: weight.detach().clone() for name, weight in found.items()}


def assert_same_data(ours, theirs):
    for index, (a, b) in enumerate(zip(ours.batches, theirs.batches, strict=True)):
        for name in a:
            assert torch.allclose(a[name].double(), b[name].double(), 0.0, 1e-7), f"{name} of batch {index}"


def assert_same_learning(ours, theirs, tolerance=DOUBLE):
    for index, (a, b) in enumerate(zip(ours.updates, theirs.updates, strict=True)):
        for name in METRICS:
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), f"{name} of update {index}"
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        off = (weight - theirs.weights[name]).abs()
        assert off.mean() <= 0.1 * tolerance, name
        assert off.max() <= (tolerance if tolerance == DOUBLE else 100 * tolerance), name


@pytest.fixture
def double_precision(monkeypatch):
    """Networks are made and evaluated in float64, in the package and in the reference; the data stays as it is."""
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: linear(x.double(), self.weight, self.bias))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "changes", [{}, {"seed": 4, "scale_rewards": False, "expectile": 0.9}], ids=["scaled", "plain"]
)
def test_equal_seeds_equal_numbers(changes, data_file):
    ours, theirs = run_both(settings(data_file, **changes))
    assert len(ours.updates) == UPDATES
    assert sum(int((batch["discount"] == 0).sum()) for batch in ours.batches) > 100
    assert not torch.allclose(ours.weights["q1.0.weight"], ours.weights["q1_target.0.weight"])
    assert all(weight.dtype == torch.float64 for run in (ours, theirs) for weight in run.weights.values())
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs)


def test_equal_seeds_almost_equal_numbers_in_single_precision(data_file):
    ours, theirs = run_both(settings(data_file, total_updates=25))
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs, SINGLE)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0.98},
        {"tau": 0.006},
        {"expectile": 0.701},
        {"inverse_temperature": 3.01},
        {"critic_learning_rate": 3.01e-4},
        {"learning_rate": 3e-4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_package_with_another_setting_is_noticed(change, data_file):
    args = settings(data_file, total_updates=20)
    ours, theirs = run_both(args, agent_like(args, **change))
    with pytest.raises(AssertionError):
        assert_same_learning(ours, theirs, tolerance=10 * DOUBLE)


@pytest.mark.usefixtures("double_precision")
def test_a_package_whose_target_networks_never_follow_is_noticed(monkeypatch, data_file):
    monkeypatch.setattr(Target, "update", lambda self, tau=1.0: None)
    ours, theirs = run_both(settings(data_file, total_updates=20))
    with pytest.raises(AssertionError):
        assert_same_learning(ours, theirs, tolerance=10 * DOUBLE)


def test_a_package_that_takes_the_next_episode_for_the_next_observation_is_noticed(monkeypatch, data_file):
    monkeypatch.setattr(
        RecordedTransitions, "next_observations", lambda self, index: self.observations((index + 1) % self.num_slots)
    )
    ours, theirs = run_both(settings(data_file, total_updates=5))
    with pytest.raises(AssertionError, match="next_obs"):
        assert_same_data(ours, theirs)


def test_the_reference_does_not_import_the_package():
    nodes = list(ast.walk(ast.parse(Path(reference.__file__).read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not [name for name in imported if name.startswith("rl_training")]


def test_the_reference_runs_as_a_script(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "pendulum.npz",
        observations=rng.normal(size=(20, 3)),
        actions=rng.uniform(-2, 2, (20, 1)),
        rewards=rng.normal(size=20),
        next_observations=rng.normal(size=(20, 3)),
        terminations=np.zeros(20, bool),
        truncations=np.arange(20) % 10 == 9,
    )
    done = subprocess.run(
        [sys.executable, reference.__file__, "pendulum.npz", "--total-updates", "20", "--eval-episodes", "1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["update", "20"]
    assert all(part in lines[0] for part in ("value loss", "actor loss", "critic loss", "weight mean"))
    assert lines[-1].startswith("mean return: ")
