"""Checksums of chunks that are copied directly: one launch for all that wait.

Beside kernels that take the whole device, a kernel of the daemon starts only where one of them ends
and the next begins. A second one hardly starts with it, however much the first has to read. So
there is one launch at a time, on a stream of its own, and the next launch is for all chunks that
were added since.

Only the store thread uses this module.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, closing
from typing import Final

from storm_kernels.ancf.checksum import from_sums
from storm_kernels.ancf.prepared import PreparedCodec
from storm_kernels.cuda_driver import Event, MappedHost, Stream
from storm_kernels.errors import KernelsError

__all__ = ["MAX_TOGETHER", "Check", "Checks"]

MAX_TOGETHER: Final = 16
"""Most chunks in one launch."""

SPAN_WORDS: Final = 2

UNWRITTEN: Final = (1 << 64) - 1
"""Initial value that the device must overwrite; a sum has it by chance once in 2^64 chunks."""


class Check:
    """The checksum of `nbytes` bytes at a device address, available once `is_known`."""

    __slots__ = ("_error", "_sums", "address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._sums: list[int] = []
        self._error: KernelsError | None = None

    @property
    def is_known(self) -> bool:
        """Whether the bytes have been read, or never will be."""
        return bool(self._sums) or self._error is not None

    @property
    def value(self) -> int:
        """The checksum.

        Raises:
            KernelsError: the launch failed.
            RuntimeError: the launch ended, but wrote no checksum.
        """
        if self._error is not None:
            raise self._error
        if self._sums[0] == UNWRITTEN:
            raise RuntimeError(f"the device has left no checksum of {self.nbytes} bytes")
        return from_sums(self._sums, self.nbytes)

    def found(self, sums: list[int]) -> None:
        """Set the sums that the device has written."""
        self._sums = sums

    def failed(self, error: KernelsError) -> None:
        """Set the error because of which the launch failed."""
        self._error = error


class Checks:
    """Makes a device read chunks for their checksums. Needs `close`.

    Raises:
        CudaDriverError: the device gives no stream or memory; nothing is kept.
    """

    def __init__(self, codec: PreparedCodec, priority: int) -> None:
        self._codec = codec
        self._words: Final = codec.check_words
        self._waiting: deque[Check] = deque()
        self._under_way: list[Check] = []
        with ExitStack() as made:
            self.stream = made.enter_context(closing(Stream(priority)))
            self._done = made.enter_context(closing(Event()))
            self._spans = made.enter_context(closing(MappedHost(8 * SPAN_WORDS * MAX_TOGETHER)))
            self._sums = made.enter_context(closing(MappedHost(8 * self._words * MAX_TOGETHER)))
            self._made = made.pop_all()

    def add(self, address: int, nbytes: int) -> Check:
        """Add bytes to the next launch, which starts now if none is in flight.

        The bytes must stay mapped until the check is known or forgotten.
        """
        check = Check(address, nbytes)
        self._waiting.append(check)
        self._launch_next()
        return check

    def refresh(self) -> None:
        """Check whether a launch has ended, and begin the next if none is in flight.

        Raises:
            CudaDriverError: the device is broken.
        """
        if self._under_way and self._done.done():
            sums = self._sums.words()
            for number, check in enumerate(self._under_way):
                check.found(sums[number * self._words : (number + 1) * self._words])
            self._under_way = []
        self._launch_next()

    def forget(self, check: Check) -> None:
        """Drop a check that has not been launched; one that has been launched must have ended."""
        if check in self._waiting:
            self._waiting.remove(check)

    def close(self) -> None:
        """Free all of it; nothing may be in flight."""
        self._made.close()

    def _launch_next(self) -> None:
        if self._under_way or not self._waiting:
            return
        count = min(len(self._waiting), MAX_TOGETHER)
        checks = [self._waiting.popleft() for _ in range(count)]
        try:
            self._launch(checks)
        except KernelsError as error:
            for check in checks:
                check.failed(error)
        else:
            self._under_way = checks

    def _launch(self, checks: list[Check]) -> None:
        spans, sums = self._spans.words(), self._sums.words()
        for number, check in enumerate(checks):
            spans[SPAN_WORDS * number] = check.address
            spans[SPAN_WORDS * number + 1] = check.nbytes
            sums[number * self._words] = UNWRITTEN
        self._codec.check(
            self._spans.device_address,
            len(checks),
            self._sums.device_address,
            stream=self.stream.handle,
        )
        self._done.record(self.stream.handle)
