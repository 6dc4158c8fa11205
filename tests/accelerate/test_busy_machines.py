"""The faster of one thread and several is used; results do not depend on it."""

import ctypes

import pytest
import torch

from rl_training.accelerate.native import compiler
from rl_training.accelerate.recording import Accelerated
from tests.accelerate.native_harness import HAS_COMPILER, settle
from tests.accelerate.test_recording import draw

TRIALS = """
#include "kernels.h"
static void pass(double seconds) { for (const double until = seconds_now() + seconds; seconds_now() < until;); }
/* After one trial: how many of the next 100 calls are by one thread. */
int calls_alone(double together, double alone) {
    team_type team = {0};
    int count = 0;
    for (int i = 0; i < TRIAL; i++) { pass(begin_call(&team) ? alone : together); end_call(&team); }
    for (int i = 0; i < 100; i++) { count += begin_call(&team); end_call(&team); }
    return count;
}
/* How many trials there are in so many calls: a call in which several threads and one are both tried. */
int trials(int calls) {
    team_type team = {0};
    int count = 0;
    for (int i = 0; i < calls; i++) { team.is_alone = 0; count += begin_call(&team); end_call(&team); }
    return count / (TRIAL / 2);
}
"""


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")
def test_the_faster_way_is_used_until_the_next_trial():
    library = compiler.build("trials", TRIALS)
    library.calls_alone.argtypes = [ctypes.c_double, ctypes.c_double]
    assert library.calls_alone(0.0, 0.01) == 0
    assert library.calls_alone(0.01, 0.0) == 100
    assert library.trials(1024) == 1
    assert library.trials(2048) == 2


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")
def test_every_call_has_the_same_bits():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        function = Accelerated(lambda a, b: {"y": ((a @ b).relu() * 2).sum(0), "z": (a * 0.5).exp()})
        inputs = draw(256, 128), draw(128, 192, seed=1)
        recording = settle(function, *inputs)
        assert recording.library is not None
        assert "begin_call(&team)" in recording.library._program.source()
        first = {name: value.clone() for name, value in function(*inputs).items()}
        for _ in range(40):  # both ways, in the trial and after it
            assert all(torch.equal(value, first[name]) for name, value in function(*inputs).items())
    finally:
        torch.set_num_threads(before)
