"""Lets go of a device's memory when that has run out: what a session holds or keeps mapped."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from storm_client.errors import StormError
from storm_client.lanes.segments import tell
from storm_client.transport.kept_memory import offload_kept
from stormd.protocol import UnmapSegment

if TYPE_CHECKING:
    import torch

    from storm_client.transport.session import Session
    from storm_client.transport.store import Outbound

__all__ = ["DeviceMemory"]

BARRIER_SECONDS = 2.0
"""How long a thread that is out of memory waits for the daemon to unmap what was freed."""


class DeviceMemory:
    """That of one session, for any thread; see memory_pressure."""

    def __init__(self, session: Session, outbound: Outbound) -> None:
        """Let go of what `session` has on its device, and `outbound` holds."""
        self._session = session
        self._outbound = outbound

    @property
    def device(self) -> torch.device:
        """That of the session."""
        return self._session.device

    def give_back_memory(self) -> None:
        """Sweep, and return when the freed memory can be allocated again."""
        session = self._session
        if session.lane.in_place is None:
            return
        with session.connection.lock:
            session.transfers.window.shrink()
            session.transfers.forget_early()
        self._unmap_freed()

    def make_room(self) -> None:
        """Let go of all device memory that the backward pass can do without for now.

        What nobody else holds leaves, what was stored is not held, and what was prefetched is
        given up. Waits a few seconds at most, until the daemon neither reads nor writes it.
        """
        session = self._session
        with suppress(StormError):
            session.send_unshared()
            with session.connection.lock:
                session.connection.check()
                session.transfers.forget_early()
                self._outbound.let_all_go()
                end = time.monotonic() + BARRIER_SECONDS
                while session.transfers.early_bytes and session.connection.wait(end):
                    pass
        self._unmap_freed()

    def offload_kept(self) -> int:
        """Offload what steps keep on the device and nobody else holds; return how many bytes."""
        moved = 0
        with suppress(StormError):
            moved = offload_kept(self._session)
        return moved

    def _unmap_freed(self) -> None:
        """Have mappings of freed memory undone, and return when that is done."""
        session = self._session
        in_place = session.lane.in_place
        if in_place is None:
            return
        with suppress(StormError):  # the allocation that asks for it fails in any case
            with session.connection.lock:
                session.connection.check()
                is_given_back = in_place.sweep()
                tell(session.connection, in_place.segments)
                barrier = in_place.barrier() if is_given_back else None
            if barrier is not None:
                session.connection.request(barrier, BARRIER_SECONDS)
                with session.connection.lock:
                    session.connection.send(0, UnmapSegment(barrier.segment))
