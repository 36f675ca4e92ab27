"""Frees a device's memory when it has run out: memory that a session holds or has mapped."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from storm_client.errors import StormError
from storm_client.transport.connection import send_offers
from storm_client.transport.kept_memory import offload_kept
from stormd.protocol import UnmapSegment

if TYPE_CHECKING:
    import torch

    from storm_client.transport.session import Session
    from storm_client.transport.store import Outbound

__all__ = ["DeviceMemory"]

BARRIER_SECONDS = 2.0
"""How long a thread without memory waits for the daemon to unmap freed memory."""


class DeviceMemory:
    """The device memory of one session, for any thread; see memory_pressure."""

    def __init__(self, session: Session, outbound: Outbound) -> None:
        """Free what `session` has on its device, and the sources that `outbound` holds."""
        self._session = session
        self._outbound = outbound

    @property
    def device(self) -> torch.device:
        """The session's device."""
        return self._session.device

    def unmap_freed_memory(self) -> None:
        """Shrink the window, drop prefetched memory, and return once freed memory is unmapped."""
        session = self._session
        if session.lane.in_place is None:
            return
        with session.connection.lock:
            session.transfers.window.shrink()
            session.transfers.cancel_prefetched()
        self._unmap_freed()

    def make_room(self) -> None:
        """Free all device memory that the backward pass does not need for now.

        Saved tensors that nobody else holds are offloaded, stored sources are no longer held, and
        prefetched memory is given up. This waits a few seconds at most, until the daemon neither
        reads nor writes that memory.
        """
        session = self._session
        with suppress(StormError):
            session.send_unshared()
            with session.connection.lock:
                session.connection.check()
                session.transfers.cancel_prefetched()
                self._outbound.release_all_sources()
                end = time.monotonic() + BARRIER_SECONDS
                while session.transfers.prefetched_bytes and session.connection.wait(end):
                    pass
        self._unmap_freed()

    def offload_kept(self) -> int:
        """Offload kept tensors that nobody else holds; return the number of bytes."""
        moved = 0
        with suppress(StormError):
            moved = offload_kept(self._session)
        return moved

    def _unmap_freed(self) -> None:
        """Have the daemon unmap freed memory, and return when that is done."""
        session = self._session
        in_place = session.lane.in_place
        if in_place is None:
            return
        with suppress(StormError):  # the allocation that needs the memory fails in any case
            with session.connection.lock:
                session.connection.check()
                is_given_back = in_place.sweep()
                send_offers(session.connection, in_place.segments)
                barrier = in_place.barrier() if is_given_back else None
            if barrier is not None:
                session.connection.request(barrier, BARRIER_SECONDS)
                with session.connection.lock:
                    session.connection.send(0, UnmapSegment(barrier.segment))
