"""A tier on disk that does nothing until a test says so, and remembers what lies where.

Pool and file are maps from granules to the entry whose bytes are there. So whoever reads a block
that was given to another meanwhile, or an extent that was written by another, is found.
"""

from __future__ import annotations

from support.fake_lane import FakeLane

from stormd.ledger.events import RestoreJob, Result, SpillDone, SpillFailed, SpillJob
from stormd.ledger.ledger import Ledger
from stormd.memory.arena import GRANULE, Block
from stormd.memory.extents import PAGE

__all__ = ["FakeTier", "WatchedLane"]


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


class WatchedLane(FakeLane):
    """A lane that puts what it stores into `memory`, and checks what it restores."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.memory = Memory(GRANULE)

    def finish(self, index: int = 0, *, share: float = 1.0, fail: bool = False) -> None:
        """Answer a job, whose block is looked at or filled."""
        job = self.jobs[index]
        if isinstance(job, RestoreJob):
            self.memory.check(job.block, (job.session, job.entry))
        super().finish(index, share=share, fail=fail)

    def answer(self, session: int, results: list[Result]) -> None:
        """Give results to the ledger; what was stored is in memory before that."""
        for result in results:
            block = getattr(result, "block", None)
            if block is not None:
                self.memory.put(block, (session, getattr(result, "entry", 0)))
        super().answer(session, results)


class FakeTier:
    """Takes the ledger's moves; `jobs` are those not yet answered, oldest first."""

    def __init__(self, ledger: Ledger, lane: WatchedLane) -> None:
        self._ledger = ledger
        self._lane = lane
        self._file = Memory(PAGE)
        self.jobs: list[SpillJob] = []

    def move(self, now: float = 0.0) -> None:
        """Take what is to be begun."""
        self.jobs += self._ledger.spills.moves(now)

    def finish(self, index: int = 0, *, fail: bool = False, now: float = 0.0) -> None:
        """Answer a job."""
        job = self.jobs.pop(index)
        what = job.session, job.entry
        result: Result
        if fail:
            result = SpillFailed(session=job.session, entry=job.entry, detail="the disk is gone")
        elif job.is_read:
            self._file.check(job.extent, (*what, job.generation))
            self._lane.memory.put(job.block, what)
            result = SpillDone(session=job.session, entry=job.entry)
        else:
            self._lane.memory.check(job.block, what)
            self._file.put(job.extent, (*what, job.generation))
            result = SpillDone(session=job.session, entry=job.entry)
        self._lane.answer(job.session, [result])

    def settle(self) -> None:
        """Answer all there is and that follows from it."""
        self.move()
        while self.jobs:
            self.finish()
            self.move()
