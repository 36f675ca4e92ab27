"""A daemon's cpu lane that comes to its stores late, as that of a busy device does.

What stays true: a store is admitted at once, and begun when the session's `published` counter says
that its bytes are there, or fails when the session ends before. Client and daemon share a process,
so where nobody has had the bytes made for a while the lane asks for them itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from stormd.lanes.cpu import CpuLane
from stormd.ledger.events import RestoreJob, StoreJob
from stormd.protocol.timeline import PUBLISHED, Timelines

LOOK_SECONDS = 0.001
IDLE_SECONDS = 0.1
"""After so long without another store the device has nothing else to do."""


class LateCpuLane(CpuLane):
    """All its methods are called on the loop, `catch_up` too."""

    catch_up: Callable[[], None]
    """Has clients make the bytes of all that they have sent."""

    _late: tuple[StoreJob, ...] = ()
    _latest = 0.0
    _looks = False

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> tuple[()]:
        stores = tuple(job for job in jobs if isinstance(job, StoreJob))
        restores = [job for job in jobs if not isinstance(job, StoreJob)]
        if restores:
            super().begin(session, restores)
        if stores:
            self._late += stores
            self._latest = time.monotonic()
            self._begin_what_is_there()
        return ()

    def _may_do_at_once(self, session: int) -> bool:
        return False

    def detach(self, session: int) -> None:
        for job in self._late:
            if job.session == session:
                super().begin(job.session, [job])  # to be skipped
        self._late = tuple(job for job in self._late if job.session != session)
        super().detach(session)

    def _begin_what_is_there(self) -> None:
        waiting = []
        for job in self._late:
            if self._is_published(job):
                super().begin(job.session, [job])
            else:
                waiting.append(job)
        self._late = tuple(waiting)
        if self._late and not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looks = False
        if self._late and time.monotonic() - self._latest > IDLE_SECONDS:
            self.catch_up()
        self._begin_what_is_there()

    def _is_published(self, job: StoreJob) -> bool:
        page = self._memories[job.session].page
        return Timelines(page.address).read(PUBLISHED) >= job.sequence
