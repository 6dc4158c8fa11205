"""Whatever a vector environment does at the end of an episode, the same transitions come out."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Observation, Step
from rl_training.contracts.environment import VectorStep
from rl_training.contracts.errors import EnvError
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import BoxActions
from rl_training.envs.actions import ActionMap
from rl_training.envs.factory import AnyVectorEnv
from rl_training.envs.vector import AutoresetAdapter
from rl_training.runtime.collector import Collector
from tests.envs.scripted import (
    SCRIPTS,
    ScriptedEnv,
    Transition,
    expected_transitions,
    make_scripted,
    places,
    scripted_action,
)

MODES = list(AutoresetMode)
NUM_STEPS = 30
NUM_ENVS = len(SCRIPTS)

# Workers of Gymnasium's are forked from a process with nothing in it: forked from one that has run thousands of tests,
# with threads of many libraries, one of them once died before it began.
multiprocessing.set_forkserver_preload(["tests.envs.scripted"])
InProcesses = functools.partial(AsyncVectorEnv, context="forkserver")
EITHER = {"argvalues": [SyncVectorEnv, InProcesses], "ids": ["sync", "async"]}


@pytest.fixture(params=[False, True], ids=["box", "dict"])
def dict_obs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> AutoresetMode:
    return AutoresetMode(request.param)


@pytest.fixture(params=[SyncVectorEnv, InProcesses], ids=["sync", "async"])
def vector(request: pytest.FixtureRequest, mode: AutoresetMode, dict_obs: bool) -> Iterator[AnyVectorEnv]:
    env = request.param(make_scripted(dict_obs), autoreset_mode=mode)
    yield env
    env.close()


class ScriptedPolicy:
    """Does what `scripted_action` says."""

    box_actions: BoxActions = "clip"

    def act(self, obs: Observation, *, deterministic: bool = False, **_: Any) -> ActOutput:
        arrays = {key: part.numpy() for key, part in obs.items()} if isinstance(obs, dict) else obs.numpy()
        action = torch.tensor([scripted_action(place) for place in places(arrays)])
        return ActOutput(action, {"twice": 2 * action})

    def value(self, obs: Observation) -> torch.Tensor:
        raise NotImplementedError


class ListSink:
    """Keeps every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, step: Step) -> None:
        self.steps.append(step)


def transitions(steps: list[Step]) -> list[list[Transition]]:
    """The valid transitions of each environment; the next observation is the final one where an episode ended."""
    found: list[list[Transition]] = [[] for _ in range(NUM_ENVS)]
    for step, after in pairwise(steps):
        following = places(after.obs)
        if step.final_obs is not None:
            for env, place in zip(step.ended, places(step.final_obs), strict=True):
                following[env] = place
        for env, place in enumerate(places(step.obs)):
            if step.valid[env]:
                flags = bool(step.terminated[env]), bool(step.truncated[env])
                row = Transition(place, int(step.action[env]), float(step.reward[env]), *flags, following[env])
                found[env].append(row)
    return found


def play(adapter: AutoresetAdapter, num_steps: int) -> list[Step]:
    """Step the adapter by hand, with the scripted policy."""
    obs = adapter.reset(seed=1)
    steps = []
    for _ in range(num_steps):
        action = np.array([scripted_action(place) for place in places(obs)])
        after = adapter.step(action)
        steps.append(as_step(obs, action, after))
        obs = after.obs
    return steps


def as_step(obs: Any, action: Any, after: VectorStep) -> Step:
    return Step(
        obs=obs,
        policy_obs=obs,
        action=action,
        extras={},
        reward=after.reward,
        policy_reward=after.reward,
        terminated=after.terminated,
        truncated=after.truncated,
        valid=after.valid,
        ended=after.ended,
        final_obs=after.final_obs,
        final_policy_obs=after.final_obs,
        next_obs=after.obs,
    )


def as_dict(obs: ArrayObservation | None) -> dict[str, AnyArray]:
    assert obs is not None
    return obs if isinstance(obs, dict) else {"": obs}


def assert_scripted(steps: list[Step]) -> None:
    for env, found in enumerate(transitions(steps)):
        # rows that only reset take the place of at most one transition per episode
        assert len(found) >= NUM_STEPS // 2 - 1
        assert found == expected_transitions(env, len(found))


def make_collector(vector: AnyVectorEnv) -> Collector:
    return Collector(
        AutoresetAdapter(vector),
        ActionMap(vector.single_action_space),
        policy_rng=random_stream(0, "policy"),
        env_rng=random_stream(0, "environment"),
    )


def test_adapter_gives_the_scripted_transitions(vector: AnyVectorEnv) -> None:
    steps = play(AutoresetAdapter(vector), NUM_STEPS)
    assert_scripted(steps)


def test_adapter_marks_only_reset_rows_as_not_valid(vector: AnyVectorEnv, mode: AutoresetMode) -> None:
    steps = play(AutoresetAdapter(vector), NUM_STEPS)
    after_end = np.zeros(NUM_ENVS, np.bool_)
    for step in steps:
        expected = ~after_end if mode is AutoresetMode.NEXT_STEP else np.ones(NUM_ENVS, np.bool_)
        assert step.valid.tolist() == expected.tolist()
        assert not (step.terminated | step.truncated)[~step.valid].any()
        after_end = step.terminated | step.truncated


def test_final_observations_have_the_form_of_observations(vector: AnyVectorEnv) -> None:
    steps = play(AutoresetAdapter(vector), NUM_STEPS)
    ended = [step for step in steps if len(step.ended)]
    assert ended
    for step in steps:
        assert (step.final_obs is None) == (len(step.ended) == 0)
        assert step.ended.tolist() == np.flatnonzero(step.terminated | step.truncated).tolist()
    for step in ended:
        obs, final = as_dict(step.obs), as_dict(step.final_obs)
        assert obs.keys() == final.keys()
        for key, part in obs.items():
            assert (final[key].dtype, final[key].shape) == (part.dtype, (len(step.ended), *part.shape[1:]))


def test_collector_gives_the_scripted_transitions(vector: AnyVectorEnv) -> None:
    sink = ListSink()
    stats = make_collector(vector).collect(ScriptedPolicy(), NUM_STEPS, sink)
    assert len(sink.steps) == NUM_STEPS
    assert_scripted(sink.steps)
    assert stats.num_transitions == sum(int(step.valid.sum()) for step in sink.steps)
    assert all((step.extras["twice"] == 2 * step.action).all() for step in sink.steps)


def test_collector_counts_only_transitions(vector: AnyVectorEnv) -> None:
    sink = ListSink()
    collector = make_collector(vector)
    collector.collect(ScriptedPolicy(), NUM_STEPS, sink)
    rows = [row for step in sink.steps for row in np.flatnonzero(step.valid)]
    finished: list[tuple[float, int, bool]] = []
    running = [(0.0, 0)] * NUM_ENVS
    episodes = [0] * NUM_ENVS
    for step in sink.steps:
        for env in np.flatnonzero(step.valid):
            running[env] = (running[env][0] + float(step.reward[env]), running[env][1] + 1)
            if step.terminated[env] or step.truncated[env]:
                script = SCRIPTS[env]
                finished.append((*running[env], script[episodes[env] % len(script)].success))
                running[env], episodes[env] = (0.0, 0), episodes[env] + 1
    statistics = collector.statistics
    assert sum(length for _, length, _ in finished) + sum(length for _, length in running) == len(rows)
    assert list(zip(statistics.returns, statistics.lengths, statistics.successes, strict=True)) == finished
    assert statistics.num_episodes == len(finished)
    assert statistics.running_length.tolist() == [length for _, length in running]


def test_collector_stops_at_the_budget_of_transitions(mode: AutoresetMode) -> None:
    vector = SyncVectorEnv(make_scripted(False), autoreset_mode=mode)
    sink = ListSink()
    stats = make_collector(vector).collect(ScriptedPolicy(), 1000, sink, max_transitions=20)
    assert 20 <= stats.num_transitions < 20 + NUM_ENVS
    assert stats.num_transitions == sum(int(step.valid.sum()) for step in sink.steps)


def test_collecting_in_pieces_changes_nothing(mode: AutoresetMode) -> None:
    whole, pieces = ListSink(), ListSink()
    make_collector(SyncVectorEnv(make_scripted(False), autoreset_mode=mode)).collect(ScriptedPolicy(), 12, whole)
    collector = make_collector(SyncVectorEnv(make_scripted(False), autoreset_mode=mode))
    for _ in range(4):
        collector.collect(ScriptedPolicy(), 3, pieces)
    assert transitions(pieces.steps) == transitions(whole.steps)
    assert [step.valid.tolist() for step in pieces.steps] == [step.valid.tolist() for step in whole.steps]


def test_reset_forgets_pending_resets() -> None:
    adapter = AutoresetAdapter(SyncVectorEnv(make_scripted(False), autoreset_mode=AutoresetMode.NEXT_STEP))
    adapter.reset(seed=0)
    actions = np.zeros(NUM_ENVS, np.int64)
    ended = [len(adapter.step(actions).ended) for _ in range(2)]
    assert ended == [0, 1]
    adapter.reset(seed=0)
    assert adapter.step(actions).valid.all()


def test_native_cartpole_next_step() -> None:
    """Every valid row continues the row before it or starts an episode; rows after an end are never valid."""
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    adapter = AutoresetAdapter(env)
    rng = np.random.default_rng(0)
    obs = adapter.reset(seed=0)
    assert isinstance(obs, np.ndarray)
    num_ended, num_invalid, length = 0, 0, np.zeros(4, np.int64)
    for _ in range(200):
        step = adapter.step(rng.integers(2, size=4))
        assert isinstance(step.obs, np.ndarray)
        assert (np.abs(obs[step.valid & (length == 0)]) <= 0.05).all(), "an episode must begin near the middle"
        assert (step.reward[step.valid] == 1).all()
        assert (step.reward[~step.valid] == 0).all()
        if step.final_obs is not None:
            assert isinstance(step.final_obs, np.ndarray)
            fallen = (np.abs(step.final_obs[:, 0]) > 2.4) | (np.abs(step.final_obs[:, 2]) > 12 * 2 * np.pi / 360)
            assert fallen.all(), "a true last observation of CartPole is out of bounds"
        num_ended += len(step.ended)
        num_invalid += int((~step.valid).sum())
        length[step.valid] += 1
        length[step.ended] = 0
        obs = step.obs
    assert num_ended > 10
    # the last step's ends have not been reset yet
    assert num_invalid == num_ended - len(step.ended)


def test_same_step_final_observations_get_the_dtype_of_the_space() -> None:
    class Double(gym.ObservationWrapper[Any, Any, Any]):
        def observation(self, observation: Any) -> Any:
            return observation.astype(np.float64)

    vector = SyncVectorEnv([lambda: Double(ScriptedEnv(1, SCRIPTS[1]))], autoreset_mode=AutoresetMode.SAME_STEP)
    adapter = AutoresetAdapter(vector)
    adapter.reset(seed=0)
    adapter.step(np.zeros(1, np.int64))
    final = adapter.step(np.zeros(1, np.int64)).final_obs
    assert isinstance(final, np.ndarray)
    assert final.dtype == np.float32


@pytest.mark.parametrize("final", [None, np.full(1, None, object)], ids=["no key", "no entry"])
def test_same_step_without_final_observation_is_refused(final: Any) -> None:
    class Forgetful(SyncVectorEnv[Any, Any]):
        def step(self, actions: Any) -> Any:
            *rest, info = super().step(actions)
            info.pop("final_obs", None)
            return *rest, info if final is None else {**info, "final_obs": final}

    vector = Forgetful([lambda: ScriptedEnv(1, SCRIPTS[1])], autoreset_mode=AutoresetMode.SAME_STEP)
    adapter = AutoresetAdapter(vector)
    adapter.reset(seed=0)
    adapter.step(np.zeros(1, np.int64))
    with pytest.raises(EnvError, match="final_obs"):
        adapter.step(np.zeros(1, np.int64))


def test_same_step_final_observations_batched_by_key() -> None:
    """Not Gymnasium's own form, but that of native vector environments with dict observations."""

    class ByKey(SyncVectorEnv[Any, Any]):
        def step(self, actions: Any) -> Any:
            *rest, info = super().step(actions)
            if "final_obs" in info:
                info["final_obs"] = {
                    key: np.stack([row[key] for row in info["final_obs"]]) for key in ("_place", "step")
                }
            return *rest, info

    vector = ByKey(make_scripted(True)[1:2], autoreset_mode=AutoresetMode.SAME_STEP)
    adapter = AutoresetAdapter(vector)
    adapter.reset(seed=0)
    adapter.step(np.zeros(1, np.int64))
    final = adapter.step(np.zeros(1, np.int64)).final_obs
    assert isinstance(final, dict)
    assert places(final) == [(1, 0, 2)]


def test_unknown_autoreset_mode_is_taken_as_next_step_with_a_warning() -> None:
    vector = SyncVectorEnv(make_scripted(False))
    vector.metadata = {}
    with pytest.warns(UserWarning, match="autoreset mode"):
        adapter = AutoresetAdapter(vector)
    assert adapter.mode is AutoresetMode.NEXT_STEP


class TestFactsAboutGymnasium:
    """What the adapter relies on. If a newer Gymnasium behaves otherwise, this says so."""

    def test_vector_environments_default_to_next_step(self) -> None:
        vector = SyncVectorEnv(make_scripted(False))
        assert vector.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        assert "autoreset_mode" not in ScriptedEnv(0, SCRIPTS[0]).metadata, "the class-level dict must stay clean"

    def test_native_cartpole_is_next_step_only(self) -> None:
        env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
        assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        with pytest.raises(TypeError, match="autoreset_mode"):
            gym.make_vec(
                "CartPole-v1",
                num_envs=2,
                vectorization_mode="vector_entry_point",
                autoreset_mode=AutoresetMode.SAME_STEP,
            )

    def test_native_cartpole_ignores_the_reset_mask(self) -> None:
        env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
        before, _ = env.reset(seed=0)
        after, _ = env.reset(options={"reset_mask": np.array([True, False])})
        assert (before[1] != after[1]).any(), "the mask is honoured now: Disabled could be offered for native vectors"

    def test_a_tenth_or_so_of_a_random_next_step_rollout_is_no_transition(self) -> None:
        env = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="vector_entry_point")
        adapter = AutoresetAdapter(env)
        adapter.reset(seed=0)
        rng = np.random.default_rng(0)
        invalid = sum(int((~adapter.step(rng.integers(2, size=8)).valid).sum()) for _ in range(128))
        assert 20 < invalid < 100

    @pytest.mark.parametrize("cls", **EITHER)
    def test_same_step_gives_final_obs_per_environment_with_a_mask(self, cls: Any) -> None:
        vector = cls(make_scripted(True), autoreset_mode=AutoresetMode.SAME_STEP)
        vector.reset(seed=0)
        vector.step(np.zeros(NUM_ENVS, np.int64))
        *_, info = vector.step(np.zeros(NUM_ENVS, np.int64))
        vector.close()
        assert info["_final_obs"].tolist() == [False, True, False]
        assert info["final_obs"].dtype == object
        assert info["final_obs"][0] is None
        assert set(info["final_obs"][1]) == {"_place", "step"}
        assert info["final_info"]["is_success"].tolist() == [False, True, False]

    @pytest.mark.parametrize("cls", **EITHER)
    def test_a_masked_reset_leaves_the_others_alone(self, cls: Any) -> None:
        vector = cls(make_scripted(False), autoreset_mode=AutoresetMode.DISABLED)
        vector.reset(seed=0)
        vector.step(np.zeros(NUM_ENVS, np.int64))
        obs, _ = vector.reset(options={"reset_mask": np.array([False, True, False])})
        vector.close()
        assert places(obs) == [(0, 0, 1), (1, 1, 0), (2, 0, 1)]

    @pytest.mark.parametrize("cls", **EITHER)
    def test_same_step_loses_final_observations_of_environments_that_reuse_an_array(self, cls: Any) -> None:
        """Why `check_env` warns of such environments."""
        vector = cls([ReusingEnv], autoreset_mode=AutoresetMode.SAME_STEP)
        vector.reset(seed=0)
        *_, info = vector.step(np.zeros(1, np.int64))
        vector.close()
        assert info["final_obs"][0].tolist() == [0.0], "the true last observation is [1.0]"


class ReusingEnv(gym.Env[Any, Any]):
    """Writes every observation into the same array."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.obs = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.obs[:] = 0.0
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.obs[:] = 1.0
        return self.obs, 0.0, True, False, {}
