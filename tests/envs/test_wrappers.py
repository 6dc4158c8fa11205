"""Wrappers of our own, and environments that are seen as they are rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_training import DQN, DrQv2
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.spec import FrameStack
from rl_training.envs.factory import make_env
from rl_training.envs.snapshot import restore_snapshot, take_snapshot
from rl_training.envs.wrappers import ActionRepeat, WrapperConfig, apply_wrappers, stack_of, wrapper_names
from rl_training.experiment.build import build_experiment
from rl_training.experiment.config import resolve
from rl_training.experiment.presets import get_preset
from tests.small import small_settings


class Counting(gym.Env[Any, Any]):
    """Rewards 1, 2, 3, ...; ends after `length` steps."""

    observation_space, action_space = spaces.Discrete(100), spaces.Discrete(2)

    def __init__(self, length: int, terminates: bool) -> None:
        self.length, self.terminates, self.time = length, terminates, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        assert self.time < self.length, "stepped after the end"
        self.time += 1
        over = self.time == self.length
        return self.time, self.time, over and self.terminates, over and not self.terminates, {"time": self.time}


@pytest.mark.parametrize("terminates", [True, False])
def test_action_repeat_sums_rewards_and_stops_at_the_end(terminates: bool) -> None:
    env = ActionRepeat(Counting(5, terminates), num_repeats=2)
    for _ in range(2):
        env.reset()
        assert env.step(0) == (2, 1.0 + 2.0, False, False, {"time": 2})
        assert env.step(0) == (4, 3.0 + 4.0, False, False, {"time": 4})
        assert env.step(0) == (5, 5.0, terminates, not terminates, {"time": 5})


def test_videos_of_repeated_actions_run_at_the_speed_of_the_environment() -> None:
    env = gym.make("Pendulum-v1", render_mode="rgb_array")
    assert ActionRepeat(env, num_repeats=4).metadata["render_fps"] == env.metadata["render_fps"] / 4


def test_an_action_that_is_not_repeated() -> None:
    env = ActionRepeat(Counting(2, terminates=True), num_repeats=1)
    env.reset()
    assert env.step(0)[:2] == (1, 1.0)


def test_action_repeat_by_name() -> None:
    env = make_env("Pendulum-v1", wrappers=[WrapperConfig("ActionRepeat", {"num_repeats": 4})])
    env.reset(seed=0)
    ends = [env.step(env.action_space.sample())[3] for _ in range(50)]
    assert ends == [False] * 49 + [True]
    with pytest.raises(ConfigError, match="ActionRepeat: num_repeats must be at least 1, got 0"):
        make_env("Pendulum-v1", wrappers=[WrapperConfig("ActionRepeat", {"num_repeats": 0})])


# Stacks of frames that replay may undo

STACK = WrapperConfig("FrameStackObservation", {"stack_size": 3})
LIMIT = WrapperConfig("TimeLimit", {"max_episode_steps": 5})
OUTSIDE = [LIMIT, WrapperConfig("StickyAction", {"repeat_action_probability": 0.2}), WrapperConfig("ClipAction")]


@pytest.mark.parametrize(
    ("wrappers", "inside", "expected"),
    [
        ([], None, None),
        ([], FrameStack(4), FrameStack(4)),
        ([LIMIT], FrameStack(4), FrameStack(4)),
        ([STACK], None, FrameStack(3, "first")),
        ([STACK, *OUTSIDE], None, FrameStack(3, "first")),
        ([WrapperConfig("FlattenObservation"), STACK, LIMIT], FrameStack(4), FrameStack(3, "first")),
        ([STACK, WrapperConfig("FlattenObservation"), LIMIT], None, None),
        ([STACK, WrapperConfig("ActionRepeat", {"num_repeats": 2})], None, None),
        ([WrapperConfig("FrameStackObservation", {"stack_size": 2, "padding_type": "custom"})], None, None),
    ],
)
def test_which_wrappers_leave_a_stack(
    wrappers: list[WrapperConfig], inside: FrameStack | None, expected: FrameStack | None
) -> None:
    assert stack_of(wrappers, inside) == expected


def test_a_stack_is_stored_by_frames_also_inside_of_a_time_limit() -> None:
    wrappers = [STACK, LIMIT, WrapperConfig("StickyAction", {"repeat_action_probability": 0.2})]
    agent = DQN("CartPole-v1", wrappers=wrappers, buffer_size=50, learning_starts=10, batch_size=4, eval_every=0)
    agent.learn(60, progress=False)
    buffer = agent._off_policy().sampler.buffer
    assert buffer.obs.shape[1:] == (4,)
    assert buffer.observations(np.arange(5)).shape == (5, 3, 4)
    assert buffer.truncated.any()
    agent.close()


# Images in any layout


class Noise(gym.Env[Any, Any]):
    """Shows random observations of a space; their generator is all of its state."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, bool(self.np_random.random() < 0.1), False, {}


COLOURS = np.random.default_rng(0).integers(0, 256, (2, 3, 20, 26), dtype=np.uint8)  # stack, channels, height, width
LAYOUTS = {
    (20, 26, 3): COLOURS[0].transpose(1, 2, 0),
    (3, 20, 26): COLOURS[0],
    (2, 20, 26, 3): COLOURS.transpose(0, 2, 3, 1),
    (2, 3, 20, 26): COLOURS,
}


def image_space(shape: tuple[int, ...], high: int = 255) -> spaces.Box:
    return spaces.Box(0, high, shape, np.uint8)


def wrapped(space: spaces.Space[Any], name: str, **kwargs: Any) -> gym.ObservationWrapper[Any, Any, Any]:
    env = apply_wrappers(Noise(space), [WrapperConfig(name, kwargs)])
    assert isinstance(env, gym.ObservationWrapper)
    return env


def gymnasium_image(name: str, frame: Any, **kwargs: Any) -> Any:
    """What Gymnasium's own wrapper makes of one frame with its channels last."""
    return getattr(gym.wrappers, name)(Noise(image_space(frame.shape)), **kwargs).observation(frame)


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("size", [(10, 13), (9, 30), (3, 26)])
def test_resizing_keeps_the_layout(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    pytest.importorskip("cv2")
    env = wrapped(image_space(shape), "ResizeObservation", shape=list(size))
    expected_shape = tuple({20: size[0], 26: size[1]}.get(n, n) for n in shape)
    assert env.observation_space == image_space(expected_shape)
    found = env.observation(LAYOUTS[shape])
    assert env.observation_space.contains(found)
    frames = [gymnasium_image("ResizeObservation", x.transpose(1, 2, 0), shape=size) for x in COLOURS]
    expected = np.stack(frames)  # stack, height, width, channels
    if shape[-1] != 3:
        expected = expected.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(found, expected if len(shape) == 4 else expected[0])


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("keep_dim", [False, True])
def test_grey_in_any_layout(shape: tuple[int, ...], keep_dim: bool) -> None:
    env = wrapped(image_space(shape), "GrayscaleObservation", keep_dim=keep_dim)
    found = env.observation(LAYOUTS[shape])
    assert env.observation_space == image_space(tuple(1 if n == 3 else n for n in shape if keep_dim or n != 3))
    assert env.observation_space.contains(found)
    expected = np.stack([gymnasium_image("GrayscaleObservation", x.transpose(1, 2, 0)) for x in COLOURS])
    np.testing.assert_array_equal(found.squeeze(), expected if len(shape) == 4 else expected[0])


@pytest.mark.parametrize("shape", [(20, 26), (9, 20, 26), (20, 26, 9), (20, 26, 1), (1, 20, 26)])
def test_resizing_with_any_number_of_channels(shape: tuple[int, ...]) -> None:
    cv2 = pytest.importorskip("cv2")
    env = wrapped(image_space(shape), "ResizeObservation", shape=(10, 13))
    obs, _ = env.reset(seed=0)
    assert obs.shape == tuple({20: 10, 26: 13}.get(n, n) for n in shape)
    assert env.observation_space.contains(obs)
    env.env.reset(seed=0)
    raw = Noise(image_space(shape)).reset(seed=0)[0]
    plane, small = (raw[..., 0], obs[..., 0]) if len(shape) == 3 and shape[0] == 20 else (raw, obs)
    plane, small = (plane[0], small[0]) if plane.ndim == 3 else (plane, small)
    np.testing.assert_array_equal(small, cv2.resize(plane, (13, 10), interpolation=cv2.INTER_AREA))


def test_bits_stay_bits() -> None:
    pytest.importorskip("cv2")
    env = wrapped(image_space((20, 20, 2), high=1), "ResizeObservation", shape=(10, 10))
    assert env.observation_space == image_space((10, 10, 2), high=1)
    assert env.observation_space.contains(env.reset(seed=0)[0])


CAMERAS = spaces.Dict(
    {
        "wrist": image_space((3, 20, 26)),
        "speed": spaces.Box(-1, 1, (2,), np.float64),
        "depth": image_space((20, 26, 1)),
        "front": image_space((20, 26, 3)),
    }
)


def test_all_images_of_a_dict_are_resized() -> None:
    pytest.importorskip("cv2")
    env = wrapped(CAMERAS, "ResizeObservation", shape=(10, 12))
    obs, _ = env.reset(seed=0)
    raw = Noise(CAMERAS).reset(seed=0)[0]
    assert env.observation_space.contains(obs)
    shapes = {key: part.shape for key, part in obs.items()}
    assert shapes == {"wrist": (3, 10, 12), "speed": (2,), "depth": (10, 12, 1), "front": (10, 12, 3)}
    np.testing.assert_array_equal(obs["speed"], raw["speed"])
    front = gymnasium_image("ResizeObservation", raw["front"], shape=(10, 12))
    np.testing.assert_array_equal(obs["front"], front)


def test_chosen_images_of_a_dict_become_grey() -> None:
    env = wrapped(CAMERAS, "GrayscaleObservation", keys=["wrist", "front"])
    obs, _ = env.reset(seed=0)
    raw = Noise(CAMERAS).reset(seed=0)[0]
    assert env.observation_space.contains(obs)
    np.testing.assert_array_equal(obs["front"], gymnasium_image("GrayscaleObservation", raw["front"]))
    np.testing.assert_array_equal(obs["depth"], raw["depth"])
    assert obs["wrist"].shape == (20, 26)
    alone = wrapped(CAMERAS, "GrayscaleObservation", keys="front")
    assert alone.observation_space["wrist"] == CAMERAS["wrist"]


@pytest.mark.parametrize(
    ("space", "name", "kwargs", "problem"),
    [
        (spaces.Box(-1, 1, (4,)), "ResizeObservation", {"shape": [8, 8]}, "the observation is not an image"),
        (spaces.Box(0, 1, (9, 9, 3)), "ResizeObservation", {"shape": [8, 8]}, "is not an image"),
        (image_space((9, 9, 3)), "ResizeObservation", {"shape": [8]}, r"expected height and width, .* got \(8,\)"),
        (image_space((9, 9, 3)), "ResizeObservation", {"shape": [8, 0]}, "expected height and width"),
        (image_space((9, 9, 3)), "ResizeObservation", {"shape": [8, 8], "keys": ["a"]}, "keys: need a Dict"),
        (CAMERAS, "ResizeObservation", {"shape": [8, 8], "keys": ["rear"]}, r"among .*'wrist'.*, got \['rear'\]"),
        (CAMERAS, "ResizeObservation", {"shape": [8, 8], "keys": ["speed"]}, "'speed' is not an image"),
        (CAMERAS, "GrayscaleObservation", {}, r"expected images with 3 channels .*\(20, 26, 1\).*`keys` chooses"),
        (image_space((84, 84)), "GrayscaleObservation", {}, "expected images with 3 channels"),
        (spaces.Dict({"speed": CAMERAS["speed"]}), "GrayscaleObservation", {}, r"images among \['speed'\], got \[\]"),
    ],
)
def test_what_is_no_image_is_refused(space: spaces.Space[Any], name: str, kwargs: Any, problem: str) -> None:
    pytest.importorskip("cv2")
    with pytest.raises(ConfigError, match=rf"wrappers: {name}: .*{problem}"):
        wrapped(space, name, **kwargs)


def test_an_agent_learns_from_a_dict_of_images_in_any_layout() -> None:
    """Resized, grey and stacked by configuration alone, and each frame stored once."""
    pytest.importorskip("cv2")
    wrappers = [
        WrapperConfig("ResizeObservation", {"shape": [12, 14]}),
        WrapperConfig("GrayscaleObservation", {"keys": ["wrist", "front"]}),
        STACK,
    ]
    network = {"sizes": (8,)}
    settings: dict[str, Any] = {"buffer_size": 50, "learning_starts": 10, "batch_size": 4, "network": network}
    agent = DQN(lambda: Noise(CAMERAS), wrappers=wrappers, eval_every=0, **settings)
    agent.learn(30, progress=False)
    shapes = {key: column.shape[1:] for key, column in agent._off_policy().sampler.buffer.obs.items()}
    assert shapes == {"wrist": (12, 14), "speed": (2,), "depth": (12, 14, 1), "front": (12, 14)}
    parts = [type(part).__name__ for part in agent.policy.network.hidden[0].parts]  # type: ignore[attr-defined]
    assert parts == ["ImpalaCNN", "ImpalaCNN", "FlatEncoder", "ImpalaCNN"]
    agent.close()


# What is rendered, as observation

PIXELS = [
    WrapperConfig("ActionRepeat", {"num_repeats": 2}),
    WrapperConfig("AddRenderObservation"),
    WrapperConfig("ResizeObservation", {"shape": [20, 20]}),
    WrapperConfig("GrayscaleObservation"),
    WrapperConfig("FrameStackObservation", {"stack_size": 3}),
]
RENDERED = {"render_mode": "rgb_array"}


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("cv2")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def test_what_pixels_need_is_registered() -> None:
    assert {wrapper.name for wrapper in PIXELS} <= set(wrapper_names())


@pytest.mark.usefixtures("rendering")
@pytest.mark.parametrize("grey", [True, False])
def test_pendulum_in_pixels(grey: bool) -> None:
    wrappers = [wrapper for wrapper in PIXELS if grey or wrapper.name != "GrayscaleObservation"]
    env = make_env("Pendulum-v1", RENDERED, wrappers)
    assert env.observation_space == spaces.Box(0, 255, (3, 20, 20) if grey else (3, 20, 20, 3), np.uint8)
    first, _ = env.reset(seed=0)
    assert (first[0] == first[2]).all(), "the first frame fills the stack"
    seen = [env.step(np.array([2.0], np.float32))[0] for _ in range(3)]
    assert (seen[0][1:] == seen[1][:-1]).all()
    assert (seen[0][-1] != seen[2][-1]).any(), "it moves"
    env.close()


@pytest.mark.usefixtures("rendering")
@pytest.mark.parametrize("render_only", [True, False])
def test_pixels_go_on_from_a_snapshot(render_only: bool) -> None:
    wrappers = [*PIXELS]
    wrappers[1] = WrapperConfig("AddRenderObservation", {"render_only": render_only})  # or a Dict with the state
    one, two = (make_env("Pendulum-v1", RENDERED, wrappers) for _ in range(2))
    one.reset(seed=0)
    two.reset(seed=1)
    actions = np.linspace(-2, 2, 12, dtype=np.float32)[:, None]
    for action in actions[:6]:
        one.step(action)
    restore_snapshot(two, take_snapshot(one))
    for action in actions[6:]:
        (obs, reward, *_), (other_obs, other_reward, *_) = one.step(action), two.step(action)
        for part, other in ((obs, other_obs),) if render_only else ((obs[key], other_obs[key]) for key in obs):
            assert np.array_equal(part, other)
        assert reward == other_reward
    one.close()
    two.close()


@pytest.mark.usefixtures("rendering")
def test_an_agent_sees_pixels_and_keeps_each_frame_once(tmp_path: Path) -> None:
    settings = small_settings("drqv2", n_step=2)
    agent = DrQv2("Pendulum-v1", env_kwargs=RENDERED, wrappers=PIXELS, seed=0, eval_every=0, **settings)
    grade, problem = agent._experiment.resume_grade()
    assert (grade, problem) == ("exact", None)
    agent.learn(30, progress=False)
    buffer = agent._off_policy().sampler.buffer
    assert buffer.obs.shape[1:] == (20, 20)
    stacks = buffer.observations(np.arange(10))
    assert stacks.shape == (10, 3, 20, 20)
    assert np.array_equal(stacks[1:, :-1], stacks[:-1, 1:])
    agent.save(tmp_path / "agent")
    again = DrQv2.load(tmp_path / "agent")
    assert np.array_equal(agent.predict(stacks)[0], again.predict(stacks)[0])
    for one in (agent, again):
        one.close()


@pytest.mark.usefixtures("rendering")
def test_the_preset_can_be_built() -> None:
    experiment = build_experiment(resolve([get_preset("drqv2/pendulum-pixels").layer()]))
    assert experiment.spec.frame_stack is not None
    assert experiment.spec.frame_stack.size == 3
    experiment.close()
