"""When a step saved and used its tensors, and when its threads waited: the data of a figure.

Times are the host's, as training threads measure them: on a GPU the work runs later. A step notes
its actions as it runs. Each note costs a fraction of a microsecond, so after the first steps only
one step in `EVERY` is traced. Sums are computed when they are read. An endless block is not traced
beyond `MAX_MOMENTS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from storm_client.monitoring.stats import StatsRecorder

__all__ = [
    "EVERY",
    "FIRST_STEPS",
    "MAX_MOMENTS",
    "Fate",
    "Moment",
    "Pause",
    "StepTrace",
    "Timeline",
    "Traces",
    "Untraced",
]

MAX_MOMENTS = 20_000

FIRST_STEPS = 10
"""First steps, which are all traced: a plan is learned in them."""

EVERY = 50
"""Of the later steps, one in so many is traced."""

Fate = Literal["kept", "offloaded", "replayed"]
"""The outcome of a saved tensor: kept on the device, offloaded, or recomputed."""

FATES: tuple[Fate, ...] = ("kept", "offloaded", "replayed")


class Moment(NamedTuple):
    """Seconds since the step began, and byte counts at that time.

    `kept`, `offloaded` and `replayed` are the bytes of each fate that are saved and not used yet.
    `stored` is the bytes that have arrived in the pool since the step began.
    """

    seconds: float
    kept: int
    offloaded: int
    replayed: int
    stored: int


class Pause(NamedTuple):
    """A time in which a training thread did not compute, in seconds since the step began.

    `kind` is "store", "wait" or "replay".
    """

    kind: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step over time."""

    moments: tuple[Moment, ...]
    pauses: tuple[Pause, ...]


class StepTrace:
    """The actions of one step so far. Any of its threads may note something."""

    __slots__ = ("_began", "_changes", "_of", "_pauses", "_stored", "_unused")

    def __init__(self, stored: StatsRecorder, of: Traces) -> None:
        """Begin; `stored` counts the bytes that have arrived in the pool."""
        self._stored = stored
        self._of: Traces | None = of
        """Where this becomes the latest trace once a backward pass uses a saved tensor."""
        self._began = perf_counter()
        self._changes: list[tuple[float, Fate, int, int]] = []
        self._pauses: list[Pause] = []
        self._unused: dict[int, tuple[Fate, int]] = {}

    def saved(self, key: int, fate: Fate, nbytes: int) -> None:
        """Note that a tensor was saved; `key` identifies it as long as the step's graph lives."""
        if len(self._changes) < MAX_MOMENTS:
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
        """Note an activity of a thread since `began`, by perf_counter; return the seconds."""
        ended = perf_counter()
        if len(self._pauses) < MAX_MOMENTS:
            self._pauses.append(Pause(kind, began - self._began, ended - self._began))
        return ended - began

    def timeline(self) -> Timeline:
        """Return the notes so far as a timeline."""
        changes = sorted(self._changes)  # threads append in any order
        before = changes[0][3] if changes else 0
        sums = dict.fromkeys(FATES, 0)
        moments = [Moment(0.0, 0, 0, 0, 0)]
        for when, fate, nbytes, stored in changes:
            sums[fate] += nbytes
            moments.append(Moment(when - self._began, **sums, stored=stored - before))
        return Timeline(tuple(moments), tuple(self._pauses))


class Untraced:
    """Replaces the trace of a step that is not traced."""

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
    """Selects the step of an Offload that is shown: the last traced one with a backward pass."""

    def __init__(self) -> None:
        self.latest: StepTrace | None = None
        self._steps = 0

    def begin(self, stored: StatsRecorder, *, seldom: bool = False) -> StepTrace | Untraced:
        """Return the next step's trace; `stored` counts the bytes that have arrived in the pool.

        A step whose saves are not noted here is `seldom`: no such step is traced.
        """
        self._steps += 1
        is_followed = not seldom and (self._steps <= FIRST_STEPS or self._steps % EVERY == 0)
        return StepTrace(stored, self) if is_followed else _UNTRACED

    def timeline(self) -> Timeline | None:
        """Return the timeline of the latest trace; None before there is one."""
        return None if self.latest is None else self.latest.timeline()
