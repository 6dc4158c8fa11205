"""Flat parameters: one contiguous tensor of weights, one of gradients, and the optimizer over them.

The modules' parameters become views into the flat tensors, so a gradient step is a few calls for any number of layers
(this saves about a third of the optimizer's time on small networks). Each parameter is aligned as torch would align it;
the padding between parameters is zero, and so are its gradients. Checkpoints do not contain the flat layout: the module
saves weights by parameter name, and the store saves the optimizer state by the same names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl_training.accelerate import Accelerated, HasAccelerated, layout, num_registrations, scale_, write_gradients
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.state import MAX_NUMBER, Stateful, check_keys, check_tensor
from rl_training.policies.networks import TrainingMode
from rl_training.policies.optimizers import OWN, OptimizerConfig, Slots, check_optimizer, plain_step


class ParameterStore(Stateful):
    """Owns the flat parameters, gradients and optimizer state of a network, or of some parts of it.

    Parts are given by name, so that a replaced submodule is noticed:
    `ParameterStore(policy, settings, parts=["actor"])`.
    """

    transient: ClassVar[tuple[str, ...]] = (
        "network",
        "flat",
        "grad",
        "parameters",
        "slices",
        "num_builds",
        "_all",
        "_learning",
        "_registrations",
    )

    def __init__(self, network: nn.Module, optimizer: OptimizerConfig, parts: Sequence[str] = ()) -> None:
        self.network = network
        self.parts = tuple(parts)
        self.settings = optimizer
        self.num_builds = 0
        """How often the flat layout was built; targets and recordings are valid for one layout only."""
        self._build()
        self._apply = Accelerated(self.optimizer_step, why_plain=self.why_plain)

    @property
    def why_plain(self) -> str:
        """Why the optimizer's step is not recorded; empty if it is."""
        return (
            ""
            if self.is_fused
            else f"{type(self.optimizer).__name__} needs its learning rate as a number, not as a tensor"
        )

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name, including frozen ones. With several parts, names begin with the part's name."""
        if len(self.parts) < 2:
            module = self.network if not self.parts else self.network.get_submodule(self.parts[0])
            return dict(module.named_parameters())
        return {
            f"{part}.{name}": parameter
            for part in self.parts
            for name, parameter in self.network.get_submodule(part).named_parameters()
        }

    def _trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are not frozen, by name."""
        return {name: parameter for name, parameter in self.named_parameters().items() if parameter.requires_grad}

    def _build(self) -> None:
        """Build the flat tensors of the trainable parameters, and their optimizer."""
        self.num_builds += 1
        named = self._trainable()
        self.parameters = list(named.values())
        self._all = list(self.named_parameters().values())
        if len({parameter.dtype for parameter in self._all}) != 1:
            raise ValueError(f"all parameters of a store must have the same dtype, got {[p.dtype for p in self._all]}")
        self.slices, size = layout(named)
        self._learning = [parameter.requires_grad for parameter in self._all]
        self.flat = nn.Parameter(self._all[0].new_zeros(size))
        self.grad = torch.zeros_like(self.flat)
        self.flat.grad = self.grad
        for parameter, (span, shape) in zip(self.parameters, self.slices.values(), strict=True):
            self.flat.data[span] = parameter.detach().reshape(-1)
            parameter.data = self.flat.data[span].view(shape)
            parameter.grad = self.grad[span].view(shape)
        self.optimizer = self.settings.make([self.flat])
        self.is_own = self.settings.name in OWN
        """Whether a step may be recorded. Other optimizers may count in Python, which a replay does not repeat."""
        self.is_fused = self.is_own and bool(self.optimizer.param_groups[0].get("fused"))
        self.slots = self._own_slots() if self.is_own else check_optimizer(self.settings, self.flat.device)
        self._registrations = num_registrations()

    def is_current(self) -> bool:
        """A quick check whether no submodule was replaced and no parameter was frozen or unfrozen."""
        learning = [parameter.requires_grad for parameter in self._all]
        return num_registrations() == self._registrations and learning == self._learning

    def follow_module(self) -> None:
        """Rebuild after changes of the module: frozen or unfrozen parameters, replaced submodules or storage.

        Unchanged parameters keep their optimizer state.
        """
        self._registrations = num_registrations()
        found = self._trainable()
        if list(found) == list(self.slices) and all(map(operator.is_, found.values(), self.parameters)):
            places = [self.flat[span].data_ptr() for span, _ in self.slices.values()]
            if [parameter.data_ptr() for parameter in self.parameters] == places:
                return
        kept = dict(zip(self.slices, self.parameters, strict=True))
        state = self.state_dict()
        self._build()
        state.pop("frozen", None)
        slots = {slot: tensors for slot, tensors in state.items() if slot in self.slots.tensors}
        if slots and self.parameters:
            for slot, tensors in slots.items():
                state[slot] = {
                    name: tensors[name] if kept.get(name) is parameter else torch.zeros_like(parameter)
                    for name, parameter in found.items()
                }
            self._load_slots(state)

    def step(self, loss: Tensor, *, learning_rate: float, max_grad_norm: float | None) -> Tensor:
        """Backpropagate `loss`, clip the gradients by global norm, and step. Returns the norm before clipping."""
        norm = self.differentiate(loss, max_grad_norm)
        self.apply(learning_rate)
        return norm

    def differentiate(self, loss: Tensor, max_grad_norm: float | None) -> Tensor:
        """Write the gradients of `loss`, clipped by global norm. Returns the norm before clipping.

        Only the store's parameters get gradients: an actor's loss goes through the critics without changing them.
        """
        if self.parameters:
            places = [self.grad[span].view(shape) for span, shape in self.slices.values()]
            write_gradients(loss, self.parameters, places)
        norm: Tensor = self.grad.norm()
        if max_grad_norm is not None:
            scale_(self.grad, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def apply(self, learning_rate: float | Tensor) -> None:
        """One optimizer step with the gradients written by `differentiate`."""
        if self.flat.is_cpu:
            self._apply(learning_rate)
        else:
            self.optimizer_step(torch.as_tensor(learning_rate, dtype=torch.float64))

    def optimizer_step(self, learning_rate: Tensor) -> None:
        """See `apply`. The learning rate is a tensor, so that it can change between replays of a recording."""
        self.optimizer.param_groups[0]["lr"] = learning_rate if self.is_fused else learning_rate.item()
        if self.is_own:
            plain_step(self.optimizer)
        else:
            self.optimizer.step()

    def _freeze(self, names: Any) -> None:
        """Freeze exactly the parameters with these names; unfreeze the others."""
        own = self.named_parameters()
        if not isinstance(names, list) or not all(isinstance(name, str) and name in own for name in names):
            raise CheckpointError(f"the frozen parameters do not fit the network: {names!r:.80}")
        for name, parameter in own.items():
            parameter.requires_grad_(name not in names)
        self.follow_module()

    def _own_slots(self) -> Slots:
        """The state kept by the optimizers in `OWN`, which need no trial steps."""
        names = {"Adam": {"exp_avg", "exp_avg_sq"}, "AdamW": {"exp_avg", "exp_avg_sq"}, "RMSprop": {"square_avg"}}
        momentum = {"momentum_buffer"} if self.optimizer.param_groups[0].get("momentum") else set()
        # torch's fused kernels need the step counter on the device
        step = torch.zeros((), device=self.flat.device if self.is_fused else None)
        return Slots(names.get(type(self.optimizer).__name__, set()) | momentum, {"step": step})

    def state_dict(self) -> dict[str, Any]:
        """The optimizer state by parameter name, its step counter, and its other scalars."""
        slots = {name: value for name, value in self.optimizer.state.get(self.flat, {}).items() if value is not None}
        state: dict[str, Any] = {
            "kind": type(self.optimizer).__name__,
            "step": int(slots["step"]) if "step" in slots else 0,
        }
        if frozen := [name for name, parameter in self.named_parameters().items() if not parameter.requires_grad]:
            state["frozen"] = frozen
        for slot in slots.keys() & self.slots.tensors:
            state[slot] = {name: slots[slot][span].view(shape) for name, (span, shape) in self.slices.items()}
        if numbers := {name: slots[name] for name in slots.keys() & self.slots.numbers.keys() - {"step"}}:
            state["numbers"] = numbers
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the optimizer state and which parameters are frozen. The module restores the weights."""
        state = dict(state)
        self._freeze(state.pop("frozen", []))
        self._load_slots(state)

    def _load_slots(self, state: dict[str, Any]) -> None:
        self.grad.zero_()  # also the padding between parameters, where clipping may have left NaN
        if state["kind"] != type(self.optimizer).__name__:
            raise CheckpointError(f"the optimizer is {type(self.optimizer).__name__}, the checkpoint's {state['kind']}")
        if type(state["step"]) is not int or not 0 <= state["step"] <= MAX_NUMBER:
            raise CheckpointError(f"the optimizer's step count is invalid: {state['step']!r:.60}")
        saved = {slot: tensors for slot, tensors in state.items() if slot not in ("kind", "step", "numbers")}
        slots = self._read_slots(saved) if saved or "numbers" in state else {}  # none before the first step
        if slots:
            slots |= self._read_numbers({"step": state["step"], **state.get("numbers", {})})
        current = self.optimizer.state[self.flat]
        if not self.is_own:
            current.clear()
        for slot in current.keys() - slots.keys():
            if current[slot] is not None:
                current[slot].zero_()  # as before the first step
        for slot, value in slots.items():
            if slot in current:
                current[slot].copy_(value)  # in-place, because recorded steps write to this memory
            else:
                current[slot] = value

    def _read_slots(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Saved per-parameter state as flat tensors."""
        slots: dict[str, Any] = {}
        check_keys("the optimizer", self.slots.tensors, saved)
        for slot, tensors in saved.items():
            check_keys(f"the optimizer's {slot}", self.slices.keys(), tensors)
            slots[slot] = torch.zeros_like(self.flat.data)
            for name, (span, shape) in self.slices.items():
                check_tensor(f"the optimizer's {slot} of {name}", self.flat.data[span].view(shape), tensors[name])
                slots[slot][span] = tensors[name].reshape(-1)
        return slots

    def _read_numbers(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Saved scalars, each in the type that the optimizer uses."""
        if "step" not in self.slots.numbers:
            del saved["step"]
        check_keys("the optimizer's numbers", self.slots.numbers.keys(), saved)
        found: dict[str, Any] = {}
        for name, example in self.slots.numbers.items():
            value = saved[name]
            if isinstance(example, Tensor):
                found[name] = torch.as_tensor(value, dtype=example.dtype, device=example.device).clone()
            elif type(value) is type(example):
                found[name] = value
            else:
                raise CheckpointError(f"the optimizer's {name} has the wrong type: {value!r:.60}")
        return found


class GradientStep(HasAccelerated):
    """One accelerated gradient step on a store's parameters.

    `losses` is a function of tensors that returns a dict of tensors. The step minimises `loss` and returns all of them,
    with `gradient_norm` (before clipping). `module` is the network that `losses` evaluates. It is in training mode
    during the step, and in evaluation mode otherwise; with `training`, only that part of it is.

    Example:
        >>> line = nn.Linear(1, 1)
        >>> def losses(x, y):
        ...     return {"loss": (line(x) - y).square().mean()}
        >>> step = GradientStep(ParameterStore(line, OptimizerConfig()), losses, module=line, max_grad_norm=None)
        >>> found = [step(0.1, torch.ones(8, 1), torch.ones(8, 1))["loss"].item() for _ in range(100)]
        >>> found[-1] < 0.01 * found[0]
        True
    """

    def __init__(
        self,
        store: ParameterStore,
        losses: Callable[..., dict[str, Tensor]],
        *,
        module: nn.Module,
        max_grad_norm: float | None,
        training: str = "",
    ) -> None:
        self.store = store
        self.losses = losses
        self.max_grad_norm = max_grad_norm
        self.module = module
        self.training = training
        module.eval()
        self._training = TrainingMode(module.get_submodule(training))
        self._step = Accelerated(self._whole_step if store.is_fused else self._differentiate, module)

    def rebuild(self) -> None:
        """Update to a changed module: see `ParameterStore.follow_module`."""
        self.module.eval()
        self._training = TrainingMode(self.module.get_submodule(self.training))

    def __call__(self, learning_rate: float | Tensor, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        """Make one step. Returns the detached results of `losses` from before the step."""
        if self.store.is_fused:
            return self._step(learning_rate, *inputs, **named)
        found = self._step(*inputs, **named)
        self.store.apply(learning_rate)
        return found

    def _whole_step(self, learning_rate: Tensor, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        found = self._differentiate(*inputs, **named)
        self.store.apply(learning_rate)  # records itself if this function is not recorded
        return found

    def _differentiate(self, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        with self._training:
            found = self.losses(*inputs, **named)
            norm = self.store.differentiate(found["loss"], self.max_grad_norm)
        return {**{name: value.detach() for name, value in found.items()}, "gradient_norm": norm}
