from __future__ import annotations

import os
import re
import signal
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
from support.scripts import Scripts
from support.waiting import wait_until

from stormd.query import StatusQuery

pytestmark = pytest.mark.usefixtures("no_daemon_by_convention")

NOTHING_IS_SET = """
import os
for name in [name for name in os.environ if name.startswith("STORMD_")]:
    del os.environ[name]
"""

Run = Callable[..., list[str]]


@pytest.fixture
def run(scripts: Scripts, tmp_path: Path) -> Iterator[Run]:
    """Run a script as a user would who has set nothing up; return the lines that it prints."""
    path = tmp_path / "script.py"
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:

        def lines(script: str, **environ: str) -> list[str]:
            path.write_text(NOTHING_IS_SET + textwrap.dedent(script))
            return scripts.lines(path, **{"XDG_RUNTIME_DIR": runtime, **environ})

        yield lines


@pytest.mark.filterwarnings("ignore:variable STORMD_POOL_BYTE is no setting")
@pytest.mark.parametrize("embedded", ["auto", "always"])
def test_an_embedded_daemon_ends_with_its_client(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has no variables that it would refuse, or would not start with where there is a GPU."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("STORMD_POOL_BYTE", "16MiB")
    monkeypatch.setenv("STORMD_MAX_SESSIONS", "3")
    with storm.connect(embedded=embedded, pool_bytes=16 << 20, timeout=30) as client:
        status = client.status()
        assert status.pool.capacity_bytes == 16 << 20
        assert [session.pid for session in status.sessions] == [os.getpid()]
        pid = status.details["pid"]
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert {b"CUDA_VISIBLE_DEVICES=", b"STORMD_MAX_SESSIONS=3"} <= set(environment)
        refused = {b"CUDA_DEVICE_MAX_CONNECTIONS=1", b"STORMD_POOL_BYTE=16MiB"}
        assert not refused & set(environment)
        socket = Path(client.address.removeprefix("ipc://"))
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert list(socket.parent.glob(f"{socket.stem}*"))
    assert not Path(f"/proc/{pid}").exists()
    assert not list(socket.parent.glob(f"{socket.stem}*"))


@pytest.mark.parametrize(
    ("name", "speaks_of_size"), [("STORMD_MAX_SESSIONS", False), ("STORMD_POOL_BYTES", True)]
)
def test_only_a_daemon_that_fails_for_its_size_is_said_how_to_size_it(
    name: str, speaks_of_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "banana")
    with pytest.raises(storm.DaemonUnavailable, match=f"{name}.*'banana'") as raised:
        storm.connect(embedded="always", timeout=30)
    assert ("connect(pool_bytes=)" in str(raised.value)) is speaks_of_size


def test_an_embedded_daemon_ends_with_a_killed_client_and_with_no_forked_child(run: Run) -> None:
    [line] = run("""
        import os, signal, storm_client
        script = os.fork()
        if script == 0:
            client = storm_client.connect(embedded="always", pool_bytes=16 << 20, timeout=30)
            child = os.fork()
            if child == 0:
                client.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            status = client.status()
            print(status.details["pid"], len(status.sessions), client.address, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(script, 0)
    """)
    pid, sessions, address = line.split()
    assert sessions == "1"
    socket = Path(address.removeprefix("ipc://"))
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)
    assert not list(socket.parent.glob(f"{socket.stem}*"))


def test_a_client_that_nobody_closes_gives_no_warning(run: Run) -> None:
    """Neither when it is let go of nor when the script ends: an ignored exception would be shown.

    Daemons end by themselves.
    """
    script = """
    import sys, warnings
    warnings.simplefilter("error")
    sys.unraisablehook = lambda shown: print(shown.exc_value, flush=True)
    import storm_client as storm
    client = storm.connect(embedded="always")
    client = storm.connect(embedded="always")
    print("connected", flush=True)
    """
    assert run(script, STORMD_POOL_BYTES="16MiB") == ["connected"]


def test_a_pool_that_cannot_be_had_names_what_its_user_can_set() -> None:
    named = r"connect\(pool_bytes=\) and STORMD_POOL_BYTES"
    with pytest.raises(storm.DaemonUnavailable, match=named):
        storm.connect(pool_bytes="100TiB")


def test_directories_into_which_no_socket_fits_are_passed_over(run: Run, tmp_path: Path) -> None:
    """Also where a daemon is only looked for."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    script = """
        import storm_client
        try:
            storm_client.connect(embedded="never")
        except storm_client.DaemonUnavailable as error:
            print("looked")
        with storm_client.connect(embedded="always", pool_bytes=16 << 20, timeout=30) as client:
            print(client.address)
    """
    looked, address = run(script, TMPDIR=str(long), XDG_RUNTIME_DIR=str(long))
    assert looked == "looked"
    assert address.startswith("ipc:///tmp/")
    assert not list(long.iterdir())


# --- what it takes --------------------------------------------------------------------------


def test_a_script_of_two_lines_takes_little_and_is_told_of_it_once(run: Run) -> None:
    *said, last = run("""
        import os, torch, storm_client as storm
        os.dup2(1, 2)
        offload = storm.offload(torch.nn.Linear(4, 4))
        storm.offload(torch.nn.Linear(4, 4))
        with storm.connect() as client:
            status = client.status()
            pages = open(f"/proc/{status.details['pid']}/statm").read().split()[1]
            committed = status.details["pool"]["committed_bytes"]
            print(int(pages) * 4096, committed, len(status.sessions))
    """)
    resident, committed, sessions = map(int, last.split())
    assert committed == 64 << 20
    assert resident < 400 << 20
    assert sessions == 2, "the second client has another daemon"
    [line] = [line for line in said if "private daemon" in line]
    assert re.search(r"takes \d+\.\d MiB of host memory now, and up to \d\.\d GiB more", line)
    assert "connect(pool_bytes=) or STORMD_POOL_BYTES" in line


@pytest.mark.slow
def test_the_pool_holds_whatever_is_stored_however_small_it_began(run: Run) -> None:
    """More than it begins with, in one step that nothing holds back, bit for bit."""
    [line] = run("""
        import torch, storm_client as storm
        from storm_client.transport import store
        store.PATIENCE_SECONDS = 60.0  # for a daemon that a busy machine gives no time to
        offload = storm.offload(replay=False, codec="raw")
        x = [torch.randn(4 << 20, requires_grad=True) for _ in range(12)]
        def total():
            return sum((one.sin() * one.cos()).sum() for one in x)
        total().backward()
        wanted = [one.grad for one in x]
        for one in x:
            one.grad = None
        with offload:
            loss = total()
        loss.backward()
        assert all(torch.equal(one.grad, grad) for one, grad in zip(x, wanted))
        print(offload.stats().offloaded_bytes >> 20, offload.stats().kept_bytes)
    """)
    offloaded, kept = map(int, line.split())
    assert offloaded >= 12 * 32
    assert kept == 0, "a tensor was kept while the pool grew"


def test_clients_share_one_unless_they_ask_for_another(run: Run) -> None:
    printed = run("""
        import storm_client as storm
        one, two = storm.connect(pool_bytes="16MiB"), storm.connect()
        other, own = storm.connect(pool_bytes=17 << 20), storm.connect(embedded="always")
        print(one.address == two.address, len({c.address for c in (one, other, own)}))
        one.close()
        print(len(two.status().sessions))
        two.close()
        three = storm.connect()
        print(three.address in (one.address, two.address), three.address == other.address)
    """)
    assert " ".join(printed) == "True 3 1 False True"


def test_a_little_memory_is_enough_for_a_pool_of_its_default_size(run: Run) -> None:
    """As in a small container: less than the default size may be had in all."""
    [capacity] = run("""
        import resource, storm_client as storm
        from storm_client import embedded
        start = embedded._Process
        def limited(*args, **options):
            limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
            return start(*args, preexec_fn=limit, **options)
        embedded._Process = limited
        with storm.connect() as client:
            print(client.status().pool.capacity_bytes)
    """)
    assert 1 << 30 < int(capacity) < 3 << 30


def test_a_private_daemon_that_is_killed_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMD_RESUMABLE", "1")
    with storm.connect(embedded="always", pool_bytes="64MiB") as client:
        tensor = torch.linspace(0, 1, 1 << 16, requires_grad=True)
        offload = client.offload(min_bytes=1)
        with offload:
            loss = tensor.exp().sin().sum()
        assert offload.stats().stored_bytes > 0
        with StatusQuery(client.address, timeout=30) as query:
            os.kill(query.ask()["pid"], signal.SIGKILL)
        loss.backward()
        assert tensor.grad is not None
        point = tensor.detach()
        assert torch.equal(tensor.grad, point.exp().cos() * point.exp())
