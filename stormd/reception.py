"""Where connections without a session are heard: who may have one, and what it is granted.

What stays true: nothing is granted to a peer of another protocol version, of a user who is not
allowed, or under a routing id that it chose itself; and whatever a stranger says is answered.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import zmq

from stormd import __version__
from stormd.cache import Caller
from stormd.control import ControlSocket
from stormd.counters import Counters
from stormd.errors import LaneUnavailable
from stormd.lanes import Attachment, Lane
from stormd.ledger import Ledger
from stormd.peers import Credentials, Peer, Peers
from stormd.protocol import (
    CACHE_FEATURE,
    PROTOCOL_VERSION,
    Envelope,
    Hello,
    Message,
    ProtocolError,
    Refused,
    Status,
    StatusRequest,
    Welcome,
    decode,
    encode,
    hello_version,
)
from stormd.protocol.limits import TOKEN_BYTES
from stormd.records import SessionInfo

__all__ = ["Reception"]

log = logging.getLogger(__name__)

NAME_SHOWN: Final = 64
"""Characters of a client's name that are kept: a status of 1,024 sessions must fit into a frame,
or nobody would get one."""


class Reception:
    """Opens sessions. All methods run on the event loop.

    `allowed_uids` are the users that may connect, `status` returns what a StatusRequest is
    answered with, `lifeline_path` and `lease_seconds` are what Welcome says of them.
    `cache_part_bytes` is the largest part of a session for the cache, 0 where there is none.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        counters: Counters,
        lanes: Mapping[str, Lane],
        control: ControlSocket,
        peers: Peers,
        lifeline_path: str,
        allowed_uids: frozenset[int],
        cache_part_bytes: int,
        lease_seconds: float,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._ledger = ledger
        self._counters = counters
        self._lanes = lanes
        self._control = control
        self._peers = peers
        self._lifeline_path = lifeline_path
        self._allowed_uids = allowed_uids
        self._cache_part_bytes = cache_part_bytes
        self._lease_seconds = lease_seconds
        self._status = status

    def allow(self, uids: frozenset[int]) -> None:
        """Let other users connect from now on; sessions that are open stay."""
        self._allowed_uids = uids

    def take(
        self,
        route: bytes,
        frame: zmq.Frame | None,
        on_request: Callable[[Peer, int, Message], None],
    ) -> None:
        """Answer a frame of a connection without a session.

        `on_request` gets what follows in the frame once it holds a Hello that was granted.
        """
        try:
            batch = decode(b"" if frame is None else frame.bytes)
        except ProtocolError as error:
            self._refuse(route, 0, self._undecodable(frame, error))
            return
        assert frame is not None
        credentials = _credentials(frame)
        problem = self._stranger_problem(route, credentials.uid)
        for request, message in batch:
            peer = self._peers.at(route)
            if problem is not None:
                self._refuse(route, request, problem)
            elif peer is not None:
                on_request(peer, request, message)
            else:
                self._answer(route, credentials, request, message)

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

    def _answer(
        self, route: bytes, credentials: Credentials, request: int, message: Message
    ) -> None:
        answer: Message
        if isinstance(message, Hello):
            answer = self._open(route, credentials, message)
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

    def _open(self, route: bytes, credentials: Credentials, hello: Hello) -> Welcome | Refused:
        problem = self._hello_problem(credentials.uid, hello) or self._ledger.refusal()
        if problem is not None:
            return problem
        lane = self._lanes[hello.device]
        session = secrets.randbits(63) or 1
        try:
            attachment = lane.attach(session, hello)
        except LaneUnavailable as error:
            return Refused("UsageError", str(error))
        if CACHE_FEATURE in hello.features:
            part_bytes = min(attachment.part_bytes, self._cache_part_bytes)
            attachment = replace(attachment, part_bytes=part_bytes)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._peers.add(Peer(session, route, credentials, lane, token, attachment.descriptors))
        self._enter(session, credentials, hello, attachment)
        return Welcome(
            session=session,
            token=token,
            protocol=PROTOCOL_VERSION,
            features=[CACHE_FEATURE] if self._cache_part_bytes else [],
            version=__version__,
            lifeline=self._lifeline_path,
            staging_bytes=attachment.staging_bytes,
            part_bytes=attachment.part_bytes,
            lease_seconds=self._lease_seconds,
        )

    def _enter(
        self, session: int, credentials: Credentials, hello: Hello, attachment: Attachment
    ) -> None:
        """Put the session into the ledger. A pid of another namespace is 0: then Hello's is."""
        uid, gid, pid = credentials
        info = SessionInfo(session, hello.device, uid, pid or hello.pid, hello.name[:NAME_SHOWN])
        self._ledger.open(
            info,
            part_bytes=attachment.part_bytes,
            staging_bytes=attachment.segment_bytes,
            now=time.monotonic(),
            caller=Caller(uid, gid) if CACHE_FEATURE in hello.features else None,
        )
        log.info("session opened", extra={"session": session, "pid": info.pid, "uid": uid})

    def _hello_problem(self, uid: int, hello: Hello) -> Refused | None:
        if hello.protocol != PROTOCOL_VERSION:
            return _mismatch(hello.protocol)
        if hello.uid != uid:
            return Refused("UsageError", f"Hello says user {hello.uid}, the kernel says {uid}")
        if CACHE_FEATURE in hello.features and not self._cache_part_bytes:
            return Refused(
                "UsageError", "this daemon keeps no cache: start it with --cache-bytes above 0"
            )
        if hello.device not in self._lanes:
            offered = ", ".join(self._lanes)
            return Refused(
                "UsageError",
                f"this daemon has no {hello.device} lane, only {offered}: start it with --device "
                f"{hello.device}, or train on another device",
            )
        return None


def _credentials(frame: zmq.Frame) -> Credentials:
    """Return who is at the other end, as the kernel told ZeroMQ: "localhost:uid:gid:pid"."""
    _, uid, gid, pid = str(frame.get("Peer-Address")).split(":")
    return Credentials(int(uid), int(gid), int(pid))


def _mismatch(version: int) -> Refused:
    return Refused(
        "ProtocolMismatch",
        f"the client speaks protocol {version}, this daemon (stormd {__version__}) "
        f"{PROTOCOL_VERSION}: install the same version of stormd on both sides",
    )
