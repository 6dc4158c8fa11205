"""Suites: the files of the package are right, and a wrong file says all that is wrong with it."""

from __future__ import annotations

import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from rl_training.contracts.errors import ConfigError
from rl_training.experiment.presets import presets
from rl_training.zoo.suites import (
    Normalization,
    Suite,
    get_suite,
    learns_from_data,
    plain_text,
    read_suite,
    suites,
    task_name,
)

CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1")
ALL = {name: get_suite(name) for name in suites()}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


GOOD = """
description: for a test
normalization: [{env_id: CartPole-v1, low: 22.1, high: 500, reference: the most}]
tasks:
  - {preset: ppo/cartpole, settings: {total_timesteps: 1000, algorithm: {gamma: 0.9}}}
  - {preset: dqn/cartpole, judge: best}
"""


def test_a_suite_is_presets_with_other_settings(tmp_path):
    suite = read_suite(written(tmp_path / "mine.yaml", GOOD))
    ppo, dqn = suite.tasks
    assert suite.name == "mine"
    assert ppo.name == "ppo/cartpole total_timesteps=1_000 gamma=0.9"
    assert (ppo.config.total_timesteps, ppo.config.algorithm.gamma) == (1000, 0.9)
    assert ppo.config.algorithm.num_steps == 32, "the preset's other settings stay"
    assert (ppo.judge, dqn.judge) == ("final", "best")
    assert dqn.config == get_suite("classic").select(["dqn/cartpole"])[0].config


def test_a_pattern_stands_for_the_presets_that_are_not_named(tmp_path):
    text = GOOD.replace(
        "  - {preset: dqn/cartpole, judge: best}", "  - preset: '*/cartpole'\n  - {preset: dqn/cartpole, judge: best}"
    )
    suite = read_suite(written(tmp_path / "mine.yaml", text))
    expected = {
        name for name, preset in presets().items() if name.endswith("/cartpole") and not learns_from_data(preset)
    }
    assert {task.preset for task in suite.tasks} == expected
    assert [task.judge for task in suite.tasks if task.preset == "dqn/cartpole"] == ["best"]


def test_all_problems_are_reported_at_once(tmp_path):
    text = """
    description: wrong
    sedes: 3
    evaluation: {points: 0, epsiodes: 2}
    normalization: [{env_id: CartPole-v1, low: 500, high: 500, reference: the most}]
    tasks:
      - {preset: ppo/cartpole, setings: {}}
      - {preset: ppo/cartpole, judge: bets}
    """
    with pytest.raises(ConfigError) as caught:
        read_suite(written(tmp_path / "wrong.yaml", text))
    found = "\n".join(caught.value.problems)
    for part in (
        "unknown key 'sedes'. Did you mean 'seeds'?",
        "evaluation > points: must be >= 1, got 0",
        "evaluation: unknown key 'epsiodes'. Did you mean 'episodes'?",
        "high: must be above low",
        "tasks[0]: unknown key 'setings'. Did you mean 'settings'?",
        "tasks[1] > judge: got 'bets' (str), accepted: final, best. Did you mean 'best'?",
    ):
        assert part in found


def test_problems_with_presets_and_settings_are_reported_at_once(tmp_path):
    text = """
    description: wrong
    normalization: [{env_id: CartPole-v1, low: 22.1, high: 500, reference: the most}]
    tasks:
      - {preset: ppo/cartpol}
      - {preset: "*/nothing"}
      - {preset: ppo/cartpole, settings: {algorithm: {gama: 0.9}}}
      - {preset: ppo/cartpole, settings: {seed: 3, mlflow: true}}
      - {preset: ppo/pendulum}
      - {preset: dqn/atari}
      - {preset: a2c/cartpole}
      - {preset: a2c/cartpole, settings: {total_timesteps: 500_000}}
      - {preset: a2c/cartpole, settings: {env_id: "some_module:CartPole-v1"}}
    """
    with pytest.raises(ConfigError) as caught:
        read_suite(written(tmp_path / "wrong.yaml", text))
    found = "\n".join(caught.value.problems)
    for part in (
        "tasks[0] > preset: there is no preset 'ppo/cartpol'. Did you mean 'ppo/cartpole'?",
        "tasks[1] > preset: no preset matches '*/nothing'",
        "tasks[2] > settings > algorithm: unknown key 'gama'. Did you mean 'gamma'?",
        "tasks[3] > settings: 'seed' cannot differ between tasks; the suite sets it",
        "tasks[3] > settings: 'mlflow' cannot differ between tasks; the suite sets it",
        "tasks[4]: no entry of 'normalization' is for Pendulum-v1",
        "tasks[5] > settings: 'env_id' is required: dqn/atari is a preset for ALE/*",
        "'a2c/cartpole' and 'a2c/cartpole total_timesteps=500_000' have the same settings",
        "would import the module 'some_module'",
    ):
        assert part in found


def test_a_file_that_is_trusted_may_name_a_module(tmp_path):
    text = GOOD.replace("total_timesteps: 1000", "env_id: 'some_module:CartPole-v1'").replace(
        "{env_id: CartPole-v1,",
        "{env_id: 'some_module:CartPole-v1', low: 0, high: 1, reference: x}, {env_id: CartPole-v1,",
    )
    path = written(tmp_path / "mine.yaml", text)
    assert get_suite(str(path), trust=True).tasks[0].config.env_id == "some_module:CartPole-v1"


def test_the_scale_of_an_environment_with_arguments_is_nearer():
    found = {task.preset: task.normalization.low for task in ALL["box2d"].tasks}
    assert found["ppo/lunarlander"] != found["ppo/lunarlander-continuous"]
    assert found["sac/lunarlander-continuous"] == found["ppo/lunarlander-continuous"]
    assert Normalization("X-v0", 10.0, 20.0, "by hand").score(25.0) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (100_000, "100_000"),
        (0.001, "1e-3"),
        (2.5e-5, "2.5e-5"),
        (0.0, "0"),
        (0.25, "0.25"),
        ({"name": "A"}, "{name: A}"),
    ],
)
def test_values_are_written_as_people_write_them(value, text):
    assert plain_text(value) == text
    assert task_name("a/b", {"algorithm": {"x": value}}) == f"a/b x={text}"


# The suites of the package


def test_the_suites_that_are_promised_exist():
    assert {"smoke", "classic", "box2d", "mujoco", "atari"} <= ALL.keys()


@pytest.mark.parametrize("suite", ALL.values(), ids=ALL)
def test_the_protocol_is_what_counts_as_true(suite: Suite):
    assert suite.evaluation.final_episodes >= 20
    assert suite.evaluation.points >= 5
    assert suite.description
    if suite.name != "smoke":
        assert suite.seeds >= 3
    for task in suite.tasks:
        gym.spec(task.config.env_id) if not task.config.env_id.startswith(("ALE/", "Fetch")) else None


def test_classic_has_every_preset_on_classic_control():
    expected = {name for name, preset in presets().items() if preset.env_id in CLASSIC and not learns_from_data(preset)}
    named = {task.preset for task in ALL["classic"].tasks}
    assert named == expected
    assert {task.name for task in ALL["classic"].tasks} >= expected, "each as it is"


def test_the_other_suites_have_what_they_are_for():
    mujoco = {(task.config.algo, task.config.env_id, task.config.total_timesteps) for task in ALL["mujoco"].tasks}
    assert mujoco >= {
        ("sac", "HalfCheetah-v4", 100_000),
        ("td3", "HalfCheetah-v4", 100_000),
        ("ppo", "HalfCheetah-v4", 1_000_000),
        ("ppo", "Hopper-v4", 1_000_000),
    }
    atari = {(task.config.algo, task.config.env_id) for task in ALL["atari"].tasks}
    games = ("ALE/Pong-v5", "ALE/Breakout-v5")
    assert atari >= {(algo, game) for algo in ("ppo", "dqn", "qrdqn", "rainbow") for game in games}
    box2d = {task.preset for task in ALL["box2d"].tasks}
    assert box2d == {name for name, p in presets().items() if p.env_id.startswith(("LunarLander", "BipedalWalker"))}


def test_smoke_is_small_and_of_every_kind():
    smoke = ALL["smoke"]
    assert len(smoke.tasks) * smoke.seeds <= 10
    assert sum(task.config.total_timesteps for task in smoke.tasks) * smoke.seeds <= 300_000
    assert {task.config.env_id for task in smoke.tasks} <= {"CartPole-v1", "Pendulum-v1"}, "no extra is needed"
    assert len({task.config.algo for task in smoke.tasks}) >= 3


SCALES = {
    (scale.env_id, tuple(scale.env_kwargs.items())): scale
    for suite in ALL.values()
    for scale in (task.normalization for task in suite.tasks)
    if not scale.env_id.startswith(("ALE/", "Fetch"))  # minutes to play; their source is named in the suite
}


def played(scale: Normalization):
    """Classic control takes seconds, the others minutes."""
    marks = [] if scale.env_id in CLASSIC else [pytest.mark.learning]
    return pytest.param(scale, 30 if not marks else 100, id=f"{scale.env_id} {scale.env_kwargs}", marks=marks)


@pytest.mark.parametrize(("scale", "episodes"), [played(scale) for scale in SCALES.values()])
def test_low_is_what_random_actions_get(scale: Normalization, episodes: int):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = gym.make(scale.env_id, **scale.env_kwargs)
    env.action_space.seed(1)
    returns = []
    for seed in range(episodes):
        env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    error = float(np.std(returns)) / episodes**0.5
    assert abs(np.mean(returns) - scale.low) <= 4 * error + 0.01 * (scale.high - scale.low)


def test_high_is_the_threshold_where_it_says_so():
    for scale in SCALES.values():
        if scale.reference == "Gymnasium's reward threshold":
            assert gym.spec(scale.env_id).reward_threshold == scale.high


def test_patterns_keep_recorded_data_apart(tmp_path):
    """With a dataset a pattern means presets with total_updates, without one the others."""
    text = """
    description: for a test
    normalization: [{env_id: CartPole-v1, low: 22.1, high: 500, reference: the most}]
    tasks:
      - {preset: "*/cartpole"}
      - {preset: "*/cartpole", settings: {dataset: a.npz}}
      - {preset: "*/cartpole", settings: {dataset: b.npz}}
    """
    tasks = read_suite(written(tmp_path / "mine.yaml", text)).tasks
    online = {task.preset for task in tasks if task.config.dataset is None}
    recorded = {task.preset for task in tasks if task.config.dataset == "a.npz"}
    assert {"ppo/cartpole", "dqn/cartpole"} <= online
    assert {"bc/cartpole", "iql/cartpole"} <= recorded
    assert not online & recorded
    assert all(task.config.total_updates > 0 for task in tasks if task.preset in recorded)
    assert all(task.config.budget == task.config.total_updates for task in tasks if task.preset in recorded)
    assert len({task.name for task in tasks}) == len(tasks)
