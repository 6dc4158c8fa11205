"""The cost of a step and of an update in calls, which do not depend on the machine or on what else it does.

Small networks are bound by the number of calls: of torch's operators, and of Python's functions between them. These are
counted in steady state, when everything that is recorded has been; what numpy does for torch is not counted. A number
that rises is work that somebody added to every step of every run. If it is worth that, raise the bound and say why; one
that falls may lower it.
"""

import sys
from collections import Counter
from contextlib import contextmanager

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from rl_training.accelerate.native.libraries import blas, vector_functions
from rl_training.experiment.build import build_experiment
from rl_training.experiment.config import TrainConfig
from tests.accelerate.native_harness import HAS_COMPILER, compile_now

PPO = {"num_steps": 16, "num_epochs": 2, "minibatch_size": 64}
REPLAY = {"buffer_size": 1000, "learning_starts": 32, "num_steps": 1, "updates_per_step": 1}

# algorithm, environment, environments, settings, torch operators per iteration, Python calls per iteration
BOUNDS = {
    "ppo": ("CartPole-v1", 8, PPO, 225, 1950),
    "a2c": ("CartPole-v1", 8, {}, 125, 830),
    "dqn": ("CartPole-v1", 1, {**REPLAY, "batch_size": 64}, 22, 215),
    "sac": ("Pendulum-v1", 1, {**REPLAY, "batch_size": 64}, 88, 240),
    "td3": ("Pendulum-v1", 1, {**REPLAY, "batch_size": 64, "policy_delay": 1}, 75, 225),
}


class Operators(TorchDispatchMode):
    """Counts every operator that torch runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def python_calls(function):
    """How many functions written in Python are called within a call of one, apart from the environments' own."""
    count = 0

    def watch(frame, event, arg):
        nonlocal count
        if event == "call" and "/gymnasium/" not in frame.f_code.co_filename:
            count += 1

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def steady(algo):
    """A trainer that has recorded all that it will."""
    env_id, num_envs, settings, *_ = BOUNDS[algo]
    experiment = build_experiment(TrainConfig(algo=algo, env_id=env_id, num_envs=num_envs, algorithm=settings))
    trainer = experiment.trainer
    trainer._total, trainer.progress.horizon = 10**9, 10**9
    try:
        for _ in range(60):
            trainer.iterate()
        yield trainer
    finally:
        experiment.close()


@pytest.mark.parametrize("algo", BOUNDS)
def test_calls_of_an_iteration(algo):
    *_, max_operators, max_calls = BOUNDS[algo]
    with steady(algo) as trainer:
        # the cheapest of several iterations: in some of them episodes end, or a target follows
        calls = min(python_calls(trainer.iterate) for _ in range(8))
        counts = []
        for _ in range(8):
            with Operators() as operators:
                trainer.iterate()
            counts.append(operators.counts.total())
    found = f"{algo}: {min(counts)} operators and {calls} Python calls per iteration"
    assert min(counts) <= max_operators, found
    assert calls <= max_calls, found


# algorithm: operators that a compiled update still calls from Python, apart from those that depend on the machine
COMPILED = {"dqn": 0, "ppo": 2, "sac": 0, "td3": 0}
PRODUCTS = {"addmm", "baddbmm", "bmm", "mm"}
OF_NUMPY = {"exp", "linalg_vector_norm", "log", "sum", "tanh"}
OF_TORCH = {"softplus", "softplus_backward"}


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")
@pytest.mark.parametrize("algo", COMPILED)
def test_calls_of_a_compiled_update(algo):
    with steady(algo) as trainer:
        update = getattr(trainer.algorithm, "gradient_steps", None) or trainer.algorithm.step._step
        recording = next(iter(update._recordings.values()))
        num_recorded = len(recording.kernels)
        compile_now(recording.takeover)
        program = recording.takeover.library._program
    missing = PRODUCTS | (set() if blas() else OF_NUMPY) | (set() if vector_functions() else OF_TORCH)
    left = [name for name in program.foreign if name not in missing]
    assert len(left) <= COMPILED[algo], f"{algo}: {left} of {num_recorded}"
