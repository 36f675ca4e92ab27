"""The control connection of a session: one dealer, one lifeline, one listening thread.

One lock protects the dealer and all state that replies change. Callers send in their own thread,
under the lock, and then handle the replies that have arrived. A thread that waits for a reply
listens to the socket itself, unless another one does so already: to be woken by the listening
thread takes two more switches of threads. The thread "storm-io" does the rest: it notices replies,
heartbeats and the daemon's death without a caller. Every wait ends at a deadline, or with the
daemon's death.

If the session outlives its daemon, that thread looks for the next daemon. Meanwhile nothing is
sent, and waits continue. Then all unanswered requests are repeated.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import threading
import time
from contextlib import suppress
from itertools import count

from storm_client.errors import (
    ConnectionClosed,
    DaemonLost,
    StormError,
    UsageError,
    named,
)
from storm_client.lanes import Lane, LaneHello
from storm_client.lanes.offers import Mappable
from storm_client.lanes.segments import Segments
from storm_client.transport.frames import Messages
from storm_client.transport.handshake import FIRST_NUMBER, Channel, open_channel
from storm_client.transport.interrupts import SafeCondition, SafeWeakSet, Wakeup
from storm_client.transport.io_thread import IoThread, Listener, Phase
from storm_client.transport.resume import Resumed
from stormd.protocol import (
    Envelope,
    Goodbye,
    Message,
    Ping,
    Pong,
    ProtocolError,
    Refused,
)

__all__ = ["Connection", "send_offers"]

PING_SECONDS = 1.0
"""Between heartbeats; a fifth of the daemon's default lease."""

SEND_QUEUE = 1 << 18
"""Messages that may wait for a daemon that does not read before it counts as lost."""

POLL_SECONDS = 0.001
"""The shortest wait for which a thread listens to the socket: `poll` counts in milliseconds."""

GONE_SECONDS = 1.0
"""Limit for a daemon's lifeline to end after its other socket did: the kernel closes both in turn.
"""

RESUMED_SECONDS = 2.0
"""For a daemon that has taken over to answer waiting requests, whatever their deadlines."""

GOODBYE_SECONDS = 5.0
"""How long close waits for the daemon to free the session."""


class Connection:
    """A session's control plane. `lock` and `changed` are shared with the session built on it."""

    def __init__(self, address: str, hello: LaneHello, timeout: float) -> None:
        """Open a session at `address` within `timeout` seconds.

        Raises:
            UsageError: a malformed address.
            DaemonUnavailable: nobody answers there, or the daemon accepts no session.
            ProtocolMismatch: the daemon speaks another version.
        """
        self.address = address
        self.lock = threading.RLock()
        self.changed = SafeCondition(self.lock)
        """Notified whenever something changes that a thread may wait for."""
        self.numbers = count(FIRST_NUMBER)
        """Request, entry and ticket numbers; draw them with the lock held, right before the
        send."""
        self.outbox: list[Envelope] = []
        """Messages for the next flush; whoever holds the lock may append to it."""
        self.phase = Phase.OPEN
        self.error: StormError | None = None
        """Why the connection cannot be used: `check` raises it."""
        self.waiting = 0
        """The number of threads that wait for the listening thread's word."""
        self.speeds = Pong()
        """The speeds of the session's transfers, as the daemon reported them last: mostly a second
        ago."""
        self._patient_until = 0.0  # no wait times out before
        self._pid = os.getpid()
        self.loss_text = f"the daemon at {address} ended, with all it held for us"
        self._answers: dict[int, Message | None] = {}
        self._asked: dict[int, Message] = {}  # requests that wait for an answer
        self._is_deferred = False  # whether the listener was woken to send the posted messages
        self._is_handling = False  # whether `flush` is handling replies
        self._is_blocked = False  # whether the listener was woken to send what the kernel refused
        self._closing: object = None  # the `close` that waits for the daemon to end the session
        self._thread = IoThread(self)
        self._lane: Lane | None = None
        self._is_attached = False  # whether the daemon has mapped the lane's shared memory
        self.listener = Listener()
        channel = open_channel(address, hello, timeout)
        self.changed.wakeup = Wakeup()
        self._use(channel)
        self.descriptors = channel.descriptors
        self.wakeup: Wakeup | None = Wakeup()
        """Wakes the listening thread; None once the thread has ended."""
        _CONNECTIONS.add(self)

    def _use(self, channel: Channel) -> None:
        """Use this channel from now on."""
        self.dealer = channel.dealer
        self._messages = Messages(channel.dealer, self.outbox)
        self._poller = select.poll()  # for the thread that waits, one at a time
        self._poller.register(channel.dealer, select.POLLIN)
        assert self.changed.wakeup is not None, "close drops it after this connection has ended"
        self._poller.register(self.changed.wakeup, select.POLLIN)
        self.lifeline, self.welcome = channel.lifeline, channel.welcome

    @property
    def lost(self) -> bool:
        """Whether the daemon is gone or the connection closed."""
        return self.phase is Phase.LOST

    def start(self, listener: Listener | None = None) -> None:
        """Start the listening thread, which calls `listener` if given, perhaps at once."""
        if listener is not None:
            self.listener = listener
        self._thread.start()

    def attach(self, lane: Lane, timeout: float) -> None:
        """Let a lane map the memory that the daemon shares; the daemon's end will poison the lane.

        Raises:
            StormError: from the lane, or the daemon's refusal.
        """
        self.start()
        self._lane = lane

        def ask(message: Message) -> Message:
            with self.lock:  # the next daemon gets the request again, or the lane's offers
                answer = self.request(message, timeout)
                self._is_attached = True
                return answer

        lane.attach(self.welcome, self.descriptors, ask)
        if not self.welcome.resume_seconds:
            self._close_shared()

    # --- for callers ------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if this connection cannot be used.

        Raises:
            DaemonLost: the daemon is gone, or the connection was closed.
            UsageError: this is a forked child of the process that connected.
        """
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error

    def check_now(self) -> None:
        """Look at the lifeline and `check`: the listening thread notices an end a little later.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        with self.lock:
            self.check()
            if self.phase is Phase.OPEN and self.lifeline.is_readable_within(0.0):
                self.daemon_ended()
                self.check()

    def post(self, request: int, message: Message) -> None:
        """Append a message for the next flush or send; call with the lock held."""
        self.outbox.append(Envelope(request, message))

    def defer(self, request: int, message: Message) -> None:
        """Have a message sent within milliseconds; call with the lock held."""
        self.post(request, message)
        self.flush_soon()

    def send_descriptor(self, number: int, descriptor: int) -> bool:
        """Send a piece's descriptor before its MapPiece; False if it has to wait (locked)."""
        return self.phase is Phase.OPEN and self.lifeline.send_descriptor(number, descriptor)

    def flush_soon(self) -> None:
        """Have posted messages sent within milliseconds; call with the lock held.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        if self.error is not None:
            self.check()
        if not self._is_deferred:
            self.wake()
            self._is_deferred = True

    def flush(self) -> bool:
        """Send posted messages and handle the replies that have arrived; call with the lock held.

        Returns whether there were any replies.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        if self.error is not None:
            self.check()
        if self.outbox or self.dealer.unsent:
            self._transmit()
        if self._is_handling or self.phase is not Phase.OPEN:
            return False  # a handler has called this: the loop that runs the handler continues
        is_news = False
        self._is_handling = True
        try:
            self._messages.receive()
            while (envelope := self._messages.first()) is not None:
                is_news = True
                self._handle(*envelope)
                self._messages.handled()
        except ProtocolError as error:
            self._lose(
                DaemonLost(
                    f"the daemon at {self.address} sent what its version does not allow: {error}"
                )
            )
            self.check()
        finally:
            self._is_handling = False
            if is_news:
                self.changed.notify_all()
        if self.dealer.is_ended and self.phase is Phase.OPEN:
            self._disconnected()
        if self.outbox:  # messages that the replies have caused
            self._transmit()
        return is_news

    def send(self, request: int, message: Message) -> None:
        """Post a message and flush."""
        self.post(request, message)
        self.flush()

    def notify(self) -> None:
        """Wake all waiting threads; call with the lock held."""
        self.changed.notify_all()

    def request(self, message: Message, timeout: float) -> Message:
        """Send a message and return its answer.

        Raises:
            StormError: the kind that the daemon names in a refusal.
            DaemonLost: the daemon died, or gave no answer within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self.lock:
            number = next(self.numbers)
            self._answers[number] = None
            self._asked[number] = message
            try:
                self.send(number, message)
                while self._answers[number] is None:
                    if not self.wait(deadline):
                        raise DaemonLost(
                            f"the daemon at {self.address} did not answer {type(message).__name__} "
                            f"within {timeout:g} s; see `stormd status`"
                        )
            finally:
                answer = self._answers.pop(number)
                del self._asked[number]
        if isinstance(answer, Refused):
            raise named(answer.kind, answer.detail)
        assert answer is not None
        return answer

    def wait(self, deadline: float, every: float = PING_SECONDS) -> bool:
        """Wait until a change that somebody waits for may have come; call with the lock held.

        A wait ends after each batch of replies, after `notify`, and after `every` seconds, for
        changes that nobody announces: a signal handler may close the connection just before the
        wait. Returns False if the time.monotonic() clock is past `deadline` and all replies were
        handled. It never returns False while the next daemon is looked for; that search has its own
        limit.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        if self.flush():
            return True
        left = max(deadline, self._patient_until) - time.monotonic()
        if left <= 0:
            return False
        seconds = min(left, every)
        if seconds >= POLL_SECONDS and self.phase is Phase.OPEN and not self.changed.is_polled:
            self.changed.poll(self._poller, seconds)
            self.flush()
            return True
        self.waiting += 1
        try:
            self._thread.end_pause()
            self.changed.wait(seconds)
        finally:
            self.waiting -= 1
        return True

    def wake(self) -> None:
        """Make the listening thread call `on_wake`. Takes no lock: destructors may call this."""
        wakeup = self.wakeup  # close may set it to None meanwhile
        if wakeup is not None:
            wakeup.signal()

    def end_with(self, owner: object) -> None:
        """Have the listening thread close the session within a heartbeat of `owner`'s death."""
        self._thread.end_with(owner)

    def close(self) -> None:
        """Say goodbye, wait until the daemon has freed the session, and stop listening.

        Data that is still stored is lost: asking for it raises DaemonLost. A second call has no
        effect. Two threads may call this at once, and so may a destructor, wherever it runs.
        """
        if self.lifeline.inherited:
            return
        this = object()
        try:
            if self._say_goodbye(this):
                self._wait_for_the_end()
        finally:
            if self._closing is this:
                self._closing = None
        with self.lock:
            self.changed.notify_all()
            while self._closing is not None or self._thread.is_running:
                # A join would deadlock if a destructor's thread has the lock.
                self.changed.wait(PING_SECONDS)
            self.wakeup = self.changed.wakeup = None
            self.lifeline.close()
            self._close_shared()
            self.dealer.close()
        self._thread.join()  # the thread's end runs Python code: better now than within a step

    def _say_goodbye(self, closing: object) -> bool:
        """Say goodbye for a `close`; return False if no daemon hears it, or if it was said before.

        If an interrupt ends this, `_closing` is either that `close` or as it was before.
        """
        with self.lock:
            if self.phase is Phase.LOST:
                return False
            with suppress(DaemonLost):  # the daemon does not read: no goodbye is needed
                self.post(0, Goodbye())
                self._transmit()
                if self.phase is Phase.OPEN:  # else a signal handler has closed it meanwhile
                    self._closing = closing
            self._lose(
                ConnectionClosed(
                    f"the client's connection to {self.address} was closed, and what it held is "
                    "gone; call storm_client.connect() for another"
                )
            )
            return self._closing is closing

    def forked(self) -> None:
        """Replace the lock in a forked child, where the thread that held it does not exist."""
        self.error = self.error or UsageError(
            f"process {os.getpid()} was forked from process {self._pid}, whose connection to "
            f"{self.address} it cannot share; call storm_client.connect() in the child"
        )
        self._close_shared()
        self.dealer.close()
        self.lock = threading.RLock()
        self.changed = SafeCondition(self.lock)

    # --- for the listening thread -----------------------------------------------------------

    def release_all(self) -> None:
        """Release all memory kept for the daemon, and all waits for the daemon."""
        try:
            with self.lock:
                self.listener.on_loss()
        finally:
            if self._lane is not None:
                self._lane.poison()

    def offers(self) -> list[Mappable]:
        """Return the memory that another daemon has to map, in this order."""
        with self.lock:
            offers = self.listener.offers()
            if self._lane is not None and self._is_attached:
                offers = [*self._lane.offers(), *offers]
            return offers

    def piece_descriptor(self, number: int) -> int | None:
        """Return the descriptor of a piece among the offers, None if the piece was freed."""
        with self.lock:
            return self.listener.piece_descriptor(number)

    def service(self, next_ping: float, *, is_awake: bool) -> float:
        """Handle replies and due work, and return when the next heartbeat is due."""
        with self.lock:
            if self.phase is not Phase.OPEN:
                return next_ping
            self.flush()
            is_due = time.monotonic() >= next_ping
            if is_due:
                self.post(0, Ping())
                next_ping = time.monotonic() + PING_SECONDS
            if is_awake or is_due:
                self.listener.on_wake()
            if self.outbox:
                self.flush()
            return next_ping

    def fail(self, loss: DaemonLost) -> None:
        """Note that the daemon is lost, unless that is known."""
        with self.lock:
            if self.phase is not Phase.LOST:
                self._lose(loss)

    # --- with the lock held -----------------------------------------------------------------

    def _transmit(self) -> None:
        """Send posted messages, unless the next daemon is being looked for."""
        self._is_deferred = False
        if self.phase is Phase.RESUMING:
            return
        was_blocked, self._is_blocked = self._is_blocked, not self._messages.send()
        if self._is_blocked and not was_blocked:
            self.wake()
        if len(self.outbox) > SEND_QUEUE:
            self._lose(
                DaemonLost(f"the daemon at {self.address} left {SEND_QUEUE} messages unread")
            )
            self.check()

    def _disconnected(self) -> None:
        """Handle the end of the dealer's connection, mostly the daemon's end."""
        self.check()  # a signal handler may have closed it
        if self.lifeline.is_readable_within(GONE_SECONDS):
            self.daemon_ended()
            return
        self._lose(DaemonLost(f"the daemon at {self.address} closed the connection; see its log"))
        self.check()

    def _handle(self, request: int, message: Message) -> None:
        """Handle a reply; after an interrupt the same reply is handled again."""
        if isinstance(message, Pong):
            self.speeds = message
        if request in self._answers:
            self._answers[request] = message
        elif not isinstance(message, Pong):
            self.listener.on_message(request, message)

    def daemon_ended(self) -> None:
        """Begin to look for the next daemon if stored data outlives this one; otherwise fail.

        Fail as well if the daemon has ended this session alone: no other resumes it.
        """
        if self.phase is not Phase.OPEN:
            return
        if reason := self.lifeline.reason:
            ended = f"the daemon at {self.address} ended this session: {reason}; see its log"
            self._lose(DaemonLost(ended))
            self.check()
        if not self.welcome.resume_seconds or not self._thread.is_started:
            self._lose(DaemonLost(self.loss_text))
            self.check()
        self.phase, self._patient_until = Phase.RESUMING, math.inf
        self._thread.end_pause()
        self.wake()

    def resume_on(self, found: Resumed) -> None:
        """Use the channel to another daemon, and repeat all unanswered requests to it."""
        self.lifeline.close()
        self.dealer.close()
        self._is_blocked = False
        while (envelope := self._messages.first()) is not None:
            self._handle(*envelope)
            self._messages.handled()
        self._use(found.channel)
        # Unsent messages are about the session, which posts again all that it needs.
        self.outbox[:] = [Envelope(number, message) for number, message in self._asked.items()]
        self.phase, self._patient_until = Phase.OPEN, time.monotonic() + RESUMED_SECONDS
        self.listener.on_resume(found.entries, found.mapped)
        self.flush()
        self.changed.notify_all()

    def _close_shared(self) -> None:
        """Close the descriptors of shared memory: no other daemon needs them."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _lose(self, loss: DaemonLost) -> None:
        self.error, self.phase = loss, Phase.LOST
        self._thread.end_pause()
        self.changed.notify_all()
        self.wake()

    def _wait_for_the_end(self) -> None:
        """Wait for the daemon to close the lifeline."""
        poller = select.poll()
        poller.register(self.lifeline, select.POLLIN)
        poller.poll(GOODBYE_SECONDS * 1000)


_CONNECTIONS: SafeWeakSet[Connection] = SafeWeakSet()
"""The connections of this process, only for the two handlers below."""


def _unlock_in_child() -> None:
    for connection in _CONNECTIONS:
        connection.forked()


def _close_all() -> None:
    """Close open connections while their threads still run: a later close would hang."""
    for connection in _CONNECTIONS:
        connection.close()


os.register_at_fork(after_in_child=_unlock_in_child)
atexit.register(_close_all)


def send_offers(connection: Connection, segments: Segments) -> None:
    """Send the daemon the unmap messages and offers of `segments`, without a wait for its answers.

    Raises:
        DaemonLost: the daemon is gone.
    """
    while segments.to_unmap:
        # After an interrupt it may be sent twice; the daemon refuses the second.
        connection.defer(next(connection.numbers), segments.to_unmap[0])
        segments.to_unmap.popleft()
    while (
        segments.outbox and (offer := segments.next_offer(connection.send_descriptor)) is not None
    ):
        segments.post(next(connection.numbers), offer, connection.outbox)
        connection.flush_soon()
