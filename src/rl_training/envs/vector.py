"""One autoreset convention for every vector environment.

Gymnasium 1.x has three autoreset modes. `AutoresetAdapter` converts each to the same form: `obs` to act on next, and
separately the true last observations of the episodes that ended.

- Disabled: finished environments are reset here, with a reset mask.
- Same step: the last observations are in `info["final_obs"]`.
- Next step: the observation returned is the last one; the *following* step only resets, ignores the action and is not
  a transition. Its row is marked as not valid.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray, map_observation
from rl_training.contracts.environment import VectorStep
from rl_training.contracts.errors import EnvError, RLTrainingError
from rl_training.envs.advice import advice
from rl_training.envs.encoding import SnapshotError
from rl_training.envs.snapshot import restore_vector_snapshot, take_vector_snapshot

AnyVectorEnv = VectorEnv[Any, Any, Any]

_NOBODY: npt.NDArray[np.intp] = np.zeros(0, np.intp)


class AutoresetAdapter:
    """Steps a vector environment and hides its autoreset mode."""

    def __init__(self, env: AnyVectorEnv) -> None:
        self.env = env
        mode = env.metadata.get("autoreset_mode")
        if mode is None:
            warnings.warn(
                f"{env} does not declare its autoreset mode; assuming next-step, Gymnasium's default", stacklevel=2
            )
        self.mode = AutoresetMode(mode) if mode is not None else AutoresetMode.NEXT_STEP
        self.resetting: BoolArray = np.zeros(env.num_envs, np.bool_)
        """Next-step mode: environments whose next row is a reset, not a transition."""
        self.info: Mapping[str, Any] = {}
        """Infos of the last step, or of a reset of all environments."""
        self.reset_info: Mapping[str, Any] = {}
        """Infos of environments that were reset after the last step, if the adapter reset them."""

    @property
    def num_envs(self) -> int:
        """Number of environments, N."""
        return self.env.num_envs

    def reset(self, seed: int | None = None) -> ArrayObservation:
        """Reset every environment. A seed is also that of their spaces, in case an environment draws from these."""
        self.resetting[:] = False
        if seed is not None:
            _seed_spaces(self.env, seed)
        with _env_errors("reset"):
            obs, self.info = self.env.reset(seed=seed)
        return _own(obs)

    def step(self, action: AnyArray) -> VectorStep:
        """Step every environment; `action` in the environment's own units."""
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except RLTrainingError:
            raise
        except (Exception, SystemExit) as error:  # not `_env_errors`, which takes as long as all the rest
            raise _readable(error, "step") from error
        terminated, truncated = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
        obs = _own(obs)
        done = terminated | truncated
        valid, num_valid = ~self.resetting, self.num_envs - int(np.count_nonzero(self.resetting))
        ended = np.flatnonzero(done) if np.count_nonzero(done) else _NOBODY
        reset_info: Mapping[str, Any] = {}
        final_obs: ArrayObservation | None = None
        end_info: Mapping[str, Any] = info
        if len(ended):
            if self.mode is AutoresetMode.SAME_STEP:
                final_obs = self._same_step_final_obs(info, obs, ended)
                end_info = info.get("final_info", {})
            else:
                final_obs = map_observation(lambda x: x[ended].copy(), obs)
            if self.mode is AutoresetMode.DISABLED:
                with _env_errors("reset"):
                    obs, reset_info = self.env.reset(options={"reset_mask": done})
                obs = _own(obs)
        acting = valid
        if self.mode is AutoresetMode.NEXT_STEP:
            self.resetting[:] = done
            acting = ~done
        reward = np.asarray(reward)
        self.info, self.reset_info = info, reset_info
        return VectorStep(
            obs=obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            acting=acting,
            ended=ended,
            final_obs=final_obs,
            end_info=end_info,
            score=reward,
            finished=ended,
            num_valid=num_valid,
        )

    def _same_step_final_obs(
        self, info: Mapping[str, Any], obs: ArrayObservation, ended: npt.NDArray[np.intp]
    ) -> ArrayObservation:
        final = info.get("final_obs")
        if final is None or (not isinstance(final, Mapping) and any(final[index] is None for index in ended)):
            raise EnvError(f"{self.env} declares same-step autoreset, but its info has no 'final_obs'")
        if not isinstance(obs, dict):
            return _stack([final[index] for index in ended], obs)
        if isinstance(final, Mapping):  # Gymnasium gives one dict per environment; others may batch by key
            return {key: _stack([final[key][index] for index in ended], part) for key, part in obs.items()}
        return {key: _stack([final[index][key] for index in ended], part) for key, part in obs.items()}

    def take_snapshot(self) -> dict[str, Any] | str:
        """See `Environments.take_snapshot`."""
        try:
            return {"resetting": self.resetting.copy(), "env": take_vector_snapshot(self.env)}
        except SnapshotError as error:
            return str(error)
        except (Exception, SystemExit) as error:  # an environment's own get_state must not end a run
            return f"taking a snapshot raised {type(error).__name__}: {error}"

    def restore_snapshot(self, snapshot: dict[str, Any]) -> None:
        """See `Environments.restore_snapshot`."""
        self.resetting[:] = np.asarray(snapshot["resetting"])
        restore_vector_snapshot(self.env, snapshot["env"], self.resetting)

    def close(self) -> None:
        """Close the vector environment."""
        self.env.close()


@contextmanager
def _env_errors(doing: str) -> Iterator[None]:
    """Turn an environment's exception into an `EnvError` with its traceback and, if known, the environment's number."""
    try:
        yield
    except RLTrainingError:
        raise
    except (Exception, SystemExit) as error:
        raise _readable(error, doing) from error


def _readable(error: Exception | SystemExit, doing: str) -> EnvError:
    """See `_env_errors`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    numbers = [f.f_locals.get("i") for f in frames if f.f_code.co_filename.endswith(("sync_vector_env.py", "sync.py"))]
    number = f" {numbers[-1]}" if numbers and isinstance(numbers[-1], int) else ""
    problem = f"environment{number} raised {type(error).__name__} in {doing}: {str(error).rstrip('.')}"
    return EnvError(f"{problem}{advice(error, doing)}\n\n{traceback.format_exc()}")


def _own(obs: Any) -> ArrayObservation:
    """Copies that the environment cannot overwrite at its next step; in C order, because sums depend on it."""
    if isinstance(obs, Mapping):
        return {key: np.array(value, order="C") for key, value in obs.items()}
    return np.array(obs, order="C")


def _stack(rows: list[Any], like: AnyArray) -> AnyArray:
    """Rows as one array of the space's dtype: final observations come from the environment without a cast."""
    return np.stack([np.asarray(row) for row in rows]).astype(like.dtype, copy=False)


def _seed_spaces(env: Any, seed: int) -> None:
    """Seed the spaces of environments in this process: Gymnasium gives the first one's a seed from the system."""
    while isinstance(env, gym.vector.VectorWrapper):
        env = env.env
    for index, level in enumerate(getattr(env, "envs", ())):
        while True:
            level.action_space.seed(seed + index)
            level.observation_space.seed(seed + index)
            if not isinstance(level, gym.Wrapper):
                break
            level = level.env
