"""Passes each message of a client, and each result of a lane, to the module that handles it.

Every request is answered, if only with an error, or its session ends. A client's frame, whatever
its content, changes nothing for another client, and delays nobody: it is handled in steps.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Final

from stormd.gateway.dispatch import Dispatch
from stormd.gateway.opening import Opening
from stormd.gateway.peers import Peer
from stormd.ledger.cache_requests import CACHE_REQUESTS
from stormd.ledger.events import Instruction, Wait
from stormd.ledger.sessions import Phase
from stormd.open_files import are_scarce, close_all
from stormd.protocol import (
    Envelope,
    Goodbye,
    MapPiece,
    Message,
    Ping,
    ProtocolError,
    Refused,
    Release,
    Status,
    StatusRequest,
    Store,
    StoreParts,
    decode,
    decode_each,
    first_request,
)
from stormd.protocol.limits import MAX_PIECES_WAITING
from stormd.transport.control import Connection
from stormd.transport.lifeline import LifelineListener

__all__ = ["ATTACHED", "LARGE_BYTES", "RELEASED_AT_ONCE", "SMALL_BYTES", "Gateway"]

log = logging.getLogger(__name__)

SMALL_BYTES: Final = 16 << 10
"""Maximum bytes of a frame that is decoded at once, in under a millisecond whatever its content."""

RELEASED_AT_ONCE: Final = 256
"""Maximum entries released before other clients have a turn."""

LARGE_BYTES: Final = 8 << 20
"""A store of at least so many bytes gets Admitted at once: a client that is short of memory frees
the tensor when it arrives."""

ATTACHED: Final = "attached"
"""What `on_session` is told of a session whose lifeline is connected."""

UNHANDLED: Final = "a frame could not be handled"

Handler = Callable[["Peer", int, Any], Iterator[None] | None]
"""Carries a request out; one that may take long returns its steps."""


class Gateway:
    """Connects ledger, lanes and sockets. All methods run on the event loop.

    Lanes pass their results to `take_results`.
    """

    def __init__(self, dispatch: Dispatch, opening: Opening) -> None:
        self._dispatch = dispatch
        self._opening = opening
        self._ledger = ledger = dispatch.ledger
        self._counters = dispatch.counters
        self._control = dispatch.control
        self._peers = dispatch.peers
        self.take_results = dispatch.take_results
        self._lifelines: LifelineListener
        self._own_handlers: dict[type[Message], Handler] = {
            Store: self._store,
            StoreParts: self._store_parts,
            Release: self._release,
            Ping: self._ping,
            StatusRequest: self._status_request,
            Goodbye: self._goodbye,
            MapPiece: self._map_piece,
            **dict.fromkeys(CACHE_REQUESTS, self._cached),
        }
        self._ledger_handlers = {
            kind: ask for kind, ask in ledger.on_request.items() if kind not in self._own_handlers
        }

    def start(self, lifelines: LifelineListener, allowed_uids: frozenset[int]) -> None:
        """Begin to serve these users."""
        self._lifelines = lifelines
        self._dispatch.start(lifelines)
        self.allow(allowed_uids)
        self._control.start(self.take_frame, self._dispatch.flush, self.end_overfull)

    def allow(self, uids: frozenset[int]) -> None:
        """Allow these users to connect from now on; open sessions are not affected."""
        self._control.allow(uids)
        self._lifelines.allow(uids)

    # --- events -----------------------------------------------------------------------------

    def take_frame(self, connection: Connection, frame: bytes | None) -> Iterator[None] | None:
        """Take a message from a client; return its long work as steps. `flush` must follow.

        `frame` is None if the message had more than one part.
        """
        peer = self._peers.by_connection.get(connection)
        try:
            if peer is None:
                steps: Iterator[None] | None = self._handle_sessionless(connection, frame)
            else:
                steps = self._handle_frame(peer, frame)
        except Exception:
            log.exception(UNHANDLED)
            self._fail(connection)
            return None
        return None if steps is None else self._watched(connection, steps)

    def _watched(self, connection: Connection, steps: Iterator[None]) -> Iterator[None]:
        try:
            yield from steps
        except Exception:
            log.exception(UNHANDLED)
            self._fail(connection)

    def _fail(self, connection: Connection) -> None:
        """End only the session whose frame hit a bug of ours."""
        peer = self._peers.by_connection.get(connection)
        if peer is not None:
            self._dispatch.end(peer.session, "failed")

    def end_overfull(self, connection: Connection) -> None:
        """End the session of a client whose connection was closed because too much waited on it."""
        peer = self._peers.by_connection.get(connection)
        if peer is not None:
            self._dispatch.end_unreachable(peer, "too much waits of it")
            self.flush()

    def take_token(
        self, token: bytes, uid: int, given: list[int]
    ) -> tuple[int, tuple[int, ...]] | None:
        """Give a lifeline the session of its token, and the descriptors to send.

        `given` has the descriptors that a resuming client has sent; this method owns them.
        """
        peer = self._peers.claim(token, uid)
        if peer is None or peer.resumes is None:
            close_all(given)
        if peer is None:
            self._counters.refused += 1
            return None
        if peer.resumes is not None and not self._opening.attach_resumed(peer, given):
            self.end(peer.session, "failed")
            return None
        self._ledger.leases.attach(peer.record, time.monotonic())
        self._dispatch.on_session(peer.session, ATTACHED)
        descriptors, peer.descriptors = peer.descriptors, ()
        return peer.session, descriptors

    def take_piece(self, session: int, number: int, descriptor: int) -> None:
        """Take the descriptor of the piece that a MapPiece names; either may come first.

        The descriptor is closed if its piece is not to be mapped. A client with too many open
        descriptors loses its session. A client that was interrupted may send a descriptor twice.
        """
        peer = self._peers.by_session[session]
        waiting = peer.pieces_waiting.pop(number, None)
        if not peer.is_live or number in peer.piece_descriptors:
            os.close(descriptor)
        elif waiting is None and (
            len(peer.piece_descriptors) >= MAX_PIECES_WAITING or are_scarce()
        ):
            os.close(descriptor)
            self._dispatch.end(session, "failed")
        else:
            peer.piece_descriptors[number] = descriptor
            if waiting is not None:
                self._map_handed(peer, *waiting)
        self.flush()

    def tick(self) -> None:
        """Check leases and silent connections; to be called twice a second."""
        self._control.tick()
        self._dispatch.perform(self._ledger.tick(time.monotonic()))
        self._dispatch.schedule_freeing()
        if self._ledger.is_waited_for:
            self._control.unpark()
        self.flush()

    def end_tier(self, reason: str) -> None:
        """End the tier on disk: restores that need it fail, and stores no longer wait for it."""
        if self._ledger.spills is not None:
            self._dispatch.perform(self._ledger.spills.end(reason))
        self.retry_waiting()

    def retry_waiting(self) -> None:
        """Retry requests that wait for memory: there is more of it, or no more can be had."""
        self._control.unpark()
        self.flush()

    def end(self, session: int, cause: str) -> None:
        """Begin a session's end, and send what that brings."""
        self._dispatch.end(session, cause)
        self.flush()

    def take_report(self, session: int, cause: str) -> None:
        """Take a worker's report: a session has its lifeline, which it watches, or has ended."""
        record = self._ledger.sessions.get(session)
        if cause != ATTACHED:
            self.end(session, cause)
        elif record is not None and record.phase is Phase.OPENED:
            self._ledger.leases.attach(record, math.inf)

    def end_all(self, cause: str) -> None:
        """Begin the end of all sessions."""
        for session in list(self._ledger.sessions):
            self.end(session, cause)

    def suspend(self) -> None:
        """Hear nobody any more; sessions are kept unchanged for the next daemon."""
        self._dispatch.suspend()
        self._control.close(keeps_file=True)
        self._lifelines.close(keeps_file=True)

    def flush(self) -> None:
        """Send the outboxes; to be called at the end of any event."""
        self._dispatch.flush()

    # --- frames -----------------------------------------------------------------------------

    def _handle_sessionless(self, connection: Connection, frame: bytes | None) -> Iterator[None]:
        """Answer a frame of a connection without a session; a Hello in it may open one."""
        problem = self._opening.problem(connection)
        if problem is not None:  # and the content of the frame is not read
            request = 0 if frame is None else first_request(frame)
            self._opening.refuse(connection, request, problem)
            return
        try:
            batch = yield from _read(frame)
        except ProtocolError as error:
            self._opening.refuse(connection, 0, self._opening.undecodable(frame, error))
            return
        rest = iter(batch)
        for request, message in rest:
            peer = self._peers.by_connection.get(connection)
            if peer is not None:
                yield from self._while_live(peer, self._request(peer, request, message) or ())
            elif connection.is_open:
                yield from self._opening.answer(connection, request, message, rest)
            yield

    def _handle_frame(self, peer: Peer, frame: bytes | None) -> Iterator[None] | None:
        """Carry out a frame of a client with a session, and renew its lease.

        A small frame's first message is carried out at once, since most frames have no other.
        """
        peer.record.seen = time.monotonic()
        if frame is None or len(frame) > SMALL_BYTES:
            return self._read_and_carry_out(peer, frame)
        try:
            batch = decode(frame)
        except ProtocolError as error:
            self._refuse(peer, error)
            return None
        request, message = batch[0]
        ask, steps = self._ledger_handlers.get(type(message)), None
        if ask is None:
            steps = self._request(peer, request, message)
        else:
            self._dispatch.perform(ask(peer.record, request, message, time.monotonic()))
        if steps is None and len(batch) == 1:
            return None
        return self._carry_out(peer, batch[1:], steps)

    def _read_and_carry_out(self, peer: Peer, frame: bytes | None) -> Iterator[None]:
        try:
            batch = yield from _read(frame)
        except ProtocolError as error:
            self._refuse(peer, error)
            return
        yield from self._carry_out(peer, batch, None)

    def _carry_out(
        self, peer: Peer, batch: Iterable[Envelope], steps: Iterator[None] | None
    ) -> Iterator[None]:
        """Take the remaining steps of a message, then carry out those that follow it."""
        if steps is not None:
            yield from self._while_live(peer, steps)
        for request, message in batch:
            yield
            steps = self._request(peer, request, message)
            if steps is not None:
                yield from self._while_live(peer, steps)

    def _refuse(self, peer: Peer, error: ProtocolError) -> None:
        self._counters.malformed += 1
        if peer.is_live:
            self._dispatch.send(peer, 0, Refused("UsageError", str(error)))

    def _request(self, peer: Peer, request: int, message: Message) -> Iterator[None] | None:
        if not peer.is_live:
            return None  # the session ended by an earlier message of this frame, or meanwhile
        ask = self._ledger_handlers.get(type(message))
        if ask is not None:
            self._dispatch.perform(ask(peer.record, request, message, time.monotonic()))
            return None
        handler = self._own_handlers.get(type(message))
        if handler is not None:
            return handler(peer, request, message)
        self._counters.malformed += 1
        name = type(message).__name__
        refused = Refused("UsageError", f"{name} is not for an open session")
        self._dispatch.send(peer, request, refused)
        return None

    def _while_live(self, peer: Peer, steps: Iterable[None]) -> Iterator[None]:
        for _ in steps:
            yield
            if not peer.is_live:
                return

    # --- requests with steps before the ledger is asked --------------------------------------

    def _store(self, peer: Peer, request: int, message: Store) -> Iterator[None] | None:
        if peer.record.cache is not None:
            return self._store_in_cache(peer, request, message)
        if message.nbytes >= LARGE_BYTES:
            self._dispatch.send_soon(peer)
        return self._ask_ledger(peer, request, message)

    def _store_parts(self, peer: Peer, _request: int, message: StoreParts) -> Iterator[None]:
        """Store each entry in turn; one that has to wait delays those after it."""
        for one in message.stores():
            steps = self._store(peer, one.entry, one)
            if steps is not None:
                yield from steps
            yield

    def _map_piece(self, peer: Peer, request: int, message: MapPiece) -> None:
        if message.segment in peer.piece_descriptors:
            self._map_handed(peer, request, message)
        elif (
            len(peer.pieces_waiting) < MAX_PIECES_WAITING
            and message.segment not in peer.pieces_waiting
        ):
            peer.pieces_waiting[message.segment] = request, message
        else:
            waiting = len(peer.pieces_waiting)
            detail = f"{waiting} pieces wait for their descriptors: send those first"
            self._dispatch.send(peer, request, Refused("UsageError", detail))

    def _map_handed(self, peer: Peer, request: int, message: MapPiece) -> None:
        ask = self._ledger.on_request[MapPiece]
        self._dispatch.perform(ask(peer.record, request, message, time.monotonic()))
        close_all([peer.piece_descriptors.pop(message.segment, -1)])  # if it was refused

    def _ask_ledger(self, peer: Peer, request: int, message: Message) -> Iterator[None] | None:
        """Carry out the ledger's answer; if that is to wait for memory, return the steps."""
        ask = self._ledger.on_request[type(message)]
        answer = ask(peer.record, request, message, time.monotonic())
        if isinstance(answer[0], Wait):
            return self._retry_until_room(peer, request, message)
        self._dispatch.perform(answer)
        return None

    def _retry_until_room(self, peer: Peer, request: int, message: Message) -> Iterator[None]:
        """Ask the ledger again each time the pool has grown, before the client's later requests.

        The last attempt is made when the pool cannot grow any more.
        """
        ask = self._ledger.on_request[type(message)]
        answer: list[Instruction] = [Wait(peer.session)]
        while isinstance(answer[0], Wait):
            self._control.park(peer.connection)
            yield
            answer = ask(peer.record, request, message, time.monotonic())
        self._dispatch.perform(answer)
        self._dispatch.send_soon(peer)

    def _store_in_cache(self, peer: Peer, request: int, message: Store) -> Iterator[None]:
        """Store after dropping cached tensors to make room, which may take long."""
        now = time.monotonic()
        while self._ledger.make_cache_room(peer.record, message, now):
            yield
        yield from self._ask_ledger(peer, request, message) or ()

    def _cached(self, peer: Peer, request: int, message: Message) -> Iterator[None]:
        """Answer after dropping expired tensors, which may take long."""
        now = time.monotonic()
        while self._ledger.tidy_cache(now):
            yield
        yield from self._ask_ledger(peer, request, message) or ()
        self._dispatch.schedule_freeing()

    def _release(self, peer: Peer, request: int, message: Release) -> Iterator[None] | None:
        entries, release = message.entries, self._ledger.on_request[Release]
        if len(entries) > RELEASED_AT_ONCE:
            return self._release_some(peer, entries)
        self._dispatch.perform(release(peer.record, request, message, 0.0))
        return None

    def _release_some(self, peer: Peer, entries: list[int]) -> Iterator[None]:
        for begin in range(0, len(entries), RELEASED_AT_ONCE):
            self._release(peer, 0, Release(entries[begin : begin + RELEASED_AT_ONCE]))
            yield

    # --- requests answered without the ledger ------------------------------------------------

    def _ping(self, peer: Peer, request: int, _message: Ping) -> None:
        self._dispatch.send_pong(peer, request)

    def _status_request(self, peer: Peer, request: int, _message: StatusRequest) -> Iterator[None]:
        """Answer in a separate frame: a state is large, and a batch of them might not fit."""
        state = yield from self._opening.status(peer.connection)
        self._dispatch.send_alone(peer, request, Status(state))

    def _goodbye(self, peer: Peer, _request: int, _message: Goodbye) -> None:
        self._dispatch.send_outbox(peer)
        self._dispatch.end(peer.session, "goodbye")


def _read(frame: bytes | None) -> Generator[None, None, Iterable[Envelope]]:
    """Return the messages of a frame, after checking in steps that all are valid.

    Raises:
        ProtocolError: the frame is no valid batch.
    """
    if frame is None:
        raise ProtocolError("a message of several parts: send each batch in one")
    if len(frame) <= SMALL_BYTES:
        return decode(frame)
    for _ in decode_each(frame):  # not kept: decoded, they take many times the frame's bytes
        yield
    return decode_each(frame)
