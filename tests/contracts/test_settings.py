"""Settings: documented dataclass fields with ranges."""

import dataclasses
import math
from dataclasses import dataclass

import pytest

from rl_training.contracts.settings import documented, range_problem, setting


@documented
@dataclass
class Sample:
    """A sample.

    With a second paragraph.
    """

    gamma: float = setting(0.99, "Discount factor.", ge=0, le=1)
    rate: float = setting(1e-3, "Learning rate.", gt=0)
    share: float = setting(0.5, "A share.", ge=0, lt=1)
    sizes: list[int] = setting(factory=lambda: [64, 64], help="Widths.")
    free: int = setting(3)
    name: str = "plain"


@documented
@dataclass
class Child(Sample):
    """A child."""

    gamma: float = setting(0.9, "Another discount.")
    more: int = setting(1, "One more.")


FIELDS = {field.name: field for field in dataclasses.fields(Sample)}


def test_defaults():
    assert (Sample().gamma, Sample().sizes, Sample().free, Sample().name) == (0.99, [64, 64], 3, "plain")


def test_factories_make_new_objects():
    assert Sample().sizes is not Sample().sizes


def test_a_setting_without_default_is_required():
    @dataclass
    class Required:
        algo: str = setting(help="Algorithm.")

    with pytest.raises(TypeError, match="algo"):
        Required()
    assert Required("ppo").algo == "ppo"


def test_the_docstring_lists_the_settings_that_have_a_help():
    assert Sample.__doc__.splitlines() == [
        "A sample.",
        "",
        "    With a second paragraph.",
        "",
        "Attributes:",
        "    gamma: Discount factor.",
        "    rate: Learning rate.",
        "    share: A share.",
        "    sizes: Widths.",
    ]


def test_a_child_lists_its_parents_settings_and_its_own():
    doc = Child.__doc__
    assert doc.startswith("A child.\n")
    assert "    rate: Learning rate." in doc
    assert "    more: One more." in doc
    assert "Another discount." in doc
    assert "Discount factor." not in doc


def test_metadata():
    assert FIELDS["gamma"].metadata == {
        "help": "Discount factor.",
        "ge": 0,
        "gt": None,
        "le": 1,
        "lt": None,
        "search": None,
        "registry": None,
        "added_later": False,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("gamma", 0), ("gamma", 1), ("gamma", 0.5), ("rate", 1e-9), ("share", 0), ("share", 0.999), ("free", -5)],
)
def test_inside_the_range(name, value):
    assert range_problem(FIELDS[name], value) is None


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("gamma", -0.1, "must be >= 0 and <= 1"),
        ("gamma", 1.1, "must be >= 0 and <= 1"),
        ("gamma", math.nan, "must be >= 0 and <= 1"),
        ("rate", 0, "must be > 0"),
        ("share", 1, "must be >= 0 and < 1"),
    ],
)
def test_outside_the_range(name, value, problem):
    assert range_problem(FIELDS[name], value) == problem


def test_a_plain_field_has_no_range():
    assert range_problem(FIELDS["name"], "anything") is None
