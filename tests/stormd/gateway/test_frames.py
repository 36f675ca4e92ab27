"""Which answers leave the gateway together, and when: without sockets and lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any, cast
from unittest.mock import Mock

from stormd.gateway.gateway import RELEASED_AT_ONCE, Gateway
from stormd.gateway.peers import Peer
from stormd.lanes import LinkSpeed
from stormd.ledger.events import StoreDone, StoreFailed, StoreJob
from stormd.ledger.ledger import Ledger
from stormd.ledger.sessions import Limits, SessionInfo
from stormd.memory.arena import Space
from stormd.monitoring.counters import Counters
from stormd.protocol import (
    Admitted,
    Message,
    Ping,
    Pong,
    Refused,
    Rejected,
    Release,
    Store,
    Stored,
    StoreParts,
    decode,
    encode,
    pack,
)
from stormd.protocol.framing import Envelope
from stormd.protocol.limits import MAX_BATCH, MAX_ENTRY_BYTES, MAX_ID
from stormd.transport.listener import Credentials

MIB = 1 << 20


class Timer:
    """A call that somebody has asked for later."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds, self.call = seconds, call


def finish(steps: Iterator[None] | None) -> None:
    """Take the steps that are left of a frame."""
    for _ in steps or ():
        pass


class Core:
    """A gateway without sockets and lanes: frames go in, and what it sends is kept."""

    device = "cuda"

    def __init__(self, part_bytes: int = MIB, max_entries: int = 100) -> None:
        self.sent: list[list[Message]] = []
        self.timers: list[Timer] = []
        self.connections: dict[int, Any] = {}
        self.jobs: list[StoreJob] = []
        self.space, counters, nothing = Space(64 * MIB), Counters(), Mock()
        self._part_bytes = part_bytes
        self._ledger = Ledger(
            self.space,
            Limits(
                max_sessions=4, max_entries=max_entries, quota_bytes=64 * MIB, lease_seconds=5.0
            ),
            counters,
        )
        self.gateway = Gateway(
            ledger=self._ledger, counters=counters, lanes={}, control=cast("Any", self),
            terms=nothing, status=nothing, on_progress=nothing, later=self.later,
        )  # fmt: skip
        self.open(1)
        self.gateway.start(nothing)

    def open(self, session: int) -> None:
        record = self._ledger.leases.open(
            SessionInfo(session=session, device="cuda", uid=0, pid=1, name="x"),
            chunk_bytes=self._part_bytes,
            staging_bytes=self._part_bytes,
            now=0.0,
        )
        token = bytes([session]) * 16
        self.gateway._peers.add(
            Peer(
                record=record,
                connection=self.connections.setdefault(session, Mock(unsent=0)),
                credentials=Credentials(uid=0, gid=0, pid=1),
                lane=self,
                token=token,
                descriptors=(),
            )
        )
        self._ledger.leases.attach(record, 0.0)

    def start(self, *_: object) -> None:
        pass

    def allow(self, uids: object) -> None:
        pass

    def session_ended(self, connection: object) -> None:
        pass

    def send(self, connection: object, frame: bytes) -> None:
        self.sent.append([message for _, message in decode(frame)])

    def later(self, seconds: float, call: Callable[[], None]) -> Any:
        self.timers.append(Timer(seconds, call))
        return self.timers[-1]

    def let_time_pass(self) -> None:
        """Make the calls that were asked for."""
        timers, self.timers = self.timers, []
        for timer in timers:
            timer.call()

    def begin(self, session: int, jobs: Sequence[StoreJob]) -> tuple[()]:
        self.jobs += jobs
        return ()

    def skip_sequence(self, session: int, sequence: int) -> None:
        pass

    def detach(self, session: int) -> None:
        pass

    def link_speed(self, session: int) -> LinkSpeed:
        return LinkSpeed(measured=25 * 10**9, limit=12 * 10**9)

    def feed(self, *messages: Message, session: int = 1) -> None:
        frame = encode([Envelope(1, message) for message in messages])
        finish(self.gateway.take_frame(self.connections[session], frame))
        self.gateway.flush()

    def done(self, job: StoreJob) -> StoreDone:
        return StoreDone(
            session=job.session,
            entry=job.entry,
            block=job.place(100),
            mode="raw",
            seconds=0.0,
        )


def a_store(entry: int, nbytes: int = 4096) -> Store:
    return Store(
        entry=entry, segment=0, offset=0, nbytes=nbytes, dtype="uint8", codec="raw", sequence=entry
    )


def test_no_other_answer_waits() -> None:
    core = Core()
    core.feed(a_store(1))
    core.feed(a_store(1))
    assert [type(message) for message in core.sent[0]] == [Admitted, Rejected]
    core.feed(a_store(2))
    core.feed(Ping())
    assert core.sent[1] == [Admitted(2), Pong(link=25 * 10**9, limit=12 * 10**9, disk=0)]


def test_a_result_that_cannot_be_handled_ends_its_session_alone() -> None:
    core = Core()
    core.open(2)
    core.feed(a_store(1), session=2)
    (job,) = core.jobs
    core.gateway.take_results(
        [StoreFailed(session=1, entry=77, detail="of no entry"), core.done(job)]
    )
    assert [type(message) for message in core.sent[0]] == [Stored]
    core.feed(a_store(2))
    assert core.jobs == [job]


def steps(core: Core, *messages: Message) -> list[int]:
    """Feed a frame of these; return how many entries there were after each step."""
    frame = encode([Envelope(1, message) for message in messages])
    work = core.gateway.take_frame(core.connections[1], frame)
    left = [core._ledger.entries, *(core._ledger.entries for _ in work or ())]
    core.gateway.flush()
    return [*left, core._ledger.entries]


def test_entries_are_released_a_few_at_a_time() -> None:
    """Others are served in between, however many one message names."""
    core = Core(max_entries=1000)
    core.feed(*[a_store(number, 100) for number in range(1, 1001)])
    core.gateway.take_results([core.done(job) for job in core.jobs])
    left = [1000, *steps(core, Release(list(range(1, 1001))))]
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) <= RELEASED_AT_ONCE


def test_of_a_large_frame_that_is_not_valid_nothing_is_done() -> None:
    core = Core()
    core.feed(a_store(1))
    core.gateway.take_results([core.done(job) for job in core.jobs])
    frame = encode([Envelope(1, Release([1] * MAX_BATCH))] * 10) + b"more"
    finish(core.gateway.take_frame(core.connections[1], frame))
    core.gateway.flush()
    assert core._ledger.entries == 1
    assert [type(message) for message in core.sent[-1]] == [Refused]


def test_work_that_is_under_way_ends_with_its_session() -> None:
    core = Core(max_entries=1000)
    core.feed(*[a_store(number, 100) for number in range(1, 1001)])
    core.gateway.take_results([core.done(job) for job in core.jobs])
    frame = encode([Envelope(1, Release(list(range(1, 1001)))), Envelope(2, a_store(2000))])
    work = core.gateway.take_frame(core.connections[1], frame)
    assert work is not None
    next(work)
    core.gateway.end(1, "died")
    for _ in work:
        pass
    assert len(core.jobs) == 1000


def test_parts_of_a_hostile_client_name_nothing_but_its_own() -> None:
    """Ten thousand: in range or not, known or new, in any order."""
    chance, core = Random(1), Core()
    numbers = (0, 1, 4096, MIB - 4096, MIB, MIB + 1, 1 << 62, MAX_ID)
    begun = 0
    for count in range(100):
        places: list[int] = []
        for entry in range(100 * count, 100 * count + 100):
            named = (
                entry + 1 if chance.random() < 0.5 else chance.choice((entry, 0, 1 << 62, MAX_ID))
            )
            segment, offset, nbytes = chance.choice((0, 0, 0, 1)), chance.choice(numbers), 4096
            if chance.random() < 0.2:
                nbytes = chance.choice((1, MIB, MIB + 1, MAX_ENTRY_BYTES))
            places += named, segment, offset, nbytes, chance.choice(numbers), chance.choice(numbers)
        dtype = chance.choice(("uint8", "uint8", "float64", "none such"))
        core.feed(StoreParts(dtype=dtype, codec="raw", places=pack(places)))
        for job in core.jobs:
            assert job.segment == 0
            assert job.offset + job.nbytes <= MIB
        begun += len(core.jobs)
        core.gateway.take_results([core.done(job) for job in core.jobs])
        core.feed(Release([job.entry for job in core.jobs]))
        core.jobs.clear()
        core.sent.clear()
    core._ledger.assert_invariants()
    assert begun > 100
