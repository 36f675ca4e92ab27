"""How many descriptors the process may have open, and whether they run short.

Asking costs two system calls, however many are open.
"""

from __future__ import annotations

import os
import resource

__all__ = ["are_scarce", "raise_limit"]


def raise_limit() -> None:
    """Raise the soft limit to the hard one: shells start programs with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
