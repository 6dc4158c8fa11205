"""Torch's compiler is not imported by runs: that takes two seconds."""

import subprocess
import sys

import torch

from rl_training.accelerate import without_torchs_compiler

RUNS = """
import sys
import rl_training
for name, env_id, settings in [
    ("PPO", "CartPole-v1", {"num_steps": 16}),
    ("A2C", "CartPole-v1", {"num_steps": 16}),
    ("SAC", "Pendulum-v1", {"learning_starts": 8, "accelerate": "off"}),
]:
    agent = getattr(rl_training, name)(env_id, eval_every=0, num_envs=1, **settings)
    agent.learn(32, progress=False)
assert "torch._dynamo" not in sys.modules
"""


def test_runs_do_not_import_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", RUNS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_is_as_before():
    function = torch.optim.Optimizer.add_param_group.__wrapped__
    before = dict(vars(function))
    with without_torchs_compiler():
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert vars(function) == before
