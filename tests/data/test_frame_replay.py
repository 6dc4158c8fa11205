"""Replay of frame stacks: each frame is stored once, and what comes out are the stacks that went in."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from gymnasium import spaces

from rl_training.contracts.batches import Progress, Step, TransitionBatch
from rl_training.contracts.errors import CheckpointError, DataError
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import EnvSpec, FrameStack
from rl_training.data import replay_buffer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.samplers import PrioritizedIndexer, ReplaySampler, UniformIndexer

Padding = Literal["zero", "first"]
FRAME = (3, 2)


def spec_of(size: int, padding: Padding = "zero", *, as_dict: bool = False) -> EnvSpec:
    image = spaces.Box(0, 255, (size, *FRAME), np.uint8)
    space = spaces.Dict({"image": image, "speed": spaces.Box(-1, 1, (size, 2))}) if as_dict else image
    return EnvSpec(space, spaces.Discrete(5), frame_stack=FrameStack(size, padding))


class Screens:
    """N environments with random screens; what every step showed is kept in plain lists.

    Steps end by chance: terminated, truncated, or cut at a lost life, after which the same stack goes on.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int = 0, *, next_step: bool = False) -> None:
        assert spec.frame_stack is not None
        self.size, self.padding = spec.frame_stack.size, spec.frame_stack.padding
        self.as_dict = isinstance(spec.observation_space, spaces.Dict)
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.next_step = num_envs, next_step
        self.stacks = [self.first() for _ in range(num_envs)]
        self.obs: Any = self.batch(self.stacks)
        self.resetting = [False] * num_envs
        self.history: list[list[dict[str, Any]]] = []
        self.chances = [0.7, 0.1, 0.1, 0.1]

    def frame(self) -> Any:
        return self.rng.integers(1, 256, FRAME).astype(np.uint8)

    def first(self) -> Any:
        frame = self.frame()
        stack = np.zeros((self.size, *FRAME), np.uint8) if self.padding == "zero" else np.stack([frame] * self.size)
        stack[-1] = frame
        return stack

    def batch(self, stacks: list[Any]) -> Any:
        images = np.stack(stacks)
        if not self.as_dict:
            return images
        return {"image": images, "speed": images[:, :, 0, :].astype(np.float32) / 255}

    def step(self) -> Step:
        rows, final, ended = [], [], []
        terminated, truncated, valid = (np.zeros(self.num_envs, np.bool_) for _ in range(3))
        for env in range(self.num_envs):
            before, kind = self.stacks[env], self.rng.choice(["on", "end", "cut", "life"], p=self.chances)
            if self.resetting[env]:
                self.stacks[env], self.resetting[env] = self.first(), False
                rows.append({"valid": False})
                continue
            after = np.concatenate([before[1:], self.frame()[None]])
            valid[env], terminated[env], truncated[env] = True, kind in ("end", "life"), kind == "cut"
            self.stacks[env] = after
            if kind in ("end", "cut"):
                if self.next_step:
                    self.resetting[env] = True
                else:
                    self.stacks[env] = self.first()
            if kind != "on":
                final.append(after)
                ended.append(env)
            rows.append({"valid": True, "obs": before, "next": after, "ends": kind != "on", "kind": kind})
        obs, self.obs = self.obs, self.batch(self.stacks)
        self.history.append(rows)
        final_obs = self.batch(final) if final else None
        action = self.rng.integers(0, 5, self.num_envs)
        reward = self.rng.random(self.num_envs).astype(np.float32)
        for row, one in zip(rows, reward, strict=True):
            row["reward"] = one
        return Step(
            obs=obs, policy_obs=obs, action=action, extras={}, reward=reward, policy_reward=reward,
            terminated=terminated, truncated=truncated, valid=valid, ended=np.array(ended, np.intp),
            final_obs=final_obs, final_policy_obs=final_obs, next_obs=self.obs,
        )  # fmt: skip


def image(obs: Any) -> Any:
    return obs["image"] if isinstance(obs, dict) else obs


def check(buffer: ReplayBuffer, screens: Screens) -> int:
    """Every transition that is in the buffer is the one that happened."""
    index = buffer.everything()
    index = index[buffer.valid[index]]
    obs, following = buffer.observations(index), buffer.next_observations(index)
    for place, (time, env) in enumerate(zip(buffer.times(index), index % buffer.num_envs, strict=True)):
        row = screens.history[time][env]
        np.testing.assert_array_equal(image(obs)[place], row["obs"])
        np.testing.assert_array_equal(image(following)[place], row["next"])
        if isinstance(obs, dict):
            np.testing.assert_array_equal(obs["speed"][place], screens.batch([row["obs"]])["speed"][0])
    return len(index)


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("padding", ["zero", "first"])
@pytest.mark.parametrize(("size", "num_envs", "capacity"), [(1, 2, 20), (2, 1, 13), (4, 1, 9), (4, 3, 60), (5, 2, 7)])
def test_what_comes_out_is_what_went_in(
    size: int, num_envs: int, capacity: int, padding: Padding, next_step: bool
) -> None:
    spec = spec_of(size, padding)
    buffer, screens = ReplayBuffer(spec, capacity, num_envs), Screens(spec, num_envs, next_step=next_step)
    checked = 0
    for _ in range(120):
        buffer.add(screens.step())
        checked += check(buffer, screens)
    assert checked > 300
    assert {row["kind"] for rows in screens.history for row in rows if row["valid"]} == {"on", "end", "cut", "life"}


def test_dicts_of_stacks() -> None:
    spec = spec_of(3, as_dict=True)
    buffer, screens = ReplayBuffer(spec, 40, 2), Screens(spec, 2)
    for _ in range(90):
        buffer.add(screens.step())
    assert check(buffer, screens) == 40


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_n_steps_and_priorities(n_step: int, prioritized: bool) -> None:
    """The bootstrap observation of an n-step return is the stack that was seen then, also at an episode's end."""
    spec = spec_of(4)
    buffer, screens = ReplayBuffer(spec, 50, 2), Screens(spec, 2)
    rng = random_stream(0, "sampler")
    indexer = PrioritizedIndexer(buffer, rng) if prioritized else UniformIndexer(rng)
    sampler = ReplaySampler(buffer, indexer, gamma=0.5, n_step=n_step)
    for _ in range(80):
        sampler.add(screens.step())
    batch: TransitionBatch = sampler.sample(256, Progress())
    assert not isinstance(batch.obs, dict)
    assert not isinstance(batch.next_obs, dict)
    lengths = set()
    for place, index in enumerate(batch.indices.tolist()):
        time, env = int(buffer.times(np.array([index]))[0]), index % 2
        last, total = time, 0.0
        while True:
            row = screens.history[last][env]
            total += 0.5 ** (last - time) * row["reward"]
            if row["ends"] or last - time + 1 == n_step or last + 1 == buffer.added:
                break
            last += 1
        lengths.add(last - time + 1)
        np.testing.assert_array_equal(batch.obs[place].numpy(), screens.history[time][env]["obs"])
        np.testing.assert_array_equal(batch.next_obs[place].numpy(), row["next"])
        assert batch.reward[place].item() == pytest.approx(total, rel=1e-5)
        terminated = row["kind"] in ("end", "life")
        assert batch.discount[place].item() == pytest.approx(0.0 if terminated else 0.5 ** (last - time + 1))
    assert lengths == set(range(1, n_step + 1))


@pytest.mark.parametrize("num_steps", [3, 25, 70])
def test_saved_and_loaded(num_steps: int) -> None:
    """Also the stacks of the oldest rows, which reach back to rows that are no longer there."""
    spec = spec_of(4)
    screens, buffer, again = Screens(spec, 2), ReplayBuffer(spec, 40, 2), ReplayBuffer(spec, 40, 2)
    for _ in range(num_steps):
        buffer.add(screens.step())
    again.load_state_dict(buffer.state_dict())
    assert check(again, screens) == check(buffer, screens) == min(40, 2 * num_steps)
    for _ in range(50):
        step = screens.step()
        again.add(step._replace(obs=step.obs.copy()))  # type: ignore[union-attr]
    assert check(again, screens) == 40


@pytest.mark.parametrize("size", [255, 256, 300])
def test_long_stacks(size: int) -> None:
    """Longer than a byte can count, in episodes that are longer still."""
    spec = spec_of(size)
    screens, buffer, again = Screens(spec, 1), ReplayBuffer(spec, 30), ReplayBuffer(spec, 30)
    screens.chances = [1.0, 0.0, 0.0, 0.0]
    for _ in range(size + 5):
        buffer.add(screens.step())
    again.load_state_dict(buffer.state_dict())
    for tested in (buffer, again):
        assert check(tested, screens) == 30
    step = screens.step()
    again.add(step._replace(obs=np.array(step.obs)))
    assert check(again, screens) == 30


@pytest.mark.parametrize("as_dict", [False, True])
def test_float64_goes_on_after_loading(as_dict: bool) -> None:
    """Replay keeps float32 of it, so what it shows again after a resume is not equal to the bit."""
    plain = spaces.Box(-1, 1, (3, 2), np.float64)
    image = spaces.Box(0, 255, (3, *FRAME), np.uint8)
    space = spaces.Dict({"image": image, "speed": plain}) if as_dict else plain
    spec = EnvSpec(space, spaces.Discrete(5), frame_stack=FrameStack(3, "first"))
    screens = Screens(spec_of(3, "first"), 2)

    def as_float64(stacks: Any) -> Any:
        speeds = stacks[:, :, 0, :].astype(np.float64) / 300
        return {"image": stacks.copy(), "speed": speeds} if as_dict else speeds

    def step() -> Step:
        made = screens.step()
        final = None if made.final_obs is None else as_float64(made.final_obs)
        return made._replace(obs=as_float64(made.obs), next_obs=as_float64(made.next_obs), final_obs=final)

    buffer, again = ReplayBuffer(spec, 40, 2), ReplayBuffer(spec, 40, 2)
    for _ in range(30):
        buffer.add(step())
    again.load_state_dict(buffer.state_dict())
    for _ in range(30):
        one = step()
        buffer.add(one)
        again.add(one)
    index = buffer.everything()
    for a, b in zip(_parts(again.observations(index)), _parts(buffer.observations(index)), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(_parts(again.observations(index[-2:])), _parts(one.obs), strict=True):
        np.testing.assert_array_equal(a, b.astype(a.dtype))


def _parts(obs: Any) -> list[Any]:
    return list(obs.values()) if isinstance(obs, dict) else [obs]


@pytest.mark.parametrize("capacity", range(1, 24))
def test_loaded_into_a_smaller_one(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks reach back into rows that do not fit, also where those are in another segment."""
    monkeypatch.setattr(replay_buffer, "SEGMENT_BYTES", 60)
    spec = spec_of(4)
    screens, buffer, smaller = Screens(spec, 1), ReplayBuffer(spec, 40), ReplayBuffer(spec, capacity)
    for _ in range(63):
        buffer.add(screens.step())
    assert len(buffer.state_dict()["segments"]) > 8
    smaller.load_state_dict(buffer.state_dict())
    assert check(smaller, screens) == capacity


def test_loaded_without_a_stack_is_refused() -> None:
    spec = spec_of(4)
    screens, buffer = Screens(spec, 1), ReplayBuffer(spec, 40)
    for _ in range(5):
        buffer.add(screens.step())
    whole = ReplayBuffer(EnvSpec(spec.observation_space, spec.action_space), 40)
    with pytest.raises(CheckpointError):
        whole.load_state_dict(buffer.state_dict())


def test_closed_episodes_end_with_their_last_stack() -> None:
    """After a resume at an episode boundary, new episodes begin and the old ones count as cut off."""
    spec = spec_of(4)
    screens, buffer = Screens(spec, 2, seed=3), ReplayBuffer(spec, 40, 2)
    for _ in range(8):
        buffer.add(screens.step())
    buffer.close_episodes()
    screens.stacks = [screens.first() for _ in range(2)]
    screens.obs = screens.batch(screens.stacks)
    for _ in range(8):
        buffer.add(screens.step())
    assert check(buffer, screens) == 32


def test_what_is_not_a_stack_is_refused() -> None:
    spec = spec_of(3)
    buffer, screens = ReplayBuffer(spec, 40), Screens(spec, 1)
    buffer.add(screens.step())
    step = screens.step()
    with pytest.raises(DataError, match="stacks of the last 3 frames, but environment 0"):
        buffer.add(step._replace(next_obs=screens.rng.integers(1, 256, (1, 3, *FRAME)).astype(np.uint8)))


def test_a_frame_is_stored_once() -> None:
    """100k Atari transitions: 0.71 GB, not 2.8."""
    image = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = ReplayBuffer(EnvSpec(image, spaces.Discrete(6), frame_stack=FrameStack(4)), 100_000)
    assert buffer.num_bytes < 0.715e9
    assert ReplayBuffer(EnvSpec(image, spaces.Discrete(6)), 100_000).num_bytes > 2.8e9
