"""Sends stored ranges to the daemon: in place, or by copies in the staging area.

A source is kept until the daemon has admitted every chunk of it, so only a fault can lose a tensor
that left memory. `transfers` decides about the chunks. Here the lane copies, the connection sends,
and threads wait, each only for a limited time.

Sources that the daemon reads in place are held until their memory is needed for others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from storm_client.errors import ActivationLost, UsageError
from storm_client.lanes import InPlace, Lane, Mapped, Slot, Staged
from storm_client.saved.ranges import StoredRange
from storm_client.transport.connection import Connection, send_offers
from storm_client.transport.staging_area import open_staging
from storm_client.transport.transfer import Outgoing
from storm_client.transport.transfers import Transfers

__all__ = ["Outbound"]

PATIENCE_SECONDS = 2.0
"""How long a training thread waits for the daemon before it keeps its tensor."""

FLUSH_BYTES = 1 << 20
"""Stores of smaller tensors are sent together up to this size, or when the listener sends them. A
larger value would only make the daemon start later, and read data that left the caches."""

IN_PLACE_FLUSH_BYTES = 32 << 20
"""The same for tensors that are read in place: no cache holds them, and a store's cost for the
daemon is mostly its frame."""

COUNTER_SECONDS = 1e-4
"""Seconds between two looks at a counter, whose changes nobody announces."""

_RESIZED = (
    "a storage was resized while {} bytes of it were being read in place; save a copy of what is "
    "freed before the backward pass"
)


class _Unread(NamedTuple):
    """A source that was given up before the daemon has read it up to the number `sequence`."""

    sequence: int
    nbytes: int


_nbytes = attrgetter("nbytes")


class Outbound:
    """The stores of one session, for any thread; "locked" methods need the session's lock held."""

    def __init__(
        self,
        connection: Connection,
        lane: Lane,
        transfers: Transfers,
        patience: float | None = None,
    ) -> None:
        """Send over `connection` as `transfers` decide; `lane` is attached."""
        self._connection = connection
        self._lane = lane
        self._transfers = transfers
        self._patience = patience
        self._in_place = lane.in_place
        self._unread: deque[_Unread] = deque()
        together = FLUSH_BYTES if self._in_place is None else IN_PLACE_FLUSH_BYTES
        self.batch_bytes = min(together, transfers.stores.part_bytes)
        self._unsent_bytes = 0  # of stores deferred since this object's last flush
        self._slow_since = -1  # the value of transfers.freed when a wait timed out

    def store(self, records: Sequence[StoredRange]) -> None:
        """Send the bytes of records; a record that cannot be sent is kept in memory.

        Raises:
            DaemonLost: the daemon is gone. The records keep their storages.
        """
        if self._in_place is not None:
            with self._connection.lock:
                records = self._store_mapped(records)
        for record in records:
            source = record.source
            if source is None:
                continue
            with self._connection.lock:
                out = self._transfers.stores.begin_store(record)
            if self._open_staging(out):
                self.store_staged(out, source)

    def store_staged(self, out: Outgoing, source: torch.UntypedStorage, begin: int = 0) -> None:
        """Send the bytes of `source` from `begin` on through the staging area, or refuse `out`.

        Raises:
            DaemonLost: the daemon is gone.
        """
        transfers = self._transfers
        for part in transfers.stores.split(out.nbytes):
            with self._connection.lock:
                slot = transfers.reserve(len(part)) or self._wait_for_slot(len(part))
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

    def check_not_resized(self, record: StoredRange) -> None:
        """Raise if the record's source is held though it is no longer whole (locked).

        Raises:
            ActivationLost: the daemon may not have read the source before it was resized.
        """
        if record.key in self._transfers.held:
            raise ActivationLost(_RESIZED.format(record.nbytes))

    def release_all_sources(self) -> None:
        """Give up all sources that may be given up (locked): the device has no memory left."""
        self._free_excess(limit=0)
        end = time.monotonic() + PATIENCE_SECONDS
        if self._in_place is not None:
            while self._unread_bytes(self._in_place) and self._connection.wait(
                end, COUNTER_SECONDS
            ):
                pass

    def _open_staging(self, out: Outgoing) -> bool:
        """Open the staging area unless it is open; refuse `out` and return False if that fails."""
        reason, detail = "daemon_slow", ""
        try:
            end = self._end_of_patience()
            if open_staging(self._connection, self._lane, self._transfers, end):
                return True
        except UsageError as error:
            reason, detail = "no_staging", str(error)
        with self._connection.lock:
            self._transfers.stores.refuse(out, reason, detail)
        return False

    # --- for both routes, with the lock held ------------------------------------------------

    def _wait_for_slot(self, nbytes: int) -> Slot | None:
        """Return a slot as soon as the daemon frees one, None if that takes too long."""
        end = self._end_of_patience()
        while self._wait_for_room(end, self._transfers.freed):
            slot = self._transfers.reserve(nbytes)
            if slot is not None:
                return slot
        return None

    def _flush_if_due(self) -> None:
        if self._unsent_bytes < self.batch_bytes:
            self._connection.flush_soon()
            return
        self._unsent_bytes = 0
        self._connection.flush()

    # --- in place, with the lock held -------------------------------------------------------

    def _store_mapped(self, records: Sequence[StoredRange]) -> list[StoredRange]:
        """Store records in place, once the daemon has said whether it maps their memory.

        Return the records that must be staged. If the daemon is slow, records are kept.
        """
        seen = self._transfers.freed
        staged, waiting = self._store_in_place(records)
        while waiting:
            if not self._wait_for_room(self._end_of_patience(), seen):
                for record in waiting:
                    out = self._transfers.stores.begin_store(record)
                    self._transfers.stores.refuse(out, "daemon_slow")
                break
            seen = self._transfers.freed
            refused, waiting = self._store_in_place(waiting)
            staged += refused
        return staged

    def _store_in_place(
        self, records: Sequence[StoredRange]
    ) -> tuple[list[StoredRange], list[StoredRange]]:
        """Hold sources, and send those not needed soon.

        Return the records that must be staged, and those for which the daemon has yet to say
        whether it maps their memory.
        """
        in_place = self._in_place
        assert in_place is not None
        sent: list[tuple[Outgoing, Mapped]] = []
        staged: list[StoredRange] = []
        waiting: list[StoredRange] = []
        is_any_held = False
        for record in records:
            assert record.source is not None
            if record.soon and sent:
                self._send_mapped(sent)
                sent = []
            address = record.source.data_ptr()
            place = in_place.find(address, record.nbytes)
            if place is None:
                awaits = in_place.awaits_answer(address, record.nbytes)
                (waiting if awaits else staged).append(record)
                continue
            is_any_held = True
            out = self._transfers.stores.begin_store(record)
            self._transfers.held.hold(out)
            if not record.soon:
                sent.append((out, place))
        send_offers(self._connection, in_place.segments)
        if sent:
            self._send_mapped(sent)
        if is_any_held:
            self._free_excess()
            self._flush_if_due()
        return staged, waiting

    def _send_source(self, record: StoredRange, out: Outgoing) -> None:
        """Send a source that was not sent yet; if that is impossible the source is kept."""
        if out.sequence is not None or out.key not in self._transfers.held:
            return
        if self._was_resized(record) or record.source is None:
            return
        assert self._in_place is not None
        place = self._in_place.find(record.source.data_ptr(), out.nbytes)
        send_offers(self._connection, self._in_place.segments)
        if place is not None:
            self._send_mapped([(out, place)])

    def _send_mapped(self, sources: Sequence[tuple[Outgoing, Mapped]]) -> None:
        """Ask the daemon to read sources, each at its place."""
        assert self._in_place is not None
        count = sources[0][0].count if len(sources) == 1 else sum([out.count for out, _ in sources])
        numbers = iter(self._in_place.publish_numbers(count))
        for out, place in sources:
            for part in self._transfers.stores.split(out.nbytes):
                route = place
                if part.start:
                    route = Mapped(place.segment, place.offset + part.start)
                out.sequence = next(numbers)
                self._transfers.stores.store(out, part, route, out.sequence)
            self._unsent_bytes += out.nbytes

    def _free_excess(self, limit: int | None = None) -> None:
        """Give up the oldest sources while too many are held; `limit` defaults to the window's."""
        while (out := self._transfers.held.excess(limit)) is not None:
            record = out.living()
            if record is not None and not out.is_answered and not self._await_answer(record, out):
                return  # the daemon is slow, and that costs memory
            self._transfers.held.drop(out.key)
            if record is not None and out.sequence is not None and out.refusal is None:
                self._free_source(record, out, out.sequence)

    def _await_answer(self, record: StoredRange, out: Outgoing) -> bool:
        """Send an unsent source and wait for the daemon's answer; False without an answer."""
        end = self._end_of_patience()
        self._send_source(record, out)
        while out.sequence is not None and not out.is_answered:
            if not self._connection.wait(end):
                self._slow_since = self._transfers.freed
                return False
        return True

    def _free_source(self, record: StoredRange, out: Outgoing, sequence: int) -> None:
        """Give up a source whose chunks have all been admitted."""
        if record.source is None or self._was_resized(record):
            return  # only the present bytes can be returned
        in_place = self._in_place
        assert in_place is not None
        if self._is_read(in_place, sequence):
            self._transfers.stores.free_source(record)
            return
        in_place.wait_before_reuse(sequence, record.source)
        self._unread.append(_Unread(sequence, out.nbytes))
        self._transfers.stores.free_source(record)
        # The pool reserves room for the largest possible blob until a source is read. Without this
        # wait, a host that runs ahead of its device would reserve room for a whole step.
        end = time.monotonic() + PATIENCE_SECONDS
        while self._unread_bytes(in_place) > self._transfers.window.unread:
            if not self._connection.wait(end, COUNTER_SECONDS):
                return

    def _unread_bytes(self, in_place: InPlace) -> int:
        """Return the bytes of sources that were given up and are not read yet."""
        unread = self._unread
        while unread and in_place.is_read(unread[0].sequence):
            unread.popleft()
        return sum(map(_nbytes, unread))

    def _is_read(self, in_place: InPlace, sequence: int) -> bool:
        """Return whether all sources up to `sequence` have been read; wait if that is best.

        Without MPS two processes share the device by time slices, and a waiting stream wastes its
        own slices: the daemon encodes faster while the host waits instead.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while not in_place.is_read(sequence):
            if in_place.waits_on_device or not self._connection.wait(end, COUNTER_SECONDS):
                return False
        return True

    def _was_resized(self, record: StoredRange) -> bool:
        """Return whether a source has lost its memory (an error), or had an error before."""
        assert record.source is not None
        if not record.is_whole(record.source):
            record.mark_lost(ActivationLost(_RESIZED.format(record.nbytes)))
        return record.error is not None

    def _end_of_patience(self) -> float:
        """Return the wait's deadline; it is now if a wait timed out and nothing was freed since."""
        patience = self._patience
        if patience is None:
            is_slow = self._slow_since == self._transfers.freed
            patience = 0.0 if is_slow else PATIENCE_SECONDS
        return time.monotonic() + patience

    def _wait_for_room(self, end: float, seen: int) -> bool:
        """Wait until something is freed after `seen`, or more memory is mapped; False at `end`."""
        while self._transfers.freed == seen:
            if not self._connection.wait(end):
                self._slow_since = seen
                return False
        return True
