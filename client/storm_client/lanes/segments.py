"""Which of the client's allocations the daemon has mapped, so that it can use them in place.

An allocation is known by its buffer id, which is never used again, and not by its address, which
is. Memory that is mapped piece by piece has no such id: pieces.py knows it by its handles. The
daemon is offered each once and nobody waits for its answer: until it has mapped one, or where it
cannot, nothing is found there, and the staging area serves.

A mapping keeps the memory of a freed allocation alive: `sweep` has those unmapped. The session's
lock protects a Segments.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeAlias

from storm_kernels.errors import CudaDriverError

from storm_client.lanes import Mapped
from storm_client.lanes.offers import Driver, Mappable, Offered, State
from storm_client.lanes.pieces import AddressRange, Piece, Pieces
from stormd.protocol import MapSegment, Message, UnmapSegment
from stormd.protocol.limits import MAX_PIECES_WAITING

__all__ = ["Segments", "tell"]

log = logging.getLogger(__name__)

KNOWN = 1024
"""Allocations remembered; beyond that the one that was used longest ago is unmapped."""


@dataclass(slots=True, eq=False)
class _Segment(Offered):
    base: int


HandOver: TypeAlias = Callable[[int, int], bool]
"""Sends a piece's number and descriptor; False where that has to be tried again later."""


class Segments:
    """The allocations seen so far, by buffer id."""

    def __init__(
        self,
        driver: Driver,
        known: int = KNOWN,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Remember up to `known` allocations; in the context `within` returns the driver works.

        It is entered by the methods that any thread may call: `next_offer`, `descriptor`, `close`.
        """
        self.outbox: deque[Mappable] = deque()
        """What the daemon has to be offered; who takes an offer out says so to `asked`."""
        self.taken_back: deque[UnmapSegment] = deque()
        """What it has to unmap, before it is offered anything."""
        self._driver = driver
        self._limit = known
        self._within = within
        self._numbers = count(1)  # 0 is the staging area
        self._known: OrderedDict[int, _Segment] = OrderedDict()  # used longest ago first
        self._pieces = Pieces(
            driver, new_number=self.new_number, offer=self._put, forget=self._take_back
        )
        self._unsent: dict[int, Offered] = {}  # by number: what the outbox has an offer of
        self._offers: dict[int, Offered] = {}  # by request
        self._has_warned = False
        self._resuming: dict[int, Piece] = {}  # by number: what was returned by `offers`

    def find(self, address: int, nbytes: int) -> Mapped | None:
        """Return where the daemon has mapped the bytes at `address`, None where it has not."""
        if self._pieces.has(address):
            return self._pieces.find(address, nbytes)
        buffer = self._buffer(address)
        if buffer is None or buffer not in self._known:
            self._add(buffer, address, nbytes)
            return None
        segment = self._known[buffer]
        self._known.move_to_end(buffer)
        if segment.state is not State.MAPPED:
            return None
        return Mapped(segment.number, address - segment.base)

    def new_number(self) -> int:
        """Return a segment number that is used for nothing else."""
        return next(self._numbers)

    def next_offer(self, hand_over: HandOver) -> Mappable | None:
        """Take the next offer out, whose descriptor has gone ahead; None where none is to be sent.

        Others may wait for answers, as a piece for that to its range, or for the daemon to read.
        """
        while self.outbox:
            offered = self._unsent.get(self.outbox[0].segment)
            if isinstance(offered, Piece):
                into = offered.range.state
                if into is State.OFFERED or len(self._offers) >= MAX_PIECES_WAITING:
                    return None
                descriptor = self._shared(offered) if into is State.MAPPED else None
                if descriptor is not None:
                    try:
                        if not hand_over(offered.number, descriptor):
                            return None
                    finally:
                        os.close(descriptor)
                else:
                    offered.state = State.REFUSED
            offer = self.outbox.popleft()
            if offered is not None and offered.state is State.OFFERED:
                return offer
            self._unsent.pop(offer.segment, None)
        return None

    def asked(self, request: int, offer: Mappable) -> None:
        """Note the number of the request that offers something."""
        self._offers[request] = self._unsent.pop(offer.segment)

    def concerns(self, request: int) -> bool:
        """Tell whether the number is that of an offer in flight."""
        return request in self._offers

    def answered(self, request: int, refusal: str | None) -> None:
        """Note the daemon's answer to an offer: why it maps nothing, None where it does."""
        if refusal is not None and not self._has_warned:
            log.warning("what the daemon cannot map is copied through a staging area: %s", refusal)
            self._has_warned = True
        mapped = refusal is None
        offered = self._offers[request]
        unmap = UnmapSegment(offered.number)
        # A piece has gone with its range.
        is_left = not isinstance(offered, Piece) or offered.range.known
        # All of it or nothing, for no call is between; see transport/transfers.py.
        del self._offers[request]
        offered.state = State.MAPPED if mapped else State.REFUSED
        if mapped and not offered.known and is_left:
            self.taken_back.append(unmap)

    def offers(self) -> list[Mappable]:
        """Return what has another daemon map all that is mapped or on offer, in this order."""
        wanted = [one for one in self._known.values() if one.state is not State.REFUSED]
        offers: list[Mappable] = []
        for segment in wanted:
            offer = self._offer(segment)
            if offer is None:  # it is freed, and was not looked for yet
                segment.state = State.REFUSED
            else:
                offers.append(offer)
        pieces = list(self._pieces.offered())
        self._resuming = {one.number: one for one in pieces if isinstance(one, Piece)}
        return offers + [one.offer() for one in pieces]

    def descriptor(self, number: int) -> int | None:
        """Return the descriptor of a piece that `offers` has returned; None where it is gone."""
        piece = self._resuming.get(number)
        return self._shared(piece) if piece is not None and piece.known else None

    def resume(self, offered: Collection[int], mapped: Collection[int]) -> None:
        """Note what another daemon has made of `offers`, by number; offer what came since."""
        for left in (self._offers, self._unsent, self._resuming, self.outbox, self.taken_back):
            left.clear()
        everything: list[_Segment | AddressRange | Piece] = [*self._known.values(), *self._pieces]
        numbers = {one.number for one in everything}
        gone = sorted((number for number in mapped if number not in numbers), reverse=True)
        self.taken_back.extend(map(UnmapSegment, gone))  # pieces before their ranges
        for one in everything:
            if one.number in offered:
                one.state = State.MAPPED if one.number in mapped else State.REFUSED
            elif one.state is not State.REFUSED:
                one.state = State.OFFERED
                self._put(one)

    def sweep(self) -> bool:
        """Forget allocations that are gone; tell whether a mapping of one is being given up."""
        dead = [id_ for id_, one in self._known.items() if self._buffer(one.base) != id_]
        unmapped = [self._forget(buffer) for buffer in dead]
        return self._pieces.sweep() or any(unmapped)

    def close(self) -> None:
        """Let go of what is retained: there is no daemon any more. Nothing is found from now on."""
        with self._within():
            self._pieces.close()

    def __len__(self) -> int:
        """Return the number of allocations known."""
        return len(self._known) + len(self._pieces)

    # --- helpers ----------------------------------------------------------------------------

    def _add(self, buffer: int | None, address: int, nbytes: int) -> None:
        """Offer what is at an address and was not known."""
        if not self._driver.exportable(address):
            self._pieces.find(address, nbytes)
            if self._pieces.has(address):
                return
        if buffer is None:
            return
        segment = _Segment(self.new_number(), State.OFFERED, address)
        self._put(segment)
        self._known[buffer] = segment
        if len(self._known) > self._limit:
            self._forget(next(iter(self._known)))

    def _put(self, one: _Segment | AddressRange | Piece) -> None:
        """Have it offered, where it can be exported."""
        offer = self._offer(one) if isinstance(one, _Segment) else one.offer()
        if offer is None:
            one.state = State.REFUSED
            return
        self._unsent[one.number] = one
        self.outbox.append(offer)

    def _shared(self, piece: Piece) -> int | None:
        """Return a descriptor of a piece, None where it cannot be shared."""
        try:
            with self._within():
                return self._driver.share_piece(piece.handle)
        except CudaDriverError as error:  # as of memory that was not made to be shared
            log.info("memory at %#x stays unmapped: %s", piece.begin, error)
            return None

    def _offer(self, segment: _Segment) -> MapSegment | None:
        """Return what has the daemon map it, None where it cannot be exported."""
        try:
            segment.base, nbytes = self._driver.allocation(segment.base)
            if not self._driver.exportable(segment.base):
                return None
            handle = self._driver.ipc_handle(segment.base)
        except CudaDriverError as error:  # as for memory that another process has exported
            log.info("memory at %#x stays unmapped: %s", segment.base, error)
            return None
        return MapSegment(segment=segment.number, handle=handle, nbytes=nbytes)

    def _buffer(self, address: int) -> int | None:
        """Return the id of the allocation at an address, None where there is none."""
        try:
            return self._driver.buffer_id(address)
        except CudaDriverError as error:
            if error.code != "CUDA_ERROR_INVALID_VALUE":
                raise
            return None

    def _forget(self, buffer: int) -> bool:
        """Have an allocation unmapped; tell whether it was mapped."""
        segment = self._known.pop(buffer)
        self._take_back(segment)
        return segment.state is State.MAPPED

    def _take_back(self, one: Offered) -> None:
        """Have something unmapped; what is on offer is unmapped when its answer comes."""
        one.known = False
        self._unsent.pop(one.number, None)
        if one.state is State.MAPPED:
            self.taken_back.append(UnmapSegment(one.number))


class _Connection(Protocol):
    @property
    def numbers(self) -> Iterator[int]: ...

    def defer(self, request: int, message: Message) -> None: ...

    def hand_over(self, number: int, descriptor: int) -> bool: ...


def tell(connection: _Connection, segments: Segments) -> None:
    """Tell the daemon what `segments` have to say; nobody waits for its answers.

    Raises:
        DaemonLost: it is gone.
    """
    while segments.taken_back:
        connection.defer(next(connection.numbers), segments.taken_back.popleft())
    while segments.outbox and (offer := segments.next_offer(connection.hand_over)) is not None:
        number = next(connection.numbers)
        connection.defer(number, offer)
        segments.asked(number, offer)
