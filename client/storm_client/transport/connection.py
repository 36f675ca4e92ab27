"""The control connection of a session: one DEALER socket, one lifeline, one thread that listens.

One lock protects the socket and all that replies change. Callers send in their own thread, under
the lock, and handle what has arrived meanwhile: a send makes libzmq read its mailbox, after which
the descriptor alone would not announce those replies. The thread "storm-io" does the rest, so that
replies, heartbeats and the daemon's death are noticed though nobody calls in. Whoever waits does so
until a deadline, or the daemon's death.

Where the session outlives its daemon, that thread looks for the one that follows. Meanwhile nothing
is sent, and what waits goes on waiting; then all that was not answered is asked for again.
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

import zmq

from storm_client.errors import (
    ConnectionClosed,
    DaemonLost,
    StormError,
    UsageError,
    named,
)
from storm_client.lanes import Lane, LaneHello
from storm_client.lanes.offers import Mappable
from storm_client.transport.frames import Messages
from storm_client.transport.handshake import FIRST_NUMBER, SEND_QUEUE, Channel, open_channel
from storm_client.transport.interrupts import Changes, Living, Wakeup
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

__all__ = ["Connection"]

PING_SECONDS = 1.0
"""Between heartbeats; a fifth of the daemon's default lease."""

GONE_SECONDS = 1.0
"""For a daemon's lifeline to end where its other socket has: the kernel closes one after the other.
"""

RESUMED_SECONDS = 2.0
"""For a daemon that has taken over to answer what waits, whatever was waited before."""

GOODBYE_SECONDS = 5.0
"""How long close waits for the daemon to free the session before it leaves anyway."""


class Connection:
    """A session's control plane. `lock` and `changed` are shared with the session built on it."""

    def __init__(self, address: str, hello: LaneHello, timeout: float) -> None:
        """Open a session at `address` within `timeout` seconds.

        Raises:
            UsageError: a malformed address.
            DaemonUnavailable: nobody answers there, or takes no session.
            ProtocolMismatch: the daemon speaks another version.
        """
        self.address = address
        self.lock = threading.RLock()
        self.changed = Changes(self.lock)
        """Notified whenever something that waits may look for has changed."""
        self.numbers = count(FIRST_NUMBER)
        """Request, entry and ticket numbers; drawn with the lock held, right before the send."""
        self.outbox: list[Envelope] = []
        """What leaves with the next flush; whoever has the lock may append to it."""
        self.phase = Phase.OPEN
        self.error: StormError | None = None
        """What keeps it from being used: `check` raises it."""
        self.waiting = 0
        """How many threads wait."""
        self.speeds = Pong(link=0, limit=0, disk=0)
        """How fast the session's bytes go, as the daemon has said last; a second ago, mostly."""
        self._patient_until = 0.0  # before which no wait is in vain
        self._pid = os.getpid()
        self.ended = f"the daemon at {address} ended, with all it held for us"
        self._answers: dict[int, Message | None] = {}
        self._asked: dict[int, Message] = {}  # the requests whose answers are waited for
        self._is_deferred = False  # whether the listener was woken to send what was posted
        self._is_handling = False  # replies, in `flush`
        self._is_leaving = False  # goodbye was said, and the daemon has not ended the session yet
        self._thread = IoThread(self)
        self._lane: Lane | None = None
        self._is_attached = False  # whether the daemon has mapped what the lane shares
        self.listener = Listener()
        channel = open_channel(address, hello, timeout)
        self._use(channel)
        self.descriptors = channel.descriptors
        self.wakeup: Wakeup | None = Wakeup()
        """Wakes the thread; None once it has ended."""
        _CONNECTIONS.add(self)

    def _use(self, channel: Channel) -> None:
        """Say and hear all that follows on this channel."""
        self._context, self.socket = channel.context, channel.socket
        self._messages = Messages(channel.socket, self.outbox)
        self.lifeline, self.welcome = channel.lifeline, channel.welcome

    @property
    def lost(self) -> bool:
        """Whether the daemon is gone or the connection closed."""
        return self.phase is Phase.LOST

    def start(self, listener: Listener | None = None) -> None:
        """Listen, and tell `listener`, of something at once perhaps; without one, nobody yet."""
        if listener is not None:
            self.listener = listener
        self._thread.start()

    def attach(self, lane: Lane, timeout: float) -> None:
        """Have a lane map what the daemon shares with it, and be told of the daemon's end.

        Raises:
            StormError: what the lane raises, or the daemon's refusal.
        """
        self.start()
        self._lane = lane

        def ask(message: Message) -> Message:
            with self.lock:  # a daemon that follows is asked once more, or the lane offers it
                answer = self.request(message, timeout)
                self._is_attached = True
                return answer

        lane.attach(self.welcome, self.descriptors, ask)
        if not self.welcome.resume_seconds:
            self._close_shared()

    # --- for callers ------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what keeps this connection from being used.

        Raises:
            DaemonLost: the daemon is gone, or the connection was closed.
            UsageError: this is a forked child of the process that connected.
        """
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error

    def check_now(self) -> None:
        """Check, and ask the lifeline too: the listener notices an end milliseconds later.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        with self.lock:
            self.check()
            if self.phase is Phase.OPEN and self.lifeline.ended:
                self.daemon_ended()
            self.check()

    def post(self, request: int, message: Message) -> None:
        """Have a message leave with the next flush or send; call with the lock held."""
        self.outbox.append(Envelope(request, message))

    def defer(self, request: int, message: Message) -> None:
        """Have a message leave within milliseconds; call with the lock held."""
        self.post(request, message)
        self.flush_soon()

    def hand_over(self, number: int, descriptor: int) -> bool:
        """Send a piece's descriptor ahead of its MapPiece; False where that is to wait; locked."""
        return self.phase is Phase.OPEN and self.lifeline.hand_over(number, descriptor)

    def flush_soon(self) -> None:
        """Have what was posted leave within milliseconds; call with the lock held.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        if self.error is not None:
            self.check()
        if not self._is_deferred:
            self.wake()
            self._is_deferred = True

    def flush(self) -> bool:
        """Send what was posted and handle the replies that have arrived; call with the lock held.

        Returns whether there were any.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        if self.error is not None:
            self.check()
        if self.outbox:
            self._transmit()
        if self._is_handling or self.phase is not Phase.OPEN:
            return False  # a handler sends: the loop that called it goes on
        is_news = False
        self._is_handling = True
        try:
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
            if is_news and self.waiting:
                self.changed.notify_all()
        if self.outbox:  # what is to be said to the replies
            self._transmit()
        return is_news

    def send(self, request: int, message: Message) -> None:
        """Post a message and flush."""
        self.post(request, message)
        self.flush()

    def notify(self) -> None:
        """Have every wait look again; call with the lock held."""
        if self.waiting:
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

    def wait(self, deadline: float, every: float | None = None) -> bool:
        """Return when what somebody waits for may have come; call with the lock held.

        That is after each batch of replies, and whatever else `notify` is called for; and besides
        after `every` so many seconds, for what nobody tells of. Returns False when it is later than
        `deadline`, by time.monotonic, and all that has come was handled; never while a daemon that
        follows is looked for, which itself ends in time.

        Raises:
            DaemonLost, UsageError: as `check`.
        """
        if self.flush():
            return True
        left = max(deadline, self._patient_until) - time.monotonic()
        if left <= 0:
            return False
        seconds = left if every is None else min(left, every)
        self.waiting += 1
        try:
            self._thread.hurry()
            self.changed.wait(None if math.isinf(seconds) else seconds)
        finally:
            self.waiting -= 1
        return True

    def wake(self) -> None:
        """Have the listening thread call `on_wake`. Takes no lock: destructors may call it."""
        wakeup = self.wakeup  # close may drop it meanwhile
        if wakeup is not None:
            wakeup.signal()

    def end_with(self, owner: object) -> None:
        """Have the listening thread close its session within a heartbeat of the owner's death."""
        self._thread.end_with(owner)

    def close(self) -> None:
        """Say goodbye, wait until the daemon freed the session, and stop listening.

        What is still stored is lost: asking for it raises DaemonLost. Calling it twice is fine, in
        two threads as well, and so is calling it from a destructor, wherever that runs.
        """
        if self.lifeline.inherited:
            return
        if self._leave():
            try:
                self._wait_for_the_end()
            finally:
                self._is_leaving = False
        with self.lock:
            self.changed.notify_all()
            while self._is_leaving or self._thread.is_running:
                self.changed.wait()  # a join would keep the lock, if a destructor's thread has it
            self.wakeup = None
            self.lifeline.close()
            self._close_shared()
            self._context.destroy(linger=0)
        self._thread.join()  # its end runs Python code: now, rather than in the midst of a step

    def _leave(self) -> bool:
        """Say goodbye; False where nobody hears it, or it was said."""
        with self.lock:
            if self.phase is Phase.LOST:
                return False
            is_heard = self.phase is Phase.OPEN
            with suppress(DaemonLost):  # it does not read: there is nobody to say goodbye to
                self.post(0, Goodbye())
                self._transmit()
                self._is_leaving = is_heard
            self._lose(
                ConnectionClosed(
                    f"the client's connection to {self.address} was closed, and what it held is "
                    "gone; call storm_client.connect() for another"
                )
            )
            return self._is_leaving

    def forked(self) -> None:
        """Make the lock anew in a forked child, where whoever held it does not live."""
        self.error = self.error or UsageError(
            f"process {os.getpid()} was forked from process {self._pid}, whose connection to "
            f"{self.address} it cannot share; call storm_client.connect() in the child"
        )
        self._close_shared()
        self.lock = threading.RLock()
        self.changed = Changes(self.lock)

    # --- for the listening thread -----------------------------------------------------------

    def let_go(self) -> None:
        """Release what is kept for the daemon, and all that waits for it."""
        try:
            with self.lock:
                self.listener.on_loss()
        finally:
            if self._lane is not None:
                self._lane.poison()

    def offers(self) -> list[Mappable]:
        """Return what another daemon has to map, in this order."""
        with self.lock:
            offers = self.listener.offers()
            if self._lane is not None and self._is_attached:
                offers = [*self._lane.offers(), *offers]
            return offers

    def descriptor(self, number: int) -> int | None:
        """Return the descriptor of a piece among the offers, None where it is gone."""
        with self.lock:
            return self.listener.descriptor(number)

    def turn(self, next_ping: float, *, is_awake: bool) -> float:
        """Handle what has come up, and return when the next heartbeat is due."""
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
        """Note that the daemon is lost, unless it was before."""
        with self.lock:
            if self.phase is not Phase.LOST:
                self._lose(loss)

    # --- with the lock held -----------------------------------------------------------------

    def _transmit(self) -> None:
        """Send what was posted; while another daemon is looked for, nothing."""
        self._is_deferred = False
        if self.phase is Phase.RESUMING:
            return
        try:
            self._messages.send()
        except zmq.Again:
            if self.lifeline.ends_within(GONE_SECONDS):  # nobody is there to take it
                self.daemon_ended()
                return
            self._lose(
                DaemonLost(f"the daemon at {self.address} left {SEND_QUEUE} messages unread")
            )
            self.check()

    def _handle(self, request: int, message: Message) -> None:
        """Handle a reply; where that is interrupted it is handled once more."""
        if isinstance(message, Pong):
            self.speeds = message
        if request in self._answers:
            self._answers[request] = message
        elif not isinstance(message, Pong):
            self.listener.on_message(request, message)

    def daemon_ended(self) -> None:
        """Begin to look for the daemon that follows, where what is stored outlives this one."""
        if self.phase is not Phase.OPEN:
            return
        if not self.welcome.resume_seconds or not self._thread.is_started:
            self._lose(DaemonLost(self.ended))
            self.check()
        self.phase, self._patient_until = Phase.RESUMING, math.inf
        self._thread.hurry()
        self.wake()

    def go_on(self, found: Resumed) -> None:
        """Use the channel to another daemon, and ask it for all that was not answered."""
        self.lifeline.close()
        self._context.destroy(linger=0)
        while (envelope := self._messages.first(receives=False)) is not None:
            self._handle(*envelope)
            self._messages.handled()
        self._use(found.channel)
        # What was to be sent is about the session, which posts anew what it needs.
        self.outbox[:] = [Envelope(number, message) for number, message in self._asked.items()]
        self.phase, self._patient_until = Phase.OPEN, time.monotonic() + RESUMED_SECONDS
        self.listener.on_resume(found.entries, found.mapped)
        self.flush()
        self.changed.notify_all()

    def _close_shared(self) -> None:
        """Close the descriptors of the memory that is shared: nobody else has to be given them."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _lose(self, loss: DaemonLost) -> None:
        self.error, self.phase = loss, Phase.LOST
        self._thread.hurry()
        self.changed.notify_all()
        self.wake()

    def _wait_for_the_end(self) -> None:
        """Wait for the daemon to close the lifeline."""
        poller = select.poll()
        poller.register(self.lifeline, select.POLLIN)
        poller.poll(GOODBYE_SECONDS * 1000)


_CONNECTIONS: Living[Connection] = Living()
"""For the two handlers below alone: the connections of this process."""


def _unlock_in_child() -> None:
    for connection in _CONNECTIONS:
        connection.forked()


def _close_all() -> None:
    """End what a script has left open while its threads still run: later, a close would hang."""
    for connection in _CONNECTIONS:
        connection.close()


os.register_at_fork(after_in_child=_unlock_in_child)
atexit.register(_close_all)
