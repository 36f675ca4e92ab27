from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import storm_client as storm
import torch
from storm_client.sessions import Sessions
from support.daemon_process import DaemonProcess


@pytest.fixture
def sessions(daemon: DaemonProcess) -> Iterator[Sessions]:
    sessions = Sessions(daemon.address, 30)
    yield sessions
    sessions.close()


def test_the_hosts_session_is_there_from_the_start(sessions: Sessions) -> None:
    cpu = torch.device("cpu")
    assert sessions.of(cpu) is sessions.control


def test_a_device_without_a_lane_is_warned_about_once(sessions: Sessions) -> None:
    with pytest.warns(UserWarning, match="nothing on xla:0 is offloaded"):
        assert sessions.of(torch.device("xla:0")) is None
    assert sessions.of(torch.device("xla:0")) is None  # a second warning would be an error


def test_nothing_can_be_used_after_close(sessions: Sessions) -> None:
    sessions.close()
    sessions.close()
    with pytest.raises(storm.UsageError, match="closed"):
        sessions.check()
    with pytest.raises(storm.UsageError, match="closed"):
        sessions.of(torch.device("xla:0"))
    sessions.settle(1)


def test_a_daemons_end_is_known_before_the_listener_tells(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon("--pool-bytes", "64MiB")
    with closing(Sessions(daemon.address, 30)) as sessions:
        sessions.check()
        with sessions.control.connection.lock:  # the listener cannot tell
            daemon.kill()
            assert not sessions.lost
            with pytest.raises(storm.DaemonLost, match="ended"):
                sessions.check()
            assert sessions.lost
