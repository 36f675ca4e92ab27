"""Tells the service manager how the daemon is doing, in systemd's datagram protocol.

Without a manager every call does nothing, and a manager that cannot be reached is logged and never
ends or delays the daemon. The variables read here are the manager's protocol (sd_notify(3)), set by
it for the process it starts. They are no settings of an operator.
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

__all__ = ["MANAGER_VARIABLE", "Notifier", "feed_watchdog", "take_kept", "watchdog_seconds"]

_LOGGER: Final = logging.getLogger("stormd.notify")

MANAGER_VARIABLE: Final = "NOTIFY_SOCKET"
"""Says where a service manager listens to the process that it has started."""

_MICROSECONDS: Final = 1_000_000

_FIRST_KEPT: Final = 3
"""The descriptors that a manager hands over begin behind the standard streams."""


class Notifier:
    """One datagram socket to the service manager, or nothing where there is none.

    Raises:
        ConfigError: at construction, where the socket's name is neither an absolute path nor an
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
        """Return the notifier that the process's manager asked for, an idle one without."""
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
        """Say how far the start has come, and ask for `more_seconds` before it counts as hung."""
        self._send(f"STATUS={text}", f"EXTEND_TIMEOUT_USEC={round(more_seconds * _MICROSECONDS)}")

    def store(self, name: str, descriptor: int) -> None:
        """Have the manager keep a copy of a descriptor, for whom it starts in this one's place."""
        # FDPOLL: none of them is to be dropped for what it has come to.
        self._send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", descriptors=(descriptor,))

    def forget(self, name: str) -> None:
        """Have the manager close what it keeps by a name."""
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
    """Return within how many seconds the manager wants the next sign of life; 0.0 for never.

    `pid` is this process's where None: a variable inherited from a parent means the parent.

    Raises:
        ConfigError: the variable is no positive number of microseconds.
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
    """Return the descriptors that the manager kept for this process, by name, once.

    They are the caller's. Of several of one name all but the last are closed.
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
        old = kept.pop(name, None)
        if old is not None:
            os.close(old)
        os.set_inheritable(descriptor, False)
        kept[name] = descriptor
    return kept


async def feed_watchdog(
    notifier: Notifier, within_seconds: float, stuck: Callable[[], Sequence[str]]
) -> None:
    """Give a sign of life twice in each `within_seconds` as long as `stuck` names no worker.

    Runs until cancelled, on the daemon's loop: a blocked loop gives no sign either, so the
    manager restarts a daemon that hangs anywhere.
    """
    while True:
        names = stuck()
        if names:
            _LOGGER.error("watchdog withheld", extra={"stuck": list(names)})
        else:
            notifier.watchdog()
        await asyncio.sleep(within_seconds / 2)
