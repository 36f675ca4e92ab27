"""The sessions of one client, one per device, each opened when it is first needed.

If the session of a device cannot be opened, this is remembered: the device's tensors are kept,
without another attempt. Sessions that nobody can use any more end even if nobody closes them.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Final

import torch

from storm_client.errors import DaemonUnavailable, UsageError
from storm_client.lanes import Lane, LaneHello
from storm_client.lanes.cpu import CpuLane
from storm_client.transport.connection import Connection
from storm_client.transport.io_thread import Listener
from storm_client.transport.session import Session
from stormd.protocol import NO_LANE

__all__ = ["Sessions", "lane_for"]

CPU = torch.device("cpu")

NVIDIA: Final = Path("/dev/nvidiactl")
"""Exists if NVIDIA's driver is loaded."""


class Sessions:
    """All sessions with the daemon at one address."""

    def __init__(self, address: str, timeout: float) -> None:
        """Connect: with the host memory's session if there is no other device.

        If there is a GPU, connect with a session that only asks questions and takes no share of the
        pool.

        Raises:
            StormError: as Connection.
        """
        self.address = address
        self._timeout = timeout
        # Protects _closed and the sessions; a signal handler may close in _open.
        self._lock = threading.RLock()
        self._closed = False
        self._sessions: dict[torch.device, Session | None] = {}
        """By device; None where none can be opened."""
        self.open: list[Session] = []
        """All sessions, each from before it is in the table."""
        self.control: Session | Control
        """Carries questions that concern no device."""
        if _may_have_gpu():
            self.control = Control(address, timeout)
        else:
            self.control = self._sessions[CPU] = Session(address, CpuLane(), timeout)
            self.open.append(self.control)
        self.control.connection.end_with(self)

    def check(self) -> None:
        """Raise if the sessions cannot be used: closed, forked, or the daemon is lost."""
        if self._closed:
            raise UsageError("the client is closed; call storm_client.connect() for another")
        self.control.connection.check()
        for session in self.open or (self.control,):  # their daemon is the same
            session.connection.check_now()

    @property
    def lost(self) -> bool:
        """Whether a session has lost its daemon, or was closed."""
        return self.control.connection.lost or any(session.connection.lost for session in self.open)

    def of(self, device: torch.device) -> Session | None:
        """Return the session of `device`, opened if necessary; None if there is none."""
        try:
            return self._sessions[device]
        except KeyError:
            return self._open(device)

    def opened(self, device: torch.device) -> Session | None:
        """Return the session of `device` if it is open."""
        return self._sessions.get(device)

    def settle(self, timeout: float) -> None:
        """Wait until the stores in flight are encoded, for `timeout` seconds per session."""
        for session in self.open:
            session.settle(timeout)

    def send_unshared(self) -> None:
        """Send the records whose storages nobody else holds any more.

        Raises:
            DaemonLost: a daemon is gone.
        """
        for session in self.open:
            session.send_unshared()

    def sweep(self) -> None:
        """Release all that is no longer needed, here and, soon, in the daemon."""
        for session in self.open:
            session.sweep()

    def flush(self) -> None:
        """Send what was posted.

        Raises:
            DaemonLost: a daemon is gone.
        """
        for session in self.open:
            with session.connection.lock:
                session.connection.flush()

    def close(self) -> None:
        """End all sessions. A second call has no effect."""
        with self._lock:
            self._closed = True
        for session in self.open:
            session.close()
        self.control.close()

    def _open(self, device: torch.device) -> Session | None:
        with self._lock:
            if device not in self._sessions:
                self.check()
                self._sessions[device] = self._session(device)
                if self._closed:
                    self.close()
                    self.check()
            return self._sessions[device]

    def _session(self, device: torch.device) -> Session | None:
        """Return a new session; None, with a warning, if tensors of `device` have to be kept."""
        try:
            session = Session(self.address, lane_for(device), self._timeout)
        except (UsageError, DaemonUnavailable) as error:
            warnings.warn(f"nothing on {device} is offloaded: {error}", stacklevel=2)
            return None
        self.open.append(session)
        session.connection.end_with(self)
        return session


class Control(Listener):
    """A session without data: it asks the daemon, and notices the daemon's end."""

    def __init__(self, address: str, timeout: float) -> None:
        """Connect within `timeout` seconds.

        Raises:
            StormError: as Connection.
        """
        self.connection = Connection(address, LaneHello(device=NO_LANE), timeout)
        self.connection.start(self)

    def close(self) -> None:
        """End the session. A second call has no effect."""
        self.connection.close()


def _may_have_gpu() -> bool:
    """Return whether tensors may be on a GPU, without a call that would initialize CUDA."""
    return torch.version.cuda is not None and NVIDIA.exists()


def lane_for(device: torch.device, *, in_place: bool = True) -> Lane:
    """Return a lane for tensors of `device`, not attached yet; without `in_place` it only copies.

    Raises:
        UsageError: the device type has no lane, or the device cannot be used here.
    """
    if device.type == "cpu":
        return CpuLane()
    if device.type == "cuda":
        from storm_client.lanes.cuda import CudaLane  # loads CUDA, which CPU runs never need

        return CudaLane(device, in_place=in_place)
    raise UsageError(f"there is no lane for device {device}")
