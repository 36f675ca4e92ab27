from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
from support.daemon_process import DaemonProcess
from support.waiting import wait_until

CONNECT = sys.modules["storm_client.connect"]
"""The module; as an attribute of the package, the name is the function's."""


@pytest.fixture(autouse=True)
def no_daemon_by_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the tests from any daemon that this machine may run."""
    monkeypatch.delenv("STORMD_ADDRESS", raising=False)
    monkeypatch.setattr(CONNECT, "_defaults", lambda: [f"ipc://{tmp_path}/none"])


# --- what connect is told -------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "ipc://relative", "nonsense", "", "ipc:///" + "x" * 200]
)
def test_a_malformed_address(address: str) -> None:
    with pytest.raises(storm.UsageError, match=r"ipc:///PATH|at most"):
        storm.connect(address, embedded="never")


def test_nobody_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(
        storm.DaemonUnavailable, match=r"stormd\.sock.*does not exist.*stormd serve"
    ):
        storm.connect(f"ipc://{tmp_path}/stormd.sock", embedded="never")


def test_a_named_address_is_never_replaced_by_another_daemon(tmp_path: Path) -> None:
    with pytest.raises(storm.DaemonUnavailable):
        storm.connect(f"ipc://{tmp_path}/stormd.sock", embedded="auto")


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
    monkeypatch.setattr("storm_client.connection.PROTOCOL_VERSION", 99)
    with pytest.raises(storm.ProtocolMismatch, match="99"):
        storm.connect(daemon.address)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedded": "maybe"}, "maybe.*auto, never, always"),
        ({"pool_bytes": 0}, "pool_bytes is 0.*1048576"),
        ({"pool_bytes": "4GiB"}, "pool_bytes is '4GiB'.*number of bytes"),
        ({"pool_bytes": True}, "pool_bytes is True"),
        ({"timeout": 0}, "timeout is 0.*above 0"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
    ],
)
def test_bad_values(options: dict[str, object], message: str) -> None:
    with pytest.raises(storm.UsageError, match=message):
        storm.connect(**options)


def test_a_pool_that_this_machine_cannot_give() -> None:
    with pytest.raises(storm.DaemonUnavailable, match=r"pool_bytes|pool|memory"):
        storm.connect(embedded="always", pool_bytes=1 << 50)


def test_no_daemon_and_none_allowed() -> None:
    with pytest.raises(storm.DaemonUnavailable, match="stormd serve"):
        storm.connect(embedded="never")


# --- where it looks -------------------------------------------------------------------------


def test_the_environment_names_the_daemon(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMD_ADDRESS", daemon.address)
    with storm.connect() as client:
        assert client.address == daemon.address


def test_a_running_daemon_is_found(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONNECT, "_defaults", lambda: ["ipc:///n", daemon.address])
    with storm.connect(embedded="never") as client:
        assert client.address == daemon.address


@pytest.mark.parametrize("embedded", ["auto", "always"])
def test_an_embedded_daemon_ends_with_its_client(embedded: Any) -> None:
    with storm.connect(embedded=embedded, pool_bytes=16 << 20) as client:
        status = client.status()
        assert status.pool.capacity_bytes == 16 << 20
        assert [session.pid for session in status.sessions] == [os.getpid()]
        pid = status.details["pid"]
        directory = Path(client.address.removeprefix("ipc://")).parent
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not Path(f"/proc/{pid}").exists()
    assert not directory.exists()


def test_an_embedded_daemon_ends_with_a_killed_client() -> None:
    script = """
        import os, signal, storm_client
        client = storm_client.connect(embedded="always", pool_bytes=16 << 20)
        print(client.status().details["pid"], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False
    )
    pid = int(done.stdout)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)


# --- the client -----------------------------------------------------------------------------


def test_status(client: storm.Client, daemon: DaemonProcess) -> None:
    status = client.status()
    assert status.version == storm_version()
    assert status.uptime_seconds > 0
    assert status.pool.capacity_bytes == 256 << 20
    (mine,) = [session for session in status.sessions if session.pid == os.getpid()]
    assert (mine.uid, mine.device, mine.entries, mine.used_bytes) == (os.getuid(), "cpu", 0, 0)


def storm_version() -> str:
    import stormd

    return stormd.__version__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "zip"}, "codec is 'zip'.*ancf, raw"),
        ({"min_bytes": -1}, "min_bytes is -1"),
        ({"min_bytes": 1.5}, "min_bytes is 1.5"),
        ({"model": [1]}, "got int"),
    ],
)
def test_bad_offload_options(
    client: storm.Client, options: dict[str, object], message: str
) -> None:
    with pytest.raises(storm.UsageError, match=message):
        client.offload(**options)


def test_a_closed_client_says_so(daemon: DaemonProcess) -> None:
    client = storm.connect(daemon.address)
    offload = client.offload(min_bytes=1)
    x = torch.ones(64, 64, requires_grad=True)
    with offload:
        loss = x.exp().sum()
    offload.stats()
    client.close()
    client.close()
    for use in (client.status, client.offload, offload.__enter__):
        with pytest.raises(storm.UsageError, match="closed"):
            use()
    with pytest.raises(storm.DaemonLost, match="closed"):
        loss.backward()


def test_the_process_shares_one_client(daemon: DaemonProcess) -> None:
    script = """
        import os, threading, torch, storm_client as storm
        one, two = storm.offload(min_bytes=1), storm.offload(torch.nn.Linear(2, 2), codec="raw")
        x = torch.ones(64, 64, requires_grad=True)
        with one:
            y = x.exp()
        with two:
            loss = (y * y).sum()
        loss.backward()
        print(one.stats().offloaded_bytes, sum(t.name == "storm-io" for t in threading.enumerate()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "STORMD_ADDRESS": daemon.address},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(64 * 64 * 4), "1"]


def test_a_forked_child_is_told_to_connect_itself(
    daemon: DaemonProcess, client: storm.Client
) -> None:
    offload = client.offload(min_bytes=1)
    x = torch.ones(64, 64, requires_grad=True)
    with offload:
        loss = x.exp().sum()
    offload.stats()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(errors_in_child(client, offload)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        kinds = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert kinds == ["UsageError", "UsageError"]
    loss.backward()  # the child's end harmed nobody
    assert torch.equal(x.grad, x.detach().exp())


def errors_in_child(client: storm.Client, offload: storm.Offload) -> list[str]:
    kinds = []
    for use in (client.status, offload.__enter__):
        try:
            use()
        except storm.StormError as error:
            kinds.append(type(error).__name__)
    client.close()
    return kinds


def test_a_forked_child_does_not_hide_its_parents_death(
    daemon: DaemonProcess, client: storm.Client
) -> None:
    script = """
        import os, signal, sys, time, storm_client
        client = storm_client.connect(sys.argv[1])
        if os.fork() == 0:
            time.sleep(60)
        print(flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), daemon.address],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"\n"
        pid = parent.pid
        wait_until(
            lambda: all(session.pid != pid for session in client.status().sessions),
            5,
            client.status,
        )
        parent.wait()
    finally:
        os.killpg(parent.pid, 9)
        parent.stdout.close()


def test_importing_loads_no_gpu_library() -> None:
    script = """
        import sys, storm_client, torch
        print([name for name in ("cupy", "cuda") if name in sys.modules])
        print(torch.cuda.is_initialized())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "False"]
