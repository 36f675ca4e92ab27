"""The life of a Restore: checked, begun or held back, done by a lane, answered.

Clients request restores in the order of their needs. An entry that is needed last must not take the
link first because it was encoded first. So a restore whose entry is not in the pool yet holds back
all later ones of its session; they begin in the order of their requests. Every accepted restore is
answered once.

    asked --> waiting --> begun --> Restored, or among RestoredParts
      |          |          |
      +----------+----------+-----> Failed
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stormd.ledger.events import (
    Instruction,
    Jobs,
    Reply,
    RestoreDone,
    RestoreFailed,
    RestoreJob,
    StoreJob,
)
from stormd.ledger.holdings import State
from stormd.ledger.on_disk import DiskPhase
from stormd.ledger.sessions import Destination, Phase, Session, Ticket
from stormd.protocol import (
    RESTORE_FIELDS,
    Failed,
    Restore,
    Restored,
    RestoredParts,
    RestoreParts,
    pack,
    unpack,
)
from stormd.protocol.limits import MAX_BATCH, MAX_ID

__all__ = ["MAX_RESTORES", "Restores", "restore_problem"]

MAX_RESTORES: Final = 4096
"""Maximum restores of one session in flight or waiting."""


class Restores:
    """Handles restore requests of clients and results of lanes."""

    def __init__(self, state: State) -> None:
        self._state = state

    # --- requests ---------------------------------------------------------------------------

    def restore(
        self, record: Session, request: int, message: Restore, now: float
    ) -> list[Instruction]:
        """Begin a restore, or hold it back."""
        asked = (
            message.ticket, message.entry,
            message.segment, message.offset, message.nbytes, message.sequence,
        )  # fmt: skip
        return self._ask(record, request, [asked], now, together=False)

    def restore_parts(
        self, record: Session, request: int, message: RestoreParts, now: float
    ) -> list[Instruction]:
        """Begin several restores, or hold them back, as `restore` does for each."""
        asked = unpack(message.places, RESTORE_FIELDS)
        return self._ask(record, request, asked, now, together=True)

    def _ask(
        self,
        record: Session,
        request: int,
        asked: Iterable[tuple[int, ...]],
        now: float,
        *,
        together: bool,
    ) -> list[Instruction]:
        """Begin restores or make them wait for their turns; `asked` has each Restore's numbers."""
        session = record.info.session
        record.is_restoring = True
        done: list[Instruction] = []
        jobs: list[StoreJob | RestoreJob] = []
        for number, entry_id, segment, offset, nbytes, sequence in asked:
            problem = restore_problem(record, number, entry_id, segment, offset, nbytes)
            if problem is not None:
                done.append(record.reply(request, Failed(number, entry_id, *problem)))
                continue
            entry = record.entries[entry_id]
            record.tickets[number] = Ticket(entry_id, request, now, together)
            if record.waiting or entry.block is None:
                record.waiting[number] = Destination(segment, offset, nbytes, sequence)
                entry.waits += 1
                self._state.touch(record, entry_id)
            else:
                entry.restores += 1
                jobs.append(RestoreJob(
                    session, number, entry_id, entry.block, segment, offset, nbytes, sequence
                ))  # fmt: skip
        if jobs:
            done.append(Jobs(session, jobs))
        return done

    # --- waiting restores -------------------------------------------------------------------

    def start_waiting(self, record: Session) -> list[Instruction]:
        """Begin the waiting restores, in order, up to the first whose entry is not in the pool."""
        jobs: list[StoreJob | RestoreJob] = []
        session = record.info.session
        while record.waiting:
            number = next(iter(record.waiting))
            entry_id = record.tickets[number].entry
            entry = record.entries[entry_id]
            if entry.block is None:
                break
            into = record.waiting.pop(number)
            entry.waits -= 1
            entry.restores += 1
            jobs.append(RestoreJob(session, number, entry_id, entry.block, *into))
        return [Jobs(session, jobs)] if jobs else []

    def fail_of(self, record: Session, entry_id: int, detail: str) -> list[Instruction]:
        """Fail the restores that wait for an entry that will never be in the pool."""
        named = [n for n in record.waiting if record.tickets[n].entry == entry_id]
        return [self._fail(record, number, "ActivationLost", detail) for number in named]

    def fail_into(
        self, record: Session, segment: int, begin: int = 0, end: int = MAX_ID
    ) -> list[Instruction]:
        """Fail the restores into bytes of a segment that have not begun.

        Their destinations were checked when they were requested, and are not mapped any more.
        """
        detail = f"segment {segment} was unmapped before the restore began: wait for its answer"
        named = [
            number
            for number, into in record.waiting.items()
            if into.segment == segment and into.offset < end and begin < into.offset + into.nbytes
        ]
        failed: list[Instruction] = []
        for number in named:
            entry_id = record.tickets[number].entry
            failed.append(self._fail(record, number, "UsageError", detail))
            record.entries[entry_id].waits -= 1
            self._state.unused(record, entry_id)
        return failed

    def _fail(self, record: Session, number: int, kind: str, detail: str) -> Reply:
        """Answer a waiting restore with Failed, and forget it; the caller handles its entry."""
        del record.waiting[number]
        ticket = record.tickets.pop(number)
        return record.reply(ticket.request, Failed(number, ticket.entry, kind, detail))

    # --- results of lanes -------------------------------------------------------------------

    def done(
        self, record: Session, results: Iterable[RestoreDone], now: float
    ) -> list[Instruction]:
        """Take in restores that are done; those requested together are answered together."""
        replies: list[Instruction] = []
        together: list[int] = []
        entries, flows = record.entries, self._state.counters.restores
        for result in results:
            ticket = record.tickets.pop(result.ticket)
            entry = entries[ticket.entry]
            assert entry.block is not None
            entry.restores -= 1
            flows[entry.codec].add(
                entry.raw_bytes, entry.block.nbytes, result.seconds, now - ticket.since
            )
            if entry.released:
                self._state.holdings.free_unused(record, ticket.entry)
            else:
                self._state.touch(record, ticket.entry)
            if ticket.together:
                together.append(result.ticket)
            else:
                replies.append(record.reply(ticket.request, Restored(result.ticket)))
        for begin in range(0, len(together), MAX_BATCH):
            several = RestoredParts(pack(together[begin : begin + MAX_BATCH]))
            replies.append(record.reply(0, several))
        return replies if record.phase is not Phase.ENDING else []

    def failed(
        self, record: Session, results: Iterable[RestoreFailed], _now: float
    ) -> list[Instruction]:
        """Take in restores that failed."""
        replies: list[Instruction] = []
        for result in results:
            ticket = record.tickets.pop(result.ticket)
            entry = record.entries[ticket.entry]
            entry.restores -= 1
            self._state.counters.restores[entry.codec].failures += 1
            if result.kind == "CorruptBlob":
                self._state.counters.corrupt += 1
                if entry.loan is not None:
                    entry.loan.drop_damaged()
            self._state.unused(record, ticket.entry)
            if record.phase is not Phase.ENDING:
                failed = Failed(result.ticket, ticket.entry, result.kind, result.detail)
                replies.append(record.reply(ticket.request, failed))
        return replies


def restore_problem(  # noqa: PLR0917, PLR0911 - a call for each chunk: keywords take twice as long
    session: Session, ticket: int, number: int, segment: int, offset: int, nbytes: int
) -> tuple[str, str] | None:
    """Return why entry `number` cannot be restored, as kind (of Failed) and detail, or None."""
    entry = session.entries.get(number)
    if session.phase is not Phase.ATTACHED:
        return "UsageError", session.phase_problem()
    if entry is None or entry.released:
        return "ActivationLost", f"entry {number} does not exist or was released"
    if entry.disk is not None and entry.disk.phase is DiskPhase.LOST:
        return "ActivationLost", f"entry {number}: {entry.disk.disk.loss()}"
    if nbytes != entry.raw_bytes:
        return "UsageError", f"entry {number} has {entry.raw_bytes} bytes, not {nbytes}"
    if ticket in session.tickets or not ticket:
        return "UsageError", f"ticket {ticket} is 0 or under way: choose a new one"
    if len(session.tickets) >= MAX_RESTORES:
        return "QuotaExceeded", f"{MAX_RESTORES} restores are under way: wait for one"
    if segment not in session.ranges and offset + nbytes <= session.segments.get(segment, -1):
        return None
    problem = session.range_problem(segment, offset, nbytes)
    return ("UsageError", problem) if problem else None
