"""The contract test suite for third-party algorithms, which every algorithm of this package satisfies."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from rl_training.algorithms.registry import ALGORITHMS, check_action_space, get_spec, register_algorithm
from rl_training.api.agent import Agent, make_agent
from rl_training.api.session import train
from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import ConfigError, SpaceError
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec
from rl_training.data.settings import OffPolicyConfig
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.presets import presets
from rl_training.experiment.yaml_io import parse_yaml
from rl_training.runtime.callbacks import Every
from rl_training.testing.loose_state import loose_state
from rl_training.testing.probes import ACTIONS, PROBE, Probe
from rl_training.testing.resume import crash_and_resume, differences
from rl_training.testing.small import (
    SIZES,
    budget,
    only_offline,
    recorded_data,
    small_networks,
    small_settings,
)

T = TypeVar("T")
OTHER_SPACES = {**ACTIONS, "Text": spaces.Text(5), "Tuple": spaces.Tuple([spaces.Discrete(2)])}
GOOD_SCORE, VALUE_TOLERANCE = 0.7, 0.25
LOOKS = 10
"""How often per run to check whether a probe has been learned, to stop early."""
STEPS = {"on-policy": 6_000, "off-policy": 3_000, "offline": 2_000}
STEPS_OF_RUN = 320
SHARE_GOOD = 0.75
"""How much of the recorded data of probes is good actions, so that imitation learns them as well."""


def check_algorithm(
    spec: AlgorithmSpec,
    *,
    settings: Mapping[str, Any] | None = None,
    learning: bool = True,
    steps: int | None = None,
) -> None:
    """Check an algorithm against the contract that all algorithms of this package satisfy.

    - Its settings are documented, differ in name from those of a run, and survive a round trip through a file.
    - Its presets load.
    - It accepts the action spaces that it declares and refuses all others.
    - A run that is stopped in the middle and resumed ends bitwise equal to one that was not.
    - A checkpoint holds everything that training changes.
    - It learns probes: one-step and two-step environments whose best actions and values are known. If it learns from
      recorded data only, three quarters of that are good actions.

    It need not be registered. The probes are learned with small networks and a large learning rate, if it has these
    settings; `settings` of the algorithm override them in all checks. `steps` is the number of steps per probe;
    `learning=False` skips the probes.

    Raises:
        AssertionError: it violates the contract; every failure is one line.

    Example:
        >>> def test_contract():
        ...     check_algorithm(SPEC)
    """
    suite = _Suite(spec, dict(settings or {}), steps)
    checks: list[Callable[[], Iterator[str]]] = [
        suite.settings_problems,
        suite.round_trip_problems,
        suite.preset_problems,
        suite.space_problems,
        suite.resume_problems,
        suite.state_problems,
    ]
    if learning:
        checks.append(suite.learning_problems)
    failures: list[str] = []
    try:
        with _registered(spec):
            for check in checks:
                failures += _collect(check)
    except ConfigError as error:  # it cannot even be registered
        failures += error.problems
    if failures:
        lines = "\n".join(f"- {failure}" for failure in failures)
        raise AssertionError(f"{spec.title} violates the contract of algorithms:\n{lines}")


def _collect(check: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Failures of a check; an exception counts as a failure."""
    try:
        yield from check()
    except Exception as error:
        name = check.__name__.removesuffix("_problems").replace("_", " ")
        yield f"{name}: {type(error).__name__}: {error}"


@contextmanager
def _registered(spec: AlgorithmSpec) -> Iterator[None]:
    """Register the algorithm temporarily, unless it is registered already."""
    try:
        is_known = get_spec(spec.name).algorithm is spec.algorithm
    except ConfigError:
        is_known = False
    if is_known:
        yield
        return
    register_algorithm(spec)
    try:
        yield
    finally:
        ALGORITHMS.unregister(spec.name)


@dataclass
class _Suite:
    """The checks; each yields one sentence per failure."""

    spec: AlgorithmSpec
    settings: dict[str, Any]
    steps: int | None

    def settings_problems(self) -> Iterator[str]:
        spec = self.spec
        for field in dataclasses.fields(spec.config):
            if not field.metadata.get("help"):
                yield f"settings: '{field.name}' has no help text: make it with setting(default, help)"
        for name in sorted({f.name for f in dataclasses.fields(spec.config)} & _run_settings()):
            yield f"settings: '{name}' is a setting of every run; choose another name"
        for problem in spec.config().problems():
            yield f"settings: the defaults are not compatible: {problem}"
        if not spec.regimes:
            yield "regimes: must not be empty"
        if not spec.paper:
            yield "paper: must not be empty; name the source of the algorithm"

    def round_trip_problems(self) -> Iterator[str]:
        for label, own in (("the defaults", {}), ("small settings", self._small())):
            config = TrainConfig.from_dict({"algo": self.spec.name, "env_id": "any", "algorithm": own})
            data = parse_yaml(config.to_yaml(), "config")
            back = TrainConfig.from_dict(data)
            if back != config:
                yield f"config: {label} change when they are written to a file and read back"

    def preset_problems(self) -> Iterator[str]:
        for preset in presets().values():
            if preset.algo == self.spec.name:
                try:
                    TrainConfig.from_dict(preset.data, str(preset.path))
                except ConfigError as error:
                    yield from (f"preset {preset.name}: {problem}" for problem in error.problems)

    def space_problems(self) -> Iterator[str]:
        observation = Probe(images=self.spec.needs_images).observation_space
        for name, space in OTHER_SPACES.items():
            taken = isinstance(space, self.spec.action_spaces)
            try:
                check_action_space(self.spec, EnvSpec(observation, space))
            except SpaceError as error:
                if taken:
                    yield f"spaces: {name} is in action_spaces, but is rejected: {error}"
            else:
                if not taken:
                    yield f"spaces: {name} is not in action_spaces, but is accepted"
        for name in self._action_spaces():
            try:
                self._agent("walk", name, self._small()).close()
            except Exception as error:
                yield f"spaces: no agent can be created for {name} actions: {type(error).__name__}: {error}"

    def resume_problems(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory() as scratch:
            config = self._run(Path(scratch) / "whole")
            whole = train(config, progress=False).run_dir
            assert whole is not None
            other = config.replace(output_dir=Path(scratch) / "resumed")
            resumed = crash_and_resume(other, [STEPS_OF_RUN // 2])
            found = differences(whole, resumed)
        for name in sorted(found)[:10]:
            yield f"resume: {name} differs after a run was stopped and resumed"
        if len(found) > 10:
            yield f"resume: and {len(found) - 10} more entries differ"

    def state_problems(self) -> Iterator[str]:
        classes = (self.spec.algorithm, self.spec.config)
        roots = {"rl_training", *(cls.__module__.partition(".")[0] for cls in classes)}
        with tempfile.TemporaryDirectory() as scratch:
            for name in loose_state(self._run(Path(scratch)), Path(scratch), roots=roots):
                yield (
                    f"state: {name} changes in training, but is not in checkpoints. Store it in a tensor, an array, a "
                    "Stateful dataclass or a random generator, or name it in `transient` if it is scratch space"
                )

    def learning_problems(self) -> Iterator[str]:
        for actions in self._action_spaces():
            for kind in ("action", "match", "delayed"):
                score, steps = self._learned(kind, actions, _score, lambda score: score > GOOD_SCORE)
                if not score > GOOD_SCORE:
                    yield (
                        f"learning: on the probe '{kind}' with {actions} actions its mean return is {score:.2f} after "
                        f"{steps} steps; the best is 1, and more than {GOOD_SCORE} is required"
                    )
        for kind, shown, right in (("constant", [0.0], [1.0]), ("observation", [-1.0, 1.0], [-1.0, 1.0])):
            probe = Probe(images=self.spec.needs_images)
            batch = np.stack([probe.show(number) for number in shown])

            def is_right(values: Any, right: Any = right) -> bool:
                unknown = only_offline(self.spec) and np.isnan(values).all()  # imitation has no values
                return bool(unknown or np.abs(values - right).max() < VALUE_TOLERANCE)

            read = functools.partial(_values, batch=batch)
            values, steps = self._learned(kind, self._action_spaces()[0], read, is_right)
            if not is_right(values):
                yield (
                    f"learning: on the probe '{kind}' its values are {np.round(values, 2).tolist()} after {steps} "
                    f"steps; the correct values are {right}"
                )

    def _small(self) -> dict[str, Any]:
        own = small_settings(self.spec)
        if "learning_rate" in self.spec.config.__dataclass_fields__:
            own["learning_rate"] = Linear(1e-3, 0.0)
        return {**own, **self.settings}

    def _action_spaces(self) -> list[str]:
        return [name for name, space in ACTIONS.items() if isinstance(space, self.spec.action_spaces)]

    def _run(self, output: Path) -> TrainConfig:
        """A short run with evaluations, normalisation and checkpoints."""
        probe = self._probe("walk", self._action_spaces()[0])
        return TrainConfig.from_dict(
            {
                "algo": self.spec.name,
                "env_id": PROBE,
                "env_kwargs": probe,
                "num_envs": 2,
                **budget(self.spec, STEPS_OF_RUN, Probe(**probe), output.parent / "data"),
                "normalize_obs": not self.spec.needs_images,
                "normalize_reward": not only_offline(self.spec),
                "eval_every": 64,
                "eval_episodes": 1,
                "checkpoint_every": 96,
                "log_every": 32,
                "tensorboard": False,
                "device": "cpu",
                "output_dir": output,
                "algorithm": self._small(),
            }
        )

    def _probe(self, kind: str, actions: str) -> dict[str, Any]:
        return {"kind": kind, "actions": actions, "images": self.spec.needs_images}

    def _agent(self, kind: str, actions: str, own: Mapping[str, Any], **run: Any) -> Agent:
        probe = functools.partial(Probe, **self._probe(kind, actions))
        return make_agent(self.spec.name, probe, eval_every=0, seed=1, device="cpu", **run, **own)

    def _learned(
        self, kind: str, actions: str, read: Callable[[Agent], T], is_good: Callable[[T], bool]
    ) -> tuple[T, int]:
        """Train on a probe until `is_good` or the last step; returns what `read` gives, and the number of steps."""
        names = self.spec.config.__dataclass_fields__
        own: dict[str, Any] = {"gamma": 0.9, **small_networks(self.spec, 32)}
        if issubclass(self.spec.config, OffPolicyConfig):
            own |= {"buffer_size": 2_000, "batch_size": 32, "learning_starts": 200, "num_steps": 1}
            own |= {"updates_per_step": 0.5, "learning_rate": 3e-3, "tau": 0.05, "target_update_every": 1}
            own |= {name: value for name, value in SIZES.items() if name not in own}
            num_envs, steps = 1, STEPS["off-policy"]
        elif only_offline(self.spec):
            own |= {"batch_size": 32, "learning_rate": 3e-3, "tau": 0.05}
            num_envs, steps = 1, STEPS["offline"]
        else:
            own |= {"num_steps": 8, "num_epochs": 4, "learning_rate": 0.01}
            num_envs, steps = 8, STEPS["on-policy"]
        own = {name: value for name, value in own.items() if name in names}
        agent = self._agent(kind, actions, {**own, **self.settings}, num_envs=num_envs)
        steps = self.steps or steps
        look = Every(max(1, steps // LOOKS))
        learn = agent.learn
        if only_offline(self.spec):
            probe = Probe(**self._probe(kind, actions))
            learn = functools.partial(agent.learn_offline, recorded_data(probe, 500, SHARE_GOOD))
        result = learn(
            steps, progress=False, callback=lambda run: not (look.due(run.position) and is_good(read(agent)))
        )
        found = read(agent)
        agent.close()
        return found, result.updates if only_offline(self.spec) else result.env_steps


def _score(agent: Agent) -> float:
    return agent.evaluate(20, deterministic=True, seed=1).mean


def _values(agent: Agent, batch: AnyArray) -> Any:
    return agent.value(batch)


def _run_settings() -> set[str]:
    return {field.name for field in dataclasses.fields(TrainConfig)}
