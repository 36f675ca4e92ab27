"""The numbers that a cuda lane publishes, and the order of copies among a script's streams.

The counter `published` tells the daemon which copies are complete, so its values must reach memory
in their order: one stream writes it at a time. That is the default stream as long as nothing else
is used: it writes a number behind its own work, by one call. Where another stream comes by, it is a
stream P from then on that takes part in nothing else: each copy's stream leaves an event that P
waits for, so what P writes next says that the copy is done. A range of the staging area is
overwritten behind the copies that used it before, in the order of streams.

Streams are handles; all methods are called in the lane's context.

Page and staging area are what the lane and the daemon share. The area is not PyTorch's memory, so
it can be exported whatever allocator the script has chosen. Both live until no stream uses them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import ExitStack, closing

import torch
from storm_kernels.cuda_driver import (
    DeviceBuffer,
    Event,
    RegisteredHost,
    Stream,
    copy_async,
    wait_event,
    write_value,
)
from storm_kernels.errors import CudaDriverError

from storm_client.errors import DaemonLost
from storm_client.lanes import STAGING
from stormd.protocol import MapSegment
from stormd.protocol.timeline import PAGE_BYTES, PUBLISHED, STORED, Timelines

__all__ = ["Publisher", "Shared", "closed", "share"]

DEFAULT_STREAM = 0
"""The handle of each device's default stream, which is never destroyed nor captured."""


class Shared:
    """What the lane and the daemon share, and the stream and event that order its use.

    Raises:
        KernelsError: a CUDA object cannot be made; those made before are given back.
    """

    def __init__(self, descriptor: int, staging_bytes: int) -> None:
        with ExitStack() as made:
            memory = made.enter_context(mmap.mmap(descriptor, PAGE_BYTES))
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            page = made.enter_context(closing(RegisteredHost(address, PAGE_BYTES)))
            self.p = made.enter_context(closing(Stream()))
            self.event = made.enter_context(closing(Event()))
            self.area = made.enter_context(closing(DeviceBuffer(staging_bytes)))
            self._made = made.pop_all()
        self.timelines = Timelines(address)
        self.page_address = page.device_address
        """Where the device finds the page."""
        self.published = page.device_address + PUBLISHED
        self.stored = page.device_address + STORED

    def offer(self) -> MapSegment:
        """Return the message that lets the daemon map the staging area."""
        area = self.area
        return MapSegment(segment=STAGING, handle=area.ipc_handle(), nbytes=area.nbytes)

    def close(self) -> None:
        """Give all of it up; waits for the device."""
        self.p.synchronize()
        self._made.close()


def closed() -> DaemonLost:
    """Return the error of a thread that uses what another one has closed."""
    return DaemonLost("the daemon was lost, or the client closed, while a tensor was in flight")


def share(descriptor: int, staging_bytes: int) -> Shared:
    """Make what is shared, with memory that PyTorch keeps but does not use if there is no other."""
    try:
        return Shared(descriptor, staging_bytes)
    except CudaDriverError as error:
        if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
    torch.cuda.empty_cache()
    return Shared(descriptor, staging_bytes)


class Publisher:
    """Of one lane, for any thread. Needs `end` and then `settle`.

    Once ended, every method but these two raises DaemonLost.
    """

    def __init__(self, shared: Shared) -> None:
        """Publish in the page of `shared`."""
        self._shared = shared
        self._lock = threading.Lock()  # protects the event and all below
        self._is_ended = False
        self._sequence = 0
        self._stream: int | None = None
        self._several_streams = False
        self._by_default_stream = True

    def publish(self, stream: int) -> int:
        """Publish the next number behind every copy so far, for a thread on `stream`."""
        with self._lock:
            self._notice(stream)
            return self._publish()

    def produced(self, stream: int, count: int) -> range:
        """Return `count` numbers that are published behind the work of `stream` so far."""
        with self._lock:
            self._notice(stream)
            if not self._by_default_stream:
                self._precede(stream)
            last = self._publish(count)
        return range(last - count + 1, last + 1)

    @property
    def last(self) -> int:
        """The number that was published last, or will be when its stream comes to it."""
        return self._sequence

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on `stream`, behind what other streams did with the area; numbers come behind it."""
        with self._lock:
            self._notice(stream)
            if self._several_streams:
                self._follow(stream)
            copy_async(target, source, nbytes, stream)
            if not self._by_default_stream:
                self._precede(stream)

    def is_only_stream(self, stream: int) -> bool:
        """Tell whether all copies so far were made on `stream`, so that it need not follow them."""
        return stream == self._stream and not self._several_streams

    def follow(self, stream: int) -> bool:
        """Order `stream` behind all copies; False where there is no other stream that made any."""
        with self._lock:
            self._notice(stream)
            if self._several_streams:
                self._follow(stream)
            return self._several_streams

    def end(self) -> None:
        """Publish nothing from now on."""
        with self._lock:
            self._is_ended = True

    def settle(self) -> None:
        """Wait until the default stream has written its last number; who closes P waits for P."""
        if self._by_default_stream:
            self._shared.event.record(DEFAULT_STREAM)
            self._shared.event.synchronize()

    # --- with the lock held -----------------------------------------------------------------

    def _notice(self, stream: int) -> None:
        """Remember what streams have come by, and have P go on where the default stream ends."""
        if self._is_ended:
            raise closed()
        if self._by_default_stream and stream != DEFAULT_STREAM:
            self._shared.event.record(DEFAULT_STREAM)
            wait_event(self._shared.p.handle, self._shared.event)
            self._by_default_stream = False
        self._several_streams |= self._stream not in (None, stream)
        self._stream = stream

    def _publish(self, count: int = 1) -> int:
        """Publish `count` more numbers behind what came before; return the last."""
        self._sequence += count
        stream = DEFAULT_STREAM if self._by_default_stream else self._shared.p.handle
        write_value(stream, self._shared.published, self._sequence)
        return self._sequence

    def _precede(self, stream: int) -> None:
        """Have what P publishes next come behind the work of `stream` so far."""
        self._shared.event.record(stream)
        wait_event(self._shared.p.handle, self._shared.event)

    def _follow(self, stream: int) -> None:
        """Order `stream` behind P, which is behind every copy."""
        self._shared.event.record(self._shared.p.handle)
        wait_event(stream, self._shared.event)
