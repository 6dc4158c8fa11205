"""The one-file reference and the package: equal seeds, equal transitions, equal batches, equal losses, equal weights.

They share no code. What is left between them is rounding: the package's Adam is fused and works on one flat tensor, and
it clips by the norm of that tensor and not by the norm of the norms. So most tests let the networks of both sides
compute in double precision, where rounding is out of the way and the slightest other difference is seen.
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

from examples import dqn_cartpole_reference as reference
from rl_training import DQN, Linear
from rl_training.algorithms.dqn import DQNAlgorithm
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.policies.targets import Target

# Measured over 150 gradient steps and six seeds: 4e-15 and 3e-6.
DOUBLE, SINGLE = 1e-10, 1e-5
GAMMA = float(np.float32(0.99))
"""A discount that is the same number in both precisions: batches hold it in single precision."""

METRICS = {"loss": "loss/critic", "q_mean": "value/q_mean", "gradient_norm": "train/gradient_norm"}
WEIGHTS = {"0": "hidden.1", "2": "hidden.3", "4": "head"}


class Run:
    """What one side did: the replay, every batch, metrics of every gradient step, returns, and final weights."""

    def __init__(self):
        self.replay, self.batches, self.updates, self.returns = {}, [], [], []
        self.weights, self.target_weights = {}, {}


def settings(**changes):
    """150 gradient steps with four copies of the target network, on episodes that terminate and that are truncated."""
    values = {"seed": 3, "total_timesteps": 700, "max_episode_steps": 12, "num_hidden": 64, "buffer_size": 10_000}
    values |= {"learning_starts": 100, "num_steps": 4, "updates_per_step": 0.25, "batch_size": 32}
    values |= {"learning_rate": 1e-3, "gamma": GAMMA, "epsilon_fraction": 0.5, "target_update_every": 35}
    return reference.Args(**{**values, **changes})


def run_reference(args):
    run = Run()

    def watch(update):
        not_over = ~update["terminated"]
        batch = {name: update[name] for name in ("obs", "action", "reward", "next_obs")}
        run.batches.append({**batch, "discount": args.gamma * not_over.float()})
        run.updates.append({name: float(update[name]) for name in METRICS})

    with contextlib.redirect_stdout(None):
        result = reference.train(args, watch)
    run.replay, run.returns = result["replay"], result["returns"]
    run.weights, run.target_weights = result["parameters"], result["target_parameters"]
    return run


def agent_like(args, **changes):
    limit = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
    same = ("seed", "buffer_size", "learning_starts", "num_steps", "updates_per_step", "batch_size", "learning_rate")
    same += ("gamma", "target_update_every", "max_grad_norm")
    values = {name: getattr(args, name) for name in same}
    values["network"] = {"sizes": [args.num_hidden, args.num_hidden]}
    values["epsilon"] = Linear(args.epsilon_start, args.epsilon_end, until=args.epsilon_fraction)
    return DQN(args.env_id, env_kwargs=limit, eval_every=0, device="cpu", **{**values, **changes})


def run_package(args, agent=None):
    run = Run()
    agent = agent or agent_like(args)
    trainer = agent._experiment.trainer
    update = DQNAlgorithm.update

    def watched(algorithm, batch, progress):
        result = update(algorithm, batch, progress)
        run.batches.append({name: getattr(batch, name) for name in ("obs", "action", "reward", "next_obs", "discount")})
        run.updates.append({ours: float(result.metrics[theirs]) for ours, theirs in METRICS.items()})
        return result

    with mock.patch.object(DQNAlgorithm, "update", watched):
        agent.learn(args.total_timesteps, progress=False)
    run.replay = rows_of(trainer.sampler.buffer)
    run.returns = list(trainer.collector.statistics.returns)
    run.weights = weights_of(trainer.algorithm.policy.network)
    run.target_weights = weights_of(trainer.algorithm.target.module)
    agent.close()
    return run


def rows_of(buffer):
    index = buffer.everything()
    columns = {name: getattr(buffer, name)[index] for name in ("action", "reward", "terminated", "truncated")}
    return {**columns, "obs": buffer.observations(index), "next_obs": buffer.next_observations(index)}


def weights_of(network):
    named = dict(network.named_parameters())
    assert len(named) == 2 * len(WEIGHTS)
    return {
        f"{ours}.{kind}": named[f"{theirs}.{kind}"].detach().clone()
        for ours, theirs in WEIGHTS.items()
        for kind in ("weight", "bias")
    }


def assert_same_data(ours, theirs):
    for name, column in ours.replay.items():
        np.testing.assert_array_equal(column, theirs.replay[name], err_msg=name)
    assert ours.returns[-100:] == theirs.returns
    assert len(ours.batches) == len(theirs.batches)
    for index, (a, b) in enumerate(zip(ours.batches, theirs.batches, strict=True)):
        for name in a:
            assert torch.equal(a[name], b[name]), f"{name} of batch {index}"


def assert_same_learning(ours, theirs, tolerance=DOUBLE):
    for index, (a, b) in enumerate(zip(ours.updates, theirs.updates, strict=True)):
        for name in METRICS:
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), f"{name} of update {index}"
    for a, b in ((ours.weights, theirs.weights), (ours.target_weights, theirs.target_weights)):
        assert a.keys() == b.keys()
        for name, weight in a.items():
            torch.testing.assert_close(weight, b[name], rtol=0.0, atol=tolerance)


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
@pytest.mark.parametrize("seed", [3, 4])
def test_equal_seeds_equal_numbers(seed):
    args = settings(seed=seed)
    ours, theirs = run_reference(args), run_package(args)

    # the run is worth comparing: episodes that end in both ways, terminated rows in batches, a target that lags
    assert theirs.replay["terminated"].sum() > 5
    assert theirs.replay["truncated"].sum() > 5
    assert len(ours.updates) == 150
    assert sum(int((batch["discount"] == 0).sum()) for batch in ours.batches) > 100
    assert all(not torch.equal(ours.weights[name], ours.target_weights[name]) for name in ours.weights)
    assert all(weight.dtype == torch.float64 for run in (ours, theirs) for weight in run.weights.values())

    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs)


@pytest.mark.parametrize("seed", [3, 4])
def test_equal_seeds_almost_equal_numbers_in_single_precision(seed):
    args = settings(seed=seed)
    ours, theirs = run_reference(args), run_package(args)
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs, SINGLE)


def test_the_first_gradient_step_sees_values_that_are_equal_but_for_the_last_digit():
    args = settings(total_timesteps=101, num_steps=1, updates_per_step=1.0)
    ours, theirs = run_reference(args), run_package(args)
    assert_same_data(ours, theirs)
    assert len(ours.updates) == 1
    assert ours.updates[0]["q_mean"] == pytest.approx(theirs.updates[0]["q_mean"], rel=1e-6)


@pytest.mark.usefixtures("double_precision")
def test_a_full_replay_forgets_the_oldest():
    args = settings(buffer_size=150)
    ours, theirs = run_reference(args), run_package(args)
    assert len(ours.replay["obs"]) == 150
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs)


@pytest.mark.usefixtures("double_precision")
def test_rounds_of_many_gradient_steps_and_a_budget_that_ends_within_one():
    args = settings(learning_starts=90, num_steps=64, updates_per_step=0.5, total_timesteps=400)
    ours, theirs = run_reference(args), run_package(args)
    assert len(ours.updates) == 155
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs)


def test_the_defaults_are_the_preset():
    args = reference.Args(seed=3, total_timesteps=1_100)
    agent = DQN.from_preset(args.env_id, seed=args.seed, eval_every=0, device="cpu")
    assert agent.config.total_timesteps == reference.Args().total_timesteps
    ours, theirs = run_reference(args), run_package(args, agent)
    assert len(ours.updates) == 50
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs, SINGLE)


def test_the_defaults_of_the_package():
    defaults = {"num_hidden": 64, "buffer_size": 1_000_000, "batch_size": 32, "learning_rate": 1e-4, "gamma": 0.99}
    defaults |= {"epsilon_end": 0.05, "epsilon_fraction": 0.1, "target_update_every": 2_500}
    args = settings(max_episode_steps=None, total_timesteps=500, **defaults)
    ours = run_reference(args)
    theirs = run_package(args, DQN(args.env_id, seed=args.seed, eval_every=0, device="cpu"))
    assert len(ours.updates) == 100
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs, SINGLE)


def test_another_seed_is_another_run():
    ours, theirs = run_reference(settings(seed=3)), run_package(settings(seed=4))
    with pytest.raises(AssertionError):
        assert_same_data(ours, theirs)
    with pytest.raises(AssertionError):
        assert_same_learning(ours, theirs, SINGLE)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0.9899},
        {"loss": "mse"},
        {"double": True},
        {"tau": 0.99},
        {"target_update_every": 36},
        {"learning_rate": 1.001e-3},
        {"optimizer": {"eps": 1e-7}},
        {"max_grad_norm": 0.1},
        {"n_step": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_package_with_another_setting_is_noticed(change):
    args = settings(total_timesteps=400)
    assert_notices(run_reference(args), run_package(args, agent_like(args, **change)))


@pytest.mark.usefixtures("double_precision")
def test_a_package_whose_target_network_never_follows_is_noticed(monkeypatch):
    args = settings(total_timesteps=280)
    ours = run_reference(args)
    monkeypatch.setattr(Target, "update", lambda self, tau=1.0: None)
    assert_notices(ours, run_package(args))


@pytest.mark.usefixtures("double_precision")
def test_a_package_that_takes_truncation_for_termination_is_noticed(monkeypatch):
    args = settings(total_timesteps=280)
    ours = run_reference(args)
    right = ReplayBuffer.add

    def wrong(buffer, step):
        right(buffer, step._replace(terminated=step.terminated | step.truncated))

    monkeypatch.setattr(ReplayBuffer, "add", wrong)
    assert_notices(ours, run_package(args))


@pytest.mark.usefixtures("double_precision")
def test_a_package_that_takes_the_next_episode_for_the_next_observation_is_noticed(monkeypatch):
    args = settings(total_timesteps=280)
    ours = run_reference(args)
    monkeypatch.setattr(
        ReplayBuffer,
        "next_observations",
        lambda self, index: self.observations((index + self.num_envs) % self.num_slots),
    )
    assert_notices(ours, run_package(args))


@pytest.mark.usefixtures("double_precision")
def test_a_reference_that_takes_truncation_for_termination_is_noticed(monkeypatch):
    class Wrong(gym.Wrapper):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated or truncated, False, info

    args = settings(total_timesteps=280)
    theirs = run_package(args)
    make = gym.make
    monkeypatch.setattr(gym, "make", lambda *arguments, **kwargs: Wrong(make(*arguments, **kwargs)))
    assert_notices(run_reference(args), theirs)


def test_the_reference_does_not_import_the_package():
    nodes = list(ast.walk(ast.parse(Path(reference.__file__).read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not [name for name in imported if name.startswith("rl_training")]


def test_the_reference_runs_as_a_script(tmp_path):
    done = subprocess.run(
        [sys.executable, reference.__file__, "--total-timesteps", "1100", "--seed", "1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["step", "1100"]
    assert all(part in lines[0] for part in ("mean return", "loss", "q mean"))
    assert lines[-1].startswith("final return: ")
    assert list(tmp_path.iterdir()) == []
