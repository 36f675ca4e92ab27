"""The sessions of one client, one a device, opened when first needed.

A device whose session could not be had is remembered: its tensors stay where they are without a
question each time. Sessions that nobody can use any more end, though nobody has closed them.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Protocol

import torch

from storm_client.errors import DaemonUnavailable, UsageError
from storm_client.lanes import Lane
from storm_client.lanes.cpu import CpuLane
from storm_client.session import Session

__all__ = ["Sessions", "abandon_with", "lane_for"]

CPU = torch.device("cpu")


class Sessions:
    """All sessions with the daemon at one address."""

    def __init__(self, address: str, timeout: float, codec_in: str = "auto") -> None:
        """Open the session of the host's memory; it also carries status requests.

        `codec_in` says where tensors on a GPU are encoded, as `connect` does.

        Raises:
            StormError: as Connection.
        """
        self.address = address
        self._timeout = timeout
        self._codec_in = codec_in
        self._lock = threading.Lock()  # protects what is opened and _closed
        self._closed = False
        self._sessions: dict[torch.device, Session | None] = {}
        self.control = Session(address, CpuLane(), timeout)
        self._sessions[CPU] = self.control
        self._abandons = abandon_with(self, self._sessions)

    def check(self) -> None:
        """Raise what keeps the sessions from being used: closed, forked, daemon lost by now."""
        if self._closed:
            raise UsageError("the client is closed; call storm_client.connect() for another")
        for session in self._open_sessions():
            session.connection.check_now()

    @property
    def lost(self) -> bool:
        """Whether a session has lost its daemon, or was closed."""
        return any(session.connection.lost for session in self._open_sessions())

    def of(self, device: torch.device) -> Session | None:
        """Return the session of `device`, opening it if need be; None where there is none."""
        try:
            return self._sessions[device]
        except KeyError:
            return self._open(device)

    def settle(self, timeout: float) -> None:
        """Wait until the stores under way have been encoded, `timeout` seconds a session."""
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
        self._abandons.detach()

    def _open(self, device: torch.device) -> Session | None:
        with self._lock:
            if device not in self._sessions:
                self.check()
                self._sessions[device] = self._session(device)
            return self._sessions[device]

    def _session(self, device: torch.device) -> Session | None:
        """Return a new session; None, with a warning, where tensors of `device` have to stay."""
        try:
            return Session(self.address, lane_for(device, self._codec_in), self._timeout)
        except (UsageError, DaemonUnavailable) as error:
            warnings.warn(f"nothing on {device} is offloaded: {error}", stacklevel=2)
            return None

    def _open_sessions(self) -> list[Session]:
        return [session for session in list(self._sessions.values()) if session is not None]


class _Abandoned(Protocol):
    def abandon(self) -> None: ...


def abandon_with(
    owner: object, sessions: Mapping[torch.device, _Abandoned | None]
) -> weakref.finalize[..., object]:
    """Have sessions end by themselves when `owner` dies, through which alone they are used.

    Those count that are among `sessions` then.
    """
    finalizer = weakref.finalize(owner, _abandon, sessions)
    finalizer.atexit = False
    return finalizer


def _abandon(sessions: Mapping[torch.device, _Abandoned | None]) -> None:
    for session in sessions.values():
        if session is not None:
            session.abandon()


def lane_for(device: torch.device, codec_in: str = "auto") -> Lane:
    """Return a lane for tensors of `device`, not yet attached, that codes where it is told to.

    Raises:
        UsageError: there is none for such a device, or it cannot be used here.
    """
    if device.type == "cpu":
        return CpuLane()
    if device.type == "cuda":
        from storm_client.lanes.cuda import CudaLane  # loads CUDA, which a cpu run never needs

        return CudaLane(device, codec_in)
    raise UsageError(f"there is no lane for device {device}")
