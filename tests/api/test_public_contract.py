"""The names that are part of the contract, at the places where they are promised."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

import rl_training
from rl_training.contracts.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_front_door() -> None:
    from rl_training import PPO, TrainConfig, evaluate, load, resume, train

    assert all(callable(name) for name in (PPO, TrainConfig, evaluate, load, resume, train))
    assert rl_training.__version__


def test_algorithms_has_the_facade() -> None:
    from rl_training.algorithms import A2C, PPO

    assert PPO is rl_training.PPO
    assert A2C is rl_training.A2C
    with pytest.raises(ImportError):
        from rl_training.algorithms import NoSuchAlgorithm  # type: ignore[attr-defined]  # noqa: F401


def test_config_has_train_config() -> None:
    from rl_training.config import TrainConfig

    assert TrainConfig is rl_training.TrainConfig


def test_runs_has_make_run_dir(tmp_path: Path) -> None:
    from rl_training.config import TrainConfig
    from rl_training.runs import make_run_dir

    cfg = TrainConfig(algo="ppo", env_id="CartPole-v1", seed=7, output_dir=tmp_path)
    path = make_run_dir(cfg)
    assert path.name.startswith("ppo__CartPole-v1__seed7__")
    assert path.is_dir()
    assert path.parent == tmp_path


def test_envs_has_make_vector_env_and_check_env() -> None:
    from rl_training.config import TrainConfig
    from rl_training.envs import check_env, make_vector_env

    cfg = TrainConfig(algo="ppo", env_id="CartPole-v1")
    envs = make_vector_env(cfg, num_envs=4)
    assert isinstance(envs, SyncVectorEnv)
    assert envs.num_envs == 4
    obs, _ = envs.reset(seed=0)
    assert obs.shape == (4, 4)
    envs.close()
    assert not [finding for finding in check_env("CartPole-v1", num_steps=50) if finding.level == "error"]


def test_rollout_buffer() -> None:
    from rl_training.data.rollout_buffer import RolloutBuffer

    buffer = RolloutBuffer(num_steps=5, num_envs=2, obs_shape=(3,), action_shape=())
    for name in ("obs", "actions", "logprobs", "rewards", "dones", "values", "advantages", "returns"):
        assert tuple(np.shape(getattr(buffer, name))[:2]) == (5, 2), name
    buffer.compute_returns_and_advantages(last_value=torch.zeros(2), gamma=0.99, gae_lambda=0.95)
    assert np.all(np.asarray(buffer.returns) == 0)


def test_ppo_loss() -> None:
    from rl_training.algorithms.ppo import ppo_loss

    keys = ("logprobs", "old_logprobs", "advantages", "returns", "values", "new_values", "entropy")
    minibatch = {key: torch.ones(4) for key in keys}
    losses = ppo_loss(minibatch, clip_coef=0.2, ent_coef=0.01, vf_coef=0.5)
    assert {"loss", "policy_loss", "value_loss", "entropy_loss"} <= losses.keys()
    assert all(losses[key].shape == () for key in ("loss", "policy_loss", "value_loss", "entropy_loss"))


def test_train_ppo(tmp_path: Path) -> None:
    from rl_training.config import TrainConfig
    from rl_training.trainer import train_ppo

    cfg = TrainConfig(algo="ppo", env_id="CartPole-v1", seed=7, output_dir=tmp_path)
    result = train_ppo(cfg, total_timesteps=1024, num_envs=2, num_steps=64)
    assert result.checkpoint_path is not None
    assert result.checkpoint_path.exists()
    assert result.metrics["global_step"] == 1024
    agent = rl_training.load(result.checkpoint_path)
    assert agent.config.num_envs == 2
    assert agent.config.algorithm.num_steps == 64  # type: ignore[attr-defined]
    assert agent.config.seed == 7
    agent.close()
    assert cfg.num_envs == 8, "the config that was given is left alone"
    with pytest.raises(ConfigError, match="Did you mean 'num_steps'"):
        train_ppo(cfg, num_step=64)


def test_load_config(tmp_path: Path) -> None:
    from rl_training.cli import load_config

    config = load_config(ROOT / "configs" / "ppo" / "cartpole.yaml")
    assert (config.algo, config.env_id) == ("ppo", "CartPole-v1")
    path = tmp_path / "mine.yaml"
    path.write_text("algo: ppo\nenv_id: CartPole-v1\nseed: 9\n")
    mine = load_config(str(path))
    assert mine.seed == 9
    assert mine.algorithm == config.algorithm, "the preset lies underneath"


def test_scripts_train(tmp_path: Path) -> None:
    """In a new process, from a checkout, with a path that has a space."""
    directory = tmp_path / "with space"
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "ppo", "CartPole-v1"]
    options = ["--total-timesteps", "256", "--eval-every", "0", "--output-dir", str(directory)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = directory.iterdir()
    assert (run / "checkpoints" / "step_256").is_dir()
    assert str(run) in done.stdout


def test_importing_the_package_stays_light() -> None:
    """Names are imported when they are used; the command line's help needs none of the heavy parts."""
    code = (
        "import sys, rl_training, rl_training.cli\n"
        "code = rl_training.cli.main(['--help'])\n"
        "heavy = {'torch', 'tensorboard', 'gymnasium', 'wandb', 'moviepy', 'tyro', 'rich'} & sys.modules.keys()\n"
        "print(code, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_every_public_name_can_be_had() -> None:
    for name in dir(rl_training):
        value: Any = getattr(rl_training, name)
        assert value is not None
    assert importlib.util.find_spec("rl_training.api.facades") is not None
