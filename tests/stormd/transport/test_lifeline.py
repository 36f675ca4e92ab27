"""The lifelines of a daemon: who may have one, what may be said on it, and what its end means."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient
from support.waiting import wait_until

from stormd.protocol import Welcome
from stormd.transport import lifeline
from stormd.transport.sessionless import Sessionless

SECONDS = 60.0
Connect = Callable[..., RawClient]


def _connected(daemon: DaemonThread, token: bytes = b"") -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(SECONDS)
    line.connect(daemon.address.removeprefix("ipc://") + ".lifeline")
    if token:  # the daemon may have closed it already
        line.sendall(token)
    return line


def _is_ended(line: socket.socket) -> bool:
    """Whether the daemon closes the connection without a word."""
    with line:
        try:
            return line.recv(1) == b""
        except ConnectionResetError:
            return True


def test_a_token_opens_one_lifeline_whose_end_is_its_sessions(
    daemon: DaemonThread, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(daemon)
    welcome = client.hello()
    assert isinstance(welcome, Welcome)
    for token in (bytes(16), welcome.token[:-1], welcome.token + b"x"):
        assert _is_ended(_connected(daemon, token))
    descriptors = client.connect_lifeline(welcome.lifeline, welcome.token)
    assert len(descriptors) == 2
    for descriptor in descriptors:
        os.close(descriptor)
    assert _is_ended(_connected(daemon, welcome.token))
    monkeypatch.setattr(lifeline, "GREETING_SECONDS", 0.01)
    assert _is_ended(_connected(daemon)), "who says nothing"
    client.line.close()
    wait_until(lambda: daemon.status()["counters"]["ended"]["died"] == 1)


@pytest.mark.parametrize(("said", "descriptors"), [(b"?", 0), (b"?", 1), (bytes(8), 0)])
def test_other_speech_on_the_lifeline_is_its_end(
    daemon: DaemonThread, client: RawClient, said: bytes, descriptors: int
) -> None:
    socket.send_fds(client.line, [said], [0] * descriptors)
    assert client.is_cut_off()
    wait_until(lambda: not daemon.status()["sessions"])


def test_strangers_are_limited_and_keep_nobody_out(
    daemon: DaemonThread, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.server._lifelines, "_sessionless", Sessionless(2, 2))
    monkeypatch.setattr(lifeline, "GREETING_SECONDS", SECONDS)  # none of them goes for its silence
    silent = [_connected(daemon) for _ in range(5)]
    for line in silent[:3]:
        assert _is_ended(line)
    connect(daemon).open().stored(b"served")
    for line in silent[3:]:
        line.close()


def test_who_is_not_allowed_is_shown_out_at_once(make_daemon: Callable[..., DaemonThread]) -> None:
    assert _is_ended(_connected(make_daemon(allowed_uids=(os.getuid() + 1,))))
