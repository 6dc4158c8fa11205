"""Encoders: every supported observation space becomes a flat float tensor, and the others are refused in words."""

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

import rl_training
from rl_training.contracts.errors import ConfigError, SpaceError
from rl_training.contracts.images import has_images, image_layout
from rl_training.contracts.plugins import ENCODERS
from rl_training.policies import encoders
from rl_training.policies.encoders import (
    DictEncoder,
    DrQCNN,
    FlatEncoder,
    ImageEncoder,
    ImpalaCNN,
    NatureCNN,
    make_encoder,
    register_encoder,
)


def encode(space, rows, name="auto"):
    encoder = make_encoder(name, space)
    features = encoder(torch.as_tensor(rows))
    assert features.dtype == torch.float32
    assert features.shape == (len(rows), encoder.num_features)
    return features.tolist()


BOX = [
    pytest.param(spaces.Box(-1, 1, (3,), np.float32), np.array([[0.5, -1, 1]], np.float32), [0.5, -1, 1], id="float32"),
    pytest.param(spaces.Box(-1, 1, (2,), np.float64), np.array([[0.5, -0.25]]), [0.5, -0.25], id="float64"),
    pytest.param(spaces.Box(-9, 9, (2,), np.int8), np.array([[-7, 7]], np.int8), [-7, 7], id="int8"),
    pytest.param(spaces.Box(0, 255, (2,), np.uint8), np.array([[0, 255]], np.uint8), [0, 255], id="uint8"),
    pytest.param(spaces.Box(-1, 1, (2, 2)), np.array([[[0, 0.5], [1, -1]]], np.float32), [0, 0.5, 1, -1], id="matrix"),
    pytest.param(spaces.Box(-1, 1, ()), np.array([0.5], np.float32), [0.5], id="scalar"),
    pytest.param(
        spaces.Box(-1, 1, (1, 2, 2)), np.array([[[[0, 1], [0.5, -1]]]], np.float32), [0, 1, 0.5, -1], id="3d-float"
    ),
]


@pytest.mark.parametrize(("space", "rows", "expected"), BOX)
def test_box_is_flattened_to_floats(space, rows, expected):
    assert encode(space, rows) == [expected]


def test_discrete_is_one_hot():
    assert encode(spaces.Discrete(3), [0, 2]) == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("start", [5, -1])
def test_discrete_with_start(start):
    assert encode(spaces.Discrete(3, start=start), [start, start + 2]) == [[1, 0, 0], [0, 0, 1]]


def test_multi_discrete_is_one_hot_side_by_side():
    # sizes 2 and 3: codes (1, 0) and (0, 2)
    assert encode(spaces.MultiDiscrete([2, 3]), [[1, 0], [0, 2]]) == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]


def test_multi_discrete_with_start():
    space = spaces.MultiDiscrete([2, 3], start=[10, -1])
    assert encode(space, [[11, -1], [10, 1]]) == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]


def test_multi_discrete_with_a_matrix_of_sizes():
    # sizes 2, 3 / 2, 2; codes 1, 2 / 0, 1
    space = spaces.MultiDiscrete(np.array([[2, 3], [2, 2]]))
    assert encode(space, [[[1, 2], [0, 1]]]) == [[0, 1, 0, 0, 1, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("space", "rows", "expected"),
    [
        (spaces.MultiBinary(3), [[1, 0, 1]], [1, 0, 1]),
        (spaces.MultiBinary((2, 2)), [[[1, 0], [1, 1]]], [1, 0, 1, 1]),
    ],
)
def test_multi_binary(space, rows, expected):
    assert encode(space, np.array(rows, np.int8)) == [expected]


SUPPORTED = [
    spaces.Box(-1, 1, (2, 3)),
    spaces.Discrete(4, start=2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(5),
    spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)}),
]


@pytest.mark.parametrize("space", SUPPORTED, ids=lambda space: type(space).__name__)
def test_observations_as_vector_environments_give_them(space):
    many = batch_space(space, 4)
    many.seed(0)
    obs = many.sample()
    tensors = {k: torch.from_numpy(v) for k, v in obs.items()} if isinstance(obs, dict) else torch.from_numpy(obs)
    encoder = make_encoder("auto", space)
    features = encoder(tensors)
    assert features.shape == (4, encoder.num_features)
    assert torch.isfinite(features).all()


class TestDict:
    SPACE = spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Box(-1, 1, (2,))), ("c", spaces.MultiBinary(1))])
    OBS: ClassVar = {
        "b": torch.tensor([1, 0]),
        "a": torch.tensor([[0.1, 0.2], [0.3, 0.4]]),
        "c": torch.tensor([[1], [0]], dtype=torch.int8),
    }

    def test_entries_are_joined_in_the_order_of_their_names(self):
        encoder = make_encoder("auto", self.SPACE)
        assert isinstance(encoder, DictEncoder)
        assert encoder.num_features == 5
        expected = torch.tensor([[0.1, 0.2, 0, 1, 1], [0.3, 0.4, 1, 0, 0]])
        assert torch.equal(encoder(self.OBS), expected)

    def test_the_order_of_space_and_observation_does_not_matter(self):
        turned = spaces.Dict([(key, self.SPACE[key]) for key in ("c", "b", "a")])
        obs = {key: self.OBS[key] for key in ("a", "c", "b")}
        assert torch.equal(make_encoder("auto", turned)(obs), make_encoder("auto", self.SPACE)(self.OBS))

    def test_entries_that_the_space_does_not_have_are_ignored(self):
        encoder = make_encoder("dict", self.SPACE)
        assert torch.equal(encoder({**self.OBS, "extra": torch.ones(2, 9)}), encoder(self.OBS))

    def test_dict_in_dict_is_refused(self):
        space = spaces.Dict({"outer": spaces.Dict({"inner": spaces.Discrete(2)})})
        with pytest.raises(SpaceError, match="observation 'outer' is a Dict inside a Dict"):
            make_encoder("auto", space)

    def test_unsupported_entry_is_refused(self):
        with pytest.raises(SpaceError, match="is a Text, which is not supported"):
            make_encoder("auto", spaces.Dict({"words": spaces.Text(5)}))

    def test_dict_encoder_needs_a_dict(self):
        with pytest.raises(SpaceError, match=r"needs a Dict observation space, got Discrete\(3\)"):
            make_encoder("dict", spaces.Discrete(3))


IMAGE = spaces.Box(0, 255, (4, 4, 3), np.uint8)
CONVOLUTIONS = ["nature_cnn", "impala_cnn", "drq_cnn"]


def image(*shape, dtype=np.uint8, high=255):
    return spaces.Box(0, high, shape, dtype)


LAYOUTS = [
    pytest.param((84, 84, 3), (3, (84, 84)), id="channels-last"),
    pytest.param((3, 84, 84), (3, (84, 84)), id="channels-first"),
    pytest.param((84, 84, 1), (1, (84, 84)), id="grey-last"),
    pytest.param((1, 84, 84), (1, (84, 84)), id="grey-first"),
    pytest.param((4, 84, 84), (4, (84, 84)), id="stacked-grey"),
    pytest.param((210, 160, 3), (3, (210, 160)), id="wide-last"),
    pytest.param((3, 210, 160), (3, (210, 160)), id="wide-first"),
    pytest.param((4, 84, 84, 3), (12, (84, 84)), id="stacked-last"),
    pytest.param((4, 3, 84, 84), (12, (84, 84)), id="stacked-first"),
    pytest.param((4, 84, 84, 1), (4, (84, 84)), id="stacked-grey-last"),
    pytest.param((8, 8, 20), (20, (8, 8)), id="many-planes-last"),
    pytest.param((20, 8, 8), (20, (8, 8)), id="many-planes-first"),
    pytest.param((5, 5, 5), (5, (5, 5)), id="cube"),
    pytest.param((84, 80), (1, (84, 80)), id="one-grey-picture"),
]


class TestImages:
    @pytest.mark.parametrize(("shape", "expected"), LAYOUTS)
    def test_layouts(self, shape, expected):
        layout = image_layout(image(*shape))
        assert (layout.num_channels, layout.size) == expected

    @pytest.mark.parametrize("name", CONVOLUTIONS)
    @pytest.mark.parametrize("shape", [(40, 44, 3), (3, 40, 44), (2, 40, 44, 3), (2, 3, 40, 44), (40, 44)])
    def test_all_layouts_are_encoded(self, name, shape):
        space = image(*shape)
        encoder = make_encoder(name, space)
        rows = torch.from_numpy(np.stack([space.sample() for _ in range(3)]))
        features = encoder(rows)
        assert features.shape == (3, encoder.num_features)
        assert features.dtype == torch.float32
        assert torch.isfinite(features).all()

    def test_pixels_stay_in_their_places(self):
        """One image in all layouts: the same picture for the network."""
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 256, (1, 2, 3, 9, 10), dtype=np.uint8)  # batch, stack, channels, height, width
        pictures = {
            (3, 9, 10): frames[:, 0],
            (9, 10, 3): frames[:, 0].transpose(0, 2, 3, 1),
            (2, 3, 9, 10): frames,
            (2, 9, 10, 3): frames.transpose(0, 1, 3, 4, 2),
            (9, 10): frames[:, 0, 0],
        }
        for shape, picture in pictures.items():
            found = ImageEncoder(image(*shape)).pixels(torch.from_numpy(picture.copy()))
            expected = {2: frames[:, 0, :1], 3: frames[:, 0], 4: frames.reshape(1, 6, 9, 10)}[len(shape)]
            torch.testing.assert_close(found, torch.from_numpy(expected) / 255.0)

    @pytest.mark.parametrize(
        ("space", "brightest", "expected"),
        [
            (image(4, 4, 3), 255, 1.0),
            (image(4, 4, 3), 51, 0.2),
            (image(4, 4, 3, high=1), 1, 1.0),
            (image(4, 4, 3, high=10), 5, 0.5),
            (image(4, 4, 3, high=0), 0, 0.0),
            (spaces.Box(-1.0, 1.0, (4, 4, 3), np.float32), 0.5, 0.5),
            (spaces.Box(-np.inf, np.inf, (4, 4, 3), np.float64), 7.0, 7.0),
        ],
    )
    def test_bytes_are_scaled_and_reals_are_not(self, space, brightest, expected):
        pixels = ImageEncoder(space).pixels(torch.from_numpy(np.full((1, *space.shape), brightest, space.dtype)))
        assert pixels.dtype == torch.float32
        torch.testing.assert_close(pixels, torch.full((1, 3, 4, 4), expected))

    def test_what_was_observed_is_not_written_into(self):
        """Pixels are scaled where they lie, and so must lie apart from reals that already have the right order."""
        encoder = ImageEncoder(spaces.Box(0.0, 1.0, (3, 4, 4), np.float32))
        encoder.scale = 0.5
        observed = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        assert encoder.pixels(observed).unique().tolist() == [0.5]
        assert observed.unique().tolist() == [1.0]

    @pytest.mark.parametrize(
        ("space", "expected"),
        [
            (image(84, 84, 4), NatureCNN),
            (image(36, 36, 3), NatureCNN),
            (image(35, 64, 3), ImpalaCNN),
            (image(7, 7, 3), ImpalaCNN),
            (image(1, 1, 1), ImpalaCNN),
            (image(4, 84, 84, 1), NatureCNN),
            (image(84, 84), NatureCNN),
            (image(8, 35), ImpalaCNN),
            (image(7, 84), FlatEncoder),  # too low for a picture: perhaps a few vectors
            (spaces.Box(0, 255, (84, 84), np.int16), FlatEncoder),  # not bytes: perhaps a table
            (spaces.Box(0.0, 1.0, (84, 84, 3)), FlatEncoder),  # not bytes: perhaps a grid of anything
        ],
    )
    def test_chosen_by_the_space(self, space, expected):
        encoder = make_encoder("auto", space)
        assert type(encoder) is expected
        assert encoder(torch.zeros(2, *space.shape, dtype=torch.uint8)).shape == (2, encoder.num_features)

    @pytest.mark.parametrize(("name", "width"), [("nature_cnn", 512), ("impala_cnn", 256), ("drq_cnn", 32 * 13 * 13)])
    def test_real_valued_images_by_name(self, name, width):
        space = spaces.Box(0.0, 1.0, (40, 40, 3), np.float64)
        encoder = make_encoder(name, space)
        assert encoder(torch.zeros(2, 40, 40, 3, dtype=torch.float64)).shape == (2, width)

    def test_too_small_for_nature_cnn(self):
        with pytest.raises(SpaceError, match=r"at least 36 pixels; for .*\(35, 64, 3\).* use impala_cnn"):
            make_encoder("nature_cnn", image(35, 64, 3))

    def test_too_small_for_drq_cnn(self):
        assert make_encoder("drq_cnn", image(15, 15, 3)).num_features == 32
        with pytest.raises(SpaceError, match=r"at least 15 pixels; for .*\(14, 64, 3\).* use impala_cnn"):
            make_encoder("drq_cnn", image(14, 64, 3))

    def test_drq_cnn_sees_pixels_around_zero(self):
        encoder, seen = make_encoder("drq_cnn", image(15, 15, 3)), []
        encoder.convolutions[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for brightness in (0, 255):
            encoder(torch.full((1, 15, 15, 3), brightness, dtype=torch.uint8))
        assert [x.unique().tolist() for x in seen] == [[-0.5], [0.5]]

    @pytest.mark.parametrize("name", CONVOLUTIONS)
    @pytest.mark.parametrize("space", [image(84), spaces.Discrete(3)])
    def test_no_image_no_convolution(self, name, space):
        with pytest.raises(SpaceError, match="need images: a Box with 2, 3 or 4 dimensions"):
            make_encoder(name, space)

    def test_in_a_dict(self):
        space = spaces.Dict({"camera": image(8, 8, 3), "speed": spaces.Box(-1, 1, (2,))})
        encoder = make_encoder("auto", space)
        obs = {"camera": torch.zeros(2, 8, 8, 3, dtype=torch.uint8), "speed": torch.tensor([[1.0, 2.0]] * 2)}
        features = encoder(obs)
        assert features.shape == (2, 256 + 2)
        assert features[:, -2:].tolist() == [[1.0, 2.0]] * 2

    def test_in_a_dict_by_name(self):
        space = spaces.Dict({"camera": image(16, 16, 3), "speed": spaces.Box(-1, 1, (2,)), "gear": spaces.Discrete(3)})
        encoder = make_encoder("drq_cnn", space)
        assert [type(part) for part in encoder.parts] == [DrQCNN, FlatEncoder, FlatEncoder]
        assert encoder.num_features == 32 + 3 + 2

    def test_a_name_for_images_in_a_dict_without_any(self):
        with pytest.raises(SpaceError, match="encoder 'impala_cnn' needs images, but there are none in Dict"):
            make_encoder("impala_cnn", spaces.Dict({"speed": spaces.Box(-1, 1, (2,))}))

    @pytest.mark.parametrize(
        ("space", "expected"),
        [
            (image(4, 4, 3), True),
            (image(2, 4, 4, 3), True),
            (image(84, 84), True),
            (image(8, 8), True),
            (image(4, 128), False),
            (spaces.Box(0.0, 1.0, (4, 4, 3)), False),
            (spaces.Discrete(2), False),
            (spaces.Dict({"camera": image(4, 4, 3), "speed": spaces.Box(-1, 1, (2,))}), True),
            (spaces.Dict({"speed": spaces.Box(-1, 1, (2,))}), False),
        ],
    )
    def test_has_images(self, space, expected):
        assert has_images(space) is expected

    @pytest.mark.parametrize("name", CONVOLUTIONS)
    def test_every_weight_learns(self, name):
        torch.manual_seed(0)
        encoder = make_encoder(name, image(40, 40, 3))
        encoder(torch.randint(0, 256, (4, 40, 40, 3), dtype=torch.uint8)).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())

    def test_the_shapes_of_the_papers(self):
        nature = make_encoder("nature_cnn", image(4, 84, 84))
        convolutions = [tuple(p.shape) for p in nature.parameters() if p.ndim == 4]
        assert convolutions == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
        assert nature.linear[0].in_features == 64 * 7 * 7
        impala = make_encoder("impala_cnn", image(64, 64, 3))
        assert impala.linear[0].in_features == 32 * 8 * 8
        drq = make_encoder("drq_cnn", image(9, 84, 84))
        assert drq.num_features == 32 * 35 * 35
        assert [tuple(p.shape) for p in drq.parameters() if p.ndim == 4] == [(32, 9, 3, 3), *[(32, 32, 3, 3)] * 3]
        assert sum(p.ndim == 4 for p in impala.parameters()) == 15


class Lamp(gym.Env):
    """A picture that is bright or dark; pressing the right one of two buttons is worth 1."""

    observation_space, action_space = image(8, 8, 1), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bright = int(self.np_random.integers(2))
        return np.full((8, 8, 1), 255 * self.bright, np.uint8), {}

    def step(self, action):
        reward = float(action == self.bright)
        return self.reset()[0], reward, False, True, {}


@pytest.mark.parametrize("title", ["PPO", "DQN"])
def test_an_agent_learns_from_pixels(title):
    settings = {
        "PPO": {"num_envs": 4, "num_steps": 64, "learning_rate": 1e-3, "minibatch_size": 64, "num_epochs": 4},
        "DQN": {"num_envs": 4, "num_steps": 1, "learning_starts": 100, "learning_rate": 1e-3, "gamma": 0.0,
                "buffer_size": 1000},
    }[title]  # fmt: skip
    agent = getattr(rl_training, title)(Lamp, eval_every=0, **settings)
    agent.learn(1000, progress=False)
    score = agent.evaluate(40).mean
    agent.close()
    assert score >= 0.95


def test_an_image_is_flattened_when_asked_for_by_name():
    assert encode(IMAGE, np.full((2, 4, 4, 3), 7, np.uint8), name="flat") == [[7.0] * 48] * 2


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]),
        spaces.Text(5),
        spaces.Graph(spaces.Box(-1, 1, (2,)), None),
        spaces.Sequence(spaces.Discrete(2)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_unsupported_spaces_are_refused_in_words(space):
    with pytest.raises(SpaceError, match=f"observations of {type(space).__name__} are not supported") as caught:
        make_encoder("auto", space)
    assert "Supported are Box, Discrete, MultiDiscrete, MultiBinary and a Dict of these" in str(caught.value)


class LampAndNoise(Lamp):
    """Beside the picture, a number."""

    observation_space = spaces.Dict({"picture": image(8, 8, 1), "noise": spaces.Box(0.0, 1.0, (1,))})

    def reset(self, *, seed=None, options=None):
        picture, info = super().reset(seed=seed)
        return {"picture": picture, "noise": self.np_random.random(1, np.float32)}, info


class TestRegister:
    @pytest.fixture(autouse=True)
    def own_registry(self, monkeypatch):
        monkeypatch.setattr(ENCODERS, "_added", {})

    def test_a_registered_encoder_is_made_by_name(self):
        seen = []

        @register_encoder("mine")
        def make(space):
            seen.append(space)
            return FlatEncoder(space)

        assert "mine" in ENCODERS.names()
        assert isinstance(make_encoder("mine", IMAGE), FlatEncoder)  # also for images: it was asked for
        assert seen == [IMAGE]

    def test_classes_register_too(self):
        @register_encoder("twice")
        class Twice(FlatEncoder):
            def forward(self, obs):
                return 2 * super().forward(obs)

        assert encode(spaces.Discrete(2), [1], name="twice") == [[0, 2]]

    def test_an_image_encoder_is_for_the_images_of_a_dict(self):
        @register_encoder("mean")
        class Mean(ImageEncoder):
            num_features = 1

            def forward(self, obs):
                return self.pixels(obs).mean((1, 2, 3))[:, None]

        @register_encoder("whole")
        class Whole(DictEncoder):
            pass

        space = spaces.Dict({"a": image(8, 8, 3), "b": spaces.Box(-1, 1, (2,)), "c": image(9, 9)})
        encoder = make_encoder("mean", space)
        assert [type(part) for part in encoder.parts] == [Mean, FlatEncoder, Mean]
        a, c = (torch.full((2, *space[key].shape), 51, dtype=torch.uint8) for key in "ac")
        features = encoder({"a": a, "b": torch.tensor([[0.5, 1.0]] * 2), "c": c})
        torch.testing.assert_close(features, torch.tensor([[0.2, 0.5, 1.0, 0.2]] * 2))
        assert isinstance(make_encoder("whole", space), Whole), "one that is for Dicts gets the Dict"

    @pytest.mark.parametrize("title", ["PPO", "DQN", "RecurrentPPO"])
    def test_agents_use_it_in_a_dict(self, title):
        small = {"PPO": {"num_steps": 8}, "RecurrentPPO": {"num_steps": 8}, "DQN": {"learning_starts": 4}}[title]
        network = {"encoder": "impala_cnn"}
        agent = getattr(rl_training, title)(LampAndNoise, num_envs=1, eval_every=0, network=network, **small)
        agent.learn(12, progress=False)
        used = [type(part) for part in agent.policy.modules() if isinstance(part, encoders.Encoder)]
        agent.close()
        assert ImpalaCNN in used
        assert DictEncoder in used

    @pytest.mark.parametrize("space", [spaces.Box(-1, 1, (4,), np.float64), IMAGE, spaces.Discrete(3, start=2)])
    @pytest.mark.parametrize(
        ("width", "gives", "problem"),
        [
            (None, 3, "encoder 'mine' must set self.num_features, an int"),
            ("3", 3, "encoder 'mine' must set self.num_features, an int"),
            (4, 3, r"num_features 4, .* shape \(2, 4\); got torch.float32 of shape \(2, 3\)"),
        ],
    )
    def test_features_must_be_as_many_as_it_says(self, space, width, gives, problem):
        @register_encoder("mine")
        class Mine(encoders.Encoder):
            def __init__(self, space):
                super().__init__()
                if width is not None:
                    self.num_features = width
                self.layer = torch.nn.LazyLinear(gives)

            def forward(self, obs):
                return self.layer(obs.flatten(1).float() if obs.ndim > 1 else obs[:, None].float())

        with pytest.raises(SpaceError, match=problem):
            make_encoder("mine", space)

    @pytest.mark.parametrize(
        ("forward", "problem"),
        [
            (lambda obs: obs.float(), r"got torch.float32 of shape \(2, 4, 4, 3\)"),
            (lambda obs: obs.flatten(1), r"got torch.uint8 of shape \(2, 48\)"),
            (
                lambda obs: torch.zeros(3, 2) @ obs.float(),
                r"fails on a batch of two observations of Box.*: RuntimeError",
            ),
        ],
    )
    def test_what_is_wrong_with_features_is_said(self, forward, problem):
        @register_encoder("mine")
        class Mine(encoders.Encoder):
            num_features = 48

            def __init__(self, space):
                super().__init__()

            def forward(self, obs):
                return forward(obs)

        with pytest.raises(SpaceError, match=rf"encoder 'mine' .*{problem}"):
            make_encoder("mine", IMAGE)

    def test_trying_leaves_no_trace(self):
        @register_encoder("normed")
        class Normed(FlatEncoder):
            def __init__(self, space):
                super().__init__(space)
                self.norm, self.frozen = torch.nn.BatchNorm1d(48), torch.nn.Dropout().eval()

            def forward(self, obs):
                return self.frozen(self.norm(super().forward(obs)))

        space = image(4, 4, 3)
        space.seed(1)
        torch.manual_seed(0)
        encoder = make_encoder("normed", space)
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))
        assert encoder.norm.num_batches_tracked == 0
        assert (encoder.training, encoder.norm.training, encoder.frozen.training) == (True, True, False)
        again = image(4, 4, 3)
        again.seed(1)
        assert np.array_equal(space.sample(), again.sample())

    def test_unknown_names_are_refused_with_the_known_ones(self):
        with pytest.raises(
            ConfigError,
            match=r"unknown encoder 'nature'\. Did you mean 'nature_cnn'\? Known: auto, dict, drq_cnn, flat, imp",
        ):
            make_encoder("nature", IMAGE)


def test_constants_of_the_space_are_not_weights():
    # they follow the module to its device, but belong to the space, so no checkpoint holds them
    encoder = make_encoder("auto", spaces.Discrete(3, start=5))
    assert dict(encoder.state_dict()) == {}
    assert encoder.to(torch.device("meta")).offsets.device.type == "meta"
