from __future__ import annotations

import socket
from pathlib import Path

import pytest
import storm_client as storm
from support.daemon_process import DaemonProcess
from support.other_user import ANOTHER_UID, listening_impostor, root_only


def test_a_socket_that_nobody_accepts_on(tmp_path: Path) -> None:
    path = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with pytest.raises(storm.DaemonUnavailable, match="refuses connections"):
        storm.connect(f"ipc://{path}", embedded="never")


def test_somebody_who_does_not_answer(tmp_path: Path) -> None:
    path = tmp_path / "silent"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(storm.DaemonUnavailable, match=r"did not answer within 0\.2 s"):
            storm.connect(f"ipc://{path}", timeout=0.2)


def test_another_version(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storm_client.transport.handshake.PROTOCOL_VERSION", 99)
    with pytest.raises(storm.ProtocolMismatch, match="99"):
        storm.connect(daemon.address, timeout=30)


@root_only
def test_another_users_daemon_where_anybody_could_have_put_it_is_told_nothing() -> None:
    with listening_impostor() as (path, heard):
        with pytest.raises(storm.DaemonUnavailable, match=f"user {ANOTHER_UID} .*STORMD_DAEMON_U"):
            storm.connect(f"ipc://{path}", embedded="never")
        assert heard() == "b''"
