"""What arrives at a daemon's socket changes nothing for anybody but its sender."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import storm_client as storm
import torch
import zmq
from bench.fuzz import fuzz
from storm_client.transport.handshake import is_listening
from support.checked_training import MIN_BYTES, Training
from support.daemon_process import resident_bytes, start_daemon
from support.daemon_thread import DaemonThread
from support.other_user import ANOTHER_UID, as_another_user, open_directory, root_only
from support.patience import patient_clients
from support.raw_client import RawClient
from support.waiting import wait_until

from stormd.config import Config
from stormd.protocol import (
    Envelope,
    Failed,
    Goodbye,
    MapSegment,
    Ping,
    Pong,
    Refused,
    Rejected,
    Release,
    ReserveRange,
    Restore,
    Restored,
    StatusRequest,
    Store,
    Stored,
    UnmapSegment,
    Welcome,
    encode,
)
from stormd.protocol.limits import FIRST_LEASED, MAX_COSTLY, MAX_ENTRY_BYTES, MAX_ID

FRAMES = 5_000
MIB = 1 << 20

STRANGER = """
import json, sys
from support.raw_client import RawClient
BECOME
client = RawClient(sys.argv[1])
answer = client.hello(uid=65534)
print(json.dumps([type(answer).__name__, getattr(answer, "detail", "")]))
client.close()
"""

HELLOS = """
import json, sys
from support.raw_client import RawClient
BECOME
clients = [RawClient(sys.argv[1]) for _ in range(12)]
print(json.dumps([type(client.hello(uid=65534)).__name__ for client in clients]), flush=True)
sys.stdin.readline()
"""

CROWD = """
import socket, sys, zmq
BECOME
context, frame, clients, lines = zmq.Context(), b"\\xdc\\xff\\xff" + b"\\x90" * 1000000, [], []
for _ in range(8):
    clients.append(context.socket(zmq.DEALER))
    clients[-1].setsockopt(zmq.LINGER, 0)
    clients[-1].connect(sys.argv[1])
    for _ in range(64):
        clients[-1].send(frame)
for _ in range(400):
    lines.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    lines[-1].connect(sys.argv[1].removeprefix("ipc://"))
print("sent", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with open_directory() as path:
        yield path


@pytest.fixture
def neighbour(daemon: DaemonThread) -> Iterator[Callable[[], bool]]:
    """Return what tells whether a well-behaved client's next step is right."""
    training = Training()
    with patient_clients(), storm.connect(daemon.address, embedded="never", timeout=30.0) as client:
        offload = client.offload(training.model, min_bytes=MIN_BYTES)
        assert training.is_right(offload)
        yield lambda: training.is_right(offload)
        assert offload.stats().offloaded_bytes > 0


@pytest.fixture
def hostile(daemon: DaemonThread) -> Iterator[RawClient]:
    with RawClient(daemon.address) as client:
        yield client.open()


def _store(entry: int, **changes: Any) -> Store:
    fields = {"segment": 0, "offset": 0, "nbytes": 100, "dtype": "uint8", "codec": "raw"}
    return Store(**{"entry": entry, "sequence": 0, **fields, **changes})


def _restore(ticket: int, entry: int, **changes: int) -> Restore:
    fields = {"segment": 0, "offset": 0, "nbytes": 100, "sequence": 0, **changes}
    return Restore(ticket=ticket, entry=entry, **fields)


def test_fuzzed_frames() -> None:
    """`bench.fuzz` asserts: the neighbour's steps right, no bug met, nothing left over."""
    figures = fuzz(FRAMES, seed=1)
    assert figures["malformed"] > FRAMES // 10
    assert figures["stores"] > 100
    assert figures["neighbour_right_steps"] > 0


OUT_OF_BOUNDS = [
    _store(1, nbytes=MAX_ENTRY_BYTES),
    _store(1, offset=MAX_ID),
    _store(1, offset=MAX_ID, nbytes=MAX_ENTRY_BYTES),
    _store(1, segment=MAX_ID),
    _store(0),
    _store(FIRST_LEASED),
    _store(1, nbytes=101, dtype="float32", codec="ancf"),
    _store(1, dtype="no such type", codec="ancf", sequence=MAX_ID),
    _restore(1, 1),
    _restore(0, MAX_ID, segment=MAX_ID, offset=MAX_ID, nbytes=MAX_ENTRY_BYTES, sequence=MAX_ID),
    MapSegment(segment=1, handle=b"\xff" * 64, nbytes=MAX_ID),
    MapSegment(segment=0, handle=b"", nbytes=1),
    ReserveRange(segment=1, nbytes=MAX_ID),
    UnmapSegment(7),
    Stored(1, 1, "raw"),
    _store(MAX_ID),  # after which no entry may follow
]


def test_requests_out_of_bounds_are_refused(
    daemon: DaemonThread, neighbour: Callable[[], bool], hostile: RawClient
) -> None:
    for message in OUT_OF_BOUNDS:
        assert isinstance(hostile.ask(message), Rejected | Failed | Refused), message
        daemon.check()
    for offset in (-1, -(1 << 63), 1 << 63, 1.5, None):
        hostile.send_bytes(msgpack.packb([[Store.OP, 1, 1, 0, offset, 100, "uint8", "raw", 0]]))
        hostile.wait_for(Refused)
    assert neighbour()


def test_entries_of_others_cannot_be_guessed(daemon: DaemonThread, hostile: RawClient) -> None:
    with RawClient(daemon.address) as owner:
        entry = owner.open().stored(b"secret")
        hostile.release(*range(200))
        for ticket in range(1, 200):
            assert isinstance(hostile.ask(_restore(ticket, ticket, nbytes=6)), Failed)
        assert owner.restored(entry, 6) == b"secret"


def test_freed_memory_is_never_read_by_another(daemon: DaemonThread, hostile: RawClient) -> None:
    """A new session's areas are zero, and what it restores is what it stored, to the last byte."""
    with RawClient(daemon.address) as owner:
        owner.open()
        owner.release(owner.stored(b"secret" * 10_000))
    assert not any(hostile.staging[:])  # type: ignore[index]
    assert not any(hostile.page[:])  # type: ignore[index]
    entry = hostile.stored(b"mine")
    assert isinstance(hostile.ask(_restore(1, entry, nbytes=60_000)), Failed)
    assert hostile.restored(entry, 4) == b"mine"
    assert not any(hostile.staging[4:])  # type: ignore[index]


def test_words_in_the_wrong_order(
    daemon: DaemonThread, neighbour: Callable[[], bool], hostile: RawClient
) -> None:
    hostile.send(Release([5]), _restore(1, 5), _store(5), _store(5), _store(4))
    assert hostile.wait_for(Failed, ticket=1).kind == "ActivationLost"
    hostile.wait_for(Stored, entry=5)
    hostile.wait_for(Rejected, entry=5)
    hostile.wait_for(Rejected, entry=4)
    hostile.send(*[_restore(2, 5)] * 2, Release([5, 5]), Goodbye(), _store(6))
    assert hostile.is_cut_off()
    assert isinstance(hostile.ask(_restore(3, 5)), Refused)
    assert neighbour()


def test_a_source_changed_while_it_is_read_harms_its_owner_alone(
    daemon: DaemonThread, neighbour: Callable[[], bool], hostile: RawClient
) -> None:
    """What was stored then may be anything; it comes back checked, or as CorruptBlob."""
    staging = hostile.staging
    noise = [os.urandom(64 << 10) for _ in range(2)]
    for round_number in range(1, 50):
        staging[: 64 << 10] = noise[0]
        hostile.send(_store(round_number, nbytes=64 << 10, dtype="bfloat16", codec="ancf"))
        staging[: 64 << 10] = noise[1]
        hostile.wait_for(Stored, entry=round_number)
        answer = hostile.ask(_restore(round_number, round_number, offset=MIB, nbytes=64 << 10))
        assert isinstance(answer, Restored) or answer.kind == "CorruptBlob"
        hostile.release(round_number)
    assert neighbour()


def test_a_damaged_block_is_never_returned(daemon: DaemonThread) -> None:
    """Every kind of record: whichever byte of the pool is hit, unpack raises."""
    with patient_clients(), storm.connect(daemon.address, embedded="never", timeout=30.0) as client:
        offload = client.offload(min_bytes=1)
        x = torch.randn(1 << 16, requires_grad=True)
        with offload:
            loss = x.exp().square().sum()
        offload.stats()
        assert daemon.on_loop(lambda: _flip_all_blocks(daemon)) > 0
        with pytest.raises(storm.CorruptBlob):
            loss.backward()
        assert x.grad is None
        del loss
    assert daemon.status()["counters"]["corrupt"] > 0


def _flip_all_blocks(daemon: DaemonThread) -> int:
    """Flip a bit in the middle of every block of the pool; return the number of blocks."""
    server = daemon.server
    blocks = [
        entry.block
        for session in server._ledger.sessions.values()
        for entry in session.entries.values()
        if entry.block is not None
    ]
    for block in blocks:
        offset, nbytes = block.used_extents()[0]
        byte = ctypes.c_ubyte.from_address(server._pool.address + offset + nbytes // 2)
        byte.value ^= 0x10
    return len(blocks)


def test_connections_that_do_nothing_end_before_the_daemon_does(tmp_path: Path) -> None:
    """ZeroMQ ends a process in which no descriptor is left for a connection."""
    process = start_daemon(tmp_path, "--pool-bytes", "1MiB", "--cache-bytes", "0")
    path = process.address.removeprefix("ipc://")
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, 256))
    idle = []
    with RawClient(process.address) as served:
        entry = served.open().stored(b"data")
        for number in range(300):
            idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            idle[-1].connect(path)
            assert isinstance(served.ask(Ping()), Pong), number
        assert served.restored(entry, 4) == b"data"
        for line in idle:
            line.close()
        wait_until(lambda: psutil.Process(process.pid).num_fds() < 100)
        with RawClient(process.address) as late:
            assert isinstance(late.hello(), Welcome)
    process.stop()
    assert process.process.returncode == 0


@pytest.mark.parametrize("suffix", ["", ".lifeline"])
def test_a_crowd_that_comes_while_the_daemon_is_busy_is_not_sent_away(
    tmp_path: Path, suffix: str
) -> None:
    """A connection that finds no place in the queue fails at once, as if there were no daemon."""
    process = start_daemon(tmp_path, "--pool-bytes", "1MiB", "--cache-bytes", "0")
    wait_until(lambda: is_listening(process.address + suffix))  # lifelines are taken last
    queue = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with ExitStack() as lines:
        process.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(min(500, queue)):
                line = lines.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                line.setblocking(False)
                line.connect(process.address.removeprefix("ipc://") + suffix)
        finally:
            process.process.send_signal(signal.SIGCONT)
    with RawClient(process.address) as late:
        late.open()
    process.stop()


@root_only
def test_a_user_is_heard_from_when_the_settings_say_so(
    daemon: DaemonThread, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the socket's mode lets it in, by what the kernel says of it."""
    Path(daemon.address.removeprefix("ipc://")).chmod(0o666)
    for allowed, answer in (((0,), "Refused"), ((0, ANOTHER_UID), "Welcome"), ((0,), "Refused")):
        daemon.on_loop(lambda uids=allowed: daemon.server.reload(make_config(allowed_uids=uids)))
        told, _ = as_another_user(STRANGER, daemon.address).communicate(timeout=300)
        kind, detail = json.loads(told)
        assert kind == answer
        if kind == "Refused":
            assert f"user {ANOTHER_UID} may not connect" in detail
    monkeypatch.setattr("stormd.ledger.leases.ATTACH_SECONDS", 0.0)  # the one session may end
    wait_until(lambda: not daemon.status()["sessions"])


@root_only
def test_a_user_who_is_not_allowed_fills_nothing_and_keeps_nobody_out(tmp_path: Path) -> None:
    """Neither by frames without end, nor by more connections that say nothing than there may be."""
    process = start_daemon(tmp_path, "--pool-bytes=1MiB", "--cache-bytes=0", "--socket-mode=0666")
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, 256))
    with RawClient(process.address) as neighbour:
        entry = neighbour.open().stored(b"data")
        before = resident_bytes(process.pid)
        crowd = as_another_user(CROWD, process.address)
        assert crowd.stdout.readline() == "sent\n"
        for _ in range(20):
            with RawClient(process.address) as newcomer:
                assert newcomer.open().stored(b"served") == 1
            assert isinstance(neighbour.ask(Ping()), Pong)
        assert neighbour.restored(entry, 4) == b"data"
        assert resident_bytes(process.pid) - before < 32 * MIB
        crowd.communicate("\n", timeout=300)
    process.stop()
    assert process.process.returncode == 0


@root_only
def test_a_user_takes_no_more_than_its_own_places(
    make_daemon: Callable[..., DaemonThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as many sessions without a lifeline as it is told to stop at, and then some."""
    daemon = make_daemon(allowed_uids=(0, ANOTHER_UID), max_sessions=8)
    Path(daemon.address.removeprefix("ipc://")).chmod(0o666)
    greedy = as_another_user(HELLOS, daemon.address)
    assert json.loads(greedy.stdout.readline()) == ["Welcome"] * 4 + ["Refused"] * 8
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(RawClient(daemon.address)).open()
    monkeypatch.setattr("stormd.ledger.leases.ATTACH_SECONDS", 0.0)  # all is seen: they may end
    greedy.communicate("\n", timeout=300)
    wait_until(lambda: not daemon.status()["sessions"])


def test_what_a_client_reads_not_is_given_up_with_its_connection(
    make_daemon: Callable[..., DaemonThread],
) -> None:
    """While its socket stays open: nothing is kept for it, and what the kernel has is bounded."""
    daemon = make_daemon(message_bytes=4 * MIB)
    frame = encode([Envelope(n, StatusRequest()) for n in range(1, MAX_COSTLY + 1)])
    with RawClient(daemon.address) as neighbour, RawClient(daemon.address, RCVHWM=1) as deaf:
        neighbour.open()
        deaf.open()
        while not deaf.is_cut_off(0.001):
            with suppress(zmq.Again):
                deaf.socket.send(frame, zmq.NOBLOCK)
            assert daemon.on_loop(lambda: daemon.server._control._held_bytes) < 5 * MIB
        assert daemon.status()["counters"]["ended"]["unreachable"] == 1
        wait_until(lambda: daemon.on_loop(lambda: daemon.server._control._held_bytes) < MIB)
        assert isinstance(neighbour.ask(Ping()), Pong)
