"""Schedules: tables computed by hand."""

import math
from dataclasses import FrozenInstanceError

import pytest

from rl_training.contracts.schedule import SCHEDULES, Constant, Cosine, Linear, Piecewise, Schedule, value_of

TABLES = {
    "constant": (Constant(0.3), {0.0: 0.3, 0.5: 0.3, 1.0: 0.3}),
    # from 1 to 0 over the whole horizon
    "linear": (Linear(1.0), {0.0: 1.0, 0.25: 0.75, 0.5: 0.5, 1.0: 0.0}),
    # 4 + (2 - 4) x
    "linear-end": (Linear(4.0, 2.0), {0.0: 4.0, 0.25: 3.5, 1.0: 2.0}),
    # there after half of it: at 1/4 half way, then flat
    "linear-until": (Linear(1.0, 0.2, until=0.5), {0.0: 1.0, 0.25: 0.6, 0.5: 0.2, 0.75: 0.2, 1.0: 0.2}),
    "linear-up": (Linear(0.0, 8.0, until=0.25), {0.0: 0.0, 0.125: 4.0, 0.25: 8.0, 1.0: 8.0}),
    # (1 + cos(pi x)) / 2: cos of 60, 90 and 120 degrees is 1/2, 0 and -1/2
    "cosine": (Cosine(1.0), {0.0: 1.0, 1 / 3: 0.75, 0.5: 0.5, 2 / 3: 0.25, 1.0: 0.0}),
    "cosine-end": (Cosine(3.0, 1.0), {0.0: 3.0, 1 / 3: 2.5, 0.5: 2.0, 1.0: 1.0}),
    # flat 2 until 0.2, down to 1 at 0.4, up to 5 at 0.8, flat
    "piecewise": (
        Piecewise(((0.2, 2.0), (0.4, 1.0), (0.8, 5.0))),
        {0.0: 2.0, 0.2: 2.0, 0.3: 1.5, 0.4: 1.0, 0.5: 2.0, 0.6: 3.0, 0.8: 5.0, 1.0: 5.0},
    ),
    "piecewise-one-point": (Piecewise(((0.5, 7.0),)), {0.0: 7.0, 0.5: 7.0, 1.0: 7.0}),
}


@pytest.mark.parametrize(("schedule", "table"), TABLES.values(), ids=TABLES)
def test_table(schedule, table):
    for fraction, expected in table.items():
        assert schedule.value(fraction) == pytest.approx(expected, abs=1e-12), fraction
        assert value_of(schedule, fraction) == schedule.value(fraction)


@pytest.mark.parametrize("schedule", [Linear(1.0, 0.5), Cosine(1.0, 0.5), Piecewise(((0.0, 1.0), (1.0, 0.5)))])
def test_past_the_horizon_the_last_value_holds(schedule):
    assert schedule.value(1.5) == pytest.approx(0.5)


@pytest.mark.parametrize("until", [0.0, -0.5, 1.5, math.nan])
def test_linear_refuses_an_end_outside_the_horizon(until):
    with pytest.raises(ValueError, match=r"until must be in \(0, 1\]"):
        Linear(1.0, 0.0, until=until)


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0.5, 1.0), (0.5, 2.0)),  # the same place twice
        ((0.5, 1.0), (0.2, 2.0)),  # backwards
        ((0.0, 1.0), (50_000, 0.1)),  # steps instead of fractions
        ((-0.1, 1.0), (0.5, 0.1)),
        ((math.nan, 1.0), (0.5, 0.1)),
    ],
)
def test_piecewise_refuses_bad_points(points):
    with pytest.raises(ValueError, match="strictly increasing fractions"):
        Piecewise(points)


def test_numbers_are_schedules_too():
    assert value_of(3e-4, 0.7) == 3e-4
    assert isinstance(value_of(1, 0.0), float)


def test_every_schedule_has_a_name():
    expected = {"constant": Constant, "linear": Linear, "cosine": Cosine, "piecewise": Piecewise}
    assert expected == SCHEDULES
    assert {cls.name for cls in Schedule.__subclasses__()} == set(SCHEDULES)


def test_schedules_are_values():
    assert Linear(1.0, 0.5) == Linear(1.0, 0.5)
    assert Linear(1.0, 0.5) != Linear(1.0, 0.4)
    assert Linear(1.0, 0.0) != Cosine(1.0, 0.0)
    assert len({Linear(1.0), Linear(1.0), Cosine(1.0)}) == 2
    with pytest.raises(FrozenInstanceError):
        Linear(1.0).start = 2.0


def test_the_base_has_no_value():
    with pytest.raises(NotImplementedError):
        Schedule().value(0.0)
