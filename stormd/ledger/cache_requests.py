"""The ledger's answers to sessions that are for the shared cache.

A put gets room chunk by chunk as its chunks arrive, and its name changes its meaning only at the
commit. When a session ends, its room and loans are freed; so is the room of a put that gets no
chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from stormd.cache.items import Cache, CacheChunk, Label
from stormd.ledger.chunks import blob_bound
from stormd.ledger.holdings import State, assert_space
from stormd.ledger.sessions import CacheAccess, Entry, Limits, OpenPut, Phase, Session
from stormd.memory.arena import granules
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
"""Time without a chunk after which an open put is closed: what it has stored is of no use."""


class CacheRequests:
    """Connects one cache, whose blobs are in `space`, to the sessions that use it."""

    def __init__(self, cache: Cache, state: State) -> None:
        self._cache = cache
        self._state = state
        self.space: Final = cache.space

    def answer(self, record: Session, message: Message, now: float) -> Message:
        """Return the answer to a message of CACHE_REQUESTS."""
        assert record.cache is not None
        if record.phase is not Phase.ATTACHED:
            return _refused(record.phase_problem())
        return _HANDLERS[type(message)](self, record, record.cache, message, now)

    def make_room(self, record: Session, nbytes: int, now: float) -> bool:
        """Drop a little for a chunk of up to `nbytes`; return whether to call this again."""
        access = record.cache
        if access is None or access.put is None or granules(nbytes) > access.put.unspent:
            return False
        return self._cache.make_room(granules(nbytes), access.caller, record.used_bytes, now)

    def spend(self, access: CacheAccess, nbytes: int) -> str | None:
        """Promise room for a chunk of the open put; return None, or why it cannot be promised."""
        put = access.put
        if put is None:
            return _no_put(access)
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

    def close_idle(self, record: Session, now: float) -> None:
        """Close the session's put if no chunk of it has come for too long."""
        access = record.cache
        if access is None or access.put is None or now - access.put.since <= PUT_SECONDS:
            return
        access.put_closed = access.put.message.name
        self._close_put(record, access)

    def assert_invariants(self, records: Sequence[Session]) -> None:
        """Raise AssertionError if cache and sessions contradict each other: for tests."""
        self._cache.assert_invariants()
        entries = [entry for record in records for entry in record.entries.values()]
        assert_space(
            self.space,
            [entry for entry in entries if entry.space is self.space and entry.loan is None],
            held=self._cache.held_bytes(),
        )

    # --- requests ---------------------------------------------------------------------------

    def _put(self, record: Session, access: CacheAccess, message: CachePut, now: float) -> Message:
        if access.put is not None:
            name = access.put.message.name
            return _refused(
                f"the put of {name!r} is open in this session: commit or cancel it first"
            )
        if message.part_bytes > record.chunk_bytes:
            return _refused(
                f"parts of {message.part_bytes} bytes; the limit is {record.chunk_bytes}: send "
                "parts of Welcome.part_bytes"
            )
        most = _bound(message)
        shortage = self._cache.shortage(most)
        if shortage is not None:
            return Refused("QuotaExceeded", shortage)
        access.put = OpenPut(message, most, now)
        return CacheReady()

    def _commit(
        self, record: Session, access: CacheAccess, message: CacheCommit, now: float
    ) -> Message:
        if access.put is None:
            return _refused(_no_put(access))
        put = access.put.message
        problem = _commit_problem(record, put, message.entries)
        if problem:
            return _refused(problem)
        taken = self._state.holdings.remove_all(record, message.entries)
        chunks = tuple(_chunk(entry) for entry in taken)
        self._close_put(record, access)
        expires = now + put.ttl_seconds if put.ttl_seconds else math.inf
        label = Label(put.name, put.dtype, tuple(put.shape), put.nbytes, put.part_bytes)
        self._cache.put(label, access.caller, chunks, expires)
        return CacheFound(found=True)

    def _cancel(
        self, record: Session, access: CacheAccess, _message: CacheCancel, _now: float
    ) -> Message:
        return CacheFound(self._close_put(record, access))

    def _get(self, record: Session, access: CacheAccess, message: CacheGet, now: float) -> Message:
        item = self._cache.find(message.name, access.caller, now)
        if item is None:
            self._cache.missed()
            return CacheFound(found=False)
        label = item.label
        problem = _get_problem(record, label, self._state.limits)
        if problem is not None:
            return problem
        first = access.next_loan
        access.next_loan += len(item.chunks)
        lent = {
            number: Entry(
                raw_bytes=chunk.raw_bytes,
                codec=chunk.codec,
                since=now,
                promised=0,
                charge=0,
                space=self.space,
                block=chunk.block,
                loan=loan,
            )
            for number, (chunk, loan) in enumerate(
                zip(item.chunks, self._cache.lend(item), strict=True), start=first
            )
        }
        self._state.holdings.add_lent(record, lent)
        return CacheTensor(
            dtype=label.dtype,
            shape=list(label.shape),
            nbytes=label.nbytes,
            part_bytes=label.chunk_bytes,
            first_entry=first,
        )

    def _find(self, _: Session, access: CacheAccess, message: CacheFind, now: float) -> Message:
        return CacheFound(self._cache.find(message.name, access.caller, now) is not None)

    def _delete(self, _: Session, access: CacheAccess, message: CacheDelete, now: float) -> Message:
        return CacheFound(self._cache.delete(message.name, access.caller, now))

    def _list(self, _: Session, access: CacheAccess, message: CacheList, _now: float) -> Message:
        return CacheNames(*self._cache.names(access.caller, message.after, NAMES_A_PAGE))

    def _close_put(self, record: Session, access: CacheAccess) -> bool:
        """Close the put, if one is open, and free the entries that were stored for it."""
        if access.put is None:
            return False
        access.put = None
        own = [(number, entry) for number, entry in record.entries.items() if entry.loan is None]
        for _, entry in own:
            entry.released = True  # entries that a lane uses are freed when the lane is done
        unused = [number for number, entry in own if not entry.in_use]
        blocks = [one.block for one in self._state.holdings.remove_all(record, unused)]
        self._cache.discard([block for block in blocks if block is not None])
        return True


Handler = Callable[[CacheRequests, Session, CacheAccess, Any, float], Message]
"""Takes a session, its cache access, a message and the time; returns the answer."""

_HANDLERS: Final[dict[type[Message], Handler]] = {
    CachePut: CacheRequests._put,
    CacheCommit: CacheRequests._commit,
    CacheCancel: CacheRequests._cancel,
    CacheGet: CacheRequests._get,
    CacheFind: CacheRequests._find,
    CacheDelete: CacheRequests._delete,
    CacheList: CacheRequests._list,
}

CACHE_REQUESTS: Final = tuple(_HANDLERS)
"""The messages that a session for the cache may send besides Store, Restore and Release."""


# --- helpers --------------------------------------------------------------------------------


def _refused(detail: str) -> Refused:
    return Refused("UsageError", detail)


def _bound(message: CachePut) -> int:
    """Return the maximum bytes of the space that the chunks take."""
    full, rest = divmod(message.nbytes, message.part_bytes)
    total = full * granules(blob_bound(message.part_bytes))
    return total + (granules(blob_bound(rest)) if rest else 0)


def _commit_problem(record: Session, put: CachePut, entries: list[int]) -> str:
    """Return why these entries are not the announced tensor, empty if they are."""
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


def _get_problem(record: Session, label: Label, limits: Limits) -> Refused | None:
    if label.chunk_bytes > record.chunk_bytes:
        return _refused(
            f"{label.name!r} came in parts of {label.chunk_bytes} bytes and this session's limit "
            f"is {record.chunk_bytes}: put it again with smaller parts"
        )
    held = len(record.entries)
    if held + part_count(label.nbytes, label.chunk_bytes) > limits.max_entries:
        return Refused(
            "QuotaExceeded",
            f"{held} entries are held and the limit is {limits.max_entries}: release what "
            "was read, or raise max_entries_per_session",
        )
    return None


def _chunk(entry: Entry) -> CacheChunk:
    assert entry.block is not None
    return CacheChunk(block=entry.block, raw_bytes=entry.raw_bytes, codec=entry.codec)


def _no_put(access: CacheAccess) -> str:
    """Say that no put is open, and which put was closed because no chunks came."""
    closed = ""
    if access.put_closed:
        closed = f" (that of {access.put_closed!r} ended: no chunk came for {PUT_SECONDS:g} s)"
    return f"no put is open in this session{closed}: send CachePut first"


def _no_room(nbytes: int, capacity: int) -> str:
    return (
        f"{format_size(nbytes)} find too little of {format_size(capacity)} that is not being read "
        "or put at this moment, or is another user's who holds less: try again later, or raise "
        "cache_bytes"
    )
