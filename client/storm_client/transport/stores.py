"""The way of stored ranges to the daemon, chunk by chunk: what it is asked, and what answers mean.

A source is kept until every chunk of it has been admitted; one that is refused has all of it stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from storm_client.errors import ActivationLost, StormError, named
from storm_client.lanes import Mapped, Route, Slot
from storm_client.lanes.dtypes import ENCODED, codec_name
from storm_client.saved.ranges import Part, RangePhase, StoredRange
from storm_client.transport.staging_space import ALIGNMENT
from storm_client.transport.transfer import Outgoing, Phase, Transfer
from stormd.protocol import (
    Admitted,
    Envelope,
    Failed,
    Message,
    Refused,
    Rejected,
    Release,
    Store,
    Stored,
)

__all__ = ["Stores"]

IDS_PER_RELEASE = 256
"""Entries given up in one message, of at most 9 bytes each: a frame has room for so many such."""


_REFUSABLE = {RangePhase.LEAVING, RangePhase.STAYING, RangePhase.LOST}
"""Phases in which a daemon may still say that it does not take a range."""


class Stores:
    """Those of one session, whose lock protects them; see Transfers."""

    def __init__(
        self,
        numbers: Iterator[int],
        outbox: list[Envelope],
        pending: dict[int, Transfer],
        part_bytes: int,
        *,
        keep: Callable[[Transfer, Outgoing], bool],
        give_back: Callable[[Transfer], None],
    ) -> None:
        """Ask in `outbox` for chunks of at most `part_bytes`, which are `pending` until answered.

        The slot of a stored chunk is given back unless it is kept: `keep` tells.
        """
        self.part_bytes = max(part_bytes - part_bytes % ALIGNMENT, 1)
        self._numbers = numbers
        self._outbox = outbox
        self._pending = pending
        self._keep = keep
        self._give_back = give_back

    def split(self, nbytes: int) -> list[range]:
        """Return the chunks that so many bytes travel in."""
        size = self.part_bytes
        if nbytes <= size:
            return [range(nbytes)] if nbytes else []
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
        record = None if out.record is None else out.record()
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

    def heard(self, transfer: Transfer, out: Outgoing, message: Message) -> bool:
        """Handle the daemon's answer about a chunk; tell whether it is the last."""
        match message:
            case Admitted():
                self._admitted(transfer, out)
                return False
            case Stored():
                self.stored(transfer, out, message.stored_bytes, message.mode)
            case Rejected():
                self._refused(transfer, out, message.reason, message.detail)
            case Refused():  # the message, for itself: what it asked for will not be done
                self._refused(transfer, out, message.kind, message.detail)
            case Failed():
                self._lost(transfer, out, named(message.kind, message.detail))
            case _:
                return False
        return True

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

    def stored(self, transfer: Transfer, out: Outgoing, nbytes: int, mode: str) -> None:
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
