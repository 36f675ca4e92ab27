"""The cuda lane: tensors in device memory are coded there; their blobs are in the pinned pool.

The event loop makes no CUDA call; it only queues work for other threads. A session is served by the
device whose UUID its Hello names, whatever ordinal that device has in either process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

from storm_kernels.errors import KernelsError

from stormd.errors import LaneUnavailable, error_with_remedy
from stormd.lanes import SEE_LOG, Attachment, Lane, Post, Speeds
from stormd.lanes.cuda.client import CudaClient
from stormd.lanes.cuda.device import CudaDevice, DevicePool, DeviceWatch
from stormd.lanes.cuda.session import CudaSession
from stormd.ledger.events import Mappable, RestoreJob, StoreJob
from stormd.memory.host_pool import HostPool
from stormd.memory.shared_memory import SharedMemory
from stormd.monitoring.health import Heartbeat
from stormd.monitoring.link_meter import LinkMeter
from stormd.open_files import close_all
from stormd.protocol import Hello
from stormd.protocol.timeline import PAGE_BYTES

__all__ = ["CudaLane"]

log = logging.getLogger(__name__)


class CudaLane(Lane):
    """Serves sessions on the devices of these ordinals; results go to `post`, from any thread.

    With `is_resumable`, a source may be reused only once the outcome of its store is recorded.
    `staging_bytes` and `chunk_bytes` are the most that a session is granted. Under MPS, chunks of
    at least `direct_bytes` may be copied directly; 0 disables that. `close` must follow.

    Raises:
        LaneUnavailable: a device, or CUDA itself, cannot be used; nothing is left behind.
    """

    device = "cuda"

    def __init__(
        self,
        ordinals: list[int],
        *,
        pool: HostPool,
        post: Post,
        staging_bytes: int,
        chunk_bytes: int,
        direct_bytes: int,
        is_resumable: bool = False,
    ) -> None:
        super().__init__(post)
        self._staging_bytes = staging_bytes
        self._chunk_bytes = chunk_bytes
        self._direct_bytes = direct_bytes
        self._is_resumable = is_resumable
        self._opened = ExitStack()
        self._pool, self._devices = _devices(ordinals, pool, self._opened)
        self._opened.enter_context(closing(DeviceWatch(self._devices.values())))
        # Changed only on the loop.
        self._sessions: dict[int, CudaSession] = {}
        self._ending: list[CudaSession] = []

    # --- called on the event loop -----------------------------------------------------------

    @property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """The heartbeats of the devices, and of the threads that serve sessions now."""
        devices = (device.heartbeat for device in self._devices.values())
        sessions = [*self._sessions.values(), *self._ending]
        return (*devices, *(heartbeat for session in sessions for heartbeat in session.heartbeats))

    @property
    def fault(self) -> str:
        return "; ".join(device.fault for device in self._devices.values() if device.fault)

    @property
    def links(self) -> tuple[LinkMeter, ...]:
        return tuple(device.link for device in self._devices.values())

    def extend(self, offset: int, nbytes: int) -> None:
        try:
            self._pool.extend(offset, nbytes)
        except KernelsError as error:
            raise LaneUnavailable(f"the pool cannot be registered further: {error}") from error

    def retract(self, offset: int, nbytes: int) -> None:
        self._pool.retract(offset, nbytes)

    def speeds(self, session: int) -> Speeds:
        served = self._sessions.get(session)
        if served is None:
            return Speeds()
        device = served.device
        link, limit = device.link, device.limit.bytes_per_second
        return Speeds(link.bytes_per_second(), limit, link.coded_per_second())

    def limit_link(self, bytes_per_second: int) -> None:
        for device in self._devices.values():
            device.limit.change(bytes_per_second)

    def attach(self, session: int, hello: Hello, descriptors: Sequence[int] = ()) -> Attachment:
        """Make the timeline page; the client makes a staging area and maps it as segment 0."""
        given, *others = descriptors or (-1,)
        close_all(others)
        device = self._devices.get(hello.device_uuid)
        if device is None:
            close_all((given,))
            raise LaneUnavailable(
                f"this daemon does not serve the GPU {hello.device_uuid or 'without a UUID'}, "
                f"only {', '.join(self._devices)}: check CUDA_VISIBLE_DEVICES on both sides"
            )
        try:
            page = SharedMemory(f"stormd-{session:x}-timeline", PAGE_BYTES, given)
        except OSError as error:
            raise LaneUnavailable(
                f"no shared page for a session: {error_with_remedy(error, SEE_LOG)}"
            ) from error
        staging = min(hello.staging_bytes or self._staging_bytes, self._staging_bytes)
        chunk_bytes = max(1, min(self._chunk_bytes, staging // 2))
        client = CudaClient(
            session,
            device,
            page,
            chunk_bytes=chunk_bytes,
            direct_bytes=self._direct_bytes,
            is_resumable=self._is_resumable,
            post=self._post,
        )
        self._sessions[session] = CudaSession(client)
        made = page.take_descriptor()
        if descriptors:  # the client has it
            close_all((made,))
        return Attachment(
            descriptors=() if descriptors else (made,),
            staging_bytes=staging,
            chunk_bytes=chunk_bytes,
            segment_bytes=0,
        )

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> tuple[()]:
        served = self._sessions[session]
        for job in jobs:
            if isinstance(job, StoreJob):
                served.store(job)
            else:
                served.restores.put(job)
        return ()

    def skip_sequence(self, session: int, sequence: int) -> None:
        self._sessions[session].skip_sequence(sequence)

    def recorded(self, session: int, sequences: Sequence[int]) -> None:
        self._sessions[session].recorded(sequences)

    def map_segment(self, session: int, request: Mappable, descriptor: int = -1) -> None:
        self._sessions[session].map_segment(request, descriptor)

    def unmap_segment(self, session: int, segment: int) -> None:
        self._sessions[session].unmap_segment(segment)

    def detach(self, session: int) -> None:
        """Release everything that waits for the client, and free all of the session."""
        self._ending = [ending for ending in self._ending if not ending.join(0.0)]
        self._ending.append(self._sessions.pop(session))
        self._ending[-1].detach()

    def close(self, seconds: float) -> bool:
        """Close the devices; return False and keep them if a session still uses one.

        A session that is still attached is left to another daemon, its client's memory untouched
        from then on.
        """
        deadline = time.monotonic() + seconds
        for session in list(self._sessions):
            self._ending.append(self._sessions.pop(session))
            self._ending[-1].abandon()
        for ending in self._ending:
            if not ending.join(max(0.0, deadline - time.monotonic())):
                return False
        try:
            self._opened.close()
        except KernelsError as error:  # a broken device, on which nothing runs any more
            log.warning("not everything on the devices could be freed: %s", error)
        return True


def _devices(
    ordinals: list[int], pool: HostPool, opened: ExitStack
) -> tuple[DevicePool, dict[str, CudaDevice]]:
    """Open the pool and the devices, by UUID, all or none; `opened` closes them."""
    try:
        with ExitStack() as made:
            shared = made.enter_context(closing(DevicePool(ordinals, pool)))
            devices = [made.enter_context(closing(CudaDevice(n, shared))) for n in ordinals]
            opened.push(made.pop_all())
    except KernelsError as error:
        raise LaneUnavailable(f"CUDA cannot be used: {error}") from error
    return shared, {device.uuid: device for device in devices}
