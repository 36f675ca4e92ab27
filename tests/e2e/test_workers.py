"""A front and two worker processes are one daemon: for trainers, operators, and who means harm.

Real processes; the workers' devices are cpu lanes, so that it needs no GPU.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import storm_client as storm
import torch
from bench.deaths import last_report
from prometheus_client.parser import text_string_to_metric_families
from storm_bench.child_daemon import ChildDaemon
from storm_client.lanes.cpu import CpuLane
from storm_client.transport.sessions import Sessions
from support.raw_client import RawClient
from support.trainers import Trainers, workers_of
from support.waiting import wait_until

from stormd.errors import ChildFailed
from stormd.protocol import (
    PROTOCOL_VERSION,
    Envelope,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Refused,
    Rejected,
    Status,
    StatusRequest,
    Stored,
    Welcome,
    encode,
)

KIB, MIB = 1 << 10, 1 << 20
FLAGS = ["--pool-bytes=64MiB", "--cache-bytes=8MiB", "--device=cpu", "--workers=2"]
MAX_SESSIONS = 4
MAX_ENTRIES = "max_entries_per_session = {}\n"


@pytest.fixture
def daemon() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=FLAGS) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def metrics_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "stormd.toml"
    path.write_text(MAX_ENTRIES.format(10_000))
    return path


@pytest.fixture(scope="module")
def lasting(metrics_address: str, settings: Path) -> Iterator[ChildDaemon]:
    more = [f"--metrics-address={metrics_address}", f"--config={settings}"]
    with ChildDaemon(flags=[*FLAGS, *more, f"--max-sessions={MAX_SESSIONS}"]) as daemon:
        yield daemon


@pytest.fixture
def shared(lasting: ChildDaemon) -> ChildDaemon:
    """The daemon of the tests that leave its processes as they are; nobody has a session there."""
    wait_until(lambda: lasting.status()["session_count"] == 0, found=lasting.status)
    return lasting


def worker_of(daemon: ChildDaemon, client: RawClient) -> dict[str, Any]:
    """Return the worker that serves a client: the one whose lifelines its is one of."""
    index = int(client.welcome.lifeline.rpartition(".")[2])
    return workers_of(daemon)[index]


def test_each_of_two_trainers_has_its_worker(shared: ChildDaemon, trainers: Trainers) -> None:
    first, second = (trainers.start(shared.address) for _ in range(2))
    for pid in (first, second):
        trainers.expect(pid, "ready", *["same"] * 5)
    state = shared.status()
    assert [one["sessions"] for one in state["workers"]] == [1, 1]
    assert {one["pid"] for one in state["sessions"] if one["device"] == "cpu"} == {first, second}
    for pid in (first, second):
        trainers.expect(pid, *["same"] * 3)


def test_a_killed_worker_ends_its_sessions_alone(daemon: ChildDaemon, trainers: Trainers) -> None:
    """Those of the other go on, and one that is started in its place serves who comes next."""
    pids = [trainers.start(daemon.address)]
    trainers.expect(pids[0], "ready", "same")
    killed = next(one for one in workers_of(daemon) if one["sessions"])
    pids.append(trainers.start(daemon.address))
    trainers.expect(pids[1], "ready", "same")
    os.kill(killed["pid"], signal.SIGKILL)
    last_report(trainers, pids[0])
    trainers.expect(pids[1], *["same"] * 5)

    def is_back() -> bool:
        found = workers_of(daemon)[killed["index"]]
        return found["phase"] == "serving" and found["starts"] == 2

    wait_until(is_back, 60.0, lambda: workers_of(daemon))
    wait_until(lambda: daemon.status()["session_count"] <= 2)
    third = trainers.start(daemon.address)
    trainers.expect(third, "ready", *["same"] * 3)
    assert [one["sessions"] for one in workers_of(daemon)] == [1, 1]
    assert daemon.status()["counters"]["ended"]["failed"] == 1


def test_devices_of_one_process_have_a_connection_each(
    shared: ChildDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model on two devices has: the session of each is with the worker of its device."""
    monkeypatch.setattr("storm_client.transport.sessions.lane_for", lambda device: CpuLane())
    sessions = Sessions(shared.address, 30.0)
    try:
        for number in range(2):
            assert sessions.of(torch.device("cuda", number)) is not None
        busy = [one["sessions"] for one in workers_of(shared)]
        assert min(busy) == 1
    finally:
        sessions.close()
    assert [one["sessions"] for one in workers_of(shared)] == [0, 0]


def test_a_dead_workers_work_stays_counted_and_nothing_outlives_a_killed_front(
    daemon: ChildDaemon,
) -> None:
    with RawClient(daemon.address) as client:
        client.open().stored(b"x" * KIB)
        assert daemon.status()["throughput"]["store"]["operations"] == 1
        pid = worker_of(daemon, client)["pid"]
        os.kill(pid, signal.SIGKILL)
        assert client.is_cut_off()
        log = Path(daemon.address.removeprefix("ipc://")).parent / "log"
        ended = re.compile(rf"a worker has ended: signal SIGKILL .*\bpid={pid}\b")
        wait_until(lambda: ended.search(log.read_text()) is not None)
        wait_until(lambda: daemon.status()["entries"] == 0)
        assert daemon.status()["throughput"]["store"]["operations"] == 1
    with RawClient(daemon.address) as client:
        client.open().stored(b"x" * KIB)
        below = psutil.Process(daemon.pid).children(recursive=True)
        os.kill(daemon.pid, signal.SIGKILL)
        assert client.is_cut_off()
        gone, alive = psutil.wait_procs(below, timeout=60.0)
        assert (bool(gone), alive) == (True, [])


def test_a_front_that_is_told_to_end_lets_clients_fetch_theirs(daemon: ChildDaemon) -> None:
    below = psutil.Process(daemon.pid).children(recursive=True)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(daemon.address)).open() for _ in range(2)]
        entries = [client.stored(bytes([n]) * KIB) for n, client in enumerate(clients)]
        os.kill(daemon.pid, signal.SIGTERM)
        for number, (client, entry) in enumerate(zip(clients, entries, strict=True)):
            wait_until(lambda client=client: _is_draining(client))
            assert client.restored(entry, KIB, offset=KIB) == bytes([number]) * KIB
            client.release(entry)
        for client in clients:
            assert client.is_cut_off()
    directory = Path(daemon.address.removeprefix("ipc://")).parent
    psutil.wait_procs([*below, psutil.Process(daemon.pid)], timeout=60.0)
    assert not any(process.is_running() for process in below)
    assert [one.name for one in directory.iterdir()] == ["log"]


def _is_draining(client: RawClient) -> bool:
    entry = client.store(b"y")
    answer = _answer(client, entry)
    if isinstance(answer, Stored):
        client.release(entry)
        return False
    return bool(answer.reason == "draining")


def test_status_and_metrics_add_up(shared: ChildDaemon, metrics_address: str) -> None:
    url = f"http://{metrics_address}/metrics"
    raw = ("stormd_operations_total", (("codec", "raw"), ("direction", "store")))
    before, stored_before = shared.status(), _samples(url).get(raw, 0)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(shared.address)).open() for _ in range(3)]
        for number, client in enumerate(clients, 1):
            entry = client.stored(b"x" * number * KIB)
            client.restored(entry, number * KIB, offset=64 * KIB)
        state = shared.status()
        assert (state["entries"], state["raw_bytes"]) == (3, 6 * KIB)
        assert state["pool"]["capacity_bytes"] == 64 * MIB
        assert state["pool"]["used_bytes"] == sum(one["used_bytes"] for one in state["sessions"])
        assert sorted(one["entries"] for one in state["sessions"]) == [1, 1, 1]
        for way in ("store", "restore"):
            now, then = state["throughput"][way], before["throughput"][way]
            assert now["operations"] - then["operations"] == 3
            assert now["raw_bytes"] - then["raw_bytes"] == 6 * KIB
        assert state["counters"]["sessions"] - before["counters"]["sessions"] == 3
        assert sorted(one["sessions"] for one in state["workers"]) == [1, 2]
        assert state["cache"]["capacity_bytes"] == 8 * MIB
        found = _samples(url)
        assert found["stormd_entries", ()] == 3
        assert found["stormd_pool_used_bytes", ()] == state["pool"]["used_bytes"]
        assert found["stormd_sessions", (("device", "cpu"),)] == 3
        assert found[raw] - stored_before == 3
        served = [value for (name, _), value in found.items() if name == "stormd_worker_serving"]
        assert served == [1, 1]


def _samples(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_session_that_asks_its_worker_is_told_of_all(shared: ChildDaemon) -> None:
    with RawClient(shared.address) as one, RawClient(shared.address) as other:
        for client in (one, other):
            client.open().stored(b"x" * KIB)
        for client in (one, other):
            state = client.ask(StatusRequest()).state
            assert (state["entries"], len(state["sessions"]), len(state["workers"])) == (2, 2, 2)
            assert state["pid"] == shared.pid


def test_places_are_of_all_workers_together(shared: ChildDaemon) -> None:
    with ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(shared.address)).open() for _ in range(MAX_SESSIONS)
        ]
        with RawClient(shared.address) as one_more:
            refused = one_more.hello()
            assert isinstance(refused, Refused)
            assert refused.kind == "QuotaExceeded"
        for _ in range(10):  # a place that was left is free for who comes next, at once
            client = clients.pop(0)
            client.send(Goodbye())
            assert client.is_cut_off()
            clients.append(stack.enter_context(RawClient(shared.address)).open())


def test_a_users_quota_is_of_all_workers_together() -> None:
    """Two sessions on two workers that store at once never hold more than their user may."""
    quota = 256 * KIB
    with ChildDaemon(flags=[*FLAGS, f"--uid-quota-bytes={quota}"]) as daemon, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(daemon.address)).open() for _ in range(2)]
        assert len({worker_of(daemon, client)["pid"] for client in clients}) == 2
        held: list[list[int]] = [[], []]
        for _ in range(6):
            sent = [[client.store(os.urandom(32 * KIB)) for _ in range(3)] for client in clients]
            for number, client in enumerate(clients):
                held[number] += [entry for entry in sent[number] if _is_stored(client, entry)]
            used = daemon.status()["pool"]["used_bytes"]
            assert used <= quota
        assert used > quota - 2 * 64 * KIB
        clients[0].release(*held[0])
        wait_until(lambda: daemon.status()["pool"]["used_bytes"] < used)
        entry = clients[1].store(os.urandom(32 * KIB))
        assert _is_stored(clients[1], entry)


def test_a_worker_alone_has_what_others_do_not_use_and_gives_it_back() -> None:
    """Of a pool that is taken as it is used. The sum is never more than the pool."""
    flags = ["--pool-bytes=256MiB", "--cache-bytes=0", "--device=cpu", "--workers=2"]
    flags += ["--pool-commit=use", "--part-bytes-cpu=4MiB"]
    with ChildDaemon(flags=flags) as daemon, ExitStack() as stack:
        first, second = (stack.enter_context(RawClient(daemon.address)) for _ in range(2))
        first.open()
        held = _fill(first, 256)
        assert len(held) * 4 * MIB > 160 * MIB, "its share is half of 256 MiB"
        assert _committed(daemon) <= 264 * MIB
        second.open()
        _fill(second, 256)
        assert _committed(daemon) <= 264 * MIB
        first.release(*held)

        def has_its_share() -> bool:
            _fill(second, 1)
            own = worker_of(daemon, second)["pool"]
            assert _committed(daemon) <= 264 * MIB
            return bool(own["used_bytes"] > 110 * MIB)

        wait_until(has_its_share, 60.0, lambda: workers_of(daemon))


def _fill(client: RawClient, most: int) -> list[int]:
    """Store pieces of 4 MiB that cannot be compressed until one is refused; return the entries."""
    data, held = os.urandom(4 * MIB), []
    while len(held) < most:
        entry = client.store(data)
        answer = _answer(client, entry)
        if not isinstance(answer, Stored):
            assert answer.reason == "pool_full"
            break
        held.append(entry)
    return held


def _committed(daemon: ChildDaemon) -> int:
    return int(daemon.status()["pool"]["committed_bytes"])


def _is_stored(client: RawClient, entry: int) -> bool:
    answer = _answer(client, entry)
    assert isinstance(answer, Stored) or answer.reason == "quota", answer
    return isinstance(answer, Stored)


def test_the_cache_is_one_for_all(shared: ChildDaemon) -> None:
    tensor = torch.arange(1000.0)
    with storm.connect(shared.address, embedded="never") as client:
        client.cache.put("shared", tensor)
    with storm.connect(shared.address, embedded="never") as client:
        assert torch.equal(client.cache.get("shared"), tensor)
    state = shared.status()
    assert (state["cache"]["items"], state["pool"]["used_bytes"]) == (1, 0)


def test_settings_that_are_read_again_reach_the_workers(
    shared: ChildDaemon, settings: Path
) -> None:
    for number in (1, 10_000):
        settings.write_text(MAX_ENTRIES.format(number))
        os.kill(shared.pid, signal.SIGHUP)
        with RawClient(shared.address) as client:
            client.open()

            def is_so(client: RawClient = client, is_limited: bool = number == 1) -> bool:
                entries = [client.store(b"x"), client.store(b"y")]
                refused = [not isinstance(_answer(client, entry), Stored) for entry in entries]
                client.release(*entries)
                return any(refused) == is_limited

            wait_until(is_so)


def test_settings_that_do_not_fit_a_worker_are_not_taken(tmp_path: Path) -> None:
    """Not even by a worker that is started later: it could not begin with them."""
    settings = tmp_path / "stormd.toml"
    settings.touch()
    with ChildDaemon(flags=[*FLAGS, "--max-sessions=1", f"--config={settings}"]) as daemon:
        settings.write_text('session_share_bytes = "48MiB"\n')
        os.kill(daemon.pid, signal.SIGHUP)
        log = Path(daemon.address.removeprefix("ipc://")).parent / "log"
        wait_until(lambda: "settings not reloaded" in log.read_text())
        os.kill(workers_of(daemon)[0]["pid"], signal.SIGKILL)

        def is_back() -> bool:
            found = workers_of(daemon)[0]
            return (found["phase"], found["starts"]) == ("serving", 2)

        wait_until(is_back, 60.0, lambda: workers_of(daemon))


def _answer(client: RawClient, entry: int) -> Any:
    return client.wait(
        lambda envelope: (
            isinstance(envelope.message, Stored | Rejected) and envelope.message.entry == entry
        )
    ).message


def test_a_worker_that_hangs_harms_nobody_else(shared: ChildDaemon) -> None:
    """Stopped, it answers nobody; the front and the other worker serve, and say what they know."""
    with RawClient(shared.address) as one, RawClient(shared.address) as other:
        one.open()
        other.open()
        hanging = worker_of(shared, one)
        os.kill(hanging["pid"], signal.SIGSTOP)
        try:
            entry = other.stored(b"x" * KIB)
            assert shared.status()["entries"] == 1
            assert other.restored(entry, KIB, offset=KIB) == b"x" * KIB
        finally:
            os.kill(hanging["pid"], signal.SIGCONT)
        assert one.restored(one.stored(b"y" * KIB), KIB, offset=KIB) == b"y" * KIB


def test_requests_behind_one_for_the_state_wait_for_it(shared: ChildDaemon) -> None:
    """Else a client could ask faster than it is answered, and all answers would come at once."""
    stopped = workers_of(shared)[0]["pid"]
    with RawClient(shared.address) as client:
        os.kill(stopped, signal.SIGSTOP)  # the front waits a second for what it says
        try:
            client.send(StatusRequest(), Ping())
            client.wait_for(Refused)
            assert isinstance(client.received[0].message, Status)
        finally:
            os.kill(stopped, signal.SIGCONT)


# --- who means harm -------------------------------------------------------------------------


def test_what_comes_right_behind_hello_is_heard_by_the_worker(shared: ChildDaemon) -> None:
    """A client need not wait for Welcome; what it sends meanwhile is the session's."""
    hello = Hello(
        protocol=PROTOCOL_VERSION, features=[], pid=os.getpid(), uid=os.getuid(),
        device="cpu", device_uuid="", staging_bytes=0, name="raw",
    )  # fmt: skip
    with RawClient(shared.address) as client:
        client.send_bytes(encode([Envelope(1, hello), Envelope(2, Ping())]))
        client.send_bytes(encode([Envelope(3, StatusRequest())]))
        for request, kind in enumerate((Welcome, Pong, Status), 1):
            found = client.wait(lambda one, request=request: one.request == request)  # type: ignore[misc]
            assert isinstance(found.message, kind)
        client.send(Goodbye())  # without a lifeline its place would be free after seconds


@pytest.mark.parametrize(
    ("changes", "kind", "detail"),
    [
        ({"protocol": 1}, "ProtocolMismatch", "protocol 1"),
        ({"uid": 12345}, "UsageError", "the kernel says"),
        ({"device": "cuda", "device_uuid": "x" * 64}, "UsageError", "no cuda lane"),
        ({"device": "cuda", "features": ["cache"]}, "UsageError", "name cpu"),
    ],
)
def test_a_hello_that_cannot_be_served_reaches_no_worker(
    shared: ChildDaemon, changes: dict[str, Any], kind: str, detail: str
) -> None:
    before = shared.status()["counters"]["sessions"]
    with RawClient(shared.address) as client:
        refused = client.hello(**changes)
        assert isinstance(refused, Refused)
        assert refused.kind == kind
        assert detail in refused.detail
        client.open()  # with a lifeline: the session ends with the client, not after seconds
    assert shared.status()["counters"]["sessions"] == before + 1


def test_hellos_without_lifelines_keep_nobody_out(shared: ChildDaemon) -> None:
    """Their places are taken back, in the worker as well, for who means it."""
    with ExitStack() as stack:
        idle = [stack.enter_context(RawClient(shared.address)) for _ in range(3 * MAX_SESSIONS)]
        for client in idle:
            client.hello()
        with RawClient(shared.address) as client:

            def is_served() -> bool:
                return isinstance(client.hello(), Welcome)

            wait_until(is_served)
            client.send(Goodbye())
        for client in idle:
            client.send(Goodbye())
        wait_until(lambda: shared.status()["session_count"] == 0, found=shared.status)
        assert [one["sessions"] for one in workers_of(shared)] == [0, 0]


def test_a_connection_whose_session_has_ended_gets_none_that_the_front_does_not_know(
    shared: ChildDaemon,
) -> None:
    """It would take no place, and be shown nowhere."""
    with RawClient(shared.address) as client:
        client.open().send(Goodbye())
        assert client.is_cut_off()
        refused = client.hello()
        assert isinstance(refused, Refused)
        assert (refused.kind, "connect again" in refused.detail) == ("DaemonLost", True)


def test_garbage_behind_a_session_ends_its_sender_alone(shared: ChildDaemon) -> None:
    before = shared.status()["counters"]["malformed"]
    with RawClient(shared.address) as good, RawClient(shared.address) as bad:
        good.open()
        bad.open()
        bad.send_bytes(b"\xc1" * 100)
        assert isinstance(bad.wait(lambda one: one.request == 0).message, Refused)
        assert isinstance(good.ask(Ping()), Pong)
        assert [one["phase"] for one in workers_of(shared)] == ["serving"] * 2
        assert shared.status()["counters"]["malformed"] == before + 1


def test_a_token_that_nobody_was_given_opens_no_lifeline(shared: ChildDaemon) -> None:
    with RawClient(shared.address) as client:
        client.open()
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(client.welcome.lifeline)
            line.sendall(bytes(16))
            assert line.recv(1) == b""
        assert isinstance(client.ask(Ping()), Pong)


def test_a_start_that_fails_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' processes do not have this one's mark in their environment."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK_OF_A_TEST", mark)
    flags = ["--device=cpu", "--workers=2", "--cache-bytes=0", "--spill-bytes=8MiB"]
    with (
        pytest.raises(ChildFailed, match="/proc/nowhere"),
        ChildDaemon(flags=[*flags, "--pool-bytes=256MiB", "--spill-path=/proc/nowhere"]),
    ):
        pass
    found = [one.info for one in psutil.process_iter(["pid", "cmdline", "environ"])]
    assert not [one for one in found if mark in (one["environ"] or {}).values()]
