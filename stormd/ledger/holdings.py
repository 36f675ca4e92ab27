"""What sessions hold, and how it adds up: the state that all modules of the ledger share.

A session is charged for the entries that are its own, in whole granules. What it holds beyond its
share is taken from the part of the pool that all have in common; so where all shares and the common
part fit into the pool, a share is never refused. An entry's block goes back where it came from
once, when it was given up and no lane uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stormd.ledger.on_disk import DiskPhase
from stormd.ledger.records import Records
from stormd.ledger.sessions import Entry, Limits, Session
from stormd.memory.arena import Space, granules
from stormd.memory.shared_rows import UserTotals
from stormd.monitoring.counters import Counters

__all__ = ["Holdings", "Shares", "State", "assert_session", "assert_space"]


class Shares:
    """How sessions' holdings add up, by user and beyond each share. Sizes are bytes of the pool.

    Other processes are told by `totals` where there are some.
    """

    def __init__(self, totals: UserTotals | None = None) -> None:
        self._totals = totals
        self._share = 0
        self._by_user: dict[int, int] = {}
        self._common = 0

    @property
    def common_bytes(self) -> int:
        """What all sessions hold beyond their shares."""
        return self._common

    def of_user(self, uid: int) -> int:
        """Return what all sessions of a user hold."""
        return self._by_user.get(uid, 0)

    def claim(self, uid: int, nbytes: int) -> int:
        """Return what all sessions of a user hold in all processes, `nbytes` more being wanted.

        Others know of them from now on; where they are refused, `unclaim` must follow.
        """
        own = self.of_user(uid)
        return own if self._totals is None else own + self._totals.claim(uid, own + nbytes)

    def unclaim(self, uid: int) -> None:
        """Note that what was claimed for a user is not held."""
        if self._totals is not None:
            self._totals.hold(uid, self.of_user(uid))

    @property
    def within_bytes(self) -> int:
        """What all sessions hold of their shares."""
        return sum(self._by_user.values()) - self._common

    def limit(self, share_bytes: int, used: Iterable[int]) -> None:
        """Hold to another share; `used` is what each session holds."""
        self._share = share_bytes
        self._common = sum(self._beyond(one) for one in used)

    def moved(self, uid: int, before: int, after: int) -> None:
        """Note that a session of the user's holds another number of bytes."""
        total = self._by_user.get(uid, 0) + after - before
        if total:
            self._by_user[uid] = total
        else:
            self._by_user.pop(uid, None)
        if self._totals is not None:
            self._totals.hold(uid, total)
        self._common += self.taken(before, after) if self._share else after - before

    def taken(self, before: int, after: int) -> int:
        """Return by how much the common part shrinks where a session goes from one to the other."""
        return max(after, self._share) - max(before, self._share)

    def assert_invariants(self, sessions: Iterable[tuple[int, int]]) -> None:
        """Raise AssertionError where the sums are not those of these users' sessions: for tests."""
        by_user: dict[int, int] = {}
        common = 0
        for uid, used in sessions:
            by_user[uid] = by_user.get(uid, 0) + used
            common += self._beyond(used)
        assert self._by_user == {uid: used for uid, used in by_user.items() if used}
        assert self._common == common

    def _beyond(self, used: int) -> int:
        return max(0, used - self._share)


class Holdings:
    """Counts `entries`, the `raw_bytes` before encoding of those in the pool, and `shares`.

    What a session has in the cache's space counts for none of the last two. `records` is where what
    outlives the process is written down. `has_changed` says that something was taken in or given
    back, or is waited for; whoever has looked at that clears it.
    """

    def __init__(self, records: Records, totals: UserTotals | None = None) -> None:
        self.shares = Shares(totals)
        self.records = records
        self.entries = 0
        self.raw_bytes = 0
        self.has_changed = True

    def add(self, record: Session, entry_id: int, entry: Entry) -> None:
        """Give a session an entry, for which it is charged."""
        record.entries[entry_id] = entry
        self.charge(record, entry.charge)
        self._count(record, entry.raw_bytes)
        self.entries += 1

    def charge(self, record: Session, nbytes: int) -> None:
        """Charge a session for so many bytes more; with fewer than 0, for fewer."""
        if not nbytes:  # as of a blob that is as large as was promised
            return
        self.has_changed = True
        before = record.used_bytes
        record.used_bytes += nbytes
        if record.cache is None:
            self.shares.moved(record.info.uid, before, record.used_bytes)

    def remove(self, record: Session, entry_id: int) -> Entry:
        """Take an entry from a session; its promise, block or loan is the caller's business."""
        entry = record.entries.pop(entry_id)
        self.charge(record, -entry.charge)
        self._count(record, -entry.raw_bytes)
        self.entries -= 1
        return entry

    def remove_all(self, record: Session, entry_ids: Iterable[int]) -> list[Entry]:
        """Take several entries from a session, as `remove` does each."""
        entries = [record.entries.pop(entry_id) for entry_id in entry_ids]
        self.charge(record, -sum(entry.charge for entry in entries))
        self._count(record, -sum(entry.raw_bytes for entry in entries))
        self.entries -= len(entries)
        return entries

    def add_lent(self, record: Session, entries: dict[int, Entry]) -> None:
        """Give a session entries that the cache lends it, and for which nobody is charged."""
        record.entries |= entries
        self.entries += len(entries)

    def give_up(self, record: Session, entry_id: int) -> None:
        """Make an entry invisible to its client, and free it unless a lane uses it."""
        entry = record.entries[entry_id]
        entry.released = True
        if not entry.in_use:
            self._free(record, entry_id, entry)

    def free_unused(self, record: Session, entry_id: int) -> None:
        """Free the entry if its owner has given it up and no lane uses it."""
        entry = record.entries[entry_id]
        if entry.released and not entry.in_use:
            self._free(record, entry_id, entry)

    def _free(self, record: Session, entry_id: int, entry: Entry) -> None:
        """Give an entry's block and extent back, or its promise; it is charged no longer."""
        self.remove(record, entry_id)
        self.records.freed(entry)  # before its room is used again
        if entry.loan is not None:
            entry.loan.end()
        elif entry.block is not None:
            entry.space.release(entry.block)
        elif entry.disk is None:
            entry.space.withdraw(entry.promised)
        if entry.disk is not None:
            entry.disk.leave()

    def _count(self, record: Session, raw_bytes: int) -> None:
        if record.cache is None:
            self.raw_bytes += raw_bytes


@dataclass(slots=True)
class State:
    """What there is, of which each module of the ledger looks after its part.

    `space` is the pool's. While it is draining no session and no entry is taken. `touched` are the
    entries that lanes no longer use, or that restores wait for, since the tier on disk has looked;
    None where there is no tier.
    """

    space: Space
    limits: Limits
    counters: Counters
    holdings: Holdings
    sessions: dict[int, Session] = field(default_factory=dict)
    is_draining: bool = False
    touched: list[tuple[Session, int]] | None = None


def assert_space(
    space: Space, entries: Sequence[Entry], *, held: int = 0, promised: int = 0
) -> None:
    """Raise AssertionError where a space holds other than these entries and what else is known.

    `held` and `promised` are the bytes that are in use or promised beside the entries.
    """
    space.assert_invariants()
    use = space.use()
    charged = held + sum(entry.charge for entry in entries)
    if all(entry.block or entry.disk for entry in entries):
        assert (use.used, use.promised) == (charged, promised)
    else:  # a lane may have placed a block of less than was promised, and not said so yet
        assert use.used + use.promised <= charged + promised


def assert_session(record: Session) -> None:
    """Raise AssertionError where a session contradicts itself: for tests."""
    assert record.used_bytes == sum(entry.charge for entry in record.entries.values())
    for entry_id, entry in record.entries.items():
        assert entry.charge == _charge(entry)
        is_due = entry_id in record.to_free  # of an ending session, a few at a time
        assert entry.in_use or not entry.released or is_due, "a released entry was not freed"
        tickets = [n for n, ticket in record.tickets.items() if ticket.entry == entry_id]
        waiting = [number for number in tickets if number in record.waiting]
        assert (entry.waits, entry.restores) == (len(waiting), len(tickets) - len(waiting))
    assert record.waiting.keys() <= record.tickets.keys()
    if record.waiting:
        first = record.entries[record.tickets[next(iter(record.waiting))].entry]
        assert first.block is None, "a restore whose turn it is was not started"


def _charge(entry: Entry) -> int:
    """Return what an entry must count for: nothing, where it is lent by the cache or on disk."""
    if entry.loan is not None or (entry.disk and entry.disk.phase is not DiskPhase.WRITING):
        return 0
    return granules(entry.block.nbytes) if entry.block else entry.promised
