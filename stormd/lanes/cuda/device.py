"""One GPU as all its sessions share it: context, codec, the pool as the device sees it, the link.

The pool is registered with the driver before the first session and until after the last. Each
direction of the link has one stream, so that both are busy at once and neither waits for the other.
No work on these two streams waits for a client.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from operator import attrgetter
from typing import Final, NamedTuple

from storm_kernels.ancf.cuda_launches import KIND_BYTES, BlobKind, blob_kind
from storm_kernels.ancf.prepared import PreparedCodec
from storm_kernels.cuda_driver import PrimaryContext, RegisteredHost, Stream, copy_async
from storm_kernels.errors import CudaDriverError

from stormd.lanes.cuda.first_copies import bytes_per_second
from stormd.memory.arena import Block
from stormd.memory.host_pool import HostPool
from stormd.monitoring.health import Heartbeat
from stormd.monitoring.link_meter import LinkLimit, LinkMeter

__all__ = ["CudaDevice", "DevicePool", "DeviceWatch"]

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
CLOSE_SECONDS: Final = 5.0
"""How long to wait for a slow driver; a thread whose driver hangs is abandoned."""


class _Registered(NamedTuple):
    """A range of the pool from offset `begin` to `end`, as it is registered with the driver."""

    begin: int
    end: int
    memory: RegisteredHost


class DevicePool:
    """The resident ranges of the host's pool, registered for all devices of these ordinals.

    Needs `close`. The driver registers a range once, for all contexts that exist. So this object
    creates the contexts of all devices first, and keeps them.

    Raises:
        BackendUnavailable, CudaDriverError: there is no such device, or it cannot access the pool.
        StartStopped: the daemon is to end.
    """

    def __init__(self, ordinals: list[int], pool: HostPool) -> None:
        self.address = pool.address
        self._pool = pool
        # Sorted; replaced as a whole, so that copies continue while a range is added.
        self._ranges: tuple[_Registered, ...] = ()
        with ExitStack() as made:
            contexts = [made.enter_context(closing(PrimaryContext(n))) for n in ordinals]
            self._context = contexts[0]
            self._made = made
            for offset, nbytes in pool.ranges:
                self.extend(offset, nbytes)
            self._made = made.pop_all()

    def extend(self, offset: int, nbytes: int) -> None:
        """Register a further range; copies may be in flight elsewhere. May take a second.

        Raises:
            CudaDriverError: the driver refuses the range; no part of it is registered.
            StartStopped: the daemon is to end; no part of the range is registered.
        """
        self._context.make_current()
        memory = RegisteredHost(
            self.address + offset, nbytes, before_piece=self._pool.check_stopped
        )
        self._made.enter_context(closing(memory))
        added = _Registered(offset, offset + nbytes, memory)
        self._ranges = tuple(sorted((*self._ranges, added)))

    def retract(self, offset: int, nbytes: int) -> None:
        """Unregister a range that was registered as a whole. No copy may use it. May take a second.

        Raises:
            CudaDriverError: the device is broken.
        """
        (gone,) = [one for one in self._ranges if (one.begin, one.end) == (offset, offset + nbytes)]
        self._ranges = tuple(one for one in self._ranges if one is not gone)
        self._context.make_current()
        gone.memory.close()  # closed again at the end, which does nothing

    def copy_ranges(self, block: Block) -> Iterator[tuple[int, int]]:
        """Yield a block's ranges as (address, bytes), each of which one copy can cover."""
        ranges = self._ranges
        for offset, nbytes in block.used_extents():
            begin, end = offset, offset + nbytes
            index = bisect_right(ranges, begin, key=attrgetter("begin")) - 1
            while begin < end:
                known = ranges[index]
                size = min(end, known.end) - begin
                yield from known.memory.pieces(begin - known.begin, size)
                begin, index = begin + size, index + 1

    def close(self) -> None:
        """Unregister the pool, which must still be mapped; no device may use it any more."""
        self._context.make_current()
        self._made.close()


class CudaDevice:
    """The device of one ordinal, ready to encode. Needs `close`.

    Raises:
        BackendUnavailable, CudaDriverError: the device cannot be used; nothing is left behind.
    """

    def __init__(self, ordinal: int, pool: DevicePool) -> None:
        self._pool = pool
        with ExitStack() as made:
            self.context = made.enter_context(closing(PrimaryContext(ordinal)))
            self.context.make_current()
            self.codec = made.enter_context(closing(PreparedCodec(ordinal)))
            self.down = made.enter_context(closing(Stream()))
            self.up = made.enter_context(closing(Stream()))
            self._made = made.pop_all()
        self.uuid = self.context.uuid
        self.is_shared_by_mps = self.context.shared_by_mps()
        self.link = LinkMeter(
            f"cuda:{ordinal}", self.uuid, initial=bytes_per_second(self.down, self.up)
        )
        self.limit = LinkLimit()
        self.heartbeat = Heartbeat(f"cuda:{ordinal}")
        self.fault = ""
        """Why the device is broken, which is permanent for this process; empty while it works."""

    def copy_down(self, source: int, block: Block, begin: int = 0) -> None:
        """Put the copy of a blob, from its byte `begin` on, to its block on the stream `down`.

        `source` is the address of those bytes.
        """
        for target, size in self._pool.copy_ranges(block):
            left_out = min(begin, size)
            begin -= left_out
            if left_out < size:
                copy_async(target + left_out, source, size - left_out, self.down.handle)
                source += size - left_out

    def is_link_idle(self) -> bool:
        """Return whether the link to the pool is idle; False if the device is broken."""
        try:
            return self.down.done()
        except CudaDriverError:
            return False

    def put_header(self, block: Block, header: bytes) -> None:
        """Write a blob's header, which lies in one extent, from the CPU into its block."""
        ctypes.memmove(self._pool.address + block.extents[0].offset, header, len(header))

    def copy_up(self, block: Block, destination: int) -> None:
        """Put the copy of a block's blob to `destination` on the stream `up`."""
        for source, size in self._pool.copy_ranges(block):
            copy_async(destination, source, size, self.up.handle)
            destination += size

    def kind(self, block: Block) -> BlobKind:
        """Return the kind in the blob's header, whose start lies in one extent.

        Raises:
            CorruptBlob: it names no element type.
        """
        header = self._pool.address + block.extents[0].offset
        return blob_kind(ctypes.string_at(header, KIND_BYTES))

    def check_fault(self) -> None:
        """Check and record whether the device is broken, by its own work or another process's.

        May take a second. Not for the event loop.
        """
        if self.fault:
            return
        with self.heartbeat:  # the heartbeat reports a driver that hangs, too
            try:
                self.context.make_current()
                self.down.done()
            except CudaDriverError as error:
                self._breaks(error)

    def settle(self, stream: Stream) -> None:
        """Wait until the stream is done; on a broken device nothing runs any more."""
        try:
            stream.synchronize()
        except CudaDriverError as error:
            self._breaks(error)

    def _breaks(self, error: CudaDriverError) -> None:
        """Report in `fault` and the heartbeat that this process must be restarted."""
        if not self.fault:
            log.error("the device is broken: %s", error)
        self.fault = f"{self.heartbeat.name}: {error}"
        self.heartbeat.ended(str(error))

    def close(self) -> None:
        """Close the device; its sessions must have ended."""
        self.context.make_current()
        self._made.close()


class DeviceWatch:
    """Makes devices check twice a second whether they are broken, from now on until `close`.

    Suppose that under CUDA's MPS a process is killed while one of its kernels runs. Then the
    contexts of all other processes fail, on every GPU of the server and from then on. MPS takes no
    new process until all of them have ended. So a daemon that did not notice would keep every later
    training from its GPU. The watch has a thread of its own: the driver has taken 0.4 s for the
    answer.
    """

    def __init__(self, devices: Iterable[CudaDevice]) -> None:
        self._devices = tuple(devices)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stormd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking; return once no check runs. Calling it twice is fine."""
        self._stopping.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            for device in self._devices:
                device.check_fault()
