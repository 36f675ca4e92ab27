"""The control socket: a ZeroMQ ROUTER to every client, on the event loop.

Invariants:
- The kernel says who owns a connection before a byte of it is read. Only allowed users are heard;
  others are told so, and their connections end within seconds.
- The bytes that wait on all connections, in both directions, are bounded. Beyond the bound,
  connections of the user with most waiting bytes are closed first.
- No turn takes longer than TURN_SECONDS and one step of work, whatever a frame asks for. Frames of
  one connection are handled in order; connections take turns.

This module accepts connections and speaks ZMTP (zmtp.py) itself, because libzmq can do none of
these: it bounds its queues in messages, and cannot close a single connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from stormd import open_files
from stormd.protocol import Credentials, parse_address, peer_credentials
from stormd.protocol.limits import MAX_FRAME_BYTES
from stormd.protocol.zmtp import OPENING, OTHER, Reader, ZmtpError, framed
from stormd.transport.listener import Listener
from stormd.transport.sessionless import Sessionless

__all__ = ["Connection", "ControlSocket"]

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 0.005
"""Time after which a turn of the loop begins no further step of work."""

SLICE_SECONDS: Final = 0.001
"""Time after which the next connection has its turn."""

GRANT_SECONDS: Final = 1.0
"""Time for the Hello of a connection that another process hands over: it is one small frame."""

READ_BYTES: Final = 1 << 16
"""Maximum bytes read from a connection at a time. Reading pauses when so many already wait."""

FRAMES_A_CALL: Final = 64
"""Maximum unsent frames passed to the kernel in one call."""

SESSIONLESS_FRAME_BYTES: Final = 1 << 16
"""Maximum bytes of a frame on a connection without a session; Hello is the largest one allowed."""

SESSIONLESS_UNREAD_BYTES: Final = MAX_FRAME_BYTES
"""Maximum unread answers, in bytes, of a connection without a session: one status of many
sessions."""

SILENT_TICKS: Final = 10
"""Ticks, two a second, for which a connection without a session may send no frame. Ticks rather
than seconds: a daemon that was itself stopped has not waited for anybody meanwhile."""

MAX_SESSIONLESS: Final = 1024
MAX_SESSIONLESS_OF_USER: Final = 512
"""Maximum connections without a session, of all users and of each. A training job's processes
connect at once, hundreds at most, and get their sessions within milliseconds."""

MAX_UNWELCOME: Final = 16
"""Maximum connections of users who are not allowed, kept to tell them so."""

WARNING_SECONDS: Final = 1.0
"""Minimum time between two log lines about connections that were closed."""


class Connection:
    """One client's connection: its bytes in both directions, and its unfinished work.

    `is_open` says whether the client can still send, `is_reachable` whether it may still read.
    `unsent` is the number of bytes that the kernel has not accepted yet. `granted` is the session
    that another process has granted the connection, 0 if none has. `is_spent` says whether the
    client has asked for that session, which it may do once.
    """

    __slots__ = (
        "credentials", "descriptor", "granted", "has_session", "held_bytes", "is_open", "is_parked",
        "is_paused", "is_queued", "is_reachable", "is_spent", "line", "output", "reader",
        "silent_ticks", "steps", "unsent", "work_bytes",
    )  # fmt: skip

    def __init__(self, line: socket.socket, credentials: Credentials, granted: int = 0) -> None:
        self.line = line
        self.descriptor = line.fileno()
        self.credentials = credentials
        self.granted = granted
        self.is_spent = False
        self.reader = Reader(SESSIONLESS_FRAME_BYTES, is_greeted=granted != 0)
        self.has_session = False
        self.is_open = True
        self.is_reachable = True
        self.is_queued = False  # among those that await their turn
        self.is_parked = False  # its work continues only after `unpark`
        self.is_paused = False  # not read from until its waiting frames are done
        self.silent_ticks = 0
        self.output: deque[memoryview] = deque()
        self.unsent = 0
        self.steps: Iterator[None] | None = None  # the unfinished steps of the last frame
        self.work_bytes = 0  # of that frame
        self.held_bytes = 0  # as counted in the total of all connections

    @property
    def identity(self) -> bytes:
        """The routing id that the client's socket chose, empty if it chose none."""
        return self.reader.identity

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were read but not handled, plus bytes of answers that are not sent."""
        return len(self.reader.data) + self.work_bytes + self.unsent

    def transmit(self) -> None:
        """Send as much of the output as the kernel accepts."""
        try:
            while self.output:
                self._drop_sent(self.line.sendmsg(list(islice(self.output, FRAMES_A_CALL))))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # nobody reads any more; what the client sent before is still handled
            self.is_reachable = False
            self.output.clear()
            self.unsent = 0

    def shut(self) -> None:
        """Close the connection. May be called twice."""
        self.descriptor = -1
        self.is_open = self.is_reachable = False
        self.output.clear()
        self.unsent = self.work_bytes = 0
        self.steps = None
        self.line.close()

    def _drop_sent(self, count: int) -> None:
        self.unsent -= count
        while count:
            first = self.output[0]
            if len(first) > count:
                self.output[0] = first[count:]
                return
            count -= len(first)
            self.output.popleft()


OnFrame = Callable[[Connection, bytes | None], Iterator[None] | None]
"""Takes a frame, or None for a message of several parts, which no client sends. Returns the
remaining work, if any, as steps. Each step is far shorter than a turn, and other connections are
served in between."""


class ControlSocket:
    """Bound from construction on; `start` begins to accept connections.

    Without an `address` it has no `listener`, and serves only connections that come by
    `continue_connection`. `on_batch()` is called after each turn in which `has_unsent_answers` was
    set. `max_held_bytes` may wait on all connections, read but not handled or answered but not
    sent. Beyond it a connection is closed, and `on_overfull(connection)` is called. No connection
    is served before `allow`.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str | None,
        *,
        max_held_bytes: int,
        listening: socket.socket | None = None,
    ) -> None:
        self._loop = loop
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self.has_unsent_answers = False
        """Whether answers must be sent after the waiting input is handled: set by their owner."""
        self.allowed_uids: frozenset[int] = frozenset()
        """The users that are heard, as set by `allow`."""
        self._on_frame: OnFrame
        self._on_batch: Callable[[], None]
        self._on_overfull: Callable[[Connection], None]
        self._connections: dict[Connection, None] = {}
        self._sessionless: Sessionless[Connection] = Sessionless(
            MAX_SESSIONLESS, MAX_SESSIONLESS_OF_USER
        )
        self._unwelcome: Sessionless[Connection] = Sessionless(MAX_UNWELCOME, MAX_UNWELCOME)
        self._just_sent: deque[Connection] = deque()  # those that have just sent something
        self._unfinished: deque[Connection] = deque()  # those that used up a slice of time
        self._scheduled: asyncio.Handle | None = None
        # After a turn, for as long as that turn took, new input is handled only in a turn. So of
        # many connections that send at once, the first is served at once, the others together.
        self._turn_after = 0.0
        self._parked: list[Connection] = []  # those whose work continues only after `unpark`
        self._relief_handle: asyncio.Handle | None = None
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._next_warning = 0.0
        self.listener: Listener | None = None
        if address is not None:
            self.listener = Listener(
                loop,
                parse_address(address),
                listening=listening,
                on_accepted=self._admit,
                on_out_of_descriptors=self._free_descriptor,
            )

    def start(
        self,
        on_frame: OnFrame,
        on_batch: Callable[[], None],
        on_overfull: Callable[[Connection], None],
    ) -> None:
        """Begin to accept connections and pass frames to `on_frame`."""
        self._on_frame = on_frame
        self._on_batch = on_batch
        self._on_overfull = on_overfull
        if self.listener is not None:
            self.listener.start()

    def allow(self, uids: frozenset[int]) -> None:
        """Hear these users from now on; connections that have a session are not affected."""
        self.allowed_uids = uids
        for connection in self._sessionless.all:
            if connection.credentials.uid not in uids:
                self.close_connection(connection)

    def session_opened(self, connection: Connection) -> None:
        """Note that a connection has a session: from now on it may be silent."""
        connection.has_session = True
        connection.reader.limit = MAX_FRAME_BYTES
        self._sessionless.remove(connection)

    def session_ended(self, connection: Connection) -> None:
        """Note that a connection's session has ended: it again counts as without a session."""
        if connection.is_open:
            connection.has_session = False
            connection.reader.limit = SESSIONLESS_FRAME_BYTES
            self._add_sessionless(connection)

    def send(self, connection: Connection, frame: bytes) -> None:
        """Send a frame as soon as the kernel accepts it; drop it if the client is unreachable."""
        if not connection.is_reachable:
            return
        data = framed(frame)
        if not connection.output:
            try:
                data = data[connection.line.send(data) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:  # nobody reads any more; what the client sent before is still handled
                connection.is_reachable = False
                return
        if data:
            self._send_bytes(connection, data)

    def hand_over(self, connection: Connection) -> tuple[int, bytes]:
        """Release a connection so that another process can continue it.

        Return its descriptor, which the caller owns, and the bytes that arrived and were not read.
        """
        descriptor, unread = os.dup(connection.descriptor), bytes(connection.reader.data)
        self.close_connection(connection)
        return descriptor, unread

    def continue_connection(self, line: socket.socket, granted: int, unread: bytes) -> None:
        """Continue a connection that another process has granted a session.

        The bytes that are `unread` are handled before this returns.
        """
        line.setblocking(False)
        connection = Connection(line, peer_credentials(line), granted)
        self._connections[connection] = None
        self._loop.add_reader(connection.descriptor, self._receive, connection)
        self._add_sessionless(connection)
        connection.reader.data += unread
        self._add_held_bytes(connection, len(unread))
        connection.is_queued = True
        self._serve(connection, time.monotonic() + GRANT_SECONDS)
        if self.has_unsent_answers or self._unfinished:
            self._end_turn()

    def park(self, connection: Connection) -> None:
        """Suspend a connection's work until `unpark`; the work itself asks for this."""
        connection.is_parked = True

    def unpark(self) -> None:
        """Continue the work of all parked connections."""
        parked, self._parked = self._parked, []
        for connection in parked:
            connection.is_parked = False
            if connection.is_open:
                self._unfinished.append(connection)
                self._schedule()

    def close_connection(self, connection: Connection) -> None:
        """Close a connection and drop its waiting bytes. May be called twice."""
        if not connection.is_open:
            return
        self._loop.remove_reader(connection.descriptor)
        self._loop.remove_writer(connection.descriptor)
        connection.shut()
        self._held_bytes -= connection.held_bytes
        connection.held_bytes = 0
        del self._connections[connection]
        self._sessionless.remove(connection)
        self._unwelcome.remove(connection)

    def tick(self) -> None:
        """Close silent connections without a session; to be called twice a second."""
        for places in (self._sessionless, self._unwelcome):
            for connection in places.all:
                connection.silent_ticks += 1
                if connection.silent_ticks > SILENT_TICKS:
                    self.close_connection(connection)

    def close(self, *, keeps_file: bool = False) -> None:
        """Unbind, remove the socket's file, drop unsent bytes. May be called twice."""
        if self.listener is not None:
            self.listener.close(keeps_file=keeps_file)
        for handle in (self._scheduled, self._relief_handle):
            if handle is not None:
                handle.cancel()
        for connection in list(self._connections):
            self.close_connection(connection)

    # --- new connections --------------------------------------------------------------------

    def _admit(self, line: socket.socket, credentials: Credentials) -> None:
        connection = Connection(line, credentials)
        self._connections[connection] = None
        self._loop.add_reader(connection.descriptor, self._receive, connection)
        self._add_sessionless(connection)
        if open_files.are_scarce():
            self._free_descriptor()
        if connection.is_open:
            self._send_bytes(connection, OPENING)

    def _add_sessionless(self, connection: Connection) -> None:
        """Give a connection without a session a place; close the one that must leave for it."""
        uid = connection.credentials.uid
        places = self._sessionless if uid in self.allowed_uids else self._unwelcome
        connection.silent_ticks = 0
        leaving = places.add(connection, uid)
        if leaving is not None:
            self.close_connection(leaving)

    def _free_descriptor(self) -> None:
        """Close a connection without a session, first one of a user who is not allowed."""
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            log.warning("open files are scarce, idle connections are ended: raise their limit")
        leaving = self._unwelcome.oldest() or self._sessionless.oldest()
        if leaving is not None:
            self.close_connection(leaving)

    # --- bytes ------------------------------------------------------------------------------

    def _receive(self, connection: Connection) -> None:
        """Read the bytes that have arrived, and have them handled now or in a turn."""
        try:
            count = connection.line.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self.close_connection(connection)
            return
        connection.reader.data += self._view[:count]
        self._add_held_bytes(connection, count)
        if connection.is_queued:
            if len(connection.reader.data) >= READ_BYTES:
                connection.is_paused = True
                self._loop.remove_reader(connection.descriptor)
            return
        connection.is_queued = True
        now = time.monotonic()
        if self._scheduled is None and now >= self._turn_after:
            self._serve(connection, now + SLICE_SECONDS)
            self._turn_after = 2 * time.monotonic() - now
            if self.has_unsent_answers or self._unfinished:
                self._end_turn()
        else:
            self._just_sent.append(connection)
            self._schedule()

    def _send_bytes(self, connection: Connection, data: bytes) -> None:
        is_waiting = bool(connection.output)
        connection.output.append(memoryview(data))
        connection.unsent += len(data)
        if not is_waiting:
            connection.transmit()
            if connection.output:
                self._loop.add_writer(connection.descriptor, self._write, connection)
        self._update_held_bytes(connection)
        if not connection.has_session and connection.unsent > SESSIONLESS_UNREAD_BYTES:
            self.close_connection(connection)

    def _write(self, connection: Connection) -> None:
        connection.transmit()
        if not connection.output:
            self._loop.remove_writer(connection.descriptor)
        self._update_held_bytes(connection)

    def _update_held_bytes(self, connection: Connection) -> None:
        """Update the total by the bytes that wait on a connection now."""
        if connection.is_open:
            self._add_held_bytes(connection, connection.waiting_bytes - connection.held_bytes)

    def _add_held_bytes(self, connection: Connection, more: int) -> None:
        """Note that `more` bytes wait on a connection; a negative number means fewer."""
        self._held_bytes += more
        connection.held_bytes += more
        if self._held_bytes > self._max_held_bytes and self._relief_handle is None:
            self._relief_handle = self._loop.call_soon(self._close_heaviest)

    def _close_heaviest(self) -> None:
        """Close connections of the users with most waiting bytes until the total is allowed."""
        self._relief_handle = None
        while self._held_bytes > self._max_held_bytes:
            by_user: dict[int, int] = {}
            for one in self._connections:
                uid = one.credentials.uid
                by_user[uid] = by_user.get(uid, 0) + one.held_bytes
            heaviest = max(
                self._connections,
                key=lambda one: (by_user[one.credentials.uid], one.held_bytes),
            )
            self.close_connection(heaviest)
            self._on_overfull(heaviest)

    # --- turns ------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Serve connections, each for a slice of time, until the turn is over.

        Slices alternate between connections that have just sent something and those with much work.
        So a short request is answered soon, however many connections have much work. Those make
        progress, however many short requests arrive.
        """
        self._scheduled = None
        first, second = self._just_sent, self._unfinished
        began = now = time.monotonic()
        deadline = now + TURN_SECONDS
        while (first or second) and now < deadline:
            connection = (first or second).popleft()
            if connection.is_open:
                self._serve(connection, now + SLICE_SECONDS)
            now = time.monotonic()
            first, second = second, first
        self._turn_after = 2 * now - began
        self._end_turn()

    def _end_turn(self) -> None:
        """Have answers sent, and schedule the next turn after the loop's other events."""
        if self.has_unsent_answers:
            self._on_batch()
        if self._just_sent or self._unfinished:
            self._schedule()

    def _serve(self, connection: Connection, end: float) -> None:
        """Do a connection's work, as much of it as the time until `end` allows."""
        try:
            is_done = self._advance(connection, end)
        except ZmtpError as error:
            log.debug("a connection broke ZMTP: %s", error)
            self.close_connection(connection)
            return
        if not connection.is_open:
            return
        # As `waiting_bytes`, but without a call for each frame.
        held = len(connection.reader.data) + connection.work_bytes + connection.unsent
        self._held_bytes += held - connection.held_bytes  # never grows, so nothing need be closed
        connection.held_bytes = held
        if not is_done:
            (self._parked if connection.is_parked else self._unfinished).append(connection)
            return
        connection.is_queued = False
        if connection.is_paused:
            connection.is_paused = False
            self._loop.add_reader(connection.descriptor, self._receive, connection)

    def _advance(self, connection: Connection, end: float) -> bool:
        """Do the connection's work until `end`; return True if nothing is left to do."""
        while connection.is_open:
            if connection.steps is None:
                found = connection.reader.read()
                if found is None:
                    return True
                if found is OTHER:
                    self._answer_commands(connection)
                else:
                    frame = found if isinstance(found, bytes) else None
                    if connection.credentials.uid in self.allowed_uids:
                        connection.silent_ticks = 0
                    connection.steps = self._on_frame(connection, frame)
                    connection.work_bytes = 0 if frame is None else len(frame)
            for _ in connection.steps or ():
                if connection.is_parked or time.monotonic() > end:
                    return not connection.is_open
            connection.steps, connection.work_bytes = None, 0
            if not connection.reader.data:
                return True
            if not connection.has_session or time.monotonic() > end:
                return False
        return True

    def _answer_commands(self, connection: Connection) -> None:
        for reply in connection.reader.replies:
            self._send_bytes(connection, reply)
        connection.reader.replies.clear()
