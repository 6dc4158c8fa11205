"""This package with one tier of acceleration: as `run_ours.py`, after switching off what the tier does not have.

The switches reach into `rl_training.accelerate` and are for this benchmark only; users choose with `accelerate`.
"""

from __future__ import annotations

import sys
from typing import Any

TIERS = {
    "plain": "plain torch: accelerate=off, acting too",
    "updates_plain": "plain torch updates, acting by numpy",
    "inductor": "torch.compile of the loss functions, acting by numpy",
    "inductor_cpp": "the same with inductor's cpp_wrapper",
    "recorded_torch": "recordings with torch's own operators",
    "recorded": "recordings with numpy's small arithmetic",
    "compiled": "recordings compiled to C, torch's convolutions",
    "convolutions": "and own convolutions: everything, accelerate=auto",
}


def switch(tier: str) -> str:
    """Switch off what a tier does not have; the value of the setting `accelerate`."""
    from rl_training.accelerate import kernels, numpy_kernels, recording
    from rl_training.accelerate.native import convolutions, layers
    from rl_training.policies import parameters

    if tier == "plain":
        return "off"
    if tier in ("updates_plain", "inductor", "inductor_cpp"):
        recording.unknown_owner = lambda function: "switched off by the benchmark"  # type: ignore[assignment]
    if tier.startswith("inductor"):
        import torch
        import torch._inductor.config

        torch._inductor.config.cpp_wrapper = tier.endswith("cpp")
        plain = parameters.GradientStep.__init__

        def compiled(self: Any, store: Any, losses: Any, **rest: Any) -> None:
            plain(self, store, torch.compile(losses, dynamic=False), **rest)

        parameters.GradientStep.__init__ = compiled  # type: ignore[method-assign]
    if tier == "recorded_torch":
        numpy_kernels.numpy_kernel = kernels.numpy_kernel = lambda *_: None
    if tier == "compiled":
        layers.Ready.__bool__ = lambda self: False  # type: ignore[method-assign]
        convolutions.is_ready = layers.is_ready
    return "recorded" if tier in ("updates_plain", "inductor", "inductor_cpp", "recorded_torch", "recorded") else "auto"


def side(task: Any, threads: int, clock: Any) -> None:
    import run_ours

    mode = switch(TIER)
    plain = run_ours.config_of
    run_ours.config_of = lambda *args: {**plain(*args), "accelerate": mode}
    run_ours.side(task, threads, clock)


if __name__ == "__main__":
    TIER = sys.argv.pop(1)
    if TIER not in TIERS:
        sys.exit(f"unknown tier '{TIER}': one of {', '.join(TIERS)}")
    from clock import run

    run(side, ("rl-training", "torch", "gymnasium", "numpy"))
