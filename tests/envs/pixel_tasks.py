"""Small tasks that are seen as pixels, each with a known best return."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SIZE = 16
"""Pixels of a side: just enough for four convolutions."""


class Dot(gym.Env[Any, Any]):
    """A bright square on black that an action moves to the left or right; the reward is how near the middle it is.

    Episodes are cut after 9 steps, and terminate when the square has come to an edge.
    """

    def __init__(self, action_space: spaces.Space[Any] | None = None) -> None:
        self.observation_space = spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)
        self.action_space = action_space or spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.given: list[Any] = []
        self.place, self.time = 0.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time = float(self.np_random.uniform(-0.6, 0.6)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.given.append(np.array(action))
        self.place = float(np.clip(self.place + 0.1 * np.mean(action), -1.0, 1.0))
        self.time += 1
        return self._observe(), 1.0 - abs(self.place), abs(self.place) == 1.0, self.time == 9, {}

    def _observe(self) -> Any:
        image = np.zeros((SIZE, SIZE, 1), np.uint8)
        column = round((self.place + 1.0) / 2.0 * (SIZE - 4))
        image[6:10, column : column + 4] = 255
        image[0, 0] = self.time  # no two frames of an episode are alike
        return image

    def get_state(self) -> dict[str, Any]:
        """See `envs.snapshot`."""
        return {"place": self.place, "time": self.time, "rng": self.np_random}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `envs.snapshot`."""
        self.place, self.time, self.np_random = state["place"], state["time"], state["rng"]


DOT = "tests/Dot-v0"
if DOT not in gym.registry:
    gym.register(DOT, entry_point=Dot)


class Glyphs(gym.Env[Any, Any]):
    """One step: say whether the stroke in the first of three channels rises or falls (+1). The others show others.

    A stroke is a diagonal of five pixels in an image of hundreds, and may be anywhere, but for every fifth place: there
    it is only with `held_out`. What is learned of some places has to hold in others: what convolutions are for.
    With `scrambled`, every pixel is in another place, always the same one: nothing is lost but who is whose neighbour.

    With a number beside the image, there is one action more, and it is right where the number is 9, in a quarter of all
    cases: who sees the image alone is right in three of four, and who sees the number alone in five of eight.
    """

    length, num_channels = 5, 3

    def __init__(
        self,
        size: int = 36,
        channels: Literal["first", "last"] = "last",
        *,
        number: bool = False,
        held_out: bool = False,
        scrambled: bool = False,
    ) -> None:
        self.size, self.channels, self.number, self.held_out = size, channels, number, held_out
        shape = (self.num_channels, size, size) if channels == "first" else (size, size, self.num_channels)
        image = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space: spaces.Space[Any] = image
        if number:
            self.observation_space = spaces.Dict({"image": image, "number": spaces.Box(0.0, 9.0, (1,), np.float32)})
        self.action_space = spaces.Discrete(2 + number)
        places = np.arange(image.low.size)
        self.places = np.random.default_rng(0).permutation(places) if scrambled else places
        self.answer = 0
        self.shown: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        strokes = [int(stroke) for stroke in self.np_random.integers(2, size=self.num_channels)]
        image = np.stack([self._draw(stroke) for stroke in strokes], axis=0 if self.channels == "first" else -1)
        image = image.reshape(-1)[self.places].reshape(image.shape)
        number = 9 * int(self.np_random.random() < 0.25) if self.number else 0
        self.answer = 2 if number else strokes[0]
        self.shown = {"image": image, "number": np.array([number], np.float32)} if self.number else image
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.shown, float(action == self.answer), True, False, {}

    def _draw(self, stroke: int) -> Any:
        image = np.zeros((self.size, self.size), np.uint8)
        row = column = -1
        while row < 0 or ((row + 2 * column) % 5 == 0) != self.held_out:
            row, column = (int(place) for place in self.np_random.integers(self.size - self.length + 1, size=2))
        along = np.arange(self.length)
        image[row + along, column + (along[::-1] if stroke else along)] = 255
        return image


class Motion(gym.Env[Any, Any]):
    """Say to which side a dot has just moved (+1 in each of 8 steps but the first): one frame does not tell."""

    size, num_steps = 6, 8

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (self.size, self.size, 1), np.uint8)
        self.action_space = spaces.Discrete(2)
        self.row = self.column = self.time = 0
        self.direction: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.row, self.column = (int(place) for place in self.np_random.integers(self.size, size=2))
        self.time, self.direction = 0, None
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.direction)
        self.direction = int(self.np_random.integers(2))
        self.column = (self.column + 2 * self.direction - 1) % self.size
        self.time += 1
        return self._observe(), reward, False, self.time == self.num_steps, {}

    def _observe(self) -> Any:
        image = np.zeros((self.size, self.size, 1), np.uint8)
        image[self.row, self.column] = 255
        return image
