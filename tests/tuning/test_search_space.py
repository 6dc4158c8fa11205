"""Search spaces: declared beside the settings, including where a study begins, read and written without loss."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from rl_training.algorithms.registry import registry
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.schedule import Constant, Cosine, Linear, Piecewise
from rl_training.contracts.settings import (
    Choices,
    Range,
    SameAs,
    choices,
    integers,
    log_uniform,
    setting,
    uniform,
)
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.presets import presets
from rl_training.tuning.search_space import (
    current,
    declared,
    find,
    peak,
    read_space,
    space_for,
    space_problems,
    space_to_plain,
    with_values,
)
from tests.small import small_env

ALGORITHMS = sorted(registry())


def config(algo: str = "ppo", env_id: str = "CartPole-v1", **settings: Any) -> TrainConfig:
    return TrainConfig.from_dict({"algo": algo, "env_id": env_id, **settings})


def drawn(search: Any, rng: random.Random) -> Any:
    if isinstance(search, Choices):
        return rng.choice(search.values)
    whole = isinstance(search.low, int) and isinstance(search.high, int)
    return rng.randint(search.low, search.high) if whole else rng.uniform(search.low, search.high)


# Declarations


def test_the_words() -> None:
    assert uniform(0, 1) == Range(0.0, 1.0)
    assert log_uniform(1e-5, 1e-2) == Range(1e-5, 1e-2, log=True)
    assert integers(1, 8, log=True) == Range(1, 8, log=True)
    assert isinstance(integers(1, 8).low, int)
    assert isinstance(uniform(1, 8).low, float)
    assert choices(16, 32) == Choices((16, 32))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: uniform(2, 1), "low must be at most high"),
        (lambda: log_uniform(0, 1), "low must be above 0"),
        (lambda: choices(), "at least one value"),
    ],
)
def test_an_impossible_search_is_refused(make: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


def test_sections_schedules_and_what_a_child_says_otherwise() -> None:
    @dataclass
    class Section:
        width: int = setting(1, "Width.", search=choices(1, 2))
        depth: int = setting(1, "Depth.", search=choices(3, 4))
        rate: float = setting(1.0, "Rate.", search=uniform(0, 1))

    @dataclass
    class Config:
        plain: int = setting(1, "Not searched.")
        epsilon: float = setting(1.0, "A schedule.", search={"end": uniform(0, 1)})
        section: Section = setting(
            factory=Section, help="S.", search={"depth": None, "width": choices(5), "rate": {"end": uniform(0, 2)}}
        )

    Config.__annotations__["section"] = Section  # a local class cannot be found by its name
    assert declared(Config) == {
        "epsilon.end": uniform(0, 1),
        "section.width": choices(5),
        "section.rate.end": uniform(0, 2),
    }


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_has_a_space_within_the_ranges_of_its_settings(algo: str) -> None:
    spec = registry()[algo]
    space = declared(spec.config)
    assert {"gamma", "learning_rate"} <= space.keys()
    assert len(space) >= 8
    base = config(algo, small_env(spec))
    inside = {name: search for name, search in space.items() if find(base, name) is not None}
    assert inside == space, "a name that the defaults do not have"
    assert space_problems(inside, base) == []


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_defaults_lie_within_what_is_declared(algo: str) -> None:
    spec = registry()[algo]
    assert space_for(config(algo, small_env(spec))) == declared(spec.config)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_what_is_drawn_resolves(algo: str) -> None:
    spec, rng = registry()[algo], random.Random(0)
    base = config(algo, small_env(spec))
    space = space_for(base)
    seen = set()
    for _ in range(20):
        values = {name: drawn(search, rng) for name, search in space.items() if not isinstance(search, SameAs)}
        found = with_values(base, space, values)
        assert all(current(found, name) == pytest.approx(value) for name, value in values.items())
        seen.add(found.to_yaml())
    assert len(seen) == 20


@pytest.mark.parametrize("name", sorted(presets()))
def test_the_space_of_a_preset_includes_the_preset(name: str) -> None:
    preset = presets()[name]
    base = TrainConfig.from_dict(preset.data)
    space = space_for(base)
    values = {name: current(base, name) for name in space}
    assert with_values(base, space, values) == base
    assert read_space(space_to_plain(space), base) == space


# What is searched


def test_what_is_fixed_unused_or_not_there_is_left_out() -> None:
    fixed = space_for(config(), fixed=["learning_rate", "network"])
    assert "learning_rate" not in fixed
    assert not any(name.startswith("network.") for name in fixed)
    assert "gamma" in fixed
    number = config("dqn", algorithm={"epsilon": 0.1})
    assert "epsilon.end" not in space_for(number)
    assert "epsilon.end" in space_for(config("dqn"))
    assert "priority_exponent" in space_for(config("rainbow"))
    assert "priority_exponent" not in space_for(config("rainbow", algorithm={"prioritized": False}))


def test_a_setting_follows_another_only_if_they_begin_alike() -> None:
    assert space_for(config())["network.critic_sizes"] == SameAs("network.actor_sizes")
    unlike = config(algorithm={"network": {"actor_sizes": [8], "critic_sizes": [16]}})
    assert "network.critic_sizes" not in space_for(unlike)
    assert "network.critic_sizes" not in space_for(config(), fixed=["network.actor_sizes"])
    space = space_for(config())
    values = {name: current(config(), name) for name in space} | {"network.actor_sizes": (7,)}
    assert with_values(config(), space, values).algorithm.network.critic_sizes == (7,)


def test_a_space_is_widened_to_where_the_study_begins() -> None:
    begun = config(
        algorithm={"learning_rate": 0.5, "gamma": 0.97, "network": {"actor_sizes": [5], "critic_sizes": [5]}}
    )
    space = space_for(begun)
    assert space["learning_rate"] == log_uniform(1e-5, 0.5)
    assert space["gamma"].values[-1] == 0.97
    assert (5,) in space["network.actor_sizes"].values


@pytest.mark.parametrize(
    ("schedule", "largest", "scaled"),
    [
        (Linear(1e-3, 1e-4, until=0.5), 1e-3, Linear(1e-2, 1e-3, until=0.5)),
        (Cosine(0.0, 1e-3), 1e-3, Cosine(0.0, 1e-2)),
        (Constant(1e-3), 1e-3, Constant(1e-2)),
        (Piecewise(((0.0, 0.0), (0.1, 1e-3), (1.0, 5e-4))), 1e-3, Piecewise(((0.0, 0.0), (0.1, 1e-2), (1.0, 5e-3)))),
    ],
)
def test_a_schedule_keeps_its_shape(schedule: Any, largest: float, scaled: Any) -> None:
    assert peak(schedule) == largest
    base = config(algorithm={"learning_rate": schedule})
    space = {"learning_rate": log_uniform(1e-5, 1e-1)}
    assert with_values(base, space, {"learning_rate": largest}) == base
    found = with_values(base, space, {"learning_rate": 1e-2}).algorithm.learning_rate
    assert type(found) is type(scaled)
    points = [0.0, 0.1, 0.3, 0.5, 1.0]
    assert [found.value(x) for x in points] == pytest.approx([scaled.value(x) for x in points])


def test_parts_of_a_schedule() -> None:
    base = config("dqn")
    space = space_for(base, {"epsilon.end": [0.02, 0.3], "epsilon.until": {"low": 0.1, "high": 0.9}})
    found = with_values(base, space, {"epsilon.end": 0.3, "epsilon.until": 0.9})
    assert found.algorithm.epsilon == Linear(1.0, 0.3, until=0.9)


# Files


def test_a_file_is_the_whole_space() -> None:
    data = {
        "learning_rate": {"low": 1, "high": 2, "log": True},
        "num_epochs": {"low": 1, "high": 4.0},
        "num_envs": [1, 4],
        "network.actor_sizes": [[8], [16, 16]],
        "network.critic_sizes": {"same_as": "network.actor_sizes"},
        "normalize_obs": [True, False],
    }
    space = read_space(data, config())
    assert list(space) == list(data)
    assert space["learning_rate"] == Range(1.0, 2.0, log=True)
    assert isinstance(space["learning_rate"].low, float)
    assert space["num_epochs"] == Range(1, 4)
    assert isinstance(space["num_epochs"].high, int)
    assert space["network.actor_sizes"] == Choices(((8,), (16, 16)))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"lerning_rate": [1]}, "search: unknown key 'lerning_rate'. Did you mean 'learning_rate'?"),
        ({"seed": [1, 2]}, "search: unknown key 'seed'."),
        ({"clip_coef.end": [1, 2]}, "search: unknown key 'clip_coef.end'."),
        ({"gamma": 0.9}, "search > gamma: expected a list of choices, {low: ..., high: ..., log: true} or {same_as:"),
        ({"gamma": {"low": 0.1}}, "search > gamma: expected a list"),
        ({"gamma": {"low": 0.1, "high": 0.2, "step": 0.1}}, "search > gamma: expected a list"),
        ({"gamma": []}, "search > gamma: a choice needs at least one value"),
        ({"gamma": {"low": 0.5, "high": 2}}, "search > gamma: must be >= 0 and <= 1, got 2.0"),
        ({"gamma": [0.9, "much"]}, "search > gamma: expected a number, got 'much'"),
        ({"learning_rate": {"low": 0, "high": 1, "log": True}}, "search > learning_rate: low must be above 0"),
        ({"learning_rate": {"low": "a", "high": 1}}, "search > learning_rate: low and high must be numbers"),
        ({"learning_rate": {"low": 0, "high": 1, "log": 3}}, "search > learning_rate: log must be true or false"),
        ({"learning_rate": {"low": 2, "high": 1}}, "search > learning_rate: low must be at most high"),
        ({"num_epochs": {"low": 0.5, "high": 2}}, "search > num_epochs: low and high must be whole numbers"),
        (
            {"ent_coef": {"low": 1e-5, "high": 1, "log": True}},
            "search > ent_coef: the initial value 0.0 has no logarithm",
        ),
        (
            {"network.activation": {"low": 1, "high": 2}},
            "search > network.activation: the initial value tanh is not a number",
        ),
        ({"network.critic_sizes": {"same_as": "network.actor_sizes"}}, "needs that setting to be searched"),
        ({}, "the search space is empty"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        space_for(config(), data)
    assert problem in str(error.value)


def test_names_may_be_those_of_flags() -> None:
    assert read_space({"algorithm.gamma": [0.9]}, config()) == {"gamma": choices(0.9)}


def test_a_schedule_and_its_part_cannot_both_be_searched() -> None:
    with pytest.raises(ConfigError, match=r"epsilon.end: is part of 'epsilon', which is also searched"):
        read_space({"epsilon": [0.1], "epsilon.end": [0.2]}, config("dqn"))


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        space_for(config(), {"gama": [1], "num_epochs": 3})
    assert len(error.value.problems) == 2


def test_fixing_everything_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="the search space is empty"):
        space_for(config(), fixed=list(declared(registry()["ppo"].config)))
