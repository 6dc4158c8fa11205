"""Every algorithm learns the same to the bit with compiled recordings as with recorded kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_training.accelerate.native.takeover import Takeover
from rl_training.algorithms.registry import registry
from rl_training.api.session import train
from rl_training.contracts.spec import AlgorithmSpec
from rl_training.testing.resume import differences, only_run
from tests.accelerate.native_harness import HAS_COMPILER, compile_now
from tests.contracts.test_loose_state import make_config

COMPILED_AFTER = 3
"""Calls of a recording before it is compiled: it takes over in the middle of a run."""


REFUSED = {"crossq": "the compiled kernels gave different results"}
"""Algorithms with a function that is recorded, but not compiled, because its bits would differ."""


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler on this machine")
@pytest.mark.parametrize("spec", registry().values(), ids=lambda spec: spec.name)
def test_every_algorithm_learns_the_same_when_it_is_compiled(
    spec: AlgorithmSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(spec, tmp_path / "plain")
    train(config, progress=False)
    calls: dict[Takeover, int] = {}
    refusals: list[str] = []
    plainly = Takeover.run

    def run(own: Takeover) -> None:
        """As `Takeover.run`, but compiled within one of the first calls."""
        calls[own] = calls.get(own, 0) + 1
        if calls[own] <= COMPILED_AFTER:
            plainly(own)
            return
        compile_now(own)
        own._take_over()
        refusals.append(own.refusal)

    monkeypatch.setattr(Takeover, "run", run)
    train(config.replace(output_dir=tmp_path / "compiled"), progress=False)
    runs = [only_run(tmp_path / name) for name in ("plain", "compiled")]
    assert set(refusals) <= {"", REFUSED.get(spec.name, "")}
    assert differences(*runs, ignoring=("/config", "/callbacks/StopAfterSeconds")) == []
    assert refusals, "nothing was compiled, not even a step of the optimizer"
