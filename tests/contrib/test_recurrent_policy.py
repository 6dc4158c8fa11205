"""The recurrent policy: sequences against single steps, for every space, with masks, and how it is acted with."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.contracts.arrays import map_observation
from rl_training.contracts.errors import DataError
from rl_training.contracts.spec import EnvSpec
from rl_training.contrib.recurrent.memory import MemoryConfig
from rl_training.contrib.recurrent.policy import RecurrentActorCriticPolicy, Sequences
from rl_training.policies.networks import ActorCriticNetworkConfig

T, B = 6, 4
VECTOR = spaces.Box(-1.0, 1.0, (3,))
OBSERVATIONS = {
    "vector": VECTOR,
    "discrete": spaces.Discrete(5, start=1),
    "dict": spaces.Dict({"a": spaces.Box(-1.0, 1.0, (2,)), "b": spaces.MultiBinary(3)}),
    "pixels": spaces.Box(0, 255, (3, 36, 36), np.uint8),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=2),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-2.0, 2.0, (2,)),
}


def make_policy(spec=None, *, kind="lstm", critic="separate", shared=False):
    torch.manual_seed(0)
    network = ActorCriticNetworkConfig(actor_sizes=(8,), critic_sizes=(8,), shared=shared)
    policy = RecurrentActorCriticPolicy(
        spec or EnvSpec(VECTOR, ACTIONS["discrete"]), network, MemoryConfig(kind=kind, size=5, critic=critic)
    )
    with torch.no_grad():
        policy.head.linear.weight.mul_(100.0)  # so that what is remembered matters to what is done
    return policy.eval()


def observe(space, shape, seed=0):
    """Random observations [*shape, ...]."""
    space.seed(seed)
    count = int(np.prod(shape))
    drawn = [space.sample() for _ in range(count)]
    if isinstance(space, spaces.Dict):
        stacked = {key: np.stack([one[key] for one in drawn]) for key in space.spaces}
    else:
        stacked = np.stack(drawn)
    return map_observation(lambda x: torch.from_numpy(x).unflatten(0, shape), stacked)


def stepped(policy, obs, state, starts, rng):
    """Actions, log-probabilities, values [T, B], states: one step at a time."""
    outs = []
    for t in range(len(starts)):
        row = map_observation(lambda x, t=t: x[t], obs)
        outs.append(policy.act(row, state=state, episode_start=starts[t], rng=rng))
        state = outs[-1].state
    actions = torch.stack([out.action for out in outs])
    logprobs, values = (torch.stack([out.extras[name] for out in outs]) for name in ("logprobs", "values"))
    return actions, logprobs, values, torch.stack([out.state for out in outs])


def check_sequences(policy, space):
    """All rows at once, with episode starts inside and holes, are judged as they were step by step."""
    obs = observe(space, (T, B))
    state = torch.randn(B, policy.state_size, generator=torch.Generator().manual_seed(1))
    starts = torch.zeros(T, B, dtype=torch.bool)
    starts[0, 0] = starts[2, 1] = starts[4, 0] = starts[4, 1] = True
    actions, logprobs, values, states = stepped(policy, obs, state, starts, np.random.default_rng(0))
    torch.testing.assert_close(policy.states(obs, state, starts), states)

    there = torch.ones(T, B, dtype=torch.bool)
    there[5, 2] = there[4, 3] = there[5, 3] = False  # padding at the end
    there[3, 0] = there[3, 1] = False  # rows that only reset: an episode starts behind each
    rows = map_observation(lambda x: x[there], obs)
    sequences = Sequences(there, starts, state)
    found_logprobs, entropies, found_values = policy.evaluate_actions(rows, actions[there], sequences)
    assert len(found_logprobs) == T * B - 5
    torch.testing.assert_close(found_logprobs, logprobs[there], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_values, values[there], rtol=1e-4, atol=1e-5)
    assert entropies.shape == found_values.shape
    (found_logprobs.sum() + found_values.sum()).backward()
    assert [name for name, parameter in policy.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(("critic", "shared"), [("separate", False), ("shared", False), ("shared", True)])
def test_sequences_are_judged_as_they_were_acted(kind, critic, shared):
    check_sequences(make_policy(kind=kind, critic=critic, shared=shared), VECTOR)


@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS)
def test_every_action_space(actions):
    check_sequences(make_policy(EnvSpec(VECTOR, actions)), VECTOR)


@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_every_observation_space(space):
    check_sequences(make_policy(EnvSpec(space, ACTIONS["discrete"]), critic="shared"), space)


@pytest.mark.parametrize("name", ["discrete", "multi-discrete"])
def test_masks(name):
    size = {"discrete": 3, "multi-discrete": 5}[name]
    space = spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(size)})
    policy = make_policy(EnvSpec(space, ACTIONS[name], action_masks=True))
    obs = observe(space, (T, B))
    obs["action_mask"][..., 0] = obs["action_mask"][..., -1] = 1  # something is always valid
    starts = torch.rand(T, B, generator=torch.Generator().manual_seed(0)) < 0.2
    state = policy.no_memory(B)
    actions, logprobs, values, _ = stepped(policy, obs, state, starts, np.random.default_rng(0))
    if name == "discrete":
        assert obs["action_mask"].gather(-1, actions.unsqueeze(-1)).all()
    there = torch.ones(T, B, dtype=torch.bool)
    rows = map_observation(lambda x: x.flatten(0, 1), obs)
    found = policy.evaluate_actions(rows, actions.flatten(0, 1), Sequences(there, starts, state))
    torch.testing.assert_close(found[0], logprobs.flatten(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], values.flatten(), rtol=1e-4, atol=1e-5)
    # the mask is no part of what is remembered
    other = {**obs, "action_mask": torch.ones_like(obs["action_mask"])}
    torch.testing.assert_close(policy.states(other, state, starts), policy.states(obs, state, starts))
    # and one that is given takes the place of the observation's
    only = torch.zeros(B, size, dtype=torch.bool)
    only[:, [0] if name == "discrete" else [0, 2]] = True
    first = map_observation(lambda x: x[0], obs)
    assert (policy.act(first, action_mask=only, rng=np.random.default_rng(0)).action == 0).all()


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_size_of_the_state(critic):
    sizes = {"lstm": 10, "gru": 5}
    for kind, size in sizes.items():
        policy = make_policy(kind=kind, critic=critic)
        assert policy.state_size == size * (2 if critic == "separate" else 1)
        assert policy.act(observe(VECTOR, (B,)), deterministic=True).state.shape == (B, policy.state_size)


def test_separate_memories_do_not_touch_each_other():
    policy, obs = make_policy(), observe(VECTOR, (B,))
    state = torch.randn(B, policy.state_size, generator=torch.Generator().manual_seed(0))
    half = policy.state_size // 2
    other = torch.cat([state[:, :half], -state[:, half:]], dim=-1)
    distribution, values, after = policy(obs, state, torch.zeros(B, dtype=torch.bool))
    same, other_values, other_after = policy(obs, other, torch.zeros(B, dtype=torch.bool))
    assert torch.equal(distribution.log_probs, same.log_probs)
    assert torch.equal(after[:, :half], other_after[:, :half])
    assert not torch.allclose(values, other_values)


def test_an_episode_start_empties_the_memory():
    policy, obs = make_policy(), observe(VECTOR, (B,))
    before = policy.act(obs, deterministic=True).state
    fresh = policy.act(obs, deterministic=True)
    started = policy.act(obs, state=before, episode_start=torch.tensor([True, False, True, False]), deterministic=True)
    kept = policy.act(obs, state=before, deterministic=True)
    for row in range(B):
        expected = fresh if row in (0, 2) else kept
        torch.testing.assert_close(started.state[row], expected.state[row])
        torch.testing.assert_close(started.extras["values"][row], expected.extras["values"][row])
    assert not torch.allclose(fresh.state, kept.state)


def test_acting_leaves_the_state_that_was_given_alone():
    policy, obs = make_policy(), observe(VECTOR, (B,))
    state = torch.ones(B, policy.state_size)
    policy.act(obs, state=state, episode_start=torch.ones(B, dtype=torch.bool), deterministic=True)
    assert (state == 1).all()


def test_values_without_a_state_are_those_of_first_observations():
    policy, obs = make_policy(), observe(VECTOR, (B,))
    out = policy.act(obs, episode_start=torch.ones(B, dtype=torch.bool), deterministic=True)
    torch.testing.assert_close(policy.value(obs), out.extras["values"])
    assert not torch.allclose(policy.value(obs, out.state), out.extras["values"])


def test_a_state_of_another_shape_is_refused():
    policy = make_policy()
    with pytest.raises(DataError, match=r"state has shape \(2, 20\), expected \(4, 20\)"):
        policy.act(observe(VECTOR, (B,)), state=torch.zeros(2, 20), deterministic=True)
