"""Shifts of images: tables by hand, and the padding and cropping that the paper describes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_training.functional.augment import shift_images

IMAGE = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
TABLE = {
    (0, 0): IMAGE,
    (1, 0): [[4, 5, 6], [7, 8, 9], [7, 8, 9]],
    (-1, 0): [[1, 2, 3], [1, 2, 3], [4, 5, 6]],
    (0, 1): [[2, 3, 3], [5, 6, 6], [8, 9, 9]],
    (0, -2): [[1, 1, 1], [4, 4, 4], [7, 7, 7]],
    (1, -1): [[4, 4, 5], [7, 7, 8], [7, 7, 8]],
    (-9, 9): [[3, 3, 3], [3, 3, 3], [3, 3, 3]],
}


def images(*shape, dtype=torch.uint8, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("offset", TABLE)
def test_by_hand(offset):
    shifted = shift_images(torch.tensor([IMAGE]), torch.tensor([offset]))
    assert shifted.tolist() == [TABLE[offset]]


def test_each_image_has_its_own_offset():
    shifted = shift_images(torch.tensor([IMAGE] * len(TABLE)), torch.tensor(list(TABLE)))
    assert shifted.tolist() == list(TABLE.values())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_no_offset_no_change(dtype):
    given = images(3, 2, 5, 7, dtype=dtype)
    shifted = shift_images(given, torch.zeros(3, 2, dtype=torch.int64))
    assert torch.equal(shifted, given)
    assert shifted.dtype == dtype


@pytest.mark.parametrize("pad", [1, 4])
def test_as_padding_by_repetition_and_cropping(pad):
    given = images(20, 3, 12, 10)
    offsets = torch.from_numpy(np.random.default_rng(0).integers(-pad, pad, (20, 2), endpoint=True))
    padded = F.pad(given.float(), (pad, pad, pad, pad), mode="replicate").to(torch.uint8)
    expected = [
        image[:, pad + down : pad + down + 12, pad + right : pad + right + 10]
        for image, (down, right) in zip(padded, offsets.tolist(), strict=True)
    ]
    assert torch.equal(shift_images(given, offsets), torch.stack(expected))


@pytest.mark.parametrize(
    ("order", "dims"),
    [((0, 1, 2, 3, 4), (3, 4)), ((0, 1, 3, 4, 2), (2, 3)), ((0, 3, 4, 1, 2), (1, 2)), ((0, 2, 4, 3, 1), (3, 2))],
)
def test_height_and_width_may_be_anywhere(order, dims):
    given = images(4, 2, 3, 6, 5)  # batch, stack, channels, height, width
    offsets = torch.tensor([[1, 0], [0, -2], [3, 1], [-1, -1]])
    shifted = shift_images(given.permute(order), offsets, dims)
    assert torch.equal(shifted, shift_images(given, offsets).permute(order))


def test_what_was_given_is_left_alone():
    given = images(2, 1, 4, 4)
    before = given.clone()
    shift_images(given, torch.tensor([[1, 1], [0, 0]])).zero_()
    shift_images(given, torch.zeros(2, 2, dtype=torch.int64)).zero_()
    assert torch.equal(given, before)
