"""Action masks through whole agents: never a forbidden action, right targets, errors in words, exact resume."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rl_training
from rl_training import load
from rl_training.algorithms.registry import registry
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.errors import ConfigError, DataError, EnvError, SpaceError
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.q_networks import QNetworkConfig
from rl_training.testing.resume import flat, same
from tests.envs.masked_tasks import Forbidding, InvalidActionError
from tests.small import small_settings

ON_POLICY = ["ppo", "a2c", "trpo"]
Q_LEARNING = ["dqn", "c51", "qrdqn", "iqn", "rainbow"]
STEPS = 1000
each_algorithm = pytest.mark.parametrize("name", ON_POLICY + Q_LEARNING)
each_q_algorithm = pytest.mark.parametrize("name", Q_LEARNING)
QUICK = {
    "ppo": {"num_epochs": 2, "minibatch_size": 32},
    "trpo": {"critic_epochs": 1, "cg_iterations": 5},
}


def make(name, env, **settings):
    settings = {"num_envs": 2, "eval_every": 0, "action_masks": True, **QUICK.get(name, {}), **settings}
    return getattr(rl_training, registry()[name].title)(env, **small_settings(name, **settings))


class Counted(Forbidding):
    """Counts the steps of all of its kind in this process."""

    steps = 0

    def step(self, action):
        Counted.steps += 1
        return super().step(action)


@pytest.fixture(autouse=True)
def no_steps_yet():
    Counted.steps = 0


def test_a_forbidden_action_would_be_noticed():
    agent = make("ppo", Forbidding, action_masks=False)
    with pytest.raises(EnvError, match="InvalidActionError"):
        agent.learn(STEPS, progress=False)
    agent.close()
    assert issubclass(InvalidActionError, Exception)


# ----------------------------------------------------------------------------------------------------------------------
# Never a forbidden action
# ----------------------------------------------------------------------------------------------------------------------


class TestNeverForbidden:
    @each_algorithm
    @pytest.mark.parametrize("where", ["obs", "info"])
    def test_in_training_evaluation_and_prediction(self, name, where):
        agent = make(name, lambda: Counted(where))
        agent.learn(STEPS, progress=False)
        assert Counted.steps == agent.num_timesteps >= STEPS
        agent.evaluate(20)
        agent.evaluate(20, deterministic=False)
        masks = np.eye(6, dtype=bool)[np.random.default_rng(0).integers(6, size=500)]
        vectors = np.zeros((500, 2), np.float32)
        for deterministic in (True, False):
            action, _ = agent.predict(vectors, action_mask=masks, deterministic=deterministic)
            assert masks[np.arange(500), action].all()
        agent.close()

    @pytest.mark.parametrize("name", ON_POLICY)
    @pytest.mark.parametrize("where", ["obs", "info"])
    def test_multi_discrete(self, name, where):
        agent = make(name, lambda: Counted(where, sizes=(3, 4), num_valid=2))
        agent.learn(STEPS, progress=False)
        agent.evaluate(20)
        assert Counted.steps > STEPS
        mask = np.array([0, 1, 0, 1, 0, 0, 0])
        action, _ = agent.predict(np.zeros(2, np.float32), action_mask=mask)
        assert action.tolist() == [1, 0]
        agent.close()

    @pytest.mark.parametrize("name", ["ppo", "dqn"])
    def test_in_other_processes(self, name):
        agent = make(name, lambda: Forbidding("info"), vectorization="async")
        agent.learn(300, progress=False)
        agent.evaluate(5)
        agent.close()

    @pytest.mark.parametrize("name", ["ppo", "dqn"])
    @pytest.mark.parametrize("where", ["obs", "info"])
    def test_in_one_environment_that_was_given(self, name, where):
        agent = make(name, Counted(where), num_envs=1)
        agent.learn(300, progress=False)
        agent.evaluate(5)
        agent.close()
        assert Counted.steps >= 300

    @pytest.mark.parametrize("name", ["ppo", "dqn", "rainbow"])
    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_in_a_vector_environment_that_was_given(self, name, mode):
        env, eval_env = (SyncVectorEnv([Counted] * 2, autoreset_mode=mode) for _ in range(2))
        agent = make(name, env, eval_env=eval_env)
        agent.learn(STEPS, progress=False)
        agent.evaluate(5)
        agent.close()
        assert Counted.steps > STEPS

    @each_q_algorithm
    def test_in_the_warm_up(self, name):
        agent = make(name, Counted, random_steps=STEPS, learning_starts=STEPS)
        agent.learn(STEPS, progress=False)
        agent.close()
        assert Counted.steps >= STEPS


# ----------------------------------------------------------------------------------------------------------------------
# What is kept, and what is learned from it
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ON_POLICY)
def test_rollouts_keep_masks(name):
    agent = make(name, Forbidding, normalize_obs=True)
    seen, update = [], agent.algorithm.update

    def watch(batch, progress):
        data = batch.flatten()
        again = agent.policy.distribution(data.obs)
        seen.append((data.obs["action_mask"].clone(), data.actions.clone(), data.logprobs.clone()))
        torch.testing.assert_close(again.log_prob(data.actions), data.logprobs)
        return update(batch, progress)

    agent.algorithm.update = watch
    agent.learn(200, progress=False)
    agent.close()
    for masks, actions, log_probs in seen:
        assert masks.gather(1, actions.unsqueeze(1)).eq(1.0).all()
        assert (masks.sum(1) == 1.0).all(), "not normalised"
        assert torch.equal(log_probs, torch.zeros_like(log_probs)), "one valid action is certain"


def test_replay_keeps_masks():
    agent = make("dqn", Forbidding, normalize_obs=True)
    agent.learn(200, progress=False)
    batch = agent._experiment.trainer.sampler.sample(200, Progress())
    masks = batch.obs["action_mask"]
    assert masks.gather(1, batch.action.unsqueeze(1)).eq(1.0).all()
    assert (masks.sum(1) == 1.0).all(), "not normalised"
    after = batch.next_obs["action_mask"].sum(1)
    assert torch.equal(after == 0.0, batch.discount == 0.0), "only a terminal state has marks no action as valid"
    assert (batch.discount == 0.0).any()
    agent.close()


def test_normalisation_leaves_masks_alone():
    agent = make("ppo", Forbidding, normalize_obs=True)
    agent.learn(64, progress=False)
    assert set(agent._experiment.trainer.collector.obs_normalizer.moments) == {"observation"}
    agent.close()


A = 4
SPACE = spaces.Dict({"observation": spaces.Box(-9.0, 9.0, (2,)), "action_mask": spaces.MultiBinary(A)})
SPEC = EnvSpec(SPACE, spaces.Discrete(A), action_masks=True)
SMALL = {
    "dqn": {},
    "c51": {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0},
    "rainbow": {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0},
    "qrdqn": {"num_quantiles": 3},
    "iqn": {"num_fractions": 3, "num_target_fractions": 3, "num_greedy_fractions": 3, "embedding_size": 4},
}


def algorithm(name, **settings):
    spec = registry()[name]
    plain = {"dueling": False, "noisy": False, "network": QNetworkConfig((8,)), **SMALL[name], **settings}
    return spec.algorithm_for(SPEC.action_space)(
        spec.config(**plain), SPEC, torch.device("cpu"), np.random.default_rng(0)
    )


def transitions(next_masks, discount=0.9, seed=0):
    rng = np.random.default_rng(seed)
    rows = len(next_masks)

    def vectors():
        return torch.from_numpy(rng.normal(size=(rows, 2)).astype(np.float32))

    return TransitionBatch(
        obs={"observation": vectors(), "action_mask": torch.ones(rows, A, dtype=torch.int8)},
        action=torch.from_numpy(rng.integers(A, size=rows)),
        reward=torch.from_numpy(rng.normal(size=rows).astype(np.float32)),
        discount=torch.full((rows,), discount),
        next_obs={"observation": vectors(), "action_mask": torch.tensor(next_masks, dtype=torch.int8)},
        weight=torch.ones(rows),
        indices=torch.arange(rows),
    )


NEXT_MASKS = [[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]]


class TestTargets:
    @pytest.mark.parametrize("double", [False, True])
    def test_dqn_by_hand(self, double):
        dqn = algorithm("dqn", double=double, loss="mse")
        with torch.no_grad():
            dqn.target.flat.add_(torch.linspace(-1, 1, len(dqn.target.flat)))
        batch = transitions(NEXT_MASKS)
        online, target = (
            network.expected(network(batch.next_obs)).detach() for network in (dqn.policy.network, dqn.target.module)
        )
        predicted = dqn.policy.network(batch.obs).squeeze(2).detach()
        for row, mask in enumerate(NEXT_MASKS):
            valid = [action for action in range(A) if mask[action]]
            chosen = max(valid, key=lambda action: (online if double else target)[row, action].item())
            expected = batch.reward[row] + 0.9 * target[row, chosen]
            error = predicted[row, batch.action[row]] - expected
            assert dqn.losses(batch).loss[row].item() == pytest.approx(error.item() ** 2, rel=1e-4)

    @each_q_algorithm
    @pytest.mark.parametrize("double", [False, True])
    def test_invalid_next_actions_do_not_matter(self, name, double):
        """Make an invalid action look splendid: no loss changes. Make a valid one so: they do."""
        one = algorithm(name, double=double)
        batch = transitions([[1, 1, 0, 0]] * 6)
        before = self.losses(one, batch)
        self.praise(one, action=3)
        assert torch.equal(self.losses(one, batch), before)
        self.praise(one, action=0)
        assert not torch.equal(self.losses(one, batch), before)

    @staticmethod
    def losses(one, batch):
        one.rng.bit_generator.state = np.random.default_rng(5).bit_generator.state
        batch = batch._replace(action=torch.ones(len(batch.reward), dtype=torch.int64))  # not those that are praised
        return one.losses(batch, *one.draws(batch)).loss.detach()

    @staticmethod
    def praise(one, action):
        for network in (one.policy.network, one.target.module):
            rows = network.head.bias.data.view(A, -1)
            if isinstance(one.config, registry()["c51"].config):
                rows[action, -1] += 20.0  # all of its return on the highest atom
            else:
                rows[action] += 100.0

    @each_q_algorithm
    @pytest.mark.parametrize("double", [False, True])
    def test_the_end_of_an_episode_has_no_valid_action(self, name, double):
        one = algorithm(name, double=double)
        ends = transitions([[0, 0, 0, 0]] * 4, discount=0.0)
        found = one.losses(ends, *one.draws(ends))
        assert torch.isfinite(found.loss).all()
        others = transitions([[1, 1, 1, 1]] * 4, discount=0.0)
        other = one.losses(others, *one.draws(others))
        assert other.loss.max() < 100.0
        if name != "iqn":  # which draws other fractions the second time
            assert torch.equal(found.loss, other.loss)

    @each_q_algorithm
    def test_a_cut_episode_without_a_valid_action_gives_an_ordinary_target(self, name):
        """It cannot come from an environment of ours, but from a vector environment that was given."""
        one, cut = algorithm(name), transitions([[0, 0, 0, 0]] * 4, discount=0.9)
        found = one.losses(cut, *one.draws(cut))
        assert found.loss.max() < 100.0

    @each_q_algorithm
    def test_update(self, name):
        one = algorithm(name)
        batch = transitions([[0, 0, 0, 0], *NEXT_MASKS], discount=0.0)
        result = one.update(batch, Progress(horizon=10))
        assert all(np.isfinite(float(value)) for value in result.metrics.values())
        assert abs(float(result.metrics["value/q_mean"])) < 100.0


@pytest.mark.parametrize("name", ON_POLICY)
def test_entropy_that_is_reported_is_that_of_the_valid_actions(name):
    agent = make(name, lambda: Forbidding(sizes=(8,), num_valid=2))
    seen, update = [], agent.algorithm.update

    def watch(batch, progress):
        seen.append(update(batch, progress))
        return seen[-1]

    agent.algorithm.update = watch
    agent.learn(200, progress=False)
    agent.close()
    entropies = [float(result.metrics["policy/entropy"]) for result in seen]
    assert all(0.0 < entropy <= np.log(2.0) + 1e-5 for entropy in entropies)


# ----------------------------------------------------------------------------------------------------------------------
# Prediction, values, errors
# ----------------------------------------------------------------------------------------------------------------------


class TestPredict:
    @pytest.fixture(params=["ppo", "dqn"])
    def agent(self, request):
        agent = make(request.param, lambda: Forbidding("info"))
        yield agent
        agent.close()

    VECTOR = np.zeros(2, np.float32)

    @pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int64, np.float32])
    def test_one_observation(self, agent, dtype):
        for action in range(6):
            mask = np.eye(6, dtype=dtype)[action]
            assert agent.predict(self.VECTOR, action_mask=mask)[0] == action
            assert agent.predict({"observation": self.VECTOR, "action_mask": mask})[0] == action
            assert isinstance(agent.value(self.VECTOR, action_mask=mask), float)

    def test_lists_will_do(self, agent):
        assert agent.predict([0.0, 0.0], action_mask=[False, True, False, False, False, False])[0] == 1

    def test_a_batch(self, agent):
        masks = np.eye(6)[[4, 0, 2]]
        assert agent.predict(np.zeros((3, 2)), action_mask=masks)[0].tolist() == [4, 0, 2]
        assert agent.value(np.zeros((3, 2)), action_mask=masks).shape == (3,)

    def test_what_was_given_counts_more_than_what_was_seen(self, agent):
        obs = {"observation": self.VECTOR, "action_mask": np.eye(6)[0]}
        assert agent.predict(obs, action_mask=np.eye(6)[3])[0] == 3
        assert obs["action_mask"].argmax() == 0

    @pytest.mark.parametrize(
        ("mask", "words"),
        [
            (None, "pass action_mask"),
            (np.ones(5), r"expected shape \(6,\)"),
            (np.ones((1, 1, 6)), r"expected shape \(6,\)"),
            (np.zeros(6), "marks no action as valid"),
            (np.ones((2, 6)), "have a batch dimension and some do not"),
        ],
    )
    def test_refused(self, agent, mask, words):
        with pytest.raises(DataError, match=words):
            agent.predict(self.VECTOR, action_mask=mask)

    def test_one_row_without_a_valid_action(self, agent):
        with pytest.raises(DataError, match="marks no action as valid"):
            agent.predict(np.zeros((2, 2)), action_mask=[[1, 0, 0, 0, 0, 0], [0] * 6])

    def test_masks_are_refused_by_agents_without_them(self):
        agent = make("ppo", "CartPole-v1", action_masks=False)
        with pytest.raises(ConfigError, match="created without action_masks=True"):
            agent.predict(np.zeros(4), action_mask=[1, 0])
        agent.close()


class TestErrors:
    def test_no_mask_anywhere(self):
        agent = make("ppo", "CartPole-v1")
        with pytest.raises(EnvError, match="info has no 'action_mask'"):
            agent.learn(100, progress=False)
        agent.close()

    @pytest.mark.parametrize("env", ["Pendulum-v1", "MountainCarContinuous-v0"])
    def test_real_valued_actions(self, env):
        with pytest.raises(SpaceError, match="needs Discrete or MultiDiscrete actions"):
            make("ppo", env)

    def test_real_valued_actions_of_other_algorithms(self):
        with pytest.raises(SpaceError, match="needs Discrete or MultiDiscrete actions"):
            rl_training.SAC("Pendulum-v1", action_masks=True)

    def test_a_mask_of_another_size(self):
        class Short(Forbidding):
            def __init__(self):
                super().__init__("obs")
                self.observation_space["action_mask"] = spaces.MultiBinary(5)

        with pytest.raises(SpaceError, match=r"an entry 'action_mask' of shape \(6,\)"):
            make("ppo", Short)

    @pytest.mark.parametrize("name", ["ppo", "dqn"])
    def test_no_valid_action_in_the_middle_of_an_episode(self, name):
        agent = make(name, lambda: Forbidding("obs", num_valid=0))
        with pytest.raises(EnvError, match="leaves no valid action"):
            agent.learn(100, progress=False)
        agent.close()

    def test_vector_environments_with_masks_in_their_info(self):
        with pytest.raises(SpaceError, match="an entry 'action_mask'"):
            make("ppo", SyncVectorEnv([lambda: Forbidding("info")] * 2))

    def test_native_environments_without_masks(self):
        with pytest.raises(SpaceError, match="an entry 'action_mask'"):
            make("ppo", "CartPole-v1", vectorization="native")


# ----------------------------------------------------------------------------------------------------------------------
# Resume
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    """By id, because in an environment that is given to `load` new episodes begin."""
    names = {where: f"Forbidding-{where}-v0" for where in ("obs", "info")}
    for where, name in names.items():
        gym.register(
            name, Forbidding, kwargs={"where": where, "num_valid": 2}, max_episode_steps=6, disable_env_checker=True
        )
    yield names
    for name in names.values():
        del gym.registry[name]


@each_algorithm
@pytest.mark.parametrize("where", ["obs", "info"])
def test_saved_and_loaded_in_the_middle(name, where, registered, tmp_path):
    def state_of(agent):
        return flat(agent._experiment.trainer.state_dict())

    whole = make(name, registered[where], seed=3)
    whole.learn(300, progress=False)
    stopped = make(name, registered[where], seed=3)
    stopped.learn(300, progress=False, callback=lambda run: run.env_steps < 120)
    assert stopped.num_timesteps < 300
    assert stopped._experiment.resume_grade()[0] == "exact"
    stopped.save(tmp_path / "agent")
    resumed = load(tmp_path / "agent")
    resumed.learn(300 - resumed.num_timesteps, progress=False)
    expected, found = state_of(whole), state_of(resumed)
    for agent in (whole, stopped, resumed):
        agent.close()
    assert [key for key in expected.keys() | found.keys() if not same(expected, found, key)] == []
