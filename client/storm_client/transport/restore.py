"""Restores stored ranges, on demand and ahead of it.

Ranges are restored into memory of their own that the daemon has mapped, or into the staging area,
where prefetched chunks are given up for anything that is needed now. A thread that needs a range
waits for the daemon to say whether it maps the memory; prefetching waits for nothing. Memory that
the daemon may still write to is kept, even if nobody wants it any more, until the daemon has
answered for every chunk. Prefetched memory stays within the device window.

A thread that restores through the staging area copies each chunk out when it arrives. While it
waits for a chunk, it holds no slot that it could give up. So a range of any size passes through a
staging area of two chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from storm_client.errors import ActivationLost, DaemonLost, UsageError, lost_in_backward
from storm_client.lanes import Lane, Mapped
from storm_client.monitoring.profiler_ranges import span
from storm_client.saved.ranges import Part, StoredRange, UpcomingUses, Use
from storm_client.transport.confirmation import Confirmation
from storm_client.transport.connection import Connection, send_offers
from storm_client.transport.memory_pressure import MayFail
from storm_client.transport.staging_area import open_staging
from storm_client.transport.timeouts import LONGEST_SECONDS, STALL_SECONDS, Patience
from storm_client.transport.transfer import Incoming, Phase, Transfer
from storm_client.transport.transfers import REFILL_SHARE, Transfers

__all__ = ["Inbound"]

BATCH_BYTES = 64 << 20
"""Prefetched records up to this size share one event on the stream and one frame."""

LAST_WRITES_SECONDS = 0.5
"""How long memory is kept whose restores a dead daemon left in flight. Nothing tells when the
device has ended a dead process's kernels, which takes milliseconds."""

_Placed = tuple[StoredRange, torch.UntypedStorage, Mapped]


class Inbound:
    """The restores of one session, for any thread; "locked" methods need its lock held."""

    def __init__(self, connection: Connection, lane: Lane, transfers: Transfers) -> None:
        """Request over `connection` as `transfers` decide; `lane` is attached."""
        self._connection = connection
        self._lane = lane
        self._transfers = transfers
        self._in_place = lane.in_place
        self._is_mapped = False  # whether the daemon could map the latest allocation
        self._allowed = transfers.window.limit  # bytes that may be prefetched, at the last look
        self._confirmation = Confirmation(self.confirm)
        self._seen_answers, self._answered_at = 0, time.monotonic()

    def restore(self, use: Use, *, may_hand_out: bool = False) -> torch.UntypedStorage:
        """Return the bytes of a use's record in new memory, and begin to prefetch the next records.

        With `may_hand_out` the memory may be returned before the bytes are there. Then the thread's
        stream waits for them, and the backward pass ends with `confirm`.

        This thread has the duty to restore the record.

        Raises:
            CorruptBlob, ActivationLost: the daemon cannot restore the bytes.
            DaemonLost: the daemon is gone.
            UsageError: a CUDA graph is being captured, or the bytes need a staging area for which
                the device has no memory.
        """
        record, storage = use.record, None
        if self._in_place is not None:
            storage = self._restore_in_place(record, use.step, may_hand_out=may_hand_out)
        if storage is None:
            storage = self.restore_staged(record.key, record.parts, record.nbytes, use.step)
        with self._connection.lock:
            record.keep_restored(storage, use)
        return storage

    def restore_staged(
        self, key: int, parts: list[Part], nbytes: int, uses: UpcomingUses | None = None
    ) -> torch.UntypedStorage:
        """Restore `parts` through the staging area, and return them in new memory of `nbytes`.

        Slots that become free are used to prefetch the records that are used next.

        Raises:
            CorruptBlob, ActivationLost, DaemonLost, UsageError: as `restore`.
        """
        self._refuse_in_capture(nbytes)
        transfers, connection = self._transfers, self._connection
        self._open_staging(parts)
        destination = self._lane.allocate(nbytes)
        try:
            with connection.lock:
                known = transfers.incoming.get(key)
                is_requested = known is not None and len(known.transfers) == len(parts)
                sequence = 0 if is_requested else self._lane.publish()
                incoming = transfers.demand(key, parts, sequence)
            for index, part in enumerate(parts):
                with connection.lock:
                    if index:
                        self._reuse_slot(incoming, index, uses)
                    transfer = incoming.transfers.get(index)
                    if transfer is None or not transfer.is_wanted:
                        transfer = self._request_chunk(incoming, index)
                    self._wait_for_part(incoming, index)
                    slot = transfer.slot
                    assert slot is not None, transfer
                self._lane.unstage(slot, destination, part.begin)
        finally:
            with connection.lock:
                transfers.cancel(key)
                connection.notify()
        if uses is None or not uses.is_due or not transfers.has_room_to_prefetch:
            return destination
        if upcoming := uses.unseen():
            self._prefetch_staged(uses, upcoming)
        return destination

    def prefetch(self, uses: UpcomingUses) -> None:
        """Begin to prefetch the records used next, in this order, as far as there is room."""
        if not uses.is_due:
            return
        try:
            is_done = self._in_place is not None and self._prefetch_in_place(uses)
            if not is_done and self._transfers.has_room_to_prefetch:
                self._prefetch_staged(uses, uses.unseen())
        except DaemonLost:
            pass  # a thread that needs the record gets the error

    def close(self) -> None:
        """Drop all memory; first wait for a dead daemon's last writes to it."""
        with self._connection.lock:
            is_written = self._transfers.writes_to_memory()
        if is_written:
            time.sleep(LAST_WRITES_SECONDS)
        with self._connection.lock:
            self._transfers.end()

    def _refuse_in_capture(self, nbytes: int) -> None:
        """Raise if this thread's work is captured: a graph's replay would not restore the bytes."""
        if self._lane.is_capturing():
            raise UsageError(
                f"the {nbytes} bytes of a tensor that was stored before a CUDA graph is captured "
                "are with the daemon, and needed in the capture: capture the forward pass with its "
                "backward pass, or save what the capture needs without offload"
            )

    def _open_staging(self, parts: list[Part]) -> None:
        """Open the staging area unless it is open: see `open_staging`.

        Raises:
            ActivationLost: the daemon does not answer.
        """
        end = time.monotonic() + STALL_SECONDS
        if not open_staging(self._connection, self._lane, self._transfers, end):
            with self._connection.lock:
                raise self._stalled(
                    parts[0].entry, f"did not map the staging area within {STALL_SECONDS:g} s"
                )

    def _prefetch_staged(self, uses: UpcomingUses, upcoming: Iterable[StoredRange | None]) -> None:
        """Request the next records, `upcoming`, into the staging area."""
        with self._connection.lock, suppress(DaemonLost):
            self._stage_ahead(uses, upcoming)
            if self._connection.outbox:
                self._connection.flush()

    # --- through the staging area, with the lock held ---------------------------------------

    def _reuse_slot(self, incoming: Incoming, index: int, uses: UpcomingUses | None) -> None:
        """Reuse the slot of the chunk before `index`, which has been copied out."""
        transfers, left = self._transfers, len(incoming.parts) - index
        transfers.finish_chunk(incoming, index - 1)
        self._connection.notify()
        if len(incoming.transfers) < left:
            transfers.request_ahead(incoming, index, self._lane.publish())
        if uses is not None and transfers.has_room_to_prefetch:
            self._stage_ahead(uses, uses.unseen())
        if self._connection.outbox:
            self._connection.flush()

    def _stage_ahead(self, uses: UpcomingUses, upcoming: Iterable[StoredRange | None]) -> None:
        """Request the next records, `upcoming`, as far as there is room."""
        if self._is_mapped:
            return  # records are prefetched in place if possible; others are restored when needed
        seen = 0
        for record in upcoming:
            if record is not None and record.is_wanted and not self._begin_staged(record):
                break
            seen += 1
        if seen:
            uses.saw(seen)

    def _begin_staged(self, record: StoredRange) -> bool:
        """Request a record's chunks; return False if there is no room for all of them."""
        incoming = self._transfers.begin_staged(record.key, record.parts)
        if incoming.storage is not None or len(incoming.transfers) == len(incoming.parts):
            return True
        with span("fetch ahead", record.nbytes, record.key):
            return self._transfers.request_ahead(incoming, 0, self._lane.publish())

    def _request_chunk(self, incoming: Incoming, index: int) -> Transfer:
        """Return a chunk's transfer; wait until there is room to request it."""
        transfers = self._transfers
        transfers.finish_chunk(incoming, index)  # in case an interrupt came while it was given up
        while True:
            self._connection.flush()  # send requests before room is taken from others
            transfer = transfers.request_making_room(incoming, index, self._lane.publish())
            if transfer is not None:
                return transfer
            self._wait_for_room(incoming.parts[index].entry)

    def _wait_for_room(self, entry: int) -> None:
        """Wait until something has been freed, or more memory is mapped; `entry` waits for that."""
        begun = time.monotonic()
        seen, patience = self._transfers.freed, Patience(self._connection, self._transfers)
        while self._transfers.freed == seen:
            if not patience.wait():
                raise self._stalled(entry, _silence(begun))

    def _wait_for_part(self, incoming: Incoming, index: int) -> None:
        transfer = incoming.transfers[index]
        if transfer.phase is Phase.REQUESTED:
            begun = time.monotonic()
            patience = Patience(self._connection, self._transfers)
            while transfer.phase is Phase.REQUESTED:
                if not patience.wait():
                    raise self._stalled(incoming.parts[index].entry, _silence(begun))
        if transfer.error is not None:
            raise transfer.error

    def _stalled(self, entry: int, silence: str) -> ActivationLost:
        """Release waiting streams, and return the error for a thread whose wait timed out."""
        self._end_waits(self._transfers.handed_out.fail_all(_unconfirmed(silence)))
        return _unanswered(f"did not restore entry {entry}", silence)

    # --- into memory of its own -------------------------------------------------------------

    def _restore_in_place(
        self, record: StoredRange, uses: UpcomingUses, *, may_hand_out: bool
    ) -> torch.UntypedStorage | None:
        """Return the record's bytes; None if they must pass through the staging area."""
        self._refuse_in_capture(record.nbytes)
        incoming = self._begin(record)
        self.prefetch(uses)
        if incoming is None:
            return None
        storage = self._hand_out(incoming) if may_hand_out else None
        return self._finish(incoming) if storage is None else storage

    def _begin(self, record: StoredRange) -> Incoming | None:
        """Begin to restore a record into its own memory; None if the staging area is needed."""
        transfers, key = self._transfers, record.key
        if key not in transfers.incoming:
            self._request_in_place([record], is_demanded=True)
        with self._connection.lock:
            incoming = transfers.incoming.get(key)
            if incoming is None or incoming.storage is None:
                return None
            incoming.is_demanded = True
            return incoming

    def _hand_out(self, incoming: Incoming) -> torch.UntypedStorage | None:
        """Return a record's memory before the bytes are there; this thread's stream waits for them.

        Return None if the host has to wait instead: if the device has no cheap waits, outside of a
        backward pass (which ends with a check of the daemon's answers), if there are too few
        counters for the chunks, or if too many bytes remain handed out.
        """
        in_place, transfers = self._in_place, self._transfers
        assert in_place is not None
        with self._connection.lock:
            user = self._confirmation.begin() if in_place.waits_on_device else None
            if user is None:
                return None
            limit = max(transfers.window.limit - incoming.nbytes, 0)
            if transfers.handed_out.nbytes > limit and not self._wait_until(
                lambda: transfers.handed_out.nbytes <= limit
            ):
                return None
            if not transfers.handed_out.can_hand_out(incoming):
                return None
            storage = incoming.storage
            assert storage is not None
            in_place.await_restored(transfers.hand_out(incoming, user))
        self._lane.order_after_copies(storage)
        return storage

    def order_after_writes(self, storage: torch.UntypedStorage) -> None:
        """Order this thread's later work after all writes to a storage that was handed out."""
        transfers = self._transfers
        if transfers.handed_out:
            with self._connection.lock:
                tickets = transfers.handed_out.in_storage(storage)
                if tickets and self._in_place is not None:
                    self._in_place.await_restored(tickets)
        self._lane.order_after_copies(storage)

    def confirm(self, user: int) -> None:
        """Wait until the daemon has answered for all memory that a backward pass has used.

        Raises:
            CorruptBlob, ActivationLost: the daemon could not restore memory that was in use.
            DaemonLost: the daemon is gone.
        """
        transfers, begun = self._transfers, time.monotonic()
        with self._connection.lock:
            try:
                is_answered = self._wait_until(lambda: not transfers.handed_out.is_used_by(user))
            except DaemonLost as loss:
                raise lost_in_backward(loss, keeps=True) from loss
            if not is_answered:
                self._end_waits(transfers.handed_out.fail_all(_unconfirmed(_silence(begun))))
            failed = transfers.handed_out.failed.pop(user, None)
        if failed is not None and failed.error is not None:
            raise failed.error

    def end_stalled(self) -> None:
        """Release streams that wait for a daemon which has not answered for long (locked)."""
        transfers, now = self._transfers, time.monotonic()
        if not transfers.handed_out or transfers.answered != self._seen_answers:
            self._seen_answers, self._answered_at = transfers.answered, now
        elif now - self._answered_at > LONGEST_SECONDS:
            silence = f"answered nothing for {LONGEST_SECONDS:g} s"
            self._end_waits(transfers.handed_out.fail_all(_unconfirmed(silence)))

    def _end_waits(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            if self._in_place is not None:
                self._in_place.end_waits(ticket)

    def _wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Wait until `is_so()`; return False if the daemon stops answering before (locked)."""
        if is_so():
            return True
        patience = Patience(self._connection, self._transfers)
        while patience.wait():
            if is_so():
                return True
        return False

    def _finish(self, incoming: Incoming) -> torch.UntypedStorage:
        """Return the bytes once all chunks have arrived; nothing is handed out earlier."""
        with self._connection.lock:
            try:
                for index in range(len(incoming.parts)):
                    self._wait_for_part(incoming, index)
            finally:
                self._transfers.cancel(incoming.key)
        assert incoming.storage is not None
        # The memory may have been allocated on another stream.
        self._lane.order_after_copies(incoming.storage)
        return incoming.storage

    def _prefetch_in_place(self, uses: UpcomingUses) -> bool:
        """Request the next records; return False if the rest needs the staging area."""
        with self._connection.lock:
            taken = self._taken_bytes()
            if taken > self._allowed * REFILL_SHARE:
                return True
            wanted, seen = self._choose_prefetched(uses.unseen(), taken)
        for records in _batches(wanted):
            nbytes = sum([record.nbytes for record in records])
            with span("fetch ahead", nbytes, records[0].key):
                if not self._request_in_place(records, is_demanded=False):
                    return False
        uses.saw(seen)
        return True

    def _request_in_place(self, records: list[StoredRange], *, is_demanded: bool) -> bool:
        """Allocate records' memory and request their chunks; False if the daemon cannot map it."""
        storages = [self._allocate(record.nbytes, is_demanded=is_demanded) for record in records]
        with self._connection.lock:
            placed, can_all = self._placed(records, storages)
            while is_demanded and not can_all and self._await_mapping(records[0], storages[0]):
                placed, can_all = self._placed(records, storages)
            if placed:
                self._request_placed(placed, is_demanded=is_demanded)
        return can_all

    def _await_mapping(self, record: StoredRange, storage: torch.UntypedStorage | None) -> bool:
        """Wait for news about a record's memory; return False if the daemon has answered for it.

        Raises:
            ActivationLost: the daemon does not answer.
        """
        in_place = self._in_place
        assert in_place is not None
        if storage is None or not in_place.awaits_answer(storage.data_ptr(), record.nbytes):
            return False
        self._wait_for_room(record.parts[0].entry)
        return True

    def _request_placed(self, placed: list[_Placed], *, is_demanded: bool) -> None:
        assert self._in_place is not None
        sequence = self._in_place.publish_numbers(1)[
            0
        ]  # after all work that used the memory before
        try:
            for record, storage, place in placed:
                incoming = self._transfers.begin_in_place(
                    record.key, record.parts, storage, is_demanded=is_demanded
                )
                for index, part in enumerate(record.parts):
                    route = Mapped(place.segment, place.offset + part.begin)
                    self._transfers.restore(incoming, index, route, sequence)
            self._connection.flush()
        except BaseException:
            for record, _, _ in placed:  # nobody may wait for a restore that is only half requested
                self._transfers.cancel(record.key)
            raise

    def _placed(
        self, records: list[StoredRange], storages: list[torch.UntypedStorage | None]
    ) -> tuple[list[_Placed], bool]:
        """Return where the daemon can write each record, and whether it can map all of them."""
        assert self._in_place is not None
        placed: list[_Placed] = []
        for record, storage in zip(records, storages, strict=True):
            if storage is None or record.key in self._transfers.incoming:
                continue  # no memory to prefetch into, or another thread has begun the restore
            place = self._in_place.find(storage.data_ptr(), record.nbytes)
            send_offers(self._connection, self._in_place.segments)
            self._is_mapped = place is not None
            if place is None:
                return placed, False
            placed.append((record, storage, place))
        return placed, True

    def _allocate(self, nbytes: int, *, is_demanded: bool) -> torch.UntypedStorage | None:
        """Return memory; None if there is none to prefetch into."""
        try:
            if is_demanded:
                return self._lane.allocate(nbytes)
            with MayFail():
                return self._lane.allocate(nbytes)
        except torch.OutOfMemoryError:  # the observer has already given up prefetched memory
            if not is_demanded:
                return None
        with self._connection.lock:
            deadline = time.monotonic() + STALL_SECONDS
            while self._transfers.prefetched_bytes and self._connection.wait(deadline):
                pass
        return self._lane.allocate(nbytes)

    def _choose_prefetched(
        self, upcoming: Iterable[StoredRange | None], taken: int
    ) -> tuple[list[StoredRange], int]:
        """Return the next records to prefetch while there is room, and how many were looked at.

        Measuring the room beside the `taken` bytes costs as much as all the rest of a hook. So the
        room is measured only once a record is wanted.
        """
        incoming = self._transfers.incoming
        chosen: dict[int, StoredRange] = {}  # each record once, whatever its number of handles
        room: int | None = None
        count = 0
        for count, record in enumerate(upcoming, 1):
            if record is None or record.key in chosen or record.key in incoming:
                continue
            if not record.is_wanted:
                continue
            if room is None:
                room = self._room() - taken
            room -= record.nbytes
            if room < 0:
                return list(chosen.values()), count - 1
            chosen[record.key] = record
        return list(chosen.values()), count

    def _room(self) -> int:
        """Return how many bytes may be prefetched now."""
        assert self._in_place is not None
        transfers = self._transfers
        window = transfers.window
        headroom = self._in_place.headroom() if window.counts_headroom else 0
        self._allowed = window.prefetch_limit(headroom, transfers.held.nbytes)
        return self._allowed

    def _taken_bytes(self) -> int:
        """Return the bytes of memory that is not written yet, or that nobody has used yet."""
        return self._transfers.prefetched_bytes + self._transfers.handed_out.nbytes


def _silence(begun: float) -> str:
    """Return what the daemon did until a wait that had begun then ended; see Patience."""
    if time.monotonic() - begun < LONGEST_SECONDS:
        return f"answered nothing for {STALL_SECONDS:g} s"
    return f"answered only other requests for {LONGEST_SECONDS:g} s"


def _unconfirmed(silence: str) -> ActivationLost:
    what = "did not say whether it has restored what a backward pass has used"
    return _unanswered(what, silence)


def _unanswered(what: str, silence: str) -> ActivationLost:
    return ActivationLost(
        f"the daemon {what}, and {silence}: restart it if it hangs (see `stormd status` and its "
        "log), and repeat the step from its forward pass"
    )


def _batches(records: list[StoredRange]) -> list[list[StoredRange]]:
    """Return the records in groups: a request costs about the same for one and for several."""
    groups: list[list[StoredRange]] = []
    room = 0
    for record in records:
        if room <= 0:
            groups.append([])
            room = BATCH_BYTES
        groups[-1].append(record)
        room -= record.nbytes
    return groups
