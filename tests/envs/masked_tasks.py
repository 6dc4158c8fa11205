"""Tasks that say which actions are valid, most of which are not: one that forbids mistakes, one to be learned."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

AnyArray = np.ndarray[Any, np.dtype[Any]]
Where = Literal["obs", "info"]


class InvalidActionError(Exception):
    """An action was taken that the mask forbade."""


class Forbidding(gym.Env[Any, Any]):
    """Another random mask in every step, and an error at the first invalid action.

    Of each choice, `num_valid` actions are valid. Episodes last up to 8 steps; some terminate before, and then no
    action is valid any more (masks in `obs`) or there is no mask (masks in `info`). The reward is the action's number,
    so that it is worth most to take the actions that are valid most rarely.
    """

    def __init__(self, where: Where = "obs", sizes: tuple[int, ...] = (6,), num_valid: int = 1) -> None:
        self.where, self.sizes, self.num_valid = where, sizes, num_valid
        self.action_space: spaces.Space[Any] = (
            spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)
        )
        vector = spaces.Box(-10.0, 10.0, (2,), np.float32)
        mask = spaces.Box(0.0, 1.0, (sum(sizes),), np.float32)  # a float, which normalisation must leave alone
        self.observation_space: spaces.Space[Any] = vector
        if where == "obs":
            self.observation_space = spaces.Dict({"observation": vector, "action_mask": mask})
        self.mask = np.zeros(sum(sizes), np.float32)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._observe(over=False)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        chosen = np.atleast_1d(action)
        valid = [part[number] for part, number in zip(self._parts(), chosen, strict=True)]
        if not all(valid):
            raise InvalidActionError(f"{action} is not valid: {self.mask}")
        self.time += 1
        over = bool(self.np_random.random() < 0.1)
        return *self._observe(over)[:1], float(chosen.sum()), over, self.time == 8, self.info

    def _parts(self) -> list[AnyArray]:
        return np.split(self.mask, np.cumsum(self.sizes)[:-1])

    def _observe(self, over: bool) -> tuple[Any, dict[str, Any]]:
        self.mask = np.zeros(sum(self.sizes), np.float32)
        for part in self._parts():  # views
            part[self.np_random.permutation(len(part))[: self.num_valid]] = 0.0 if over else 1.0
        vector = np.array([self.time, 5.0], np.float32)
        if self.where == "obs":
            self.info: dict[str, Any] = {}
            return {"observation": vector, "action_mask": self.mask.copy()}, self.info
        self.info = {} if over else {"action_mask": self.mask.astype(np.bool_)}
        return vector, self.info

    def get_state(self) -> dict[str, Any]:
        """For exact resume."""
        return {"mask": self.mask, "time": self.time, "np_random": self.np_random}

    def set_state(self, state: dict[str, Any]) -> None:
        """For exact resume."""
        self.mask, self.time, self.np_random = np.array(state["mask"]), state["time"], state["np_random"]


class Corridor(gym.Env[Any, Any]):
    """Walk through rooms with 100 doors, of which 3 open: one leads on (+1), two lead nowhere; 12 steps.

    Which doors open, and which of them leads on, is another matter in each room, but the same in every episode. A
    door that does not open costs a step, no more: so it can be learned without a mask, too, only slower.
    """

    num_doors, num_open, num_steps = 100, 3, 12

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.doors = [rng.permutation(self.num_doors)[: self.num_open] for _ in range(self.num_steps + 1)]
        self.action_space = spaces.Discrete(self.num_doors)
        self.observation_space = spaces.Discrete(self.num_steps + 1)
        self.room = self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.room = self.time = 0
        return self.room, self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        leads_on = bool(action == self.doors[self.room][0])
        self.room += leads_on
        self.time += 1
        return self.room, float(leads_on), False, self.time == self.num_steps, self._info()

    def _info(self) -> dict[str, Any]:
        mask = np.zeros(self.num_doors, np.int8)
        mask[self.doors[self.room]] = 1
        return {"action_mask": mask}
