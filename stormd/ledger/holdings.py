"""What sessions hold, and how it adds up: the state that all modules of the ledger share.

A session is charged for its own entries, in whole granules. What it holds beyond its share comes
from the common part of the pool. So if all shares and the common part fit into the pool, a share is
never refused. Beside a tier on disk, a session's clean blocks count too. An entry's block is freed
exactly once, when the entry is released and no lane uses it.
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
    """Sums of the sessions' holdings: by user, and beyond each share. Sizes are bytes of the pool.

    `totals` exchanges the users' sums with other processes, if there are any.
    """

    def __init__(self, totals: UserTotals | None = None) -> None:
        self._totals = totals
        self._share = 0
        self._by_user: dict[int, int] = {}
        self._common = 0

    @property
    def common_bytes(self) -> int:
        """The bytes that all sessions hold beyond their shares."""
        return self._common

    def of_user(self, uid: int) -> int:
        """Return the bytes that all sessions of a user hold."""
        return self._by_user.get(uid, 0)

    def claim(self, uid: int, nbytes: int) -> int:
        """Return the bytes that a user's sessions hold in all processes, before `nbytes` more.

        Other processes count the `nbytes` from now on. If they are refused, call `unclaim`.
        """
        own = self.of_user(uid)
        return own if self._totals is None else own + self._totals.claim(uid, own + nbytes)

    def unclaim(self, uid: int) -> None:
        """Note that a user's claimed bytes are not held."""
        if self._totals is not None:
            self._totals.hold(uid, self.of_user(uid))

    def set_share(self, share_bytes: int, used: Iterable[int]) -> None:
        """Change the size of a share; `used` has the bytes that each session holds."""
        self._share = share_bytes
        self._common = sum(self._beyond(one) for one in used)

    def update(self, uid: int, before: int, after: int) -> None:
        """Note that the bytes of one of the user's sessions change from `before` to `after`."""
        total = self._by_user.get(uid, 0) + after - before
        if total:
            self._by_user[uid] = total
        else:
            self._by_user.pop(uid, None)
        if self._totals is not None:
            self._totals.hold(uid, total)
        self._common += self.common_growth(before, after) if self._share else after - before

    def common_growth(self, before: int, after: int) -> int:
        """Return how much of the common part a session takes by going from `before` to `after`."""
        return max(after, self._share) - max(before, self._share)

    def assert_invariants(self, sessions: Iterable[tuple[int, int]]) -> None:
        """Raise AssertionError if the sums are not those of these users' sessions: for tests."""
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

    Entries of a session for the cache count for neither `raw_bytes` nor `shares`. `records` records
    the state that outlives the process. `has_changed` says that bytes were taken, freed or are
    waited for; its reader clears it.
    """

    def __init__(self, records: Records, totals: UserTotals | None = None) -> None:
        self.shares = Shares(totals)
        self.records = records
        self.entries = 0
        self.raw_bytes = 0
        self.has_changed = True

    def add(self, record: Session, entry_id: int, entry: Entry) -> None:
        """Give a session an entry, and charge the session for it."""
        record.entries[entry_id] = entry
        self.charge(record, entry.charge)
        self._count(record, entry.raw_bytes)
        self.entries += 1

    def charge(self, record: Session, nbytes: int) -> None:
        """Charge a session for `nbytes` more; a negative number means fewer."""
        if not nbytes:  # for example, a blob as large as was promised
            return
        self.has_changed = True
        before = record.used_bytes
        record.used_bytes += nbytes
        if record.cache is None:
            self.shares.update(record.info.uid, before, record.used_bytes)

    def remove(self, record: Session, entry_id: int) -> Entry:
        """Take an entry from a session; the caller handles its promise, block or loan."""
        entry = record.entries.pop(entry_id)
        self.charge(record, -entry.charge)
        self._count(record, -entry.raw_bytes)
        self.entries -= 1
        return entry

    def remove_all(self, record: Session, entry_ids: Iterable[int]) -> list[Entry]:
        """Take several entries from a session, as `remove` does for each."""
        entries = [record.entries.pop(entry_id) for entry_id in entry_ids]
        self.charge(record, -sum(entry.charge for entry in entries))
        self._count(record, -sum(entry.raw_bytes for entry in entries))
        self.entries -= len(entries)
        return entries

    def add_lent(self, record: Session, entries: dict[int, Entry]) -> None:
        """Give a session entries that the cache lends it; nobody is charged for them."""
        record.entries |= entries
        self.entries += len(entries)

    def release(self, record: Session, entry_id: int) -> None:
        """Make an entry invisible to its client, and free it unless it is in use."""
        entry = record.entries[entry_id]
        entry.released = True
        if not entry.in_use:
            self._free(record, entry_id, entry)

    def free_unused(self, record: Session, entry_id: int) -> None:
        """Free the entry if its owner has released it and it is not in use."""
        entry = record.entries[entry_id]
        if entry.released and not entry.in_use:
            self._free(record, entry_id, entry)

    def _free(self, record: Session, entry_id: int, entry: Entry) -> None:
        """Free an entry's block and extent, or withdraw its promise; it is charged no longer."""
        self.remove(record, entry_id)
        self.records.freed(entry)  # before its space is used again
        if entry.loan is not None:
            entry.loan.end()
        elif entry.block is not None:
            entry.space.release(entry.block)
        elif entry.disk is None:
            entry.space.withdraw(entry.promised)
        if entry.disk is not None:
            entry.disk.free()

    def _count(self, record: Session, raw_bytes: int) -> None:
        if record.cache is None:
            self.raw_bytes += raw_bytes


@dataclass(slots=True)
class State:
    """The state that the ledger's modules share.

    `space` is the pool's. While `is_draining`, no session and no entry is accepted. `touched` has
    the entries that lanes have stopped using, or that restores wait for, since the tier on disk
    last looked; None if there is no tier.
    """

    space: Space
    limits: Limits
    counters: Counters
    holdings: Holdings
    sessions: dict[int, Session] = field(default_factory=dict)
    is_draining: bool = False
    touched: list[tuple[Session, int]] | None = None

    def touch(self, record: Session, entry_id: int) -> None:
        """Have the tier on disk, if there is one, consider an entry again."""
        if self.touched is not None:
            self.touched.append((record, entry_id))

    def unused(self, record: Session, entry_id: int) -> None:
        """Note that an entry has one use less: free it if it was released and has no other."""
        self.holdings.free_unused(record, entry_id)
        self.touch(record, entry_id)


def assert_space(space: Space, entries: Sequence[Entry], *, held: int) -> None:
    """Raise AssertionError if a space holds anything but these entries and `held` bytes."""
    space.assert_invariants()
    use = space.use()
    charged = held + sum(entry.charge for entry in entries)
    if all(entry.block or entry.disk for entry in entries):
        assert (use.used, use.promised) == (charged, 0)
    else:  # a lane may have placed a smaller block than was promised, and not answered yet
        assert use.taken <= charged


def assert_session(record: Session) -> None:
    """Raise AssertionError if a session contradicts itself: for tests."""
    assert record.used_bytes == sum(entry.charge for entry in record.entries.values())
    for entry_id, entry in record.entries.items():
        assert entry.charge == _charge(entry)
        is_due = entry_id in record.to_free  # an ending session's entries are freed in steps
        assert entry.in_use or not entry.released or is_due, "a released entry was not freed"
        tickets = [n for n, ticket in record.tickets.items() if ticket.entry == entry_id]
        waiting = [number for number in tickets if number in record.waiting]
        assert (entry.waits, entry.restores) == (len(waiting), len(tickets) - len(waiting))
    assert record.waiting.keys() <= record.tickets.keys()
    if record.waiting:
        first = record.entries[record.tickets[next(iter(record.waiting))].entry]
        assert first.block is None, "a restore whose turn it is was not started"
    for reserved in record.ranges.values():
        reserved.assert_invariants()


def _charge(entry: Entry) -> int:
    """Return an entry's correct charge: 0 if the cache lends it or it is on disk."""
    if entry.loan is not None or entry.disk_phase not in (None, DiskPhase.WRITING):
        return 0
    return granules(entry.block.nbytes) if entry.block else entry.promised
