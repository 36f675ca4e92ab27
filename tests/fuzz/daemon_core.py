"""The daemon without sockets, threads and memory: what a frame of a client reaches, and no more.

What stays true: everything between the control socket and the lanes is the real code, and the
same frames lead to the same state. Two clients have sessions: what one sends must not change
what the other holds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

from stormd.cache.items import Cache
from stormd.gateway import Dispatch, Gateway, Opening, Terms
from stormd.lanes import Attachment, Speeds
from stormd.ledger.events import (
    Detached,
    RestoreDone,
    RestoreFailed,
    RestoreJob,
    Result,
    SegmentMapped,
    SegmentRefused,
    StoreDone,
    StoreFailed,
    StoreJob,
)
from stormd.ledger.ledger import Ledger
from stormd.ledger.records import Records
from stormd.ledger.sessions import Limits
from stormd.memory.arena import Space
from stormd.monitoring.counters import Counters
from stormd.protocol import (
    PROTOCOL_VERSION,
    Credentials,
    Envelope,
    Hello,
    Message,
    ReserveRange,
    Store,
    Welcome,
    decode,
    encode,
)

__all__ = ["DaemonCore"]

MIB = 1 << 20
POOL_BYTES = 4 * MIB
CACHE_BYTES = 1 * MIB
STAGING_BYTES = MIB
PART_BYTES = 256 << 10
LIMITS = Limits(max_sessions=8, max_entries=64, quota_bytes=2 * MIB, lease_seconds=5.0)


class _Connection:
    """What of a connection the gateway looks at."""

    credentials = Credentials(uid=os.getuid(), gid=os.getgid(), pid=os.getpid())
    identity = b""
    granted = 0
    is_spent = False
    is_open = True
    is_reachable = True
    unsent = 0


class _Control:
    """Takes answers; those sent since `take` are kept by connection."""

    def __init__(self) -> None:
        self.sent: list[tuple[_Connection, bytes]] = []

    def nothing(self, *_: object) -> None:
        pass

    start = session_opened = session_ended = tick = unpark = nothing

    def allow(self, uids: frozenset[int]) -> None:
        self.allowed_uids = uids

    def send(self, connection: _Connection, frame: bytes) -> None:
        self.sent.append((connection, frame))

    def take(self, connection: _Connection) -> list[Message]:
        """Return what was sent to a connection, and forget what was sent to anybody."""
        sent, self.sent = self.sent, []
        return [item.message for to, frame in sent if to is connection for item in decode(frame)]


class _Lane:
    """Does every job at once, on numbers only; `results` wait until the core hands them on."""

    device = "cpu"
    heartbeats = ()
    links = ()

    def __init__(self) -> None:
        self.results: list[Result] = []

    def attach(self, session: int, hello: Hello) -> Attachment:
        return Attachment(
            descriptors=(),
            staging_bytes=STAGING_BYTES,
            chunk_bytes=PART_BYTES,
            segment_bytes=STAGING_BYTES,
        )

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> tuple[()]:
        for job in jobs:
            if isinstance(job, StoreJob):
                self._store(job)
            else:
                self._restore(job)
        return ()

    def _store(self, job: StoreJob) -> None:
        if job.sequence:  # a client's own number decides, so that failures are reached as well
            self.results.append(StoreFailed(session=job.session, entry=job.entry, detail="broken"))
            return
        block = job.place(max(1, job.nbytes // 2))
        self.results.append(
            StoreDone(session=job.session, entry=job.entry, block=block, mode="raw", seconds=0.0)
        )

    def speeds(self, session: int) -> Speeds:
        return Speeds()

    def skip_sequence(self, session: int, sequence: int) -> None:
        pass

    def _restore(self, job: RestoreJob) -> None:
        if job.sequence:
            self.results.append(
                RestoreFailed(
                    session=job.session, ticket=job.ticket, kind="CorruptBlob", detail="broken"
                )
            )
        else:
            self.results.append(RestoreDone(session=job.session, ticket=job.ticket, seconds=0.0))

    def map_segment(self, session: int, request: Any, descriptor: int = -1) -> None:
        if isinstance(request, ReserveRange):
            self.results.append(SegmentMapped(session=session, segment=request.segment))
            return
        self.results.append(
            SegmentRefused(session=session, segment=request.segment, detail="no such handle")
        )

    def unmap_segment(self, session: int, segment: int) -> None:
        pass

    def detach(self, session: int) -> None:
        self.results.append(Detached(session))


class _Lifelines:
    def allow(self, uids: frozenset[int]) -> None:
        pass

    def end(self, session: int) -> None:
        pass


class DaemonCore:
    """One daemon; `feed` gives it a frame of the hostile client, `check` looks at all it holds."""

    def __init__(self) -> None:
        self.counters = Counters()
        cache = Cache(Space(CACHE_BYTES, base=POOL_BYTES), self.counters.cache, Records())
        self.ledger = Ledger(Space(POOL_BYTES), LIMITS, self.counters, cache)
        self._lane = _Lane()
        self._control: Any = _Control()
        lanes: Any = {"cpu": self._lane}
        dispatch = Dispatch(
            ledger=self.ledger,
            counters=self.counters,
            control=self._control,
            on_progress=lambda: None,
            later=Mock(),
        )
        opening = Opening(
            dispatch,
            lanes=lanes,
            terms=Terms(lifeline_path="no path", cache_chunk_bytes=PART_BYTES, lease_seconds=5.0),
            provide_status=lambda tell: tell({"entries": self.ledger.holdings.entries}),
        )
        self._gateway = Gateway(dispatch, opening)
        lifelines: Any = _Lifelines()
        self._gateway.start(lifelines, frozenset((os.getuid(),)))
        self._connections = (_Connection(), _Connection())
        fuzzer, neighbour = self._connections
        self.neighbour = self._open(neighbour)
        self._send(
            neighbour,
            Store(
                entry=1, segment=0, offset=0, nbytes=4096, dtype="uint8", codec="raw", sequence=0
            ),
        )
        self.fuzzer = self._open(fuzzer)

    def feed(self, frame: bytes) -> None:
        """Handle a frame of the hostile client; one that ends its session gives it a new one."""
        fuzzer, _ = self._connections
        self._deliver(fuzzer, frame)
        self._control.sent.clear()
        if self.fuzzer not in self.ledger.sessions:
            self.fuzzer = self._open(fuzzer)

    def check(self) -> None:
        """Assert that all holds together, and that the neighbour still has what it had."""
        self.ledger.assert_invariants()
        assert self.counters.ended["failed"] == 0, "a frame met a bug of the daemon's"
        (held,) = [one for one in self.ledger.sessions_status() if one["id"] == self.neighbour]
        assert held["entries"] == 1

    def close(self) -> None:
        """End all sessions; afterwards nothing is held."""
        self._gateway.end_all("shutdown")
        self._settle()
        assert not self.ledger.sessions
        assert not self.ledger.holdings.entries
        self.ledger.assert_invariants()

    # --- parts ------------------------------------------------------------------------------

    def _open(self, connection: _Connection) -> int:
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            features=[],
            pid=os.getpid(),
            uid=os.getuid(),
            device="cpu",
            device_uuid="",
            staging_bytes=0,
            name="fuzzed",
        )
        self._send(connection, hello)
        (welcome,) = self._control.take(connection)
        assert isinstance(welcome, Welcome), welcome
        assert self._gateway.take_token(welcome.token, os.getuid(), []) is not None
        return welcome.session

    def _send(self, connection: _Connection, message: Message) -> None:
        self._deliver(connection, encode([Envelope(1, message)]))

    def _deliver(self, connection: Any, data: bytes) -> None:
        for _ in self._gateway.take_frame(connection, data) or ():
            pass
        self._gateway.flush()
        self._settle()

    def _settle(self) -> None:
        while self._lane.results:
            results, self._lane.results = self._lane.results, []
            self._gateway.take_results(results)
