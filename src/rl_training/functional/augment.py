"""Image augmentations that keep the meaning of an image; random numbers are passed in."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_images(images: Tensor, offsets: Tensor, dims: tuple[int, int] = (-2, -1)) -> Tensor:
    """Shift each of B images by whole pixels (Yarats et al. 2021, section 3.1).

    `dims` are the dimensions of height and width; `offsets` [B, 2] is how far the window onto each image moves down and
    to the right. Pixels outside of the image repeat the nearest edge pixel (replicate padding).

    Example:
        >>> shift_images(torch.arange(6).view(1, 2, 3), torch.tensor([[0, 1]])).tolist()
        [[[1, 2, 2], [4, 5, 5]]]
    """
    batch = torch.arange(images.shape[0], device=images.device)[:, None]
    for dim, offset in zip(dims, offsets.unbind(1), strict=True):
        size = images.shape[dim]
        places = (torch.arange(size, device=images.device) + offset[:, None]).clamp(0, size - 1)
        images = images.movedim(dim, 1)[batch, places].movedim(1, dim)
    return images
