"""The setting `accelerate`: which functions are accelerated in each mode, and what is said about it."""

import json

import pytest
import torch
from torch import nn

import rl_training
from rl_training.accelerate import Accelerated, ArrayNetwork, current_mode, declare_pure, modes, report, using
from rl_training.api.session import resume, train
from rl_training.cli import main
from rl_training.contracts.errors import ConfigError
from rl_training.experiment.config import TrainConfig
from rl_training.testing.resume import only_run
from tests.accelerate.native_harness import HAS_COMPILER

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")
PPO = {"num_steps": 16, "num_epochs": 2, "minibatch_size": 16}


def config(tmp_path, **settings):
    algorithm = settings.pop("algorithm", PPO)
    return TrainConfig(
        algo=settings.pop("algo", "ppo"), env_id=settings.pop("env_id", "CartPole-v1"), num_envs=2, eval_every=0,
        output_dir=tmp_path, algorithm=algorithm, **{"total_timesteps": 256, **settings},
    )  # fmt: skip


def functions_of(path):
    return json.loads((path / "metadata.json").read_text())["accelerate"]


def test_modes_are_kept_by_what_is_made_meanwhile():
    with using("off"):
        function = Accelerated(lambda x: 2 * x)
        network = ArrayNetwork(lambda: [nn.Linear(2, 1)])
    assert current_mode() == "auto"
    for _ in range(5):
        function(torch.ones(1))
    assert function.status() == "plain torch: accelerate is off"
    assert network(torch.ones(1, 2).numpy()) is None


@pytest.mark.parametrize("mode", ["off", "recorded", pytest.param("compiled", marks=needs_compiler)])
def test_the_mode_decides_how_updates_run(mode, tmp_path):
    train(config(tmp_path, accelerate=mode), progress=False)
    found = functions_of(only_run(tmp_path))
    assert found["mode"] == mode
    step = found["functions"]["step.step"]
    expected = {"off": "plain torch: accelerate is off", "recorded": "recorded; not compiled: accelerate is recorded"}
    assert step == expected.get(mode, "compiled")


def test_a_resume_keeps_the_mode(tmp_path):
    train(config(tmp_path, accelerate="off"), progress=False)
    run = only_run(tmp_path)
    with pytest.raises(ConfigError, match="accelerate: was 'off' and cannot become 'auto'"):
        resume(run, total_timesteps=512, progress=False, accelerate="auto")
    resume(run, total_timesteps=512, progress=False)
    assert functions_of(run)["mode"] == "off"


def test_compiled_needs_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(modes, "find_compiler", lambda: None)
    with pytest.raises(ConfigError, match="accelerate: compiled needs a C compiler"):
        config(tmp_path, accelerate="compiled")


def test_plain_torch_and_recordings_learn_alike(tmp_path):
    """Numbers differ in rounding only, so a short run ends with nearly the same weights."""
    weights = []
    for mode in ("off", "recorded"):
        agent = rl_training.PPO("CartPole-v1", seed=3, num_envs=2, accelerate=mode, **PPO)
        agent.learn(64, progress=False)
        weights.append(torch.cat([p.detach().reshape(-1) for p in agent.policy.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_doctor_tells_about_the_machine_and_a_run(tmp_path, capsys):
    train(config(tmp_path, accelerate="recorded"), progress=False)
    assert main(["doctor", str(only_run(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "accelerate     auto records" in said
    assert "accelerate=recorded" in said
    assert "recorded; not compiled: accelerate is recorded" in said


class Foreign(nn.Linear):
    pass


class TestReasons:
    def status(self, module):
        function = Accelerated(lambda x: module(x), module)
        for _ in range(4):
            function(torch.ones(2, 3))
        return function.status()

    def test_a_class_from_elsewhere(self):
        assert "Foreign may do more than compute tensors" in self.status(Foreign(3, 4))

    def test_a_class_that_is_declared_pure(self):
        @declare_pure
        class Pure(nn.Linear):
            pass

        assert self.status(Pure(3, 4)).startswith("recorded")

    def test_hooks(self):
        module = nn.Linear(3, 4)
        module.register_forward_hook(lambda *_: None)
        assert (
            self.status(module)
            == "plain torch: torch.nn.modules.linear.Linear has hooks, which a recording would not call"
        )

    def test_random_numbers(self):
        assert "draws random numbers" in self.status(nn.Sequential(nn.Dropout(0.5)))

    def test_everything_of_an_algorithm_is_reported(self):
        agent = rl_training.SAC("Pendulum-v1", learning_starts=4, batch_size=4)
        agent.learn(12, progress=False)
        names = report(agent._experiment.trainer.algorithm)
        assert {"gradient_steps", "critic_step.step", "actor_step.step"} <= set(names)


def test_a_refused_first_call_leaves_no_traces():
    """What a function changed in its first call is undone before torch runs it: it counts once."""
    total, draws = torch.zeros(3), torch.Generator().manual_seed(0)

    def function(x):
        total.add_(x)
        return total + torch.rand(3, generator=draws)

    plain_draws = torch.Generator().manual_seed(0)
    accelerated = Accelerated(function)
    for count in range(1, 5):
        found = accelerated(torch.ones(3))
        assert torch.equal(found, torch.full((3,), float(count)) + torch.rand(3, generator=plain_draws))
    assert "draws random numbers" in accelerated.status()


def test_arguments_may_have_names():
    accelerated = Accelerated(lambda x, *, scale, shift=None: x * scale if shift is None else x * scale + shift)
    for value in (2.0, 3.0, 4.0, 5.0):
        assert accelerated(torch.ones(1), scale=value).item() == value
        assert accelerated(torch.ones(1), scale=value, shift=torch.ones(1)).item() == value + 1
    assert accelerated.num_recordings == 2
