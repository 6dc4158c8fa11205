"""Replay buffer in time order: a ring buffer of steps in which every observation is stored once.

The ring has one row per step of all N environments. A transition's next observation is the next row's observation.
Where an episode ended, that row belongs to the next episode, and the true last observation is stored separately.
Because rows are in time order, n-step returns, whole episodes and hindsight are computed when sampling and need no
storage of their own.

Stacked frames are stored frame by frame, and the stacks are rebuilt from the preceding rows.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray, map_observation
from rl_training.contracts.batches import Step
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.spec import EnvSpec, FrameStack
from rl_training.contracts.state import Segment, Stateful, check_keys, check_plain, check_tensor
from rl_training.data import frames

Indices = npt.NDArray[np.int64]
RewardFn = Callable[[AnyArray], AnyArray]

SEGMENT_BYTES = 32 * 2**20
"""Size of one replay file; a checkpoint rewrites at most this much."""


class OtherNumberOfEnvsError(CheckpointError):
    """A saved replay buffer of another number of environments."""


class Window(NamedTuple):
    """The n steps [B, n] that start at each of B transitions, and which of them belong to the n-step return."""

    steps: Indices
    used: BoolArray


def discounted_sums(rewards: AnyArray, gamma: float) -> AnyArray:
    """Discounted sum of the rewards from each step to the last one.

    Example:
        >>> discounted_sums(np.array([1.0, 2.0, 4.0]), 0.5).tolist()
        [3.0, 4.0, 4.0]
    """
    sums = np.array(rewards, np.float64)
    for step in range(len(sums) - 2, -1, -1):
        sums[step] += gamma * sums[step + 1]
    return sums.astype(np.float32)


class ReplayBuffer(Stateful):
    """The newest `capacity` transitions of N environments, in time order.

    The index of a transition is `row * num_envs + environment`; the ring reuses rows. Columns (`reward`, `action`, ...)
    are indexed by it. `terminated` and `truncated` are separate. With next-step autoreset, `valid` is false where the
    environment only reset itself. Observations are raw, before normalisation; float64 is stored as float32.

    With a frame stack of K (see `EnvSpec.frame_stack`), `obs` holds the newest frame of each row, and `age` how many
    preceding rows belong to its stack; the ring is K - 1 rows longer, for the stacks of its oldest rows.

    Example:
        >>> spec = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
        >>> buffer = ReplayBuffer(spec, capacity=1000, num_envs=4)
        >>> buffer.num_rows, buffer.num_transitions
        (250, 0)
    """

    def __init__(self, spec: EnvSpec, capacity: int, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        self.num_rows = -(-capacity // num_envs)
        self.stack = spec.frame_stack or FrameStack(1)
        layout: Any = _layout(spec.observation_space)
        if spec.frame_stack is not None:
            layout = map_observation(_frame_layout, layout)
        parts = [*(layout.values() if isinstance(layout, dict) else [layout]), _action_layout(spec.action_space)]
        row_bytes = num_envs * sum(map(_num_bytes, parts))
        # the row after the newest holds its next observations, and segments must not wrap around the ring
        num_rows = self.num_rows + self.stack.size
        num_segments = -(-num_rows // max(1, SEGMENT_BYTES // row_bytes))
        self.segment_rows = -(-num_rows // num_segments)
        self.ring = num_segments * self.segment_rows
        self.num_slots = self.ring * num_envs

        self.obs = map_observation(self._column, layout)
        self.is_stacked = spec.frame_stack is not None
        self.age = self._column(_Layout((), np.uint8 if self.stack.size < 256 else np.int32))
        """How many preceding rows belong to this row's frame stack."""
        self.shown: ArrayObservation | None = None
        """The last observation object: a step whose `obs` is this object continues from it."""
        self.action_space = spec.action_space
        self.action = self._column(_action_layout(spec.action_space))
        self.reward = self._column(_Layout((), np.float32))
        self.terminated, self.truncated, self.valid = (self._column(_Layout((), np.bool_)) for _ in range(3))
        self.final_row = self._column(_Layout((), np.int32))
        """Row in `final_obs` of the true last observation, for transitions that ended an episode; -1 for others."""
        self.final_row[:] = -1
        self.final_obs = map_observation(lambda column: column[:0].copy(), self.obs)
        self.free_finals: list[int] = []

        self.added = 0
        """Rows ever added, which is the time of the next one."""
        self.begin = 0
        """Time of the first row that this buffer ever held; later than 0 if it was loaded from a smaller one."""
        self.num_invalid = 0
        self.ends: list[list[int]] = [[] for _ in range(num_envs)]
        """Times at which each environment's episodes ended, oldest first."""
        self.segments: dict[int, Segment] = {}
        """Segments that are already saved in files, by number."""
        self._known_returns: dict[tuple[int, int], AnyArray] = {}
        """Returns to go of finished episodes, by environment and time of the end; computed when first needed."""

    def _column(self, layout: _Layout) -> AnyArray:
        return np.zeros((self.num_slots, *layout.shape), layout.dtype)  # the OS allocates memory on first write

    @property
    def oldest(self) -> int:
        """Time of the oldest row."""
        return max(self.begin, self.added - self.num_rows)

    @property
    def num_transitions(self) -> int:
        """Transitions that can be sampled."""
        return (self.added - self.oldest) * self.num_envs - self.num_invalid

    @property
    def num_bytes(self) -> int:
        """Memory of a full buffer, without the final observations of episodes."""
        columns = [self.action, self.reward, self.terminated, self.truncated, self.valid, self.final_row]
        return sum(column.nbytes for column in (*columns, *_arrays(self.obs)))

    # Writing

    def add(self, step: Step) -> None:
        """Write one step of all environments, and their next observations into the following row."""
        here, after = self._slots(self.added), self._slots(self.added + 1)
        if self.added - self.oldest == self.num_rows:
            self._forget(self._slots(self.oldest))
        if self.is_stacked:
            self._write_frames(here, after, step)
        else:
            _write(self.obs, here, step.obs)
            _write(self.obs, after, step.next_obs)
        self.action[here] = step.action
        self.reward[here] = step.reward
        self.terminated[here] = step.terminated & step.valid
        self.truncated[here] = step.truncated & step.valid
        self.valid[here] = step.valid
        self.num_invalid += int(self.num_envs - np.count_nonzero(step.valid))
        if step.final_obs is not None:
            final_obs = step.final_obs
            if self.is_stacked:
                frames.check(frames.follow(map_observation(lambda x: x[step.ended], step.obs), final_obs), self.stack)
                final_obs = frames.newest(final_obs)
            for row, env in enumerate(step.ended):
                self._end(int(env), map_observation(lambda x, row=row: x[row], final_obs))  # type: ignore[misc]
        self.added += 1

    def _write_frames(self, here: slice, after: slice, step: Step) -> None:
        """Write the newest frames, and how far back their stacks reach."""
        if step.obs is not self.shown:  # the first step, or after a reset or a resume
            known = np.arange(here.start, here.stop)
            goes_on = frames.equal(self.observations(known), step.obs)
            frames.check(goes_on | frames.begin(step.obs, self.stack), self.stack)
            self.age[here] *= goes_on
            _write(self.obs, here, frames.newest(step.obs))
        goes_on = frames.follow(step.obs, step.next_obs)
        frames.check(goes_on | frames.begin(step.next_obs, self.stack), self.stack)
        self.age[after] = np.where(goes_on, np.minimum(self.age[here] + 1, self.stack.size - 1), 0)
        _write(self.obs, after, frames.newest(step.next_obs))
        self.shown = step.next_obs

    def _slots(self, time: int) -> slice:
        start = (time % self.ring) * self.num_envs
        return slice(start, start + self.num_envs)

    def _end(self, env: int, final_obs: ArrayObservation) -> None:
        """Record the end of an episode in the row that is being written."""
        if not self.free_finals:
            used = len(_arrays(self.final_obs)[0])
            grown = max(64, used)
            self.final_obs = map_observation(
                lambda x: np.concatenate([x, np.zeros((grown, *x.shape[1:]), x.dtype)]), self.final_obs
            )
            self.free_finals = list(range(used + grown - 1, used - 1, -1))
        row = self.free_finals.pop()
        _write(self.final_obs, row, final_obs)
        self.final_row[self._slots(self.added).start + env] = row
        self.ends[env].append(self.added)

    def _forget(self, slots: slice) -> None:
        """Free what belongs to the oldest row, which leaves the buffer."""
        time = self.oldest
        self.num_invalid -= int(self.num_envs - np.count_nonzero(self.valid[slots]))
        for env in np.flatnonzero(self.final_row[slots] >= 0):
            self.free_finals.append(int(self.final_row[slots.start + env]))
            self.final_row[slots.start + env] = -1
            del self.ends[env][: bisect.bisect_right(self.ends[env], time)]

    def close_episodes(self) -> None:
        """Mark unfinished episodes as truncated at the newest row; later steps belong to new episodes."""
        if self.added == self.oldest:
            return
        self.added -= 1
        here, after = self._slots(self.added), self._slots(self.added + 1)
        for env in range(self.num_envs):
            slot = here.start + env
            if self.valid[slot] and self.final_row[slot] < 0:
                self.truncated[slot] = True
                self._end(env, map_observation(lambda x, env=env: x[after.start + env].copy(), self.obs))  # type: ignore[misc]
        self.segments.pop(self.added // self.segment_rows, None)
        self.added += 1

    # Reading

    def everything(self) -> Indices:
        """Indices of all rows, oldest first, including invalid ones."""
        return self.rows(np.arange(self.oldest, self.added))

    def rows(self, times: Indices) -> Indices:
        """Indices of all transitions at these times, row by row."""
        return self.at(times[:, None], np.arange(self.num_envs)).reshape(-1)

    def pick(self, positions: Indices) -> Indices:
        """Indices of the transitions at positions counted from the oldest row (N per row)."""
        start = (self.oldest % self.ring) * self.num_envs
        return (positions + start) % self.num_slots

    def observations(self, index: Indices) -> ArrayObservation:
        """Observations before these steps."""
        rows, missing = self._frames(index) if self.is_stacked else (index, None)
        return self._stacks(rows, missing)

    def next_observations(self, index: Indices) -> ArrayObservation:
        """True next observations of these steps, also where an episode ended."""
        following = (index + self.num_envs) % self.num_slots
        final = self.final_row.take(index)
        ends = np.flatnonzero(final >= 0)
        if not self.is_stacked:
            return self._stacks(following, None, (ends, final[ends]))
        rows, missing = self._frames(index)  # one frame later: drop the oldest, append the newest
        rows[:, :-1], rows[:, -1] = rows[:, 1:].copy(), following
        missing[:, :-1], missing[:, -1] = missing[:, 1:].copy(), False
        last = (ends, np.full(ends.size, self.stack.size - 1))
        return self._stacks(rows, missing, (last, final[ends]))

    def _frames(self, index: Indices) -> tuple[Indices, BoolArray]:
        """Where the frames [B, K] of these steps' observations are stored, and which of them are zero padding."""
        back, age = np.arange(self.stack.size - 1, -1, -1), self.age.take(index)[:, None]
        rows = (index[:, None] - np.minimum(back, age) * self.num_envs) % self.num_slots
        return rows, (back > age) & (self.stack.padding == "zero")

    def _stacks(
        self, rows: Indices, missing: BoolArray | None, ends: tuple[Any, Indices] | None = None
    ) -> ArrayObservation:
        """Observations of these rows; zeros where `missing`, and final observations at the ends of episodes."""
        places = np.nonzero(missing) if missing is not None and missing.any() else None

        def gather(column: AnyArray, finals: AnyArray | None) -> AnyArray:
            found: AnyArray = column.take(rows, axis=0)
            if places is not None:
                found[places] = 0
            if finals is not None and ends is not None:
                found[ends[0]] = finals.take(ends[1], axis=0)
            return found

        has_ends = ends is not None and ends[1].size > 0
        if isinstance(self.obs, dict):
            assert isinstance(self.final_obs, dict)
            return {key: gather(x, self.final_obs[key] if has_ends else None) for key, x in self.obs.items()}
        assert not isinstance(self.final_obs, dict)
        return gather(self.obs, self.final_obs if has_ends else None)

    def following(self) -> ArrayObservation:
        """The observations after the newest row, on which its environments act next."""
        return self.observations(np.arange(self.num_envs) + self._slots(self.added).start)

    def window(self, index: Indices, num_steps: int) -> Window:
        """Up to n steps starting at each transition, ending early at the end of its episode or at the newest row."""
        if num_steps == 1:
            return Window(index[:, None], np.ones((index.size, 1), np.bool_))
        steps = np.arange(num_steps)
        indices = (index[:, None] + steps * self.num_envs) % self.num_slots
        left = self.added - self.times(index)
        goes_on = (self.final_row.take(indices[:, :-1]) < 0) & (steps[1:] < left[:, None])
        used = np.ones(indices.shape, np.bool_)
        np.logical_and.accumulate(goes_on, axis=1, out=used[:, 1:])
        return Window(indices, used)

    def column(self, name: str, index: Indices, last: Indices, gamma: float, scale: RewardFn) -> AnyArray:
        """A further column of transitions whose (n-step) returns end with the steps `last`.

        `return_to_go`: discounted sum of rewards (changed by `scale`) to the end of the episode; minus infinity
        while it is unfinished.
        `next_action`: the action after the last step; at the end of an episode, the last action again.
        """
        if name == "return_to_go":
            return self._returns_to_go(index, gamma, scale)
        assert name == "next_action", name
        goes_on = (self.final_row.take(last) < 0) & (self.times(last) < self.added - 1)
        following: AnyArray = self.action.take(np.where(goes_on, (last + self.num_envs) % self.num_slots, last), axis=0)
        return following

    def _returns_to_go(self, index: Indices, gamma: float, scale: RewardFn) -> AnyArray:
        """Returns to go of these steps. Those of a finished episode are computed together, when first needed."""
        times, envs = self.times(index), index % self.num_envs
        known = self._known_returns
        found = np.empty(index.size, np.float32)
        for row, (time, env) in enumerate(zip(times.tolist(), envs.tolist(), strict=True)):
            ends = self.ends[env]
            place = bisect.bisect_left(ends, time)
            if place == len(ends):
                found[row] = -np.inf
                continue
            first, last = ends[place - 1] + 1 if place else self.oldest, ends[place]
            if (env, last) not in known:
                rewards = self.reward.take(self.at(np.arange(first, last + 1), np.full(last + 1 - first, env)))
                known[env, last] = discounted_sums(scale(rewards), gamma)
            found[row] = known[env, last][time - last - 1]
        if len(known) > 2 * sum(map(len, self.ends)) + 16:
            self._known_returns = {key: value for key, value in known.items() if key[1] >= self.oldest}
        return found

    def times(self, index: Indices) -> Indices:
        """Times of these steps, in rows since the first one."""
        newest = self.added - 1
        return newest - (newest - index // self.num_envs) % self.ring

    def episodes(self, index: Indices) -> tuple[Indices, Indices]:
        """First and last time of the episode that each step belongs to, as far as they are in the buffer."""
        times, envs = self.times(index), index % self.num_envs
        bounds = np.empty((2, index.size), np.int64)
        for row, (time, env) in enumerate(zip(times.tolist(), envs.tolist(), strict=True)):
            ends = self.ends[env]
            place = bisect.bisect_left(ends, time)  # of the end of this episode, if it has ended
            bounds[0, row] = ends[place - 1] + 1 if place > 0 else self.oldest
            bounds[1, row] = ends[place] if place < len(ends) else self.added - 1
        first, last = bounds
        # with next-step autoreset, the row after an episode's last step only resets: not part of the next episode
        first += ~self.valid[self.at(first, envs)]
        return first, last

    def at(self, times: Indices, envs: Indices) -> Indices:
        """Indices of the transitions of these environments at these times."""
        return (times % self.ring) * self.num_envs + envs

    # Files

    def state_dict(self) -> dict[str, Any]:
        """The whole buffer, as segments with a file each; segments that were saved before are not written again."""
        first, last = self.oldest // self.segment_rows, -(-self.added // self.segment_rows)
        self.segments = {number: segment for number, segment in self.segments.items() if number >= first}
        state = {
            "num_envs": self.num_envs,
            "added": self.added,
            "oldest": self.oldest,
            "next_obs": map_observation(lambda x: x[self._slots(self.added)], self.obs),
            "segments": [self._segment(number) for number in range(first, last)],
        }
        if self.is_stacked:
            earlier = self.rows(self._times_before(self.oldest))
            state["next_age"] = self.age[self._slots(self.added)]
            state["earlier"] = map_observation(lambda x: x.take(earlier, axis=0), self.obs)
        return state

    def _times_before(self, time: int) -> Indices:
        """Times of the preceding rows that the frame stacks at a time may need."""
        return np.arange(time - self.stack.size + 1, time)

    def _segment(self, number: int) -> Segment:
        if number in self.segments:
            return self.segments[number]
        start, stop = number * self.segment_rows, (number + 1) * self.segment_rows
        segment = Segment(functools.partial(self._stretch, start, stop), complete=stop <= self.added)
        if segment.complete:
            self.segments[number] = segment
        return segment

    def _stretch(self, start: int, stop: int) -> dict[str, Tensor]:
        """The rows of a time range that are still in the buffer, as views."""
        start, stop = max(start, self.oldest), min(stop, self.added)
        slots = slice(self._slots(start).start, self._slots(stop - 1).stop)
        ended = np.flatnonzero(self.final_row[slots] >= 0)
        finals = self.final_row[slots][ended]
        columns = {name: column[slots] for name, column in self._columns().items()}
        columns.update({f"final_{name}": x.take(finals, axis=0) for name, x in _named(self.final_obs, "obs").items()})
        columns.update(ended=ended, times=np.array([start, stop]))
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def _columns(self) -> dict[str, AnyArray]:
        names = ["action", "reward", "terminated", "truncated", "valid", *["age"] * self.is_stacked]
        return {**{name: getattr(self, name) for name in names}, **_named(self.obs, "obs")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; from a buffer of another size, the newest rows that fit."""
        self._known_returns = {}
        stacked = ("next_age", "earlier") if self.is_stacked else ()
        check_keys("the replay buffer", ("num_envs", "added", "oldest", "next_obs", "segments", *stacked), state)
        for name in ("num_envs", "added", "oldest"):
            check_plain(f"the replay buffer's {name}", int, state[name])
        if state["num_envs"] != self.num_envs:
            raise OtherNumberOfEnvsError(
                f"it was saved with {state['num_envs']} environments, this run has {self.num_envs}"
            )
        if not isinstance(state["segments"], list) or not all(isinstance(s, Segment) for s in state["segments"]):
            raise CheckpointError("the replay buffer's segments are damaged")
        self._clear(state["added"], state["oldest"])
        if self.is_stacked:
            self._load_rows("earlier", self.rows(self._times_before(state["oldest"])), state["earlier"])
        loaded_to = None
        for segment in state["segments"]:
            try:
                loaded_to = self._load_segment(segment, loaded_to)
            except CheckpointError as error:
                where = "" if segment.file is None else f"{segment.file.name}: "
                raise CheckpointError(f"{where}{error}") from error
        if (loaded_to or 0) != self.added:
            raise CheckpointError(f"the replay buffer's segments end at row {loaded_to} instead of {self.added}")
        after = self._slots(self.added)
        self._load_rows("next", np.arange(after.start, after.stop), state["next_obs"])
        if self.is_stacked:
            check_tensor(
                "the replay buffer's next age", torch.from_numpy(self.age[after]), torch.as_tensor(state["next_age"])
            )
            self.age[after] = np.minimum(state["next_age"], self.stack.size - 1)

    def _load_rows(self, which: str, slots: Indices, obs: ArrayObservation) -> None:
        """Restore observations that are not part of the segments."""
        saved, columns = _named(obs, "obs"), _named(self.obs, "obs")
        check_keys(f"the replay buffer's {which} observations", columns, saved)
        for name, column in columns.items():
            like = torch.from_numpy(column[:1]).expand(len(slots), *column.shape[1:])
            check_tensor(f"the replay buffer's {which} {name}", like, torch.as_tensor(saved[name]))
            column[slots] = saved[name]

    def _clear(self, added: int, oldest: int) -> None:
        if not 0 <= oldest <= added:
            raise CheckpointError(f"the replay buffer has an invalid range of rows: {oldest} to {added}")
        self.added, self.begin = added, max(oldest, added - self.num_rows)
        self.final_row[:] = -1
        self.free_finals = list(range(len(_arrays(self.final_obs)[0]) - 1, -1, -1))
        self.num_invalid, self.segments, self.shown = 0, {}, None
        self.ends = [[] for _ in range(self.num_envs)]

    def _load_segment(self, segment: Segment, loaded_to: int | None) -> int:
        """Copy one segment into its place, directly after the previous one; returns the time at which it ends."""
        saved = segment.tensors()
        columns = self._columns()
        finals = {f"final_{name}": x for name, x in _named(self.final_obs, "obs").items()}
        check_keys("a segment of the replay buffer", (*columns, *finals, "ended", "times"), saved)
        check_tensor("the replay buffer's times", torch.zeros(2, dtype=torch.int64), saved["times"])
        start, stop = (int(time) for time in saved["times"])
        newest, first = self.added, max(start, self.begin)
        in_place = start <= self.begin if loaded_to is None else start == loaded_to
        if not 0 <= start < stop <= newest or not in_place:
            raise CheckpointError(f"a segment of the replay buffer has rows {start} to {stop}, which are out of order")
        for name, column in columns.items():
            whole = torch.from_numpy(column[:1]).expand((stop - start) * self.num_envs, *column.shape[1:])
            check_tensor(f"the replay buffer's {name}", whole, saved[name])
        space, actions = self.action_space, saved["action"]
        if isinstance(space, spaces.Discrete) and ((actions < 0) | (actions >= int(space.n))).any():
            raise CheckpointError(f"the replay buffer has actions outside of {space}")
        self._load_older_frames(saved, start, stop)
        if first >= stop:  # this buffer is smaller than the one that was saved
            return stop
        skipped = (first - start) * self.num_envs
        slots = self.rows(np.arange(first, stop))
        for name, column in columns.items():
            column[slots] = saved[name].numpy()[skipped:]
        self.age[slots] = np.minimum(self.age[slots], self.stack.size - 1)
        self._load_ends(saved, finals, start, first)
        valid = saved["valid"].numpy()[skipped:]
        self.num_invalid += int(valid.size - np.count_nonzero(valid))
        # reuse the file only if it is aligned with this buffer's segments; only the oldest may begin elsewhere
        number = stop // self.segment_rows - 1
        begins = number * self.segment_rows
        if stop % self.segment_rows == 0 and (start == begins or max(start, begins) <= self.oldest):
            again = functools.partial(self._stretch, begins, stop)
            self.segments[number] = dataclasses.replace(segment, tensors=again, complete=True)
        return stop

    def _load_older_frames(self, saved: dict[str, Tensor], start: int, stop: int) -> None:
        """From a larger buffer: restore the frames of rows that do not fit but that later frame stacks need."""
        times = self._times_before(self.begin)
        times = times[(start <= times) & (times < stop)]
        if times.size:
            there = ((times - start)[:, None] * self.num_envs + np.arange(self.num_envs)).reshape(-1)
            for name, column in _named(self.obs, "obs").items():
                column[self.rows(times)] = saved[name].numpy()[there]

    def _load_ends(self, saved: dict[str, Tensor], finals: dict[str, AnyArray], start: int, first: int) -> None:
        ended = saved["ended"]
        check_tensor("the replay buffer's episode ends", torch.zeros(ended.numel(), dtype=torch.int64), ended)
        for name, column in finals.items():
            whole = torch.zeros((ended.numel(), *column.shape[1:]), dtype=torch.from_numpy(column).dtype)
            check_tensor(f"the replay buffer's {name}", whole, saved[name])
        size = saved["valid"].numel()
        newest = self.added
        for row, position in enumerate(ended.tolist()):
            if not 0 <= position < size:
                raise CheckpointError(
                    f"an episode in the replay buffer ends at row {position}, but there are {size} rows"
                )
            time, env = start + position // self.num_envs, position % self.num_envs
            if time >= first:
                self.added = time
                names = {name.removeprefix("final_"): saved[name][row].numpy() for name in finals}
                by_key = {name.removeprefix("obs."): x for name, x in names.items()}
                self._end(env, by_key if isinstance(self.obs, dict) else names["obs"])
        self.added = newest


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


def _layout(space: spaces.Space[Any]) -> Any:
    """Shapes and dtypes of observations as they are stored."""
    if isinstance(space, spaces.Dict):
        return {key: _layout(part) for key, part in space.spaces.items()}
    dtype = space.dtype or np.dtype(np.float32)
    return _Layout(tuple(space.shape or ()), np.float32 if np.issubdtype(dtype, np.floating) else dtype)


def _frame_layout(layout: _Layout) -> _Layout:
    return layout._replace(shape=layout.shape[1:])


def _action_layout(space: spaces.Space[Any]) -> _Layout:
    return _Layout(tuple(space.shape or ()), np.float32 if isinstance(space, spaces.Box) else np.int64)


def _num_bytes(layout: _Layout) -> int:
    num_bytes: int = math.prod(layout.shape) * np.dtype(layout.dtype).itemsize
    return num_bytes


def _arrays(obs: ArrayObservation) -> list[AnyArray]:
    return list(obs.values()) if isinstance(obs, dict) else [obs]


def _named(obs: ArrayObservation, name: str) -> dict[str, AnyArray]:
    return {f"{name}.{key}": x for key, x in obs.items()} if isinstance(obs, dict) else {name: obs}


def _write(columns: ArrayObservation, where: slice | int, obs: ArrayObservation) -> None:
    if isinstance(columns, dict):
        assert isinstance(obs, dict)
        for key, column in columns.items():
            column[where] = obs[key]
    else:
        columns[where] = obs
