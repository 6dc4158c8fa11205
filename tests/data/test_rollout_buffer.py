"""The rollout buffer: its public contract, what `add` keeps, and which rows come out."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.contracts.batches import Step
from rl_training.contracts.errors import DataError
from rl_training.contracts.spec import EnvSpec
from rl_training.data.rollout_buffer import RolloutBuffer, channels_last

HALVES = {"gamma": 0.5, "gae_lambda": 0.5}


def make_buffer(num_steps=3, num_envs=2, obs_shape=(2,), action_shape=(), **kwargs):
    return RolloutBuffer(
        num_steps=num_steps, num_envs=num_envs, obs_shape=obs_shape, action_shape=action_shape, **kwargs
    )


def bools(*values):
    return np.array(values, np.bool_)


def make_step(
    obs=((0, 0), (0, 0)),
    *,
    action=(0, 0),
    reward=(1, 1),
    values=(0, 0),
    logprobs=(0, 0),
    terminated=(0, 0),
    truncated=(0, 0),
    valid=(1, 1),
    final=None,
    **changes,
):
    """A step of two environments; `final` has a row for every environment whose episode ended."""
    obs = obs if isinstance(obs, dict) else np.array(obs, np.float32)
    final = final if final is None or isinstance(final, dict) else np.array(final, np.float32)
    fields = {
        "obs": obs,
        "policy_obs": obs,
        "action": np.array(action),
        "extras": {"logprobs": np.array(logprobs, np.float32), "values": np.array(values, np.float32)},
        "reward": np.array(reward, np.float64),
        "policy_reward": np.array(reward, np.float64),
        "terminated": bools(*terminated),
        "truncated": bools(*truncated),
        "valid": bools(*valid),
        "ended": np.flatnonzero(bools(*terminated) | bools(*truncated)),
        "final_obs": final,
        "final_policy_obs": final,
        "next_obs": obs,
    }
    return Step(**{**fields, **changes})


class TestWrittenDirectly:
    """The contract: fields are written, then `compute_returns_and_advantages` fills the other two."""

    def test_fields(self):
        buffer = make_buffer(num_steps=4, num_envs=3, obs_shape=(5, 2), action_shape=(6,))
        assert buffer.obs.shape == (4, 3, 5, 2)
        assert buffer.actions.shape == (4, 3, 6)
        for name in ("logprobs", "rewards", "dones", "values", "advantages", "returns"):
            assert getattr(buffer, name).shape == (4, 3), name

    def fill(self, dones):
        # gamma = lambda = 1/2, values 1, value after the rollout 2
        buffer = make_buffer(num_steps=3, num_envs=1)
        buffer.rewards[:] = torch.tensor([[1.0], [2.0], [3.0]])
        buffer.values[:] = 1.0
        buffer.dones[:] = torch.tensor(dones).reshape(3, 1)
        buffer.compute_returns_and_advantages(last_value=torch.tensor([2.0]), **HALVES)
        return buffer.advantages.flatten().tolist(), buffer.returns.flatten().tolist()

    @pytest.mark.parametrize("kind", [bool, float, int])
    def test_no_end(self, kind):
        # deltas 1 + .5 - 1 = 0.5, 2 + .5 - 1 = 1.5, 3 + 1 - 1 = 3; A2 = 3, A1 = 1.5 + 3/4, A0 = 0.5 + 2.25/4
        assert self.fill([kind(0)] * 3) == ([1.0625, 2.25, 3.0], [2.0625, 3.25, 4.0])

    @pytest.mark.parametrize("kind", [bool, float, int])
    def test_a_row_in_dones_is_terminated(self, kind):
        # row 1 is the last of its episode: A1 = 2 - 1, A0 = 0.5 + 1/4
        assert self.fill([kind(0), kind(1), kind(0)]) == ([0.75, 1.0, 3.0], [1.75, 2.0, 4.0])

    def test_a_done_in_the_last_row_ignores_the_last_value(self):
        # A2 = 3 - 1 = 2, A1 = 1.5 + 2/4 = 2, A0 = 0.5 + 2/4 = 1
        assert self.fill([False, False, True]) == ([1.0, 2.0, 2.0], [2.0, 3.0, 3.0])

    def test_each_row_is_followed_by_the_value_of_the_next(self):
        # values 1, 2, 4 and then 8, gamma 1/2: what follows is worth as much as the row itself, so deltas are rewards
        buffer = make_buffer(num_steps=3, num_envs=1)
        buffer.rewards[:] = torch.tensor([[1.0], [2.0], [3.0]])
        buffer.values[:] = torch.tensor([[1.0], [2.0], [4.0]])
        buffer.compute_returns_and_advantages(last_value=torch.tensor([8.0]), gamma=0.5, gae_lambda=0.0)
        assert buffer.advantages.flatten().tolist() == [1.0, 2.0, 3.0]
        assert buffer.returns.flatten().tolist() == [2.0, 4.0, 7.0]

    def test_truncated_rows_bootstrap_from_final_values(self):
        # row 1 ends with a final value of 4: A1 = 2 + 0.5*4 - 1 = 3, A0 = 0.5 + 3/4
        buffer = make_buffer(num_steps=3, num_envs=1)
        buffer.rewards[:] = torch.tensor([[1.0], [2.0], [3.0]])
        buffer.values[:] = 1.0
        buffer.dones[1] = buffer.truncated[1] = True
        buffer.final_values[1] = 4.0
        buffer.compute_returns_and_advantages(last_value=torch.tensor([2.0]), **HALVES)
        assert buffer.advantages.flatten().tolist() == [1.25, 3.0, 3.0]

    def test_environments_are_apart(self):
        # gamma = lambda = 1: returns are sums of rewards up to the end, plus the value of what follows
        buffer = make_buffer(num_steps=2, num_envs=3)
        buffer.rewards[:] = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]])
        buffer.dones[0, 1] = True
        buffer.compute_returns_and_advantages(last_value=torch.tensor([0.0, 5.0, 7.0]), gamma=1.0, gae_lambda=1.0)
        assert buffer.returns.tolist() == [[3.0, 10.0, 307.0], [2.0, 25.0, 207.0]]

    @pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)])
    def test_last_value_in_any_shape_and_with_gradient(self, shape):
        buffer = make_buffer(num_steps=1, num_envs=2)
        last = torch.tensor([3.0, 5.0]).reshape(shape).requires_grad_()
        buffer.compute_returns_and_advantages(last_value=last, gamma=1.0, gae_lambda=1.0)
        assert buffer.returns.tolist() == [[3.0, 5.0]]
        assert not buffer.returns.requires_grad

    def test_all_rows_come_out(self):
        buffer = make_buffer(num_steps=2, num_envs=2, obs_shape=(1,))
        buffer.obs[:] = torch.arange(4.0).reshape(2, 2, 1)
        buffer.rewards[:] = 1.0
        buffer.compute_returns_and_advantages(last_value=torch.zeros(2), gamma=1.0, gae_lambda=1.0)
        batch = buffer.flatten()
        assert batch.num_rows == 4
        assert batch.obs.flatten().tolist() == [0, 1, 2, 3]  # time-major: both environments of step 0 first
        assert batch.returns.tolist() == [2, 2, 1, 1]


class TestAdd:
    def test_what_is_kept(self):
        buffer = make_buffer(num_steps=2)
        buffer.add(make_step([[1, 2], [3, 4]], action=(1, 0), reward=(0.5, -1), values=(7, 8), logprobs=(-1, -2)))
        buffer.add(make_step([[5, 6], [7, 8]]))
        assert buffer.size == 2
        assert buffer.obs.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
        assert buffer.actions[0].tolist() == [1, 0]
        assert buffer.rewards[0].tolist() == [0.5, -1]
        assert buffer.values[0].tolist() == [7, 8]
        assert buffer.logprobs[0].tolist() == [-1, -2]

    def test_what_the_policy_saw_is_kept(self):
        # observations and rewards may be normalised for the policy; its log-probabilities belong to those
        buffer = make_buffer(num_steps=1)
        seen, scaled = np.full((2, 2), 0.5, np.float32), np.array([0.1, 0.2])
        buffer.add(make_step([[100, 100], [100, 100]], policy_obs=seen, policy_reward=scaled))
        assert buffer.obs[0].tolist() == [[0.5, 0.5], [0.5, 0.5]]
        assert buffer.rewards[0].tolist() == pytest.approx([0.1, 0.2])

    def test_arrays_are_copied(self):
        # environments may write into their arrays again
        buffer, step = make_buffer(num_steps=1), make_step([[1, 2], [3, 4]])
        buffer.add(step)
        step.policy_obs[:] = 99
        assert buffer.obs[0].tolist() == [[1, 2], [3, 4]]

    def test_ends(self):
        buffer = make_buffer(num_steps=4)
        final = [[9, 9]]
        buffer.add(make_step(terminated=(1, 0), final=final))
        buffer.add(make_step(truncated=(0, 1), final=final))
        buffer.add(make_step(terminated=(1, 0), truncated=(1, 0), final=final))  # both: it has terminated
        buffer.add(make_step())
        assert buffer.dones.tolist() == [[True, False], [False, True], [True, False], [False, False]]
        assert buffer.truncated.tolist() == [[False, False], [False, True], [False, False], [False, False]]
        assert buffer.final_rows == [(1, 1)]

    def test_final_observations_of_truncated_rows_only(self):
        buffer = make_buffer(num_steps=2)
        # both end; the first is truncated, the second terminated
        buffer.add(make_step(terminated=(0, 1), truncated=(1, 0), final=[[1, 1], [2, 2]]))
        # both truncated
        buffer.add(make_step(truncated=(1, 1), final=[[3, 3], [4, 4]]))
        assert buffer.final_rows == [(0, 0), (1, 0), (1, 1)]
        assert buffer.stacked_final_obs().tolist() == [[1, 1], [3, 3], [4, 4]]

    def test_the_row_among_those_that_ended_is_found(self):
        # only environment 1 ended, so its final observation is row 0 of the final ones
        buffer = make_buffer(num_steps=1)
        buffer.add(make_step(truncated=(0, 1), final=[[8, 8]]))
        assert buffer.final_rows == [(0, 1)]
        assert buffer.stacked_final_obs().tolist() == [[8, 8]]

    def test_no_final_observations(self):
        buffer = make_buffer(num_steps=1)
        buffer.add(make_step(terminated=(1, 0), final=[[1, 1]]))
        assert buffer.stacked_final_obs() is None

    def test_overflow(self):
        buffer = make_buffer(num_steps=1)
        buffer.add(make_step())
        with pytest.raises(IndexError, match="the rollout buffer is full: it has 1 steps"):
            buffer.add(make_step())

    def test_reset_begins_anew(self):
        buffer = make_buffer(num_steps=1)
        buffer.add(make_step(truncated=(1, 0), valid=(1, 0), final=[[5, 5]]))
        buffer.reset()
        assert buffer.size == 0
        assert buffer.stacked_final_obs() is None
        buffer.add(make_step(reward=(2, 3)))
        buffer.compute_returns_and_advantages(last_value=torch.ones(2), gamma=1.0, gae_lambda=1.0)
        # the truncation and the invalid row of the rollout before are gone
        assert buffer.flatten().returns.tolist() == [3, 4]


class TestReturnsAfterAdd:
    def test_truncation_bootstraps_from_the_value_of_the_final_observation(self):
        # the tables of the direct contract in two environments: the first truncated at t=1, the second terminated
        buffer = make_buffer()
        buffer.add(make_step(reward=(1, 1), values=(1, 1)))
        buffer.add(make_step(reward=(2, 2), values=(1, 1), truncated=(1, 0), terminated=(0, 1), final=[[0, 0], [0, 0]]))
        buffer.add(make_step(reward=(3, 3), values=(1, 1)))
        buffer.compute_returns_and_advantages(
            last_value=torch.tensor([2.0, 2.0]), **HALVES, final_values=torch.tensor([4.0])
        )
        # truncated: A1 = 2 + 0.5*4 - 1 = 3, A0 = 0.5 + 3/4;  terminated: A1 = 2 - 1, A0 = 0.5 + 1/4
        assert buffer.advantages.T.tolist() == [[1.25, 3.0, 3.0], [0.75, 1.0, 3.0]]
        assert torch.equal(buffer.returns, buffer.advantages + 1)

    def test_final_values_go_to_their_rows(self):
        # gamma 1, lambda 0, values 0, rewards 1: the advantage of a truncated row is 1 + its final value
        buffer = make_buffer()
        buffer.add(make_step(truncated=(0, 1), final=[[0, 0]]))
        buffer.add(make_step(truncated=(1, 1), final=[[0, 0], [0, 0]]))
        buffer.add(make_step())
        final_values = torch.tensor([10.0, 20.0, 30.0])
        buffer.compute_returns_and_advantages(torch.zeros(2), gamma=1.0, gae_lambda=0.0, final_values=final_values)
        assert buffer.advantages.tolist() == [[1, 11], [21, 31], [1, 1]]

    def test_both_flags_mean_terminated(self):
        buffer = make_buffer(num_steps=1)
        buffer.add(make_step(reward=(3, 3), terminated=(1, 0), truncated=(1, 1), final=[[0, 0], [0, 0]]))
        buffer.compute_returns_and_advantages(torch.full((2,), 50.0), 1.0, 1.0, final_values=torch.tensor([7.0]))
        assert buffer.returns.tolist() == [[3.0, 10.0]]

    def test_missing_final_values_are_refused(self):
        # those of an earlier rollout must not be taken instead
        buffer = make_buffer(num_steps=1)
        buffer.add(make_step(truncated=(1, 0), final=[[0, 0]]))
        with pytest.raises(DataError, match="1 episodes were truncated"):
            buffer.compute_returns_and_advantages(last_value=torch.zeros(2), gamma=1.0, gae_lambda=1.0)

    def test_a_partial_rollout(self):
        # room for 5, 2 came: the last value follows row 1
        buffer = make_buffer(num_steps=5)
        buffer.add(make_step(reward=(1, 2)))
        buffer.add(make_step(reward=(3, 4)))
        buffer.compute_returns_and_advantages(last_value=torch.tensor([10.0, 20.0]), gamma=1.0, gae_lambda=1.0)
        batch = buffer.flatten()
        assert batch.num_rows == 4
        assert batch.returns.tolist() == [14, 26, 13, 24]
        assert batch.obs.shape == (4, 2)


class TestInvalidRows:
    def rollout(self):
        """A next-step environment: the second ends at t=0, only resets at t=1 and goes on at t=2."""
        buffer = make_buffer(num_steps=3, obs_shape=(1,))
        buffer.add(make_step([[1], [10]], reward=(1, 10), truncated=(0, 1), final=[[0]]))
        buffer.add(make_step([[2], [20]], reward=(2, 999), values=(0, 999), valid=(1, 0)))
        buffer.add(make_step([[3], [30]], reward=(3, 30)))
        buffer.compute_returns_and_advantages(torch.zeros(2), 1.0, 1.0, final_values=torch.tensor([5.0]))
        return buffer

    def test_they_are_left_out(self):
        batch = self.rollout().flatten()
        assert batch.num_rows == 5
        assert batch.obs.flatten().tolist() == [1, 10, 2, 3, 30]
        assert {tuple(x.shape) for x in batch if isinstance(x, torch.Tensor) and x.dim() == 1} == {(5,)}

    def test_they_do_not_touch_their_neighbours(self):
        # first environment: 6, 5, 3; second: 10 + 5 at the truncation, and 30 in the new episode
        assert self.rollout().flatten().returns.tolist() == [6, 15, 5, 3, 30]


class TestDict:
    SHAPES: ClassVar = {"image": (2, 2), "code": ()}
    DTYPES: ClassVar = {"image": np.uint8, "code": np.int64}

    def step(self, number, **kwargs):
        obs = {"image": np.full((2, 2, 2), number, np.uint8), "code": np.array([number, number + 1])}
        return make_step(obs, **kwargs)

    def test_entries_keep_shape_and_type(self):
        buffer = make_buffer(num_steps=2, obs_shape=self.SHAPES, obs_dtype=self.DTYPES)
        assert {key: tuple(store.shape) for key, store in buffer.obs.items()} == {"image": (2, 2, 2, 2), "code": (2, 2)}
        assert {key: store.dtype for key, store in buffer.obs.items()} == {"image": torch.uint8, "code": torch.int64}

    def test_one_type_for_all(self):
        buffer = make_buffer(obs_shape=self.SHAPES, obs_dtype=np.float64)
        assert all(store.dtype == torch.float64 for store in buffer.obs.values())

    def test_rows(self):
        buffer = make_buffer(num_steps=2, obs_shape=self.SHAPES, obs_dtype=self.DTYPES)
        buffer.add(self.step(1))
        buffer.add(self.step(5, valid=(1, 0)))
        batch = buffer.flatten()
        assert batch.obs["code"].tolist() == [1, 2, 5]
        assert batch.obs["image"][:, 0, 0].tolist() == [1, 1, 5]
        part = batch.rows(torch.tensor([2, 0]))
        assert part.obs["code"].tolist() == [5, 1]
        assert part.num_rows == 2

    def test_final_observations(self):
        buffer = make_buffer(num_steps=2, obs_shape=self.SHAPES, obs_dtype=self.DTYPES)
        final = {"image": np.full((1, 2, 2), 9, np.uint8), "code": np.array([8])}
        buffer.add(self.step(1, truncated=(0, 1), final=final))
        buffer.add(self.step(1, truncated=(1, 0), final={key: value - 1 for key, value in final.items()}))
        stacked = buffer.stacked_final_obs()
        assert stacked["code"].tolist() == [8, 7]
        assert stacked["image"].shape == (2, 2, 2)
        assert stacked["image"].dtype == np.uint8


class TestTypes:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int8, np.int64, np.bool_])
    def test_observations_keep_theirs(self, dtype):
        buffer = make_buffer(num_steps=1, obs_dtype=dtype)
        obs = np.ones((2, 2), dtype)
        buffer.add(make_step(policy_obs=obs))
        assert buffer.flatten().obs.numpy().dtype == dtype
        assert buffer.flatten().obs.tolist() == obs.tolist()

    ACTIONS = (
        (spaces.Discrete(3, start=2), torch.int64, ()),
        (spaces.MultiDiscrete([3, 2]), torch.int64, (2,)),
        (spaces.MultiBinary((2, 2)), torch.int64, (2, 2)),
        (spaces.Box(-1, 1, (3,), np.float64), torch.float32, (3,)),  # as the policy gives them
    )

    @pytest.mark.parametrize(("space", "dtype", "shape"), ACTIONS, ids=lambda x: getattr(x, "__class__", x).__name__)
    def test_actions_for_a_space(self, space, dtype, shape):
        buffer = RolloutBuffer.for_spec(EnvSpec(spaces.Discrete(4), space), num_steps=3, num_envs=2)
        assert buffer.actions.dtype == dtype
        assert buffer.actions.shape == (3, 2, *shape)

    def test_observations_for_a_space(self):
        kinds = {
            "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
            "speed": spaces.Box(-1, 1, (2,), np.float64),
            "code": spaces.Discrete(3),
            "bits": spaces.MultiBinary(5),
        }
        dtypes = {"image": torch.uint8, "speed": torch.float64, "code": torch.int64, "bits": torch.int8}
        for key, space in kinds.items():
            buffer = RolloutBuffer.for_spec(EnvSpec(space, spaces.Discrete(2)), 3, 2)
            assert buffer.obs.dtype == dtypes[key]
            assert buffer.obs.shape == (3, 2, *space.shape)
        together = RolloutBuffer.for_spec(EnvSpec(spaces.Dict(kinds), spaces.Discrete(2)), 3, 2)
        assert {key: store.dtype for key, store in together.obs.items()} == dtypes

    def test_normalised_entries_are_float32(self):
        both = spaces.Dict({"speed": spaces.Box(-1, 1, (2,), np.float64), "other": spaces.Box(-1, 1, (2,), np.float64)})
        buffer = RolloutBuffer.for_spec(EnvSpec(both, spaces.Discrete(2)), 3, 2, normalized_keys={"speed"})
        assert buffer.obs["speed"].dtype == torch.float32
        assert buffer.obs["other"].dtype == torch.float64
        single = RolloutBuffer.for_spec(EnvSpec(both["speed"], spaces.Discrete(2)), 3, 2, normalized_keys={""})
        assert single.obs.dtype == torch.float32

    def test_numbers_are_float32(self):
        buffer = make_buffer()
        for name in ("logprobs", "rewards", "values", "advantages", "returns"):
            assert getattr(buffer, name).dtype == torch.float32, name


def test_a_rollout_has_no_state_of_its_own():
    buffer = make_buffer()
    buffer.add(make_step())
    assert buffer.state_dict() == {}
    buffer.load_state_dict({})
    assert buffer.size == 1


class TestMemoryOrderOfImages:
    """Convolutions want channels last; what the numbers are does not change."""

    def test_bytes_with_channels_first_are_laid_out_for_convolutions(self):
        images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).reshape(2, 3, 4, 5)
        laid_out = channels_last(images)
        assert torch.equal(laid_out, images)
        assert laid_out.is_contiguous(memory_format=torch.channels_last)
        shuffled = laid_out[torch.tensor([1, 0])]  # as a minibatch is taken
        assert shuffled.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize(
        "rows",
        [torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.zeros(2, 3, 8, 8), torch.zeros(2, 6)],
        ids=["channels last already", "floats", "vectors"],
    )
    def test_anything_else_stays_as_it_is(self, rows):
        assert channels_last(rows) is rows
