"""`TrainConfig`: typed, lossless, checked all at once, and resolved from layers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import rl_training
from rl_training import A2C
from rl_training.algorithms.a2c import A2CConfig
from rl_training.algorithms.ppo import PPOConfig
from rl_training.algorithms.registry import registry
from rl_training.cli import load_config
from rl_training.cli.train_command import parse_train
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.schedule import Constant, Cosine, Linear, Piecewise
from rl_training.envs.wrappers import WrapperConfig
from rl_training.experiment.config import Layer, TrainConfig, read_config, resolve
from rl_training.experiment.presets import find_preset, resolve_with_preset
from rl_training.experiment.schema import default_of, is_section, to_plain
from rl_training.experiment.yaml_io import parse_yaml
from rl_training.policies.optimizers import OptimizerConfig


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def reread(config: TrainConfig) -> TrainConfig:
    return TrainConfig.from_dict(parse_yaml(config.to_yaml(), "test"))


def problems_of(*layers: Layer | dict[str, Any]) -> list[str]:
    given = [layer if isinstance(layer, Layer) else Layer(layer, "my.yaml") for layer in layers]
    with pytest.raises(ConfigError) as caught:
        resolve(given)
    return caught.value.problems


# Defaults


def test_the_four_names_of_the_contract_are_enough(tmp_path: Path) -> None:
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", seed=7, output_dir=tmp_path)
    assert (config.algo, config.env_id, config.seed, config.output_dir) == ("ppo", "CartPole-v1", 7, tmp_path)
    assert isinstance(config.algorithm, PPOConfig)
    assert config.algorithm == PPOConfig()
    assert config.num_envs == registry()["ppo"].default_num_envs


def test_the_algorithm_section_is_the_algorithms_own_type() -> None:
    assert isinstance(TrainConfig(algo="a2c", env_id="CartPole-v1").algorithm, A2CConfig)
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", algorithm={"clip_coef": 0.1})  # type: ignore[arg-type]
    assert config.algorithm == PPOConfig(clip_coef=0.1)


def test_configs_do_not_share_their_mutable_defaults() -> None:
    one, two = (TrainConfig(algo="ppo", env_id="CartPole-v1") for _ in range(2))
    one.env_kwargs["x"] = 1
    one.wrappers.append(WrapperConfig("ClipReward"))
    one.algorithm.gamma = 0.5
    assert two == TrainConfig(algo="ppo", env_id="CartPole-v1")


def test_a_string_is_accepted_for_the_output_directory() -> None:
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", output_dir="some/where")  # type: ignore[arg-type]
    assert config.output_dir == Path("some/where")


# Lossless round trip


def a_config_that_differs_everywhere() -> TrainConfig:
    return TrainConfig(
        algo="ppo",
        env_id="My Env/with: odd # name-v0",
        seed=2**40,
        total_timesteps=123_457,
        num_envs=3,
        output_dir=Path("out put/1e-3"),
        device="cpu",
        num_threads=2,
        env_kwargs={
            "text": "1e-3",
            "number": 1e-3,
            "yes": "yes",
            "flag": True,
            "nothing": None,
            "void": "null",
            "list": [1, "1", 1.0, [True, "true"]],
            "map": {"100_000": "100_000", "deep": {"date": "2024-01-01"}},
            "tiny": 5e-324,
            "infinite": float("inf"),
        },
        wrappers=[WrapperConfig("TimeLimit", {"max_episode_steps": 7}), WrapperConfig("ClipReward", {"max_reward": 1})],
        vectorization="async",
        normalize_obs=True,
        normalize_reward=True,
        normalize_clip=1 / 3,
        eval_every=1,
        stop_reward=-0.0,
        stop_patience=2,
        max_seconds=1e-5,
        tensorboard=False,
        algorithm=PPOConfig(
            learning_rate=Linear(3e-4, 1e-5, until=0.5),
            clip_coef=Piecewise(((0.0, 0.3), (0.25, 0.2), (1.0, 0.1))),
            max_grad_norm=None,
            target_kl=0.015,
            box_actions="squash",
            network={"actor_sizes": [7], "critic_sizes": [5, 3], "activation": "gelu"},  # type: ignore[arg-type]
        ),
    )


def test_yaml_round_trip_is_lossless() -> None:
    config = a_config_that_differs_everywhere()
    again = reread(config)
    assert again == config
    assert again.to_yaml() == config.to_yaml()
    assert isinstance(again.env_kwargs["list"][1], str)
    assert isinstance(again.env_kwargs["list"][2], float)
    assert again.algorithm.network.actor_sizes == (7,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("algo", registry())
def test_every_algorithms_defaults_survive(algo: str) -> None:
    config = TrainConfig(algo=algo, env_id="CartPole-v1")
    assert reread(config) == config


@pytest.mark.parametrize(
    "schedule", [Constant(0.1), Linear(1e-3), Linear(1.0, 0.5, 0.25), Cosine(1e-3, 1e-5), Piecewise(((0.1, 1.0),))]
)
def test_schedules_are_typed_values_that_survive(schedule: Any) -> None:
    config = TrainConfig(algo="ppo", env_id="CartPole-v1", algorithm=PPOConfig(learning_rate=schedule))
    again = reread(config).algorithm
    assert isinstance(again, PPOConfig)
    assert again.learning_rate == schedule
    assert type(again.learning_rate) is type(schedule)


@pytest.mark.parametrize("text", ["linear_3e-4", "lambda f: f", "__import__('os').getcwd()", "{schedule: linear}"])
def test_strings_are_not_schedules(text: str) -> None:
    found = problems_of({"algo": "ppo", "env_id": "X", "algorithm": {"learning_rate": text}})
    assert len(found) == 1
    assert "algorithm > learning_rate: expected a number or a schedule" in found[0]


def test_every_field_is_written() -> None:
    data = parse_yaml(TrainConfig(algo="ppo", env_id="CartPole-v1").to_yaml(), "test")
    assert set(data) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(data["algorithm"]) == {field.name for field in dataclasses.fields(PPOConfig)}


def test_numbers_in_files_may_be_written_as_people_write_them(tmp_path: Path) -> None:
    text = (
        "algo: ppo\nenv_id: CartPole-v1\ntotal_timesteps: 1e6\nlog_every: 100_000\nstop_reward: 5\n"
        "algorithm: {learning_rate: 1e-3, gamma: 1}\n"
    )
    config = read_config(write(tmp_path / "c.yaml", text))
    assert (config.total_timesteps, config.log_every) == (1_000_000, 100_000)
    assert isinstance(config.total_timesteps, int)
    assert isinstance(config.stop_reward, float)
    assert config.algorithm.learning_rate == 1e-3  # type: ignore[attr-defined]
    assert isinstance(config.algorithm.gamma, float)


# Problems


def test_all_problems_are_reported_at_once_with_file_key_accepted_values_and_nearest_name(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml",
        """
algo: ppo
env_id: CartPole-v1
sed: 1
seed: many
total_timesteps: 1.5
num_envs: 0
normalize_obs: 1
vectorization: synch
eval_every: 0
stop_reward: 100
wrappers: [{name: TimeLimitt}]
env_kwargs: [1]
clip_coef: 0.1
algorithm:
  lerning_rate: 1e-3
  gamma: 1.5
  learning_rate: {schedule: lineal, start: 1}
  clip_coef: {schedule: linear, start: -1}
  network: {activation: relo, widths: [3]}
  optimizer: {betas: [0.9]}
""",
    )
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    found = caught.value.problems
    expected = [
        f"{path}: unknown key 'sed'. Did you mean 'seed'?",
        f"{path} > seed: expected a whole number, got 'many' (str)",
        f"{path} > total_timesteps: expected a whole number, got 1.5 (float)",
        f"{path} > num_envs: must be >= 1 and <= 65,536, got 0",
        f"{path} > normalize_obs: expected true or false, got 1 (int)",
        f"{path} > vectorization: got 'synch' (str), accepted: sync, async, native. Did you mean 'sync'?",
        f"{path} > stop_reward: needs evaluations, but eval_every is 0; set eval_every",
        f"{path} > wrappers: unknown wrapper 'TimeLimitt'. Did you mean 'TimeLimit'?",
        f"{path} > env_kwargs: expected a mapping, got [1] (list)",
        f"{path}: 'clip_coef' is a setting of the algorithm; move it to the section 'algorithm'",
        f"{path} > algorithm: unknown key 'lerning_rate'. Did you mean 'learning_rate'?",
        f"{path} > algorithm > gamma: must be >= 0 and <= 1, got 1.5",
        f"{path} > algorithm > learning_rate: a schedule needs 'schedule: <name>' with one of constant, linear",
        f"{path} > algorithm > clip_coef: must be > 0, got -1.0",
        f"{path} > algorithm > network > activation: got 'relo' (str), accepted: tanh, relu",
        f"{path} > algorithm > network: unknown key 'widths'. Accepted: activation, actor, actor_dropout, actor_kwargs",
        f"{path} > algorithm > optimizer > betas: expected a list of 2 values",
    ]
    for start in expected:
        assert [text for text in found if text.startswith(start)], f"missing: {start}\nin:\n{caught.value}"
    assert len(found) == len(expected), caught.value
    assert str(caught.value) == "\n".join(found)


def test_problems_of_several_layers_each_name_their_own_source() -> None:
    found = problems_of(
        Layer({"algo": "ppo", "env_id": "CartPole-v1", "sead": 1, "eval_every": 0}, "base.yaml"),
        Layer({"seed": "x", "stop_reward": 1, "algorithm": {"gama": 1}}, "top.yaml"),
    )
    assert sorted(found) == [
        "base.yaml: unknown key 'sead'. Did you mean 'seed'?",
        "top.yaml > algorithm: unknown key 'gama'. Did you mean 'gamma'?",
        "top.yaml > seed: expected a whole number, got 'x' (str)",
        "top.yaml > stop_reward: needs evaluations, but eval_every is 0; set eval_every",
    ]


def test_an_algorithm_section_is_checked_even_if_a_later_layer_names_the_algorithm() -> None:
    found = problems_of(
        Layer({"algorithm": {"clip_coff": 0.1}}, "file.yaml"),
        Layer({"algo": "ppo", "env_id": "CartPole-v1"}, "command line"),
    )
    assert found == ["file.yaml > algorithm: unknown key 'clip_coff'. Did you mean 'clip_coef'?"]


def test_an_unknown_algorithm_is_reported_with_the_rest() -> None:
    found = problems_of({"algo": "ppoo", "env_id": "CartPole-v1", "sed": 1})
    assert len(found) == 2
    assert "my.yaml: unknown key 'sed'. Did you mean 'seed'?" in found
    assert any("my.yaml > algo: unknown algorithm 'ppoo'. Did you mean 'ppo'?" in text for text in found)
    assert any(", ".join(registry()) in text for text in found)


def test_what_is_required_is_reported_with_the_rest() -> None:
    found = problems_of({"seed": -1})
    assert sorted(found) == [
        "my.yaml > seed: must be >= 0, got -1",
        "my.yaml: 'algo' is required",
        "my.yaml: 'env_id' is required",
    ]


def test_python_reports_all_at_once_too() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(algo="ppo", env_id="", seed=-1, eval_every=0, stop_patience=1, vectorization="x")  # type: ignore[arg-type]
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for part in (
        "seed: must be >= 0",
        "stop_patience: needs evaluations",
        "vectorization: got 'x'",
        "env_id: must not be empty",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"eval_every": 0, "stop_reward": 1}, "stop_reward: needs evaluations"),
        ({"eval_every": 0, "stop_patience": 1}, "stop_patience: needs evaluations"),
        (
            {"vectorization": "native", "wrappers": [{"name": "ClipReward"}]},
            "native environments do not support wrappers",
        ),
        (
            {"algorithm": {"network": {"shared": True, "actor_sizes": [8], "critic_sizes": [9]}}},
            "algorithm > network > shared: needs equal actor_sizes and critic_sizes",
        ),
    ],
)
def test_impossible_combinations(settings: dict[str, Any], problem: str) -> None:
    found = problems_of({"algo": "ppo", "env_id": "CartPole-v1", **settings})
    assert len(found) == 1
    assert problem in found[0]


def test_sections_are_judged_as_a_whole_not_layer_by_layer() -> None:
    """A layer may say half of what goes together."""
    config = resolve(
        [
            Layer({"algo": "ppo", "env_id": "X", "algorithm": {"network": {"actor_sizes": [8]}}}, "one"),
            Layer({"algorithm": {"network": {"critic_sizes": [8], "shared": True}}}, "two"),
        ]
    )
    assert config.algorithm.network.shared  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": True},
        {"seed": None},
        {"seed": float("nan")},
        {"total_timesteps": float("inf")},
        {"total_timesteps": 0},
        {"checkpoint_every": -1},
        {"env_id": 3},
        {"output_dir": 3},
        {"env_kwargs": {"f": len}},
        {"env_kwargs": {1: 2}},
        {"wrappers": [{"kwargs": {}}]},
        {"algorithm": {"gamma": float("nan")}},
        {"algorithm": {"num_steps": "many"}},
        {"algorithm": {"network": {"actor_sizes": [8, 0]}}},
        {"algorithm": {"network": {"actor_sizes": 8}}},
        {"algorithm": {"learning_rate": {"start": 1}}},
        {"algorithm": {"learning_rate": {"schedule": "linear", "start": 1, "ends": 0}}},
        {"algorithm": {"learning_rate": {"schedule": "linear"}}},
        {"algorithm": {"learning_rate": {"schedule": "linear", "start": 1, "until": 2}}},
        {"algorithm": {"learning_rate": {"schedule": "piecewise", "points": [[0.5, 1], [0.1, 1]]}}},
        {"algorithm": {"clip_coef": {"schedule": "piecewise", "points": [[0.1, 0.2], [0.15, -5], [0.2, 0.2]]}}},
        {"algorithm": [1]},
        {"algorithm": A2CConfig()},
    ],
)
def test_wrong_values_are_one_problem_that_names_the_key(wrong: dict[str, Any]) -> None:
    found = problems_of({"algo": "ppo", "env_id": "CartPole-v1", **wrong})
    assert len(found) == 1
    assert f"my.yaml > {next(iter(wrong))}" in found[0]


def test_an_empty_algorithm_section_changes_nothing(tmp_path: Path) -> None:
    preset = find_preset("ppo", "CartPole-v1")
    assert preset is not None
    layer = Layer(parse_yaml("algo: ppo\nenv_id: CartPole-v1\nalgorithm:\n", "x"), "x")
    config, found = resolve_with_preset([layer])
    assert found == preset
    assert config.algorithm.num_steps == preset.data["algorithm"]["num_steps"]  # type: ignore[attr-defined]


# Precedence


def test_precedence_defaults_preset_file_command_line(tmp_path: Path) -> None:
    preset = find_preset("ppo", "CartPole-v1")
    assert preset is not None
    in_preset = preset.data["algorithm"]
    assert {"num_steps", "num_epochs", "gamma"} <= set(in_preset), "this test needs three settings in the preset"
    path = write(
        tmp_path / "c.yaml",
        "algo: ppo\nenv_id: CartPole-v1\nseed: 5\nlog_every: 77\nalgorithm: {num_steps: 11, num_epochs: 12}\n",
    )
    config, used, _ = parse_train(["--config", str(path), "--algorithm.num-epochs", "13", "--log-every", "78"])
    assert used == preset
    settings = config.algorithm
    assert isinstance(settings, PPOConfig)
    assert settings.num_epochs == 13  # command line over file, preset and default
    assert config.log_every == 78
    assert settings.num_steps == 11  # file over preset and default
    assert config.seed == 5  # file over default
    assert settings.gamma == in_preset["gamma"] != PPOConfig().gamma  # preset over default
    assert settings.vf_coef == in_preset.get("vf_coef", PPOConfig().vf_coef)
    assert config.normalize_clip == 10.0  # default


def test_a_schedule_replaces_what_is_below_it_as_a_whole() -> None:
    below = {
        "algo": "ppo",
        "env_id": "X",
        "algorithm": {"learning_rate": {"schedule": "linear", "start": 1, "end": 0.5}},
    }
    for above, expected in (
        ({"schedule": "linear", "start": 2}, Linear(2.0)),
        ({"schedule": "cosine", "start": 2}, Cosine(2.0)),
        (0.25, 0.25),
    ):
        config = resolve([Layer(below, "below"), Layer({"algorithm": {"learning_rate": above}}, "above")])
        assert config.algorithm.learning_rate == expected  # type: ignore[attr-defined]


def test_environment_arguments_are_replaced_as_a_whole_and_sections_merged() -> None:
    below = {"algo": "ppo", "env_id": "X", "env_kwargs": {"a": 1}, "algorithm": {"network": {"activation": "relu"}}}
    above = {"env_kwargs": {"b": 2}, "algorithm": {"network": {"actor_sizes": [8]}}}
    config = resolve([Layer(below, "below"), Layer(above, "above")])
    assert config.env_kwargs == {"b": 2}
    network = config.algorithm.network  # type: ignore[attr-defined]
    assert (network.activation, network.actor_sizes, network.critic_sizes) == ("relu", (8,), (64, 64))


def section_defaults() -> list[tuple[str, str, str]]:
    """(algorithm, section, setting) of everything that an algorithm has in a section."""
    return [
        (name, section.name, part.name)
        for name, spec in registry().items()
        for section in dataclasses.fields(spec.config)
        if is_section(default := default_of(section))
        for part in dataclasses.fields(default)
    ]


def test_what_a_section_leaves_out_is_as_in_the_algorithms_own_default() -> None:
    """Not as in the section's class: A2C's optimizer is RMSprop, DQN's has another eps than PPO's."""
    cases = section_defaults()
    assert {("a2c", "optimizer", "eps"), ("td3", "noise", "std"), ("drqv2", "network", "activation")} <= set(cases)
    for algo, section, part in cases:
        default = TrainConfig(algo, "X-v0")
        said = {part: to_plain(getattr(getattr(default.algorithm, section), part))}
        assert TrainConfig(algo, "X-v0", algorithm={section: said}) == default  # type: ignore[arg-type]
        assert TrainConfig.from_dict({"algo": algo, "env_id": "X-v0", "algorithm": {section: said}}) == default


def test_a_part_of_a_section_changes_that_part_alone(tmp_path: Path) -> None:
    wanted = dataclasses.replace(A2CConfig().optimizer, eps=1e-6)
    assert wanted.name == "rmsprop" != OptimizerConfig().name
    path = write(tmp_path / "c.yaml", "algo: a2c\nenv_id: CartPole-v1\nalgorithm: {optimizer: {eps: 1e-6}}\n")
    part = {"optimizer": {"eps": 1e-6}}
    configs = [
        read_config(path),
        load_config(path),
        parse_train(["--config", str(path)])[0],
        parse_train(["a2c", "CartPole-v1", "--algorithm.optimizer.eps", "1e-6"])[0],
        A2C("CartPole-v1", **part).config,
        A2C("CartPole-v1", algorithm=part).config,
        A2C("CartPole-v1", algorithm=A2CConfig(gamma=0.9), **part).config,
        A2C(TrainConfig("a2c", "CartPole-v1"), **part).config,
        A2C.from_preset("CartPole-v1", **part).config,
        TrainConfig("a2c", "CartPole-v1", algorithm=A2CConfig(**part)),  # type: ignore[arg-type]
    ]
    for config in configs:
        assert config.algorithm.optimizer == wanted  # type: ignore[attr-defined]


def test_a_part_of_a_section_is_put_upon_what_was_said_before_it() -> None:
    adam = OptimizerConfig(name="adam", eps=1e-3)
    for below in (A2CConfig(optimizer=adam), {"optimizer": adam}, {"optimizer": {"name": "adam", "eps": 1e-3}}):
        layers = [{"algo": "a2c", "env_id": "X", "algorithm": below}, {"algorithm": {"optimizer": {"alpha": 0.5}}}]
        config = resolve([Layer(data, "layer") for data in layers])
        assert config.algorithm.optimizer == dataclasses.replace(adam, alpha=0.5)  # type: ignore[attr-defined]
    agent = A2C("CartPole-v1", algorithm=A2CConfig(optimizer=adam), optimizer={"alpha": 0.5})
    assert agent.config.algorithm.optimizer == dataclasses.replace(adam, alpha=0.5)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="algorithm: expected a mapping of A2CConfig, got 5"):
        A2C("CartPole-v1", algorithm=5, gamma=0.9)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "NoPreset-v0"])
def test_the_resolved_config_is_a_valid_config_file_and_gives_an_equal_config(tmp_path: Path, env_id: str) -> None:
    """Also where a preset lies underneath: everything is said, so nothing of the preset shines through."""
    config = a_config_that_differs_everywhere().replace(env_id=env_id, env_kwargs={})
    path = write(tmp_path / "config.yaml", config.to_yaml())
    assert parse_train(["--config", str(path)])[0] == config
    assert read_config(path) == config
    plain = TrainConfig(algo="ppo", env_id=env_id)
    path.write_text(plain.to_yaml())
    assert parse_train(["--config", str(path)])[0] == plain


def test_the_command_line_mends_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "algo: ppo\nenv_id: CartPole-v1\neval_every: 0\nstop_reward: 1\n")
    assert parse_train(["--config", str(path), "--eval-every", "10"])[0].eval_every == 10
    with pytest.raises(ConfigError, match="stop_reward: needs evaluations") as caught:
        parse_train(["--config", str(path)])
    assert caught.value.problems[0].startswith(f"{path} > ")


def test_replace_checks_again() -> None:
    config = TrainConfig(algo="ppo", env_id="CartPole-v1")
    assert config.replace(seed=3).seed == 3
    assert config.seed == 0
    with pytest.raises(ConfigError, match="seed: must be >= 0"):
        config.replace(seed=-3)


# Environments that import modules


@pytest.fixture
def module_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The id of an environment in a module that has not been imported."""
    name = "env_module_of_a_test"
    write(
        tmp_path / f"{name}.py",
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('FromModule-v0', CartPoleEnv, max_episode_steps=10)\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield f"{name}:FromModule-v0"
    sys.modules.pop(name, None)
    gym.registry.pop("FromModule-v0", None)


def imported(env_id: str) -> bool:
    return env_id.split(":")[0] in sys.modules


SMALL = {"total_timesteps": 16, "num_envs": 1, "eval_every": 0, "num_steps": 16}


def test_a_config_file_cannot_make_us_import_a_module(tmp_path: Path, module_env: str) -> None:
    path = write(tmp_path / "c.yaml", f"algo: ppo\nenv_id: '{module_env}'\nseed: -1\n")
    for read in (read_config, rl_training.cli.load_config):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert any("files may not do by default" in text for text in caught.value.problems)
        assert any("--trust" in text for text in caught.value.problems)
        assert any("seed" in text for text in caught.value.problems), "reported with the other problems"
    with pytest.raises(ConfigError, match="files may not do by default"):
        parse_train(["--config", str(path)])
    assert not imported(module_env)


def test_a_config_file_may_with_trust(tmp_path: Path, module_env: str) -> None:
    path = write(tmp_path / "c.yaml", f"algo: ppo\nenv_id: '{module_env}'\n")
    assert read_config(path, trust=True).env_id == module_env
    assert parse_train(["--config", str(path), "--trust"])[0].env_id == module_env


def test_people_may_name_a_module_on_the_command_line(tmp_path: Path, module_env: str) -> None:
    path = write(tmp_path / "c.yaml", "algo: ppo\nenv_id: CartPole-v1\nseed: 3\n")
    assert parse_train(["ppo", module_env])[0].env_id == module_env
    assert parse_train(["--config", str(path), "--env-id", module_env])[0].env_id == module_env


def test_people_may_name_a_module_in_python_but_checkpoints_and_runs_may_not(tmp_path: Path, module_env: str) -> None:
    agent = rl_training.PPO(module_env, output_dir=tmp_path, **SMALL)
    assert imported(module_env)
    agent.learn(progress=False, run_dir=tmp_path / "run")
    agent.save(tmp_path / "saved")
    agent.close()
    del sys.modules[module_env.split(":")[0]]
    gym.registry.pop("FromModule-v0")

    for path in (tmp_path / "saved", tmp_path / "run"):
        with pytest.raises(ConfigError, match="files may not do by default") as caught:
            rl_training.load(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="files may not do by default"):
        rl_training.resume(tmp_path / "run", total_timesteps=32, progress=False)
    assert not imported(module_env)
    assert rl_training.cli.main(["eval", str(tmp_path / "saved")]) == 2
    assert rl_training.cli.main(["resume", str(tmp_path / "run"), "--total-timesteps", "32"]) == 2
    assert not imported(module_env)

    own = rl_training.load(tmp_path / "saved", env="CartPole-v1")  # the file's environment is not used
    assert own.config.env_id == "CartPole-v1"
    own.close()
    assert not imported(module_env)

    trusted = rl_training.load(tmp_path / "saved", trust=True)
    assert imported(module_env)
    assert trusted.num_timesteps == 16
    trusted.close()
    assert rl_training.resume(tmp_path / "run", total_timesteps=32, progress=False, trust=True).env_steps == 32


def test_a_module_that_is_imported_already_needs_no_trust(tmp_path: Path, module_env: str) -> None:
    __import__(module_env.split(":")[0])
    path = write(tmp_path / "c.yaml", f"algo: ppo\nenv_id: '{module_env}'\n")
    assert read_config(path).env_id == module_env
