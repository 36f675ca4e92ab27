"""Records the ledger's state, and reads it in the next daemon, which continues with it.

A record is written before the answer that depends on it is sent, and erased before its space is
used again. Recorded are sessions that can be resumed, the space promised to their entries, the
entries' blocks, and the shared cache's tensors. Work in flight is not recorded. A client repeats
requests that were not answered; a store that is done gets the same answer again.

A record has the kind of its entry's place: only a promise, or a block of the pool. An entry on disk
alone is not recorded. It is lost with the daemon: the file has no name, and its key is nowhere
else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgpack

from stormd.cache.items import CacheChunk, Caller, Item, Label
from stormd.ledger.sessions import Entry, Phase, Session, SessionInfo
from stormd.memory.arena import Block, Extent, Space
from stormd.memory.journal import Found, Journal, JournalUnusable
from stormd.protocol import CODECS, Hello, ProtocolError

__all__ = [
    "JournalRecords",
    "KeptEntry",
    "KeptSession",
    "Layout",
    "Records",
    "State",
    "Totals",
    "read_state",
]

_LAYOUT: Final = 1
_SESSION: Final = 2
_ENTRY: Final = 3
_ITEM: Final = 4
_TOTALS: Final = 5
"""The record kinds."""

_PROMISED: Final = 0
_PLACED: Final = 1
"""The kinds of an entry's place: promised space, or a block."""

_KEYS: Final = struct.Struct("<QQIIBBB")
"""The head of an entry's record: session, number, bytes before encoding, bytes promised or of the
blob, codec, place, length of the mode's name. The name follows, then offset and bytes of each
extent."""

_EXTENT: Final = struct.Struct("<QQ")
_CODECS: Final = {name: number for number, name in enumerate(CODECS)}


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes stored, before and after encoding, by all daemons that resumed one another's state."""

    raw_bytes: int = 0
    blob_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the memory of the pool is laid out, and how much of it is committed.

    `committed` has the bytes of memory in each space: the pool's, and the cache's if there is a
    cache. `chunk_bytes` has each lane's largest chunk, for which it has scratch.
    """

    pool_bytes: int
    cache_bytes: int
    committed: tuple[int, ...]
    chunk_bytes: dict[str, int]


class Records:
    """Records the state that must outlive the process; this base class records nothing."""

    @property
    def has_room(self) -> bool:
        """Whether new entries can be recorded."""
        return True

    def opened(self, record: Session) -> None:
        """Record a new session, if it can be resumed."""

    def ended(self, record: Session) -> None:
        """Erase a session whose end has begun: its entries have no owner."""

    def admitted(self, record: Session, number: int, entry: Entry) -> None:
        """Record that space is promised for an entry."""

    def stored(self, record: Session, number: int, entry: Entry) -> None:
        """Record that an entry's blob is in its block, or was read back into one."""

    def freed(self, entry: Entry) -> None:
        """Erase an entry's record: its space or block is about to be used for others."""

    def cached(self, item: Item) -> None:
        """Record that a tensor is in the cache."""

    def dropped(self, item: Item) -> None:
        """Erase the record of a tensor that has lost its name."""


class JournalRecords(Records):
    """Records in a journal. Sessions for the cache cannot be resumed, so theirs are not recorded.

    `cell` of a session, entry or item is the place of its record, 0 if it has none.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._layout = self._totals = 0

    @property
    def epoch(self) -> int:
        """Identifies the recorded state to clients."""
        return self._journal.epoch

    @property
    def has_room(self) -> bool:
        return self._journal.has_room

    def opened(self, record: Session) -> None:
        if record.hello is None:
            return
        info = record.info
        content = [
            info.session, info.device, info.uid, info.pid, info.name, record.chunk_bytes,
            record.segments.get(0, 0), record.secret, record.hello.to_wire(),
        ]  # fmt: skip
        record.cell = self._journal.write(_SESSION, msgpack.packb(content))

    def ended(self, record: Session) -> None:
        """Erase a session; its entries are erased one by one later, and have no owner meanwhile."""
        if record.cell:
            self._journal.erase(record.cell)
            record.cell = 0

    def admitted(self, record: Session, number: int, entry: Entry) -> None:
        if record.cell:
            keys = _KEYS.pack(
                record.info.session, number, entry.raw_bytes, entry.promised,
                _CODECS[entry.codec], _PROMISED, 0,
            )  # fmt: skip
            entry.cell = self._journal.write(_ENTRY, keys)

    def stored(self, record: Session, number: int, entry: Entry) -> None:
        block = entry.block
        if not record.cell or block is None:
            return
        mode = entry.mode.encode()
        keys = _KEYS.pack(
            record.info.session, number, entry.raw_bytes, block.nbytes,
            _CODECS[entry.codec], _PLACED, len(mode),
        )  # fmt: skip
        if len(block.extents) == 1:  # as in nearly all blocks
            content = keys + mode + _EXTENT.pack(*block.extents[0])
        else:
            content = keys + mode + b"".join(_EXTENT.pack(*one) for one in block.extents)
        # There is no cell to replace if the entry was on disk alone.
        entry.cell = self._journal.replace(entry.cell, _ENTRY, content)

    def freed(self, entry: Entry) -> None:
        if entry.cell:
            self._journal.erase(entry.cell)
            entry.cell = 0

    def cached(self, item: Item) -> None:
        chunks = [
            [raw_bytes, codec, block.nbytes, [number for one in block.extents for number in one]]
            for block, raw_bytes, codec in item.chunks
        ]
        label, owner = item.label, item.owner
        content = [
            label.name, label.dtype, list(label.shape), label.nbytes, label.chunk_bytes,
            owner.uid, owner.gid, item.expires, chunks,
        ]  # fmt: skip
        item.cell = self._journal.write(_ITEM, msgpack.packb(content))

    def dropped(self, item: Item) -> None:
        if item.cell:
            self._journal.erase(item.cell)
            item.cell = 0

    def record_layout(self, layout: Layout) -> None:
        """Record the current memory layout."""
        content = [
            layout.pool_bytes, layout.cache_bytes, list(layout.committed), layout.chunk_bytes
        ]  # fmt: skip
        self._layout = self._journal.replace(self._layout, _LAYOUT, msgpack.packb(content))

    def record_totals(self, totals: Totals) -> None:
        """Record how much has been stored so far."""
        content = [totals.raw_bytes, totals.blob_bytes]
        self._totals = self._journal.replace(self._totals, _TOTALS, msgpack.packb(content))

    def adopt(self, state: State) -> None:
        """Continue with the records that were read, and erase the useless ones."""
        self._layout, self._totals = state.layout_cell, state.totals_cell
        for cell in state.useless:
            self._journal.erase(cell)


# --- reading --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class KeptEntry:
    """An entry as recorded; one without a block was promised `promised` bytes."""

    raw_bytes: int
    codec: str
    promised: int
    block: Block | None
    mode: str
    cell: int

    def made(self, space: Space, now: float) -> Entry:
        """Return the entry, which no lane uses yet."""
        charge = self.promised if self.block is None else sum(e.nbytes for e in self.block.extents)
        return Entry(
            raw_bytes=self.raw_bytes,
            codec=self.codec,
            since=now,
            promised=self.promised,
            charge=charge,
            space=space,
            block=self.block,
            mode=self.mode,
            cell=self.cell,
            is_begun=self.block is not None,
        )


@dataclass(slots=True, kw_only=True)
class KeptSession:
    """A session without its entries, and these as recorded, by number."""

    record: Session
    entries: dict[int, KeptEntry] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class State:
    """The state that an earlier daemon has left; `useless` has the cells of outdated records."""

    layout: Layout
    layout_cell: int
    sessions: list[KeptSession]
    items: list[Item]
    useless: list[int]
    totals: Totals = Totals()
    totals_cell: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether it contains neither sessions nor cached tensors."""
        return not self.sessions and not self.items

    def pool_blocks(self) -> list[Block]:
        """Return the blocks of all entries."""
        return [entry.block for entry in self._entries() if entry.block is not None]

    def promised_bytes(self) -> int:
        """Return the sum of bytes promised to entries that have no block."""
        return sum(entry.promised for entry in self._entries() if entry.block is None)

    def cache_blocks(self) -> list[Block]:
        """Return the blocks of all tensors in the cache."""
        return [chunk.block for item in self.items for chunk in item.chunks]

    def _entries(self) -> Iterable[KeptEntry]:
        return (entry for session in self.sessions for entry in session.entries.values())


def read_state(found: Sequence[Found]) -> State:
    """Return the state that these records describe; they are in the order of writing.

    Of two records about the same object the later counts: the writer ended before it erased the
    earlier one. An entry whose session is gone has no owner.

    Raises:
        JournalUnusable: the records are not in this version's format.
    """
    try:
        return _Reading(found).state()
    except (
        KeyError, TypeError, ValueError, IndexError, struct.error, ProtocolError,
        msgpack.exceptions.UnpackException,
    ) as error:  # fmt: skip
        raise JournalUnusable(f"a record cannot be read: {error!r}") from error


class _Reading:
    def __init__(self, found: Iterable[Found]) -> None:
        self._layout: tuple[Layout, int] | None = None
        self._sessions: dict[int, KeptSession] = {}
        self._entries: dict[tuple[int, int], KeptEntry] = {}
        self._items: dict[tuple[str, int], Item] = {}
        self._useless: list[int] = []
        self._totals: tuple[Totals, int] = (Totals(), 0)
        readers = {
            _LAYOUT: self._read_layout,
            _SESSION: self._read_session,
            _ENTRY: self._read_entry,
            _ITEM: self._read_item,
            _TOTALS: self._read_totals,
        }
        for one in found:
            readers[one.kind](one)

    def state(self) -> State:
        if self._layout is None:
            raise ValueError("no record of how the memory is laid out")
        for (session, number), entry in sorted(self._entries.items()):
            owner = self._sessions.get(session)
            if owner is None:
                self._useless.append(entry.cell)
            else:
                owner.entries[number] = entry
        return State(
            layout=self._layout[0],
            layout_cell=self._layout[1],
            sessions=list(self._sessions.values()),
            items=list(self._items.values()),
            useless=self._useless,
            totals=self._totals[0],
            totals_cell=self._totals[1],
        )

    def _read_layout(self, found: Found) -> None:
        pool_bytes, cache_bytes, committed, chunk_bytes = msgpack.unpackb(found.payload)
        if self._layout is not None:
            self._useless.append(self._layout[1])
        layout = Layout(
            pool_bytes=pool_bytes,
            cache_bytes=cache_bytes,
            committed=tuple(committed),
            chunk_bytes=chunk_bytes,
        )
        self._layout = layout, found.cell

    def _read_totals(self, found: Found) -> None:
        raw_bytes, blob_bytes = msgpack.unpackb(found.payload)
        if self._totals[1]:
            self._useless.append(self._totals[1])
        self._totals = Totals(raw_bytes, blob_bytes), found.cell

    def _read_session(self, found: Found) -> None:
        (session, device, uid, pid, name, chunk_bytes, staging_bytes, secret, hello) = (
            msgpack.unpackb(found.payload)
        )
        info = SessionInfo(session=session, device=device, uid=uid, pid=pid, name=name)
        record = Session(
            info=info,
            chunk_bytes=chunk_bytes,
            seen=0.0,
            segments={0: staging_bytes} if staging_bytes else {},
            phase=Phase.ORPHANED,
            has_client=False,
            hello=Hello.from_wire(hello),
            secret=secret,
            cell=found.cell,
        )
        self._sessions[session] = KeptSession(record=record)

    def _read_entry(self, found: Found) -> None:
        session, number, raw_bytes, size, codec, place, length = _KEYS.unpack_from(found.payload)
        begin = _KEYS.size + length
        if place not in (_PROMISED, _PLACED):
            raise ValueError(f"entry {number} is at a place of kind {place}")
        block = None
        if place == _PLACED:
            extents = tuple(Extent(*one) for one in _EXTENT.iter_unpack(found.payload[begin:]))
            block = Block(extents, size)
        before = self._entries.get((session, number))
        if before is not None:
            self._useless.append(before.cell)
        self._entries[session, number] = KeptEntry(
            raw_bytes=raw_bytes,
            codec=CODECS[codec],
            promised=size if block is None else 0,
            block=block,
            mode=found.payload[_KEYS.size : begin].decode(),
            cell=found.cell,
        )

    def _read_item(self, found: Found) -> None:
        (name, dtype, shape, nbytes, chunk_bytes, uid, gid, expires, chunks) = msgpack.unpackb(
            found.payload
        )
        before = self._items.pop((name, uid), None)
        if before is not None:
            self._useless.append(before.cell)
        self._items[name, uid] = Item(
            label=Label(name, dtype, tuple(shape), nbytes, chunk_bytes),
            owner=Caller(uid, gid),
            chunks=tuple(_read_chunk(*chunk) for chunk in chunks),
            expires=expires,
            number=found.sequence,
            cell=found.cell,
        )


def _read_chunk(raw_bytes: int, codec: str, nbytes: int, numbers: list[int]) -> CacheChunk:
    extents = tuple(Extent(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
    return CacheChunk(Block(extents, nbytes), raw_bytes, codec)
