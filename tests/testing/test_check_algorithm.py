"""The contract suite passes what keeps the contract, and names what does not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gymnasium import spaces

from rl_training.algorithms.a2c import A2CAlgorithm
from rl_training.algorithms.registry import ALGORITHMS, get_spec
from rl_training.contracts.batches import UpdateResult
from rl_training.contracts.settings import setting
from rl_training.contracts.spec import AlgorithmSpec
from rl_training.testing import check_algorithm

A2C = get_spec("a2c")


def failures(spec: AlgorithmSpec, **options: Any) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        check_algorithm(spec, **options)
    first, *rest = str(caught.value).splitlines()
    assert first == f"{spec.title} violates the contract of algorithms:"
    return [line.removeprefix("- ") for line in rest]


def another(**changes: Any) -> AlgorithmSpec:
    """A2C under another name, with something changed."""
    return dataclasses.replace(
        A2C, **{"name": "another", "title": "Another", "action_spaces": (spaces.Discrete,), **changes}
    )


@pytest.mark.parametrize("name", ["dqn", "recurrent_ppo", "iql"])
def test_our_own_keep_it(name: str) -> None:
    check_algorithm(get_spec(name), learning=False)


@pytest.mark.parametrize("name", ["bc", "marwil"])
def test_those_of_recorded_data_keep_it_and_learn_the_probes(name: str) -> None:
    check_algorithm(get_spec(name))


def test_one_that_is_not_registered_learns_the_probes_and_is_forgotten_afterwards() -> None:
    check_algorithm(another())
    assert "another" not in ALGORITHMS.names()


class Counting(A2CAlgorithm):
    """Keeps a number where no checkpoint finds it, and learns by it."""

    calls = 0

    def update(self, *args: Any) -> UpdateResult:
        self.calls += 1
        if self.calls % 2:
            self.store.flat.data.mul_(1.001)
        return super().update(*args)


def test_a_number_that_checkpoints_lack_is_named_and_shows_after_a_resume() -> None:
    found = failures(another(algorithm=Counting), learning=False)
    assert any(line.startswith("state: trainer.algorithm.calls of Counting changes in training") for line in found)
    assert any(line.startswith("resume: state /algorithm/policy/") for line in found)


class Lazy(A2CAlgorithm):
    """Learns nothing, and always chooses the first action."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.policy.head.linear.bias.data[:] = torch.tensor([9.0, -9.0])

    def update(self, batch: Any, progress: Any) -> UpdateResult:
        return UpdateResult({})


def test_one_that_does_not_learn_is_told_which_probes() -> None:
    found = failures(another(algorithm=Lazy), steps=64)
    assert all(line.startswith("learning: on the probe") for line in found)
    assert any("'constant' its values are" in line for line in found)
    assert any("'match' with Discrete actions its mean return is" in line for line in found)


@dataclass
class BadConfig(type(A2C.config())):  # type: ignore[misc]
    """Settings with mistakes."""

    seed: int = setting(3, "Also a setting of the run.")
    mystery: int = 3

    def problems(self) -> list[str]:
        return [*super().problems(), "mystery: is never right"]


def test_settings_are_looked_at() -> None:
    found = failures(another(config=BadConfig, paper=""), learning=False)
    assert "settings: 'mystery' has no help text: make it with setting(default, help)" in found
    assert "settings: 'seed' is a setting of every run; choose another name" in found
    assert "settings: the defaults are not compatible: mystery: is never right" in found
    assert "paper: must not be empty; name the source of the algorithm" in found


def test_a_space_that_is_promised_and_cannot_be_taken_is_named() -> None:
    found = failures(dataclasses.replace(get_spec("dqn"), name="another", title="Another", action_spaces=(spaces.Box,)),
                     learning=False)  # fmt: skip
    assert any(line.startswith("spaces: no agent can be created for Box actions: SpaceError") for line in found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "ppo"}, "algorithm 'ppo': the name is taken by rl_training itself; choose another"),
        ({"title": "PPO"}, "title: 'PPO' is the title of rl_training's own ppo; choose another"),
        ({"name": "My-Algo"}, "name: expected lower-case letters, digits and underscores, got 'My-Algo'"),
        ({"title": "My Algo"}, "title: must be a valid class name, got 'My Algo'"),
    ],
)
def test_names_that_cannot_be_registered(changes: dict[str, Any], expected: str) -> None:
    assert failures(another(**changes)) == [expected]
