"""Streams, events, and the operations that are enqueued on a stream.

Functions with a numeric `stream` accept any stream of the process's primary context, including
PyTorch's, and never wait for the device. The context must be current in the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storm_kernels.cuda_driver.calls import call, check, driver

__all__ = [
    "Event",
    "Stream",
    "copy_async",
    "elapsed_seconds",
    "wait_event",
    "wait_value",
    "write_value",
]

_GEQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
_WRITE = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
_NON_BLOCKING = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
_BLOCKING = int(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
_UNTIMED = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_TIMED = int(driver.CUevent_flags.CU_EVENT_DEFAULT)
_NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY

# Looked up once, because these functions are called several times for every tensor.
_copy, _elapsed = driver.cuMemcpyAsync, driver.cuEventElapsedTime
_record, _query, _synchronize = driver.cuEventRecord, driver.cuEventQuery, driver.cuEventSynchronize
_query_stream = driver.cuStreamQuery
_wait_event = driver.cuStreamWaitEvent
_wait_value, _write_value = driver.cuStreamWaitValue64, driver.cuStreamWriteValue64


class Stream:
    """A new stream that never waits for the legacy default stream.

    `priority`: streams with smaller numbers are served first (see PrimaryContext.priorities).
    """

    def __init__(self, priority: int = 0) -> None:
        self._stream = call(driver.cuStreamCreateWithPriority, _NON_BLOCKING, priority)
        self.handle = int(self._stream)
        self._open = True

    def synchronize(self) -> None:
        """Wait until all work on the stream is done; raise CudaDriverError if some of it failed."""
        call(driver.cuStreamSynchronize, self._stream)

    def done(self) -> bool:
        """Return whether all work on the stream is done, without waiting.

        Raises:
            CudaDriverError: some of the work failed.
        """
        return _is_ready(_query_stream, self._stream)

    def close(self) -> None:
        """Destroy the stream; work already enqueued on it still completes."""
        if self._open:
            self._open = False
            call(driver.cuStreamDestroy, self._stream)


class Event:
    """A point on a stream. A host thread that waits for it sleeps and does not spin.

    While a thread waits for a timed event, the driver spins whatever its flags say. So a timed
    `Event` also has a second, untimed one for waiting. `awaited=False` omits the second event, for
    callers that never ask whether the point has been passed.
    """

    def __init__(self, *, timed: bool = False, awaited: bool = True) -> None:
        self._natives = [call(driver.cuEventCreate, _BLOCKING | _UNTIMED)] if awaited else []
        if timed:
            self._natives.insert(0, call(driver.cuEventCreate, _TIMED))
        self.native = self._natives[0]
        self._awaited = self._natives[-1]

    def record(self, stream: int) -> None:
        """Mark the current point of `stream`; this replaces an earlier mark."""
        for native in self._natives:
            check(_record, _record(native, stream))

    def done(self) -> bool:
        """Return whether the marked point has been passed, without waiting.

        Raises:
            CudaDriverError: work before the point failed.
        """
        return _is_ready(_query, self._awaited)

    def synchronize(self) -> None:
        """Block the calling thread until the marked point has been passed."""
        check(_synchronize, _synchronize(self._awaited))

    def close(self) -> None:
        """Destroy the event."""
        while self._natives:
            call(driver.cuEventDestroy, self._natives.pop())


def copy_async(destination: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue on `stream` a copy of `nbytes` between any two host or device addresses."""
    check(_copy, _copy(destination, source, nbytes, stream))


def elapsed_seconds(begin: Event, end: Event) -> float:
    """Return the device time in seconds between two timed events that have both been passed."""
    outcome = _elapsed(begin.native, end.native)
    check(_elapsed, outcome)
    return float(outcome[1]) / 1e3


def wait_event(stream: int, event: Event) -> None:
    """Make `stream` wait for the point that `event` marks now; a later mark has no influence."""
    check(_wait_event, _wait_event(stream, event.native, 0))


def wait_value(stream: int, address: int, value: int) -> None:
    """Make `stream` wait until the 64-bit counter at device address `address` is >= `value`."""
    check(_wait_value, _wait_value(stream, address, value, _GEQ))


def write_value(stream: int, address: int, value: int) -> None:
    """Make `stream` store `value` at `address`, after all its earlier work is visible."""
    check(_write_value, _write_value(stream, address, value, _WRITE))


def _is_ready(query: Callable[..., Any], native: Any) -> bool:
    outcome = query(native)
    if outcome[0] == _NOT_READY:
        return False
    check(query, outcome)
    return True
