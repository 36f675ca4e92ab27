from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
from support.waiting import wait_until

CONNECT = sys.modules["storm_client.connect"]
"""The module; as an attribute of the package, the name is the function's."""


@pytest.fixture(autouse=True)
def no_daemon_by_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the tests from any daemon that this machine may run."""
    monkeypatch.delenv("STORMD_ADDRESS", raising=False)
    monkeypatch.setattr(CONNECT, "_defaults", lambda: [f"ipc://{tmp_path}/none"])


@pytest.mark.parametrize("embedded", ["auto", "always"])
def test_an_embedded_daemon_ends_with_its_client(embedded: Any) -> None:
    with storm.connect(embedded=embedded, pool_bytes=16 << 20, timeout=30) as client:
        status = client.status()
        assert status.pool.capacity_bytes == 16 << 20
        assert [session.pid for session in status.sessions] == [os.getpid()]
        pid = status.details["pid"]
        socket = Path(client.address.removeprefix("ipc://"))
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert list(socket.parent.glob(f"{socket.stem}*"))
    assert not Path(f"/proc/{pid}").exists()
    assert not list(socket.parent.glob(f"{socket.stem}*"))


def test_an_embedded_daemon_ends_with_a_killed_client() -> None:
    script = """
        import os, signal, storm_client
        client = storm_client.connect(embedded="always", pool_bytes=16 << 20, timeout=30)
        print(client.status().details["pid"], client.address, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False
    )
    pid, address = done.stdout.decode().split()
    socket = Path(address.removeprefix("ipc://"))
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)
    assert not list(socket.parent.glob(f"{socket.stem}*"))


def test_a_scripts_limit_of_streams_is_not_its_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it the daemon would not start where there is a GPU."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with storm.connect(embedded="always", pool_bytes=16 << 20, timeout=30) as client:
        pid = client.status().details["pid"]
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    assert b"CUDA_DEVICE_MAX_CONNECTIONS=1" not in environment


@pytest.mark.filterwarnings("ignore:variable STORMD_POOL_BYTE is no setting")
def test_a_variable_that_a_daemon_would_refuse_does_not_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STORMD_POOL_BYTE", "16MiB")
    monkeypatch.setenv("STORMD_MAX_SESSIONS", "3")
    with storm.connect(embedded="always", pool_bytes=16 << 20, timeout=30) as client:
        pid = client.status().details["pid"]
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"STORMD_MAX_SESSIONS=3" in environment
    assert b"STORMD_POOL_BYTE=16MiB" not in environment


def test_a_pool_that_this_machine_cannot_give() -> None:
    with pytest.raises(storm.DaemonUnavailable, match=r"pool_bytes|pool|memory"):
        storm.connect(embedded="always", pool_bytes=1 << 50)


def test_a_forked_child_that_ends_harms_nobody() -> None:
    script = """
        import os, sys, storm_client
        with storm_client.connect(embedded="always", pool_bytes=16 << 20, timeout=30) as client:
            child = os.fork()
            if child == 0:
                client.close()
                sys.exit()
            assert os.waitpid(child, 0)[1] == 0
            print(len(client.status().sessions))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=True
    )
    assert done.stdout == b"1\n"


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_directory_into_which_no_socket_fits_is_passed_over(
    tmp_path: Path, variable: str
) -> None:
    """Also where a daemon is only looked for."""
    script = """
        import storm_client
        try:
            storm_client.connect(embedded="never")
        except storm_client.DaemonUnavailable as error:
            print("looked")
        with storm_client.connect(embedded="always", pool_bytes=16 << 20, timeout=30) as client:
            print(client.address)
    """
    long = tmp_path / ("x" * 90)
    long.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "STORMD_ADDRESS": "", variable: str(long)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    looked, address = done.stdout.split()
    assert looked == "looked"
    assert address.startswith("ipc:///tmp/")
    assert not list(long.iterdir())
