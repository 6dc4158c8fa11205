"""When a recording is compiled, and the check before the compiled kernels are used."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_training.accelerate.calls import Call, map_tensors, tensors_in
from rl_training.accelerate.modes import Mode
from rl_training.accelerate.native.compiler import NotCompiledError, build, find_compiler
from rl_training.accelerate.native.products import library
from rl_training.accelerate.native.program import Program
from rl_training.accelerate.numpy_kernels import Kernel

if TYPE_CHECKING:
    from rl_training.accelerate.kernels import Mover

SECONDS_BEFORE = 0.3
"""Total time of a recording's calls after which it is compiled; for shorter runs compiling does not pay."""

_compiling = threading.Lock()
"""Compilation is serialised: recordings are compiled one at a time."""


class Takeover:
    """Calls a recording's kernels, compiles them in the background, and then replaces them by the compiled ones.

    `state` are the tensors from before the recording that it writes to. Together with the outputs, they are all that a
    call changes for later code.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        kernels: list[Kernel],
        move: Mover,
        outputs: Any,
        state: Sequence[Tensor],
        mode: Mode = "auto",
    ) -> None:
        self.kernels = kernels
        self.refusal = "" if find_compiler() else "there is no C compiler"
        if mode == "recorded":
            self.refusal = "accelerate is recorded"
        """Why compilation is disabled or its result is not used; empty if enabled."""
        self.is_done = bool(self.refusal)
        """Whether it is decided if compiled kernels are used."""
        self._state = state
        self._results = [*state, *tensors_in(map_tensors(move, outputs))]
        self._make: Callable[[int], Program] = functools.partial(Program, calls, kernels, move, outputs)
        self._forget = move.forget  # so that the check cannot succeed with old results
        self._seconds = 0.0
        self._at_once = mode == "compiled"
        self._thread: threading.Thread | None = None
        self.library: Library | None = None
        """The compiled library; it owns memory that its kernels use."""

    def run(self) -> None:
        """One call of the kernels."""
        if self._thread is not None and not self._thread.is_alive():
            self._take_over()
            return
        begin = time.perf_counter()
        for kernel in self.kernels:
            kernel()
        self._seconds += time.perf_counter() - begin
        is_due = self._at_once or self._seconds > SECONDS_BEFORE
        if self._thread is None and is_due and _compiling.acquire(blocking=self._at_once):
            # no daemon: it must not be killed inside torch when the program ends; it notices the end itself
            self._thread = threading.Thread(target=self._compile, args=(torch.get_num_threads(),))
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads
                _compiling.release()
                self.refusal, self.is_done = str(error), True
            else:
                if self._at_once:
                    self._thread.join()

    def _compile(self, num_threads: int) -> None:
        try:
            self.library = Library(self._make(num_threads))
        except NotCompiledError as error:
            self.refusal = str(error)
        except Exception as error:  # an unexpected recording: fall back to the recorded kernels
            self.refusal = f"{type(error).__name__}: {error}"
        finally:
            _compiling.release()

    def _take_over(self) -> None:
        """Run the recorded and the compiled kernels on the same state; use the compiled ones if results are equal."""
        before = [tensor.clone() for tensor in self._state]
        for kernel in self.kernels:
            kernel()
        self.is_done = True
        if self.library is None:
            return
        after = [tensor.clone() for tensor in self._results]
        self._forget()
        _write(self._state, before)
        for kernel in self.library.kernels:
            kernel()
        if all(map(_equal, self._results, after)):
            self.kernels = self.library.kernels
        else:
            _write(self._results, after)
            self.library = None
            self.refusal = "the compiled kernels gave different results"


class Library:
    """A compiled program. `kernels` are called in order, instead of those of the recording."""

    def __init__(self, program: Program) -> None:
        flags = ("-fopenmp",) if program.num_threads > 1 else ()
        self._library = build("a recording", program.source(), flags)
        self._program = program  # it owns memory
        kernels = library()
        functions = kernels.product, kernels.product_of_some, kernels.product_of_few, kernels.pack
        own = (ctypes.c_void_p * len(functions))(
            *(ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        )
        given = program.pointers.functions
        self._functions = (ctypes.c_void_p * len(given))(*given)  # the library keeps its address
        self._library.set_functions(own, self._functions)
        tensors = program.pointers.tensors
        table = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        self.kernels: list[Kernel] = [
            functools.partial(getattr(self._library, f"segment_{step}"), table) if isinstance(step, int) else step
            for step in program.steps
        ]


def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal; NaN equals NaN, and zero equals minus zero."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
