"""The shared cache between processes and users, while some of them die; all of it real."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from support.cache_process import CacheProcess, cache_nursery
from support.chains import chain, gradient, leaf
from support.daemon_process import DaemonProcess, start_daemon
from support.waiting import wait_until

MIB = 1 << 20
ANNA, BERT, MATE = (64001, 64100), (64002, 64200), (64003, 64100)


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[None]:
    with cache_nursery():
        yield


@pytest.fixture(scope="module")
def lasting() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=["--pool-bytes=64MiB", "--cache-bytes=32MiB", "--device=cpu"]) as daemon:
        yield daemon


@pytest.fixture
def daemon(lasting: ChildDaemon) -> Iterator[ChildDaemon]:
    """The module's daemon, whose cache is empty, and holds nothing without a name at the end."""
    yield lasting
    with storm.connect(lasting.address, timeout=30.0) as client:
        for name in client.cache.list():
            client.cache.delete(name)
    wait_until(lambda: not lasting.status()["sessions"], found=lasting.status)
    state = lasting.status()
    assert state["entries"] == state["pool"]["used_bytes"] == 0
    assert not any(state["cache"][f"{kind}_bytes"] for kind in ("used", "raw", "promised"))


def cache_of(daemon: ChildDaemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["cache"]
    return found


@contextmanager
def processes(daemon: ChildDaemon, count: int) -> Iterator[list[CacheProcess]]:
    """Some processes, connected."""
    with ExitStack() as stack:
        started = [stack.enter_context(CacheProcess(daemon.address)) for _ in range(count)]
        for process in started:
            process.say("list")
        for process in started:
            process.hear()
        yield started


# --- several processes --------------------------------------------------------------------------


def test_what_one_process_put_many_get_also_after_its_end(daemon: ChildDaemon) -> None:
    hits = cache_of(daemon)["counters"]["hits"]
    with CacheProcess(daemon.address) as teacher:
        assert teacher.ask("put", "out", 7, 20 * MIB) == "put"
    wait_until(lambda: not daemon.status()["sessions"])
    with CacheProcess(daemon.address) as one, CacheProcess(daemon.address) as two:
        one.say("get", "out")
        assert two.ask("get", "out") == one.hear() == [7, 20 * MIB]
        assert one.ask("list") == ["out"]
        assert two.ask("delete", "out") is True
        assert one.ask("contains", "out") is False
    assert cache_of(daemon)["counters"]["hits"] == hits + 2


def test_puts_at_once_never_mix(daemon: ChildDaemon) -> None:
    sizes = {1: 3 * MIB, 2: 5 * MIB, 3: 100_000}
    with processes(daemon, 4) as (reader, *putters):
        for process, (value, size) in zip(putters, sizes.items(), strict=True):
            process.say("put often", "raced", [value] * 12, size)
        found = reader.ask("get often", "raced", 30)
        assert set(found) <= {"None", *(str([value, size]) for value, size in sizes.items())}
        for process in putters:
            assert process.hear() == "put"
        last = reader.ask("get", "raced")
        assert last in [list(item) for item in sizes.items()]
        assert cache_of(daemon)["items"] == 1


def test_who_is_killed_leaves_the_old_version_and_gives_back_what_it_read(
    daemon: ChildDaemon,
) -> None:
    with storm.connect(daemon.address, timeout=30.0) as client, processes(daemon, 4) as victims:
        client.cache.put("kept", torch.ones(MIB))
        for victim in victims[:2]:
            victim.say("put often", "kept", [2] * 1000, 8 * MIB)
            wait_until(lambda: cache_of(daemon)["promised_bytes"] > 0)
            victim.kill()
            wait_until(lambda: cache_of(daemon)["promised_bytes"] == 0)
            found = client.cache.get("kept")
            assert found.unique().item() == (1.0 if found.numel() == MIB else 2)
        client.cache.delete("kept")
        for victim in victims[2:]:
            client.cache.put("big", torch.ones(24 * MIB, dtype=torch.uint8))
            victim.say("get often", "big", 1000)
            wait_until(lambda: daemon.status()["entries"] > 0)
            victim.kill()
            assert client.cache.delete("big")
            wait_until(lambda: cache_of(daemon)["used_bytes"] == 0)


def test_a_short_time_to_live_ends(daemon: ChildDaemon) -> None:
    with (
        CacheProcess(daemon.address) as reader,
        storm.connect(daemon.address, timeout=30.0) as client,
    ):
        client.cache.put("brief", torch.ones(100), ttl=1e-3)
        client.cache.put("long", torch.ones(100), ttl=1e6)
        wait_until(lambda: cache_of(daemon)["items"] == 1)
        assert reader.ask("list") == ["long"]
        assert client.cache.get("brief") is None


# --- activations beside it ----------------------------------------------------------------------


def test_a_full_cache_never_touches_activations(daemon: ChildDaemon) -> None:
    evictions = cache_of(daemon)["counters"]["evictions"]
    x = leaf()
    expected = gradient(chain(x, 20), x)
    with (
        storm.connect(daemon.address, timeout=30.0) as client,
        CacheProcess(daemon.address) as other,
    ):
        x = leaf()
        with client.offload(min_bytes=1, replay=False, budget="least") as offload:
            loss = chain(x, 20)
        stats = offload.stats()
        assert stats.offloaded_bytes > 16 * MIB
        other.say("put often", "noise", list(range(4)), 24 * MIB)
        for number in range(50):
            client.cache.put(str(number), torch.randn(MIB // 4))
        assert cache_of(daemon)["counters"]["evictions"] > evictions + 10
        assert client.status().pool.used_bytes >= stats.stored_bytes
        assert torch.equal(gradient(loss, x), expected)
        assert other.hear() == "put"
        assert not stats.kept


def test_a_full_pool_never_touches_the_cache(daemon: ChildDaemon) -> None:
    with storm.connect(daemon.address, timeout=30.0) as client:
        offload = client.offload([])
        with offload:
            leaves = (torch.randn(2 * MIB, requires_grad=True) for _ in range(12))
            saved = [leaf.sin().square() for leaf in leaves]
        assert offload.stats().kept
        client.cache.put("a", torch.arange(MIB))
        found = client.cache.get("a")
        assert found is not None
        assert torch.equal(found, torch.arange(MIB))
        saved.clear()


# --- users --------------------------------------------------------------------------------------


@pytest.fixture
def open_daemon() -> Iterator[DaemonProcess]:
    """A daemon that three users may reach."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become other users")
    with tempfile.TemporaryDirectory(prefix="storm-") as base:
        Path(base).chmod(0o711)
        daemon = start_daemon(
            Path(base),
            "--socket-mode=0o666",
            f"--allowed-uids={ANNA[0]},{BERT[0]},{MATE[0]},0",
            "--pool-bytes=16MiB",
            "--cache-bytes=16MiB",
        )
        yield daemon
        daemon.stop()


def test_another_user_neither_sees_nor_changes_it_and_a_group_only_reads(
    open_daemon: DaemonProcess,
) -> None:
    address = open_daemon.address
    with (
        CacheProcess(address, *ANNA) as anna,
        CacheProcess(address, *BERT) as bert,
        CacheProcess(address, *MATE) as mate,
        CacheProcess(address) as root,
    ):
        assert anna.ask("put", "secret", 5, MIB) == "put"
        for stranger in (bert, root):
            assert stranger.ask("get", "secret") is None
            assert stranger.ask("contains", "secret") is False
            assert stranger.ask("delete", "secret") is False
            assert stranger.ask("list") == []
        assert mate.ask("get", "secret") == [5, MIB]
        assert mate.ask("list") == ["secret"]
        assert mate.ask("delete", "secret") is False
        assert bert.ask("put", "secret", 6, MIB) == "put"
        assert mate.ask("put", "secret", 7, MIB) == "put"
        assert anna.ask("get", "secret") == [5, MIB]
        assert bert.ask("get", "secret") == [6, MIB]
        assert mate.ask("get", "secret") == [7, MIB]
        with CacheProcess(address, 64009, 64100) as stranger:
            kind, text = stranger.ask("get", "secret")
            assert kind == "UsageError"
            assert "64009 may not connect" in text
