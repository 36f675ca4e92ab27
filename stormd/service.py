"""What the daemon does with a frame, a lifeline and a lane's result: the shell of the ledger.

What stays true: every request is answered, also with an error, or its session ends; a frame of
one client, whatever is in it, changes nothing for another; answers that arise in one turn of the
loop leave in one frame, and those that may wait leave with the next within milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import zmq

from stormd.cache_requests import CACHE_REQUESTS
from stormd.control import ControlSocket, Delivery
from stormd.counters import Counters
from stormd.instructions import Detach, Ended, Instruction, Map, Probe, Reply, Skip, Unmap
from stormd.lanes import Lane, RestoreJob, Result, StoreJob
from stormd.ledger import Ledger
from stormd.lifeline import LifelineListener
from stormd.peers import Peer, Peers
from stormd.protocol import (
    Admitted,
    CacheNames,
    Envelope,
    Goodbye,
    MapSegment,
    Message,
    Ping,
    Pong,
    ProtocolError,
    Refused,
    Release,
    Restore,
    Status,
    StatusRequest,
    Store,
    UnmapSegment,
    decode,
    encode,
)
from stormd.reception import Reception

__all__ = ["Service"]

log = logging.getLogger(__name__)

MESSAGES_A_FRAME: Final = 512
"""Answers in one frame: far below what a frame holds, whatever texts they carry."""

HELD_SECONDS: Final = 0.005
"""How long Admitted may stay behind to leave with Stored: each frame wakes a thread of ZeroMQ's
here, and one of the client's."""

LARGE_BYTES: Final = 8 << 20
"""Of a store whose Admitted leaves at once: a client short of memory lets go when it has come."""


class Service:
    """Binds ledger, lanes and sockets together. All methods run on the event loop.

    `status` returns what a StatusRequest is answered with; `on_progress` is called whenever the
    state may have changed; `later` has a call made on the loop after so many seconds.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        counters: Counters,
        control: ControlSocket,
        peers: Peers,
        reception: Reception,
        status: Callable[[], dict[str, Any]],
        on_progress: Callable[[], None],
        later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self._ledger = ledger
        self._counters = counters
        self._control = control
        self._peers = peers
        self._reception = reception
        self._status = status
        self._on_progress = on_progress
        self._later = later
        self._lifelines: LifelineListener
        self._unsent: dict[Peer, None] = {}  # peers with an outbox that must leave, in order
        self._held: dict[Peer, asyncio.TimerHandle] = {}  # those with one that may wait so long
        self._freeing: asyncio.TimerHandle | None = None
        self._requests = self._request_handlers()
        self._actions = self._instruction_handlers()

    def start(self, lifelines: LifelineListener) -> None:
        """Begin to serve."""
        self._lifelines = lifelines
        self._control.start(self.take_frame, self._flush)

    # --- events -----------------------------------------------------------------------------

    def take_frame(self, route: bytes, frame: zmq.Frame | None) -> None:
        """Take a message from a client; the control socket flushes after a batch of them."""
        peer = self._peers.at(route)
        try:
            if peer is None:
                self._reception.take(route, frame, self._request)
            else:
                self._take_from_peer(peer, frame)
        except Exception:
            # Our bug. It ends the one session whose frame met it and nobody else's.
            log.exception("a frame could not be handled")
            peer = self._peers.at(route)
            if peer is not None:
                self.end(peer.session, "failed")

    def take_token(self, token: bytes, uid: int) -> tuple[int, tuple[int, ...]] | None:
        """Give a lifeline the session of its token, and the descriptors to hand over."""
        peer = self._peers.claim(token, uid)
        if peer is None:
            self._counters.refused += 1
            return None
        self._ledger.attach(peer.session, time.monotonic())
        descriptors, peer.descriptors = peer.descriptors, ()
        return peer.session, descriptors

    def lose(self, session: int) -> None:
        """End a session whose lifeline has ended."""
        self.end(session, "died")
        self.flush()

    def take_results(self, results: list[Result]) -> None:
        """Take what lanes have done."""
        now = time.monotonic()
        for result in results:
            try:
                self._perform(self._ledger.result(result, now))
            except Exception:
                # Our bug, as above. The session's end waits for this result in vain.
                log.exception("a result could not be handled: %s", type(result).__name__)
                if result.session in self._ledger.sessions:
                    self.end(result.session, "failed")
        self.flush()

    def tick(self) -> None:
        """Look after leases; called about once a second."""
        self._perform(self._ledger.tick(time.monotonic()))
        self._go_on_freeing()
        self.flush()

    def end(self, session: int, cause: str) -> None:
        """Begin a session's end; `flush` must follow."""
        self._perform(self._ledger.end(session, cause))
        self._go_on_freeing()

    def end_all(self, cause: str) -> None:
        """Begin the end of all sessions."""
        for session in self._ledger.sessions:
            self.end(session, cause)
        self.flush()

    def _free_some(self) -> None:
        """Free more of what sessions that end have held, and look again after others had a turn."""
        self._freeing = None
        self._perform(self._ledger.free_some())
        self._go_on_freeing()
        self.flush()

    def _go_on_freeing(self) -> None:
        if self._freeing is None and self._ledger.is_freeing:
            self._freeing = self._later(0.0, self._free_some)

    def flush(self) -> None:
        """Send what is in the outboxes, at the end of any event but a frame."""
        self._flush()
        self._control.settle()

    def _flush(self) -> None:
        while self._unsent:
            peer = next(iter(self._unsent))
            del self._unsent[peer]
            self._send_outbox(peer)
        self._on_progress()

    # --- who handles what -------------------------------------------------------------------

    def _request_handlers(self) -> dict[type[Message], Callable[[Peer, int, Any], None]]:
        return {
            Store: self._store,
            Restore: self._restore,
            Release: self._release,
            Ping: self._ping,
            MapSegment: self._map_segment,
            UnmapSegment: self._unmap_segment,
            StatusRequest: self._status_request,
            Goodbye: self._goodbye,
            **dict.fromkeys(CACHE_REQUESTS, self._cached),
        }

    def _instruction_handlers(self) -> dict[type[Instruction], Callable[[Any], None]]:
        def lane(instruction: Instruction) -> Lane:
            return self._peers.of(instruction.session).lane

        return {
            Reply: self._reply,
            StoreJob: lambda job: lane(job).store(job),
            RestoreJob: lambda job: lane(job).restore(job),
            Skip: lambda skip: lane(skip).skip(skip.session, skip.sequence),
            Map: lambda made: lane(made).map_segment(made.session, made.segment),
            Unmap: lambda made: lane(made).unmap_segment(made.session, made.segment),
            Probe: self._probe,
            Detach: self._detach,
            Ended: self._ended,
        }

    # --- clients with a session -------------------------------------------------------------

    def _take_from_peer(self, peer: Peer, frame: zmq.Frame | None) -> None:
        self._ledger.touch(peer.session, time.monotonic())
        try:
            batch = decode(b"" if frame is None else frame.bytes)
        except ProtocolError as error:
            self._counters.malformed += 1
            self._send(peer, 0, Refused("UsageError", str(error)))
            return
        for request, message in batch:
            self._request(peer, request, message)

    def _request(self, peer: Peer, request: int, message: Message) -> None:
        handler = self._requests.get(type(message))
        if self._peers.at(peer.route) is not peer:
            return  # the session ended with an earlier message of this frame
        if handler is None:
            self._counters.malformed += 1
            name = type(message).__name__
            self._send(peer, request, Refused("UsageError", f"{name} is not for an open session"))
            return
        handler(peer, request, message)

    def _store(self, peer: Peer, request: int, message: Store) -> None:
        self._perform(self._ledger.store(peer.session, request, message, time.monotonic()))
        if message.nbytes >= LARGE_BYTES:
            self._unsent[peer] = None

    def _restore(self, peer: Peer, request: int, message: Restore) -> None:
        self._perform(self._ledger.restore(peer.session, request, message, time.monotonic()))

    def _release(self, peer: Peer, _request: int, message: Release) -> None:
        self._perform(self._ledger.release(peer.session, message))

    def _map_segment(self, peer: Peer, request: int, message: MapSegment) -> None:
        self._perform(self._ledger.map_segment(peer.session, request, message))

    def _unmap_segment(self, peer: Peer, request: int, message: UnmapSegment) -> None:
        self._perform(self._ledger.unmap_segment(peer.session, request, message))

    def _cached(self, peer: Peer, request: int, message: Message) -> None:
        self._perform(self._ledger.cached(peer.session, request, message, time.monotonic()))

    def _ping(self, peer: Peer, request: int, _message: Ping) -> None:
        self._send(peer, request, Pong())

    def _status_request(self, peer: Peer, request: int, _message: StatusRequest) -> None:
        """Answer in a frame of its own: a state is large, a batch of them might not fit."""
        self._send_frame(peer, [Envelope(request, Status(self._status()))])

    def _goodbye(self, peer: Peer, _request: int, _message: Goodbye) -> None:
        self._send_outbox(peer)
        self.end(peer.session, "goodbye")

    # --- instructions -----------------------------------------------------------------------

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._actions[type(instruction)](instruction)

    def _reply(self, reply: Reply) -> None:
        peer = self._peers.of(reply.session)
        if isinstance(reply.message, CacheNames):  # large, like a state: in a frame of its own
            self._send_frame(peer, [Envelope(reply.request, reply.message)])
        else:
            self._send(peer, reply.request, reply.message)

    def _probe(self, probe: Probe) -> None:
        """Send what the client ignores: ZeroMQ says whether there is anybody to send it to."""
        self._send(self._peers.of(probe.session), 0, Pong())

    def _detach(self, detach: Detach) -> None:
        peer = self._peers.of(detach.session)
        self._peers.cut_off(peer)
        self._unsent.pop(peer, None)
        self._let_leave(peer)
        for descriptor in peer.descriptors:
            os.close(descriptor)
        peer.descriptors = ()
        peer.lane.detach(detach.session)

    def _ended(self, ended: Ended) -> None:
        self._peers.remove(ended.session)
        self._lifelines.end(ended.session)
        log.info("session ended", extra={"session": ended.session})

    # --- sending ----------------------------------------------------------------------------

    def _send(self, peer: Peer, request: int, message: Message) -> None:
        peer.outbox.append(Envelope(request, message))
        self._counters.refused += isinstance(message, Refused)
        if not isinstance(message, Admitted) or len(peer.outbox) >= MESSAGES_A_FRAME:
            self._unsent[peer] = None
        elif peer not in self._held:
            self._held[peer] = self._later(HELD_SECONDS, partial(self._send_held, peer))

    def _send_held(self, peer: Peer) -> None:
        """Send what has waited long enough."""
        self._unsent[peer] = None
        self.flush()

    def _send_outbox(self, peer: Peer) -> None:
        self._let_leave(peer)
        outbox, peer.outbox = peer.outbox, []
        for start in range(0, len(outbox), MESSAGES_A_FRAME):
            if self._peers.at(peer.route) is not peer:
                return  # cut off by the frame before
            self._send_frame(peer, outbox[start : start + MESSAGES_A_FRAME])

    def _let_leave(self, peer: Peer) -> None:
        """Hold the peer's answers no longer."""
        timer = self._held.pop(peer, None)
        if timer is not None:
            timer.cancel()

    def _send_frame(self, peer: Peer, batch: list[Envelope]) -> None:
        if self._control.send(peer.route, encode(batch)) is not Delivery.SENT:
            # It does not read, or is gone: it would wait for ever for what it has missed.
            self._counters.unsent += 1
            self.end(peer.session, "unreachable")
