"""The control connection: one DEALER socket, one lifeline, one thread that listens.

What stays true: the lock protects the socket and everything that replies change, so whoever holds
it sees a consistent session; the thread "storm-io" needs nobody to call in for replies, heartbeats
and the daemon's death to be noticed; no wait outlives its deadline or the daemon.

Callers send in their own thread, under the lock, and handle what has arrived meanwhile: a send
makes libzmq read its mailbox, after which the descriptor alone would not announce those replies.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import zmq

from storm_client.errors import DaemonLost, StormError, UsageError, named
from storm_client.handshake import FIRST_NUMBER, SEND_QUEUE, open_channel
from storm_client.lanes import LaneHello
from storm_client.wakeup import Wakeup
from stormd.protocol import (
    Envelope,
    Goodbye,
    Message,
    Ping,
    Pong,
    ProtocolError,
    Refused,
    decode,
    encode,
)

__all__ = ["IDS_PER_RELEASE", "Connection"]

PING_SECONDS = 1.0
"""Between heartbeats; a fifth of the daemon's default lease."""

QUIET_SECONDS = 0.002
"""The listener's pause after each turn while nobody waits: replies then come in batches, and a
training thread, which handles them itself when it sends, rarely shares the interpreter lock."""

GOODBYE_SECONDS = 5.0
"""How long close waits for the daemon to free the session before it leaves anyway."""

FRAME_MESSAGES = 256
"""Messages sent in one frame: of the longest kind, a Release of IDS_PER_RELEASE, they fit."""

READABLE = int(zmq.POLLIN)
"""As a plain number: the enumeration's own operators take several microseconds."""

IDS_PER_RELEASE = 256
"""Entries given up in one message, of at most 9 bytes each."""

OnMessage = Callable[[int, Message], None]


class Connection:
    """A session's control plane. `lock` and `changed` are shared with the session built on it.

    `on_message` is called with the lock held for every reply that no request waits for;
    `on_wake` with the lock held after `wake`, and has to flush; `on_lost` without it, once, when
    all is over.
    """

    def __init__(self, address: str, hello: LaneHello, timeout: float) -> None:
        """Open a session at `address` within `timeout` seconds.

        Raises:
            UsageError: a malformed address.
            DaemonUnavailable: nobody answers there, or takes no session.
            ProtocolMismatch: the daemon speaks another version.
        """
        self.address = address
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified whenever something that waits may look for has changed."""
        self.numbers = count(FIRST_NUMBER)
        """Request, entry and ticket numbers; drawn with the lock held, right before the send."""
        self.on_message: OnMessage = _ignore
        self.on_wake: Callable[[], None] = _nothing
        self.on_lost: Callable[[], None] = _nothing
        self._pid = os.getpid()
        self._lost: DaemonLost | None = None
        self._outbox: list[Envelope] = []
        self._answers: dict[int, Message | None] = {}
        self._waiting = 0
        self._needed = threading.Event()  # set while somebody waits, or when all is over
        self._draining = False
        self._thread: threading.Thread | None = None
        channel = open_channel(address, hello, timeout)
        self._context, self._socket = channel.context, channel.socket
        self.lifeline, self.descriptors = channel.lifeline, channel.descriptors
        self.welcome = channel.welcome
        self._wakeup: Wakeup | None = Wakeup()

    def start(self) -> None:
        """Start listening; the callbacks are set."""
        self._thread = threading.Thread(target=self._listen, name="storm-io", daemon=True)
        self._thread.start()

    # --- for callers ------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what keeps this connection from being used.

        Raises:
            DaemonLost: the daemon is gone, or the connection was closed.
            UsageError: this is a forked child of the process that connected.
        """
        if self._lost is not None:
            raise DaemonLost(str(self._lost)) from self._lost
        if self.lifeline.inherited:
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._pid}, whose connection to "
                f"{self.address} it cannot share; call storm_client.connect() in the child"
            )

    @property
    def lost(self) -> bool:
        """Whether the daemon is gone or the connection closed."""
        return self._lost is not None

    def post(self, request: int, message: Message) -> None:
        """Have a message leave with the next flush or send; call with the lock held."""
        self._outbox.append(Envelope(request, message))

    def defer(self, request: int, message: Message) -> None:
        """Have a message leave within milliseconds; call with the lock held.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        self.check()
        if not self._outbox:
            self.wake()
        self.post(request, message)

    def flush(self) -> None:
        """Send what was posted and handle the replies that have arrived; call with the lock held.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        self.check()
        self._transmit()
        self.drain()

    def send(self, request: int, message: Message) -> None:
        """Post a message and flush."""
        self.post(request, message)
        self.flush()

    def drain(self) -> None:
        """Handle every reply that has arrived, in order; call with the lock held."""
        if self._draining or self._socket.closed:
            return  # a handler sends: the loop that called it goes on
        self._draining = True
        try:
            # Asking for the events costs a tenth of an exception that says there are none.
            while int(self._socket.getsockopt(zmq.EVENTS)) & READABLE:
                self._handle(self._socket.recv(zmq.NOBLOCK))
        finally:
            self._draining = False

    def notify(self) -> None:
        """Have every wait look again; call with the lock held."""
        if self._waiting:
            self.changed.notify_all()

    def request(self, message: Message, timeout: float) -> Message:
        """Send a message and return its answer.

        Raises:
            StormError: the kind that the daemon names in a refusal.
            DaemonLost: the daemon died, or gave no answer within `timeout` seconds.
        """
        with self.lock:
            number = next(self.numbers)
            self._answers[number] = None
            try:
                self.send(number, message)
                if not self.wait(lambda: self._answers[number] is not None, timeout):
                    raise DaemonLost(
                        f"the daemon at {self.address} did not answer {type(message).__name__} "
                        f"within {timeout:g} s; see `stormd status`"
                    )
            finally:
                answer = self._answers.pop(number)
        if isinstance(answer, Refused):
            raise named(answer.kind, answer.detail)
        assert answer is not None
        return answer

    def wait(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until `ready()` or for `timeout` seconds; call with the lock held.

        Returns whether it became ready.

        Raises:
            DaemonLost: the daemon died meanwhile and it is not ready.
        """
        if ready():
            return True
        self.flush()
        deadline = time.monotonic() + timeout
        self._waiting += 1
        self._needed.set()
        try:
            while not ready():
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(left)
            return True
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._needed.clear()

    def wake(self) -> None:
        """Have the listening thread call `on_wake`. Takes no lock: destructors may call it."""
        wakeup = self._wakeup  # close may drop it meanwhile
        if wakeup is not None:
            wakeup.signal()

    def close(self) -> None:
        """Say goodbye, wait until the daemon freed the session, and stop listening.

        What is still stored is lost: asking for it raises DaemonLost. Calling it twice is fine.
        """
        if self.lifeline.inherited:
            return
        with self.lock:
            if not self.lost:
                with suppress(DaemonLost):  # it does not read: there is nobody to say goodbye to
                    self.post(0, Goodbye())
                    self._transmit()
                    self._wait_for_the_end()
                self._lose("the connection was closed")
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._wakeup = None
        self.lifeline.close()
        self._context.destroy(linger=0)

    # --- the listening thread ---------------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._serve()
        except (StormError, zmq.ZMQError) as error:
            self._fail(f"the connection to {self.address} broke: {error}")
        finally:
            self._fail(f"the thread that listens to {self.address} ended; see its traceback")
            self.on_lost()

    def _serve(self) -> None:
        wakeup = self._wakeup
        assert wakeup is not None, "close drops it after this thread has ended"
        poller = select.poll()
        for descriptor in (self._socket.fileno(), self.lifeline.fileno(), wakeup.fileno()):
            poller.register(descriptor, select.POLLIN)
        next_ping = time.monotonic()
        while not self.lost:
            next_ping = self._turn(next_ping, wakeup)
            self._needed.wait(QUIET_SECONDS)
            ready = poller.poll(max(0.0, (next_ping - time.monotonic()) * 1000))
            if any(descriptor == self.lifeline.fileno() for descriptor, _ in ready):
                self._fail(f"the daemon at {self.address} ended, with all it held for us")

    def _turn(self, next_ping: float, wakeup: Wakeup) -> float:
        """Handle what has come up, and return when the next heartbeat is due."""
        with self.lock:
            if self.lost:
                return next_ping
            self.drain()
            if wakeup.clear():
                self.on_wake()
            if time.monotonic() < next_ping:
                return next_ping
            self.post(0, Ping())
            self._transmit()
            self.drain()
            return time.monotonic() + PING_SECONDS

    def _fail(self, reason: str) -> None:
        with self.lock:
            if not self.lost:
                self._lose(reason)

    # --- with the lock held -----------------------------------------------------------------

    def _transmit(self) -> None:
        batch, self._outbox = self._outbox, []
        try:
            for begin in range(0, len(batch), FRAME_MESSAGES):
                frame = encode(batch[begin : begin + FRAME_MESSAGES])
                self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._lose(f"the daemon at {self.address} left {SEND_QUEUE} messages unread")
            self.check()

    def _handle(self, frame: bytes) -> None:
        try:
            batch = decode(frame)
        except ProtocolError as error:
            self._lose(
                f"the daemon at {self.address} sent what its version does not allow: {error}"
            )
            self.check()
            return
        for request, message in batch:
            if request in self._answers:
                self._answers[request] = message
            elif not isinstance(message, Pong):
                self.on_message(request, message)
        self.notify()

    def _lose(self, reason: str) -> None:
        self._lost = DaemonLost(reason)
        self._needed.set()
        self.changed.notify_all()
        self.wake()

    def _wait_for_the_end(self) -> None:
        """Wait for the daemon to close the lifeline; the listener is kept out by the lock."""
        poller = select.poll()
        poller.register(self.lifeline, select.POLLIN)
        poller.poll(GOODBYE_SECONDS * 1000)


def _ignore(request: int, message: Message) -> None:
    """Pass over a reply that comes before the session is built."""


def _nothing() -> None:
    """Do nothing: no session is built yet."""
