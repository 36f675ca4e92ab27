"""What sessions hold and may hold: shares, quotas, limits, and the checks of what clients ask for.

A session is charged for the entries that are its own, in whole granules. What it holds beyond its
share is taken from the part of the pool that all have in common; so where all shares and the common
part fit into the pool, a share is never refused. An entry's block goes back where it came from
once, when it was given up and no lane uses it.

A check reads and changes nothing. What passes all of them names only entries, segments and ranges
of its own session, within the limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from stormd.ledger.parts import blob_bound
from stormd.ledger.sessions import Entry, Limits, Phase, Session
from stormd.memory.arena import Space, granules
from stormd.protocol import MapSegment, Store
from stormd.protocol.limits import FIRST_LEASED
from stormd.sizes import format_size

__all__ = [
    "MAX_RESTORES",
    "MAX_SEGMENTS",
    "Holdings",
    "Shares",
    "assert_session",
    "assert_space",
    "restore_problem",
    "segment_problem",
    "share_problem",
    "store_problem",
]

MAX_RESTORES: Final = 4096
"""Restores of one session under way at one time."""

MAX_SEGMENTS: Final = 4096
"""Segments of one session mapped at one time."""


# --- sums -----------------------------------------------------------------------------------


class Shares:
    """How sessions' holdings add up, by user and beyond each share. Sizes are bytes of the pool."""

    def __init__(self) -> None:
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

    What a session has in the cache's space counts for none of the last two.
    """

    def __init__(self) -> None:
        self.shares = Shares()
        self.entries = 0
        self.raw_bytes = 0

    def add(self, record: Session, entry_id: int, entry: Entry) -> None:
        """Give a session an entry, for which it is charged."""
        record.entries[entry_id] = entry
        self.charge(record, entry.charge)
        self._count(record, entry.raw_bytes)
        self.entries += 1

    def charge(self, record: Session, nbytes: int) -> None:
        """Charge a session for so many bytes more; with fewer than 0, for fewer."""
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
        record.entries[entry_id].released = True
        self.free_unused(record, entry_id)

    def free_unused(self, record: Session, entry_id: int) -> None:
        """Free the entry if its owner has given it up and no lane uses it."""
        entry = record.entries[entry_id]
        if entry.released and not entry.in_use:
            self._free(record, entry_id, entry)

    def _free(self, record: Session, entry_id: int, entry: Entry) -> None:
        """Give an entry's block back, for which it is charged no longer."""
        assert entry.block is not None
        self.remove(record, entry_id)
        if entry.loan is None:
            entry.space.release(entry.block)
        else:
            entry.loan.end()

    def _count(self, record: Session, raw_bytes: int) -> None:
        if record.cache is None:
            self.raw_bytes += raw_bytes


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
        tickets = [n for n, ticket in record.tickets.items() if ticket.entry == entry_id]
        waiting = [number for number in tickets if number in record.waiting]
        assert (entry.waits, entry.restores) == (len(waiting), len(tickets) - len(waiting))
    assert record.waiting.keys() <= record.tickets.keys()
    if record.waiting:
        first = record.entries[record.tickets[next(iter(record.waiting))].entry]
        assert first.block is None, "a restore whose turn it is was not started"


def _charge(entry: Entry) -> int:
    """Return what an entry must count for: what is lent counts for the cache."""
    if entry.loan is not None:
        return 0
    return granules(entry.block.nbytes) if entry.block else entry.promised


# --- may it be carried out -------------------------------------------------------------------


def store_problem(
    session: Session, message: Store, limits: Limits, *, user_bytes: int, draining: bool
) -> tuple[str, str] | None:
    """Return the reason (of protocol.REJECTIONS) and detail of a rejection, None if there is none.

    `user_bytes` is what all sessions of the session's user hold.
    Whether the pool has room is not looked at: only a promise of the arena can tell.
    """
    if detail := _invalid(session, message):
        return "invalid", detail
    nbytes = granules(blob_bound(message.nbytes))
    if draining:
        return "draining", "the daemon is shutting down"
    if detail := _count(session, limits):
        return "too_many_entries", detail
    if session.cache is not None:  # the cache limits itself, by its own size
        return None
    detail = _quota(session, limits, nbytes) or _user_quota(session, limits, user_bytes, nbytes)
    return ("quota", detail) if detail else None


def share_problem(
    session: Session, shares: Shares, limits: Limits, capacity: int, nbytes: int
) -> str | None:
    """Return why a pool of `capacity` has no `nbytes` more for the session, others' shares kept.

    None where it has: always, where the session does not leave its own share with them.
    """
    common = capacity - limits.max_sessions * limits.share_bytes
    taken = shares.taken(session.used_bytes, session.used_bytes + nbytes)
    if not limits.share_bytes or not taken or shares.common_bytes + taken <= common:
        return None
    return (
        f"{format_size(shares.common_bytes)} of the {format_size(common)} beyond the sessions' "
        f"shares of {format_size(limits.share_bytes)} are taken and {format_size(taken)} more "
        "are asked for: raise pool_bytes or lower session_share_bytes"
    )


def restore_problem(  # noqa: PLR0917, PLR0911 - a call for each part: keywords take twice as long
    session: Session, ticket: int, number: int, segment: int, offset: int, nbytes: int
) -> tuple[str, str] | None:
    """Return the kind (of Failed) and detail of why entry `number` is not restored, or None."""
    entry = session.entries.get(number)
    if session.phase is not Phase.ATTACHED:
        return "UsageError", _phase(session)
    if entry is None or entry.released:
        return "ActivationLost", f"entry {number} does not exist or was released"
    if nbytes != entry.raw_bytes:
        return "UsageError", f"entry {number} has {entry.raw_bytes} bytes, not {nbytes}"
    if ticket in session.tickets or not ticket:
        return "UsageError", f"ticket {ticket} is 0 or under way: choose a new one"
    if len(session.tickets) >= MAX_RESTORES:
        return "QuotaExceeded", f"{MAX_RESTORES} restores are under way: wait for one"
    if offset + nbytes <= session.segments.get(segment, -1):
        return None
    return "UsageError", _range(session, segment, offset, nbytes)


def segment_problem(session: Session, message: MapSegment) -> str | None:
    """Return why the segment may not be mapped, None where it may."""
    if detail := _phase(session) or _lane(session):
        return detail
    if message.segment in session.segments or message.segment in session.mapping:
        return f"segment {message.segment} is mapped already: choose a new number"
    if len(session.segments) + len(session.mapping) >= MAX_SEGMENTS:
        return f"{MAX_SEGMENTS} segments are mapped: unmap one first"
    if not message.nbytes:
        return f"segment {message.segment} has 0 bytes"
    return None


def _invalid(session: Session, message: Store) -> str:
    """Return what is wrong with the message itself; of several faults the first."""
    return (
        _phase(session)
        or _lane(session)
        or _order(session, message.entry)
        or _part(session, message)
        or _range(session, message.segment, message.offset, message.nbytes)
    )


def _phase(session: Session) -> str:
    if session.phase is Phase.ATTACHED:
        return ""
    return "the session has no lifeline yet: connect to Welcome.lifeline first"


def _lane(session: Session) -> str:
    if session.info.has_lane:
        return ""
    return "this session is for control alone: open one for a device to store what is there"


def _order(session: Session, entry: int) -> str:
    if session.last_entry < entry < FIRST_LEASED:
        return ""
    if entry >= FIRST_LEASED:
        return f"entry {entry} is of those that only the daemon numbers, from 2^62 on"
    return f"entry {entry} does not follow entry {session.last_entry}: ids only grow"


def _part(session: Session, message: Store) -> str:
    if message.nbytes <= session.part_bytes:
        return ""
    return _too_large(message.nbytes, session.part_bytes)


def _too_large(nbytes: int, most: int) -> str:
    return f"{nbytes} bytes in one entry; the limit is {most}: send parts"


def _range(session: Session, segment: int, offset: int, nbytes: int) -> str:
    size, end = session.segments.get(segment), offset + nbytes
    if size is None:
        return f"segment {segment} is not mapped"
    if end <= size:
        return ""
    return f"bytes {offset} to {end} lie outside segment {segment} of {size} bytes"


def _count(session: Session, limits: Limits) -> str:
    if len(session.entries) < limits.max_entries:
        return ""
    return f"{limits.max_entries} entries are held, the limit: release some first"


def _quota(session: Session, limits: Limits, nbytes: int) -> str:
    if not limits.quota_bytes or session.used_bytes + nbytes <= limits.quota_bytes:
        return ""
    return (
        f"{format_size(session.used_bytes)} of {format_size(limits.quota_bytes)} are used and "
        f"{format_size(nbytes)} more are asked for: raise session_quota_bytes"
    )


def _user_quota(session: Session, limits: Limits, used: int, nbytes: int) -> str:
    if not limits.user_quota_bytes or used + nbytes <= limits.user_quota_bytes:
        return ""
    return (
        f"{format_size(used)} of the {format_size(limits.user_quota_bytes)} of user "
        f"{session.info.uid} are used and {format_size(nbytes)} more are asked for: raise "
        "uid_quota_bytes"
    )
