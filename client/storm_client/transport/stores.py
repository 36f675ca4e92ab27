"""Stores of ranges, chunk by chunk: the requests to the daemon, and the handling of its answers.

A source is kept until every chunk of it has been admitted. If one chunk is refused, the whole
source is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from storm_client.errors import ActivationLost, StormError, named
from storm_client.lanes import Route, Slot
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
"""Entries released in one message, of at most 9 bytes each: this many fit into a frame."""


_REFUSABLE = {RangePhase.OFFLOADING, RangePhase.KEPT, RangePhase.LOST}
"""Phases in which a daemon may still refuse a range."""

_REASONS = {"DaemonLost": "daemon_lost", "QuotaExceeded": "quota"}
"""For each error by which a daemon refuses a request, what it is called in statistics."""


class Stores:
    """The stores of one session, whose lock protects them; see Transfers."""

    def __init__(
        self,
        numbers: Iterator[int],
        outbox: list[Envelope],
        pending: dict[int, Transfer],
        part_bytes: int,
        *,
        keep: Callable[[Transfer, Outgoing], bool],
        free_slot: Callable[[Transfer], None],
    ) -> None:
        """Request chunks of at most `part_bytes` in `outbox`; they are `pending` until answered.

        `keep` returns whether a stored chunk remains in its slot. If not, the slot is freed by
        `free_slot`.
        """
        self.part_bytes = max(part_bytes - part_bytes % ALIGNMENT, 1)
        self._numbers = numbers
        self._outbox = outbox
        self._pending = pending
        self._keep = keep
        self._free_slot = free_slot

    def split(self, nbytes: int) -> list[range]:
        """Return the chunks of a range of `nbytes`."""
        size = self.part_bytes
        if nbytes <= size:
            return [range(nbytes)] if nbytes else []
        return [range(begin, min(begin + size, nbytes)) for begin in range(0, nbytes, size)]

    def begin_store(self, record: StoredRange) -> Outgoing:
        """Begin to store a record; nothing is sent yet."""
        record.move_to(RangePhase.OFFLOADING)
        return Outgoing(
            record.key,
            record.nbytes,
            record.dtype,
            record.codec,
            -(-record.nbytes // self.part_bytes),
            weakref.ref(record),
            record.stats,
        )

    def store(
        self, out: Outgoing, part: range, route: Route, sequence: int, slot: Slot | None = None
    ) -> Transfer:
        """Ask the daemon to store a chunk whose bytes are at `route`: in `slot`, if staged.

        The order of the statements matters. If an interrupt comes between them, the entry is
        released later, and nobody waits for it. No call is between the table and the outbox,
        because a slot is owned for as long as the daemon may read it.
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
        )
        transfer = Transfer(entry, len(part), route, slot, out, Phase.SENT, message=message)
        envelope = Envelope(entry, message)
        if record is not None:
            record.parts.append(Part(entry, part.start, len(part)))
        self._pending[entry] = transfer
        self._outbox.append(envelope)
        return transfer

    def refuse(self, out: Outgoing, reason: str, detail: str = "") -> None:
        """Keep a range in memory, and release its chunks that were stored."""
        if out.refusal is not None:
            return
        out.refusal = reason, detail
        if out.stats is not None:
            out.stats.kept(out.nbytes, reason, detail)
        record = out.living()
        if record is None:
            return
        if record.phase is RangePhase.OFFLOADING:
            record.move_to(RangePhase.KEPT)
        self.release([part.entry for part in record.parts])
        record.parts.clear()

    def release(self, entries: list[int]) -> None:
        """Release entries, as many per message as fit."""
        for begin in range(0, len(entries), IDS_PER_RELEASE):
            message = Release(entries[begin : begin + IDS_PER_RELEASE])
            self._outbox.append(Envelope(0, message))

    def on_answer(self, transfer: Transfer, out: Outgoing, message: Message) -> bool:
        """Handle the daemon's answer about a chunk; return whether it is the last."""
        match message:
            case Admitted():
                self._admitted(transfer, out)
                return False
            case Stored():
                self.stored(transfer, out, message.stored_bytes, message.mode)
            case Rejected():
                self._refused(transfer, out, message.reason, message.detail)
            case Refused():  # the daemon refused the message itself, and will not store the chunk
                reason = _REASONS.get(message.kind, message.kind)
                self._refused(transfer, out, reason, message.detail)
            case Failed():
                self._lost(transfer, out, named(message.kind, message.detail))
            case _:
                return False
        return True

    def _admitted(self, transfer: Transfer, out: Outgoing) -> None:
        """Give up the record's storage once the daemon has promised room for all chunks."""
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
        if record is not None and record.phase is RangePhase.OFFLOADING and out.sequence is None:
            self.free_source(record)

    def free_source(self, record: StoredRange) -> None:
        """Give up a record's storage: the daemon has its bytes."""
        record.move_to(RangePhase.OFFLOADED)
        record.source = None

    def stored(self, transfer: Transfer, out: Outgoing, nbytes: int, mode: str) -> None:
        """Note that a chunk's bytes are in the arena, so its source is not needed any more."""
        if transfer.number not in out.admitted:
            self._admitted(transfer, out)
        transfer.move_to(Phase.STORED)
        is_new = transfer.number not in out.arrived
        out.arrived[transfer.number] = nbytes, mode
        if is_new and out.is_counted and out.refusal is None and out.stats is not None:
            out.stats.stored(nbytes, mode)
        if not self._keep(transfer, out):
            self._free_slot(transfer)

    def _refused(self, transfer: Transfer, out: Outgoing, reason: str, detail: str) -> None:
        """Handle a refused chunk: the daemon takes no chunk of its record."""
        record = out.living()
        if record is not None and record.phase not in _REFUSABLE:
            # Another daemon refuses what the previous one has admitted.
            error = ActivationLost(f"a daemon that took over did not take the tensor on: {detail}")
            self._lost(transfer, out, error)
            return
        transfer.move_to(Phase.REFUSED)
        self._free_slot(transfer)
        self.refuse(out, reason, detail)

    def _lost(self, transfer: Transfer, out: Outgoing, error: StormError) -> None:
        """Handle the loss of an admitted chunk; whoever needs the record gets the error."""
        transfer.move_to(Phase.FAILED)
        transfer.error = out.error = error
        record = out.living()
        if record is not None:
            record.mark_lost(error)
        self._free_slot(transfer)
