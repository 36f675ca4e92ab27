"""Who may speak, and what a message asks of whom: the shell between sockets, ledger and lanes.

Nothing is granted to a peer of another protocol version, of a user who is not allowed, or under a
routing id that it chose itself. Every request is answered, also with an error, or its session ends;
a frame of one client, whatever is in it, changes nothing for another, and holds nobody up: it is
worked on in pieces. Answers that arise in one turn of the loop leave in one frame, and those that
may wait leave with the next within milliseconds.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from stormd import __version__
from stormd.cache.items import Caller
from stormd.errors import LaneUnavailable
from stormd.lanes import Attachment, Lane
from stormd.ledger.cache_requests import CACHE_REQUESTS
from stormd.ledger.events import (
    Detach,
    Ended,
    Instruction,
    Jobs,
    Map,
    Probe,
    Reply,
    Result,
    Skip,
    Unmap,
    Wait,
)
from stormd.ledger.ledger import Ledger
from stormd.ledger.sessions import SessionInfo, session_name
from stormd.monitoring.counters import Counters
from stormd.protocol import (
    CACHE_FEATURE,
    NO_LANE,
    PROTOCOL_VERSION,
    Admitted,
    CacheNames,
    Envelope,
    Goodbye,
    Hello,
    MapSegment,
    Message,
    Ping,
    PlanLearned,
    Pong,
    ProtocolError,
    Refused,
    Release,
    Restore,
    RestoreParts,
    Status,
    StatusRequest,
    Store,
    UnmapSegment,
    Welcome,
    decode,
    decode_each,
    encode,
    first_request,
    hello_version,
)
from stormd.protocol.limits import TOKEN_BYTES
from stormd.transport.control import Connection, ControlSocket
from stormd.transport.lifeline import LifelineListener
from stormd.transport.listener import Credentials

__all__ = ["Gateway", "Peer", "Peers", "Terms"]

log = logging.getLogger(__name__)

MESSAGES_A_FRAME: Final = 512
"""Answers in one frame: far below what a frame holds, whatever texts they carry."""

HELD_SECONDS: Final = 0.005
"""How long Admitted may stay behind to leave with Stored: each frame wakes a thread of ZeroMQ's
here, and one of the client's."""

UNREAD_BYTES: Final = 8 << 20
"""Of answers that the kernel has not taken; a peer that leaves more unread is given up. Those to
all stores of a session with 60,000 entries are a third of it. Less would not do: on a busy machine
a client that reads may be kept from it for as long as hundreds of frames take."""

SMALL_BYTES: Final = 16 << 10
"""Of a frame that is read at once, in a fraction of a millisecond whatever is in it."""

RELEASED_AT_ONCE: Final = 256
"""Entries given up before others have a turn."""

LARGE_BYTES: Final = 8 << 20
"""Of a store whose Admitted leaves at once: a client short of memory lets go when it has come."""

NAME_SHOWN: Final = 64
"""Characters of a client's name that are kept: a status of 1,024 sessions must fit into a frame,
or nobody would get one."""

_session_of = attrgetter("session")

Handler = Callable[["Peer", int, Any], Iterator[None] | None]
"""Carries a request out; one that may take long returns its steps."""

Ask = Callable[[float], list[Instruction]]
"""Asks the ledger for something, at a time."""


@dataclass(slots=True, eq=False, kw_only=True)
class Peer:
    """One client. `descriptors` are empty once they were handed over; `outbox` is unsent."""

    session: int
    connection: Connection
    credentials: Credentials
    lane: Lane
    token: bytes
    descriptors: tuple[int, ...]
    outbox: list[Envelope] = field(default_factory=list)


class Peers:
    """All clients, by session and, until they are cut off, by connection."""

    def __init__(self) -> None:
        self._by_session: dict[int, Peer] = {}
        self._by_connection: dict[Connection, Peer] = {}
        self._waiting: dict[int, Peer] = {}  # by session: no lifeline yet

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_session.values()))

    def add(self, peer: Peer) -> None:
        """Add a client that has no lifeline yet."""
        self._by_session[peer.session] = peer
        self._by_connection[peer.connection] = peer
        self._waiting[peer.session] = peer

    def at(self, connection: Connection) -> Peer | None:
        """Return the client that speaks on this connection, if it has a session."""
        return self._by_connection.get(connection)

    def of(self, session: int) -> Peer:
        """Return a session's client."""
        return self._by_session[session]

    def claim(self, token: bytes, uid: int) -> Peer | None:
        """Return the client whose lifeline this token and user open; each only once.

        Every waiting token is compared, in constant time, so that nothing is learned by trying.
        """
        found = None
        for peer in self._waiting.values():
            if hmac.compare_digest(peer.token, token) and peer.credentials.uid == uid:
                found = peer
        if found is not None:
            del self._waiting[found.session]
        return found

    def cut_off(self, peer: Peer) -> None:
        """Neither hear nor answer the client any more; its session is ending."""
        if self._by_connection.get(peer.connection) is peer:
            del self._by_connection[peer.connection]
        self._waiting.pop(peer.session, None)
        peer.outbox.clear()

    def remove(self, session: int) -> None:
        """Forget a client that was cut off and whose session is gone."""
        del self._by_session[session]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Who may have a session, and what Welcome says of every one.

    `allowed_uids` are the users that may connect; `cache_part_bytes` is the largest part of a
    session for the cache, 0 where there is none.
    """

    allowed_uids: frozenset[int]
    lifeline_path: str
    cache_part_bytes: int
    lease_seconds: float


class Gateway:
    """Binds ledger, lanes and sockets together. All methods run on the event loop.

    `status` returns what a StatusRequest is answered with; `on_progress` is called whenever the
    state may have changed; `later` has a call made on the loop after so many seconds.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        counters: Counters,
        lanes: Mapping[str, Lane],
        control: ControlSocket,
        terms: Terms,
        status: Callable[[], dict[str, Any]],
        on_progress: Callable[[], None],
        later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self._ledger = ledger
        self._counters = counters
        self._lanes = lanes
        self._control = control
        self._terms = terms
        self._status = status
        self._on_progress = on_progress
        self._later = later
        self._peers = Peers()
        self._lifelines: LifelineListener
        self._unsent: dict[Peer, None] = {}  # peers with an outbox that must leave, in order
        self._held: dict[Peer, asyncio.TimerHandle] = {}  # those with one that may wait so long
        self._freeing: asyncio.TimerHandle | None = None
        self._requests = self._request_handlers()
        self._actions = self._instruction_handlers()

    def start(self, lifelines: LifelineListener) -> None:
        """Begin to serve."""
        self._lifelines = lifelines
        self._control.allow(self._terms.allowed_uids)
        lifelines.allow(self._terms.allowed_uids)
        self._control.start(self.take_frame, self.flush, self.give_up)

    def allow(self, uids: frozenset[int]) -> None:
        """Let other users connect from now on; sessions that are open stay."""
        self._terms = replace(self._terms, allowed_uids=uids)
        self._control.allow(uids)
        self._lifelines.allow(uids)

    # --- events -----------------------------------------------------------------------------

    def take_frame(self, connection: Connection, frame: bytes | None) -> Iterator[None]:
        """Take a message from a client: the steps in which it is worked on. `flush` must follow.

        `frame` is None where the message had another number of parts than a client sends.
        """
        peer = self._peers.at(connection)
        try:
            if peer is None:
                yield from self._hear_stranger(connection, frame)
            else:
                yield from self._hear(peer, frame)
        except Exception:
            # Our bug. It ends the one session whose frame met it and nobody else's.
            log.exception("a frame could not be handled")
            peer = self._peers.at(connection)
            if peer is not None:
                self.end(peer.session, "failed")

    def give_up(self, connection: Connection) -> None:
        """End the session of a client whose connection was ended: too much of it had to wait."""
        peer = self._peers.at(connection)
        if peer is not None:
            self._give_up(peer, "too much waits of it")
            self.flush()

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
        for session, of_one in groupby(results, _session_of):
            try:
                self._perform(self._ledger.results(session, of_one, now))
            except Exception:
                # Our bug, as above. The session's end waits for these results in vain.
                log.exception("results of session %s could not be handled", session_name(session))
                self.end(session, "failed")
        self._perform(self._ledger.told())
        self.flush()

    def tick(self) -> None:
        """Look after leases and silent connections; called twice a second."""
        self._control.tick()
        self._perform(self._ledger.tick(time.monotonic()))
        self._go_on_freeing()
        self.flush()

    def go_on(self) -> None:
        """Take up what waits for memory: there is more of it, or none is to be had."""
        self._control.unpark()
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
        """Send what is in the outboxes, at the end of any event."""
        while self._unsent:
            peer = next(iter(self._unsent))
            del self._unsent[peer]
            self._send_outbox(peer)
        self._on_progress()

    # --- who handles what -------------------------------------------------------------------

    def _request_handlers(self) -> dict[type[Message], Handler]:
        return {
            Store: self._store,
            Restore: self._restore,
            Release: self._release,
            Ping: self._ping,
            PlanLearned: self._plan_learned,
            RestoreParts: self._restore_parts,
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
            Jobs: lambda begun: lane(begun).begin(begun.session, begun.jobs),
            Skip: lambda skip: lane(skip).skip(skip.session, skip.sequence),
            Map: lambda made: lane(made).map_segment(made.session, made.segment),
            Unmap: lambda made: lane(made).unmap_segment(made.session, made.segment),
            Probe: self._probe,
            Detach: self._detach,
            Ended: self._ended,
        }

    # --- connections without a session ------------------------------------------------------

    def _hear_stranger(self, connection: Connection, frame: bytes | None) -> Iterator[None]:
        """Answer a frame of a connection without a session; a Hello in it may open one."""
        problem = self._stranger_problem(connection)
        if problem is not None:  # and nothing of what it says is looked at
            request = 0 if frame is None else first_request(frame)
            self._refuse(connection, request, problem)
            return
        try:
            batch = yield from _read(frame)
        except ProtocolError as error:
            self._refuse(connection, 0, self._undecodable(frame, error))
            return
        for request, message in batch:
            peer = self._peers.at(connection)
            if peer is not None:
                yield from self._while_heard(peer, self._request(peer, request, message) or ())
            elif connection.is_open:
                self._answer_stranger(connection, request, message)
            yield

    def _stranger_problem(self, connection: Connection) -> Refused | None:
        uid = connection.credentials.uid
        if uid not in self._terms.allowed_uids:
            return Refused("UsageError", f"user {uid} may not connect: add it to allowed_uids")
        if connection.identity:
            return Refused("UsageError", "a routing id was chosen: leave it to ZeroMQ")
        return None

    def _undecodable(self, frame: bytes | None, error: ProtocolError) -> Refused:
        version = None if frame is None else hello_version(frame)
        if version is not None and version != PROTOCOL_VERSION:
            return _mismatch(version)
        self._counters.malformed += 1
        return Refused("UsageError", str(error))

    def _answer_stranger(self, connection: Connection, request: int, message: Message) -> None:
        answer: Message
        if isinstance(message, Hello):
            answer = self._open(connection, message)
        elif isinstance(message, StatusRequest):
            answer = Status(self._status())
        else:
            answer = Refused("DaemonLost", "this connection has no session: send Hello first")
        if isinstance(answer, Refused):
            self._refuse(connection, request, answer)
        else:
            self._control.send(connection, encode([Envelope(request, answer)]))

    def _refuse(self, connection: Connection, request: int, answer: Refused) -> None:
        self._counters.refused += 1
        self._control.send(connection, encode([Envelope(request, answer)]))

    def _open(self, connection: Connection, hello: Hello) -> Welcome | Refused:
        credentials = connection.credentials
        has_lane = hello.device != NO_LANE
        problem = self._hello_problem(credentials.uid, hello)
        if problem is None:
            uid, now = credentials.uid, time.monotonic()
            self._perform(self._ledger.make_place(uid, now, has_lane=has_lane))
            problem = self._ledger.refusal(uid, has_lane=has_lane)
        if problem is not None:
            return problem
        lane = self._lanes[hello.device]
        session = secrets.randbits(63) or 1
        try:
            attachment = lane.attach(session, hello)
        except LaneUnavailable as error:
            return Refused("UsageError", str(error))
        if CACHE_FEATURE in hello.features:
            part_bytes = min(attachment.part_bytes, self._terms.cache_part_bytes)
            attachment = replace(attachment, part_bytes=part_bytes)
        token = secrets.token_bytes(TOKEN_BYTES)
        features = [CACHE_FEATURE] if self._terms.cache_part_bytes else []
        self._peers.add(
            Peer(
                session=session,
                connection=connection,
                credentials=credentials,
                lane=lane,
                token=token,
                descriptors=attachment.descriptors,
            )
        )
        self._control.adopt(connection)
        self._enter(session, credentials, hello, attachment)
        return Welcome(
            session=session,
            token=token,
            protocol=PROTOCOL_VERSION,
            features=features,
            version=__version__,
            lifeline=self._terms.lifeline_path,
            staging_bytes=attachment.staging_bytes,
            part_bytes=attachment.part_bytes,
            lease_seconds=self._terms.lease_seconds,
        )

    def _enter(
        self, session: int, credentials: Credentials, hello: Hello, attachment: Attachment
    ) -> None:
        """Put the session into the ledger. A pid of another namespace is 0: then Hello's is."""
        uid, gid, pid = credentials
        info = SessionInfo(
            session=session,
            device=hello.device,
            uid=uid,
            pid=pid or hello.pid,
            name=hello.name[:NAME_SHOWN],
        )
        self._ledger.open(
            info,
            part_bytes=attachment.part_bytes,
            staging_bytes=attachment.segment_bytes,
            now=time.monotonic(),
            caller=Caller(uid, gid) if CACHE_FEATURE in hello.features else None,
        )
        fields = {"session": session_name(session), "pid": info.pid, "uid": uid}
        log.info("session opened", extra=fields | {"device": info.device})

    def _hello_problem(self, uid: int, hello: Hello) -> Refused | None:
        if hello.protocol != PROTOCOL_VERSION:
            return _mismatch(hello.protocol)
        if hello.uid != uid:
            return Refused("UsageError", f"Hello says user {hello.uid}, the kernel says {uid}")
        if CACHE_FEATURE in hello.features and not self._terms.cache_part_bytes:
            return Refused(
                "UsageError", "this daemon keeps no cache: start it with --cache-bytes above 0"
            )
        if CACHE_FEATURE in hello.features and hello.device == NO_LANE:
            return Refused("UsageError", "a session for the cache needs a lane: name a device")
        if hello.device not in self._lanes:
            offered = ", ".join(name for name in self._lanes if name != NO_LANE)
            return Refused(
                "UsageError",
                f"this daemon has no {hello.device} lane, only {offered}: start it with --device "
                f"{hello.device}, or train on another device",
            )
        return None

    # --- clients with a session -------------------------------------------------------------

    def _hear(self, peer: Peer, frame: bytes | None) -> Iterator[None]:
        """Carry out a frame of a client with a session."""
        self._ledger.touch(peer.session, time.monotonic())
        try:
            batch = yield from _read(frame)
        except ProtocolError as error:
            self._counters.malformed += 1
            if self._is_heard(peer):
                self._send(peer, 0, Refused("UsageError", str(error)))
            return
        for request, message in batch:
            steps = self._request(peer, request, message)
            if steps is not None:
                yield from self._while_heard(peer, steps)
            yield

    def _request(self, peer: Peer, request: int, message: Message) -> Iterator[None] | None:
        """Carry a message out, or return the steps of one that may take long."""
        if not self._is_heard(peer):
            return None  # the session ended with an earlier message of this frame, or meanwhile
        handler = self._requests.get(type(message))
        if handler is not None:
            return handler(peer, request, message)
        self._counters.malformed += 1
        name = type(message).__name__
        self._send(peer, request, Refused("UsageError", f"{name} is not for an open session"))
        return None

    def _while_heard(self, peer: Peer, steps: Iterable[None]) -> Iterator[None]:
        """Take steps until they are done or the session ends."""
        for _ in steps:
            yield
            if not self._is_heard(peer):
                return

    def _is_heard(self, peer: Peer) -> bool:
        """Tell whether the client's session goes on."""
        return self._peers.at(peer.connection) is peer

    def _store(self, peer: Peer, request: int, message: Store) -> Iterator[None] | None:
        if self._ledger.is_of_cache(peer.session):
            return self._store_in_cache(peer, request, message)
        if message.nbytes >= LARGE_BYTES:
            self._unsent[peer] = None
        return self._ask(peer, partial(self._ledger.store, peer.session, request, message))

    def _ask(self, peer: Peer, ask: Ask) -> Iterator[None] | None:
        """Do what the ledger says, or return the steps where that waits for memory."""
        answer = ask(time.monotonic())
        if isinstance(answer[0], Wait):
            return self._ask_again(peer, ask)
        self._perform(answer)
        return None

    def _ask_again(self, peer: Peer, ask: Ask) -> Iterator[None]:
        """Ask each time the pool has grown; nothing that the client has sent since comes between.

        It is asked for the last time where the pool does not grow any more.
        """
        answer: list[Instruction] = [Wait(peer.session)]
        while isinstance(answer[0], Wait):
            self._control.park(peer.connection)
            yield
            answer = ask(time.monotonic())
        self._perform(answer)
        self._unsent[peer] = None

    def _store_in_cache(self, peer: Peer, request: int, message: Store) -> Iterator[None]:
        """Store once what is there has made room, which may take long."""
        now = time.monotonic()
        while self._ledger.make_cache_room(peer.session, message, now):
            yield
        ask = partial(self._ledger.store, peer.session, request, message)
        yield from self._ask(peer, ask) or ()

    def _restore(self, peer: Peer, request: int, message: Restore) -> None:
        self._perform(self._ledger.restore(peer.session, request, message, time.monotonic()))

    def _release(self, peer: Peer, _request: int, message: Release) -> Iterator[None] | None:
        entries = message.entries
        if len(entries) > RELEASED_AT_ONCE:
            return self._release_some(peer, entries)
        self._perform(self._ledger.release(peer.session, message))
        return None

    def _release_some(self, peer: Peer, entries: list[int]) -> Iterator[None]:
        for begin in range(0, len(entries), RELEASED_AT_ONCE):
            some = Release(entries[begin : begin + RELEASED_AT_ONCE])
            self._perform(self._ledger.release(peer.session, some))
            yield

    def _map_segment(self, peer: Peer, request: int, message: MapSegment) -> None:
        self._perform(self._ledger.map_segment(peer.session, request, message))

    def _unmap_segment(self, peer: Peer, request: int, message: UnmapSegment) -> None:
        self._perform(self._ledger.unmap_segment(peer.session, request, message))

    def _cached(self, peer: Peer, request: int, message: Message) -> Iterator[None]:
        """Answer once what has expired is gone, which may take long."""
        now = time.monotonic()
        while self._ledger.tidy_cache(now):
            yield
        ask = partial(self._ledger.cached, peer.session, request, message)
        yield from self._ask(peer, ask) or ()
        self._go_on_freeing()

    def _plan_learned(self, peer: Peer, request: int, message: PlanLearned) -> None:
        self._perform(self._ledger.learned(peer.session, request, message))

    def _restore_parts(self, peer: Peer, request: int, message: RestoreParts) -> None:
        now = time.monotonic()
        self._perform(self._ledger.restore_parts(peer.session, request, message, now))

    def _ping(self, peer: Peer, request: int, _message: Ping) -> None:
        self._send(peer, request, Pong())

    def _status_request(self, peer: Peer, request: int, _message: StatusRequest) -> None:
        """Answer in a frame of its own: a state is large, a batch of them might not fit."""
        self._send_alone(peer, request, Status(self._status()))

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
            self._send_alone(peer, reply.request, reply.message)
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
        self._control.disown(peer.connection)
        for descriptor in peer.descriptors:
            os.close(descriptor)
        peer.descriptors = ()
        peer.lane.detach(detach.session)

    def _ended(self, ended: Ended) -> None:
        self._peers.remove(ended.session)
        self._lifelines.end(ended.session)
        fields = {"session": session_name(ended.session), "cause": ended.cause}
        log.info("session ended", extra=fields)

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

    def _send_alone(self, peer: Peer, request: int, message: Message) -> None:
        """Send a message in a frame of its own, now."""
        self._send_frame(peer, encode([Envelope(request, message)]))

    def _send_outbox(self, peer: Peer) -> None:
        self._let_leave(peer)
        outbox, peer.outbox = peer.outbox, []
        for start in range(0, len(outbox), MESSAGES_A_FRAME):
            if not self._is_heard(peer):
                return  # it was given up
            self._send_frame(peer, encode(outbox[start : start + MESSAGES_A_FRAME]))

    def _send_frame(self, peer: Peer, frame: bytes) -> None:
        """Send a frame; give a peer up that is not there or reads too little."""
        connection = peer.connection
        self._control.send(connection, frame)
        if not connection.is_reachable:
            self._give_up(peer, "it is gone")
        elif connection.unsent > UNREAD_BYTES:
            self._give_up(peer, "it does not read")

    def _give_up(self, peer: Peer, reason: str) -> None:
        """End the session of a peer that would wait for ever for the answers it has missed.

        Its connection ends as well: what is unsent must not be kept for as long as it likes.
        """
        self._counters.unsent += 1
        fields = {"session": session_name(peer.session), "reason": reason}
        log.info("answers cannot be sent", extra=fields)
        self._control.close_connection(peer.connection)
        self.end(peer.session, "unreachable")

    def _let_leave(self, peer: Peer) -> None:
        """Hold the peer's answers no longer."""
        timer = self._held.pop(peer, None)
        if timer is not None:
            timer.cancel()


def _read(frame: bytes | None) -> Generator[None, None, Iterable[Envelope]]:
    """Return the messages of a frame, all of which are valid, having looked at it in steps.

    Raises:
        ProtocolError: it is no valid batch.
    """
    if frame is None:
        raise ProtocolError("a message of several parts: send each batch in one")
    if len(frame) <= SMALL_BYTES:
        return decode(frame)
    for _ in decode_each(frame):  # kept, they would take many times the frame's bytes
        yield
    return decode_each(frame)


def _mismatch(version: int) -> Refused:
    return Refused(
        "ProtocolMismatch",
        f"the client speaks protocol {version}, this daemon (stormd {__version__}) "
        f"{PROTOCOL_VERSION}: install the same version of stormd on both sides",
    )
