"""The thread "storm-io" of a connection, which listens though nobody calls in.

It handles replies that nobody waits for, sends heartbeats and what was deferred, notices the
daemon's end, and finds the one that follows. What comes is told to a Listener.
"""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING

import zmq

from storm_client.errors import DaemonLost, DaemonUnavailable, ProtocolMismatch, StormError
from storm_client.transport.resume import resumed
from stormd.protocol import Message

if TYPE_CHECKING:
    from storm_client.lanes.offers import Mappable
    from storm_client.transport.connection import Connection

__all__ = ["IoThread", "Listener", "Phase"]

QUIET_SECONDS = 0.005
"""The listener's pause after each turn while nobody waits: replies then come in batches, and a
training thread, which handles them itself when it sends, rarely shares the interpreter lock."""


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


class IoThread:
    """Of one connection."""

    def __init__(self, connection: Connection) -> None:
        """Listen to what comes to `connection`, once started."""
        self._connection = connection
        self._thread: threading.Thread | None = None
        self._is_over = False  # it has ended, or is about to, and takes the lock no more
        # Held but for ending the pause. No Event: its methods take a lock in Python, and who is
        # interrupted there keeps it.
        self._pause = threading.Lock()
        self._pause.acquire()
        self._owner: weakref.ref[object] | None = None
        self._ownerless: deque[object] = deque()  # not empty once nobody is left who could close

    def start(self) -> None:
        """Listen from now on, unless that is so."""
        if self._thread is None:
            thread = threading.Thread(target=self._listen, name="storm-io", daemon=True)
            thread.start()
            self._thread = thread

    @property
    def is_started(self) -> bool:
        """Whether it listens, or has until lately."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether it is another thread than this one, and may take the lock."""
        thread = self._thread
        is_other = thread is not None and thread is not threading.current_thread()
        return is_other and not self._is_over

    def join(self) -> None:
        """Wait for its end, unless this is it, and forget it."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None

    def hurry(self) -> None:
        """Have it look for replies now, rather than after a pause."""
        if self._pause.locked():
            self._pause.release()

    def end_with(self, owner: object) -> None:
        """Have it close the session within a heartbeat of the owner's death."""
        self._owner = weakref.ref(owner, self._ownerless.append)

    def _listen(self) -> None:
        connection = self._connection
        address = connection.address
        try:
            while self._serve() and self._resume():
                pass
        except (StormError, zmq.ZMQError) as error:
            connection.fail(DaemonLost(f"the connection to {address} broke: {error}"))
        finally:
            connection.fail(
                DaemonLost(f"the thread that listens to {address} ended; see its traceback")
            )
            try:
                connection.let_go()
            finally:
                with connection.lock:
                    self._is_over = True
                    connection.changed.notify_all()

    def _serve(self) -> bool:
        """Listen to the daemon there is; tell, once it has ended, whether another may follow."""
        connection = self._connection
        wakeup = connection.wakeup
        assert wakeup is not None, "close drops it after this thread has ended"
        poller = select.poll()
        lifeline, awakened = connection.lifeline.fileno(), wakeup.fileno()
        for descriptor in (connection.socket.fileno(), lifeline, awakened):
            poller.register(descriptor, select.POLLIN)
        ready: dict[int, int] = {}
        next_ping = time.monotonic()
        while connection.phase is Phase.OPEN:
            if awakened in ready:
                wakeup.clear()
            next_ping = connection.turn(next_ping, is_awake=awakened in ready)
            if self._ownerless:
                connection.listener.close()
                return False
            if not connection.waiting:
                self._pause.acquire(timeout=QUIET_SECONDS)
            ready = dict(poller.poll(max(0.0, (next_ping - time.monotonic()) * 1000)))
            if lifeline in ready:
                with connection.lock:
                    connection.daemon_ended()
        return connection.phase is Phase.RESUMING

    def _resume(self) -> bool:
        """Have another daemon go on with the session; False where none does: then it is lost."""
        connection, ended = self._connection, time.monotonic()
        try:
            found = resumed(
                connection.address,
                connection.welcome,
                connection.descriptors,
                offers=connection.offers,
                descriptor=connection.descriptor,
                is_over=self._is_unwanted,
            )
        except (DaemonUnavailable, ProtocolMismatch) as error:
            connection.fail(DaemonLost(f"{connection.ended}: {error}"))
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
                connection.go_on(found)
                return True
        found.channel.close()
        return False

    def _is_unwanted(self) -> bool:
        return self._connection.phase is not Phase.RESUMING or bool(self._ownerless)
