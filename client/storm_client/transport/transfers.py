"""The ways of stored ranges to the daemon and back: a state machine without a socket or a device.

A **transfer** is one chunk in flight. Its number is that of the request that asked for it, and one
table finds it by that number when an answer comes. The transfers of one stored range in flight
out are an `Outgoing`, those in flight back an `Incoming`. All of them share the staging area: what
lies there, and what of it gives way to what, is decided here, too.

What happens comes in as calls, which sessions make with their lock held; what the daemon has to be
told goes to the outbox, in this order. Nothing here waits, sends, copies or looks at a clock.

A call that an interrupt ended may be made again, and leaves the tables as they should be if it is
not. Python looks for signals at calls and loops alone, so what must change together does so in
statements without one, and a call that ends them is that of a function written in C, whose work is
done before signals are looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from storm_client.errors import ActivationLost, StormError, named
from storm_client.lanes import Mapped, Route, Slot, Staged
from storm_client.lanes.dtypes import ENCODED, codec_name
from storm_client.monitoring.shared_counts import RangeRecorder
from storm_client.planner import DeviceWindow
from storm_client.saved.ranges import Part, RangePhase, StoredRange
from storm_client.transport.staging_space import ALIGNMENT, StagingSpace
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
    Release,
    Restore,
    Restored,
    RestoredParts,
    Store,
    Stored,
    StoredParts,
    unpack,
)
from stormd.protocol.timeline import RESTORED_SLOTS

__all__ = [
    "Incoming",
    "Outgoing",
    "Phase",
    "Transfer",
    "Transfers",
    "number_of",
]

AHEAD_SHARE = 0.75
"""Of the staging area, for what was prefetched or is kept there; the rest is left to stores and
to what is needed at once."""

AHEAD_PARTS = 64
"""Chunks of that kind at most, however small they are."""

IDS_PER_RELEASE = 256
"""Entries given up in one message, of at most 9 bytes each: a frame has room for so many such."""

MOST_FAILED = 64
"""Backward passes remembered for what was not restored: who ended by an error never asks."""

MOST_HANDED_OUT = RESTORED_SLOTS // 2
"""Chunks that are in use before the daemon has answered for them."""

REFILL_SHARE = 0.75
"""Only when no more than this share of what may be prefetched is in use is more fetched: looking
is not free of charge, and what is requested together travels together."""


class Phase(Enum):
    """How far a transfer has come."""

    __hash__ = object.__hash__  # that of Enum is written in Python
    SENT = auto()
    """Out: the daemon has been asked to take the chunk."""
    ADMITTED = auto()
    """Out: it has promised room."""
    STORED = auto()
    """Out: the bytes are in its arena. Final."""
    REFUSED = auto()
    """Out: it does not take the chunk. Final."""
    REQUESTED = auto()
    """Back: it may be writing the chunk."""
    DROPPED = auto()
    """Back: the same, but nobody wants the chunk any more."""
    HANDED_OUT = auto()
    """Back: the same, and the memory is in use: streams wait until the chunk has been written."""
    ARRIVED = auto()
    """Back: the bytes are there."""
    DONE = auto()
    """Back: the bytes were used, or given up. Final."""
    FAILED = auto()
    """The daemon has lost the chunk, or cannot restore it: `error` says why. Final."""


_NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.SENT: (Phase.ADMITTED, Phase.STORED, Phase.REFUSED, Phase.FAILED),
    Phase.ADMITTED: (Phase.STORED, Phase.REFUSED, Phase.FAILED),
    Phase.STORED: (),
    Phase.REFUSED: (),
    Phase.REQUESTED: (Phase.ARRIVED, Phase.FAILED, Phase.DROPPED, Phase.HANDED_OUT),
    Phase.DROPPED: (Phase.DONE,),
    Phase.HANDED_OUT: (Phase.DONE, Phase.FAILED, Phase.DROPPED),
    Phase.ARRIVED: (Phase.DONE,),
    Phase.DONE: (),
    Phase.FAILED: (Phase.DONE,),
}
_PENDING = (Phase.SENT, Phase.ADMITTED, Phase.REQUESTED, Phase.DROPPED, Phase.HANDED_OUT)
_ANSWERED = (Phase.ARRIVED, Phase.FAILED)


@dataclass(eq=False, slots=True)
class Transfer:
    """One chunk, in flight out or back."""

    number: int
    nbytes: int
    route: Route
    slot: Slot | None
    """The range of the staging area that it occupies, until that is given back."""
    of: Outgoing | Incoming
    phase: Phase
    index: int = 0
    """On its way back: the part's place among those of its record."""
    used_by: int = 0
    """The backward pass that uses it since before it was answered for."""
    error: StormError | None = None
    message: Message | None = None
    """What has asked the daemon for it; None for one that was never asked for."""

    @property
    def is_wanted(self) -> bool:
        """On its way back: whether its bytes are there, or will be, or cannot be had."""
        return self.phase is Phase.REQUESTED or self.phase in _ANSWERED

    def move_to(self, phase: Phase) -> None:
        """Go on to the next phase, or stay in this one."""
        assert phase is self.phase or phase in _NEXT[self.phase], f"{self.phase} to {phase}"
        self.phase = phase


@dataclass(eq=False, slots=True)
class Outgoing:
    """A stored range's way out; it outlives the range for the statistics' sake."""

    key: int
    nbytes: int
    dtype: torch.dtype
    codec: str
    count: int
    """Of its chunks."""
    record: weakref.ref[StoredRange] | None = None
    """None for what is put into the cache."""
    stats: RangeRecorder | None = None
    refusal: tuple[str, str] | None = None
    """The reason, and the daemon's sentence about it; then nothing of it is with the daemon."""
    error: StormError | None = None
    """Why a chunk that was admitted is lost."""
    admitted: set[int] = field(default_factory=set)
    arrived: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Of each chunk that is in the arena, its bytes there and the codec's mode."""
    is_counted: bool = False

    # Where the daemon reads the source in its own memory:
    ready: int = 0
    """The number that says its bytes are there, where one does so before those of its chunks."""
    sequence: int | None = None
    """The number of its last chunk; None until its chunks are sent."""

    @property
    def is_answered(self) -> bool:
        """Whether the daemon has taken or refused it."""
        return self.refusal is not None or len(self.admitted) == self.count

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come of it."""
        ended = self.refusal is not None or self.error is not None
        return ended or len(self.arrived) == self.count

    def living(self) -> StoredRange | None:
        """Return the stored range if somebody still holds it."""
        return None if self.record is None else self.record()


@dataclass(eq=False, slots=True)
class Incoming:
    """A stored range's way back: to the staging area, or into `storage`, which the daemon maps."""

    key: int
    parts: list[Part]
    storage: torch.UntypedStorage | None = None
    transfers: dict[int, Transfer] = field(default_factory=dict)
    """By the chunk's place in `parts`."""
    is_demanded: bool = False
    """Whether a thread waits for it; what nobody waits for is prefetched, or kept."""
    is_early: bool = False
    """Whether its storage counts among the memory that was taken early."""

    @property
    def nbytes(self) -> int:
        """The size of the storage that it comes back into."""
        return 0 if self.storage is None else int(self.storage.nbytes())


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
        self.part_bytes = max(part_bytes - part_bytes % ALIGNMENT, 1)
        self.window = window
        self.answered = 0
        """Answers about transfers so far: while it grows the daemon gets on."""
        self.freed = 0
        """Grows with whatever gives room to a thread that waits for some."""
        self.early_bytes = 0
        """Of memory that is being restored into, and that nobody waits for yet."""
        self._numbers = numbers
        self._outbox = outbox
        self._keeps_stored = keeps_stored
        self._space = StagingSpace(staging_bytes)
        self._ahead_limit = int(staging_bytes * AHEAD_SHARE)
        self._ahead_bytes = 0
        self._ahead_parts = 0
        self._pending: dict[int, Transfer] = {}
        self._held: dict[int, Outgoing] = {}
        """Whose sources wait in their own memory, the oldest first."""
        self.held_bytes = 0
        """Of sources that lie here though they were stored."""
        self._has_grown = False
        """Whether the window has seen a source since it was told that something is brought back."""
        self.incoming: dict[int, Incoming] = {}
        """By the record's key: the ways back that have begun."""
        self.handed_out: dict[int, Transfer] = {}
        """By ticket, the oldest first: what is in use before the daemon has answered for it."""
        self.handed_out_bytes = 0
        """Of these chunks."""
        self.failed: dict[int, Transfer] = {}
        """By backward pass, the first that the daemon could not restore for it."""
        self._counters: dict[int, int] = {}
        """By the counter that says that it is there: the latest restore that was asked for."""
        self._shares_counters = False
        """Whether more restores were under way than there are counters: none can be trusted."""
        self._kept: dict[Transfer, Incoming] = {}
        """Chunks that were stored and lie in their slots still, the oldest first."""

    @property
    def is_storing(self) -> bool:
        """Whether the daemon has yet to read or encode something."""
        return any(isinstance(one.of, Outgoing) for one in self._pending.values())

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

    # --- out --------------------------------------------------------------------------------

    def split(self, nbytes: int) -> list[range]:
        """Return the chunks that so many bytes travel in."""
        size = self.part_bytes
        return [range(begin, min(begin + size, nbytes)) for begin in range(0, nbytes, size)]

    def leave(self, record: StoredRange) -> Outgoing:
        """Begin a record's way out; nothing is sent yet."""
        record.move_to(RangePhase.LEAVING)
        return Outgoing(
            record.key,
            record.nbytes,
            record.dtype,
            record.codec,
            -(-record.nbytes // self.part_bytes),
            weakref.ref(record),
            record.stats,
            ready=0 if record.ready is None else record.ready.sequence,
        )

    def store(
        self, out: Outgoing, part: range, route: Route, sequence: int, slot: Slot | None = None
    ) -> Transfer:
        """Have the daemon store a chunk, whose bytes lie where `route` says: in `slot`, if staged.

        In this order: what an interrupt leaves half done is released, and waited for by nobody. No
        call is between the table and the outbox: a slot is owned for as long as it may be read.
        """
        record = out.living()
        entry = next(self._numbers)
        message = Store(
            entry=entry,
            segment=route.segment,
            offset=route.offset,
            nbytes=len(part),
            dtype=codec_name(out.dtype),
            codec="raw" if out.codec == ENCODED else out.codec,
            sequence=sequence,
            ready=out.ready if isinstance(route, Mapped) else 0,
        )
        transfer = Transfer(entry, len(part), route, slot, out, Phase.SENT, message=message)
        envelope = Envelope(entry, message)
        if record is not None:
            record.parts.append(Part(entry, part.start, len(part)))
        self._pending[entry] = transfer
        self._outbox.append(envelope)
        return transfer

    def refuse(self, out: Outgoing, reason: str, detail: str = "") -> None:
        """Leave the bytes where they are; chunks that did arrive are released."""
        if out.refusal is not None:
            return
        out.refusal = reason, detail
        if out.stats is not None:
            out.stats.kept(out.nbytes, reason, detail)
        record = out.living()
        if record is None:
            return
        if record.phase is RangePhase.LEAVING:
            record.move_to(RangePhase.STAYING)
        self.release([part.entry for part in record.parts])
        record.parts.clear()

    def release(self, entries: list[int]) -> None:
        """Give entries up, as many in a message as fit."""
        for begin in range(0, len(entries), IDS_PER_RELEASE):
            message = Release(entries[begin : begin + IDS_PER_RELEASE])
            self._outbox.append(Envelope(0, message))

    # --- sources that wait in their own memory ----------------------------------------------

    def hold(self, out: Outgoing) -> None:
        """Hold a source back: what was saved last stays, as much of it as the window allows."""
        self.window.saw(out.nbytes)
        self._has_grown = True
        self._held[out.key] = out
        self.held_bytes += out.nbytes

    def excess(self, limit: int | None = None) -> Outgoing | None:
        """Return whose source has to go next, None where no more than `limit` bytes are held.

        That is the window's unless it is given. The oldest goes first, because a backward pass
        needs it last.
        """
        most = self.window.may_hold() if limit is None else limit
        return next(iter(self._held.values())) if self.held_bytes > most else None

    def is_held(self, key: int) -> bool:
        """Tell whether the source of the record of that key is held."""
        return key in self._held

    def let_go(self, key: int) -> None:
        """Hold a source no longer: its record died, or its turn to go has come."""
        out = self._held.get(key)
        if out is None:
            return
        del self._held[key]
        self.held_bytes -= out.nbytes
        if out.sequence is None and out.refusal is None and out.stats is not None:
            out.stats.kept(out.nbytes, "needed_at_once")  # before there was a reason to send it

    # --- back -------------------------------------------------------------------------------

    def demand(self, key: int, parts: list[Part], sequence: int) -> Incoming:
        """Have a record fetched now: what a thread waits for is not given up.

        What has not been requested of it is, through the staging area as far as there is room.
        """
        incoming = self.expect(key, parts)
        self.wait_for(incoming)
        if len(incoming.transfers) < len(parts):
            self.request_ahead(incoming, 0, sequence)
        return incoming

    def wait_for(self, incoming: Incoming) -> None:
        """Give nothing of a record up any more: a thread waits for it."""
        incoming.is_demanded = True
        if incoming.storage is not None:
            self._count_early(incoming)

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
        self._count_early(incoming)
        return incoming

    def restore(
        self, incoming: Incoming, index: int, route: Route, sequence: int, slot: Slot | None = None
    ) -> Transfer:
        """Have the daemon restore a chunk to where `route` says: into `slot`, if staged."""
        if self._has_grown:
            self.window.turned()
            self._has_grown = False
        part = incoming.parts[index]
        number = self._next_ticket()
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
        self._counters[number % RESTORED_SLOTS] = number
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
        ends_early = incoming.is_early and not self._is_written(incoming)
        nbytes = incoming.nbytes
        del self.incoming[key]
        if ends_early:
            incoming.is_early = False
            self.early_bytes -= nbytes

    def hand_out(self, incoming: Incoming, user: int) -> list[int]:
        """Let a backward pass use a record's memory on streams that wait; return the tickets.

        The memory is kept until the daemon has answered: it may be writing to it.
        """
        tickets = []
        for index, transfer in list(incoming.transfers.items()):
            if transfer.phase is not Phase.REQUESTED:
                continue
            # All of it or nothing, for no call is between.
            transfer.phase = Phase.HANDED_OUT
            transfer.used_by = user
            del incoming.transfers[index]
            self.handed_out[transfer.number] = transfer
            self.handed_out_bytes += transfer.nbytes
            tickets.append(transfer.number)
        self.forget(incoming.key)
        return tickets

    def can_hand_out(self, incoming: Incoming) -> bool:
        """Tell whether streams can wait for all chunks that have not been written yet.

        Raises:
            CorruptBlob, ActivationLost: one that was answered for cannot be had.
        """
        error = next((one.error for one in incoming.transfers.values() if one.error), None)
        if error is not None:
            raise error
        count = len(self.handed_out) + len(incoming.transfers)
        return count <= MOST_HANDED_OUT and not self._shares_counters

    def is_used_by(self, user: int) -> bool:
        """Tell whether a backward pass has used what was not answered for."""
        return any(transfer.used_by == user for transfer in self.handed_out.values())

    def handed_out_of(self, storage: torch.UntypedStorage) -> list[int]:
        """Return the tickets of what is still being written to a storage that is in use."""
        address = storage._cdata
        return [
            ticket
            for ticket, transfer in self.handed_out.items()
            if isinstance(transfer.of, Incoming)
            and transfer.of.storage is not None
            and transfer.of.storage._cdata == address
        ]

    def fail_handed_out(self, error: StormError) -> list[int]:
        """Give up what is in use and was not answered for; return the tickets."""
        tickets = list(self.handed_out)
        for ticket in tickets:
            self._fail_handed_out(self.handed_out[ticket], error, Phase.DROPPED)
        return tickets

    def forget_early(self) -> None:
        """Give up all memory that was taken early: there is none left."""
        for key in [key for key, one in self.incoming.items() if one.is_early]:
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
            elif self._tells(transfer) and (status := outcome(number)) is not None:
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

    def _tells(self, transfer: Transfer) -> bool:
        """Tell whether a restore's counter is its own: always where a stream may wait for it."""
        return transfer.phase is Phase.HANDED_OUT or not self._shares_counters

    def end(self) -> None:
        """Let all memory go: no answer will come any more."""
        self._pending.clear()
        self.incoming.clear()
        self.handed_out.clear()
        self.handed_out_bytes = 0
        self._held.clear()
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
            self._stored(transfer, transfer.of, nbytes, mode)
            self._end(transfer)

    def _answered(self, number: int, message: Message) -> None:
        transfer = self._pending.get(number)
        if transfer is None:
            return
        self.answered += 1
        if isinstance(transfer.of, Incoming):
            self._came(transfer, message)
        else:
            self._went(transfer, transfer.of, message)

    def _went(self, transfer: Transfer, out: Outgoing, message: Message) -> None:
        """Handle an answer about a part in flight out."""
        match message:
            case Admitted():
                self._admitted(transfer, out)
                return
            case Stored():
                self._stored(transfer, out, message.stored_bytes, message.mode)
            case Rejected():
                self._refused(transfer, out, message.reason, message.detail)
            case Refused():  # the message, for itself: what it asked for will not be done
                self._refused(transfer, out, message.kind, message.detail)
            case Failed():
                self._lost(transfer, out, named(message.kind, message.detail))
            case _:
                return
        self._end(transfer)

    def _came(self, transfer: Transfer, message: Message) -> None:
        """Handle an answer about a part in flight back: it is there, or cannot be had."""
        if transfer.phase in (Phase.DROPPED, Phase.DONE):  # DONE: this was interrupted here
            transfer.move_to(Phase.DONE)
            self._give_back(transfer)
        elif transfer.phase is Phase.REQUESTED:
            if isinstance(message, Failed | Refused):
                transfer.error = named(message.kind, message.detail)  # for whoever needs it
            transfer.move_to(Phase.ARRIVED if transfer.error is None else Phase.FAILED)
        elif transfer.number in self.handed_out:
            if isinstance(message, Failed | Refused):
                error = named(message.kind, message.detail)
                self._fail_handed_out(transfer, error, Phase.FAILED)
            else:
                self._answered_for(transfer, Phase.DONE)
        self._end(transfer)

    def _next_ticket(self) -> int:
        """Return the number of a restore, whose counter no stream waits for another one by."""
        for _ in range(RESTORED_SLOTS):
            number = next(self._numbers)
            before = self._counters.get(number % RESTORED_SLOTS)
            if before not in self._pending:
                return number
        self._shares_counters = True
        while True:
            number = next(self._numbers)
            if self._counters[number % RESTORED_SLOTS] not in self.handed_out:
                return number

    def _fail_handed_out(self, transfer: Transfer, error: StormError, phase: Phase) -> None:
        transfer.error = error
        self.failed.setdefault(transfer.used_by, transfer)
        if len(self.failed) > MOST_FAILED:
            self.failed.pop(next(iter(self.failed)))
        self._answered_for(transfer, phase)

    def _answered_for(self, transfer: Transfer, phase: Phase) -> None:
        """Note what has become of a part that is in use."""
        # All of it or nothing, for no call is between.
        transfer.phase = phase
        self.handed_out_bytes -= transfer.nbytes
        del self.handed_out[transfer.number]

    def _admitted(self, transfer: Transfer, out: Outgoing) -> None:
        """Let the record's storage go once the daemon has promised room for all chunks."""
        if transfer.phase is Phase.SENT:
            transfer.move_to(Phase.ADMITTED)
        out.admitted.add(transfer.number)
        if len(out.admitted) < out.count or out.refusal is not None or out.is_counted:
            return
        out.is_counted = True
        if out.stats is not None:
            out.stats.offloaded(out.nbytes, out.dtype, out.codec)
            for nbytes, mode in out.arrived.values():
                out.stats.stored(nbytes, mode)
        record = out.living()
        if record is not None and record.phase is RangePhase.LEAVING and out.sequence is None:
            self.gone(record)

    def gone(self, record: StoredRange) -> None:
        """Give a record's storage up: its bytes are the daemon's."""
        record.move_to(RangePhase.AWAY)
        record.source = None

    def _stored(self, transfer: Transfer, out: Outgoing, nbytes: int, mode: str) -> None:
        """The bytes of a chunk are in the arena, and its source is not needed any more."""
        if transfer.number not in out.admitted:
            self._admitted(transfer, out)
        transfer.move_to(Phase.STORED)
        is_new = transfer.number not in out.arrived
        out.arrived[transfer.number] = nbytes, mode
        if is_new and out.is_counted and out.refusal is None and out.stats is not None:
            out.stats.stored(nbytes, mode)
        if not self._keep(transfer, out):
            self._give_back(transfer)

    def _refused(self, transfer: Transfer, out: Outgoing, reason: str, detail: str) -> None:
        """The daemon does not take a chunk, and so none of its record's."""
        record = out.living()
        if record is not None and record.phase not in _REFUSABLE:
            # Another daemon does not take what the one before has admitted.
            error = ActivationLost(f"a daemon that took over did not take the tensor on: {detail}")
            self._lost(transfer, out, error)
            return
        transfer.move_to(Phase.REFUSED)
        self._give_back(transfer)
        self.refuse(out, reason, detail)

    def _lost(self, transfer: Transfer, out: Outgoing, error: StormError) -> None:
        """A chunk that was admitted is lost; who needs it gets the error."""
        transfer.move_to(Phase.FAILED)
        transfer.error = out.error = error
        record = out.living()
        if record is not None:
            record.lose(error)
        self._give_back(transfer)

    def _end(self, transfer: Transfer) -> None:
        """Forget a transfer whose answer has come, and memory that was kept for it alone."""
        early = self._early_until(transfer)
        nbytes = 0 if early is None else early.nbytes
        del self._pending[transfer.number]
        self.freed += 1
        if early is not None:
            early.is_early = False
            self.early_bytes -= nbytes

    def _early_until(self, transfer: Transfer) -> Incoming | None:
        """Return what nobody wants any more, where this is the last answer about it."""
        incoming = transfer.of
        if not isinstance(incoming, Incoming) or not incoming.is_early:
            return None
        if self.incoming.get(incoming.key) is incoming or self._is_written(incoming, transfer):
            return None
        return incoming

    def _is_written(self, incoming: Incoming, but: Transfer | None = None) -> bool:
        """Tell whether the daemon may still write to a storage, for another transfer than one."""
        return any(one.of is incoming and one is not but for one in self._pending.values())

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
                if transfer.phase in _ANSWERED and transfer not in self._kept:
                    self.take(incoming, transfer.index)
                    return True
        return False

    def _drop_last(self, incoming: Incoming) -> bool:
        for index in sorted(incoming.transfers, reverse=True):
            if incoming.transfers[index].phase in _ANSWERED:
                self.take(incoming, index)
                return True
        return False

    def _count_early(self, incoming: Incoming) -> None:
        """Count a storage as early while nobody waits for it and it is wanted, or written to."""
        is_early = incoming.storage is not None and not incoming.is_demanded
        if is_early and self.incoming.get(incoming.key) is not incoming:
            is_early = self._is_written(incoming)
        if is_early != incoming.is_early:
            more = incoming.nbytes if is_early else -incoming.nbytes
            incoming.is_early = is_early
            self.early_bytes += more

    # --- what holds between any two calls ---------------------------------------------------

    def assert_invariants(self) -> None:
        """Check the tables against each other, and every count against what it counts."""
        self._space.assert_invariants()
        for number, transfer in self._pending.items():
            assert transfer.number == number
            assert transfer.phase in _PENDING, transfer
        for key, incoming in self.incoming.items():
            assert incoming.key == key
            for transfer in incoming.transfers.values():
                assert transfer.of is incoming
                assert transfer.phase is Phase.REQUESTED or transfer.phase in _ANSWERED, transfer
                assert (transfer.phase is Phase.REQUESTED) == (transfer.number in self._pending)
        back = {one for way in self.incoming.values() for one in way.transfers.values()}
        back |= {one for one in self._pending.values() if isinstance(one.of, Incoming)}
        slots = [one.slot for one in back if one.slot is not None]
        assert self._ahead_bytes == sum(slot.nbytes for slot in slots)
        assert self._ahead_parts == len(slots)
        early = {one.of for one in back if isinstance(one.of, Incoming) and one.of.is_early}
        early |= {one for one in self.incoming.values() if one.is_early}
        assert self.early_bytes == sum(one.nbytes for one in early)
        handed = [one for one in self._pending.values() if one.phase is Phase.HANDED_OUT]
        assert handed == list(self.handed_out.values())
        assert self.handed_out_bytes == sum(one.nbytes for one in handed)
        for ticket in self.handed_out:
            assert self._counters[ticket % RESTORED_SLOTS] == ticket
        assert self.held_bytes == sum(out.nbytes for out in self._held.values())
        for kept, incoming in self._kept.items():
            assert kept.phase is Phase.ARRIVED
            assert kept in incoming.transfers.values()


_FETCHABLE = {RangePhase.LEAVING, RangePhase.AWAY}
_REFUSABLE = {RangePhase.LEAVING, RangePhase.STAYING, RangePhase.LOST}


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
