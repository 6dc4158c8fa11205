"""Exported files answer as the agent does, for every algorithm and every kind of space."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

import rl_training
from rl_training import DQN, PPO, SAC, RecurrentPPO, load
from rl_training.algorithms.registry import registry
from rl_training.cli import main
from rl_training.contracts.errors import ConfigError, ExportError, MissingExtraError
from rl_training.contracts.plugins import ENCODERS
from rl_training.contracts.spec import ACTION_MASK
from rl_training.deploy import export
from rl_training.policies.encoders import FlatEncoder, register_encoder
from tests.api.test_agent import Scripted
from tests.envs.masked_tasks import Forbidding
from tests.small import learn, small_env, small_settings

FORMATS = {"onnx": "policy.onnx", "torch-export": "policy.pt2"}
QUICK: dict[str, Any] = {"num_envs": 2, "eval_every": 0, "seed": 3}
PPO_QUICK: dict[str, Any] = {**QUICK, "num_steps": 16, "minibatch_size": 32, "num_epochs": 1}


class Exported:
    """A file as those who deploy it use it: without anything of this package."""

    def __init__(self, path: Path) -> None:
        if path.suffix == ".onnx":
            self.session = onnxruntime.InferenceSession(str(path))
            self.about = json.loads(self.session.get_modelmeta().custom_metadata_map["rl_training"])
        else:
            extra = {"rl_training.json": ""}
            self.session = None
            self.module = torch.export.load(path, extra_files=extra).module()
            self.about = json.loads(extra["rl_training.json"])
        self.inputs = [port["name"] for port in self.about["inputs"]]

    def __call__(self, **inputs: Any) -> Any:
        named = {name.replace("__", "."): np.ascontiguousarray(value) for name, value in inputs.items()}
        assert sorted(named) == sorted(self.inputs)
        if self.session is not None:
            found = self.session.run(None, named)
        else:
            with torch.no_grad():
                out = self.module(*(torch.from_numpy(named[name]) for name in self.inputs))
            found = [tensor.numpy() for tensor in (out if isinstance(out, tuple) else (out,))]
        return found[0] if len(found) == 1 else tuple(found)


def exports(agent: Any, directory: Path, *kinds: str) -> list[Exported]:
    """Files in these formats; in all of them, if none is named."""
    kinds = kinds or tuple(FORMATS)
    for kind in kinds:
        agent.export(directory / FORMATS[kind], format=kind)
    return [Exported(directory / FORMATS[kind]) for kind in kinds]


def one_of_them(names: Iterable[str], name: str) -> str:
    """A format, in turn: both begin with the same trace of the policy, so each case needs one."""
    return list(FORMATS)[list(names).index(name) % len(FORMATS)]


def assert_same(found: Any, expected: Any) -> None:
    """Of one type and shape; integers equal, reals to rounding."""
    expected = np.asarray(expected)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if np.issubdtype(expected.dtype, np.floating):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)


IN_BOTH = {"iqn", "ppo", "recurrent_ppo", "sac"}
"""One of each kind of policy; the others are exported as ONNX."""


@pytest.mark.parametrize("name", sorted(registry()))
def test_every_algorithm(name: str, tmp_path: Path) -> None:
    spec = registry()[name]
    settings = {**QUICK, **small_settings(spec), "normalize_obs": not spec.needs_images}
    agent = getattr(rl_training, spec.title)(small_env(spec), **settings)
    learn(agent, 64)  # statistics, and recordings that must not be traced
    space = agent._experiment.spec.observation_space
    rng = np.random.default_rng(0)
    for file in exports(agent, tmp_path, *(() if name in IN_BOTH else ("onnx",))):
        assert file.about["env_id"] == agent.config.env_id
        assert file.about["env_steps"] == agent.num_timesteps
        assert file.about["versions"]["torch"] == torch.__version__
        for rows in (1, 2, 33):
            obs = (
                rng.integers(0, 256, (rows, *space.shape))
                if spec.needs_images
                else 3 * rng.normal(size=(rows, *space.shape))
            )
            obs = obs.astype(space.dtype)
            if not spec.needs_images:
                obs[0] = 1000.0  # beyond the clipping of normalised observations
            if "state" not in file.inputs:
                assert_same(file(obs=obs), agent.predict(obs)[0])
                continue
            state = np.zeros((rows, file.about["inputs"][1]["shape"][1]), np.float32)
            for start in (np.ones(rows, np.bool_), rng.random(rows) < 0.5, np.zeros(rows, np.bool_)):
                expected, after = agent.predict(obs, torch.from_numpy(state), episode_start=start)
                action, state = file(obs=obs, state=state, episode_start=start)
                assert_same(action, expected)
                assert_same(state, after.numpy())
    agent.close()


ACTIONS: dict[str, tuple[spaces.Space[Any], dict[str, Any]]] = {
    "discrete with a start": (spaces.Discrete(3, start=-1), {}),
    "int32": (spaces.Discrete(3, start=2, dtype=np.int32), {}),
    "choices": (spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [-3, 7]], dtype=np.int16), {}),
    "bits": (spaces.MultiBinary([2, 3]), {}),
    "clip": (spaces.Box(np.array([-1e-3, -2.0], np.float32), np.array([1e-3, 5.0], np.float32)), {}),
    "clip, no bounds": (spaces.Box(-np.inf, np.inf, (2,), np.float32), {}),
    "clip, float64": (spaces.Box(-0.01, 0.01, (2, 2), np.float64), {}),
    "squash": (spaces.Box(-200.0, 500.0, (3,), np.float32), {"box_actions": "squash"}),
    "squash, float64 without dimensions": (spaces.Box(-1.0, 3.0, (), np.float64), {"box_actions": "squash"}),
    "squash, integers": (spaces.Box(-128, 127, (4,), np.int8), {"box_actions": "squash"}),
    "clip, integers": (spaces.Box(-1, 1, (4,), np.int32), {}),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_every_action_space(name: str, tmp_path: Path) -> None:
    actions, settings = ACTIONS[name]
    observations = spaces.Box(-1, 1, (3,), np.float32)
    agent = PPO(lambda: Scripted(observations, actions), **PPO_QUICK, **settings)
    with torch.no_grad():
        agent.policy.head.linear.weight.mul_(300.0)  # so that bounds are met
    obs = np.random.default_rng(1).uniform(-1, 1, (40, 3)).astype(np.float32)
    expected, _ = agent.predict(obs)
    assert len(np.unique(expected, axis=0)) > 1, "not a constant answer"
    for file in exports(agent, tmp_path, one_of_them(ACTIONS, name)):
        found = file(obs=obs)
        assert_same(found, expected)
        assert all(actions.contains(action) for action in found)
    agent.close()


OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "float64": spaces.Box(-1e9, 1e9, (2, 2), np.float64),
    "float32 of any size": spaces.Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (3,), np.float32),
    "discrete": spaces.Discrete(5, start=-2),
    "choices": spaces.MultiDiscrete([2, 5]),
    "bits": spaces.MultiBinary(4),
    "image": spaces.Box(0, 255, (40, 40, 3), np.uint8),
    "small image, channels first": spaces.Box(0, 255, (3, 16, 20), np.uint8),
    "stacked images": spaces.Box(0, 255, (2, 16, 16, 1), np.uint8),
    "dict": spaces.Dict(
        {
            "zoom level": spaces.Discrete(4, start=1),
            "position": spaces.Box(-1, 1, (2,), np.float64),
            "camera": spaces.Box(0, 255, (16, 16, 3), np.uint8),
            "state": spaces.MultiBinary(3),
        }
    ),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_observation_space(name: str, tmp_path: Path) -> None:
    space = OBSERVATIONS[name]
    agent = PPO(lambda: Scripted(space, spaces.Box(-2, 2, (2,), np.float32)), **PPO_QUICK, normalize_obs=True)
    agent.learn(32, progress=False)
    space.seed(5)
    batch = [space.sample() for _ in range(7)]
    if isinstance(space, spaces.Dict):
        obs: Any = {key: np.stack([np.asarray(one[key]) for one in batch]) for key in space.spaces}
        inputs = {f"obs.{key}": value for key, value in obs.items()}
    else:
        obs = np.stack([np.asarray(one) for one in batch])
        inputs = {"obs": obs}
    if "any size" in name:
        obs = inputs["obs"] = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    expected, _ = agent.predict(obs)
    for file in exports(agent, tmp_path, *(() if name == "dict" else (one_of_them(OBSERVATIONS, name),))):
        assert_same(file(**inputs), expected)
    agent.close()


@pytest.mark.parametrize(
    ("cls", "sizes", "settings", "where", "kind"),
    [(PPO, (6,), {"num_steps": 16}, "info", "torch-export"), (PPO, (2, 4), {"num_steps": 16}, "obs", "onnx"),
     (DQN, (6,), small_settings("dqn"), "info", "onnx"),
     (RecurrentPPO, (6,), {"num_steps": 16, "memory": {"kind": "gru", "size": 8, "critic": "shared"}}, "obs", "onnx")],
    ids=["ppo", "ppo-choices", "dqn", "recurrent"],
)  # fmt: skip
def test_action_masks_are_an_input(
    cls: Any, sizes: tuple[int, ...], settings: Any, where: Any, kind: str, tmp_path: Path
) -> None:
    agent = cls(lambda: Forbidding(where, sizes), action_masks=True, normalize_obs=True, **QUICK, **settings)
    agent.learn(64, progress=False)
    rng = np.random.default_rng(2)
    obs = rng.normal(size=(50, 2)).astype(np.float32)
    mask = np.zeros((50, sum(sizes)), agent._experiment.spec.observation_space[ACTION_MASK].dtype)
    ends = np.cumsum(sizes)
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        mask[np.arange(50), rng.integers(first, end, 50)] = 1
    for file in exports(agent, tmp_path, kind):
        inputs = {"obs": obs, "action_mask": mask}
        state = torch.zeros(50, 8) if cls is RecurrentPPO else None
        if state is not None:
            inputs |= {"state": state.numpy(), "episode_start": np.zeros(50, np.bool_)}
        expected, after = agent.predict(obs, state, action_mask=mask)
        found = file(**inputs)
        if state is not None:
            found, next_state = found
            assert_same(next_state, after.numpy())
        assert_same(found, expected)
        chosen = [mask[row, number + first] for row, action in enumerate(np.atleast_2d(found.T).T)
                  for number, first in zip(action, [0, *ends[:-1]], strict=True)]  # fmt: skip
        assert all(chosen), "only valid actions"
    agent.close()


def test_a_file_tells_nothing_of_this_machine_and_holds_no_critic(tmp_path: Path) -> None:
    agent = load("zoo:sac/Pendulum-v1")
    exports(agent, tmp_path)
    agent.close()
    parts = [(tmp_path / "policy.onnx").read_bytes()]
    with zipfile.ZipFile(tmp_path / "policy.pt2") as archive:
        parts += [archive.read(name) for name in archive.namelist()]
        pickles = [name for name in archive.namelist() if name.endswith((".pt", ".pkl")) and archive.read(name)]
    assert pickles == [], "nothing in it is a pickle"
    for part in parts:
        assert str(Path(rl_training.__file__).parent).encode() not in part
        assert b"site-packages" not in part
        assert b"policy.critic" not in part
    assert any(b"policy.actor" in part for part in parts)


# What cannot be exported, and what went wrong


def test_a_file_that_answers_otherwise_is_not_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = load("zoo:ppo/CartPole-v1")
    path = tmp_path / "policy.pt2"
    path.write_text("an older one")
    right = export.ActionLayer.forward
    monkeypatch.setattr(export.ActionLayer, "forward", lambda self, flat: 1 - right(self, flat))
    with pytest.raises(
        ExportError, match=r"not written: for \d+ of \d+ random observations 'action' differs from predict"
    ):
        agent.export(path, "torch-export")
    monkeypatch.setattr(export.ActionLayer, "forward", lambda self, flat: right(self, flat).int())
    with pytest.raises(ExportError, match=r"its 'action' is int32 .*predict gives int64"):
        agent.export(path, "torch-export")
    assert path.read_text() == "an older one"
    assert os.listdir(tmp_path) == ["policy.pt2"], "nothing is left behind"
    agent.close()


def test_a_wrong_normalisation_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = SAC("Pendulum-v1", normalize_obs=True, **QUICK, **small_settings("sac"))
    agent.learn(64, progress=False)
    right = export.NormalizeLayer.forward
    monkeypatch.setattr(export.NormalizeLayer, "forward", lambda self, value: right(self, value) * 1.05)
    with pytest.raises(ExportError, match="'action' differs from predict"):
        agent.export(tmp_path / "policy.pt2", "torch-export")
    agent.close()


class Peeking(FlatEncoder):
    """Does what cannot be traced: its Python depends on the values of tensors."""

    def forward(self, obs: Any) -> Tensor:
        rows = super().forward(obs)
        return rows if rows.sum().item() > 0 else -rows


@pytest.mark.parametrize("kind", FORMATS)
def test_a_network_that_cannot_be_traced_is_explained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ENCODERS, "_added", {})  # other tests must not see this one
    register_encoder("peeking")(Peeking)
    agent = PPO("CartPole-v1", network={"encoder": "peeking"}, **PPO_QUICK)
    with pytest.raises(ExportError, match=rf"this policy cannot be exported as {kind}: .+ must be traceable"):
        agent.export(tmp_path / FORMATS[kind], kind)
    assert os.listdir(tmp_path) == []
    agent.close()


def test_a_policy_without_a_mode_is_explained(tmp_path: Path) -> None:
    agent = PPO("CartPole-v1", **PPO_QUICK)
    agent.algorithm.policy = nn.Linear(4, 2)
    with pytest.raises(ExportError, match=r"Linear cannot be exported: it has no method `mode\(obs\)`"):
        agent.export(tmp_path / "policy.pt2", "torch-export")
    agent.close()


def test_observations_of_a_strange_type_are_explained(tmp_path: Path) -> None:
    agent = PPO(lambda: Scripted(spaces.Box(0, 9, (2,), np.uint32), spaces.Discrete(2)), **PPO_QUICK)
    with pytest.raises(ExportError, match="observations of type uint32 cannot be exported; accepted:"):
        agent.export(tmp_path / "policy.pt2", "torch-export")
    agent.close()


def test_what_is_asked_for_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = PPO("CartPole-v1", **PPO_QUICK)
    with pytest.raises(ConfigError, match="format: expected onnx or torch-export, got 'tflite'"):
        agent.export(tmp_path / "policy.tflite", "tflite")
    with pytest.raises(ConfigError, match=r"must end in \.pt2 for the format torch-export"):
        agent.export(tmp_path / "policy.onnx", "torch-export")
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(MissingExtraError, match=r"pip install '.\[export\]'"):
        agent.export(tmp_path / "policy.onnx")
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="could not be written"):
        agent.export(tmp_path / "file" / "policy.pt2", "torch-export")
    agent.close()


# The command


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "zoo:ppo/CartPole-v1"]) == 0
    shown = capsys.readouterr().out
    assert "inputs:   obs float32 [batch, 4]" in shown
    assert "outputs:  action int64 [batch]" in shown
    assert "written:  ppo-CartPole-v1.onnx" in shown
    assert main(["export", "zoo:ppo/CartPole-v1", "--format", "torch-export", "--output", "deep/down.pt2"]) == 0
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert written == ["deep/down.pt2", "ppo-CartPole-v1.onnx"]
    agent = load("zoo:ppo/CartPole-v1")
    obs = np.random.default_rng(0).uniform(-1, 1, (9, 4)).astype(np.float32)
    assert_same(Exported(tmp_path / "ppo-CartPole-v1.onnx")(obs=obs), agent.predict(obs)[0])
    agent.close()


def test_the_command_refuses_before_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "nowhere"), "--output", "x.bin"]) == 2
    assert "must end in .onnx for the format onnx, got 'x.bin'" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--format", "keras"]) == 2
    assert "keras" in capsys.readouterr().err


def test_nothing_of_the_exporters_is_imported_before_it_is_needed() -> None:
    heavy = "{'onnx', 'onnxruntime', 'huggingface_hub', 'mlflow'}"
    code = f"import sys, rl_training.api.agent; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
