"""Encoders: every supported observation space becomes a flat float tensor, and the others are refused in words."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from rl_training.contracts.errors import SpaceError
from rl_training.policies import encoders
from rl_training.policies.encoders import DictEncoder, FlatEncoder, encoder_names, make_encoder, register_encoder


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
        with pytest.raises(SpaceError, match="observations of Text are not supported"):
            make_encoder("auto", spaces.Dict({"words": spaces.Text(5)}))

    def test_dict_encoder_needs_a_dict(self):
        with pytest.raises(SpaceError, match=r"needs a Dict observation space, got Discrete\(3\)"):
            make_encoder("dict", spaces.Discrete(3))


IMAGE = spaces.Box(0, 255, (4, 4, 3), np.uint8)


@pytest.mark.parametrize("space", [IMAGE, spaces.Dict({"camera": IMAGE, "speed": spaces.Box(-1, 1, (1,))})])
def test_images_are_refused_in_words(space):
    with pytest.raises(SpaceError, match="looks like an image") as caught:
        make_encoder("auto", space)
    message = str(caught.value)
    assert "Box(0, 255, (4, 4, 3), uint8)" in message
    assert "register_encoder" in message


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


class TestRegister:
    @pytest.fixture(autouse=True)
    def own_registry(self, monkeypatch):
        monkeypatch.setattr(encoders, "_ENCODERS", dict(encoders._ENCODERS))

    def test_a_registered_encoder_is_made_by_name(self):
        seen = []

        @register_encoder("mine")
        def make(space):
            seen.append(space)
            return FlatEncoder(space)

        assert "mine" in encoder_names()
        assert isinstance(make_encoder("mine", IMAGE), FlatEncoder)  # also for images: it was asked for
        assert seen == [IMAGE]

    def test_classes_register_too(self):
        @register_encoder("twice")
        class Twice(FlatEncoder):
            def forward(self, obs):
                return 2 * super().forward(obs)

        assert encode(spaces.Discrete(2), [1], name="twice") == [[0, 2]]

    def test_unknown_names_are_refused_with_the_known_ones(self):
        with pytest.raises(SpaceError, match="unknown encoder 'nature'; known: auto, dict, flat"):
            make_encoder("nature", IMAGE)


def test_constants_of_the_space_are_not_weights():
    # they follow the module to its device, but belong to the space, so no checkpoint holds them
    encoder = make_encoder("auto", spaces.Discrete(3, start=5))
    assert dict(encoder.state_dict()) == {}
    assert encoder.to(torch.device("meta")).starts.device.type == "meta"
