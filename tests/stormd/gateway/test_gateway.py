"""What a session gets from the daemon: real sockets, a daemon in a thread of this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from itertools import chain
from random import Random
from typing import Any

import pytest
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient
from support.waiting import wait_until

from stormd.ledger.events import StoreFailed
from stormd.protocol import (
    CACHE_FEATURE,
    NO_LANE,
    CacheCommit,
    CacheFound,
    CacheGet,
    CacheList,
    CacheNames,
    CachePut,
    CacheReady,
    CacheTensor,
    Goodbye,
    Ping,
    PlanLearned,
    Pong,
    Refused,
    Rejected,
    Release,
    Restore,
    Status,
    StatusRequest,
    Stored,
    StoreParts,
    Welcome,
    encode,
    pack,
)
from stormd.protocol.framing import Envelope
from stormd.protocol.limits import FIRST_LEASED, MAX_BATCH, MAX_COSTLY, MAX_ENTRY_BYTES, MAX_ID

MIB = 1 << 20
Connect = Callable[..., RawClient]
MakeDaemon = Callable[..., DaemonThread]


def plan(**changes: Any) -> PlanLearned:
    fields: dict[str, Any] = {
        "kept_bytes": 1,
        "offloaded_bytes": 2,
        "replayed_bytes": 3,
        "budget": "12.0 GiB",
    }
    return PlanLearned(**{**fields, **changes})


def plans(client: RawClient) -> list[Any]:
    return [session["plan"] for session in client.ask(StatusRequest()).state["sessions"]]


def test_the_last_plan_of_a_session_is_shown(client: RawClient) -> None:
    assert plans(client) == [None]
    client.send(plan(), plan(replayed_bytes=4, budget="fit"))
    shown = {"kept_bytes": 1, "offloaded_bytes": 2, "replayed_bytes": 4, "budget": "fit"}
    assert plans(client) == [shown]


def test_a_session_that_stores_no_activations_has_no_plan(
    daemon: DaemonThread, connect: Connect
) -> None:
    for hello in ({"device": NO_LANE}, {"features": [CACHE_FEATURE]}):
        client = connect(daemon)
        client.hello(**hello)
        refused = client.ask(plan())
        assert (type(refused), refused.kind) == (Refused, "UsageError")
        assert set(plans(client)) == {None}
        client.send(Goodbye())  # it has no lifeline, whose end would tell


def test_what_does_not_fit_is_rejected(client: RawClient) -> None:
    for changes in (
        {"offset": 4 * MIB - 1, "nbytes": 2},
        {"offset": (1 << 63) - 1, "nbytes": 1},
        {"nbytes": MIB + 1},
        {"nbytes": 1 << 30},
        {"segment": 1},
        {"dtype": "float5"},
        {"dtype": "float32", "nbytes": 3},
        {"entry": 0},
    ):
        entry = client.store(b"", **{"nbytes": 1, **changes})
        rejected = client.wait_for(Rejected, entry=changes.get("entry", entry))
        assert rejected.reason == "invalid", changes
        assert rejected.detail
        client.stored(b"the next one is served")


def test_a_restore_that_cannot_be_fails(client: RawClient) -> None:
    entry = client.stored(b"x" * 100)
    right = {"ticket": 5, "entry": entry, "segment": 0, "offset": 0, "nbytes": 100, "sequence": 0}
    for changes, kind in (
        ({"entry": 77}, "ActivationLost"),
        ({"nbytes": 99}, "UsageError"),
        ({"offset": 4 * MIB}, "UsageError"),
        ({"segment": 3}, "UsageError"),
        ({"ticket": 0}, "UsageError"),
    ):
        fields = right | changes
        failed = client.ask(Restore(**fields))
        assert (failed.kind, failed.ticket) == (kind, fields["ticket"])


def a_put(name: str, nbytes: int) -> CachePut:
    sizes = {"nbytes": nbytes, "part_bytes": MIB, "ttl_seconds": 0.0}
    return CachePut(name=name, dtype="uint8", shape=[nbytes], **sizes)


def test_a_tensor_is_put_and_got_by_another(daemon: DaemonThread, connect: Connect) -> None:
    data = os.urandom(MIB) + b"rest"
    with connect(daemon).open(features=[CACHE_FEATURE]) as putter:
        assert putter.ask(a_put("a", len(data))) == CacheReady()
        entries = [putter.stored(data[:MIB]), putter.stored(data[MIB:], offset=MIB)]
        assert putter.ask(CacheCommit(entries)) == CacheFound(found=True)
    wait_until(lambda: not daemon.status()["sessions"])
    reader = connect(daemon).open(features=[CACHE_FEATURE])
    found = reader.ask(CacheGet("a"))
    assert found == CacheTensor(
        dtype="uint8", shape=[len(data)], nbytes=len(data), part_bytes=MIB, first_entry=FIRST_LEASED
    )
    assert reader.restored(FIRST_LEASED, MIB) == data[:MIB]
    assert reader.restored(FIRST_LEASED + 1, 4, ticket=2) == b"rest"
    daemon.check()
    assert daemon.status()["pool"]["used_bytes"] == 0


def test_a_damaged_tensor_is_reported_once_and_then_missing(
    daemon: DaemonThread, connect: Connect
) -> None:
    client = connect(daemon).open(features=[CACHE_FEATURE])
    client.ask(a_put("a", 25600))
    client.ask(CacheCommit([client.stored(bytes(range(256)) * 100)]))
    first = client.ask(CacheGet("a")).first_entry
    base = daemon.server._cache.space.base
    ctypes.memset(daemon.server._pool.address + base + 256 + 1000, 0xFF, 1)
    restore = Restore(ticket=1, entry=first, segment=0, offset=0, nbytes=25600, sequence=0)
    assert client.ask(restore).kind == "CorruptBlob"
    assert client.ask(CacheGet("a")) == CacheFound(found=False)


def test_many_pages_of_names_asked_for_at_once_are_all_answered(
    daemon: DaemonThread, connect: Connect
) -> None:
    client = connect(daemon).open(features=[CACHE_FEATURE])
    names = [f"{number:03}" + "\N{EARTH GLOBE EUROPE-AFRICA}" * 250 for number in range(300)]
    for name in names:
        client.send(a_put(name, 0), CacheCommit([]))
    frames = [client.send(*[CacheList("")] * MAX_COSTLY) for _ in range(3)]
    for request in chain.from_iterable(frames):
        page = client.wait(lambda envelope, wanted=request: envelope.request == wanted).message
        assert page == CacheNames(names, complete=True)


def test_a_malformed_frame_is_answered_counted_and_harms_nobody(
    daemon: DaemonThread, client: RawClient, connect: Connect
) -> None:
    stranger = connect(daemon)
    answer = encode([Envelope(1, Stored(1, 1, "raw"))])
    frames = [b"", b"\xc1", b"\x90", b"\x93", answer, os.urandom(3000)]
    for sender in (stranger, client):
        for frame in frames:
            sender.send_bytes(frame)
            sender.wait_for(Refused)
    assert daemon.status()["counters"]["malformed"] >= len(frames)
    client.socket.send_multipart([b"", b"part"])
    client.wait_for(Refused)
    assert client.restored(client.stored(b"still served"), 12) == b"still served"


def test_of_a_large_frame_that_is_not_valid_nothing_is_done(client: RawClient) -> None:
    entry = client.stored(b"kept")
    client.send_bytes(encode([Envelope(1, Release([entry] * MAX_BATCH))] * 10) + b"more")
    client.wait_for(Refused)
    assert client.restored(entry, 4) == b"kept"


def test_what_cannot_be_handled_ends_its_session_alone(
    daemon: DaemonThread, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of no entry, and a message at which the daemon has a bug."""
    first, second, other = (connect(daemon).open() for _ in range(3))
    lost = StoreFailed(session=first.welcome.session, entry=77, detail="of no entry")
    daemon.on_loop(lambda: daemon.server._gateway.take_results([lost]))
    monkeypatch.setitem(daemon.server._gateway._own_handlers, Ping, lambda *_: 1 / 0)
    second.send(Ping())
    assert first.is_cut_off()
    assert second.is_cut_off()
    assert daemon.status()["counters"]["ended"]["failed"] == 2
    other.stored(b"served")


def test_many_entries_are_released_in_steps_also_those_of_a_client_that_dies(
    daemon: DaemonThread, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormd.gateway.gateway.RELEASED_AT_ONCE", 2)
    monkeypatch.setattr("stormd.ledger.leases.FREED_A_TURN", 2)
    client, dying = connect(daemon).open(), connect(daemon).open()
    for one in (client, dying):
        for _ in range(9):
            one.stored(b"held")
    client.send(*[Release([*range(1, 10)] * 400)] * 10)
    assert isinstance(client.ask(Ping()), Pong)
    assert daemon.status()["entries"] == 9
    dying.close()
    wait_until(lambda: daemon.status()["entries"] == 0)
    daemon.check()


def test_chunks_of_a_hostile_client_name_nothing_but_its_own(
    daemon: DaemonThread, client: RawClient
) -> None:
    """Thousands at once: in range or not, known or new, in any order."""
    chance = Random(1)
    numbers = (0, 1, 4096, MIB - 4096, 4 * MIB, 4 * MIB + 1, 1 << 62, MAX_ID)
    for count in range(50):
        places: list[int] = []
        for entry in range(100 * count, 100 * count + 100):
            known = chance.choice((entry, 0, 1 << 62, MAX_ID))
            named = entry + 1 if chance.random() < 0.5 else known
            nbytes = chance.choice((1, MIB, MIB + 1, MAX_ENTRY_BYTES, *[4096] * 16))
            segment, offset = chance.choice((0, 0, 0, 1)), chance.choice(numbers)
            places += named, segment, offset, nbytes, chance.choice(numbers)
        dtype = chance.choice(("uint8", "uint8", "float64", "none such"))
        client.send(StoreParts(dtype=dtype, codec="raw", places=pack(places)))
        client.send(Release(list(range(100 * count, 100 * count + 101))), Ping())
        client.wait_for(Pong)
        client.received.clear()
        daemon.check()
    assert daemon.status()["throughput"]["store"]["operations"] > 100


def test_a_frame_above_the_limit_cuts_its_sender_off_only(
    daemon: DaemonThread, connect: Connect
) -> None:
    client, neighbour = connect(daemon).open(), connect(daemon).open()
    client.send_bytes(bytes((1 << 20) + 1))
    neighbour.stored(b"served")


def test_a_store_before_the_lifeline_is_rejected(daemon: DaemonThread, connect: Connect) -> None:
    client = connect(daemon)
    client.welcome = client.hello()
    client.staging = memoryview(bytearray(10))  # type: ignore[assignment]
    assert client.wait_for(Rejected, entry=client.store(b"x")).reason == "invalid"
    client.staging = None
    client.send(Goodbye())


def test_a_client_that_is_late_to_read_gets_all_its_answers(
    make_daemon: MakeDaemon, connect: Connect
) -> None:
    """It may be kept from reading for longer than what ZeroMQ and the kernel hold takes."""
    daemon = make_daemon()
    client = connect(daemon, RCVHWM=1).open()
    (peer,) = daemon.server._gateway._peers.by_session.values()
    connection = peer.connection
    for _ in range(125):
        client.send(*[StatusRequest()] * MAX_COSTLY)
    wait_until(lambda: connection.unsent > 100_000)
    for _ in range(125 * MAX_COSTLY):
        client.wait_for(Status)
    wait_until(lambda: connection.unsent == 0)  # the last is read before it counts as sent
    assert len(daemon.status()["sessions"]) == 1


def test_a_client_that_reads_nothing_is_cut_off(
    make_daemon: MakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormd.gateway.dispatch.UNREAD_BYTES", 100_000)
    daemon = make_daemon()
    client, neighbour = connect(daemon, RCVHWM=1).open(), connect(daemon).open()
    for _ in range(100):
        client.send(*[StatusRequest()] * MAX_COSTLY)
    assert client.is_cut_off()
    assert client.reason == "its answers could not be sent"
    assert daemon.status()["counters"]["ended"]["unreachable"] == 1
    neighbour.stored(b"served")


def test_a_session_without_a_lifeline_ends(
    ticks_often: None, daemon: DaemonThread, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormd.ledger.leases.ATTACH_SECONDS", 0.0)
    assert isinstance(connect(daemon).hello(), Welcome)
    wait_until(lambda: not daemon.status()["sessions"])
    assert daemon.status()["counters"]["ended"]["unattached"] == 1


def test_a_silent_client_is_kept_while_it_can_be_reached(
    make_daemon: MakeDaemon, connect: Connect, ticks_often: None
) -> None:
    daemon = make_daemon(lease_seconds=0.1)
    client = connect(daemon).open()
    client.wait_for(Pong)
    client.wait_for(Pong)
    assert len(daemon.status()["sessions"]) == 1


def test_a_client_without_its_control_connection_ends(
    make_daemon: MakeDaemon, connect: Connect, ticks_often: None
) -> None:
    daemon = make_daemon(lease_seconds=0.1)
    client = connect(daemon).open()
    client.socket.close()
    assert client.is_cut_off()
    assert daemon.status()["counters"]["ended"]["unreachable"] == 1
