"""Supplies an Offload with sessions, and handles the loss of the daemon behind them.

Sessions are replaced only where a step begins, so a step's tensors are never with two daemons. What
a lost daemon held remains lost; needing it raises.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch

from storm_client.errors import DaemonLost, ProtocolMismatch, StormError, lost_in_forward
from storm_client.monitoring.status import DaemonStatus
from storm_client.planner.machine import TransferFigures
from storm_client.transport.sessions import Sessions
from stormd.protocol import Ping, Status, StatusRequest

__all__ = ["Supply"]

FIGURES_SECONDS = 0.5
"""For a daemon to report its copies' speeds; a plan can do without them."""

ATTEMPT_SECONDS = 1.0
"""Least seconds between the starts of two attempts."""


class Supply:
    """The sessions of one client: with its first daemon, or with a later one.

    If `keeps_without_daemon` is set, a lost daemon is no error for tensors saved from then on: they
    are kept in memory. Every step checks in the background whether a daemon answers again.
    """

    def __init__(self, connect: Callable[[], Sessions], *, keeps_without_daemon: bool) -> None:
        """Connect, and own the sessions that `connect` returns, now and later.

        Raises:
            StormError: as `connect` does.
        """
        self.keeps_without_daemon = keeps_without_daemon
        self._connect = connect
        # Protects all attributes below; a signal handler that closes may interrupt its owner.
        self._lock = threading.RLock()
        self._is_announced = False  # whether the loss is known
        self._is_trying = False  # whether an attempt to reconnect is under way
        self._next_attempt = float("-inf")
        self._found: Sessions | None = None
        self._attempt: threading.Thread | None = None
        self._closed = False
        self._sessions = connect()

    @property
    def sessions(self) -> Sessions:
        """The sessions in use, even if their daemon is lost."""
        return self._sessions

    def current(self) -> Sessions:
        """Return the sessions for a step that begins now.

        With `keeps_without_daemon` their daemon may be lost.

        Raises:
            UsageError: the client is closed, or this is a forked child.
            DaemonLost: the daemon is gone, and `keeps_without_daemon` is not set.
        """
        self._take_found()
        sessions = self._sessions
        try:
            sessions.check()
        except DaemonLost as loss:
            if not self.keeps_without_daemon:
                raise lost_in_forward(loss) from loss
            self._warn_and_reconnect(loss, sessions)
        return sessions

    def status(self, timeout: float) -> DaemonStatus:
        """Return the daemon's state, within `timeout` seconds.

        Raises:
            DaemonLost: the daemon is gone or does not answer.
        """
        sessions = self.current()
        sessions.sweep()
        sessions.flush()
        answer = sessions.control.connection.request(StatusRequest(), timeout)
        if not isinstance(answer, Status):
            raise ProtocolMismatch(f"StatusRequest was answered by {type(answer).__name__}")
        return DaemonStatus.of(answer.state)

    def figures(self, device: torch.device) -> TransferFigures:
        """Return the daemon's present figures for a device's link; empty if it does not answer."""
        session = self._sessions.opened(device)
        if session is not None:
            with suppress(StormError):
                session.connection.request(Ping(), FIGURES_SECONDS)
        return self.latest_figures(device)

    def latest_figures(self, device: torch.device) -> TransferFigures:
        """Return the latest figures for a device's link; each heartbeat brings new ones."""
        session = self._sessions.opened(device)
        if session is None:
            return TransferFigures()
        return TransferFigures.of(session.connection.speeds)

    def close(self) -> None:
        """End all sessions. A second call has no effect."""
        with self._lock:
            self._closed = True
            attempt = self._attempt
        if attempt is not None and attempt.is_alive():
            attempt.join()
        if self._found is not None:
            self._found.close()
        self._sessions.close()

    # --- helpers ----------------------------------------------------------------------------

    def _take_found(self) -> None:
        """Use the sessions that an attempt has opened, and end the lost ones."""
        if self._found is None:
            return
        with self._lock:
            found = self._found
            if found is None or self._closed:
                return  # another thread has taken them, or `close` ends them
            self._found = None
            lost, self._sessions = self._sessions, found
            self._is_announced = False
        lost.close()

    def _warn_and_reconnect(self, loss: DaemonLost, lost: Sessions) -> None:
        """Warn once that the daemon is lost, and start an attempt to reconnect if one is due.

        Do neither if an attempt has succeeded meanwhile: the next step uses its sessions.
        """
        with self._lock:
            if self._found is not None or self._sessions is not lost:
                return
            if not self._is_announced:
                self._is_announced = True
                warnings.warn(
                    f"{loss}; activations stay in memory until a daemon answers there again",
                    RuntimeWarning,
                    stacklevel=4,
                )
            now = time.monotonic()
            if self._closed or self._is_trying or now < self._next_attempt:
                return
            self._is_trying, self._next_attempt = True, now + ATTEMPT_SECONDS
            attempt = self._attempt = threading.Thread(
                target=self._reconnect, name="storm-reconnect", daemon=True
            )
        attempt.start()  # without the lock, which it needs before a `close` has joined it

    def _reconnect(self) -> None:
        found = None
        try:
            with suppress(StormError):  # the next attempt may succeed
                found = self._connect()
        finally:
            with self._lock:
                self._is_trying = False
                self._found = found
