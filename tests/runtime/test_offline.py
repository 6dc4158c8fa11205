"""Learning from recorded data: the offline trainer, the switch to online, exact resume."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training import DQN, PPO, SAC, TD3, load, resume
from rl_training.api.session import train
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.errors import CheckpointError, ConfigError, RLTrainingError
from rl_training.data.dataset import Dataset, write_dataset
from rl_training.experiment.config import TrainConfig

SMALL = {
    "num_envs": 1,
    "num_threads": 1,
    "eval_every": 0,
    "tensorboard": False,
    "checkpoint_every": 50,
    "log_every": 50,
}
SIZES = {"network": {"actor_sizes": [8], "critic_sizes": [8]}, "batch_size": 16}


def pendulum_data(num_episodes=3, length=20, seed=0):
    """Episodes of random numbers in the shape of Pendulum's; the last one of each is cut by the time limit."""
    rng, rows = np.random.default_rng(seed), num_episodes * length
    ends = np.arange(rows) % length == length - 1
    return Dataset(
        observations=rng.normal(size=(rows, 3)).astype(np.float32),
        actions=rng.uniform(-2, 2, size=(rows, 1)).astype(np.float32),
        rewards=rng.normal(size=rows).astype(np.float32),
        terminated=np.zeros(rows, bool),
        truncated=ends,
        final_observations=rng.normal(size=(num_episodes, 3)).astype(np.float32),
        observation_space=spaces.Box(-8, 8, (3,)),
        action_space=spaces.Box(-2, 2, (1,)),
    )


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pendulum.npz"
    write_dataset(pendulum_data(), path)
    return path


def weights(agent):
    return torch.cat([value.flatten().double() for value in agent.policy.state_dict().values()])


def offline_config(path, **changes):
    return TrainConfig(
        algo="sac", env_id="Pendulum-v1", dataset=str(path), seed=3, algorithm=SIZES, **{**SMALL, **changes}
    )


def test_offline_learning_counts_updates_and_no_steps():
    agent = SAC("Pendulum-v1", seed=1, **SIZES)
    before = weights(agent)
    result = agent.learn_offline(pendulum_data(), 30, progress=False)
    assert (result.updates, result.env_steps, result.metrics["global_step"]) == (30, 0, 30)
    assert not torch.equal(weights(agent), before)
    more = agent.learn_offline(total_updates=20, progress=False)
    assert (more.updates, more.metrics["global_step"]) == (50, 50)


def test_learning_needs_no_environment(tmp_path):
    agent = SAC(dataset=str(write_dataset(pendulum_data(), tmp_path / "d.npz")), **SIZES)
    agent.learn_offline(total_updates=10, progress=False)
    action, _ = agent.predict(np.zeros(3, np.float32))
    assert action.shape == (1,)
    with pytest.raises(ConfigError, match="an evaluation needs an environment"):
        agent.evaluate(1)
    with pytest.raises(ConfigError, match="training online needs an environment"):
        agent.learn(10, progress=False)
    agent.save(tmp_path / "agent")
    (tmp_path / "d.npz").unlink()  # acting does not need the data
    again, _ = load(tmp_path / "agent").predict(np.zeros(3, np.float32))
    assert np.array_equal(action, again)


def test_going_online_keeps_the_weights_and_mixes_the_data():
    agent = SAC("Pendulum-v1", seed=1, learning_starts=10, num_envs=1, prior_ratio=0.25, **SIZES)
    agent.learn_offline(pendulum_data(), 30, progress=False)
    trained = weights(agent)
    result = agent.learn(9, progress=False)  # before learning_starts, nothing changes
    assert torch.equal(weights(agent), trained)
    assert (result.env_steps, result.metrics["global_step"]) == (9, 39)
    sampler = agent._experiment.trainer.sampler
    online = sampler.online.buffer
    batch = sampler.sample(16, agent._experiment.trainer.progress)
    own = online.reward[batch.indices[:12].numpy()]
    recorded = pendulum_data().rewards[batch.indices[12:].numpy()]
    assert np.allclose(batch.reward.numpy(), np.concatenate([own, recorded]))
    agent.learn(11, progress=False)
    assert agent._experiment.trainer.updates == 30 + 10


def test_recorded_actions_are_those_of_the_policy():
    agent = SAC("Pendulum-v1", **SIZES)
    agent.learn_offline(pendulum_data(), 1, progress=False)
    batch = agent._experiment.trainer.sampler.sample(8, agent._experiment.trainer.progress)
    assert np.allclose(batch.action.numpy() * 2.0, pendulum_data().actions[batch.indices.numpy()], atol=1e-6)


def test_truncated_rows_bootstrap_from_their_true_last_observation():
    data = pendulum_data(2, 5)
    agent = SAC("Pendulum-v1", n_step=3, gamma=0.5, **SIZES)
    agent.learn_offline(data, 1, progress=False)
    batch = agent._experiment.trainer.sampler.sample(64, agent._experiment.trainer.progress)
    for row, index in enumerate(batch.indices.tolist()):
        end = 4 if index < 5 else 9
        last = min(index + 2, end)
        rewards = data.rewards[index : last + 1]
        assert batch.reward[row].item() == pytest.approx(
            float(sum(r * 0.5**k for k, r in enumerate(rewards))), abs=1e-5
        )
        assert batch.discount[row].item() == pytest.approx(0.5 ** len(rewards))
        expected = data.final_observations[end // 5] if last == end else data.observations[last + 1]
        assert np.array_equal(batch.next_obs[row].numpy(), expected)


@pytest.mark.parametrize("stop", [50, 150, 215])
def test_a_run_stopped_in_either_phase_resumes_exactly(stop, data_file, tmp_path):
    """Stops before the switch, at it, and after it; the last ones are compared with a run that never stopped."""

    def run(directory, *stops):
        result = train(
            offline_config(data_file, total_updates=150, output_dir=directory), progress=False, callback=stops
        )
        if result.updates < 150:
            result = resume(result.run_dir, progress=False)
        online = {"online": True, "total_timesteps": 100, "progress": False}
        result = resume(result.run_dir, callback=stops, **online)
        if result.env_steps < 100:
            result = resume(result.run_dir, progress=False)
        return result

    whole = run(tmp_path / "a")
    halted = run(tmp_path / "b", lambda run: None if run.position < stop or run.position > stop + 50 else False)
    assert (whole.env_steps, whole.updates) == (halted.env_steps, halted.updates)
    assert torch.equal(weights(load(whole.run_dir)), weights(load(halted.run_dir)))


def test_other_data_is_refused_on_resume(data_file, tmp_path):
    copy = tmp_path / "copy.npz"
    write_dataset(pendulum_data(), copy)
    result = train(offline_config(copy, total_updates=50, output_dir=tmp_path), progress=False)
    copy.unlink()
    write_dataset(pendulum_data(seed=9), copy)
    with pytest.raises(CheckpointError, match="the dataset is not the one"):
        resume(result.run_dir, total_updates=100, progress=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dataset": None, "total_updates": 10}, "dataset: sac learns from recorded data"),
        ({"dataset": "nowhere.npz", "total_updates": 10}, "does not exist"),
        ({"env_id": "CartPole-v1", "algo": "dqn", "total_updates": 10, "algorithm": {}}, "rows have the shape"),
        ({"algo": "ppo", "total_updates": 10, "algorithm": {}}, "ppo cannot learn from recorded data alone"),
        ({"total_updates": 10, "normalize_reward": True}, "normalize_reward: is for rewards that are collected"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(config, message, data_file, tmp_path):
    with pytest.raises(RLTrainingError, match=message):
        train(
            TrainConfig(
                **{
                    **SMALL,
                    "algo": "sac",
                    "env_id": "Pendulum-v1",
                    "dataset": str(data_file),
                    "output_dir": tmp_path / "runs",
                    "algorithm": SIZES,
                    **config,
                }
            ),
            progress=False,
        )
    assert not (tmp_path / "runs").exists()


def test_on_policy_agents_cannot_learn_offline():
    with pytest.raises(ConfigError, match="ppo cannot learn from recorded data alone"):
        PPO("CartPole-v1", num_envs=1).learn_offline("data.npz", 10)


def test_discrete_actions_with_another_start():
    rows = 10
    data = Dataset(
        observations=np.zeros((rows, 4), np.float32),
        actions=np.arange(rows) % 2,
        rewards=np.ones(rows, np.float32),
        terminated=np.arange(rows) == rows - 1,
        truncated=np.zeros(rows, bool),
        final_observations=np.zeros((1, 4), np.float32),
        observation_space=spaces.Box(-1, 1, (4,)),
        action_space=spaces.Discrete(2),
    )
    agent = DQN("CartPole-v1", batch_size=8)
    agent.learn_offline(data, 5, progress=False)
    batch = agent._experiment.trainer.sampler.sample(32, agent._experiment.trainer.progress)
    assert np.array_equal(batch.action.numpy(), batch.indices.numpy() % 2)
    assert np.array_equal(batch.discount.numpy() == 0, batch.indices.numpy() == rows - 1)


@pytest.mark.parametrize("algo", [SAC, TD3])
def test_validation_of_actor_critics(algo):
    """The error is that of Q(s, a) against reward + discount * min Q'(s', pi(s'))."""
    agent = algo("Pendulum-v1", seed=1, **SIZES)
    agent.learn_offline(pendulum_data(), 5, progress=False)
    batch, policy = agent._experiment.validation_batches()[0], agent.policy
    found = {name: float(value) for name, value in agent.algorithm.validate(batch).items()}
    with torch.no_grad():
        q = policy.critic(batch.obs, batch.action)
        next_q = agent.algorithm.critic_target.module(batch.next_obs, policy.mode(batch.next_obs))
        best = policy.critic(batch.obs, policy.mode(batch.obs))
    error = q - (batch.reward + batch.discount * next_q.amin(0))
    assert found["td_error"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)
    for name, values in (("data", q), ("policy", best)):
        assert found[f"q_{name}_mean"] == pytest.approx(values.mean().item(), rel=1e-5)
        assert found[f"q_{name}_std"] == pytest.approx(values.numpy().std(), rel=1e-5)
        assert found[f"q_{name}_max"] == pytest.approx(values.max().item(), rel=1e-5)


def test_validation_of_q_learning():
    """Of a table that is known: a linear network whose Q-values are 1 and 3 everywhere."""
    agent = DQN("CartPole-v1", network={"sizes": [4]}, batch_size=8, gamma=0.5)
    head = agent.policy.network.acting_layers()[-1]
    linear = [part for part in head.modules() if isinstance(part, torch.nn.Linear)][-1]
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(torch.tensor([1.0, 3.0]))
    agent.algorithm.target.update()
    batch = TransitionBatch(
        torch.zeros(2, 4), torch.tensor([0, 1]), torch.ones(2), torch.tensor([0.5, 0.0]), torch.zeros(2, 4),
        torch.ones(2), torch.arange(2),
    )  # fmt: skip
    found = {name: float(value) for name, value in agent.algorithm.validate(batch).items()}
    assert found["td_error"] == pytest.approx(((1 - 2.5) ** 2 / 2 + (3 - 1) ** 2 / 2) ** 0.5)
    assert (found["q_data_mean"], found["q_data_std"], found["q_data_max"]) == (2.0, 1.0, 3.0)
    assert (found["q_policy_mean"], found["q_policy_std"], found["q_policy_max"]) == (3.0, 0.0, 3.0)


def test_runs_without_an_environment_log_their_validation(data_file, tmp_path):
    settings = {**SMALL, "total_updates": 50, "eval_every": 50, "output_dir": tmp_path, "algorithm": SIZES}
    config = TrainConfig(algo="sac", env_id="", dataset=str(data_file), **settings)
    metrics = train(config, progress=False).metrics
    assert metrics["validation/td_error"] > 0
    assert metrics["validation/q_policy_max"] >= metrics["validation/q_policy_mean"]
