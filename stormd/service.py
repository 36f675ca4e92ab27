"""What the daemon does with a frame, a lifeline and a lane's result: the shell of the ledger.

What stays true: every request is answered, also with an error, or its session ends; a frame of
one client, whatever is in it, changes nothing for another; answers that arise in one turn of the
loop leave in one frame.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

import zmq

from stormd import __version__
from stormd.control import ControlSocket, Delivery
from stormd.counters import Counters
from stormd.errors import LaneUnavailable
from stormd.instructions import Detach, Ended, Instruction, Map, Probe, Reply, Skip, Unmap
from stormd.lanes import Lane, RestoreJob, Result, StoreJob
from stormd.ledger import Ledger
from stormd.lifeline import LifelineListener
from stormd.peers import Peer, Peers
from stormd.protocol import (
    PROTOCOL_VERSION,
    Envelope,
    Goodbye,
    Hello,
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
    Welcome,
    decode,
    encode,
    hello_version,
)
from stormd.protocol.limits import TOKEN_BYTES
from stormd.records import SessionInfo

__all__ = ["FEATURES", "Service"]

log = logging.getLogger(__name__)

FEATURES: Final[list[str]] = []
"""What this daemon can do beyond its protocol version, as Welcome says it."""

MESSAGES_A_FRAME: Final = 512
"""Answers in one frame: far below what a frame holds, whatever texts they carry."""


class Service:
    """Binds ledger, lanes and sockets together. All methods run on the event loop.

    `status` returns what a StatusRequest is answered with; `on_progress` is called whenever the
    state may have changed. `allowed_uids` are the users that may connect.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ledger: Ledger,
        counters: Counters,
        lanes: Mapping[str, Lane],
        control: ControlSocket,
        lifeline_path: str,
        allowed_uids: frozenset[int],
        lease_seconds: float,
        status: Callable[[], dict[str, Any]],
        on_progress: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._ledger = ledger
        self._counters = counters
        self._lanes = lanes
        self._control = control
        self._lifeline_path = lifeline_path
        self._allowed_uids = allowed_uids
        self._lease_seconds = lease_seconds
        self._status = status
        self._on_progress = on_progress
        self._lifelines: LifelineListener
        self._peers = Peers()
        self._unsent: dict[Peer, None] = {}  # peers with an outbox, in order
        self._requests: dict[type[Message], Callable[[Peer, int, Any], None]] = {
            Store: self._store,
            Restore: self._restore,
            Release: self._release,
            Ping: self._ping,
            MapSegment: self._map_segment,
            UnmapSegment: self._unmap_segment,
            StatusRequest: self._status_request,
            Goodbye: self._goodbye,
        }
        self._actions: dict[type[Instruction], Callable[[Any], None]] = {
            Reply: self._reply,
            StoreJob: lambda job: self._peers.of(job.session).lane.store(job),
            RestoreJob: lambda job: self._peers.of(job.session).lane.restore(job),
            Skip: lambda skip: self._peers.of(skip.session).lane.skip(skip.session, skip.sequence),
            Map: lambda made: self._peers.of(made.session).lane.map_segment(
                made.session, made.segment
            ),
            Unmap: lambda made: self._peers.of(made.session).lane.unmap_segment(
                made.session, made.segment
            ),
            Probe: self._probe,
            Detach: self._detach,
            Ended: self._ended,
        }

    def allow(self, uids: frozenset[int]) -> None:
        """Let other users connect from now on; sessions that are open stay."""
        self._allowed_uids = uids

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
                self._take_from_stranger(route, frame)
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
        self._ledger.attach(peer.session, self._loop.time())
        descriptors, peer.descriptors = peer.descriptors, ()
        return peer.session, descriptors

    def lose(self, session: int) -> None:
        """End a session whose lifeline has ended."""
        self.end(session, "died")
        self.flush()

    def take_results(self, results: list[Result]) -> None:
        """Take what lanes have done."""
        now = self._loop.time()
        for result in results:
            self._perform(self._ledger.result(result, now))
        self.flush()

    def tick(self) -> None:
        """Look after leases; called about once a second."""
        self._perform(self._ledger.tick(self._loop.time()))
        self.flush()

    def end(self, session: int, cause: str) -> None:
        """Begin a session's end; `flush` must follow."""
        self._perform(self._ledger.end(session, cause))

    def end_all(self, cause: str) -> None:
        """Begin the end of all sessions."""
        for session in self._ledger.sessions:
            self.end(session, cause)
        self.flush()

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

    # --- strangers --------------------------------------------------------------------------

    def _take_from_stranger(self, route: bytes, frame: zmq.Frame | None) -> None:
        try:
            batch = decode(b"" if frame is None else frame.bytes)
        except ProtocolError as error:
            self._refuse(route, 0, self._undecodable(frame, error))
            return
        assert frame is not None
        uid = _uid(frame)
        problem = self._stranger_problem(route, uid)
        for request, message in batch:
            peer = self._peers.at(route)  # a Hello may stand in front of other messages
            if problem is not None:
                self._refuse(route, request, problem)
            elif peer is not None:
                self._request(peer, request, message)
            else:
                self._answer_stranger(route, uid, request, message)

    def _stranger_problem(self, route: bytes, uid: int) -> Refused | None:
        if route[:1] != b"\0":  # ZeroMQ's own begin with a zero byte, chosen ones cannot
            return Refused("UsageError", "a routing id was chosen: leave it to ZeroMQ")
        if uid not in self._allowed_uids:
            return Refused("UsageError", f"user {uid} may not connect: add it to allowed_uids")
        return None

    def _undecodable(self, frame: zmq.Frame | None, error: ProtocolError) -> Refused:
        version = None if frame is None else hello_version(frame.bytes)
        if version is not None and version != PROTOCOL_VERSION:
            return _mismatch(version)
        self._counters.malformed += 1
        return Refused("UsageError", str(error))

    def _answer_stranger(self, route: bytes, uid: int, request: int, message: Message) -> None:
        answer: Message
        if isinstance(message, Hello):
            answer = self._open(route, uid, message)
        elif isinstance(message, StatusRequest):
            answer = Status(self._status())
        else:
            answer = Refused("DaemonLost", "this connection has no session: send Hello first")
        if isinstance(answer, Refused):
            self._refuse(route, request, answer)
        else:
            self._control.send(route, encode([Envelope(request, answer)]))

    def _refuse(self, route: bytes, request: int, answer: Refused) -> None:
        self._counters.refused += 1
        self._control.send(route, encode([Envelope(request, answer)]))

    def _open(self, route: bytes, uid: int, hello: Hello) -> Welcome | Refused:
        problem = self._hello_problem(uid, hello) or self._ledger.refusal()
        if problem is not None:
            return problem
        lane = self._lanes[hello.device]
        session = secrets.randbits(63) or 1
        try:
            attachment = lane.attach(session, hello)
        except LaneUnavailable as error:
            return Refused("UsageError", str(error))
        token = secrets.token_bytes(TOKEN_BYTES)
        self._peers.add(Peer(session, route, uid, lane, token, attachment.descriptors))
        info = SessionInfo(session, hello.device, uid, hello.pid, hello.name)
        self._ledger.open(
            info,
            part_bytes=attachment.part_bytes,
            staging_bytes=attachment.segment_bytes,
            now=self._loop.time(),
        )
        log.info("session opened", extra={"session": session, "pid": hello.pid, "uid": uid})
        return Welcome(
            session,
            token,
            PROTOCOL_VERSION,
            FEATURES,
            __version__,
            self._lifeline_path,
            attachment.staging_bytes,
            attachment.part_bytes,
            self._lease_seconds,
        )

    def _hello_problem(self, uid: int, hello: Hello) -> Refused | None:
        if hello.protocol != PROTOCOL_VERSION:
            return _mismatch(hello.protocol)
        if hello.uid != uid:
            return Refused("UsageError", f"Hello says user {hello.uid}, the kernel says {uid}")
        if hello.device not in self._lanes:
            offered = ", ".join(self._lanes)
            return Refused(
                "UsageError",
                f"this daemon has no {hello.device} lane, only {offered}: start it with --device "
                f"{hello.device}, or train on another device",
            )
        return None

    # --- clients with a session -------------------------------------------------------------

    def _take_from_peer(self, peer: Peer, frame: zmq.Frame | None) -> None:
        self._ledger.touch(peer.session, self._loop.time())
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
        self._perform(self._ledger.store(peer.session, request, message, self._loop.time()))

    def _restore(self, peer: Peer, request: int, message: Restore) -> None:
        self._perform(self._ledger.restore(peer.session, request, message, self._loop.time()))

    def _release(self, peer: Peer, _request: int, message: Release) -> None:
        self._perform(self._ledger.release(peer.session, message))

    def _map_segment(self, peer: Peer, request: int, message: MapSegment) -> None:
        self._perform(self._ledger.map_segment(peer.session, request, message))

    def _unmap_segment(self, peer: Peer, request: int, message: UnmapSegment) -> None:
        self._perform(self._ledger.unmap_segment(peer.session, request, message))

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
        self._send(self._peers.of(reply.session), reply.request, reply.message)

    def _probe(self, probe: Probe) -> None:
        """Send what the client ignores: ZeroMQ says whether there is anybody to send it to."""
        self._send(self._peers.of(probe.session), 0, Pong())

    def _detach(self, detach: Detach) -> None:
        peer = self._peers.of(detach.session)
        self._peers.cut_off(peer)
        self._unsent.pop(peer, None)
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
        self._unsent[peer] = None

    def _send_outbox(self, peer: Peer) -> None:
        outbox, peer.outbox = peer.outbox, []
        for start in range(0, len(outbox), MESSAGES_A_FRAME):
            if self._peers.at(peer.route) is not peer:
                return  # cut off by the frame before
            self._send_frame(peer, outbox[start : start + MESSAGES_A_FRAME])

    def _send_frame(self, peer: Peer, batch: list[Envelope]) -> None:
        if self._control.send(peer.route, encode(batch)) is not Delivery.SENT:
            # It does not read, or is gone: it would wait for ever for what it has missed.
            self._counters.unsent += 1
            self.end(peer.session, "unreachable")


def _uid(frame: zmq.Frame) -> int:
    """Return the user at the other end, as the kernel told ZeroMQ: "localhost:uid:gid:pid"."""
    return int(str(frame.get("Peer-Address")).split(":")[1])


def _mismatch(version: int) -> Refused:
    return Refused(
        "ProtocolMismatch",
        f"the client speaks protocol {version}, this daemon (stormd {__version__}) "
        f"{PROTOCOL_VERSION}: install the same version of stormd on both sides",
    )
