"""Optimizers: torch's and registered ones, over one flat parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.accelerate import without_torchs_compiler
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.plugins import OPTIMIZERS, FactoryT
from rl_training.contracts.settings import documented, log_uniform, setting

OWN = ("adam", "adamw", "rmsprop", "sgd")
"""Optimizers configured by the fields of `OptimizerConfig`; others are configured by `kwargs`."""

for _name, _cls in vars(torch.optim).items():
    if isinstance(_cls, type) and issubclass(_cls, torch.optim.Optimizer) and _cls is not torch.optim.Optimizer:
        OPTIMIZERS.builtin(_name)(_cls)


def register_optimizer(name: str) -> Callable[[FactoryT], FactoryT]:
    """Make an optimizer available under a name in the `optimizer.name` setting.

    The class or function is called with a list of one parameter, and with `optimizer.kwargs` as keyword arguments; it
    returns a `torch.optim.Optimizer`. The learning rate is set before each step. The optimizer must be elementwise, see
    `check_optimizer`.

    Example:
        >>> @register_optimizer("plain")
        ... def make(parameters, weight_decay=0.0):
        ...     return torch.optim.SGD(parameters, weight_decay=weight_decay)
    """
    return OPTIMIZERS.register(name)


@documented
@dataclass
class OptimizerConfig:
    """The optimizer and its settings (the learning rate is a setting of the algorithm, since it may be scheduled)."""

    name: str = setting(
        "adam",
        "Optimizer: adam, adamw, rmsprop, sgd, another class of torch.optim (such as RAdam), or a registered one.",
        registry=OPTIMIZERS,
    )
    eps: float = setting(1e-5, "Added to the denominator (adam, adamw, rmsprop).", gt=0, search=log_uniform(1e-8, 1e-3))
    betas: tuple[float, float] = setting((0.9, 0.999), "Decay of Adam's moment estimates.", ge=0, lt=1)
    alpha: float = setting(0.99, "Decay of RMSprop's squared gradients.", ge=0, lt=1)
    momentum: float = setting(0.0, "Momentum (rmsprop, sgd).", ge=0, lt=1)
    weight_decay: float = setting(0.0, "Weight decay (decoupled for adamw, added to the gradient otherwise).", ge=0)
    kwargs: dict[str, Any] = setting(
        factory=dict,
        help="Keyword arguments of an optimizer other than adam, adamw, rmsprop and sgd.",
        added_later=True,
    )

    def problems(self) -> list[str]:
        """Combinations that cannot work."""
        found = []
        if self.name in OWN and self.kwargs:
            found.append(
                f"kwargs: only for other optimizers; {self.name} takes its settings directly (eps, betas, ...)"
            )
        if "lr" in self.kwargs:
            found.append("kwargs: 'lr' is not accepted here; set the algorithm's learning_rate instead")
        return found

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer for `parameters`, a list with one flat parameter."""
        with without_torchs_compiler():
            return self._make(parameters)

    def _make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.name in ("adam", "adamw"):
            cls = torch.optim.Adam if self.name == "adam" else torch.optim.AdamW
            return cls(parameters, eps=self.eps, betas=self.betas, weight_decay=self.weight_decay, fused=True)
        if self.name == "rmsprop":
            return torch.optim.RMSprop(
                parameters, alpha=self.alpha, eps=self.eps, momentum=self.momentum, weight_decay=self.weight_decay
            )
        if self.name == "sgd":
            return torch.optim.SGD(parameters, lr=1e-3, momentum=self.momentum, weight_decay=self.weight_decay)
        made = OPTIMIZERS.make(self.name, (parameters,), self.kwargs, "optimizer > kwargs")
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer: '{self.name}' must return a torch.optim.Optimizer, got {made!r:.80}")
        return made


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """One step of an optimizer of `OWN`, without the decorators around it: they import torch's compiler, see `make`."""
    with torch.no_grad():
        cls: Any = type(optimizer)  # typeshed takes its __hash__ for that of its instances
        _undecorated(cls)(optimizer)


@functools.cache
def _undecorated(cls: Any) -> Callable[[torch.optim.Optimizer], Any]:
    step: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(cls.step)
    return step


class Slots(NamedTuple):
    """The state that an optimizer keeps per parameter."""

    tensors: set[str]
    """Names of the entries with the parameter's shape."""
    numbers: dict[str, Any]
    """Scalar entries by name, each with an example value: a 0-d tensor or a Python number."""


def check_optimizer(optimizer: OptimizerConfig, device: torch.device) -> Slots:
    """Check that an optimizer works on flat parameters, by a few trial steps; returns the state that it keeps.

    The weights of a network are one flat tensor, so an optimizer must be elementwise: a few steps on two small
    parameters must give the same values as the same steps on one flat parameter. All that it keeps between steps must
    be in its `state`, so that checkpoints can save it.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10, generator=generator)
    gradients = [torch.randn(10, generator=generator).to(device) for _ in range(6)]
    flat = [nn.Parameter(start.clone().to(device))]
    parts = [nn.Parameter(start[:6].view(2, 3).clone().to(device)), nn.Parameter(start[6:].clone().to(device))]
    try:
        whole, split = optimizer.make(flat), optimizer.make(parts)
        before = _group(whole)
        for gradient in gradients:
            flat[0].grad = gradient.clone()
            parts[0].grad, parts[1].grad = gradient[:6].view(2, 3).clone(), gradient[6:].clone()
            for one in (whole, split):
                one.param_groups[0]["lr"] = 0.01
                one.step()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"optimizer: {optimizer.name} cannot be used: a step on one flat parameter fails: {type(error).__name__}: "
            f"{error}"
        ) from error
    joined = torch.cat([part.detach().reshape(-1) for part in parts])
    if not torch.allclose(flat[0].detach(), joined, rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"optimizer: {optimizer.name} cannot be used: it treats each parameter as a whole (its matrix or norm), "
            "but here all weights of a network are one flat tensor. Choose an element-wise optimizer"
        )
    if changed := sorted(name for name, value in _group(whole).items() if value != before.get(name)):
        raise ConfigError(
            f"optimizer: {optimizer.name} cannot be used: it changes {', '.join(changed)} of its parameter group, "
            "which checkpoints do not save"
        )
    tensors, numbers = set(), {}
    for name, value in whole.state[flat[0]].items():
        if isinstance(value, Tensor) and value.shape == flat[0].shape and value.dtype == flat[0].dtype:
            tensors.add(name)
        elif type(value) in (bool, int, float) or (isinstance(value, Tensor) and value.dim() == 0):
            numbers[name] = value
        elif value is not None:
            raise ConfigError(
                f"optimizer: {optimizer.name} cannot be used: it keeps {name}, which is neither a number nor a tensor "
                f"of the parameter's shape: {value!r:.80}"
            )
    return Slots(tensors, numbers)


def _group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The entries of the parameter group without the parameters and the learning rate."""
    group = optimizer.param_groups[0]
    return {name: value for name, value in group.items() if name not in ("params", "lr")}
