"""Which of the client's allocations the daemon has mapped, so that it can use them in place.

An allocation is known by its buffer id, because addresses are reused and buffer ids are not. Memory
that is mapped piece by piece has no such id: pieces.py knows it by its handles. Each allocation is
offered to the daemon once. `find` returns None until the daemon has mapped it, and for ever if it
cannot; `awaits_answer` says which. Only what cannot be mapped passes through the staging area,
which is an allocation that is offered like all others.

A mapping keeps the memory of a freed allocation alive: `sweep` has such mappings undone. The
session's lock protects a Segments.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from storm_kernels.errors import CudaDriverError

from storm_client.lanes import STAGING, Mapped
from storm_client.lanes.offers import Driver, Mappable, Offered, State
from storm_client.lanes.pieces import AddressRange, Piece, Pieces
from stormd.protocol import Envelope, MapSegment, UnmapSegment
from stormd.protocol.limits import MAX_PIECES_WAITING

__all__ = ["Segments"]

log = logging.getLogger(__name__)

KNOWN = 1024
"""Limit for known allocations; beyond it the least recently used one is unmapped, but never the
staging area."""


@dataclass(slots=True, eq=False)
class _Segment(Offered):
    base: int


SendDescriptor: TypeAlias = Callable[[int, int], bool]
"""Sends a piece's number and descriptor; returns False if it must be tried again later."""


class Segments:
    """The known allocations, by buffer id."""

    def __init__(
        self,
        driver: Driver,
        known: int = KNOWN,
        driver_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Remember up to `known` allocations; `driver_context` returns a context for driver calls.

        The methods that any thread may call enter this context: `next_offer`, `piece_descriptor`,
        `close`.
        """
        self.outbox: deque[Mappable] = deque()
        """Offers for the daemon: `next_offer` returns one, which `post` removes."""
        self.to_unmap: deque[UnmapSegment] = deque()
        """Segments that the daemon has to unmap, before it gets further offers."""
        self._driver = driver
        self._limit = known
        self._driver_context = driver_context
        self._numbers = count(STAGING + 1)
        self._known: OrderedDict[int, _Segment] = OrderedDict()  # least recently used first
        self._pieces = Pieces(
            driver, new_number=self.new_number, offer=self._queue_offer, forget=self._unmap
        )
        self._unsent: dict[int, Offered] = {}  # by number: memory whose offer is in the outbox
        self._offers: dict[int, Offered] = {}  # by request number
        self._has_warned = False
        self._resuming: dict[int, Piece] = {}  # by number: the pieces that `offers` returned

    def find(self, address: int, nbytes: int) -> Mapped | None:
        """Return where the daemon has mapped the bytes at `address`, None if it has not."""
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

    def awaits_answer(self, address: int, nbytes: int) -> bool:
        """Return whether the daemon has yet to say if it maps bytes that `find` has not found.

        An offer that an interrupt has stopped on its way to the daemon is not awaited.
        """
        under_way = [*self._unsent.values(), *self._offers.values()]
        if not under_way:
            return False
        if self._pieces.has(address):
            return any(piece in under_way for piece in self._pieces.within(address, nbytes))
        buffer = self._buffer(address)
        return buffer is not None and self._known.get(buffer) in under_way

    def offer_staging(self, address: int) -> None:
        """Offer the staging area, an allocation at `address`, unless that was done."""
        buffer = self._buffer(address)
        if buffer is not None and buffer not in self._known:
            self._add_segment(buffer, _Segment(STAGING, State.OFFERED, address))

    def new_number(self) -> int:
        """Return an unused segment number."""
        return next(self._numbers)

    def next_offer(self, send_descriptor: SendDescriptor) -> Mappable | None:
        """Return the next offer, to be posted at once; None if none can be sent now.

        A piece's descriptor is sent first. A piece's offer may have to wait for the answer about
        its range, or for the daemon to read earlier offers.
        """
        while self.outbox:
            offered = self._unsent.get(self.outbox[0].segment)
            if isinstance(offered, Piece):
                into = offered.range.state
                if into is State.OFFERED or len(self._offers) >= MAX_PIECES_WAITING:
                    return None
                descriptor = self._share_piece(offered) if into is State.MAPPED else None
                if descriptor is not None:
                    try:
                        if not send_descriptor(offered.number, descriptor):
                            return None
                    finally:
                        os.close(descriptor)
                else:
                    offered.state = State.REFUSED
            if offered is not None and offered.state is State.OFFERED:
                return self.outbox[0]
            self._unsent.pop(self.outbox[0].segment, None)
            self.outbox.popleft()
        return None

    def post(self, request: int, offer: Mappable, outbox: list[Envelope]) -> None:
        """Move the offer that `next_offer` has returned to `outbox`, as this request."""
        envelope = Envelope(request, offer)
        offered = self._unsent[offer.segment]
        # No call is between these statements: all or none are done; see transport/transfers.py.
        self._offers[request] = offered
        del self._unsent[offer.segment]
        del self.outbox[0]
        outbox.append(envelope)

    def is_pending(self, request: int) -> bool:
        """Return whether the number is that of an offer in flight."""
        return request in self._offers

    def on_answer(self, request: int, refusal: str | None) -> None:
        """Note the daemon's answer to an offer: a refusal's reason, or None if it has mapped it."""
        if refusal is not None and not self._has_warned:
            log.warning("what the daemon cannot map is copied through a staging area: %s", refusal)
            self._has_warned = True
        mapped = refusal is None
        offered = self._offers[request]
        unmap = UnmapSegment(offered.number)
        # Unmapping a range unmaps its pieces, too.
        is_left = not isinstance(offered, Piece) or offered.range.known
        # No call is between these statements: all or none are done; see transport/transfers.py.
        del self._offers[request]
        offered.state = State.MAPPED if mapped else State.REFUSED
        if mapped and not offered.known and is_left:
            self.to_unmap.append(unmap)

    def offers(self) -> list[Mappable]:
        """Return the offers for all memory that is mapped or on offer, in this order."""
        wanted = [one for one in self._known.values() if one.state is not State.REFUSED]
        offers: list[Mappable] = []
        for segment in wanted:
            offer = self._offer(segment)
            if offer is None:  # it was freed, and no sweep has noticed that yet
                segment.state = State.REFUSED
            else:
                offers.append(offer)
        pieces = list(self._pieces.offered())
        self._resuming = {one.number: one for one in pieces if isinstance(one, Piece)}
        return offers + [one.offer() for one in pieces]

    def piece_descriptor(self, number: int) -> int | None:
        """Return the descriptor of a piece that `offers` has returned; None if it was freed."""
        piece = self._resuming.get(number)
        return self._share_piece(piece) if piece is not None and piece.known else None

    def resume(self, offered: Collection[int], mapped: Collection[int]) -> None:
        """Note which offers, by number, another daemon has mapped; offer newer memory."""
        for left in (self._offers, self._unsent, self._resuming, self.outbox, self.to_unmap):
            left.clear()
        everything: list[_Segment | AddressRange | Piece] = [*self._known.values(), *self._pieces]
        numbers = {one.number for one in everything}
        gone = sorted((number for number in mapped if number not in numbers), reverse=True)
        self.to_unmap.extend(map(UnmapSegment, gone))  # pieces before their ranges
        for one in everything:
            if one.number in offered:
                one.state = State.MAPPED if one.number in mapped else State.REFUSED
            elif one.state is not State.REFUSED:
                one.state = State.OFFERED
                self._queue_offer(one)

    def sweep(self) -> bool:
        """Forget freed allocations; return whether the daemon had mapped any of them."""
        dead = [id_ for id_, one in self._known.items() if self._buffer(one.base) != id_]
        unmapped = [self._forget(buffer) for buffer in dead]
        return self._pieces.sweep() or any(unmapped)

    def close(self) -> None:
        """Release all retained pieces, as the daemon is gone; no piece is found from now on."""
        with self._driver_context():
            self._pieces.close()

    def __len__(self) -> int:
        """Return the number of known allocations and pieces."""
        return len(self._known) + len(self._pieces)

    # --- helpers ----------------------------------------------------------------------------

    def _add(self, buffer: int | None, address: int, nbytes: int) -> None:
        """Offer the unknown memory at an address."""
        if not self._driver.exportable(address):
            self._pieces.find(address, nbytes)
            if self._pieces.has(address):
                return
        if buffer is None:
            return
        self._add_segment(buffer, _Segment(self.new_number(), State.OFFERED, address))
        if len(self._known) > self._limit:
            known = self._known.items()
            self._forget(next(buffer for buffer, one in known if one.number != STAGING))

    def _add_segment(self, buffer: int, segment: _Segment) -> None:
        """Note an allocation, and queue its offer if it can be exported."""
        offer = self._offer(segment)
        if offer is None:
            segment.state = State.REFUSED
            self._known[buffer] = segment
            return
        # No call is between these statements: all or none are done.
        self._known[buffer] = segment
        self._unsent[segment.number] = segment
        self.outbox.append(offer)

    def _queue_offer(self, one: _Segment | AddressRange | Piece) -> None:
        """Queue an offer, if the memory can be exported."""
        offer = self._offer(one) if isinstance(one, _Segment) else one.offer()
        if offer is None:
            one.state = State.REFUSED
            return
        self._unsent[one.number] = one
        self.outbox.append(offer)

    def _share_piece(self, piece: Piece) -> int | None:
        """Return a descriptor of a piece, None if it cannot be shared."""
        try:
            with self._driver_context():
                return self._driver.share_piece(piece.handle)
        except CudaDriverError as error:  # as for memory that was not made to be shared
            log.info("memory at %#x stays unmapped: %s", piece.begin, error)
            return None

    def _offer(self, segment: _Segment) -> MapSegment | None:
        """Return the message that makes the daemon map it, None if it cannot be exported."""
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
        """Return the id of the allocation at an address, None if there is none."""
        try:
            return self._driver.buffer_id(address)
        except CudaDriverError as error:
            if error.code != "CUDA_ERROR_INVALID_VALUE":
                raise
            return None

    def _forget(self, buffer: int) -> bool:
        """Have an allocation unmapped; return whether the daemon had mapped it."""
        segment = self._known.pop(buffer)
        self._unmap(segment)
        return segment.state is State.MAPPED

    def _unmap(self, one: Offered) -> None:
        """Have memory unmapped; if its offer is in flight, when the answer comes."""
        one.known = False
        self._unsent.pop(one.number, None)
        if one.state is State.MAPPED:
            self.to_unmap.append(UnmapSegment(one.number))
