"""A lane that does nothing until a test says so: it performs the ledger's jobs on numbers only.

The pool is a map from granules to the entry whose bytes are there. So whoever reads a block that
was given to another meanwhile is found.
"""

from __future__ import annotations

from stormd.ledger.events import (
    Detach,
    Detached,
    Ended,
    Instruction,
    Jobs,
    Map,
    Mappable,
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
from stormd.memory.arena import GRANULE, Block
from stormd.protocol import MapPiece, Message, ReserveRange


class Memory:
    """What lies where, by granule."""

    def __init__(self, granule: int) -> None:
        self._granule = granule
        self._held: dict[int, object] = {}

    def put(self, block: Block, what: object) -> None:
        """Have all of a block hold something."""
        self._held |= dict.fromkeys(self._granules(block), what)

    def check(self, block: Block, what: object) -> None:
        """Assert that all of a block holds it."""
        for granule in self._granules(block):
            assert self._held.get(granule) == what, f"granule {granule} is another's"

    def _granules(self, block: Block) -> list[int]:
        return [
            start
            for offset, nbytes in block.extents
            for start in range(offset, offset + nbytes, self._granule)
        ]


class FakeLane:
    """Takes the ledger's instructions; `jobs` are those not yet answered, oldest first.

    `replies` are the messages sent to clients, `ended` the sessions that are gone, `segments` the
    bytes of what is mapped, by session and number; of `ranges`, the bytes of each piece by number.
    What is stored lies in `memory`, and what is restored must lie there.

    Answers come in any order, as that of what is done and undone is the instructions' own.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.memory = Memory(GRANULE)
        self.jobs: list[StoreJob | RestoreJob | Map] = []
        self.detaching: set[int] = set()
        self.replies: list[tuple[int, int, Message]] = []
        self.ended: list[int] = []
        self.others: list[Instruction] = []
        self.segments: dict[tuple[int, int], int] = {}
        self.ranges: dict[tuple[int, int], dict[int, range]] = {}
        self._into: dict[tuple[int, int], dict[int, range]] = {}  # of pieces that are being mapped

    def take(self, instructions: list[Instruction]) -> None:
        """Perform instructions."""
        for instruction in instructions:
            if isinstance(instruction, Jobs | Map):
                assert instruction.session not in self.detaching, "a job for an ending session"
                jobs = instruction.jobs if isinstance(instruction, Jobs) else [instruction]
                for job in jobs:
                    self._check_range(job)
                    if isinstance(job, Map) and isinstance(job.segment, MapPiece):
                        into = self.ranges[job.session, job.segment.into]
                        self._into[job.session, job.segment.segment] = into
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
                    self._unmap(instruction.session, instruction.segment)
                self.others.append(instruction)

    def finish(self, index: int = 0, *, share: float = 1.0, fail: bool = False) -> None:
        """Answer a job: a blob of `share` of what was promised, or a failure."""
        job = self.jobs.pop(index)
        if isinstance(job, RestoreJob):
            self.memory.check(job.block, (job.session, job.entry))
        result = self._failed(job) if fail else self._done(job, share)
        self.answer(result.session, [result])

    def detach(self, session: int) -> None:
        """Answer what is left of an ending session, then let go of it."""
        while indices := [i for i, job in enumerate(self.jobs) if job.session == session]:
            self.finish(indices[0], fail=True)
        self.answer(session, [Detached(session)])

    def answer(self, session: int, results: list[Result]) -> None:
        """Have the ledger take in results of one kind, all of one session."""
        for result in results:
            block = getattr(result, "block", None)
            if block is not None:
                self.memory.put(block, (session, getattr(result, "entry", 0)))
        record = self.ledger.sessions[session]
        self.take(self.ledger.on_results[type(results[0])](record, results, 0.0))

    def last(self) -> Message:
        """Return the last message sent to a client."""
        return self.replies[-1][2]

    def _done(self, job: StoreJob | RestoreJob | Map, share: float) -> Result:
        if isinstance(job, StoreJob):
            block = job.place(max(1, int(job.chunk.bound * share)))
            return StoreDone(
                session=job.session, entry=job.entry, block=block, mode="raw", seconds=0.001
            )
        if isinstance(job, RestoreJob):
            return RestoreDone(session=job.session, ticket=job.ticket, seconds=0.001)
        return self._mapped(job.session, job.segment)

    def _mapped(self, session: int, message: Mappable) -> SegmentMapped | SegmentRefused:
        key = session, message.segment
        if isinstance(message, MapPiece):
            into = self._into.pop(key)
            wanted = range(message.offset, message.offset + message.nbytes)
            if any(one.start < wanted.stop and wanted.start < one.stop for one in into.values()):
                return SegmentRefused(session=session, segment=key[1], detail="it is taken")
            into[key[1]] = wanted
        else:
            self.segments[key] = message.nbytes
        if isinstance(message, ReserveRange):
            self.ranges[key] = {}
        return SegmentMapped(session=session, segment=key[1])

    def _unmap(self, session: int, number: int) -> None:
        if self.segments.pop((session, number), None) is None:
            ranges = (one for (whose, _), one in self.ranges.items() if whose == session)
            del next(one for one in ranges if number in one)[number]
        self.ranges.pop((session, number), None)

    def _check_range(self, job: StoreJob | RestoreJob | Map) -> None:
        """Hold a job to the segments that were mapped by message, as a lane with such relies on."""
        if isinstance(job, StoreJob | RestoreJob) and job.segment:
            size = self.segments[job.session, job.segment]
            assert job.offset + job.nbytes <= size, "a range outside its segment"
            pieces = self.ranges.get((job.session, job.segment))
            if pieces is not None:
                left = job.nbytes
                for one in pieces.values():
                    ends = min(one.stop, job.offset + job.nbytes), max(one.start, job.offset)
                    left -= max(0, ends[0] - ends[1])
                assert not left, "bytes at which nothing is mapped"

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
