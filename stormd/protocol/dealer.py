"""A client's end of the control connection: a DEALER that never waits and has no thread.

libzmq has a thread that sends and receives for its sockets, so that each message and each answer
wakes a thread more. With it, storing and restoring 64 KiB took 1.4 times as long.

Ctrl-C may come between any two steps, and a frame that is sent twice, or lost, breaks a session.
So each system call notes its result in a list in the same step, and a caller takes a result by
statements without a call, between which Python runs no signal handler.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from stormd.protocol.limits import MAX_FRAME_BYTES
from stormd.protocol.zmtp import DEALER_OPENING, GREETING_BYTE, Reader, framed

__all__ = ["Dealer"]

READ_BYTES: Final = 1 << 16
"""Maximum bytes that one call reads."""


class Dealer:
    """A connection to the ROUTER at `path`.

    `unsent` has the bytes that the kernel has not accepted yet, `unread` those that have arrived
    and were not taken: first what is less than a frame, then what was received since. `is_ended`
    says that the peer has closed the connection. A signal handler may close it at any moment.

    Raises:
        OSError: nobody accepts a connection there within `timeout` seconds.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self.unsent = memoryview(DEALER_OPENING)
        self.unread = [b""]
        self.is_ended = False
        self._sent: list[int] = []  # how much of `unsent` was sent, if that was not taken off yet
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._line.settimeout(timeout)
            self._line.connect(str(path))
            self._line.setblocking(False)
        except BaseException:
            self._line.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 when closed."""
        return self._line.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame behind the unsent bytes, as far as the kernel accepts it at once."""
        self.unsent = memoryview(bytes(self.unsent) + framed(frame))
        self.transmit()

    def transmit(self) -> bool:
        """Send unsent bytes as far as the kernel accepts them at once; return whether none is left.

        Bytes for a peer that has closed the connection are dropped.
        """
        while True:
            if self._sent:
                left = self.unsent[self._sent[0] :]
                self.unsent, self._sent = left, []
            if not self.unsent:
                return True
            try:
                self._sent.extend(map(self._line.send, (self.unsent,), (socket.MSG_NOSIGNAL,)))
            except BlockingIOError:
                return False
            except OSError:  # nobody reads any more; what the peer has sent is still received
                self.unsent = self.unsent[:0]

    def received(self) -> tuple[list[bytes], list[bytes]]:
        """Return the frames that have arrived, and the bytes behind them.

        The caller takes the frames by assigning those bytes to `unread`; until then another call
        returns the same frames.

        Raises:
            ProtocolError: the peer does not speak ZMTP 3.
        """
        if not self.is_ended:
            self._receive()
        if len(self.unread) == 1:
            return [], self.unread
        data = b"".join(self.unread)
        # Its greeting is kept until READY has followed, and begins as no frame does.
        reader = Reader(MAX_FRAME_BYTES, is_greeted=not data.startswith(GREETING_BYTE))
        reader.data += data
        frames = []
        while (found := reader.read()) is not None:
            if isinstance(found, bytes):
                frames.append(found)
        return frames, [bytes(reader.data)] if reader.is_open else self.unread

    def close(self) -> None:
        """Close the connection. A second call has no effect."""
        self._line.close()

    def _receive(self) -> None:
        try:
            self.unread.extend(map(self._line.recv, (READ_BYTES,)))
        except BlockingIOError:
            return
        except OSError:
            self.is_ended = True
        else:
            self.is_ended = not self.unread[-1]
