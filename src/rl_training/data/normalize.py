"""Running normalisation of observations and rewards; saved in checkpoints, frozen during evaluation."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray
from rl_training.contracts.state import Stateful

Float64 = npt.NDArray[np.float64]


class RunningMoments(Stateful):
    """Running mean and variance, by Chan et al.'s parallel update, in float64."""

    transient: ClassVar[tuple[str, ...]] = ("recent",)

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.recent: RunningMoments | None = None
        """Moments of the batches since it was set, if a worker has to report them."""
        self.mean: Float64 = np.zeros(shape, np.float64)
        self.var: Float64 = np.ones(shape, np.float64)
        self.count: Float64 = np.zeros((), np.float64)

    def update(self, batch: AnyArray) -> None:
        """Update the statistics with a batch [B, ...]."""
        if len(batch) == 0:
            return
        batch = batch.astype(np.float64, copy=False)
        self.merge(batch.mean(axis=0), batch.var(axis=0), len(batch))

    def merge(self, mean: Any, var: Any, count: Any) -> None:
        """Update the statistics with the mean and variance of `count` rows."""
        if count == 0:
            return
        if self.recent is not None:
            self.recent.merge(mean, var, count)
        total = self.count + count
        delta = mean - self.mean
        squares = self.var * self.count + var * count + np.square(delta) * self.count * count / total
        self.mean[...] = self.mean + delta * (count / total)
        self.var[...] = squares / total
        self.count[...] = total


class ObservationNormalizer(Stateful):
    """Scales real-valued observations to zero mean and unit variance, and clips them.

    Only floating-point Box entries are normalised; images, discrete and binary entries are unchanged.
    """

    def __init__(self, space: spaces.Space[Any], clip: float = 10.0, eps: float = 1e-8) -> None:
        self.clip, self.eps = clip, eps
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        self.moments = {
            key: RunningMoments(part.shape)
            for key, part in parts.items()
            if isinstance(part, spaces.Box) and np.issubdtype(part.dtype, np.floating)
        }

    @property
    def is_new(self) -> bool:
        """Whether it has no statistics yet."""
        return all(moments.count == 0 for moments in self.moments.values())

    def update(self, obs: ArrayObservation) -> None:
        """Update the statistics with a batch of observations."""
        for key, moments in self.moments.items():
            moments.update(obs[key] if isinstance(obs, dict) else obs)

    def __call__(self, obs: ArrayObservation) -> ArrayObservation:
        """Normalised observations (float32), without updating the statistics."""
        if isinstance(obs, dict):
            return {key: self._normalize(key, value) for key, value in obs.items()}
        return self._normalize("", obs)

    def _normalize(self, key: str, value: AnyArray) -> AnyArray:
        moments = self.moments.get(key)
        if moments is None:
            return value
        scaled = (value - moments.mean) / np.sqrt(moments.var + self.eps)
        return np.clip(scaled, -self.clip, self.clip).astype(np.float32)


class RewardNormalizer(Stateful):
    """Divides rewards by the running standard deviation of the discounted return (not centred), and clips them."""

    per_env: ClassVar[tuple[str, ...]] = ("returns",)

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0, eps: float = 1e-8) -> None:
        self.gamma, self.clip, self.eps = gamma, clip, eps
        self.moments = RunningMoments()
        self.returns: Float64 = np.zeros(num_envs, np.float64)

    def restart(self) -> None:
        """Clear the running returns (all environments were reset)."""
        self.returns[:] = 0.0

    def __call__(self, reward: AnyArray, ended: BoolArray, valid: BoolArray) -> AnyArray:
        """Normalised rewards [N], after updating the statistics with them."""
        self.returns[valid] = self.returns[valid] * self.gamma + reward[valid]
        self.moments.update(self.returns[valid])
        self.returns[ended] = 0.0
        return self.scale(reward)

    def scale(self, reward: AnyArray) -> AnyArray:
        """Normalised rewards of any shape, without updating the statistics."""
        scaled = reward / np.sqrt(self.moments.var + self.eps)
        return np.clip(scaled, -self.clip, self.clip).astype(np.float32)
