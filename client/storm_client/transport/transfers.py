"""The transfers of stored ranges to the daemon and back: a state machine without socket or device.

One table finds a transfer by its number when an answer comes. All transfers share the staging area;
this module also decides which of its slots are given up, and for what.

Events come in as calls, which sessions make with their lock held. Messages for the daemon go to the
outbox, in this order. Nothing here waits, sends, copies or reads a clock.

If an interrupt ends a call, the call may be repeated; the tables are consistent even if it is not.
Python checks for signals only at calls and in loops. So state that must change together changes in
statements without a call. A call that ends such statements is to a function written in C, whose
work is done before Python checks for signals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from storm_client.errors import named
from storm_client.lanes import Route, Slot, Staged
from storm_client.planner import DeviceWindow
from storm_client.saved.ranges import Part, RangePhase
from storm_client.transport.handed_out import HandedOut
from storm_client.transport.held_sources import HeldSources
from storm_client.transport.staging_space import StagingSpace
from storm_client.transport.stores import Stores
from storm_client.transport.transfer import (
    ANSWERED,
    PENDING,
    Incoming,
    Outgoing,
    Phase,
    Transfer,
)
from stormd.protocol import (
    RESTORED_FIELDS,
    STORED_FIELDS,
    Admitted,
    Envelope,
    Failed,
    Message,
    PassOver,
    Refused,
    Rejected,
    Restore,
    Restored,
    RestoredParts,
    Store,
    Stored,
    StoredParts,
    unpack,
)
from stormd.protocol.timeline import RESTORED_SLOTS

__all__ = ["FAILURES", "Transfers", "number_of"]

AHEAD_SHARE = 0.75
"""Share of the staging area for chunks that are prefetched or kept there; the rest is for stores
and for chunks that are needed at once."""

AHEAD_PARTS = 64
"""Limit for the number of those chunks, however small they are."""

REFILL_SHARE = 0.75
"""Prefetching goes on only if at most this share of its room is in use: looking costs time, and
chunks requested together travel together."""


class Transfers:
    """All transfers of one session. The session's lock protects them and all that they refer to."""

    def __init__(
        self,
        numbers: Iterator[int],
        outbox: list[Envelope],
        *,
        staging_bytes: int,
        part_bytes: int,
        window: DeviceWindow,
        keeps_stored: bool = False,
    ) -> None:
        """Move chunks of at most `part_bytes`; number them by `numbers`; request in `outbox`.

        If `staging_bytes` is 0, there is no staging area until `open_staging`. With `keeps_stored`,
        stored chunks remain in the staging area while there is room. This is for devices where a
        restore is much slower than a copy.
        """
        self.window = window
        self.held = HeldSources(window)
        self.answered = 0
        """The number of answers about transfers so far; while it grows the daemon makes
        progress."""
        self.freed = 0
        """Grows with every event that may give room to a waiting thread."""
        self._numbers = numbers
        self._outbox = outbox
        self._keeps_stored = keeps_stored
        self.open_staging(staging_bytes)
        self._ahead_bytes = 0
        self._ahead_parts = 0
        self._pending: dict[int, Transfer] = {}
        self.stores = Stores(
            numbers,
            outbox,
            self._pending,
            part_bytes,
            keep=self._keep,
            free_slot=self._free_slot,
        )
        self.incoming: dict[int, Incoming] = {}
        """By the record's key: restores that have begun."""
        self.handed_out = HandedOut()
        """Restored memory that is in use before the daemon has answered."""
        self._kept: dict[Transfer, Incoming] = {}
        """Stored chunks that remain in their slots, the oldest first."""

    @property
    def is_storing(self) -> bool:
        """Whether the daemon still has to read or encode a chunk."""
        return any(isinstance(one.of, Outgoing) for one in self._pending.values())

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of memory of restores, begun or done, that no thread waits for."""
        into = set(self.incoming.values())
        for one in self._pending.values():
            if one.phase is Phase.DROPPED and isinstance(one.of, Incoming):
                into.add(one.of)
        return sum([one.nbytes for one in into if not one.is_demanded])

    # --- the staging area -------------------------------------------------------------------

    @property
    def has_staging(self) -> bool:
        """Whether there is a staging area."""
        return self._space.capacity > 0

    def open_staging(self, nbytes: int) -> None:
        """Use a staging area of `nbytes` from now on; there was none before."""
        space, limit = StagingSpace(nbytes), int(nbytes * AHEAD_SHARE)
        # No call is between these statements: either both are done or none.
        self._space = space
        self._ahead_limit = limit

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a slot; if there is no room, give up chunks that are not needed yet.

        The chunk that is needed last is given up first: the newest of the prefetched, else the
        oldest of the kept.
        """
        slot = self._space.allocate(nbytes)
        while slot is None and (self._drop_newest_fetched() or self._drop_oldest_kept()):
            slot = self._space.allocate(nbytes)
        return slot

    def free(self, slot: Slot) -> None:
        """Free a slot that no transfer occupies."""
        self._space.free(slot)
        self.freed += 1

    # --- restores ---------------------------------------------------------------------------

    def demand(self, key: int, parts: list[Part], sequence: int) -> Incoming:
        """Restore a record now: its chunks are not given up, because a thread waits for them.

        Chunks that were not requested yet are requested into the staging area, as far as there is
        room.
        """
        incoming = self.begin_staged(key, parts)
        incoming.is_demanded = True
        if len(incoming.transfers) < len(parts):
            self.request_ahead(incoming, 0, sequence)
        return incoming

    def begin_staged(self, key: int, parts: list[Part]) -> Incoming:
        """Begin to restore a record into the staging area, or return the restore that has begun."""
        incoming = self.incoming.get(key)
        if incoming is None:
            incoming = self.incoming[key] = Incoming(key, parts)
        return incoming

    def begin_in_place(
        self, key: int, parts: list[Part], storage: torch.UntypedStorage, *, is_demanded: bool
    ) -> Incoming:
        """Begin to restore a record into memory of its own, which the daemon maps."""
        incoming = Incoming(key, parts, storage, is_demanded=is_demanded)
        self.incoming[key] = incoming
        return incoming

    def restore(
        self, incoming: Incoming, index: int, route: Route, sequence: int, slot: Slot | None = None
    ) -> Transfer:
        """Ask the daemon to restore a chunk to where `route` says: into `slot`, if staged."""
        if self.held.has_grown:
            self.held.on_backward_begin()
        part = incoming.parts[index]
        number = self.handed_out.next_ticket(self._numbers, self._pending)
        message = Restore(
            ticket=number,
            entry=part.entry,
            segment=route.segment,
            offset=route.offset,
            nbytes=part.nbytes,
            sequence=sequence,
        )
        transfer = Transfer(
            number, part.nbytes, route, slot, incoming, Phase.REQUESTED, index, message=message
        )
        envelope = Envelope(number, message)
        # No call is between these statements, so either all are done or none: nobody waits for a
        # chunk that was never requested, and no memory that the daemon may write to is reused.
        self._pending[number] = transfer
        self.handed_out.counters[number % RESTORED_SLOTS] = number
        incoming.transfers[index] = transfer
        if slot is not None:
            self._ahead_bytes += slot.nbytes
            self._ahead_parts += 1
        self._outbox.append(envelope)
        return transfer

    def request_making_room(self, incoming: Incoming, index: int, sequence: int) -> Transfer | None:
        """Request a chunk into the staging area, and the chunks after it as far as there is room.

        If there is no room for the chunk, chunks that are not needed yet are given up. Next are the
        record's own later chunks, which may leave no free range of this length. Return None if
        there is still no room.
        """
        nbytes = incoming.parts[index].nbytes
        slot = self.reserve(nbytes)
        while slot is None and self._drop_last(incoming):
            slot = self._space.allocate(nbytes)
        if slot is None:
            return None
        transfer = self.restore(incoming, index, Staged(slot.offset), sequence, slot)
        self.request_ahead(incoming, index + 1, sequence)
        return transfer

    def request_ahead(self, incoming: Incoming, begin: int, sequence: int) -> bool:
        """Request a restore's chunks from `begin` on into the staging area, ahead of their use.

        Return False if the share for prefetched chunks has no room for all of them.
        """
        for index in range(begin, len(incoming.parts)):
            if index in incoming.transfers:
                continue
            slot = self.reserve_ahead(incoming.parts[index].nbytes)
            if slot is None:
                return False
            self.restore(incoming, index, Staged(slot.offset), sequence, slot)
        return True

    def reserve_ahead(self, nbytes: int) -> Slot | None:
        """Return a slot for a prefetched chunk, None if the share for those is used up."""
        return self._space.allocate(nbytes) if self._has_room_ahead(nbytes) else None

    @property
    def has_room_to_prefetch(self) -> bool:
        """Whether enough of the share for prefetched chunks is free to be worth a look ahead."""
        is_free = self._ahead_bytes <= self._ahead_limit * REFILL_SHARE
        return self.has_staging and is_free and self._ahead_parts <= AHEAD_PARTS // 2

    def finish_chunk(self, incoming: Incoming, index: int) -> None:
        """Note that a chunk's bytes have been used, or that nobody wants them."""
        transfer = incoming.transfers.get(index)
        if transfer is None:
            return
        slot = None
        is_pending = transfer.phase in (Phase.REQUESTED, Phase.DROPPED)
        phase = Phase.DROPPED if is_pending else Phase.DONE  # the daemon may be writing it
        # No call is between these statements: either all are done or none.
        transfer.phase = phase
        del incoming.transfers[index]
        if transfer in self._kept:
            del self._kept[transfer]
        if not is_pending:
            slot, transfer.slot = transfer.slot, None
        if slot is not None:
            self._ahead_bytes -= slot.nbytes
            self._ahead_parts -= 1
            self.free(slot)

    def cancel(self, key: int) -> None:
        """Give up the remaining chunks of a record's restore."""
        incoming = self.incoming.get(key)
        if incoming is None:
            return
        for index in list(incoming.transfers):
            self.finish_chunk(incoming, index)
        del self.incoming[key]

    def hand_out(self, incoming: Incoming, user: int) -> list[int]:
        """Let a backward pass use a record's memory on streams that wait; return the tickets.

        The memory is kept until the daemon has answered, because the daemon may be writing to it.
        """
        tickets = self.handed_out.hand_out(incoming, user)
        if incoming.transfers:
            self.cancel(incoming.key)
        else:
            self.incoming.pop(incoming.key, None)
        return tickets

    def cancel_prefetched(self) -> None:
        """Give up all memory of restores that no thread waits for: the device has none left."""
        for key, incoming in list(self.incoming.items()):
            if incoming.storage is not None and not incoming.is_demanded:
                self.cancel(key)

    def writes_to_memory(self) -> bool:
        """Return whether the daemon may be writing to memory that was allocated for restores."""
        pending = self._pending.values()
        return any(isinstance(one.of, Incoming) and one.slot is None for one in pending)

    @property
    def is_restoring(self) -> bool:
        """Whether the daemon may be writing to any memory, the staging area included."""
        return any(isinstance(one.of, Incoming) for one in self._pending.values())

    def resume(
        self, restore_status: Callable[[int], int | None] = lambda _: None, last_number: int = 0
    ) -> list[int]:
        """Repeat all requests that the previous daemon has not answered, in the same order.

        `restore_status` takes a restore's ticket and returns the status that the dead daemon's
        device has left. None means that the restore was not done and never will be by that device.
        A restore that was done is not repeated, because its memory may be in use. One that was not
        is repeated, because streams may wait for it. Streams may also wait for the number of any
        store, up to `last_number`, the last that was drawn.

        Returns the entries that the daemon is to store; if it has stored one already, it says so.
        Chunks that nobody wants are not requested again, and nobody writes them.
        """
        entries: list[int] = []
        last_asked = 0
        for number, transfer in sorted(self._pending.items()):
            if transfer.phase is Phase.DROPPED:
                transfer.move_to(Phase.DONE)
                self._free_slot(transfer)
                self._end(transfer)
                continue
            if isinstance(transfer.of, Outgoing):
                entries.append(number)
            elif (
                self.handed_out.has_own_counter(transfer)
                and (status := restore_status(number)) is not None
            ):
                self._on_answer(number, _restored(transfer, status))
                continue
            message = transfer.message
            assert message is not None, "a transfer that was not asked for is awaited"
            self._outbox.append(Envelope(number, message))
            if isinstance(message, Store):
                last_asked = max(last_asked, message.sequence)
        if last_number > last_asked:
            self._outbox.append(Envelope(0, PassOver(last_number)))
        return entries

    def end(self) -> None:
        """Drop all memory: no answer will come any more."""
        self._pending.clear()
        self.incoming.clear()
        self.handed_out.clear()
        self.held.clear()
        self._kept.clear()

    # --- answers ----------------------------------------------------------------------------

    def on_offers_answered(self) -> None:
        """Note that the daemon has said which memory it maps, for which a thread may wait."""
        self.freed += 1

    def on_reply(self, request: int, message: Message) -> None:
        """Handle the daemon's answer about a transfer; ignore any other message."""
        match message:
            case RestoredParts():
                for (ticket,) in unpack(message.places, RESTORED_FIELDS):
                    self._on_answer(ticket, message)
            case StoredParts():
                for entry, nbytes in unpack(message.places, STORED_FIELDS):
                    self._on_stored(entry, nbytes, message.mode)
            case _:
                self._on_answer(number_of(request, message), message)

    def _on_stored(self, number: int, nbytes: int, mode: str) -> None:
        transfer = self._pending.get(number)
        if transfer is not None and isinstance(transfer.of, Outgoing):
            self.answered += 1
            self.stores.stored(transfer, transfer.of, nbytes, mode)
            self._end(transfer)

    def _on_answer(self, number: int, message: Message) -> None:
        transfer = self._pending.get(number)
        if transfer is None:
            return
        self.answered += 1
        if isinstance(transfer.of, Incoming):
            if isinstance(message, (Restored, RestoredParts, *FAILURES)):
                self._on_restore_answer(transfer, message)
        elif self.stores.on_answer(transfer, transfer.of, message):
            self._end(transfer)

    def _on_restore_answer(self, transfer: Transfer, message: Message) -> None:
        """Handle the answer about a restored chunk: it has arrived, or cannot be restored."""
        if transfer.phase in (Phase.DROPPED, Phase.DONE):  # DONE: an interrupt came here before
            transfer.move_to(Phase.DONE)
            self._free_slot(transfer)
        elif transfer.phase is Phase.REQUESTED:
            if isinstance(message, FAILURES):
                transfer.error = named(message.kind, message.detail)  # for whoever needs it
            transfer.move_to(Phase.ARRIVED if transfer.error is None else Phase.FAILED)
        elif transfer.number in self.handed_out:
            if isinstance(message, FAILURES):
                self.handed_out.fail(transfer, named(message.kind, message.detail), Phase.FAILED)
            else:
                self.handed_out.finish(transfer, Phase.DONE)
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        """Forget an answered transfer, and the memory that was kept only for it."""
        del self._pending[transfer.number]
        self.freed += 1

    # --- helpers ----------------------------------------------------------------------------

    def _free_slot(self, transfer: Transfer) -> None:
        """Free a transfer's slot, if it has one."""
        is_back = isinstance(transfer.of, Incoming)
        slot, transfer.slot = transfer.slot, None
        if slot is None:
            return
        if is_back:
            self._ahead_bytes -= slot.nbytes
            self._ahead_parts -= 1
        self.free(slot)

    def _keep(self, transfer: Transfer, out: Outgoing) -> bool:
        """Leave a stored chunk in its slot, as if it was restored already, if there is room."""
        record, slot = out.living(), transfer.slot
        if not self._keeps_stored or record is None or slot is None or out.refusal is not None:
            return False
        if not isinstance(transfer.route, Staged) or record.phase not in _FETCHABLE:
            return False
        while not self._has_room_ahead(slot.nbytes):
            if not self._drop_oldest_kept():
                return False
        incoming = self.begin_staged(record.key, record.parts)
        index = next(i for i, part in enumerate(record.parts) if part.entry == transfer.number)
        if index in incoming.transfers or incoming.storage is not None:
            return False
        kept = Transfer(
            transfer.number, slot.nbytes, transfer.route, slot, incoming, Phase.ARRIVED, index
        )
        # No call is between these statements: either all are done or none.
        transfer.slot = None
        incoming.transfers[index] = kept
        self._ahead_bytes += slot.nbytes
        self._ahead_parts += 1
        self._kept[kept] = incoming
        return True

    def _has_room_ahead(self, nbytes: int) -> bool:
        return self._ahead_bytes + nbytes <= self._ahead_limit and self._ahead_parts < AHEAD_PARTS

    def _drop_oldest_kept(self) -> bool:
        for kept, incoming in self._kept.items():
            if not incoming.is_demanded:
                self.finish_chunk(incoming, kept.index)
                return True
        return False

    def _drop_newest_fetched(self) -> bool:
        if self._ahead_parts == len(self._kept):
            return False
        for incoming in reversed(self.incoming.values()):
            if incoming.is_demanded or incoming.storage is not None:
                continue
            for transfer in reversed(incoming.transfers.values()):
                if transfer.phase in ANSWERED and transfer not in self._kept:
                    self.finish_chunk(incoming, transfer.index)
                    return True
        return False

    def _drop_last(self, incoming: Incoming) -> bool:
        for index in sorted(incoming.transfers, reverse=True):
            if incoming.transfers[index].phase in ANSWERED:
                self.finish_chunk(incoming, index)
                return True
        return False

    # --- invariants, which hold between any two calls ---------------------------------------

    def assert_invariants(self) -> None:
        """Check the tables against each other, and every count against what it counts."""
        self._space.assert_invariants()
        for number, transfer in self._pending.items():
            assert transfer.number == number
            assert transfer.phase in PENDING, transfer
        for key, incoming in self.incoming.items():
            assert incoming.key == key
            for transfer in incoming.transfers.values():
                assert transfer.of is incoming
                assert transfer.phase is Phase.REQUESTED or transfer.phase in ANSWERED, transfer
                assert (transfer.phase is Phase.REQUESTED) == (transfer.number in self._pending)
        back = {one for way in self.incoming.values() for one in way.transfers.values()}
        back |= {one for one in self._pending.values() if isinstance(one.of, Incoming)}
        slots = [one.slot for one in back if one.slot is not None]
        assert self._ahead_bytes == sum(slot.nbytes for slot in slots)
        assert self._ahead_parts == len(slots)
        self.handed_out.assert_invariants(self._pending)
        self.held.assert_invariants()
        for kept, incoming in self._kept.items():
            assert kept.phase is Phase.ARRIVED
            assert kept in incoming.transfers.values()


FAILURES = (Failed, Refused)
"""Messages that say that something is not available."""

_FETCHABLE = {RangePhase.OFFLOADING, RangePhase.OFFLOADED}


def _restored(transfer: Transfer, status: int) -> Message:
    """Return the answer that a daemon would have given for its decoder's status."""
    message = transfer.message
    assert isinstance(message, Restore)
    if not status:
        return Restored(message.ticket)
    detail = f"entry {message.entry} is damaged: its decoder left status {status}"
    return Failed(message.ticket, message.entry, "CorruptBlob", detail)


def number_of(request: int, message: Message) -> int:
    """Return the number of the transfer that a message answers; else the request's number."""
    match message:
        case Admitted() | Stored() | Rejected():
            return message.entry
        case Restored():
            return message.ticket
        case Failed():
            return message.ticket or message.entry
    return request
