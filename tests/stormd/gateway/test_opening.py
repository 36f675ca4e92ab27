"""Who gets a session, and what everybody else is told."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgpack
import pytest
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient
from support.waiting import wait_until

from stormd.gateway.opening import NAME_SHOWN
from stormd.protocol import (
    CACHE_FEATURE,
    NO_LANE,
    PROTOCOL_VERSION,
    Envelope,
    Goodbye,
    Hello,
    MapSegment,
    Ping,
    Pong,
    Refused,
    Restore,
    Status,
    StatusRequest,
    Store,
    Welcome,
    encode,
)
from stormd.protocol.limits import MAX_BUDGET, MAX_FRAME_BYTES, MAX_ID, MAX_TEXT
from stormd.state import SESSIONS_SHOWN

MIB = 1 << 20
Connect = Callable[..., RawClient]
MakeDaemon = Callable[..., DaemonThread]


def test_no_names_of_clients_are_too_long_for_a_status(
    make_daemon: MakeDaemon, connect: Connect
) -> None:
    daemon = make_daemon(staging_bytes_cpu=64 << 10, part_bytes_cpu=32 << 10)
    longest = "\N{CJK UNIFIED IDEOGRAPH-20000}" * MAX_TEXT
    clients = [connect(daemon).open(name=longest) for _ in range(64)]
    for asking in (clients[0], connect(daemon)):
        state = asking.ask(StatusRequest()).state
        assert [len(session["name"]) for session in state["sessions"]] == [NAME_SHOWN] * 64
    plan = dict.fromkeys(("kept_bytes", "offloaded_bytes", "replayed_bytes"), MAX_ID)
    plan["budget"] = longest[:MAX_BUDGET]
    client = {**state["sessions"][0], "id": MAX_ID, "used_bytes": MAX_ID, "entries": MAX_ID}
    client["plan"] = plan
    full = {**state, "sessions": [client] * SESSIONS_SHOWN}
    assert len(encode([Envelope(1, Status(full))])) < MAX_FRAME_BYTES


def test_a_session_for_control_takes_nobodys_place(
    make_daemon: MakeDaemon, connect: Connect
) -> None:
    """As many trainers as there are shares for, each of which may ask by a session of its own."""
    daemon = make_daemon(max_sessions=1)
    control = connect(daemon)
    welcome = control.hello(device=NO_LANE)
    assert isinstance(welcome, Welcome)
    assert welcome.staging_bytes == 0
    assert control.connect_lifeline(welcome.lifeline, welcome.token) == []
    trainer = connect(daemon).open()
    entry = trainer.stored(b"kept")
    assert connect(daemon).hello().kind == "QuotaExceeded"
    assert connect(daemon).hello(device=NO_LANE).kind == "QuotaExceeded"
    listed = control.ask(StatusRequest()).state["sessions"]
    assert [one["device"] for one in listed] == [NO_LANE, "cpu"]
    fields = {"entry": 1, "segment": 0, "offset": 0, "nbytes": 4, "dtype": "uint8"}
    rejected = control.ask(Store(**fields, codec="raw", sequence=0))
    assert rejected.reason == "invalid"
    assert "for control alone" in rejected.detail
    assert isinstance(control.ask(MapSegment(segment=1, handle=b"x" * 64, nbytes=4)), Refused)
    assert isinstance(control.ask(Ping()), Pong)
    control.send(Goodbye())
    assert control.is_cut_off()
    assert trainer.restored(entry, 4) == b"kept"


def test_another_protocol_version_is_told_so(daemon: DaemonThread, connect: Connect) -> None:
    client = connect(daemon)
    client.send_bytes(msgpack.packb([[1, 7, 999, "anything", "a later version sends"]]))
    refused = client.wait_for(Refused)
    assert refused.kind == "ProtocolMismatch"
    assert "999" in refused.detail
    assert connect(daemon).hello(protocol=PROTOCOL_VERSION + 1).kind == "ProtocolMismatch"


def test_a_chosen_routing_id_is_refused(daemon: DaemonThread, connect: Connect) -> None:
    client = connect(daemon, ROUTING_ID=b"chosen")
    assert "routing id" in client.hello().detail


def test_messages_without_a_session_are_refused(daemon: DaemonThread, connect: Connect) -> None:
    client = connect(daemon)
    restore = Restore(ticket=1, entry=1, segment=0, offset=0, nbytes=1, sequence=0)
    for message in (Ping(), restore):
        assert client.ask(message).kind == "DaemonLost"


def test_a_second_hello_and_an_absent_device_are_refused(
    daemon: DaemonThread, client: RawClient, connect: Connect
) -> None:
    assert isinstance(client.hello(), Refused)
    assert "cuda" in connect(daemon).hello(device="cuda").detail


def test_hello_must_name_the_user_that_the_kernel_sees(
    daemon: DaemonThread, connect: Connect
) -> None:
    refused = connect(daemon).hello(uid=os.getuid() + 1)
    assert isinstance(refused, Refused)
    assert f"the kernel says {os.getuid()}" in refused.detail


def test_users_who_are_not_allowed_are_refused(make_daemon: MakeDaemon, connect: Connect) -> None:
    daemon = make_daemon(allowed_uids=(os.getuid() + 1,))
    client = connect(daemon)
    for answer in (client.hello(), client.ask(StatusRequest())):
        assert "allowed_uids" in answer.detail
    assert daemon.status()["counters"]["refused"] == 2


def test_a_session_for_the_cache_needs_a_cache(make_daemon: MakeDaemon, connect: Connect) -> None:
    daemon = make_daemon(cache_bytes=0)
    refused = connect(daemon).hello(features=[CACHE_FEATURE])
    assert refused.kind == "UsageError"
    assert "--cache-bytes" in refused.detail
    client = connect(daemon)
    assert client.hello().features == []
    client.send(Goodbye())  # it has no lifeline, whose end would tell


def test_sessions_for_the_cache_take_parts_that_all_lanes_take(
    make_daemon: MakeDaemon, connect: Connect
) -> None:
    daemon = make_daemon(part_bytes_cpu=MIB, part_bytes_cuda=MIB // 4)
    plain, for_the_cache = connect(daemon), connect(daemon)
    assert plain.hello().part_bytes == MIB
    refused = connect(daemon).hello(device=NO_LANE, features=[CACHE_FEATURE])
    assert "needs a lane" in refused.detail
    welcome = for_the_cache.hello(features=[CACHE_FEATURE])
    assert (welcome.part_bytes, welcome.features) == (MIB // 4, [CACHE_FEATURE])
    plain.send(Goodbye())  # they have no lifelines, whose ends would tell
    for_the_cache.send(Goodbye())


def test_what_follows_a_hello_in_its_frame_is_heard(daemon: DaemonThread, connect: Connect) -> None:
    client = connect(daemon)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        features=[],
        pid=1,
        uid=os.getuid(),
        device="cpu",
        device_uuid="",
        staging_bytes=0,
        name="test",
    )
    client.send(hello, Ping(), Goodbye(), Ping())
    assert isinstance(client.wait_for(Welcome), Welcome)
    assert isinstance(client.wait_for(Pong), Pong)
    wait_until(lambda: daemon.status()["counters"]["ended"]["goodbye"] == 1)


def test_a_lane_without_room_for_a_session_refuses_it(
    daemon: DaemonThread, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", no_memory)
    assert "Too many open files" in connect(daemon).hello().detail
