"""Which of its client's memory a session's jobs may name: mapped by its lane, used, unmapped.

Jobs may name a segment from the lane's SegmentMapped until the client's UnmapSegment. A job begun
before that keeps the segment mapped in the lane until the job ends. In an address range, jobs may
name only addresses at which pieces are mapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stormd.ledger.address_ranges import AddressRange
from stormd.ledger.events import Instruction, Map, SegmentMapped, SegmentRefused, Unmap
from stormd.ledger.restores import Restores
from stormd.ledger.sessions import Offer, Phase, Session
from stormd.protocol import (
    Mapped,
    MapPiece,
    MapSegment,
    Message,
    Refused,
    ReserveRange,
    UnmapSegment,
)

__all__ = ["MAX_PIECES", "MAX_SEGMENTS", "Segments", "piece_problem", "segment_problem"]

MAX_SEGMENTS: Final = 4096
"""Maximum segments of one session mapped at a time, ranges included."""

MAX_PIECES: Final = 1 << 14
"""Maximum pieces of one session mapped at a time: enough for 320 GiB in pieces of 20 MiB."""


class Segments:
    """Handles map requests of clients and results of lanes."""

    def __init__(self, restores: Restores) -> None:
        self._restores = restores

    def map(
        self, record: Session, request: int, message: MapSegment | ReserveRange, _now: float
    ) -> list[Instruction]:
        """Have a segment mapped, unless its number is taken or there are too many segments."""
        return _begin(record, segment_problem(record, message), Offer(request, message))

    def map_piece(
        self, record: Session, request: int, message: MapPiece, _now: float
    ) -> list[Instruction]:
        """Have a piece mapped into a range, unless its addresses are outside it or taken."""
        into = record.ranges.get(message.into)
        return _begin(record, piece_problem(record, message), Offer(request, message, into))

    def unmap(
        self, record: Session, request: int, message: UnmapSegment, _now: float
    ) -> list[Instruction]:
        """Unmap a segment or a piece; new jobs cannot name it from now on."""
        number = message.segment
        if number in record.pieces:
            segment, begin = record.pieces.pop(number)
            end = begin + record.ranges[segment].remove(begin)
            failed = self._restores.fail_into(record, segment, begin, end)
        elif record.segments.pop(number, None) is not None:
            failed = self._restores.fail_into(record, number)
            if record.ranges.pop(number, None) is not None:
                gone = [piece for piece, (into, _) in record.pieces.items() if into == number]
                for piece in gone:
                    del record.pieces[piece]
        else:
            refused = Refused("UsageError", f"segment {number} is not mapped")
            return [record.reply(request, refused)]
        return [
            *failed,
            Unmap(session=record.info.session, segment=number),
            *self._restores.start_waiting(record),
        ]

    def tried(
        self, record: Session, results: Iterable[SegmentMapped | SegmentRefused], _now: float
    ) -> list[Instruction]:
        """Take in segments and pieces that are mapped, or that the lane could not map."""
        replies: list[Instruction] = []
        for result in results:
            offer = record.mapping.pop(result.segment)
            if record.phase is Phase.ENDING:
                continue
            if isinstance(result, SegmentMapped):
                replies.append(record.reply(offer.request, _added(record, offer)))
            else:
                replies.append(record.reply(offer.request, Refused("UsageError", result.detail)))
        return replies


def segment_problem(session: Session, message: MapSegment | ReserveRange) -> str | None:
    """Return why the segment may not be mapped, or None if it may."""
    if detail := _number_problem(session, message.segment):
        return detail
    if len(session.segments) + len(session.mapping) >= MAX_SEGMENTS:
        return f"{MAX_SEGMENTS} segments are mapped: unmap one first"
    if not message.nbytes:
        return f"segment {message.segment} has 0 bytes"
    return None


def piece_problem(session: Session, message: MapPiece) -> str | None:
    """Return why the piece may not be mapped, or None if it may."""
    if detail := _number_problem(session, message.segment):
        return detail
    into = session.ranges.get(message.into)
    if into is None:
        return f"segment {message.into} is no range of addresses"
    if len(session.pieces) >= MAX_PIECES:
        return f"{MAX_PIECES} pieces are mapped: unmap one first"
    if not message.nbytes:
        return f"piece {message.segment} has 0 bytes"
    return into.problem(message.offset, message.nbytes) or None


def _number_problem(session: Session, number: int) -> str:
    """Return why nothing may be mapped under that number, empty if something may."""
    if detail := session.phase_problem() or session.lane_problem():
        return detail
    if number in session.segments or number in session.mapping or number in session.pieces:
        return f"segment {number} is mapped already: choose a new number"
    return ""


def _begin(record: Session, problem: str | None, offer: Offer) -> list[Instruction]:
    if problem is not None:
        return [record.reply(offer.request, Refused("UsageError", problem))]
    record.mapping[offer.message.segment] = offer
    return [Map(session=record.info.session, segment=offer.message)]


def _added(record: Session, offer: Offer) -> Message:
    """Let jobs name the mapped memory; return the answer to the client.

    A piece's range may have been unmapped meanwhile, and its number may name a new range. The piece
    was then unmapped with its range.
    """
    message = offer.message
    if isinstance(message, MapPiece):
        if offer.into is None or record.ranges.get(message.into) is not offer.into:
            return Refused("UsageError", f"range {message.into} was unmapped meanwhile")
        offer.into.add(message.offset, message.nbytes)
        record.pieces[message.segment] = message.into, message.offset
    else:
        record.segments[message.segment] = message.nbytes
        if isinstance(message, ReserveRange):
            record.ranges[message.segment] = AddressRange(message.nbytes)
    return Mapped(message.segment)
