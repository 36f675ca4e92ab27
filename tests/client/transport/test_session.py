from __future__ import annotations

from collections.abc import Iterator

import pytest
import storm_client as storm
import torch
from storm_client.lanes import Request
from storm_client.lanes.cpu import CpuLane
from storm_client.monitoring.stats import StatsRecorder
from storm_client.planner import OrderHistory, Step
from storm_client.saved.ranges import Handle, RangePhase, StoredRange
from storm_client.saved.snapshots import Ready, SnapshotProof
from storm_client.saved.versions import View
from storm_client.transport.restore import Inbound
from storm_client.transport.session import Session
from support.daemon_process import DaemonProcess
from support.records import version_of
from support.waiting import wait_until
from torch import Tensor

from stormd.protocol import Admitted, Failed, Refused, Welcome


@pytest.fixture
def session(daemon: DaemonProcess) -> Iterator[Session]:
    session = Session(daemon.address, CpuLane(), 30)
    yield session
    session.close()


def store(session: Session, tensor: Tensor, recorder: StatsRecorder) -> StoredRange:
    """Send a tensor though the test holds it."""
    record = session.hold(tensor.untyped_storage(), tensor.dtype, "raw", recorder)
    session.send(record)
    return record


def handle_of(record: StoredRange, tensor: Tensor) -> Handle:
    return Step(OrderHistory()).handle(record, View.of(tensor), version_of(tensor))


class UnattachedLane(CpuLane):
    """A lane whose memory cannot be had."""

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:
        raise storm.UsageError("no memory for the staging area")


def test_a_lane_that_cannot_attach_says_why(daemon: DaemonProcess) -> None:
    with pytest.raises(storm.UsageError, match="no memory"):
        Session(daemon.address, UnattachedLane(), 30)


def test_bytes_go_and_come_back(session: Session) -> None:
    tensor = torch.randn(1000)
    expected = tensor.clone()
    record = store(session, tensor, StatsRecorder())
    handle = handle_of(record, tensor)
    session.settle(30)
    del tensor
    assert record.source is None
    located = session.load(handle)
    assert torch.equal(handle.view.rebuild(located.storage), expected)


def test_a_held_storage_is_found_whatever_becomes_of_it(session: Session) -> None:
    """What leaves is what it holds at last, and each handle has a version of its own."""
    tensor = torch.randn(1000)
    record = session.hold(tensor.untyped_storage(), tensor.dtype, "raw", StatsRecorder())
    assert session.find(tensor.untyped_storage(), tensor) is record
    tensor.add_(1)
    assert session.find(tensor.untyped_storage(), tensor) is record


def test_of_what_has_left_the_same_version_is_found(session: Session) -> None:
    tensor = torch.randn(1000, requires_grad=True) * 2
    record = store(session, tensor, StatsRecorder())
    assert session.find(tensor.untyped_storage(), tensor) is None
    record.proof = SnapshotProof(tensor)
    assert session.find(tensor.untyped_storage(), tensor) is record
    tensor.detach().add_(1)
    assert session.find(tensor.untyped_storage(), tensor) is None


@pytest.mark.parametrize("leaves", [False, True])
def test_what_is_ready_leaves_at_once_and_is_found_at_its_version(
    session: Session, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(session.lane, "reaches", lambda _stream: leaves)
    tensor = torch.randn(1000, requires_grad=True) * 2
    proof = SnapshotProof(tensor)
    record = session.hold(
        tensor.untyped_storage(),
        tensor.dtype,
        "raw",
        StatsRecorder(),
        proof=proof,
        ready=Ready(proof, 1),
    )
    assert (record.phase is RangePhase.IN_USE) is not leaves
    assert session.find(tensor.untyped_storage(), tensor) is record
    tensor.detach().add_(1)
    assert session.find(tensor.untyped_storage(), tensor) is None


def test_what_somebody_else_holds_stays_until_he_lets_go(session: Session) -> None:
    recorder = StatsRecorder()
    tensor = torch.randn(1000)
    expected = tensor + 1
    record = session.hold(tensor.untyped_storage(), tensor.dtype, "raw", recorder)
    handle = handle_of(record, tensor)
    session.settle(30)
    assert record.source is not None
    assert recorder.snapshot().skipped == {"in_use": 1}
    tensor.data += 1  # counted nowhere
    del tensor
    session.settle(30)
    assert record.source is None
    assert recorder.snapshot().skipped == {}
    assert recorder.snapshot().offloaded_bytes == 4000
    assert torch.equal(handle.view.rebuild(session.load(handle).storage), expected)


def test_settling_means_that_all_is_encoded(session: Session) -> None:
    recorder = StatsRecorder()
    records = [store(session, torch.randn(1000), recorder) for _ in range(20)]
    session.settle(30)
    stats = recorder.snapshot()
    assert stats.offloaded_bytes == 20 * 4000
    assert stats.stored_bytes >= 20 * 4000
    assert len(records) == 20


def test_a_record_that_dies_is_released(session: Session) -> None:
    record = store(session, torch.randn(1000), StatsRecorder())
    session.settle(30)
    assert len(session.saved) == 1
    del record
    wait_until(lambda: not len(session.saved) and not session.saved._latest, 30)


def test_a_record_may_die_before_it_has_arrived(session: Session) -> None:
    recorder = StatsRecorder()
    for _ in range(50):
        store(session, torch.randn(1 << 16), recorder)
    session.settle(30)
    wait_until(lambda: len(session.saved) == 0, 30)
    assert recorder.snapshot().offloaded_bytes == 50 << 18


@pytest.mark.parametrize("kind", ["ActivationLost", "CorruptBlob"])
def test_an_admitted_part_that_is_lost_raises_where_it_is_needed(
    session: Session, kind: str
) -> None:
    tensor = torch.randn(1000)
    with session.connection.lock:  # so the daemon's own answers come after these
        record = store(session, tensor, StatsRecorder())
        entry = record.parts[0].entry
        session.on_message(0, Admitted(entry))
        session.on_message(0, Failed(0, entry, kind, "the lane broke"))
    handle = handle_of(record, tensor)
    assert session.load(handle).storage.data_ptr() == tensor.data_ptr()  # it is still in memory
    del tensor
    for _ in range(2):
        with pytest.raises(getattr(storm, kind), match="the lane broke"):
            session.load(handle)


def test_a_store_that_is_refused_leaves_the_tensor_here(session: Session) -> None:
    recorder = StatsRecorder()
    tensor = torch.randn(1000)
    with session.connection.lock:  # so the daemon's own answer comes after this one
        record = store(session, tensor, recorder)
        session.on_message(record.parts[0].entry, Refused("QuotaExceeded", "too much"))
    handle = handle_of(record, tensor)
    expected = tensor.clone()
    del tensor
    assert torch.equal(handle.view.rebuild(session.load(handle).storage), expected)
    assert recorder.snapshot().kept == {"QuotaExceeded": 1}


def test_nothing_is_brought_back_into_a_capture(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = client.offload(min_bytes=1)
    x = torch.randn(1 << 12, requires_grad=True)
    with offload:
        loss = x.exp().square().sum()
    offload.stats()
    with monkeypatch.context() as capture:
        capture.setattr(CpuLane, "is_capturing", lambda lane: True)
        with pytest.raises(storm.UsageError, match="CUDA graph"):
            loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, 2 * x.detach().exp() * x.detach().exp())


def test_nothing_is_fetched_ahead_in_a_capture(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = client.offload(min_bytes=1)
    x = torch.randn(1 << 12, requires_grad=True)
    with offload:
        kept = x.exp()
        loss = kept.square().sum()  # needs what the script keeps, which is in memory
    looks: list[object] = []
    monkeypatch.setattr(Inbound, "look_ahead", lambda inbound, uses: looks.append(uses))
    with monkeypatch.context() as capture:
        capture.setattr(CpuLane, "is_capturing", lambda lane: True)
        torch.autograd.grad(loss, kept, retain_graph=True)
        assert looks == []
    torch.autograd.grad(loss, kept)
    assert len(looks) == 1
