"""Saved tensors of which a slice stays: bit for bit what they were, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import storm_client as storm
import torch
import torch.distributed as dist
from storm_client.inbound import Inbound
from storm_client.lanes.cpu import CpuLane
from storm_client.plan.planner import SLICE_GRANULE
from storm_client.saved import StoredRange
from support.chains import chain, gradient, leaf
from support.coding_lane import CodingCpuLane
from support.daemon_process import DaemonProcess
from support.daemon_thread import DaemonThread
from support.in_place_lane import InPlaceCpuLane
from support.planning import replay_all, slice_all
from support.random_programs import compare_freely, process_group, run
from support.training import assert_identical
from support.waiting import wait_until
from torch import nn

MIB = 1 << 20
STEPS = 4


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    slice_all(monkeypatch)


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(
    seed: int, replays: bool, device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    if replays:
        replay_all(monkeypatch)
    offload = client.offload(min_bytes=1, codec="raw" if seed % 2 else "ancf", replay=replays)
    expected = run(seed, device, nullcontext)
    for _ in range(STEPS):
        assert_identical(run(seed, device, lambda: offload), expected)
    stats = offload.stats()
    assert stats.skipped["slice"] > 0
    parts = (stats.skipped_bytes, stats.deduplicated_bytes, stats.offloaded_bytes, stats.kept_bytes)
    if not replays:  # what is made again is handed over, too, while it is tried
        assert stats.saved_bytes <= sum(parts), "storages of views are larger"


@pytest.fixture
def group() -> Iterator[None]:
    with process_group(dist.HashStore()):
        yield


@pytest.mark.usefixtures("group", "sliced")
@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint")
@pytest.mark.parametrize("batch", range(3))
def test_free_programs(batch: int, device: str, client: storm.Client) -> None:
    compare_freely(range(batch * 10, batch * 10 + 10), device, client, steps=3)


@pytest.mark.parametrize("lane_kind", [InPlaceCpuLane, CodingCpuLane])
@pytest.mark.usefixtures("sliced")
def test_where_sources_are_read_late(
    make_late_daemon: Callable[..., DaemonThread], lanes: list[InPlaceCpuLane]
) -> None:
    """What stays has left the source before that is given up, whoever reads the rest of it."""
    x = leaf()
    expected = gradient(chain(x), x)
    with storm.connect(make_late_daemon().address, embedded="never", timeout=30) as client:
        offload = client.offload(min_bytes=1, replay=False)
        for _ in range(STEPS):
            with offload:
                loss = chain(x)
            assert torch.equal(gradient(loss, x), expected)
            del loss
        assert offload.stats().skipped["slice"] > 5
        lanes[0].unread.read_all()
        wait_until(lambda: client.status().entries == 0, 30, client.status)


@pytest.mark.usefixtures("sliced")
def test_a_slice_in_the_wrong_place_is_noticed(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else these tests would prove nothing."""
    monkeypatch.setattr(Inbound, "_put_rest_back", lambda *_: None)
    x = leaf()
    expected = gradient(chain(x), x)
    offload = client.offload(min_bytes=1, replay=False)
    with offload:
        loss = chain(x)
    assert torch.equal(gradient(loss, x), expected), "nothing is cut before there is a plan"
    with offload:
        loss = chain(x)
    assert not torch.equal(gradient(loss, x), expected)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def train(
    net: nn.Module, offload: storm.Offload, x: torch.Tensor, steps: int = STEPS
) -> list[torch.Tensor]:
    for _ in range(steps):
        net.zero_grad()
        with offload:
            loss = net(x).square().mean()
        loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_a_budget_is_used_but_for_a_granule(client: storm.Client) -> None:
    """Each of four values has 12 MiB; a budget of 18 has room for one and a half."""
    net, x = network(), torch.randn(6144, 512)
    with_none = client.offload(net, budget=0.0, replay=False)
    expected = [gradient.clone() for gradient in train(net, with_none, x, steps=1)]
    offload = client.offload(net, budget=18 * MIB - 1000, replay=False)
    assert_identical(train(net, offload, x), expected)
    plan = offload.plan
    assert plan is not None
    assert 18 * MIB - 1000 - SLICE_GRANULE < plan.peak_bytes <= 18 * MIB - 1000
    assert plan.bytes_by_decision["keep"] == plan.peak_bytes
    assert "the budget has room for a slice" in str(plan)
    stats = offload.stats()
    assert stats.skipped["slice"] == STEPS - 1
    assert stats.saved_bytes == (
        stats.skipped_bytes + stats.deduplicated_bytes + stats.offloaded_bytes + stats.kept_bytes
    )


@pytest.fixture
def offload(client: storm.Client) -> storm.Offload:
    """Offload that has learned to let slices of a chain stay."""
    offload = client.offload(min_bytes=1, replay=False)
    x = leaf()
    with offload:
        loss = chain(x)
    loss.backward()
    return offload


@pytest.mark.usefixtures("sliced")
def test_a_graph_is_used_twice(offload: storm.Offload) -> None:
    x = leaf()
    with offload:
        loss = chain(x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert torch.equal(first, gradient(chain(x), x))
    assert offload.stats().skipped["slice"] > 0


@pytest.mark.usefixtures("sliced")
def test_without_memory_for_a_slice_all_leaves(
    offload: storm.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(lane: CpuLane, nbytes: int) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError(f"no {nbytes} bytes")

    x, before = leaf(), offload.stats().offloaded_bytes
    with monkeypatch.context() as patch:
        patch.setattr(CpuLane, "allocate", allocate)
        with offload:
            loss = chain(x)
    assert torch.equal(gradient(loss, x), gradient(chain(x), x))
    stats = offload.stats()
    assert "slice" not in stats.skipped
    assert stats.offloaded_bytes == 2 * before, "of both steps"


@pytest.mark.usefixtures("sliced")
def test_what_the_daemon_refuses_stays_whole(
    make_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[StoredRange] = []
    cut = storm.session.Outbound._cut

    def noting(self: object, record: StoredRange, source: torch.UntypedStorage) -> None:
        cut(self, record, source)
        records.append(record)

    monkeypatch.setattr(storm.session.Outbound, "_cut", noting)
    x = leaf()
    expected = gradient(chain(x), x)
    daemon = make_daemon("--pool-bytes", "4MiB")
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        offload = client.offload(min_bytes=1, replay=False, codec="raw")
        for _ in range(2):
            with offload:
                loss = chain(x)
            slices = offload.stats().skipped
            has_rest = [record.rest is not None for record in records]
            records.clear()
            assert torch.equal(gradient(loss, x), expected)
    assert slices["slice"] == len(has_rest) > sum(has_rest) > 0


@pytest.mark.usefixtures("sliced")
def test_a_lost_daemon_takes_the_slices_with_it(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon()
    x = leaf()
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        offload = client.offload(min_bytes=1, replay=False)
        for _ in range(2):
            with offload:
                loss = chain(x)
        assert offload.stats().skipped["slice"] > 0
        daemon.kill()
        with pytest.raises(storm.DaemonLost):
            loss.backward()
