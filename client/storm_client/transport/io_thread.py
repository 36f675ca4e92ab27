"""The thread "storm-io" of a connection, which listens even if nobody makes a call.

It handles replies that nobody waits for, sends heartbeats and deferred messages, notices the
daemon's end, and finds the next daemon. It passes events to a Listener.
"""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING

from storm_client.errors import DaemonLost, DaemonUnavailable, ProtocolMismatch, StormError
from storm_client.transport.resume import resumed
from stormd.protocol import Message

if TYPE_CHECKING:
    from storm_client.lanes.offers import Mappable
    from storm_client.transport.connection import Connection

__all__ = ["IoThread", "Listener", "Phase"]

QUIET_SECONDS = 0.005
"""The thread's pause after each turn while nobody waits. Replies then come in batches. The training
thread handles replies itself when it sends, so the two rarely compete for the GIL."""


class Phase(Enum):
    """The state of a connection."""

    OPEN = auto()
    RESUMING = auto()
    """The daemon has ended, and the thread looks for one that resumes the session."""
    LOST = auto()
    """The daemon is gone or the connection is closed: `error` says which. Final."""


class Listener:
    """Receives a connection's events: the session on that connection, or this default."""

    def on_message(self, request: int, message: Message) -> None:
        """Handle a reply that no request waits for; the lock is held. Default: ignore it.

        After an interrupt a reply may come twice; the second call must have no further effect.
        """

    def on_wake(self) -> None:
        """Post due messages, after `wake` and with each heartbeat; the lock is held."""

    def offers(self) -> list[Mappable]:
        """Return what another daemon has to map besides the lane's memory, in this order (locked).

        Default: nothing.
        """
        return []

    def piece_descriptor(self, number: int) -> int | None:  # noqa: ARG002 - for those that have pieces
        """Return the descriptor of a piece among `offers`, None if it was freed (locked)."""
        return None

    def settling_seconds(self) -> float:
        """Return how long a dead daemon's device may still write. Default: there is no device."""
        return 0.0

    def on_resume(self, entries: frozenset[int], mapped: frozenset[int]) -> None:
        """Post all requests again that a dead daemon has not answered (locked).

        The next daemon has these `entries`, and has mapped `mapped` of the `offers`.
        """

    def on_loss(self) -> None:
        """Release all that is kept for the daemon, which is lost (locked). Default: nothing."""

    def close(self) -> None:
        """End the session: its owner is gone. Default: there is no owner."""


class IoThread:
    """The listening thread of one connection."""

    def __init__(self, connection: Connection) -> None:
        """Listen to `connection` once started."""
        self._connection = connection
        self._thread: threading.Thread | None = None
        self._is_over = False  # the thread has ended, or will not take the lock again
        # Held except to end the pause. It is not an Event: an Event's methods take a lock in
        # Python, and an interrupt there would leave that lock held.
        self._pause = threading.Lock()
        self._pause.acquire()
        self._owner: weakref.ref[object] | None = None
        self._ownerless: deque[object] = deque()  # not empty once the owner was freed

    def start(self) -> None:
        """Start listening, unless the thread was started already."""
        if self._thread is None:
            thread = threading.Thread(target=self._listen, name="storm-io", daemon=True)
            thread.start()
            self._thread = thread

    @property
    def is_started(self) -> bool:
        """Whether the thread was started, and not joined yet."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether the thread is not the calling one, and may still take the lock."""
        thread = self._thread
        is_other = thread is not None and thread is not threading.current_thread()
        return is_other and not self._is_over

    def join(self) -> None:
        """Wait for the thread's end, unless it is the calling thread, and forget it."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None

    def end_pause(self) -> None:
        """Make the thread look for replies now, without a pause."""
        if self._pause.locked():
            self._pause.release()

    def end_with(self, owner: object) -> None:
        """Have the thread close the session within a heartbeat of the owner's death."""
        self._owner = weakref.ref(owner, self._ownerless.append)

    def _listen(self) -> None:
        connection = self._connection
        address = connection.address
        try:
            while self._serve() and self._resume():
                pass
        except StormError as error:
            connection.fail(DaemonLost(f"the connection to {address} broke: {error}"))
        finally:
            connection.fail(
                DaemonLost(f"the thread that listens to {address} ended; see its traceback")
            )
            try:
                connection.release_all()
            finally:
                with connection.lock:
                    self._is_over = True
                    connection.changed.notify_all()

    def _serve(self) -> bool:
        """Listen until the daemon has ended; return whether another daemon may follow."""
        connection = self._connection
        wakeup = connection.wakeup
        assert wakeup is not None, "close drops it after this thread has ended"
        poller = select.poll()
        lifeline, awakened = connection.lifeline.fileno(), wakeup.fileno()
        control = connection.dealer.fileno()
        for descriptor in (control, lifeline, awakened):
            poller.register(descriptor, select.POLLIN)
        ready: dict[int, int] = {}
        next_ping = time.monotonic()
        while connection.phase is Phase.OPEN:
            if awakened in ready:
                wakeup.clear()
            next_ping = connection.service(next_ping, is_awake=awakened in ready)
            if self._ownerless:
                connection.listener.close()
                return False
            if not connection.waiting:
                self._pause.acquire(timeout=QUIET_SECONDS)
            is_blocked = bool(connection.dealer.unsent)
            poller.modify(control, select.POLLIN | select.POLLOUT * is_blocked)
            ready = dict(poller.poll(max(0.0, (next_ping - time.monotonic()) * 1000)))
            if lifeline in ready:
                with connection.lock:
                    connection.daemon_ended()
        return connection.phase is Phase.RESUMING

    def _resume(self) -> bool:
        """Resume the session with another daemon; return False if none does: then it is lost."""
        connection, ended = self._connection, time.monotonic()
        try:
            found = resumed(
                connection.address,
                connection.welcome,
                connection.descriptors,
                offers=connection.offers,
                piece_descriptor=connection.piece_descriptor,
                is_over=self._is_unwanted,
            )
        except (DaemonUnavailable, ProtocolMismatch) as error:
            connection.fail(DaemonLost(f"{connection.loss_text}: {error}"))
            return False
        if found is None:
            if self._ownerless:
                connection.listener.close()
            return False
        with connection.lock:
            settled = ended + connection.listener.settling_seconds()
        time.sleep(max(0.0, settled - time.monotonic()))
        with connection.lock:
            if connection.phase is Phase.RESUMING:
                connection.resume_on(found)
                return True
        found.channel.close()
        return False

    def _is_unwanted(self) -> bool:
        return self._connection.phase is not Phase.RESUMING or bool(self._ownerless)
