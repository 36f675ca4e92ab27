"""Brings stored ranges back: on demand, and ahead of it.

They come through the staging area, where what was prefetched waits and gives way to anything
that is needed now; or into memory of their own that the daemon has mapped. Where that is so, memory
that it may still write to is kept, whoever has lost interest in it, until it has answered for every
chunk; and what is prefetched stays within the device window.

A thread that fetches through the staging area copies each chunk out as it comes, and waits for one
with no slot that it could give up, so a range of any size passes through an area of two chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from storm_client.errors import ActivationLost, DaemonLost, UsageError, lost_in_backward
from storm_client.lanes import Lane, Mapped
from storm_client.lanes.segments import tell
from storm_client.monitoring.profiler_ranges import span
from storm_client.saved.ranges import Part, RangePhase, StoredRange, UpcomingUses, Use
from storm_client.transport.confirmation import Confirmation
from storm_client.transport.connection import Connection
from storm_client.transport.memory_pressure import MayFail
from storm_client.transport.patience import LONGEST_SECONDS, STALL_SECONDS, Patience
from storm_client.transport.transfer import Incoming, Phase, Transfer
from storm_client.transport.transfers import REFILL_SHARE, Transfers

__all__ = ["Inbound"]

TOGETHER_BYTES = 64 << 20
"""Of records prefetched: so many share an event on the stream and a frame to the daemon."""

LAST_WRITES_SECONDS = 0.5
"""How long the memory of restores that a dead daemon left in flight is not given back: nothing
tells when the device has ended a dead process's kernels, which takes milliseconds."""

_Placed = tuple[StoredRange, torch.UntypedStorage, Mapped]


class Inbound:
    """Of one session, for any thread; methods marked "locked" are called with its lock held."""

    def __init__(self, connection: Connection, lane: Lane, transfers: Transfers) -> None:
        """Ask over `connection` for what `transfers` decide; `lane` is attached."""
        self._connection = connection
        self._lane = lane
        self._transfers = transfers
        self._in_place = lane.in_place
        self._is_mapped = False  # whether the daemon could map the memory that was allocated last
        self._allowed = transfers.window.limit  # bytes that may be taken early, as last measured
        self._confirmation = Confirmation(self.confirm)
        self._seen_answers, self._answered_at = 0, time.monotonic()

    def fetch(self, use: Use, *, may_hand_out: bool = False) -> torch.UntypedStorage:
        """Return the bytes of a use's record in new memory, and begin to fetch what is next.

        Where it `may_hand_out` memory before the bytes are there, the thread's stream waits for
        them, and the backward pass ends with `confirm`.

        This thread has made the record RETURNING; behind this it is not, whatever happens.

        Raises:
            CorruptBlob, ActivationLost: the daemon cannot give the bytes back.
            DaemonLost: it is gone.
            UsageError: a CUDA graph is being captured.
        """
        record, connection = use.record, self._connection
        storage = None
        try:
            if self._in_place is not None:
                storage = self._fetch_in_place(record, use.step, may_hand_out=may_hand_out)
            if storage is None:
                storage = self.bring(record.key, record.parts, record.nbytes, use.step)
        finally:
            with connection.lock:
                if storage is not None:
                    record.came_back(storage, use)
                if record.phase is RangePhase.RETURNING:
                    record.move_to(RangePhase.AWAY)
                if connection.waiting:
                    connection.notify()
        return storage

    def bring(
        self, key: int, parts: list[Part], nbytes: int, uses: UpcomingUses | None = None
    ) -> torch.UntypedStorage:
        """Return `nbytes` in new memory: `parts`, by way of the staging area.

        As slots come free they are used to fetch what is used next.

        Raises:
            CorruptBlob, ActivationLost, DaemonLost, UsageError: as `fetch`.
        """
        self._refuse_in_capture(nbytes)
        transfers, connection = self._transfers, self._connection
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
                        self._go_on(incoming, index, uses)
                    transfer = incoming.transfers.get(index)
                    if transfer is None or not transfer.is_wanted:
                        transfer = self._requested(incoming, index)
                    self._wait_for_part(incoming, index)
                    slot = transfer.slot
                    assert slot is not None, transfer
                self._lane.unstage(slot, destination, part.begin)
        finally:
            with connection.lock:
                transfers.forget(key)
                if connection.waiting:
                    connection.notify()
        if uses is None or not uses.is_due or not transfers.looks_ahead:
            return destination
        if upcoming := uses.unseen():
            self._look_ahead_staged(uses, upcoming)
        return destination

    def look_ahead(self, uses: UpcomingUses) -> None:
        """Begin to fetch what is used next, in this order, as far as there is room."""
        if not uses.is_due:
            return
        try:
            is_done = self._in_place is not None and self._allocate_ahead(uses)
            if not is_done and self._transfers.looks_ahead:
                self._look_ahead_staged(uses, uses.unseen())
        except DaemonLost:
            pass  # who needs it is told

    def close(self) -> None:
        """Let all memory go; what a dead daemon was writing to is kept for its last writes."""
        with self._connection.lock:
            is_written = self._transfers.writes_to_memory()
        if is_written:
            time.sleep(LAST_WRITES_SECONDS)
        with self._connection.lock:
            self._transfers.end()

    def _refuse_in_capture(self, nbytes: int) -> None:
        """Raise where this thread's work is captured: a replay would not bring the bytes again."""
        if self._lane.is_capturing():
            raise UsageError(
                f"the {nbytes} bytes of a tensor that was stored before a CUDA graph is captured "
                "are with the daemon, and needed in the capture: capture the forward pass with its "
                "backward pass, or save what the capture needs without offload"
            )

    def _look_ahead_staged(
        self, uses: UpcomingUses, upcoming: Iterable[StoredRange | None]
    ) -> None:
        """Request what is used next, the `upcoming`, through the staging area."""
        with self._connection.lock, suppress(DaemonLost):
            self._stage_ahead(uses, upcoming)
            if self._connection.outbox:
                self._connection.flush()

    # --- through the staging area, with the lock held ---------------------------------------

    def _go_on(self, incoming: Incoming, index: int, uses: UpcomingUses | None) -> None:
        """Use the slot of the chunk before `index`, which has been copied, for what comes next."""
        transfers, left = self._transfers, len(incoming.parts) - index
        transfers.take(incoming, index - 1)
        self._connection.notify()
        if len(incoming.transfers) < left:
            transfers.request_ahead(incoming, index, self._lane.publish())
        if uses is not None and transfers.looks_ahead:
            self._stage_ahead(uses, uses.unseen())
        if self._connection.outbox:
            self._connection.flush()

    def _stage_ahead(self, uses: UpcomingUses, upcoming: Iterable[StoredRange | None]) -> None:
        """Request what is used next, the `upcoming`, as far as there is room."""
        if self._is_mapped:
            return  # what can come in place does, and the rest is fetched when it is needed
        seen = 0
        for record in upcoming:
            if record is not None and record.is_wanted and not self._begin_staged(record):
                break
            seen += 1
        if seen:
            uses.saw(seen)

    def _begin_staged(self, record: StoredRange) -> bool:
        """Request a record's chunks; False where there is no room for all of them."""
        incoming = self._transfers.expect(record.key, record.parts)
        if incoming.storage is not None or len(incoming.transfers) == len(incoming.parts):
            return True
        with span("fetch ahead", record.nbytes, record.key):
            return self._transfers.request_ahead(incoming, 0, self._lane.publish())

    def _requested(self, incoming: Incoming, index: int) -> Transfer:
        """Return a chunk's transfer, waiting until there is room to request it."""
        transfers = self._transfers
        transfers.take(incoming, index)  # where giving it up was interrupted
        while True:
            self._connection.flush()  # before others' room is taken
            transfer = transfers.require(incoming, index, self._lane.publish())
            if transfer is not None:
                return transfer
            self._wait_for_room(incoming, index)

    def _wait_for_room(self, incoming: Incoming, index: int) -> None:
        seen, patience = self._transfers.freed, Patience(self._connection, self._transfers)
        while self._transfers.freed == seen:
            if not patience.wait():
                raise self._stalled(incoming, index)

    def _wait_for_part(self, incoming: Incoming, index: int) -> None:
        transfer = incoming.transfers[index]
        if transfer.phase is Phase.REQUESTED:
            patience = Patience(self._connection, self._transfers)
            while transfer.phase is Phase.REQUESTED:
                if not patience.wait():
                    raise self._stalled(incoming, index)
        if transfer.error is not None:
            raise transfer.error

    def _stalled(self, incoming: Incoming, index: int) -> ActivationLost:
        """Return the error of a thread that waits in vain; streams that wait are released."""
        self._release(self._transfers.handed_out.fail_all(_unanswered()))
        return ActivationLost(
            f"the daemon did not restore entry {incoming.parts[index].entry}, and answered nothing "
            f"for {STALL_SECONDS:g} s or others alone for {LONGEST_SECONDS:g}; see `stormd status` "
            "and its log"
        )

    # --- into memory of its own -------------------------------------------------------------

    def _fetch_in_place(
        self, record: StoredRange, uses: UpcomingUses, *, may_hand_out: bool
    ) -> torch.UntypedStorage | None:
        """Return the record's bytes; None where they must take the staging area."""
        self._refuse_in_capture(record.nbytes)
        incoming = self._begin(record)
        self.look_ahead(uses)
        if incoming is None:
            return None
        storage = self._handed_out(incoming) if may_hand_out else None
        return self._finish(incoming) if storage is None else storage

    def _begin(self, record: StoredRange) -> Incoming | None:
        """Have a record fetched now; None where its bytes must take the staging area."""
        transfers, key = self._transfers, record.key
        if key not in transfers.incoming:
            self._open([record], is_demanded=True)
        with self._connection.lock:
            incoming = transfers.incoming.get(key)
            if incoming is None or incoming.storage is None:
                return None
            incoming.is_demanded = True
            return incoming

    def _handed_out(self, incoming: Incoming) -> torch.UntypedStorage | None:
        """Return a record's memory before the bytes are there: this thread's stream waits for them.

        None where the host has to wait instead: outside of a backward pass, which ends with a look
        at what the daemon has answered, and where something else could act on gradients before.
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
            if not transfers.handed_out.may_take(incoming):
                return None
            storage = incoming.storage
            assert storage is not None
            in_place.await_restored(transfers.hand_out(incoming, user))
        self._lane.use(storage)
        return storage

    def use(self, storage: torch.UntypedStorage) -> None:
        """Order this thread's later work behind all that fills a storage that was handed out."""
        transfers = self._transfers
        if transfers.handed_out:
            with self._connection.lock:
                tickets = transfers.handed_out.in_storage(storage)
                if tickets and self._in_place is not None:
                    self._in_place.await_restored(tickets)
        self._lane.use(storage)

    def confirm(self, user: int) -> None:
        """Wait until the daemon has answered for all that a backward pass has used.

        Raises:
            CorruptBlob, ActivationLost: it could not restore something that was in use.
            DaemonLost: it is gone.
        """
        transfers = self._transfers
        with self._connection.lock:
            try:
                is_answered = self._wait_until(lambda: not transfers.handed_out.is_used_by(user))
            except DaemonLost as loss:
                raise lost_in_backward(loss, keeps=True) from loss
            if not is_answered:
                self._release(transfers.handed_out.fail_all(_unanswered()))
            failed = transfers.handed_out.failed.pop(user, None)
        if failed is not None and failed.error is not None:
            raise failed.error

    def end_stalled(self) -> None:
        """Release streams that wait for a daemon that has answered nothing for long (locked)."""
        transfers, now = self._transfers, time.monotonic()
        if not transfers.handed_out or transfers.answered != self._seen_answers:
            self._seen_answers, self._answered_at = transfers.answered, now
        elif now - self._answered_at > LONGEST_SECONDS:
            self._release(transfers.handed_out.fail_all(_unanswered()))

    def _release(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            if self._in_place is not None:
                self._in_place.release(ticket)

    def _wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Return True as soon as it is so; False where the daemon answers nothing (locked)."""
        if is_so():
            return True
        patience = Patience(self._connection, self._transfers)
        while patience.wait():
            if is_so():
                return True
        return False

    def _finish(self, incoming: Incoming) -> torch.UntypedStorage:
        """Return the bytes once all chunks are there; nothing is handed out before."""
        with self._connection.lock:
            try:
                for index in range(len(incoming.parts)):
                    self._wait_for_part(incoming, index)
            finally:
                self._transfers.forget(incoming.key)
        assert incoming.storage is not None
        self._lane.use(incoming.storage)  # which may have been allocated on another stream
        return incoming.storage

    def _allocate_ahead(self, uses: UpcomingUses) -> bool:
        """Request what is used next; False where the rest has to take the staging area."""
        with self._connection.lock:
            taken = self._taken_bytes()
            if taken > self._allowed * REFILL_SHARE:
                return True
            wanted, seen = self._chosen(uses.unseen(), taken)
        for records in _together(wanted):
            nbytes = sum([record.nbytes for record in records])
            with span("fetch ahead", nbytes, records[0].key):
                if not self._open(records, is_demanded=False):
                    return False
        uses.saw(seen)
        return True

    def _open(self, records: list[StoredRange], *, is_demanded: bool) -> bool:
        """Allocate records' memory and request their chunks; False where the daemon cannot."""
        storages = [self._allocate(record.nbytes, is_demanded=is_demanded) for record in records]
        with self._connection.lock:
            placed, can_all = self._placed(records, storages)
            if placed:
                self._request_placed(placed, is_demanded=is_demanded)
        return can_all

    def _request_placed(self, placed: list[_Placed], *, is_demanded: bool) -> None:
        assert self._in_place is not None
        sequence = self._in_place.produced(1)[0]  # behind whoever had the memory before
        try:
            for record, storage, place in placed:
                incoming = self._transfers.expect_into(
                    record.key, record.parts, storage, is_demanded=is_demanded
                )
                for index, part in enumerate(record.parts):
                    route = Mapped(place.segment, place.offset + part.begin)
                    self._transfers.restore(incoming, index, route, sequence)
            self._connection.flush()
        except BaseException:
            for record, _, _ in placed:  # nobody may wait for what has not all been asked for
                self._transfers.forget(record.key)
            raise

    def _placed(
        self, records: list[StoredRange], storages: list[torch.UntypedStorage | None]
    ) -> tuple[list[_Placed], bool]:
        """Return where the daemon can write each record; False with it if it cannot write all."""
        assert self._in_place is not None
        placed: list[_Placed] = []
        for record, storage in zip(records, storages, strict=True):
            if storage is None or record.key in self._transfers.incoming:
                continue  # no memory for what nobody waits for; or another thread has begun it
            place = self._in_place.find(storage.data_ptr(), record.nbytes)
            tell(self._connection, self._in_place.segments)
            self._is_mapped = place is not None
            if place is None:
                return placed, False
            placed.append((record, storage, place))
        return placed, True

    def _allocate(self, nbytes: int, *, is_demanded: bool) -> torch.UntypedStorage | None:
        """Return memory; None where there is none for what nobody waits for."""
        try:
            if is_demanded:
                return self._lane.allocate(nbytes)
            with MayFail():
                return self._lane.allocate(nbytes)
        except torch.OutOfMemoryError:  # the observer has had what was prefetched given up
            if not is_demanded:
                return None
        with self._connection.lock:
            deadline = time.monotonic() + STALL_SECONDS
            while self._transfers.early_bytes and self._connection.wait(deadline):
                pass
        return self._lane.allocate(nbytes)

    def _chosen(
        self, upcoming: Iterable[StoredRange | None], taken: int
    ) -> tuple[list[StoredRange], int]:
        """Return the next records to fetch, as many as there is room for, and how far that was.

        Measuring the room beside what is `taken` costs as much as all the rest of a hook, so it is
        done where it counts.
        """
        incoming = self._transfers.incoming
        chosen: dict[int, StoredRange] = {}  # each once, however many handles it has
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
        """Return how much may be fetched early now."""
        assert self._in_place is not None
        transfers = self._transfers
        self._allowed = transfers.window.ahead(self._in_place.headroom(), transfers.held.nbytes)
        return self._allowed

    def _taken_bytes(self) -> int:
        """Return how much lies here that the daemon has not written, or that nobody has used."""
        return self._transfers.early_bytes + self._transfers.handed_out.nbytes


def _unanswered() -> ActivationLost:
    return ActivationLost(
        "the daemon did not say whether it has restored what a backward pass has used, and "
        f"answered nothing for {STALL_SECONDS:g} s or others alone for {LONGEST_SECONDS:g}; see "
        "`stormd status` and its log"
    )


def _together(records: list[StoredRange]) -> list[list[StoredRange]]:
    """Return the records in groups: what one costs is mostly the same for however many."""
    groups: list[list[StoredRange]] = []
    room = 0
    for record in records:
        if room <= 0:
            groups.append([])
            room = TOGETHER_BYTES
        groups[-1].append(record)
        room -= record.nbytes
    return groups
