"""Descriptors: how many the process may have open, whether they run short, and closing them.

A check costs a few system calls, however many descriptors are open.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from typing import Final

from stormd.errors import ConfigError

__all__ = ["are_scarce", "check_room", "close_all", "limit_for", "raise_limit"]

OF_DAEMON: Final = 64
"""More than a daemon without sessions has open: 19 on the cpu lane, with the metrics endpoint."""

OF_SESSION: Final = 4


def limit_for(sessions: int) -> int:
    """Return the limit that so many sessions need: twice their descriptors, see `are_scarce`."""
    return 2 * (OF_DAEMON + OF_SESSION * sessions)


def raise_limit() -> int:
    """Raise the soft limit, 1,024 in most shells, to the hard limit, and return it.

    Raises:
        ConfigError: the hard limit is too low for a daemon to start.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < OF_DAEMON:
        raise ConfigError(_too_low(hard, f"a daemon needs {OF_DAEMON} at the least"))
    return hard


def check_room() -> None:
    """Check that a daemon that has opened all its own descriptors can take a session.

    Raises:
        ConfigError: it would close each connection at once.
    """
    if are_scarce():
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(_too_low(limit, "so many are open already that no client can be served"))


def _too_low(limit: int, why: str) -> str:
    return (
        f"the limit of open files is {limit}, and {why}: raise the hard limit (ulimit -Hn, "
        f"LimitNOFILE= in a unit), to {limit_for(64)} for 64 sessions"
    )


def close_all(descriptors: Iterable[int]) -> None:
    """Close these descriptors; a negative number stands for none."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def are_scarce() -> bool:
    """Return whether more than half of the permitted descriptors may be open.

    The kernel returns the lowest free number, so at least that many are open. The limit is reached
    only once all numbers below it are taken.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.open("/", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    return limit != resource.RLIM_INFINITY and 2 * lowest > limit
