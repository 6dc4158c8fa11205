"""Networks that users change: frozen parameters, replaced layers."""

from __future__ import annotations

from typing import Any

from rl_training.accelerate import forget
from rl_training.policies.parameters import GradientStep, ParameterStore
from rl_training.policies.targets import Target


class NetworkChanges:
    """Detects changes to the networks of an algorithm (or of any object that has stores), and updates what uses them.

    Example: freezing the first layer.
        >>> from torch import nn
        >>> from rl_training.policies.optimizers import OptimizerConfig
        >>> class Owner:
        ...     def __init__(self):
        ...         self.network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        ...         self.store = ParameterStore(self.network, OptimizerConfig())
        >>> owner = Owner()
        >>> changes = NetworkChanges(owner)
        >>> _ = owner.network[0].requires_grad_(False)
        >>> changes.found()
        True
        >>> changes.take_over()
        >>> list(owner.store.slices)
        ['1.weight', '1.bias']
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._stores = [part for part in vars(owner).values() if isinstance(part, ParameterStore)]
        self._builds = [store.num_builds for store in self._stores]

    def found(self) -> bool:
        """Whether a layer was replaced or a parameter frozen or unfrozen since the last check; takes microseconds."""
        return not all(store.is_current() for store in self._stores)

    def take_over(self) -> None:
        """Rebuild the stores, target networks and gradient steps, and drop the recordings of the old networks."""
        for store in self._stores:
            store.follow_module()
        builds = [store.num_builds for store in self._stores]  # loading a checkpoint may also have caused builds
        if builds != self._builds:
            self._builds = builds
            for part in vars(self._owner).values():
                if isinstance(part, (Target, GradientStep)):
                    part.rebuild()
            forget(self._owner)
