"""Makes functions of tensors fast without changing what they compute. README.md in this folder explains how.

- `Accelerated(function, module)`: takes a function and its network, and is a faster function with the same behaviour.
- `ArrayNetwork(modules)`: for acting; evaluates a chain of layers on numpy arrays.
- `using(mode)`, `report(owner)`, `forget(owner)`: select a mode, report what is accelerated, drop recordings after
  weights were replaced.
- `without_torchs_compiler()`: makes an optimizer without the import of torch's compiler.
- `num_registrations()`: changes when any module gets a new submodule or parameter.
- `layout`, `write_gradients`, `scale_`: memory layout, gradients and in-place scaling of flat parameters.
- `ConvolutionStack`, `WideLinear`: faster layers for image networks, with the results of torch's.

Code outside this package does not import its modules.
"""

from rl_training.accelerate.array_network import ArrayNetwork
from rl_training.accelerate.calls import used_tensors
from rl_training.accelerate.flat import layout, scale_, write_gradients
from rl_training.accelerate.imports import without_torchs_compiler
from rl_training.accelerate.memory import keep_memory
from rl_training.accelerate.modes import Mode, current_mode, describe_machine, mode_problem, using
from rl_training.accelerate.native.compiler import find_compiler
from rl_training.accelerate.native.convolutions import ConvolutionStack
from rl_training.accelerate.native.layers import WideLinear
from rl_training.accelerate.recording import Accelerated, HasAccelerated, declare_pure
from rl_training.accelerate.registrations import num_registrations
from rl_training.accelerate.report import forget, report

__all__ = [
    "Accelerated",
    "ArrayNetwork",
    "ConvolutionStack",
    "HasAccelerated",
    "Mode",
    "WideLinear",
    "current_mode",
    "declare_pure",
    "describe_machine",
    "find_compiler",
    "forget",
    "keep_memory",
    "layout",
    "mode_problem",
    "num_registrations",
    "report",
    "scale_",
    "used_tensors",
    "using",
    "without_torchs_compiler",
    "write_gradients",
]
