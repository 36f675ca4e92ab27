"""Which of the client's allocations the daemon has mapped, so that it can use them in place.

An allocation is known by its buffer id, which is never used again, and not by its address, which
is. The daemon is offered each once and nobody waits for its answer: until it has mapped one, or
where it cannot, nothing is found there, and the staging area serves.

A mapping keeps the memory of a freed allocation alive: `sweep` has those unmapped. The session's
lock protects a Segments.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Protocol

from storm_kernels.errors import CudaDriverError

from storm_client.lanes import Mapped
from stormd.protocol import MapSegment, Message, UnmapSegment

__all__ = ["Driver", "Segments", "tell"]

log = logging.getLogger(__name__)

KNOWN = 1024
"""Allocations remembered; beyond that the one that was used longest ago is unmapped."""


class Driver(Protocol):
    """What is asked of the device's driver; each call raises CudaDriverError for a bad address."""

    def buffer_id(self, address: int) -> int:
        """Return the id of the allocation at `address`."""
        ...

    def allocation(self, address: int) -> tuple[int, int]:
        """Return its first address and its bytes."""
        ...

    def exportable(self, address: int) -> bool:
        """Tell whether another process can map it."""
        ...

    def ipc_handle(self, address: int) -> bytes:
        """Return the handle for that; `address` is the first."""
        ...


class _State(Enum):
    OFFERED = auto()
    """The daemon's answer is awaited."""
    MAPPED = auto()
    REFUSED = auto()
    """It cannot be exported or mapped, and is not offered again."""


@dataclass(slots=True)
class _Segment:
    number: int
    base: int
    state: _State


class Segments:
    """The allocations seen so far, by buffer id."""

    def __init__(self, driver: Driver, known: int = KNOWN) -> None:
        """Remember up to `known` allocations."""
        self.outbox: deque[MapSegment | UnmapSegment] = deque()
        """What the daemon has to be told; who takes an offer out says so to `asked`."""
        self._driver = driver
        self._limit = known
        self._numbers = count(1)  # 0 is the staging area
        self._known: OrderedDict[int, _Segment] = OrderedDict()  # used longest ago first
        self._offers: dict[int, _Segment] = {}  # by request

    def find(self, address: int) -> Mapped | None:
        """Return where the daemon has mapped the allocation at `address`, None where it has not."""
        buffer = self._driver.buffer_id(address)
        segment = self._known.get(buffer)
        if segment is None:
            self._add(buffer, address)
            return None
        self._known.move_to_end(buffer)
        if segment.state is not _State.MAPPED:
            return None
        return Mapped(segment.number, address - segment.base)

    def new_number(self) -> int:
        """Return a segment number that is used for nothing else."""
        return next(self._numbers)

    def asked(self, request: int, offer: MapSegment) -> None:
        """Note the number of the request that offers an allocation."""
        segment = next((one for one in self._known.values() if one.number == offer.segment), None)
        self._offers[request] = segment or _Segment(offer.segment, 0, _State.OFFERED)

    def concerns(self, request: int) -> bool:
        """Tell whether the number is that of an offer in flight."""
        return request in self._offers

    def answered(self, request: int, *, mapped: bool) -> None:
        """Note the daemon's answer to an offer."""
        segment = self._offers[request]
        unmap = UnmapSegment(segment.number)
        forgotten = all(segment is not known for known in self._known.values())
        # All of it or nothing, for no call is between; see transport/transfers.py.
        del self._offers[request]
        segment.state = _State.MAPPED if mapped else _State.REFUSED
        if forgotten and mapped:
            self.outbox.append(unmap)

    def offers(self) -> list[MapSegment]:
        """Return what has another daemon map all that is mapped or on offer."""
        wanted = [one for one in self._known.values() if one.state is not _State.REFUSED]
        offers = [(segment, self._offer(segment)) for segment in wanted]
        for segment, offer in offers:
            if offer is None:  # it is freed, and was not looked for yet
                segment.state = _State.REFUSED
        return [offer for _, offer in offers if offer is not None]

    def resume(self, offered: Collection[int], mapped: Collection[int]) -> None:
        """Note what another daemon has made of `offers`, by number; offer what came since."""
        self._offers.clear()
        self.outbox.clear()
        known = {segment.number for segment in self._known.values()}
        self.outbox.extend(UnmapSegment(number) for number in mapped if number not in known)
        for segment in self._known.values():
            if segment.number in offered:
                is_mapped = segment.number in mapped
                segment.state = _State.MAPPED if is_mapped else _State.REFUSED
            elif segment.state is not _State.REFUSED:
                offer = self._offer(segment)
                segment.state = _State.REFUSED if offer is None else _State.OFFERED
                self.outbox.extend([] if offer is None else [offer])

    def sweep(self) -> bool:
        """Forget allocations that are gone; tell whether a mapping of one is being given up."""
        dead = [buffer for buffer, known in self._known.items() if not self._lives(buffer, known)]
        unmapped = [self._forget(buffer) for buffer in dead]
        return any(unmapped)

    def __len__(self) -> int:
        """Return the number of allocations known."""
        return len(self._known)

    # --- helpers ----------------------------------------------------------------------------

    def _add(self, buffer: int, address: int) -> None:
        segment = _Segment(self.new_number(), address, _State.REFUSED)
        offer = self._offer(segment)
        if offer is not None:
            segment.state = _State.OFFERED
            self.outbox.append(offer)
        self._known[buffer] = segment
        if len(self._known) > self._limit:
            self._forget(next(iter(self._known)))

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

    def _lives(self, buffer: int, segment: _Segment) -> bool:
        try:
            return self._driver.buffer_id(segment.base) == buffer
        except CudaDriverError as error:
            if error.code != "CUDA_ERROR_INVALID_VALUE":
                raise
            return False  # nothing is allocated there any more

    def _forget(self, buffer: int) -> bool:
        """Have it unmapped; what is still on offer is unmapped when its answer comes."""
        segment = self._known.pop(buffer)
        if segment.state is not _State.MAPPED:
            return False
        self.outbox.append(UnmapSegment(segment.number))
        return True


class _Connection(Protocol):
    @property
    def numbers(self) -> Iterator[int]: ...

    def defer(self, request: int, message: Message) -> None: ...


def tell(connection: _Connection, segments: Segments) -> None:
    """Tell the daemon what `segments` have to say; nobody waits for its answers.

    Raises:
        DaemonLost: it is gone.
    """
    while segments.outbox:
        message = segments.outbox.popleft()
        number = next(connection.numbers)
        connection.defer(number, message)
        if isinstance(message, MapSegment):
            segments.asked(number, message)
