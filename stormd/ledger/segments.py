"""Which memory of its own a session's jobs may name: mapped by its lane, used, unmapped.

A segment takes part from the lane's SegmentMapped until the client's UnmapSegment; a job that was
begun before keeps it mapped in the lane for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stormd.ledger.events import Instruction, Map, Reply, SegmentMapped, SegmentRefused, Unmap
from stormd.ledger.restores import Restores
from stormd.ledger.sessions import Phase, Session
from stormd.protocol import Mapped, MapSegment, Message, Refused, UnmapSegment

__all__ = ["MAX_SEGMENTS", "Segments", "segment_problem"]

MAX_SEGMENTS: Final = 4096
"""Segments of one session mapped at one time."""


class Segments:
    """Takes what clients ask for and what lanes answer."""

    def __init__(self, restores: Restores) -> None:
        self._restores = restores

    def map(
        self, record: Session, request: int, message: MapSegment, _now: float
    ) -> list[Instruction]:
        """Have a segment mapped, unless its number is taken or there are too many."""
        problem = segment_problem(record, message)
        if problem is not None:
            return [_answer(record, request, Refused("UsageError", problem))]
        record.mapping[message.segment] = (request, message.nbytes)
        return [Map(session=record.info.session, segment=message)]

    def unmap(
        self, record: Session, request: int, message: UnmapSegment, _now: float
    ) -> list[Instruction]:
        """Take a segment out of use; new jobs cannot name it from here on."""
        segment = message.segment
        if record.segments.pop(segment, None) is None:
            refused = Refused("UsageError", f"segment {segment} is not mapped")
            return [_answer(record, request, refused)]
        return [
            *self._restores.fail_into(record, segment),
            Unmap(session=record.info.session, segment=segment),
            *self._restores.start_waiting(record),
        ]

    def mapped(
        self, record: Session, results: Iterable[SegmentMapped], _now: float
    ) -> list[Instruction]:
        """Take in segments that jobs may name from now on."""
        replies: list[Instruction] = []
        for result in results:
            request, nbytes = record.mapping.pop(result.segment)
            if record.phase is not Phase.ENDING:
                record.segments[result.segment] = nbytes
                replies.append(_answer(record, request, Mapped(result.segment)))
        return replies

    def refused(
        self, record: Session, results: Iterable[SegmentRefused], _now: float
    ) -> list[Instruction]:
        """Take in segments that the lane could not map."""
        replies: list[Instruction] = []
        for result in results:
            request, _ = record.mapping.pop(result.segment)
            if record.phase is not Phase.ENDING:
                replies.append(_answer(record, request, Refused("UsageError", result.detail)))
        return replies


def segment_problem(session: Session, message: MapSegment) -> str | None:
    """Return why the segment may not be mapped, None where it may."""
    if detail := session.phase_problem() or session.lane_problem():
        return detail
    if message.segment in session.segments or message.segment in session.mapping:
        return f"segment {message.segment} is mapped already: choose a new number"
    if len(session.segments) + len(session.mapping) >= MAX_SEGMENTS:
        return f"{MAX_SEGMENTS} segments are mapped: unmap one first"
    if not message.nbytes:
        return f"segment {message.segment} has 0 bytes"
    return None


def _answer(record: Session, request: int, message: Message) -> Reply:
    return Reply(session=record.info.session, request=request, message=message)
