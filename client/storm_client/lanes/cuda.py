"""The cuda lane: tensors in device memory, staged through memory that the daemon maps.

What stays true: the training thread never waits for the device here. A range of the staging area
is overwritten only behind the copies that used it before, in the order of streams; and the
counter `published` reaches memory in the order of its values, because one stream writes it.

That stream P takes part in nothing else: each copy's stream leaves an event that P waits for, so
what P writes next says that the copy is done. Both the staging area and P are the lane's own and
not PyTorch's, so the area can be exported whatever allocator the script has chosen.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import ExitStack, closing

import torch
from storm_kernels.errors import CudaDriverError, KernelsError

from storm_client.errors import DaemonUnavailable, UsageError
from storm_client.lanes import LaneHello, Request, Slot
from storm_client.staging import StagingSpace
from stormd.protocol import MapSegment, Welcome
from stormd.protocol.timeline import PAGE_BYTES, PUBLISHED, RESTORED, STORED, Timelines

try:
    from storm_kernels.cuda_driver import (
        DeviceBuffer,
        Event,
        PrimaryContext,
        RegisteredHost,
        Stream,
        buffer_id,
        copy_async,
        wait_event,
        write_value,
    )
except KernelsError as error:
    raise UsageError(f"tensors on a GPU stay there: {error}") from error

__all__ = ["CudaLane"]

STAGING = 0
"""The segment that is the staging area."""

STAGING_DIVISOR = 32
"""What part of a device's memory is asked for as staging area; a daemon may grant less."""


class CudaLane:
    """Copies between tensors of one device and a staging area in that device's memory.

    Raises:
        UsageError: the device cannot be used through the CUDA driver.
    """

    keeps_stored = True

    def __init__(self, device: torch.device) -> None:
        """Describe the lane; attach gives it its memory."""
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", ordinal)
        try:
            self._context = PrimaryContext(ordinal)
        except KernelsError as error:
            raise UsageError(f"tensors on {device} stay there: {error}") from error
        self.hello = LaneHello(
            device="cuda",
            device_uuid=self._context.uuid,
            ipc_modes=("cuda_ipc",),
            staging_bytes=torch.cuda.get_device_properties(ordinal).total_memory // STAGING_DIVISOR,
        )
        self.staging_bytes = 0
        self._ordinal = ordinal
        self._space = StagingSpace(0)
        self._lock = threading.Lock()
        """Protects the event, the sequence of P, and what is known about streams."""
        self._sequence = 0
        self._stream: int | None = None
        self._several_streams = False
        self._shared: _Shared | None = None
        self._thread = threading.local()

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        """Map the timeline page, make the staging area, and have the daemon map it.

        Raises:
            DaemonUnavailable: the daemon shared no page.
            UsageError: the device has no memory for the staging area, or cannot export it.
            StormError: the daemon's refusal.
        """
        if not descriptors:
            raise DaemonUnavailable(
                "the daemon shared no timeline page with this cuda session; see its log"
            )
        with torch.cuda.device(self._ordinal):
            self._context.make_current()
            try:
                self._shared = _share(descriptors[0], welcome.staging_bytes)
            except KernelsError as error:
                raise UsageError(
                    f"no staging area of {welcome.staging_bytes} bytes on {self.device}: {error}"
                ) from error
            request(self._shared.offer())
        self.staging_bytes = welcome.staging_bytes
        self._space = StagingSpace(welcome.staging_bytes)

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a slot of `nbytes`, None where there is no room now."""
        offset = self._space.allocate(nbytes)
        return None if offset is None else Slot(STAGING, offset, nbytes)

    def free(self, slot: Slot) -> None:
        """Take a slot back. Copies of it that streams have yet to make stay in order."""
        self._space.free(slot.offset)

    def publish(self, slot: Slot) -> int:  # noqa: ARG002 - P is behind all copies so far
        """Have P write the next number, behind every copy that was staged or unstaged so far."""
        shared = self._open()
        with torch.cuda.device(self._ordinal), self._lock:
            self._enter()
            self._sequence += 1
            write_value(shared.p.handle, shared.published, self._sequence)
            return self._sequence

    def stage(self, source: torch.Tensor, slot: Slot) -> None:
        """Put a copy of `source` into the slot on the current stream.

        The memory of `source` may be used again behind that copy, as by any work on the stream.
        """
        target = self._open().area.address + slot.offset
        with torch.cuda.device(self._ordinal):
            self._enter()
            stream = torch.cuda.current_stream()
            source.record_stream(stream)
            self._copy(target, source.data_ptr(), slot.nbytes, stream.cuda_stream)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor on the device."""
        # Not torch.empty(nbytes), which fills it where deterministic algorithms are asked for.
        storage = torch.UntypedStorage(nbytes, device=self.device)  # type: ignore[no-untyped-call]  # torch's gap
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.set_(storage, 0, (nbytes,), (1,))

    def unstage(self, slot: Slot, destination: torch.Tensor) -> None:
        """Put a copy of the slot into `destination` on the current stream."""
        source = self._open().area.address + slot.offset
        with torch.cuda.device(self._ordinal):
            self._enter()
            stream = torch.cuda.current_stream().cuda_stream
            self._copy(destination.data_ptr(), source, slot.nbytes, stream)

    def use(self, restored: torch.UntypedStorage) -> None:
        """Order the current stream behind all copies so far, where others may have made them."""
        stream = torch.cuda.current_stream(self.device)
        with self._lock:
            self._notice(stream.cuda_stream)
            if not self._several_streams:
                return
        with torch.cuda.device(self._ordinal):
            self._enter()
            with self._lock:
                self._follow(stream.cuda_stream)
            view = torch.empty(0, dtype=torch.uint8, device=self.device).set_(restored)
            view.record_stream(stream)

    def poison(self) -> None:
        """Release every wait on the daemon's counters."""
        with self._lock:
            if self._shared is not None:
                self._shared.timelines.poison(STORED, RESTORED)

    def close(self) -> None:
        """Free the staging area once no stream uses it; the daemon has unmapped it, or is dead."""
        with self._lock:
            shared, self._shared = self._shared, None
        if shared is not None:
            with torch.cuda.device(self._ordinal):
                self._context.make_current()
                shared.close()
        self._context.close()

    # --- helpers ----------------------------------------------------------------------------

    def _open(self) -> _Shared:
        assert self._shared is not None, "the lane is closed"
        return self._shared

    def _enter(self) -> None:
        """Make the driver's calls possible in a new thread, whose device must be the lane's."""
        if not hasattr(self._thread, "entered"):
            self._context.make_current()
            self._thread.entered = True

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on `stream`, behind what other streams did with the area, and P behind it."""
        shared = self._open()
        with self._lock:
            self._notice(stream)
            if self._several_streams:
                self._follow(stream)
            copy_async(target, source, nbytes, stream)
            shared.event.record(stream)
            wait_event(shared.p.handle, shared.event)

    def _notice(self, stream: int) -> None:
        """Remember whether more than one stream has come by; with the lock held."""
        self._several_streams |= self._stream not in (None, stream)
        self._stream = stream

    def _follow(self, stream: int) -> None:
        """Order `stream` behind P, which is behind every copy; with the lock held."""
        shared = self._open()
        shared.event.record(shared.p.handle)
        wait_event(stream, shared.event)


class _Shared:
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
        self.published = page.device_address + PUBLISHED

    def offer(self) -> MapSegment:
        """Return the message that lets the daemon map the staging area."""
        area = self.area
        return MapSegment(STAGING, area.ipc_handle(), buffer_id(area.address), area.nbytes)

    def close(self) -> None:
        """Give all of it up; waits for the device."""
        self.p.synchronize()
        self._made.close()


def _share(descriptor: int, staging_bytes: int) -> _Shared:
    """Make what is shared, with memory that PyTorch keeps but does not use if there is no other."""
    try:
        return _Shared(descriptor, staging_bytes)
    except CudaDriverError as error:
        if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
    torch.cuda.empty_cache()
    return _Shared(descriptor, staging_bytes)
