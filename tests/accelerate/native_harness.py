"""Accelerated functions that are compiled at once, instead of when that pays."""

import torch

from rl_training.accelerate.native import takeover
from rl_training.accelerate.native.compiler import find_compiler
from rl_training.accelerate.recording import Accelerated

HAS_COMPILER = find_compiler() is not None


def compile_now(own: takeover.Takeover) -> None:
    """Compile a recording within this call."""
    takeover._compiling.acquire()
    own._compile(torch.get_num_threads())


def settle(function: Accelerated, *inputs):
    """Call a recorded function until it is decided whether its recordings are compiled; the last of these."""
    before, takeover.SECONDS_BEFORE = takeover.SECONDS_BEFORE, -1.0
    try:
        while not function._recordings:
            function(*inputs)
        recording = next(reversed(function._recordings.values()))
        while recording.takeover is not None:
            function(*inputs)
            if recording.takeover is not None and recording.takeover._thread is not None:
                recording.takeover._thread.join()
        return recording
    finally:
        takeover.SECONDS_BEFORE = before
