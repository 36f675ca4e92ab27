"""A tier on disk that does nothing until a test says so, and remembers what lies where.

The file is a map from pages to the entry whose bytes are there, as the lane's memory is one. So
whoever reads an extent that was written by another is found.
"""

from __future__ import annotations

from support.fake_lane import FakeLane, Memory

from stormd.ledger.events import Result, SpillDone, SpillFailed, SpillJob
from stormd.ledger.ledger import Ledger
from stormd.memory.extents import PAGE


class FakeTier:
    """Takes the ledger's moves; `jobs` are those not yet answered, oldest first."""

    def __init__(self, ledger: Ledger, lane: FakeLane) -> None:
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
