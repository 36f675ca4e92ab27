"""How many descriptors the process may have open, and whether they run short.

Asking costs two system calls, however many are open.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from stormd.errors import ConfigError

__all__ = ["are_scarce", "check_room", "raise_limit", "wanted"]

OF_DAEMON: Final = 64
"""More than a daemon without sessions has open: 19 on the cpu lane, with the metrics' endpoint."""

OF_SESSION: Final = 4


def wanted(sessions: int) -> int:
    """Return the limit with which so many sessions find room: half of it, see `are_scarce`."""
    return 2 * (OF_DAEMON + OF_SESSION * sessions)


def raise_limit() -> int:
    """Raise the soft limit to the hard one, and return it: shells start programs with 1,024.

    Raises:
        ConfigError: it is too low for a daemon to start.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < OF_DAEMON:
        raise ConfigError(_too_low(hard, f"a daemon needs {OF_DAEMON} at the least"))
    return hard


def check_room() -> None:
    """Make sure that a daemon which has opened all its own could take a session.

    Raises:
        ConfigError: it would end each connection as soon as it comes.
    """
    if are_scarce():
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(_too_low(limit, "so many are open already that no client can be served"))


def _too_low(limit: int, why: str) -> str:
    return (
        f"the limit of open files is {limit}, and {why}: raise the hard limit (ulimit -Hn, "
        f"LimitNOFILE= in a unit), to {wanted(64)} for 64 sessions"
    )


def are_scarce() -> bool:
    """Return whether half of what may be open is.

    The kernel gives the lowest number that is free: so many are taken at the least, and all have
    to be before the limit is met.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.open("/", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    return limit != resource.RLIM_INFINITY and 2 * lowest > limit
