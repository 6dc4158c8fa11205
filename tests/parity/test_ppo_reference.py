"""The one-file reference and the package: equal seeds, equal rollouts, equal losses, equal weights.

They share no code. What is left between them is rounding: the package's Adam is fused and works on one flat tensor, it
clips by the norm of that tensor and not by the norm of the norms, and it values observations in batches of other sizes.
"""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch

from examples import ppo_cartpole_reference as reference
from rl_training import PPO, Linear
from rl_training.data.rollout_buffer import RolloutBuffer

EXAMPLES = Path(reference.__file__).parent

# Measured over 16 updates and six seeds: losses 1e-6 (absolute), weights 3e-6, advantages and values 9e-6.
LOSS = {"rel": 1e-5, "abs": 1e-6}
WEIGHT = {"rtol": 1e-5, "atol": 1e-5}
ROLLOUT = {"rtol": 1e-5, "atol": 1e-5}

METRICS = {
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "value_loss": "loss/critic",
    "entropy": "policy/entropy",
    "approx_kl": "policy/approx_kl",
    "clip_fraction": "policy/clip_fraction",
    "gradient_norm": "train/gradient_norm",
    "mean_return": "rollout/return_mean",
    "step": "global_step",
}
WEIGHTS = {
    "actor.0": "actor.1.0",
    "actor.2": "actor.1.2",
    "actor.4": "head.linear",
    "critic.0": "critic.1.0",
    "critic.2": "critic.1.2",
    "critic.4": "value_head",
}


class Run:
    """What one side did: rollouts, metrics of each update under the reference's names, and final weights."""

    def __init__(self):
        self.rollouts, self.updates, self.weights = [], [], {}


def settings(**changes):
    """Six rollouts, minibatches, an entropy bonus, schedules, and a last rollout that is cut to the budget."""
    values = {"seed": 3, "total_timesteps": 2_816, "num_envs": 4, "num_steps": 128, "num_epochs": 4, "ent_coef": 0.01}
    return reference.Args(**{**values, "minibatch_size": 64, **changes})


def run_reference(args):
    run = Run()
    with contextlib.redirect_stdout(None):
        result = reference.train(
            args, lambda rollout: run.rollouts.append({name: rows.clone() for name, rows in rollout.items()})
        )
    run.updates = result["updates"]
    run.weights = result["parameters"]
    return run


def agent_like(args):
    schedule = Linear if args.anneal else float
    limit = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
    same = ("seed", "num_envs", "num_steps", "num_epochs", "minibatch_size", "gamma", "gae_lambda")
    return PPO(
        args.env_id,
        env_kwargs=limit,
        eval_every=0,
        device="cpu",
        learning_rate=schedule(args.learning_rate),
        clip_coef=schedule(args.clip_coef),
        vf_coef=args.vf_coef,
        ent_coef=args.ent_coef,
        max_grad_norm=args.max_grad_norm,
        **{name: getattr(args, name) for name in same},
    )


def run_package(args, agent=None):
    run = Run()
    agent = agent or agent_like(args)
    buffer = agent._experiment.trainer.buffer

    def watch(view):
        run.rollouts.append(rows_of(buffer))
        metrics = view.metrics()
        run.updates.append({ours: metrics[theirs] for ours, theirs in METRICS.items()})

    agent.learn(args.total_timesteps, callback=watch, progress=False)
    named = dict(agent.policy.named_parameters())
    run.weights = {
        f"{ours}.{kind}": named[f"{theirs}.{kind}"].detach()
        for ours, theirs in WEIGHTS.items()
        for kind in ("weight", "bias")
    }
    assert len(run.weights) == len(named)
    agent.close()
    return run


def rows_of(buffer):
    names = ("obs", "actions", "logprobs", "values", "rewards", "truncated", "advantages", "returns")
    rows = {name: getattr(buffer, name)[: buffer.size].clone() for name in names}
    return {**rows, "terminated": buffer.dones[: buffer.size] & ~rows["truncated"]}


def assert_same_data(ours, theirs):
    assert len(ours.rollouts) == len(theirs.rollouts)
    for a, b in zip(ours.rollouts, theirs.rollouts, strict=True):
        for name in ("obs", "actions", "rewards", "terminated", "truncated"):
            assert torch.equal(a[name], b[name]), name


def assert_same_learning(ours, theirs):
    for index, (a, b) in enumerate(zip(ours.updates, theirs.updates, strict=True)):
        for name in METRICS:
            assert a[name] == pytest.approx(b[name], nan_ok=True, **LOSS), f"{name} of update {index}"
    for a, b in zip(ours.rollouts, theirs.rollouts, strict=True):
        for name in ("logprobs", "values", "advantages", "returns"):
            torch.testing.assert_close(a[name], b[name], **ROLLOUT)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        torch.testing.assert_close(weight, theirs.weights[name], **WEIGHT)


def count(run, name):
    return sum(int(rollout[name].sum()) for rollout in run.rollouts)


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("limit", [None, 20])
def test_equal_seeds_equal_numbers(seed, limit):
    args = settings(seed=seed, max_episode_steps=limit)
    ours, theirs = run_reference(args), run_package(args)

    # the run is worth comparing: several updates, episodes that end in each rollout, a last one that is shorter
    assert [len(rollout["obs"]) for rollout in ours.rollouts] == [128] * 5 + [64]
    assert all(rollout["terminated"].any() for rollout in ours.rollouts)
    assert count(ours, "truncated") > 50 if limit else count(ours, "truncated") == 0

    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs)


def test_the_first_rollout_is_equal_but_for_the_last_digits():
    args = settings(total_timesteps=512)
    ours, theirs = run_reference(args), run_package(args)
    assert_same_data(ours, theirs)
    for name in ("logprobs", "values"):
        torch.testing.assert_close(ours.rollouts[0][name], theirs.rollouts[0][name], rtol=1e-6, atol=1e-6)


def test_the_defaults_are_the_preset():
    args = reference.Args(seed=3, total_timesteps=1_024)
    agent = PPO.from_preset(args.env_id, seed=args.seed, eval_every=0, device="cpu")
    assert agent.config.total_timesteps == reference.Args().total_timesteps
    ours, theirs = run_reference(args), run_package(args, agent)
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs)


def test_without_schedules():
    args = settings(anneal=False, total_timesteps=1_024)
    ours, theirs = run_reference(args), run_package(args)
    assert_same_data(ours, theirs)
    assert_same_learning(ours, theirs)


def test_another_seed_is_another_run():
    ours, theirs = run_reference(settings(seed=3)), run_package(settings(seed=4))
    with pytest.raises(AssertionError):
        assert_same_data(ours, theirs)
    with pytest.raises(AssertionError):
        assert_same_learning(ours, theirs)


def test_a_package_that_takes_truncation_for_termination_is_noticed(monkeypatch):
    args = settings(max_episode_steps=20, total_timesteps=512)
    ours = run_reference(args)
    right = RolloutBuffer.add

    def wrong(buffer, step):
        right(buffer, step._replace(terminated=step.terminated | step.truncated))

    monkeypatch.setattr(RolloutBuffer, "add", wrong)
    theirs = run_package(args)
    assert torch.equal(ours.rollouts[0]["actions"], theirs.rollouts[0]["actions"])
    with pytest.raises(AssertionError):
        assert_same_learning(ours, theirs)
    assert ours.updates[0]["value_loss"] != pytest.approx(theirs.updates[0]["value_loss"], rel=1e-3)


def test_a_reference_that_takes_truncation_for_termination_is_noticed(monkeypatch):
    class Wrong(gym.Wrapper):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated or truncated, False, info

    args = settings(max_episode_steps=20, total_timesteps=512)
    theirs = run_package(args)
    make = gym.make
    monkeypatch.setattr(gym, "make", lambda *arguments, **kwargs: Wrong(make(*arguments, **kwargs)))
    ours = run_reference(args)
    assert torch.equal(ours.rollouts[0]["actions"], theirs.rollouts[0]["actions"])
    with pytest.raises(AssertionError):
        assert_same_learning(ours, theirs)
    assert ours.updates[0]["value_loss"] != pytest.approx(theirs.updates[0]["value_loss"], rel=1e-3)


def test_the_reference_does_not_import_the_package():
    nodes = list(ast.walk(ast.parse(Path(reference.__file__).read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not [name for name in imported if name.startswith("rl_training")]


def run_python(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_the_reference_runs_as_a_script(tmp_path):
    done = run_python(EXAMPLES / "ppo_cartpole_reference.py", "--total-timesteps", "256", "--seed", "1", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["step", "256"]
    assert all(part in lines[0] for part in ("mean return", "policy loss", "value loss"))
    assert lines[-1].startswith("final return: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("custom_env.py", "arrives in 100% of the episodes"),
        ("callbacks.py", "why: stopped by good_enough"),
    ],
)
def test_how_to_scripts_run(script, expected, tmp_path):
    done = run_python(EXAMPLES / script, cwd=tmp_path)
    assert expected in done.stdout
    assert list(tmp_path.iterdir()) == [], "examples leave nothing behind"
