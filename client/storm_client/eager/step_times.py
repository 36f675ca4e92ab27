"""What the steps of one signature took: their forward passes, turns and whole steps.

A time is known when the device has come so far. Nothing here waits for that but what says so.
Where steps have several sizes, forward passes are told as the largest would take, by what is saved;
whole steps are compared only where they are among the largest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

from storm_client.planner.search import Alternative

__all__ = ["OBSERVED", "Duration", "StepTimes"]

OBSERVED: Final = 2
"""Forward passes that are timed before the plan is made anew."""

MOST_FILLED: Final = 0.25
"""Seconds for which a device is kept busy at the most, so that its queue is full afterwards."""


class Duration(Protocol):
    """How long something took."""

    @property
    def is_known(self) -> bool:
        """Whether the device has come so far that the next call does not wait for it."""
        ...

    def __call__(self) -> float:
        """Return the seconds, waiting until they are known."""
        ...


class StepTimes:
    """The latest times of steps that follow plans."""

    def __init__(self, *, is_on_gpu: bool) -> None:
        """Start without any."""
        self._is_on_gpu = is_on_gpu
        self.window: float | None = None
        """Seconds of the shortest forward pass that followed the plan; None until seen. A device
        that waits for the thread has waited in it."""
        self.pass_seconds = 0.0
        """Of the latest forward pass that followed a plan, by the host's clock."""
        self._full: tuple[Duration, float] | None = None
        """Of a forward pass for which the device had all that it needed in its queue, and how
        large that step was: its share of the largest."""
        self._forwards: list[tuple[Duration, float]] = []
        """The latest that `window` does not know, and the same of each."""
        self._turns: list[Duration] = []
        """From the end of the latest forward passes until something was asked for."""
        self._steps: deque[tuple[Alternative, Duration | None]] = deque()
        """From the begin of a block to that of the next, by which plan; not known yet. None of one
        that is smaller than others."""

    @property
    def wants_full_queue(self) -> bool:
        """Whether the next forward pass is to begin behind something that takes the device a while.

        Then all of it is queued when the device comes to it, and what it takes is what it computes.
        """
        return self._is_on_gpu and self._full is None and 0 < self.pass_seconds <= MOST_FILLED

    def filled(self, forward: Duration, share: float = 1.0) -> None:
        """Note such a forward pass, of a step that is a `share` of the largest."""
        self._full = forward, share

    def observe(self, forward: Duration, share: float = 1.0) -> bool:
        """Note a forward pass that followed the plan; tell whether the window can be measured."""
        if self.window is not None:
            return False
        self._forwards = [*self._forwards, (forward, share)][-OBSERVED:]
        return len(self._forwards) == OBSERVED

    def turned(self, turn: Duration) -> None:
        """Note how long after the end of a forward pass the backward pass asked for something."""
        self._turns = [*self._turns, turn][-OBSERVED:]

    def turn_seconds(self) -> float:
        """Return the longest of the latest of these times; infinity where that is not known."""
        if len(self._turns) < OBSERVED or not all(turn.is_known for turn in self._turns):
            return math.inf
        return max(turn() for turn in self._turns)

    def measure(self) -> float | None:
        """Return the window, waiting until the device has come that far."""
        if self.window is None and len(self._forwards) == OBSERVED:
            self.window = min(forward() / share for forward, share in self._forwards)
            self._forwards.clear()
        return self.window

    def busy_seconds(self) -> float | None:
        """Return for how long the device computes in a forward pass, as far as that is known."""
        window = self.measure()
        if window is None or self._full is None:
            return window
        forward, share = self._full
        return min(window, forward() / share)

    def grow(self, factor: float) -> None:
        """Note that the largest step is `factor` times what it was."""
        if self.window is not None:
            self.window *= factor
        if self._full is not None:
            self._full = self._full[0], self._full[1] / factor
        self._forwards = [(forward, share / factor) for forward, share in self._forwards]

    def took(self, alternative: Alternative, step: Duration | None) -> None:
        """Note what a step took that has followed a plan; None of a smaller one."""
        self._steps.append((alternative, step))

    def known_steps(self) -> Iterator[tuple[Alternative, float | None]]:
        """Yield the steps that have become known, each once."""
        while self._steps:
            alternative, step = self._steps[0]
            if step is not None and not step.is_known:
                return
            self._steps.popleft()
            yield alternative, None if step is None else step()
