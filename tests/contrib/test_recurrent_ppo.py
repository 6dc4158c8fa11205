"""RecurrentPPO: how rollouts are cut, with which memory they are valued, and that nothing of it is lost anywhere."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training import RecurrentPPO, TrainConfig, load
from rl_training.contracts.batches import Progress, Step
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import EnvSpec
from rl_training.contrib.recurrent.policy import Sequences
from rl_training.contrib.recurrent_ppo import SPEC, RecurrentPPOAlgorithm, RecurrentPPOConfig, cut_rollout
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.envs.wrappers import HideVelocity
from rl_training.testing.resume import flat, same
from tests.envs.memory_tasks import MaskedRecall, Recall

SMALL = {"num_steps": 16, "sequence_length": 6, "minibatch_size": 16, "num_epochs": 2}
SMALL |= {"network": {"actor_sizes": (8,), "critic_sizes": (8,)}, "memory": {"size": 8}}


def make_agent(env="CartPole-v1", **settings):
    return RecurrentPPO(env, **{"num_envs": 3, "seed": 1, "eval_every": 0, **SMALL, **settings})


def make_algorithm(env, **changes):
    config = TrainConfig(algo="recurrent_ppo", env_id="any", algorithm={**SMALL, **changes}).algorithm
    return RecurrentPPOAlgorithm(config, env, torch.device("cpu"), random_stream(0, "algorithm"))


class TestCutting:
    def make_rollout(self, num_steps, num_envs):
        rollout = RolloutBuffer(num_steps=num_steps, num_envs=num_envs, obs_shape=(1,), action_shape=())
        rollout.size = num_steps
        states = torch.arange(num_steps * num_envs, dtype=torch.float32).view(num_steps, num_envs, 1)
        return rollout, states

    def test_windows_of_each_environment(self):
        rollout, states = self.make_rollout(5, 2)
        rollout.dones[2, 0] = True
        rows, sequences = cut_rollout(rollout, states, 2)
        # windows 0-1, 2-3 and 4, each of both environments; row t of environment n is number 2 t + n
        assert rows.T.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 0], [9, 0]]
        assert sequences.there.T.tolist() == [[True, True]] * 4 + [[True, False]] * 2
        assert sequences.starts.T.tolist() == [[True, False]] * 2 + [[False, True]] + [[False, False]] * 3
        assert sequences.state.flatten().tolist() == [0, 1, 4, 5, 8, 9]

    def test_invalid_rows_are_not_counted(self):
        rollout, states = self.make_rollout(4, 2)
        rollout.first_starts = np.array([False, True])
        rollout.dones[1, 0] = True
        rollout.valid[2, 0] = False
        rows, sequences = cut_rollout(rollout, states, 4)
        # flattened without it: (0,0) (0,1) (1,0) (1,1) (2,1) (3,0) (3,1)
        assert rows.T.tolist() == [[0, 2, 0, 5], [1, 3, 4, 6]]
        assert sequences.there.T.tolist() == [[True, True, False, True], [True] * 4]
        assert sequences.starts.T.tolist() == [[False, False, True, True], [True, False, False, False]]

    def test_a_sequence_without_a_valid_row_is_left_out(self):
        rollout, states = self.make_rollout(2, 2)
        rollout.valid[1, 0] = False
        rows, sequences = cut_rollout(rollout, states, 1)
        assert rows.tolist() == [[0, 1, 2]]
        assert sequences.state.flatten().tolist() == [0, 1, 3]

    def test_longer_than_the_rollout(self):
        rollout, states = self.make_rollout(3, 2)
        rows, sequences = cut_rollout(rollout, states, 8)
        assert rows.shape == (8, 2)
        assert int(sequences.there.sum()) == 6

    @pytest.mark.parametrize(
        ("num_sequences", "num_rows", "size", "parts"),
        [(12, 96, 32, [4, 4, 4]), (8, 40, 16, [4, 4]), (3, 30, 1, [1, 1, 1]), (5, 7, 100, [5])],
    )
    def test_minibatches_are_whole_sequences(self, num_sequences, num_rows, size, parts):
        algorithm = make_algorithm(EnvSpec(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)), minibatch_size=size)
        found = algorithm._minibatches(num_sequences, num_rows)
        assert [len(part) for part in found] == parts
        assert sorted(torch.cat(found).tolist()) == list(range(num_sequences))


def watch_rollouts(agent, total, look):
    """Train, and look at the buffer before each update."""
    algorithm, update = agent._experiment.trainer.algorithm, agent._experiment.trainer.algorithm.update

    def looking(batch, progress):
        look(batch)
        return update(batch, progress)

    algorithm.update = looking
    agent.learn(total, progress=False)
    del algorithm.update


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {"memory": {"size": 8, "kind": "gru"}}),
        ("CartPole-v1", {"vectorization": "native"}),
        ("CartPole-v1", {"vectorization": "native", "memory": {"size": 8, "critic": "shared"}, "sequence_length": 1}),
        ("CartPole-v1", {"env_kwargs": {"max_episode_steps": 7}, "normalize_obs": True, "sequence_length": None}),
        ("Pendulum-v1", {"env_kwargs": {"max_episode_steps": 11}}),
        (MaskedRecall, {"action_masks": True}),
    ],
    ids=["gru", "native", "single steps", "truncated", "continuous", "masked"],
)
def test_before_the_first_step_everything_is_judged_as_it_was_collected(env, settings):
    """Rollouts of real environments: cut, padded, shuffled, with resets; memories that go on from the one before."""
    agent = make_agent(env, **settings)
    algorithm, seen = agent._experiment.trainer.algorithm, []

    def look(rollout):
        states = algorithm._states(rollout)
        rows, sequences = cut_rollout(rollout, states[:-1], algorithm.config.sequence_length or rollout.num_steps)
        data = rollout.flatten()
        assert sorted(rows[sequences.there].tolist()) == list(range(data.num_rows))
        order = torch.from_numpy(np.random.default_rng(0).permutation(rows.shape[1]))
        there = sequences.there[:, order]
        part = Sequences(there, sequences.starts[:, order], sequences.state[order])
        chosen = data.rows(rows[:, order][there])
        logprobs, _, values = algorithm.policy.evaluate_actions(chosen.obs, chosen.actions, part)
        torch.testing.assert_close(logprobs, chosen.logprobs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, chosen.values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[-1], agent._experiment.trainer.collector.policy_state)
        seen.append((bool(rollout.valid[: rollout.size].all()), rollout.first_state is not None, rollout.size))

    watch_rollouts(agent, 130, look)
    agent.close()
    assert [carried for _, carried, _ in seen] == [False] + [True] * (len(seen) - 1)
    assert len(seen) >= 3
    assert seen[-1][2] < 16, "the last rollout is shorter"
    if settings.get("vectorization") == "native":
        assert not all(valid for valid, _, _ in seen), "there were rows that only reset"


T, N = 5, 2


def fill(algorithm, rng):
    """A rollout by hand: environment 0 is truncated in row 2, environment 1 terminates in the last row."""
    env = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    buffer = RolloutBuffer.for_spec(env, T, N)
    obs = rng.normal(size=(T + 1, N, 3)).astype(np.float32)
    final = rng.normal(size=(1, 3)).astype(np.float32)
    state = torch.from_numpy(rng.normal(size=(N, algorithm.policy.state_size)).astype(np.float32))
    buffer.first_state, buffer.first_starts = state, np.array([False, False])
    start, after = torch.zeros(N, dtype=torch.bool), []
    for t in range(T):
        out = algorithm.policy.act(torch.from_numpy(obs[t]), state=state, episode_start=start, rng=rng)
        state = out.state
        after.append(state)
        truncated, terminated = np.array([t == 2, False]), np.array([False, t == T - 1])
        ended = np.flatnonzero(truncated | terminated)
        last = {2: final, T - 1: final}.get(t)
        extras = {name: value.numpy() for name, value in out.extras.items()}
        reward, valid = np.ones(N), np.ones(N, np.bool_)
        buffer.add(
            Step(
                obs[t], obs[t], out.action.numpy(), extras, reward, reward, terminated, truncated, valid, ended, last,
                last, obs[t + 1],
            )
        )  # fmt: skip
        start = torch.from_numpy(truncated | terminated)
    buffer.last_obs = obs[T]
    return buffer, torch.from_numpy(final), torch.from_numpy(obs[T]), after


def test_truncated_episodes_are_valued_with_their_own_memory():
    algorithm = make_algorithm(EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2)), gamma=0.9, gae_lambda=0.0)
    buffer, final, last, after = fill(algorithm, np.random.default_rng(0))
    algorithm._estimate_returns(buffer, algorithm._states(buffer))
    policy = algorithm.policy
    truncated = policy.act(final, state=after[2][:1], deterministic=True).extras["values"]
    following = policy.act(last[:1], state=after[-1][:1], deterministic=True).extras["values"]
    # with lambda 0 a return is the reward and the discounted value of what followed
    torch.testing.assert_close(buffer.returns[2, :1], 1.0 + 0.9 * truncated)
    torch.testing.assert_close(buffer.returns[-1, :1], 1.0 + 0.9 * following)
    torch.testing.assert_close(buffer.returns[-1, 1], torch.tensor(1.0))
    torch.testing.assert_close(buffer.returns[1], 1.0 + 0.9 * buffer.values[2])
    # and other memories would have given other values
    for wrong in (None, after[3][:1], after[1][:1]):
        value = policy.act(final, state=wrong, deterministic=True).extras["values"]
        assert not torch.allclose(value, truncated, atol=1e-4)


def test_what_follows_an_episode_that_ended_in_the_last_row_is_valued_with_an_empty_memory(monkeypatch):
    algorithm = make_algorithm(EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2)))
    buffer, _, last, after = fill(algorithm, np.random.default_rng(0))
    given = {}
    monkeypatch.setattr(buffer, "compute_returns_and_advantages", lambda **kwargs: given.update(kwargs))
    algorithm._estimate_returns(buffer, algorithm._states(buffer))
    kept = algorithm.policy.value(last[:1], after[-1][:1])
    torch.testing.assert_close(given["last_value"], torch.cat([kept, algorithm.policy.value(last[1:])]))


def test_stored_states_stay_fixed_during_the_epochs():
    algorithm = make_algorithm(EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2)), learning_rate=0.1)
    buffer, _, _, _ = fill(algorithm, np.random.default_rng(0))
    judge, seen = algorithm.policy.evaluate_actions, []

    def judging(obs, actions, sequences):
        seen.append(sequences.state.clone())
        return judge(obs, actions, sequences)

    algorithm.policy.evaluate_actions = judging
    algorithm.update(buffer, Progress(horizon=100))
    assert len(seen) == 2
    assert torch.equal(seen[0].sort(0).values, seen[1].sort(0).values)


def test_predict_returns_the_next_state():
    agent = make_agent()
    obs = np.array([0.1, -0.2, 0.03, 0.4], np.float32)
    action, state = agent.predict(obs)
    assert action in (0, 1)
    assert state.shape == (1, agent.policy.state_size)
    _, second = agent.predict(obs, state)
    assert not torch.equal(state, second)
    for start in (True, [True], np.array([True])):
        _, restarted = agent.predict(obs, second, episode_start=start)
        assert torch.equal(restarted, state)
    _, batch = agent.predict(np.stack([obs, obs]), torch.cat([state, state]), episode_start=[False, True])
    torch.testing.assert_close(batch, torch.cat([second, state]))
    agent.close()


def test_equal_seeds_equal_evaluations():
    agent = make_agent(Recall, num_envs=2)
    assert agent.evaluate(5, seed=5) == agent.evaluate(5, seed=5)
    agent.close()


def test_resumed_with_its_memories(tmp_path):
    def make():
        return make_agent(wrappers=[{"name": "HideVelocity"}])

    whole, stopped = make(), make()
    whole.learn(300, progress=False)
    stopped.learn(300, progress=False, callback=lambda run: run.env_steps < 100)
    state = stopped._experiment.trainer.collector.policy_state.clone()
    assert (state != 0).any()
    stopped.save(tmp_path / "agent")
    resumed = load(tmp_path / "agent")
    assert torch.equal(resumed._experiment.trainer.collector.policy_state, state)
    resumed.learn(300 - resumed.num_timesteps, progress=False)
    expected, found = (flat(agent._experiment.trainer.state_dict()) for agent in (whole, resumed))
    for agent in (whole, stopped, resumed):
        agent.close()
    assert any("in_flight/policy" in name for name in expected)
    assert [name for name in expected.keys() | found.keys() if not same(expected, found, name)] == []


def test_settings():
    assert SPEC.layer == "contrib"
    config = RecurrentPPOConfig()
    assert config.problems() == []
    with pytest.raises(ConfigError, match=r"network > shared: .* set memory.critic to shared"):
        make_agent(network={"shared": True})
    make_agent(network={"shared": True}, memory={"critic": "shared"}).close()


@pytest.mark.parametrize(
    ("env_id", "seen"),
    [
        ("CartPole-v1", [0, 2]),
        ("Pendulum-v1", [0, 1]),
        ("MountainCar-v0", [0]),
        ("MountainCarContinuous-v0", [0]),
        ("LunarLander-v3", [0, 1, 4, 6, 7]),
    ],
)
def test_velocities_are_hidden(env_id, seen):
    plain, hidden = gym.make(env_id), HideVelocity(gym.make(env_id))
    plain.action_space.seed(0)
    action = plain.action_space.sample()
    assert np.array_equal(hidden.reset(seed=0)[0], plain.reset(seed=0)[0][seen])
    assert np.array_equal(hidden.step(action)[0], plain.step(action)[0][seen])
    assert hidden.observation_space.shape == (len(seen),)
    assert hidden.observation_space.dtype == np.float32
    plain.close()
    hidden.close()


def test_velocities_that_are_not_known():
    with pytest.raises(
        ConfigError, match="HideVelocity: the velocities of 'Acrobot-v1' are not known; supported environments: "
    ):
        make_agent("Acrobot-v1", wrappers=[{"name": "HideVelocity"}])


def test_hidden_velocities_are_resumed_exactly():
    agent = make_agent(wrappers=[{"name": "HideVelocity"}])
    assert agent._experiment.resume_grade() == ("exact", None)
    agent.close()
