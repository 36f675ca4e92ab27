"""Reports the daemon's state to the service manager, in systemd's datagram protocol.

Without a manager every call does nothing. A manager that cannot be reached is logged, and never
ends or delays the daemon. The variables read here belong to the manager's protocol (sd_notify(3)):
the manager sets them for the process it starts. They are not settings of an operator.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from array import array
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Final, Self

from stormd.errors import ConfigError
from stormd.open_files import close_all

__all__ = ["MANAGER_VARIABLE", "Notifier", "feed_watchdog", "take_kept", "watchdog_seconds"]

_LOGGER: Final = logging.getLogger("stormd.notify")

MANAGER_VARIABLE: Final = "NOTIFY_SOCKET"
"""Names the socket on which a service manager listens to the process that it has started."""

_MICROSECONDS: Final = 1_000_000

_FIRST_KEPT: Final = 3
"""The descriptors that a manager passes begin after the standard streams."""


class Notifier:
    """One datagram socket to the service manager, or nothing if there is no manager.

    Raises:
        ConfigError: at construction, if the socket's name is neither an absolute path nor an
            abstract name.
    """

    def __init__(self, name: str = "") -> None:
        if name and name[0] not in "/@":
            raise ConfigError(
                f"NOTIFY_SOCKET is {name!r}, neither an absolute path nor @NAME: "
                "unset it where no service manager started the daemon"
            )
        self._target = "\0" + name[1:] if name.startswith("@") else name
        self._socket: socket.socket | None = None
        if name:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)  # the loop must not wait for the manager

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Return a notifier for the process's manager; without a manager, one that does nothing."""
        return cls(environ.get(MANAGER_VARIABLE, ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; later calls do nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ready(self) -> None:
        """Say that the daemon serves: at start, and again after a reload."""
        self._send("READY=1", "STATUS=serving")

    def reloading(self) -> None:
        """Say that settings are being read again; ready() ends it."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now}", "STATUS=reloading")

    def stopping(self) -> None:
        """Say that the ordered shutdown has begun."""
        self._send("STOPPING=1", "STATUS=draining")

    def watchdog(self) -> None:
        """Say that the daemon is alive and no worker is stuck."""
        self._send("WATCHDOG=1")

    def starting(self, text: str, more_seconds: float) -> None:
        """Report the start's progress, and ask for `more_seconds` before it counts as hung."""
        self._send(f"STATUS={text}", f"EXTEND_TIMEOUT_USEC={round(more_seconds * _MICROSECONDS)}")

    def store(self, name: str, descriptor: int) -> None:
        """Have the manager keep a copy of a descriptor for the process that it starts next."""
        # FDPOLL=0: the manager must not drop a descriptor on a hang-up or an error.
        self._send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", descriptors=(descriptor,))

    def forget(self, name: str) -> None:
        """Have the manager close the descriptors that it keeps under a name."""
        self._send("FDSTOREREMOVE=1", f"FDNAME={name}")

    def _send(self, *assignments: str, descriptors: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        message = "\n".join(assignments).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
        try:
            self._socket.sendmsg([message], rights if descriptors else [], 0, self._target)
        except OSError as error:
            _LOGGER.warning(
                "service manager not told",
                extra={"message_sent": assignments[0], "reason": str(error)},
            )


def watchdog_seconds(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float:
    """Return the most seconds that the manager allows between two signs of life; 0.0 for no limit.

    `pid` is this process's if None: a variable inherited from a parent applies to the parent.

    Raises:
        ConfigError: the variable is not a positive number of microseconds.
    """
    text = environ.get("WATCHDOG_USEC", "")
    if not text:
        return 0.0
    if environ.get("WATCHDOG_PID", "") not in ("", str(os.getpid() if pid is None else pid)):
        return 0.0
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(
            f"WATCHDOG_USEC is {text!r}, not a positive number of microseconds: "
            "set WatchdogSec= in the unit"
        )
    return int(text) / _MICROSECONDS


def take_kept(environ: MutableMapping[str, str] = os.environ) -> dict[str, int]:
    """Return the descriptors that the manager kept for this process, by name; only the first time.

    The caller owns them. Of several with one name, all but the last are closed.
    """
    pid, count, names = (
        environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    )
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    kept: dict[str, int] = {}
    given = names.split(":")
    for place in range(int(count)):
        descriptor = _FIRST_KEPT + place
        name = given[place] if place < len(given) else ""
        close_all((kept.pop(name, -1),))
        os.set_inheritable(descriptor, False)
        kept[name] = descriptor
    return kept


async def feed_watchdog(
    notifier: Notifier, within_seconds: float, stuck: Callable[[], Sequence[str]]
) -> None:
    """Send a sign of life twice in each `within_seconds`, as long as `stuck` names no worker.

    Runs on the daemon's event loop until cancelled. A blocked loop sends no sign either, so the
    manager restarts a daemon that hangs anywhere.
    """
    while True:
        names = stuck()
        if names:
            _LOGGER.error("watchdog withheld", extra={"stuck": list(names)})
        else:
            notifier.watchdog()
        await asyncio.sleep(within_seconds / 2)
