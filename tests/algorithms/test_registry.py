"""Contracts that every algorithm keeps: this walks the registry, so a new algorithm is tested by being there."""

import copy
import dataclasses
import importlib
import math
import types
import typing
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.algorithms.registry import check_action_space, get_spec, registry
from rl_training.contracts.arrays import map_observation
from rl_training.contracts.batches import Progress, Step, TransitionBatch
from rl_training.contracts.errors import ConfigError, SpaceError
from rl_training.contracts.plugins import NETWORKS
from rl_training.contracts.random import random_stream
from rl_training.contracts.schedule import Linear, Schedule
from rl_training.contracts.spec import EnvSpec, Regime
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.data.settings import OffPolicyConfig
from rl_training.experiment.config import TrainConfig, read_config
from rl_training.experiment.presets import presets
from rl_training.policies.networks import ActorCriticNetworkConfig, StochasticActorConfig
from tests.small import small_settings

SPECS = registry()
ON_POLICY = {name: spec for name, spec in SPECS.items() if Regime.ON_POLICY in spec.regimes}
ACTION_SPACES = {
    spaces.Discrete: spaces.Discrete(3, start=1),
    spaces.MultiDiscrete: spaces.MultiDiscrete([3, 2]),
    spaces.MultiBinary: spaces.MultiBinary(3),
    spaces.Box: spaces.Box(-2.0, 2.0, (2,)),
    spaces.Text: spaces.Text(5),
    spaces.Tuple: spaces.Tuple([spaces.Discrete(2)]),
}
OBSERVATION_SPACES = {
    "box": spaces.Box(-1.0, 1.0, (3,)),
    "discrete": spaces.Discrete(4, start=2),
    "dict": spaces.Dict({"speed": spaces.Box(-1.0, 1.0, (2,), np.float64), "bits": spaces.MultiBinary(2)}),
}
CAMERA = spaces.Box(0, 255, (16, 16, 3), np.uint8)
IMAGE_SPACES = {
    "image": CAMERA,
    "stack": spaces.Box(0, 255, (2, 16, 16), np.uint8),
    "dict": spaces.Dict({"camera": CAMERA, "speed": spaces.Box(-1.0, 1.0, (2,), np.float64)}),
}

NO_NETWORKS = {"actor": "mlp", "actor_kwargs": {}, "critic": "mlp", "critic_kwargs": {}}


@pytest.fixture(autouse=True)
def another_network(monkeypatch):
    """A name beside the built-in one."""
    monkeypatch.setitem(NETWORKS._added, "another", torch.nn.Linear)


each_algorithm = pytest.mark.parametrize("name", SPECS)
each_observation_space = pytest.mark.parametrize(
    ("name", "obs"),
    [
        (name, obs)
        for name, spec in SPECS.items()
        for obs in (IMAGE_SPACES if spec.needs_images else OBSERVATION_SPACES)
    ],
)
each_on_policy = pytest.mark.parametrize("name", ON_POLICY)
each_action_space = pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(n, k, id=f"{n}-{k.__name__}") for n, spec in SPECS.items() for k in spec.action_spaces],
)


# ----------------------------------------------------------------------------------------------------------------------
# Names
# ----------------------------------------------------------------------------------------------------------------------


def test_the_first_algorithms_are_there():
    assert {"ppo", "a2c"} <= set(SPECS)
    assert list(SPECS) == sorted(SPECS)


@each_algorithm
def test_names(name):
    spec = SPECS[name]
    assert spec.name == name == name.lower()
    assert get_spec(name) is spec
    module = importlib.import_module(spec.algorithm.__module__)
    assert module.SPEC is spec
    assert module.__name__.rpartition(".")[2] == name  # `PPO` lives in ppo.py
    assert spec.config.__name__ == f"{spec.title}Config"
    assert spec.paper
    assert spec.regimes
    assert spec.default_num_envs >= 1


@each_algorithm
def test_a_wrong_name_is_answered_with_the_nearest(name):
    for wrong in (name + "x", name.upper()):
        with pytest.raises(ConfigError, match=rf"unknown algorithm '{wrong}'\. Did you mean '{name}'\?"):
            get_spec(wrong)
    with pytest.raises(ConfigError, match=rf"algo: unknown algorithm '{name}x'\. Did you mean '{name}'\?"):
        TrainConfig(algo=name + "x", env_id="CartPole-v1")


def test_a_hopeless_name_is_answered_with_all():
    with pytest.raises(ConfigError, match=f"unknown algorithm 'zzzzzzzz'. Known: {', '.join(SPECS)}"):
        get_spec("zzzzzzzz")


# ----------------------------------------------------------------------------------------------------------------------
# Settings
# ----------------------------------------------------------------------------------------------------------------------


def settings_of(cls, prefix=""):
    """(dotted name, field, type) of every setting, also of sections."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name, field, hints[field.name]
        if dataclasses.is_dataclass(hints[field.name]):
            yield from settings_of(hints[field.name], f"{prefix}{field.name}.")


def another(hint, field, value):
    """A value of that type, inside the range, that is not the one given."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        return Linear(0.5, 0.25, until=0.75) if Schedule in kinds else another(kinds[0], field, value)
    if origin is Literal:
        return next(arg for arg in args if arg != value)
    if dataclasses.is_dataclass(hint):
        return all_changed(hint())
    if origin is tuple:
        inner = args[0]
        return tuple(another(inner, field, x) for x in (value or (inner(1),)))
    if hint is bool:
        return not value
    if hint is int:
        return (value or 1) + 1
    if hint is float:
        return 0.5 if value != 0.5 else 0.25
    if hint is Path:
        return Path("elsewhere")
    if origin is dict:
        return {"size": 3}
    return {"encoder": "flat", "actor": "another", "critic": "another", "name": "RAdam", "sampler": None}[field.name]


def all_changed(config):
    """A copy of a config in which every single setting has another value."""
    hints = typing.get_type_hints(type(config))
    fields = dataclasses.fields(config)
    if hasattr(config, "v_min"):
        config.v_min = 0.5  # so that what `another` makes of it stays below the other end
    changed = type(config)(**{f.name: another(hints[f.name], f, getattr(config, f.name)) for f in fields})
    if hasattr(config, "critic_kwargs"):  # registered networks refuse the settings of `mlp`
        for name in NO_NETWORKS.keys() & {field.name for field in fields}:
            setattr(changed, name, NO_NETWORKS[name])
    if isinstance(changed, StochasticActorConfig):
        for name in ("exploration", *changed.only_sde):  # not every algorithm has gSDE, and it has tests of its own
            setattr(changed, name, getattr(config, name))
    if isinstance(changed, ActorCriticNetworkConfig):
        changed.actor_dropout = changed.critic_dropout = 0.0  # as on-policy updates demand
        changed.shared = False  # as TRPO demands
    if isinstance(changed, OffPolicyConfig):
        for name in changed.unused():  # what may be refused if it is set
            setattr(changed, name, getattr(config, name))
        if any("epsilon" in problem for problem in changed.problems()):  # a schedule, where a number is needed
            changed.epsilon = config.epsilon
        changed.sampler_kwargs = {}  # a sampler cannot be set beside priorities, and has a test of its own
    return changed


@each_algorithm
@pytest.mark.parametrize("change", [lambda config: config, all_changed], ids=["defaults", "all-changed"])
def test_config_round_trip_through_a_file(name, change, tmp_path):
    config = TrainConfig(algo=name, env_id="CartPole-v1", seed=3, algorithm=change(SPECS[name].config()))
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    back = read_config(path)
    assert back == config
    assert type(back.algorithm) is SPECS[name].config
    assert back.to_yaml() == config.to_yaml()


@each_algorithm
def test_the_round_trip_above_changes_every_setting(name):
    default, changed = SPECS[name].config(), all_changed(SPECS[name].config())
    same = [f.name for f in dataclasses.fields(default) if getattr(default, f.name) == getattr(changed, f.name)]
    one_choice = {"epsilon"} if name == "apex" else set()  # a schedule is refused, and every number is like another
    assert set(same) <= {"sampler", "sampler_kwargs"} | one_choice | changed.unused()


@each_algorithm
def test_every_setting_is_documented(name):
    undocumented = [label for label, field, _ in settings_of(SPECS[name].config) if not field.metadata.get("help")]
    assert undocumented == []
    for field in dataclasses.fields(SPECS[name].config):
        assert f"    {field.name}: " in SPECS[name].config.__doc__


@each_algorithm
def test_settings_do_not_collide_with_those_of_the_run(name):
    # both are keywords of the facade and flags of the command line
    own = {field.name for field in dataclasses.fields(SPECS[name].config)}
    assert own & {field.name for field in dataclasses.fields(TrainConfig)} == set()


@each_algorithm
def test_a_misspelt_setting_is_answered_with_the_nearest(name):
    with pytest.raises(ConfigError, match=r"algorithm: unknown key 'gama'. Did you mean 'gamma'\?"):
        TrainConfig(algo=name, env_id="CartPole-v1", algorithm={"gama": 0.9})


@each_algorithm
def test_there_is_a_preset(name):
    own = [preset for preset in presets().values() if preset.algo == name]
    assert own
    for preset in own:
        assert preset.name.startswith(f"{name}/")
        assert TrainConfig.from_dict(preset.data).algo == name


# ----------------------------------------------------------------------------------------------------------------------
# Spaces
# ----------------------------------------------------------------------------------------------------------------------


@each_algorithm
def test_every_space_is_taken_or_refused_by_name(name):
    spec, refused = SPECS[name], 0
    for kind, space in ACTION_SPACES.items():
        env = EnvSpec(OBSERVATION_SPACES["box"], space, env_id="Fake-v0")
        if kind in spec.action_spaces:
            check_action_space(spec, env)
            continue
        refused += 1
        with pytest.raises(SpaceError) as caught:
            check_action_space(spec, env)
        message = str(caught.value)
        assert message.startswith(f"{spec.title} needs an action space of type")
        assert f"got {space} from 'Fake-v0'" in message
        assert all(accepted.__name__ in message for accepted in spec.action_spaces)
    assert refused >= 2  # nobody takes words or tuples


def test_a_space_that_nobody_takes_is_answered_with_advice():
    env = EnvSpec(OBSERVATION_SPACES["box"], spaces.Text(5))
    with pytest.raises(SpaceError, match="No algorithm takes Text actions; wrap the environment"):
        check_action_space(SPECS["ppo"], env)


# ----------------------------------------------------------------------------------------------------------------------
# Updates
# ----------------------------------------------------------------------------------------------------------------------

T, N = 12, 3


def sample(space, rows, rng):
    """Random observations [rows, ...]."""
    if isinstance(space, spaces.Dict):
        return {key: sample(part, rows, rng) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.start, space.start + space.n, rows)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, (rows, *space.shape)).astype(space.dtype)
    if space.dtype == np.uint8:
        return rng.integers(0, 256, (rows, *space.shape), dtype=np.uint8)
    return rng.uniform(-1, 1, (rows, *space.shape)).astype(space.dtype)


def to_tensors(obs):
    return {k: torch.from_numpy(v) for k, v in obs.items()} if isinstance(obs, dict) else torch.from_numpy(obs)


def make(name, env, seed=0, **settings):
    spec = SPECS[name]
    config = TrainConfig(algo=name, env_id="any", algorithm=small_settings(spec, **settings)).algorithm
    return spec.algorithm_for(env.action_space)(config, env, torch.device("cpu"), random_stream(seed, "algorithm"))


def env_of(name, obs=None):
    """An environment for an algorithm."""
    known = IMAGE_SPACES if SPECS[name].needs_images else OBSERVATION_SPACES
    return EnvSpec(known[obs or next(iter(known))], ACTION_SPACES[SPECS[name].action_spaces[0]])


def data(algorithm, env, seed=0):
    """What an algorithm learns from: a rollout, or transitions."""
    on_policy = type(algorithm) in [spec.algorithm for spec in ON_POLICY.values()]
    return fill(algorithm, env, seed) if on_policy else transitions(env, seed)


def transitions(env, seed=0):
    """A batch as replay gives them, with ends of episodes and weights."""
    rng = np.random.default_rng(seed)
    space, rows = env.action_space, 16
    if isinstance(space, spaces.Discrete):
        action = torch.from_numpy(rng.integers(space.n, size=rows))  # counted from 0, wherever the space starts
    else:
        action = torch.from_numpy(rng.uniform(-1, 1, (rows, *space.shape)).astype(np.float32))
    reward, weight = (torch.from_numpy(rng.random(rows, dtype=np.float32)) for _ in range(2))
    discount = torch.where(torch.arange(rows) % 5 == 0, 0.0, 0.99)
    obs, next_obs = (stored(sample(env.observation_space, rows, rng)) for _ in range(2))
    extras = {"return_to_go": reward * 3, "next_action": action.flip(0)}  # further columns that algorithms ask for
    return TransitionBatch(obs, action, reward, discount, next_obs, weight, torch.arange(rows), extras)


def stored(obs):
    """Observations as replay keeps them: no doubles."""
    return to_tensors(map_observation(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, obs))


NOW = Progress(env_steps=0, horizon=1000, updates=1)
"""At a step at which what learns with a delay of two is due."""


def fill(algorithm, env, seed=0):
    """A rollout of a fake environment: random observations and rewards, with ends of every kind and a reset row."""
    rng, policy_rng = np.random.default_rng(seed), random_stream(seed, "policy")
    buffer = RolloutBuffer.for_spec(env, T, N)
    for t in range(T):
        obs = sample(env.observation_space, N, rng)
        out = algorithm.policy.act(to_tensors(obs), rng=policy_rng)
        terminated, truncated = np.arange(N) == (0 if t == 4 else -1), np.arange(N) == (1 if t == 6 else -1)
        ended = np.flatnonzero(terminated | truncated)
        final = sample(env.observation_space, len(ended), rng) if len(ended) else None
        reward = rng.normal(size=N)
        extras = {key: value.numpy() for key, value in out.extras.items()}
        valid = ~((np.arange(N) == 1) & (t == 7))
        step = Step(
            obs, obs, out.action.numpy(), extras, reward, reward, terminated, truncated, valid, ended, final, final, obs
        )
        buffer.add(step)
    buffer.last_obs = sample(env.observation_space, N, rng)
    return buffer


def weights(algorithm):
    return {name: value.detach().clone() for name, value in algorithm.policy.named_parameters()}


def differing(one, two):
    return {name for name in one if not torch.equal(one[name], two[name])}


def check_update(algorithm, env):
    before = weights(algorithm)
    result = algorithm.update(data(algorithm, env), NOW)
    assert result.num_updates >= 1
    assert result.metrics
    assert {name: float(value) for name, value in result.metrics.items() if not math.isfinite(value)} == {}
    assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in result.metrics.values())
    after = weights(algorithm)
    assert differing(before, after) == set(before)  # every parameter has moved
    assert all(torch.isfinite(value).all() for value in after.values())
    if result.priorities is not None:
        assert result.priorities.shape == (16,)
        assert not result.priorities.requires_grad
        assert (result.priorities >= 0).all()


@each_action_space
def test_an_update_on_each_action_space(name, kind):
    env = EnvSpec(env_of(name).observation_space, ACTION_SPACES[kind])
    check_update(make(name, env), env)


@each_observation_space
def test_an_update_on_each_observation_space(name, obs):
    env = env_of(name, obs)
    check_update(make(name, env), env)


@pytest.mark.parametrize("name", ["sac", "tqc", "redq", "droq", "crossq"])
def test_an_update_on_a_dict_with_an_image(name):
    env = EnvSpec(IMAGE_SPACES["dict"], ACTION_SPACES[spaces.Box])
    check_update(make(name, env), env)


@each_algorithm
def test_training_mode_lasts_as_long_as_an_update(name):
    env = env_of(name)
    algorithm = make(name, env)
    assert not algorithm.policy.training
    algorithm.update(data(algorithm, env), NOW)
    assert not any(module.training for module in algorithm.policy.modules())


@each_observation_space
def test_the_policy_acts_and_values_on_each_observation_space(name, obs):
    env = env_of(name, obs)
    algorithm = make(name, env)
    batch = to_tensors(sample(env.observation_space, 5, np.random.default_rng(0)))
    policy = algorithm.explore(NOW)
    for deterministic in (False, True):
        out = policy.act(batch, deterministic=deterministic, rng=np.random.default_rng(1))
        assert out.action.shape == (5, *env.action_space.shape)
        assert not out.action.requires_grad
    assert torch.equal(out.action, policy.act(batch, deterministic=True).action)  # needs no stream
    values = policy.value(batch)
    assert values.shape == (5,)
    assert not values.requires_grad
    with pytest.raises(NotImplementedError, match="mask"):
        policy.act(batch, deterministic=True, action_mask=torch.ones(5, 3, dtype=torch.bool))


@each_algorithm
def test_weights_can_be_started_from(name):
    env = env_of(name)
    trained, fresh, other = make(name, env), make(name, env, seed=9), make(name, env, seed=9)
    trained.update(data(trained, env), NOW)
    fresh.start_from(copy.deepcopy(trained.state_dict()["policy"]))
    assert differing(weights(trained), weights(fresh)) == set()
    copies = [value for value in vars(fresh).values() if type(value).__name__ == "Target"]
    for target in copies:  # and so do the copies that follow them
        assert torch.equal(target.flat, target.source)
    assert fresh.rng.bit_generator.state == other.rng.bit_generator.state, "the rest is as in a new run"


DISCRETE = EnvSpec(OBSERVATION_SPACES["box"], spaces.Discrete(3))


@each_algorithm
def test_equal_seeds_give_equal_bits_whatever_the_global_streams_do(name):
    env, results = env_of(name), []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002
        before = torch.get_rng_state()
        algorithm = make(name, env)
        algorithm.update(data(algorithm, env), NOW)
        results.append(weights(algorithm))
        assert torch.equal(torch.get_rng_state(), before)  # and they are left alone
    assert differing(*results) == set()
    assert differing(results[0], weights(make(name, env, seed=1))) != set()


@each_algorithm
def test_the_state_comes_back_bit_for_bit(name):
    env = env_of(name)
    first, second = make(name, env), make(name, env, seed=9)
    for seed in range(2):
        first.update(data(first, env, seed), NOW)
    second.update(data(second, env, 5), NOW)  # a past of its own, which must not show
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert differing(weights(first), weights(second)) == set()
    for seed in (3, 4):  # the second update sees what the first left in optimizers, targets and streams
        for algorithm in (first, second):
            algorithm.update(data(algorithm, env, seed), NOW)
    assert differing(weights(first), weights(second)) == set()


@each_algorithm
def test_the_state_names_every_parameter(name):
    algorithm = make(name, env_of(name))
    named, kept = set(dict(algorithm.policy.named_parameters())), set(algorithm.policy.state_dict())
    assert named <= set(algorithm.state_dict()["policy"]) == kept
    others = {name for name in kept - named if name.rpartition(".")[2] not in ("mean", "variance", "num_batches")}
    assert others <= {"epsilon", "noise_std", "candidate_noise"}, "how it explores, beside the statistics of batch norm"


@each_on_policy
def test_rows_that_only_reset_do_not_count(name):
    # whatever stands in them, the update is the same
    results = []
    for number in (0.0, 1000.0):
        algorithm = make(name, DISCRETE)
        rollout = fill(algorithm, DISCRETE)
        invalid = ~rollout.valid
        assert invalid.sum() == 1
        rollout.rewards[invalid] = number
        rollout.obs[invalid] = number
        algorithm.update(rollout, Progress(horizon=1000))
        results.append(weights(algorithm))
    assert differing(*results) == set()


@each_on_policy
def test_truncation_is_not_termination(name):
    # the same rollout, once with its truncated row counted as terminated: another update
    results = []
    for as_terminated in (False, True):
        algorithm = make(name, DISCRETE)
        rollout = fill(algorithm, DISCRETE)
        if as_terminated:
            rollout.truncated[:] = False
        algorithm.update(rollout, Progress(horizon=1000))
        results.append(weights(algorithm))
    assert differing(*results) != set()


JOINT = {"crossq"}
"""Algorithms that normalise next observations together with the others, so that each has an effect on all."""


EVERYWHERE = JOINT | {"cql", "cal_ql"}
"""Algorithms for which that holds, or whose penalty is for actions of the policy in next observations."""


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ON_POLICY and name not in EVERYWHERE])
def test_nothing_is_expected_after_a_termination(name):
    # where the discount is 0, it does not matter what was seen next; elsewhere it does
    env = env_of(name)
    batch = transitions(env)
    results = []
    for rows, number in ((batch.discount == 0, 0.0), (batch.discount == 0, 0.5), (batch.discount > 0, 0.5)):
        # plain gradients: Adam's would make steps of what is only rounding (probabilities that sum to nearly one)
        algorithm, next_obs = make(name, env, optimizer={"name": "sgd"}), batch.next_obs.clone()
        next_obs[rows] = number if next_obs.is_floating_point() else int(255 * number)
        algorithm.update(batch._replace(next_obs=next_obs), NOW)
        results.append(weights(algorithm))
    start = weights(make(name, env))
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key] - start[key], value - start[key], rtol=1e-3, atol=1e-8)
    far = [
        (results[2][key] - value).abs().max() / (value - start[key]).abs().max() for key, value in results[0].items()
    ]
    if getattr(algorithm.policy, "num_critics", 1):  # imitation and recorded returns need no next observation
        assert max(far) > 1e-2


NATURAL = {"trpo": ("actor.", "head.")}
"""Weights that move as far as a KL divergence allows, whatever the learning rate."""


@each_algorithm
def test_a_learning_rate_that_faded_to_zero_changes_nothing(name):
    env = env_of(name)
    others = ("critic_learning_rate", "behaviour_learning_rate")
    same = {other: None for other in others if hasattr(SPECS[name].config(), other)}
    algorithm = make(name, env, learning_rate=Linear(1e-2, 0.0), **same)
    before = weights(algorithm)
    algorithm.update(data(algorithm, env), Progress(env_steps=1000, horizon=1000, updates=1))
    changed = differing(before, weights(algorithm))
    assert changed == {key for key in before if key.startswith(NATURAL.get(name, ("none",)))}
    algorithm.update(data(algorithm, env), Progress(env_steps=500, horizon=1000, updates=1))
    assert differing(before, weights(algorithm)) == set(before)
