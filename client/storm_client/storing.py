"""The way out: storage ranges to the daemon, in parts.

What stays true: a record keeps its storage until the daemon has admitted every part of it, so a
tensor leaves memory only when nothing but a fault can lose it. If one part is rejected the record
keeps its storage for good, and training goes on with that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from storm_client.connection import IDS_PER_RELEASE, Connection
from storm_client.errors import named
from storm_client.lanes import Lane, Slot
from storm_client.records import Part, StoredRange
from storm_client.staging import ALIGNMENT
from storm_client.stats import StatsRecorder, dtype_name
from stormd.protocol import Admitted, Failed, Release, Store, Stored

__all__ = ["Storer", "flat_bytes"]

FLUSH_BYTES = 1 << 20
"""Stores of smaller tensors travel together up to this, or until the listener sends them. More
at once would only make the daemon start later, and read what has left the caches."""

STAGING_SECONDS = 2.0
"""How long a training thread waits for room in the staging area before it keeps its tensor."""


@dataclass(slots=True)
class _Admission:
    """What became of one record's parts; outlives the record, for the statistics' sake."""

    record: weakref.ref[StoredRange]
    stats: StatsRecorder
    nbytes: int
    dtype: torch.dtype
    outstanding: int
    refused: bool = False
    early: list[Stored] = field(default_factory=list)
    """Parts that arrived before the last one was admitted: they may yet be given back."""


class _Storing(NamedTuple):
    """A part between Store and Stored."""

    admission: _Admission
    slot: Slot


class Storer:
    """Sends records to the daemon and follows its answers."""

    def __init__(
        self,
        connection: Connection,
        lane: Lane,
        reserve: Callable[[int], Slot | None],
        keep: Callable[[StoredRange, int, Slot], bool],
        part_bytes: int,
    ) -> None:
        """Store in parts of at most `part_bytes`.

        Called with the lock held: `reserve` for a slot, and `keep` with a stored part's record,
        entry and slot, which takes the slot over or returns False.
        """
        self._connection = connection
        self._lane = lane
        self._reserve = reserve
        self._keep_staged = keep
        self._part_bytes = part_bytes - part_bytes % ALIGNMENT
        self._under_way: dict[int, _Storing] = {}
        self._flush_bytes = min(FLUSH_BYTES, self._part_bytes)
        self._unsent = 0  # bytes of stores deferred since the last flush here
        self._slow = False  # a wait for room was in vain, and no part has arrived since

    @property
    def under_way(self) -> int:
        """The number of parts whose slots the daemon still reads."""
        return len(self._under_way)

    def store(self, record: StoredRange, codec: str) -> None:
        """Hand the record's bytes over; it stays with the client where that is not possible.

        Raises:
            DaemonLost: the daemon is gone. The record keeps its storage.
        """
        storage = record.source
        assert storage is not None
        source = flat_bytes(storage, record.start, record.nbytes)
        admission = self._admission(record)
        for begin in range(0, record.nbytes, self._part_bytes):
            piece = source[begin : begin + self._part_bytes]
            slot = self._slot(piece.numel())
            if slot is None:
                with self._connection.lock:
                    self._keep(admission, "daemon_slow")
                return
            self._stage(piece, slot)
            with self._connection.lock:
                if admission.refused:
                    self._lane.free(slot)
                    return
                self._send(record, admission, slot, begin, codec)

    # --- replies, with the lock held --------------------------------------------------------

    def admitted(self, message: Admitted) -> None:
        """Let the tensor go once all of its parts are promised room."""
        storing = self._under_way.get(message.entry)
        if storing is None or storing.admission.refused:
            return
        admission = storing.admission
        admission.outstanding -= 1
        if admission.outstanding:
            return
        admission.stats.offloaded(admission.nbytes, admission.dtype)
        for part in admission.early:
            admission.stats.stored(part.stored_bytes, part.mode)
        record = admission.record()
        if record is not None:
            record.source = None

    def rejected(self, entry: int, reason: str) -> None:
        """Keep the record's storage, for the reason that the daemon gives."""
        admission = self._finish(entry)
        if admission is not None:
            self._keep(admission, reason)

    def stored(self, message: Stored) -> None:
        """Give the slot up: the bytes are in the arena."""
        admission = self._finish(message.entry, stored=True)
        if admission is None or admission.refused:
            return
        if admission.outstanding:
            admission.early.append(message)
        else:
            admission.stats.stored(message.stored_bytes, message.mode)

    def failed(self, message: Failed) -> None:
        """Note that an admitted part is lost; whoever needs it gets the error."""
        admission = self._finish(message.entry)
        record = None if admission is None else admission.record()
        if record is not None:
            record.error = named(message.kind, message.detail)

    def concerns(self, request: int) -> bool:
        """Tell whether the number is that of a part under way."""
        return request in self._under_way

    # --- helpers ----------------------------------------------------------------------------

    def _admission(self, record: StoredRange) -> _Admission:
        parts = -(-record.nbytes // self._part_bytes)
        return _Admission(
            weakref.ref(record), record.stats, record.nbytes, record.version.dtype, parts
        )

    def _slot(self, nbytes: int) -> Slot | None:
        """Return a slot, waiting a while for the daemon to free one."""
        slot: Slot | None = None

        def reserved() -> bool:
            nonlocal slot
            slot = self._reserve(nbytes)
            return slot is not None

        with self._connection.lock:
            if not reserved():
                self._connection.drain()
                patience = 0.0 if self._slow else STAGING_SECONDS
                self._slow = not self._connection.wait(reserved, patience)
        return slot

    def _stage(self, piece: torch.Tensor, slot: Slot) -> None:
        try:
            self._lane.stage(piece, slot)
        except BaseException:
            with self._connection.lock:
                self._lane.free(slot)
            raise

    def _send(
        self,
        record: StoredRange,
        admission: _Admission,
        slot: Slot,
        begin: int,
        codec: str,
    ) -> None:
        """Send one part, with the lock held from its number to its message."""
        entry = next(self._connection.numbers)
        record.parts.append(Part(entry, begin, begin + slot.nbytes))
        self._under_way[entry] = _Storing(admission, slot)
        sequence = self._lane.publish(slot)
        name = dtype_name(admission.dtype)
        message = Store(entry, slot.segment, slot.offset, slot.nbytes, name, codec, sequence)
        self._connection.defer(entry, message)
        self._unsent += slot.nbytes
        if self._unsent >= self._flush_bytes:
            self._unsent = 0
            self._connection.flush()

    def _keep(self, admission: _Admission, reason: str) -> None:
        """Leave the bytes with the client; parts that did arrive are released."""
        if admission.refused:
            return
        admission.refused = True
        admission.stats.kept(admission.nbytes, reason)
        record = admission.record()
        if record is not None and record.parts:
            entries = [part.entry for part in record.parts]
            record.parts.clear()
            for begin in range(0, len(entries), IDS_PER_RELEASE):
                self._connection.post(0, Release(entries[begin : begin + IDS_PER_RELEASE]))
            self._connection.flush()

    def _finish(self, entry: int, *, stored: bool = False) -> _Admission | None:
        """Give up the slot of a part that the daemon is done with; return what it belongs to."""
        storing = self._under_way.pop(entry, None)
        if storing is None:
            return None
        self._slow = False
        if not (stored and self._is_kept(entry, storing)):
            self._lane.free(storing.slot)
        return storing.admission

    def _is_kept(self, entry: int, storing: _Storing) -> bool:
        record = storing.admission.record()
        if record is None or storing.admission.refused:
            return False
        return self._keep_staged(record, entry, storing.slot)


def flat_bytes(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Return the bytes `start .. start + nbytes` of a storage as a uint8 tensor over them."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (nbytes,), (1,))
