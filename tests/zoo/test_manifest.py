"""Manifests: what is written is read back, what is wrong is refused, and the config hash means something."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rl_training.contracts.errors import ConfigError
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.presets import presets
from rl_training.zoo.manifest import (
    Manifest,
    check_commits,
    config_hash,
    merge,
    pick,
    read_manifest,
    read_results,
    results_dir,
    write_manifest,
)
from rl_training.zoo.suites import suites
from tests.zoo.manifests import run_result, task_result


@pytest.fixture
def manifest() -> Manifest:
    changed = task_result("dqn/cartpole", run_result(0, 7.0), settings={"algorithm": {"double": True}}, judge="final")
    return Manifest(1, "some", [task_result("ppo/cartpole", run_result(0, 50.0), run_result(1, 70.0)), changed])


def test_round_trip(manifest: Manifest, tmp_path: Path) -> None:
    write_manifest(tmp_path / "some.json", manifest)
    assert read_manifest(tmp_path / "some.json") == manifest
    lines = (tmp_path / "some.json").read_text(encoding="utf-8").splitlines()
    assert any("[[500, 25.0, 0.5], [1000, 50.0, 0.25]]" in line for line in lines), "a curve is one line"
    assert manifest.tasks[1].name == "dqn/cartpole double=true"
    assert manifest.tasks[0].scores() == [50.0, 70.0]
    assert manifest.tasks[0].scores("best") == []


def test_a_wrong_manifest_is_refused_with_all_problems(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    write_manifest(path, manifest)
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["tasks"][0]["config_hash"]
    data["tasks"][0]["runs"][1]["sed"] = 1
    data["tasks"][1]["runs"][0]["final"]["mean"] = "high"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_manifest(path)
    found = "\n".join(caught.value.problems)
    assert "tasks[0]: 'config_hash' is required" in found
    assert "tasks[0] > runs[1]: unknown key 'sed'. Did you mean 'seed'?" in found
    assert "tasks[1] > runs[0] > final > mean: expected a number, got 'high'" in found


def test_what_contradicts_itself_and_newer_formats_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    twice = dataclasses.replace(manifest.tasks[0], runs=[run_result(3, 1.0), run_result(3, 2.0)])
    write_manifest(tmp_path / "twice.json", dataclasses.replace(manifest, tasks=[twice, twice]))
    with pytest.raises(ConfigError, match="duplicate seed 3"):
        read_manifest(tmp_path / "twice.json")
    write_manifest(tmp_path / "newer.json", dataclasses.replace(manifest, format=99))
    with pytest.raises(ConfigError, match="has format 99, this version reads up to 1"):
        read_manifest(tmp_path / "newer.json")


def test_the_hash_is_of_what_decides_the_numbers() -> None:
    config = TrainConfig(algo="ppo", env_id="CartPole-v1")
    same = config.replace(seed=5, eval_every=7, output_dir=Path("elsewhere"), num_threads=2, tensorboard=False)
    assert config_hash(same) == config_hash(config)
    others = [
        config.replace(env_id="Acrobot-v1"),
        config.replace(total_timesteps=1),
        config.replace(normalize_obs=True),
        config.replace(action_masks=True),
        config.replace(algorithm=dataclasses.replace(config.algorithm, gamma=0.5)),
    ]
    assert len({config_hash(other) for other in [config, *others]}) == 6


def test_merging_adds_seeds_and_replaces_what_was_measured_otherwise(manifest: Manifest) -> None:
    ppo = task_result("ppo/cartpole", run_result(1, 71.0), run_result(2, 72.0))
    dqn = task_result("dqn/cartpole", run_result(5, 8.0), settings={"algorithm": {"double": True}}, config_hash="other")
    a2c = task_result("a2c/cartpole", run_result(0, 1.0))
    merged = merge(manifest, Manifest(1, "some", [ppo, dqn, a2c]))
    assert [task.name for task in merged.tasks] == ["ppo/cartpole", "dqn/cartpole double=true", "a2c/cartpole"]
    assert merged.tasks[0].scores() == [50.0, 71.0, 72.0]
    assert [run.seed for run in merged.tasks[1].runs] == [5], "seeds with other settings do not mix"


def test_runs_without_a_commit_are_replaced_and_never_added(manifest: Manifest) -> None:
    check_commits(manifest, "here")
    bare = task_result("ppo/cartpole", run_result(0, 1.0, git_commit=None), run_result(1, 1.0, git_commit=None))
    with pytest.raises(ConfigError) as caught:
        check_commits(Manifest(1, "some", [bare]), "here")
    assert [problem.split(";")[0] for problem in caught.value.problems] == [
        "here: ppo/cartpole seed 0 has no git commit",
        "here: ppo/cartpole seed 1 has no git commit",
    ]
    new = task_result("ppo/cartpole", run_result(1, 70.0))
    assert merge(Manifest(1, "some", [bare]), Manifest(1, "some", [new])).tasks == [new]


def test_the_result_to_show_has_the_settings_of_today_and_the_most_seeds() -> None:
    old = task_result("ppo/cartpole", *(run_result(seed, 1.0) for seed in range(5)), config_hash="old")
    few = task_result("ppo/cartpole", run_result(0, 2.0))
    many = task_result("ppo/cartpole", run_result(0, 3.0), run_result(1, 3.0))
    assert pick([old, few, many], few.config_hash) is many
    assert pick([old], few.config_hash) is old
    assert pick([], "any") is None


def test_the_results_of_the_package_are_of_presets_and_suites() -> None:
    found = read_results(results_dir())
    assert found
    assert {manifest.suite for manifest in found} <= set(suites())
    for manifest in found:
        for task in manifest.tasks:
            assert task.preset in presets()
            assert task.runs, f"{task.name} has no result"


def offline_config(**changes):
    settings = {"algo": "dqn", "env_id": "CartPole-v1", "dataset": "here/a.npz", "total_updates": 10, **changes}
    return TrainConfig(**settings)


def test_the_hash_knows_the_data_and_the_updates():
    plain = config_hash(offline_config())
    assert config_hash(offline_config(dataset="there/a.npz")) == plain, "the folder does not matter"
    for changes in ({"dataset": "here/b.npz"}, {"total_updates": 11}, {"data": {"reward_scale": 2.0}}):
        assert config_hash(offline_config(**changes)) != plain


def test_runs_on_different_data_are_not_one_task():
    runs = [run_result(seed, 1.0, env_steps=0, updates=10, data_hash=f"hash {seed}") for seed in (0, 1)]
    assert "their data differs" in " ".join(task_result("ppo/cartpole", *runs).problems())
    same = [dataclasses.replace(run, data_hash="one") for run in runs]
    assert task_result("ppo/cartpole", *same).problems() == []
    old, new = task_result("ppo/cartpole", *same), task_result("ppo/cartpole", runs[1])
    merged = merge(Manifest(1, "s", [old]), Manifest(1, "s", [new]))
    assert [run.data_hash for run in merged.tasks[0].runs] == ["hash 1"], "results with other data are replaced"
