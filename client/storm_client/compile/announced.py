"""The stored values that a backward pass is expected to wait for next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storm_client.saved.ranges import StoredRange

__all__ = ["FEW_RECORDS", "Announced"]

FEW_RECORDS = 64
"""With no more announced records than this, freed ones are not looked for."""


class Announced:
    """Records of one session that fetches have announced and nobody has waited for, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below
        self._records: dict[int, weakref.ref[StoredRange]] = {}
        self._seen: set[int] = set()
        self._limit = FEW_RECORDS

    def add(self, record: StoredRange) -> None:
        """Expect that `record` is waited for after all records announced before."""
        with self._lock:
            if record.key not in self._records:
                self._records[record.key] = weakref.ref(record)

    def remove(self, record: StoredRange) -> None:
        """Remove a restored `record`; also remove freed ones whenever the number has doubled."""
        with self._lock:
            self._records.pop(record.key, None)
            self._seen.discard(record.key)
            if len(self._records) > self._limit:
                gone = [key for key, reference in self._records.items() if reference() is None]
                for key in gone:
                    del self._records[key]
                self._seen.difference_update(gone)
                self._limit = 2 * len(self._records) + FEW_RECORDS

    @property
    def is_due(self) -> bool:
        """Return True: records are announced only a few times a step."""
        return True

    def upcoming(self) -> list[StoredRange]:
        """Return the living records, the nearest first."""
        with self._lock:
            found = [reference() for reference in self._records.values()]
        return [record for record in found if record is not None]

    def unseen(self) -> list[StoredRange | None]:
        """Return the records that have not been looked at, None for a freed one."""
        with self._lock:
            return [self._records[key]() for key in self._unseen()]

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen are restored or have been requested."""
        with self._lock:
            self._seen.update(list(islice(self._unseen(), count)))

    def _unseen(self) -> Iterator[int]:
        return (key for key in self._records if key not in self._seen)
