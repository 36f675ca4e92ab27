"""Answers connections that have no session: who may have one, and how it is opened.

Nothing is granted to a peer of another protocol version, of a user who is not allowed, or with a
routing id of its own choice. If a user may not connect, no message of the connection is read.

If worker processes serve the devices, the session is granted here and takes its place here. Its
connection is handed over to the worker, which answers with Welcome.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stormd import __version__
from stormd.cache.items import Caller
from stormd.errors import LaneUnavailable
from stormd.gateway.dispatch import Dispatch
from stormd.gateway.peers import Peer
from stormd.lanes import NOTHING_SHARED, Attachment, Lane
from stormd.ledger.sessions import Phase, Session, SessionInfo, session_name
from stormd.protocol import (
    CACHE_FEATURE,
    NO_LANE,
    PROTOCOL_VERSION,
    Credentials,
    Envelope,
    Hello,
    Message,
    ProtocolError,
    Refused,
    Resume,
    Status,
    StatusRequest,
    Welcome,
    encode,
    hello_version,
)
from stormd.protocol.limits import TOKEN_BYTES
from stormd.transport.control import Connection
from stormd.workers.fleet import Fleet, Worker

__all__ = ["NAME_SHOWN", "Opening", "ProvideStatus", "Terms"]

log = logging.getLogger(__name__)

NAME_SHOWN: Final = 64
"""Characters kept of a client's name: a status of 1,024 sessions must fit into a frame, or nobody
could receive one."""


ProvideStatus = Callable[[Callable[[dict[str, Any]], None]], None]
"""Passes the state to the given callback, now or within a second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The values that every Welcome contains.

    `cache_chunk_bytes` is the largest chunk in a session for the cache, 0 if there is no cache.
    `resume_seconds` is how long clients wait for the next daemon, 0.0 if sessions cannot be
    resumed. `epoch` identifies the sessions that can.
    """

    lifeline_path: str
    cache_chunk_bytes: int
    lease_seconds: float
    resume_seconds: float = 0.0
    epoch: int = 0


class Opening:
    """Answers connections without a session; a valid Hello opens one, here or in the `fleet`.

    `provide_status` provides the state that answers a StatusRequest.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        terms: Terms,
        lanes: Mapping[str, Lane],
        provide_status: ProvideStatus,
        fleet: Fleet | None = None,
    ) -> None:
        self._terms = terms
        self._lanes = lanes
        self._dispatch = dispatch
        self._peers = dispatch.peers
        self._ledger = dispatch.ledger
        self._counters = dispatch.counters
        self._control = dispatch.control
        self._provide_status = provide_status
        self._fleet = fleet

    def problem(self, connection: Connection) -> Refused | None:
        """Return why no message of this connection is read, or None if messages are."""
        uid = connection.credentials.uid
        if uid not in self._control.allowed_uids:
            return Refused("UsageError", f"user {uid} may not connect: add it to allowed_uids")
        if connection.identity:
            return Refused("UsageError", "a routing id was chosen: leave it to ZeroMQ")
        return None

    def undecodable(self, frame: bytes | None, error: ProtocolError) -> Refused:
        """Return the answer to a frame that is no valid batch."""
        version = None if frame is None else hello_version(frame)
        if version is not None and version != PROTOCOL_VERSION:
            return _mismatch(version)
        self._counters.malformed += 1
        return Refused("UsageError", str(error))

    def answer(
        self, connection: Connection, request: int, message: Message, rest: Iterator[Envelope]
    ) -> Iterator[None]:
        """Answer a message, in steps; a Hello may open a session.

        `rest` are the messages behind it in its frame. They are taken if another process is to
        handle them.
        """
        answer: Message | None
        if isinstance(message, Hello):
            answer = yield from self._open(connection, request, message, rest)
        elif isinstance(message, Resume):
            answer = self._resume(connection, message)
        elif isinstance(message, StatusRequest):
            answer = Status((yield from self.status(connection)))
        else:
            answer = Refused("DaemonLost", "this connection has no session: send Hello first")
        if isinstance(answer, Refused):
            self.refuse(connection, request, answer)
        elif answer is not None:
            self._send(connection, request, answer)

    def status(self, connection: Connection) -> Generator[None, None, dict[str, Any]]:
        """Return the state, in steps, once the work of other processes so far is known."""
        if self._fleet is not None:
            yield from self._waited(connection, self._fleet.refresh)
        found = yield from self._waited(connection, self._provide_status)
        state: dict[str, Any] = found[0]
        return state

    def _waited(
        self, connection: Connection, ask: Callable[[Callable[..., None]], None]
    ) -> Generator[None, None, tuple[Any, ...]]:
        """Call `ask` with a callback, and return what the callback is called with.

        Until then the connection's later requests wait: a client that asks faster than it can be
        answered costs others no time.
        """
        found: list[tuple[Any, ...]] = []

        def take(*values: Any) -> None:
            found.append(values)
            self._control.unpark()

        ask(take)
        while not found:
            self._control.park(connection)
            yield
        return found[0]

    def refuse(self, connection: Connection, request: int, answer: Refused) -> None:
        """Send a refusal to a connection without a session."""
        self._counters.refused += 1
        self._send(connection, request, answer)

    def _send(self, connection: Connection, request: int, answer: Message) -> None:
        self._control.send(connection, encode([Envelope(request, answer)]))

    # --- Hello ------------------------------------------------------------------------------

    def _open(
        self, connection: Connection, request: int, hello: Hello, rest: Iterator[Envelope]
    ) -> Generator[None, None, Welcome | Refused | None]:
        """Open a session, in steps; None if another process answers.

        If no place is free, workers are first asked about places that have just become free.
        """
        uid = connection.credentials.uid
        problem = self._hello_problem(connection, hello)
        connection.is_spent = connection.granted != 0
        if problem is not None:
            return problem
        has_lane = hello.device != NO_LANE
        problem = self._place_problem(uid, has_lane=has_lane)
        if problem is not None and self._fleet is not None:
            yield from self._waited(connection, self._fleet.refresh)
            problem = self._place_problem(uid, has_lane=has_lane)
        if problem is not None:
            return problem
        try:
            if self._fleet is not None and _is_for_workers(hello):
                lane = self._fleet.lane_for(hello)
                self._hand_over(connection, hello, lane, [Envelope(request, hello), *rest])
                return None
            return self._open_here(connection, hello)
        except LaneUnavailable as error:
            return Refused("UsageError", str(error))

    def _place_problem(self, uid: int, *, has_lane: bool) -> Refused | None:
        """Return why there is no place for a session, after trying to make one."""
        leases = self._ledger.leases
        self._dispatch.perform(leases.make_place(uid, time.monotonic(), has_lane=has_lane))
        return leases.refusal(uid, has_lane=has_lane)

    def _open_here(self, connection: Connection, hello: Hello) -> Welcome:
        lane = self._lanes[hello.device]
        session = connection.granted or _new_session_id()
        attachment = lane.attach(session, hello)
        if CACHE_FEATURE in hello.features:
            chunk_bytes = min(attachment.chunk_bytes, self._terms.cache_chunk_bytes)
            attachment = replace(attachment, chunk_bytes=chunk_bytes)
        peer = Peer(
            record=self._record_session(session, connection.credentials, hello, attachment),
            connection=connection,
            lane=lane,
            token=secrets.token_bytes(TOKEN_BYTES),
            descriptors=attachment.descriptors,
        )
        return self._welcome(peer, attachment.staging_bytes)

    def _hand_over(
        self, connection: Connection, hello: Hello, lane: Worker, batch: list[Envelope]
    ) -> None:
        """Give a session its place here, and its connection to the worker that will serve it.

        The worker begins with `batch`, the Hello and what came behind it.
        """
        session, uid = _new_session_id(), connection.credentials.uid
        peer = Peer(
            record=self._record_session(session, connection.credentials, hello, NOTHING_SHARED),
            connection=connection,
            lane=lane,
            token=b"",
            is_live=False,
        )
        self._peers.add_of_worker(peer)
        lane.hand_over(session, uid, encode(batch), self._control.hand_over(connection))

    def _welcome(self, peer: Peer, staging_bytes: int) -> Welcome:
        terms, record = self._terms, peer.record
        self._peers.add(peer)
        self._control.session_opened(peer.connection)
        return Welcome(
            session=peer.session,
            token=peer.token,
            protocol=PROTOCOL_VERSION,
            features=[CACHE_FEATURE] if terms.cache_chunk_bytes else [],
            version=__version__,
            lifeline=terms.lifeline_path,
            staging_bytes=staging_bytes,
            part_bytes=record.chunk_bytes,
            lease_seconds=terms.lease_seconds,
            resume_seconds=terms.resume_seconds if record.hello is not None else 0.0,
            epoch=terms.epoch,
            secret=record.secret,
        )

    def _record_session(
        self, session: int, credentials: Credentials, hello: Hello, attachment: Attachment
    ) -> Session:
        """Put the session into the ledger. If the pid is 0 (another namespace), use Hello's pid."""
        uid, gid, pid = credentials
        info = SessionInfo(
            session=session,
            device=hello.device,
            uid=uid,
            pid=pid or hello.pid,
            name=hello.name[:NAME_SHOWN],
        )
        is_cached = CACHE_FEATURE in hello.features
        can_resume = self._terms.resume_seconds > 0 and not is_cached
        record = self._ledger.leases.open(
            info,
            chunk_bytes=attachment.chunk_bytes,
            staging_bytes=attachment.segment_bytes,
            now=time.monotonic(),
            caller=Caller(uid, gid) if is_cached else None,
            hello=_hello_to_keep(hello, pid, attachment) if can_resume else None,
            secret=secrets.token_bytes(TOKEN_BYTES) if can_resume else b"",
        )
        fields = {"session": session_name(session), "pid": info.pid, "uid": uid}
        log.info("session opened", extra=fields | {"device": info.device})
        return record

    # --- Resume -----------------------------------------------------------------------------

    def _resume(self, connection: Connection, resume: Resume) -> Welcome | Refused:
        """Have a client continue a session of an earlier daemon."""
        if resume.protocol != PROTOCOL_VERSION:
            return _mismatch(resume.protocol)
        record = self._ledger.sessions.get(resume.session)
        uid = connection.credentials.uid
        if (
            record is None
            or not _may_resume(record, resume, uid, self._terms.epoch)
            or self._has_lane(record)
        ):
            return Refused(
                "DaemonLost",
                f"this daemon has no session {session_name(resume.session)} that could go on: it "
                "was ended, or is of a daemon whose memory was given up",
            )
        hello, now = record.hello, time.monotonic()
        assert hello is not None, "a session that cannot be resumed was kept"
        lane = self._lanes.get(hello.device)
        if lane is None:
            return Refused("DaemonLost", f"this daemon has no {hello.device} lane any more")
        if record.phase is Phase.ORPHANED:
            self._ledger.leases.resume(record, now)
        else:  # the client came again before its lifeline: its first attempt was cut off
            self._dispatch.drop_connection(self._peers.by_session[resume.session])
            record.seen = now
        peer = Peer(
            record=record,
            connection=connection,
            lane=self._lanes[NO_LANE],
            token=secrets.token_bytes(TOKEN_BYTES),
            resumes=lane,
        )
        return self._welcome(peer, hello.staging_bytes)

    def _has_lane(self, record: Session) -> bool:
        """Return whether a lane of this daemon serves the session, so that no other can take it."""
        peer = self._peers.by_session.get(record.info.session)
        return peer is not None and peer.resumes is None

    def attach_resumed(self, peer: Peer, descriptors: list[int]) -> bool:
        """Attach a lane to a resumed session with its client's descriptors; False if it cannot."""
        hello, lane = peer.record.hello, peer.resumes
        assert hello is not None, "a session that cannot be resumed was kept"
        assert lane is not None, "a client that does not resume was taken up"
        peer.resumes = None
        try:
            _attach_to_given(lane, peer.session, hello, descriptors)
        except LaneUnavailable as error:
            fields = {"session": session_name(peer.session), "reason": str(error)}
            log.warning("session not resumed", extra=fields)
            return False
        peer.lane = lane
        entries = len(peer.record.entries)
        shown = {"session": session_name(peer.session), "entries": entries}
        log.info("session resumed", extra=shown)
        return True

    def _hello_problem(self, connection: Connection, hello: Hello) -> Refused | None:
        uid = connection.credentials.uid
        if connection.is_spent:
            return Refused("DaemonLost", "this connection's session has ended: connect again")
        if hello.protocol != PROTOCOL_VERSION:
            return _mismatch(hello.protocol)
        if hello.uid != uid:
            return Refused("UsageError", f"Hello says user {hello.uid}, the kernel says {uid}")
        if CACHE_FEATURE in hello.features and not self._terms.cache_chunk_bytes:
            return Refused(
                "UsageError", "this daemon keeps no cache: start it with --cache-bytes above 0"
            )
        if CACHE_FEATURE in hello.features and hello.device == NO_LANE:
            return Refused("UsageError", "a session for the cache needs a lane: name a device")
        return self._device_problem(hello)

    def _device_problem(self, hello: Hello) -> Refused | None:
        offered: Collection[str] = self._lanes
        if self._fleet is not None and _is_for_workers(hello):
            offered = sorted(self._fleet.devices)
        if hello.device in offered:
            return None
        if self._fleet is not None and CACHE_FEATURE in hello.features:
            return Refused(
                "UsageError", "workers serve the devices, and the cache is beside them: name cpu"
            )
        return Refused(
            "UsageError",
            f"this daemon has no {hello.device} lane, only "
            f"{', '.join(name for name in offered if name != NO_LANE)}: start it with --device "
            f"{hello.device}, or train on another device",
        )


def _is_for_workers(hello: Hello) -> bool:
    """Return whether a worker serves the session: one with a lane that is not for the cache."""
    return hello.device != NO_LANE and CACHE_FEATURE not in hello.features


def _new_session_id() -> int:
    return secrets.randbits(63) or 1


def _may_resume(record: Session, resume: Resume, uid: int, epoch: int) -> bool:
    """Return whether the session's own client asks to resume it, and it has no lifeline yet."""
    is_its_own = hmac.compare_digest(record.secret, resume.secret) and bool(record.secret)
    is_known = resume.epoch == epoch and record.info.uid == uid
    return is_its_own and is_known and record.phase in (Phase.ORPHANED, Phase.OPENED)


def _attach_to_given(lane: Lane, session: int, hello: Hello, descriptors: list[int]) -> None:
    """Attach a lane to the memory that a resuming client has sent.

    Raises:
        LaneUnavailable: the client has sent none, or other memory than it had.
    """
    if not descriptors and hello.device != NO_LANE:
        raise LaneUnavailable("its client has sent no descriptors of its memory")
    lane.attach(session, hello, descriptors)


def _hello_to_keep(hello: Hello, pid: int, attachment: Attachment) -> Hello:
    """Return the Hello to keep for a later daemon: granted staging size and the kernel's pid."""
    granted = {"pid": pid, "staging_bytes": attachment.staging_bytes}
    return Hello(**hello.as_dict() | granted)


def _mismatch(version: int) -> Refused:
    return Refused(
        "ProtocolMismatch",
        f"the client speaks protocol {version}, this daemon (stormd {__version__}) "
        f"{PROTOCOL_VERSION}: install the same version of stormd on both sides",
    )
