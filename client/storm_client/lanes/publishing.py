"""The numbers that a cuda lane publishes, and the order of copies among a script's streams.

The counter `published` tells the daemon which copies are complete. So its values must reach memory
in order: only one stream may write it at a time. As long as the script uses only the default
stream, this is the default stream: one call writes a number after the stream's own work. Once
another stream is used, a stream P writes the counter, and P does nothing else. Each copy's stream
records an event, and P waits for it; so the next number from P says that the copy is complete. A
range of the staging area is overwritten after the copies that used it before, in stream order.

Streams are passed as handles; all methods are called in the lane's context.

The lane and the daemon share the page and the staging area, once there is one. The area is not
PyTorch's memory, so it can be exported with any allocator. Page and area exist until no stream uses
them.
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

from storm_client.devices import unused_bytes
from storm_client.errors import DaemonLost
from stormd.protocol.timeline import PAGE_BYTES, PUBLISHED, STORED, Timelines

__all__ = ["Publisher", "Shared", "closed", "new_area"]

DEFAULT_STREAM = 0
"""The handle of each device's default stream, which is never destroyed nor captured."""


class Shared:
    """The page shared with the daemon, the stream and event that order copies, the staging area.

    Raises:
        KernelsError: a CUDA object cannot be made; those made before are freed.
    """

    def __init__(self, descriptor: int) -> None:
        with ExitStack() as made:
            memory = made.enter_context(mmap.mmap(descriptor, PAGE_BYTES))
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            page = made.enter_context(closing(RegisteredHost(address, PAGE_BYTES)))
            self.p = made.enter_context(closing(Stream()))
            self.event = made.enter_context(closing(Event()))
            self._made = made.pop_all()
        self.area: DeviceBuffer | None = None
        """None until `use_area`."""
        self.timelines = Timelines(address)
        self.page_address = page.device_address
        """The page's address on the device."""
        self.published = page.device_address + PUBLISHED
        self.stored = page.device_address + STORED

    def use_area(self, area: DeviceBuffer) -> None:
        """Take over a staging area; there was none before."""
        self._made.callback(area.close)
        self.area = area

    def close(self) -> None:
        """Free all objects; this waits for the device."""
        self.p.synchronize()
        self._made.close()


def closed() -> DaemonLost:
    """Return the error for a thread that uses an object which another thread has closed."""
    return DaemonLost("the daemon was lost, or the client closed, while a tensor was in flight")


def new_area(nbytes: int, device: torch.device) -> DeviceBuffer:
    """Allocate a staging area; if only PyTorch's unused memory has room for it, free that.

    Raises:
        CudaDriverError: the device has no memory.
    """
    try:
        return DeviceBuffer(nbytes)
    except CudaDriverError as error:
        if error.code != "CUDA_ERROR_OUT_OF_MEMORY" or unused_bytes(device) < nbytes:
            raise
    torch.cuda.empty_cache()
    return DeviceBuffer(nbytes)


class Publisher:
    """Publishes the numbers of one lane, for any thread. Call `end` and then `settle` at the end.

    After `end`, all other methods raise DaemonLost.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lock = threading.Lock()  # protects the event and all attributes below
        self._is_ended = False
        self._sequence = 0
        self._stream: int | None = None
        self._several_streams = False
        self._by_default_stream = True

    def publish(self, stream: int) -> int:
        """Publish the next number after all copies so far, for a thread on `stream`."""
        with self._lock:
            self._notice(stream)
            return self._publish()

    def publish_numbers(self, stream: int, count: int) -> range:
        """Return `count` numbers that are published after the work of `stream` so far."""
        with self._lock:
            self._notice(stream)
            if not self._by_default_stream:
                self._precede(stream)
            last = self._publish(count)
        return range(last - count + 1, last + 1)

    @property
    def last(self) -> int:
        """The latest number, which is published when its stream reaches it."""
        return self._sequence

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on `stream`, after other streams' use of the area and before later numbers."""
        with self._lock:
            self._notice(stream)
            if self._several_streams:
                self._follow(stream)
            copy_async(target, source, nbytes, stream)
            if not self._by_default_stream:
                self._precede(stream)

    def is_only_stream(self, stream: int) -> bool:
        """Return whether all copies so far were on `stream`, so that it has to follow none."""
        return stream == self._stream and not self._several_streams

    def follow(self, stream: int) -> bool:
        """Order `stream` after all copies; return False if no other stream has made any."""
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
        """Wait until the default stream has written its last number; closing P waits for P."""
        if self._by_default_stream:
            self._shared.event.record(DEFAULT_STREAM)
            self._shared.event.synchronize()

    # --- with the lock held -----------------------------------------------------------------

    def _notice(self, stream: int) -> None:
        """Note a stream's use; the first use of a non-default stream makes P the publisher."""
        if self._is_ended:
            raise closed()
        if self._by_default_stream and stream != DEFAULT_STREAM:
            self._shared.event.record(DEFAULT_STREAM)
            wait_event(self._shared.p.handle, self._shared.event)
            self._by_default_stream = False
        self._several_streams |= self._stream not in (None, stream)
        self._stream = stream

    def _publish(self, count: int = 1) -> int:
        """Publish `count` further numbers after all before; return the last."""
        self._sequence += count
        stream = DEFAULT_STREAM if self._by_default_stream else self._shared.p.handle
        write_value(stream, self._shared.published, self._sequence)
        return self._sequence

    def _precede(self, stream: int) -> None:
        """Order P's next number after the work of `stream` so far."""
        self._shared.event.record(stream)
        wait_event(self._shared.p.handle, self._shared.event)

    def _follow(self, stream: int) -> None:
        """Order `stream` after P, and so after every copy."""
        self._shared.event.record(self._shared.p.handle)
        wait_event(stream, self._shared.event)
