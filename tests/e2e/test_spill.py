"""Training whose activations go to a disk: the same bits; a disk that fails ends only itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import storm_client as storm
import torch
from bench.disk_faults import run
from storm_client.errors import ActivationLost
from storm_client.transport import connection
from support.chains import chain, gradient, leaf
from support.daemon_thread import DaemonThread
from support.failing_file import FailingFile, MemoryFile
from support.spilling import ENCRYPT, ENCRYPTIONS, skip_without_disk
from support.waiting import wait_until

from stormd.config import Config
from stormd.spill import opening, tier

MIB = 1 << 20
POOL_BYTES = 12 * MIB
LENGTH = 52
"""Of a chain that stores 53 tensors of 1 MiB each."""

DEADLINE = 60.0
STORED_BYTES = 4 * POOL_BYTES

Start = Callable[..., DaemonThread]


@pytest.fixture
def start(tmp_path: Path, place: Path) -> Iterator[Start]:
    """Start daemons of a small pool with a tier on disk."""
    skip_without_disk(tmp_path)
    started: list[DaemonThread] = []

    def made(**settings: Any) -> DaemonThread:
        config = Config(
            address=f"ipc://{place}/{len(started)}.sock",
            device="cpu",
            pool_bytes=POOL_BYTES,
            cache_bytes=0,
            part_bytes_cpu=MIB,
            staging_bytes_cpu=4 * MIB,
            spill_path=str(tmp_path),
            **{"spill_bytes": 128 * MIB, "spill_encrypt": ENCRYPT, **settings},
        )
        started.append(DaemonThread(config))
        return started[-1]

    yield made
    for daemon in started:
        daemon.stop()
    assert not list(tmp_path.iterdir())


def _step(client: storm.Client) -> tuple[torch.Tensor, storm.OffloadStats]:
    """Return a gradient, and what its step stored."""
    x = leaf()
    with client.offload(min_bytes=1, codec="raw", replay=False, budget="least") as offload:
        loss = chain(x, LENGTH)
    return gradient(loss, x), offload.stats()


def _expected() -> torch.Tensor:
    x = leaf()
    return gradient(chain(x, LENGTH), x)


@pytest.mark.parametrize("encrypt", ENCRYPTIONS)
def test_a_pool_of_a_quarter_of_what_is_stored(start: Start, encrypt: str) -> None:
    daemon = start(spill_encrypt=encrypt)
    expected = _expected()
    with storm.connect(daemon.address, embedded="never") as client:
        for _ in range(3):
            found, stats = _step(client)
            assert torch.equal(found, expected)
            assert stats.kept_bytes == 0
            assert stats.stored_bytes > STORED_BYTES
            daemon.check()
        spill = daemon.status()["spill"]
        assert spill["write"]["bytes"] > 2 * STORED_BYTES
        assert spill["read"]["bytes"] > 2 * STORED_BYTES
        assert (spill["encrypted"], spill["ended"]) == (encrypt == "on", "")
    daemon.wait_until_empty()
    assert daemon.status()["spill"]["used_bytes"] == 0


def test_a_disk_that_is_full_leaves_tensors_with_the_trainer(start: Start) -> None:
    daemon = start(spill_bytes=8 * MIB)
    with storm.connect(daemon.address, embedded="never") as client:
        found, stats = _step(client)
        assert torch.equal(found, _expected())
        assert stats.kept_bytes > 0
        assert stats.kept["pool_full"] > 0
    daemon.wait_until_empty()


def test_a_session_that_ends_leaves_nothing_on_the_disk(start: Start) -> None:
    daemon = start()
    client = storm.connect(daemon.address, embedded="never")
    with client.offload(min_bytes=1, codec="raw", replay=False, budget="least"):
        loss = chain(leaf(), LENGTH)
    wait_until(lambda: daemon.status()["spill"]["away_bytes"] > 0)
    assert daemon.status()["ratio"] <= 1.0, "what is on the disk alone is stored, too"
    del loss
    client.close()
    daemon.wait_until_empty()
    assert daemon.status()["spill"]["used_bytes"] == 0


@pytest.mark.parametrize("kind", ["eio", "flipped"])  # it is told, or it is found
def test_a_fault_of_the_disk_ends_the_tier_alone(
    start: Start, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: right bits or ActivationLost, and the next step trains without the disk."""
    files: list[FailingFile] = []

    def failing(_directory: Path, nbytes: int) -> FailingFile:
        files.append(FailingFile(nbytes, Random(len(files)), 0.03, (kind,)))
        return files[-1]

    monkeypatch.setattr(opening, "SpillFile", failing)
    daemon, expected = start(), _expected()
    with storm.connect(daemon.address, embedded="never") as client:
        for _ in range(50):
            try:
                found, _ = _step(client)
            except ActivationLost as error:
                assert "on disk alone, and the tier there has ended" in str(error)  # noqa: PT017
            else:
                assert torch.equal(found, expected)
            if daemon.status()["spill"]["ended"]:
                break
        else:
            raise AssertionError(f"{files[0].faults} faults were not noticed")
        found, stats = _step(client)  # as in any pool that is too small
        assert torch.equal(found, expected)
        assert stats.kept["pool_full"] > 0
    daemon.wait_until_empty()


def test_a_disk_that_stands_still_holds_nobody_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first write does not end: the tier does, and the step with the pool alone."""
    monkeypatch.setattr(tier, "SLOW_SECONDS", 0.5)
    monkeypatch.setattr(connection, "GOODBYE_SECONDS", 0.1)  # what is on its way holds the session
    goes_on = threading.Event()

    class Still(MemoryFile):
        def write(self, offset: int, data: memoryview) -> None:
            assert goes_on.wait(DEADLINE)
            super().write(offset, data)

    monkeypatch.setattr(opening, "SpillFile", lambda _directory, nbytes: Still(nbytes))
    daemon = start()
    try:
        with storm.connect(daemon.address, embedded="never") as client:
            found, stats = _step(client)
            assert torch.equal(found, _expected())
            assert stats.kept["pool_full"] > 0
            assert "has been at one job for" in daemon.status()["spill"]["ended"]
        wait_until(lambda: daemon.status()["spill"]["used_bytes"] > 0)  # a thread has it yet
    finally:
        goes_on.set()
    daemon.wait_until_empty()
    assert daemon.status()["spill"]["used_bytes"] == 0


@pytest.mark.slow
def test_a_hundred_faults_and_more() -> None:
    found = run(150, seed=1 << 20)
    assert found["faults"] >= 150
    assert found["entries_lost"] > 0
    assert found["rounds_that_lost_something"] < found["rounds"]
