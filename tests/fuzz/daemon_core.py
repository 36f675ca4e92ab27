"""The daemon without sockets, threads and memory: what a frame of a client reaches, and no more.

What stays true: everything between the control socket and the lanes is the real code, and the
same frames lead to the same state. Two clients have sessions: what one sends must not change
what the other holds.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import Mock

from stormd.arena import Space
from stormd.cache import Cache
from stormd.control import Delivery
from stormd.counters import Counters
from stormd.lanes import (
    Attachment,
    Detached,
    RestoreDone,
    RestoreFailed,
    RestoreJob,
    Result,
    SegmentRefused,
    StoreDone,
    StoreFailed,
    StoreJob,
)
from stormd.ledger import Ledger
from stormd.peers import Peers
from stormd.protocol import (
    PROTOCOL_VERSION,
    Envelope,
    Hello,
    Message,
    Store,
    Welcome,
    decode,
    encode,
)
from stormd.reception import Reception
from stormd.records import Limits
from stormd.service import Service

__all__ = ["DaemonCore"]

MIB = 1 << 20
POOL_BYTES = 4 * MIB
CACHE_BYTES = 1 * MIB
STAGING_BYTES = MIB
PART_BYTES = 256 << 10
LIMITS = Limits(max_sessions=8, max_entries=64, quota_bytes=2 * MIB, lease_seconds=5.0)
FUZZER = b"\0fuzz"
NEIGHBOUR = b"\0good"


class _Frame:
    """What of a ZeroMQ frame the daemon looks at."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def get(self, _name: str) -> str:
        return f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}"


class _Control:
    """Takes answers; those sent since `take` are kept by route."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []

    def start(self, *_: object) -> None:
        pass

    def settle(self) -> None:
        pass

    def send(self, route: bytes, frame: bytes) -> Delivery:
        self.sent.append((route, frame))
        return Delivery.SENT

    def take(self, route: bytes) -> list[Message]:
        """Return what was sent to a route, and forget what was sent to anybody."""
        sent, self.sent = self.sent, []
        return [item.message for to, frame in sent if to == route for item in decode(frame)]


class _Lane:
    """Does every job at once, on numbers only; `results` wait until the core hands them on."""

    device = "cpu"
    hearts = ()
    links = ()

    def __init__(self) -> None:
        self.results: list[Result] = []

    def attach(self, session: int, hello: Hello) -> Attachment:
        return Attachment((), STAGING_BYTES, PART_BYTES, STAGING_BYTES)

    def store(self, job: StoreJob) -> None:
        if job.sequence:  # a client's own number decides, so that failures are reached as well
            self.results.append(StoreFailed(job.session, job.entry, "broken"))
            return
        block = job.space.place(job.promised, max(1, job.nbytes // 2))
        self.results.append(StoreDone(job.session, job.entry, block, "raw", 0.0))

    def skip(self, session: int, sequence: int) -> None:
        pass

    def restore(self, job: RestoreJob) -> None:
        if job.sequence:
            self.results.append(RestoreFailed(job.session, job.ticket, "CorruptBlob", "broken"))
        else:
            self.results.append(RestoreDone(job.session, job.ticket, 0.0))

    def map_segment(self, session: int, request: Any) -> None:
        self.results.append(SegmentRefused(session, request.segment, "no such handle"))

    def unmap_segment(self, session: int, segment: int) -> None:
        pass

    def detach(self, session: int) -> None:
        self.results.append(Detached(session))


class _Lifelines:
    def end(self, session: int) -> None:
        pass


class DaemonCore:
    """One daemon; `feed` gives it a frame of the hostile client, `check` looks at all it holds."""

    def __init__(self) -> None:
        self.counters = Counters()
        cache = Cache(Space(CACHE_BYTES, base=POOL_BYTES), self.counters.cache)
        self.ledger = Ledger(Space(POOL_BYTES), LIMITS, self.counters, cache)
        self._lane = _Lane()
        self._control: Any = _Control()
        peers = Peers()
        lanes: Any = {"cpu": self._lane}
        self._reception = Reception(
            ledger=self.ledger,
            counters=self.counters,
            lanes=lanes,
            control=self._control,
            peers=peers,
            lifeline_path="/nowhere",
            allowed_uids=frozenset((os.getuid(),)),
            cache_part_bytes=PART_BYTES,
            lease_seconds=5.0,
            status=lambda: {"entries": self.ledger.entries},
        )
        self._service = Service(
            ledger=self.ledger,
            counters=self.counters,
            control=self._control,
            peers=peers,
            reception=self._reception,
            status=lambda: {"entries": self.ledger.entries},
            on_progress=lambda: None,
            later=Mock(),
        )
        lifelines: Any = _Lifelines()
        self._service.start(lifelines)
        self.neighbour = self._open(NEIGHBOUR)
        self._send(
            NEIGHBOUR,
            Store(
                entry=1, segment=0, offset=0, nbytes=4096, dtype="uint8", codec="raw", sequence=0
            ),
        )
        self.fuzzer = self._open(FUZZER)

    def feed(self, frame: bytes) -> None:
        """Handle a frame of the hostile client; one that ends its session gives it a new one."""
        self._deliver(FUZZER, frame)
        self._control.sent.clear()
        if self.fuzzer not in self.ledger.sessions:
            self.fuzzer = self._open(FUZZER)

    def check(self) -> None:
        """Assert that all holds together, and that the neighbour still has what it had."""
        self.ledger.assert_invariants()
        assert self.counters.ended["failed"] == 0, "a frame met a bug of the daemon's"
        (held,) = [one for one in self.ledger.sessions_status() if one["id"] == self.neighbour]
        assert held["entries"] == 1

    def close(self) -> None:
        """End all sessions; afterwards nothing is held."""
        self._service.end_all("shutdown")
        self._settle()
        assert not self.ledger.sessions
        assert not self.ledger.entries
        self.ledger.assert_invariants()

    # --- parts ------------------------------------------------------------------------------

    def _open(self, route: bytes) -> int:
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
        self._send(route, hello)
        (welcome,) = self._control.take(route)
        assert isinstance(welcome, Welcome), welcome
        assert self._service.take_token(welcome.token, os.getuid()) is not None
        return welcome.session

    def _send(self, route: bytes, message: Message) -> None:
        self._deliver(route, encode([Envelope(1, message)]))

    def _deliver(self, route: bytes, data: bytes) -> None:
        frame: Any = _Frame(data)
        self._service.take_frame(route, frame)
        self._service.flush()
        self._settle()

    def _settle(self) -> None:
        while self._lane.results:
            results, self._lane.results = self._lane.results, []
            self._service.take_results(results)
