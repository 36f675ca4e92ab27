"""A signal to the listening thread that any code may give, a destructor's too.

It takes no lock and never blocks. Its descriptor is closed only when nobody can be about to write
to it: a late signal would land in whatever has been opened under that number since.
"""

from __future__ import annotations

import os
import select

__all__ = ["Wakeup"]


class Wakeup:
    """An eventfd that is closed when the last reference to it goes."""

    def __init__(self) -> None:
        """Start unsignalled."""
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Of what Python's own types close when they die, the one that does it without a warning,
        # and without code in Python: that would lose an interrupt.
        self._owner = select.epoll.fromfd(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._descriptor

    def signal(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """Take the signal back; return whether there was one."""
        try:
            return os.eventfd_read(self._descriptor) > 0
        except BlockingIOError:
            return False
