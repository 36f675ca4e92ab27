"""Records in memory that outlives the process: what a new daemon needs to continue a killed one.

The memory is a file without a name that another process keeps open (`fd_store`). So a written
record survives whatever ends this process, at whichever instruction. Nothing is written to a disk:
a machine that fails takes the pool with it, too.

A record is either whole or absent: its checksum covers all of it, including its sequence number,
and is verified when the memory is read. So the order in which bytes reach memory does not matter,
and no record is ever half changed. `replace` writes the new record before it erases the old one; if
both are found, the later one counts. The cost of an operation depends on the length of its record,
not on the number of records: there is no log to scan or rewrite while somebody waits.

Records lie in cells of equal size, a long record in several cells.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

from stormd.memory.shared_memory import is_sealed, sealed_memory

__all__ = ["FORMAT", "Found", "Journal", "JournalUnusable"]

FORMAT: Final = 1
"""Version of the cells' format and the records' contents: raised with any change of either."""

CELL_BYTES: Final = 128
"""Two cache lines: an entry in up to four extents fits."""

PAGE_BYTES: Final = 4096
"""Bytes of the header; the cells begin behind it."""

FILE_BYTES: Final = 1 << 30
"""Bytes of address space. Memory is allocated as cells are used, and cells are reused."""

LEFT_CELLS: Final = 1 << 16
"""With fewer free cells than these, nothing new is begun: work that has begun needs some to
continue."""

_MAGIC: Final = b"STORMJNL"
_HEADER: Final = struct.Struct("<8sIIQ")  # magic, format, checksum of the rest, epoch
_EPOCH: Final = struct.Struct("<IQ")  # format and epoch, as the checksum covers them
_HEAD: Final = struct.Struct("<QIIIHxx")  # sequence, checksum, next cell, bytes in all, kind
_COVERED: Final = struct.Struct("<QIIH")  # the same without the checksum, as it covers them
_NEXT: Final = struct.Struct("<I")
_NEXT_AT: Final = 12
_ROOM: Final = CELL_BYTES - _HEAD.size
_FIRST: Final = PAGE_BYTES // CELL_BYTES
_MAX_BYTES: Final = 1 << 24
"""Most bytes of one record: a cached tensor in half a million chunks."""

_ERASED: Final = bytes(_NEXT_AT)
"""Overwrites sequence and checksum. If only the checksum were erased, a later record that is cut
off could be taken for the erased one if it has the same sequence."""


class JournalUnusable(Exception):
    """A file is not a journal that this version can read; the message says why."""


class Found(NamedTuple):
    """A record as it was read: its cell, its order among all records, its kind and its content."""

    cell: int
    sequence: int
    kind: int
    payload: bytes


class Journal:
    """The records of one daemon's state, in the file of `descriptor`.

    Only one thread uses it. `epoch` is drawn at random when a journal is made: equal epochs mean
    the same journal.
    """

    def __init__(self, descriptor: int, epoch: int) -> None:
        """Take over the descriptor of a file that `make` has written or `open` has checked."""
        self.descriptor: Final = descriptor
        self.epoch: Final = epoch
        self._memory = mmap.mmap(descriptor, FILE_BYTES)
        self._end = FILE_BYTES // CELL_BYTES
        self._sequence = 0
        self._fresh = _FIRST
        self._free: list[int] = []
        self._chains: dict[int, list[int]] = {}  # first cell of a long record -> its further cells

    @classmethod
    def make(cls) -> Journal:
        """Return an empty journal.

        Raises:
            OSError: no descriptor or no address space is left.
        """
        descriptor = sealed_memory("stormd-journal", FILE_BYTES)
        try:
            epoch = secrets.randbits(62) or 1
            checksum = crc32(_EPOCH.pack(FORMAT, epoch))
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, FORMAT, checksum, epoch), 0)
            return cls(descriptor, epoch)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, descriptor: int) -> tuple[Journal, list[Found]]:
        """Return the journal in a file, and its records in the order in which they were written.

        The journal owns the descriptor from then on; if this raises, the caller keeps it.

        Raises:
            JournalUnusable: the file is not a journal, or has another format.
            OSError: it cannot be read or mapped.
        """
        journal = cls(descriptor, _epoch_of(descriptor))
        try:
            return journal, journal._read()
        except BaseException:
            journal._memory.close()
            raise

    @property
    def has_room(self) -> bool:
        """Whether something new may be begun."""
        return self._end - self._fresh + len(self._free) > LEFT_CELLS

    def write(self, kind: int, payload: bytes) -> int:
        """Add a record of a kind above 0; return the cell by which to erase or replace it."""
        if not (0 < kind <= 0xFFFF and len(payload) <= _MAX_BYTES):
            raise ValueError(f"a record of kind {kind} with {len(payload)} bytes")
        first = self._free.pop() if self._free else self._new_cell()
        following = self._continue(first, payload) if len(payload) > _ROOM else 0
        self._sequence = sequence = self._sequence + 1
        covered = _COVERED.pack(sequence, following, len(payload), kind)
        checksum = crc32(payload, crc32(covered))
        head = _HEAD.pack(sequence, checksum, following, len(payload), kind) + payload[:_ROOM]
        at = first * CELL_BYTES
        self._memory[at : at + len(head)] = head
        return first

    def erase(self, cell: int) -> None:
        """Erase a record, each only once. What it described may then be used for other things."""
        at = cell * CELL_BYTES
        self._memory[at : at + len(_ERASED)] = _ERASED
        if cell in self._chains:
            self._free += self._chains.pop(cell)
        self._free.append(cell)

    def replace(self, cell: int, kind: int, payload: bytes) -> int:
        """Write a record that replaces another, if `cell` is not 0; return its cell."""
        fresh = self.write(kind, payload)
        if cell:
            self.erase(cell)
        return fresh

    def close(self) -> None:
        """Unmap and close the descriptor; records stay if another process has it. Twice is fine."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.descriptor)

    def assert_invariants(self) -> None:
        """Raise AssertionError if a cell is lost, or has two owners: for tests."""
        chained = [cell for cells in self._chains.values() for cell in cells]
        taken = {found.cell for found in self._read_records()}
        assert set(self._chains) <= taken
        owned = [*taken, *chained, *self._free]
        assert len(owned) == len(set(owned)), "a cell is used twice"
        assert set(owned) == set(range(_FIRST, self._fresh)), "a cell is lost"

    # --- writing ----------------------------------------------------------------------------

    def _new_cell(self) -> int:
        if self._fresh >= self._end:
            raise MemoryError(f"the journal's {self._end} cells are all in use")
        self._fresh += 1
        return self._fresh - 1

    def _continue(self, first: int, payload: bytes) -> int:
        """Write the bytes that do not fit into the first cell; return the second cell."""
        cells = [
            self._free.pop() if self._free else self._new_cell()
            for _ in range(_ROOM, len(payload), _ROOM)
        ]
        for place, (cell, following) in enumerate(zip(cells, [*cells[1:], 0], strict=True), 1):
            at, piece = cell * CELL_BYTES, payload[place * _ROOM : (place + 1) * _ROOM]
            self._memory[at : at + _HEAD.size] = bytes(_HEAD.size)
            self._memory[at + _NEXT_AT : at + _NEXT_AT + _NEXT.size] = _NEXT.pack(following)
            self._memory[at + _HEAD.size : at + _HEAD.size + len(piece)] = piece
        self._chains[first] = cells
        return cells[0]

    # --- reading ----------------------------------------------------------------------------

    def _read(self) -> list[Found]:
        """Return all records, and mark all other cells as free."""
        self._fresh = max(_FIRST, self._used_end())
        found = sorted(self._read_records(), key=lambda one: one.sequence)
        taken = set()
        for one in found:
            taken.add(one.cell)
            cells = self._cells_behind(one.cell, len(one.payload))
            if cells:
                self._chains[one.cell] = cells
                taken.update(cells)
        self._free = [cell for cell in range(self._fresh - 1, _FIRST - 1, -1) if cell not in taken]
        for cell in self._free:  # of records cut off when another process ended
            at = cell * CELL_BYTES
            self._memory[at : at + len(_ERASED)] = _ERASED
        self._sequence = found[-1].sequence if found else 0
        return found

    def _used_end(self) -> int:
        """Return the first cell behind all that were ever written, by the file's last hole."""
        end, at = 0, 0
        while at < FILE_BYTES:
            try:
                at = os.lseek(self.descriptor, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole
                break
            end = at = os.lseek(self.descriptor, at, os.SEEK_HOLE)
        return end // CELL_BYTES

    def _read_records(self) -> Iterator[Found]:
        for cell in range(_FIRST, self._fresh):
            at = cell * CELL_BYTES
            sequence, checksum, following, length, kind = _HEAD.unpack_from(self._memory, at)
            if not sequence:
                continue
            payload = self._payload(cell, length)
            covered = _COVERED.pack(sequence, following, length, kind)
            if payload is not None and crc32(payload, crc32(covered)) == checksum:
                yield Found(cell, sequence, kind, payload)

    def _payload(self, cell: int, length: int) -> bytes | None:
        """Return a record's bytes; None if its chain of cells leads outside the used cells."""
        cells = self._cells_behind(cell, length)
        if cells is None:
            return None
        pieces = [
            self._memory[one * CELL_BYTES + _HEAD.size : (one + 1) * CELL_BYTES]
            for one in [cell, *cells]
        ]
        return b"".join(pieces)[:length]

    def _cells_behind(self, cell: int, length: int) -> list[int] | None:
        cells = []
        for _ in range(_ROOM, length, _ROOM):
            (cell,) = _NEXT.unpack_from(self._memory, cell * CELL_BYTES + _NEXT_AT)
            if not _FIRST <= cell < self._fresh:
                return None
            cells.append(cell)
        return cells


def _epoch_of(descriptor: int) -> int:
    """Return the epoch of the journal in a file.

    Raises:
        JournalUnusable: the file is not a journal, or has another format.
    """
    try:
        header = os.pread(descriptor, _HEADER.size, 0)
    except OSError as error:
        raise JournalUnusable(f"it cannot be read: {error.strerror}") from error
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise JournalUnusable("it is no journal of stormd's")
    _, version, checksum, epoch = _HEADER.unpack(header)
    if version != FORMAT:
        raise JournalUnusable(f"it is of format {version}, and this stormd writes {FORMAT}")
    if not is_sealed(descriptor, FILE_BYTES) or checksum != crc32(_EPOCH.pack(version, epoch)):
        raise JournalUnusable("its header is damaged, or its size")
    return int(epoch)
