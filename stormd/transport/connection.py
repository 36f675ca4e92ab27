"""One connection of the control socket: its bytes both ways, and what is undone of them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from stormd.transport.listener import Credentials
from stormd.transport.zmtp import Reader

__all__ = ["STRANGER_BYTES", "Connection"]

STRANGER_BYTES: Final = 1 << 16
"""Of the largest frame on a connection without a session; Hello is the largest that it may send."""

PIECES_AT_ONCE: Final = 64
"""Unsent frames handed to the kernel in one call."""


class Connection:
    """One client's connection. It is changed by its ControlSocket alone.

    `is_open` says whether it can still say something, `is_reachable` whether anybody may still read
    what is sent. `unsent` are the bytes of frames that the kernel has not taken yet. `granted` is
    the session that another process has granted it, 0 where none has.
    """

    __slots__ = (
        "credentials", "descriptor", "granted", "has_session", "held_bytes", "is_open", "is_parked",
        "is_paused", "is_queued", "is_reachable", "line", "output", "reader", "silent_ticks",
        "unsent", "work", "work_bytes",
    )  # fmt: skip

    def __init__(self, line: socket.socket, credentials: Credentials, granted: int = 0) -> None:
        self.line = line
        self.descriptor = line.fileno()
        self.credentials = credentials
        self.granted = granted
        self.reader = Reader(STRANGER_BYTES, is_greeted=granted != 0)
        self.has_session = False
        self.is_open = True
        self.is_reachable = True
        self.is_queued = False  # among those whose turn comes
        self.is_parked = False  # its work goes on when it is told to
        self.is_paused = False  # not read from until what has come is done
        self.silent_ticks = 0
        self.output: deque[memoryview] = deque()
        self.unsent = 0
        self.work: Iterator[None] | None = None  # what the last frame asks for, as far as undone
        self.work_bytes = 0  # of that frame
        self.held_bytes = 0  # as counted in the sum of all

    @property
    def identity(self) -> bytes:
        """The routing id that its socket chose, empty where it chose none."""
        return self.reader.identity

    @property
    def waiting_bytes(self) -> int:
        """What was read and is not done, and what was answered and is not sent."""
        return len(self.reader.data) + self.work_bytes + self.unsent

    def receive_into(self, buffer: bytearray) -> int | None:
        """Read what is there; return how much, 0 at the end, None where nothing is there now."""
        try:
            return self.line.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return 0

    def transmit(self) -> None:
        """Have the kernel take what it takes of the output."""
        try:
            while self.output:
                self._sent(self.line.sendmsg(list(islice(self.output, PIECES_AT_ONCE))))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # nobody reads any more; what was said before is still to be heard
            self.is_reachable = False
            self.output.clear()
            self.unsent = 0

    def shut(self) -> None:
        """Close it. Twice is fine."""
        self.descriptor = -1
        self.is_open = self.is_reachable = False
        self.output.clear()
        self.unsent = self.work_bytes = 0
        self.work = None
        self.line.close()

    def _sent(self, count: int) -> None:
        self.unsent -= count
        while count:
            first = self.output[0]
            if len(first) > count:
                self.output[0] = first[count:]
                return
            count -= len(first)
            self.output.popleft()
