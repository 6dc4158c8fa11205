"""Target networks: slowly updated copies of the online networks, which keep the learning targets stable."""

from __future__ import annotations

import copy
from typing import ClassVar, Generic, TypeVar, cast

import torch
from torch import nn

from rl_training.contracts.state import Stateful
from rl_training.policies.parameters import ParameterStore

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Target(Stateful, Generic[ModuleT]):
    """A target network: `module` is a frozen copy of a module whose parameters are in a `ParameterStore`.

    The parameters of the copy are views into one flat tensor, so an update is a single call for any number of layers.
    The store may hold other modules too; the parameters of this one must be contiguous in it. With `training`, the copy
    is in training mode: its dropout stays active, as in DroQ.

    Example:
        >>> from rl_training.policies.optimizers import OptimizerConfig
        >>> online = nn.Linear(2, 1)
        >>> target = Target(online, ParameterStore(online, OptimizerConfig()))
        >>> target.update(tau=0.005)  # target <- 0.005 * online + 0.995 * target
    """

    transient: ClassVar[tuple[str, ...]] = ("flat", "source", "network", "store", "_online")

    def __init__(self, network: nn.Module, store: ParameterStore, part: str = "", training: bool = False) -> None:
        self.network, self.part, self.store = network, part, store
        self.training = training
        self._build(copy.deepcopy(self.followed))

    @property
    def followed(self) -> ModuleT:
        """The online module: a part of the network, or all of it."""
        return cast("ModuleT", self.network.get_submodule(self.part))

    def rebuild(self) -> None:
        """Copy the online module again after it was changed; unchanged parameters keep their target values."""
        before, fresh = dict(self.module.named_parameters()), copy.deepcopy(self.followed)
        online = dict(self.followed.named_parameters())
        with torch.no_grad():
            for name, parameter in fresh.named_parameters():
                if self._online.get(name) is online[name]:
                    parameter.copy_(before[name])
        self._build(fresh)

    def _build(self, duplicate: ModuleT) -> None:
        module, store = self.followed, self.store
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        spans = {id(p): span for p, (span, _) in zip(store.parameters, store.slices.values(), strict=True)}
        if any(id(p) not in spans for p in trainable.values()):
            raise ValueError("the store was built over another module than the one to copy")
        self._online = dict(module.named_parameters())
        self.module = duplicate.train(self.training).requires_grad_(False)
        first = min((spans[id(p)].start for p in trainable.values()), default=0)
        self.source = store.flat.detach()[first : max((spans[id(p)].stop for p in trainable.values()), default=0)]
        self.flat = torch.zeros_like(self.source)
        copies = dict(self.module.named_parameters())
        for name, p in trainable.items():
            start = spans[id(p)].start - first
            place = self.flat[start : start + p.numel()].view(p.shape)
            place.copy_(copies[name].detach())
            copies[name].data = place
        # the rest of the state: buffers, and frozen parameters
        self.others = [name for name in self.module.state_dict() if name not in trainable]

    @torch.no_grad()
    def update(self, tau: float = 1.0) -> None:
        """Polyak update: target <- tau * online + (1 - tau) * target; 1 copies. Buffers are always copied."""
        if tau == 1.0:
            self.flat.copy_(self.source)
        else:
            self.flat.lerp_(self.source, tau)
        if self.others:
            own, followed = self.module.state_dict(), self.followed.state_dict()
            for name in self.others:
                own[name].copy_(followed[name])
