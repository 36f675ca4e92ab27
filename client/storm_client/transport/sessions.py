"""The sessions of one client, one a device, opened when first needed.

A device whose session could not be had is remembered: its tensors stay where they are without a
question each time. Sessions that nobody can use any more end, though nobody has closed them.
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
"""There where NVIDIA's driver is."""


class Sessions:
    """All sessions with the daemon at one address."""

    def __init__(self, address: str, timeout: float) -> None:
        """Connect, by the session of the host's memory where that is the only device.

        Where there is a GPU it is by one that only asks, and takes nobody's share.

        Raises:
            StormError: as Connection.
        """
        self.address = address
        self._timeout = timeout
        self._lock = threading.Lock()  # protects what is opened and _closed
        self._closed = False
        self._sessions: dict[torch.device, Session | None] = {}
        self.control: Session | Control
        """Carries the questions that are about no device."""
        if _may_have_gpu():
            self.control = Control(address, timeout)
        else:
            self.control = self._sessions[CPU] = Session(address, CpuLane(), timeout)
        self.control.connection.end_with(self)

    def check(self) -> None:
        """Raise what keeps the sessions from being used by now: closed, forked, daemon lost."""
        if self._closed:
            raise UsageError("the client is closed; call storm_client.connect() for another")
        self.control.connection.check_now()
        for session in self._open_sessions():
            if session is not self.control:
                session.connection.check_now()

    @property
    def lost(self) -> bool:
        """Whether a session has lost its daemon, or was closed."""
        return self.control.connection.lost or any(
            session.connection.lost for session in self._open_sessions()
        )

    def of(self, device: torch.device) -> Session | None:
        """Return the session of `device`, opening it if need be; None where there is none."""
        try:
            return self._sessions[device]
        except KeyError:
            return self._open(device)

    def opened(self, device: torch.device) -> Session | None:
        """Return the session of `device` if there is one by now."""
        return self._sessions.get(device)

    def settle(self, timeout: float) -> None:
        """Wait until the stores in flight have been encoded, `timeout` seconds a session."""
        for session in self._open_sessions():
            session.settle(timeout)

    def send_unshared(self) -> None:
        """Send what was saved and nobody else holds any more.

        Raises:
            DaemonLost: a daemon is gone.
        """
        for session in self._open_sessions():
            session.send_unshared()

    def sweep(self) -> None:
        """Give up what is not needed any more, here and in the daemon."""
        for session in self._open_sessions():
            session.sweep()

    def close(self) -> None:
        """End all sessions. Calling it twice is fine."""
        with self._lock:
            self._closed = True
        for session in self._open_sessions():
            session.close()
        self.control.close()

    def _open(self, device: torch.device) -> Session | None:
        with self._lock:
            if device not in self._sessions:
                self.check()
                self._sessions[device] = self._session(device)
            return self._sessions[device]

    def _session(self, device: torch.device) -> Session | None:
        """Return a new session; None, with a warning, where tensors of `device` have to stay."""
        try:
            session = Session(self.address, lane_for(device), self._timeout)
        except (UsageError, DaemonUnavailable) as error:
            warnings.warn(f"nothing on {device} is offloaded: {error}", stacklevel=2)
            return None
        session.connection.end_with(self)
        return session

    def _open_sessions(self) -> list[Session]:
        return [session for session in list(self._sessions.values()) if session is not None]


class Control(Listener):
    """A session that holds nothing: it asks the daemon, and notices its end."""

    def __init__(self, address: str, timeout: float) -> None:
        """Connect within `timeout` seconds.

        Raises:
            StormError: as Connection.
        """
        self.connection = Connection(address, LaneHello(device=NO_LANE), timeout)
        self.connection.start(self)

    def close(self) -> None:
        """End it. Calling it twice is fine."""
        self.connection.close()


def _may_have_gpu() -> bool:
    """Tell whether tensors will probably be on a GPU; CUDA is not asked, which would start it."""
    return torch.version.cuda is not None and NVIDIA.exists()


def lane_for(device: torch.device) -> Lane:
    """Return a lane for tensors of `device`, not yet attached.

    Raises:
        UsageError: there is none for such a device, or it cannot be used here.
    """
    if device.type == "cpu":
        return CpuLane()
    if device.type == "cuda":
        from storm_client.lanes.cuda import CudaLane  # loads CUDA, which a cpu run never needs

        return CudaLane(device)
    raise UsageError(f"there is no lane for device {device}")
