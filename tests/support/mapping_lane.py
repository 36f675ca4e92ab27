"""A daemon's cpu lane that maps segments, as the cuda lane does, or is late to, or refuses.

What stays true: no job may name a segment that the lane has not mapped, the staging area included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from support.late_lane import LateCpuLane

from stormd.lanes import Attachment
from stormd.lanes.cpu import CpuLane
from stormd.ledger.events import (
    Mappable,
    RestoreJob,
    Result,
    SegmentMapped,
    SegmentRefused,
    StoreJob,
)
from stormd.protocol import Hello


class MappingLane(CpuLane):
    """A daemon's lane that maps what `refuses` does not refuse, when it is not held up."""

    opened: ClassVar[list[MappingLane]] = []
    """The lanes of a process, or of a test."""
    refuses: Callable[[int], bool] = staticmethod(lambda segment: False)
    is_held = False
    """Whether no offer is answered before `answer`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.offered: list[int] = []
        """The number of each segment that was offered, in order."""
        self._waiting: list[tuple[int, Mappable]] = []
        self._begins: dict[tuple[int, int], int] = {}
        self.opened.append(self)

    def attach(self, session: int, hello: Hello, descriptors: Sequence[int] = ()) -> Attachment:
        return replace(super().attach(session, hello, descriptors), segment_bytes=0)

    def map_segment(self, session: int, request: Any, descriptor: int = -1) -> None:
        self.offered.append(request.segment)
        self._waiting.append((session, request))
        if not self.is_held:
            self.answer()

    def answer(self) -> None:
        """Answer all offers; the lane holds up none from now on."""
        self.is_held = False
        waiting, self._waiting = self._waiting, []
        for session, request in waiting:
            number = request.segment
            if self.refuses(number):
                self._post(
                    SegmentRefused(session=session, segment=number, detail="no memory of that kind")
                )
            else:
                self._begins[session, number] = int(request.handle)
                self._post(SegmentMapped(session=session, segment=number))

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> Sequence[Result]:
        at = self._begins
        return super().begin(
            session,
            [replace(job, segment=0, offset=job.offset + at[session, job.segment]) for job in jobs],
        )


class LateMappingLane(MappingLane, LateCpuLane):
    """Both: what it maps it reads late."""
