"""A lane that does nothing until a test says so: it performs the ledger's jobs on numbers only."""

from __future__ import annotations

from stormd.ledger.events import (
    Detach,
    Detached,
    Ended,
    Instruction,
    Jobs,
    Map,
    Reply,
    RestoreDone,
    RestoreFailed,
    RestoreJob,
    Result,
    SegmentMapped,
    SegmentRefused,
    StoreDone,
    StoreFailed,
    StoreJob,
    Unmap,
)
from stormd.ledger.ledger import Ledger
from stormd.protocol import Message


class FakeLane:
    """Takes the ledger's instructions; `jobs` are those not yet answered, oldest first.

    `replies` are the messages sent to clients, `ended` the sessions that are gone, `segments` the
    bytes of what is mapped, by session and number.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.jobs: list[StoreJob | RestoreJob | Map] = []
        self.detaching: set[int] = set()
        self.replies: list[tuple[int, int, Message]] = []
        self.ended: list[int] = []
        self.others: list[Instruction] = []
        self.segments: dict[tuple[int, int], int] = {}

    def take(self, instructions: list[Instruction]) -> None:
        """Perform instructions."""
        for instruction in instructions:
            if isinstance(instruction, Jobs | Map):
                assert instruction.session not in self.detaching, "a job for an ending session"
                jobs = instruction.jobs if isinstance(instruction, Jobs) else [instruction]
                for job in jobs:
                    self._check_range(job)
                self.jobs += jobs
            elif isinstance(instruction, Reply):
                assert instruction.session not in self.detaching, "an answer after the end"
                reply = (instruction.session, instruction.request, instruction.message)
                self.replies.append(reply)
            elif isinstance(instruction, Detach):
                self.detaching.add(instruction.session)
            elif isinstance(instruction, Ended):
                self.detaching.remove(instruction.session)
                self.ended.append(instruction.session)
            else:
                if isinstance(instruction, Unmap):
                    del self.segments[instruction.session, instruction.segment]
                self.others.append(instruction)

    def finish(self, index: int = 0, *, share: float = 1.0, fail: bool = False) -> None:
        """Answer a job: a blob of `share` of what was promised, or a failure."""
        job = self.jobs.pop(index)
        result = self._failed(job) if fail else self._done(job, share)
        self.answer(result.session, [result])

    def detach(self, session: int) -> None:
        """Answer what is left of an ending session, then let go of it."""
        while indices := [i for i, job in enumerate(self.jobs) if job.session == session]:
            self.finish(indices[0], fail=True)
        self.answer(session, [Detached(session)])

    def answer(self, session: int, results: list[Result]) -> None:
        """Have the ledger take in results of one kind, all of one session."""
        record = self.ledger.sessions[session]
        self.take(self.ledger.on_results[type(results[0])](record, results, 0.0))

    def last(self) -> Message:
        """Return the last message sent to a client."""
        return self.replies[-1][2]

    def _done(self, job: StoreJob | RestoreJob | Map, share: float) -> Result:
        if isinstance(job, StoreJob):
            block = job.place(max(1, int(job.part.bound * share)))
            return StoreDone(
                session=job.session, entry=job.entry, block=block, mode="raw", seconds=0.001
            )
        if isinstance(job, RestoreJob):
            return RestoreDone(session=job.session, ticket=job.ticket, seconds=0.001)
        self.segments[job.session, job.segment.segment] = job.segment.nbytes
        return SegmentMapped(session=job.session, segment=job.segment.segment)

    def _check_range(self, job: StoreJob | RestoreJob | Map) -> None:
        """Hold a job to the segments that were mapped by message, as a lane with such relies on."""
        if isinstance(job, StoreJob | RestoreJob) and job.segment:
            size = self.segments[job.session, job.segment]
            assert job.offset + job.nbytes <= size, "a range outside its segment"

    def _failed(self, job: StoreJob | RestoreJob | Map) -> Result:
        if isinstance(job, StoreJob):
            return StoreFailed(session=job.session, entry=job.entry, detail="broken")
        if isinstance(job, RestoreJob):
            return RestoreFailed(
                session=job.session, ticket=job.ticket, kind="CorruptBlob", detail="damaged"
            )
        return SegmentRefused(
            session=job.session, segment=job.segment.segment, detail="no such handle"
        )
