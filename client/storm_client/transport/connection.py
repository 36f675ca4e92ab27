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
import weakref
from collections import deque
from contextlib import suppress
from enum import Enum, auto
from itertools import count

import zmq

from storm_client.errors import (
    ConnectionClosed,
    DaemonLost,
    DaemonUnavailable,
    ProtocolMismatch,
    StormError,
    UsageError,
    named,
)
from storm_client.lanes import Lane, LaneHello
from storm_client.lanes.offers import Mappable
from storm_client.transport.frames import Frames, joined
from storm_client.transport.handshake import FIRST_NUMBER, SEND_QUEUE, Channel, open_channel
from storm_client.transport.interrupts import Changes, Living, Wakeup
from storm_client.transport.resume import Resumed, resumed
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

__all__ = ["Connection", "Listener", "Phase"]

PING_SECONDS = 1.0
"""Between heartbeats; a fifth of the daemon's default lease."""

QUIET_SECONDS = 0.005
"""The listener's pause after each turn while nobody waits: replies then come in batches, and a
training thread, which handles them itself when it sends, rarely shares the interpreter lock."""

GONE_SECONDS = 1.0
"""For a daemon's lifeline to end where its other socket has: the kernel closes one after the other.
"""

RESUMED_SECONDS = 2.0
"""For a daemon that has taken over to answer what waits, whatever was waited before."""

GOODBYE_SECONDS = 5.0
"""How long close waits for the daemon to free the session before it leaves anyway."""

FRAME_MESSAGES = 256
"""Messages sent in one frame: of the longest kind, a Release of 256 entries, they fit."""


class Phase(Enum):
    """What becomes of a connection."""

    OPEN = auto()
    RESUMING = auto()
    """The daemon has ended, and one that goes on with the session is looked for."""
    LOST = auto()
    """The daemon is gone or the connection closed: `error` says which. Final."""


class Listener:
    """Who is told of what comes: the session that is built on a connection."""

    def on_message(self, request: int, message: Message) -> None:
        """Handle a reply that no request waits for; with the lock held. Here: nobody asked.

        One may come twice, behind an interrupt, which must do what it does once.
        """

    def on_wake(self) -> None:
        """Post what is to be sent, after `wake` and with each heartbeat; with the lock held."""

    def offers(self) -> list[Mappable]:
        """Return what another daemon has to map besides the lane's, in this order; locked.

        Here: nothing.
        """
        return []

    def descriptor(self, number: int) -> int | None:  # noqa: ARG002 - for those that have pieces
        """Return the descriptor of a piece among `offers`, None where it is gone; locked."""
        return None

    def settling_seconds(self) -> float:
        """Return how long after a daemon's end its device may still write. Here: it has none."""
        return 0.0

    def on_resume(self, entries: frozenset[int], mapped: frozenset[int]) -> None:
        """Post what another daemon, which has these entries, has not answered; locked.

        `mapped` are those of `offers` that it has mapped.
        """

    def on_loss(self) -> None:
        """Let go of what is kept for the daemon: there is none any more; locked. Here: nothing."""

    def close(self) -> None:
        """End: nobody else can end it any more. Here: there is nobody who could be gone."""


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
        self._patient_until = 0.0  # before which no wait is in vain
        self._pid = os.getpid()
        self._ended = f"the daemon at {address} ended, with all it held for us"
        self._leaving = 0  # how many of the outbox the frame has that is sent next, or was last
        self._sent: list[int] = []  # says so where they were, and are in the outbox still
        self._received: list[int] = []  # the same of a frame that is not in the inbox yet
        self._inbox: deque[Envelope] = deque()  # what of the last frame has not been handled
        self._answers: dict[int, Message | None] = {}
        self._asked: dict[int, Message] = {}  # the requests whose answers are waited for
        self._is_deferred = False  # whether the listener was woken to send what was posted
        # Held but for ending the listener's pause. No Event: its methods take a lock in Python, and
        # who is interrupted there keeps it.
        self._pause = threading.Lock()
        self._pause.acquire()
        self._is_handling = False  # replies, in `flush`
        self._owner: weakref.ref[object] | None = None
        self._ownerless: deque[object] = deque()  # not empty once nobody is left who could close
        self._is_leaving = False  # goodbye was said, and the daemon has not ended the session yet
        self._thread: threading.Thread | None = None
        self._lane: Lane | None = None
        self._is_attached = False  # whether the daemon has mapped what the lane shares
        self._listener = Listener()
        self._is_over = False  # the thread has ended, or is about to, and takes the lock no more
        channel = open_channel(address, hello, timeout)
        self._use(channel)
        self.descriptors = channel.descriptors
        self._wakeup: Wakeup | None = Wakeup()
        _CONNECTIONS.add(self)

    def _use(self, channel: Channel) -> None:
        """Say and hear all that follows on this channel."""
        self._context, self._socket = channel.context, channel.socket
        self._frames = Frames(channel.socket)
        self.lifeline, self.welcome = channel.lifeline, channel.welcome

    @property
    def lost(self) -> bool:
        """Whether the daemon is gone or the connection closed."""
        return self.phase is Phase.LOST

    def start(self, listener: Listener | None = None) -> None:
        """Listen, and tell `listener`, of something at once perhaps; without one, nobody yet."""
        if listener is not None:
            self._listener = listener
        if self._thread is None:
            thread = threading.Thread(target=self._listen, name="storm-io", daemon=True)
            thread.start()
            self._thread = thread

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
                self._daemon_ended()
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
            while True:
                if not self._inbox:
                    frame = self._frames.arrived(self._received)
                    if frame is None:
                        break
                    self._inbox, self._received = deque(decode(frame)), []
                self._handle_all()
                is_news = True
        except ProtocolError as error:
            self._lose(
                DaemonLost(
                    f"the daemon at {self.address} sent what its version does not allow: {error}"
                )
            )
            self.check()
        finally:
            self._is_handling = False
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
            if self._pause.locked():
                self._pause.release()  # the listener looks for replies now
            self.changed.wait(None if math.isinf(seconds) else seconds)
        finally:
            self.waiting -= 1
        return True

    def wake(self) -> None:
        """Have the listening thread call `on_wake`. Takes no lock: destructors may call it."""
        wakeup = self._wakeup  # close may drop it meanwhile
        if wakeup is not None:
            wakeup.signal()

    def end_with(self, owner: object) -> None:
        """Have the listening thread close its session within a heartbeat of the owner's death."""
        self._owner = weakref.ref(owner, self._ownerless.append)

    def close(self) -> None:
        """Say goodbye, wait until the daemon freed the session, and stop listening.

        What is still stored is lost: asking for it raises DaemonLost. Calling it twice is fine, in
        two threads as well, and so is calling it from a destructor, wherever that runs.
        """
        if self.lifeline.inherited:
            return
        thread = self._thread if self._thread is not threading.current_thread() else None
        if self._leave():
            try:
                self._wait_for_the_end()
            finally:
                self._is_leaving = False
        with self.lock:
            self.changed.notify_all()
            while self._is_leaving or (thread is not None and not self._is_over):
                self.changed.wait()  # a join would keep the lock, if a destructor's thread has it
            self._wakeup = None
            self.lifeline.close()
            self._close_shared()
            self._context.destroy(linger=0)
        if thread is not None:
            thread.join()
        self._thread = None  # its end runs Python code: now, rather than in the midst of a step

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

    # --- the listening thread ---------------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._serve()
        except (StormError, zmq.ZMQError) as error:
            self._fail(DaemonLost(f"the connection to {self.address} broke: {error}"))
        finally:
            self._fail(
                DaemonLost(f"the thread that listens to {self.address} ended; see its traceback")
            )
            try:
                self._let_go()
            finally:
                with self.lock:
                    self._is_over = True
                    self.changed.notify_all()

    def _let_go(self) -> None:
        """Release what is kept for the daemon, and all that waits for it."""
        try:
            with self.lock:
                self._listener.on_loss()
        finally:
            if self._lane is not None:
                self._lane.poison()

    def _serve(self) -> None:
        while self._serve_channel() and self._resume():
            pass

    def _serve_channel(self) -> bool:
        """Listen to the daemon there is; tell, once it has ended, whether another may follow."""
        wakeup = self._wakeup
        assert wakeup is not None, "close drops it after this thread has ended"
        poller = select.poll()
        lifeline, awakened = self.lifeline.fileno(), wakeup.fileno()
        for descriptor in (self._socket.fileno(), lifeline, awakened):
            poller.register(descriptor, select.POLLIN)
        ready: dict[int, int] = {}
        next_ping = time.monotonic()
        while self.phase is Phase.OPEN:
            if awakened in ready:
                wakeup.clear()
            next_ping = self._turn(next_ping, is_awake=awakened in ready)
            if self._ownerless:
                self._listener.close()
                return False
            if not self.waiting:
                self._pause.acquire(timeout=QUIET_SECONDS)
            ready = dict(poller.poll(max(0.0, (next_ping - time.monotonic()) * 1000)))
            if lifeline in ready:
                with self.lock:
                    self._daemon_ended()
        return self.phase is Phase.RESUMING

    def _resume(self) -> bool:
        """Have another daemon go on with the session; False where none does: then it is lost."""
        ended = time.monotonic()
        try:
            found = resumed(
                self.address,
                self.welcome,
                self.descriptors,
                offers=self._offers,
                descriptor=self._descriptor,
                is_over=self._is_unwanted,
            )
        except (DaemonUnavailable, ProtocolMismatch) as error:
            self._fail(DaemonLost(f"{self._ended}: {error}"))
            return False
        if found is None:
            if self._ownerless:
                self._listener.close()
            return False
        with self.lock:
            settled = ended + self._listener.settling_seconds()
        time.sleep(max(0.0, settled - time.monotonic()))
        with self.lock:
            if self.phase is Phase.RESUMING:
                self._go_on(found)
                return True
        found.channel.close()
        return False

    def _offers(self) -> list[Mappable]:
        with self.lock:
            offers = self._listener.offers()
            if self._lane is not None and self._is_attached:
                offers = [*self._lane.offers(), *offers]
            return offers

    def _descriptor(self, number: int) -> int | None:
        with self.lock:
            return self._listener.descriptor(number)

    def _is_unwanted(self) -> bool:
        return self.phase is not Phase.RESUMING or bool(self._ownerless)

    def _turn(self, next_ping: float, *, is_awake: bool) -> float:
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
                self._listener.on_wake()
            if self.outbox:
                self.flush()
            return next_ping

    def _fail(self, loss: DaemonLost) -> None:
        with self.lock:
            if self.phase is not Phase.LOST:
                self._lose(loss)

    # --- with the lock held -----------------------------------------------------------------

    def _transmit(self) -> None:
        """Send what was posted. What interrupts it neither loses a message nor sends one twice.

        While another daemon is looked for nothing is sent.
        """
        self._is_deferred = False
        if self.phase is Phase.RESUMING:
            return
        try:
            while self.outbox:
                if not self._sent:
                    batch = self.outbox[:FRAME_MESSAGES]
                    self._leaving = len(batch)
                    frame = encode(batch if len(batch) == 1 else joined(batch))
                    self._frames.send(frame, self._sent)
                # Nothing is called between these two, and so no signal looked for.
                del self.outbox[: self._leaving]
                self._sent = []
        except zmq.Again:
            if self.lifeline.ends_within(GONE_SECONDS):  # nobody is there to take it
                self._daemon_ended()
                return
            self._lose(
                DaemonLost(f"the daemon at {self.address} left {SEND_QUEUE} messages unread")
            )
            self.check()

    def _handle_all(self) -> None:
        """Handle what was received; a reply at which that is interrupted is handled once more."""
        try:
            while self._inbox:
                request, message = self._inbox[0]
                if request in self._answers:
                    self._answers[request] = message
                elif not isinstance(message, Pong):
                    self._listener.on_message(request, message)
                self._inbox.popleft()
        finally:
            if self.waiting:
                self.changed.notify_all()

    def _daemon_ended(self) -> None:
        """Begin to look for the daemon that follows, where what is stored outlives this one."""
        if self.phase is not Phase.OPEN:
            return
        if not self.welcome.resume_seconds or self._thread is None:
            self._lose(DaemonLost(self._ended))
            self.check()
        self.phase, self._patient_until = Phase.RESUMING, math.inf
        if self._pause.locked():
            self._pause.release()
        self.wake()

    def _go_on(self, found: Resumed) -> None:
        """Use the channel to another daemon, and ask it for all that was not answered."""
        self.lifeline.close()
        self._context.destroy(linger=0)
        self._use(found.channel)
        self._handle_all()
        self._sent, self._received, self._leaving = [], [], 0
        # What was to be sent is about the session, which posts anew what it needs.
        self.outbox[:] = [Envelope(number, message) for number, message in self._asked.items()]
        self.phase, self._patient_until = Phase.OPEN, time.monotonic() + RESUMED_SECONDS
        self._listener.on_resume(found.entries, found.mapped)
        self.flush()
        self.changed.notify_all()

    def _close_shared(self) -> None:
        """Close the descriptors of the memory that is shared: nobody else has to be given them."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _lose(self, loss: DaemonLost) -> None:
        self.error, self.phase = loss, Phase.LOST
        if self._pause.locked():
            self._pause.release()
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
