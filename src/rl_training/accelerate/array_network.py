"""Small networks evaluated by numpy, using the weights of the torch modules, to act on a few observations at a time.

An environment step needs one evaluation of the policy, with one row per environment. At that size call overhead
dominates, and a numpy call takes a third of the time of a torch call. Torch still does updates, and large networks or
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from rl_training.accelerate.modes import Mode, current_mode
from rl_training.accelerate.registrations import num_registrations
from rl_training.contracts.arrays import AnyArray, ArrayObservation

MAX_PRODUCT = 262_144
"""Multiplications in a layer up to which call overhead dominates: 64 rows of 64 x 64, or 4 of 256 x 256."""

_IN_PLACE: dict[Any, Callable[[AnyArray], AnyArray]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0.0, out=x),
}


class ArrayNetwork:
    """Evaluates a chain of modules on arrays: an encoder with `encode_arrays`, linear layers, tanh and relu.

    `modules` returns the chain; it is called again after a layer was replaced. An encoder's `encode_arrays(obs)` is the
    numpy version of its `forward`; torch evaluates networks whose encoder has none.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 1)
        >>> network = ArrayNetwork(lambda: [nn.Sequential(layer, nn.ReLU())])
        >>> np.allclose(network(np.ones((3, 2), np.float32)), torch.relu(layer(torch.ones(3, 2))).detach().numpy())
        True
    """

    def __init__(self, modules: Callable[[], Sequence[nn.Module]], mode: Mode | None = None) -> None:
        self._get = modules
        self._mode: Mode = current_mode() if mode is None else mode
        self._registrations = -1
        self._encode: Callable[[Any], AnyArray | None] | None = None
        self._modules: list[nn.Module] = []
        self._weights: list[Tensor] = []
        self._address = 0
        self._layers: list[tuple[AnyArray, AnyArray, Any]] = []
        self._dtype: Any = None
        self._max_rows = 0

    def __call__(self, obs: ArrayObservation) -> AnyArray | None:
        """The outputs [N, ...] for observations [N, ...], a new array; None if torch has to compute them."""
        if self._registrations != num_registrations():
            self._look()
        if not self._weights:
            return None
        if self._weights[0].data_ptr() != self._address:  # weights are moved together: into a store, to another device
            self._bind()
        x = _flat(obs) if self._encode is None else self._encode(obs)
        if x is None or not 0 < len(x) <= self._max_rows:
            return None
        if x.dtype != self._dtype:
            x = x.astype(self._dtype)
        with np.errstate(all="ignore"):  # torch does not warn about infinities either
            for weight, bias, activation in self._layers:
                x = np.dot(x, weight)
                x += bias
                if activation is not None:
                    activation(x)
        return x

    def _look(self) -> None:
        """Get the current modules of the chain, and check whether numpy can evaluate them."""
        self._registrations = num_registrations()
        modules = [] if self._mode == "off" else [module for part in self._get() for module in _chain(part)]
        self._encode = getattr(modules[0], "encode_arrays", None) if modules else None
        self._modules = modules[1:] if self._encode is not None else modules
        is_known = bool(self._modules) and _is_known(self._modules)
        self._weights = [p for m in self._modules if isinstance(m, nn.Linear) for p in (m.weight, m.bias)]
        if not is_known:
            self._weights = []
        self._address = 0

    def _bind(self) -> None:
        """Make numpy views of the weights at their current addresses."""
        self._address = self._weights[0].data_ptr()
        self._layers, largest = [], 1
        self._max_rows = 0
        if any(weight.device.type != "cpu" for weight in self._weights):
            return
        for module, following in zip(self._modules, [*self._modules[1:], None], strict=True):
            if isinstance(module, nn.Linear):
                weight, bias = module.weight.detach().numpy().T, module.bias.detach().numpy()
                self._layers.append((weight, bias, _IN_PLACE.get(type(following))))
                largest = max(largest, weight.size)
        self._dtype = self._layers[0][0].dtype
        self._max_rows = MAX_PRODUCT // largest

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies use the weights of the copied modules."""
        return type(self), (self._get, self._mode)


def _flat(obs: Any) -> AnyArray | None:
    """Observations flattened to rows; None if they are not an array."""
    return obs.reshape(len(obs), -1) if isinstance(obs, np.ndarray) else None


def _chain(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of nested `nn.Sequential`s, in order."""
    if type(module) is nn.Sequential:
        for part in module:
            yield from _chain(part)
    else:
        yield module


def _is_known(modules: list[nn.Module]) -> bool:
    """Whether numpy can evaluate a chain of modules: linear layers with activations in between."""
    linear = [type(module) is nn.Linear and module.bias is not None for module in modules]
    activations = [type(module) in _IN_PLACE for module in modules]
    follows_linear = all(linear[i - 1] for i in range(1, len(modules)) if activations[i])
    return linear[0] and follows_linear and all(a or b for a, b in zip(linear, activations, strict=True))
