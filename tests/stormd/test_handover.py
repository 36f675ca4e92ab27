"""What one daemon leaves to the next: whose it is, and what of it cannot be used."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from support.raw_client import RawClient
from support.waiting import wait_until

from stormd.config import Config
from stormd.handover import CONTROL, Handover
from stormd.memory.arena import Space
from stormd.memory.journal import FORMAT, Journal
from stormd.memory.shared_memory import sealed_memory
from stormd.notify import Notifier
from stormd.protocol import PROTOCOL_VERSION, Entries, ListEntries, Refused, Resume, Stored, Welcome

FLAGS = ["--device=cpu", "--resumable", "--resume-seconds=60"]


@pytest.fixture
def resumable() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=FLAGS) as daemon:
        yield daemon


def replaced(daemon: ChildDaemon, number: int = signal.SIGKILL) -> None:
    """End the daemon that serves, and wait until the next does."""
    before = daemon.status()["pid"]
    os.kill(before, number)
    wait_until(lambda: not Path(f"/proc/{before}").exists())
    assert daemon.status()["pid"] != before


def resume(welcome: Welcome, **changes: Any) -> Resume:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "epoch": welcome.epoch,
        "session": welcome.session,
        "secret": welcome.secret,
        "pid": os.getpid(),
        "uid": os.getuid(),
    }
    return Resume(**fields | changes)


# --- who may go on with a session -------------------------------------------------------------


def refusal(daemon: ChildDaemon, asked: Resume) -> Refused:
    client = RawClient(daemon.address)
    answer = client.ask(asked)
    client.close()
    assert isinstance(answer, Refused)
    return answer


def test_who_may_go_on_with_a_session_and_with_what(resumable: ChildDaemon) -> None:
    clients = [RawClient(resumable.address).open() for _ in range(3)]
    welcomes = [client.welcome for client in clients if client.welcome is not None]
    entry = clients[2].store(b"here" * 1024)
    clients[2].wait_for(Stored)
    refusal(resumable, resume(welcomes[0]))  # it is open
    replaced(resumable)
    _assert_is_for_who_knows_its_secret(resumable, welcomes[0])
    _assert_ends_with_other_memory(resumable, welcomes[1])
    # One that comes twice is heard on the later connection.
    first, second = RawClient(resumable.address), RawClient(resumable.address)
    assert isinstance(first.ask(resume(welcomes[2])), Welcome)
    assert isinstance(second.ask(resume(welcomes[2])), Welcome)
    assert second.ask(ListEntries(0)) == Entries([entry], True)
    second.release(entry)
    for one in (first, second, *clients):
        one.close()


def _assert_is_for_who_knows_its_secret(daemon: ChildDaemon, welcome: Welcome) -> None:
    for changes in ({"epoch": 1}, {"session": 1}, {"secret": b"x" * 16}, {"secret": b""}):
        refused = refusal(daemon, resume(welcome, **changes))
        assert (refused.kind, "has no session" in refused.detail) == ("DaemonLost", True)
        assert [one["orphaned"] for one in daemon.status()["sessions"]] == [True] * 3
    other = resume(welcome, protocol=PROTOCOL_VERSION + 1)
    assert refusal(daemon, other).kind == "ProtocolMismatch"


def _assert_ends_with_other_memory(daemon: ChildDaemon, welcome: Welcome) -> None:
    """A client that sends other shared memory than it had has no session any more."""
    client = RawClient(daemon.address)
    again = client.ask(resume(welcome))
    assert isinstance(again, Welcome)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, again.staging_bytes)
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(60)
        line.connect(again.lifeline)
        socket.send_fds(line, [again.token], [unsealed, unsealed])
        assert line.recv(1) == b""
    wait_until(lambda: len(daemon.status()["sessions"]) == 2)
    os.close(unsealed)
    client.close()


def test_a_client_that_resumes_without_its_memory_costs_no_descriptors(
    resumable: ChildDaemon,
) -> None:
    def resume_in_vain(welcome: Welcome | None) -> None:
        with RawClient(resumable.address) as client:
            again = client.ask(resume(welcome))
            assert isinstance(again, Welcome)
            assert client.connect_lifeline(again.lifeline, again.token) == []
            assert client.is_cut_off()

    def descriptors() -> int:
        pid = resumable.status()["pid"]
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    with ExitStack() as held:
        clients = [held.enter_context(RawClient(resumable.address)).open() for _ in range(5)]
        replaced(resumable)
        resume_in_vain(clients[0].welcome)
        most = descriptors()
        for client in clients[1:]:
            resume_in_vain(client.welcome)
        wait_until(lambda: descriptors() <= most)


def test_a_session_that_this_daemon_has_opened_is_not_resumed(resumable: ChildDaemon) -> None:
    """It has its memory; a lane that attached it again would lose track of that."""
    with RawClient(resumable.address) as client:
        welcome = client.hello()
        assert isinstance(welcome, Welcome)
        assert refusal(resumable, resume(welcome)).kind == "DaemonLost"
        page, staging = client.connect_lifeline(welcome.lifeline, welcome.token)
        os.close(page)
        os.close(staging)


# --- what outlives ----------------------------------------------------------------------------


def test_the_cache_outlives_its_daemon_but_not_an_end_in_order(resumable: ChildDaemon) -> None:
    tensors = {"first": torch.randn(1000, 100), "second": torch.randn(1000, 100)}
    for (name, tensor), number in zip(
        tensors.items(), (signal.SIGKILL, signal.SIGUSR2), strict=True
    ):
        with storm.connect(resumable.address) as client:
            client.cache.put(name, tensor)
        replaced(resumable, number)
    for name, left in (("first", ["first", "second"]), ("second", ["second"])):
        with storm.connect(resumable.address) as client:
            found = {kept: client.cache.get(kept) for kept in tensors}
            assert [kept for kept, tensor in found.items() if tensor is not None] == left
            assert all(torch.equal(found[kept], tensors[kept]) for kept in left)
            assert client.cache.delete(name)
        if name == "first":
            replaced(resumable)
    os.kill(resumable.pid, signal.SIGTERM)
    wait_until(lambda: not Path(resumable.address.removeprefix("ipc://")).exists())


# --- what cannot be used ----------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(address=f"ipc://{tmp_path}/s", pool_bytes=1 << 20, cache_bytes=1 << 20)


def handed_over(config: Config, **changes: Any) -> dict[str, int]:
    """Return the descriptors that a daemon of these settings leaves, with a session."""
    handover = Handover(Notifier(), {})
    pool = os.dup(handover.pool_file(config.host_bytes))
    handover.records()
    handover.record_layout(config, [Space(1 << 20), Space(1 << 20)])
    journal = handover._journal
    for kind, payload in changes.items():
        journal.write(int(kind.removeprefix("kind")), payload)
    kept = {"stormd-pool": pool, "stormd-journal": os.dup(journal.descriptor)}
    handover.close()
    return kept


def test_memory_in_which_nobody_has_anything_is_given_up(config: Config) -> None:
    handover = Handover(Notifier(), handed_over(config))
    assert handover.take(config) == config
    assert handover.state is None
    handover.close()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("format", "format 2"),
        ("kind3", "cannot be read"),  # a record that is too short
        ("kind77", "77"),  # one of a later version
        ("size", "not of the size"),
    ],
)
def test_what_cannot_be_read_is_lost_and_said_so(
    config: Config,
    damage: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("stormd"), "propagate", True)
    kept = handed_over(config, **({damage: b"short"} if damage.startswith("kind") else {}))
    if damage == "format":
        os.pwrite(kept["stormd-journal"], struct.pack("<I", FORMAT + 1), 8)
    if damage == "size":
        with_session(kept["stormd-journal"])
        os.close(kept["stormd-pool"])
        kept["stormd-pool"] = sealed_memory("small", 4096)
    handover = Handover(Notifier(), kept)
    assert handover.take(config) == config
    assert handover.state is None
    assert "what an earlier daemon held is lost" in caplog.text
    assert said in caplog.text
    handover.close()


def with_session(descriptor: int) -> None:
    """Write down that there is something in the cache."""
    journal, _ = Journal.open(os.dup(descriptor))
    item = ["name", "float32", [1], 4, 4, 0, 0, 1e9, [[4, "raw", 256, [1 << 20, 256]]]]
    journal.write(4, msgpack.packb(item))
    journal.close()


def test_settings_of_the_memory_stay_while_it_is_used(
    config: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("stormd"), "propagate", True)
    kept = handed_over(config)
    with_session(kept["stormd-journal"])
    handover = Handover(Notifier(), kept)
    wanted = replace(config, pool_bytes=2 << 20, encode_threads=3)
    assert handover.take(wanted) == replace(config, encode_threads=3)
    assert handover.state is not None
    assert "pool_bytes keep their earlier values" in caplog.text
    handover.close()


def test_a_socket_that_is_bound_elsewhere_is_not_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "old"))
        handover = Handover(Notifier(), {CONTROL: os.dup(listening.fileno())})
        assert handover.listening(CONTROL, tmp_path / "new") is None
        handover.close()
        handover = Handover(Notifier(), {CONTROL: os.dup(listening.fileno())})
        found = handover.listening(CONTROL, tmp_path / "old")
        found.close()
        handover.close()


def test_what_was_stored_so_far_is_known_to_the_next_daemon(resumable: ChildDaemon) -> None:
    with storm.connect(resumable.address) as client:
        offload = client.offload(min_bytes=1)
        with offload:
            loss = torch.linspace(0, 1, 1 << 16, requires_grad=True).exp().sin().sum()
        assert offload.stats().stored_bytes > 0
        stored = resumable.status()["throughput"]["store"]["raw_bytes"]
        replaced(resumable, signal.SIGUSR2)
        assert resumable.status()["earlier"]["raw_bytes"] == stored
        replaced(resumable, signal.SIGUSR2)
        state = resumable.status()
        assert state["earlier"]["raw_bytes"] == stored
        assert state["throughput"]["store"]["raw_bytes"] == 0
        loss.backward()
