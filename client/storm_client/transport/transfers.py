"""The ways of stored ranges to the daemon and back: a state machine without a socket or a device.

One table finds a transfer by its number when an answer comes. All share the staging area: what lies
there, and what of it gives way to what, is decided here, too.

What happens comes in as calls, which sessions make with their lock held; what the daemon has to be
told goes to the outbox, in this order. Nothing here waits, sends, copies or looks at a clock.

A call that an interrupt ended may be made again, and leaves the tables as they should be if it is
not. Python looks for signals at calls and loops alone, so what must change together does so in
statements without one, and a call that ends them is that of a function written in C, whose work is
done before signals are looked at.
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
"""Of the staging area, for what was prefetched or is kept there; the rest is left to stores and
to what is needed at once."""

AHEAD_PARTS = 64
"""Chunks of that kind at most, however small they are."""

REFILL_SHARE = 0.75
"""Only when no more than this share of what may be prefetched is in use is more fetched: looking
is not free of charge, and what is requested together travels together."""


class Transfers:
    """All transfers of one session; its lock protects them, and whatever they refer to."""

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
        """Move chunks of at most `part_bytes`, each numbered by `numbers`, asked for in `outbox`.

        `keeps_stored` says that stored chunks wait in the staging area while there is room: where
        the way back is much slower than a copy.
        """
        self.window = window
        self.held = HeldSources(window)
        self.answered = 0
        """Answers about transfers so far: while it grows the daemon gets on."""
        self.freed = 0
        """Grows with whatever gives room to a thread that waits for some."""
        self._numbers = numbers
        self._outbox = outbox
        self._keeps_stored = keeps_stored
        self._space = StagingSpace(staging_bytes)
        self._ahead_limit = int(staging_bytes * AHEAD_SHARE)
        self._ahead_bytes = 0
        self._ahead_parts = 0
        self._pending: dict[int, Transfer] = {}
        self.stores = Stores(
            numbers,
            outbox,
            self._pending,
            part_bytes,
            keep=self._keep,
            give_back=self._give_back,
        )
        self.incoming: dict[int, Incoming] = {}
        """By the record's key: the ways back that have begun."""
        self.handed_out = HandedOut()
        """What is in use before the daemon has answered for it."""
        self._kept: dict[Transfer, Incoming] = {}
        """Chunks that were stored and lie in their slots still, the oldest first."""

    @property
    def is_storing(self) -> bool:
        """Whether the daemon has yet to read or encode something."""
        return any(isinstance(one.of, Outgoing) for one in self._pending.values())

    @property
    def early_bytes(self) -> int:
        """Bytes of the memory that is restored into, or was begun to be, and nobody waits for."""
        into = set(self.incoming.values())
        for one in self._pending.values():
            if one.phase is Phase.DROPPED and isinstance(one.of, Incoming):
                into.add(one.of)
        return sum([one.nbytes for one in into if not one.is_demanded])

    # --- the staging area -------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a slot, giving up what waits to be needed where there is no other room.

        The one that is needed last goes first: of what was prefetched the newest, else what has
        been kept longest.
        """
        slot = self._space.allocate(nbytes)
        while slot is None and (self._drop_newest_fetched() or self._drop_oldest_kept()):
            slot = self._space.allocate(nbytes)
        return slot

    def free(self, slot: Slot) -> None:
        """Take a slot back that no transfer occupies."""
        self._space.free(slot)
        self.freed += 1

    # --- back -------------------------------------------------------------------------------

    def demand(self, key: int, parts: list[Part], sequence: int) -> Incoming:
        """Have a record fetched now: what a thread waits for is not given up.

        What has not been requested of it is, through the staging area as far as there is room.
        """
        incoming = self.expect(key, parts)
        incoming.is_demanded = True
        if len(incoming.transfers) < len(parts):
            self.request_ahead(incoming, 0, sequence)
        return incoming

    def expect(self, key: int, parts: list[Part]) -> Incoming:
        """Begin to fetch a record ahead, through the staging area, or go on with it."""
        incoming = self.incoming.get(key)
        if incoming is None:
            incoming = self.incoming[key] = Incoming(key, parts)
        return incoming

    def expect_into(
        self, key: int, parts: list[Part], storage: torch.UntypedStorage, *, is_demanded: bool
    ) -> Incoming:
        """Begin to fetch a record into memory of its own, which the daemon maps."""
        incoming = Incoming(key, parts, storage, is_demanded=is_demanded)
        self.incoming[key] = incoming
        return incoming

    def restore(
        self, incoming: Incoming, index: int, route: Route, sequence: int, slot: Slot | None = None
    ) -> Transfer:
        """Have the daemon restore a chunk to where `route` says: into `slot`, if staged."""
        if self.held.has_grown:
            self.held.turned()
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
        # All of it or nothing, for no call is between: nobody waits for what was never asked for,
        # and nobody else gets what the daemon may write to.
        self._pending[number] = transfer
        self.handed_out.counters[number % RESTORED_SLOTS] = number
        incoming.transfers[index] = transfer
        if slot is not None:
            self._ahead_bytes += slot.nbytes
            self._ahead_parts += 1
        self._outbox.append(envelope)
        return transfer

    def require(self, incoming: Incoming, index: int, sequence: int) -> Transfer | None:
        """Request a chunk through the staging area, and those behind it as far as there is room.

        Where there is none for the chunk itself, what only waits to be needed is given up, and then
        the record's own later chunks, which may lie so that no free range is as long as this one;
        None where even that is not enough now.
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
        """Request its chunks from `begin` on through the staging area, before they are needed.

        False where what is prefetched has no room for all of them now.
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
        """Return a slot for what is fetched before it is needed, None where its share is used."""
        return self._space.allocate(nbytes) if self._has_room_ahead(nbytes) else None

    @property
    def looks_ahead(self) -> bool:
        """Whether enough of the staging area's share is free to be worth a look."""
        is_free = self._ahead_bytes <= self._ahead_limit * REFILL_SHARE
        return is_free and self._ahead_parts <= AHEAD_PARTS // 2

    def take(self, incoming: Incoming, index: int) -> None:
        """Note that a chunk's bytes have been used, or that nobody wants them."""
        transfer = incoming.transfers.get(index)
        if transfer is None:
            return
        slot = None
        is_pending = transfer.phase in (Phase.REQUESTED, Phase.DROPPED)
        phase = Phase.DROPPED if is_pending else Phase.DONE  # the daemon may be writing it
        # All of it or nothing, for no call is between.
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

    def forget(self, key: int) -> None:
        """Give up what is left of a record's way back."""
        incoming = self.incoming.get(key)
        if incoming is None:
            return
        for index in list(incoming.transfers):
            self.take(incoming, index)
        del self.incoming[key]

    def hand_out(self, incoming: Incoming, user: int) -> list[int]:
        """Let a backward pass use a record's memory on streams that wait; return the tickets.

        The memory is kept until the daemon has answered: it may be writing to it.
        """
        tickets = self.handed_out.take_over(incoming, user)
        if incoming.transfers:
            self.forget(incoming.key)
        else:
            self.incoming.pop(incoming.key, None)
        return tickets

    def forget_early(self) -> None:
        """Give up all memory that was taken early: there is none left."""
        for key, incoming in list(self.incoming.items()):
            if incoming.storage is not None and not incoming.is_demanded:
                self.forget(key)

    def writes_to_memory(self) -> bool:
        """Tell whether the daemon may be writing to memory that was allocated for that."""
        pending = self._pending.values()
        return any(isinstance(one.of, Incoming) and one.slot is None for one in pending)

    @property
    def is_restoring(self) -> bool:
        """Whether the daemon may be writing anywhere, the staging area included."""
        return any(isinstance(one.of, Incoming) for one in self._pending.values())

    def resume(
        self, outcome: Callable[[int], int | None] = lambda _: None, last_number: int = 0
    ) -> list[int]:
        """Ask another daemon for all that the one before has not answered, in the same order.

        `outcome` returns, by its ticket, the status that the dead daemon's device has left of a
        restore that it has done, None for one that it has not, and never will: what is done is not
        done again, because the memory may be in use, and what is not is, as streams may wait for
        it. They may wait for the number of any store, up to the `last_number` that was drawn.

        Returns the entries that it is to store: it may have stored them already, which it says.
        What nobody wants any more is not asked for again, as nobody writes it.
        """
        entries: list[int] = []
        last_asked = 0
        for number, transfer in sorted(self._pending.items()):
            if transfer.phase is Phase.DROPPED:
                transfer.move_to(Phase.DONE)
                self._give_back(transfer)
                self._end(transfer)
                continue
            if isinstance(transfer.of, Outgoing):
                entries.append(number)
            elif self.handed_out.tells(transfer) and (status := outcome(number)) is not None:
                self._answered(number, _restored(transfer, status))
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
        """Let all memory go: no answer will come any more."""
        self._pending.clear()
        self.incoming.clear()
        self.handed_out.clear()
        self.held.clear()
        self._kept.clear()

    # --- answers ----------------------------------------------------------------------------

    def reply(self, request: int, message: Message) -> None:
        """Handle the daemon's answer about a transfer; about anything else, do nothing."""
        match message:
            case RestoredParts():
                for (ticket,) in unpack(message.places, RESTORED_FIELDS):
                    self._answered(ticket, message)
            case StoredParts():
                for entry, nbytes in unpack(message.places, STORED_FIELDS):
                    self._is_stored(entry, nbytes, message.mode)
            case _:
                self._answered(number_of(request, message), message)

    def _is_stored(self, number: int, nbytes: int, mode: str) -> None:
        transfer = self._pending.get(number)
        if transfer is not None and isinstance(transfer.of, Outgoing):
            self.answered += 1
            self.stores.stored(transfer, transfer.of, nbytes, mode)
            self._end(transfer)

    def _answered(self, number: int, message: Message) -> None:
        transfer = self._pending.get(number)
        if transfer is None:
            return
        self.answered += 1
        if isinstance(transfer.of, Incoming):
            self._came(transfer, message)
        elif self.stores.heard(transfer, transfer.of, message):
            self._end(transfer)

    def _came(self, transfer: Transfer, message: Message) -> None:
        """Handle an answer about a part in flight back: it is there, or cannot be had."""
        if transfer.phase in (Phase.DROPPED, Phase.DONE):  # DONE: this was interrupted here
            transfer.move_to(Phase.DONE)
            self._give_back(transfer)
        elif transfer.phase is Phase.REQUESTED:
            if isinstance(message, FAILURES):
                transfer.error = named(message.kind, message.detail)  # for whoever needs it
            transfer.move_to(Phase.ARRIVED if transfer.error is None else Phase.FAILED)
        elif transfer.number in self.handed_out:
            if isinstance(message, FAILURES):
                self.handed_out.fail(transfer, named(message.kind, message.detail), Phase.FAILED)
            else:
                self.handed_out.settle(transfer, Phase.DONE)
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        """Forget a transfer whose answer has come, and memory that was kept for it alone."""
        del self._pending[transfer.number]
        self.freed += 1

    # --- helpers ----------------------------------------------------------------------------

    def _give_back(self, transfer: Transfer) -> None:
        """Give a transfer's slot back, if it has one."""
        is_back = isinstance(transfer.of, Incoming)
        slot, transfer.slot = transfer.slot, None
        if slot is None:
            return
        if is_back:
            self._ahead_bytes -= slot.nbytes
            self._ahead_parts -= 1
        self.free(slot)

    def _keep(self, transfer: Transfer, out: Outgoing) -> bool:
        """Leave a stored chunk in its slot as one that has come back already, if there is room."""
        record, slot = out.living(), transfer.slot
        if not self._keeps_stored or record is None or slot is None or out.refusal is not None:
            return False
        if not isinstance(transfer.route, Staged) or record.phase not in _FETCHABLE:
            return False
        while not self._has_room_ahead(slot.nbytes):
            if not self._drop_oldest_kept():
                return False
        incoming = self.expect(record.key, record.parts)
        index = next(i for i, part in enumerate(record.parts) if part.entry == transfer.number)
        if index in incoming.transfers or incoming.storage is not None:
            return False
        kept = Transfer(
            transfer.number, slot.nbytes, transfer.route, slot, incoming, Phase.ARRIVED, index
        )
        # All of it or nothing, for no call is between.
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
                self.take(incoming, kept.index)
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
                    self.take(incoming, transfer.index)
                    return True
        return False

    def _drop_last(self, incoming: Incoming) -> bool:
        for index in sorted(incoming.transfers, reverse=True):
            if incoming.transfers[index].phase in ANSWERED:
                self.take(incoming, index)
                return True
        return False

    # --- what holds between any two calls ---------------------------------------------------

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
"""What says that something cannot be had."""

_FETCHABLE = {RangePhase.LEAVING, RangePhase.AWAY}


def _restored(transfer: Transfer, status: int) -> Message:
    """Return what a daemon would have answered whose decoder has left a status."""
    message = transfer.message
    assert isinstance(message, Restore)
    if not status:
        return Restored(message.ticket)
    detail = f"entry {message.entry} is damaged: its decoder left status {status}"
    return Failed(message.ticket, message.entry, "CorruptBlob", detail)


def number_of(request: int, message: Message) -> int:
    """Return the number of the transfer that a message answers, if it answers one."""
    match message:
        case Admitted() | Stored() | Rejected():
            return message.entry
        case Restored():
            return message.ticket
        case Failed():
            return message.ticket or message.entry
    return request
