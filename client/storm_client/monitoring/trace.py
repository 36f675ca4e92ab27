"""When a step saved and used its tensors, and when its threads waited: what a picture shows.

Times are the host's, as training threads saw them: on a GPU their work is done later. A step notes
what it does as it goes, which costs it a fraction of a microsecond each time, so after the first
steps only one in some is followed; sums are made where somebody asks. A block without end is not
followed any further than MOST_MOMENTS.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple, Protocol

__all__ = [
    "EVERY",
    "FIRST_STEPS",
    "MOST_MOMENTS",
    "Fate",
    "Moment",
    "Pause",
    "StepTrace",
    "Timeline",
    "Traces",
    "Untraced",
]

MOST_MOMENTS = 20_000

FIRST_STEPS = 10
"""That are all followed: a plan is learned in them."""

EVERY = 50
"""Of the later steps one in so many is."""

Fate = Literal["stays", "offloaded", "replayed"]
"""What becomes of a saved tensor: stays on the device, goes to the daemon, is recomputed."""

FATES: tuple[Fate, ...] = ("stays", "offloaded", "replayed")


class Moment(NamedTuple):
    """Seconds since the step began, what has been saved and not used since by then, in bytes of
    each fate, and the bytes that had arrived in the pool since the step began.
    """

    seconds: float
    stays: int
    offloaded: int
    replayed: int
    stored: int


class Pause(NamedTuple):
    """What a training thread did instead of computing: "store", "wait" or "replay"; in seconds
    since the step began.
    """

    kind: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step in time."""

    moments: tuple[Moment, ...]
    pauses: tuple[Pause, ...]


class Stored(Protocol):
    """What tells how much has been stored."""

    arrived_bytes: int
    """In the pool, by now."""


class StepTrace:
    """What one step has done so far. Any of its threads may note something."""

    __slots__ = ("_began", "_changes", "_of", "_pauses", "_stored", "_unused")

    def __init__(self, stored: Stored, of: Traces) -> None:
        """Begin; `stored` tells how many bytes have arrived in the pool."""
        self._stored = stored
        self._of: Traces | None = of
        """Whose latest this is to be, once a backward pass has begun to use what was saved."""
        self._began = perf_counter()
        self._changes: list[tuple[float, Fate, int, int]] = []
        self._pauses: list[Pause] = []
        self._unused: dict[int, tuple[Fate, int]] = {}

    def saved(self, key: int, fate: Fate, nbytes: int) -> None:
        """Note that a tensor was saved; `key` stands for it as long as the step's graph lives."""
        if len(self._changes) < MOST_MOMENTS:
            self._unused[key] = fate, nbytes
            self._changes.append((perf_counter(), fate, nbytes, self._stored.arrived_bytes))

    def used(self, key: int) -> None:
        """Note that a tensor was needed; only the first time counts."""
        of, self._of = self._of, None
        if of is not None:
            of.latest = self
        known = self._unused.pop(key, None)
        if known is not None:
            self._changes.append((perf_counter(), known[0], -known[1], self._stored.arrived_bytes))

    def paused(self, kind: str, began: float) -> float:
        """Note what a thread has done since `began`, by perf_counter; return the seconds."""
        ended = perf_counter()
        if len(self._pauses) < MOST_MOMENTS:
            self._pauses.append(Pause(kind, began - self._began, ended - self._began))
        return ended - began

    def timeline(self) -> Timeline:
        """Return what has been noted so far."""
        changes = sorted(self._changes)  # threads append in any order
        before = changes[0][3] if changes else 0
        sums = dict.fromkeys(FATES, 0)
        moments = [Moment(0.0, 0, 0, 0, 0)]
        for when, fate, nbytes, stored in changes:
            sums[fate] += nbytes
            moments.append(Moment(when - self._began, **sums, stored=stored - before))
        return Timeline(tuple(moments), tuple(self._pauses))


class Untraced:
    """Stands for the trace of a step that is not followed."""

    __slots__ = ()

    def saved(self, key: int, fate: Fate, nbytes: int) -> None:
        """Do nothing."""

    def used(self, key: int) -> None:
        """Do nothing."""

    def paused(self, kind: str, began: float) -> float:  # noqa: ARG002 - as a trace's
        """Return the seconds since `began`."""
        return perf_counter() - began


_UNTRACED = Untraced()


class Traces:
    """Which step of an Offload is shown: the last that was followed and used by a backward pass."""

    def __init__(self) -> None:
        """Start without any."""
        self.latest: StepTrace | None = None
        self._steps = 0

    def begin(self, stored: Stored, *, seldom: bool = False) -> StepTrace | Untraced:
        """Return the next step's; `stored` tells how many bytes have arrived in the pool.

        A step whose saves are not told here is `seldom`: of those none is followed.
        """
        self._steps += 1
        is_followed = not seldom and (self._steps <= FIRST_STEPS or self._steps % EVERY == 0)
        return StepTrace(stored, self) if is_followed else _UNTRACED

    def timeline(self) -> Timeline | None:
        """Return the latest in time; None before there was one."""
        return None if self.latest is None else self.latest.timeline()
