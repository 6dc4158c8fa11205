"""The one-file reference and the package: equal seeds, equal rollouts, equal losses, equal weights.

They share no code: the reference steps LSTM cells through time, the package calls torch's LSTM once for all pieces of
episodes. What is left between them is rounding.
"""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import recurrent_ppo_reference as reference
from rl_training import Linear, RecurrentPPO
from rl_training.contrib.recurrent.memory import Memory
from rl_training.contrib.recurrent_ppo import RecurrentPPOAlgorithm

LOSS = {"rel": 1e-4, "abs": 1e-5}
WEIGHT = {"rtol": 1e-4, "atol": 2e-5}
ROLLOUT = {"rtol": 1e-4, "atol": 2e-5}

METRICS = {
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "value_loss": "loss/critic",
    "entropy": "policy/entropy",
    "gradient_norm": "train/gradient_norm",
    "mean_return": "rollout/return_mean",
    "step": "global_step",
}
LAYERS = {
    "actor.0": "actor.0",
    "actor.2": "actor.2",
    "actor.4": "head.linear",
    "critic.0": "critic.0",
    "critic.2": "critic.2",
    "critic.4": "value_head",
}
MEMORIES = {"actor_memory": "trunks.0.memory.network", "critic_memory": "trunks.1.memory.network"}
WEIGHTS = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in LAYERS.items() for kind in ("weight", "bias")}
WEIGHTS |= {
    f"{ours}.{kind}": f"{theirs}.{kind}_l0"
    for ours, theirs in MEMORIES.items()
    for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
}


def settings(**changes):
    """Sequences that do not divide the rollout, minibatches, an entropy bonus, and a last rollout that is cut short."""
    values = {"seed": 3, "total_timesteps": 600, "num_envs": 4, "num_steps": 40, "sequence_length": 16, "num_epochs": 2}
    return reference.Args(**{**values, "minibatch_size": 64, "ent_coef": 0.01, **changes})


def run_reference(args):
    rollouts = []
    with contextlib.redirect_stdout(None):
        result = reference.train(args, lambda rollout: rollouts.append({k: v.clone() for k, v in rollout.items()}))
    return rollouts, result["updates"], result["parameters"]


def run_package(args):
    same = ("seed", "num_envs", "num_steps", "sequence_length", "num_epochs", "minibatch_size", "gamma", "gae_lambda")
    same += ("clip_coef", "vf_coef", "ent_coef", "max_grad_norm")
    limit = {} if args.max_episode_steps is None else {"max_episode_steps": args.max_episode_steps}
    agent = RecurrentPPO(
        "CartPole-v1",
        env_kwargs=limit,
        wrappers=[{"name": "HideVelocity"}],
        eval_every=0,
        device="cpu",
        learning_rate=Linear(args.learning_rate),
        **{name: getattr(args, name) for name in same},
    )
    buffer, rollouts, updates = agent._experiment.trainer.buffer, [], []

    def watch(view):
        names = ("obs", "actions", "logprobs", "values", "rewards", "truncated", "advantages", "returns")
        rows = {name: getattr(buffer, name)[: buffer.size].clone() for name in names}
        rollouts.append({**rows, "terminated": buffer.dones[: buffer.size] & ~rows["truncated"]})
        updates.append({ours: view.metrics()[theirs] for ours, theirs in METRICS.items()})

    agent.learn(args.total_timesteps, callback=watch, progress=False)
    named = dict(agent.policy.named_parameters())
    assert set(WEIGHTS.values()) == set(named)
    agent.close()
    return rollouts, updates, {ours: named[theirs].detach() for ours, theirs in WEIGHTS.items()}


def assert_same(ours, theirs):
    for a, b in zip(ours[0], theirs[0], strict=True):
        for name in ("obs", "actions", "rewards", "terminated", "truncated"):
            assert torch.equal(a[name], b[name]), name
        for name in ("logprobs", "values", "advantages", "returns"):
            torch.testing.assert_close(a[name], b[name], **ROLLOUT)
    for index, (a, b) in enumerate(zip(ours[1], theirs[1], strict=True)):
        for name in METRICS:
            assert a[name] == pytest.approx(b[name], nan_ok=True, **LOSS), f"{name} of update {index}"
    for name, weight in ours[2].items():
        torch.testing.assert_close(weight, theirs[2][name], msg=lambda text, name=name: f"{name}: {text}", **WEIGHT)


@pytest.mark.parametrize("limit", [None, 12])
def test_equal_seeds_equal_numbers(limit):
    args = settings(max_episode_steps=limit)
    ours, theirs = run_reference(args), run_package(args)

    # the run is worth comparing: several updates, episodes that end within sequences, a last rollout that is shorter
    assert [len(rollout["obs"]) for rollout in ours[0]] == [40, 40, 40, 30]
    ends = sum(int((rollout["terminated"] | rollout["truncated"]).sum()) for rollout in ours[0])
    assert ends > 15
    assert any(rollout["truncated"].any() for rollout in ours[0]) == (limit is not None)
    assert not any(rollout["starts"][0].all() for rollout in ours[0][1:]), "memories go on from rollout to rollout"

    assert_same(ours, theirs)


def test_sequences_as_long_as_rollouts():
    args = settings(sequence_length=40, total_timesteps=320)
    assert_same(run_reference(args), run_package(args))


def test_a_package_that_forgets_between_rollouts_is_noticed(monkeypatch):
    args = settings(total_timesteps=320)
    right = RecurrentPPOAlgorithm._states

    def wrong(self, rollout):
        rollout.first_state = None
        return right(self, rollout)

    monkeypatch.setattr(RecurrentPPOAlgorithm, "_states", wrong)
    with pytest.raises(AssertionError):
        assert_same(run_reference(args), run_package(args))


def test_a_package_that_carries_memories_into_the_next_episode_is_noticed(monkeypatch):
    args = settings(total_timesteps=160)
    right = Memory.forward
    monkeypatch.setattr(Memory, "forward", lambda self, x, state, starts: right(self, x, state, starts & False))
    with pytest.raises(AssertionError):
        assert_same(run_reference(args), run_package(args))


def test_the_reference_does_not_import_the_package():
    nodes = list(ast.walk(ast.parse(Path(reference.__file__).read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not [name for name in imported if name.startswith("rl_training")]


def test_the_reference_runs_as_a_script(tmp_path):
    done = subprocess.run(
        [sys.executable, reference.__file__, "--total-timesteps", "256", "--num-epochs", "1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines()[0].split()[:2] == ["step", "256"]
    assert done.stdout.splitlines()[-1].startswith("final return: ")
    assert list(tmp_path.iterdir()) == []
