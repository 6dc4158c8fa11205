"""The replay of runs, checkpoints and files as datasets."""

import numpy as np
import pytest
from gymnasium import spaces

from rl_training import DQN, PPO, SAC, train
from rl_training.contracts.errors import RLTrainingError
from rl_training.data.dataset import DatasetMetadata, read_dataset, write_dataset
from rl_training.data.dataset_checks import check_dataset
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.actions import ActionMap
from rl_training.envs.factory import make_env
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.datasets import dataset_of, open_dataset
from tests.data.tape import SPEC, Tape
from tests.data.test_frame_replay import Screens, spec_of
from tests.small import small_settings

SMALL = {"num_envs": 1, "num_threads": 1, "eval_every": 0, "tensorboard": False}


def identity(spec):
    return ActionMap(spec.action_space)


@pytest.mark.parametrize("next_step", [False, True])
def test_rows_are_in_order_within_each_environment(next_step):
    buffer = ReplayBuffer(SPEC, 100, num_envs=2)
    lines = ("..Tr.C", "...Tr.") if next_step else ("..T..C", "...T..")
    Tape(buffer, 2, next_step=next_step).play(*lines)
    data = dataset_of(buffer, SPEC, identity(SPEC), DatasetMetadata())
    first = [0, 1, 2, 10, 11] if next_step else [0, 1, 2, 10, 11, 12]
    second = [1000, 1001, 1002, 1003, 1010, 1011][: 5 if next_step else 6]
    assert data.observations[:, 0].tolist() == [*first, *second]
    assert data.final_observations[:, 0].tolist() == [3, first[-1] + 1, 1004, second[-1] + 1]
    assert np.flatnonzero(data.terminated).tolist() == [2, len(first) + 3]
    assert np.flatnonzero(data.truncated).tolist() == [len(first) - 1, len(data) - 1]  # the last one is unfinished
    assert data.findings == []


def test_an_overfull_replay_says_what_it_lacks():
    buffer = ReplayBuffer(SPEC, 4)
    Tape(buffer).play("....T..")
    data = dataset_of(buffer, SPEC, identity(SPEC), DatasetMetadata())
    assert data.observations[:, 0].tolist() == [3, 4, 10, 11]
    assert "the oldest 3 steps have left the replay" in data.findings[0].message


@pytest.mark.parametrize("as_dict", [False, True])
def test_frame_stacks_are_put_together_when_they_are_read(as_dict, tmp_path):
    spec = spec_of(3, as_dict=as_dict)
    buffer, screens = ReplayBuffer(spec, 60, 2), Screens(spec, 2)
    for _ in range(30):
        buffer.add(screens.step())
    data = dataset_of(buffer, spec, identity(spec), DatasetMetadata())
    rows = [step[env] for env in range(2) for step in screens.history]
    observations = data.observations["image"] if as_dict else data.observations
    assert not isinstance(observations, np.ndarray)
    following = data.next_observations["image"] if as_dict else data.next_observations
    assert np.array_equal(observations[:], np.stack([row["obs"] for row in rows]))
    assert np.array_equal(following[:], np.stack([row["next"] for row in rows]))
    assert read_dataset(write_dataset(data, tmp_path / "d.npz")).hash == data.hash


def test_a_run_a_checkpoint_and_a_saved_replay(tmp_path):
    config = TrainConfig(
        algo="sac", env_id="Pendulum-v1", total_timesteps=250, output_dir=tmp_path,
        algorithm=small_settings("sac", buffer_size=1000),
        **SMALL,
    )  # fmt: skip
    result = train(config, progress=False)
    data = open_dataset(result.run_dir)
    assert (len(data), data.episode_lengths.tolist()) == (250, [200, 50])
    assert data.metadata.env_id == "Pendulum-v1"
    assert data.metadata.behaviour_policy.startswith("replay of sac, ")
    assert np.abs(data.actions).max() > 1.5  # the environment's, not the policy's
    findings = check_dataset(data, make_env("Pendulum-v1"))
    assert "agree with the environment in all 250 rows" in findings[-1].message
    assert open_dataset(result.checkpoint_path).hash == data.hash
    agent = SAC.load(result.run_dir)
    agent.save_replay(tmp_path / "replay")
    assert open_dataset(tmp_path / "replay").hash == data.hash
    # a run learns from the replay of another one
    other = SAC("Pendulum-v1", **small_settings("sac"))
    other.learn_offline(str(result.run_dir), 5, progress=False)
    assert other._experiment.data.raw.hash == data.hash


def test_discrete_actions_of_the_environment(tmp_path):
    agent = DQN("CartPole-v1", **small_settings("dqn"), num_envs=1)
    agent.learn(40, progress=False)
    agent.save_replay(tmp_path / "replay")
    data = open_dataset(tmp_path / "replay")
    assert data.action_space == spaces.Discrete(2)
    assert set(data.actions.tolist()) <= {0, 1}
    assert data.actions.dtype == np.int64


def test_what_has_no_replay(tmp_path):
    ppo = PPO("CartPole-v1", num_envs=1)
    with pytest.raises(RLTrainingError, match="ppo has no replay here: it learned from rollouts"):
        open_dataset(ppo.save(tmp_path / "ppo"))
    sac = SAC("Pendulum-v1", **small_settings("sac"))
    with pytest.raises(RLTrainingError, match="its replay buffer is empty"):
        open_dataset(sac.save(tmp_path / "sac", weights_only=True))
    with pytest.raises(RLTrainingError, match="is a directory, but no Minari dataset, run or saved replay"):
        open_dataset(tmp_path)
