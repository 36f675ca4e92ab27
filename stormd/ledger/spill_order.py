"""Which of the sessions' entries are written, freed in the pool, or read next. Pure.

These lists keep an entry's number after the entry has changed; the reader of a number checks
whether the entry still fits the list. So freeing an entry needs no search.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from stormd.ledger.holdings import State
from stormd.ledger.on_disk import Disk, DiskPhase
from stormd.ledger.sessions import Entry, Phase, Session

__all__ = ["MIN_BYTES", "Numbered", "SpillOrder", "SpillOrders"]

Numbered = tuple[int, Entry]
"""An entry with its number."""

MIN_BYTES: Final = 16 << 10
"""Minimum size of a blob that is written: for a smaller one, a disk operation frees too little."""

_FEW: Final = 64
"""Outdated numbers that a list may have, besides twice the entries, before they are removed."""


class SpillOrder:
    """One session's order: the oldest entry is written first and read last, as backward needs."""

    def __init__(self, record: Session) -> None:
        self.record = record
        self._dirty: deque[int] = deque()  # in the pool alone, oldest first
        self._clean: deque[int] = deque()  # in both, oldest first
        self._away: deque[int] = deque()  # on the disk alone, newest last
        self._requested: list[tuple[int, int]] = []  # a heap: on the disk alone, and waited for

    def note(self, number: int, entry: Entry) -> None:
        """Add an entry to the list for its current place."""
        if entry.disk is None:
            if _is_dirty(entry):
                self._append(self._dirty, number, _is_dirty)
        elif entry.disk.phase is DiskPhase.CLEAN:
            self._append(self._clean, number, _is_clean)
        elif entry.disk.phase is DiskPhase.AWAY:
            if entry.waits:
                heapq.heappush(self._requested, (entry.disk.order, number))
            else:
                self._append(self._away, number, _is_away)

    @property
    def clean_count(self) -> int:
        """The number of blocks that may be freed, at most."""
        return len(self._clean)

    def next_dirty(self) -> Numbered | None:
        """Take the oldest entry that may be written."""
        return self._take(self._dirty, _is_dirty)

    def next_clean(self) -> Numbered | None:
        """Take the oldest entry whose block may be freed and that no restore waits for."""
        return self._take(self._clean, _is_clean)

    def last_waiting(self) -> Numbered | None:
        """Return the entry with a clean block whose restore will begin last, or None."""
        record = self.record
        for ticket in reversed(record.waiting):
            number = record.tickets[ticket].entry
            entry = record.entries[number]
            if entry.disk_phase is DiskPhase.CLEAN and not entry.restores:
                return number, entry
        return None

    def blocking_entry(self) -> Numbered | None:
        """Return the entry that holds back all other restores, if it is on the disk alone."""
        record = self.record
        if not record.waiting:
            return None
        number = record.tickets[next(iter(record.waiting))].entry
        entry = record.entries[number]
        return (number, entry) if entry.disk_phase is DiskPhase.AWAY else None

    def first_requested(self) -> Numbered | None:
        """Return the entry on disk alone whose restore, as far as known, was requested first."""
        while self._requested:
            order, number = self._requested[0]
            entry = self.record.entries.get(number)
            if entry is not None and _is_requested(entry, order):
                return number, entry
            heapq.heappop(self._requested)
        return None

    def last_away(self) -> Numbered | None:
        """Return the newest entry on the disk alone, which a backward pass will need first."""
        while self._away:
            entry = self.record.entries.get(self._away[-1])
            if entry is not None and _is_away(entry):
                return self._away[-1], entry
            self._away.pop()
        return None

    def _append(self, numbers: deque[int], number: int, fits: Callable[[Entry], bool]) -> None:
        """Add a number; first remove outdated ones if most may be outdated."""
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
    """The orders of all sessions that have something for the tier to move."""

    def __init__(self, state: State, disk: Disk) -> None:
        self._state = state
        self._disk = disk
        self._by_session: dict[int, SpillOrder] = {}
        self._request_numbers = itertools.count(1)
        state.touched = []

    def refresh(self) -> None:
        """Take in the changes of entries since the last look."""
        state = self._state
        touched, state.touched = state.touched or [], []
        for record, number in touched:
            entry = record.entries.get(number)
            if entry is None or record.phase is Phase.ENDING or entry.space is not state.space:
                continue
            place = entry.disk
            if place is not None:
                place.order = (place.order or next(self._request_numbers)) if entry.waits else 0
            self._of(record).note(number, entry)

    def active(self) -> list[SpillOrder]:
        """Return the orders of sessions that are not ending, and forget the others."""
        orders = self._by_session
        for session in [n for n, one in orders.items() if one.record.phase is Phase.ENDING]:
            del orders[session]
        return list(orders.values())

    def keeps_shares(self, record: Session, nbytes: int) -> bool:
        """Return whether all shares are kept if a session holds `nbytes` more of the pool.

        What is clean or being read counts as its session's, since restores may use it. All are kept
        while the session stays within its own.
        """
        limits = self._state.limits
        if not limits.share_bytes:
            return True
        held = self._held_by(record)
        taken = self._beyond_share(held + nbytes) - self._beyond_share(held)
        if not taken:
            return True
        kept = limits.max_sessions * limits.share_bytes
        return self.common_bytes() + taken + kept <= self._state.space.capacity

    def common_bytes(self) -> int:
        """Return the bytes of the pool that all sessions hold beyond their shares."""
        sessions, shares = self._state.sessions, self._state.holdings.shares
        return shares.common_bytes + sum(
            shares.common_growth((used := sessions[session].used_bytes), used + held)
            for session, held in self._disk.held_by_session.items()
        )

    def drop_beyond(self, record: Session) -> bool:
        """Free an idle clean block of the session, or of one that holds more than its share."""
        return self._drop(
            SpillOrder.next_clean,
            [
                one
                for one in self._by_clean_count()
                if one.record is record or self._beyond_share(self._held_by(one.record))
            ],
        )

    def drop_idle(self) -> bool:
        """Free a clean block that no restore waits for; return whether there was one.

        It is the oldest one of the session with most clean blocks.
        """
        return self._drop(SpillOrder.next_clean, self._by_clean_count())

    def drop_waiting(self) -> bool:
        """Free a clean block that a restore waits for; return whether there was one.

        That restore is not its session's first, so it cannot begin yet.
        """
        return self._drop(SpillOrder.last_waiting, self.active())

    def _by_clean_count(self) -> list[SpillOrder]:
        return sorted(self.active(), key=lambda order: -order.clean_count)

    def _held_by(self, record: Session) -> int:
        """Return the bytes of the pool that a session is charged for, is reading, or has clean."""
        return record.used_bytes + self._disk.held_by_session[record.info.session]

    def _beyond_share(self, held: int) -> int:
        return max(0, held - self._state.limits.share_bytes)

    def _drop(
        self, find: Callable[[SpillOrder], Numbered | None], orders: Sequence[SpillOrder]
    ) -> bool:
        """Free the first clean block found, so that its entry is on the disk alone."""
        if not self._disk.held_bytes:
            return False
        for order in orders:
            found = find(order)
            if found is not None:
                number, entry = found
                assert entry.block is not None
                assert entry.disk is not None
                self._state.holdings.records.freed(entry)  # before its space is used again
                entry.space.release(entry.block)
                entry.block = None
                entry.disk.enter(DiskPhase.AWAY)
                order.note(number, entry)
                return True
        return False

    def end(self) -> None:
        """Forget all entries and take in no more: the tier has ended."""
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
    return entry.loan is None and entry.block.nbytes >= MIN_BYTES


def _is_clean(entry: Entry) -> bool:
    return entry.disk_phase is DiskPhase.CLEAN and not entry.in_use


def _is_away(entry: Entry) -> bool:
    return entry.disk_phase is DiskPhase.AWAY and not entry.waits


def _is_requested(entry: Entry, order: int) -> bool:
    place = entry.disk
    is_away = place is not None and place.phase is DiskPhase.AWAY and place.order == order
    return is_away and entry.waits > 0
