"""The channel between the front and a worker: messages both ways, some with a descriptor.

The channel is a socket pair that both have from the worker's start; when one side ends, the other
notices by it. Neither side waits for the other: messages that cannot be sent now are kept. Their
number is bounded by the number of possible sessions.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgpack

from stormd.open_files import close_all
from stormd.transport.listener import received

__all__ = ["WorkerChannel"]

HEADER: Final = struct.Struct("<I?")
"""The size in bytes of the message that follows, and whether a descriptor came with it."""

READ_BYTES: Final = 1 << 16
MAX_AT_ONCE: Final = 16
"""Most descriptors in one read; the kernel ends a read behind the first."""

OnMessage = Callable[[str, list[Any], int], None]
"""Takes a message's kind, its values, and its descriptor (-1 for none), which it then owns."""


class WorkerChannel:
    """One end, on the loop; it owns the socket. `on_end` is called once if the other end closes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: socket.socket,
        on_message: OnMessage,
        on_end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._descriptors: deque[int] = deque()  # in the order of the messages that name them
        self._unsent: deque[tuple[memoryview, int]] = deque()
        end.setblocking(False)
        loop.add_reader(end.fileno(), self._read)

    def send(self, kind: str, *values: Any, descriptor: int = -1) -> None:
        """Send a message, with a descriptor that is closed here once it has been sent."""
        body: bytes = msgpack.packb([kind, *values])
        data = HEADER.pack(len(body), descriptor >= 0) + body
        if self._end.fileno() < 0:
            close_all((descriptor,))
            return
        self._unsent.append((memoryview(data), descriptor))
        if len(self._unsent) == 1:
            self._write()

    def close(self) -> None:
        """Close this end; no more messages are sent or received. Calling it twice is fine."""
        if self._end.fileno() < 0:
            return
        self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())
        self._end.close()
        close_all((*(descriptor for _, descriptor in self._unsent), *self._descriptors))
        self._unsent.clear()
        self._descriptors.clear()

    def _write(self) -> None:
        """Send as much as the kernel takes; the reader reports a broken channel."""
        try:
            while self._unsent:
                data, descriptor = self._unsent[0]
                if descriptor >= 0:
                    sent = socket.send_fds(self._end, [data], [descriptor])
                    os.close(descriptor)
                else:
                    sent = self._end.send(data)
                self._unsent[0] = data[sent:], -1
                if sent == len(data):
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._end.fileno(), self._write)
            return
        except OSError:
            close_all(descriptor for _, descriptor in self._unsent)
            self._unsent.clear()
        self._loop.remove_writer(self._end.fileno())

    def _read(self) -> None:
        found = received(self._end, READ_BYTES, MAX_AT_ONCE)
        if found is None:
            return
        data, descriptors = found
        if not data:
            self.close()
            self._on_end()
            return
        self._received += data
        self._descriptors += descriptors
        self._take_messages()

    def _take_messages(self) -> None:
        while len(self._received) >= HEADER.size:
            nbytes, has_descriptor = HEADER.unpack_from(self._received)
            end = HEADER.size + nbytes
            if len(self._received) < end:
                return
            kind, *values = msgpack.unpackb(bytes(self._received[HEADER.size : end]))
            del self._received[:end]
            self._on_message(kind, values, self._descriptors.popleft() if has_descriptor else -1)
