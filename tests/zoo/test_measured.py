"""Whether a preset is measured: as it ships, with earlier settings, without a commit, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import generate_docs

from rl_training.experiment.presets import get_preset, presets
from rl_training.zoo.manifest import Manifest, TaskResult, read_results, results_dir
from rl_training.zoo.measured import HEADER, measured, measured_presets, shipped_hash
from tests.zoo.manifests import run_result, task_result

CARTPOLE = get_preset("ppo/cartpole")


@pytest.mark.parametrize(
    ("tasks", "state", "text"),
    [
        ([task_result("ppo/cartpole", run_result(0, 1.0), run_result(1, 1.0))], "measured", "yes, 2 seeds"),
        (
            [task_result("ppo/cartpole", run_result(0, 1.0), config_hash="old")],
            "stale",
            "with earlier settings, 1 seed",
        ),
        (
            [task_result("ppo/cartpole", run_result(0, 1.0, git_commit=None))],
            "no commit",
            "without a recorded commit, 1 seed",
        ),
        ([task_result("ppo/cartpole", run_result(0, 1.0), settings={"total_timesteps": 7})], "not measured", "not yet"),
        ([task_result("ppo/cartpole")], "not measured", "not yet"),
    ],
)
def test_states(tasks: list[TaskResult], state: str, text: str) -> None:
    found = measured(CARTPOLE, [Manifest(1, "some", tasks)])
    assert (found.state, found.text) == (state, text)


def test_current_results_come_before_stale_ones_with_more_seeds() -> None:
    old = task_result("ppo/cartpole", *(run_result(seed, 1.0) for seed in range(5)), config_hash="old")
    new = task_result("ppo/cartpole", run_result(0, 1.0))
    found = measured(CARTPOLE, [Manifest(1, "one", [old]), Manifest(1, "two", [new])])
    assert found.task is new


def test_presets_that_nobody_can_afford_here_say_so() -> None:
    assert measured(get_preset("dqn/breakout"), []).text == "no, published settings"
    assert shipped_hash(get_preset("dqn/atari")) == ""


def test_the_header_is_before_the_first_setting_and_replaced() -> None:
    found = measured(CARTPOLE, [])
    once = found.with_header("# Source.\n# More.\nalgo: ppo\nenv_id: X\n")
    assert once == "# Source.\n# More.\n# Measured: not yet.\nalgo: ppo\nenv_id: X\n"
    assert found.with_header(once) == once
    assert found.with_header(once.replace("not yet", "yes, 9 seeds")) == once


def test_the_header_of_each_preset_agrees_with_the_manifests() -> None:
    """It fails when a preset is new, or changed so that its result is stale."""
    for about in measured_presets(read_results(results_dir())).values():
        if about.preset.path.is_relative_to(generate_docs.PRESETS):
            lines = about.preset.path.read_text(encoding="utf-8").splitlines()
            said = [line for line in lines if line.startswith(HEADER)]
            assert said == [f"{HEADER}{about.text}."], f"{about.preset.name}: run `python scripts/generate_docs.py`"


def test_headers_are_generated_for_the_presets_of_the_package(tmp_path: Path) -> None:
    found = generate_docs.headers(tmp_path)  # as if nothing had been measured
    assert {path.stem for path in found} >= {name.split("/")[1] for name in presets()}
    assert found[CARTPOLE.path].text.count("# Measured: not yet.\n") == 1
