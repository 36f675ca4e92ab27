"""The control socket: a ZeroMQ ROUTER to every client, on the event loop.

What stays true:
- the kernel has said whose connection it is before a byte of it is read, and only those who are
  allowed are heard; the others are told so and end within seconds;
- what waits of all connections, in both directions, is bounded in bytes, and who has most of it
  ends first;
- no turn takes longer than TURN_SECONDS and one piece of work, whatever a frame asks for; frames of
  one connection are handled in their order, connections in rotation.

Connections are accepted and ZMTP is spoken here (zmtp.py) rather than by libzmq, which can do none
of these: its queues are bounded in messages, and a connection of it cannot be ended.
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
from stormd.protocol import parse_address
from stormd.protocol.limits import MAX_FRAME_BYTES
from stormd.transport.listener import Credentials, Listener, peer_credentials
from stormd.transport.strangers import Strangers
from stormd.transport.zmtp import OPENING, OTHER, Reader, ZmtpError, framed

__all__ = ["Connection", "ControlSocket"]

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 0.005
"""Time after which no further piece of work is begun in a turn of the loop."""

SLICE_SECONDS: Final = 0.001
"""Time after which the next connection has its turn."""

GRANT_SECONDS: Final = 1.0
"""For the Hello of a connection that another process hands over: it is one small frame."""

READ_BYTES: Final = 1 << 16
"""Read of one connection at a time, and of one whose frames wait already kept at the most."""

PIECES_AT_ONCE: Final = 64
"""Unsent frames handed to the kernel in one call."""

STRANGER_BYTES: Final = 1 << 16
"""Of the largest frame on a connection without a session; Hello is the largest that it may send."""

STRANGER_UNREAD_BYTES: Final = MAX_FRAME_BYTES
"""Of answers that a connection without a session may leave unread: one status of many sessions."""

SILENT_TICKS: Final = 10
"""Of `tick`, twice a second, for which a connection without a session may send no frame. Ticks and
not seconds: a daemon that was stopped itself has not waited for anybody meanwhile."""

MAX_STRANGERS: Final = 1024
MAX_STRANGERS_OF_ONE: Final = 512
"""Connections without a session, of all users and of each. A training job's processes come at once,
in hundreds at the most, and have theirs within milliseconds."""

MAX_UNWELCOME: Final = 16
"""Connections of users who are not allowed, there to be told so."""

WARNING_SECONDS: Final = 1.0
"""Least time between two lines in the log about connections that were ended."""


class Connection:
    """One client's connection: its bytes both ways, and what is undone of them.

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


OnFrame = Callable[[Connection, bytes | None], Iterator[None] | None]
"""Takes a frame, None where the message had several parts, as no client's has. Returns the work
that is left of what it asks for: it is stepped through, each step far shorter than a turn, with
others' between."""


class ControlSocket:
    """Bound from construction on; `start` begins to accept connections.

    Without an `address` it has the connections alone that it is given by `take`, and no `listener`.
    `on_batch()` follows each turn in which `is_owing` was set. `held_most` is how many bytes may
    wait of all connections, read but not done and answered but not sent; where there are more,
    `on_overfull(connection)` follows the end of the one that is given up. Nobody is heard before
    `allow`.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str | None,
        *,
        held_most: int,
        listening: socket.socket | None = None,
    ) -> None:
        self._loop = loop
        self._held_most = held_most
        self._held_bytes = 0
        self.is_owing = False
        """Whether somebody has answers to send once what has come is done: theirs to set."""
        self._allowed: frozenset[int] = frozenset()
        self._on_frame: OnFrame
        self._on_batch: Callable[[], None]
        self._on_overfull: Callable[[Connection], None]
        self._connections: dict[Connection, None] = {}
        self._strangers: Strangers[Connection] = Strangers(MAX_STRANGERS, MAX_STRANGERS_OF_ONE)
        self._unwelcome: Strangers[Connection] = Strangers(MAX_UNWELCOME, MAX_UNWELCOME)
        self._fresh: deque[Connection] = deque()  # those that have said something
        self._busy: deque[Connection] = deque()  # those that have had their slice and ask for more
        self._scheduled: asyncio.Handle | None = None
        # As long as the last turn took nobody is served where something is read, but in a turn: of
        # many that speak at once the first is served at once, and all others together.
        self._turn_after = 0.0
        self._parked: list[Connection] = []  # those whose turn does not come before they are told
        self._relief: asyncio.Handle | None = None
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._next_warning = 0.0
        self.listener: Listener | None = None
        if address is not None:
            self.listener = Listener(
                loop,
                parse_address(address),
                listening=listening,
                on_line=self._admit,
                on_lack=self._make_room,
            )

    def start(
        self,
        on_frame: OnFrame,
        on_batch: Callable[[], None],
        on_overfull: Callable[[Connection], None],
    ) -> None:
        """Begin to accept connections and hand frames on."""
        self._on_frame = on_frame
        self._on_batch = on_batch
        self._on_overfull = on_overfull
        if self.listener is not None:
            self.listener.start()

    def allow(self, uids: frozenset[int]) -> None:
        """Hear these users from now on; connections that have a session stay."""
        self._allowed = uids
        for connection in self._strangers.all:
            if connection.credentials.uid not in uids:
                self.close_connection(connection)

    def adopt(self, connection: Connection) -> None:
        """Note that a connection has a session: it keeps its place, however silent it is."""
        connection.has_session = True
        connection.reader.limit = MAX_FRAME_BYTES
        self._strangers.remove(connection)

    def disown(self, connection: Connection) -> None:
        """Note that a connection's session has ended: it is a stranger's again."""
        if connection.is_open:
            connection.has_session = False
            connection.reader.limit = STRANGER_BYTES
            self._place(connection)

    def send(self, connection: Connection, frame: bytes) -> None:
        """Send a frame, now or as soon as the kernel takes it; to nobody where nobody is there."""
        if not connection.is_reachable:
            return
        data = framed(frame)
        if not connection.output:
            try:
                data = data[connection.line.send(data) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:  # nobody reads any more; what was said before is still to be heard
                connection.is_reachable = False
                return
        if data:
            self._send_as_it_is(connection, data)

    def release(self, connection: Connection) -> tuple[int, bytes]:
        """Let go of a connection for another process to go on with it.

        Returns its descriptor, which is the caller's, and what has arrived and was not read.
        """
        descriptor, unread = os.dup(connection.descriptor), bytes(connection.reader.data)
        self.close_connection(connection)
        return descriptor, unread

    def take(self, line: socket.socket, granted: int, unread: bytes) -> None:
        """Go on with a connection that another process has granted a session.

        What of it is `unread` is handled before this returns.
        """
        line.setblocking(False)
        connection = Connection(line, peer_credentials(line), granted)
        self._connections[connection] = None
        self._loop.add_reader(connection.descriptor, self._receive, connection)
        self._place(connection)
        connection.reader.data += unread
        self._hold(connection, len(unread))
        connection.is_queued = True
        self._serve(connection, time.monotonic() + GRANT_SECONDS)
        if self.is_owing or self._busy:
            self._end_turn()

    def park(self, connection: Connection) -> None:
        """Go on with a connection's work, which asks for it, only once all that are parked do."""
        connection.is_parked = True

    def unpark(self) -> None:
        """Go on with all connections that are parked."""
        parked, self._parked = self._parked, []
        for connection in parked:
            connection.is_parked = False
            if connection.is_open:
                self._busy.append(connection)
                self._schedule()

    def close_connection(self, connection: Connection) -> None:
        """End a connection, with all that waits of it. Twice is fine."""
        if not connection.is_open:
            return
        self._loop.remove_reader(connection.descriptor)
        self._loop.remove_writer(connection.descriptor)
        connection.shut()
        self._held_bytes -= connection.held_bytes
        connection.held_bytes = 0
        del self._connections[connection]
        self._strangers.remove(connection)
        self._unwelcome.remove(connection)

    def tick(self) -> None:
        """End those who have no session and say nothing; to be called twice a second."""
        for places in (self._strangers, self._unwelcome):
            for connection in places.all:
                connection.silent_ticks += 1
                if connection.silent_ticks > SILENT_TICKS:
                    self.close_connection(connection)

    def close(self, *, keeps_file: bool = False) -> None:
        """Unbind, remove the socket's file, drop what was not sent. Twice is fine."""
        if self.listener is not None:
            self.listener.close(keeps_file=keeps_file)
        for handle in (self._scheduled, self._relief):
            if handle is not None:
                handle.cancel()
        for connection in list(self._connections):
            self.close_connection(connection)

    # --- new connections --------------------------------------------------------------------

    def _admit(self, line: socket.socket, credentials: Credentials) -> None:
        connection = Connection(line, credentials)
        self._connections[connection] = None
        self._loop.add_reader(connection.descriptor, self._receive, connection)
        self._place(connection)
        if open_files.are_scarce():
            self._make_room()
        if connection.is_open:
            self._send_as_it_is(connection, OPENING)

    def _place(self, connection: Connection) -> None:
        """Give a connection without a session a place; who must leave for it is ended."""
        uid = connection.credentials.uid
        places = self._strangers if uid in self._allowed else self._unwelcome
        connection.silent_ticks = 0
        leaving = places.add(connection, uid)
        if leaving is not None:
            self.close_connection(leaving)

    def _make_room(self) -> None:
        """End a connection that has no session, of those who are not allowed first."""
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            log.warning("open files are scarce, idle connections are ended: raise their limit")
        leaving = self._unwelcome.oldest() or self._strangers.oldest()
        if leaving is not None:
            self.close_connection(leaving)

    # --- bytes ------------------------------------------------------------------------------

    def _receive(self, connection: Connection) -> None:
        """Read what has arrived, and have it handled in a turn."""
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
        self._hold(connection, count)
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
            if self.is_owing or self._busy:
                self._end_turn()
        else:
            self._fresh.append(connection)
            self._schedule()

    def _send_as_it_is(self, connection: Connection, data: bytes) -> None:
        is_waiting = bool(connection.output)
        connection.output.append(memoryview(data))
        connection.unsent += len(data)
        if not is_waiting:
            connection.transmit()
            if connection.output:
                self._loop.add_writer(connection.descriptor, self._write, connection)
        self._count(connection)
        if not connection.has_session and connection.unsent > STRANGER_UNREAD_BYTES:
            self.close_connection(connection)

    def _write(self, connection: Connection) -> None:
        connection.transmit()
        if not connection.output:
            self._loop.remove_writer(connection.descriptor)
        self._count(connection)

    def _count(self, connection: Connection) -> None:
        """Have the sum of all hold what waits of a connection now."""
        if connection.is_open:
            self._hold(connection, connection.waiting_bytes - connection.held_bytes)

    def _hold(self, connection: Connection, more: int) -> None:
        """Note that so many bytes more wait of a connection; with fewer than 0, fewer."""
        self._held_bytes += more
        connection.held_bytes += more
        if self._held_bytes > self._held_most and self._relief is None:
            self._relief = self._loop.call_soon(self._relieve)

    def _relieve(self) -> None:
        """Give up connections until no more waits than may: of the user of whom most waits."""
        self._relief = None
        while self._held_bytes > self._held_most:
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

        Who has just said something and who asks for much have every other slice, so that a word is
        answered soon, however many ask for much, and these get on, however many say something.
        """
        self._scheduled = None
        first, second = self._fresh, self._busy
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
        """Have answers sent, and go on once the loop has seen to its other events."""
        if self.is_owing:
            self._on_batch()
        if self._fresh or self._busy:
            self._schedule()

    def _serve(self, connection: Connection, end: float) -> None:
        """Do what a connection has asked for, or the part of it that there is time for now."""
        try:
            is_done = self._advance(connection, end)
        except ZmtpError as error:
            log.debug("a connection broke ZMTP: %s", error)
            self.close_connection(connection)
            return
        if not connection.is_open:
            return
        # As `waiting_bytes`, without a call for each frame.
        held = len(connection.reader.data) + connection.work_bytes + connection.unsent
        self._held_bytes += held - connection.held_bytes  # never more, so nobody is given up
        connection.held_bytes = held
        if not is_done:
            (self._parked if connection.is_parked else self._busy).append(connection)
            return
        connection.is_queued = False
        if connection.is_paused:
            connection.is_paused = False
            self._loop.add_reader(connection.descriptor, self._receive, connection)

    def _advance(self, connection: Connection, end: float) -> bool:
        """Go on until the time is over; True where nothing is left to do."""
        while connection.is_open:
            if connection.work is None:
                found = connection.reader.read()
                if found is None:
                    return True
                if found is OTHER:
                    self._answer_commands(connection)
                else:
                    frame = found if isinstance(found, bytes) else None
                    if connection.credentials.uid in self._allowed:
                        connection.silent_ticks = 0
                    connection.work = self._on_frame(connection, frame)
                    connection.work_bytes = 0 if frame is None else len(frame)
            for _ in connection.work or ():
                if connection.is_parked or time.monotonic() > end:
                    return not connection.is_open
            connection.work, connection.work_bytes = None, 0
            if not connection.reader.data:
                return True
            if not connection.has_session or time.monotonic() > end:
                return False
        return True

    def _answer_commands(self, connection: Connection) -> None:
        for reply in connection.reader.replies:
            self._send_as_it_is(connection, reply)
        connection.reader.replies.clear()
