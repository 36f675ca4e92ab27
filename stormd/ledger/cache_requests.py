"""What the ledger answers to sessions that are for the shared cache.

Room for a put is made as its parts come, and its name changes its meaning at the commit alone. A
session that ends leaves neither room nor loans behind, a put that gets no parts none either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stormd.cache.items import Cache, CachePart, Caller, Label
from stormd.ledger.holdings import Holdings, assert_space
from stormd.ledger.parts import blob_bound
from stormd.ledger.sessions import CacheAccess, Entry, Limits, OpenPut, Phase, Session
from stormd.memory.arena import Space, granules
from stormd.protocol import (
    NAMES_A_PAGE,
    CacheCancel,
    CacheCommit,
    CacheDelete,
    CacheFind,
    CacheFound,
    CacheGet,
    CacheList,
    CacheNames,
    CachePut,
    CacheReady,
    CacheTensor,
    Message,
    Refused,
    part_count,
)
from stormd.sizes import format_size

__all__ = ["CACHE_REQUESTS", "PUT_SECONDS", "CacheRequests"]

PUT_SECONDS: Final = 60.0
"""Without a part, after which a put that is open is closed: what was stored for it helps nobody."""


class CacheRequests:
    """Binds one cache to the sessions that use it."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    @property
    def space(self) -> Space:
        """Where the cache's blobs lie."""
        return self._cache.space

    @property
    def size(self) -> int:
        """Bytes of the cache, all of which the first put waits for where the memory is to come."""
        return self._cache.space.capacity

    def answer(
        self, record: Session, holdings: Holdings, message: Message, now: float, limits: Limits
    ) -> Message:
        """Return the answer to a message of CACHE_REQUESTS."""
        assert record.cache is not None
        if record.phase is not Phase.ATTACHED:
            return _refused("the session has no lifeline yet: connect to Welcome.lifeline first")
        handler = _HANDLERS[type(message)]
        return handler(_Request(self._cache, record, record.cache, holdings, now, limits), message)

    def make_room(self, record: Session, nbytes: int, now: float) -> bool:
        """Drop a little to make room for a part of `nbytes` at the most; True where to go on."""
        access = record.cache
        if access is None or access.put is None or granules(nbytes) > access.put.unspent:
            return False
        return self._cache.make_room(granules(nbytes), access.caller, record.used_bytes, now)

    def spend(self, access: CacheAccess, nbytes: int) -> str | None:
        """Promise room for a part of the put that is open; return None, or why that cannot be."""
        put = access.put
        if put is None:
            return f"no put is open in this session{_closed(access)}: send CachePut first"
        wanted = granules(nbytes)
        if wanted > put.unspent:
            return (
                f"{format_size(nbytes)} are asked for and {format_size(put.unspent)} are "
                "left of what the put asked for: send parts of CachePut.part_bytes"
            )
        if not self.space.promise(wanted):
            return _no_room(wanted, self.space.capacity)
        put.unspent -= wanted
        return None

    def tidy(self, now: float) -> bool:
        """Drop a little of what has outlived its time; True where there may be more."""
        return self._cache.tidy(now)

    @property
    def has_garbage(self) -> bool:
        """Whether there are blocks that nobody has any more."""
        return self._cache.has_garbage

    def collect(self) -> None:
        """Give a little of them back."""
        self._cache.collect()

    def close_idle(self, record: Session, holdings: Holdings, now: float) -> None:
        """Close the session's put where no part of it has come for too long."""
        access = record.cache
        if access is None or access.put is None or now - access.put.since <= PUT_SECONDS:
            return
        access.put_closed = access.put.message.name
        _close_put(self._cache, record, holdings)

    def assert_invariants(self, records: Sequence[Session]) -> None:
        """Raise AssertionError where cache and sessions contradict each other: for tests."""
        self._cache.assert_invariants()
        entries = [entry for record in records for entry in record.entries.values()]
        assert_space(
            self.space,
            [entry for entry in entries if entry.space is self.space and entry.loan is None],
            held=self._cache.held_bytes(),
        )


@dataclass(frozen=True, slots=True)
class _Request:
    """One request with all that it may look at and change."""

    cache: Cache
    record: Session
    access: CacheAccess
    holdings: Holdings
    now: float
    limits: Limits

    @property
    def caller(self) -> Caller:
        return self.access.caller


def _put(request: _Request, message: CachePut) -> Message:
    if request.access.put is not None:
        name = request.access.put.message.name
        return _refused(f"the put of {name!r} is open in this session: commit or cancel it first")
    if message.part_bytes > request.record.part_bytes:
        return _refused(
            f"parts of {message.part_bytes} bytes; the limit is {request.record.part_bytes}: send "
            "parts of Welcome.part_bytes"
        )
    most = _bound(message)
    shortage = request.cache.shortage(most)
    if shortage is not None:
        return Refused("QuotaExceeded", shortage)
    request.access.put = OpenPut(message, most, request.now)
    return CacheReady()


def _commit(request: _Request, message: CacheCommit) -> Message:
    put = request.access.put
    if put is None:
        return _refused(
            f"no put is open in this session{_closed(request.access)}: send CachePut first"
        )
    problem = _commit_problem(request.record, put.message, message.entries)
    if problem:
        return _refused(problem)
    taken = request.holdings.remove_all(request.record, message.entries)
    parts = tuple(_part(entry) for entry in taken)
    _close_put(request.cache, request.record, request.holdings)
    ttl = put.message.ttl_seconds
    expires = request.now + ttl if ttl else math.inf
    request.cache.put(_label(put.message), request.caller, parts, expires)
    return CacheFound(found=True)


def _cancel(request: _Request, _message: CacheCancel) -> Message:
    return CacheFound(_close_put(request.cache, request.record, request.holdings))


def _get(request: _Request, message: CacheGet) -> Message:
    item = request.cache.find(message.name, request.caller, request.now)
    if item is None:
        request.cache.missed()
        return CacheFound(found=False)
    problem = _get_problem(request, item.label)
    if problem is not None:
        return problem
    first = request.access.next_loan
    request.access.next_loan += len(item.parts)
    space, now = request.cache.space, request.now
    lent = {
        number: Entry(
            raw_bytes=part.raw_bytes,
            codec=part.codec,
            since=now,
            promised=0,
            charge=0,
            space=space,
            block=part.block,
            loan=loan,
        )
        for number, (part, loan) in enumerate(
            zip(item.parts, request.cache.lend(item), strict=True), start=first
        )
    }
    request.holdings.add_lent(request.record, lent)
    label = item.label
    return CacheTensor(
        dtype=label.dtype,
        shape=list(label.shape),
        nbytes=label.nbytes,
        part_bytes=label.part_bytes,
        first_entry=first,
    )


def _find(request: _Request, message: CacheFind) -> Message:
    item = request.cache.find(message.name, request.caller, request.now)
    return CacheFound(item is not None)


def _delete(request: _Request, message: CacheDelete) -> Message:
    return CacheFound(request.cache.delete(message.name, request.caller, request.now))


def _list(request: _Request, message: CacheList) -> Message:
    names, complete = request.cache.names(request.caller, message.after, NAMES_A_PAGE)
    return CacheNames(names, complete)


_HANDLERS: dict[type[Message], Callable[[_Request, Any], Message]] = {
    CachePut: _put,
    CacheCommit: _commit,
    CacheCancel: _cancel,
    CacheGet: _get,
    CacheFind: _find,
    CacheDelete: _delete,
    CacheList: _list,
}

CACHE_REQUESTS = tuple(_HANDLERS)
"""The messages that a session for the cache may send beside Store, Restore and Release."""


# --- parts of the above ---------------------------------------------------------------------


def _refused(detail: str) -> Refused:
    return Refused("UsageError", detail)


def _bound(message: CachePut) -> int:
    """Return the most bytes of the space that the parts take."""
    full, rest = divmod(message.nbytes, message.part_bytes)
    total = full * granules(blob_bound(message.part_bytes))
    return total + (granules(blob_bound(rest)) if rest else 0)


def _label(message: CachePut) -> Label:
    return Label(
        name=message.name,
        dtype=message.dtype,
        shape=tuple(message.shape),
        nbytes=message.nbytes,
        part_bytes=message.part_bytes,
    )


def _commit_problem(record: Session, put: CachePut, entries: list[int]) -> str:
    """Return why these entries are not the tensor that was announced, empty where they are."""
    wanted = part_count(put.nbytes, put.part_bytes)
    if len(set(entries)) != wanted or len(entries) != wanted:
        return f"{len(entries)} entries are no tensor of {put.nbytes} bytes in {wanted} parts"
    for index, entry_id in enumerate(entries):
        entry = record.entries.get(entry_id)
        nbytes = min(put.part_bytes, put.nbytes - index * put.part_bytes)
        if entry is None or entry.released or entry.loan is not None:
            return f"entry {entry_id} does not exist, was released or is lent"
        if entry.in_use:
            return f"entry {entry_id} is being stored or read: wait for Stored"
        if entry.raw_bytes != nbytes:
            return f"entry {entry_id} has {entry.raw_bytes} bytes, part {index} has {nbytes}"
    return ""


def _get_problem(request: _Request, label: Label) -> Refused | None:
    """Return why the session cannot read a tensor that is there."""
    if label.part_bytes > request.record.part_bytes:
        return _refused(
            f"{label.name!r} came in parts of {label.part_bytes} bytes and this session's limit is "
            f"{request.record.part_bytes}: put it again with smaller parts"
        )
    held = len(request.record.entries)
    if held + part_count(label.nbytes, label.part_bytes) > request.limits.max_entries:
        return Refused(
            "QuotaExceeded",
            f"{held} entries are held and the limit is {request.limits.max_entries}: release what "
            "was read, or raise max_entries_per_session",
        )
    return None


def _part(entry: Entry) -> CachePart:
    """Return a stored entry, which was its session's, as the cache's."""
    assert entry.block is not None
    return CachePart(block=entry.block, raw_bytes=entry.raw_bytes, codec=entry.codec)


def _close_put(cache: Cache, record: Session, holdings: Holdings) -> bool:
    """Close the put, if one is open; give up what was stored for it."""
    if record.cache is None or record.cache.put is None:
        return False
    record.cache.put = None
    own = [(number, entry) for number, entry in record.entries.items() if entry.loan is None]
    for _, entry in own:
        entry.released = True  # what a lane uses is freed when that is done
    unused = holdings.remove_all(record, [number for number, entry in own if not entry.in_use])
    cache.discard([entry.block for entry in unused if entry.block is not None])
    return True


def _closed(access: CacheAccess) -> str:
    """Return what became of the last put, where it was not its client that closed it."""
    if not access.put_closed:
        return ""
    return f" (that of {access.put_closed!r} got no part for {PUT_SECONDS:g} s)"


def _no_room(nbytes: int, capacity: int) -> str:
    return (
        f"{format_size(nbytes)} find too little of {format_size(capacity)} that is not being read "
        "or put at this moment, or is another user's who holds less: try again later, or raise "
        "cache_bytes"
    )
