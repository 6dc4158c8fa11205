"""Deployment: a trained policy as one file that runs without this package.

The file maps raw observations of the environment to its actions: normalisation, network and action bounds are
included. Its outputs are compared with the agent's before the file is written to its final path.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.accelerate import used_tensors
from rl_training.contracts.algorithm import Policy
from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Observation
from rl_training.contracts.errors import ConfigError, ExportError, MissingExtraError
from rl_training.contracts.random import random_stream
from rl_training.contracts.spec import ACTION_MASK, EnvSpec
from rl_training.data.normalize import ObservationNormalizer, RunningMoments
from rl_training.envs.actions import ActionMap
from rl_training.envs.masks import has_choice
from rl_training.experiment.build import Experiment
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.files import safe_name
from rl_training.experiment.metadata import package_versions, utc_now

ExportFormat = Literal["onnx", "torch-export"]
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
BATCH = "batch"
METADATA = "rl_training"
"""Key of the file's metadata: an entry of ONNX metadata, or with `.json` an extra file of a torch.export archive."""
CHECKED_ROWS = (1, 2, 61)
"""Batch sizes used to compare a file with its agent."""
UNBOUNDED = 1e6
"""Width of observation bounds above which an entry counts as unbounded."""
DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}

Predict = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Deterministic prediction of the agent: from observations, state and episode starts to actions and next state."""
Run = Callable[[dict[str, AnyArray]], list[AnyArray]]
"""Runs an exported file on named inputs."""


@dataclass(frozen=True)
class Port:
    """One input or output of an exported file; the shape excludes the batch dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    key: str = ""
    """The key in a Dict observation."""

    def as_dict(self) -> dict[str, Any]:
        """The port as plain data."""
        return {"name": self.name, "shape": [BATCH, *self.shape], "dtype": self.dtype.name}


class NormalizeLayer(nn.Module):
    """Applies `ObservationNormalizer` to one entry, with frozen statistics."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, moments: RunningMoments, normalizer: ObservationNormalizer) -> None:
        super().__init__()
        self.clip = normalizer.clip
        self.register_buffer("mean", torch.from_numpy(moments.mean.copy()))
        self.register_buffer("deviation", torch.from_numpy(np.sqrt(moments.var + normalizer.eps)))

    def forward(self, value: Tensor) -> Tensor:
        """Normalised values, float32."""
        return ((value.double() - self.mean) / self.deviation).clamp(-self.clip, self.clip).float()


class ActionLayer(nn.Module):
    """Applies `ActionMap.to_env`."""

    offset: Tensor
    low: Tensor
    high: Tensor
    half_width: Tensor

    def __init__(self, actions: ActionMap) -> None:
        super().__init__()
        space = actions.space
        self.shape = tuple(space.shape or ())
        self.dtype = torch_dtype(space.dtype, "actions")
        self.is_box = isinstance(space, spaces.Box)
        self.rounds = self.is_box and np.issubdtype(space.dtype, np.integer)
        self.box_actions = actions.box_actions
        self.register_buffer("offset", torch.as_tensor(np.asarray(actions.offset, np.int64)))
        # numpy promotes dtypes of zero-dimensional arrays; torch does not
        reals = np.result_type(np.float32, np.asarray(actions.low).dtype) if self.is_box else np.float32
        half_width = 0.5 * (actions.high - actions.low) if self.box_actions != "clip" else 0.0
        for name, bound in (("low", actions.low), ("high", actions.high), ("half_width", half_width)):
            self.register_buffer(name, torch.as_tensor(np.asarray(bound).astype(reals)))

    def forward(self, flat: Tensor) -> Tensor:
        """Actions [B, ...] in the environment's format, from the policy's flat actions."""
        action = flat.reshape(flat.shape[0], *self.shape)
        if not self.is_box:
            return (action + self.offset).to(self.dtype)
        if self.box_actions != "clip":
            unit = action.tanh() if self.box_actions == "squash" else action.clamp(-1.0, 1.0)
            action = self.low + (unit + 1.0).to(self.low.dtype) * self.half_width
        action = torch.minimum(torch.maximum(action.to(self.low.dtype), self.low), self.high)
        return (action.round() if self.rounds else action).to(self.dtype)


class ExportedPolicy(nn.Module):
    """Maps observations to the deterministic actions of a policy. One argument per port in `inputs`, in that order."""

    def __init__(
        self, policy: Policy, spec: EnvSpec, normalizer: ObservationNormalizer | None, actions: ActionMap
    ) -> None:
        super().__init__()
        if not isinstance(policy, nn.Module) or not callable(getattr(policy, "mode", None)):
            raise ExportError(
                f"{type(policy).__name__} cannot be exported: it has no method `mode(obs)` that computes its "
                "deterministic actions in plain torch code"
            )
        self.policy: Any = copy.deepcopy(policy).cpu().eval().requires_grad_(False)
        self.state_size = int(getattr(policy, "state_size", 0))
        self.observations = observation_ports(spec)
        self.inputs = list(self.observations)
        self.outputs = [Port("action", tuple(spec.action_space.shape or ()), np.dtype(spec.action_space.dtype))]
        if self.state_size:
            state = np.dtype(np.float32)
            self.inputs += [Port("state", (self.state_size,), state), Port("episode_start", (), np.dtype(np.bool_))]
            self.outputs.append(Port("next_state", (self.state_size,), state))
        moments = {} if normalizer is None else normalizer.moments
        self.normalizers = nn.ModuleList(
            NormalizeLayer(moments[port.key], normalizer) if normalizer and port.key in moments else nn.Identity()
            for port in self.observations
        )
        self.action = ActionLayer(actions)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The actions, and the next state if the policy is recurrent."""
        count = len(self.observations)
        seen = [layer(value) for layer, value in zip(self.normalizers, inputs[:count], strict=True)]
        keys = [port.key for port in self.observations]
        obs: Observation = seen[0] if keys == [""] else dict(zip(keys, seen, strict=True))
        if not self.state_size:
            return self.action(self.policy.mode(obs))  # type: ignore[no-any-return]
        action, state = self.policy.mode(obs, *inputs[count:])
        return self.action(action), state

    def leave_out_unused(self, example: tuple[Tensor, ...]) -> None:
        """Delete submodules of the policy that acting does not use, such as critics."""
        with torch.no_grad():
            is_used = used_tensors(lambda: self(*example))
        for name, part in list(self.policy.named_children()):
            tensors = [*part.parameters(), *part.buffers()]
            if tensors and not any(map(is_used, tensors)):
                delattr(self.policy, name)


def torch_dtype(dtype: Any, what: str) -> torch.dtype:
    """The torch dtype of a numpy dtype; an error if files cannot hold it."""
    if np.dtype(dtype) not in DTYPES:
        known = ", ".join(str(known) for known in DTYPES)
        raise ExportError(f"{what} of type {np.dtype(dtype)} cannot be exported; accepted: {known}")
    found: torch.dtype = DTYPES[np.dtype(dtype)]
    return found


def observation_ports(spec: EnvSpec) -> list[Port]:
    """The inputs for an observation: `obs`, or `obs.<key>` for each entry of a Dict, and `action_mask`."""
    space = spec.observation_space
    if not isinstance(space, spaces.Dict):
        return [_port("obs", space)]
    single = spec.action_masks and set(space.spaces) == {"observation", ACTION_MASK}
    names = {key: "obs" if single else f"obs.{key}" for key in space.spaces}
    if spec.action_masks:
        names[ACTION_MASK] = ACTION_MASK
    return [_port(names[key], part, key) for key, part in space.spaces.items()]


def _port(name: str, space: spaces.Space[Any], key: str = "") -> Port:
    torch_dtype(space.dtype, f"observations '{key}'" if key else "observations")
    return Port(name, tuple(space.shape or ()), np.dtype(space.dtype), key)


def default_name(config: TrainConfig, format: ExportFormat) -> str:  # noqa: A002 - as in the public API
    """The default file name for an agent: `ppo-CartPole-v1.onnx`."""
    return safe_name(f"{config.algo}-{config.env_id}") + SUFFIXES[format]


def require_export(path: Path, format: str) -> None:  # noqa: A002 - as in the public API
    """Raise an error before any work if the format cannot be written."""
    if format not in get_args(ExportFormat):
        raise ConfigError(f"format: expected {' or '.join(get_args(ExportFormat))}, got {format!r}")
    if path.suffix != SUFFIXES[format]:
        raise ConfigError(f"path: must end in {SUFFIXES[format]} for the format {format}, got '{path}'")
    if format == "onnx" and any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        raise MissingExtraError("exporting to ONNX", "export")


def export_policy(experiment: Experiment, path: Path, format: ExportFormat, predict: Predict) -> dict[str, Any]:  # noqa: A002
    """Write the deterministic policy to a file after comparing it with `predict`; returns the file's metadata."""
    require_export(path, format)
    collector, spec = experiment.trainer.collector, experiment.spec
    module = ExportedPolicy(experiment.trainer.policy, spec, collector.obs_normalizer, experiment.actions)
    about = describe(experiment, module, format)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        with _explained(format):
            run = WRITERS[format](module, _trace(module, spec), beside / path.name, json.dumps(about))
        compare(run, module, predict, spec, collector.obs_normalizer)
        os.replace(beside / path.name, path)
    except OSError as error:
        raise ExportError(f"{path}: could not be written: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return about


def describe(experiment: Experiment, module: ExportedPolicy, format: str) -> dict[str, Any]:  # noqa: A002
    """The metadata of an exported file."""
    config = experiment.config
    return {
        "format": format,
        "algo": config.algo,
        "env_id": config.env_id,
        "env_kwargs": config.env_kwargs,
        "env_steps": experiment.trainer.env_steps,
        "inputs": [port.as_dict() for port in module.inputs],
        "outputs": [port.as_dict() for port in module.outputs],
        "created": utc_now().isoformat(timespec="seconds"),
        "versions": package_versions(),
    }


def _trace(module: ExportedPolicy, spec: EnvSpec) -> torch.export.ExportedProgram:
    rows = 3  # not 1, which torch would specialise to a constant
    obs = draw_observations(spec, rows, random_stream(0, "example"))
    parts = obs if isinstance(obs, dict) else {"": obs}
    seen = [torch.from_numpy(parts[port.key]) for port in module.observations]
    rest = [torch.zeros(rows, *port.shape, dtype=DTYPES[port.dtype]) for port in module.inputs[len(seen) :]]
    example = (*seen, *rest)
    module.leave_out_unused(example)
    program = torch.export.export(module, example, dynamic_shapes=_dynamic(module), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains local file names
    program.example_inputs = None  # would be pickled
    return program


def _dynamic(module: ExportedPolicy) -> tuple[Any, ...]:
    """Declare a dynamic batch size, shared by all inputs."""
    batch = torch.export.Dim(BATCH)
    return (tuple({0: batch} for _ in module.inputs),)


def _write_onnx(module: ExportedPolicy, traced: torch.export.ExportedProgram, path: Path, about: str) -> Run:
    import onnxruntime

    program = torch.onnx.export(
        traced,
        dynamo=True,
        input_names=[port.name for port in module.inputs],
        output_names=[port.name for port in module.outputs],
        dynamic_shapes=_dynamic(module),
        verbose=False,
    )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    program.model.metadata_props[METADATA] = about
    program.save(str(path), external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, AnyArray]) -> list[AnyArray]:
        return [np.asarray(output) for output in session.run(None, inputs)]

    return run


def _write_torch_export(module: ExportedPolicy, traced: torch.export.ExportedProgram, path: Path, about: str) -> Run:
    torch.export.save(traced, path, extra_files={f"{METADATA}.json": about})
    loaded = traced.module()  # not loaded from the file: torch may unpickle parts of it

    def run(inputs: dict[str, AnyArray]) -> list[AnyArray]:
        with torch.no_grad():
            found = loaded(*(torch.from_numpy(inputs[port.name]) for port in module.inputs))
        return [output.numpy() for output in (found if isinstance(found, tuple) else (found,))]

    return run


WRITERS: dict[str, Callable[[ExportedPolicy, torch.export.ExportedProgram, Path, str], Run]] = {
    "onnx": _write_onnx,
    "torch-export": _write_torch_export,
}


@contextlib.contextmanager
def _explained(format: str) -> Iterator[None]:  # noqa: A002
    """Silence the exporters' output, and turn their failures into an `ExportError`."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            log.setLevel(logging.ERROR)
            yield
    except (ExportError, OSError):
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExportError(
            f"this policy cannot be exported as {format}: {reason}. A custom network must be traceable by "
            "torch.export: no Python branches on tensor values."
        ) from error
    finally:
        log.setLevel(level)


# Comparison of a file with its agent


def compare(
    run: Run, module: ExportedPolicy, predict: Predict, spec: EnvSpec, normalizer: ObservationNormalizer | None
) -> None:
    """Raise an error if the file's actions for random observations differ from the agent's."""
    rng, scale = random_stream(0, "export"), _scale(spec.action_space)
    for rows in CHECKED_ROWS:
        state = np.zeros((rows, module.state_size), np.float32)
        for start in (np.ones(rows, np.bool_), rng.random(rows) < 0.3) if module.state_size else (None,):
            obs = draw_observations(spec, rows, rng, normalizer)
            parts = obs if isinstance(obs, dict) else {"": obs}
            inputs = {port.name: parts[port.key] for port in module.observations}
            expected, after = predict(obs, None if start is None else torch.from_numpy(state), start)
            if start is None:
                _compare_arrays("action", np.asarray(expected), run(inputs)[0], scale)
                continue
            found, next_state = run({**inputs, "state": state, "episode_start": start})
            _compare_arrays("action", np.asarray(expected), found, scale)
            state = np.asarray(after.cpu())
            _compare_arrays("next_state", state, next_state)


def _scale(space: spaces.Space[Any]) -> float:
    """The magnitude of actions, for the rounding tolerance; 0 if the space is unbounded."""
    bounds = np.abs([space.low, space.high]).astype(np.float64) if isinstance(space, spaces.Box) else np.zeros(1)
    return float(np.where(bounds < UNBOUNDED, bounds, 0.0).max(initial=0.0))


def _compare_arrays(name: str, expected: AnyArray, found: AnyArray, scale: float = 0.0) -> None:
    """Raise an error unless integers are equal and floats agree up to rounding."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise ExportError(
            f"the exported file was not written: its '{name}' is {found.dtype} {found.shape}, and predict gives "
            f"{expected.dtype} {expected.shape}"
        )
    same = found == expected
    if np.issubdtype(expected.dtype, np.floating):
        tolerance = max(1e-4, 2.0 * float(np.finfo(expected.dtype).eps))
        largest = max(scale, float(np.abs(expected).max(initial=0.0)))
        same = np.abs(found.astype(np.float64) - expected.astype(np.float64)) <= tolerance * largest
    if not same.all():
        rows = np.unique(np.argwhere(~same)[:, 0])
        raise ExportError(
            f"the exported file was not written: for {len(rows)} of {len(same)} random observations '{name}' differs "
            f"from predict, for example {found[rows[0]]!r:.80} instead of {expected[rows[0]]!r:.80}"
        )


def draw_observations(
    spec: EnvSpec, rows: int, rng: np.random.Generator, normalizer: ObservationNormalizer | None = None
) -> ArrayObservation:
    """Random observations [rows, ...]; half of the normalised ones are drawn from the running statistics."""
    space = spec.observation_space
    moments: Mapping[str, RunningMoments] = {} if normalizer is None else normalizer.moments
    if not isinstance(space, spaces.Dict):
        return _draw(space, rows, rng, moments.get(""))
    found = {key: _draw(part, rows, rng, moments.get(key)) for key, part in space.spaces.items()}
    if spec.action_masks:
        mask = found[ACTION_MASK] = (rng.random(found[ACTION_MASK].shape) < 0.5).astype(found[ACTION_MASK].dtype)
        mask[~has_choice(mask, spec.action_space)] = 1
    return found


def _draw(space: spaces.Space[Any], rows: int, rng: np.random.Generator, moments: RunningMoments | None) -> AnyArray:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        own = copy.deepcopy(space)
        own.seed(int(rng.integers(2**31)))
        return np.stack([np.asarray(own.sample(), space.dtype) for _ in range(rows)])
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    normal = rng.standard_normal((rows, *space.shape))
    with np.errstate(over="ignore", invalid="ignore"):
        bounded = high - low < UNBOUNDED
        inside = np.where(bounded, low, 0.0) + rng.random(normal.shape) * np.where(bounded, high - low, 0.0)
    found = np.where(bounded, inside, 3.0 * normal)
    if moments is not None:
        found[::2] = (moments.mean + np.sqrt(moments.var) * 3.0 * normal)[::2]
    return np.clip(found, low, high).astype(space.dtype)
