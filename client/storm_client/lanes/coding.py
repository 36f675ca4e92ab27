"""The codec in this process: encodes tensors into the staging area, on streams of its own.

Two processes that share a device without MPS take turns at it. Encoding here takes part in the
trainer's own turns, and the daemon is left with copies, which need no turn. Nothing waits for
another process, on the host or on the device: a blob's size is in the timeline page before
`published` says that the blob is there. A slot is written behind the copies that used it before.
"""

from __future__ import annotations

import atexit
import logging
from collections import deque
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from functools import cache
from typing import Protocol

import torch
from storm_kernels.ancf import DType, max_encoded_bytes
from storm_kernels.ancf.prepared import PreparedCodec
from storm_kernels.cuda_driver import DeviceBuffer, Event, Stream, wait_value
from storm_kernels.errors import KernelsError

from storm_client.lanes import Slot
from stormd.protocol.timeline import PUBLISHED, RESULTS, Timelines, result_offset

__all__ = ["CudaCoder"]

log = logging.getLogger(__name__)


class Order(Protocol):
    """What the lane orders its streams by, in the calling thread."""

    def entered(self) -> AbstractContextManager[None]:
        """Make the driver's calls possible for a while."""
        ...

    def publish_behind(self, event: Event) -> int:
        """Have the next number published behind an event, and return it."""
        ...

    def wait_published(self, sequence: int, source: torch.UntypedStorage) -> None:
        """Have the current stream, and whoever gets the memory of `source`, wait for a number."""
        ...

    def slots_left(self) -> int:
        """Return a number that is published once no slot that is free is copied from or to."""
        ...


class CudaCoder:
    """Encodes on one device; see lanes.Coder. The session's lock protects it.

    `area` is the staging area's address and `page` the timeline page's, as the device sees them.
    `keeps_sources` says that memory which is given back may be unmapped while a stream still reads
    it, which only cudaFree waits for: then a source stays until it has been read, though what it
    was saved for is given up before.

    Raises:
        KernelsError: the codec cannot be had here; nothing is kept.
    """

    waits_on_device = True

    def __init__(
        self,
        ordinal: int,
        *,
        area: int,
        page: int,
        timelines: Timelines,
        part_bytes: int,
        priority: int,
        order: Order,
        keeps_sources: bool,
    ) -> None:
        with ExitStack() as made:
            self._codec = _codec(ordinal)
            self._stream = made.enter_context(closing(Stream(priority)))
            self._encoded = made.enter_context(closing(Event()))
            self._work = made.enter_context(
                closing(DeviceBuffer(self._codec.scratch_bytes(part_bytes)))
            )
            self._made = made.pop_all()
        self._area, self._page, self._timelines = area, page, timelines
        self._order = order
        self._keeps_sources = keeps_sources
        self._sources: deque[tuple[int, torch.UntypedStorage]] = deque()
        """Those that may not have been read, with the number that says so, in its order."""
        self._results = list(range(1, RESULTS + 1))  # those that no store under way has
        self._broken = False

    def codes(self, dtype: str, codec: str) -> bool:
        """Tell whether such elements can be coded now; not while their kernels are compiled."""
        if self._broken or codec == "raw":
            return not self._broken
        kind = DType[dtype.upper()]
        if self._codec.is_ready(kind):
            return True
        self._codec.want(kind)
        return False

    def room(self, nbytes: int) -> int:
        """Return the bytes of a slot that holds the largest blob of `nbytes`."""
        return max_encoded_bytes(nbytes, DType.BYTES)  # the same for all element types

    def encode(
        self,
        source: torch.UntypedStorage,
        part: range,
        slot: Slot,
        *,
        dtype: str,
        codec: str,
        after: int,
    ) -> tuple[int, int] | None:
        """Put an encoder on the stream; None while there is no place for its result.

        Also where the device's codec turns out to be broken: `codes` says so from then on.
        """
        if not self._results or self._broken:
            return None
        number = self._results.pop()
        stream = self._stream.handle
        try:
            with self._order.entered():
                wait_value(stream, self._page + PUBLISHED, max(after, self._order.slots_left()))
                self._codec.encode(
                    (source.data_ptr() + part.start, len(part)),
                    DType[dtype.upper()],
                    (self._area + slot.offset, slot.nbytes),
                    raw=codec == "raw",
                    scratch=self._work.address,
                    result=self._page + result_offset(number),
                    stream=stream,
                )
                self._encoded.record(stream)
                sequence = self._order.publish_behind(self._encoded)
        except KernelsError:
            log.exception("this process cannot encode on its device: the daemon does")
            self._broken = True
            with suppress(KernelsError):  # a device that is broken writes nothing any more
                self._stream.synchronize()  # some kernels may have begun, and write to the slot
            return None
        if self._keeps_sources:
            self._sources.append((sequence, source))
        return sequence, number

    def take_back(self, result: int) -> None:
        """Use a result again: its store has been answered."""
        self._results.append(result)
        self._let_go(self._timelines.read(PUBLISHED))

    def is_read(self, sequence: int) -> bool:
        """Tell whether all sources up to `sequence` have been encoded."""
        published = self._timelines.read(PUBLISHED)
        self._let_go(published)
        return published >= sequence

    def overtake(self, sequence: int, source: torch.UntypedStorage) -> None:
        """Have the current stream, and whoever gets the memory of `source`, wait for that."""
        self._order.wait_published(sequence, source)
        self._let_go(sequence)

    def close(self) -> None:
        """Wait for what was begun, and let all go."""
        self._stream.synchronize()
        self._sources.clear()
        self._made.close()

    def _let_go(self, sequence: int) -> None:
        """Keep no source up to `sequence`: it was read, or its memory is used behind that."""
        while self._sources and self._sources[0][0] <= sequence:
            self._sources.popleft()


@cache
def _codec(ordinal: int) -> PreparedCodec:
    """Return the device's codec, for as long as the process lives: loading it takes a second."""
    codec = PreparedCodec(ordinal, on_demand=True)
    atexit.register(codec.close)
    return codec
