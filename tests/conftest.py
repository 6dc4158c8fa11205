"""What holds in every test."""

import pytest

from rl_training.accelerate.native import takeover


@pytest.fixture(autouse=True)
def compile_nothing_in_the_background(monkeypatch):
    """Recordings are compiled where a test asks for it, not because a machine is so slow that it would pay.

    `tests/accelerate` compiles what it tests; every algorithm is compiled in `test_compiled.py`.
    """
    monkeypatch.setattr(takeover, "SECONDS_BEFORE", float("inf"))
