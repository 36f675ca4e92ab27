"""One step of an Offload: the handles it made, in the order of its plan.

What stays true: a step keeps no tensor and no record alive; it knows records weakly, for as long
as they may have to be fetched ahead.
"""

from __future__ import annotations

import threading
import weakref
from itertools import islice

from storm_client.prefetch import OrderHistory, StepPlan
from storm_client.records import Handle, StoredRange, View
from storm_client.versions import SavedVersion

__all__ = ["Step"]


LOOKAHEAD = 64
"""Handles looked at in one go; more than fit into a staging area, less than a step has."""


class Step:
    """What one `with` block packed. Its handles may be unpacked by several threads.

    A block may go around a whole loop. When all that was packed has died after some of it was
    unpacked, what is packed next begins as if it were another block's.
    """

    def __init__(self, history: OrderHistory) -> None:
        """Begin a step of the Offload whose `history` this is."""
        self._history = history
        self._lock = threading.Lock()  # protects both fields below
        self._plan = StepPlan(history)
        self._records: list[weakref.ref[StoredRange]] = []

    def handle(self, record: StoredRange, view: View, version: SavedVersion) -> Handle:
        """Return a new handle of `record`, next in the plan."""
        with self._lock:
            self._begin_anew_if_over()
            number = self._plan.packed(record.nbytes)
            self._records.append(weakref.ref(record))
        return Handle(record, view, version, self, number)

    def needed_at_once(self, nbytes: int) -> bool:
        """Tell whether a record of `nbytes` that is made now will be needed at once."""
        with self._lock:
            self._begin_anew_if_over()
            return self._plan.needed_at_once(nbytes)

    def unpacked(self, handle: Handle) -> None:
        """Note that `handle` is being asked for."""
        with self._lock:
            self._plan.unpacked(handle.number)

    def upcoming(self) -> list[StoredRange]:
        """Return the next living records, in the order in which they will probably be needed."""
        with self._lock:
            numbers = list(islice(self._plan.upcoming(), LOOKAHEAD))
            found = [self._records[number]() for number in numbers]
        return [record for record in found if record is not None]

    def unseen(self) -> list[StoredRange | None]:
        """Return what of the upcoming has not been looked at: each once, None for a dead one.

        A thread that has looked says how far by `saw`; another's, meanwhile, costs time alone.
        """
        with self._lock:
            return [self._records[number]() for number in self._plan.unseen(LOOKAHEAD)]

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen are here or have been requested."""
        with self._lock:
            self._plan.saw(count)

    def _begin_anew_if_over(self) -> None:
        if self._plan.is_going_back and all(record() is None for record in self._records):
            self._plan = StepPlan(self._history)
            self._records.clear()
