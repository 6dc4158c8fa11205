"""Lossless encoding of state as plain data for JSON and safetensors, and its inverse.

Decoding restores value, type, dtype, memory order and identity exactly: a random generator, list or array that is
referenced twice is still one object afterwards. Anything else is refused with a `SnapshotError`: objects of other types
(subclasses too), arrays that overlap in memory, and containers that contain themselves.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import CheckpointError, RLTrainingError

BIT_GENERATORS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
RANDOM = (np.random.Generator, np.random.RandomState, random.Random)
"""Random generators that can be saved."""
CONTAINERS: dict[type[Any], str] = {list: "$list", tuple: "$tuple", deque: "$deque"}
SHARED = (np.ndarray, list, dict, deque, RunningMeanStd, *RANDOM)
"""Mutable types, for which it matters whether two names refer to the same object."""
MAX_NESTING, MAX_BITS = 20, 4096
"""How deeply containers may be nested and how large integers may be: JSON has limits for both."""
RAW_KINDS = "biufcmMSU"
"""Dtype kinds of arrays without objects or fields."""


class SnapshotError(RLTrainingError):
    """An environment whose state cannot be taken; the message says which part prevents it."""


class Encoder:
    """Encodes the parts of one state; all parts use one encoder, which tracks shared objects."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []
        """Objects by number; kept alive, since the id of a deleted object may be reused."""
        self._open: set[int] = set()
        self._depth = 0
        self._uses: Counter[int] = Counter()
        self._arrays: dict[int, list[tuple[str, AnyArray]]] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Encode a part of the state; `where` names it in errors. Call `finish` on the whole."""
        if not isinstance(value, SHARED):
            return self._encode_new(value, where)
        identity = id(_source(value))
        number = self._numbers.setdefault(identity, len(self._met))
        self._uses[number] += 1
        if number < len(self._met):
            self._check_same(value, number, where)
            return {"$shared": number}
        self._met.append(value)
        self._open.add(number)
        encoded = self._encode_new(value, where)
        self._open.remove(number)
        return {"$shared": number, "value": encoded}

    def finish(self, encoded: Any) -> Any:
        """The encoded state without the numbers of objects that occur only once."""
        if isinstance(encoded, dict):
            if "$shared" in encoded and self._uses[encoded["$shared"]] == 1:
                return self.finish(encoded["value"])
            return {key: self.finish(item) for key, item in encoded.items()}
        return [self.finish(item) for item in encoded] if isinstance(encoded, list) else encoded

    def _check_same(self, value: Any, number: int, where: str) -> None:
        if number in self._open:
            raise SnapshotError(f"{where} contains itself")
        first = self._met[number]
        if first is not value and not (type(first) is type(value) is np.random.Generator):
            raise SnapshotError(f"{where} draws from the bit generator of another random generator")

    def _encode_new(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is int and value.bit_length() > MAX_BITS:
            raise SnapshotError(f"{where} is an integer of {value.bit_length()} bits, more than {MAX_BITS}")
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is np.ndarray:
            self._check_memory(value, where)
            return _encode_array(value, where)
        if kind is np.str_:
            return str(value)
        if isinstance(value, np.generic):
            return {"$scalar": _encode_array(np.array(value), where)}
        if kind in RANDOM:
            return _encode_random(value, where)
        if self._depth == MAX_NESTING:
            raise SnapshotError(f"{where} is nested more than {MAX_NESTING} deep")
        self._depth += 1
        encoded = self._encode_container(value, kind, where)
        self._depth -= 1
        return encoded

    def _encode_container(self, value: Any, kind: type[Any], where: str) -> dict[str, Any]:
        if kind is RunningMeanStd:
            return {"$moments": {key: self.encode(item, f"{where}.{key}") for key, item in vars(value).items()}}
        if kind in CONTAINERS:
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return {CONTAINERS[kind]: items, **({"maxlen": value.maxlen} if kind is deque else {})}
        if kind is dict:
            pairs = [[self.encode(key, where), self.encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
            return {"$pairs": pairs}
        raise SnapshotError(f"{where} is a {kind.__name__}, which is not plain data")

    def _check_memory(self, array: AnyArray, where: str) -> None:
        """Refuse arrays that overlap (one is a view of the other): after decoding they would not."""
        root: Any = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        others = self._arrays.setdefault(id(root), [])
        for name, other in others:
            if np.may_share_memory(array, other):
                raise SnapshotError(f"{where} shares memory with {name}")
        others.append((where, array))


class Decoder:
    """Decodes what one `Encoder` encoded, part by part and in the same order."""

    def __init__(self) -> None:
        self._shared: dict[int, Any] = {}

    def decode(self, value: Any, current: Any = None) -> Any:
        """The inverse of `Encoder.encode`.

        Random generators, deques and moments are restored in place where there is a `current` one that fits.
        """
        if not isinstance(value, dict):
            return value.copy() if isinstance(value, np.ndarray) else value
        (tag, content), *_ = value.items()
        if tag == "$shared":
            if "value" in value:
                self._shared[content] = self.decode(value["value"], current)
            return self._shared[content]
        if tag in ("$raw", "$axes"):
            return _decode_array(value)
        if tag == "$scalar":
            return np.asarray(_decode_array(content))[()]
        if tag in ("$generator", "$legacy", "$python"):
            return _decode_random(tag, value, current)
        if tag == "$moments":
            return self._decode_moments(content, current)
        if tag == "$pairs":
            return {self.decode(key): self.decode(item) for key, item in content}
        items = [self.decode(item) for item in content]
        if tag == "$deque":
            if not isinstance(current, deque) or current.maxlen != value.get("maxlen", current.maxlen):
                return deque(items, value.get("maxlen"))
            current.clear()
            current.extend(items)
            return current
        return {"$list": list, "$tuple": tuple}[tag](items)

    def _decode_moments(self, content: dict[str, Any], current: Any) -> RunningMeanStd:
        moments = current if isinstance(current, RunningMeanStd) else RunningMeanStd()  # type: ignore[no-untyped-call]
        for key, item in content.items():
            if key not in vars(moments):
                raise CheckpointError(f"RunningMeanStd has no '{key:.60}'")
            setattr(moments, key, self.decode(item))
        return moments


def encode(value: Any, where: str) -> Any:
    """Encode a state of one part."""
    encoder = Encoder()
    return encoder.finish(encoder.encode(value, where))


def decode(value: Any, current: Any = None) -> Any:
    """The inverse of `encode`."""
    return Decoder().decode(value, current)


def _source(value: Any) -> Any:
    """The bit generator of a random generator, which several may share; any other value itself."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator
    return value._bit_generator if isinstance(value, np.random.RandomState) else value


def _encode_array(array: AnyArray, where: str) -> Any:
    """A copy, or its raw bytes if torch lacks the dtype; keeps the memory order, on which sums depend."""
    dtype = array.dtype
    is_long = dtype.type in (np.longdouble, np.clongdouble)  # platform-dependent size, with padding bytes
    if dtype.kind not in RAW_KINDS or dtype.itemsize == 0 or is_long:
        raise SnapshotError(f"{where} is an array of {dtype}, which is not plain data")
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    if not array.flags.c_contiguous and axes != sorted(axes):
        return {"$axes": axes, "array": _encode_array(array.transpose(axes).copy(), where)}
    copied = array.copy()
    if dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8:
        return copied
    content = np.frombuffer(copied.tobytes(), np.uint8).copy()
    return {"$raw": content, "dtype": dtype.str, "shape": list(array.shape)}


def _decode_array(value: Any) -> AnyArray:
    if not isinstance(value, dict):
        return np.array(value)
    if "$axes" in value:
        return _decode_array(value["array"]).transpose(np.argsort(value["$axes"]))
    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind not in RAW_KINDS:
        raise CheckpointError(f"an array of {dtype} is not plain data")
    return np.frombuffer(np.asarray(value["$raw"], np.uint8).tobytes(), dtype).reshape(value["shape"]).copy()


def _encode_random(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return {"$python": np.array(words, np.uint32), "version": version, "gauss": gauss}
    source = _source(value)
    if BIT_GENERATORS.get(type(source).__name__) is not type(source):
        raise SnapshotError(f"{where} draws from a {type(source).__name__}, which is not one of numpy's bit generators")
    if isinstance(value, np.random.RandomState):
        return {"$legacy": value.get_state(legacy=False)}
    seeds = _seeds(source, where)
    return {"$generator": source.state, **({"seeds": seeds} if seeds is not None else {})}


def _seeds(source: Any, where: str) -> dict[str, Any] | None:
    """The seed sequence from which `Generator.spawn` continues."""
    found = source.seed_seq
    if type(found) is not np.random.SeedSequence:
        return None
    entropy = found.entropy
    try:
        plain = entropy if entropy is None or type(entropy) is int else np.ravel(entropy).tolist()
    except ValueError:
        plain = [None]
    if isinstance(plain, list) and not all(type(word) is int for word in plain):
        raise SnapshotError(f"{where} was seeded by {entropy!r:.60}, which is not plain data")
    key, children = [int(number) for number in found.spawn_key], int(found.n_children_spawned)
    return {"entropy": plain, "spawn_key": key, "pool_size": int(found.pool_size), "n_children_spawned": children}


def _decode_random(tag: str, value: dict[str, Any], current: Any) -> Any:
    content = value[tag]
    if tag == "$python":
        python = current if type(current) is random.Random else random.Random()
        python.setstate((value["version"], tuple(np.asarray(content).tolist()), value["gauss"]))
        return python
    cls = BIT_GENERATORS.get(str(content.get("bit_generator")))
    if cls is None:
        raise CheckpointError(f"unknown random generator '{content.get('bit_generator')}' in an environment's state")
    if tag == "$legacy":
        fits = type(current) is np.random.RandomState and type(_source(current)) is cls
        legacy = current if fits else np.random.RandomState(cls())
        legacy.set_state(content)
        return legacy
    seeds = value.get("seeds")
    fits = type(current) is np.random.Generator and type(_source(current)) is cls
    if fits and (seeds is None or _seeds(_source(current), "") == seeds):
        generator = current
    else:
        generator = np.random.Generator(cls() if seeds is None else cls(np.random.SeedSequence(**seeds)))
    generator.bit_generator.state = content
    return generator
