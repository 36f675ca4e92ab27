"""What a cuda lane and the daemon share: the timeline page and the staging area.

The area is not PyTorch's memory, so it can be exported whatever allocator the script has chosen. It
and the page live until no stream of the lane uses them.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import ExitStack, closing

import torch
from storm_kernels.cuda_driver import DeviceBuffer, Event, RegisteredHost, Stream
from storm_kernels.errors import CudaDriverError

from storm_client.errors import DaemonLost
from storm_client.lanes import STAGING
from stormd.protocol import MapSegment
from stormd.protocol.timeline import PAGE_BYTES, PUBLISHED, STORED, Timelines

__all__ = ["Shared", "closed", "share"]


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
