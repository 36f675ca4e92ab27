"""With on_daemon_loss="keep" training survives its daemon, and finds the next one by itself."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import storm_client as storm
import torch
from storm_client.transport.daemon_loss import Supply
from support.checked_training import MIN_BYTES, Training
from support.daemon_process import DaemonProcess, start_daemon
from support.waiting import wait_until

DEADLINE_SECONDS = 60.0


class Place:
    """An address at which one daemon after the other listens."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.daemon = self.start()

    def start(self) -> DaemonProcess:
        self.daemon = start_daemon(self._directory, "--pool-bytes", "64MiB")
        return self.daemon


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="storm-") as base:  # pytest's own paths are too long
        place = Place(Path(base))
        yield place
        place.daemon.stop()


@pytest.fixture
def keeping(place: Place) -> Iterator[storm.Client]:
    with storm.connect(
        place.daemon.address, embedded="never", on_daemon_loss="keep", timeout=DEADLINE_SECONDS
    ) as client:
        yield client


def test_steps_go_on_without_a_daemon_and_return_to_the_next(
    place: Place, keeping: storm.Client
) -> None:
    training, x = Training(), torch.ones(1 << 16, requires_grad=True)
    offload = keeping.offload(training.model, min_bytes=MIN_BYTES)
    assert training.is_right(offload)
    with keeping.offload(min_bytes=1) as other:
        lost = x.exp().square().sum()
    other.stats()
    offloaded = offload.stats().offloaded_bytes
    assert offloaded > 0
    place.daemon.kill()
    with pytest.warns(RuntimeWarning, match="stay in memory") as warned:
        assert all(training.is_right(offload) for _ in range(3))
    assert len(warned) == 1
    with other:
        kept = x.exp().square().sum()
    stats = offload.stats()
    assert stats.offloaded_bytes == offloaded
    assert stats.kept["daemon_lost"] > 0
    assert stats.saved_bytes >= stats.skipped_bytes + stats.kept_bytes
    place.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wait_until(lambda: _offloads(offload), DEADLINE_SECONDS)
        assert training.is_right(offload)
    assert keeping.status().version
    assert len(keeping.status().sessions) == 1
    with pytest.raises(
        storm.DaemonLost, match=r"held for us; repeat the step from its forward pass$"
    ):
        lost.backward()
    assert x.grad is None
    kept.backward()
    assert torch.equal(x.grad, 2 * x.detach().exp().square())


def test_a_death_amid_a_forward_loses_only_what_was_stored(
    place: Place, keeping: storm.Client
) -> None:
    offload = keeping.offload(min_bytes=1)
    x = torch.ones(1 << 16, requires_grad=True)
    with offload:
        lost = x.exp().square().sum()
        offload.stats()
        place.daemon.kill()
        wait_until(lambda: keeping._supply.sessions.lost)
        kept = x.exp().square().sum()
    kept.backward()
    assert torch.equal(x.grad, 2 * x.detach().exp().square())
    with pytest.raises(storm.DaemonLost):
        lost.backward()
    with pytest.warns(RuntimeWarning):
        offload.__enter__()
    h = torch.ones(100, requires_grad=True).exp()
    loss = h.square().sum()
    offload.__exit__(None, None, None)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    keeping.close()  # while it looks for a daemon
    with pytest.raises(storm.UsageError, match="closed"), offload:
        pass


class FakeSessions:
    """Sessions whose daemon is lost from when a test says so; `seen` is called when that shows."""

    def __init__(self) -> None:
        self.lost = False
        self.seen: Callable[[], None] = lambda: None

    def check(self) -> None:
        if self.lost:
            self.seen()
            raise storm.DaemonLost("the daemon ended")

    def close(self) -> None: ...


def test_a_daemon_that_was_found_meanwhile_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attempt succeeds when a step has seen the loss and has yet to look for a daemon."""
    monkeypatch.setattr("storm_client.transport.daemon_loss.ATTEMPT_SECONDS", 0.0)
    made: list[FakeSessions] = []
    answers = threading.Event()

    def connect() -> FakeSessions:
        assert not made or answers.wait(30)
        made.append(FakeSessions())
        return made[-1]

    def let_one_be_found() -> None:
        attempt = supply._attempt
        if attempt is not None:
            answers.set()
            attempt.join()

    supply = Supply(connect, keeps_without_daemon=True)  # type: ignore[arg-type]
    made[0].lost, made[0].seen = True, let_one_be_found
    with pytest.warns(RuntimeWarning):
        assert [supply.current(), supply.current()] == [made[0], made[0]]
    assert supply.current() is made[1]
    supply.close()
    assert len(made) == 2


def test_attempts_begin_apart_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, begun, go_on = SimpleNamespace(now=0.0), list[float](), threading.Event()
    monkeypatch.setattr(
        "storm_client.transport.daemon_loss.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    sessions = FakeSessions()

    def connect() -> FakeSessions:
        if not sessions.lost:
            return sessions
        begun.append(clock.now)
        assert go_on.wait(30)
        raise storm.DaemonLost("no daemon answers")

    def step(now: float) -> None:
        clock.now = now
        supply.current()

    supply = Supply(connect, keeps_without_daemon=True)  # type: ignore[arg-type]
    sessions.lost = True
    with pytest.warns(RuntimeWarning):
        step(0.0)
    for now in (0.5, 5.0):
        step(now)
    go_on.set()
    for now in (5.0, 5.5, 6.0, 6.9):
        supply._attempt.join()
        step(now)
    supply.close()
    assert begun == [0.0, 5.0, 6.0]


def _offloads(offload: storm.Offload) -> bool:
    """Do a step; tell whether it gave the daemon anything."""
    before = offload.stats().offloaded_bytes
    with offload:
        loss = torch.ones(MIN_BYTES, requires_grad=True).exp().square().sum()
    loss.backward()
    return offload.stats().offloaded_bytes > before
