"""The control socket: a ZeroMQ ROUTER on the event loop.

It never blocks the loop, every frame that has arrived is handed on without another event being
needed, a peer that does not read costs its own connection only, and however many connect, those who
are connected are served.

ZeroMQ's descriptor is edge-triggered: it tells of a change, not of a state, and any send may
swallow the edge. So whoever has sent calls `settle`, which looks for input again. This is several
times cheaper than zmq.asyncio's future for each message.

ZeroMQ accepts connections in a thread of its own, as many as come, and ends the process where
there is no descriptor left for one. So those that come while descriptors are scarce are ended at
once. (Unbinding would end all others as well.)
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from socket import AF_UNIX, SHUT_RDWR, SOCK_STREAM, fromfd
from typing import Final

import zmq

from stormd import open_files
from stormd.protocol import parse_address
from stormd.protocol.limits import MAX_FRAME_BYTES
from stormd.runtime_directory import SocketFile

__all__ = ["BACKLOG", "ControlSocket", "Delivery"]

log = logging.getLogger(__name__)

FRAMES_A_TURN: Final = 64
"""Frames handed on before the loop gets to other work."""

PARTS_AT_ONCE: Final = 64
"""Of a message that has several, which no client sends, read before the time is looked at."""

TURN_SECONDS: Final = 0.005
"""Time after which no further frame is begun in a turn. ZeroMQ takes peers in rotation, so one
that sends full frames without end holds each of the others up by one frame."""

HIGH_WATER: Final = 256
"""Frames that may wait in each direction for one peer. Its own ZeroMQ holds 1,000 more, read
without its interpreter lock: only a process that has stopped gets this far behind."""
BACKLOG: Final = 4096
"""Connections that may wait to be accepted. One more is refused at once, and its client takes the
daemon for absent. The kernel allows as many since Linux 5.4."""

WARNING_SECONDS: Final = 1.0
"""Least time between two lines in the log about connections that were ended."""

# As plain numbers: operations on pyzmq's flag types cost as much as a message.
DONTWAIT: Final = int(zmq.DONTWAIT)
SEND_ROUTE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
POLLIN: Final = int(zmq.POLLIN)
EVENTS: Final = int(zmq.EVENTS)


class Delivery(Enum):
    """What became of a frame that was sent."""

    SENT = auto()
    GONE = auto()
    FULL = auto()


class ControlSocket:
    """Bound from construction on; `start` begins to hand frames on.

    `on_frame(route, frame)` gets each message: the peer's routing id, and its frame, None where
    the message had another number of parts than a client sends. `on_batch()` follows each batch.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str) -> None:
        self._loop = loop
        self._path = parse_address(address)
        self._context = zmq.Context()
        self._address = address
        self._file: SocketFile | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._accepted = self._context.socket(zmq.PAIR)
        self._on_frame: Callable[[bytes, zmq.Frame | None], None]
        self._on_batch: Callable[[], None]
        self._scheduled: asyncio.Handle | None = None
        self._next_warning = 0.0
        self._passed_over: bytes | None = None  # who sent the message that has parts left
        try:
            self._configure()
            self.bind()
        except zmq.ZMQError:
            self.close()
            raise

    def bind(self) -> None:
        """Make the socket's file, again where it was removed; connections stay as they are.

        The listener whose file is gone stays too: to unbind it would end its connections.

        Raises:
            zmq.ZMQError: the address cannot be bound.
        """
        self._socket.bind(self._address)
        self._file = SocketFile(self._path)

    @property
    def is_bound(self) -> bool:
        """Whether the socket's file is there, so that clients find it."""
        return self._file is not None and self._file.is_there

    def start(
        self, on_frame: Callable[[bytes, zmq.Frame | None], None], on_batch: Callable[[], None]
    ) -> None:
        """Begin to hand frames on."""
        self._on_frame = on_frame
        self._on_batch = on_batch
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._accepted.fileno(), self._watch)
        self._watch()
        self.settle()

    def send(self, route: bytes, frame: bytes) -> Delivery:
        """Send one frame to a peer, without waiting; `settle` must follow.

        Only the first part can fail: a socket that has taken it takes the rest of the message.
        """
        try:
            self._socket.send(route, SEND_ROUTE)
            self._socket.send(frame, DONTWAIT)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        return Delivery.SENT

    def settle(self) -> None:
        """Schedule a read if there is input whose edge was swallowed."""
        if self._scheduled is None and self._has_input():
            self._scheduled = self._loop.call_soon(self._read)

    def close(self) -> None:
        """Unbind, remove the socket's file, drop what was not sent. Twice is fine."""
        if self._socket.closed:
            return
        for socket in (self._socket, self._accepted):
            self._loop.remove_reader(socket.fileno())
        if self._scheduled is not None:
            self._scheduled.cancel()
        if self._file is not None:
            self._file.remove()  # ZeroMQ does not
        self._socket.close(linger=0)
        self._accepted.close()
        self._context.term()

    def _configure(self) -> None:
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._accepted.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop ZeroMQ's thread
        self._socket.monitor("inproc://accepted", int(zmq.EVENT_ACCEPTED))
        self._accepted.connect("inproc://accepted")

    # --- new connections --------------------------------------------------------------------

    def _watch(self) -> None:
        """Take note of new connections; end them while descriptors are scarce."""
        while int(self._accepted.getsockopt(EVENTS)) & POLLIN:
            event, _ = self._accepted.recv_multipart(DONTWAIT)
            if open_files.are_scarce():
                _, descriptor = struct.unpack("=hi", event)
                self._show_out(descriptor)

    def _show_out(self, descriptor: int) -> None:
        """End a connection of ZeroMQ's, which closes it; it may have done so by itself."""
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            log.warning("new connections are ended: raise the limit of open files")
        with suppress(OSError), fromfd(descriptor, AF_UNIX, SOCK_STREAM) as connection:
            if connection.getsockname() == str(self._path):
                connection.shutdown(SHUT_RDWR)

    # --- frames -----------------------------------------------------------------------------

    def _take_message(self) -> None:
        """Hand a message on, all parts of which are there, or go on passing over one of several."""
        if self._passed_over is None:
            route = bytes(self._socket.recv(DONTWAIT))
            frame = self._socket.recv(DONTWAIT, copy=False)
            if not frame.more:
                self._on_frame(route, frame)
                return
            self._passed_over = route
        for _ in range(PARTS_AT_ONCE):
            if not self._socket.recv(DONTWAIT, copy=False).more:
                route, self._passed_over = self._passed_over, None
                self._on_frame(route, None)
                return

    def _read(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        deadline = time.monotonic() + TURN_SECONDS
        for _ in range(FRAMES_A_TURN):
            # Asking is cheaper than the exception of a recv in vain.
            if not self._has_input() or time.monotonic() > deadline:
                break
            self._take_message()
        self._on_batch()
        self.settle()

    def _has_input(self) -> bool:
        return bool(int(self._socket.getsockopt(EVENTS)) & POLLIN)
