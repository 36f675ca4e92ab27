"""Checksums of chunks that are copied directly: one launch for all that wait.

Beside kernels that take the whole device, a kernel of the daemon starts only where one of them ends
and the next begins. A second one hardly starts with it, however much the first has to read. So
there is one launch at a time, on a stream of its own, and the next launch is for all chunks that
were added since.

Only the store thread uses this module.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import Final, NamedTuple

from storm_kernels.ancf.checksum import from_sums
from storm_kernels.ancf.prepared import PreparedCodec
from storm_kernels.cuda_driver import Event, MappedHost, Stream
from storm_kernels.errors import KernelsError

__all__ = ["MAX_TOGETHER", "Checks"]

MAX_TOGETHER: Final = 16
"""Most chunks in one launch."""

SPAN_WORDS: Final = 2

UNWRITTEN: Final = (1 << 64) - 1
"""Initial value that the device must overwrite; a sum has it by chance once in 2^64 chunks."""


class _Chunk(NamedTuple):
    """A chunk of `nbytes` bytes at a device address, and its checksum once it is known."""

    address: int
    nbytes: int
    checksum: Future[int]

    def found(self, sums: list[int]) -> None:
        """Take the sums that the device has written."""
        if sums[0] == UNWRITTEN:
            detail = f"the device has left no checksum of {self.nbytes} bytes"
            self.checksum.set_exception(RuntimeError(detail))
        else:
            self.checksum.set_result(from_sums(sums, self.nbytes))


class Checks:
    """Makes a device read chunks for their checksums. Needs `close`.

    Raises:
        CudaDriverError: the device gives no stream or memory; nothing is kept.
    """

    def __init__(self, codec: PreparedCodec, priority: int) -> None:
        self._codec = codec
        self._words: Final = codec.check_words
        self._waiting: deque[_Chunk] = deque()
        self._under_way: list[_Chunk] = []
        with ExitStack() as made:
            self.stream = made.enter_context(closing(Stream(priority)))
            self._done = made.enter_context(closing(Event()))
            self._spans = made.enter_context(closing(MappedHost(8 * SPAN_WORDS * MAX_TOGETHER)))
            self._sums = made.enter_context(closing(MappedHost(8 * self._words * MAX_TOGETHER)))
            self._made = made.pop_all()

    def add(self, address: int, nbytes: int) -> Future[int]:
        """Add bytes to the next launch, which starts now if none is in flight.

        Returns their checksum. It fails with a KernelsError if the launch fails, with a
        RuntimeError if the launch writes none. The bytes must stay mapped until then, unless it is
        cancelled before the launch.
        """
        chunk = _Chunk(address, nbytes, Future())
        self._waiting.append(chunk)
        self._launch_next()
        return chunk.checksum

    def refresh(self) -> None:
        """Check whether a launch has ended, and begin the next if none is in flight.

        Raises:
            CudaDriverError: the device is broken.
        """
        if self._under_way and self._done.done():
            sums = self._sums.words()
            for number, chunk in enumerate(self._under_way):
                chunk.found(sums[number * self._words : (number + 1) * self._words])
            self._under_way = []
        self._launch_next()

    def close(self) -> None:
        """Free all of it; nothing may be in flight."""
        self._made.close()

    def _launch_next(self) -> None:
        if self._under_way:
            return
        chunks: list[_Chunk] = []
        while self._waiting and len(chunks) < MAX_TOGETHER:
            chunk = self._waiting.popleft()
            if chunk.checksum.set_running_or_notify_cancel():
                chunks.append(chunk)
        try:
            if chunks:
                self._launch(chunks)
        except KernelsError as error:
            for chunk in chunks:
                chunk.checksum.set_exception(error)
        else:
            self._under_way = chunks

    def _launch(self, chunks: list[_Chunk]) -> None:
        spans, sums = self._spans.words(), self._sums.words()
        for number, chunk in enumerate(chunks):
            spans[SPAN_WORDS * number] = chunk.address
            spans[SPAN_WORDS * number + 1] = chunk.nbytes
            sums[number * self._words] = UNWRITTEN
        self._codec.check(
            self._spans.device_address,
            len(chunks),
            self._sums.device_address,
            stream=self.stream.handle,
        )
        self._done.record(self.stream.handle)
