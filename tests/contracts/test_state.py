"""State is found by walking types, and comes back in place."""

import copy
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.state import Stateful


@dataclass
class Counters(Stateful):
    transient: ClassVar[tuple[str, ...]] = ("cache",)
    steps: int = 0
    best: float | None = None
    recent: deque = field(default_factory=lambda: deque(maxlen=3))
    names: list[str] = field(default_factory=list)
    table: dict[str, Any] = field(default_factory=dict)
    pair: tuple[int, int] = (0, 0)
    total: np.ndarray = field(default_factory=lambda: np.zeros(2))
    cache: Any = None


class Part(Stateful):
    def __init__(self, number):
        self.array = np.full(3, float(number))


class Everything(Stateful):
    """One attribute of every kind that is state, and some that are not."""

    transient = ("scratch",)

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.rng = np.random.default_rng(seed)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.tensor = torch.full((2,), float(seed))
        self.array = np.full((2, 2), seed, dtype=np.int64)
        self.scalar = np.full((), float(seed))
        self.counters = Counters(steps=seed)
        self.parts = [Part(seed), Part(seed + 1)]
        self.named = {"a": Part(seed), "b": Part(seed + 1)}
        self.nested = {"deep": [{"x": torch.full((1,), float(seed))}]}
        self.scratch = np.full(5, seed)
        self.learning_rate = 0.1 * seed
        self.label = f"seed {seed}"
        self.sizes = (1, 2)
        self.function = len


STATE = {"module", "rng", "torch_rng", "tensor", "array", "scalar", "counters", "parts", "named", "nested"}


def plain(state):
    """State as nested lists, for comparison."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, (torch.Tensor, np.ndarray)) else state


def saved(owner):
    return copy.deepcopy(owner.state_dict())


class TestWalk:
    def test_what_is_state(self):
        assert set(Everything().state_dict()) == STATE

    def test_what_it_holds(self):
        state = plain(Everything(3).state_dict())
        assert state["tensor"] == [3.0, 3.0]
        assert state["array"] == [[3, 3], [3, 3]]
        assert state["scalar"] == 3.0
        assert state["parts"] == [{"array": [3.0] * 3}, {"array": [4.0] * 3}]
        assert state["named"] == {"a": {"array": [3.0] * 3}, "b": {"array": [4.0] * 3}}
        assert state["nested"] == {"deep": [{"x": [3.0]}]}
        assert state["counters"]["steps"] == 3
        assert {"0.weight", "0.bias", "1.running_mean", "1.num_batches_tracked"} <= set(state["module"])

    def test_plain_attributes_of_ordinary_classes_are_settings(self):
        first, second = Everything(1), Everything(2)
        second.load_state_dict(saved(first))
        assert (second.learning_rate, second.label) == (0.2, "seed 2")
        assert second.scratch.tolist() == [2] * 5

    def test_every_field_of_a_dataclass_is_state(self):
        assert set(Counters().state_dict()) == {"steps", "best", "recent", "names", "table", "pair", "total"}

    def test_the_walk_begins_anew_each_time(self):
        owner = Part(0)
        owner.later = np.zeros(1)
        assert set(owner.state_dict()) == {"array", "later"}

    def test_plain_parts_are_json(self):
        state = Counters(steps=np.int64(3), best=np.float32(0.5), recent=deque([1, 2])).state_dict()
        state.pop("total")
        text = json.dumps(state)
        assert json.loads(text) == {**state, "steps": 3, "best": 0.5, "recent": [1, 2], "pair": [0, 0]}

    def test_tensors_are_not_copied_and_have_no_gradient(self):
        class Weights(Stateful):
            def __init__(self):
                self.weight = nn.Parameter(torch.zeros(2))

        owner = Weights()
        tensor = owner.state_dict()["weight"]
        assert not tensor.requires_grad
        assert tensor.data_ptr() == owner.weight.data_ptr()

    def test_what_no_file_can_hold_is_refused(self):
        with pytest.raises(TypeError, match="cannot put a object into a checkpoint"):
            Counters(best=object()).state_dict()


class TestRoundTrip:
    def test_everything_comes_back(self):
        first, second = Everything(1), Everything(2)
        assert plain(first.state_dict()) != plain(second.state_dict())
        second.load_state_dict(saved(first))
        assert plain(second.state_dict()) == plain(first.state_dict())

    def test_objects_stay_the_same(self):
        # others hold references to them: optimizers to weights, collectors to normalisers
        owner = Everything(2)
        names = STATE - {"nested"}
        before = {name: getattr(owner, name) for name in names}
        inner = (owner.parts[0], owner.named["b"], owner.module[0].weight, owner.nested["deep"][0]["x"])
        owner.load_state_dict(saved(Everything(1)))
        assert all(getattr(owner, name) is before[name] for name in names)
        after = (owner.parts[0], owner.named["b"], owner.module[0].weight, owner.nested["deep"][0]["x"])
        assert all(a is b for a, b in zip(inner, after, strict=True))

    def test_generators_go_on_with_the_same_numbers(self):
        owner = Everything(5)
        owner.rng.random(7)
        owner.rng.standard_normal(1, dtype=np.float32)
        torch.rand(7, generator=owner.torch_rng)
        state = saved(owner)
        expected = owner.rng.random(4).tolist(), torch.rand(4, generator=owner.torch_rng).tolist()

        other = Everything(6)
        other.load_state_dict(state)
        assert (other.rng.random(4).tolist(), torch.rand(4, generator=other.torch_rng).tolist()) == expected

    def test_half_a_64_bit_draw_is_kept(self):
        # 32-bit draws leave half a word behind; a generator restored without it would be one draw off
        owner, other = Everything(0), Everything(1)
        owner.rng.integers(0, 100, dtype=np.uint32)
        assert owner.rng.bit_generator.state["has_uint32"] == 1
        other.load_state_dict(saved(owner))
        draw = lambda rng: rng.integers(0, 1000, 5, dtype=np.uint32).tolist()  # noqa: E731
        assert draw(other.rng) == draw(owner.rng)

    def test_dataclass_fields(self):
        values = {"steps": 9, "best": 1.5, "names": ["a"], "table": {"k": [1, {"x": None}]}, "pair": (3, 4)}
        first = Counters(**values, recent=deque([1, 2, 3], maxlen=3), total=np.array([1.0, 2.0]), cache="mine")
        second = Counters(best=None, cache="yours")
        second.load_state_dict(saved(first))
        assert {name: getattr(second, name) for name in values} == values
        assert second.total.tolist() == [1.0, 2.0]
        assert second.cache == "yours"  # transient

    def test_a_tuple_stays_a_tuple(self):
        second = Counters()
        state = saved(Counters(pair=(3, 4)))
        assert state["pair"] == [3, 4]  # as files give it back
        second.load_state_dict(state)
        assert second.pair == (3, 4)

    def test_a_deque_keeps_its_length_limit(self):
        second = Counters(recent=deque([7, 8], maxlen=3))
        second.load_state_dict(saved(Counters(recent=deque([1, 2], maxlen=3))))
        assert list(second.recent) == [1, 2]
        second.recent += [3, 4]
        assert list(second.recent) == [2, 3, 4]

    def test_plain_values_beside_state_in_a_container(self):
        class Mixed(Stateful):
            def __init__(self, number):
                self.items = [torch.full((1,), float(number)), number]
                self.named = {"array": np.full(1, number), "count": number}
                self.pair = (np.full(1, number), number)

        first, second = Mixed(1), Mixed(2)
        array = second.pair[0]
        second.load_state_dict(saved(first))
        assert plain(second.state_dict()) == {
            "items": [[1.0], 1],
            "named": {"array": [1], "count": 1},
            "pair": [[1], 1],
        }
        assert second.pair[0] is array

    def test_arrays_may_come_back_as_tensors(self):
        # safetensors gives tensors for everything
        owner = Part(0)
        owner.load_state_dict({"array": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)})
        assert owner.array.tolist() == [1.0, 2.0, 3.0]
        assert isinstance(owner.array, np.ndarray)

    def test_trainable_tensors_are_loaded_in_place(self):
        class Weights(Stateful):
            def __init__(self, number):
                self.weight = nn.Parameter(torch.full((2,), number))

        owner = Weights(0.0)
        owner.load_state_dict(saved(Weights(3.0)))
        assert owner.weight.tolist() == [3.0, 3.0]
        assert owner.weight.requires_grad


class TestRefusal:
    def refuse(self, change, match):
        owner = Everything()
        state = saved(owner)
        change(state)
        with pytest.raises(CheckpointError, match=match):
            owner.load_state_dict(state)

    def test_missing(self):
        self.refuse(lambda s: s.pop("tensor"), "does not fit Everything: missing tensor")

    def test_unknown(self):
        self.refuse(lambda s: s.update(extra=1, more=2), "does not fit Everything: unknown extra, more")

    def test_missing_and_unknown_together(self):
        self.refuse(lambda s: s.update(tensr=s.pop("tensor")), "missing tensor; unknown tensr")

    def test_inner_names_say_where(self):
        self.refuse(lambda s: s["module"].pop("0.bias"), r"does not fit Everything\.module: missing 0\.bias")
        self.refuse(lambda s: s["counters"].pop("steps"), "does not fit Counters: missing steps")
        self.refuse(lambda s: s["named"].pop("b"), r"does not fit Everything\.named: missing b")

    def test_names_that_are_not_strings(self):
        class Numbered(Stateful):
            def __init__(self):
                self.parts = {0: Part(0), 1: Part(1)}

        state = saved(Numbered())
        state["parts"].pop(1)
        with pytest.raises(CheckpointError, match="missing 1"):
            Numbered().load_state_dict(state)

    def test_shape_of_a_tensor(self):
        self.refuse(lambda s: s.update(tensor=torch.zeros(3)), r"tensor has shape \(2,\), the checkpoint has \(3,\)")

    def test_shape_of_an_array(self):
        # numpy would broadcast a row into the matrix without a word
        self.refuse(lambda s: s.update(array=np.zeros(2)), r"array has shape \(2, 2\), the checkpoint has \(2,\)")

    def test_shape_of_a_weight(self):
        self.refuse(lambda s: s["module"].update({"0.bias": torch.zeros(1)}), r"module\.0\.bias has shape \(2,\)")

    def test_length_of_a_list(self):
        self.refuse(lambda s: s["parts"].pop(), r"Everything\.parts has 2 parts, the checkpoint 1")
