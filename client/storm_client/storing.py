"""The way out: storage ranges to the daemon, in parts.

What stays true: a record keeps its storage until the daemon has admitted every part of it, so a
tensor leaves memory only when nothing but a fault can lose it. If one part is rejected the record
keeps its storage for good, and training goes on with that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from storm_client.admissions import Admission
from storm_client.connection import IDS_PER_RELEASE, Connection
from storm_client.departing import PATIENCE_SECONDS, Departures, Piece
from storm_client.dtypes import codec_name
from storm_client.errors import named
from storm_client.lanes import Lane, Slot
from storm_client.records import Part, StoredRange
from storm_client.staging import ALIGNMENT
from storm_client.window import Window
from stormd.protocol import Admitted, Failed, Release, Store, Stored

__all__ = ["Storer", "flat_bytes"]

FLUSH_BYTES = 1 << 20
"""Stores of smaller tensors travel together up to this, or until the listener sends them. More
at once would only make the daemon start later, and read what has left the caches."""

IN_PLACE_FLUSH_BYTES = 8 << 20
"""The same for tensors that are read where they lie: no cache holds them, and what a store costs
the daemon is mostly its frame (195 us of CPU for one a frame, 70 for eight, without the device)."""


class _Storing(NamedTuple):
    """A part between Store and Stored."""

    admission: Admission
    slot: Slot | None
    """Of the staging area; None where the daemon reads the tensor's own memory."""
    result: int | None = None
    """Where the blob's size is, if the slot holds a blob."""


class Storer:
    """Sends records to the daemon and follows its answers."""

    def __init__(
        self,
        connection: Connection,
        lane: Lane,
        reserve: Callable[[int], Slot | None],
        keep: Callable[[StoredRange, int, Slot], bool],
        part_bytes: int,
        *,
        window: Window,
    ) -> None:
        """Store in parts of at most `part_bytes`, holding back what `window` allows.

        Called with the lock held: `reserve` for a slot, and `keep` with a stored part's record,
        entry and slot, which takes the slot over or returns False.
        """
        self._connection = connection
        self._lane = lane
        self._reserve = reserve
        self._keep_staged = keep
        self._part_bytes = part_bytes - part_bytes % ALIGNMENT
        in_place = lane.in_place
        self._departures: Departures | None = None
        if in_place is not None:
            self._departures = Departures(
                connection,
                lane,
                in_place,
                window,
                part_bytes=self._part_bytes,
                send=self._send,
                reserve=reserve,
                wait=self._wait,
            )
        self._under_way: dict[int, _Storing] = {}
        together = FLUSH_BYTES if in_place is None else IN_PLACE_FLUSH_BYTES
        self._flush_bytes = min(together, self._part_bytes)
        self._unsent = 0  # bytes of stores deferred since the last flush here
        self._slow = False  # a wait for room was in vain, and no part has arrived since

    @property
    def under_way(self) -> int:
        """The number of parts whose slots the daemon still reads."""
        return len(self._under_way)

    def store(self, record: StoredRange) -> None:
        """Hand the record's bytes over; it stays with the client where that is not possible.

        Raises:
            DaemonLost: the daemon is gone. The record keeps its storage.
        """
        if self._departs(record):
            return
        storage = record.source
        assert storage is not None
        source = flat_bytes(storage)
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
                sequence = self._lane.publish(slot)
                part = range(begin, begin + slot.nbytes)
                self._send(Piece(record, admission, part, slot, record.codec, sequence))

    def forget(self, key: int) -> None:
        """Hold a record's source no longer: it died (with the lock held)."""
        if self._departures is not None:
            self._departures.forget(key)

    def check_steady(self, record: StoredRange) -> None:
        """Raise if the record's source is held, where it was not found whole (locked).

        Raises:
            ActivationLost: it cannot have been read for sure before it was resized.
        """
        if self._departures is not None:
            self._departures.check_steady(record)

    # --- replies, with the lock held --------------------------------------------------------

    def admitted(self, message: Admitted) -> None:
        """Let the tensor go once all of its parts are promised room."""
        storing = self._under_way.get(message.entry)
        if storing is None or storing.admission.refused:
            return
        admission = storing.admission
        if message.entry in admission.admitted:
            return
        admission.admitted.add(message.entry)
        admission.outstanding -= 1
        if admission.outstanding:
            return
        admission.stats.offloaded(admission.nbytes, admission.dtype)
        for part in admission.early:
            admission.stats.stored(part.stored_bytes, part.mode)
        record = admission.record()
        if record is not None and not admission.in_place:
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

    def _departs(self, record: StoredRange) -> bool:
        """Have the record's source read or encoded where it is; False where it cannot be."""
        if self._departures is None:
            return False
        with self._connection.lock:
            admission = self._admission(record)
            admission.in_place = True
            return self._departures.add(record, admission)

    def _admission(self, record: StoredRange) -> Admission:
        parts = -(-record.nbytes // self._part_bytes)
        return Admission(weakref.ref(record), record.stats, record.nbytes, record.dtype, parts)

    def _slot(self, nbytes: int) -> Slot | None:
        """Return a slot, waiting a while for the daemon to free one."""
        slot: Slot | None = None

        def reserved() -> bool:
            nonlocal slot
            slot = self._reserve(nbytes)
            return slot is not None

        with self._connection.lock:
            self._wait(reserved)
        return slot

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Wait a while for the daemon, but not while it is known to be slow; with the lock held."""
        if ready():
            return True
        self._connection.drain()
        patience = 0.0 if self._slow else PATIENCE_SECONDS
        self._slow = not self._connection.wait(ready, patience)
        return not self._slow

    def _stage(self, piece: torch.Tensor, slot: Slot) -> None:
        try:
            self._lane.stage(piece, slot)
        except BaseException:
            with self._connection.lock:
                self._lane.free(slot)
            raise

    def _send(self, piece: Piece) -> None:
        """Send a part, with the lock held from its number to its message."""
        admission, part, slot, result = piece.admission, piece.part, piece.slot, piece.result
        entry = next(self._connection.numbers)
        store = Store(
            entry=entry,
            segment=slot.segment,
            offset=slot.offset,
            nbytes=len(part),
            dtype=codec_name(admission.dtype),
            codec=piece.codec,
            sequence=piece.sequence,
            result=result or 0,
        )
        is_staged = result is not None or not admission.in_place
        storing = _Storing(admission, slot if is_staged else None, result)
        # In this order: what an interrupt leaves half done is released, and waited for by nobody.
        piece.record.parts.append(Part(entry, part.start, part.stop))
        self._connection.defer(entry, store)
        self._under_way[entry] = storing
        self._unsent += len(part)
        self._flush_if_due()

    def _flush_if_due(self) -> None:
        if self._unsent >= self._flush_bytes:
            self._unsent = 0
            self._connection.flush()

    def _keep(self, admission: Admission, reason: str) -> None:
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

    def _finish(self, entry: int, *, stored: bool = False) -> Admission | None:
        """Give up the slot of a part that the daemon is done with; return what it belongs to."""
        storing = self._under_way.pop(entry, None)
        if storing is None:
            return None
        self._slow = False
        slot = storing.slot
        if slot is not None and not (stored and self._is_kept(entry, storing, slot)):
            self._lane.free(slot)
        if storing.result is not None and self._lane.coder is not None:
            self._lane.coder.take_back(storing.result)
        if slot is not None and self._departures is not None:
            self._departures.send_waiting()
        return storing.admission

    def _is_kept(self, entry: int, storing: _Storing, slot: Slot) -> bool:
        """Tell whether the slot, which holds the bytes themselves, may stay as a copy of them."""
        record = storing.admission.record()
        if record is None or storing.admission.refused or storing.result is not None:
            return False
        return self._keep_staged(record, entry, slot)


def flat_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage as a uint8 tensor over them."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
