"""One step of an Offload: the handles it made, in the order of its plan.

What stays true: a step keeps no tensor and no record alive; it knows records weakly, for as long
as they may have to be fetched ahead. What a hook costs does not depend on how much a block has
packed before: a block that goes around a whole loop is a chain of passes, of which those are
forgotten that have nothing alive.
"""

from __future__ import annotations

import threading
import weakref
from itertools import chain, islice

from storm_client.prefetch import OrderHistory, StepPlan
from storm_client.records import Handle, StoredRange, View
from storm_client.versions import SavedVersion

__all__ = ["Step"]


LOOKAHEAD = 64
"""Handles looked at in one go; more than fit into a staging area, less than a step has."""

PASS_HANDLES = 4096
"""Packed before another pass begins, though nothing has been asked for."""


class _Pass:
    """What was packed until some of it was asked for: one plan, whose numbers begin at `first`."""

    def __init__(self, history: OrderHistory, earlier: _Pass | None, first: int) -> None:
        self.plan = StepPlan(history)
        self.records: list[weakref.ref[StoredRange]] = []
        self.earlier = earlier
        self.first = first

    @property
    def is_over(self) -> bool:
        """Whether what is packed next belongs to another pass."""
        return self.plan.is_going_back or len(self.records) >= PASS_HANDLES

    @property
    def lives(self) -> bool:
        """Whether something of it is alive, and so may be asked for."""
        return any(record() is not None for record in self.records)

    def with_number(self, number: int) -> _Pass:
        """Return the pass that packed the handle of that number."""
        found = self
        while number < found.first and found.earlier is not None:
            found = found.earlier
        return found

    def upcoming(self) -> list[StoredRange | None]:
        numbers = islice(self.plan.upcoming(), LOOKAHEAD)
        return [self.records[number]() for number in numbers]


class Step:
    """What one `with` block packed. Its handles may be unpacked by several threads."""

    def __init__(self, history: OrderHistory) -> None:
        """Begin a step of the Offload whose `history` this is."""
        self._history = history
        self._lock = threading.Lock()  # protects both fields below
        self._packing = _Pass(history, None, 0)
        self._asked = self._packing
        """The pass of which a handle was asked for last."""

    def handle(self, record: StoredRange, view: View, version: SavedVersion) -> Handle:
        """Return a new handle of `record`, next in the plan."""
        with self._lock:
            packing = self._begin_anew_if_over()
            number = packing.first + packing.plan.packed(record.nbytes)
            packing.records.append(weakref.ref(record))
        return Handle(record, view, version, self, number)

    def needed_at_once(self, nbytes: int) -> bool:
        """Tell whether a record of `nbytes` that is made now will be needed at once."""
        with self._lock:
            return self._begin_anew_if_over().plan.needed_at_once(nbytes)

    def unpacked(self, handle: Handle) -> bool:
        """Note that `handle` is being asked for; tell whether it is the first since the packing."""
        with self._lock:
            asked = self._asked = self._packing.with_number(handle.number)
            is_first = not asked.plan.is_going_back
            asked.plan.unpacked(handle.number - asked.first)
            return is_first

    def upcoming(self) -> list[StoredRange]:
        """Return the next living records, in the order in which they will probably be needed."""
        with self._lock:
            asked = self._asked
            found = asked.upcoming()
            if len(found) < LOOKAHEAD and asked.earlier is not None:
                found = list(islice(chain(found, asked.earlier.upcoming()), LOOKAHEAD))
        return [record for record in found if record is not None]

    def unseen(self) -> list[StoredRange | None]:
        """Return what of the upcoming has not been looked at: each once, None for a dead one.

        A thread that has looked says how far by `saw`; another's, meanwhile, costs time alone.
        """
        with self._lock:
            asked = self._asked
            return [asked.records[number]() for number in asked.plan.unseen(LOOKAHEAD)]

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen are here or have been requested."""
        with self._lock:
            self._asked.plan.saw(count)

    def _begin_anew_if_over(self) -> _Pass:
        if self._packing.is_over:
            earlier = _living(self._packing)
            if earlier is not None:
                earlier.earlier = _living(earlier.earlier)
            first = 0 if earlier is None else earlier.first + len(earlier.records)
            self._packing = _Pass(self._history, earlier, first)
        return self._packing


def _living(latest: _Pass | None) -> _Pass | None:
    """Return the latest pass up to this one of which something lives."""
    while latest is not None and not latest.lives:
        latest = latest.earlier
    return latest
