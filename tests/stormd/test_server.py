"""The daemon's own life: how it opens, what it says of itself, how it ends."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
import uvloop
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient
from support.spilling import ENCRYPT, skip_without_disk
from support.waiting import wait_until

from stormd.config import Config
from stormd.errors import (
    AddressInUse,
    ConfigError,
    LaneUnavailable,
    PoolUnavailable,
    SpillUnavailable,
    StormdError,
)
from stormd.lanes.cpu import CpuLane
from stormd.memory import host_pool
from stormd.protocol import (
    Goodbye,
    Refused,
    Rejected,
    StatusRequest,
    Stored,
)
from stormd.server import Server

MIB = 1 << 20
Connect = Callable[..., RawClient]
MakeDaemon = Callable[..., DaemonThread]


def test_status_says_who_holds_what(daemon: DaemonThread, client: RawClient) -> None:
    client.stored(bytes(1000))
    state = client.ask(StatusRequest()).state
    assert state["pool"]["capacity_bytes"] == 16 * MIB
    assert state["pool"]["used_bytes"] == 1280
    assert state["entries"] == 1
    (session,) = state["sessions"]
    assert session["pid"] == os.getpid()
    assert session["uid"] == os.getuid()
    assert (session["device"], session["entries"], session["used_bytes"]) == ("cpu", 1, 1280)
    assert session["id"] == client.welcome.session  # type: ignore[union-attr]
    assert state["throughput"]["store"]["raw_bytes"] == 1000
    assert state["version"]
    assert state["uptime_seconds"] >= 0


# --- a pool that is taken as it is used -----------------------------------------------------


@pytest.mark.parametrize("pool_commit", ["start", "use"])
def test_memory_is_taken_at_start_or_as_it_is_used(
    make_daemon: MakeDaemon, connect: Connect, pool_commit: str
) -> None:
    daemon = make_daemon(pool_bytes=96 * MIB, pool_commit=pool_commit)
    pool = daemon.status()["pool"]
    assert pool["capacity_bytes"] == 96 * MIB
    whole = pool["committed_bytes"]
    assert whole == 64 * MIB if pool_commit == "use" else whole > 96 * MIB
    client = connect(daemon).open()
    data = os.urandom(MIB)
    entries = [client.stored(data) for _ in range(90)]
    assert daemon.status()["pool"]["committed_bytes"] > 90 * MIB
    for entry in entries:
        assert client.restored(entry, MIB) == data
    assert daemon.status()["counters"]["rejected"]["pool_full"] == 0
    daemon.check()


def test_nothing_is_lost_where_the_machine_has_no_more_memory(
    make_daemon: MakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch, ticks_often: None
) -> None:
    """Stores are refused, with the tensor kept by the client, until there is some again."""
    monkeypatch.setattr("stormd.memory.growth.RETRY_SECONDS", 0.1)
    daemon = make_daemon(pool_bytes=160 * MIB, pool_commit="use")
    client = connect(daemon).open()
    monkeypatch.setattr(host_pool, "memory_available", lambda: 0)
    stored = {}
    while True:
        data = os.urandom(MIB)
        entry = client.store(data)
        answer = client.wait(lambda found: isinstance(found.message, Stored | Rejected)).message
        if isinstance(answer, Rejected):
            break
        stored[entry] = data
    assert answer.reason == "pool_full"
    assert "no memory left for more of pool_bytes=160.0 MiB" in answer.detail
    assert len(stored) > 50
    monkeypatch.undo()
    wait_until(lambda: client.ask(StatusRequest()).state["pool"]["committed_bytes"] > 64 * MIB)
    stored[client.stored(data)] = data
    for entry, data in stored.items():
        assert client.restored(entry, MIB) == data


def test_the_cache_takes_its_memory_with_the_first_put(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon = make_daemon(pool_bytes=MIB, cache_bytes=96 * MIB, pool_commit="use")
    assert daemon.status()["cache"]["committed_bytes"] == 0
    with storm.connect(daemon.address, timeout=30) as client:
        tensor = torch.arange(1 << 20)
        client.cache.put("a", tensor)
        assert daemon.status()["cache"]["committed_bytes"] == 99 * MIB
        assert torch.equal(client.cache.get("a"), tensor)


def test_a_dead_daemons_sockets_are_replaced(
    make_config: Callable[..., Config], make_daemon: MakeDaemon, connect: Connect
) -> None:
    path = make_config().address.removeprefix("ipc://")
    for name in (path, path + ".lifeline"):
        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(name)
    Path(path + ".lock").touch()
    connect(make_daemon()).open().stored(b"served")


def test_the_sockets_are_private_and_removed(
    tmp_path: Path, make_daemon: MakeDaemon, connect: Connect
) -> None:
    directory = tmp_path / "made" / "here"
    daemon = make_daemon(address=f"ipc://{directory}/s")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {path.name for path in directory.iterdir()} == {"s", "s.lifeline", "s.lock"}
    for name in ("s", "s.lifeline"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    daemon.stop()
    assert list(directory.iterdir()) == []


def test_files_of_the_address_that_were_removed_are_made_again(
    tmp_path: Path, make_daemon: MakeDaemon, connect: Connect, ticks_often: None
) -> None:
    """And so is the directory."""
    directory = tmp_path / "d"
    daemon = make_daemon(address=f"ipc://{directory}/s", socket_mode=0o660)
    old = connect(daemon).open()
    entry = old.stored(b"held")
    files = {"s", "s.lifeline", "s.lock"}
    for removed in ({"s"}, {"s.lifeline"}, {"s.lock"}, files, None):
        for name in removed or ():
            (directory / name).unlink()
        if removed is None:
            shutil.rmtree(directory)
        wait_until(lambda: {path.name for path in directory.glob("*")} == files)
        for name in ("s", "s.lifeline"):
            wait_until(lambda name=name: mode_of(directory / name) == 0o660)  # type: ignore[misc]
        connect(daemon).open().stored(b"served")
        assert old.restored(entry, 4) == b"held"
        with pytest.raises(AddressInUse):
            DaemonThread(daemon.config)
    daemon.stop()
    assert list(directory.iterdir()) == []


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_daemon_that_cannot_open_leaves_nothing(
    tmp_path: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PoolUnavailable, match="pool_bytes"):
        DaemonThread(make_config(pool_bytes=1 << 60))

    def no_lanes(*_: object) -> None:
        raise LaneUnavailable("no device")

    monkeypatch.setattr("stormd.server.open_lanes", no_lanes)
    with pytest.raises(LaneUnavailable, match="no device"):
        DaemonThread(make_config())
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_looked_for_before_memory_is_taken(
    tmp_path: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "storm_kernels.cuda_driver", None)
    with pytest.raises(LaneUnavailable, match="CUDA is not available"):
        DaemonThread(make_config(device="cuda", pool_bytes=1 << 60))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"spill_path": "/proc/nowhere"}, SpillUnavailable, "/proc/nowhere cannot be used"),
        ({"spill_path": "/dev/shm"}, SpillUnavailable, "on a file system in memory"),
        ({"pool_bytes": 4 * MIB}, ConfigError, "set pool_bytes to at least 4097KiB"),
        ({"spill_bytes": 1}, ConfigError, "set spill_bytes to at least"),
    ],
)
def test_a_tier_on_disk_that_cannot_be_is_refused_before_memory_is_taken(
    tmp_path: Path,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    error: type[StormdError],
    words: str,
) -> None:
    monkeypatch.setattr("stormd.server.HostPool", None)
    skip_without_disk(tmp_path)
    whole = {"spill_path": str(tmp_path), "spill_bytes": 8 * MIB, "spill_encrypt": ENCRYPT}
    with pytest.raises(error, match=words):
        DaemonThread(make_config(**{**whole, **settings}))
    assert list(tmp_path.iterdir()) == []


def test_draining_takes_nothing_new_and_gives_everything_back(
    make_daemon: MakeDaemon, connect: Connect
) -> None:
    daemon = make_daemon(shutdown_seconds=600.0)  # as long as the client holds something
    client = connect(daemon).open()
    data = os.urandom(MIB)
    entry = client.stored(data)
    daemon.server.stop()
    wait_until(lambda: _is_refused(connect(daemon)))
    assert client.wait_for(Rejected, entry=client.store(b"late")).reason == "draining"
    assert client.restored(entry, MIB) == data
    client.release(entry)
    assert client.is_cut_off()
    daemon.stop()


def _is_refused(client: RawClient) -> bool:
    """Whether the daemon has begun to end: whoever came right before has got a session."""
    answer = client.hello()
    return isinstance(answer, Refused) and answer.kind == "DaemonLost"


def test_an_end_by_the_deadline_cuts_off_who_still_holds(
    make_daemon: MakeDaemon, connect: Connect
) -> None:
    daemon = make_daemon(shutdown_seconds=0.2)
    client = connect(daemon).open()
    client.stored(b"held")
    daemon.server.stop()
    assert client.is_cut_off()
    daemon.stop()


def test_an_end_that_fails_leaves_no_socket_and_no_lock(
    tmp_path: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end() -> None:
        server = Server(make_config())
        await server.open()
        monkeypatch.setattr(server._gateway, "end_all", lambda _cause: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await server.close()

    uvloop.run(end())
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_of_its_clients_ends_with_the_last(
    make_daemon: MakeDaemon, connect: Connect, ticks_often: None
) -> None:
    daemon = make_daemon(exit_with_last_client=True)
    first, second = connect(daemon).open(), connect(daemon).open()
    first.close()
    second.stored(b"served")
    second.send(Goodbye())
    wait_until(lambda: not daemon.is_alive)


def test_a_daemon_whose_device_is_broken_ends(
    make_daemon: MakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch, ticks_often: None
) -> None:
    """Under MPS no process could use the GPU as long as it lived."""
    daemon = make_daemon()
    client = connect(daemon).open()
    client.stored(b"held")
    monkeypatch.setattr(CpuLane, "fault", "cuda:0: CUDA_ERROR_LAUNCH_FAILED")
    client.close()
    wait_until(lambda: not daemon.is_alive)
    assert isinstance(daemon.error, LaneUnavailable)
    assert "CUDA_ERROR_LAUNCH_FAILED" in str(daemon.error)
