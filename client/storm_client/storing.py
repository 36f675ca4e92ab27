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
from storm_client.errors import ActivationLost, named
from storm_client.held import Held, HeldBack
from storm_client.lanes import InPlace, Lane, Slot
from storm_client.records import Part, StoredRange
from storm_client.staging import ALIGNMENT
from storm_client.stats import StatsRecorder, dtype_name
from storm_client.window import Window
from stormd.protocol import Admitted, Failed, Release, Store, Stored

__all__ = ["Storer", "flat_bytes"]

FLUSH_BYTES = 1 << 20
"""Stores of smaller tensors travel together up to this, or until the listener sends them. More
at once would only make the daemon start later, and read what has left the caches."""

IN_PLACE_FLUSH_BYTES = 8 << 20
"""The same for tensors that are read where they lie: no cache holds them, and what a store costs
the daemon is mostly its frame (195 us of CPU for one a frame, 70 for eight, without the device)."""

STAGING_SECONDS = 2.0
"""How long a training thread waits for room in the staging area before it keeps its tensor."""


_MOVED = (
    "a storage was resized while the daemon read {} bytes of it where they were; save a copy of "
    "what is freed before the backward pass"
)


@dataclass(slots=True)
class _Admission:
    """What became of one record's parts; outlives the record, for the statistics' sake."""

    record: weakref.ref[StoredRange]
    stats: StatsRecorder
    nbytes: int
    dtype: torch.dtype
    outstanding: int
    in_place: bool = False
    refused: bool = False
    early: list[Stored] = field(default_factory=list)
    """Parts that arrived before the last one was admitted: they may yet be given back."""

    def is_answered(self) -> bool:
        """Tell whether the daemon has admitted or refused it."""
        return self.refused or not self.outstanding


class _Storing(NamedTuple):
    """A part between Store and Stored."""

    admission: _Admission
    slot: Slot | None
    """Of the staging area; None where the part is stored in place."""


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
        self._in_place = lane.in_place
        self._window = window
        self._held: HeldBack[_Admission] = HeldBack(window)
        self._under_way: dict[int, _Storing] = {}
        together = FLUSH_BYTES if self._in_place is None else IN_PLACE_FLUSH_BYTES
        self._flush_bytes = min(together, self._part_bytes)
        self._unsent = 0  # bytes of stores deferred since the last flush here
        self._slow = False  # a wait for room was in vain, and no part has arrived since

    @property
    def under_way(self) -> int:
        """The number of parts whose slots the daemon still reads."""
        return len(self._under_way)

    def store(self, record: StoredRange, codec: str, *, steady: bool, soon: bool) -> None:
        """Hand the record's bytes over; it stays with the client where that is not possible.

        `steady` says that the storage's memory stays the same while somebody holds it, `soon`
        that it is needed at once: it is not sent as long as there is memory for it.

        Raises:
            DaemonLost: the daemon is gone. The record keeps its storage.
        """
        if steady and self._in_place is not None and self._hold(record, codec, soon=soon):
            return
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
                sequence = self._lane.publish(slot)
                self._send(record, admission, slot, begin, codec, sequence=sequence)
                self._flush_if_due()

    def forget(self, key: int) -> None:
        """Hold a record no longer: it died, or its turn to go has come (with the lock held).

        What was never sent was needed before there was a reason to.
        """
        held = self._held.forget(key)
        if held is not None and held.sequence is None:
            held.admission.stats.kept(held.admission.nbytes, "needed_at_once")

    def check_steady(self, record: StoredRange) -> None:
        """Raise if the record's source is held, where it was not found whole (locked).

        Raises:
            ActivationLost: the daemon cannot have read it for sure before it was resized.
        """
        if record.key in self._held:
            raise ActivationLost(_MOVED.format(record.nbytes))

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

    # --- stores in place --------------------------------------------------------------------

    def _hold(self, record: StoredRange, codec: str, *, soon: bool) -> bool:
        """Have the daemon read the record's source where it is; False where it cannot."""
        lane = self._in_place
        assert lane is not None
        with self._connection.lock:
            whole = _find(lane, record)
            if whole is None:
                return False
            self._window.saw(record.storage_nbytes)
            admission = self._admission(record)
            admission.in_place = True
            size = record.storage_nbytes
            held = Held(record.key, weakref.ref(record), size, codec, admission)
            if not soon:
                self._send_in_place(lane, record, held, whole)
            self._held.add(held)
            self._relieve(lane)
        return True

    def _send_in_place(
        self, lane: InPlace, record: StoredRange, held: Held[_Admission], whole: Slot
    ) -> None:
        """Send all parts of a source, which lies at `whole`."""
        numbers = lane.produced(held.admission.outstanding)
        begins = range(0, record.nbytes, self._part_bytes)
        for begin, sequence in zip(begins, numbers, strict=True):
            nbytes = min(self._part_bytes, record.nbytes - begin)
            slot = Slot(whole.segment, whole.offset + begin, nbytes)
            self._send(record, held.admission, slot, begin, held.codec, sequence=sequence)
        held.sequence = numbers[-1]
        self._flush_if_due()

    def _relieve(self, lane: InPlace) -> None:
        """Let the oldest sources go while more is held than may be; with the lock held."""
        while (held := self._held.excess()) is not None:
            record = held.record()
            if record is not None and held.sequence is None:
                self._send_late(lane, record, held)
            if held.sequence is not None and not self._wait(held.admission.is_answered):
                return  # the daemon is slow: memory is what that costs
            self.forget(held.key)
            if record is None or record.source is None or held.sequence is None:
                continue
            if not held.admission.refused:
                self._let_go(lane, record, record.source, held.sequence)

    def _send_late(self, lane: InPlace, record: StoredRange, held: Held[_Admission]) -> None:
        """Send what was not needed so soon after all; what cannot be read any more stays."""
        whole = _find(lane, record)
        if whole is not None:
            self._send_in_place(lane, record, held, whole)

    def _let_go(
        self, lane: InPlace, record: StoredRange, source: torch.UntypedStorage, sequence: int
    ) -> None:
        """Give a source up, whose parts up to `sequence` have all been admitted."""
        if not record.is_whole(source):
            record.error = ActivationLost(_MOVED.format(record.nbytes))
        if record.error is not None:
            return  # what may be had is what is here
        if not self._is_read(lane, sequence):
            lane.overtake(sequence, source)
        record.source = None

    def _is_read(self, lane: InPlace, sequence: int) -> bool:
        """Tell whether the daemon has read the stores up to `sequence`, waiting if that is best.

        Two processes without MPS share the device by time slices, and a stream that waits wastes
        its own: the daemon encodes faster while the host waits instead.
        """
        if lane.is_read(sequence) or lane.waits_on_device:
            return lane.is_read(sequence)
        self._connection.drain()
        return self._connection.wait(lambda: lane.is_read(sequence), STAGING_SECONDS)

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
            self._wait(reserved)
        return slot

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Wait a while for the daemon, but not while it is known to be slow; with the lock held."""
        if ready():
            return True
        self._connection.drain()
        patience = 0.0 if self._slow else STAGING_SECONDS
        self._slow = not self._connection.wait(ready, patience)
        return not self._slow

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
        *,
        sequence: int,
    ) -> None:
        """Send one part, with the lock held from its number to its message."""
        entry = next(self._connection.numbers)
        record.parts.append(Part(entry, begin, begin + slot.nbytes))
        self._under_way[entry] = _Storing(admission, None if admission.in_place else slot)
        name = dtype_name(admission.dtype)
        message = Store(entry, slot.segment, slot.offset, slot.nbytes, name, codec, sequence)
        self._connection.defer(entry, message)
        self._unsent += slot.nbytes

    def _flush_if_due(self) -> None:
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
        slot = storing.slot
        if slot is not None and not (stored and self._is_kept(entry, storing.admission, slot)):
            self._lane.free(slot)
        return storing.admission

    def _is_kept(self, entry: int, admission: _Admission, slot: Slot) -> bool:
        record = admission.record()
        if record is None or admission.refused:
            return False
        return self._keep_staged(record, entry, slot)


def _find(lane: InPlace, record: StoredRange) -> Slot | None:
    """Return where the daemon can read the record's source, None where it cannot."""
    assert record.source is not None
    return lane.find(record.source.data_ptr() + record.start, record.nbytes)


def flat_bytes(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Return the bytes `start .. start + nbytes` of a storage as a uint8 tensor over them."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (nbytes,), (1,))
