"""Checkpoints of weights alone: they act as the agent did, tell nothing of the machine, and can be learned on from."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_training
from rl_training import DQN, PPO, SAC, TrainConfig, load, resume, train
from rl_training.algorithms.registry import registry
from rl_training.contracts.errors import CheckpointError
from rl_training.experiment.files import write_json
from rl_training.testing.small import only_offline
from tests.small import learn, small_env, small_settings

QUICK: dict[str, Any] = {"num_envs": 2, "eval_every": 0, "seed": 3}


def trained(name: str, **settings: Any) -> Any:
    spec = registry()[name]
    own = small_settings(spec, **settings)
    agent = getattr(rl_training, spec.title)(small_env(spec), **{**QUICK, **own})
    learn(agent, 64)
    return agent


def observations(agent: Any, rows: int = 20) -> Any:
    space = agent._experiment.spec.observation_space
    rng = np.random.default_rng(1)
    drawn = (
        rng.integers(0, 256, (rows, *space.shape)) if space.dtype == np.uint8 else rng.normal(size=(rows, *space.shape))
    )
    return drawn.astype(space.dtype)


@pytest.mark.filterwarnings("ignore:the schedules of")
@pytest.mark.parametrize("name", sorted(registry()))
def test_every_algorithm_acts_as_it_did_and_learns_on(name: str, tmp_path: Path) -> None:
    agent = trained(
        name, normalize_obs=not registry()[name].needs_images, normalize_reward=not only_offline(registry()[name])
    )
    obs = observations(agent)
    agent.save(tmp_path / "whole")
    agent.save(tmp_path / "weights", weights_only=True)
    again = load(tmp_path / "weights")
    np.testing.assert_array_equal(again.predict(obs)[0], agent.predict(obs)[0])
    np.testing.assert_array_equal(again.value(obs), agent.value(obs))
    assert again._experiment.trainer.position == 64
    result = learn(again, 64)
    assert result.env_steps + (result.updates if only_offline(registry()[name]) else 0) == 128
    sizes = {kind: sum(file.stat().st_size for file in (tmp_path / kind).iterdir()) for kind in ("whole", "weights")}
    assert sizes["weights"] < 0.75 * sizes["whole"]
    agent.close()
    again.close()


def test_it_holds_no_training_state_and_tells_nothing_of_the_machine(tmp_path: Path) -> None:
    agent = trained("dqn", output_dir=tmp_path / "secret", num_threads=1, device="cpu")
    agent.save_replay(tmp_path / "replay")
    settings = {**QUICK, **small_settings("dqn", prior_replay=tmp_path / "replay")}
    with_prior = DQN("CartPole-v1", output_dir=tmp_path / "secret", num_threads=1, device="cpu", **settings)
    path = with_prior.save(tmp_path / "weights", weights_only=True)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json", "manifest.json", "metadata.json", "state.json", "state.safetensors",
    ]  # fmt: skip
    state = json.loads((path / "state.json").read_text())
    assert state.keys() == {"algorithm", "collector", "progress"}
    assert state["algorithm"].keys() == {"policy"}
    text = "".join((path / name).read_text() for name in ("config.json", "metadata.json", "state.json"))
    assert str(tmp_path) not in text
    config = json.loads((path / "config.json").read_text())
    assert (config["output_dir"], config["device"], config["num_threads"]) == ("runs", "auto", None)
    assert config["algorithm"]["prior_replay"] is None
    metadata = json.loads((path / "metadata.json").read_text())
    assert metadata.keys() == {"created", "versions", "seed", "environment", "env_steps", "plugins", "resume_grade"}
    agent.close()
    with_prior.close()


def test_a_new_run_can_start_from_it(tmp_path: Path) -> None:
    agent = trained("ppo", normalize_obs=True)
    agent.save(tmp_path / "weights", weights_only=True)
    new = PPO("CartPole-v1", init_from=tmp_path / "weights", normalize_obs=True, **QUICK)
    obs = observations(agent)
    assert new.num_timesteps == 0
    np.testing.assert_array_equal(new.value(obs), agent.value(obs))
    agent.close()
    new.close()


def test_an_agent_of_an_environment_object_needs_it_again(tmp_path: Path) -> None:
    import gymnasium as gym

    agent = SAC(gym.make("Pendulum-v1"), eval_every=0, **small_settings("sac"))
    agent.save(tmp_path / "weights", weights_only=True)
    with pytest.raises(rl_training.contracts.errors.ConfigError, match="trained on an environment object"):
        load(tmp_path / "weights")
    again = load(tmp_path / "weights", env=gym.make("Pendulum-v1"))
    obs = observations(agent)
    np.testing.assert_array_equal(again.predict(obs)[0], agent.predict(obs)[0])


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    from rl_training.experiment.checkpointing import _digest

    agent = trained("ppo")
    path = agent.save(tmp_path / "weights", weights_only=True)
    agent.close()
    state = json.loads((path / "state.json").read_text())
    del state["progress"]
    write_json(path / "state.json", state)
    manifest = json.loads((path / "manifest.json").read_text())
    file = path / "state.json"
    manifest["files"]["state.json"] = {"sha256": _digest(file), "size": file.stat().st_size}
    write_json(path / "manifest.json", manifest)
    with pytest.raises(CheckpointError, match=r"does not fit ppo on CartPole-v1: .*missing progress"):
        load(path)


def test_whole_checkpoints_are_as_before(tmp_path: Path) -> None:
    config = TrainConfig(
        algo="ppo", env_id="CartPole-v1", output_dir=tmp_path, total_timesteps=64, eval_every=0, num_envs=2,
        algorithm={"num_steps": 16},
    )  # fmt: skip
    result = train(config, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resume(result.run_dir, total_timesteps=96, progress=False).env_steps == 96
