from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.lanes.cpu import CpuLane
from storm_client.transport import sessions as sessions_module
from storm_client.transport.sessions import Sessions
from support.daemon_process import DaemonProcess
from support.waiting import wait_until

from stormd.query import StatusQuery


def status_of(daemon: DaemonProcess) -> dict[str, Any]:
    with StatusQuery(daemon.address) as query:
        return query.ask()


@pytest.fixture
def sessions(daemon: DaemonProcess) -> Iterator[Sessions]:
    sessions = Sessions(daemon.address, 30)
    yield sessions
    sessions.close()


@pytest.mark.parametrize(("has_gpu", "devices"), [(False, ["cpu"]), (True, ["none"])])
def test_a_trainer_takes_a_share_only_of_the_device_that_it_uses(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, devices: list[str]
) -> None:
    """Where there is a GPU, the host's memory may never be saved from."""
    monkeypatch.setattr(sessions_module, "_may_have_gpu", lambda: has_gpu)
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        assert [one.device for one in client.status().sessions] == devices
        x = torch.ones(64, requires_grad=True)
        with client.offload(min_bytes=1):
            loss = x.exp().square().sum()
        loss.backward()
        assert sorted({one.device for one in client.status().sessions}) == sorted({"cpu", *devices})
    wait_until(lambda: not status_of(daemon)["sessions"], 30)


def test_a_client_that_only_asks_ends_when_nobody_can_use_it(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "_may_have_gpu", lambda: True)
    client = storm.connect(daemon.address, embedded="never", timeout=30)
    assert len(client.status().sessions) == 1
    del client
    gc.collect()
    wait_until(lambda: not status_of(daemon)["sessions"], 30)


def test_a_device_without_a_lane_is_warned_about_once(sessions: Sessions) -> None:
    with pytest.warns(UserWarning, match="nothing on xla:0 is offloaded"):
        assert sessions.of(torch.device("xla:0")) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sessions.of(torch.device("xla:0")) is None


def test_a_signal_handler_closes_while_a_session_is_opened(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that takes a while. The handler waited for the thread that it had interrupted."""
    monkeypatch.setattr(sessions_module, "_may_have_gpu", lambda: True)
    sessions = Sessions(daemon.address, 30)
    errors: list[str] = []

    def closed_meanwhile(device: torch.device) -> CpuLane:
        sessions.close()
        return CpuLane()

    def open_one() -> None:
        with pytest.raises(storm.UsageError) as caught:
            sessions.of(torch.device("cpu"))
        errors.append(str(caught.value))

    monkeypatch.setattr(sessions_module, "lane_for", closed_meanwhile)
    thread = threading.Thread(target=open_one, daemon=True)
    thread.start()
    thread.join(30)
    assert errors == ["the client is closed; call storm_client.connect() for another"]
    wait_until(lambda: not status_of(daemon)["sessions"], 30)


def test_a_daemons_end_is_known_before_the_listener_tells(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon("--pool-bytes", "64MiB")
    with closing(Sessions(daemon.address, 30)) as sessions:
        sessions.check()
        with sessions.of(torch.device("cpu")).connection.lock:  # the listener cannot tell
            daemon.kill()
            assert not sessions.lost
            with pytest.raises(storm.DaemonLost, match="ended"):
                sessions.check()
            assert sessions.lost
