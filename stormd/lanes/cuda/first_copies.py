"""The speed of a device's link before anything is stored: plans of compiled graphs need it then."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Final

from storm_kernels.cuda_driver import (
    DeviceBuffer,
    Event,
    MappedHost,
    Stream,
    copy_async,
    elapsed_seconds,
)
from storm_kernels.errors import CudaDriverError

__all__ = ["bytes_per_second"]

NBYTES: Final = 32 << 20

COPIES: Final = 3
"""Each way; the fastest counts, since the first ones also wake the link up."""


def bytes_per_second(down: Stream, up: Stream) -> int:
    """Return how fast the current device copies to and from pinned memory, the slower of both.

    The result is 0 if the device has no memory for that.
    """
    with ExitStack() as made:
        try:
            memory = made.enter_context(closing(DeviceBuffer(NBYTES)))
            host = made.enter_context(closing(MappedHost(NBYTES)))
            begin, end = (made.enter_context(closing(Event(timed=True))) for _ in range(2))
        except CudaDriverError:
            return 0
        found = []
        for stream, target, source in (
            (down, host.address, memory.address),
            (up, memory.address, host.address),
        ):
            seconds = []
            for _ in range(COPIES):
                begin.record(stream.handle)
                copy_async(target, source, NBYTES, stream.handle)
                end.record(stream.handle)
                end.synchronize()
                seconds.append(elapsed_seconds(begin, end))
            found.append(min(seconds))
        return int(NBYTES / max(found))
