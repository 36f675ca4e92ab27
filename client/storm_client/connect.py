"""`connect`: finds a daemon by its address or by convention, or starts one.

It returns a client whose daemon has answered in our version of the protocol, or raises and leaves
nothing open.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from typing import Any, Literal, get_args

from storm_client.arguments import Modules, check_options, modules_of, size_of
from storm_client.client import Client
from storm_client.embedded import EmbeddedDaemon, shared_daemon
from storm_client.errors import DaemonUnavailable, UsageError
from storm_client.monitoring.summary import say
from storm_client.offloading import Offload
from storm_client.sizes import format_size
from storm_client.transport.handshake import is_listening, socket_path
from storm_client.transport.sessions import Sessions
from storm_client.transport.supply import Supply
from stormd.protocol import default_addresses, socket_trouble, unknown_variables

__all__ = ["ADDRESS_VARIABLE", "Embedded", "OnDaemonLoss", "connect", "offload", "shared_supply"]

ADDRESS_VARIABLE = "STORMD_ADDRESS"

LEAST_POOL_BYTES = 1 << 20

Embedded = Literal["auto", "never", "always"]
OnDaemonLoss = Literal["raise", "keep"]


def connect(
    address: str | None = None,
    embedded: Embedded = "auto",
    pool_bytes: int | str | None = None,
    timeout: float = 5.0,
    on_daemon_loss: OnDaemonLoss = "raise",
) -> Client:
    """Connect to a daemon.

    Without `address`, it is the one named by STORMD_ADDRESS, else the system's, else the user's.
    `embedded` says whether a private daemon is started: "auto" when none answers, "never", or
    "always". With "auto" all clients of the process share one, unless they ask for pools of other
    sizes. `pool_bytes` is how large its pool may grow, in bytes or as "8GiB"; without it, what
    STORMD_POOL_BYTES says, or 4 GiB, less where the machine or container has less. It takes memory
    as it is used. An address that was named, here or in the environment, is never replaced by
    another daemon. `timeout` is in seconds.

    `on_daemon_loss` is for what is saved after the daemon was lost; what it held raises in any
    case when it is needed. "raise": DaemonLost. "keep": it stays in memory, with one warning,
    until a daemon answers at the same address again.

    Raises:
        UsageError: a malformed address or a value out of range.
        DaemonUnavailable: no daemon answers, or none may be started.
        ProtocolMismatch: the daemon speaks another version.
    """
    _check(embedded, timeout)
    pool = _pool_size(pool_bytes)
    if on_daemon_loss not in get_args(OnDaemonLoss):
        known = ", ".join(get_args(OnDaemonLoss))
        raise UsageError(f"on_daemon_loss is {on_daemon_loss!r}; choose {known}")
    _warn_of_unknown_variables()
    keeps = on_daemon_loss == "keep"
    named = address if address is not None else os.environ.get(ADDRESS_VARIABLE) or None
    if named is not None:
        socket_path(named)
    if embedded == "always":
        return _connect_embedded(EmbeddedDaemon(pool), timeout, keeps)
    found = named or _running()
    if found is not None:
        return Client(_supply(found, timeout, keeps), None, timeout)
    if embedded == "never":
        raise DaemonUnavailable(
            f"no daemon that this user can use listens at {_looked()}; start one with "
            "`stormd serve`, pass its address, or allow one of your own with embedded='auto'"
        )
    return _connect_embedded(shared_daemon(pool), timeout, keeps)


def offload(model: Modules = None, **options: Any) -> Offload:
    """Return `Client.offload(model, **options)` of a client that the whole process shares.

    The client is made by `connect()` at the first call and closed when the process ends. A
    forked child gets one of its own.

    Raises:
        UsageError: what Client.offload does not take; options of `connect` belong there.
        DaemonUnavailable, ProtocolMismatch: as `connect`.
    """
    modules = modules_of(model)
    check_options(options)
    return _SHARED.client().offload(modules, **options)


def shared_supply() -> Supply:
    """Return where the shared client's Offloads get their sessions, connecting if need be."""
    return _SHARED.client()._supply


class _SharedClient:
    """The client behind `offload`, one a process."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._lock = threading.Lock()  # protects it

    def client(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = connect()
                atexit.register(self._client.close)
            return self._client

    def forked(self) -> None:
        """Begin anew in a child, where a thread that was connecting does not live."""
        self._client, self._lock = None, threading.Lock()


_SHARED = _SharedClient()
os.register_at_fork(after_in_child=_SHARED.forked)


def _connect_embedded(daemon: EmbeddedDaemon, timeout: float, keeps: bool) -> Client:
    try:
        client = Client(_supply(daemon.address, timeout, keeps), daemon, timeout)
        _tell_once(client, daemon)
    except BaseException:
        if daemon.users > 1:
            daemon.close()
        else:
            daemon.kill()
        raise
    return client


_told: set[str] = set()
"""Whether the process was told of a private daemon: it holds one text at most."""


def _tell_once(client: Client, daemon: EmbeddedDaemon) -> None:
    """Say what a private daemon takes, and how to change it: nobody has asked for it by name."""
    if _told:
        return
    _told.add(daemon.address)
    most = client.status().pool.capacity_bytes
    say(
        f"stormd: started a private daemon (process {daemon.pid}), which takes "
        f"{format_size(daemon.resident_bytes())} of host memory now, and up to "
        f"{format_size(most)} more as it is used; connect(pool_bytes=) or STORMD_POOL_BYTES sets "
        "that, and `stormd serve` runs one daemon for all"
    )


def _supply(address: str, timeout: float, keeps: bool) -> Supply:
    return Supply(lambda: Sessions(address, timeout), keeps=keeps)


def _running() -> str | None:
    """Return the first of the usual addresses at which somebody listens."""
    return next((address for address in _defaults() if is_listening(address)), None)


def _defaults() -> list[str]:
    return default_addresses(os.environ, os.getuid())


def _looked() -> str:
    """Return where a daemon was looked for by convention, and why none was found."""
    troubles = {address: socket_trouble(socket_path(address)) for address in _defaults()}
    return " or ".join(f"{address} ({trouble})" for address, trouble in troubles.items())


def _warn_of_unknown_variables() -> None:
    for text in unknown_variables(os.environ).values():
        warnings.warn(f"{text}; it has no effect", stacklevel=3)


def _check(embedded: str, timeout: float) -> None:
    if embedded not in get_args(Embedded):
        raise UsageError(f"embedded is {embedded!r}; choose {', '.join(get_args(Embedded))}")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < 86400:
        raise UsageError(f"timeout is {timeout!r}; it must be seconds above 0 and below a day")


def _pool_size(pool_bytes: int | str | None) -> int | None:
    """Return the size in bytes, None for the default."""
    if pool_bytes is None:
        return None
    size = size_of(pool_bytes, "pool_bytes")
    if size < LEAST_POOL_BYTES:
        raise UsageError(
            f"pool_bytes is {pool_bytes!r}; it must be at least {LEAST_POOL_BYTES}, or None for "
            "the daemon's default"
        )
    return size
