"""What the ledger writes down of its state, and reads again where another daemon goes on with it.

Written before the answer leaves that tells of it, and taken away before the space is used again:
sessions that can be resumed, the room that their entries were promised, the blocks that these came
to, and what is in the shared cache. What is under way is not written down. A client asks again for
what was not answered, and a store that has been done is answered as it was.

An entry's place is named by its kind: none yet, or a block of the pool. What is on disk alone is
gone with the daemon, whose file has no name and whose key is nowhere else: it is not written down.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgpack

from stormd.cache.items import CachePart, Caller, Item, Label
from stormd.ledger.sessions import Entry, Session, SessionInfo
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
"""The kinds of records."""

_PROMISED: Final = 0
_PLACED: Final = 1
"""The kinds of an entry's place."""

_KEYS: Final = struct.Struct("<QQIIBBB")
"""Of an entry: session, number, bytes before encoding, bytes promised or of the blob, codec, place,
length of its mode's name, which follows; then offset and bytes of each extent."""

_EXTENT: Final = struct.Struct("<QQ")
_CODECS: Final = {name: number for number, name in enumerate(CODECS)}


@dataclass(frozen=True, slots=True)
class Totals:
    """What daemons have stored that followed each other, in bytes before and after encoding."""

    raw_bytes: int = 0
    blob_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the memory of the pool is laid out, and how much of it there is.

    `committed` are the bytes of each space that are there: the pool's, and the cache's where there
    is one. `part_bytes` are the largest parts that lanes had scratch for.
    """

    pool_bytes: int
    cache_bytes: int
    committed: tuple[int, ...]
    part_bytes: dict[str, int]


class Records:
    """Writes down what has to outlive the process; as it stands, nothing."""

    @property
    def has_room(self) -> bool:
        """Whether new entries can be written down."""
        return True

    def opened(self, record: Session) -> None:
        """A session has begun that may be resumed."""

    def ended(self, record: Session) -> None:
        """A session's end has begun: its entries are nobody's."""

    def admitted(self, record: Session, number: int, entry: Entry) -> None:
        """Room is promised for an entry."""

    def stored(self, record: Session, number: int, entry: Entry) -> None:
        """An entry's blob is in its block, or there again."""

    def freed(self, entry: Entry) -> None:
        """An entry's room, or its block, is about to be used for others."""

    def cached(self, item: Item) -> None:
        """A tensor is in the cache."""

    def dropped(self, item: Item) -> None:
        """A tensor's name means nothing any more."""


class JournalRecords(Records):
    """In a journal. Sessions for the cache are not resumed, so nothing of theirs is written down.

    `cell` of sessions, entries and items says where each is, 0 where it is not.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._layout = self._totals = 0

    @property
    def epoch(self) -> int:
        """Names what is written down, for clients."""
        return self._journal.epoch

    @property
    def has_room(self) -> bool:
        return self._journal.has_room

    def opened(self, record: Session) -> None:
        if record.hello is None:
            return
        info = record.info
        content = [
            info.session, info.device, info.uid, info.pid, info.name, record.part_bytes,
            record.segments.get(0, 0), record.secret, record.hello.to_wire(),
        ]  # fmt: skip
        record.cell = self._journal.write(_SESSION, msgpack.packb(content))

    def ended(self, record: Session) -> None:
        """Take a session away; its entries follow one by one, and are nobody's meanwhile."""
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
        if len(block.extents) == 1:  # as nearly all
            content = keys + mode + _EXTENT.pack(*block.extents[0])
        else:
            content = keys + mode + b"".join(_EXTENT.pack(*one) for one in block.extents)
        if entry.cell:
            entry.cell = self._journal.replace(entry.cell, _ENTRY, content)
        else:  # it was on disk alone
            entry.cell = self._journal.write(_ENTRY, content)

    def freed(self, entry: Entry) -> None:
        if entry.cell:
            self._journal.erase(entry.cell)
            entry.cell = 0

    def cached(self, item: Item) -> None:
        parts = [
            [raw_bytes, codec, block.nbytes, [number for one in block.extents for number in one]]
            for block, raw_bytes, codec in item.parts
        ]
        label, owner = item.label, item.owner
        content = [
            label.name, label.dtype, list(label.shape), label.nbytes, label.part_bytes,
            owner.uid, owner.gid, item.expires, parts,
        ]  # fmt: skip
        item.cell = self._journal.write(_ITEM, msgpack.packb(content))

    def dropped(self, item: Item) -> None:
        if item.cell:
            self._journal.erase(item.cell)
            item.cell = 0

    def laid_out(self, layout: Layout) -> None:
        """Write down how the memory is laid out now."""
        content = [
            layout.pool_bytes, layout.cache_bytes, list(layout.committed), layout.part_bytes
        ]  # fmt: skip
        before, self._layout = self._layout, self._journal.write(_LAYOUT, msgpack.packb(content))
        if before:
            self._journal.erase(before)

    def counted(self, totals: Totals) -> None:
        """Write down what has been stored so far."""
        content = [totals.raw_bytes, totals.blob_bytes]
        before, self._totals = self._totals, self._journal.write(_TOTALS, msgpack.packb(content))
        if before:
            self._journal.erase(before)

    def adopt(self, state: State) -> None:
        """Go on with the records that were read, and take those away that mean nothing."""
        self._layout, self._totals = state.layout_cell, state.totals_cell
        for cell in state.useless:
            self._journal.erase(cell)


# --- reading --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class KeptEntry:
    """An entry as it was written down; without a block it was promised `promised` bytes."""

    number: int
    raw_bytes: int
    codec: str
    promised: int
    block: Block | None
    mode: str
    cell: int

    def made(self, space: Space, now: float) -> Entry:
        """Return the entry, on which no lane works."""
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
    """A session as it was written down, and its entries by number."""

    info: SessionInfo
    part_bytes: int
    staging_bytes: int
    secret: bytes
    hello: Hello
    cell: int
    entries: dict[int, KeptEntry] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class State:
    """What an earlier daemon has left: `useless` are the cells of what came to nothing."""

    layout: Layout
    layout_cell: int
    sessions: list[KeptSession]
    items: list[Item]
    useless: list[int]
    totals: Totals = Totals()
    totals_cell: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nobody is waiting for anything of it."""
        return not self.sessions and not self.items

    def pool_blocks(self) -> list[Block]:
        """Return the blocks of all entries."""
        return [entry.block for entry in self._entries() if entry.block is not None]

    def promised_bytes(self) -> int:
        """Return what entries without a block were promised together."""
        return sum(entry.promised for entry in self._entries() if entry.block is None)

    def cache_blocks(self) -> list[Block]:
        """Return the blocks of all that is in the cache."""
        return [part.block for item in self.items for part in item.parts]

    def _entries(self) -> Iterable[KeptEntry]:
        return (entry for session in self.sessions for entry in session.entries.values())


def read_state(found: Sequence[Found]) -> State:
    """Return what these records, in the order in which they were written, say there is.

    Of two about the same thing the later counts: its writer was ended before it took the other
    away. An entry whose session is gone is nobody's.

    Raises:
        JournalUnusable: they are not what this version writes.
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
        pool_bytes, cache_bytes, committed, part_bytes = msgpack.unpackb(found.payload)
        if self._layout is not None:
            self._useless.append(self._layout[1])
        layout = Layout(
            pool_bytes=pool_bytes,
            cache_bytes=cache_bytes,
            committed=tuple(committed),
            part_bytes=part_bytes,
        )
        self._layout = layout, found.cell

    def _read_totals(self, found: Found) -> None:
        raw_bytes, blob_bytes = msgpack.unpackb(found.payload)
        if self._totals[1]:
            self._useless.append(self._totals[1])
        self._totals = Totals(raw_bytes, blob_bytes), found.cell

    def _read_session(self, found: Found) -> None:
        (session, device, uid, pid, name, part_bytes, staging_bytes, secret, hello) = (
            msgpack.unpackb(found.payload)
        )
        info = SessionInfo(session=session, device=device, uid=uid, pid=pid, name=name)
        self._sessions[session] = KeptSession(
            info=info,
            part_bytes=part_bytes,
            staging_bytes=staging_bytes,
            secret=secret,
            hello=Hello.from_wire(hello),
            cell=found.cell,
        )

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
            number=number,
            raw_bytes=raw_bytes,
            codec=CODECS[codec],
            promised=size if block is None else 0,
            block=block,
            mode=found.payload[_KEYS.size : begin].decode(),
            cell=found.cell,
        )

    def _read_item(self, found: Found) -> None:
        (name, dtype, shape, nbytes, part_bytes, uid, gid, expires, parts) = msgpack.unpackb(
            found.payload
        )
        before = self._items.pop((name, uid), None)
        if before is not None:
            self._useless.append(before.cell)
        self._items[name, uid] = Item(
            label=Label(name, dtype, tuple(shape), nbytes, part_bytes),
            owner=Caller(uid, gid),
            parts=tuple(_part(*part) for part in parts),
            expires=expires,
            number=found.sequence,
            cell=found.cell,
        )


def _part(raw_bytes: int, codec: str, nbytes: int, numbers: list[int]) -> CachePart:
    extents = tuple(Extent(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
    return CachePart(Block(extents, nbytes), raw_bytes, codec)
