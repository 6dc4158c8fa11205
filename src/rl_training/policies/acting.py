"""Small networks evaluated by numpy, on the weights that torch learns, to act on a few observations at a time.

A step needs one evaluation of the policy, on as many rows as there are environments. There the price of a call is all
that counts, and numpy's calls cost a third of torch's. Learning, and networks or batches for which arithmetic counts,
stay with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import nn

from rl_training.contracts.arrays import AnyArray
from rl_training.policies.encoders import FlatEncoder

MAX_PRODUCT = 262_144
"""Multiplications in a layer up to which calls count more than arithmetic: 64 rows of 64 x 64, or 4 of 256 x 256."""

_IN_PLACE: dict[Any, Callable[[AnyArray], AnyArray]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0.0, out=x),
}


class ArrayNetwork:
    """A chain of modules as a function of arrays: an encoder that only flattens, linear layers, tanh and relu.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> network = ArrayNetwork(nn.Sequential(layer, nn.ReLU()))
        >>> np.allclose(network(np.ones((3, 2), np.float32)), torch.relu(layer(torch.ones(3, 2))).detach().numpy())
        True
    """

    def __init__(self, *parts: nn.Module) -> None:
        self._parts = parts
        self._modules = [module for part in parts for module in _chain(part)]
        self._known = _is_known(self._modules)
        self._weights = [p for m in self._modules if isinstance(m, nn.Linear) for p in (m.weight, m.bias)]
        self._address = 0
        self._layers: list[tuple[AnyArray, AnyArray, Any]] = []
        self._dtype: Any = None
        self._max_rows = 0

    def __call__(self, obs: Any) -> AnyArray | None:
        """The outputs [N, ...] for observations [N, ...], a new array; None where torch has to compute them."""
        if not self._known or not isinstance(obs, np.ndarray):
            return None
        if self._weights[0].data_ptr() != self._address:  # weights move together: into a store, to another device
            self._bind()
        num_rows = len(obs)
        if not 0 < num_rows <= self._max_rows:
            return None
        x = obs.reshape(num_rows, -1)
        if x.dtype != self._dtype:
            x = x.astype(self._dtype)
        with np.errstate(all="ignore"):  # torch does not warn of infinities either
            for weight, bias, activation in self._layers:
                x = np.dot(x, weight)
                x += bias
                if activation is not None:
                    activation(x)
        return x

    def _bind(self) -> None:
        """Look at the weights where they are now."""
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
        """Copies look at the weights of the copied modules."""
        return type(self), self._parts


def _chain(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of nested chains, in order."""
    if type(module) is nn.Sequential:
        for part in module:
            yield from _chain(part)
    else:
        yield module


def _is_known(modules: list[nn.Module]) -> bool:
    """Whether numpy can do what a chain of modules does: flatten, and then linear layers with activations between."""
    first, *rest = modules
    if type(first) is FlatEncoder and not first.sizes:  # one-hot vectors are left to torch
        first, *rest = rest
    chain = [first, *rest]
    linear = [type(module) is nn.Linear and module.bias is not None for module in chain]
    activations = [type(module) in _IN_PLACE for module in chain]
    follows_linear = all(linear[i - 1] for i in range(1, len(chain)) if activations[i])
    return linear[0] and follows_linear and all(a or b for a, b in zip(linear, activations, strict=True))
