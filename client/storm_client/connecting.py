"""Finds a daemon by its address or at the usual addresses, or starts one.

The returned daemon has answered in our protocol version. Otherwise these functions raise and leave
nothing open.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from typing import Literal, NamedTuple, get_args

from storm_client.arguments import size_of
from storm_client.embedded import EmbeddedDaemon, shared_daemon
from storm_client.errors import DaemonUnavailable, UsageError
from storm_client.monitoring.summary import log_line
from storm_client.native.loader import SWITCH
from storm_client.transport.daemon_loss import Supply
from storm_client.transport.handshake import is_listening, socket_path
from storm_client.transport.sessions import Sessions
from stormd.protocol import default_addresses, socket_trouble, unknown_variables
from stormd.protocol.sizes import format_size

__all__ = ["TIMEOUT", "Connected", "Embedded", "OnDaemonLoss", "connected", "shared_supply"]

ADDRESS_VARIABLE = "STORMD_ADDRESS"

MIN_POOL_BYTES = 1 << 20

TIMEOUT = 5.0
"""Default for the seconds within which a daemon must answer."""

Embedded = Literal["auto", "never", "always"]
OnDaemonLoss = Literal["raise", "keep"]


class Connected(NamedTuple):
    """The sessions with a daemon, and the daemon itself if it is a private one."""

    supply: Supply
    embedded: EmbeddedDaemon | None

    def close(self) -> None:
        """End the sessions and stop using the private daemon, which ends with its last user."""
        self.supply.close()
        if self.embedded is not None:
            self.embedded.close()


def connected(
    address: str | None = None,
    embedded: Embedded = "auto",
    pool_bytes: int | str | None = None,
    timeout: float = TIMEOUT,
    on_daemon_loss: OnDaemonLoss = "raise",
) -> Connected:
    """Connect to a daemon; see `storm_client.connect`.

    Raises:
        UsageError, DaemonUnavailable, ProtocolMismatch: as `storm_client.connect`.
    """
    _check(embedded, timeout)
    pool = _pool_size(pool_bytes)
    if on_daemon_loss not in get_args(OnDaemonLoss):
        known = ", ".join(get_args(OnDaemonLoss))
        raise UsageError(f"on_daemon_loss is {on_daemon_loss!r}; choose {known}")
    _warn_of_unknown_variables()
    keeps_without_daemon = on_daemon_loss == "keep"
    named = address if address is not None else os.environ.get(ADDRESS_VARIABLE) or None
    if named is not None:
        socket_path(named)
    if embedded == "always":
        if address is not None:
            raise UsageError(
                f"address is {address!r} and embedded is 'always', which starts a daemon at an "
                "address of its own: pass one of both"
            )
        return _connect_embedded(EmbeddedDaemon(pool), timeout, keeps_without_daemon)
    found = named or _running()
    if found is not None:
        return Connected(_supply(found, timeout, keeps_without_daemon), None)
    if embedded == "never":
        raise DaemonUnavailable(
            f"no daemon that this user can use listens at {_looked()}; start one with "
            "`stormd serve`, pass its address, or allow one of your own with embedded='auto'"
        )
    return _connect_embedded(shared_daemon(pool), timeout, keeps_without_daemon)


def shared_supply() -> Supply:
    """Return the sessions that the whole process shares; the first call connects.

    The sessions are closed when the process ends. A forked child gets its own sessions.

    Raises:
        DaemonUnavailable, ProtocolMismatch: as `connected`.
    """
    return _SHARED.connected().supply


class _Shared:
    """The shared connection behind `shared_supply`, one per process."""

    def __init__(self) -> None:
        self._connected: Connected | None = None
        self._lock = threading.Lock()  # protects _connected

    def connected(self) -> Connected:
        with self._lock:
            if self._connected is None:
                self._connected = connected()
                atexit.register(self._connected.close)
            return self._connected

    def forked(self) -> None:
        """Reset in a forked child, where no thread that was connecting continues."""
        self._connected, self._lock = None, threading.Lock()


_SHARED = _Shared()
os.register_at_fork(after_in_child=_SHARED.forked)


def _connect_embedded(
    daemon: EmbeddedDaemon, timeout: float, keeps_without_daemon: bool
) -> Connected:
    try:
        supply = _supply(daemon.address, timeout, keeps_without_daemon)
        _announce_once(supply, daemon, timeout)
    except BaseException:
        if daemon.users > 1:
            daemon.close()
        else:
            daemon.kill()
        raise
    return Connected(supply, daemon)


_announced: set[str] = set()
"""The addresses of private daemons that were announced: one per process at most."""


def _announce_once(supply: Supply, daemon: EmbeddedDaemon, timeout: float) -> None:
    """Print once what a private daemon takes and how to change it: the user did not name one."""
    if _announced:
        return
    _announced.add(daemon.address)
    most = supply.status(timeout).pool.capacity_bytes
    log_line(
        f"stormd: started a private daemon (process {daemon.pid}), which takes "
        f"{format_size(daemon.resident_bytes())} of host memory now, and up to "
        f"{format_size(most)} more as it is used; connect(pool_bytes=) or STORMD_POOL_BYTES sets "
        "that, and `stormd serve` runs one daemon for all"
    )


def _supply(address: str, timeout: float, keeps_without_daemon: bool) -> Supply:
    return Supply(lambda: Sessions(address, timeout), keeps_without_daemon=keeps_without_daemon)


def _running() -> str | None:
    """Return the first of the usual addresses at which a daemon listens, else None."""
    return next((address for address in _defaults() if is_listening(address)), None)


def _defaults() -> list[str]:
    return default_addresses(os.environ, os.getuid())


def _looked() -> str:
    """Return the usual addresses, each with the reason why no daemon was found there."""
    troubles = {address: socket_trouble(socket_path(address)) for address in _defaults()}
    return " or ".join(f"{address} ({trouble})" for address, trouble in troubles.items())


def _warn_of_unknown_variables() -> None:
    texts = list(unknown_variables(os.environ).values())
    native = os.environ.get(SWITCH) or "on"
    if native not in ("on", "off"):
        texts.append(f"variable {SWITCH} is {native!r}: write off or on")
    level, frame = 1, sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("storm_client."):
        level, frame = level + 1, frame.f_back  # to the script's line, whichever function it calls
    for text in texts:
        warnings.warn(f"{text}; it has no effect", stacklevel=level)


def _check(embedded: str, timeout: float) -> None:
    if embedded not in get_args(Embedded):
        raise UsageError(f"embedded is {embedded!r}; choose {', '.join(get_args(Embedded))}")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < 86400:
        raise UsageError(f"timeout is {timeout!r}; it must be seconds above 0 and below a day")


def _pool_size(pool_bytes: int | str | None) -> int | None:
    """Return the pool size in bytes; None means the daemon's default."""
    if pool_bytes is None:
        return None
    size = size_of(pool_bytes, "pool_bytes")
    if size < MIN_POOL_BYTES:
        raise UsageError(
            f"pool_bytes is {pool_bytes!r}; it must be at least {MIN_POOL_BYTES}, or None for "
            "the daemon's default"
        )
    return size
