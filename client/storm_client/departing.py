"""The way out of tensors where they lie: read by the daemon, or encoded by this process.

What stays true: a source is kept until the daemon has admitted every part of it, and its memory
is used for nothing else before all of it has been read; no more than may be held is let go unread;
and what is needed at once is not sent as long as there is memory for it.

The daemon is sent a source as soon as it is saved. Where this process encodes, blobs need room in
the staging area: sources wait for it in their order, and whoever hears that there is room again
sends the next ones. All methods are called with the session's lock held.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from storm_client.admissions import Admission
from storm_client.connection import Connection
from storm_client.dtypes import codec_name
from storm_client.errors import ActivationLost
from storm_client.held import Held, HeldBack
from storm_client.lanes import Coder, InPlace, Lane, Reader, Slot
from storm_client.records import StoredRange
from storm_client.window import Window

__all__ = ["PATIENCE_SECONDS", "Departures", "Piece"]

PATIENCE_SECONDS = 2.0
"""How long a training thread waits for the daemon before it keeps its tensor."""

_MOVED = (
    "a storage was resized while {} bytes of it were read where they were; save a copy of what is "
    "freed before the backward pass"
)


class Piece(NamedTuple):
    """A part that is about to be sent: the bytes `part` of `record`, which lie at `slot`.

    With a `result` it is their blob that lies there, in a slot to be freed afterwards.
    """

    record: StoredRange
    admission: Admission
    part: range
    slot: Slot
    codec: str
    sequence: int
    result: int | None = None


class _Overtaken(NamedTuple):
    """A source that was let go before `reader` had read it, up to the number `sequence`."""

    reader: Reader
    sequence: int
    nbytes: int


class Departures:
    """Sources of one session that are held back until they have been read."""

    def __init__(
        self,
        connection: Connection,
        lane: Lane,
        in_place: InPlace,
        window: Window,
        *,
        part_bytes: int,
        send: Callable[[Piece], None],
        reserve: Callable[[int], Slot | None],
        wait: Callable[[Callable[[], bool]], bool],
    ) -> None:
        """Hold back what `window` allows.

        `reserve` returns a slot of the staging area; `wait` waits a while for the daemon, but not
        while it is known to be slow.
        """
        self._connection = connection
        self._lane = lane
        self._in_place = in_place
        self._window = window
        self._part_bytes = part_bytes
        self._send_piece = send
        self._reserve = reserve
        self._wait = wait
        self._held: HeldBack[Admission] = HeldBack(window)
        self._overtaken: deque[_Overtaken] = deque()
        self._overtaken_bytes = 0
        self._unsent: deque[Held[Admission]] = deque()
        self._sending = False

    def add(self, record: StoredRange, admission: Admission) -> bool:
        """Hold a record's source, and send it unless it is needed soon.

        False where neither the daemon nor this process can read it where it is.
        """
        is_coded = self._coder_of(record) is not None
        whole = None if is_coded else self._find(record)
        if not is_coded and whole is None:
            return False
        self._window.saw(record.nbytes)
        produced = self._in_place.produced(1)[0] if is_coded else 0
        held = Held(record.key, weakref.ref(record), record.nbytes, admission, produced=produced)
        self._held.add(held)
        if whole is not None and not record.soon:
            self._have_read(record, held, whole)
        elif not record.soon:
            self._unsent.append(held)
            self.send_waiting()
        self._relieve()
        return True

    def send_waiting(self) -> None:
        """Send the sources that wait for room, in their order, as far as there is some."""
        if self._sending:
            return  # a send hears of the room that another one has made, and goes on itself
        while self._unsent:
            record = self._unsent[0].record()
            if record is not None and not self._send(record, self._unsent[0]):
                return
            self._unsent.popleft()

    def forget(self, key: int) -> None:
        """Hold a record no longer: it died, or its turn to go has come.

        What was never sent was needed before there was a reason to.
        """
        held = self._held.forget(key)
        if held is not None and held.sequence is None and not held.admission.refused:
            held.admission.stats.kept(held.admission.nbytes, "needed_at_once")

    def check_steady(self, record: StoredRange) -> None:
        """Raise if the record's source is held, where it was not found whole.

        Raises:
            ActivationLost: it cannot have been read for sure before it was resized.
        """
        if record.key in self._held:
            raise ActivationLost(_MOVED.format(record.nbytes))

    # --- sending ----------------------------------------------------------------------------

    def _send(self, record: StoredRange, held: Held[Admission]) -> bool:
        """Send what is left of a source; False where there is no room for all of it now.

        One that cannot be sent at all stays as it is.
        """
        if held.sequence is not None or held.key not in self._held or self._is_moved(record):
            return True
        self._sending = True
        try:
            coder = self._coder_of(record)
            if coder is not None and held.reader in (None, coder):
                return self._encode(coder, record, held)
            whole = self._find(record) if held.reader is None else None
            if whole is not None:
                self._have_read(record, held, whole)
            return True
        finally:
            self._sending = False

    def _encode(self, coder: Coder, record: StoredRange, held: Held[Admission]) -> bool:
        """Encode the parts that are left into slots, as far as there are any."""
        assert record.source is not None
        dtype = codec_name(record.dtype)
        while held.sent < record.nbytes and not held.admission.refused:
            nbytes = min(self._part_bytes, record.nbytes - held.sent)
            slot = self._reserve(coder.room(nbytes))
            if slot is None:
                return False
            part = range(held.sent, held.sent + nbytes)
            encoded = coder.encode(
                record.source, part, slot, dtype=dtype, codec=record.codec, after=held.produced
            )
            if encoded is None:
                self._lane.free(slot)
                return False
            held.reader = coder
            held.sent = part.stop
            if held.sent == record.nbytes:
                held.sequence = encoded.sequence
            sequence, result = encoded
            self._send_piece(
                Piece(record, held.admission, part, slot, record.codec, sequence, result)
            )
        return True

    def _have_read(self, record: StoredRange, held: Held[Admission], whole: Slot) -> None:
        """Have the daemon read a source, which lies at `whole`."""
        held.reader = self._in_place
        numbers = self._in_place.produced(held.admission.outstanding)
        held.sequence = numbers[-1]
        begins = range(0, record.nbytes, self._part_bytes)
        for begin, sequence in zip(begins, numbers, strict=True):
            part = range(begin, min(begin + self._part_bytes, record.nbytes))
            slot = Slot(whole.segment, whole.offset + begin, len(part))
            self._send_piece(Piece(record, held.admission, part, slot, record.codec, sequence))

    # --- letting go -------------------------------------------------------------------------

    def _relieve(self) -> None:
        """Let the oldest sources go while more is held than may be."""
        while (held := self._held.excess()) is not None:
            record = held.record()
            if record is not None and not self._is_sent(record, held):
                return  # the daemon is slow: memory is what that costs
            self.forget(held.key)
            if record is None or record.source is None or held.sequence is None:
                continue
            if not held.admission.refused:
                self._let_go(record, record.source, held)

    def _is_sent(self, record: StoredRange, held: Held[Admission]) -> bool:
        """Send what has not been sent yet and wait for the daemon's answer; False without one."""
        if not self._wait(lambda: self._send(record, held)):
            return False
        return held.sequence is None or self._wait(held.admission.is_answered)

    def _let_go(
        self, record: StoredRange, source: torch.UntypedStorage, held: Held[Admission]
    ) -> None:
        """Give a source up, whose parts have all been admitted."""
        if self._is_moved(record):
            return  # what may be had is what is here
        reader, sequence = held.reader, held.sequence
        assert reader is not None
        assert sequence is not None
        if not self._is_read(reader, sequence):
            reader.overtake(sequence, source)
            self._overtaken.append(_Overtaken(reader, sequence, held.nbytes))
            self._overtaken_bytes += held.nbytes
        record.source = None
        self._connection.wait(self._is_near, PATIENCE_SECONDS)

    def _is_near(self) -> bool:
        """Tell whether no more than may be held has been let go unread.

        The pool promises room for the largest blob until a source is read; a host that ran ahead
        of its device would have it promise all of a step.
        """
        while self._overtaken and self._overtaken[0].reader.is_read(self._overtaken[0].sequence):
            self._overtaken_bytes -= self._overtaken.popleft().nbytes
        return self._overtaken_bytes <= self._window.limit

    def _is_read(self, reader: Reader, sequence: int) -> bool:
        """Tell whether all up to `sequence` has been read, waiting if that is best.

        Two processes without MPS share the device by time slices, and a stream that waits wastes
        its own: the daemon encodes faster while the host waits instead.
        """
        if reader.is_read(sequence) or reader.waits_on_device:
            return reader.is_read(sequence)
        self._connection.drain()
        return self._connection.wait(lambda: reader.is_read(sequence), PATIENCE_SECONDS)

    # --- helpers ----------------------------------------------------------------------------

    def _coder_of(self, record: StoredRange) -> Coder | None:
        """Return this process's codec if it can encode the record."""
        coder = self._lane.coder
        if coder is None or not coder.codes(codec_name(record.dtype), record.codec):
            return None
        return coder

    def _find(self, record: StoredRange) -> Slot | None:
        """Return where the daemon can read the record's source, None where it cannot."""
        assert record.source is not None
        return self._in_place.find(record.source.data_ptr(), record.nbytes)

    def _is_moved(self, record: StoredRange) -> bool:
        """Tell whether a source has not kept its memory, which is an error; or had one before."""
        assert record.source is not None
        if not record.is_whole(record.source):
            record.error = ActivationLost(_MOVED.format(record.nbytes))
        return record.error is not None
