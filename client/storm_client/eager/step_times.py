"""The times of the steps of one signature: forward passes, turns and whole steps.

A turn lasts from the end of a forward pass until the backward pass asks for a value. A time is
known once the device has reached its end; only functions that say so wait for that. Where steps
have several sizes, the times of forward passes are scaled to the largest step, by the bytes saved.
Whole steps are compared only if they are among the largest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from storm_client.planner.search import Alternative

if TYPE_CHECKING:
    from storm_client.eager.marks import Span

__all__ = ["OBSERVED", "StepTimes"]

OBSERVED: Final = 2
"""Forward passes that are timed before the plan is made anew."""

MAX_FILLED: Final = 0.25
"""Longest time in seconds to keep a device busy, so that its queue is full afterwards."""


class StepTimes:
    """The latest times of steps that follow plans."""

    def __init__(self, *, is_on_gpu: bool) -> None:
        """Start without times."""
        self._is_on_gpu = is_on_gpu
        self.window: float | None = None
        """Seconds of the shortest forward pass that followed the plan; None before. If the step is
        CPU-bound, this includes the device's waits for the thread."""
        self.pass_seconds = 0.0
        """Seconds of the latest forward pass that followed a plan, by the host's clock."""
        self._full: tuple[Span, float] | None = None
        """The time of a forward pass with a full device queue, and the step's share of the largest
        step."""
        self._forwards: list[tuple[Span, float]] = []
        """The latest forward passes that are not in `window` yet, each with its step's share."""
        self._turns: list[Span] = []
        """The latest turns."""
        self._steps: deque[tuple[Alternative, Span | None]] = deque()
        """Plans and times of steps whose time is not known yet, each from the begin of a block to
        the begin of the next. None for a step that is smaller than others."""

    @property
    def wants_full_queue(self) -> bool:
        """Whether the device is to be kept busy for a while before the next forward pass.

        Then the whole pass is queued when the device reaches it, so its time is compute time alone.
        """
        return self._is_on_gpu and self._full is None and 0 < self.pass_seconds <= MAX_FILLED

    def record_full_queue(self, forward: Span, share: float = 1.0) -> None:
        """Record such a forward pass, of a step with a `share` of the largest step's saves."""
        self._full = forward, share

    def observe(self, forward: Span, share: float = 1.0) -> bool:
        """Record a forward pass that followed the plan; return whether `measure` has enough now.

        Call this only as long as there is no `window`.
        """
        self._forwards = [*self._forwards, (forward, share)][-OBSERVED:]
        return len(self._forwards) == OBSERVED

    def record_turn(self, turn: Span) -> None:
        """Record a turn: from the end of a forward pass to the backward pass's first request."""
        self._turns = [*self._turns, turn][-OBSERVED:]

    def turn_seconds(self) -> float:
        """Return the longest of the latest turns in seconds; infinity where it is not known."""
        if len(self._turns) < OBSERVED or not all(turn.is_known for turn in self._turns):
            return math.inf
        return max(turn() for turn in self._turns)

    def measure(self) -> float | None:
        """Return the window, if known; waits until the device has reached the end of the passes."""
        if self.window is None and len(self._forwards) == OBSERVED:
            self.window = min(forward() / share for forward, share in self._forwards)
            self._forwards.clear()
        return self.window

    def busy_seconds(self) -> float | None:
        """Return the device's compute time in a forward pass, if known; waits for the device."""
        window = self.measure()
        if window is None or self._full is None:
            return window
        forward, share = self._full
        return min(window, forward() / share)

    def grow(self, factor: float) -> None:
        """Rescale all times: the largest step has grown by `factor`."""
        if self.window is not None:
            self.window *= factor
        if self._full is not None:
            self._full = self._full[0], self._full[1] / factor
        self._forwards = [(forward, share / factor) for forward, share in self._forwards]

    def record_step(self, alternative: Alternative, step: Span | None) -> None:
        """Record the time of a step that has followed a plan; None for a smaller step."""
        self._steps.append((alternative, step))

    def known_steps(self) -> Iterator[tuple[Alternative, float | None]]:
        """Yield the steps whose times have become known, each once."""
        while self._steps:
            alternative, step = self._steps[0]
            if step is not None and not step.is_known:
                return
            self._steps.popleft()
            yield alternative, None if step is None else step()
