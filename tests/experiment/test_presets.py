"""Presets: one tree, found by what they are for, saying only what differs from the defaults."""

from __future__ import annotations

import fnmatch
import os
import re
from pathlib import Path
from typing import Any

import pytest

from rl_training.algorithms.registry import registry
from rl_training.contracts.errors import ConfigError
from rl_training.experiment.config import Layer, TrainConfig, resolve
from rl_training.experiment.presets import Preset, find_preset, get_preset, presets, resolve_with_preset

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(presets())

PROMISED = [
    ("ppo", "CartPole-v1", {}),
    ("ppo", "Pendulum-v1", {}),
    ("ppo", "LunarLander-v3", {}),
    ("ppo", "LunarLander-v3", {"continuous": True}),
    ("ppo", "Acrobot-v1", {}),
    ("ppo", "MountainCarContinuous-v0", {}),
    ("ppo", "BipedalWalker-v3", {}),
    ("ppo", "HalfCheetah-v5", {}),
    ("ppo", "Hopper-v5", {}),
    ("ppo", "InvertedPendulum-v5", {}),
    ("a2c", "CartPole-v1", {}),
    *[
        (algo, env_id, {})
        for algo in ("dqn", "qrdqn")
        for env_id in ("CartPole-v1", "MountainCar-v0", "LunarLander-v3", "Acrobot-v1")
    ],
    *[
        (algo, env_id, {})
        for algo in ("c51", "iqn", "rainbow")
        for env_id in ("CartPole-v1", "LunarLander-v3", "Acrobot-v1")
    ],
    *[(algo, "LunarLander-v3", {"continuous": True}) for algo in ("ddpg", "td3", "sac")],
    ("drqv2", "Pendulum-v1", {"render_mode": "rgb_array"}),
    *[
        (algo, f"ALE/{game}", {})
        for algo in ("ppo", "dqn", "qrdqn", "rainbow")
        for game in ("Pong-v5", "Breakout-v5", "*")
    ],
    *[(algo, "ALE/*", {}) for algo in ("a2c", "c51", "iqn")],
    *[
        (algo, env_id, {})
        for algo in ("ddpg", "td3", "sac")
        for env_id in (
            "Pendulum-v1",
            "MountainCarContinuous-v0",
            "BipedalWalker-v3",
            "HalfCheetah-v5",
            "Hopper-v5",
            "Walker2d-v5",
            "Ant-v5",
        )
    ],
]


def leaves(data: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Values by their place; schedules and environment arguments are values."""
    section = isinstance(data, dict) and "schedule" not in data and path[-1:] != ("env_kwargs",)
    if not section:
        return {path: data}
    return {place: value for key, item in data.items() for place, value in leaves(item, (*path, key)).items()}


def resolved(preset: Preset) -> TrainConfig:
    """The preset's config; one for a family, on a member of it."""
    env_id = preset.env_id.replace("*", "Pong-v5")
    return resolve([preset.layer(), *[Layer({"env_id": env_id}, "test")] * preset.is_family])


@pytest.mark.parametrize(("algo", "env_id", "kwargs"), PROMISED)
def test_what_was_promised_is_there(algo: str, env_id: str, kwargs: dict[str, Any]) -> None:
    preset = find_preset(algo, env_id, kwargs)
    assert preset is not None
    assert (preset.algo, preset.env_id, preset.env_kwargs) == (algo, env_id, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_loads_and_is_named_by_its_algorithm(name: str) -> None:
    preset = get_preset(name)
    config = resolved(preset)
    assert config.algo == preset.algo == name.split("/")[0]
    assert fnmatch.fnmatchcase(config.env_id, preset.env_id)
    assert config.total_timesteps == preset.total_timesteps
    assert config.env_kwargs == preset.env_kwargs
    assert re.fullmatch(r"[a-z0-9_]+/[a-z0-9-]+", name), "named for people"


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_states_differences_only(name: str) -> None:
    preset = get_preset(name)
    config = resolved(preset)
    default = leaves(TrainConfig(algo=preset.algo, env_id=config.env_id).to_dict())
    found = leaves(config.to_dict())
    said = set(leaves(preset.data)) - {("algo",), ("env_id",)}
    assert said <= set(found)
    repeated = [" > ".join(place) for place in sorted(said) if place in default and found[place] == default[place]]
    assert not repeated, f"{name} repeats defaults: {', '.join(repeated)}"


def test_a_repeated_default_would_be_found() -> None:
    """The walk above sees into sections and takes schedules as one value."""
    data = {"seed": 0, "algorithm": {"gamma": 0.99, "network": {"shared": True}, "clip_coef": {"schedule": "linear"}}}
    assert leaves(data) == {
        ("seed",): 0,
        ("algorithm", "gamma"): 0.99,
        ("algorithm", "network", "shared"): True,
        ("algorithm", "clip_coef"): {"schedule": "linear"},
    }


def test_no_two_presets_are_for_the_same_thing() -> None:
    keys = [(preset.algo, preset.env_id, repr(sorted(preset.env_kwargs.items()))) for preset in presets().values()]
    assert len(keys) == len(set(keys))


def test_found_by_environment_and_arguments() -> None:
    """LunarLander's two action spaces share one id."""
    discrete = find_preset("ppo", "LunarLander-v3")
    continuous = find_preset("ppo", "LunarLander-v3", {"continuous": True})
    assert discrete is not None
    assert continuous is not None
    assert discrete.path != continuous.path
    assert "continuous" not in discrete.env_kwargs
    assert continuous.env_kwargs == {"continuous": True}
    assert find_preset("ppo", "LunarLander-v3", {"continuous": False}) == discrete
    assert find_preset("ppo", "NoSuchThing-v0") is None
    assert find_preset("a2c", "InvertedPendulum-v4") is None


def test_a_family_is_for_every_member_without_a_preset_of_its_own() -> None:
    pong, other = find_preset("ppo", "ALE/Pong-v5"), find_preset("ppo", "ALE/Seaquest-v5")
    assert pong is not None
    assert other is not None
    assert (pong.name, other.name) == ("ppo/pong", "ppo/atari")
    config, found = resolve_with_preset([Layer({"algo": "ppo", "env_id": "ALE/Seaquest-v5"}, "command line")])
    assert found == other
    assert config.env_id == "ALE/Seaquest-v5"
    assert not config.eval_deterministic
    with pytest.raises(ConfigError, match="preset ppo/atari: 'env_id' is required"):
        resolve([other.layer()])


@pytest.mark.parametrize(
    ("algo", "env_id", "kwargs", "expected"),
    [
        ("ppo", "ALE/Breakout-v5", {"mode": 4}, "ppo/breakout"),
        ("ppo", "ALE/Seaquest-v5", {"mode": 4, "difficulty": 1}, "ppo/atari"),
        ("ppo", "ALE/Seaquest-v5", {"obs_type": "ram"}, None),  # not the images that it is for
        ("ppo", "LunarLander-v3", {"gravity": -5.0}, "ppo/lunarlander"),
        ("ppo", "LunarLander-v3", {"gravity": -5.0, "continuous": True}, "ppo/lunarlander-continuous"),
        ("ppo", "LunarLander-v3", {"gravity": -5.0, "continuous": False}, "ppo/lunarlander"),
        ("dqn", "LunarLander-v3", {"continuous": True}, None),  # no preset of DQN says so, but others do
        ("sac", "LunarLander-v3", {}, None),
        ("sac", "LunarLander-v3", {"continuous": False}, None),
        ("sac", "LunarLander-v3", {"continuous": True, "enable_wind": True}, "sac/lunarlander-continuous"),
        ("drqv2", "Pendulum-v1", {}, None),
        ("drqv2", "Pendulum-v1", {"render_mode": "rgb_array", "g": 5.0}, "drqv2/pendulum-pixels"),
        ("ppo", "Pendulum-v1", {"render_mode": "rgb_array"}, "ppo/pendulum"),
        ("ppo", "Pendulum-v1", {"g": 5.0}, "ppo/pendulum"),
    ],
)
def test_a_preset_is_for_more_arguments_than_its_own(
    algo: str, env_id: str, kwargs: dict[str, Any], expected: str | None
) -> None:
    found = find_preset(algo, env_id, kwargs)
    assert (None if found is None else found.name) == expected


def test_arguments_that_go_further_are_kept() -> None:
    layer = Layer({"algo": "ppo", "env_id": "ALE/Breakout-v5", "env_kwargs": {"mode": 4}}, "command line")
    config, preset = resolve_with_preset([layer])
    assert preset is not None
    assert config.env_kwargs == {"mode": 4}
    assert not config.eval_deterministic
    assert config.vectorization == "sync", "ale-py's vector environment has one mode"


def test_layers_say_which_preset_lies_underneath() -> None:
    base = {"algo": "ppo", "env_id": "LunarLander-v3"}
    _, discrete = resolve_with_preset([Layer(base, "file")])
    config, continuous = resolve_with_preset(
        [Layer(base, "file"), Layer({"env_kwargs": {"continuous": True}}, "command line")]
    )
    assert discrete == find_preset("ppo", "LunarLander-v3")
    assert continuous == find_preset("ppo", "LunarLander-v3", {"continuous": True})
    assert config.env_kwargs == {"continuous": True}
    config, none = resolve_with_preset([Layer({"algo": "ppo", "env_id": "NoSuchThing-v0"}, "file")])
    assert none is None
    assert config == TrainConfig(algo="ppo", env_id="NoSuchThing-v0")


@pytest.mark.parametrize("name", [name for name in NAMES if get_preset(name).env_id.startswith("ALE/")])
def test_games_are_not_evaluated_without_chance(name: str) -> None:
    """They are deterministic: an agent that is as well may play one and the same game for ever."""
    config = resolved(get_preset(name))
    assert config.eval_epsilon > 0 or not config.eval_deterministic


def test_a_wrong_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'ppo/cartpole'"):
        get_preset("ppo/cartpol")
    assert get_preset("ppo/cartpole").env_id == "CartPole-v1"


def test_configs_at_the_root_leads_to_the_same_files() -> None:
    configs = ROOT / "configs"
    found = sorted(configs.glob("*/*.yaml"))
    assert sorted(f"{path.parent.name}/{path.stem}" for path in found) == NAMES
    for path in found:
        preset = get_preset(f"{path.parent.name}/{path.stem}")
        assert os.path.samefile(path, preset.path)


def test_there_is_a_preset_for_every_core_algorithm() -> None:
    core = {name for name, spec in registry().items() if spec.layer == "core"}
    assert core <= {preset.algo for preset in presets().values()}
