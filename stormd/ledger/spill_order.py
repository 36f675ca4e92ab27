"""Which of the sessions' entries are written next, given back next, or read next. Pure.

Numbers stay in these lists when their entries have gone on; whoever takes one looks whether it is
still what was meant. So nothing is searched when an entry is freed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

from stormd.ledger.holdings import State
from stormd.ledger.on_disk import Disk, DiskPhase
from stormd.ledger.sessions import Entry, Phase, Session

__all__ = ["LEAST_BYTES", "Numbered", "SpillOrder", "SpillOrders"]

Numbered = tuple[int, Entry]
"""An entry with its number."""

LEAST_BYTES: Final = 16 << 10
"""Of a blob that is written: for less, an operation of the disk frees too little."""

_FEW: Final = 64
"""Numbers of which as many may be out of date without anybody looking."""


class SpillOrder:
    """Of one session. The oldest goes first and comes back last, as in a backward pass."""

    def __init__(self, record: Session) -> None:
        self.record = record
        self._dirty: deque[int] = deque()  # in the pool alone, the oldest first
        self._clean: deque[int] = deque()  # in both, the oldest first
        self._away: deque[int] = deque()  # on the disk alone, the newest last
        self._asked: list[tuple[int, int]] = []  # a heap: on the disk alone, and waited for

    def note(self, number: int, entry: Entry) -> None:
        """Take an entry in, by where it is now."""
        if entry.disk is None:
            if _is_dirty(entry):
                self._append(self._dirty, number, _is_dirty)
        elif entry.disk.phase is DiskPhase.CLEAN:
            self._append(self._clean, number, _is_clean)
        elif entry.disk.phase is DiskPhase.AWAY:
            if entry.waits:
                heapq.heappush(self._asked, (entry.disk.order, number))
            else:
                self._append(self._away, number, _is_away)

    @property
    def clean_count(self) -> int:
        """How many blocks may be given back, at the most."""
        return len(self._clean)

    def next_dirty(self) -> Numbered | None:
        """Take the oldest that may be written."""
        return self._take(self._dirty, _is_dirty)

    def next_clean(self) -> Numbered | None:
        """Take the oldest whose block may be given back, and which nobody waits for."""
        return self._take(self._clean, _is_clean)

    def last_waiting(self) -> Numbered | None:
        """Return what is waited for last of those whose block may be given back all the same."""
        record = self.record
        for ticket in reversed(record.waiting):
            number = record.tickets[ticket].entry
            entry = record.entries[number]
            place = entry.disk
            if place is not None and place.phase is DiskPhase.CLEAN and not entry.restores:
                return number, entry
        return None

    def head(self) -> Numbered | None:
        """Return what holds up all other restores, where that is on the disk alone."""
        record = self.record
        if not record.waiting:
            return None
        number = record.tickets[next(iter(record.waiting))].entry
        entry = record.entries[number]
        is_away = entry.disk is not None and entry.disk.phase is DiskPhase.AWAY
        return (number, entry) if is_away else None

    def first_asked(self) -> Numbered | None:
        """Return what is waited for and not being read; as far as is known, what is first."""
        while self._asked:
            order, number = self._asked[0]
            entry = self.record.entries.get(number)
            if entry is not None and _is_asked(entry, order):
                return number, entry
            heapq.heappop(self._asked)
        return None

    def last_away(self) -> Numbered | None:
        """Return the newest on the disk alone, which a backward pass will want first."""
        while self._away:
            entry = self.record.entries.get(self._away[-1])
            if entry is not None and _is_away(entry):
                return self._away[-1], entry
            self._away.pop()
        return None

    def _append(self, numbers: deque[int], number: int, fits: Callable[[Entry], bool]) -> None:
        """Add a number; where most may be out of date, leave those out that are."""
        entries = self.record.entries
        if len(numbers) > 2 * len(entries) + _FEW:
            kept = {one: None for one in numbers if one in entries and fits(entries[one])}
            numbers.clear()
            numbers.extend(kept)
        numbers.append(number)

    def _take(self, numbers: deque[int], fits: Callable[[Entry], bool]) -> Numbered | None:
        while numbers:
            number = numbers.popleft()
            entry = self.record.entries.get(number)
            if entry is not None and fits(entry):
                return number, entry
        return None


class SpillOrders:
    """Of all sessions that have something for the tier to move."""

    def __init__(self, state: State, disk: Disk) -> None:
        self._state = state
        self._disk = disk
        self._by_session: dict[int, SpillOrder] = {}
        self._asking = itertools.count(1)
        state.touched = []

    def look(self) -> None:
        """Take in what has become of entries since the last look."""
        state = self._state
        touched, state.touched = state.touched or [], []
        for record, number in touched:
            entry = record.entries.get(number)
            if entry is None or record.phase is Phase.ENDING or entry.space is not state.space:
                continue
            place = entry.disk
            if place is not None:
                place.order = (place.order or next(self._asking)) if entry.waits else 0
            self._of(record).note(number, entry)

    def living(self) -> list[SpillOrder]:
        """Return those of sessions that go on, and forget the others."""
        orders = self._by_session
        for session in [n for n, one in orders.items() if one.record.phase is Phase.ENDING]:
            del orders[session]
        return list(orders.values())

    def drop_idle(self) -> bool:
        """Give the block of the oldest clean entry back that nobody waits for."""
        if not self._disk.held_bytes:
            return False
        for order in sorted(self.living(), key=lambda one: -one.clean_count):
            found = order.next_clean()
            if found is not None:
                self._drop(order, *found)
                return True
        return False

    def drop_waiting(self) -> bool:
        """Give a block back that is waited for, by a restore that cannot begin yet."""
        if not self._disk.held_bytes:
            return False
        for order in self.living():
            found = order.last_waiting()
            if found is not None:
                self._drop(order, *found)
                return True
        return False

    def _drop(self, order: SpillOrder, number: int, entry: Entry) -> None:
        """Have an entry that is in both places be on the disk alone."""
        assert entry.block is not None
        assert entry.disk is not None
        self._state.holdings.records.freed(entry)  # before its room is used again
        entry.space.release(entry.block)
        entry.block = None
        entry.disk.enter(DiskPhase.AWAY)
        order.note(number, entry)

    def end(self) -> None:
        """Forget all, and note nothing any more: the tier has ended."""
        self._by_session.clear()
        self._state.touched = None

    def _of(self, record: Session) -> SpillOrder:
        session = record.info.session
        order = self._by_session.get(session)
        if order is None:
            order = self._by_session[session] = SpillOrder(record)
        return order


def _is_dirty(entry: Entry) -> bool:
    if entry.disk is not None or entry.in_use or entry.released or entry.block is None:
        return False
    return entry.loan is None and entry.block.nbytes >= LEAST_BYTES


def _is_clean(entry: Entry) -> bool:
    place = entry.disk
    return place is not None and place.phase is DiskPhase.CLEAN and not entry.in_use


def _is_away(entry: Entry) -> bool:
    place = entry.disk
    return place is not None and place.phase is DiskPhase.AWAY and not entry.waits


def _is_asked(entry: Entry, order: int) -> bool:
    place = entry.disk
    return (
        place is not None
        and place.phase is DiskPhase.AWAY
        and place.order == order
        and entry.waits > 0
    )
