from __future__ import annotations

from collections.abc import Iterator

import pytest
import storm_client as storm
import torch
from storm_client.lanes import Request
from storm_client.lanes.cpu import CpuLane
from storm_client.monitoring.stats import StatsRecorder
from storm_client.planner import OrderHistory, Step
from storm_client.saved.ranges import Handle, StoredRange
from storm_client.saved.versions import View
from storm_client.transport.restore import Inbound
from storm_client.transport.session import Session
from support.daemon_process import DaemonProcess
from support.records import version_of
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


@pytest.mark.parametrize(
    ("kind", "reason"), [("QuotaExceeded", "quota"), ("DaemonLost", "daemon_lost")]
)
def test_a_store_that_is_refused_leaves_the_tensor_here(
    session: Session, kind: str, reason: str
) -> None:
    recorder = StatsRecorder()
    tensor = torch.randn(1000)
    with session.connection.lock:  # so the daemon's own answer comes after this one
        record = store(session, tensor, recorder)
        session.on_message(record.parts[0].entry, Refused(kind, "too much"))
    handle = handle_of(record, tensor)
    expected = tensor.clone()
    del tensor
    assert torch.equal(handle.view.rebuild(session.load(handle).storage), expected)
    assert recorder.snapshot().kept == {reason: 1}


def test_an_interrupt_before_a_restore_begins_does_not_keep_others_from_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others waited for a restore that nobody made, and then raised."""
    monkeypatch.setattr("storm_client.transport.session.STALL_SECONDS", 1.0)
    tensor = torch.randn(1000)
    record, expected = store(session, tensor, StatsRecorder()), tensor.clone()
    handle = handle_of(record, tensor)
    del tensor
    session.settle(30)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session._inbound, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.load(handle)
    assert torch.equal(handle.view.rebuild(session.load(handle).storage), expected)


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
    monkeypatch.setattr(Inbound, "prefetch", lambda inbound, uses: looks.append(uses))
    with monkeypatch.context() as capture:
        capture.setattr(CpuLane, "is_capturing", lambda lane: True)
        torch.autograd.grad(loss, kept, retain_graph=True)
        assert looks == []
    torch.autograd.grad(loss, kept)
    assert len(looks) == 1


def test_a_signal_handler_that_settles_changes_nothing_beneath_the_thread_it_interrupts(
    session: Session,
) -> None:
    """Dead records were forgotten while the thread went through them, and its step raised."""
    tensors, recorder = [torch.randn(1000) for _ in range(3)], StatsRecorder()
    records = [session.hold(t.untyped_storage(), t.dtype, "raw", recorder) for t in tensors]

    class Settling(list[StoredRange]):
        def __contains__(self, record: object) -> bool:
            records.clear()
            session.settle(0.0)
            return False

    del tensors
    session.send_unshared(but=Settling())
    session.settle(30)
    assert not records
