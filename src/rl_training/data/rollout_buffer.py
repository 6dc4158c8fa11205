"""Rollout buffer of an on-policy iteration: [T, N] rows in time order."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.contracts.algorithm import Policy, ScoringPolicy
from rl_training.contracts.arrays import ArrayObservation, BoolArray, map_observation
from rl_training.contracts.batches import Observation, RolloutBatch, Step
from rl_training.contracts.errors import DataError
from rl_training.contracts.spec import EnvSpec
from rl_training.contracts.state import Stateful
from rl_training.functional.returns import gae, vtrace

Shape = tuple[int, ...]
WRITTEN = ("actions", "logprobs", "rewards", "values", "dones", "truncated", "valid")
"""Columns that are written at every step, through numpy arrays on the same memory, which are faster to write."""


def channels_last(images: Tensor) -> Tensor:
    """Convert uint8 images to the channels-last memory format for convolutions; return anything else unchanged.

    Done once here, instead of in the encoder for every minibatch of every epoch.
    """
    is_image = images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] < min(images.shape[2:])
    return images.contiguous(memory_format=torch.channels_last) if is_image else images


class RolloutBuffer(Stateful):
    """Rows `obs, actions, logprobs, rewards, dones, values`, and `advantages, returns` once computed; all [T, N, ...].

    `dones` marks rows in which an episode ended; `truncated` those of them that were cut by a limit and therefore
    bootstrap from `final_values`, the value of the episode's true last observation. With next-step autoreset, `valid`
    is false where the environment only reset itself. `obs` holds the policy's inputs, from which the log-probabilities
    were computed.

    The buffer is full at the end of `collect` and consumed by `update` in the same iteration, so checkpoints save
    nothing of it.

    Example:
        >>> buffer = RolloutBuffer(num_steps=2, num_envs=1, obs_shape=(4,), action_shape=())
        >>> buffer.rewards[:] = 1.0
        >>> buffer.compute_returns_and_advantages(last_value=torch.zeros(1), gamma=1.0, gae_lambda=1.0)
        >>> buffer.returns.flatten().tolist()
        [2.0, 1.0]
    """

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        obs_shape: Shape | Mapping[str, Shape],
        action_shape: Shape,
        *,
        obs_dtype: Any = np.float32,
        action_dtype: Any = np.float32,
    ) -> None:
        self.num_steps, self.num_envs = num_steps, num_envs
        rows = (num_steps, num_envs)

        def zeros(shape: Shape = (), dtype: Any = np.float32) -> Tensor:
            return torch.from_numpy(np.zeros(rows + tuple(shape), dtype=dtype))

        self.obs: Observation
        if isinstance(obs_shape, Mapping):
            dtypes = obs_dtype if isinstance(obs_dtype, Mapping) else dict.fromkeys(obs_shape, obs_dtype)
            self.obs = {key: zeros(shape, dtypes[key]) for key, shape in obs_shape.items()}
        else:
            self.obs = zeros(obs_shape, obs_dtype)
        self.actions = zeros(action_shape, action_dtype)
        self.logprobs, self.rewards, self.values = zeros(), zeros(), zeros()
        self.dones, self.truncated, self.valid = (zeros(dtype=np.bool_) for _ in range(3))
        self.final_values, self.advantages, self.returns = zeros(), zeros(), zeros()
        self.last_obs: ArrayObservation | None = None
        self.first_state: Any = None
        """The policy's opaque state before the first row."""
        self.first_starts: BoolArray = np.ones(num_envs, np.bool_)
        """Which environments begin an episode in the first row."""
        self._obs_rows: Any = map_observation(Tensor.numpy, self.obs)
        self._rows = {name: getattr(self, name).numpy() for name in WRITTEN}
        self.reset()

    @classmethod
    def for_spec(cls, spec: EnvSpec, num_steps: int, num_envs: int, *, normalized_keys: Any = ()) -> RolloutBuffer:
        """A buffer for an environment's spaces; entries that are normalised are kept as float32."""

        def kind(key: str, space: spaces.Space[Any]) -> Any:
            return np.float32 if key in normalized_keys else (space.dtype or np.float32)

        obs = spec.observation_space
        shape: Any
        dtype: Any
        if isinstance(obs, spaces.Dict):
            shape = {key: tuple(part.shape or ()) for key, part in obs.spaces.items()}
            dtype = {key: kind(key, part) for key, part in obs.spaces.items()}
        else:
            shape, dtype = tuple(obs.shape or ()), kind("", obs)
        action_dtype = np.float32 if isinstance(spec.action_space, spaces.Box) else np.int64
        action_shape = tuple(spec.action_space.shape or ())
        return cls(num_steps, num_envs, shape, action_shape, obs_dtype=dtype, action_dtype=action_dtype)

    def reset(self) -> None:
        """Begin a new rollout."""
        self.size = 0
        self.has_scores = True
        """Whether log-probabilities and values came with every step; if not, `score` computes them."""
        self.valid.fill_(True)
        self.final_rows: list[tuple[int, int]] = []
        self.final_obs: list[ArrayObservation] = []

    def add(self, step: Step) -> None:
        """Write one step of all environments."""
        t = self.size
        if t >= self.num_steps:
            raise IndexError(f"the rollout buffer is full: it has {self.num_steps} steps")
        if isinstance(step.policy_obs, dict):
            for key, store in self._obs_rows.items():
                store[t] = step.policy_obs[key]
        else:
            self._obs_rows[t] = step.policy_obs
        rows = self._rows
        rows["actions"][t] = step.action
        rows["rewards"][t] = step.policy_reward
        if step.extras:
            rows["logprobs"][t] = step.extras["logprobs"]
            rows["values"][t] = step.extras["values"]
        else:
            self.has_scores = False
        rows["valid"][t] = step.valid
        rows["dones"][t] = step.terminated | step.truncated
        rows["truncated"][t] = step.truncated & ~step.terminated
        if step.final_policy_obs is not None:
            for row, env in enumerate(step.ended):
                if step.truncated[env] and not step.terminated[env]:
                    self.final_rows.append((t, int(env)))
                    self.final_obs.append(map_observation(lambda x, row=row: x[row], step.final_policy_obs))  # type: ignore[misc]
        self.size += 1

    def export(self) -> dict[str, Any]:
        """The rollout as arrays of its own and plain values: what `join` takes."""
        size = self.size
        return {
            "obs": map_observation(lambda x: x[:size].copy(), self._obs_rows),
            **{name: rows[:size].copy() for name, rows in self._rows.items()},
            "final_rows": np.array(self.final_rows, np.int64).reshape(-1, 2),
            "final_obs": self.stacked_final_obs(),
            "last_obs": copy.deepcopy(self.last_obs),
            "first_state": copy.deepcopy(self.first_state),
            "first_starts": self.first_starts.copy(),
        }

    def join(self, parts: Sequence[Mapping[str, Any]], num_steps: int | None = None) -> None:
        """Fill the buffer with exported rollouts of equal length, side by side in this order.

        Only the first `num_steps` steps are taken; by default, all.
        """
        self.reset()
        full = len(parts[0]["rewards"])
        self.size = size = min(num_steps or full, full)

        def beside(name: str) -> Any:
            return _concatenate([part[name] for part in parts], axis=1)

        for name, rows in self._rows.items():
            rows[:size] = beside(name)[:size]
        _put(self._obs_rows, size, beside("obs"))
        following = [part["last_obs"] if size == full else _row(part["obs"], size) for part in parts]
        self.last_obs = _concatenate(following)
        self.first_starts = np.concatenate([part["first_starts"] for part in parts])
        states = [part["first_state"] for part in parts]
        together = all(isinstance(state, (Tensor, np.ndarray)) for state in states)
        self.first_state = torch.cat([torch.as_tensor(state) for state in states]) if together else None
        first_env = 0
        for part in parts:
            for place, (step, env) in enumerate(part["final_rows"].tolist()):
                if step < size:
                    self.final_rows.append((step, first_env + env))
                    self.final_obs.append(_row(part["final_obs"], place))
            first_env += part["rewards"].shape[1]

    def score(self, policy: Policy, device: torch.device) -> None:
        """Compute log-probabilities and values of all rows with the policy that acted, unless acting returned them.

        Called before the update: behaviour log-probabilities belong to the weights that acted.
        """
        if self.has_scores:
            return

        def rows(store: Tensor) -> Tensor:
            return store[: self.size].reshape(-1, *store.shape[2:]).to(device)

        logprobs, values = cast("ScoringPolicy", policy).score(map_observation(rows, self.obs), rows(self.actions))
        self.logprobs[: self.size] = logprobs.reshape(self.size, self.num_envs)
        self.values[: self.size] = values.reshape(self.size, self.num_envs)
        self.has_scores = True

    def stacked_final_obs(self) -> ArrayObservation | None:
        """True last observations of the truncated rows, in the order of `final_rows`; None if there are none."""
        if not self.final_obs:
            return None
        first = self.final_obs[0]
        if isinstance(first, dict):
            return {key: np.stack([cast("dict[str, Any]", obs)[key] for obs in self.final_obs]) for key in first}
        return np.stack(cast("list[Any]", self.final_obs))

    def compute_returns_and_advantages(
        self, last_value: Tensor, gamma: float, gae_lambda: float, final_values: Tensor | None = None
    ) -> None:
        """Fill `advantages` and `returns`.

        `last_value` [N] is the value of the observations after the last row; `final_values` [K] those of
        `final_rows`. A row marked in `dones` alone counts as terminated; one that is also in `truncated` bootstraps.
        """
        size = self.size or self.num_steps
        next_values = self._next_values(last_value, final_values)
        dones, truncated = self.dones[:size].bool(), self.truncated[:size].bool()
        self.advantages[:size], self.returns[:size] = gae(
            self.rewards[:size].float(),
            self.values[:size].float(),
            next_values,
            terminated=dones & ~truncated,
            ended=dones,
            gamma=gamma,
            gae_lambda=gae_lambda,
        )

    def compute_vtrace(
        self,
        logprobs: Tensor,
        last_value: Tensor,
        gamma: float,
        *,
        gae_lambda: float = 1.0,
        clip_rho: float = 1.0,
        clip_c: float = 1.0,
        final_values: Tensor | None = None,
    ) -> None:
        """Fill `advantages` and `returns` by V-trace, like `compute_returns_and_advantages`.

        `logprobs` [T, N] and the values in the buffer are those of the policy that learns; the log-probabilities in the
        buffer are those of the policy that acted.
        """
        size = self.size or self.num_steps
        next_values = self._next_values(last_value, final_values)
        dones, truncated = self.dones[:size].bool(), self.truncated[:size].bool()
        self.advantages[:size], self.returns[:size] = vtrace(
            logprobs - self.logprobs[:size],
            self.rewards[:size].float(),
            self.values[:size].float(),
            next_values,
            terminated=dones & ~truncated,
            ended=dones,
            gamma=gamma,
            decay=gae_lambda,
            clip_rho=clip_rho,
            clip_c=clip_c,
        )

    def _next_values(self, last_value: Tensor, final_values: Tensor | None) -> Tensor:
        """The value of each row's true next observation."""
        size = self.size or self.num_steps
        if self.final_rows:
            if final_values is None:
                raise DataError(f"{len(self.final_rows)} episodes were truncated: pass final_values for them")
            steps, envs = zip(*self.final_rows, strict=True)
            self.final_values[list(steps), list(envs)] = final_values.detach().to(self.final_values)
        values = self.values[:size].float()
        last = torch.as_tensor(last_value).detach().to(values).reshape(1, self.num_envs)
        return torch.where(self.truncated[:size].bool(), self.final_values[:size], torch.cat([values[1:], last]))

    def episode_starts(self) -> Tensor:
        """Rows [T, N] in which an episode begins: after the end of one, and after a row that only reset."""
        size = self.size or self.num_steps
        starts = self.dones[: size - 1] | ~self.valid[: size - 1]
        return torch.cat([torch.from_numpy(self.first_starts).unsqueeze(0), starts])

    def flatten(self, device: torch.device | str = "cpu") -> RolloutBatch:
        """The valid rows as one batch [B], time-major."""
        size = self.size or self.num_steps
        keep = self.valid[:size].reshape(-1)
        everything = bool(keep.all())

        def rows(store: Tensor) -> Tensor:
            flat = store[:size].reshape(-1, *store.shape[2:])
            return (flat if everything else flat[keep]).to(device)

        return RolloutBatch(
            obs=map_observation(lambda store: channels_last(rows(store)), self.obs),
            actions=rows(self.actions),
            logprobs=rows(self.logprobs),
            values=rows(self.values),
            advantages=rows(self.advantages),
            returns=rows(self.returns),
        )

    def state_dict(self) -> dict[str, Any]:
        """Empty: a rollout is used up within its iteration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


def _concatenate(parts: list[Any], axis: int = 0) -> Any:
    """Observations of several workers as one."""
    if isinstance(parts[0], dict):
        return {key: np.concatenate([part[key] for part in parts], axis) for key in parts[0]}
    return np.concatenate(parts, axis)


def _row(obs: ArrayObservation, index: int) -> ArrayObservation:
    return map_observation(lambda x: x[index], obs)


def _put(store: Any, size: int, rows: Any) -> None:
    """Write the first rows of an observation."""
    if isinstance(store, dict):
        for key, column in store.items():
            column[:size] = rows[key][:size]
    else:
        store[:size] = rows[:size]
