"""A session goes on with the daemon that follows, or is lost, and either is known in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_client.errors import DaemonLost
from storm_client.transport import resume
from storm_client.transport.io_thread import Phase
from storm_client.transport.lifeline import Lifeline
from support.daemon_process import served_by
from support.waiting import wait_until

from stormd.protocol import Entries, Mapped, MapPiece, Message, StatusRequest


@pytest.fixture
def resumable(request: pytest.FixtureRequest) -> Iterator[ChildDaemon]:
    seconds = getattr(request, "param", 120)
    flags = ["--device=cpu", "--resumable", f"--resume-seconds={seconds}"]
    with ChildDaemon(flags=flags) as daemon:
        yield daemon


def stored(client: storm.Client) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss whose saved tensors the daemon has, and what its gradient is for."""
    tensor = torch.linspace(0, 1, 1 << 16, requires_grad=True)
    offload = client.offload(min_bytes=1)
    with offload:
        loss = tensor.exp().sin().sum()
    assert offload.stats().stored_bytes > 0  # behind the last answer
    return loss, tensor


def assert_right(tensor: torch.Tensor) -> None:
    """Check the gradient of a loss as `stored` returns it."""
    point = tensor.detach()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, point.exp().cos() * point.exp())


def test_without_a_holder_a_daemon_is_lost_at_once(resumable: ChildDaemon) -> None:
    pid = resumable.status()["pid"]
    with storm.connect(resumable.address) as client:
        loss, _ = stored(client)
        os.kill(resumable.pid, signal.SIGKILL)  # the daemon ends with it
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        with pytest.raises(DaemonLost, match="refuses connections"):
            loss.backward()


@pytest.mark.parametrize("resumable", [1], indirect=True)
def test_a_daemon_that_does_not_come_back_is_lost_in_the_end(
    resumable: ChildDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a client can be closed meanwhile."""
    monkeypatch.setattr(resume, "ATTEMPT_SECONDS", 0.2)
    pid, other = resumable.status()["pid"], storm.connect(resumable.address)
    connection = other._supply.sessions.control.connection
    with storm.connect(resumable.address) as client:
        loss, _ = stored(client)
        os.kill(resumable.pid, signal.SIGSTOP)  # it starts none
        try:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: connection.phase is not Phase.OPEN)
            began = time.monotonic()
            other.close()
            assert time.monotonic() - began < 60
            assert connection.phase is Phase.LOST
            with pytest.raises(DaemonLost, match="did not answer within"):
                loss.backward()
        finally:
            os.kill(resumable.pid, signal.SIGCONT)


def test_questions_are_asked_again_and_what_died_meanwhile_is_released(
    resumable: ChildDaemon,
) -> None:
    pid = resumable.status()["pid"]
    with storm.connect(resumable.address) as client:
        connection = client._supply.sessions.control.connection
        loss, _ = stored(client)
        kept, tensor = stored(client)
        wait_until(lambda: resumable.status()["entries"] > 0)
        os.kill(pid, signal.SIGKILL)
        del loss
        wait_until(lambda: connection.phase is not Phase.OPEN)
        answer = connection.request(StatusRequest(), 60.0)
        assert answer.state["pid"] != pid  # type: ignore[attr-defined]
        kept.backward()
        assert_right(tensor)
        del kept
        wait_until(lambda: resumable.status()["entries"] == 0)
        assert resumable.status()["pool"]["used_bytes"] == 0


@pytest.mark.parametrize("step", ["lifeline", "answers"])
def test_a_daemon_may_take_its_time_once_it_has_the_session(
    step: str, resumable: ChildDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gave up then would end the session, which no other attempt resumes."""
    monkeypatch.setattr(resume, "ATTEMPT_SECONDS", 0.2)
    owner, name = (Lifeline, "open") if step == "lifeline" else (resume, "_agreed")
    original, stopped = getattr(owner, name), list[int]()

    def on_a_stopped_daemon(*arguments: Any) -> Any:
        if not stopped:
            stopped.append(served_by(resumable))
            os.kill(stopped[0], signal.SIGSTOP)
            threading.Timer(1.0, os.kill, [stopped[0], signal.SIGCONT]).start()
        return original(*arguments)

    with storm.connect(resumable.address) as client:
        loss, tensor = stored(client)
        monkeypatch.setattr(owner, name, on_a_stopped_daemon)
        os.kill(resumable.status()["pid"], signal.SIGKILL)
        loss.backward()
    assert stopped
    assert_right(tensor)


def test_the_descriptor_of_a_piece_goes_ahead_of_it() -> None:
    """One that is gone is left out, and so is one that cannot leave."""
    handed: list[int] = []

    def send_descriptor(number: int, descriptor: int) -> bool:
        os.fstat(descriptor)
        handed.append(number)
        return number != 3

    channel: Any = SimpleNamespace(lifeline=SimpleNamespace(send_descriptor=send_descriptor))
    offers = [MapPiece(segment=n, into=9, offset=0, nbytes=1) for n in (1, 2, 3)]
    asked: list[Message] = []

    def ask(_number: int, message: Message) -> Message:
        asked.append(message)
        return Mapped(1) if isinstance(message, MapPiece) else Entries([], is_all=True)

    ways = {number: os.memfd_create("piece") for number in (1, 3)}
    found = resume._asked(channel, offers, ways.get, ask)  # type: ignore[arg-type]
    assert handed == [1, 3]
    assert asked[:-1] == offers[:1]
    assert found.mapped == {1}
    for descriptor in ways.values():
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)
