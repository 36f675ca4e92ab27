"""The entries of all sessions: adding, charging and freeing them, and their sums.

What stays true: a session is charged exactly for the entries that are its own, in whole granules;
an entry's block goes back where it came from once, when it was given up and no lane uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from stormd.arena import Space, granules
from stormd.records import Entry, Phase, Session
from stormd.shares import Shares

__all__ = ["Holdings", "assert_session", "assert_space"]


class Holdings:
    """Counts `entries`, the `raw_bytes` before encoding of those in the pool, and `shares`.

    What a session has in the cache's space counts for none of the last two.
    """

    def __init__(self) -> None:
        self.shares = Shares()
        self.entries = 0
        self.raw_bytes = 0

    def add(self, record: Session, entry_id: int, entry: Entry) -> None:
        """Give a session an entry."""
        record.entries[entry_id] = entry
        self._move(record, entry.charge)
        self._count(record, entry.raw_bytes)
        self.entries += 1

    def remove(self, record: Session, entry_id: int) -> Entry:
        """Take an entry from a session; its promise, block or loan is the caller's business."""
        entry = record.entries.pop(entry_id)
        self._move(record, -entry.charge)
        self._count(record, -entry.raw_bytes)
        self.entries -= 1
        return entry

    def charge(self, record: Session, entry: Entry, charge: int) -> None:
        """Count the entry for another number of bytes from now on."""
        self._move(record, charge - entry.charge)
        entry.charge = charge

    def give_up(self, record: Session, entry_id: int) -> None:
        """Make an entry invisible to its client, and free it unless a lane uses it."""
        record.entries[entry_id].released = True
        self.free_unused(record, entry_id)

    def free_unused(self, record: Session, entry_id: int) -> None:
        """Free the entry if its owner has given it up and no lane uses it."""
        entry = record.entries[entry_id]
        if not entry.released or entry.in_use:
            return
        assert entry.block is not None
        self.remove(record, entry_id)
        if entry.loan is None:
            entry.space.release(entry.block)
        else:
            entry.loan.end()

    def _count(self, record: Session, raw_bytes: int) -> None:
        if record.cache is None:
            self.raw_bytes += raw_bytes

    def _move(self, record: Session, delta: int) -> None:
        before = record.used_bytes
        record.used_bytes += delta
        if record.cache is None:
            self.shares.moved(record.info.uid, before, record.used_bytes)


def assert_space(
    space: Space, entries: Sequence[Entry], *, held: int = 0, promised: int = 0
) -> None:
    """Raise AssertionError where a space holds other than these entries and what else is known.

    `held` and `promised` are the bytes that are in use or promised beside the entries.
    """
    space.assert_invariants()
    use = space.use()
    charged = held + sum(entry.charge for entry in entries)
    if all(entry.block for entry in entries):
        assert (use.used, use.promised) == (charged, promised)
    else:  # a lane may have placed a block of less than was promised, and not said so yet
        assert use.used + use.promised <= charged + promised


def assert_session(record: Session) -> None:
    """Raise AssertionError where a session contradicts itself: for tests."""
    assert record.used_bytes == sum(entry.charge for entry in record.entries.values())
    for entry_id, entry in record.entries.items():
        assert entry.charge == _charge(entry)
        assert not (entry.released and not entry.in_use), "a released entry was not freed"
        started = [t for t in record.tickets.values() if t.entry == entry_id and t.started]
        assert entry.restores == len(started)
    waiting = [number for number, ticket in record.tickets.items() if not ticket.started]
    if record.phase is not Phase.ENDING:
        assert list(record.waiting) == waiting, "restores wait in the order of asking"
        assert sorted(waiting) == sorted(n for e in record.entries.values() for n in e.held)
    if record.waiting:
        first = record.entries[record.tickets[record.waiting[0]].entry]
        assert first.block is None, "a restore whose turn it is was not started"


def _charge(entry: Entry) -> int:
    """Return what an entry must count for: what is lent counts for the cache."""
    if entry.loan is not None:
        return 0
    return granules(entry.block.nbytes if entry.block else entry.promised)
