"""Messages: what goes in comes out, and nothing else."""

import numpy as np
import pytest
import torch

from rl_training.contracts.state import same_state
from rl_training.runtime.distributed.messages import pack, unpack


def test_round_trip():
    message = {
        "arrays": [np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros((0, 2), np.int64), np.array(1.5)],
        "weights": {"layer.weight": torch.randn(3, 5), "flag": torch.tensor(True)},
        "rng": np.random.default_rng(0).bit_generator.state,
        "plain": [None, True, 1, 0.1, float("inf"), "text"],
    }
    back = unpack(pack(message))
    assert same_state(back, message)
    back["arrays"][0][0] = 1  # writable, and a copy


def test_objects_are_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        pack({"object": object()})
