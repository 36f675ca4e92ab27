"""A daemon process and a client of it; after each test the daemon holds nothing."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import storm_client as storm
from storm_client import connecting
from storm_client.lanes.cpu import CpuLane
from storm_client.native.build import BuildError, build
from storm_client.transport import memory_pressure, sessions
from support.daemon_process import DaemonProcess, daemons
from support.daemon_thread import DaemonThread
from support.devices import DEVICES
from support.following import PATHS, Followed, follow_by
from support.in_place_lane import InPlaceCpuLane, freed_memory_is_overwritten
from support.late_lane import LateCpuLane
from support.patience import patient_clients
from support.planning import replay_all
from support.scripts import Scripts
from support.waiting import wait_until

from stormd.config import Config
from stormd.lanes import opening

DEADLINE_SECONDS = 60.0
MIB = 1 << 20

SMALL_STAGING = ("--staging-bytes-cuda", "256KiB", "--part-bytes-cuda", "64KiB")
"""So small that what is saved on a GPU has to leave and come back, instead of waiting there."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Run a test once a device; that of a GPU is marked."""
    return request.param


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Run a test once for each kind of code that follows steps."""
    return request.param


@pytest.fixture
def followed(path: str, monkeypatch: pytest.MonkeyPatch) -> Followed:
    """Have steps be followed by that code, by plans that recompute all that they can."""
    replay_all(monkeypatch)
    return follow_by(path, monkeypatch)


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., DaemonProcess]]:
    """Start daemons for one test."""
    with daemons() as make:
        yield make


@pytest.fixture(scope="session")
def daemon() -> Iterator[DaemonProcess]:
    """The daemon that most tests share."""
    with daemons() as make:
        yield make("--pool-bytes", "256MiB", *SMALL_STAGING)


@pytest.fixture(scope="session")
def scripts() -> Iterator[Scripts]:
    """Run scripts in processes of their own, for which PyTorch is loaded once."""
    with Scripts() as made:
        yield made


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[storm.Client]:
    """A client of the shared daemon, which must hold nothing when the test is over."""
    with storm.connect(daemon.address, embedded="never", timeout=DEADLINE_SECONDS) as client:
        yield client
        gc.collect()  # a failed test's traceback may be what holds a graph
        client._supply.sessions.settle(DEADLINE_SECONDS)  # what was saved last may not have left
        wait_until(lambda: _holds_nothing(client), DEADLINE_SECONDS, client.status)
        assert client.status().pool.used_bytes == 0
        for session in client._supply.sessions.open:
            with session.connection.lock:
                session.transfers.assert_invariants()


def _holds_nothing(client: storm.Client) -> bool:
    """Tell whether the daemon holds nothing; if not, look for garbage once more.

    A backward pass that failed in a GPU's thread lives until that thread has let its error go.
    """
    if client.status().entries == 0:
        return True
    gc.collect()
    return False


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Have compiled code follow steps, where there is a compiler, from the first test on."""
    with suppress(BuildError):
        build()


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Give the daemon time: others may use its device and processors."""
    with patient_clients():
        yield


@pytest.fixture
def no_daemon_by_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep a test from any daemon that this machine may run."""
    monkeypatch.delenv("STORMD_ADDRESS", raising=False)
    monkeypatch.setattr(connecting, "_defaults", lambda: [f"ipc://{tmp_path}/none"])


@pytest.fixture
def lane_kind() -> type[CpuLane]:
    """The kind of lane that `lanes` are; a file may have another."""
    return InPlaceCpuLane


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch, lane_kind: type[CpuLane]) -> list[CpuLane]:
    """The lanes, which work in place, of the sessions that the test opens."""
    opened: list[CpuLane] = []

    def lane() -> CpuLane:
        opened.append(lane_kind())
        return opened[-1]

    monkeypatch.setattr(sessions, "CpuLane", lane)
    monkeypatch.setattr(memory_pressure, "_observe", lambda: None)
    return opened


@pytest.fixture
def late_lane_kind() -> type[LateCpuLane]:
    """The kind of lane that the daemons of `make_late_daemon` have; a file may have another."""
    return LateCpuLane


@pytest.fixture
def make_late_daemon(
    lanes: list[InPlaceCpuLane],
    late_lane_kind: type[LateCpuLane],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., DaemonThread]]:
    """Start daemons for one test that read what `lanes` store as late as they may.

    They are threads, so that a test can reach their memory.
    """

    class Lane(late_lane_kind):  # type: ignore[misc,valid-type]
        @staticmethod
        def catch_up() -> None:
            for lane in lanes:
                lane.unread.read_all()

    monkeypatch.setattr(opening, "CpuLane", Lane)
    started: list[DaemonThread] = []
    with (
        tempfile.TemporaryDirectory(prefix="storm-") as base,
        freed_memory_is_overwritten(),
    ):

        def make(**options: int) -> DaemonThread:
            address = f"ipc://{base}/{len(started)}.sock"
            sizes = {"pool_bytes": 64 * MIB, "cache_bytes": MIB, "part_bytes_cpu": 256 << 10}
            sizes |= options
            started.append(DaemonThread(Config(address=address, device="cpu", **sizes)))
            return started[-1]

        yield make
        try:
            for daemon in started:
                daemon.wait_until_empty()
        finally:
            for daemon in started:
                daemon.stop()
