from __future__ import annotations

import os
import socket
import tempfile
import textwrap
from pathlib import Path
from typing import NoReturn

import pytest
import storm_client as storm
from storm_client.transport.lifeline import Lifeline
from support.daemon_process import DaemonProcess
from support.other_user import listening_impostor, root_only
from support.scripts import Scripts
from support.waiting import wait_until


def test_a_forked_child_does_not_hide_its_parents_death(
    client: storm.Client, scripts: Scripts, tmp_path: Path
) -> None:
    script = """
        import os, signal, sys, time, storm_client
        parent = os.fork()
        if parent == 0:
            client = storm_client.connect(sys.argv[1], timeout=30)
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            print(os.getpid(), child, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(parent, 0)
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    [line] = scripts.lines(path, client.address)
    parent, child = map(int, line.split())
    try:
        wait_until(
            lambda: all(session.pid != parent for session in client.status().sessions),
            30,
            client.status,
        )
    finally:
        os.kill(child, 9)


def test_a_fork_before_the_daemon_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a thread connects again while another one starts the workers of a data loader."""
    codes: list[int] = []

    def forking(lifeline: Lifeline, _: float) -> NoReturn:
        child = os.fork()
        if child == 0:
            os._exit(0 if lifeline.fileno() == -1 else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        raise TimeoutError("it says nothing")

    monkeypatch.setattr(Lifeline, "is_readable_within", forking)
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/lifeline")
        listener.listen()
        with pytest.raises(storm.DaemonUnavailable, match="says nothing"):
            Lifeline.attach(f"{directory}/lifeline", b"t" * 16, 1.0)
    assert codes == [0]


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(storm.DaemonUnavailable, match="stormd status"):
        Lifeline.attach(f"{tmp_path}/missing", b"t" * 16, 1.0)


def test_a_wrong_token(daemon: DaemonProcess) -> None:
    path = daemon.address.removeprefix("ipc://") + ".lifeline"
    with pytest.raises(storm.DaemonUnavailable, match="closed the lifeline"):
        Lifeline.attach(path, b"t" * 16, 30.0)


@root_only
def test_the_token_is_not_told_to_another_user() -> None:
    with listening_impostor() as (path, heard):
        with pytest.raises(storm.DaemonUnavailable, match=f"who listens at {path} is user"):
            Lifeline.attach(str(path), b"0123456789abcdef", 30.0)
        assert heard() == "b''"


def test_it_tells_a_session_that_ends_alone_from_the_daemons_end() -> None:
    ours, its = socket.socketpair()
    lifeline = Lifeline(ours)
    assert lifeline.reason == ""
    its.send(b"an error in the daemon")
    its.close()
    assert lifeline.reason == lifeline.reason == "an error in the daemon"
    lifeline.close()
    assert lifeline.reason == ""


def test_a_descriptor_leaves_with_its_number_or_has_to_wait() -> None:
    ours, its = socket.socketpair()
    ours.setblocking(False)
    lifeline = Lifeline(ours)
    with its, tempfile.TemporaryFile() as file:
        assert lifeline.send_descriptor(1 << 40, file.fileno())
        said, (received,), _, _ = socket.recv_fds(its, 64, 4)
        assert int.from_bytes(said, "little") == 1 << 40
        assert os.path.sameopenfile(received, file.fileno())
        os.close(received)
        while lifeline.send_descriptor(1, file.fileno()):  # until it would have to wait
            pass
        its.close()
        assert not lifeline.send_descriptor(1, file.fileno())
    lifeline.close()
