"""May this request be carried out: the checks of everything that a client says.

What stays true: a check reads and changes nothing, and what passes all of them names only
entries, segments and ranges of its own session, within the limits.
"""

from __future__ import annotations

from typing import Final

from stormd.arena import granules
from stormd.lanes import blob_bound
from stormd.protocol import MapSegment, Restore, Store
from stormd.protocol.limits import FIRST_LEASED
from stormd.protocol.timeline import RESULTS
from stormd.records import Limits, Phase, Session
from stormd.shares import Shares
from stormd.sizes import format_size

__all__ = [
    "MAX_RESTORES",
    "MAX_SEGMENTS",
    "restore_problem",
    "segment_problem",
    "share_problem",
    "store_problem",
]

MAX_RESTORES: Final = 4096
"""Restores of one session under way at one time."""

MAX_SEGMENTS: Final = 4096
"""Segments of one session mapped at one time."""


def store_problem(
    session: Session, message: Store, limits: Limits, *, user_bytes: int, draining: bool
) -> tuple[str, str] | None:
    """Return the reason (of protocol.REJECTIONS) and detail of a rejection, None if there is none.

    `user_bytes` is what all sessions of the session's user hold.
    Whether the pool has room is not looked at: only a promise of the arena can tell.
    """
    if detail := _invalid(session, message):
        return "invalid", detail
    if draining:
        return "draining", "the daemon is shutting down"
    if detail := _count(session, limits):
        return "too_many_entries", detail
    if session.cache is not None:  # the cache limits itself, by its own size
        return None
    nbytes = granules(blob_bound(message.nbytes))
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


def restore_problem(session: Session, message: Restore) -> tuple[str, str] | None:
    """Return the kind (of Failed) and detail of why there will be no restore, or None."""
    entry = session.entries.get(message.entry)
    if session.phase is not Phase.ATTACHED:
        return "UsageError", _phase(session)
    if entry is None or entry.released:
        return "ActivationLost", f"entry {message.entry} does not exist or was released"
    if message.nbytes != entry.raw_bytes:
        detail = f"entry {message.entry} has {entry.raw_bytes} bytes, not {message.nbytes}"
        return "UsageError", detail
    if message.ticket in session.tickets or not message.ticket:
        return "UsageError", f"ticket {message.ticket} is 0 or under way: choose a new one"
    if len(session.tickets) >= MAX_RESTORES:
        return "QuotaExceeded", f"{MAX_RESTORES} restores are under way: wait for one"
    problem = _range(session, message, message.nbytes)
    return ("UsageError", problem) if problem else None


def segment_problem(session: Session, message: MapSegment) -> str | None:
    """Return why the segment may not be mapped, None where it may."""
    if session.phase is not Phase.ATTACHED:
        return _phase(session)
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
        or _order(session, message)
        or _part(session, message)
        or _result(session, message)
        or _range(session, message, _offered_bytes(message))
    )


def _phase(session: Session) -> str:
    if session.phase is Phase.ATTACHED:
        return ""
    return "the session has no lifeline yet: connect to Welcome.lifeline first"


def _order(session: Session, message: Store) -> str:
    if session.last_entry < message.entry < FIRST_LEASED:
        return ""
    if message.entry >= FIRST_LEASED:
        return f"entry {message.entry} is of those that only the daemon numbers, from 2^62 on"
    return f"entry {message.entry} does not follow entry {session.last_entry}: ids only grow"


def _part(session: Session, message: Store) -> str:
    if message.nbytes <= session.part_bytes:
        return ""
    return f"{message.nbytes} bytes in one entry; the limit is {session.part_bytes}: send parts"


def _result(session: Session, message: Store) -> str:
    if message.result > RESULTS:
        return f"result {message.result} is not in the timeline page: there are {RESULTS}"
    if not message.result or session.info.device == "cuda":
        return ""
    return f"the {session.info.device} lane encodes itself: leave it to the daemon"


def _offered_bytes(message: Store) -> int:
    """Return how much a store may read."""
    return blob_bound(message.nbytes) if message.result else message.nbytes


def _range(session: Session, message: Store | Restore, nbytes: int) -> str:
    size = session.segments.get(message.segment)
    if size is None:
        return f"segment {message.segment} is not mapped"
    end = message.offset + nbytes
    if end <= size:
        return ""
    return f"bytes {message.offset} to {end} lie outside segment {message.segment} of {size} bytes"


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
