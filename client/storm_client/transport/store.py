"""Sends stored ranges to the daemon: by copies in the staging area, or from where they lie.

A source is kept until the daemon has admitted every part of it, so a tensor leaves memory only when
nothing but a fault can lose it. What becomes of the chunks is decided in `transfers`; here the lane
copies, the connection sends, and threads wait, never for longer than their patience.

Sources that are read where they lie are held back until memory is needed for others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from storm_client.errors import ActivationLost
from storm_client.lanes import InPlace, Lane, Mapped, Slot, Staged
from storm_client.lanes.segments import tell
from storm_client.saved.ranges import StoredRange
from storm_client.transport.connection import Connection
from storm_client.transport.transfer import Outgoing
from storm_client.transport.transfers import Transfers

__all__ = ["Outbound"]

PATIENCE_SECONDS = 2.0
"""How long a training thread waits for the daemon before it keeps its tensor."""

FLUSH_BYTES = 1 << 20
"""Stores of smaller tensors travel together up to this, or until the listener sends them. More at
once would only make the daemon start later, and read what has left the caches."""

IN_PLACE_FLUSH_BYTES = 32 << 20
"""The same for tensors that are read where they lie: no cache holds them, and what a store costs
the daemon is mostly its frame."""

COUNTER_SECONDS = 1e-4
"""Between two looks at a counter, which nobody tells of."""

_MOVED = (
    "a storage was resized while {} bytes of it were read where they were; save a copy of what is "
    "freed before the backward pass"
)


class _Unread(NamedTuple):
    """A source that was given up before the daemon had read it, up to the number `sequence`."""

    sequence: int
    nbytes: int


_nbytes = attrgetter("nbytes")


class Outbound:
    """Of one session, for any thread; methods marked "locked" are called with its lock held."""

    def __init__(
        self,
        connection: Connection,
        lane: Lane,
        transfers: Transfers,
        patience: float | None = None,
    ) -> None:
        """Send over `connection` what `transfers` decide; `lane` is attached."""
        self._connection = connection
        self._lane = lane
        self._transfers = transfers
        self._patience = patience
        self._in_place = lane.in_place
        self._unread: deque[_Unread] = deque()
        together = FLUSH_BYTES if self._in_place is None else IN_PLACE_FLUSH_BYTES
        self.together_bytes = min(together, transfers.stores.part_bytes)
        self._unsent_bytes = 0  # of stores deferred since the last flush here
        self._slow_since = -1  # how much had been freed when a wait was in vain

    def store(self, records: Sequence[StoredRange]) -> None:
        """Hand records' bytes over; one stays with the client where that is not possible.

        Raises:
            DaemonLost: the daemon is gone. The records keep their storages.
        """
        if self._in_place is not None:
            with self._connection.lock:
                records = self._store_in_place(records)
        for record in records:
            source = record.source
            if source is None:
                continue
            with self._connection.lock:
                out = self._transfers.stores.leave(record)
            self.copy(out, source)

    def copy(self, out: Outgoing, source: torch.UntypedStorage, begin: int = 0) -> None:
        """Send the bytes of `source` from `begin` on through the staging area, or have it refused.

        Raises:
            DaemonLost: the daemon is gone.
        """
        transfers = self._transfers
        for part in transfers.stores.split(out.nbytes):
            with self._connection.lock:
                slot = transfers.reserve(len(part)) or self._slot_later(len(part))
                if slot is None:
                    transfers.stores.refuse(out, "daemon_slow")
                    self._connection.flush()
                    return
            try:
                self._lane.stage(source, begin + part.start, slot)
            except BaseException:
                with self._connection.lock:
                    transfers.free(slot)
                raise
            with self._connection.lock:
                if out.refusal is not None:
                    transfers.free(slot)
                    return
                transfers.stores.store(out, part, Staged(slot.offset), self._lane.publish(), slot)
                self._unsent_bytes += slot.nbytes
                self._flush_if_due()

    def check_steady(self, record: StoredRange) -> None:
        """Raise if the record's source is held, where it was not found whole (locked).

        Raises:
            ActivationLost: it cannot have been read for sure before it was resized.
        """
        if record.key in self._transfers.held:
            raise ActivationLost(_MOVED.format(record.nbytes))

    def let_all_go(self) -> None:
        """Let all sources go that may (locked): the device has no memory left."""
        self._relieve(limit=0)
        end = time.monotonic() + PATIENCE_SECONDS
        if self._in_place is not None:
            while self._unread_bytes(self._in_place) and self._connection.wait(
                end, COUNTER_SECONDS
            ):
                pass

    # --- what both ways need, with the lock held --------------------------------------------

    def _slot_later(self, nbytes: int) -> Slot | None:
        """Return a slot as soon as the daemon frees one, within patience."""
        end = self._end_of_patience()
        while self._frees_by(end):
            slot = self._transfers.reserve(nbytes)
            if slot is not None:
                return slot
        return None

    def _flush_if_due(self) -> None:
        if self._unsent_bytes < self.together_bytes:
            self._connection.flush_soon()
            return
        self._unsent_bytes = 0
        self._connection.flush()

    # --- in place, with the lock held -------------------------------------------------------

    def _store_in_place(self, records: Sequence[StoredRange]) -> list[StoredRange]:
        """Hold sources, and send those that are not needed soon; return what has to be staged."""
        in_place = self._in_place
        assert in_place is not None
        sent: list[tuple[Outgoing, Mapped]] = []
        staged: list[StoredRange] = []
        for record in records:
            assert record.source is not None
            if record.soon and sent:
                self._send_mapped(sent)
                sent = []
            place = in_place.find(record.source.data_ptr(), record.nbytes)
            if place is None:
                staged.append(record)
                continue
            out = self._transfers.stores.leave(record)
            self._transfers.held.hold(out)
            if not record.soon:
                sent.append((out, place))
        tell(self._connection, in_place.segments)
        if sent:
            self._send_mapped(sent)
        if len(staged) < len(records):
            self._relieve()
            self._flush_if_due()
        return staged

    def _send_source(self, record: StoredRange, out: Outgoing) -> None:
        """Send a source that was not sent yet; one that cannot be sent stays as it is."""
        if out.sequence is not None or out.key not in self._transfers.held:
            return
        if self._is_moved(record) or record.source is None:
            return
        assert self._in_place is not None
        place = self._in_place.find(record.source.data_ptr(), out.nbytes)
        tell(self._connection, self._in_place.segments)
        if place is not None:
            self._send_mapped([(out, place)])

    def _send_mapped(self, sources: Sequence[tuple[Outgoing, Mapped]]) -> None:
        """Have the daemon read sources, each of which lies at its place."""
        assert self._in_place is not None
        count = sources[0][0].count if len(sources) == 1 else sum([out.count for out, _ in sources])
        numbers = iter(self._in_place.produced(count))
        for out, place in sources:
            for part in self._transfers.stores.split(out.nbytes):
                route = place
                if part.start:
                    route = Mapped(place.segment, place.offset + part.start)
                out.sequence = next(numbers)
                self._transfers.stores.store(out, part, route, out.sequence)
            self._unsent_bytes += out.nbytes

    def _relieve(self, limit: int | None = None) -> None:
        """Let the oldest sources go while more is held than `limit`, or the window's."""
        while (out := self._transfers.held.excess(limit)) is not None:
            record = out.living()
            if record is not None and not out.is_answered and not self._is_taken(record, out):
                return  # the daemon is slow: memory is what that costs
            self._transfers.held.let_go(out.key)
            if record is not None and out.sequence is not None and out.refusal is None:
                self._give_up(record, out, out.sequence)

    def _is_taken(self, record: StoredRange, out: Outgoing) -> bool:
        """Send what has not been sent yet and wait for the daemon's answer; False without one."""
        end = self._end_of_patience()
        self._send_source(record, out)
        while out.sequence is not None and not out.is_answered:
            if not self._connection.wait(end):
                self._slow_since = self._transfers.freed
                return False
        return True

    def _give_up(self, record: StoredRange, out: Outgoing, sequence: int) -> None:
        """Give a source up, whose chunks have all been admitted."""
        if record.source is None or self._is_moved(record):
            return  # what may be had is what is here
        in_place = self._in_place
        assert in_place is not None
        if self._is_read(in_place, sequence):
            self._transfers.stores.gone(record)
            return
        in_place.overtake(sequence, record.source)
        self._unread.append(_Unread(sequence, out.nbytes))
        self._transfers.stores.gone(record)
        # The pool promises room for the largest blob until a source is read; a host that ran ahead
        # of its device would have it promise all of a step.
        end = time.monotonic() + PATIENCE_SECONDS
        while self._unread_bytes(in_place) > self._transfers.window.unread:
            if not self._connection.wait(end, COUNTER_SECONDS):
                return

    def _unread_bytes(self, in_place: InPlace) -> int:
        """Return how much has been given up and not been read."""
        unread = self._unread
        while unread and in_place.is_read(unread[0].sequence):
            unread.popleft()
        return sum(map(_nbytes, unread))

    def _is_read(self, in_place: InPlace, sequence: int) -> bool:
        """Tell whether all up to `sequence` has been read, waiting if that is best.

        Two processes without MPS share the device by time slices, and a stream that waits wastes
        its own: the daemon encodes faster while the host waits instead.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while not in_place.is_read(sequence):
            if in_place.waits_on_device or not self._connection.wait(end, COUNTER_SECONDS):
                return False
        return True

    def _is_moved(self, record: StoredRange) -> bool:
        """Tell whether a source has not kept its memory, which is an error; or had one before."""
        assert record.source is not None
        if not record.is_whole(record.source):
            record.lose(ActivationLost(_MOVED.format(record.nbytes)))
        return record.error is not None

    def _end_of_patience(self) -> float:
        """Return until when to wait: now, where a wait was in vain and nothing was freed since."""
        patience = self._patience
        if patience is None:
            is_slow = self._slow_since == self._transfers.freed
            patience = 0.0 if is_slow else PATIENCE_SECONDS
        return time.monotonic() + patience

    def _frees_by(self, end: float) -> bool:
        """Wait until something has been freed; False, for the daemon is slow, after `end`."""
        seen = self._transfers.freed
        while self._transfers.freed == seen:
            if not self._connection.wait(end):
                self._slow_since = seen
                return False
        return True
