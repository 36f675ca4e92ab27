"""The daemon as a process under a service manager: what it says, serves and takes anew."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.raw_client import RawClient
from support.waiting import wait_until

from stormd.config import Config
from stormd.memory.host_pool import CHUNK_BYTES
from stormd.protocol import Goodbye, Refused, StatusRequest
from stormd.running import StartReport, run_daemon
from stormd.server import Server

SECONDS = 60.0
"""A daemon starts or ends in less than one."""

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)

SETTINGS = """
address = "ipc://{folder}/run/s.sock"
device = "cpu"
pool_bytes = "{pool}"
max_sessions = {sessions}
metrics_address = "127.0.0.1:0"
log_format = "json"
shutdown_seconds = 2
"""


class Managed:
    """A daemon process with a service manager's socket, and its settings file."""

    def __init__(
        self, process: subprocess.Popen[str], manager: socket.socket | None = None
    ) -> None:
        self.process = process
        self._manager = manager

    def logged(self, event: str) -> dict[str, Any]:
        """Return the next log line of an event; the test's own deadline bounds the wait."""
        for line in self.process.stderr:
            fields: dict[str, Any] = json.loads(line)
            if fields["event"] == event:
                return fields
        raise AssertionError(f"the daemon ended without {event!r}")

    def told(self, wanted: str) -> list[str]:
        """Return what the manager is told up to and with a datagram that begins with `wanted`."""
        lines: list[str] = []
        while not lines or lines[-1] != wanted:
            lines.append(self._manager.recv(4096).decode().split("\n")[0])
        return lines

    def all_told(self) -> list[str]:
        """Return what the manager was told by a daemon that has ended."""
        lines: list[str] = []
        self._manager.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                lines += self._manager.recv(4096).decode().split("\n")
        return lines


@contextmanager
def managed(folder: Path, *flags: str, **environ: str) -> Iterator[Managed]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "notify"))
        manager.settimeout(SECONDS)
        command = [sys.executable, "-m", "stormd.cli", "serve", *flags]
        environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), **environ}
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                yield Managed(process, manager)
            finally:
                process.kill()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a writer of the settings file."""
    monkeypatch.delenv("STORMD_POOL_BYTES")  # which would win over the file's

    def make(pool: str = "8MiB", sessions: int = 1) -> Path:
        path = tmp_path / "stormd.toml"
        path.write_text(SETTINGS.format(folder=tmp_path, pool=pool, sessions=sessions))
        return path

    return make


def get(port: int, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_what_a_manager_is_told_settings_metrics_and_the_log_of_a_real_daemon(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    """A bad file leaves it as it was, another one has its limits taken."""
    address = f"ipc://{tmp_path}/run/s.sock"
    path = write(sessions=1)
    # The watchdog's interval is long enough for one sign of life alone.
    with managed(tmp_path, "--config", str(path), WATCHDOG_USEC="600000000") as daemon:
        port = daemon.logged("metrics served")["port"]
        start = daemon.told("READY=1")
        assert len(start) > 1
        assert all(line.startswith("STATUS=pinning the pool") for line in start[:-1])
        daemon.told("WATCHDOG=1")
        assert get(port, "/healthz") == (200, "ok\n")
        second = [sys.executable, "-m", "stormd.cli", "serve", *plain(tmp_path)]
        done = subprocess.run(second, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 1, "one daemon an address"
        assert "s.sock" in done.stderr
        assert "Traceback" not in done.stderr
        path.write_text("max_sesions = 3")
        daemon.process.send_signal(signal.SIGHUP)
        assert "max_sessions" in daemon.logged("settings not reloaded")["reason"]
        daemon.told("READY=1")
        with RawClient(address) as first, RawClient(address) as second:
            first.open()
            assert isinstance(second.hello(), Refused)
            write(pool="9MiB", sessions=2)
            daemon.process.send_signal(signal.SIGHUP)
            assert daemon.logged("settings reloaded")["need_restart"] == ["pool_bytes"]
            assert daemon.told("READY=1") == ["RELOADING=1", "READY=1"]
            second.open()
            first.stored(b"x" * 5000)
            check_metrics(port, sessions=2)
            numbers = [first.welcome.session, second.welcome.session]
            told = {
                one["id"]: one["session"] for one in first.ask(StatusRequest()).state["sessions"]
            }
            second.send(Goodbye())
            assert second.is_cut_off()
            closed = daemon.logged("session ended")
        died = daemon.logged("session ended")
        assert [closed["cause"], died["cause"]] == ["goodbye", "died"]
        assert [died["session"], closed["session"]] == [told[number] for number in numbers]
        assert [int(told[number], 16) for number in numbers] == numbers
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.told("STOPPING=1") == ["STOPPING=1"]
        assert daemon.process.wait(SECONDS) == 0


def check_metrics(port: int, sessions: int) -> None:
    status, text = get(port, "/metrics")
    assert status == 200
    assert 'stormd_raw_bytes_total{codec="raw",direction="store"} 5000.0' in text
    assert f'stormd_sessions{{device="cpu"}} {sessions}.0' in text
    assert f'stormd_user_used_bytes{{uid="{os.getuid()}"}}' in text
    assert "stormd_stuck_workers 0.0" in text


def plain(folder: Path) -> tuple[str, ...]:
    """Flags of a small daemon without a settings file."""
    return (
        f"--address=ipc://{folder}/run/s.sock",
        "--pool-bytes=8MiB",
        "--device=cpu",
        "--log-format=json",
    )


def test_the_end_of_its_terminal_ends_it_in_order(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "stormd.cli", "serve", *plain(tmp_path)]
    with subprocess.Popen(
        command,
        stdin=theirs,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one call
    ) as process:
        os.close(theirs)
        daemon = Managed(process)
        daemon.logged("ready")
        process.send_signal(signal.SIGHUP)
        daemon.logged("SIGHUP changes nothing: there is no --config FILE to be read again")
        os.close(ours)
        daemon.logged("ended")
        assert process.wait(SECONDS) == 0
    assert not (tmp_path / "run" / "s.sock").exists()


def test_a_daemon_that_another_program_has_taken_the_place_of_ends_with_an_error(
    tmp_path: Path,
) -> None:
    with managed(tmp_path, *plain(tmp_path)) as daemon, socket.socket(socket.AF_UNIX) as theirs:
        daemon.told("READY=1")
        theirs.bind(str(tmp_path / "run" / "theirs"))
        theirs.listen()
        (tmp_path / "run" / "theirs").rename(tmp_path / "run" / "s.sock")
        _, errors = daemon.process.communicate(timeout=SECONDS)
        assert daemon.process.returncode == 1
        assert f"has the socket {tmp_path}/run/s.sock" in errors
        assert "Traceback" not in errors
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["s.sock"]


def test_a_log_that_nobody_reads_holds_nothing_up(tmp_path: Path) -> None:
    """Neither what clients ask for nor the end: standard error is a pipe with room for a page."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "stormd.cli", "serve", *plain(tmp_path)]
    with subprocess.Popen(command, stderr=writing) as process:
        os.close(writing)
        wait_until((tmp_path / "run" / "s.sock.lifeline").exists, SECONDS)
        for _ in range(40):  # some 200 bytes each, opened and ended
            with RawClient(f"ipc://{tmp_path}/run/s.sock") as client:
                client.open().stored(b"x" * 100)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    os.close(reading)
    assert list((tmp_path / "run").iterdir()) == []


def test_what_jobs_ignore_stays_ignored_and_what_is_for_a_daemon_alone_is_heard(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    """As under nohup, and in the background of a shell."""
    line = shlex.join([sys.executable, "-m", "stormd.cli", "serve", "--config", str(write())])
    script = f"trap '' HUP INT TERM USR2; exec {line}"
    with subprocess.Popen(["sh", "-c", script], stderr=subprocess.PIPE, text=True) as process:
        daemon = Managed(process)
        daemon.logged("ready")
        for number in (signal.SIGHUP, signal.SIGINT):
            assert ignores(process.pid, number)
            process.send_signal(number)
        process.send_signal(signal.SIGUSR2)
        daemon.logged("SIGUSR2 changes nothing: nothing outlives a daemon without --resumable")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return what the kernel says of a process and a signal."""
    fields = dict(
        line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return bool(int(fields["SigIgn"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_keep_coming_change_nothing_of_its_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Also those that come when the loop has ended and Python is about to."""
    with managed(tmp_path, *plain(tmp_path)) as daemon:
        daemon.told("READY=1")
        while daemon.process.poll() is None:
            daemon.process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                daemon.process.wait(0.002)
        assert daemon.process.returncode == 0
    assert not (tmp_path / "run" / "s.sock").exists()


@pytest.mark.parametrize(
    ("number", "told", "is_followed"),
    [(signal.SIGTERM, Server.stop, False), (signal.SIGUSR2, Server.suspend, True)],
)
def test_a_signal_gives_up_the_start(
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: signal.Signals,
    told: Callable[[Server], object],
    is_followed: bool,
) -> None:
    """As the first chunk of the pool is there; the process of this test is the daemon."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    chunks: list[int] = []

    def come(_report: StartReport, done: int, _total: int) -> None:
        if not chunks:
            os.kill(os.getpid(), number)
            stopped.wait(SECONDS)
        chunks.append(done)

    def tell(server: Server) -> object:
        server._loop.call_soon(server._loop.call_soon, stopped.set)  # after what it has queued
        return told(server)

    stopped = threading.Event()
    monkeypatch.setattr(Server, told.__name__, tell)
    monkeypatch.setattr(StartReport, "__call__", come)
    monkeypatch.setattr("stormd.memory.host_pool.MAX_TOUCHERS", 1)
    try:
        config = make_config(pool_bytes=256 << 20, resumable=is_followed)
        assert run_daemon(config) == is_followed
        assert {signal.getsignal(number) for number in HANDLED} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert chunks == [CHUNK_BYTES]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [16, 63, 64])
def test_a_limit_of_open_files_under_which_nobody_is_served_is_refused(
    tmp_path: Path, limit: int
) -> None:
    """Whatever it is, the start fails by its name, or clients are served."""
    line = shlex.join([sys.executable, "-m", "stormd.cli", "serve", *plain(tmp_path)])
    command = ["bash", "-c", f"ulimit -n {limit}; exec {line}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = iter(process.stderr)
        while not (line := next(lines)).startswith("stormd: "):
            if json.loads(line)["event"] == "ready":
                with RawClient(f"ipc://{tmp_path}/run/s.sock") as client:
                    client.open().stored(b"served")
                process.terminate()
                assert process.wait(SECONDS) == 0
                assert limit >= 64
                return
        assert f"the limit of open files is {limit}, and " in line
        assert process.wait(SECONDS) == 2
    assert not list(tmp_path.glob("run/*"))


def test_a_taken_metrics_port_ends_the_start(tmp_path: Path) -> None:
    """And nobody is told that the daemon were ready."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flag = f"--metrics-address=127.0.0.1:{port}"
        with managed(tmp_path, *plain(tmp_path), flag) as daemon:
            _, errors = daemon.process.communicate(timeout=SECONDS)
            assert not [line for line in daemon.all_told() if "READY=1" in line]
    assert daemon.process.returncode == 1
    assert f"metrics_address 127.0.0.1:{port} cannot be listened on" in errors
    assert "stop what uses it" in errors
    events = [json.loads(line)["event"] for line in errors.splitlines() if line[0] == "{"]
    assert "pinning the pool" in events
    assert "ready" not in events
    assert "Traceback" not in errors
    assert not (tmp_path / "run" / "s.sock").exists()
